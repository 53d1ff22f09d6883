"""Signs that tell whether the features are worth anything: the loss is not one of them.

Shape letters: see ``asc.pretrain.siamese``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asc.layer import LayerStats

# Spread of unit vectors that all point the same way is 0, of evenly spread ones 1. Healthy runs stay above 0.5.
_LEAST_SPREAD = 0.1
# Directions that the projections of a batch fill; healthy runs have dozens.
_LEAST_RANK = 2.0
_GIANT = 0.9
# Similarities this close to 1 cannot be told apart in half precision; healthy runs stay ten times farther away.
_CROWDED = 2.0**-12
# A mean share of tokens this far from the budget, as a factor, is no noise any more.
_BUDGET_FACTOR = 1.3


def spread(rows_BC: Tensor) -> float:
    """Standard deviation of the directions of the rows, 1 when they point everywhere and 0 when all are one."""
    unit_BC = F.normalize(rows_BC.float(), dim=1)
    return float(unit_BC.std(0).mean()) * math.sqrt(rows_BC.shape[1])


def effective_rank(rows_BC: Tensor) -> float:
    """How many directions the centred rows fill: the exponential of the entropy of their singular values."""
    centred_BC = rows_BC.double() - rows_BC.double().mean(0)
    if not bool(torch.isfinite(centred_BC).all()):
        return math.nan
    # In double precision the eigenvalues of the product are as good, and there in half the time.
    narrow = centred_BC if rows_BC.shape[0] >= rows_BC.shape[1] else centred_BC.T
    values = torch.linalg.eigvalsh(narrow.T @ narrow).clamp(min=0).sqrt()
    shares = values / values.sum().clamp(min=1e-12)
    return float(torch.exp(-(shares * shares.clamp(min=1e-12).log()).sum()))


def by_block(blocks: Mapping[int, LayerStats]) -> dict[str, float]:
    """Numbers on every block under the names that they have in logs."""
    return {
        f"block_{block:02d}/{name}": value for block, stats in blocks.items() for name, value in asdict(stats).items()
    }


class Learning(NamedTuple):
    """How the kNN accuracy has changed."""

    untrained: float
    now: float
    judged: int
    """Images it is measured on."""
    progress: float
    """Share of the training that is done."""

    @property
    def is_missing(self) -> bool:
        """Whether half the training has brought no more than the noise of the measurement."""
        noise = math.sqrt(max(self.untrained * (1 - self.untrained), 1e-4) / self.judged)
        return self.progress >= 0.5 and self.now < self.untrained + 2 * noise


@dataclass
class Monitor:
    """Turns numbers into warnings; says each once, and again only after things had been well in between."""

    budget: float | None = None
    """Mean share of the tokens that should enter a block; None: no budget is held."""
    cosine: bool = True
    """Whether the thresholds are compared with cosines."""
    _standing: set[str] = field(default_factory=set)

    def judge(
        self,
        step: int,
        projection_spread: float,
        projection_rank: float,
        blocks: Mapping[int, LayerStats],
        share: float,
        learning: Learning | None = None,
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
        if learning is not None and learning.is_missing:
            signs["learning"] = (
                f"step {step}: {learning.progress:.0%} of the training is done and the kNN accuracy is "
                f"{learning.now:.1%}, hardly above the untrained {learning.untrained:.1%}: the features may be "
                f"learning nothing. Look at gradient_norm in the log and lower train.lr; watch.knn_data can name "
                f"labelled images that are more like your videos"
            )
        for block, stats in blocks.items():
            if self.cosine and 1 - stats.theta < _CROWDED:
                signs[f"crowded {block}"] = (
                    f"step {step}: the keys of block {block} crowd together: θ = {stats.theta:.6f}, where half "
                    f"precision cannot tell similarities apart. Set model.superpixels.center, or lower train.lr"
                )
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
