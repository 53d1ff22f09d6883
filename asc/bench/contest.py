"""Networks side by side: every contestant does the same work on the same images. Shape letters: see ``asc.tokens``."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

import asc
from asc.bench.cells import Setup, reason_of
from asc.bench.measure import (
    AttentionChoice,
    Memory,
    attention_kernel,
    choose_attention,
    half_precision,
    out_of_memory,
)
from asc.bench.peers import SIZE_CHANNELS, TimmEncoder, TokenMergingEncoder
from asc.pretrain.replay import Replay
from asc.pretrain.siamese import Agreement, Siamese, SiameseConfig
from asc.replay import ReplayedEncoder
from asc.replay.replayer import is_worth_replaying
from asc.vit import AscViT

Work = Literal["train", "pretrain", "inference"]
Encoder = AscViT | TimmEncoder

ASC, PLAIN, TIMM, BIPARTITE, TOME = "superpixels", "plain ViT", "timm", "pairs (ours)", "Token Merging"
COMPILED, REPLAYED = ", compiled", ", compiled and replayed"
OURS = (ASC, ASC + COMPILED, ASC + REPLAYED)
PEERS = (PLAIN, PLAIN + COMPILED, PLAIN + REPLAYED, TIMM, TIMM + COMPILED, TIMM + REPLAYED)
MERGERS = (BIPARTITE, TOME, TOME + COMPILED, TOME + REPLAYED)
EAGER = (ASC, PLAIN, TIMM, BIPARTITE, TOME)
CONTESTANTS = (
    *EAGER,
    *(name + COMPILED for name in (ASC, PLAIN, TIMM, TOME)),
    *(name + REPLAYED for name in (ASC, PLAIN, TIMM, TOME)),
)

# The allocator needs a few calls until it has seen all sizes, since the number of tokens changes from step to step.
_WARM_CALLS = 4
# Until the number of tokens is steady enough for steps to be replayed, at most.
_MOST_TO_SETTLE = 60
# Peers are replayed up to so many patches of a batch: each graph keeps its memory to itself, and with more patches the
# GPU is busy all the time anyway (64 images of 3,136 took as long either way, docs/results/performance.md).
_REPLAYED_PATCHES = 1 << 17
# A batch has no more patches than this: one call should not take longer than a second or two.
_MOST_PATCHES = 1 << 19
# Memory is measured with so few images, and worked out for more.
_FEW = (2, 4)
# Attention kernels are compared on so many tokens: on few it is the host that decides, and any could win.
_ATTENDED_TOKENS = 1 << 18
# Frames repeat after these, see ``scene_frames``.
_CALIBRATION = 32


@dataclass(frozen=True)
class Shape:
    """A network and its images."""

    size: str
    """tiny, small or base; ``nano`` is for trying."""
    patch: int
    """Side of a patch."""
    pixels: int
    """Side of an image."""
    most: int = 512
    """Images of a batch, at most."""

    @property
    def name(self) -> str:
        """As part of a cell's name."""
        return f"{self.size}-patch{self.patch}-{self.pixels}px"

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return (self.pixels // self.patch) ** 2

    @property
    def batch(self) -> int:
        """Images that are at hand."""
        return min(self.most, _MOST_PATCHES // self.patches)

    def network(self, superpixels: asc.SuperpixelConfig | None) -> AscViT:
        """Our network of this shape."""
        size, settings = (self.size, {}) if self.size != "nano" else ("tiny", {"width": 48})
        return asc.create_model(f"asc_vit_{size}_patch{self.patch}", superpixels, image_size=self.pixels, **settings)


def kind_of(name: str) -> str:
    """The network of a contestant, however it is run."""
    return name.removesuffix(COMPILED).removesuffix(REPLAYED)


def make_encoder(name: str, shape: Shape) -> Encoder:
    """The network of a contestant."""
    kind = kind_of(name)
    if kind == ASC:
        return shape.network(asc.SuperpixelConfig())
    if kind == BIPARTITE:
        return shape.network(asc.SuperpixelConfig(grouping="bipartite"))
    plain = shape.network(None)
    if kind == PLAIN:
        return plain
    if kind == TIMM:
        return TimmEncoder(plain.config)
    by_size = asc.SuperpixelConfig().proportional_attention
    return TokenMergingEncoder(plain.config, [shape.patches] * plain.config.depth, by_size)


# --- The work ---------------------------------------------------------------------------------------------


class Job(ABC):
    """What is done with a batch."""

    def __init__(self, encoder: Encoder, device: torch.device) -> None:
        self.encoder = encoder.to(device)
        self.device = device

    @abstractmethod
    def __call__(self, images_B3HW: Tensor) -> None:
        """Once."""

    def encoders(self) -> list[Encoder]:
        """All networks that take part."""
        return [self.encoder]

    @abstractmethod
    def replay(self, first: int) -> None:
        """From now on replay every call, after the first ones."""

    @property
    @abstractmethod
    def is_settled(self) -> bool:
        """Whether all of the last calls were replayed."""

    def _optimiser(self, module: nn.Module) -> torch.optim.Optimizer:
        learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(learned, lr=1e-4, fused=self.device.type == "cuda")


class FeaturesJob(Job):
    """One that wants features and does with them what is no part of what is replayed."""

    def __init__(self, encoder: Encoder, device: torch.device) -> None:
        super().__init__(encoder, device)
        self.features: Callable[[Tensor], Tensor] = self.encoder

    def replay(self, first: int) -> None:
        """From now on replay every call, after the first ones."""
        self.features = ReplayedEncoder(self.encoder, first)

    @property
    def is_settled(self) -> bool:
        """Whether all of the last calls were replayed."""
        return isinstance(self.features, ReplayedEncoder) and self.features.is_settled


class Inference(FeaturesJob):
    """Features of images."""

    def __init__(self, encoder: Encoder, device: torch.device) -> None:
        super().__init__(encoder, device)
        self.encoder.eval()

    @torch.no_grad()
    def __call__(self, images_B3HW: Tensor) -> None:
        """Once."""
        with half_precision(self.device):
            self.features(images_B3HW)


class TrainStep(FeaturesJob):
    """Forward, backward, optimiser, thresholds."""

    def __init__(self, encoder: Encoder, device: torch.device) -> None:
        super().__init__(encoder, device)
        self.encoder.train()
        self.optimiser = self._optimiser(self.encoder)
        self.weights_C = torch.randn(encoder.num_features, device=device)

    def __call__(self, images_B3HW: Tensor) -> None:
        """Once."""
        with half_precision(self.device):
            loss = (self.features(images_B3HW).float() * self.weights_C).mean()
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.encoder.update_thresholds()


class PretrainStep(Job):
    """A whole step of pre-training: both encoders, heads, loss, optimiser, thresholds, moving average."""

    def __init__(self, encoder: Encoder, device: torch.device) -> None:
        super().__init__(encoder, device)
        # The usual heads would be larger than a network that is only for trying.
        config = SiameseConfig() if encoder.num_features >= 192 else SiameseConfig(hidden=64)
        self.siamese = Siamese(cast(AscViT, encoder), config).to(device).train()
        self.optimiser = self._optimiser(self.siamese)
        self.agree: Callable[[Tensor], Agreement] = self.siamese

    def replay(self, first: int) -> None:
        """From now on replay every step, after the first ones."""
        self.agree = Replay(self.siamese, first)

    @property
    def is_settled(self) -> bool:
        """Whether all of the last steps were replayed."""
        return isinstance(self.agree, Replay) and self.agree.is_settled

    def encoders(self) -> list[Encoder]:
        """Encoder and target."""
        assert self.siamese.target_encoder is not None
        return [self.encoder, self.siamese.target_encoder]

    def __call__(self, images_B3HW: Tensor) -> None:
        """Once; the halves of the batch are the two frames of the clips."""
        with half_precision(self.device):
            loss = self.agree(images_B3HW.unflatten(0, (2, -1))).loss
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.encoder.update_thresholds()
        self.siamese.follow(0.5)


JOBS: dict[Work, type[Job]] = {"train": TrainStep, "pretrain": PretrainStep, "inference": Inference}


# --- The contestants --------------------------------------------------------------------------------------


class Contestant:
    """One network at its work, and the memory it needs."""

    def __init__(self, name: str, shape: Shape, work: Work, device: torch.device, kernel: str | None) -> None:
        self.memory = Memory(device)
        self.kernel = kernel
        self.job: Job = self.memory.keep(lambda: JOBS[work](make_encoder(name, shape), device))
        self.fresh = True
        self.settles = False
        if name.endswith((COMPILED, REPLAYED)):
            for encoder in self.job.encoders():
                _compile(encoder)
        if name.endswith(REPLAYED):
            # Recorded in the call whose memory is measured: a graph's memory is not seen later.
            self.job.replay(first=1 + _WARM_CALLS)
            self.settles = True

    def __call__(self, images_B3HW: Tensor) -> None:
        """Do the work once."""
        with contextlib.nullcontext() if self.kernel is None else attention_kernel(self.kernel):
            self.job(images_B3HW)

    def peak_gb(self, images_B3HW: Tensor, calls: int = 2) -> float | None:
        """Most memory of a call, after a few to warm up."""
        if self.fresh:  # gradients and the optimiser's state come with the first step, and stay
            self.memory.keep(lambda: self(images_B3HW))
            self.fresh = False
        for _ in range(calls):
            self(images_B3HW)
        peak = self.memory.peak_gb(lambda: self(images_B3HW))
        if self.settles:
            for _ in range(_MOST_TO_SETTLE):
                if self.job.is_settled:
                    break
                self(images_B3HW)
        return peak


def _compile(encoder: Encoder) -> None:
    # Ours compile themselves for any number of tokens, whatever they are told.
    encoder.compile(dynamic=False)


class Contest:
    """All contestants of a cell, at one batch that suits every one of them.

    Those that cannot run are left out, with the reason in ``failed``.
    """

    def __init__(self, shape: Shape, work: Work, setup: Setup) -> None:
        self.shape, self.work, self.setup = shape, work, setup
        self.images_B3HW = setup.source.frames(shape.batch, shape.pixels, setup.device)
        config = shape.network(None).config
        self._heads, self._width_of_head = config.heads, config.width // config.heads
        self.attention = self._fastest_attention(shape.patches, self._width_of_head)
        self.attention_of_mergers = self.attention
        self.running: dict[str, Contestant] = {}
        self.failed: dict[str, str] = {}
        self.tokens_after: list[int] = []
        self.peaks_gb: dict[str, float | None] = {}
        self.seconds_to_warm_up: dict[str, float] = {}

    def run(self) -> int:
        """Find the batch and warm up everybody at it; returns the batch."""
        for name in EAGER:
            if name == ASC or not self.setup.networks or name in self.setup.networks:
                self._enter(name)
        self.calibrate(_FEW[1])
        if TOME in self.running:
            # Most of its blocks have as many tokens as the last.
            width = self._width_of_head + SIZE_CHANNELS
            self.attention_of_mergers = self._fastest_attention(self.tokens_after[-1], width)
            self.running[TOME].kernel = self._kernel_of(TOME)
        batch = self._fitting_batch()
        while True:
            try:
                self._warm_up(batch)
                return batch
            except Exception as error:
                if not out_of_memory(error) or batch <= _FEW[0]:
                    raise
            batch //= 2
            for name in [name for name in self.running if name.endswith((COMPILED, REPLAYED))]:
                del self.running[name]
            # Seen at two batches, code would be compiled for any, which is slower.
            torch._dynamo.reset()
            torch.cuda.empty_cache()

    def _enter(self, name: str) -> None:
        torch.manual_seed(self.setup.seed)
        self.running[name] = Contestant(name, self.shape, self.work, self.setup.device, self._kernel_of(name))

    def _kernel_of(self, name: str) -> str | None:
        """Ours run as a user gets them; the others with the attention kernel that is fastest here."""
        kind = kind_of(name)
        if kind in (ASC, BIPARTITE):
            return None
        return (self.attention_of_mergers if kind == TOME else self.attention).fastest

    def _fastest_attention(self, tokens: int, width: int) -> AttentionChoice:
        images = max(_FEW[1], min(self.shape.batch, _ATTENDED_TOKENS // tokens))
        return choose_attention((images, self._heads, tokens, width), self.setup.device, self.work != "inference")

    def calibrate(self, batch: int) -> None:
        """Hold superpixels to the default budget on the first images, and let the mergers keep as many tokens."""
        images_B3HW = self.images_B3HW[: min(batch, _CALIBRATION)]
        self.tokens_after = []
        with torch.no_grad(), half_precision(self.setup.device):
            for contestant in self._of(OURS):
                for encoder in contestant.job.encoders():
                    assert isinstance(encoder, AscViT)
                    encoder.calibrate(images_B3HW)
                    self.tokens_after = _tokens_after(encoder, images_B3HW, self.shape.patches)
        for contestant in self._of(MERGERS):
            for encoder in contestant.job.encoders():
                _keep_tokens(encoder, self.tokens_after, self.shape.patches)

    def _of(self, names: Iterable[str]) -> list[Contestant]:
        return [self.running[name] for name in names if name in self.running]

    def _fitting_batch(self) -> int:
        """The largest power of 2 at which nobody needs more than the share of the memory."""
        if self.setup.device.type != "cuda":
            return self.shape.batch
        total_gb = torch.cuda.get_device_properties(self.setup.device).total_memory / 1e9
        batch = self.shape.batch
        for name, contestant in list(self.running.items()):
            try:
                few, more = (contestant.peak_gb(self.images_B3HW[:count]) for count in _FEW)
            except Exception as error:
                if out_of_memory(error):
                    raise
                self._leave_out(name, error)
                continue
            assert few is not None and more is not None
            batch = min(batch, fitting(few, more, self.setup.memory_share * total_gb))
        return 1 << (max(batch, _FEW[0]).bit_length() - 1)

    def _warm_up(self, batch: int) -> None:
        if self.setup.compiled:
            for name in CONTESTANTS:
                if name not in self.running and kind_of(name) in self.running and self._can_enter(name, batch):
                    self._enter(name)
        self.calibrate(batch)
        for name, contestant in list(self.running.items()):
            begun = time.perf_counter()
            try:
                self.peaks_gb[name] = contestant.peak_gb(self.images_B3HW[:batch], _WARM_CALLS)
                self.seconds_to_warm_up[name] = time.perf_counter() - begun
                if self.setup.device.type == "cuda":
                    torch.cuda.empty_cache()  # others may be at work there, too
            except Exception as error:
                if out_of_memory(error):
                    raise
                self._leave_out(name, error)

    def _can_enter(self, name: str, batch: int) -> bool:
        if name in self.failed:
            return False
        if not name.endswith(REPLAYED):
            return True
        if self.setup.device.type != "cuda":
            return False
        if kind_of(name) == ASC:
            encoder, size_hw = self.running[ASC].job.encoder, (self.shape.pixels, self.shape.pixels)
            return is_worth_replaying(encoder, batch, size_hw, learns=self.work != "inference")
        return batch * self.shape.patches <= _REPLAYED_PATCHES

    def _leave_out(self, name: str, error: BaseException) -> None:
        if name == ASC:
            raise error
        del self.running[name]
        self.failed[name] = reason_of(error)

    def entering_tokens(self, name: str) -> list[float]:
        """Mean number of tokens that entered every block in the last call."""
        encoder = self.running[name].job.encoder
        if isinstance(encoder, AscViT):
            after = _after_blocks(encoder, self.shape.patches)
        elif isinstance(encoder, TokenMergingEncoder):
            after = [float(count) for count in encoder.tokens_after]
        else:
            after = [float(self.shape.patches)] * len(encoder.vit.blocks)
        return [float(self.shape.patches), *after[:-1]]


def fitting(few_gb: float, more_gb: float, most_gb: float) -> int:
    """Images that fit, from the memory that a few and some more of them need (``_FEW``)."""
    each = max((more_gb - few_gb) / (_FEW[1] - _FEW[0]), 1e-9)
    return max(0, int((most_gb - few_gb) / each) + _FEW[0])


def _tokens_after(encoder: AscViT, images_B3HW: Tensor, patches: int) -> list[int]:
    """Mean number of tokens after every block on these images, rounded."""
    was_training = encoder.training
    encoder.eval()(images_B3HW)
    encoder.train(was_training)
    return [round(count) for count in _after_blocks(encoder, patches)]


def _after_blocks(encoder: AscViT, patches: int) -> list[float]:
    """The same in the last call."""
    now, stats, after = float(patches), encoder.diagnostics(), []
    for block in range(encoder.config.depth):
        now = stats[block].tokens_mean if block in stats else now
        after.append(now)
    return after


def _keep_tokens(encoder: Encoder, tokens_after: list[int], patches: int) -> None:
    if isinstance(encoder, TokenMergingEncoder):
        # One step can at most halve.
        now = patches
        encoder.tokens_after = [now := max(count, now - now // 2) for count in tokens_after]
        return
    assert isinstance(encoder, AscViT) and encoder.budget is not None
    before, shares = float(patches), []
    for block in encoder.config.superpixel_blocks:
        shares.append(min(1.0, tokens_after[block] / before))
        before = tokens_after[block]
    # In both places: the update after a step copies the first into the second.
    encoder.budget.targets_L.copy_(torch.tensor(shares))
    for layer, share in zip(encoder.superpixel_layers, shares, strict=True):
        layer.threshold.target.fill_(share)
