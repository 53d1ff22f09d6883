"""A classifier trained on an encoder, on the one training loop: a linear layer on frozen features, or everything.

Shape letters: B images, S their side, C channels, K classes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from asc.data.images import normalise
from asc.data.loading import make_loader
from asc.data.sampling import BatchPlan
from asc.precision import autocast
from asc.replay import ReplayedEncoder
from asc.run_folder import RunFolder
from asc.tasks.classify.datasets import Dataset, ImageSet
from asc.tasks.classify.metrics import score
from asc.tasks.classify.views import CentreViews, TrainingViews, ViewBatch, ViewConfig
from asc.tasks.encoders import Encoder
from asc.train import Measures, Outcome, Task, TrainConfig
from asc.transfer import Transfer
from asc.vit import AscViT

Thresholds = Literal["frozen", "budget"]
Chosen = Literal["best", "last"]
_BLOCK = re.compile(r"blocks\.(\d+)\.")


@dataclass(frozen=True)
class ClassifyConfig:
    """What is trained, and which weights are taken in the end."""

    frozen: bool = True
    """Whether the encoder stays as it is and only a linear layer learns."""
    chosen: Chosen = "best"
    """The weights that are judged on the test images: the ``best`` on the validation images, measured after every
    epoch, or the ``last``."""
    patience: float | None = None
    """Epochs without a better result on the validation images after which the training ends; None: never."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes; for datasets with one label an image."""
    layer_decay: float | None = None
    """Each block's learning rate as a share of that of the block behind it; None: the same for all."""
    thresholds: Thresholds = "frozen"
    """What the thresholds of superpixels do while the encoder learns. ``frozen``: they stay where pre-training left
    them, because a fine-tuning is short, its batches are of one kind of image, and a controller that follows them
    would change the tokens of every image for reasons that have nothing to do with its class. ``budget``: they
    follow their budget as in pre-training, for long trainings that move the keys far; the log has ``tokens_share``."""

    def __post_init__(self) -> None:
        for name, choices in (("chosen", get_args(Chosen)), ("thresholds", get_args(Thresholds))):
            if getattr(self, name) not in choices:
                raise ValueError(f"classify.{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        if self.patience is not None and not self.patience > 0:
            raise ValueError(f"classify.patience must be positive, or None for never, got {self.patience}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"classify.label_smoothing must lie in [0, 1), got {self.label_smoothing}")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise ValueError(f"classify.layer_decay must lie in (0, 1], got {self.layer_decay}")
        if self.patience is not None and self.chosen == "last":
            raise ValueError("classify.patience chooses the best weights: set classify.chosen to best, or no patience")


class ClassifyTask(Task):
    """Images to classes. The test part of the dataset is not touched before ``test`` is called."""

    def __init__(
        self,
        encoder: Encoder,
        dataset: Dataset,
        config: ClassifyConfig,
        view: ViewConfig,
        train: TrainConfig,
        replay: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.view, self.settings = config, view, train
        self.dataset, self.about = dataset, encoder
        self.epoch_length = len(dataset.train)
        self.views = TrainingViews(dataset.train, view, encoder.image_size, train.seed)
        self.encoder = encoder.module
        self._replayed = ReplayedEncoder(self.encoder) if replay and isinstance(self.encoder, AscViT) else None
        torch.manual_seed(train.seed)
        self.head = nn.Linear(encoder.num_features, len(dataset.train.classes))
        nn.init.trunc_normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)
        self._hold_still()
        self._shares = _lr_shares(self.encoder, config.layer_decay)
        self._workers, self._pin = 0, False
        self._seen_step, self._best_step, self._best_value = 0, 0, -math.inf
        self._best: dict[str, Tensor] = {}
        self._last: tuple[Tensor, Tensor] | None = None

    def _hold_still(self) -> None:
        if self.config.frozen:
            self.encoder.requires_grad_(False)
        elif isinstance(self.encoder, AscViT) and self.config.thresholds == "frozen":
            for name, parameter in self.encoder.named_parameters():
                if "threshold" in name or name.startswith("budget."):
                    parameter.requires_grad_(False)

    def train(self, mode: bool = True) -> ClassifyTask:
        """A frozen encoder is always in evaluation mode."""
        super().train(mode)
        if self.config.frozen:
            self.encoder.eval()
        return self

    # --- Learning -----------------------------------------------------------------------------------------

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Outcome:
        """Loss of a micro-batch."""
        images_B3SS, labels = inputs
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.config.frozen):
            features_BC = (self._replayed or self.encoder)(images_B3SS)
        logits_BK = self.head(features_BC)
        self._last = logits_BK.detach(), labels
        return Outcome(self._loss(logits_BK, labels), len(images_B3SS))

    def _loss(self, logits_BK: Tensor, labels: Tensor) -> Tensor:
        if not self.dataset.multi_label:
            return F.cross_entropy(logits_BK, labels, label_smoothing=self.config.label_smoothing)
        losses_BK = F.binary_cross_entropy_with_logits(
            logits_BK, labels.clamp(min=0).to(logits_BK.dtype), reduction="none"
        )
        counted_BK = labels >= 0
        return (losses_BK * counted_BK).sum() / counted_BK.sum().clamp(min=1)

    def batches(self, plan: BatchPlan, workers: int, pin: bool) -> DataLoader[Any]:
        """The micro-batches of the plan."""
        self._workers, self._pin = workers, pin
        return make_loader(self.views, plan, workers, pin)

    def prepare(self, batch: ViewBatch, device: torch.device) -> tuple[Tensor, Tensor]:
        """Normalised images and their labels."""
        pixels_BSS3, labels = (part.to(device, non_blocking=True) for part in (batch.images_BSS3, batch.labels))
        images_B3SS = normalise(pixels_BSS3, self.about.mean, self.about.deviation)
        return images_B3SS.to(self.head.weight.dtype), labels

    def bad_batch(self, batch: ViewBatch) -> dict[str, Any]:
        """Views and files of a batch."""
        sources = [self.dataset.train.source(sample) for sample in batch.samples]
        return {"images": batch.images_BSS3, "labels": batch.labels, "sources": sources}

    def after_step(self, progress: float) -> None:
        """The controllers of the thresholds, if they are to follow."""
        if isinstance(self.encoder, AscViT) and not self.config.frozen and self.config.thresholds == "budget":
            self.encoder.update_thresholds()
        else:
            self.forget_step()

    def forget_step(self) -> None:
        """What was counted is of no use."""
        if isinstance(self.encoder, AscViT):
            for layer in self.encoder.superpixel_layers:
                layer.threshold.reset_counts()

    def lr_share(self, name: str) -> float:
        """Less for blocks that lie farther from the classifier, if so asked."""
        return self._shares.get(name.removeprefix("encoder."), 1.0) if name.startswith("encoder.") else 1.0

    def parts_to_compile(self) -> list[nn.Module]:
        """The encoder, if it is ours."""
        return [self.encoder] if isinstance(self.encoder, AscViT) else []

    def measuring(self, step: int) -> Callable[[], Measures]:
        """Accuracy on the last batch, and the share of tokens that are left after the last block."""
        assert self._last is not None
        logits_BK, labels = self._last
        multi_label = self.dataset.multi_label
        right = Transfer(logits_BK.new_zeros(()) if multi_label else (logits_BK.argmax(1) == labels).float().mean())
        ours = self.encoder if isinstance(self.encoder, AscViT) else None
        diagnostics = ours.diagnosing() if ours is not None else dict

        def finish() -> Measures:
            values = {"epoch": step * self.settings.batch / self.epoch_length}
            if not multi_label:
                values["train_top1"] = float(right.wait())
            blocks = diagnostics()
            if ours is not None and blocks:
                rows, columns = ours.config.grid_of((self.about.image_size, self.about.image_size))
                values["tokens_share"] = blocks[max(blocks)].tokens_mean / (rows * columns)
            return Measures(values, [])

        return finish

    def brief(self) -> dict[str, str]:
        """The best result so far."""
        return {"best": f"{self._best_value:.1%}"} if math.isfinite(self._best_value) else {}

    # --- Choosing -----------------------------------------------------------------------------------------

    def evaluation_due(self, step: int, last: bool) -> bool:
        """After every epoch."""
        batch, length = self.settings.batch, self.epoch_length
        return last or (step > 0 and step * batch // length > (step - 1) * batch // length)

    def evaluate(self, step: int, last: bool, folder: RunFolder) -> dict[str, float]:
        """The metric on the validation images; the best weights so far are remembered."""
        values = self.judge(self.dataset.val)
        self._seen_step = step
        if self.config.chosen == "last" or values[self.dataset.metric] > self._best_value:
            self._best_step, self._best_value = step, values[self.dataset.metric]
            self._best = {name: tensor.detach().cpu().clone() for name, tensor in self._learned().items()}
        return {f"val_{name}": value for name, value in values.items()}

    def finished(self) -> bool:
        """Whether the validation images have seen no progress for too long."""
        waited = (self._seen_step - self._best_step) * self.settings.batch / self.epoch_length
        return self.config.patience is not None and waited >= self.config.patience

    def get_extra_state(self) -> dict[str, Any]:
        """What early stopping must know after a restart; the best weights travel with it, so that both always fit."""
        return {
            "seen_step": self._seen_step,
            "best_step": self._best_step,
            "best_value": self._best_value,
            "best": self._best,
        }

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """The counterpart."""
        self._seen_step, self._best_step = state["seen_step"], state["best_step"]
        self._best_value = state["best_value"]
        self._best = {name: tensor.cpu() for name, tensor in state["best"].items()}

    def _learned(self) -> dict[str, Tensor]:
        state = {f"head.{name}": tensor for name, tensor in self.head.state_dict().items()}
        if not self.config.frozen:
            state |= {f"encoder.{name}": tensor for name, tensor in self.encoder.state_dict().items()}
        return state

    # --- Judging ------------------------------------------------------------------------------------------

    @property
    def chosen_epoch(self) -> float:
        """Epochs after which the chosen weights were reached."""
        return self._best_step * self.settings.batch / self.epoch_length

    def take_chosen(self) -> None:
        """Put the chosen weights in."""
        for part, module in (("head.", self.head), ("encoder.", self.encoder)):
            own = {name.removeprefix(part): tensor for name, tensor in self._best.items() if name.startswith(part)}
            if own:
                module.load_state_dict(own)

    def test(self) -> dict[str, float]:
        """The metrics on the test images; to be called once, with the chosen weights."""
        return self.judge(self.dataset.test)

    @torch.no_grad()
    def judge(self, images: ImageSet) -> dict[str, float]:
        """The metrics on a part of the dataset."""
        self.eval()
        device = self.head.weight.device
        views = CentreViews(images, self.about.image_size, self.view.margin)
        plan = BatchPlan(0, len(images), min(self.settings.batch, len(images)))
        scores = []
        for batch in make_loader(views, plan, self._workers, self._pin):
            images_B3SS, _ = self.prepare(batch, device)
            with autocast(device, self.settings.precision):
                scores.append(self.head(self.encoder(images_B3SS)).float().cpu())
        self.forget_step()
        return score(self.dataset.metric, torch.cat(scores), images.labels)


def _lr_shares(encoder: nn.Module, decay: float | None) -> dict[str, float]:
    """Share of the learning rate by parameter of the encoder."""
    if decay is None:
        return {}
    layers = _layers(encoder)
    last = max(layers.values())
    return {name: decay ** (1 + last - layer) for name, layer in layers.items()}


def _layers(encoder: nn.Module) -> dict[str, int]:
    """How far from the pixels a parameter lies: 0 for the embedding, then one more with every block."""
    if isinstance(encoder, AscViT):
        layers = {}
        for name, _ in encoder.named_parameters():
            block = _BLOCK.match(name)
            at_the_end = encoder.config.depth if name.startswith(("norm.", "budget.")) else 0
            layers[name] = 1 + int(block[1]) if block else at_the_end
        return layers
    if not hasattr(encoder, "group_matcher"):
        raise ValueError(f"classify.layer_decay: {type(encoder).__name__} does not say which of its layers come when")
    from timm.models._manipulate import group_parameters

    peer: Any = encoder
    found: dict[str, int] = group_parameters(peer, peer.group_matcher(coarse=False), reverse=True)
    return found
