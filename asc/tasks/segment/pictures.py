"""Pictures of classes."""

from __future__ import annotations

import numpy as np

from asc.tasks.images import Pixels, Truth


def palette() -> Pixels:
    """The usual colours (256, 3) of PASCAL VOC: the bits of a class spread over the three channels."""
    numbers_N = np.arange(256)
    colours_N3 = np.zeros((256, 3), dtype=np.uint8)
    for bit in range(8):
        for channel in range(3):
            on_N = (numbers_N >> (3 * bit + channel)) & 1
            colours_N3[:, channel] |= (on_N << (7 - bit)).astype(np.uint8)
    return colours_N3


_PALETTE = palette()


def paint_classes(classes_HW: Truth) -> Pixels:
    """A picture (H, W, 3) with a colour for every class; void is nearly white."""
    painted_HW3: Pixels = _PALETTE[classes_HW]
    return painted_HW3
