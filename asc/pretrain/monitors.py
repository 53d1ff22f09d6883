"""Signs that tell whether the features are worth anything: the loss is not one of them.

Shape letters: see ``asc.pretrain.siamese``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from asc.layer import LayerStats

# Spread of unit vectors that all point the same way is 0, of evenly spread ones 1. Healthy runs stay above 0.5.
_LEAST_SPREAD = 0.1
# Directions that the projections of a batch fill; healthy runs have dozens.
_LEAST_RANK = 2.0
_GIANT = 0.9
# A mean share of tokens this far from the budget, as a factor, is no noise any more.
_BUDGET_FACTOR = 1.3


def spread(rows_BC: Tensor) -> float:
    """Standard deviation of the directions of the rows, 1 when they point everywhere and 0 when all are one."""
    unit_BC = F.normalize(rows_BC.float(), dim=1)
    return float(unit_BC.std(0).mean()) * math.sqrt(rows_BC.shape[1])


def effective_rank(rows_BC: Tensor) -> float:
    """How many directions the centred rows fill: the exponential of the entropy of their singular values."""
    centred_BC = rows_BC.float() - rows_BC.float().mean(0)
    if not bool(torch.isfinite(centred_BC).all()):
        return math.nan
    values = torch.linalg.svdvals(centred_BC.cpu())
    shares = values / values.sum().clamp(min=1e-12)
    return float(torch.exp(-(shares * shares.clamp(min=1e-12).log()).sum()))


@dataclass
class Monitor:
    """Turns numbers into warnings; says each once, and again only after things had been well in between."""

    budget: float | None = None
    """Mean share of the tokens that should enter a block; None: no budget is held."""
    _standing: set[str] = field(default_factory=set)

    def judge(
        self,
        step: int,
        projection_spread: float,
        projection_rank: float,
        blocks: Mapping[int, LayerStats],
        share: float,
    ) -> list[str]:
        """Warnings in plain words."""
        signs: dict[str, str] = {}
        if projection_spread < _LEAST_SPREAD:
            signs["spread"] = (
                f"step {step}: the representation has collapsed: all images are projected to almost the same point "
                f"(spread {projection_spread:.3f}, healthy is above 0.5). Lower train.lr, raise siamese.momentum, or "
                f"train with a larger batch"
            )
        elif projection_rank < _LEAST_RANK:
            signs["rank"] = (
                f"step {step}: the representation is collapsing: the projections of a batch fill only "
                f"{projection_rank:.1f} directions. Lower train.lr, or train with a larger batch"
            )
        for block, stats in blocks.items():
            if stats.tokens_mean < 1.5:
                signs[f"one {block}"] = (
                    f"step {step}: block {block} joins almost every image into one token (θ = {stats.theta:.4f}). "
                    f"Use model.superpixels.threshold budget, or raise model.superpixels.budget"
                )
            elif stats.largest_share > _GIANT:
                signs[f"giant {block}"] = (
                    f"step {step}: block {block} has a giant component: one superpixel covers "
                    f"{stats.largest_share:.0%} of an image on average. Raise model.superpixels.budget, or set "
                    f"model.superpixels.neighbourhood spatial"
                )
        if self.budget is not None and not 1 / _BUDGET_FACTOR < share / self.budget < _BUDGET_FACTOR:
            signs["budget"] = (
                f"step {step}: the blocks work on {share:.0%} of the tokens, the budget is {self.budget:.0%}; the "
                f"thresholds lag behind. It passes if the keys calm down; else lower train.lr"
            )
        fresh = [message for sign, message in signs.items() if sign not in self._standing]
        self._standing = set(signs)
        return fresh
