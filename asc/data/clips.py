"""Corpora of clips that can be read by number: a folder of videos, prepared shards, the embedded scenes.

A clip is a stretch of video, seen as frames at a fixed rate. Every corpus answers the same few questions
(:class:`Clips`), so that training does not know where its frames come from. What is wrong with a file is found and
told before training begins; a file is used, or it is named in the report, and never replaced by another one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from asc.data.scenes import Scene, SceneConfig

if TYPE_CHECKING:
    from asc.data.video import VideoInfo

Pixels = NDArray[np.uint8]

SCENES = "scenes"
"""The name under which the embedded scenes are asked for, where others give a folder."""

# The end of a video is known to half a tick of its clock; a frame that begins later than this before it may not exist.
_SLACK = 2e-3


class Clips(Protocol):
    """A corpus of clips; it can be sent to other processes."""

    name: str
    """What messages call it."""

    def __len__(self) -> int:
        """Number of clips."""

    def num_frames(self, clip: int) -> int:
        """Frames of a clip, at least 1."""

    def read(self, clip: int, frames: Sequence[int]) -> list[Pixels]:
        """Frames of a clip as RGB bytes (H, W, 3), in the order asked for; the same one may come twice."""

    def source(self, clip: int) -> str:
        """The file the clip comes from, below the corpus' folder."""

    def content_hash(self, clip: int) -> str:
        """SHA-256 of that file."""

    def order(self, generator: np.random.Generator) -> NDArray[np.int64]:
        """All clips in a random order."""


@dataclass
class Findings:
    """What a corpus consists of and what is left out of it; goes into the record of a run."""

    corpus: str
    """Its name."""
    clips: int = 0
    """Clips that are used."""
    frames: int = 0
    """Their frames."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Files that are not used, with the reason."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Files that are used as far as they can be read, with what is wrong."""
    ignored: list[str] = field(default_factory=list)
    """Files that are no videos."""
    left_out: list[str] = field(default_factory=list)
    """Files that the leave-out list names."""

    def lines(self) -> list[str]:
        """The findings in words."""
        lines = [f"{self.corpus}: {self.clips} clips, {self.frames} frames"]
        lines += [f"  skipped: {reason}" for reason in self.skipped.values()]
        lines += [f"  used as far as it goes: {reason}" for reason in self.damaged.values()]
        if self.left_out:
            lines.append(f"  left out by the list: {len(self.left_out)} files")
        if self.ignored:
            lines.append(f"  not videos: {len(self.ignored)} files")
        return lines


# --- The embedded scenes ----------------------------------------------------------------------------------


class SceneClips:
    """Scenes drawn by our own code."""

    def __init__(self, config: SceneConfig, clips: int) -> None:
        self.name = SCENES
        self.config = config
        self.clips = clips

    def __len__(self) -> int:
        return self.clips

    def num_frames(self, clip: int) -> int:
        """Frames of a clip."""
        return self.config.frames

    def read(self, clip: int, frames: Sequence[int]) -> list[Pixels]:
        """Frames of a clip."""
        scene = Scene(self.config, clip)
        return [scene.frame(number).image_HW3 for number in frames]

    def source(self, clip: int) -> str:
        """Name of a scene."""
        return f"scene {clip}"

    def content_hash(self, clip: int) -> str:
        """Hash of what the scene is drawn from."""
        return hashlib.sha256(f"{self.config} {clip}".encode()).hexdigest()

    def order(self, generator: np.random.Generator) -> NDArray[np.int64]:
        """All clips in a random order."""
        return generator.permutation(self.clips)

    def findings(self) -> Findings:
        """What there is."""
        return Findings(SCENES, self.clips, self.clips * self.config.frames)


# --- A folder of videos -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Checked:
    """One file after it was decoded once."""

    file: str
    size: int
    modified: int
    duration: float = 0.0
    sha256: str = ""
    problem: str = ""
    """Why it cannot be used."""
    damage: str = ""
    """What is wrong with it though it can be used."""


@dataclass(frozen=True)
class FolderSettings:
    """How a folder of videos is read without preparation."""

    fps: float = 16.0
    """Frames a second that a clip is seen at."""
    clip_length: float | None = None
    """Longer videos are cut into clips of so many seconds; None: a video is one clip."""
    short_side: int = 256
    """The shorter side of a frame is resized to so many pixels."""
    crop: int | None = 224
    """Side of the square that is cut from the middle of a frame; None: the whole frame."""


