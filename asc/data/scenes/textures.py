"""Textures: the patterns on objects and backgrounds, with other families for each split.

A family draws its parameters and returns a field in [0, 1] on the square grid axis × axis, which a palette
then turns into colour. ``detail`` is the number of repeats per unit of the axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from asc.data.scenes.common import Array, Rng, Split, draw_angle, larger, length, smaller, whole_and_part

# Tools of the families.


def turned(rng: Rng, axis_S: Array) -> tuple[Array, Array]:
    """The coordinates of the grid, turned by a random angle."""
    angle = draw_angle(rng)
    cos, sin = math.cos(angle), math.sin(angle)
    x, y = axis_S[None, :], axis_S[:, None]
    return cos * x + sin * y, cos * y - sin * x


def soft_step(wave: Array, hardness: float = 2.0) -> Array:
    """Squeezes a wave around zero into [0, 1]; a soft step keeps moving edges from flickering."""
    result: Array = np.clip(0.5 + hardness * wave, 0.0, 1.0)
    return result


def noise(rng: Rng, axis_S: Array, detail: float, octaves: int = 1, squeeze: float = 1.0) -> Array:
    """Smooth noise with mean zero and spread about one, ``squeeze`` times finer along y than along x."""
    # The extent, and with it the lattice, must not depend on how finely the axis is sampled.
    extent = 2.0 * abs(float(axis_S[0]))
    total = np.zeros((axis_S.size, axis_S.size), np.float32)
    power = 0.0
    for octave in range(octaves):
        coarse, fine, gain = detail * 2**octave, detail * 2**octave * squeeze, 0.55**octave
        knots = (math.ceil(extent * coarse) + 4, math.ceil(extent * fine) + 4)
        lattice = rng.standard_normal(knots, dtype=np.float32)
        # Splines average neighbouring lattice values, which halves their spread.
        total += (2.0 * gain) * stretched(stretched(lattice, axis_S, coarse).T, axis_S, fine)
        power += gain**2
    return total * (1.0 / math.sqrt(power))


def stretched(lattice_GM: Array, axis_S: Array, detail: float) -> Array:
    """Interpolates the first axis of a lattice at the axis' points by cubic B-splines, giving (S, M)."""
    first_S, part_S = whole_and_part((axis_S - axis_S[0]) * detail, len(lattice_GM) - 4)
    rest_S = 1.0 - part_S
    weights = (
        rest_S**3,
        4.0 - 3.0 * part_S * part_S * (1.0 + rest_S),
        4.0 - 3.0 * rest_S * rest_S * (1.0 + part_S),
        part_S**3,
    )
    # Four products, not a matrix product: numpy's would start threads, which slows down parallel workers.
    terms = [weight_S[:, None] * lattice_GM[first_S + k] for k, weight_S in enumerate(weights)]
    result: Array = (terms[0] + terms[1] + terms[2] + terms[3]) * (1.0 / 6.0)
    return result


def _radius(rng: Rng, axis_S: Array, spread: float) -> Array:
    """Distance of the grid's points from a random centre."""
    x, y = rng.uniform(-spread, spread), rng.uniform(-spread, spread)
    return length(axis_S[None, :] - x, axis_S[:, None] - y)


# Objects of the split "train".


def _stripes(rng: Rng, axis_S: Array, detail: float) -> Array:
    along, _ = turned(rng, axis_S)
    return soft_step(np.sin(math.tau * detail * along + draw_angle(rng)))


def _checks(rng: Rng, axis_S: Array, detail: float) -> Array:
    a, b = turned(rng, axis_S)
    turn = math.pi * detail
    return soft_step(np.sin(turn * a + draw_angle(rng)) * np.sin(turn * b + draw_angle(rng)), 4.0)


def _dots(rng: Rng, axis_S: Array, detail: float) -> Array:
    a, b = turned(rng, axis_S)
    turn = math.tau * detail
    return soft_step(np.cos(turn * a + draw_angle(rng)) + np.cos(turn * b + draw_angle(rng)) - 0.5, 1.5)


def _blotches(rng: Rng, axis_S: Array, detail: float) -> Array:
    return soft_step(noise(rng, axis_S, detail, 2), 0.4)


def _gradient(rng: Rng, axis_S: Array, detail: float) -> Array:
    along, _ = turned(rng, axis_S)
    return soft_step(along * (1.0 / float(axis_S[-1])) + 0.15 * noise(rng, axis_S, detail), 0.5)


# Backgrounds of the split "train".


def _clouds(rng: Rng, axis_S: Array, detail: float) -> Array:
    return soft_step(noise(rng, axis_S, 0.6 * detail, 4), 0.33)


def _patches(rng: Rng, axis_S: Array, detail: float) -> Array:
    return 0.5 * (soft_step(noise(rng, axis_S, detail), 5.0) + soft_step(noise(rng, axis_S, detail), 5.0))


