"""Our shards next to litdata and webdataset: random reads, resuming, mixing, streaming, in one run on the same frames.

Needs the two: pip install litdata webdataset. Run: python benchmarks/shards.py
"""

from __future__ import annotations

import functools
import http.server
import io
import os
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from PIL import Image
from skimage import data
from torch.utils.data import DataLoader

from asc.data.shards import ShardedClips, ShardWriter, decode_frame, shard_name, write_index

# Its announcement to leave torchvision, and what the others say on their own matters.
warnings.filterwarnings("ignore")
PHOTOGRAPHS = ("astronaut", "coffee", "chelsea", "rocket")
BATCH, BATCHES_BEFORE = 8, 5


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    clips: int = 384
    """Number of clips."""
    frames: int = 48
    """Frames of each: three seconds at 16 a second, as in Moments in Time."""
    size: int = 224
    """Side of the frames in pixels."""
    rounds: int = 5
    """Rounds, in which all take turns."""
    seed: int = 0
    """Start of all random draws."""


# ---------------------------------------------------------------------------------------------- the frames


@functools.cache
def photograph(name: str, size: int) -> Image.Image:
    return Image.fromarray(getattr(data, name)()).convert("RGB").resize((2 * size, 2 * size), Image.Resampling.LANCZOS)


def jpegs(settings: Settings, clip: int) -> list[bytes]:
    """The frames of a clip: a window that wanders over a photograph."""
    rng = np.random.default_rng((settings.seed, clip))
    start, step, size = rng.uniform(0, settings.size, 2), rng.uniform(-2, 2, 2), settings.size
    made = []
    for frame in range(settings.frames):
        left, top = (int(x) for x in (start + step * frame).clip(0, size))
        file = io.BytesIO()
        picture = photograph(PHOTOGRAPHS[clip % len(PHOTOGRAPHS)], size)
        picture.crop((left, top, left + size, top + size)).save(file, "JPEG", quality=90)
        made.append(file.getvalue())
    return made


def write_ours(settings: Settings, folder: Path, shard_clips: int = 64) -> None:
    folder.mkdir()
    shards = range(0, settings.clips, shard_clips)
    for number, first in enumerate(shards):
        with ShardWriter(folder, number) as shard:
            for clip in range(first, min(first + shard_clips, settings.clips)):
                shard.begin_clip(f"{clip}.mp4", f"{clip:064x}", 0.0)
                for jpeg in jpegs(settings, clip):
                    shard.add_frame(jpeg)
            shard.finish({})
    write_index(folder, len(shards))


def lit_clip(settings: Settings, clip: int) -> dict[str, object]:
    return {"clip": clip} | {f"{number:04d}": jpeg for number, jpeg in enumerate(jpegs(settings, clip))}


def lit_frames(settings: Settings, clip: int) -> Iterator[bytes]:
    yield from jpegs(settings, clip)


def write_litdata(settings: Settings, folder: Path, make: Callable[..., object]) -> None:
    import litdata

    clips = list(range(settings.clips))
    litdata.optimize(
        functools.partial(make, settings), clips, str(folder), chunk_bytes="64MB", num_workers=1, verbose=False
    )


# -------------------------------------------------------------------------------------------- random reads


def two_frames(settings: Settings, clip: int, epoch: int) -> list[int]:
    rng = np.random.default_rng((settings.seed, epoch, clip))
    return [int(x) for x in rng.choice(settings.frames, 2, replace=False)]


def ours(settings: Settings, root: Path, epoch: int) -> Iterator[list[np.ndarray]]:
    clips = ShardedClips(root / "ours")
    for clip in clips.order(np.random.default_rng((settings.seed, epoch))).tolist():
        yield clips.read(clip, two_frames(settings, clip, epoch))


def litdata_clips(settings: Settings, root: Path, epoch: int) -> Iterator[list[np.ndarray]]:
    import litdata

    for sample in litdata.StreamingDataset(str(root / "lit_clips"), shuffle=True, seed=settings.seed + epoch):
        wanted = two_frames(settings, int(sample["clip"]), epoch)
        yield [decode_frame(bytearray(sample[f"{number:04d}"])) for number in wanted]


