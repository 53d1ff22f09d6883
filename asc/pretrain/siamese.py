"""Two frames of one clip must agree: a predictor encoder against a slowly moving target encoder.

    first frame  ─▶ encoder ─▶ projector ─▶ predictor ─▶ p ┐
                       ┆ moving average                    ├ 2 - 2 ⟨p, z⟩, and the same with the frames swapped
    second frame ─▶ target encoder ─▶ target projector ─▶ z ┘   (no gradient)

Shape letters: V frames of a clip, B clips, C channels of the encoder, Z channels of a projection.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asc.distributed import gathered_from_processes
from asc.pretrain.batchnorm import SyncedBatchNorm
from asc.vit import AscViT

TargetKind = Literal["average", "stop_gradient"]
LossKind = Literal["positive", "contrastive"]


@dataclass(frozen=True)
class SiameseConfig:
    """Heads, target and loss of pre-training."""

    projection: int = 256
    """Channels that the two frames are compared in."""
    hidden: int = 4096
    """Hidden channels of projector and predictor."""
    target: TargetKind = "average"
    """``average``: the target is a moving average of the encoder; ``stop_gradient``: the encoder itself."""
    momentum: float = 0.996
    """Share of the target that is kept at a step, at the start."""
    last_momentum: float = 1.0
    """The same at the end; between them a cosine. The paper keeps 0.996 throughout."""
    symmetric: bool = True
    """Whether each frame is predicted from the other; else only the later from the earlier."""
    loss: LossKind = "positive"
    """``positive``: 2 - 2⟨p, z⟩, no negatives; ``contrastive``: InfoNCE against all other clips of the batch."""
    temperature: float = 0.1
    """Temperature of the contrastive loss."""

    def __post_init__(self) -> None:
        if self.target not in get_args(TargetKind):
            raise ValueError(f"unknown target {self.target!r}; choose from {', '.join(get_args(TargetKind))}")
        if self.loss not in get_args(LossKind):
            raise ValueError(f"unknown loss {self.loss!r}; choose from {', '.join(get_args(LossKind))}")
        for name in ("momentum", "last_momentum"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}")
        for name in ("projection", "hidden", "temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


class Agreement(NamedTuple):
    """What one step of pre-training needs and what its monitors look at."""

    loss: Tensor
    features_BC: Tensor
    """Features of the first frames, without gradient."""
    projections_BZ: Tensor
    """Target projections of the second frames, of unit length; they shrink to one point in a collapse."""


class Siamese(nn.Module):
    """The encoder with its projector and predictor, and the target that it follows.

    Args:
        encoder: The network to train; calibrate it before, so that the target starts with its thresholds.
        config: Heads, target and loss.
    """

    def __init__(self, encoder: AscViT, config: SiameseConfig | None = None) -> None:
        super().__init__()
        self.config = config = SiameseConfig() if config is None else config
        self.encoder = encoder
        self.projector = _mlp(encoder.num_features, config.hidden, config.projection, layers=3)
        self.predictor = _mlp(config.projection, config.hidden, config.projection, layers=2)
        self.target_encoder: AscViT | None = None
        self.target_projector: nn.Module | None = None
        if config.target == "average":
            self.target_encoder = copy.deepcopy(encoder).requires_grad_(False)
            self.target_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self._pairs: tuple[list[Tensor], list[Tensor]] | None = None

    def forward(self, images_VB3HW: Tensor) -> Agreement:
        """Loss of a batch of clips, given two or more frames of each (V views); every two of them are a pair."""
        views, clips = images_VB3HW.shape[:2]
        images_B3HW = images_VB3HW.flatten(0, 1)
        # The target goes first: its largest tensors are gone before the encoder keeps any for the way back.
        wanted_BZ = self._wanted(images_B3HW)
        features_BC = self.encoder(images_B3HW)
        projected_BZ = self.projector(features_BC)
        predicted_VBZ = _unit(self.predictor(projected_BZ)).unflatten(0, (views, clips))
        if wanted_BZ is None:
            wanted_BZ = _unit(projected_BZ.detach())
        wanted_VBZ = wanted_BZ.unflatten(0, (views, clips))
        pairs = permutations(range(views), 2) if self.config.symmetric else combinations(range(views), 2)
        losses = [self._loss(predicted_VBZ[one], wanted_VBZ[other]) for one, other in pairs]
        return Agreement(torch.stack(losses).mean(), features_BC[:clips].detach(), wanted_VBZ[1])

    @torch.no_grad()
    def _wanted(self, images_B3HW: Tensor) -> Tensor | None:
        """What the target says of the images, if there is a target apart from the encoder."""
        if self.target_encoder is None or self.target_projector is None:
            return None
        return _unit(self.target_projector(self.target_encoder(images_B3HW)))

    def _loss(self, predicted_BZ: Tensor, wanted_BZ: Tensor) -> Tensor:
        if self.config.loss == "positive":
            return (2 - 2 * (predicted_BZ * wanted_BZ).sum(dim=1)).mean()
        everyone_AZ, first = gathered_from_processes(wanted_BZ)
        scores_BA = predicted_BZ @ everyone_AZ.T / self.config.temperature
        own_B = first + torch.arange(len(predicted_BZ), device=scores_BA.device)
        return F.cross_entropy(scores_BA, own_B)

    @torch.no_grad()
    def follow(self, progress: float) -> None:
        """Let the target follow the encoder; call once after every optimiser step and ``update_thresholds``.

        ``progress`` is the share of the training that is done, from 0 to 1.
        """
        if self.target_encoder is None or self.target_projector is None:
            return
        share = 1.0 - momentum_at(self.config, progress)
        if self._pairs is None:
            # Looked up once: that takes the host longer than the GPU takes for the sum.
            target: list[Tensor] = [*self.target_encoder.parameters(), *self.target_projector.parameters()]
            self._pairs = target, [*self.encoder.parameters(), *self.projector.parameters()]
        torch._foreach_lerp_(*self._pairs, share)
        theirs, ours = _threshold_state(self.target_encoder), _threshold_state(self.encoder)
        for dtype in {tensor.dtype for tensor in ours}:
            # All of one type at once: copied one by one, these few numbers would take a good part of the step.
            old, new = ([tensor for tensor in state if tensor.dtype == dtype] for state in (theirs, ours))
            torch._foreach_copy_(old, new)
        # Thresholds belong to keys, and the target has keys of its own: with the encoder's thresholds it would leave
        # its budget, and do up to twice the work.
        self.target_encoder.update_thresholds()
        for layer in self.target_encoder.superpixel_layers:
            layer.threshold.reset_counts()


def _threshold_state(encoder: AscViT) -> list[Tensor]:
    """Parameters and buffers of the budget and of all thresholds, without what controllers move."""
    thresholds = [layer.threshold for layer in encoder.superpixel_layers]
    parts: list[nn.Module] = [*thresholds] if encoder.budget is None else [encoder.budget, *thresholds]
    own = {id(tensor) for threshold in thresholds if threshold.kind == "budget" for tensor in threshold.controller()}
    tensors = [tensor for part in parts for tensor in (*part.parameters(), *part.buffers())]
    return [tensor for tensor in tensors if id(tensor) not in own]


def momentum_at(config: SiameseConfig, progress: float) -> float:
    """Share of the target that is kept, by a cosine from the first to the last momentum."""
    rise = (1 - math.cos(math.pi * min(max(progress, 0.0), 1.0))) / 2
    return config.momentum + (config.last_momentum - config.momentum) * rise


def _unit(rows_BZ: Tensor) -> Tensor:
    return F.normalize(rows_BZ.to(torch.promote_types(rows_BZ.dtype, torch.float32)), dim=1)


def _mlp(inputs: int, hidden: int, outputs: int, layers: int) -> nn.Sequential:
    """Linear layers with batch norm and ReLU between them; the last one stays linear."""
    parts: list[nn.Module] = []
    for _ in range(layers - 1):
        # Heads are thrown away after training, so nobody would ever look at running statistics.
        norm = SyncedBatchNorm(hidden, track_running_stats=False)
        parts += [nn.Linear(inputs, hidden, bias=False), norm, nn.ReLU()]
        inputs = hidden
    return nn.Sequential(*parts, nn.Linear(inputs, outputs))
