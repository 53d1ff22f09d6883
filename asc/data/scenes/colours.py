"""Colours: palettes with hues of their own for each split, and the haze that dulls them with distance."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from asc.data.scenes.common import Array, Rng, Split, farthest

HUES: Final[dict[Split, tuple[tuple[float, float], ...]]] = {
    "train": ((0.00, 0.08), (0.25, 0.33), (0.50, 0.58), (0.75, 0.83)),
    "test": ((0.12, 0.21), (0.37, 0.46), (0.62, 0.71), (0.87, 0.96)),
}
"""Ranges of hue (one turn = 1) from which all colours are drawn; disjoint between the splits."""

_HAZE_DEPTH: Final = 45.0  # distance over which haze takes 63 % of the contrast


def draw_colours(rng: Rng, split: Split, count: int, saturation: tuple[float, float]) -> Array:
    """``count`` random colours (C, 3) in [0, 255] with hues of the split."""
    ranges = np.array(HUES[split])
    low, high = ranges[rng.integers(len(ranges), size=count)].T
    hue = rng.uniform(low, high)
    strength = rng.uniform(*saturation, size=count)
    value = rng.uniform(0.3, 1.0, size=count)
    # The usual closed form of HSV to RGB: each channel is a trapezium over the hue circle.
    k_C3 = (np.array([5.0, 3.0, 1.0]) + 6.0 * hue[:, None]) % 6.0
    dip_C3 = np.clip(np.minimum(k_C3, 4.0 - k_C3), 0.0, 1.0)
    colours_C3: Array = (255.0 * value[:, None] * (1.0 - strength[:, None] * dip_C3)).astype(np.float32)
    return colours_C3


def draw_object_colours(rng: Rng, split: Split, taken_C3: Array) -> Array:
    """Two or three colours (C, 3) for an object, each chosen to stand out from those already in the scene."""
    count = rng.integers(2, 4)
    return np.stack([farthest(draw_colours(rng, split, 6, (0.3, 1.0)), taken_C3) for _ in range(count)])


def faded(colours_C3: Array, contrast: float) -> Array:
    """The colours drawn towards the first of them: for an object, the one that stands out most."""
    faded_C3: Array = colours_C3[0] + contrast * (colours_C3 - colours_C3[0])
    # At full contrast not even the rounding may change.
    return colours_C3 if contrast == 1.0 else faded_C3


def coloured(field_SS: Array, colours_C3: Array, haze_3: Array, depth: float) -> Array:
    """Turns a field in [0, 1] into colour (3, S, S) by a ramp through the colours, seen through haze.

    Far things lose contrast in haze, which makes depth visible in a single image.
    """
    keep = math.exp(-depth / _HAZE_DEPTH)
    hazy_C3 = keep * colours_C3 + (1.0 - keep) * haze_3
    stops = np.linspace(0.0, 255.0, len(hazy_C3))
    ramp_3 = np.stack([np.interp(np.arange(256.0), stops, channel) for channel in hazy_C3.T])
    level_SS = (field_SS * 255.0).astype(np.intp)
    return ramp_3.astype(np.float32).take(level_SS, axis=1, mode="clip")
