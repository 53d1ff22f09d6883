"""How long an exported encoder takes in ONNX Runtime, next to the encoder itself in PyTorch.

python benchmarks/export_speed.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime
import torch

import asc
from asc.data import SceneConfig, SceneDataset, normalise
from asc.export.onnx import check_onnx, write_onnx

# Size, patch, pixels.
SHAPES = (("tiny", 4, 64), ("tiny", 16, 224), ("small", 16, 224), ("tiny", 16, 512))
IMAGES, ROUNDS = 4, 7


def seconds(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Medians, in turns; the first round does not count."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(ROUNDS + 1):
        for name, function in functions.items():
            begun = time.perf_counter()
            function()
            if number:
                times[name].append(time.perf_counter() - begun)
    return {name: statistics.median(values) for name, values in times.items()}


@torch.no_grad()
def measure(size: str, patch: int, pixels: int) -> None:
    """One line."""
    torch.manual_seed(0)
    scenes = SceneDataset(SceneConfig(size=pixels), length=IMAGES)
    images = normalise(np.stack([scene.frame(0).image_HW3 for scene in scenes]))
    name = f"asc_vit_{size}_patch{patch}"
    ours = asc.create_model(name, image_size=pixels).eval()
    plain = asc.create_model(name, None, image_size=pixels).eval()
    ours.calibrate(images)
    with TemporaryDirectory() as scratch:
        sessions = {}
        for kind, model in (("superpixels", ours), ("plain", plain)):
            file = Path(scratch) / f"{kind}.onnx"
            write_onnx(model, file, (pixels, pixels), {})
            sessions[kind] = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        check = check_onnx(ours, Path(scratch) / "superpixels.onnx", images)
    feed = {"images": images.numpy()}
    functions: dict[str, Callable[[], object]] = {
        f"ONNX Runtime, {kind}": lambda session=session: session.run(None, feed) for kind, session in sessions.items()
    }
    functions |= {"PyTorch, superpixels": lambda: ours(images), "PyTorch, plain": lambda: plain(images)}
    found = seconds(functions)
    unit = found["PyTorch, plain"]
    ratios = ", ".join(f"{name} {value / unit:.2f}" for name, value in found.items())
    print(f"{size}/{patch}, {pixels} px, {(pixels // patch) ** 2} patches: {ratios}; {check}", flush=True)


if __name__ == "__main__":
    for shape in SHAPES:
        measure(*shape)
