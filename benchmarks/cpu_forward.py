"""How fast a network with superpixels is on a CPU, next to the plain ViT.

    python benchmarks/cpu_forward.py [--out FILE.json]

One 224 × 224 image through tiny/4 (3,136 tokens) with the default budget, calibrated on other embedded scenes,
against the same network without superpixels. All times are medians of one run, so only their ratios mean anything.
Components alone, against the product of the keys: ``asc bench --only cpu``.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch

import asc
from asc.bench.inputs import scene_frames
from asc.bench.measure import take_turns, warm_up

BAR = 0.5


def time_forward(repeats: int) -> dict[str, dict[str, float]]:
    """Seconds and tokens of one image, for the image among 8 whose number of tokens is nearest the budget."""
    torch.manual_seed(0)
    configs = {
        "plain": None,
        "global": asc.SuperpixelConfig(),
        "spatial": asc.SuperpixelConfig(neighbourhood="spatial"),
    }
    models = {name: asc.create_model("asc_vit_tiny_patch4", config).eval() for name, config in configs.items()}
    frames = scene_frames(16, 224, torch.device("cpu"))
    shares, functions = {"plain": 1.0}, {"plain": lambda: models["plain"](frames[:1])}
    for name in ("global", "spatial"):
        models[name].calibrate(frames[8:])
        share_of = [token_share(models[name], frames[index : index + 1]) for index in range(8)]
        chosen = min(range(8), key=lambda index: abs(share_of[index] - 0.4))
        shares[name] = share_of[chosen]
        functions[name] = lambda name=name, chosen=chosen: models[name](frames[chosen : chosen + 1])
    working, failed = warm_up(functions, calls=1)
    assert not failed, failed
    times = take_turns(working, torch.device("cpu"), repeats, float("inf"))
    return {name: {"seconds": times[name].ms / 1e3, "token_share": shares[name]} for name in models}


def token_share(model: asc.AscViT, image: torch.Tensor) -> float:
    """Mean share of the original tokens that enters a block."""
    labels = model.superpixels(image)
    counts, patches = labels.flatten(1).amax(1) + 1, labels[0].numel()
    return (patches + float(counts[:-1].sum())) / patches / len(counts)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each; the median counts")
    parser.add_argument("--out", type=Path, help="also write the numbers as JSON")
    options = parser.parse_args()
    forward = time_forward(options.repeats)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    for name in ("global", "spatial"):
        ratio = forward[name]["seconds"] / forward["plain"]["seconds"]
        share = forward[name]["token_share"]
        print(f"{name}: {ratio:.2f}x the time of the plain ViT (bar {BAR}), at {share:.2f} of its tokens")
    if options.out:
        options.out.write_text(json.dumps(forward, indent=2) + "\n")


if __name__ == "__main__":
    main()
