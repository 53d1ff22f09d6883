"""Images with a truth for every pixel: reading, augmenting both alike, and padding to whole patches.

Every random number is drawn from the key of a sample (see ``asc.data.keyed``), so that a run gives the same images
with any number of processes and workers, and after any interruption. Shape letters: H, W rows and columns of a stored
image, S, R rows and columns of a crop, B images.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional as colours

from asc.data.images import MEAN
from asc.data.keyed import Key, uniforms
from asc.data.loading import Shuffled
from asc.data.scenes import Frame, Scene, SceneConfig
from asc.files import write_whole
from asc.tasks.files import file_size, open_rgb

Pixels = NDArray[np.uint8]
Truth = NDArray[Any]
Item = TypeVar("Item")

MEAN_COLOUR: tuple[int, int, int] = (round(255 * MEAN[0]), round(255 * MEAN[1]), round(255 * MEAN[2]))
"""What stands where a crop reaches beyond its image; close to zeros once it is normalised."""

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")
# Of entries of a folder that are not used, so many are named.
_NAMED = 4
_ORDERS = tuple(itertools.permutations(range(4)))
# Scale, place, flip, jitter or not, its order, its four factors: each has its own numbers whether used or not.
_NUMBERS = 1 + 2 + 1 + 1 + 1 + 4


# --- Pairs of an image and its truth ----------------------------------------------------------------------


class Pair(NamedTuple):
    """An image and what is to be predicted of each of its pixels."""

    image_HW3: Pixels
    """Bytes."""
    truth_HW: Truth
    """Of the same height and width: classes (uint8) or metres (fp32)."""


class Pairs(ABC):
    """A list of images with their truth."""

    name: str
    """What messages and tables call it."""
    padding: float
    """The truth where there is no image."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> Pair:
        """One image with its truth; what cannot be used is a ValueError that names the file."""

    @abstractmethod
    def source(self, index: int) -> str:
        """The file or scene behind a pair."""

    @abstractmethod
    def key(self, index: int) -> str:
        """What tells a pair from all others, wherever the folder lies: its files and their sizes."""

    def fingerprint(self, most: int | None = None) -> str:
        """Hex digest of what the first ``most`` pairs consist of, or all; not over the bytes, so that it is cheap."""
        return keys_digest(self.key, len(self) if most is None else min(most, len(self)))

    def zoomed(self, truth_SR: Truth, factor: float) -> Truth:
        """The truth of an image that was enlarged by a factor; most kinds do not feel it."""
        return truth_SR


