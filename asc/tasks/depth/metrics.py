"""Scores of depth over all valid pixels of a set. Shape letters: H, W rows and columns, N valid pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Crop = Literal["eigen", "none"]

# Rows and columns of 480 x 640 images that count: the usual part, in which the sensor saw everything (Eigen 2014).
_EIGEN_ROWS, _EIGEN_COLUMNS = (45 / 480, 471 / 480), (41 / 640, 601 / 640)


@dataclass(frozen=True)
class DepthRange:
    """Which pixels count, in training and when judged."""

    near: float = 1e-3
    """Metres; a truth that is not farther is invalid."""
    far: float = 10.0
    """Metres; a truth that is not nearer is invalid, and no prediction is farther."""
    crop: Crop = "eigen"
    """``eigen``: only the usual part of an image of NYU v2 is judged, in proportion for other sizes; ``none``: all."""

    def __post_init__(self) -> None:
        if not 0 < self.near < self.far:
            raise ValueError(
                f"range.near and range.far must be metres with 0 < near < far, got {self.near}, {self.far}"
            )
        if self.crop not in get_args(Crop):
            raise ValueError(f"unknown range.crop {self.crop!r}; choose from {', '.join(get_args(Crop))}")

    def valid(self, truth: Tensor) -> Tensor:
        """Where the truth is known."""
        return (truth > self.near) & (truth < self.far)

    def judged(self, truth_HW: Tensor) -> Tensor:
        """Where the truth is known and counts when judged."""
        valid_HW = self.valid(truth_HW)
        if self.crop == "none":
            return valid_HW
        height, width = truth_HW.shape
        inside_HW = torch.zeros_like(valid_HW)
        top, bottom = (round(height * share) for share in _EIGEN_ROWS)
        left, right = (round(width * share) for share in _EIGEN_COLUMNS)
        inside_HW[top:bottom, left:right] = True
        return valid_HW & inside_HW


class DepthScores:
    """Sums over pixels, from which all scores follow."""

    def __init__(self, limits: DepthRange) -> None:
        self.limits = limits
        # Pixels; those within 1.25, 1.25² and 1.25³; squared errors; relative errors.
        self.sums_6 = torch.zeros(6, dtype=torch.float64)

    def add(self, depth_HW: Tensor, truth_HW: Tensor) -> dict[str, float]:
        """Count an image; returns its own scores, which are no numbers if none of its pixels counts."""
        judged_HW = self.limits.judged(truth_HW)
        truth_N = truth_HW[judged_HW].double()
        depth_N = depth_HW[judged_HW].double().clamp(self.limits.near, self.limits.far)
        ratio_N = torch.maximum(depth_N / truth_N, truth_N / depth_N)
        errors_N = depth_N - truth_N
        parts = [torch.ones_like(ratio_N), *(ratio_N < 1.25**power for power in (1, 2, 3))]
        parts += [errors_N.square(), errors_N.abs() / truth_N]
        sums_6 = torch.stack([part.double().sum() for part in parts]).cpu()
        self.sums_6 += sums_6
        return scores(sums_6)

    def values(self) -> dict[str, float]:
        """The scores over all pixels of all images."""
        return scores(self.sums_6)


def scores(sums_6: Tensor) -> dict[str, float]:
    """Shares of pixels within a factor of 1.25, 1.25² and 1.25³; root of the mean squared error in metres; mean error
    relative to the truth."""
    d1, d2, d3, square, rel = (sums_6[1:] / sums_6[0]).tolist()
    return {"d1": d1, "d2": d2, "d3": d3, "rms": square**0.5, "rel": rel}
