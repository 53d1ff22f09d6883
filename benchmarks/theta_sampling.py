"""What it costs to let few rows speak for θ: noise of the sampled gradient next to the noise between batches.

    python benchmarks/theta_sampling.py --checkpoint runs/small/encoder [--spatial]

In images of more than 1,024 tokens the GPU kernels hear some of the rows. Here the contribution of every row to the
gradient of θ is worked out exactly on the CPU, and rows are left out in several ways: all but those of the first
quarter of the images, all but every n-th block of 64, all but every n-th row, or all but those drawn by the length of
their gradients, as the kernels do it. The loss is that of pre-training, on embedded scenes. If the error made by
sampling is small next to how much the exact gradient differs from batch to batch, training cannot tell the two apart.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

import asc
from asc.data import SceneConfig, SceneDataset, normalise
from asc.grouping import gradient
from asc.kernels import gradient as kernel
from asc.pretrain.siamese import Siamese, SiameseConfig

ROWS = 64  # of a block, as in asc.kernels.gradient.Blocks
# All rows of one of so many images.
IMAGES = 4
# Rows that stay together, and how many of them stand for one.
WAYS = ((ROWS, 4), (ROWS, 16), (1, 4), (1, 8), (1, 16))
# One of so many rows drawn by the length of their gradients.
DRAWN = (8, 16)


def slopes_everywhere(
    grad_TC: Tensor, grad_votes_T: Tensor, features_TD: Tensor, theta: Tensor, gate: gradient.Gate
) -> Tensor:
    """What every row adds to minus the gradient of θ, over all pairs."""
    inputs, parts = (grad_TC, grad_votes_T, features_TD, theta, gate), []
    for first, end in pairwise(gate.cu_seqlens.tolist()):
        tiles = [slice(row, min(row + 256, end)) for row in range(first, end, 256)]
        parts += [gradient._slopes_of_tile(*inputs, tile, slice(first, end)).sum(1) for tile in tiles]
    return torch.cat(parts)


def slopes_among_pairs(
    grad_TC: Tensor, grad_votes_T: Tensor, features_TD: Tensor, theta: Tensor, gate: gradient.Gate
) -> Tensor:
    """The same over the pairs that touch."""
    assert gate.pairs_2E is not None
    slope_F = gradient._slopes_of_pairs(grad_TC, grad_votes_T, features_TD, theta, gate)
    return torch.zeros_like(gate.weights_T).index_add(0, gate.pairs_2E.flatten(), slope_F)


class Recorder:
    """Takes the place of the plain gradient: exact, and as sampling would have it, for one layer after another."""

    def __init__(self, slopes_of_rows: Callable[..., Tensor]) -> None:
        self.slopes_of_rows = slopes_of_rows
        self.found: list[list[float]] = []

    def __call__(
        self,
        grad_TC: Tensor,
        grad_votes_T: Tensor,
        features_TD: Tensor,
        theta: Tensor,
        gate: gradient.Gate,
        needs_features: bool = True,
    ) -> tuple[None, Tensor]:
        slope_T = self.slopes_of_rows(grad_TC, grad_votes_T, features_TD, theta, gate)
        images = list(pairwise(gate.cu_seqlens.tolist()))
        heard = -(-len(images) // IMAGES)
        estimates = [0.0] * (2 + len(WAYS) + len(DRAWN))
        for number, (first, end) in enumerate(images):
            row_N = -slope_T[first:end].double()
            estimates[0] += float(row_N.sum())
            estimates[1] += float(row_N.sum()) * len(images) / heard * (number < heard)
            for place, (together, every) in enumerate(WAYS, start=2):
                heard_N = torch.arange(len(row_N)) // together % every == number % every
                estimates[place] += every * float(row_N[heard_N].sum())
            lengths_N = grad_TC[first:end].double().norm(dim=1) + grad_votes_T[first:end].double().abs()
            for place, every in enumerate(DRAWN, start=2 + len(WAYS)):
                estimates[place] += drawn_sum(row_N, lengths_N, every, number)
        self.found.append(estimates)
        return None, theta.new_tensor(estimates[0])


def drawn_sum(row_N: Tensor, lengths_N: Tensor, every: int, number: int) -> float:
    """Sum of all rows as those say that are drawn; see ``asc.kernels.gradient._choose_rows``."""
    chance_N = lengths_N + kernel._LEAST * lengths_N.mean()
    chance_N /= chance_N.sum()
    draws = -(-len(row_N) // every)
    places_K = (torch.arange(draws) + number * 0.6180339887 % 1.0) / draws
    drawn_K = torch.searchsorted(chance_N.cumsum(0), places_K).clamp(max=len(row_N) - 1)
    return float((row_N[drawn_K] / (draws * chance_N[drawn_K])).sum())


def batches(size: int, clips: int, count: int) -> Iterator[Tensor]:
    """Two frames of each scene ``(2, clips, 3, size, size)``."""
    scenes = SceneDataset(SceneConfig(size=size, seed=5), clips * count)
    for batch in range(count):
        chosen = [scenes[batch * clips + clip] for clip in range(clips)]
        frames = [torch.stack([torch.from_numpy(scene.frame(time).image_HW3) for scene in chosen]) for time in (0, 6)]
        yield torch.stack([normalise(frames_BHW3) for frames_BHW3 in frames])


def measure(encoder: asc.AscViT, size: int, clips: int, count: int) -> Tensor:
    """Exact and sampled gradients of θ (batches, layers, 1 + ways)."""
    data = list(batches(size, clips, count))
    encoder.calibrate(data[0].flatten(0, 1))
    torch.manual_seed(0)
    siamese = Siamese(encoder, SiameseConfig(hidden=256)).train()
    spatial = encoder.superpixel_layers[0].config.neighbourhood == "spatial"
    recorder = Recorder(slopes_among_pairs if spatial else slopes_everywhere)
    setattr(gradient, "soft_gradient_among_pairs" if spatial else "soft_gradient_everywhere", recorder)
    results = []
    for images_VB3HW in data:
        recorder.found = []
        siamese(images_VB3HW).loss.backward()
        results.append(recorder.found[::-1])  # gradients come last layer first
    return torch.tensor(results, dtype=torch.float64)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="an encoder of asc pretrain; without one, random weights")
    parser.add_argument("--size", type=int, default=160, help="side of the images in pixels")
    parser.add_argument("--clips", type=int, default=8, help="clips of a batch, two frames each")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--spatial", action="store_true", help="only touching tokens are joined")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    kind = "spatial" if arguments.spatial else "global"
    superpixels = asc.SuperpixelConfig(neighbourhood=kind)
    encoder = asc.create_model("asc_vit_tiny_patch4", superpixels, image_size=arguments.size)
    if arguments.checkpoint is not None:
        encoder = asc.load(arguments.checkpoint)
        for layer in encoder.superpixel_layers:
            layer.config = replace(layer.config, neighbourhood=kind)
    found_BLE = measure(encoder, arguments.size, arguments.clips, arguments.batches)
    print(f"{arguments.batches} batches of {2 * arguments.clips} images of {arguments.size} px\n")
    names = [f"1 of {IMAGES} images"]
    names += [f"1 of {every} " + ("rows" if together == 1 else f"blocks of {together}") for together, every in WAYS]
    names += [f"1 of {every} rows, drawn" for every in DRAWN]
    print("| layer | mean of the exact gradient | σ between batches | error: " + " | ".join(names) + " |")
    print("|---|---|---|" + "---|" * len(names))
    for layer, found_BE in enumerate(found_BLE.unbind(1), start=1):
        exact_B, between = found_BE[:, 0], found_BE[:, 0].std()
        sampled = found_BE[:, 1:].unbind(1)
        errors = [float((sampled_B - exact_B).square().mean().sqrt() / between) for sampled_B in sampled]
        shown = " | ".join(f"{error:.2f} σ" for error in errors)
        print(f"| {layer} | {exact_B.mean():.2e} | {between:.2e} | {shown} |")


if __name__ == "__main__":
    main()
