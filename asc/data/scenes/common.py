"""Types and small functions on arrays that several files share."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Split = Literal["train", "test"]
Array = npt.NDArray[np.floating[Any]]  # float32 throughout
Indices = npt.NDArray[np.intp]
Rng = np.random.Generator


def larger(a: Array, b: Array | float) -> Array:
    """``np.maximum``, with the type that numpy leaves open."""
    result: Array = np.maximum(a, b)
    return result


def smaller(a: Array, b: Array | float) -> Array:
    """``np.minimum``, with the type that numpy leaves open."""
    result: Array = np.minimum(a, b)
    return result


def length(a: Array, b: Array) -> Array:
    """Length of the vectors (a, b)."""
    result: Array = np.sqrt(a * a + b * b)  # several times faster than np.hypot
    return result


def cell_centres(count: int) -> Array:
    """Middles of ``count`` equal cells that fill [-1, 1]."""
    return ((np.arange(count) + 0.5) * (2.0 / count) - 1.0).astype(np.float32)


def draw_angle(rng: Rng) -> float:
    """Any direction, or any phase of a wave."""
    return rng.uniform(0.0, math.tau)


def farthest(options: Array, taken: npt.ArrayLike) -> Array:
    """The row of ``options`` that keeps the largest distance to all rows of ``taken``."""
    gaps = np.linalg.norm(options[:, None] - np.asarray(taken), axis=-1).min(axis=1)
    row: Array = options[gaps.argmax()]
    return row


def whole_and_part(position_N: Array, last: int) -> tuple[Indices, Array]:
    """Splits positions into a grid point's number, 0 to ``last``, and the way to the next point, 0 to 1."""
    position_N = np.clip(position_N, 0.0, last + 1.0)
    whole_N = np.minimum(position_N.astype(np.intp), last)
    return whole_N, position_N - whole_N.astype(np.float32)


def mixed(first: Array, second: Array, share: Array) -> Array:
    """``first + share (second - first)``, in the memory of ``second``, which is lost."""
    second -= first
    second *= share
    second += first
    return second