def _bands(rng: Rng, axis_S: Array, detail: float) -> Array:
    along, _ = turned(rng, axis_S)
    wander = 0.8 * noise(rng, axis_S, 0.5 * detail)
    return soft_step(np.sin(math.pi * detail * along + wander + draw_angle(rng)), 0.8)


def _dusk(rng: Rng, axis_S: Array, detail: float) -> Array:
    along, _ = turned(rng, axis_S)
    return soft_step(along * (1.0 / float(axis_S[-1])) + 0.35 * noise(rng, axis_S, detail, 3), 0.6)


def _speckles(rng: Rng, axis_S: Array, detail: float) -> Array:
    specks = soft_step(noise(rng, axis_S, 3.0 * detail) - 0.9)
    return 0.6 * specks + 0.4 * soft_step(noise(rng, axis_S, 0.5 * detail), 0.33)


# Objects of the split "test".


def _chevrons(rng: Rng, axis_S: Array, detail: float) -> Array:
    along, across = turned(rng, axis_S)
    zigzag = abs((across * (0.6 * detail) + rng.uniform()) % 1.0 - 0.5)
    return soft_step(np.sin(math.tau * (0.8 * detail * along + 1.2 * zigzag)))


def _rings(rng: Rng, axis_S: Array, detail: float) -> Array:
    radius = _radius(rng, axis_S, 0.6)
    return soft_step(np.sin(math.tau * detail * radius + draw_angle(rng)))


def _bricks(rng: Rng, axis_S: Array, detail: float) -> Array:
    along, across = turned(rng, axis_S)
    row = across * (1.4 * detail) + rng.uniform()
    column = along * (0.7 * detail) + 0.5 * np.floor(row)
    # Distance to the nearest joint, in brick heights; a brick is twice as long as high.
    to_joint = smaller(0.5 - abs(row % 1.0 - 0.5), 1.0 - 2.0 * abs(column % 1.0 - 0.5))
    return soft_step(to_joint - 0.14, 6.0)


def _marble(rng: Rng, axis_S: Array, detail: float) -> Array:
    along, _ = turned(rng, axis_S)
    veins = np.sin(math.pi * detail * along + 1.6 * noise(rng, axis_S, detail, 2))
    return soft_step(veins, 0.5)


def _spiral(rng: Rng, axis_S: Array, detail: float) -> Array:
    x, y = axis_S[None, :] - rng.uniform(-0.4, 0.4), axis_S[:, None] - rng.uniform(-0.4, 0.4)
    arms = int(rng.integers(2, 6)) * int(rng.choice([-1, 1]))
    return soft_step(np.sin(arms * np.arctan2(y, x) + 3.0 * detail * length(x, y)))


# Backgrounds of the split "test".


def _ridges(rng: Rng, axis_S: Array, detail: float) -> Array:
    return larger(1.0 - 0.8 * abs(noise(rng, axis_S, 0.8 * detail, 3)), 0.0)


def _glow(rng: Rng, axis_S: Array, detail: float) -> Array:
    radius = _radius(rng, axis_S, 0.8)
    return soft_step(1.0 - radius + 0.25 * noise(rng, axis_S, detail, 2), 0.6)


def _tiles(rng: Rng, axis_S: Array, detail: float) -> Array:
    a, b = turned(rng, axis_S)
    to_joint = larger(abs((a * detail) % 1.0 - 0.5), abs((b * detail) % 1.0 - 0.5))
    return soft_step(soft_step(0.44 - to_joint, 12.0) - 0.5 + 0.12 * noise(rng, axis_S, detail, 2), 1.0)


def _streaks(rng: Rng, axis_S: Array, detail: float) -> Array:
    field = soft_step(noise(rng, axis_S, 0.4 * detail, 2, squeeze=8.0), 0.33)
    return field if rng.uniform() < 0.5 else field.T


def _weave(rng: Rng, axis_S: Array, detail: float) -> Array:
    a, b = turned(rng, axis_S)
    turn = math.tau * detail
    return soft_step(np.sin(turn * a) + np.sin(turn * b) + 0.4 * noise(rng, axis_S, detail), 0.3)


Texture = Callable[[Rng, Array, float], Array]
OBJECT_TEXTURES: Final[dict[Split, dict[str, Texture]]] = {
    "train": {"stripes": _stripes, "checks": _checks, "dots": _dots, "blotches": _blotches, "gradient": _gradient},
    "test": {"chevrons": _chevrons, "rings": _rings, "bricks": _bricks, "marble": _marble, "spiral": _spiral},
}
"""Texture families of objects; no family belongs to both splits."""
BACKGROUND_TEXTURES: Final[dict[Split, dict[str, Texture]]] = {
    "train": {"clouds": _clouds, "patches": _patches, "bands": _bands, "dusk": _dusk, "speckles": _speckles},
    "test": {"ridges": _ridges, "glow": _glow, "tiles": _tiles, "streaks": _streaks, "weave": _weave},
}
"""Texture families of backgrounds; no family belongs to both splits, nor to objects."""
