"""The video corpora of the paper: how their folders and lists are laid out, and what of them is here.

All three are licensed and fetched by their users. What is prepared is what stands in the official list of the
training split; everything listed but not here, or here but not listed, is named in the report.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple

CorpusName = Literal["moments", "kinetics700", "ego4d"]


@dataclass(frozen=True)
class Listed:
    """What an official list says of one video."""

    seconds: float = 0.0
    """Length; 0 where the list counts clips instead of hours."""
    held_out: str = ""
    """Benchmarks of the corpus that evaluate on this video, e.g. ``val of em``."""


@dataclass(frozen=True)
class Corpus:
    """One of the paper's corpora."""

    title: str
    """Its name in messages."""
    fps: float
    """Frames a second the paper keeps."""
    clip_length: float | None
    """Seconds of a clip where recordings are long; None where a file is a clip."""
    official_size: str
    """Size of the official training split."""
    lists: tuple[str, ...]
    """Where the official list lies, relative to the corpus' folder; the first that exists is used."""
    read_list: Callable[[Path], dict[str, Listed]]
    """The videos of the training split by key."""
    key_of: Callable[[PurePath], str]
    """The key of a file, from its path relative to the corpus' folder."""


@dataclass(frozen=True)
class Coverage:
    """How much of an official training split is here."""

    corpus: str
    """Title of the corpus."""
    official_size: str
    """Size of the official training split, as published."""
    list_file: str
    """The list that was read."""
    listed: int
    """Videos in the list."""
    present: int
    """Those of them that are here."""
    listed_hours: float
    """Length of the videos in the list; 0 where it does not say."""
    present_hours: float
    """Length of those that are here."""
    missing: list[str] = field(default_factory=list)
    """Videos of the list that are not here."""
    extra: list[str] = field(default_factory=list)
    """Videos here that are not in the list, or a second copy; they are left out."""
    held_out: dict[str, str] = field(default_factory=dict)
    """Videos here on which benchmarks of the corpus evaluate, and which ones. They are used, as in the paper; a
    leave-out list keeps them from training."""

    def __str__(self) -> str:
        hours = f", {self.present_hours:,.1f} of {self.listed_hours:,.1f} hours" if self.listed_hours else ""
        line = (
            f"{self.corpus}: {self.present:,} of {self.listed:,} clips of the official training split are here{hours} "
            f"(list {self.list_file}; published size {self.official_size}); {len(self.missing):,} missing, "
            f"{len(self.extra):,} not in the list and left out"
        )
        if self.held_out:
            line += f"; {len(self.held_out):,} are in the val or test part of a benchmark of the corpus"
        return line


class Selection(NamedTuple):
    """The videos to prepare."""

    videos: list[Path]
    """Files of the training split, in the order they were found."""
    coverage: Coverage


def select(name: CorpusName, folder: Path, videos: Sequence[Path], list_file: Path | None = None) -> Selection:
    """Pick the official training split out of the videos found in a corpus' folder.

    Args:
        name: The corpus.
        folder: Its folder, laid out as its makers hand it out.
        videos: The videos in that folder.
        list_file: The official list, if it lies elsewhere.
    """
    corpus = CORPORA[name]
    path = list_file if list_file is not None else _find_list(corpus, folder)
    listed = _read_list(corpus, path)
    chosen: dict[str, Path] = {}
    extra: list[Path] = []
    for video in videos:
        key = corpus.key_of(video.relative_to(folder))
        if key in listed and key not in chosen:
            chosen[key] = video
        else:
            extra.append(video)
    if not chosen:
        raise ValueError(
            f"{folder}: none of the {len(videos)} videos here is in {path}; "
            f"{name} expects names such as {next(iter(listed))}"
        )
    coverage = Coverage(
        corpus=corpus.title,
        official_size=corpus.official_size,
        list_file=path.name,
        listed=len(listed),
        present=len(chosen),
        listed_hours=_hours(listed.values()),
        present_hours=_hours(listed[key] for key in chosen),
        missing=sorted(listed.keys() - chosen.keys()),
        extra=[video.relative_to(folder).as_posix() for video in extra],
        held_out={key: listed[key].held_out for key in chosen if listed[key].held_out},
    )
    return Selection(list(chosen.values()), coverage)


