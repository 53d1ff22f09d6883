"""Markings: what a class wears besides its outline, as a zebra its stripes, whatever its colours and texture.

A marking is a field from -1 to 1 over coordinates that are turned, shifted and sized anew for every object, and light
and dark are exchanged for half of them: so it is told by its pattern alone, and no brightness gives it away.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from asc.data.scenes.common import Array, Rng, draw_angle, length
from asc.data.scenes.shapes import CLASSES

Marking = Callable[[Array, Array], Array]


def _soft(wave: Array) -> Array:
    # Harder than the wave itself, yet without edges that would flicker in motion.
    result: Array = np.clip(3.0 * wave, -1.0, 1.0)
    return result


def _none(u: Array, v: Array) -> Array:
    return np.zeros_like(u)


def _wide_stripes(u: Array, v: Array) -> Array:
    return _soft(np.sin(math.tau * 0.8 * u))


def _fine_stripes(u: Array, v: Array) -> Array:
    return _soft(np.sin(math.tau * 1.7 * u))


def _wide_checks(u: Array, v: Array) -> Array:
    return _soft(np.sin(math.tau * 0.7 * u) * np.sin(math.tau * 0.7 * v))


def _fine_checks(u: Array, v: Array) -> Array:
    return _soft(np.sin(math.tau * 1.4 * u) * np.sin(math.tau * 1.4 * v))


def _rings(u: Array, v: Array) -> Array:
    return _soft(np.cos(math.tau * 1.3 * length(u, v)))


def _spokes(u: Array, v: Array) -> Array:
    return _soft(np.sin(4.0 * np.arctan2(v, u)))


def _halves(u: Array, v: Array) -> Array:
    return _soft(2.0 * v)


def _dots(u: Array, v: Array) -> Array:
    result: Array = np.clip(4.0 * np.cos(math.tau * u) * np.cos(math.tau * v) - 1.2, -0.4, 1.0)
    return result


def _waves(u: Array, v: Array) -> Array:
    return _soft(np.sin(math.tau * (1.1 * u + 0.35 * np.sin(math.tau * 0.9 * v))))


MARKINGS: Final[tuple[Marking, ...]] = (
    *(_none, _wide_stripes, _fine_stripes, _wide_checks, _fine_checks, _rings, _spokes, _halves, _dots, _waves),
)
"""The marking of every class, in the order of ``CLASSES``."""
assert len(MARKINGS) == len(CLASSES)


class Placing(NamedTuple):
    """How a marking lies on an object: no two of a class wear theirs quite alike."""

    cos: float
    sin: float
    shift: tuple[float, float]
    sign: float
    """1, or -1 where light and dark are exchanged."""

    def __call__(self, u_N: Array, v_N: Array) -> tuple[Array, Array]:
        """Coordinates of the marking at points of the object."""
        return (
            self.cos * u_N + self.sin * v_N + self.shift[0],
            self.cos * v_N - self.sin * u_N + self.shift[1],
        )


def draw_placing(rng: Rng) -> Placing:
    """A random turn, size and shift."""
    angle, size = draw_angle(rng), rng.uniform(0.8, 1.25)
    shift_u, shift_v = rng.uniform(-0.3, 0.3, 2).tolist()
    sign = 1.0 if rng.uniform() < 0.5 else -1.0
    return Placing(size * math.cos(angle), size * math.sin(angle), (shift_u, shift_v), sign)


def marked(colour_3N: Array, class_id: int, strength: float, placing: Placing, u_N: Array, v_N: Array) -> Array:
    """The colours of an object with its class' marking drawn over them."""
    field_N = placing.sign * strength * MARKINGS[class_id](*placing(u_N, v_N))
    ink_N = np.where(field_N > 0.0, np.float32(255.0), np.float32(0.0))
    result: Array = colour_3N + np.abs(field_N) * (ink_N - colour_3N)
    return result
