"""What superpixels are compared with, at equal numbers: the square grid and SLIC."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import numpy as np

from asc.report.pictures import Labels, Pixels
from asc.tasks.superpixels.metrics import count_superpixels, split_regions

Method = Literal["grid", "slic"]
METHODS: tuple[Method, ...] = get_args(Method)

# A cell of the grid may be this much longer than wide, or the other way round: hardly any number is a product of two
# that divide an image into squares.
_MOST_OBLONG = 1.5
# SLIC is asked for other numbers until it gives nearly the wanted one (it cannot give every number), at most so often.
_TRIES, _NEAR = 10, 0.005


def enlarged_labels(labels_hw: Labels, height: int, width: int) -> Labels:
    """Labels of patches as labels of pixels: each pixel takes the patch that its centre lies in."""
    rows, columns = labels_hw.shape
    row_H = ((np.arange(height) + 0.5) * rows / height).astype(np.int64)
    column_W = ((np.arange(width) + 0.5) * columns / width).astype(np.int64)
    enlarged_HW: Labels = labels_hw[row_H[:, None], column_W]
    return enlarged_HW


def grid_shape(count: int, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of a grid with at least ``count`` cells, and as few more as nearly square cells allow.

    Never fewer cells, so that the grid is never at a disadvantage.
    """
    if not 1 <= count <= height * width:
        raise ValueError(f"a grid of {count} cells does not fit an image of {width} x {height} pixels")
    shapes = [(rows, -(-count // rows)) for rows in range(1, min(count, height) + 1)]
    shapes = [(rows, columns) for rows, columns in shapes if columns <= width]
    oblong = {shape: _oblong(shape, height, width) for shape in shapes}
    # Where no shape is square enough (two cells in a square image), the squarest will do.
    limit = max(_MOST_OBLONG, min(oblong.values()))
    fitting = [shape for shape in shapes if oblong[shape] <= limit]
    return min(fitting, key=lambda shape: (shape[0] * shape[1], oblong[shape]))


def _oblong(shape: tuple[int, int], height: int, width: int) -> float:
    aspect = (height / shape[0]) / (width / shape[1])
    return max(aspect, 1 / aspect)


def grid_labels(count: int, height: int, width: int) -> Labels:
    """A grid of nearly square cells, drawn in pixels."""
    rows, columns = grid_shape(count, height, width)
    return enlarged_labels(np.arange(rows * columns).reshape(rows, columns), height, width)


class Slic:
    """SLIC of one image at wanted numbers of superpixels.

    Args:
        image_HW3: The image.
        settings: Of ``skimage.segmentation.slic``: compactness and the like.
        split: Whether 8-connected regions are counted.
    """

    def __init__(self, image_HW3: Pixels, settings: Mapping[str, Any], split: bool = True) -> None:
        self.image_HW3 = image_HW3
        self.settings = settings
        self.split = split
        self._made: dict[int, Labels] = {}

    def labels(self, count: int) -> Labels:
        """The labels whose number is nearest to ``count``; of two as near, those that are more."""
        pixels = self.image_HW3.shape[0] * self.image_HW3.shape[1]
        asked = nearest_count(lambda number: count_superpixels(self._of(number)), count, pixels)
        return self._of(asked)

    def _of(self, asked: int) -> Labels:
        if asked not in self._made:
            from skimage.segmentation import slic

            labels_HW = slic(self.image_HW3, n_segments=asked, start_label=0, channel_axis=-1, **self.settings)
            self._made[asked] = split_regions(labels_HW) if self.split else labels_HW
        return self._made[asked]


def nearest_count(given: Callable[[int], int], wanted: int, most: int) -> int:
    """What to ask for so that the number that is ``given`` comes near to the wanted one; it rises nearly evenly."""
    seen: dict[int, int] = {}
    low, high, ask = 1, most, wanted
    for _ in range(_TRIES):
        seen[ask] = given(ask)
        if abs(seen[ask] - wanted) <= _NEAR * wanted:
            return ask
        low, high = (ask + 1, high) if seen[ask] < wanted else (low, ask - 1)
        if low > high:
            break
        # In proportion first, which is nearly right; then halving, which is sure.
        guess = ask * wanted / seen[ask] if len(seen) < _TRIES // 2 else math.sqrt(low * high)
        ask = min(max(round(guess), low), high)
    return min(seen, key=lambda asked: (abs(seen[asked] - wanted), -seen[asked]))
