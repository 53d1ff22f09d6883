"""Does the loader feed the network fast enough?

    python benchmarks/loader.py --data SHARDS [--workers 16]

Reads batches of the recipe ``small`` as training does, without training: first as they come, then once more when all
frames are in memory. Then trains for a few steps on one batch that is already there, and prints how many times faster
the loader is than the network.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from asc.data.sampling import BatchPlan
from asc.pretrain.data import open_corpora
from asc.pretrain.run import PretrainTask, scene_split
from asc.recipes.pretrain import small
from asc.train import make_optimiser

WARM, MEASURED = 8, 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", required=True, help="prepared shards or a folder of videos")
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1))
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for plain in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            config = replace(small(), data=(arguments.data,), plain=plain)
            corpora = open_corpora(config.data, config.clips, 0, Path(folder))
            task = PretrainTask(config, corpora, scene_split(config.clips.scene, 10, 10)).to(device)
            task.start(device)
            first, batch = loader_rate(task, config.train.batch, arguments.workers, device)
            for clips in task.corpora:
                for clip in range(len(clips)):
                    clips.read(clip, range(clips.num_frames(clip)))
            later, batch = loader_rate(task, config.train.batch, arguments.workers, device)
            used = network_rate(task, batch, device)
        name = "plain" if plain else "superpixels"
        loaded = f"loader {first:.0f} frames/s, {later:.0f} from memory, with {arguments.workers} workers"
        print(f"{name}: {loaded}; network {used:.0f} frames/s: {first / used:.2f}x, {later / used:.2f}x", flush=True)


def loader_rate(task: PretrainTask, batch: int, workers: int, device: torch.device) -> tuple[float, torch.Tensor]:
    """Frames a second that arrive on the device, not yet augmented; and one augmented batch."""
    plan = BatchPlan(0, (WARM + MEASURED) * batch, batch)
    begun = 0.0
    for number, loaded in enumerate(task.batches(plan, workers, pin=device.type == "cuda")):
        if number == WARM:
            begun = time.perf_counter()
        frames = loaded.frames.to(device, non_blocking=True) if isinstance(loaded.frames, torch.Tensor) else loaded
        del frames
    seconds = time.perf_counter() - begun
    return MEASURED * batch * task.config.clips.frames.views / seconds, task.prepare(loaded, device)


def network_rate(task: PretrainTask, images: torch.Tensor, device: torch.device) -> float:
    """Frames a second that the network learns from when it never waits for data."""
    optimiser = make_optimiser(task, task.config.train)
    steps = 24 if device.type == "cuda" else 2
    begun = 0.0
    for step in range(steps + 4):
        if step == 4:
            _wait(device)
            begun = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = task(images).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        task.after_step(0.1)
    _wait(device)
    return steps * images.shape[0] * images.shape[1] / (time.perf_counter() - begun)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
