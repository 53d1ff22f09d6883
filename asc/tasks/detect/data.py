"""Images with boxes: PASCAL VOC in its official layout, and the embedded scenes."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from asc.data.clips import SCENES
from asc.data.scenes import CLASSES as SCENE_CLASSES
from asc.data.scenes import Scene, SceneConfig
from asc.data.voc import VOC_CLASSES
from asc.tasks.images import file_key, keys_digest, read_image

# Of a scene's object that is mostly hidden, the visible sliver does not tell what it is.
_LEAST_SIDE = 1 / 16
# Parts that images can be learned from and judged on: the challenge keeps the test images of later years to itself.
_LIST_PAIRS = (("trainval", "test"), ("train", "val"))


class Truth(NamedTuple):
    """The objects of one image."""

    boxes_K4: Tensor
    """Boxes (fp32)."""
    classes_K: Tensor
    """Classes, counted from 0 (int64)."""
    difficult_K: Tensor
    """Objects that VOC marks as hard to recognise (bool): finding them is neither asked for nor punished."""

    def to(self, device: torch.device) -> Truth:
        """The same on a device."""
        return Truth(*(part.to(device, non_blocking=True) for part in self))

    def only(self, chosen_K: Tensor) -> Truth:
        """The chosen objects."""
        return Truth(*(part[chosen_K] for part in self))


class Sample(NamedTuple):
    """An image and what is in it."""

    image_HW3: NDArray[np.uint8]
    truth: Truth


class DetectionSet(ABC):
    """Images with their objects."""

    classes: tuple[str, ...]
    """Names of the classes."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Sample: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """What a message calls an image."""

    @abstractmethod
    def key(self, index: int) -> str:
        """What tells a sample from all others, wherever the folder lies: its files and their sizes."""

    def fingerprint(self) -> str:
        """Hex digest of what the set consists of; not over the bytes, so that it is cheap."""
        return keys_digest(self.key, len(self))


@dataclass(frozen=True)
class DataConfig:
    """Which images are learned from and which are judged."""

    train: tuple[str, ...] = ("2007/trainval",)
    """Lists of VOC to learn from, as year/name; ``2012/trainval`` is another one."""
    test: str = "2007/test"
    """List of VOC that the detector is judged on."""
    difficult: bool = False
    """Whether objects that VOC calls difficult are learned from, too; they never count in the scores."""
    scenes: int = 2000
    """Number of embedded scenes to learn from, where ``--data`` is ``scenes``."""
    test_scenes: int = 200
    """Number of those to be judged on; they show textures and hues that the others never do."""
    scene: SceneConfig = SceneConfig(size=128, frames=3, contrast=0.3, markings=1.0)
    """What they show; their split is chosen by their use. The middle frame is taken."""
    same_scenes: bool = False
    """Whether the scenes to be judged on are those that are learned from: does the detector fit what it sees?"""


def open_sets(data: str, config: DataConfig) -> tuple[DetectionSet, DetectionSet]:
    """Images to learn from and to be judged on; ``data`` is the folder of VOC, or ``scenes``."""
    return open_train(data, config), open_test(data, config)


def open_train(data: str, config: DataConfig) -> DetectionSet:
    """Images to learn from."""
    if data == SCENES:
        return SceneSet(replace(config.scene, split="train"), config.scenes)
    return VocSet(Path(data), config.train)


def open_test(data: str, config: DataConfig) -> DetectionSet:
    """Images to be judged on."""
    if data != SCENES:
        return VocSet(Path(data), (config.test,))
    split, count = ("train", config.scenes) if config.same_scenes else ("test", config.test_scenes)
    return SceneSet(replace(config.scene, split=split), count)  # type: ignore[arg-type]


# --- Embedded scenes --------------------------------------------------------------------------------------


class SceneSet(DetectionSet):
    """The middle frames of scenes with boxes around the visible part of every object; each is drawn once and kept."""

    classes = tuple(SCENE_CLASSES)

    def __init__(self, config: SceneConfig, count: int) -> None:
        if count < 1:
            raise ValueError(f"the number of scenes must be at least 1, got {count}")
        self.config = config
        self.count = count
        self._drawn: dict[int, Sample] = {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        if index not in self._drawn:
            self._drawn[index] = _scene_sample(self.config, index)
        return self._drawn[index]

    def name(self, index: int) -> str:
        """The scene's number."""
        return f"scene {index}"

    def key(self, index: int) -> str:
        """All that the scene is drawn from."""
        return f"{self.config} {index}"


