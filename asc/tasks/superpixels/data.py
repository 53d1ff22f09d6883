"""Images with segmentations by people or with masks of objects: BSDS500, PASCAL VOC, DAVIS, embedded scenes."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from scipy.io import loadmat

from asc.data.scenes import Scene, SceneConfig
from asc.report.pictures import Labels, Pixels
from asc.tasks.images import image_files, read_image
from asc.tasks.segment.data import SCENES, VocPairs, read_mask, voc_folder
from asc.tasks.superpixels.metrics import split_regions

# What masks of VOC and DAVIS call neither object nor background.
_VOID = 255


class Sample(NamedTuple):
    """An image with what is true of it."""

    image_HW3: Pixels
    """Bytes."""
    truths: tuple[Labels, ...]
    """The segment of every pixel (H, W), one map for each annotator; negative: void. Where there are objects, 0 is the
    background."""


@dataclass(frozen=True)
class QualityDataConfig:
    """Which images."""

    part: str = "val"
    """Part of a dataset that has several, by its name in the official lists or folders."""
    most: int | None = None
    """Images, at most: evenly spread over the part."""
    every: int = 10
    """Of the frames of a DAVIS sequence, each how-manieth is taken; 1: all."""
    year: int = 2017
    """Which lists of DAVIS: 2017, or 2016, whose objects of a frame count as one."""
    scenes: int = 64
    """Number of embedded scenes."""
    scene: SceneConfig = SceneConfig(size=64, frames=8, split="test")
    """What the scenes show."""

    def __post_init__(self) -> None:
        for name in ("most", "every", "scenes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"images.{name} must be at least 1, got {value}")
        if self.year not in (2016, 2017):
            raise ValueError(f"images.year must be 2016 or 2017, got {self.year}")


class QualityData(ABC):
    """A list of images with their truth."""

    name: str
    """What tables call it."""
    objects: bool
    """Whether the truth marks objects; else it is a segmentation of everything."""
    note: str
    """How its truth is read, in a sentence."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> Sample:
        """One image with its truth; what cannot be used is a ValueError that names the file."""

    @abstractmethod
    def title(self, index: int) -> str:
        """A short name of an image."""

    @abstractmethod
    def content(self, index: int) -> list[bytes]:
        """What an image and its truth are made from."""

    def chosen(self, most: int | None) -> list[int]:
        """Numbers of the images, at most ``most``, evenly spread."""
        count = len(self) if most is None else min(most, len(self))
        return [number * len(self) // count for number in range(count)]

    def fingerprint(self, indices: Sequence[int]) -> str:
        """Digest of images and truth."""
        digest = hashlib.sha256()
        for index in indices:
            digest.update(f"{self.title(index)}\n".encode())
            for content in self.content(index):
                digest.update(hashlib.sha256(content).digest())
        return digest.hexdigest()


def open_quality_data(data: str, config: QualityDataConfig) -> QualityData:
    """The dataset that a word or a folder means: ``scenes``, or one of three official layouts."""
    if data == SCENES:
        return SceneObjects(config.scene, config.scenes)
    root = Path(data)
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}: data is {SCENES!r}, or a folder of BSDS500, PASCAL VOC or DAVIS")
    for folders in _bsds_folders(root, config.part):
        if all(folder.is_dir() for folder in folders):
            return Bsds(*folders)
    if (root / "Annotations").is_dir() and _davis_resolution(root) is not None:
        return Davis(root, config)
    try:
        return VocObjects(voc_folder(root), config.part)
    except ValueError as error:
        if "layout" not in str(error):
            raise
        raise ValueError(
            f"{root} has none of the known layouts: BSDS500 (images/ and groundTruth/, themselves or with "
            f"{config.part}/ above or below them), PASCAL VOC (VOCdevkit/VOC2012/JPEGImages) or DAVIS (JPEGImages/480p)"
        ) from error


# --- BSDS500 ----------------------------------------------------------------------------------------------


def _bsds_folders(root: Path, part: str) -> list[tuple[Path, Path]]:
    """Where images and truth may lie: in a part's own folder, or as the official archive has them."""
    folders = [(root / "images", root / "groundTruth"), (root / part / "images", root / part / "groundTruth")]
    for top in (root, root / "data", root / "BSDS500" / "data"):
        folders.append((top / "images" / part, top / "groundTruth" / part))
    # The official archive has images/ and groundTruth/ as well, with the parts inside: those are meant then.
    return folders if not (root / "images" / part).is_dir() else folders[::-1]


