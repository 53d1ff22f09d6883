"""Losses of segmentation. Shape letters: B images, K classes, H, W rows and columns, P pixels that have a class."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

VOID = 255
"""The class of pixels that do not count."""


@dataclass(frozen=True)
class SegmentLossConfig:
    """What is minimised; a weight of 0 leaves a part out."""

    cross_entropy: float = 1.0
    """Weight of the cross-entropy."""
    lovasz: float = 0.5
    """Weight of Lovász-Softmax, a smooth stand-in for the intersection over union."""

    def __post_init__(self) -> None:
        if min(self.cross_entropy, self.lovasz) < 0 or self.cross_entropy + self.lovasz == 0:
            raise ValueError(
                f"loss.cross_entropy and loss.lovasz must not be negative, nor both 0, got {self.cross_entropy} and "
                f"{self.lovasz}"
            )


def segment_loss(scores_BKHW: Tensor, classes_BHW: Tensor, config: SegmentLossConfig) -> Tensor:
    """The weighted sum, over the pixels that are not void."""
    loss = scores_BKHW.new_zeros(())
    if config.cross_entropy:
        loss = loss + config.cross_entropy * cross_entropy(scores_BKHW, classes_BHW)
    if config.lovasz:
        loss = loss + config.lovasz * lovasz_softmax(scores_BKHW, classes_BHW)
    return loss


def cross_entropy(scores_BKHW: Tensor, classes_BHW: Tensor) -> Tensor:
    """Mean over all pixels that are not void; 0 if there is none."""
    total = F.cross_entropy(scores_BKHW, classes_BHW, ignore_index=VOID, reduction="sum")
    return total / (classes_BHW != VOID).sum().clamp(min=1)


def lovasz_softmax(scores_BKHW: Tensor, classes_BHW: Tensor) -> Tensor:
    """Mean over the classes present of the Lovász extension of the Jaccard loss (Berman, Triki, Blaschko 2018).

    All pixels of the batch count together. For predictions that are certain it is exactly 1 - intersection over union.
    """
    # Selected by number, not by a mask: back, a mask would sort all pixels to add up what comes to each.
    known_P = (classes_BHW.flatten() != VOID).nonzero()[:, 0]
    classes_P = classes_BHW.flatten()[known_P]
    chances_PK = scores_BKHW.permute(0, 2, 3, 1).flatten(0, 2).index_select(0, known_P).softmax(1)
    present = classes_P.unique().tolist()
    if not present:
        return scores_BKHW.sum() * 0.0
    return torch.stack([_lovasz(chances_PK[:, number], classes_P == number) for number in present]).mean()


def _lovasz(chances_P: Tensor, is_class_P: Tensor) -> Tensor:
    errors_P, order_P = (is_class_P.to(chances_P.dtype) - chances_P).abs().sort(descending=True)
    return errors_P @ _jaccard_steps(is_class_P[order_P]).to(errors_P.dtype)


def _jaccard_steps(is_class_P: Tensor) -> Tensor:
    """How much the Jaccard loss rises with every further wrong pixel, the worst pixel first."""
    # Whole numbers: fp32 could not count the pixels of a large batch exactly.
    total = is_class_P.sum()
    intersection_P = total - is_class_P.cumsum(0)
    union_P = total + (~is_class_P).cumsum(0)
    jaccard_P = 1.0 - intersection_P.double() / union_P
    return torch.diff(jaccard_P, prepend=jaccard_P.new_zeros(1))
