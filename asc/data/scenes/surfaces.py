"""Surfaces: how things look is drawn at random, made into texels once per scene, and looked up in every frame."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from asc.data.scenes.colours import coloured, draw_colours, draw_object_colours, faded
from asc.data.scenes.common import Array, Indices, Rng, Split, draw_angle, mixed, whole_and_part
from asc.data.scenes.layout import BACKGROUND_REACH
from asc.data.scenes.textures import BACKGROUND_TEXTURES, OBJECT_TEXTURES, Texture, noise, soft_step, turned

_OBJECT_REACH: Final = 1.1  # a little more than the unit disk that holds every shape, for the soft edge


@dataclass(frozen=True, slots=True)
class Look:
    """The appearance of one thing, at no resolution yet."""

    name: str  # of the texture
    texture: Texture
    colours_C3: Array
    detail: float
    rim: float  # how much darker an object gets towards its edge

    def texels(self, rng: Rng, axis_S: Array, haze_3: Array, depth: float) -> Array:
        """Colours (3, S, S) on the grid axis × axis."""
        return coloured(self.texture(rng, axis_S, self.detail), self.colours_C3, haze_3, depth)


class Looks(NamedTuple):
    """The appearance of a whole scene."""

    background: tuple[Look, ...]  # one or two
    objects: tuple[Look, ...]
    haze_3: Array


def draw_looks(rng: Rng, split: Split, count: int, contrast: float = 1.0) -> Looks:
    """Looks for a background and ``count`` objects; ``contrast``: see ``SceneConfig``."""
    grounds = [draw_colours(rng, split, int(rng.integers(2, 4)), (0.05, 0.7)) for _ in range(2)]
    if rng.uniform() < 0.5:
        grounds.pop()
    grounds = [faded(colours_C3, contrast) for colours_C3 in grounds]
    background = tuple(_draw_look(rng, BACKGROUND_TEXTURES[split], colours_C3) for colours_C3 in grounds)
    haze_3 = draw_colours(rng, split, 1, (0.0, 0.1))[0]
    taken_C3 = np.concatenate(grounds)
    objects = []
    for _ in range(count):
        colours_C3 = faded(draw_object_colours(rng, split, taken_C3), contrast)
        taken_C3 = np.concatenate([taken_C3, colours_C3])
        objects.append(_draw_look(rng, OBJECT_TEXTURES[split], colours_C3))
    return Looks(background, tuple(objects), haze_3)


def _draw_look(rng: Rng, families: dict[str, Texture], colours_C3: Array) -> Look:
    name, texture = tuple(families.items())[rng.integers(len(families))]
    return Look(name, texture, colours_C3, detail=rng.uniform(1.2, 2.6), rim=rng.uniform(0.0, 0.35))


class Surface(NamedTuple):
    """A square texture over [-reach, reach] on both axes."""

    texels_3SS: Array
    reach: float

    def sample(self, x_N: Array, y_N: Array) -> Array:
        """Colours (3, N) at the given points, interpolated between the four nearest texels."""
        side = self.texels_3SS.shape[1]
        per_unit = (side - 1) / (2.0 * self.reach)
        column_N, right_N = whole_and_part((x_N + self.reach) * per_unit, side - 2)
        row_N, down_N = whole_and_part((y_N + self.reach) * per_unit, side - 2)
        corner_N = row_N * side + column_N
        upper_3N = self._along_row(corner_N, right_N)
        lower_3N = self._along_row(corner_N + side, right_N)
        return mixed(upper_3N, lower_3N, down_N)

    def _along_row(self, corner_N: Indices, right_N: Array) -> Array:
        # mode="clip" skips numpy's buffered bounds check, which costs more than the look-up itself.
        texels = self.texels_3SS.reshape(3, -1)
        left_3N = texels.take(corner_N, axis=1, mode="clip")
        return mixed(left_3N, texels.take(corner_N + 1, axis=1, mode="clip"), right_N)


def background_surface(rng: Rng, looks: Looks, depth: float, pixels_per_unit: float) -> Surface:
    """One texture, or two that meet in a wavy line, like ground and sky."""
    axis_S = _texel_axis(BACKGROUND_REACH, pixels_per_unit)
    texels_3SS, *second = (look.texels(rng, axis_S, looks.haze_3, depth) for look in looks.background)
    if second:
        along, across = turned(rng, axis_S)
        line_SS = across + rng.uniform(-0.5, 0.5) + 0.1 * np.sin(rng.uniform(1.0, 5.0) * along + draw_angle(rng))
        texels_3SS = mixed(texels_3SS, second[0], soft_step(line_SS, pixels_per_unit))
    # No surface is perfectly even: a fine grain lets motion be seen everywhere.
    texels_3SS *= 1.0 + 0.05 * noise(rng, axis_S, 9.0)
    return Surface(texels_3SS, BACKGROUND_REACH)


def object_surface(rng: Rng, look: Look, haze_3: Array, depth: float, pixels_per_unit: float) -> Surface:
    """The texture of an object, lit from one side."""
    axis_S = _texel_axis(_OBJECT_REACH, pixels_per_unit)
    texels_3SS = look.texels(rng, axis_S, haze_3, depth)
    light_u, light_v = rng.uniform(-0.25, 0.25, 2).tolist()
    texels_3SS *= 1.0 + light_u * axis_S[None, :] + light_v * axis_S[:, None]
    return Surface(texels_3SS, _OBJECT_REACH)


def _texel_axis(reach: float, pixels_per_unit: float) -> Array:
    """Texel positions along one side, about one per pixel of the image."""
    side = max(8, math.ceil(2.0 * reach * pixels_per_unit) + 1)
    return np.linspace(-reach, reach, side, dtype=np.float32)