def litdata_frames(settings: Settings, root: Path, epoch: int) -> Iterator[list[np.ndarray]]:
    import litdata

    frames = litdata.StreamingDataset(str(root / "lit_frames"))
    for clip in np.random.default_rng((settings.seed, epoch)).permutation(settings.clips).tolist():
        places = [clip * settings.frames + number for number in two_frames(settings, clip, epoch)]
        yield [decode_frame(bytearray(frames[place])) for place in places]


def webdataset_clips(settings: Settings, root: Path, epoch: int) -> Iterator[list[np.ndarray]]:
    import webdataset

    shards = sorted(str(path) for path in (root / "ours").glob("*.tar"))
    stream = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=settings.seed + epoch).shuffle(settings.clips)
    for clip, sample in enumerate(stream):
        wanted = two_frames(settings, clip, epoch)
        yield [decode_frame(bytearray(sample[f"{number:04d}.jpg"])) for number in wanted]


def measure_reads(settings: Settings, root: Path) -> None:
    contestants = (ours, litdata_clips, litdata_frames, webdataset_clips)
    rates: dict[str, list[float]] = {contestant.__name__: [] for contestant in contestants}
    for epoch in range(settings.rounds + 1):
        for contestant in contestants:
            begun = time.perf_counter()
            count = sum(len(frames) == 2 for frames in contestant(settings, root, epoch))
            assert count == settings.clips, (contestant.__name__, count)
            # The first round fills the system's cache of files.
            if epoch:
                rates[contestant.__name__].append(count / (time.perf_counter() - begun))
    base = rates["ours"]
    for name, values in rates.items():
        ratio = statistics.median(own / other for own, other in zip(base, values, strict=True))
        print(f"  {name:18s} {statistics.median(values):7.0f} clips/s   ours is {ratio:5.2f} times as fast")


# ------------------------------------------------------------------------------------------------ resuming


class Numbers:
    """Our clips as a dataset that gives their numbers, after reading a frame."""

    def __init__(self, clips: ShardedClips) -> None:
        self.clips = clips

    def __getitem__(self, clip: int) -> int:
        self.clips.read(clip, [0])
        return clip


def our_loader(root: Path, seed: int, position: int, workers: int) -> DataLoader[int]:
    clips = ShardedClips(root / "ours")
    order = clips.order(np.random.default_rng(seed)).tolist()
    return DataLoader(Numbers(clips), BATCH, sampler=order[position:], num_workers=workers, collate_fn=list)  # type: ignore[arg-type]


def clip_numbers(samples: Sequence[dict[str, object]]) -> list[object]:
    return [sample["clip"] for sample in samples]


def lit_loader(root: Path, seed: int, workers: int, state: dict[str, object] | None = None) -> DataLoader[object]:
    import litdata

    dataset = litdata.StreamingDataset(str(root / "lit_clips"), shuffle=True, seed=seed)
    loader = litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers, collate_fn=clip_numbers)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def verdict(before: list[int], rest: list[int], undisturbed: list[int]) -> str:
    is_same = before + rest == undisturbed
    is_complete = sorted(before + rest) == sorted(undisturbed)
    return f"same order: {'yes' if is_same else 'no'}, every clip once: {'yes' if is_complete else 'no'}"


def flat(batches: Iterator[list[int]], count: int | None = None) -> list[int]:
    return [clip for number, batch in enumerate(batches) if count is None or number < count for clip in batch]


def measure_resume(settings: Settings, root: Path) -> None:
    whole = flat(iter(our_loader(root, settings.seed, 0, workers=2)))
    for workers in (1, 3):
        rest = flat(iter(our_loader(root, settings.seed, BATCH * BATCHES_BEFORE, workers)))
        print(f"  ours, 2 workers, then {workers}: {verdict(whole[: BATCH * BATCHES_BEFORE], rest, whole)}")
    for workers in (2, 1, 3):
        whole = flat(iter(lit_loader(root, settings.seed, workers=2)))
        loader = lit_loader(root, settings.seed, workers=2)
        batches = iter(loader)
        before = [clip for _ in range(BATCHES_BEFORE) for clip in next(batches)]
        state = loader.state_dict()
        del batches
        try:
            rest = flat(iter(lit_loader(root, settings.seed, workers, state)))
            print(f"  litdata, 2 workers, then {workers}: {verdict(before, rest, whole)}")
        except Exception as error:
            print(f"  litdata, 2 workers, then {workers}: {type(error).__name__}: {str(error)[:100]}")
    import webdataset

    has_state = any(hasattr(kind, "state_dict") for kind in (webdataset.WebDataset, webdataset.WebLoader))
    print(f"  webdataset: keeps a position: {'yes' if has_state else 'no'}")


