"""The interface: the settings, a scene whose frames can be asked for, and a dataset of scenes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from asc.data.scenes.common import Array, Rng, Split
from asc.data.scenes.layout import draw_background, draw_camera, draw_objects
from asc.data.scenes.markings import draw_placing
from asc.data.scenes.render import Canvas, Frame, background_canvas, finished_frame, paint_object
from asc.data.scenes.surfaces import Surface, background_surface, draw_looks, object_surface

MIN_SIZE: Final = 16
MAX_OBJECTS: Final = 20
MAX_KEY: Final = 2**32 - 1  # one word of entropy, so that no two (seed, index) share a random stream

_Purpose = Literal["layout", "looks", "texels", "noise", "markings"]


@dataclass(frozen=True, slots=True)
class SceneConfig:
    """Settings of the scenes; a bad value raises a ValueError that names the setting."""

    size: int = 64
    """Side of the square image in pixels, at least 16."""
    frames: int = 16
    """Number of frames of a clip, at least 1."""
    min_objects: int = 1
    """Fewest objects in a scene, the main object included; at least 1."""
    max_objects: int = 3
    """Most objects in a scene, at least ``min_objects`` and at most 20."""
    contrast: float = 1.0
    """How much a texture's colours differ from each other, from 0 (every surface has one colour) to 1."""
    markings: float = 0.0
    """How strongly every class shows its own markings over texture and colour, from 0 (only the outline tells the
    class) to 1."""
    split: Split = "train"
    """"train" or "test": the splits share no texture family, no range of hues, and no random stream."""
    seed: int = 0
    """Start of all random draws, 0 to 2³² - 1; another seed gives other scenes."""

    def __post_init__(self) -> None:
        _check_whole("size", self.size, MIN_SIZE)
        _check_whole("frames", self.frames, 1)
        _check_whole("min_objects", self.min_objects, 1)
        _check_whole("max_objects", self.max_objects, self.min_objects, MAX_OBJECTS)
        _check_whole("seed", self.seed, 0, MAX_KEY)
        for name in ("contrast", "markings"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be from 0 to 1, not {getattr(self, name)!r}")
        if self.split not in get_args(Split):
            raise ValueError(f"split must be one of {get_args(Split)}, not {self.split!r}")


def _check_whole(name: str, value: int, least: int, most: int | None = None) -> None:
    """Raises a ValueError naming the setting unless it is a whole number within its limits."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be a whole number {limits}, not {value!r}")


class Scene:
    """One moving scene, fixed by (seed, split, index) and the allowed numbers of objects."""

    def __init__(self, config: SceneConfig, index: int) -> None:
        """Draws the scene's contents; its textures are made when the first frame is asked for."""
        _check_whole("index", index, 0, MAX_KEY)
        self.config = config
        self.index = int(index)
        rng = self._rng("layout")
        count = int(rng.integers(config.min_objects, config.max_objects + 1))
        self._camera = draw_camera(rng)
        self._objects = draw_objects(rng, self._camera, count)
        self._plane = draw_background(rng)
        self._looks = draw_looks(self._rng("looks"), config.split, count, config.contrast)

    @property
    def label(self) -> int:
        """Class id of the main object."""
        return self._objects[0].body.class_id

    @property
    def object_textures(self) -> tuple[str, ...]:
        """Texture family of every object, the main object first."""
        return tuple(look.name for look in self._looks.objects)

    @property
    def background_textures(self) -> tuple[str, ...]:
        """Texture families of the background, one or two."""
        return tuple(look.name for look in self._looks.background)

    @property
    def palette(self) -> Array:
        """All colours (C, 3) in [0, 255] that the scene was given, before light and haze."""
        return np.concatenate([look.colours_C3 for look in self._looks.background + self._looks.objects])

    def main_area(self, t: float) -> float:
        """Area in pixels that the main object would cover with nothing in front and no image border."""
        main = self._objects[0]
        return main.area(main.pose(self._camera, t)) * (self.config.size / 2) ** 2

    def frame(self, t: float) -> Frame:
        """The image and its truth at time ``t`` in frames, 0 to ``frames - 1``, fractions allowed."""
        t = float(t) + 0.0  # makes -0.0 the same time as 0.0
        if not 0.0 <= t <= self.config.frames - 1:
            raise ValueError(f"t must be from 0 to frames - 1 = {self.config.frames - 1}, not {t}")
        canvas = self._background(t)
        far_to_near = sorted(range(len(self._objects)), key=lambda k: -self._objects[k].depth.centre)
        for k in far_to_near:
            self._paint(canvas, k, t)
        # The bits of the time itself are the key, so that every fraction of a frame has noise of its own.
        noise_rng = self._rng("noise", int(np.float64(t).view(np.uint64)))
        return finished_frame(canvas, noise_rng, [thing.body.class_id for thing in self._objects])

    def clip(self) -> npt.NDArray[np.uint8]:
        """The images (T, H, W, 3) of all frames."""
        return np.stack([self.frame(t).image_HW3 for t in range(self.config.frames)])

    def _rng(self, purpose: _Purpose, key: int = 0) -> Rng:
        """A random stream of its own for every purpose, so that no draw depends on what was asked before."""
        split, use = get_args(Split).index(self.config.split), get_args(_Purpose).index(purpose)
        return np.random.default_rng([self.config.seed, split, self.index, use, key])

    def _background(self, t: float) -> Canvas:
        """A canvas with nothing but the background on it."""
        return background_canvas(self.config.size, self._plane, self._background_surface, self._camera, t)

    def _paint(self, canvas: Canvas, k: int, t: float) -> None:
        """Draws object k over the canvas."""
        thing, rim = self._objects[k], self._looks.objects[k].rim
        pose = thing.pose(self._camera, t)
        markings, placing = self.config.markings, draw_placing(self._rng("markings", k))
        paint_object(canvas, k + 1, thing.body, pose, self._object_surfaces[k], rim, markings, placing)

    @cached_property
    def _background_surface(self) -> Surface:
        return background_surface(self._rng("texels"), self._looks, self._plane.depth, self.config.size / 2)

    @cached_property
    def _object_surfaces(self) -> tuple[Surface, ...]:
        return tuple(self._object_surface(k) for k in range(len(self._objects)))

    def _object_surface(self, k: int) -> Surface:
        thing, look = self._objects[k], self._looks.objects[k]
        pixels_per_unit = thing.size * self.config.size / 2
        return object_surface(self._rng("texels", k + 1), look, self._looks.haze_3, thing.depth.centre, pixels_per_unit)


class SceneDataset:
    """Scenes 0 to ``length - 1`` as a map-style dataset: ``dataset[i]`` is scene i."""

    def __init__(self, config: SceneConfig, length: int) -> None:
        """Holds the settings only; every scene is made when it is asked for."""
        _check_whole("length", length, 0)
        self.config = config
        self.length = int(length)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Scene:
        if not 0 <= index < self.length:
            raise IndexError(f"scene {index} of {self.length}")
        return Scene(self.config, index)

    def clip(self, index: int) -> npt.NDArray[np.uint8]:
        """The images (T, H, W, 3) of scene ``index``."""
        return self[index].clip()
