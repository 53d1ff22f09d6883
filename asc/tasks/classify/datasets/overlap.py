"""Evaluation images that may have been seen in pre-training.

What is compared: names, and the bytes of files of equal size where both are files that are here. A video and an image
cut from it share no bytes, so only the name can tell: that of the file, with or without a frame number at its end.
Names that are numbers alone are counters and tell nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asc.data.clips import SCENES
from asc.data.shards import INDEX_FILE, read_index
from asc.run_folder import CONFIG_FILE
from asc.tasks.classify.datasets.folders import some
from asc.tasks.classify.datasets.parts import ArrayImages, Dataset, FileImages, ImageSet
from asc.tasks.files import file_size

_DATA_FILE, _FOUND = "data.json", "found"
_EXAMPLES = 5
_FRAME_NUMBER = re.compile(r"[-_.]?(frame)?[-_.]?\d+$")


@dataclass
class Overlap:
    """What a dataset and pre-training have in common."""

    files: int = 0
    """Pre-training files (or scenes) that were compared with."""
    same_content: list[str] = field(default_factory=list)
    """Images whose bytes are those of a pre-training file, with that file."""
    same_name: list[str] = field(default_factory=list)
    """Images that are called as a pre-training file, with that file: a hint, not a proof."""
    not_compared: list[str] = field(default_factory=list)
    """What could not be compared, with the reason."""

    def lines(self) -> list[str]:
        """The findings in words."""
        lines = [f"not compared with pre-training: {reason}" for reason in self.not_compared]
        for found, what in ((self.same_content, "have the bytes"), (self.same_name, "bear the name")):
            if found:
                lines.append(f"{len(found):,} evaluation images {what} of a pre-training file: {some(found)}")
        if not self.same_content and not self.same_name and self.files:
            lines.append(f"no evaluation image is found among {self.files:,} pre-training files by name or content")
        return lines

    def record(self) -> dict[str, Any]:
        """The same for the file of a result: counts, and a few examples."""
        return {
            "files": self.files,
            "same_content": len(self.same_content),
            "same_name": len(self.same_name),
            "examples": self.same_content[:_EXAMPLES] + self.same_name[:_EXAMPLES],
            "not_compared": self.not_compared,
        }


@dataclass
class _Seen:
    """Pre-training files."""

    names: dict[str, str] = field(default_factory=dict)
    """Files by what they are called."""
    sizes: dict[int, list[Path]] = field(default_factory=dict)
    """Files that are here by their number of bytes."""
    count: int = 0

    def add(self, file: str, path: Path | None = None) -> None:
        self.count += 1
        self.names |= dict.fromkeys(_names(file)[:1], file)
        if path is not None and path.is_file():
            self.sizes.setdefault(path.stat().st_size, []).append(path)


def overlap(dataset: Dataset, sources: Iterable[str | Path]) -> Overlap:
    """Compare all parts of a dataset with what an encoder was pre-trained on.

    Args:
        dataset: The dataset.
        sources: Folders of prepared shards, of videos or images, or of pre-training runs (``asc pretrain``); an
            encoder within a run stands for the run.
    """
    result = Overlap()
    seen = _Seen()
    for source in sources:
        run = _run_around(Path(source))
        if run is None:
            _collect(str(source), seen, result.not_compared)
        else:
            _collect_run(run, seen, result.not_compared)
    result.files = seen.count
    for part in (dataset.train, dataset.val, dataset.test):
        if isinstance(part, ArrayImages):
            result.not_compared.append(f"{part.name}: its images have no names and files of their own")
        else:
            _compare(part, seen, result)
    return result


def _compare(part: ImageSet, seen: _Seen, result: Overlap) -> None:
    hashes: dict[Path, str] = {}
    for index in range(len(part)):
        source = part.source(index)
        shown = f"{part.name} {Path(source).name}"
        called = next((seen.names[name] for name in _names(source) if name in seen.names), None)
        if called is not None:
            result.same_name.append(f"{shown} = {called}")
        same = _same_bytes(Path(source), seen, hashes) if seen.sizes and isinstance(part, FileImages) else None
        if same is not None:
            result.same_content.append(f"{shown} = {same}")


def _same_bytes(file: Path, seen: _Seen, hashes: dict[Path, str]) -> Path | None:
    candidates = seen.sizes.get(file_size(file), [])
    if not candidates:
        return None
    own = _hash(file)
    for candidate in candidates:
        if candidate not in hashes:
            hashes[candidate] = _hash(candidate)
    return next((candidate for candidate in candidates if hashes[candidate] == own), None)


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _names(file: str) -> list[str]:
    """What a file may be called: its name without ending, and that without a frame number."""
    if file.startswith(f"{SCENES} "):
        return [file]
    stem = Path(file).stem.lower()
    names = [stem, _FRAME_NUMBER.sub("", stem)]
    return [name for name in dict.fromkeys(names) if re.search(r"[^\W\d_]", name)]


# --- What pre-training saw --------------------------------------------------------------------------------


def _collect(source: str, seen: _Seen, not_compared: list[str], left_out: frozenset[str] = frozenset()) -> None:
    folder = Path(source)
    if (folder / INDEX_FILE).is_file():
        index = read_index(folder / INDEX_FILE)
        for number in range(len(index.name_end_N)):
            if index.file_name(number) not in left_out:
                seen.add(index.file_name(number))
    elif folder.is_dir():
        for file in _walk(folder):
            if file not in left_out:
                seen.add(file, folder / file)
    else:
        not_compared.append(f"{source} is no folder that is here")


def _walk(folder: Path) -> Iterator[str]:
    for at, below, names in os.walk(folder, followlinks=True):
        below.sort()
        for name in sorted(names):
            yield (Path(at) / name).relative_to(folder).as_posix()


def _run_around(path: Path) -> Path | None:
    """The run that a path is, or that an encoder's folder or file lies in."""
    around = (path, *path.absolute().parents[:2])
    return next((run for run in around if all((run / file).is_file() for file in (CONFIG_FILE, _DATA_FILE))), None)


def _collect_run(run: Path, seen: _Seen, not_compared: list[str]) -> None:
    """The corpora of a run, less what it did not use."""
    try:
        config = json.loads((run / CONFIG_FILE).read_text())
        corpora = json.loads((run / _DATA_FILE).read_text())["corpora"]
        for number, (source, corpus) in enumerate(zip(config["data"], corpora, strict=True)):
            unused = frozenset([*corpus["left_out"], *corpus["skipped"], *corpus["ignored"]])
            memory = run / _FOUND / f"videos_{number}.json"
            if source == SCENES:
                _collect_scenes(config, seen)
            elif memory.is_file() and not Path(source).is_dir():
                for entry in json.loads(memory.read_text()):
                    if entry["file"] not in unused:
                        seen.add(entry["file"])
            else:
                _collect(source, seen, not_compared, unused)
    except (OSError, ValueError, KeyError, TypeError) as error:
        not_compared.append(f"{run}: the record of this run cannot be read ({error!r})")


def _collect_scenes(config: dict[str, Any], seen: _Seen) -> None:
    for number in range(config["clips"]["scenes"]):
        seen.add(f"{SCENES} train seed {config['train']['seed']}:{number}")
