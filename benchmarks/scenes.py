"""Speed of the scene generator on one core, next to decoding JPEGs of the same size from memory.

Run: python benchmarks/scenes.py
"""

import io
import os
import time
from collections.abc import Callable

import numpy as np
from PIL import Image

from asc.data import Scene, SceneConfig

SECONDS = 1.5


def per_second(work: Callable[[int], int]) -> float:
    """Frames per second of ``work(i)``, which returns how many frames it made."""
    work(0)
    frames, i, start = 0, 1, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        frames += work(i)
        i += 1
    return frames / (time.perf_counter() - start)


def as_jpeg(image_HW3: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image_HW3).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def measure(size: int) -> None:
    config = SceneConfig(size=size)
    files = [as_jpeg(Scene(config, i).frame(0).image_HW3) for i in range(16)]

    def whole_clip(i: int) -> int:
        return len(Scene(config, i).clip())

    def pair(i: int) -> int:
        # As in pre-training: two frames of a scene, which then pay for all of its preparation.
        scene = Scene(config, i)
        return len([scene.frame(t) for t in (2, 9)])

    def decode(i: int) -> int:
        np.asarray(Image.open(io.BytesIO(files[i % len(files)])))
        return 1

    clip_rate, pair_rate, peer_rate = per_second(whole_clip), per_second(pair), per_second(decode)
    print(
        f"{size:4d} px   clips {clip_rate:6.0f} frames/s ({clip_rate / peer_rate:.2f} of JPEG)   "
        f"pairs {pair_rate:6.0f} frames/s ({pair_rate / peer_rate:.2f})   JPEG {peer_rate:6.0f} frames/s"
    )


if __name__ == "__main__":
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core, as a worker would have
    for side in (64, 96, 224):
        measure(side)
