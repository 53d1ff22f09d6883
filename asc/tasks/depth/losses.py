"""Losses of depth. Shape letters: B images, H, W rows and columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Metres below which a logarithm of a prediction would run away.
_LEAST = 1e-3


@dataclass(frozen=True)
class DepthLossConfig:
    """What is minimised; a weight of 0 leaves a part out."""

    l1: float = 0.5
    """Weight of the absolute error in metres."""
    scale_invariant: float = 1.0
    """Weight of the error of the logarithm, in which a common factor of an image counts less."""
    edges: float = 0.5
    """Weight of the steps in the predicted depth where the image has no edge."""
    invariance: float = 0.5
    """How much of an image's common factor is forgiven, from 0 to 1 = all of it."""

    def __post_init__(self) -> None:
        if min(self.l1, self.scale_invariant, self.edges) < 0 or self.l1 + self.scale_invariant == 0:
            raise ValueError(
                f"loss.l1, loss.scale_invariant and loss.edges must not be negative, nor the first two both 0, got "
                f"{self.l1}, {self.scale_invariant} and {self.edges}"
            )
        if not 0 <= self.invariance <= 1:
            raise ValueError(f"loss.invariance must lie between 0 and 1, got {self.invariance}")


def depth_loss(
    depth_BHW: Tensor, truth_BHW: Tensor, valid_BHW: Tensor, images_B3HW: Tensor, config: DepthLossConfig
) -> Tensor:
    """The weighted sum; pixels without a valid truth count in the edges alone, padding (truth below 0) nowhere."""
    loss = depth_BHW.new_zeros(())
    if config.l1:
        loss = loss + config.l1 * l1(depth_BHW, truth_BHW, valid_BHW)
    if config.scale_invariant:
        loss = loss + config.scale_invariant * scale_invariant(depth_BHW, truth_BHW, valid_BHW, config.invariance)
    if config.edges:
        loss = loss + config.edges * edge_aware(depth_BHW, images_B3HW, truth_BHW >= 0)
    return loss


def l1(depth_BHW: Tensor, truth_BHW: Tensor, valid_BHW: Tensor) -> Tensor:
    """Mean absolute error over the valid pixels; 0 if there is none."""
    errors_BHW = (depth_BHW - truth_BHW).abs()
    return torch.where(valid_BHW, errors_BHW, 0).sum() / valid_BHW.sum().clamp(min=1)


def scale_invariant(depth_BHW: Tensor, truth_BHW: Tensor, valid_BHW: Tensor, invariance: float) -> Tensor:
    """Mean over the images of mean(d²) - invariance · mean(d)², with d the difference of logarithms (Eigen 2014)."""
    # Invalid pixels must not make a NaN that even a masked sum would carry into the gradient.
    ones_BHW = torch.ones_like(depth_BHW)
    truth_BHW = torch.where(valid_BHW, truth_BHW, ones_BHW)
    depth_BHW = torch.where(valid_BHW, depth_BHW.clamp(min=_LEAST), ones_BHW)
    differences_BHW = depth_BHW.log() - truth_BHW.log()
    count_B = valid_BHW.sum((1, 2)).clamp(min=1)
    squares_B = differences_BHW.square().sum((1, 2)) / count_B
    means_B = differences_BHW.sum((1, 2)) / count_B
    images = valid_BHW.flatten(1).any(1).sum().clamp(min=1)
    return (squares_B - invariance * means_B.square()).sum() / images


def edge_aware(depth_BHW: Tensor, images_B3HW: Tensor, inside_BHW: Tensor) -> Tensor:
    """Mean step between neighbouring pixels in metres, each weighted by exp(-step of the normalised colours)."""
    total, count = depth_BHW.new_zeros(()), depth_BHW.new_zeros(())
    for axis in (1, 2):
        steps_BHW = depth_BHW.diff(dim=axis).abs()
        weights_BHW = (-images_B3HW.diff(dim=axis + 1).abs().mean(1)).exp()
        ends = depth_BHW.shape[axis] - 1
        both_BHW = inside_BHW.narrow(axis, 0, ends) & inside_BHW.narrow(axis, 1, ends)
        total = total + torch.where(both_BHW, steps_BHW * weights_BHW, 0).sum()
        count = count + both_BHW.sum()
    return total / count.clamp(min=1)