class Bsds(QualityData):
    """Photographs with the segmentations of several people."""

    objects = False
    note = "Every annotator's segmentation is scored by itself, then their mean is taken."

    def __init__(self, images: Path, truth: Path) -> None:
        self.files = image_files(images)
        self.truth = truth
        part = images.name if images.parent.name == "images" else images.parent.name
        self.name = f"BSDS500 {part}"

    def __len__(self) -> int:
        return len(self.files)

    def title(self, index: int) -> str:
        """The image's number."""
        return self.files[index].stem

    def content(self, index: int) -> list[bytes]:
        """Both files."""
        return [file.read_bytes() for file in (self.files[index], self._truth(index))]

    def read(self, index: int) -> Sample:
        """One photograph with all its segmentations."""
        image_HW3, file = read_image(self.files[index], as_stored=True), self._truth(index)
        truths = tuple(read_segmentations(file))
        for truth_HW in truths:
            _check_size(image_HW3, truth_HW, self.files[index], file)
        return Sample(image_HW3, truths)

    def _truth(self, index: int) -> Path:
        file = self.truth / f"{self.files[index].stem}.mat"
        if not file.is_file():
            raise ValueError(f"there is no {file}, the segmentations of {self.files[index]}; get BSDS500 anew")
        return file


def read_segmentations(file: Path) -> list[Labels]:
    """All segmentations of a file of BSDS500, segments counted from 0."""
    try:
        cells = loadmat(file)["groundTruth"].ravel()
        maps: list[Labels] = [np.asarray(cell["Segmentation"].item()).astype(np.int64) - 1 for cell in cells]
    except Exception as error:  # scipy raises many kinds on files that are something else
        raise ValueError(
            f"{file} is no ground truth of BSDS500 (a cell array groundTruth with Segmentation in each cell): {error}"
        ) from error
    if not maps or any(segments_HW.ndim != 2 for segments_HW in maps):
        raise ValueError(f"{file} holds no segmentation of two dimensions; get BSDS500 anew")
    return maps


# --- Objects ----------------------------------------------------------------------------------------------