# ------------------------------------------------------------------------------------- mixing and streaming


def measure_mixing(settings: Settings, root: Path) -> None:
    import litdata
    import webdataset

    def lit(workers: int, state: dict[str, object] | None = None) -> DataLoader[object]:
        parts = [litdata.StreamingDataset(str(root / "lit_clips"), shuffle=True, seed=seed) for seed in (0, 1)]
        mixed = litdata.CombinedStreamingDataset(parts, seed=settings.seed, weights=[0.7, 0.3], iterate_over_all=False)
        loader = litdata.StreamingDataLoader(mixed, batch_size=BATCH, num_workers=workers, collate_fn=clip_numbers)
        if state is not None:
            loader.load_state_dict(state)
        return loader

    first, second = (flat(iter(lit(workers)), 2 * BATCHES_BEFORE) for workers in (2, 1))
    print(f"  litdata: yes; same samples with 2 and 1 workers: {'yes' if first == second else 'no'}")
    for workers in (2, 1):
        loader = lit(2)
        batches = iter(loader)
        before = [clip for _ in range(BATCHES_BEFORE) for clip in next(batches)]
        try:
            rest = flat(iter(lit(workers, loader.state_dict())), BATCHES_BEFORE)
            outcome = f"same order: {'yes' if before + rest == first else 'no'}"
        except Exception as error:
            outcome = f"{type(error).__name__}: {str(error)[:100]}"
        print(f"  litdata, a mixture resumed, 2 workers, then {workers}: {outcome}")
    shards = [str(path) for path in sorted((root / "ours").glob("*.tar"))]
    mix = webdataset.RandomMix([webdataset.WebDataset(shards, shardshuffle=False) for _ in range(2)], [0.7, 0.3])
    print(
        f"  webdataset: yes ({sum(1 for _, _ in zip(mix, range(20), strict=False))} samples drawn); no seed of its own"
    )
    print("  ours: not in the reader; clips are read by number, so whoever numbers them mixes them")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *_: object) -> None:
        pass


def measure_streaming(settings: Settings, root: Path) -> None:
    import litdata
    import webdataset

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(root)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"

    def stream_ours() -> int:
        clips = ShardedClips(f"{url}/ours", cache=root / "cache")
        order = clips.order(np.random.default_rng(settings.seed))
        return sum(len(clips.read(int(clip), [0, 1])) == 2 for clip in order)

    def stream_litdata() -> int:
        return sum(1 for _ in litdata.StreamingDataset(f"{url}/lit_clips"))

    def stream_webdataset() -> int:
        return sum(1 for _ in webdataset.WebDataset(f"{url}/ours/{shard_name(0)}", shardshuffle=False))

    for name, stream in (("ours", stream_ours), ("litdata", stream_litdata), ("webdataset", stream_webdataset)):
        try:
            print(f"  {name} from an HTTP server: {stream()} clips")
        except Exception as error:
            print(f"  {name} from an HTTP server: {type(error).__name__}: {str(error)[:120]}")
    server.shutdown()


def main(settings: Settings, root: Path) -> None:
    torch.set_num_threads(1)
    write_ours(settings, root / "ours")
    write_litdata(settings, root / "lit_clips", lit_clip)
    write_litdata(settings, root / "lit_frames", lit_frames)
    size = sum(path.stat().st_size for path in (root / "ours").glob("*.tar")) / 1e6
    print(
        f"{settings.clips} clips of {settings.frames} frames of {settings.size} px, {size:.0f} MB, seed {settings.seed}"
    )
    print(f"two random frames of every clip, shuffled, one process, decoded; median of {settings.rounds} rounds:")
    measure_reads(settings, root)
    print("resuming in the middle of an epoch:")
    measure_resume(settings, root)
    print("mixing two corpora by weight:")
    measure_mixing(settings, root)
    print("streaming:")
    measure_streaming(settings, root)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        main(tyro.cli(Settings), Path(folder))
