"""Pictures of superpixels: arrays in, RGB bytes out.

Shape letters (suffixes of array names)
    H, W  rows and columns of the picture      h, w  rows and columns of the patch grid
    N     superpixels                          3     red, green, blue
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Pixels = NDArray[np.uint8]
Labels = NDArray[np.integer[Any]]
Colour = tuple[int, int, int]

LINE: Colour = (255, 255, 255)
"""Colour of the lines between superpixels."""

_PAPER: Colour = (255, 255, 255)
_INK: Colour = (32, 33, 36)


def pixel_labels(labels_hw: Labels, height: int, width: int) -> Labels:
    """The superpixel of every pixel, from that of every patch (or of every pixel already)."""
    rows, columns = labels_hw.shape
    if height % rows or width % columns:
        raise ValueError(f"labels of {rows} × {columns} patches do not fit a picture of {height} × {width} pixels")
    return labels_hw.repeat(height // rows, axis=0).repeat(width // columns, axis=1)


def enlarged(image_HW3: Pixels, side: int = 240) -> Pixels:
    """The image with every pixel repeated, up to ``side`` pixels: lines drawn on it stay thin beside its pixels."""
    times = max(1, side // max(image_HW3.shape[:2]))
    return image_HW3.repeat(times, axis=0).repeat(times, axis=1)


def boundaries(labels_HW: Labels) -> NDArray[np.bool_]:
    """Pixels that belong to another superpixel than the pixel to the right or the one below.

    Only one side of a border is marked, so that lines are one pixel wide: patches are often four pixels.
    """
    line_HW = np.zeros(labels_HW.shape, dtype=np.bool_)
    line_HW[:, :-1] |= labels_HW[:, :-1] != labels_HW[:, 1:]
    line_HW[:-1] |= labels_HW[:-1] != labels_HW[1:]
    return line_HW


def draw_boundaries(image_HW3: Pixels, labels_hw: Labels, colour: Colour = LINE) -> Pixels:
    """The image with the borders of its superpixels drawn on it."""
    drawn_HW3 = image_HW3.copy()
    drawn_HW3[boundaries(pixel_labels(labels_hw, *image_HW3.shape[:2]))] = colour
    return drawn_HW3


def paint_means(image_HW3: Pixels, labels_hw: Labels) -> Pixels:
    """The image with every superpixel painted in its mean colour."""
    labels_HW = pixel_labels(labels_hw, *image_HW3.shape[:2])
    _, index_P, count_N = np.unique(labels_HW, return_inverse=True, return_counts=True)
    index_P = index_P.reshape(-1)
    sums_3N = [np.bincount(index_P, weights=channel_P) for channel_P in image_HW3.reshape(-1, 3).T]
    means_N3 = np.rint(np.stack(sums_3N, axis=1) / count_N[:, None]).astype(np.uint8)
    painted_HW3: Pixels = means_N3[index_P].reshape(image_HW3.shape)
    return painted_HW3


def contact_sheet(
    rows: Sequence[Sequence[Pixels]],
    headings: Sequence[str] = (),
    captions: Sequence[Sequence[str]] = (),
    gap: int = 8,
) -> Pixels:
    """Rows of pictures of one size on white paper; a single row makes a strip.

    Args:
        rows: The pictures, row by row; every row has equally many.
        headings: A line of text above each column.
        captions: A line of text below each picture, row by row.
        gap: Pixels between pictures and around them.
    """
    if not rows or len({len(row) for row in rows}) > 1 or len({picture.shape for row in rows for picture in row}) != 1:
        raise ValueError("a contact sheet needs rows of equally many pictures, all of one size")
    height, width = rows[0][0].shape[:2]
    text = max(14, width // 14)
    above, below = (text + gap if headings else 0), (text + gap if captions else 0)
    pitch_y, pitch_x = height + below + gap, width + gap
    size = (gap + len(rows[0]) * pitch_x, gap + above + len(rows) * pitch_y)
    sheet = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(text)
    for x, heading in enumerate(headings):
        draw.text((gap + x * pitch_x, gap), heading, fill=_INK, font=font)
    for y, row in enumerate(rows):
        for x, picture_HW3 in enumerate(row):
            corner = (gap + x * pitch_x, gap + above + y * pitch_y)
            sheet.paste(Image.fromarray(picture_HW3), corner)
            if captions:
                draw.text((corner[0], corner[1] + height + gap // 2), captions[y][x], fill=_INK, font=font)
    return np.asarray(sheet)