def _hours(videos: Iterable[Listed]) -> float:
    return sum(video.seconds for video in videos) / 3600


def _find_list(corpus: Corpus, folder: Path) -> Path:
    for name in corpus.lists:
        if (folder / name).is_file():
            return folder / name
    raise ValueError(
        f"{folder}: no official list of {corpus.title} here (looked for {', '.join(corpus.lists)}); "
        "put it there or name it with annotations"
    )


def _read_list(corpus: Corpus, path: Path) -> dict[str, Listed]:
    try:
        listed = corpus.read_list(path)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, csv.Error) as error:
        raise ValueError(f"{path}: not the official list of {corpus.title} ({error!r})") from error
    if not listed:
        raise ValueError(f"{path}: this list of {corpus.title} names no videos")
    return listed


# --------------------------------------------------------------------------------------- the three corpora


def _read_moments(path: Path) -> dict[str, Listed]:
    """Rows ``class/file.mp4,class,votes,votes`` without a header; the files lie in ``training/``."""
    with path.open(newline="", encoding="utf-8") as file:
        names = [row[0] for row in csv.reader(file) if row]
    if wrong := [name for name in names if "/" not in name]:
        raise ValueError(f"{wrong[0]} is no class/file.mp4")
    return {f"training/{name}": Listed() for name in names}


def _read_kinetics(path: Path) -> dict[str, Listed]:
    """Columns ``label, youtube_id, time_start, time_end, split``, in any order."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if (row.get("split") or "train") == "train"]
    return {_kinetics_key(row["youtube_id"], row["time_start"], row["time_end"]): Listed() for row in rows}


def _kinetics_key(youtube_id: str, start: str, end: str) -> str:
    # Some copies of the list write seconds as 12.0.
    return f"{youtube_id}_{int(float(start)):06d}_{int(float(end)):06d}"


def _read_ego4d(path: Path) -> dict[str, Listed]:
    videos = json.loads(path.read_text(encoding="utf-8"))["videos"]
    return {video["video_uid"]: Listed(float(video["duration_sec"]), _held_out(video)) for video in videos}


def _held_out(video: dict[str, Any]) -> str:
    # One split for each family of benchmarks; a video can train one and test another ("multi").
    splits = {family: video.get(f"split_{family}") for family in ("em", "av", "fho")}
    return ", ".join(f"{split} of {family}" for family, split in splits.items() if split in ("val", "test", "multi"))


def _stem(path: PurePath) -> str:
    # Names are unique in these corpora, so any nesting of folders (by class, by version) will do.
    return path.stem


CORPORA: dict[CorpusName, Corpus] = {
    "moments": Corpus(
        title="Moments in Time",
        fps=16.0,
        clip_length=None,
        official_size="802,264 clips",
        lists=("trainingSet.csv",),
        read_list=_read_moments,
        key_of=lambda path: path.as_posix(),
    ),
    "kinetics700": Corpus(
        title="Kinetics-700",
        fps=15.0,
        clip_length=None,
        official_size="545,317 clips",
        lists=(
            "train.csv",
            "annotations/train.csv",
            "kinetics700/train.csv",
            "kinetics700_2020/train.csv",
            "kinetics-700_train.csv",
        ),
        read_list=_read_kinetics,
        key_of=_stem,
    ),
    "ego4d": Corpus(
        title="Ego4D",
        fps=5.0,
        # Long enough for four intervals with visible change between them, as in the other two corpora's clips.
        clip_length=10.0,
        official_size="3,670 hours",
        lists=("ego4d.json", "v2/ego4d.json", "v1/ego4d.json"),
        read_list=_read_ego4d,
        key_of=_stem,
    ),
}
