"""Images with a class for every pixel: PASCAL VOC, or the embedded scenes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from asc.data.scenes import CLASSES, Frame
from asc.data.voc import VOC_CLASSES
from asc.tasks.images import (
    Pair,
    Pairs,
    PairsConfig,
    Pixels,
    SceneFrames,
    Truth,
    checked_pair,
    file_key,
    read_image,
)
from asc.tasks.segment.losses import VOID

SCENES = "scenes"
SEGMENT_CLASSES = ("background", *VOC_CLASSES)
SCENE_CLASSES = ("background", *CLASSES)

# Masks of the augmented list (SBD) are often kept beside the official ones.
_AUGMENTED_MASKS = "SegmentationClassAug"


@dataclass(frozen=True)
class SegmentDataConfig(PairsConfig):
    """Which images."""

    train: str | None = None
    """List to learn from, by its name in ``ImageSets/Segmentation``; None: ``trainaug`` where it is there, else
    ``train``."""
    val: str = "val"
    """List to be judged by."""


@dataclass(frozen=True)
class SegmentData:
    """What to learn from and what to be judged by."""

    train: Pairs
    val: Pairs
    classes: tuple[str, ...]


def open_segment_data(data: str, config: SegmentDataConfig) -> SegmentData:
    """``scenes``, or the folder of PASCAL VOC 2012 (that of ``JPEGImages``, or one that holds ``VOCdevkit``)."""
    if data == SCENES:
        return SegmentData(*config.open_scenes(ScenePairs), SCENE_CLASSES)
    folder = voc_folder(Path(data))
    name = config.train
    if name is None:
        name = "trainaug" if (folder / "ImageSets" / "Segmentation" / "trainaug.txt").is_file() else "train"
    return SegmentData(VocPairs(folder, name, config.most), VocPairs(folder, config.val), SEGMENT_CLASSES)


def voc_folder(path: Path) -> Path:
    """The folder with ``JPEGImages`` below or at a path."""
    for folder in (path, path / "VOC2012", path / "VOCdevkit" / "VOC2012"):
        if (folder / "JPEGImages").is_dir():
            return folder
    raise ValueError(f"{path} has not the layout of PASCAL VOC: no VOCdevkit/VOC2012/JPEGImages is there")


class VocPairs(Pairs):
    """The images of one list of PASCAL VOC with their masks."""

    padding = float(VOID)

    def __init__(self, folder: Path, part: str, most: int | None = None) -> None:
        self.folder = folder
        self.name = f"{folder.name} {part}"
        file = folder / "ImageSets" / "Segmentation" / f"{part}.txt"
        if not file.is_file():
            raise ValueError(f"there is no list {file}")
        self.ids = [name for line in file.read_text().splitlines() if (name := _image_of(line))][:most]
        if not self.ids:
            raise ValueError(f"{file} names no image")

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, index: int) -> Pair:
        """One image with its classes."""
        image, mask = self._image(index), self._mask(index)
        classes_HW = read_mask(mask, len(SEGMENT_CLASSES))
        return checked_pair(read_image(image, as_stored=True), classes_HW, image, mask)

    def source(self, index: int) -> str:
        """The image's file."""
        return str(self._image(index))

    def key(self, index: int) -> str:
        """Both files."""
        return file_key(self._image(index), self._mask(index))

    def _image(self, index: int) -> Path:
        return self.folder / "JPEGImages" / f"{self.ids[index]}.jpg"

    def _mask(self, index: int) -> Path:
        official = self.folder / "SegmentationClass" / f"{self.ids[index]}.png"
        return official if official.is_file() else self.folder / _AUGMENTED_MASKS / f"{self.ids[index]}.png"


def _image_of(line: str) -> str:
    # The augmented list names files rather than images: /JPEGImages/2007_000032.jpg /SegmentationClassAug/...
    return Path(line.split()[0]).stem if line.split() else ""


def read_mask(file: Path, classes: int) -> Pixels:
    """The classes (H, W) of a mask; indices of a palette, or plain grey values."""
    try:
        with Image.open(file) as opened:
            if opened.mode not in ("P", "L"):
                raise ValueError(f"{file} is no mask of classes: its mode is {opened.mode}, not P or L")
            mask_HW = np.array(opened)
    except OSError as error:
        raise ValueError(f"{file}: not a mask that can be read ({error})") from error
    known_HW = (mask_HW < classes) | (mask_HW == VOID)
    if not known_HW.all():
        wrong = int(mask_HW[~known_HW].max())
        raise ValueError(f"{file} holds the class {wrong}; classes go from 0 to {classes - 1}, and {VOID} for void")
    return mask_HW


class ScenePairs(SceneFrames):
    """Scenes with their exact masks: 0 background, then the classes of ``asc.data.CLASSES``."""

    padding = float(VOID)

    def truth_of(self, frame: Frame) -> Truth:
        """The classes of a frame."""
        return frame.semantic_HW
