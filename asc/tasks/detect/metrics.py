"""Average precision as the PASCAL VOC protocol says, in its two forms.

All detections of a class, the surest first, are compared with the objects of their image one after another. Each
looks at the object of its class that it overlaps most. If the overlap reaches the limit, the detection is right the
first time and wrong every further time that this object is found; a difficult object counts neither way. Detections
of equal score come in the order they are given in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torchvision.ops import box_iou

from asc.tasks.detect.data import Truth

Floats = NDArray[np.float64]


class Detections(NamedTuple):
    """What a detector found in one image."""

    boxes_K4: Tensor
    """Boxes (fp32)."""
    scores_K: Tensor
    """How sure it is of each, from 0 to 1."""
    classes_K: Tensor
    """Classes, counted from 0 (int64)."""

    def cpu(self) -> Detections:
        """The same on the host."""
        return Detections(*(part.float().cpu() if part.is_floating_point() else part.cpu() for part in self))

    def only(self, chosen: Tensor) -> Detections:
        """The chosen detections."""
        return Detections(*(part[chosen] for part in self))


@dataclass(frozen=True)
class Scores:
    """Average precision of every class; NaN for a class of which there is nothing to find."""

    area_C: Floats
    """Area under the curve of precision over recall (VOC 2010 and later)."""
    eleven_C: Floats
    """Mean precision at the eleven recalls 0, 0.1, … 1 (VOC 2007)."""
    objects_C: NDArray[np.int64]
    """Objects to be found, the difficult ones not counted."""

    @property
    def area(self) -> float:
        """Mean over the classes that there is something of."""
        return _mean(self.area_C)

    @property
    def eleven(self) -> float:
        """Likewise."""
        return _mean(self.eleven_C)


def average_precision(
    found: Sequence[Detections], truths: Sequence[Truth], classes: int, overlap: float = 0.5
) -> Scores:
    """The scores of all detections, given with the truth image by image."""
    if len(found) != len(truths):
        raise ValueError(f"every image needs its detections and its truth, got {len(found)} and {len(truths)}")
    curves = [_curve(found, truths, number, overlap) for number in range(classes)]
    objects_C = np.array([_count(truths, number) for number in range(classes)], dtype=np.int64)
    area_C, eleven_C = np.full(classes, np.nan), np.full(classes, np.nan)
    for number, (right_D, wrong_D) in enumerate(curves):
        if objects_C[number]:
            recall_D, precision_D = _recall_and_precision(right_D, wrong_D, int(objects_C[number]))
            area_C[number] = _area(recall_D, precision_D)
            eleven_C[number] = _eleven_points(recall_D, precision_D)
    return Scores(area_C, eleven_C, objects_C)


def _count(truths: Sequence[Truth], number: int) -> int:
    return sum(int(((truth.classes_K == number) & ~truth.difficult_K).sum()) for truth in truths)


def _curve(
    found: Sequence[Detections], truths: Sequence[Truth], number: int, overlap: float
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether each detection of a class is right and whether it is wrong, the surest first."""
    scores, right, wrong = [], [], []
    for detections, truth in zip(found, truths, strict=True):
        own = detections.only(detections.classes_K == number)
        if not len(own.scores_K):
            continue
        own = own.only(own.scores_K.argsort(descending=True, stable=True))
        judged = _judged(own.boxes_K4, truth.only(truth.classes_K == number), overlap)
        scores.append(own.scores_K.double().numpy())
        right.append(judged[0])
        wrong.append(judged[1])
    order_D = np.argsort(-np.concatenate(scores), kind="stable") if scores else np.zeros(0, np.intp)
    empty = np.zeros(0, np.bool_)
    return np.concatenate([empty, *right])[order_D], np.concatenate([empty, *wrong])[order_D]


def _judged(boxes_K4: Tensor, truth: Truth, overlap: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    right_K, wrong_K = np.zeros(len(boxes_K4), np.bool_), np.ones(len(boxes_K4), np.bool_)
    if not len(boxes_K4) or not len(truth.boxes_K4):
        return right_K, wrong_K
    # In double precision: an overlap of exactly the limit must not fall below it by rounding.
    best_K, which_K = box_iou(boxes_K4.double(), truth.boxes_K4.double()).max(1)
    taken: set[int] = set()
    for row, (best, which) in enumerate(zip(best_K.tolist(), which_K.tolist(), strict=True)):
        if best < overlap:
            continue
        if truth.difficult_K[which]:
            wrong_K[row] = False
        elif which not in taken:
            taken.add(which)
            right_K[row], wrong_K[row] = True, False
    return right_K, wrong_K


def _recall_and_precision(
    right_D: NDArray[np.bool_], wrong_D: NDArray[np.bool_], objects: int
) -> tuple[Floats, Floats]:
    right, wrong = np.cumsum(right_D, dtype=np.float64), np.cumsum(wrong_D, dtype=np.float64)
    # Before the first detection that counts there is no precision yet: 0 / 0.
    return right / objects, right / np.maximum(right + wrong, 1.0)


def _area(recall_D: Floats, precision_D: Floats) -> float:
    recall, precision = np.concatenate([[0.0], recall_D, [1.0]]), np.concatenate([[0.0], precision_D, [0.0]])
    # At each recall, the best precision that this or a higher recall has.
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    return float(np.sum(np.diff(recall) * envelope[1:]))


def _eleven_points(recall_D: Floats, precision_D: Floats) -> float:
    # Compared with a margin: a recall of 3 / 10 is not quite 0.3 in floating-point numbers.
    reached = [precision_D[recall_D >= tenth / 10 - 1e-9] for tenth in range(11)]
    return float(np.mean([part.max() if part.size else 0.0 for part in reached]))


def _mean(values_C: Floats) -> float:
    there = values_C[~np.isnan(values_C)]
    return float(there.mean()) if there.size else float("nan")
