"""Intersection over union, from one confusion matrix of the whole set. Shape letters: K classes, N pixels."""

from __future__ import annotations

import torch
from torch import Tensor

from asc.tasks.segment.losses import VOID


class Confusion:
    """Counts pixels by their true and their predicted class."""

    def __init__(self, classes: int) -> None:
        self.counts_KK = torch.zeros(classes, classes, dtype=torch.int64)

    def add(self, predicted: Tensor, truth: Tensor) -> None:
        """Count the pixels of two maps of classes; void ones do not count."""
        self.counts_KK += confusion_matrix(predicted, truth, len(self.counts_KK))

    def iou_K(self) -> Tensor:
        """Intersection over union of every class (fp64); no number for a class that is neither there nor predicted."""
        return iou(self.counts_KK)

    def mean_iou(self) -> float:
        """Mean over the classes that are there or predicted."""
        return float(self.iou_K().nanmean())

    def accuracy(self) -> float:
        """Share of the pixels whose class is right."""
        return float(self.counts_KK.diagonal().sum() / self.counts_KK.sum())


def confusion_matrix(predicted: Tensor, truth: Tensor, classes: int) -> Tensor:
    """Pixels by true (row) and predicted (column) class, on the CPU."""
    known = truth != VOID
    truth_N, predicted_N = truth[known].long(), predicted[known].long()
    return torch.bincount(classes * truth_N + predicted_N, minlength=classes**2).view(classes, classes).cpu()


def iou(counts_KK: Tensor) -> Tensor:
    """Intersection over union of every class of a confusion matrix."""
    right_K = counts_KK.diagonal().double()
    return right_K / (counts_KK.sum(0) + counts_KK.sum(1) - right_K)
