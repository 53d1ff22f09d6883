"""Images on a canvas: all of one size, the image at the top left, the rest empty.

The canvas is the same for every image and in training and judging, so that what surrounds an image never depends on
its batch-mates, and a patch has the same position code whenever it is seen. Drawing is apart from applying, as in
``asc.pretrain.augment``: all random numbers come from the key of an image alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import functional as colours

from asc.data.images import DEVIATION, MEAN
from asc.data.keyed import Key, uniforms
from asc.tasks.detect.data import Truth

_ORDERS = tuple(itertools.permutations(range(4)))


@dataclass(frozen=True)
class AugmentConfig:
    """The canvas, and how images to learn from are changed."""

    size: int = 512
    """Side of the square canvas in pixels, a multiple of the patch size. An image fits into it exactly."""
    flip_probability: float = 0.5
    """How often left and right are exchanged."""
    scale: tuple[float, float] = (0.5, 1.5)
    """Least and largest scale, where 1 fits the image into the canvas; of larger images a random part is seen."""
    least_visible: float = 0.3
    """An object counts if at least this share of its box is left in that part."""
    jitter_probability: float = 0.8
    """How often the colours are jittered: brightness, contrast, saturation and hue in a random order."""
    brightness: float = 0.4
    """The brightness is multiplied by a factor from 1 ± this."""
    contrast: float = 0.4
    """The distance from the mean brightness is multiplied by a factor from 1 ± this."""
    saturation: float = 0.4
    """The distance from grey is multiplied by a factor from 1 ± this."""
    hue: float = 0.05
    """The hue is turned by up to this share of the full circle either way; at most 0.5."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"augment.size must be at least 1 pixel, got {self.size}")
        if not (0 < self.scale[0] <= self.scale[1] and math.isfinite(self.scale[1])):
            raise ValueError(f"augment.scale must be (least, largest), both positive, got {self.scale}")
        for name in ("flip_probability", "least_visible", "jitter_probability", "brightness", "contrast", "saturation"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"augment.{name} must be from 0 to 1, got {getattr(self, name)}")
        if not 0 <= self.hue <= 0.5:
            raise ValueError(f"augment.hue must be from 0 to 0.5, got {self.hue}")


class Placed(NamedTuple):
    """An image on the canvas."""

    image_3SS: Tensor
    """Normalised pixels; 0 where there is no image."""
    real: tuple[int, int]
    """Rows and columns that the image fills, from the top left."""
    truth: Truth
    """Its objects in pixels of the canvas."""


class Fit(NamedTuple):
    """How an image came onto the canvas."""

    real: tuple[int, int]
    """Rows and columns that it fills."""
    original: tuple[int, int]
    """Rows and columns of the image itself."""

    def to_image(self, boxes_K4: Tensor) -> Tensor:
        """Boxes in pixels of the canvas as boxes in pixels of the image, nothing outside of it."""
        (rows, columns), (height, width) = self.real, self.original
        scale_4 = boxes_K4.new_tensor([width / columns, height / rows] * 2)
        limit_4 = boxes_K4.new_tensor([width, height] * 2)
        return torch.minimum((boxes_K4 * scale_4).clamp(min=0), limit_4)


def fitted(image_HW3: NDArray[np.uint8], size: int) -> tuple[Tensor, Fit]:
    """An image on the canvas (3, S, S) as it is judged: fitted in, nothing else changed."""
    height, width = image_HW3.shape[:2]
    real = _scaled(height, width, size, 1.0)
    pixels_3HW = _resized(image_HW3, real)
    return _on_canvas(pixels_3HW, size), Fit(real, (height, width))


