"""From an image file to the square that the network sees: cut out at random to learn from, in the middle to be judged.

Shape letters: B images, S side of the square.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from asc.data.keyed import Key
from asc.data.loading import Place, Shuffled
from asc.pretrain.augment import AugmentConfig, Draws, crop_boxes, draw
from asc.tasks.classify.datasets import ImageSet

Crop = Literal["resized", "random", "centre"]
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class ViewConfig:
    """What is cut out of an image. Whatever its size, the result has that of the network: small images are enlarged."""

    crop: Crop = "resized"
    """Of training images: ``resized``, a random part of any size and place (random resized crop); ``random``, a square
    at a random place, of the size that ``margin`` says; ``centre``, the middle. Images to be judged: always the
    middle."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Least and largest share of the area that a ``resized`` crop covers."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Least and largest width / height of a ``resized`` crop."""
    flip: float = 0.5
    """How often left and right of training images are exchanged."""
    margin: float = 1.0
    """Shorter side of the image as a multiple of the square's: 1, the largest square; 256 / 224, as is usual for
    ImageNet. For ``random`` and for images to be judged."""

    def __post_init__(self) -> None:
        if self.crop not in get_args(Crop):
            raise ValueError(f"view.crop must be one of {', '.join(get_args(Crop))}, not {self.crop!r}")
        if not 1.0 <= self.margin < 100:
            raise ValueError(f"view.margin must be at least 1, got {self.margin}")
        self.augment(1)

    def augment(self, size: int) -> AugmentConfig:
        """The part of the pre-training augmentation that is used here, which checks the ranges too."""
        return AugmentConfig(
            size=size,
            crop_scale=self.scale,
            crop_ratio=self.ratio,
            flip_probability=self.flip,
            jitter_probability=0.0,
            grey_probability=0.0,
            blur_probability=0.0,
        )


class ViewBatch(NamedTuple):
    """Squares of the images of one batch."""

    images_BSS3: Tensor
    """Bytes."""
    labels: Tensor
    """Classes (B,), or (B, K)."""
    samples: list[int]
    """Their numbers in the set."""


class TrainingViews(TorchDataset[ViewBatch]):
    """Random views in a shuffled order, the same for a seed with any number of processes and workers."""

    def __init__(self, images: ImageSet, view: ViewConfig, size: int, seed: int) -> None:
        self.images, self.view, self.size, self.seed = images, view, size, seed
        self.order = Shuffled(len(images), seed)

    def __getitem__(self, positions: list[int]) -> ViewBatch:
        places = [self.order.place(position) for position in positions]
        opened = [self.images.image(place.sample) for place in places]
        boxes, flips = self._draw(places, [(image.height, image.width) for image in opened])
        views = [_cut(image, box, self.size, flip) for image, box, flip in zip(opened, boxes, flips, strict=True)]
        return _batch(self.images, views, [place.sample for place in places])

    def _draw(self, places: Sequence[Place], sizes: Sequence[tuple[int, int]]) -> tuple[list[Box], list[bool]]:
        config = self.view.augment(self.size)
        draws = draw(config, [Key(self.seed, place.epoch, place.sample, 0) for place in places])
        flips: list[bool] = draws.flip_B.tolist()
        if self.view.crop == "centre":
            return [centre_box(size, self.view.margin) for size in sizes], flips
        if self.view.crop == "random":
            return _squares(draws, sizes, self.view.margin), flips
        boxes_B4 = crop_boxes(draws, torch.tensor(sizes), config).tolist()
        return [(left, top, left + width, top + height) for top, left, height, width in boxes_B4], flips


class CentreViews(TorchDataset[ViewBatch]):
    """The middle of every image, in order; positions behind the last image are passed over."""

    def __init__(self, images: ImageSet, size: int, margin: float) -> None:
        self.images, self.size, self.margin = images, size, margin

    def __getitem__(self, positions: list[int]) -> ViewBatch:
        samples = [position for position in positions if position < len(self.images)]
        views = []
        for sample in samples:
            image = self.images.image(sample)
            views.append(_cut(image, centre_box((image.height, image.width), self.margin), self.size, flip=False))
        return _batch(self.images, views, samples)


def centre_box(size: tuple[int, int], margin: float) -> Box:
    """The square in the middle (left, top, right, bottom) of an image of this height and width."""
    height, width = size
    side = min(height, width) / margin
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _squares(draws: Draws, sizes: Sequence[tuple[int, int]], margin: float) -> list[Box]:
    boxes = []
    for (height, width), (down, right) in zip(sizes, draws.place_B2.tolist(), strict=True):
        side = min(height, width) / margin
        left, top = right * (width - side), down * (height - side)
        boxes.append((left, top, left + side, top + side))
    return boxes


def _cut(image: Image.Image, box: Box, size: int, flip: bool) -> NDArray[np.uint8]:
    # Rounding may put an edge a hair outside, which Pillow refuses.
    inside = (max(0.0, box[0]), max(0.0, box[1]), min(image.width, box[2]), min(image.height, box[3]))
    view = image.resize((size, size), Image.Resampling.BICUBIC, box=inside)
    pixels_SS3 = np.asarray(view)
    return pixels_SS3[:, ::-1] if flip else pixels_SS3


def _batch(images: ImageSet, views: list[NDArray[np.uint8]], samples: list[int]) -> ViewBatch:
    return ViewBatch(torch.from_numpy(np.stack(views)), images.labels[torch.tensor(samples)], samples)
