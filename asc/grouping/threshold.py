"""The threshold of one block: fixed, learned by gradient, or held to a share of tokens by a controller.

Kept as ``u`` on a scale where equal steps matter equally. Cosine similarities of keys crowd just below 1,
so there ``θ = 1 - exp(u)``; the scaled dot product has no bounds, so there ``θ = -sinh(u)``. On both a
larger u is a lower threshold and merges more.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from asc.grouping.graph import Similarity
from asc.precision import NeverHalf

ThresholdKind = Literal["budget", "learnable", "fixed"]

# For cosines 1 - θ is kept between 2⁻²⁰, where fp32 similarities end, and the largest distance, where all are joined.
_SMALLEST_DISTANCE = 2.0**-20
_DOT_RANGE = (-12.0, 12.0)

# The controller's step in u for an error of 1 in the log-odds of the kept share. Log-odds, because near 0 and
# 1 the share itself hardly moves while the threshold is still far away. A step in u moves the log-odds by 1 to
# 6, measured over blocks and neighbourhoods: the gain follows drifting keys within a few optimiser steps and
# keeps below 2 divided by that slope, where it would start to swing.
_GAIN = 0.3
_LARGEST_STEP = 0.5
# With a handful of tokens left in an image the slope can be far steeper. An error that jumps from one side to the
# other, by more than the noise of a batch, shows it: then the block's gain is halved, and recovers slowly.
_SWING, _CALM = 1.0, 1.02


class Threshold(NeverHalf):
    """Threshold θ of one superpixel layer and, for ``budget``, its controller.

    Args:
        kind: ``budget`` moves θ so that the layer keeps ``keep`` of its tokens; ``learnable`` makes it a
            parameter; ``fixed`` leaves it where it is.
        similarity: The similarity it is compared with; sets its scale and range.
        theta: The starting value; cosine: in [-1, 1).
        keep: Share of its input tokens that a ``budget`` layer should keep, in (0, 1).
        largest: Largest 1 - S of two tokens (cosine); more than 2 where sizes count.
    """

    u: Tensor
    calibrated: Tensor
    target: Tensor
    gain: Tensor
    last_error: Tensor

    def __init__(
        self, kind: ThresholdKind, similarity: Similarity, theta: float, keep: float = 0.8, largest: float = 2.0
    ) -> None:
        super().__init__()
        if kind not in ("budget", "learnable", "fixed"):
            raise ValueError(f"unknown threshold {kind!r}; choose from budget, learnable, fixed")
        self.kind = kind
        self.similarity = similarity
        self.largest = largest
        start = torch.tensor(self.u_of(theta), dtype=torch.float32)
        if kind == "learnable":
            self.u = nn.Parameter(start)
        else:
            self.register_buffer("u", start)
        self.register_buffer("calibrated", torch.tensor(kind != "budget"))
        self.register_buffer("target", torch.tensor(_checked_keep(keep), dtype=torch.float32))
        self.register_buffer("gain", torch.tensor(_GAIN))
        self.register_buffer("last_error", torch.tensor(0.0))
        self.reset_counts()

    @property
    def u_range(self) -> tuple[float, float]:
        """Smallest and largest value of u."""
        if self.similarity == "dot":
            return _DOT_RANGE
        return math.log(_SMALLEST_DISTANCE), math.log(self.largest)

    def u_of(self, theta: float) -> float:
        """The value of u that gives ``theta``."""
        if self.similarity == "dot":
            if not math.isfinite(theta):
                raise ValueError(f"theta must be finite, got {theta}")
            return -math.asinh(theta)
        if not 1.0 - self.largest <= theta < 1.0:
            raise ValueError(f"theta must lie in [{1 - self.largest:g}, 1) for cosine similarity, got {theta}")
        return max(math.log(1.0 - theta), self.u_range[0])

    def theta(self, target: Tensor | None = None) -> Tensor:
        """θ as a scalar tensor.

        A differentiable ``target`` share receives the gradient in θ's place (a higher θ keeps more): a
        gradient on θ itself would be undone by the controller.
        """
        theta = 1.0 - self.u.exp() if self.similarity == "cosine" else -self.u.sinh()
        if target is not None:
            theta = _GradientToTarget.apply(theta.detach(), target, self.width())
        return theta

    def width(self) -> Tensor:
        """How much θ changes with u, here: the natural unit for the softness of the gate."""
        with torch.no_grad():
            return self.u.exp() if self.similarity == "cosine" else self.u.cosh()

    @torch.no_grad()
    def set_theta(self, theta: float) -> None:
        """Put θ somewhere by hand; the threshold counts as calibrated from then on."""
        self.u.fill_(self.u_of(theta))
        self.calibrated.fill_(True)

    def count(self, tokens_in: int, tokens_out: int) -> None:
        """Remember what a forward pass kept, for the next ``update``."""
        self.tokens_in += tokens_in
        self.tokens_out += tokens_out

    def reset_counts(self) -> None:
        """Forget all counts."""
        self.tokens_in = 0
        self.tokens_out = 0

    @torch.no_grad()
    def control(self, kept: float) -> None:
        """Move θ once towards keeping the target share, given the share that was kept."""
        if self.kind == "budget":
            state = self.controlled(float(self.target), kept, *(float(tensor) for tensor in self.controller()))
            for tensor, value in zip(self.controller(), state, strict=True):
                tensor.fill_(value)

    def controller(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the controller moves: u, its gain, and the error it saw last."""
        return self.u, self.gain, self.last_error

    def controlled(
        self, target: float, kept: float, u: float, gain: float, last_error: float
    ) -> tuple[float, float, float]:
        """The controller's state after one step, from numbers that the host has already; in fp32 as it is kept."""
        error = _log_odds(kept) - _log_odds(target)
        swings = error * last_error < 0 and abs(error - last_error) > _SWING
        new_gain = min(np.float32(gain) * np.float32(0.5 if swings else _CALM), np.float32(_GAIN))
        step = min(max(float(new_gain) * error, -_LARGEST_STEP), _LARGEST_STEP)
        low, high = (np.float32(end) for end in self.u_range)
        new_u = min(max(np.float32(u) + np.float32(step), low), high)
        return float(new_u), float(new_gain), error


class _GradientToTarget(torch.autograd.Function):
    """θ itself, whose gradient goes to the target share: ``target * width`` would have the same."""

    @staticmethod
    def forward(ctx: Any, theta: Tensor, target: Tensor, width: Tensor) -> Tensor:
        ctx.save_for_backward(width)
        ctx.target_dtype = target.dtype
        return theta.view_as(theta)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (width,) = ctx.saved_tensors
        return None, (grad * width).to(ctx.target_dtype), None


def _log_odds(share: float) -> float:
    share = min(max(share, 1e-4), 1 - 1e-4)
    return math.log(share / (1 - share))


def _checked_keep(keep: float) -> float:
    if not 0.0 < keep <= 1.0:
        raise ValueError(f"keep must lie in (0, 1], got {keep}")
    return keep
