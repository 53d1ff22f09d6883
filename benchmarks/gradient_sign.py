"""Does the gradient of a grouping point the right way?

    python benchmarks/gradient_sign.py

Sign of the gradient of θ and of the keys against a smoothed finite difference of the loss, on small problems where
merging more is right in about half of the cases. Prints the share of agreeing signs for several settings.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asc import AdaptiveSuperpixelLayer, SuperpixelConfig, SuperpixelWarning, Tokens

ROWS, COLUMNS, CHANNELS = 6, 8, 8
KEEPS = (0.5, 0.65, 0.8, 0.9)
# Deviation of the smoothing, in u and as a share of the keys' norm.
SMOOTHING = 0.3


class SmallProblem:
    """One superpixel layer, a fixed MLP, one vote for each superpixel, the paper's loss to a random target.

    Tokens lie in coherent regions. Keys follow the regions in even cases and nothing in odd ones, so that
    merging more is right in some cases and wrong in others.
    """

    def __init__(self, seed: int, keep: float, votes: bool, **settings: object) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        centres = torch.rand(5, 2, generator=generator) * torch.tensor([ROWS, COLUMNS])
        places = torch.cartesian_prod(torch.arange(ROWS), torch.arange(COLUMNS)) + 0.5
        region = torch.cdist(places, centres).argmin(1)
        self.values = normal(5, CHANNELS)[region] + 0.7 * normal(len(region), CHANNELS)
        self.keys = normal(5, CHANNELS)[region] + 0.5 * normal(len(region), CHANNELS)
        if seed % 2:
            self.keys = normal(len(region), CHANNELS)
        self.first, self.second = normal(CHANNELS, 32) / CHANNELS**0.5, normal(32, CHANNELS) / 32**0.5
        self.wanted = F.normalize(normal(CHANNELS), dim=0)
        self.votes = votes
        self.layer = AdaptiveSuperpixelLayer(
            CHANNELS, SuperpixelConfig(threshold="learnable", key_gradient=1.0, **settings)
        )  # type: ignore[arg-type]
        self.layer.calibrate(self.tokens(), self.keys, keep)
        self.half = torch.rand(len(region), 1, generator=generator) < 0.5

    def tokens(self) -> Tokens:
        return Tokens.from_dense(self.values[None], (ROWS, COLUMNS))

    def loss(self, keys: Tensor) -> Tensor:
        merged = self.layer(self.tokens(), keys)
        values = F.gelu(merged.values_TC @ self.first) @ self.second
        pooled = merged.with_values(values).mean_BC() if self.votes else values.mean(0, keepdim=True)
        return 2 - 2 * F.normalize(pooled[0], dim=0) @ self.wanted


class Agreement(NamedTuple):
    """Shares of the cases."""

    theta: float
    keys: float
    rising: float
    """Cases in which merging more raises the loss; near 0.5, so that a constant guess does not pass."""
    cases: int


def agreement(seeds: int, votes: bool = True, **settings: object) -> Agreement:
    """How often the signs agree. ``votes=False`` hides from the gradient that joined superpixels lose votes."""
    theta = keys = rising = cases = 0
    for keep in KEEPS:
        for seed in range(seeds):
            problem = SmallProblem(seed, keep, votes, **settings)
            by_u, by_keys, grad_u = _slopes(problem)
            cases += 1
            rising += by_u > 0
            theta += (by_u > 0) == (grad_u > 0)
            keys += by_keys > 0
    return Agreement(theta / cases, keys / cases, rising / cases, cases)


def _slopes(problem: SmallProblem) -> tuple[float, float, float]:
    """Smoothed slopes of the loss by u and along the keys' gradient, and the gradient of u."""
    leaf = problem.keys.clone().requires_grad_()
    problem.loss(leaf).backward()
    assert leaf.grad is not None
    u = problem.layer.threshold.u
    start = u.item()
    # Along the gradient of a random half of the keys: the loss must rise that way.
    direction = leaf.grad * problem.half
    direction = direction * problem.keys.norm() / direction.norm()

    def moved_threshold(step: float) -> Tensor:
        u.fill_(start + step)
        return problem.loss(problem.keys)

    with torch.no_grad():
        by_keys = smoothed_slope(lambda step: problem.loss(problem.keys + step * direction))
        return smoothed_slope(moved_threshold), by_keys, float(u.grad)


def smoothed_slope(function: Callable[[float], Tensor]) -> float:
    """Slope at 0 of the function smoothed by a normal distribution, up to a positive factor."""
    steps = torch.linspace(-2.5, 2.5, 41)
    density = torch.exp(-(steps**2) / 2)
    losses = torch.stack([function(SMOOTHING * step) for step in steps.tolist()])
    return float((density * (losses - losses.mean()) * steps).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=16, help="cases for each of four shares of kept tokens")
    seeds = parser.parse_args().seeds
    warnings.simplefilter("ignore", SuperpixelWarning)
    torch.set_num_threads(1)
    print("| neighbourhood | twin | τ | θ agrees | keys agree | merging more is wrong | cases |")
    print("|---|---|---|---|---|---|---|")
    for neighbourhood in ("global", "spatial"):
        rows = [("straight_through", tau, votes) for votes in (False, True) for tau in (0.1, 0.2, 0.5)]
        for gradient, tau, votes in [*rows, ("bottleneck", 0.2, True)]:
            found = agreement(seeds, votes, neighbourhood=neighbourhood, gradient=gradient, tau=tau)
            twin = gradient.replace("_", " ") + ("" if votes else ", no votes")
            print(
                f"| {neighbourhood} | {twin} | {tau} | {found.theta:.0%} | {found.keys:.0%} "
                f"| {found.rising:.0%} | {found.cases} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
