"""Images sorted into folders by class, and the share of a training part that is kept for validation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from asc.tasks.classify.datasets.parts import FileImages, Part

TRAIN = "train"
VAL_NAMES = ("val", "validation")
TEST = "test"


class Parts(NamedTuple):
    """What the reader of a layout finds."""

    train: Part
    val: Part | None
    """None where the layout has no validation part."""
    test: Part
    notes: list[str]


class Walked(NamedTuple):
    """What lies in class folders."""

    files: list[str]
    """Images, relative to the folder given."""
    classes: list[str]
    """The class folder of each."""
    notes: list[str]
    """What else lies there."""


def is_plain(root: Path) -> bool:
    """Whether there is ``train`` and at least one other part."""
    return (root / TRAIN).is_dir() and any((root / part).is_dir() for part in (*VAL_NAMES, TEST))


def read_plain(name: str, root: Path) -> Parts:
    """``train/<class>/*`` beside ``val`` and ``test`` of the same kind.

    Where only one of ``val`` and ``test`` is there, it is the test part.
    """
    if not is_plain(root):
        raise ValueError(f"{root} has not the layout train/<class>/ and val/<class>/ (or test/<class>/) of images")
    val = next((part for part in VAL_NAMES if (root / part).is_dir()), None)
    if not (root / TEST).is_dir():
        assert val is not None
        return read_parts(name, root, None, val)
    return read_parts(name, root, val, TEST)


def read_parts(name: str, root: Path, val: str | None, test: str, as_stored: bool = False) -> Parts:
    """The folder ``train`` and those named; for ``as_stored`` see ``FileImages``."""
    classes = class_folders(root / TRAIN)
    train, notes = read_part(f"{name}/train", root, TRAIN, classes, as_stored)
    validated, val_notes = (None, []) if val is None else read_part(f"{name}/val", root, val, classes, as_stored)
    judged, test_notes = read_part(f"{name}/test", root, test, classes, as_stored)
    return Parts(train, validated, judged, notes + val_notes + test_notes)


def class_folders(folder: Path) -> list[str]:
    """Names of the class folders, sorted."""
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    if not classes:
        raise ValueError(f"{folder} holds no class folders; images of a class belong into {folder.name}/<class>/")
    return classes


def read_part(
    name: str, root: Path, part: str, classes: Sequence[str], as_stored: bool = False
) -> tuple[FileImages, list[str]]:
    """The images of one part whose classes are known, and what else was found."""
    unknown = sorted(set(class_folders(root / part)) - set(classes))
    if unknown:
        raise ValueError(
            f"{root / part} has classes that {root / TRAIN} does not know: {some(unknown)}; "
            f"rename the folder, or add the class to {TRAIN}"
        )
    walked = walk_classes(root, part)
    if not walked.files:
        raise ValueError(f"{root / part} holds no images in class folders")
    number_of = {label: number for number, label in enumerate(classes)}
    labels = torch.tensor([number_of[label] for label in walked.classes], dtype=torch.int64)
    return FileImages(name, list(classes), labels, root, walked.files, as_stored), walked.notes


def walk_classes(root: Path, part: str) -> Walked:
    """All images in the class folders of a part, sorted; files are relative to ``root``."""
    files: list[str] = []
    classes: list[str] = []
    others = [entry.name for entry in os.scandir(root / part) if not entry.is_dir()]
    for label in class_folders(root / part):
        top = root / part / label
        before = len(files)
        for folder, below, names in os.walk(top, followlinks=True):
            below.sort()
            at = Path(folder).relative_to(root).as_posix()
            for name in sorted(names):
                if name.lower().endswith(IMG_EXTENSIONS):
                    files.append(f"{at}/{name}")
                    classes.append(label)
                else:
                    others.append(f"{at.removeprefix(part + '/')}/{name}")
        if len(files) == before:
            others.append(f"{label}/ (no image in it)")
    note = [f"{part}: {len(others)} entries that are no images are not used: {some(others)}"] if others else []
    return Walked(files, classes, note)


def several_labels(part: FileImages) -> FileImages:
    """Images that lie in several class folders under the same name, once each with all of these classes."""
    place: dict[str, int] = {}
    kept: list[int] = []
    for index, file in enumerate(part.files):
        if place.setdefault(Path(file).name, len(kept)) == len(kept):
            kept.append(index)
    labels_NK = torch.zeros(len(kept), len(part.classes), dtype=torch.int64)
    rows = torch.tensor([place[Path(file).name] for file in part.files])
    labels_NK[rows, part.labels] = 1
    return replace(part, labels=labels_NK, files=[part.files[index] for index in kept])


def hold_out(part: Part, name: str, share: float, seed: int) -> tuple[Part, Part]:
    """A part without a share of it, and that share.

    The share is drawn class by class, so that both have all classes in the same proportion; a class with one image
    keeps it for training. Images with several labels are drawn without regard to them.
    """
    held = held_out(part.labels, share, seed)
    if not 0 < len(held) < len(part):
        raise ValueError(
            f"{part.name} has {len(part)} images, too few to keep a share of {share} for validation; "
            f"give a validation part, or another val_share"
        )
    kept = np.setdiff1d(np.arange(len(part)), held)
    return part.take(part.name, kept), part.take(name, held)


def held_out(labels: Tensor, share: float, seed: int) -> NDArray[np.int64]:
    """Which images the share consists of, in rising order."""
    if not 0 < share < 1:
        raise ValueError(f"val_share must lie between 0 and 1, got {share}")
    labels_N = labels.numpy() if labels.ndim == 1 else np.zeros(len(labels), dtype=np.int64)
    generator = np.random.default_rng(seed)
    chosen = []
    for label in np.unique(labels_N):
        members = np.flatnonzero(labels_N == label)
        # A class must not lose all its images, nor be missing in the share where it can be there.
        count = min(max(1, round(share * len(members))), len(members) - 1)
        chosen.append(generator.permutation(members)[:count])
    return np.sort(np.concatenate(chosen)).astype(np.int64)


def some(names: Sequence[str], most: int = 4) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