class SceneObjects(QualityData):
    """The middle frames of embedded scenes with the exact masks of their objects."""

    objects = True
    note = "The masks are exact: the scenes are drawn."

    def __init__(self, config: SceneConfig, count: int) -> None:
        self.config = config
        self.count = count
        self.name = f"scenes ({config.split})"

    def __len__(self) -> int:
        return self.count

    def title(self, index: int) -> str:
        """The scene's number."""
        return f"scene {index}"

    def content(self, index: int) -> list[bytes]:
        """The settings: they decide every pixel."""
        return [repr((self.config, index)).encode()]

    def read(self, index: int) -> Sample:
        """One frame with its objects."""
        frame = Scene(self.config, index).frame(self.config.frames // 2)
        return Sample(frame.image_HW3, (frame.instance_HW.astype(np.int64),))


class VocObjects(QualityData):
    """Photographs of PASCAL VOC with their objects."""

    objects = True

    def __init__(self, folder: Path, part: str) -> None:
        self.pairs = VocPairs(folder, part)
        self.name = self.pairs.name
        self.masks = folder / "SegmentationObject"
        self.note = "Objects as in SegmentationObject; void pixels count nowhere."
        if not self.masks.is_dir():
            self.note = (
                "There is no SegmentationObject: every 8-connected region of a class counts as one object. Void pixels "
                "count nowhere."
            )

    def __len__(self) -> int:
        return len(self.pairs)

    def title(self, index: int) -> str:
        """The image's number."""
        return self.pairs.ids[index]

    def content(self, index: int) -> list[bytes]:
        """Pixels of the image and of the mask."""
        sample = self.read(index)
        return [sample.image_HW3.tobytes(), sample.truths[0].tobytes()]

    def read(self, index: int) -> Sample:
        """One photograph with its objects."""
        image_HW3, classes_HW = self.pairs.read(index)
        if self.masks.is_dir():
            file = self.masks / f"{self.pairs.ids[index]}.png"
            numbers_HW = _void_aside(read_mask(file, _VOID))
            _check_size(image_HW3, numbers_HW, self.pairs.source(index), file)
            return Sample(image_HW3, (numbers_HW,))
        return Sample(image_HW3, (_class_regions(_void_aside(classes_HW)),))


def _class_regions(classes_HW: Labels) -> Labels:
    """Regions of classes as numbered objects."""
    things_HW = classes_HW > 0
    regions_HW = split_regions(classes_HW)
    numbers_HW = np.where(classes_HW < 0, -1, 0)
    numbers_HW[things_HW] = 1 + np.unique(regions_HW[things_HW], return_inverse=True)[1]
    return numbers_HW


class Davis(QualityData):
    """Frames of videos with the masks of their objects."""

    objects = True

    def __init__(self, root: Path, config: QualityDataConfig) -> None:
        resolution = _davis_resolution(root)
        assert resolution is not None
        self.images, self.masks = root / "JPEGImages" / resolution, root / "Annotations" / resolution
        self.single = config.year == 2016
        self.name = f"DAVIS {config.year} {config.part}"
        self.note = f"Each {config.every}. frame of a sequence, from the first." if config.every > 1 else "All frames."
        self.frames: list[Path] = []
        for sequence in _davis_sequences(root, resolution, config):
            self.frames += image_files(self.images / sequence)[:: config.every]

    def __len__(self) -> int:
        return len(self.frames)

    def title(self, index: int) -> str:
        """Sequence and frame."""
        return f"{self.frames[index].parent.name}/{self.frames[index].stem}"

    def content(self, index: int) -> list[bytes]:
        """Both files."""
        return [file.read_bytes() for file in (self.frames[index], self._mask(index))]

    def read(self, index: int) -> Sample:
        """One frame with its objects."""
        image_HW3, file = read_image(self.frames[index], as_stored=True), self._mask(index)
        numbers_HW = _palette_numbers(file)
        _check_size(image_HW3, numbers_HW, self.frames[index], file)
        if self.single:
            numbers_HW = np.minimum(numbers_HW, 1)
        return Sample(image_HW3, (numbers_HW,))

    def _mask(self, index: int) -> Path:
        frame = self.frames[index]
        file = self.masks / frame.parent.name / f"{frame.stem}.png"
        if not file.is_file():
            raise ValueError(f"there is no {file}, the mask of {frame}; get the annotations of DAVIS for this part")
        return file


def _davis_resolution(root: Path) -> str | None:
    for resolution in ("480p", "Full-Resolution", "1080p"):
        if (root / "JPEGImages" / resolution).is_dir():
            return resolution
    return None


def _davis_sequences(root: Path, resolution: str, config: QualityDataConfig) -> list[str]:
    lists = root / "ImageSets"
    # The archive of 2016 lists frames by resolution, that of 2017 sequences by year.
    files = [lists / str(config.year) / f"{config.part}.txt", lists / resolution / f"{config.part}.txt"]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise ValueError(f"there is no list {files[0]}; images.part and images.year say which list is meant")
    lines = [line.split()[0] for line in file.read_text().splitlines() if line.split()]
    names = list(dict.fromkeys(Path(line).parent.name if "/" in line else line for line in lines))
    if not names:
        raise ValueError(f"{file} names no sequence")
    return names


def _palette_numbers(file: Path) -> Labels:
    """The object of every pixel: indices of a palette, or black and white as in 2016."""
    try:
        with Image.open(file) as opened:
            if opened.mode == "P":
                return _void_aside(np.array(opened))
            grey_HW = np.array(opened.convert("L"))
    except OSError as error:
        raise ValueError(f"{file}: not a mask that can be read ({error})") from error
    if not np.isin(grey_HW, (0, 255)).all():
        raise ValueError(f"{file} is no mask of objects: neither a palette nor black and white")
    return (grey_HW > 0).astype(np.int64)


def _void_aside(mask_HW: Pixels) -> Labels:
    numbers_HW = mask_HW.astype(np.int64)
    numbers_HW[mask_HW == _VOID] = -1
    return numbers_HW


def _check_size(image_HW3: Pixels, truth_HW: Labels, image: Path | str, truth: Path) -> None:
    if image_HW3.shape[:2] != truth_HW.shape:
        height, width = image_HW3.shape[:2]
        found = " x ".join(str(side) for side in reversed(truth_HW.shape))
        raise ValueError(f"{truth} has {found} pixels but its image {image} has {width} x {height}; they must be alike")