def _scene_sample(config: SceneConfig, index: int) -> Sample:
    frame = Scene(config, index).frame(config.frames // 2)
    boxes_K4 = torch.from_numpy(frame.boxes_K4)
    sides_K2 = boxes_K4[:, 2:] - boxes_K4[:, :2]
    truth = Truth(boxes_K4, torch.from_numpy(frame.classes_K), (sides_K2 < _LEAST_SIDE * config.size).any(1))
    return Sample(frame.image_HW3, truth)


# --- PASCAL VOC -------------------------------------------------------------------------------------------


class _VocEntry(NamedTuple):
    image: Path
    annotation: Path
    truth: Truth


class VocSet(DetectionSet):
    """Lists of PASCAL VOC. All annotations are read and checked at once, so that a bad one is told at the start.

    Args:
        root: The folder ``VOCdevkit``, or the one that holds it.
        lists: Lists as year/name, such as ``2007/trainval``.
    """

    classes = VOC_CLASSES

    def __init__(self, root: Path, lists: Sequence[str]) -> None:
        if not lists:
            raise ValueError("no list of VOC images is named; give one such as 2007/trainval")
        self._entries = [entry for name in lists for entry in _read_list(root, name)]

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Sample:
        entry = self._entries[index]
        return Sample(read_image(entry.image, as_stored=True), entry.truth)

    def name(self, index: int) -> str:
        """The image's file."""
        return str(self._entries[index].image)

    def key(self, index: int) -> str:
        """Image and annotation."""
        entry = self._entries[index]
        return file_key(entry.image, entry.annotation)


def _read_list(root: Path, name: str) -> list[_VocEntry]:
    year, _, part = name.partition("/")
    if not (year.isdecimal() and part):
        raise ValueError(f"a list of VOC images is named as year/name, such as 2007/trainval; got {name!r}")
    folders = [root / f"VOC{year}", root / "VOCdevkit" / f"VOC{year}"]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        raise ValueError(
            f"{root} holds no VOC{year}, which the list {name} belongs to: give the folder VOCdevkit of PASCAL VOC, or "
            f"the one it lies in{_other_lists(root)}"
        )
    file = folder / "ImageSets" / "Main" / f"{part}.txt"
    if not file.is_file():
        raise ValueError(f"there is no list {file}{_other_lists(root)}")
    names = file.read_text().split()
    if not names:
        raise ValueError(f"the list {file} names no image")
    return [_read_entry(folder, image) for image in names]


def _other_lists(root: Path) -> str:
    """In words, the lists that are there and how to choose them."""
    files = [*root.glob("VOC*/ImageSets/Main/*.txt"), *root.glob("VOCdevkit/VOC*/ImageSets/Main/*.txt")]
    # Those with a class in their name list the images of it alone.
    lists = sorted(f"{file.parents[2].name[3:]}/{file.stem}" for file in files if "_" not in file.stem)
    if not lists:
        return ""
    years = sorted({name.partition("/")[0] for name in lists}, reverse=True)
    pairs = [(f"{year}/{learned}", f"{year}/{judged}") for year in years for learned, judged in _LIST_PAIRS]
    pair = next((pair for pair in pairs if set(pair) <= set(lists)), None)
    example = "" if pair is None else f", such as --sets.train {pair[0]} --sets.test {pair[1]}"
    return f"; sets.train and sets.test choose other lists{example}; there are {', '.join(lists)}"


def _read_entry(folder: Path, name: str) -> _VocEntry:
    image, annotation = folder / "JPEGImages" / f"{name}.jpg", folder / "Annotations" / f"{name}.xml"
    for file in (image, annotation):
        if not file.is_file():
            raise ValueError(f"{file} is missing, but a list of VOC names it")
    try:
        with Image.open(image) as opened:
            size = opened.size
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{image}: not an image that can be read ({error}); get it again or remove it") from error
    return _VocEntry(image, annotation, read_annotation(annotation, *size))


def read_annotation(file: Path, width: int, height: int) -> Truth:
    """The objects that an XML file of VOC names in an image of this size; none is fine."""
    try:
        objects = ElementTree.parse(file).getroot().findall("object")
    except ElementTree.ParseError as error:
        raise ValueError(f"{file} is no XML that can be read: {error}") from error
    rows = [_read_object(file, entry, width, height) for entry in objects]
    return Truth(
        torch.tensor([box for box, _, _ in rows], dtype=torch.float32).view(-1, 4),
        torch.tensor([label for _, label, _ in rows], dtype=torch.int64),
        torch.tensor([difficult for _, _, difficult in rows], dtype=torch.bool),
    )


def _read_object(file: Path, entry: ElementTree.Element, width: int, height: int) -> tuple[list[float], int, bool]:
    name = (entry.findtext("name") or "").strip()
    if name not in VOC_CLASSES:
        raise ValueError(f"{file} names an object {name!r}, which is none of VOC's classes")
    try:
        corners = [float(entry.findtext(f"bndbox/{side}") or "") for side in ("xmin", "ymin", "xmax", "ymax")]
        difficult = int(entry.findtext("difficult") or 0) != 0
        if not all(map(math.isfinite, corners)):
            raise ValueError(f"got {corners}")
    except ValueError as error:
        raise ValueError(f"{file} has no box of four numbers for an object {name!r}: {error}") from error
    # VOC counts pixels from 1 and the last one belongs to the box; here from 0 and up to the border behind it.
    left, top, right, bottom = corners[0] - 1, corners[1] - 1, corners[2], corners[3]
    box = [max(0.0, left), max(0.0, top), min(float(width), right), min(float(height), bottom)]
    if not (box[0] < box[2] and box[1] < box[3]):
        raise ValueError(
            f"{file} has a box for an object {name!r} that covers nothing of the image of {width} × {height} pixels: "
            f"xmin, ymin, xmax, ymax are {', '.join(f'{corner:g}' for corner in corners)}"
        )
    return box, VOC_CLASSES.index(name), difficult