class SceneFrames(Pairs):
    """The middle frames of embedded scenes; each is drawn once and kept."""

    def __init__(self, config: SceneConfig, count: int) -> None:
        self.config = config
        self.count = count
        self.name = f"scenes ({config.split})"
        self._drawn: dict[int, Pair] = {}

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> Pair:
        """One frame with its truth."""
        if index not in self._drawn:
            frame = Scene(self.config, index).frame(self.config.frames // 2)
            self._drawn[index] = Pair(frame.image_HW3, self.truth_of(frame))
        return self._drawn[index]

    @abstractmethod
    def truth_of(self, frame: Frame) -> Truth:
        """What is to be predicted of a frame."""

    def source(self, index: int) -> str:
        """The scene's number."""
        return f"scene {index} ({self.config.split})"

    def key(self, index: int) -> str:
        """All that the scene is drawn from."""
        return f"{self.config} {index}"


@dataclass(frozen=True)
class PairsConfig:
    """Which images; what all kinds of truth have in common."""

    most: int | None = None
    """Images to learn from, at most: the first of the list."""
    scenes: int = 512
    """Number of scenes to learn from, where the data are ``scenes``."""
    scenes_judged: int = 128
    """Number of scenes to be judged by."""
    scenes_unseen: bool = True
    """Whether those have textures and hues that are never seen in training; if not, they are the very scenes learned
    from, to see whether a head can learn them at all."""
    scene: SceneConfig = SceneConfig(size=64, frames=8)
    """What the scenes show."""

    def open_scenes(self, kind: Callable[[SceneConfig, int], Pairs]) -> tuple[Pairs, Pairs]:
        """The scenes to learn from and those to be judged by."""
        judged = replace(self.scene, split="test") if self.scenes_unseen else self.scene
        return kind(self.scene, self.scenes), kind(judged, self.scenes_judged)


def read_image(file: Path, as_stored: bool = False) -> Pixels:
    """An image as bytes (H, W, 3); see ``asc.tasks.files.open_rgb``."""
    return np.array(open_rgb(file, as_stored))


def keys_digest(key: Callable[[int], str], count: int) -> str:
    """Hex digest of ``key(0)`` and so on up to ``count``."""
    digest = hashlib.sha256()
    for index in range(count):
        digest.update(f"{key(index)}\n".encode())
    return digest.hexdigest()


def file_key(*files: Path) -> str:
    """Names and sizes of files."""
    return "\t".join(f"{file.name} {file_size(file)}" for file in files)


def checked_pair(image_HW3: Pixels, truth_HW: Truth, image: Path | str, truth: Path | str) -> Pair:
    """The pair, if both have the same size."""
    if image_HW3.shape[:2] != truth_HW.shape:
        height, width = image_HW3.shape[:2]
        found = " x ".join(str(side) for side in reversed(truth_HW.shape))
        raise ValueError(f"{truth} has {found} pixels but its image {image} has {width} x {height}; they must be alike")
    return Pair(image_HW3, truth_HW)


def image_files(folder: Path) -> list[Path]:
    """The images of a folder, by name."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder} of images")
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES)
    if not files:
        raise ValueError(f"{folder} holds no image ({', '.join(IMAGE_SUFFIXES)})")
    return files


class Readable:
    """The images of a list of files, numbered; those that cannot be read are passed over.

    Args:
        files: The files.
        ahead: How many are read before their turn.
    """

    def __init__(self, files: Sequence[Path], ahead: int) -> None:
        self.files = files
        self.ahead = ahead
        self.read: list[Path] = []
        """What was read so far; an image's number is its place here."""
        self.skipped: list[str] = []
        """Of each of the others, what is wrong with it; the file is named."""

    def __iter__(self) -> Iterator[tuple[int, Pixels]]:
        """Numbers and pixels; a ValueError in the end if not one image could be read."""
        for file, found in zip(self.files, read_ahead(self._try, len(self.files), self.ahead), strict=True):
            if isinstance(found, str):
                self.skipped.append(found)
            else:
                self.read.append(file)
                yield len(self.read) - 1, found
        if not self.read:
            raise ValueError(f"no image can be read; the first: {self.skipped[0]}")

    def _try(self, number: int) -> Pixels | str:
        try:
            return read_image(self.files[number])
        except ValueError as error:
            return str(error)

    def tell(self, unread: str) -> None:
        """Name on the terminal what was skipped, and say what else was not read."""
        for line in (self.told, *self.skipped, unread):
            if line:
                print(line)

    def keep(self, file: Path) -> None:
        """Leave a list of what was skipped, one image a line; none where nothing was."""
        file.unlink(missing_ok=True)
        if self.skipped:
            write_whole(file, "".join(f"{line}\n" for line in self.skipped).encode())

    @property
    def told(self) -> str:
        """How many images were skipped, in words; nothing if none was."""
        return f"skipped: {len(self.skipped)}" if self.skipped else ""


def unread_note(others: Sequence[str]) -> str:
    """What else lies beside images, in words; nothing if nothing does."""
    if not others:
        return ""
    what = "1 entry that is no image is" if len(others) == 1 else f"{len(others)} entries that are no images are"
    more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    return f"{what} not used: {', '.join(others[:_NAMED])}{more}"


def read_ahead(read: Callable[[int], Item], count: int, ahead: int) -> Iterator[Item]:
    """``read(0)`` and so on up to ``count``, in order; while one is worked on, the next ones are being read."""
    with ThreadPoolExecutor() as pool:
        coming = deque(pool.submit(read, number) for number in range(min(ahead, count)))
        for number in range(count):
            if number + ahead < count:
                coming.append(pool.submit(read, number + ahead))
            yield coming.popleft().result()


# --- Augmentation -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JointConfig:
    """Random changes of an image and, where they move pixels, of its truth."""

    size: tuple[int, int] = (512, 512)
    """Height and width of a crop in pixels; multiples of the patch size."""
    base: tuple[int, int] | None = None
    """Height and width that every image is brought to before the random scale, its shape kept: the smallest size that
    covers both. None: the size of a crop."""
    scale: tuple[float, float] = (0.5, 2.0)
    """Least and largest random factor of that size."""
    flip_probability: float = 0.5
    """How often left and right are exchanged."""
    jitter_probability: float = 0.5
    """How often the colours are jittered, in a random order of the four below."""
    brightness: float = 0.4
    """The brightness is multiplied by a factor from 1 ± this."""
    contrast: float = 0.4
    """The contrast, likewise."""
    saturation: float = 0.4
    """The saturation, likewise."""
    hue: float = 0.1
    """The hue is turned by up to this share of the full circle; at most 0.5."""

    def __post_init__(self) -> None:
        for name in ("size", "base"):
            sides = getattr(self, name)
            if sides is not None and (len(sides) != 2 or min(sides) < 1):
                raise ValueError(f"augment.{name} must be (height, width) in pixels, got {sides}")
        if not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(f"augment.scale must be (least, largest), both positive, got {self.scale}")
        for name, most in (
            ("flip_probability", 1.0),
            ("jitter_probability", 1.0),
            ("brightness", 1.0),
            ("contrast", 1.0),
            ("saturation", 1.0),
            ("hue", 0.5),
        ):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"augment.{name} must lie between 0 and {most}, got {getattr(self, name)}")


