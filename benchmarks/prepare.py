"""Speed of preparation next to bare PyAV decoding of the same files, with as many processes, in the same run.

The sources are photographs under a moving camera with sensor noise: H.264, 30 frames a second; by default 1280 x 720
and 2.5 Mbit/s, as videos on the web have. They are sampled at 16 a second, resized to a shorter side of 256, and cut
to 224.

Run: python benchmarks/prepare.py
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import av
import numpy as np
import tyro
from PIL import Image
from skimage import data

from asc.data.prepare import PrepareSettings, Source, Task, make_tasks, prepare, write_shard
from asc.data.shards import ShardList

RATE = 30
PHOTOGRAPHS = ("astronaut", "coffee", "chelsea", "rocket")


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    files: int = 8
    """Number of videos."""
    frames: int = 150
    """Frames of each."""
    workers: int = 2
    """Processes."""
    rounds: int = 5
    """Rounds, in which both take turns."""
    fps: float = 16.0
    """Frames a second that are kept."""
    width: int = 1280
    """Columns of the videos."""
    height: int = 720
    """Rows of the videos."""
    bit_rate: int = 2_500_000
    """Bits a second of the videos."""
    seed: int = 0
    """Start of the random draws for noise and paths."""


def write_video(path: Path, photograph: str, settings: Settings, seed: int) -> None:
    """A camera that wanders over a photograph."""
    rng = np.random.default_rng((settings.seed, seed))
    width, height = settings.width, settings.height
    picture = Image.fromarray(getattr(data, photograph)()).convert("RGB")
    scale = 1.5 * max(width / picture.width, height / picture.height)
    picture = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.LANCZOS)
    wide_HW3 = np.asarray(picture).astype(np.int16)
    room = np.array([wide_HW3.shape[0] - height, wide_HW3.shape[1] - width])
    speed, phase = rng.uniform(0.5, 1.5, 2), rng.uniform(0, 2 * np.pi, 2)
    noise_HW3 = rng.normal(0, 3, (height + 64, width + 64, 3)).round().astype(np.int16)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=RATE, options={"preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = width, height, "yuv420p", settings.bit_rate
        for number in range(settings.frames):
            top, left = (room * (0.5 + 0.5 * np.sin(phase + speed * number / RATE))).astype(int)
            y, x = rng.integers(0, 64, 2)
            noisy = wide_HW3[top : top + height, left : left + width] + noise_HW3[y : y + height, x : x + width]
            frame = av.VideoFrame.from_ndarray(noisy.clip(0, 255).astype(np.uint8), "rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def decode(path: Path) -> float:
    """Bare PyAV; returns the processor's time."""
    begun = time.process_time()
    with av.open(str(path)) as container:
        container.streams.video[0].thread_count = 1
        for _ in container.decode(video=0):
            pass
    return time.process_time() - begun


def shard(task: Task) -> float:
    """A shard of one video; returns the processor's time."""
    begun = time.process_time()
    write_shard(task, abs)
    return time.process_time() - begun


def timed(pool: ProcessPoolExecutor, work: Callable[[object], float], items: Sequence[object]) -> tuple[float, float]:
    """Seconds on the wall and of the processors."""
    begun = time.perf_counter()
    processor = sum(pool.map(work, items))
    return time.perf_counter() - begun, processor


def measure(settings: Settings, root: Path) -> None:
    src, dst = root / "src", root / "dst"
    src.mkdir()
    dst.mkdir()
    for number in range(settings.files):
        write_video(src / f"{number}.mp4", PHOTOGRAPHS[number % len(PHOTOGRAPHS)], settings, number)
    files = sorted(src.iterdir())
    rate = sum(path.stat().st_size for path in files) * 8 / (settings.files * settings.frames / RATE) / 1e6
    total = settings.files * settings.frames
    print(
        f"{settings.files} videos of {settings.frames} frames, {settings.width}x{settings.height}, {rate:.1f} Mbit/s",
        end=", ",
    )
    print(f"{settings.workers} processes, median of {settings.rounds} rounds, seed {settings.seed}")
    wanted = PrepareSettings(src, dst, fps=settings.fps, shard_clips=1, workers=settings.workers)
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    tasks = make_tasks(wanted, [Source(*state, 1) for state in states])
    walls: list[tuple[float, float]] = []
    processors: list[tuple[float, float]] = []
    with ProcessPoolExecutor(settings.workers, multiprocessing.get_context("forkserver")) as pool:
        timed(pool, decode, files)
        timed(pool, shard, tasks)
        for _ in range(settings.rounds):
            bare, ours = timed(pool, decode, files), timed(pool, shard, tasks)
            walls.append((bare[0], ours[0]))
            processors.append((bare[1], ours[1]))
    for name, times in (("wall clock", walls), ("processor time", processors)):
        bare, ours = (total / statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(bare_time / our_time for bare_time, our_time in times)
        print(f"{name}: bare {bare:.0f} decoded frames/s, prepare {ours:.0f}, ratio {ratio:.2f} (bar 0.8)")
    clips = [clip for number in range(len(tasks)) for clip in ShardList.load(dst, number).clips]
    sizes = [size for clip in clips for size in clip.frame_bytes]
    print(f"{len(sizes)} frames written, {statistics.mean(sizes) / 1000:.1f} kB each")
    report = prepare(replace(wanted, dst=root / "whole"))
    print(f"the whole command, with the start of its processes: {total / report.seconds:.0f} decoded frames/s")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        measure(tyro.cli(Settings), Path(folder))