class FolderClips:
    """The videos below a folder, decoded when they are asked for.

    Every video is decoded once to begin with: then its length is known exactly, and what is broken is known by name.
    ``memory`` is a file that keeps the outcome, so that a continued run does not do it again.
    """

    def __init__(
        self, folder: str | Path, settings: FolderSettings, memory: Path | None = None, workers: int | None = None
    ) -> None:
        from asc.data.video import find_videos  # imported here: machines that train on shards need no FFmpeg

        for name in ("fps", "clip_length"):
            value = getattr(settings, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"clips.folder.{name} must be a positive number, got {value}")
        for name in ("short_side", "crop"):
            if (pixels := getattr(settings, name)) is not None and pixels < 1:
                raise ValueError(f"clips.folder.{name} must be at least 1, got {pixels}")
        self.name = str(folder)
        self.folder = Path(folder)
        self.settings = settings
        found = find_videos(self.folder)
        self._checked = _check_files(self.folder, found.videos, memory, workers)
        self._ignored = [str(path.relative_to(self.folder)) for path in found.ignored]
        self._clips = [clip for checked in self._checked if not checked.problem for clip in self._cut(checked)]
        if not self._clips:
            reasons = "; ".join(checked.problem for checked in self._checked[:3])
            raise ValueError(f"{self.folder}: none of its {len(self._checked)} files can be read as video ({reasons})")

    def _cut(self, checked: _Checked) -> Iterator[tuple[_Checked, float, int]]:
        length = self.settings.clip_length or checked.duration
        start = 0.0
        while start == 0.0 or start < checked.duration - _SLACK:
            seconds = min(length, checked.duration - start) - _SLACK
            yield checked, start, max(1, int(np.ceil(seconds * self.settings.fps)))
            start += length

    def __len__(self) -> int:
        return len(self._clips)

    def num_frames(self, clip: int) -> int:
        """Frames of a clip."""
        return self._clips[clip][2]

    def read(self, clip: int, frames: Sequence[int]) -> list[Pixels]:
        """Frames of a clip."""
        from asc.data.video import read_at

        checked, start, _ = self._clips[clip]
        times = [start + number / self.settings.fps for number in frames]
        path = self.folder / checked.file
        return list(read_at(path, times, short_side=self.settings.short_side, crop=self.settings.crop))

    def source(self, clip: int) -> str:
        """The file of a clip."""
        return self._clips[clip][0].file

    def content_hash(self, clip: int) -> str:
        """SHA-256 of the clip's file."""
        return self._clips[clip][0].sha256

    def order(self, generator: np.random.Generator) -> NDArray[np.int64]:
        """All clips in a random order."""
        return generator.permutation(len(self))

    def findings(self) -> Findings:
        """What there is and what is wrong with it."""
        return Findings(
            self.name,
            len(self),
            sum(frames for _, _, frames in self._clips),
            skipped={c.file: c.problem for c in self._checked if c.problem},
            damaged={c.file: c.damage for c in self._checked if c.damage and not c.problem},
            ignored=self._ignored,
        )


def _check_files(folder: Path, files: Sequence[Path], memory: Path | None, workers: int | None) -> list[_Checked]:
    known = _recall(memory)
    names = [str(file.relative_to(folder)) for file in files]
    stamps = [_stamp(file) for file in files]
    fresh = [
        index
        for index, (name, stamp) in enumerate(zip(names, stamps, strict=True))
        if name not in known or (known[name].size, known[name].modified) != stamp
    ]
    if fresh:
        with ProcessPoolExecutor(workers or os.cpu_count()) as pool:
            jobs = pool.map(_check_file, [folder] * len(fresh), [names[index] for index in fresh], chunksize=4)
            for checked in tqdm(jobs, total=len(fresh), desc="checking videos", unit="video", disable=None):
                known[checked.file] = checked
    result = [known[name] for name in names]
    if memory is not None and fresh:
        memory.parent.mkdir(parents=True, exist_ok=True)
        temporary = memory.with_suffix(".tmp")
        temporary.write_text(json.dumps([asdict(checked) for checked in result]))
        temporary.replace(memory)
    return result


