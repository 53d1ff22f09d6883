"""The ten classes of objects, each an outline that ``form`` in [-1, 1] varies in its proportions.

An outline is a function of the local coordinates that is like a signed distance: negative inside, zero on the
edge, where its slope is about one. Its values near zero are what makes anti-aliased edges possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from asc.data.scenes.common import Array, cell_centres, larger, length, smaller


def _disk(u: Array, v: Array, form: float) -> Array:
    return length(u, v) - 1.0


def _square(u: Array, v: Array, form: float) -> Array:
    taper = 1.0 + 0.12 * form * v
    return larger(abs(u) * taper, abs(v)) - 0.67


def _triangle(u: Array, v: Array, form: float) -> Array:
    leaning_u = u + 0.1 * form * v
    return larger(-v, 0.866 * abs(leaning_u) + 0.5 * v) - 0.48


def _star(u: Array, v: Array, form: float) -> Array:
    # Reflections fold the five arms onto half of one; what remains is the distance to one line.
    cos, sin = math.cos(math.pi / 5), math.sin(math.pi / 5)
    u = abs(u)
    fold = 2.0 * larger(cos * u - sin * v, 0.0)
    u, v = u - cos * fold, v + sin * fold
    fold = 2.0 * larger(-cos * u - sin * v, 0.0)
    u, v = abs(u + cos * fold), v + sin * fold
    inner = 0.46 + 0.05 * form
    edge_u, edge_v = inner * sin, inner * cos - 1.0
    return (edge_u * (v - 1.0) - edge_v * u) * (1.0 / math.hypot(edge_u, edge_v))


def _ring(u: Array, v: Array, form: float) -> Array:
    inner = 0.52 + 0.1 * form
    return abs(length(u, v) - (1.0 + inner) / 2) - (1.0 - inner) / 2


def _cross(u: Array, v: Array, form: float) -> Array:
    half_length, half_width = 0.93, 0.27 + 0.05 * form
    u, v = abs(u), abs(v)
    return larger(larger(u, v) - half_length, smaller(u, v) - half_width)


def _heart(u: Array, v: Array, form: float) -> Array:
    # A square standing on its corner, with a half disk on each of its two upper sides.
    half, root = 0.53, math.sqrt(0.5)
    u, v = u + 0.12 * form * v, v + 0.2
    a, b = root * (v + u), root * (v - u)
    square = larger(abs(a), abs(b))
    disks = smaller(length(a - half, b), length(a, b - half))
    return smaller(square, disks) - half


def _crescent(u: Array, v: Array, form: float) -> Array:
    bite = 0.78 - length(u - (0.55 + 0.07 * form), v)
    return larger(length(u, v) - 1.0, bite)


def _arrow(u: Array, v: Array, form: float) -> Array:
    neck, half_head, half_shaft = 0.1 + 0.1 * form, 0.8, 0.28 - 0.04 * form
    v = abs(v)
    edge = math.hypot(half_head, 1.0 - neck)
    head = larger(neck - u, (half_head * (u - 1.0) + (1.0 - neck) * v) * (1.0 / edge))
    shaft = larger(abs(u + 0.34) - 0.6, v - half_shaft)
    return smaller(head, shaft)


def _hourglass(u: Array, v: Array, form: float) -> Array:
    height, slope, waist = 0.745, 0.68, 0.13 + 0.03 * form
    v = abs(v)
    sides = (abs(u) - slope * v - waist) * (1.0 / math.hypot(1.0, slope))
    return larger(v - height, sides)


_SHAPES: Final[dict[str, Callable[[Array, Array, float], Array]]] = {
    "disk": _disk,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "ring": _ring,
    "cross": _cross,
    "heart": _heart,
    "crescent": _crescent,
    "arrow": _arrow,
    "hourglass": _hourglass,
}
CLASSES: Final[tuple[str, ...]] = tuple(_SHAPES)
"""Names of the classes; the class id is the position in this tuple."""
OUTLINES: Final = tuple(_SHAPES.values())
"""The outline of each class id."""


def unit_area(class_id: int, form: float) -> float:
    """Area of a shape in local units, from the share of a grid that it covers."""
    cells = 64
    axis = cell_centres(cells)
    distance = OUTLINES[class_id](axis[None, :], axis[:, None], form)
    return 4.0 * float(np.clip(0.5 - distance * (cells / 2), 0.0, 1.0).mean())
