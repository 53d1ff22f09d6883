"""How fast superpixels are on a CPU: the whole network against the plain ViT, components against K Kᵀ.

    python benchmarks/cpu_forward.py [--out FILE.json]

One 224 × 224 image through tiny/4 (3,136 tokens) with the default budget, calibrated on embedded scenes,
against the same network without superpixels; and the components of the first block's keys against the
product of the keys alone. All times are medians of one run, so only their ratios mean anything.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import asc
from asc.data import SceneConfig, SceneDataset, normalise
from asc.grouping.components import BACKENDS, components
from asc.grouping.graph import similarity_features

FORWARD_BAR, COMPONENTS_BAR = 0.5, 2.5


def median_times(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each function; they take turns, so that a busy moment hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(repeats + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if round_:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def scene_frames(count: int, size: int) -> torch.Tensor:
    scenes = SceneDataset(SceneConfig(size=size), count)
    return normalise(np.stack([scenes[index].frame(0).image_HW3 for index in range(count)]))


def time_forward(repeats: int) -> dict[str, float]:
    torch.manual_seed(0)
    superpixel, plain = (asc.create_model("asc_vit_tiny_patch4", **kw).eval() for kw in ({}, {"superpixels": None}))
    spatial = asc.create_model("asc_vit_tiny_patch4", superpixels=asc.SuperpixelConfig(neighbourhood="spatial")).eval()
    frames = scene_frames(9, 224)
    for model in (superpixel, spatial):
        model.calibrate(frames[1:])
    image = frames[:1]
    return median_times(
        {
            "plain": lambda: plain(image),
            "superpixels": lambda: superpixel(image),
            "superpixels_spatial": lambda: spatial(image),
        },
        repeats,
    )


def time_components(repeats: int) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    model = asc.create_model("asc_vit_tiny_patch4").eval()
    frames = scene_frames(2, 224)
    model.calibrate(frames)
    tokens, keys_THD = model.blocks[0].attend(model._embed(frames[:1]))
    features = similarity_features(keys_THD.mean(1), tokens.image_of_T(), 1, "cosine", center=True)
    clusters = torch.randn(40, 64)[torch.randint(0, 40, (3136,))]
    cases = {
        "scene": (features, model.superpixel_layers[0].threshold.theta().detach()),
        "random": (torch.nn.functional.normalize(torch.randn(3136, 64)), torch.tensor(0.4)),
        "clustered": (
            torch.nn.functional.normalize(clusters + 0.3 * torch.randn(3136, 64)),
            torch.tensor(0.9),
        ),
        "all joined": (features, torch.tensor(-1.0)),
    }
    times = {}
    for name, (keys, theta) in cases.items():
        functions: dict[str, Callable[[], object]] = {"product": lambda keys=keys: keys @ keys.T}
        for backend in BACKENDS:
            if backend != "reference":
                functions[backend] = lambda keys=keys, theta=theta, backend=backend: components(
                    keys, tokens.cu_seqlens, theta, backend=backend
                )
        times[name] = median_times(functions, repeats)
    return times


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each; the median counts")
    parser.add_argument("--out", type=Path, help="also write the numbers as JSON")
    options = parser.parse_args()
    forward = time_forward(options.repeats)
    parts = time_components(options.repeats)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    for name in ("superpixels", "superpixels_spatial"):
        ratio = forward[name] / forward["plain"]
        print(f"forward, {name}: {ratio:.2f}x the time of the plain ViT (bar {FORWARD_BAR})")
    for case, times in parts.items():
        for backend in set(times) - {"product"}:
            ratio = times[backend] / times["product"]
            print(f"components, {case} keys, {backend}: {ratio:.2f}x the time of K Kᵀ (bar {COMPONENTS_BAR} for cpu)")
    if options.out:
        options.out.write_text(json.dumps({"forward": forward, "components": parts}, indent=2) + "\n")


if __name__ == "__main__":
    main()
