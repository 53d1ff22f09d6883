"""Heads that give every pixel a score for every class: the paper's text and its appendix describe one each.

Both project the tokens of a level before spreading them over their patches: a superpixel of a hundred patches costs as
much as one of a single patch. Shape letters: see ``asc.tokens`` and ``asc.tasks.dense``; h, w rows and columns of a
map inside the head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from asc.tasks.dense import LEVELS, resized_maps
from asc.tokens import Tokens

HeadKind = Literal["mlp", "fpn"]


@dataclass(frozen=True)
class SegmentHeadConfig:
    """What stands behind the encoder."""

    kind: HeadKind = "fpn"
    """``mlp`` (the paper's text): projections, upsampling with skips and a fusion, all pixel by pixel; ``fpn`` (its
    appendix): a feature pyramid with 3 × 3 convolutions."""
    channels: int = 256
    """Width of the head."""
    finest: int = 4
    """Pixels, at most, of a cell of the head's last map; patches larger than that are halved level by level."""
    blocks: tuple[int, ...] | None = None
    """Blocks, counted from 1, whose tokens the head sees; None: 3, 6, 9 and 12 of twelve, in proportion of others."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(HeadKind):
            raise ValueError(f"unknown head.kind {self.kind!r}; choose from {', '.join(get_args(HeadKind))}")
        for name in ("channels", "finest"):
            if getattr(self, name) < 1:
                raise ValueError(f"head.{name} must be at least 1, got {getattr(self, name)}")


def make_head(config: SegmentHeadConfig, width: int, patch: int, classes: int) -> nn.Module:
    """The head for tokens of a width and patches of a size."""
    kind = MlpHead if config.kind == "mlp" else FpnHead
    return kind(width, config.channels, classes, upsampling(patch, config.finest))


def upsampling(patch: int, finest: int) -> list[int]:
    """How much finer each level's map is than the patches, the deepest level first.

    The last steps of the way up double the map, as many as it takes.
    """
    doublings = max(0, math.ceil(math.log2(patch / finest)))
    return [2 ** max(0, doublings - left) for left in range(LEVELS - 1, 0, -1)] + [2**doublings]


def _spread(tokens: Tokens, values_TC: Tensor, times: int) -> Tensor:
    """The map (B, C, h, w) of projected tokens, a number of times finer than the patches."""
    map_BChw = tokens.dense_BCHW(values_TC)
    return resized_maps(map_BChw, times * tokens.grid[0], times * tokens.grid[1])


class FpnHead(nn.Module):
    """Projections, from the deepest level up the sum with the level above, refined by a convolution."""

    def __init__(self, width: int, channels: int, classes: int, factors: Sequence[int]) -> None:
        super().__init__()
        self.factors = list(factors)
        # A 1 × 1 convolution is a linear layer of the tokens. Lists run from the deepest level to the shallowest.
        self.projections = nn.ModuleList(nn.Linear(width, channels) for _ in factors)
        self.refinements = nn.ModuleList(_refinement(channels) for _ in factors)
        self.classifier = nn.Conv2d(channels, classes, 1)

    def forward(self, levels: Sequence[Tokens], size: tuple[int, int]) -> Tensor:
        """Scores (B, K, H, W)."""
        map_BChw: Tensor | None = None
        parts = zip(reversed(levels), self.projections, self.refinements, self.factors, strict=True)
        for tokens, project, refine, times in parts:
            lateral_BChw = _spread(tokens, project(tokens.values_TC), times)
            if map_BChw is not None:
                lateral_BChw = lateral_BChw + resized_maps(map_BChw, *lateral_BChw.shape[2:])
            map_BChw = refine(lateral_BChw)
        return resized_maps(self.classifier(map_BChw).float(), *size)


def _refinement(channels: int) -> nn.Module:
    convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


class MlpHead(nn.Module):
    """Projections, upsampling with skips, and a fusion of all levels; no pixel looks at its neighbours."""

    def __init__(self, width: int, channels: int, classes: int, factors: Sequence[int]) -> None:
        super().__init__()
        self.factors = list(factors)
        self.projections = nn.ModuleList(nn.Linear(width, channels) for _ in factors)
        self.mixers = nn.ModuleList(_mixer(channels, channels) for _ in factors)
        self.fusion = _mixer(len(self.factors) * channels, channels)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, levels: Sequence[Tokens], size: tuple[int, int]) -> Tensor:
        """Scores (B, K, H, W)."""
        stages: list[Tensor] = []
        parts = zip(reversed(levels), self.projections, self.mixers, self.factors, strict=True)
        for tokens, project, mix, times in parts:
            skip_BChw = _spread(tokens, project(tokens.values_TC), times)
            if stages:
                skip_BChw = skip_BChw + resized_maps(stages[-1], *skip_BChw.shape[2:])
            stages.append(skip_BChw + _pixelwise(mix, skip_BChw))
        finest = stages[-1].shape[2:]
        all_BFhw = torch.cat([resized_maps(stage_BChw, *finest) for stage_BChw in stages], dim=1)
        fused_BhwC = self.fusion(all_BFhw.permute(0, 2, 3, 1))
        scores_BKhw = self.classifier(fused_BhwC).permute(0, 3, 1, 2)
        return resized_maps(scores_BKhw.float(), *size)


def _mixer(inputs: int, channels: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(inputs), nn.Linear(inputs, channels), nn.GELU(), nn.Linear(channels, channels))


def _pixelwise(module: nn.Module, map_BChw: Tensor) -> Tensor:
    mixed_BhwC: Tensor = module(map_BChw.permute(0, 2, 3, 1))
    return mixed_BhwC.permute(0, 3, 1, 2)
