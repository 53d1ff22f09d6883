"""How fast superpixels are on a CPU: the whole network against the plain ViT, components against K Kᵀ.

    python benchmarks/cpu_forward.py [--out FILE.json]

One 224 × 224 image through tiny/4 (3,136 tokens) with the default budget, calibrated on other embedded scenes,
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


def time_forward(repeats: int) -> dict[str, dict[str, float]]:
    """Seconds and tokens of one image, for the image among 8 whose number of tokens is nearest the budget."""
    torch.manual_seed(0)
    configs = {
        "plain": None,
        "global": asc.SuperpixelConfig(),
        "spatial": asc.SuperpixelConfig(neighbourhood="spatial"),
    }
    models = {name: asc.create_model("asc_vit_tiny_patch4", config).eval() for name, config in configs.items()}
    frames = scene_frames(16, 224)
    shares, functions = {"plain": 1.0}, {"plain": lambda: models["plain"](frames[:1])}
    for name in ("global", "spatial"):
        models[name].calibrate(frames[8:])
        share_of = [token_share(models[name], frames[index : index + 1]) for index in range(8)]
        chosen = min(range(8), key=lambda index: abs(share_of[index] - 0.4))
        shares[name] = share_of[chosen]
        functions[name] = lambda name=name, chosen=chosen: models[name](frames[chosen : chosen + 1])
    seconds = median_times(functions, repeats)
    return {name: {"seconds": seconds[name], "token_share": shares[name]} for name in models}


def token_share(model: asc.AscViT, image: torch.Tensor) -> float:
    """Mean share of the original tokens that enters a block."""
    labels = model.superpixels(image)
    counts, patches = labels.flatten(1).amax(1) + 1, labels[0].numel()
    return (patches + float(counts[:-1].sum())) / patches / len(counts)


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
    for name in ("global", "spatial"):
        ratio = forward[name]["seconds"] / forward["plain"]["seconds"]
        share = forward[name]["token_share"]
        print(
            f"forward, {name}: {ratio:.2f}x the time of the plain ViT (bar {FORWARD_BAR}), at {share:.2f} of its tokens"
        )
    for case, times in parts.items():
        for backend in set(times) - {"product"}:
            ratio = times[backend] / times["product"]
            print(f"components, {case} keys, {backend}: {ratio:.2f}x the time of K Kᵀ (bar {COMPONENTS_BAR} for cpu)")
    if options.out:
        options.out.write_text(json.dumps({"forward": forward, "components": parts}, indent=2) + "\n")


if __name__ == "__main__":
    main()