def _recall(memory: Path | None) -> dict[str, _Checked]:
    if memory is None or not memory.is_file():
        return {}
    try:
        return {entry["file"]: _Checked(**entry) for entry in json.loads(memory.read_text())}
    except (json.JSONDecodeError, TypeError, KeyError):
        return {}  # half a file or another version's: the videos are simply checked again


def _stamp(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
    except OSError:
        return 0, 0  # checking it tells what is wrong
    return status.st_size, status.st_mtime_ns


def _check_file(folder: Path, name: str) -> _Checked:
    from asc.data.video import VideoError, probe

    path = folder / name
    size, modified = _stamp(path)
    try:
        info = probe(path, count=True)
        with path.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    except VideoError as error:
        return _Checked(name, size, modified, problem=str(error))
    except OSError as error:
        return _Checked(name, size, modified, problem=f"{path}: cannot be read ({error.strerror})")
    return _Checked(name, size, modified, info.duration, sha256, damage=_damage(path, info))


def _damage(path: Path, info: VideoInfo) -> str:
    parts = ["its end is missing"] if info.truncated else []
    parts += [f"{info.damaged} packets do not decode"] if info.damaged else []
    return f"{path}: {' and '.join(parts)}" if parts else ""


# --- Leaving clips out ------------------------------------------------------------------------------------


class LeftOut:
    """A corpus without the clips that a list names."""

    def __init__(self, clips: Clips, kept: NDArray[np.int64]) -> None:
        self.name = clips.name
        self._clips = clips
        self._kept = kept
        self._place = np.full(len(clips), -1, dtype=np.int64)
        self._place[kept] = np.arange(len(kept))

    def __len__(self) -> int:
        return len(self._kept)

    def num_frames(self, clip: int) -> int:
        """Frames of a clip."""
        return self._clips.num_frames(int(self._kept[clip]))

    def read(self, clip: int, frames: Sequence[int]) -> list[Pixels]:
        """Frames of a clip."""
        return self._clips.read(int(self._kept[clip]), frames)

    def source(self, clip: int) -> str:
        """The file of a clip."""
        return self._clips.source(int(self._kept[clip]))

    def content_hash(self, clip: int) -> str:
        """SHA-256 of the clip's file."""
        return self._clips.content_hash(int(self._kept[clip]))

    def order(self, generator: np.random.Generator) -> NDArray[np.int64]:
        """All clips in a random order."""
        places = self._place[self._clips.order(generator)]
        return places[places >= 0]


def read_leave_out(file: Path) -> list[str]:
    """The entries of a leave-out list: one file, folder (ending in /) or SHA-256 a line; # begins a comment."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the leave-out list {file} cannot be read: {error}") from error
    entries = [line.split("#")[0].strip() for line in lines]
    if not any(entries):
        raise ValueError(f"the leave-out list {file} names nothing; leave the setting away or add a line")
    return [entry for entry in entries if entry]


def without(clips: Clips, entries: Sequence[str]) -> tuple[Clips, list[str], set[str]]:
    """The corpus without the listed files; also the files left out, and the entries that named one."""
    wanted = {entry.lower() if _is_hash(entry) else entry for entry in entries}
    kept, left_out, used = [], [], set()
    for clip in range(len(clips)):
        matches = _names_of(clips, clip) & wanted
        if matches:
            used |= matches
            left_out.append(clips.source(clip))
        else:
            kept.append(clip)
    if not kept:
        raise ValueError(f"{clips.name}: the leave-out list names every clip, so there is nothing to train on")
    if not left_out:
        return clips, [], used
    return LeftOut(clips, np.array(kept, dtype=np.int64)), sorted(set(left_out)), used


def _is_hash(entry: str) -> bool:
    return len(entry) == 64 and all(letter in "0123456789abcdefABCDEF" for letter in entry)


def _names_of(clips: Clips, clip: int) -> set[str]:
    """Everything that a list may call a clip: its file, the file's name, any folder above it, its hash."""
    file = Path(clips.source(clip))
    folders = {f"{folder.as_posix()}/" for folder in file.parents if folder.name}
    return {file.as_posix(), file.name, clips.content_hash(clip)} | folders
