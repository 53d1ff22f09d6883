"""What a classifier's scores are worth.

Shape letters: M images, K classes. All values are shares from 0 to 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asc.tasks.classify.datasets.parts import Metric

# Recalls at which the challenge of 2007 looks at the precision: 0, 0.1, ..., 1.
_POINTS = 10


def score(metric: Metric, scores_MK: Tensor, labels: Tensor) -> dict[str, float]:
    """The metric of a dataset, first, and those that go with it.

    Args:
        metric: ``top1`` and ``mean_per_class`` come together, with ``top5`` where there are more than five classes;
            ``map11`` comes with the number of classes that were left out for want of positives.
        scores_MK: The higher, the more likely; any scale.
        labels: Classes (M,), or (M, K) with 1, 0 and -1 for ``map11``.
    """
    if metric == "map11":
        ap_K = average_precision_11(scores_MK, labels)
        counted_K = ~ap_K.isnan()
        if not bool(counted_K.any()):
            raise ValueError("no class has a positive image, so there is no average precision")
        return {"map11": float(ap_K[counted_K].mean()), "classes_without_positives": float((~counted_K).sum())}
    values = {"top1": top_k(scores_MK, labels, 1), "mean_per_class": mean_per_class(scores_MK, labels)}
    if scores_MK.shape[1] > 5:
        values["top5"] = top_k(scores_MK, labels, 5)
    return {metric: values.pop(metric)} | values


def top_k(scores_MK: Tensor, labels_M: Tensor, k: int) -> float:
    """Share of the images whose class is among the ``k`` with the highest scores.

    Of equal scores the class with the smaller number comes first, as with argmax.
    """
    return float((_places(scores_MK, labels_M) < k).double().mean())


def mean_per_class(scores_MK: Tensor, labels_M: Tensor) -> float:
    """Top-1 accuracy of every class that occurs, averaged over these classes."""
    right_M = (_places(scores_MK, labels_M) == 0).double()
    labels_M = labels_M.cpu()
    images_K = torch.bincount(labels_M)
    right_K = torch.bincount(labels_M, weights=right_M)
    occurs_K = images_K > 0
    return float((right_K[occurs_K] / images_K[occurs_K]).mean())


def average_precision_11(scores_MK: Tensor, labels_MK: Tensor) -> Tensor:
    """11-point average precision of every class (K,), as VOC2007 defines it; NaN for a class without positives.

    The precision at a recall r is the best of all cuts whose recall is at least r; the result is its mean over
    r = 0, 0.1, ..., 1. Images whose label is -1 are left out of the class. Images of equal score pass a cut together,
    so the result does not depend on their order.
    """
    _check(scores_MK)
    if labels_MK.shape != scores_MK.shape:
        raise ValueError(f"labels of shape {tuple(labels_MK.shape)} do not fit scores of {tuple(scores_MK.shape)}")
    columns = zip(scores_MK.unbind(1), labels_MK.to(scores_MK.device).unbind(1), strict=True)
    return torch.stack([_one_class(scores_M, labels_M) for scores_M, labels_M in columns]).cpu()


def _one_class(scores_M: Tensor, labels_M: Tensor) -> Tensor:
    counted_M = labels_M != -1
    scores_M, order_M = scores_M[counted_M].sort(descending=True)
    positive_M = (labels_M[counted_M] == 1)[order_M]
    positives = positive_M.sum()
    if int(positives) == 0:
        return torch.tensor(torch.nan, dtype=torch.float64, device=scores_M.device)
    # A cut lies only where the next score is another one.
    is_cut_M = torch.ones_like(positive_M)
    is_cut_M[:-1] = scores_M[1:] != scores_M[:-1]
    found_C = positive_M.cumsum(0)[is_cut_M]
    precision_C = found_C.double() / (is_cut_M.nonzero().flatten() + 1)
    # Whole numbers, because 0.3 as a sum of tenths is not 3 / 10.
    recall_reached_PC = _POINTS * found_C >= torch.arange(_POINTS + 1, device=found_C.device)[:, None] * positives
    return torch.where(recall_reached_PC, precision_C, 0.0).amax(1).mean()


def _places(scores_MK: Tensor, labels_M: Tensor) -> Tensor:
    """How many classes come before the right one."""
    _check(scores_MK)
    if labels_M.shape != scores_MK.shape[:1]:
        raise ValueError(f"labels of shape {tuple(labels_M.shape)} do not fit scores of {tuple(scores_MK.shape)}")
    labels_M1 = labels_M.to(scores_MK.device)[:, None]
    if not 0 <= int(labels_M.min()) <= int(labels_M.max()) < scores_MK.shape[1]:
        raise ValueError(
            f"labels go from {int(labels_M.min())} to {int(labels_M.max())}, but there are "
            f"{scores_MK.shape[1]} columns of scores"
        )
    own_M1 = scores_MK.gather(1, labels_M1)
    smaller_MK = torch.arange(scores_MK.shape[1], device=scores_MK.device) < labels_M1
    before_MK = (scores_MK > own_M1) | ((scores_MK == own_M1) & smaller_MK)
    return before_MK.sum(1).cpu()


def _check(scores_MK: Tensor) -> None:
    if scores_MK.ndim != 2 or not len(scores_MK):
        raise ValueError(f"scores must be a table of images and classes, got the shape {tuple(scores_MK.shape)}")
    # Comparisons with NaN are false: such an image would count as recognised.
    if bool(scores_MK.isnan().any()):
        raise ValueError("some scores are NaN; the network that gave them has diverged")
