"""Which query answers for which object: the assignment of least total cost.

Objects of a batch are given one image after another, M of them have a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torchvision.ops import box_convert, generalized_box_iou


@dataclass(frozen=True)
class MatchCost:
    """Weights of the parts of the cost of a pair."""

    label: float = 1.0
    """Of the probability of the object's class, negative."""
    l1: float = 5.0
    """Of the distance of the boxes, in shares of the image."""
    giou: float = 2.0
    """Of the generalised overlap of the boxes, negative."""


class Match(NamedTuple):
    """The pairs of one layer (int64, on the device)."""

    image_M: Tensor
    query_M: Tensor
    """Number of the query in its image."""
    object_M: Tensor
    """Number of the object in the batch."""


@torch.no_grad()
def match(
    logits_LBQC: Tensor,
    boxes_LBQ4: Tensor,
    label_K: Tensor,
    target_K4: Tensor,
    counts: Sequence[int],
    cost: MatchCost,
) -> list[Match]:
    """The pairs of every layer L of the decoder.

    Boxes are (centre x, centre y, width, height) in shares of the image. ``counts`` are the objects of each image; an
    image of more objects than queries leaves some without one.
    """
    costs_LBQK = _costs(logits_LBQC, boxes_LBQ4, label_K, target_K4, cost)
    # What is no number makes the loss none either; the training loop deals with that, the assignment cannot.
    on_host = costs_LBQK.nan_to_num(0.0).cpu().numpy()  # one transfer for all layers and images
    return [_layer(costs_BQK, counts, logits_LBQC.device) for costs_BQK in on_host]


def _costs(logits_LBQC: Tensor, boxes_LBQ4: Tensor, label_K: Tensor, target_K4: Tensor, cost: MatchCost) -> Tensor:
    shape = (*logits_LBQC.shape[:3], len(label_K))
    probability_RK = logits_LBQC.flatten(0, 2).softmax(1)[:, label_K]
    boxes_R4 = boxes_LBQ4.flatten(0, 2)
    l1_RK = torch.cdist(boxes_R4, target_K4, p=1)
    giou_RK = generalized_box_iou(corners(boxes_R4), corners(target_K4))
    costs_RK: Tensor = cost.l1 * l1_RK - cost.label * probability_RK - cost.giou * giou_RK
    return costs_RK.view(shape)


def _layer(
    costs_BQK: np.ndarray[tuple[int, ...], np.dtype[np.float32]], counts: Sequence[int], device: torch.device
) -> Match:
    pairs = [np.zeros((3, 0), np.int64)]
    first = 0
    for image, count in enumerate(counts):
        queries, objects = linear_sum_assignment(costs_BQK[image, :, first : first + count])
        pairs.append(np.stack([np.full(len(queries), image), queries, first + objects]))
        first += count
    return Match(*torch.from_numpy(np.concatenate(pairs, axis=1)).to(device, non_blocking=True))


def corners(boxes_K4: Tensor) -> Tensor:
    """Boxes (centre x, centre y, width, height) as (x0, y0, x1, y1)."""
    converted_K4: Tensor = box_convert(boxes_K4, "cxcywh", "xyxy")
    return converted_K4