def covering_factor(height: int, width: int, base: tuple[int, int]) -> float:
    """The factor that brings an image to the smallest size that covers ``base`` (height, width)."""
    return max(base[0] / height, base[1] / width)


class Cut(NamedTuple):
    """Where a crop lies, along one side."""

    source: tuple[float, float]
    """From and to, in pixels of the stored image."""
    place: tuple[int, int]
    """From and to, in pixels of the crop: all of it where the image is large enough."""


def cut_side(length: int, factor: float, wanted: int, place: float) -> Cut:
    """A crop of ``wanted`` pixels at a place (0 to 1) of a side that is first made longer by ``factor``."""
    scaled = max(1, round(length * factor))
    kept = min(scaled, wanted)
    first = min(int(place * (abs(scaled - wanted) + 1)), abs(scaled - wanted))
    if scaled < wanted:
        return Cut((0.0, float(length)), (first, first + kept))
    return Cut((first * length / scaled, (first + kept) * length / scaled), (0, kept))


def augmented(pair: Pair, config: JointConfig, key: Key, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """A random crop: bytes (3, S, R) and its truth (S, R); the key decides everything."""
    drawn = uniforms([key], _NUMBERS)[0]
    height, width = pair.truth_HW.shape
    least, largest = config.scale
    # Evenly in octaves: half the size is as likely as twice.
    zoom = least * (largest / least) ** drawn[0]
    factor = covering_factor(height, width, config.base or config.size) * zoom
    rows = cut_side(height, factor, config.size[0], drawn[1])
    columns = cut_side(width, factor, config.size[1], drawn[2])
    box = (columns.source[0], rows.source[0], columns.source[1], rows.source[1])
    image_SR3 = _cut(pair.image_HW3, box, rows, columns, config.size, Image.Resampling.BILINEAR, MEAN_COLOUR)
    truth_SR = _cut(pair.truth_HW, box, rows, columns, config.size, Image.Resampling.NEAREST, pairs.padding)
    truth_SR = pairs.zoomed(truth_SR, zoom)
    if drawn[3] < config.flip_probability:
        image_SR3, truth_SR = image_SR3[:, ::-1], truth_SR[:, ::-1]
    image_3SR = torch.from_numpy(np.ascontiguousarray(image_SR3.transpose(2, 0, 1)))
    if drawn[4] < config.jitter_probability:
        image_3SR = _jittered(image_3SR, config, drawn[5:])
    return image_3SR, torch.from_numpy(np.ascontiguousarray(truth_SR))


def _cut(
    values: Truth,
    box: tuple[float, float, float, float],
    rows: Cut,
    columns: Cut,
    size: tuple[int, int],
    resampling: Image.Resampling,
    fill: Any,
) -> Truth:
    length = (columns.place[1] - columns.place[0], rows.place[1] - rows.place[0])
    part = np.array(Image.fromarray(values).resize(length, resampling, box=box))
    if part.shape[:2] == size:
        return part
    canvas = np.empty((*size, *values.shape[2:]), dtype=values.dtype)
    canvas[:] = fill
    canvas[rows.place[0] : rows.place[1], columns.place[0] : columns.place[1]] = part
    return canvas


def _jittered(image_3SR: Tensor, config: JointConfig, drawn: NDArray[np.float64]) -> Tensor:
    spreads = (config.brightness, config.contrast, config.saturation)
    factors = [1 + spread * (2 * number - 1) for spread, number in zip(spreads, drawn[1:4], strict=True)]
    turn = config.hue * (2 * drawn[4] - 1)
    changes = (
        lambda image: colours.adjust_brightness(image, factors[0]),
        lambda image: colours.adjust_contrast(image, factors[1]),
        lambda image: colours.adjust_saturation(image, factors[2]),
        lambda image: colours.adjust_hue(image, turn) if turn else image,
    )
    for number in _ORDERS[int(drawn[0] * len(_ORDERS))]:
        image_3SR = changes[number](image_3SR)
    return image_3SR


class PairBatch(NamedTuple):
    """A micro-batch of crops."""

    images_B3SR: Tensor
    """Bytes."""
    truth_BSR: Tensor
    """Classes (uint8) or metres (fp32)."""
    positions: list[int]
    """Places in the order of samples; name the batch in messages."""


class PairDataset(Dataset[PairBatch]):
    """Batches of crops by the positions of their samples."""

    def __init__(self, pairs: Pairs, config: JointConfig, seed: int) -> None:
        if len(pairs) == 0:
            raise ValueError(f"{pairs.name} names no image to learn from")
        self.pairs = pairs
        self.config = config
        self.order = Shuffled(len(pairs), seed)

    def __getitem__(self, positions: list[int]) -> PairBatch:
        crops = [self._crop(position) for position in positions]
        return PairBatch(torch.stack([c[0] for c in crops]), torch.stack([c[1] for c in crops]), positions)

    def _crop(self, position: int) -> tuple[Tensor, Tensor]:
        sample, epoch = self.order.place(position)
        return augmented(self.pairs.read(sample), self.config, Key(self.order.seed, epoch, sample, 0), self.pairs)

    def sources(self, positions: Sequence[int]) -> list[str]:
        """The files that samples come from."""
        return [self.pairs.source(self.order.place(position).sample) for position in positions]


# --- Sizes that a network takes ---------------------------------------------------------------------------


def padded_to_patches(images_B3HW: Tensor, patch: int) -> Tensor:
    """Normalised images with rows and columns of the mean colour below and to the right, to whole patches."""
    height, width = images_B3HW.shape[2:]
    # Normalised, the mean colour is zero.
    return F.pad(images_B3HW, (0, -width % patch, 0, -height % patch))


def resized(image_HW3: Pixels, height: int, width: int) -> Pixels:
    """The image in another size, antialiased."""
    if image_HW3.shape[:2] == (height, width):
        return image_HW3
    return np.array(Image.fromarray(image_HW3).resize((width, height), Image.Resampling.BILINEAR))


def covering_size(height: int, width: int, base: tuple[int, int]) -> tuple[int, int]:
    """Height and width of an image brought to the smallest size that covers ``base``, its shape kept."""
    factor = covering_factor(height, width, base)
    return max(1, math.floor(height * factor + 0.5)), max(1, math.floor(width * factor + 0.5))
