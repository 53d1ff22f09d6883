"""Frames that are decoded once and then kept in memory, for all processes that load data.

Decoding is most of a loader's work, and a small corpus is read many times over: a network that trains fast would wait
for its frames. The memory belongs to no file and is gone with the last process that uses it.
"""

from __future__ import annotations

import gc
import mmap
import os
import re
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asc.data.clips import Clips, Pixels

_SUM_BYTES = 4
# No more than this share of the memory there is, however much is allowed.
_SHARE = 0.25


def keep_frames(corpora: Sequence[Clips], gigabytes: float) -> list[Clips]:
    """The same corpora, whose decoded frames are kept as far as the memory goes: one after another."""
    left, kept = int(min(gigabytes * 1e9, _SHARE * available_bytes())), list[Clips]()
    gc.collect()  # the frames of an earlier training in this process may still be there, only not in use
    for clips in corpora:
        if left <= 0 or not hasattr(os, "memfd_create"):  # other systems have no such memory
            kept.append(clips)
            continue
        kept.append(keeper := KeptClips(clips, left))
        left -= keeper.bytes
    return kept


def available_bytes() -> float:
    """Memory that is available on this computer, or that its container may use if that is less."""
    found = [float("inf")]
    for file, pattern, unit in (
        ("/proc/meminfo", r"MemAvailable:\s+(\d+) kB", 1024),
        ("/sys/fs/cgroup/memory.max", r"(\d+)", 1),
    ):
        if Path(file).is_file() and (match := re.search(pattern, Path(file).read_text())):
            found.append(int(match[1]) * unit)
    return min(found)


class KeptClips:
    """A corpus whose first frames are kept, once one of its processes has read them.

    A frame is kept with its checksum, written last. Two processes may decode the same one, and write the same; one
    that finds half of it sees by the checksum that it must decode it, too.
    """

    def __init__(self, clips: Clips, most: int) -> None:
        self.name = clips.name
        self._clips = clips
        # The first place of every clip, and the end of the last.
        self._borders_C = np.cumsum([0, *(clips.num_frames(clip) for clip in range(len(clips)))])
        # Frames of another size than the first are not kept.
        self._shape = clips.read(0, [0])[0].shape
        self._frames = min(int(self._borders_C[-1]), most // self._bytes_of_frame)
        self._map(os.memfd_create("asc_frames"), new=True)

    @property
    def _bytes_of_frame(self) -> int:
        return int(np.prod(self._shape)) + _SUM_BYTES

    @property
    def bytes(self) -> int:
        """Memory that all kept frames take; only what is written counts."""
        return self._frames * self._bytes_of_frame

    def _map(self, descriptor: int, new: bool = False) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        if not self._frames:  # there is no room for one, and nothing cannot be mapped
            return
        if new:
            os.truncate(descriptor, self.bytes)
        memory = mmap.mmap(descriptor, self.bytes)
        sums = self._frames * _SUM_BYTES
        self._sum_F = np.frombuffer(memory, np.uint32, self._frames)
        self._pixels_FHW3 = np.frombuffer(memory, np.uint8, offset=sums).reshape(self._frames, *self._shape)

    def __getstate__(self) -> dict[str, Any]:
        unmapped = {name: value for name, value in self.__dict__.items() if name not in ("_sum_F", "_pixels_FHW3")}
        # Processes that are not forked open it in the process that has made it.
        return unmapped | {"_descriptor": f"/proc/{os.getpid()}/fd/{self._descriptor}"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map(os.open(state["_descriptor"], os.O_RDWR))

    def read(self, clip: int, frames: Sequence[int]) -> list[Pixels]:
        """Frames of a clip; to be looked at, not to be written into."""
        first, end = self._borders_C[clip : clip + 2].tolist()
        found = {frame: kept for frame in frames if (kept := self._kept(first + frame, first, end)) is not None}
        missing = [frame for frame in dict.fromkeys(frames) if frame not in found]
        if missing:
            for frame, pixels_HW3 in zip(missing, self._clips.read(clip, missing), strict=True):
                found[frame] = pixels_HW3
                self._keep(first + frame, pixels_HW3)
        return [found[frame] for frame in frames]

    def _kept(self, place: int, first: int, end: int) -> Pixels | None:
        if not first <= place < min(end, self._frames):
            return None
        pixels_HW3: Pixels = self._pixels_FHW3[place]
        known = self._sum_F[place]
        return pixels_HW3 if known and known == zlib.adler32(pixels_HW3.data) else None

    def _keep(self, place: int, pixels_HW3: Pixels) -> None:
        if place < self._frames and pixels_HW3.shape == self._shape:
            self._pixels_FHW3[place] = pixels_HW3
            self._sum_F[place] = zlib.adler32(np.ascontiguousarray(pixels_HW3).data)

    def __len__(self) -> int:
        return len(self._clips)

    def num_frames(self, clip: int) -> int:
        """Frames of a clip."""
        return self._clips.num_frames(clip)

    def source(self, clip: int) -> str:
        """The file of a clip."""
        return self._clips.source(clip)

    def content_hash(self, clip: int) -> str:
        """SHA-256 of the clip's file."""
        return self._clips.content_hash(clip)

    def order(self, generator: np.random.Generator) -> NDArray[np.int64]:
        """All clips in a random order."""
        return self._clips.order(generator)