def middle(image_HW3: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The largest square in the middle of an image; it fills a canvas."""
    height, width = image_HW3.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return image_HW3[top : top + side, left : left + side]


def augmented(image_HW3: NDArray[np.uint8], truth: Truth, config: AugmentConfig, key: Key) -> Placed:
    """An image on the canvas as it is learned from."""
    drawn = uniforms([key], 10)[0]
    flip, jitter, order, scale, down, right, *factors = drawn.tolist()
    height, width = image_HW3.shape[:2]
    low, high = (math.log(limit) for limit in config.scale)
    target = _scaled(height, width, config.size, math.exp(low + (high - low) * scale))
    pixels_3HW = _resized(image_HW3, target)
    boxes_K4 = truth.boxes_K4 * torch.tensor([target[1] / width, target[0] / height] * 2)
    if flip < config.flip_probability:
        pixels_3HW = pixels_3HW.flip(2)
        boxes_K4 = boxes_K4[:, [2, 1, 0, 3]] * torch.tensor([-1, 1, -1, 1]) + torch.tensor([target[1], 0, target[1], 0])
    real = (min(target[0], config.size), min(target[1], config.size))
    top, left = (int(part * (target[axis] - real[axis] + 1)) for axis, part in enumerate((down, right)))
    pixels_3HW = pixels_3HW[:, top : top + real[0], left : left + real[1]]
    seen = _seen(truth._replace(boxes_K4=boxes_K4), top, left, real, config.least_visible)
    if jitter < config.jitter_probability:
        pixels_3HW = _jittered(pixels_3HW, config, _ORDERS[int(order * len(_ORDERS))], factors)
    return Placed(_on_canvas(pixels_3HW, config.size), real, seen)


def _scaled(height: int, width: int, size: int, scale: float) -> tuple[int, int]:
    share = scale * size / max(height, width)
    return max(1, round(height * share)), max(1, round(width * share))


def _resized(image_HW3: NDArray[np.uint8], target: tuple[int, int]) -> Tensor:
    """The image from 0 to 1 in another size."""
    # A copy, because pixels of a file that was just decoded may not be written to.
    pixels_13HW = torch.from_numpy(image_HW3.copy()).permute(2, 0, 1)[None].float()
    if tuple(pixels_13HW.shape[2:]) != target:
        pixels_13HW = F.interpolate(pixels_13HW, target, mode="bilinear", antialias=True)
    return pixels_13HW[0] / 255


def _seen(truth: Truth, top: int, left: int, real: tuple[int, int], least: float) -> Truth:
    """The objects that are left in the part of the image that is seen, their boxes cut off at its border."""
    moved_K4 = truth.boxes_K4 - torch.tensor([left, top] * 2)
    cut_K4 = torch.minimum(moved_K4.clamp(min=0), torch.tensor([real[1], real[0]] * 2))
    share_K = _areas(cut_K4) / _areas(moved_K4)
    kept_K = (share_K >= least) & (cut_K4[:, 2:] > cut_K4[:, :2]).all(1)
    return truth._replace(boxes_K4=cut_K4).only(kept_K)


def _areas(boxes_K4: Tensor) -> Tensor:
    return (boxes_K4[:, 2] - boxes_K4[:, 0]).clamp(min=0) * (boxes_K4[:, 3] - boxes_K4[:, 1]).clamp(min=0)


def _jittered(pixels_3HW: Tensor, config: AugmentConfig, order: Sequence[int], drawn: Sequence[float]) -> Tensor:
    spreads = (config.brightness, config.contrast, config.saturation)
    factors = [1 + spread * (2 * uniform - 1) for spread, uniform in zip(spreads, drawn, strict=False)]
    changes = (
        lambda pixels: colours.adjust_brightness(pixels, factors[0]),
        lambda pixels: colours.adjust_contrast(pixels, factors[1]),
        lambda pixels: colours.adjust_saturation(pixels, factors[2]),
        lambda pixels: colours.adjust_hue(pixels, config.hue * (2 * drawn[3] - 1)),
    )
    for number in order:
        pixels_3HW = changes[number](pixels_3HW)
    return pixels_3HW


def _on_canvas(pixels_3HW: Tensor, size: int) -> Tensor:
    mean_311, deviation_311 = (torch.tensor(x)[:, None, None] for x in (MEAN, DEVIATION))
    normal_3HW = (pixels_3HW - mean_311) / deviation_311
    canvas_3SS = torch.zeros(3, size, size)
    canvas_3SS[:, : normal_3HW.shape[1], : normal_3HW.shape[2]] = normal_3HW
    return canvas_3SS
