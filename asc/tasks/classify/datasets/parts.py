"""One part of a dataset (training, validation, test): images with labels, opened one at a time.

Shape letters: N images, K classes.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from asc.data.scenes import CLASSES, Scene, SceneConfig
from asc.tasks.files import file_size, open_rgb

Metric = Literal["top1", "mean_per_class", "map11"]
"""Top-1 accuracy, accuracy averaged over the classes, 11-point mean average precision."""


class ImageSet(Protocol):
    """One part of a dataset; it can be sent to other processes."""

    name: str
    """What messages call it, such as ``cifar10/train``."""
    classes: list[str]
    """Names of the classes."""
    labels: Tensor
    """Class of every image (N,), int64. With several labels an image: (N, K), 1 where the class is shown, 0 where it
    is not, -1 where it is not counted (all its objects are difficult)."""

    def __len__(self) -> int:
        """Number of images."""

    def image(self, index: int) -> Image.Image:
        """An image in RGB at its full size; a broken file raises a ValueError that names it."""

    def source(self, index: int) -> str:
        """The file of an image; ``file:number`` where one file holds many."""

    def key(self, index: int) -> str:
        """What tells an image from all others of the dataset, wherever the folder lies: its file and its size."""

    def fingerprint(self) -> str:
        """Hex digest of what the part consists of.

        Over names and sizes of the files and their labels, not over their bytes, so that it is cheap; wherever the
        folder lies, it stays the same. CIFAR's pixels are in memory and go in themselves.
        """


class Part(ImageSet, Protocol):
    """A part that can be divided further."""

    def take(self, name: str, indices: Sequence[int] | NDArray[np.int64]) -> Self:
        """Some of the images."""


@dataclass
class FileImages:
    """Images that are files."""

    name: str
    classes: list[str]
    labels: Tensor
    root: Path
    """The folder that ``files`` are relative to."""
    files: list[str]
    """Where the images lie."""
    as_stored: bool = False
    """Whether an EXIF orientation is passed over, as whoever reports numbers on official releases does."""

    def __len__(self) -> int:
        return len(self.files)

    def image(self, index: int) -> Image.Image:
        """An image in RGB."""
        return open_rgb(self.root / self.files[index], self.as_stored)

    def source(self, index: int) -> str:
        """The file of an image."""
        return str(self.root / self.files[index])

    def key(self, index: int) -> str:
        """File and size."""
        return f"{self.files[index]}\t{file_size(self.root / self.files[index])}"

    def fingerprint(self) -> str:
        """Digest over names, sizes and labels."""
        digest = _digest(self)
        for index in range(len(self)):
            digest.update(f"{self.key(index)}\n".encode())
        return digest.hexdigest()

    def take(self, name: str, indices: Sequence[int] | NDArray[np.int64]) -> FileImages:
        """Some of the images."""
        chosen = torch.as_tensor(np.asarray(indices, dtype=np.int64))
        return replace(self, name=name, labels=self.labels[chosen], files=[self.files[i] for i in indices])


@dataclass
class ArrayImages:
    """Images of one size that are held in memory."""

    name: str
    classes: list[str]
    labels: Tensor
    images_NHW3: NDArray[np.uint8]
    """The pixels."""
    file: str
    """The file or folder they come from."""
    numbers_N: NDArray[np.int64]
    """Their numbers in that file."""

    def __len__(self) -> int:
        return len(self.images_NHW3)

    def image(self, index: int) -> Image.Image:
        """An image in RGB."""
        return Image.fromarray(self.images_NHW3[index])

    def source(self, index: int) -> str:
        """The file and the number in it."""
        return f"{self.file}:{self.numbers_N[index]}"

    def key(self, index: int) -> str:
        """Number in the file, and the pixels."""
        pixels = hashlib.sha256(np.ascontiguousarray(self.images_NHW3[index]).tobytes()).hexdigest()
        return f"{self.source(index)}\t{pixels}"

    def fingerprint(self) -> str:
        """Digest over pixels and labels."""
        digest = _digest(self)
        digest.update(np.ascontiguousarray(self.images_NHW3).tobytes())
        return digest.hexdigest()

    def take(self, name: str, indices: Sequence[int] | NDArray[np.int64]) -> ArrayImages:
        """Some of the images."""
        at = np.asarray(indices, dtype=np.int64)
        labels = self.labels[torch.as_tensor(at)]
        return ArrayImages(name, self.classes, labels, self.images_NHW3[at], self.file, self.numbers_N[at])


class SceneImages:
    """The middle frames of embedded scenes, drawn when they are asked for."""

    def __init__(self, name: str, config: SceneConfig, numbers: Sequence[int]) -> None:
        self.name = name
        self.config = config
        self.numbers = list(numbers)
        self.classes = list(CLASSES)
        self.labels = torch.tensor([Scene(config, number).label for number in self.numbers], dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.numbers)

    def image(self, index: int) -> Image.Image:
        """A frame."""
        scene = Scene(self.config, self.numbers[index])
        return Image.fromarray(scene.frame(self.config.frames // 2).image_HW3)

    def source(self, index: int) -> str:
        """What the scene is drawn from."""
        return f"scenes {self.config.split} seed {self.config.seed}:{self.numbers[index]}"

    def key(self, index: int) -> str:
        """All that the scene is drawn from."""
        return f"{self.config} {self.numbers[index]}"

    def fingerprint(self) -> str:
        """Digest over what the scenes are drawn from, and labels."""
        digest = _digest(self)
        digest.update(f"{self.config} {self.numbers}".encode())
        return digest.hexdigest()


class JoinedImages:
    """Several parts one after another."""

    def __init__(self, name: str, parts: Sequence[ImageSet]) -> None:
        self.name = name
        self.parts = list(parts)
        self.classes = parts[0].classes
        self.labels = torch.cat([part.labels for part in parts])
        self._ends = np.cumsum([len(part) for part in parts]).tolist()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _find(self, index: int) -> tuple[ImageSet, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {self.name}, which has {len(self)}")
        number = bisect.bisect_right(self._ends, index)
        return self.parts[number], index - (self._ends[number - 1] if number else 0)

    def image(self, index: int) -> Image.Image:
        """An image in RGB."""
        part, place = self._find(index)
        return part.image(place)

    def source(self, index: int) -> str:
        """The file of an image."""
        part, place = self._find(index)
        return part.source(place)

    def key(self, index: int) -> str:
        """That of the part."""
        part, place = self._find(index)
        return part.key(place)

    def fingerprint(self) -> str:
        """Digest over those of the parts."""
        return hashlib.sha256(" ".join(part.fingerprint() for part in self.parts).encode()).hexdigest()


class SortedImages:
    """The images of a part by their keys: always in the same order, however a dataset was divided into parts."""

    def __init__(self, images: ImageSet) -> None:
        self.name = images.name
        self.classes = images.classes
        self.images = images
        self.keys = [images.key(index) for index in range(len(images))]
        self.order = sorted(range(len(images)), key=self.keys.__getitem__)
        self.labels = images.labels[torch.tensor(self.order)]

    def __len__(self) -> int:
        return len(self.order)

    def image(self, index: int) -> Image.Image:
        """An image in RGB."""
        return self.images.image(self.order[index])

    def source(self, index: int) -> str:
        """The file of an image."""
        return self.images.source(self.order[index])

    def key(self, index: int) -> str:
        """As it was sorted by."""
        return self.keys[self.order[index]]

    def fingerprint(self) -> str:
        """Digest over the keys in their order, and labels."""
        digest = _digest(self)
        digest.update("\n".join(self.keys[index] for index in self.order).encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class Dataset:
    """A dataset that was opened."""

    name: str
    """Its name in the registry."""
    metric: Metric
    """What it is judged by."""
    multi_label: bool
    """Whether an image may show several classes."""
    train: ImageSet
    """To learn from."""
    val: ImageSet
    """To choose settings by: the official part, or a share of the training part, which then lacks it."""
    test: ImageSet
    """To be reported once."""
    notes: list[str] = field(default_factory=list)
    """What is not as in the official release, in words."""

    @property
    def trainval(self) -> ImageSet:
        """Training and validation part together, for the final fit."""
        return JoinedImages(f"{self.name}/trainval", [self.train, self.val])

    def fingerprint(self) -> str:
        """Hex digest over all three parts."""
        return JoinedImages(self.name, [self.train, self.val, self.test]).fingerprint()


def _digest(part: ImageSet) -> hashlib._Hash:
    digest = hashlib.sha256("\n".join(part.classes).encode())
    digest.update(part.labels.contiguous().numpy().tobytes())
    return digest
