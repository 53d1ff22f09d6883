"""Short moving scenes drawn by our own code, with the exact truth for every frame.

A scene is a textured background plane and a few textured objects at different depths, seen by a camera
that pans, zooms and rolls. The class of an object is its shape; texture, colour, pose and motion are drawn
independently of it. The splits "train" and "test" use disjoint textures, hues and random streams, so a test
asks for generalisation to surfaces that were never seen.

The random draws do not depend on ``size`` or ``frames``: the same index shows the same scene at every
resolution, and a longer clip begins with the shorter one.

Coordinates
    screen   x to the right and y down, the image spans [-1, 1] on both axes
    local    u, v of one object; every shape lies inside the unit disk
    depth    metres from the camera

Shape letters (suffixes of array names)
    T  frames                   H, W  rows and columns of the image, or of a window of it
    K  visible objects          P     all pixels of the image, flattened
    G  knots of a lattice       M     any second axis
    N  a selection of pixels    S     side of a square texture, in texels
    C  colours of a palette     3     red, green, blue (first axis while drawing, last in results)
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

Split = Literal["train", "test"]
Array = npt.NDArray[np.floating[Any]]  # float32 throughout
Indices = npt.NDArray[np.intp]
Rng = np.random.Generator

MIN_MAIN_COVER: Final = 0.04
"""The main object covers at least this share of the image in every frame."""
MIN_MAIN_VISIBLE: Final = 0.4
"""At least this share of the main object's own area is visible in every frame."""

MIN_SIZE: Final = 16
MAX_OBJECTS: Final = 20
MAX_KEY: Final = 2**32 - 1  # one word of entropy, so that no two (seed, index) share a random stream

# The guarantees above follow from these numbers. Every movement is a bounded wave, so its extremes are known
# when it is drawn: the main object's bounding circle never leaves the view, and the one object allowed in
# front of it is too small to hide more than 0.45 of it. What is left are 0.55 of an object that covers at
# least 0.085 of the image.
_MAIN_AREA: Final = (0.10, 0.24)  # share of the image that the main object covers when it looks smallest
_OCCLUDER_AREA: Final = 0.38  # largest area of the nearer object, relative to the main object
_OTHER_AREA: Final = 0.7  # largest area of any other object, relative to the main object
_DRIFT: Final = 0.04  # relative change of an object's depth; an area ratio grows by at most 1.17
_LOG_ZOOM: Final = 0.08
_LOG_ASPECT: Final = 0.15
_LOG_PULSE: Final = 0.05
_BEND: Final = 0.12
_ROLL: Final = 0.12
_PAN: Final = 0.22
_TRACK: Final = 0.6  # sideways movement of the camera in metres: gives parallax

_OCCLUDER_DEPTH: Final = (2.2, 2.6)
_MAIN_DEPTH: Final = (3.0, 4.0)
_OTHER_DEPTH: Final = (4.4, 9.0)
_BACKGROUND_DEPTH: Final = (13.0, 20.0)
_BACKGROUND_TILT: Final = 0.07
_HAZE_DEPTH: Final = 45.0  # distance over which haze takes 63 % of the contrast
_NOISE: Final = 3.0  # standard deviation of the sensor noise, of 255

# Half the side of the background that the camera can ever see: the view turned by the largest roll at the
# widest zoom, shifted by the largest pan and parallax, and a small margin for interpolation.
_BACKGROUND_REACH: Final = (
    (math.cos(_ROLL) + math.sin(_ROLL)) * math.exp(_LOG_ZOOM) + _PAN + _TRACK / _BACKGROUND_DEPTH[0] + 0.05
)
_OBJECT_REACH: Final = 1.1


# --------------------------------------------------------------------------------------------------------
# Shapes: signed distance-like functions, negative inside, with slope about one at the edge. ``form`` in
# [-1, 1] varies the proportions within the class.


def _larger(a: Array, b: Array | float) -> Array:
    result: Array = np.maximum(a, b)
    return result


def _smaller(a: Array, b: Array | float) -> Array:
    result: Array = np.minimum(a, b)
    return result


def _length(a: Array, b: Array) -> Array:
    result: Array = np.sqrt(a * a + b * b)  # several times faster than np.hypot
    return result


def _disk(u: Array, v: Array, form: float) -> Array:
    return _length(u, v) - 1.0


def _square(u: Array, v: Array, form: float) -> Array:
    taper = 1.0 + 0.12 * form * v
    return _larger(abs(u) * taper, abs(v)) - 0.67


def _triangle(u: Array, v: Array, form: float) -> Array:
    leaning_u = u + 0.1 * form * v
    return _larger(-v, 0.866 * abs(leaning_u) + 0.5 * v) - 0.48


def _star(u: Array, v: Array, form: float) -> Array:
    # Reflections fold the five arms onto half of one; what remains is the distance to one line.
    cos, sin = math.cos(math.pi / 5), math.sin(math.pi / 5)
    u = abs(u)
    fold = 2.0 * _larger(cos * u - sin * v, 0.0)
    u, v = u - cos * fold, v + sin * fold
    fold = 2.0 * _larger(-cos * u - sin * v, 0.0)
    u, v = abs(u + cos * fold), v + sin * fold
    inner = 0.46 + 0.05 * form
    edge_u, edge_v = inner * sin, inner * cos - 1.0
    return (edge_u * (v - 1.0) - edge_v * u) * (1.0 / math.hypot(edge_u, edge_v))


def _ring(u: Array, v: Array, form: float) -> Array:
    inner = 0.52 + 0.1 * form
    return abs(_length(u, v) - (1.0 + inner) / 2) - (1.0 - inner) / 2


def _cross(u: Array, v: Array, form: float) -> Array:
    length, half_width = 0.93, 0.27 + 0.05 * form
    u, v = abs(u), abs(v)
    return _larger(_larger(u, v) - length, _smaller(u, v) - half_width)


def _heart(u: Array, v: Array, form: float) -> Array:
    # A square standing on its corner, with a half disk on each of its two upper sides.
    half, root = 0.53, math.sqrt(0.5)
    u, v = u + 0.12 * form * v, v + 0.2
    a, b = root * (v + u), root * (v - u)
    square = _larger(abs(a), abs(b))
    disks = _smaller(_length(a - half, b), _length(a, b - half))
    return _smaller(square, disks) - half


def _crescent(u: Array, v: Array, form: float) -> Array:
    bite = 0.78 - _length(u - (0.55 + 0.07 * form), v)
    return _larger(_length(u, v) - 1.0, bite)


def _arrow(u: Array, v: Array, form: float) -> Array:
    neck, half_head, half_shaft = 0.1 + 0.1 * form, 0.8, 0.28 - 0.04 * form
    v = abs(v)
    edge = math.hypot(half_head, 1.0 - neck)
    head = _larger(neck - u, (half_head * (u - 1.0) + (1.0 - neck) * v) * (1.0 / edge))
    shaft = _larger(abs(u + 0.34) - 0.6, v - half_shaft)
    return _smaller(head, shaft)


def _hourglass(u: Array, v: Array, form: float) -> Array:
    height, slope, waist = 0.745, 0.68, 0.13 + 0.03 * form
    v = abs(v)
    sides = (abs(u) - slope * v - waist) * (1.0 / math.hypot(1.0, slope))
    return _larger(v - height, sides)


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
_OUTLINES: Final = tuple(_SHAPES.values())


def _unit_area(class_id: int, form: float) -> float:
    """Area of a shape in local units, from the share of a grid that it covers."""
    cells = 64
    axis = ((np.arange(cells) + 0.5) * (2.0 / cells) - 1.0).astype(np.float32)
    distance = _OUTLINES[class_id](axis[None, :], axis[:, None], form)
    return 4.0 * float(np.clip(0.5 - distance * (cells / 2), 0.0, 1.0).mean())


# --------------------------------------------------------------------------------------------------------
# Textures: a family draws its parameters and returns a field in [0, 1] on the square grid axis × axis,
# which a palette then turns into colour. ``detail`` is the number of repeats per unit of the axis.


def _turned(rng: Rng, axis_S: Array) -> tuple[Array, Array]:
    """The coordinates of the grid, turned by a random angle."""
    angle = rng.uniform(0.0, 2.0 * math.pi)
    cos, sin = math.cos(angle), math.sin(angle)
    x, y = axis_S[None, :], axis_S[:, None]
    return cos * x + sin * y, cos * y - sin * x


def _radius(rng: Rng, axis_S: Array, spread: float) -> Array:
    """Distance of the grid's points from a random centre."""
    x, y = rng.uniform(-spread, spread), rng.uniform(-spread, spread)
    return _length(axis_S[None, :] - x, axis_S[:, None] - y)


def _phase(rng: Rng) -> float:
    return rng.uniform(0.0, 2.0 * math.pi)


def _soft_step(wave: Array, hardness: float = 2.0) -> Array:
    """Squeezes a wave around zero into [0, 1]; a soft step keeps moving edges from flickering."""
    result: Array = np.clip(0.5 + hardness * wave, 0.0, 1.0)
    return result


def _stretched(lattice_GM: Array, axis_S: Array, detail: float) -> Array:
    """Interpolates the first axis of a lattice at the axis' points by cubic B-splines, giving (S, M)."""
    position_S = (axis_S - axis_S[0]) * detail
    first_S, part_S = _whole_and_part(position_S, len(lattice_GM) - 4)
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


def _noise(rng: Rng, axis_S: Array, detail: float, octaves: int = 1, squeeze: float = 1.0) -> Array:
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
        total += (2.0 * gain) * _stretched(_stretched(lattice, axis_S, coarse).T, axis_S, fine)
        power += gain**2
    return total * (1.0 / math.sqrt(power))


def _stripes(rng: Rng, axis_S: Array, detail: float) -> Array:
    along, _ = _turned(rng, axis_S)
    return _soft_step(np.sin(2 * math.pi * detail * along + _phase(rng)))


def _checks(rng: Rng, axis_S: Array, detail: float) -> Array:
    a, b = _turned(rng, axis_S)
    turn = math.pi * detail
    return _soft_step(np.sin(turn * a + _phase(rng)) * np.sin(turn * b + _phase(rng)), 4.0)


def _dots(rng: Rng, axis_S: Array, detail: float) -> Array:
    a, b = _turned(rng, axis_S)
    turn = 2 * math.pi * detail
    return _soft_step(np.cos(turn * a + _phase(rng)) + np.cos(turn * b + _phase(rng)) - 0.5, 1.5)


def _blotches(rng: Rng, axis_S: Array, detail: float) -> Array:
    return _soft_step(_noise(rng, axis_S, detail, 2), 0.4)


def _gradient(rng: Rng, axis_S: Array, detail: float) -> Array:
    along, _ = _turned(rng, axis_S)
    return _soft_step(along * (1.0 / float(axis_S[-1])) + 0.15 * _noise(rng, axis_S, detail), 0.5)


def _clouds(rng: Rng, axis_S: Array, detail: float) -> Array:
    return _soft_step(_noise(rng, axis_S, 0.6 * detail, 4), 0.33)


def _patches(rng: Rng, axis_S: Array, detail: float) -> Array:
    return 0.5 * (_soft_step(_noise(rng, axis_S, detail), 5.0) + _soft_step(_noise(rng, axis_S, detail), 5.0))


def _bands(rng: Rng, axis_S: Array, detail: float) -> Array:
    along, _ = _turned(rng, axis_S)
    wander = 0.8 * _noise(rng, axis_S, 0.5 * detail)
    return _soft_step(np.sin(math.pi * detail * along + wander + _phase(rng)), 0.8)


def _dusk(rng: Rng, axis_S: Array, detail: float) -> Array:
    along, _ = _turned(rng, axis_S)
    return _soft_step(along * (1.0 / float(axis_S[-1])) + 0.35 * _noise(rng, axis_S, detail, 3), 0.6)


def _speckles(rng: Rng, axis_S: Array, detail: float) -> Array:
    specks = _soft_step(_noise(rng, axis_S, 3.0 * detail) - 0.9, 2.0)
    return 0.6 * specks + 0.4 * _soft_step(_noise(rng, axis_S, 0.5 * detail), 0.33)


def _chevrons(rng: Rng, axis_S: Array, detail: float) -> Array:
    along, across = _turned(rng, axis_S)
    zigzag = abs((across * (0.6 * detail) + rng.uniform()) % 1.0 - 0.5)
    return _soft_step(np.sin(2 * math.pi * (0.8 * detail * along + 1.2 * zigzag)))


def _rings(rng: Rng, axis_S: Array, detail: float) -> Array:
    radius = _radius(rng, axis_S, 0.6)
    return _soft_step(np.sin(2 * math.pi * detail * radius + _phase(rng)))


def _bricks(rng: Rng, axis_S: Array, detail: float) -> Array:
    along, across = _turned(rng, axis_S)
    row = across * (1.4 * detail) + rng.uniform()
    column = along * (0.7 * detail) + 0.5 * np.floor(row)
    # Distance to the nearest joint, in brick heights; a brick is twice as long as high.
    to_joint = _smaller(0.5 - abs(row % 1.0 - 0.5), 1.0 - 2.0 * abs(column % 1.0 - 0.5))
    return _soft_step(to_joint - 0.14, 6.0)


def _marble(rng: Rng, axis_S: Array, detail: float) -> Array:
    along, _ = _turned(rng, axis_S)
    veins = np.sin(math.pi * detail * along + 1.6 * _noise(rng, axis_S, detail, 2))
    return _soft_step(veins, 0.5)


def _spiral(rng: Rng, axis_S: Array, detail: float) -> Array:
    x, y = axis_S[None, :] - rng.uniform(-0.4, 0.4), axis_S[:, None] - rng.uniform(-0.4, 0.4)
    arms = int(rng.integers(2, 6)) * int(rng.choice([-1, 1]))
    return _soft_step(np.sin(arms * np.arctan2(y, x) + 3.0 * detail * _length(x, y)))


def _ridges(rng: Rng, axis_S: Array, detail: float) -> Array:
    return _larger(1.0 - 0.8 * abs(_noise(rng, axis_S, 0.8 * detail, 3)), 0.0)


def _glow(rng: Rng, axis_S: Array, detail: float) -> Array:
    radius = _radius(rng, axis_S, 0.8)
    return _soft_step(1.0 - radius + 0.25 * _noise(rng, axis_S, detail, 2), 0.6)


def _tiles(rng: Rng, axis_S: Array, detail: float) -> Array:
    a, b = _turned(rng, axis_S)
    to_joint = _larger(abs((a * detail) % 1.0 - 0.5), abs((b * detail) % 1.0 - 0.5))
    return _soft_step(_soft_step(0.44 - to_joint, 12.0) - 0.5 + 0.12 * _noise(rng, axis_S, detail, 2), 1.0)


def _streaks(rng: Rng, axis_S: Array, detail: float) -> Array:
    field = _soft_step(_noise(rng, axis_S, 0.4 * detail, 2, squeeze=8.0), 0.33)
    return field if rng.uniform() < 0.5 else field.T


def _weave(rng: Rng, axis_S: Array, detail: float) -> Array:
    a, b = _turned(rng, axis_S)
    turn = 2 * math.pi * detail
    return _soft_step(np.sin(turn * a) + np.sin(turn * b) + 0.4 * _noise(rng, axis_S, detail), 0.3)


Texture = Callable[[Rng, Array, float], Array]
OBJECT_TEXTURES: Final[dict[Split, dict[str, Texture]]] = {
    "train": {
        "stripes": _stripes,
        "checks": _checks,
        "dots": _dots,
        "blotches": _blotches,
        "gradient": _gradient,
    },
    "test": {
        "chevrons": _chevrons,
        "rings": _rings,
        "bricks": _bricks,
        "marble": _marble,
        "spiral": _spiral,
    },
}
"""Texture families of objects; no family belongs to both splits."""
BACKGROUND_TEXTURES: Final[dict[Split, dict[str, Texture]]] = {
    "train": {"clouds": _clouds, "patches": _patches, "bands": _bands, "dusk": _dusk, "speckles": _speckles},
    "test": {"ridges": _ridges, "glow": _glow, "tiles": _tiles, "streaks": _streaks, "weave": _weave},
}
"""Texture families of backgrounds; no family belongs to both splits, nor to objects."""
HUES: Final[dict[Split, tuple[tuple[float, float], ...]]] = {
    "train": ((0.00, 0.08), (0.25, 0.33), (0.50, 0.58), (0.75, 0.83)),
    "test": ((0.12, 0.21), (0.37, 0.46), (0.62, 0.71), (0.87, 0.96)),
}
"""Ranges of hue (one turn = 1) from which all colours are drawn; disjoint between the splits."""


# --------------------------------------------------------------------------------------------------------
# Colours


def _draw_colours(rng: Rng, split: Split, count: int, saturation: tuple[float, float]) -> Array:
    """``count`` random colours (count, 3) in [0, 255] with hues of the split."""
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


def _object_colours(rng: Rng, split: Split, taken_C3: Array) -> Array:
    """Two or three colours for an object, each chosen to stand out from those already in the scene."""
    chosen = []
    for _ in range(int(rng.integers(2, 4))):
        options_C3 = _draw_colours(rng, split, 6, (0.3, 1.0))
        gaps = np.linalg.norm(options_C3[:, None] - taken_C3[None], axis=-1).min(axis=1)
        chosen.append(options_C3[int(gaps.argmax())])
    return np.stack(chosen)


def _paint_field(field_SS: Array, colours_C3: Array, haze_3: Array, depth: float) -> Array:
    """Turns a field in [0, 1] into colour (3, S, S) by a ramp through the colours, seen through haze.

    Far things lose contrast in haze, which makes depth visible in a single image.
    """
    keep = math.exp(-depth / _HAZE_DEPTH)
    hazy_C3 = keep * colours_C3 + (1.0 - keep) * haze_3
    stops = np.linspace(0.0, 255.0, len(hazy_C3))
    ramp_3 = np.stack([np.interp(np.arange(256.0), stops, channel) for channel in hazy_C3.T])
    level_SS = (field_SS * 255.0).astype(np.intp)
    return ramp_3.astype(np.float32).take(level_SS, axis=1, mode="clip")


# --------------------------------------------------------------------------------------------------------
# Motion


@dataclass(frozen=True, slots=True)
class _Wave:
    """A quantity that swings smoothly between ``centre - swing`` and ``centre + swing``; time in frames."""

    centre: float
    swing: float
    rate: float
    phase: float

    def __call__(self, t: float) -> float:
        return self.centre + self.swing * math.sin(self.rate * t + self.phase)


def _draw_wave(rng: Rng, centre: float, swing: float) -> _Wave:
    period = rng.uniform(32.0, 72.0)
    return _Wave(centre, swing, 2.0 * math.pi / period, _phase(rng))


@dataclass(frozen=True, slots=True)
class _Camera:
    """The camera turns (pan), moves sideways (track, in metres), changes its focal length, and rolls."""

    pan_x: _Wave
    pan_y: _Wave
    track_x: _Wave
    track_y: _Wave
    log_zoom: _Wave
    roll: _Wave

    def shift(self, t: float, depth: float) -> tuple[float, float]:
        """How far the view has moved, in screen units at zoom one, over a plane at this depth."""
        return (
            self.pan_x(t) + self.track_x(t) / depth,
            self.pan_y(t) + self.track_y(t) / depth,
        )


def _draw_camera(rng: Rng) -> _Camera:
    def swinging(most: float) -> _Wave:
        return _draw_wave(rng, 0.0, most * rng.uniform(0.2, 1.0))

    return _Camera(
        pan_x=swinging(_PAN),
        pan_y=swinging(0.6 * _PAN),
        track_x=swinging(_TRACK),
        track_y=swinging(0.5 * _TRACK),
        log_zoom=swinging(_LOG_ZOOM),
        roll=swinging(_ROLL),
    )


class _Pose(NamedTuple):
    """Where an object is on the screen at one moment."""

    x: float
    y: float
    scale: float  # screen length of one local unit, before the stretch
    stretch: float  # u axis is longer by this factor, v axis shorter: the area stays
    angle: float
    bend: float
    depth: float

    def reach(self) -> float:
        """Radius on the screen of a circle around the whole object."""
        return self.scale * max(self.stretch, 1.0 / self.stretch) * (1.0 + abs(self.bend))

    def local(self, x_1W: Array, y_H1: Array) -> tuple[Array, Array]:
        """Local coordinates u, v (H, W) of screen points: unturned, unstretched, then unbent."""
        cos, sin = math.cos(self.angle) / self.scale, math.sin(self.angle) / self.scale
        x_1W, y_H1 = x_1W - self.x, y_H1 - self.y
        u_HW = (cos / self.stretch) * x_1W + (sin / self.stretch) * y_H1
        v_HW = (cos * self.stretch) * y_H1 - (sin * self.stretch) * x_1W
        return u_HW - self.bend * v_HW * v_HW, v_HW


@dataclass(frozen=True, slots=True)
class _Body:
    """What an object is and how it turns and deforms, wherever it goes."""

    class_id: int
    form: float
    unit_area: float
    log_stretch: _Wave
    bend: _Wave
    angle: float
    spin: float


def _draw_body(rng: Rng) -> _Body:
    class_id, form = int(rng.integers(len(CLASSES))), float(rng.uniform(-1.0, 1.0))
    return _Body(
        class_id=class_id,
        form=form,
        unit_area=_unit_area(class_id, form),
        log_stretch=_draw_wave(rng, rng.uniform(-_LOG_ASPECT, _LOG_ASPECT), _LOG_PULSE * rng.uniform()),
        bend=_draw_wave(rng, 0.0, _BEND * rng.uniform()),
        angle=_phase(rng),
        spin=float(rng.uniform(-0.06, 0.06)),
    )


@dataclass(frozen=True, slots=True)
class _Object:
    """A body on its way through the scene."""

    body: _Body
    size: float  # scale on the screen at zoom one and middle depth
    tracked: bool  # the path is given on the screen (the camera's eye is on it) or in the world
    path_x: _Wave
    path_y: _Wave
    depth: _Wave
    tilt: tuple[float, float]  # relative change of depth per local unit along u and v

    def pose(self, camera: _Camera, t: float) -> _Pose:
        """The object as the camera sees it at time t."""
        depth, roll, zoom = self.depth(t), camera.roll(t), math.exp(camera.log_zoom(t))
        x, y = self.path_x(t), self.path_y(t)
        if not self.tracked:
            shift_x, shift_y = camera.shift(t, depth)
            x, y = x - shift_x, y - shift_y
            cos, sin = zoom * math.cos(roll), zoom * math.sin(roll)
            x, y = cos * x - sin * y, sin * x + cos * y
        return _Pose(
            x=x,
            y=y,
            scale=self.size * zoom * self.depth.centre / depth,
            stretch=math.exp(self.body.log_stretch(t)),
            angle=self.body.angle + self.body.spin * t + roll,
            bend=self.body.bend(t),
            depth=depth,
        )

    def area(self, pose: _Pose) -> float:
        """Area on the screen of the whole object, hidden parts included (the image has an area of 4)."""
        return self.body.unit_area * pose.scale**2


def _draw_depth(rng: Rng, low: float, high: float) -> tuple[_Wave, tuple[float, float]]:
    """Depth and tilt of an object that stays inside the slot (low, high) in every point at every time."""
    middle = (low + high) / 2
    room = (high - low) / (high + low)  # relative to the middle; (1 ± 0.4 room)² stays within 1 ± room
    slope, direction = 0.4 * room * rng.uniform(), _phase(rng)
    depth = _draw_wave(rng, middle, middle * min(_DRIFT, 0.4 * room))
    return depth, (slope * math.cos(direction), slope * math.sin(direction))


def _draw_path(rng: Rng, reach: float, most_swing: float) -> _Wave:
    """One coordinate of a path that never leaves [-reach, reach]."""
    swing = min(reach, most_swing) * rng.uniform(0.3, 1.0)
    return _draw_wave(rng, rng.uniform(-1.0, 1.0) * (reach - swing), swing)


def _draw_main(rng: Rng, camera: _Camera) -> _Object:
    """The main object: large, and on a path along which it cannot leave the view."""
    body = _draw_body(rng)
    depth, tilt = _draw_depth(rng, *_MAIN_DEPTH)
    drift, zoom = depth.swing / depth.centre, math.exp(camera.log_zoom.swing)
    smallest, largest = 1.0 / (zoom * (1.0 + drift)), zoom / (1.0 - drift)
    longest = largest * math.exp(abs(body.log_stretch.centre) + body.log_stretch.swing) * (1.0 + body.bend.swing)
    share = math.exp(rng.uniform(math.log(_MAIN_AREA[0]), math.log(_MAIN_AREA[1])))
    # Slender shapes reach far for their area: they are kept from outgrowing the view.
    size = min(math.sqrt(4.0 * share / body.unit_area) / smallest, 1.0 / longest)
    room = 1.0 - size * longest
    return _Object(
        body=body,
        size=size,
        tracked=True,
        path_x=_draw_path(rng, room, 0.4),
        path_y=_draw_path(rng, room, 0.4),
        depth=depth,
        tilt=tilt,
    )


def _draw_place(rng: Rng, taken: list[tuple[float, float]]) -> tuple[float, float]:
    """Of several random places the one farthest from those taken, so that objects spread over the view."""
    places = rng.uniform(-0.85, 0.85, (4, 2))
    gaps = np.linalg.norm(places[:, None] - np.array(taken)[None], axis=-1).min(axis=1)
    x, y = places[int(gaps.argmax())]
    return float(x), float(y)


def _draw_other(rng: Rng, slot: tuple[float, float], area: float, place: tuple[float, float]) -> _Object:
    """Any other object: free to be hidden or cut by the border; ``area`` is its area on the screen."""
    body = _draw_body(rng)
    depth, tilt = _draw_depth(rng, *slot)
    return _Object(
        body=body,
        size=math.sqrt(area / body.unit_area),
        tracked=False,
        path_x=_draw_wave(rng, place[0], rng.uniform(0.05, 0.35)),
        path_y=_draw_wave(rng, place[1], rng.uniform(0.05, 0.25)),
        depth=depth,
        tilt=tilt,
    )


def _depth_slots(count: int) -> list[tuple[float, float]]:
    """Disjoint depth ranges, so that no two objects ever pass through each other."""
    edges = np.geomspace(*_OTHER_DEPTH, count + 1)
    return [(float(low), float(high)) for low, high in itertools.pairwise(edges)]


def _draw_objects(rng: Rng, camera: _Camera, count: int) -> tuple[_Object, ...]:
    """The main object first, then perhaps one small nearer object, then those farther away."""
    main = _draw_main(rng, camera)
    objects = [main]
    main_place = (main.path_x.centre, main.path_y.centre)
    main_area = main.body.unit_area * main.size**2
    if count > 1 and rng.uniform() < 0.4:
        # Close enough to pass in front of the main object at times.
        place = (main_place[0] + rng.uniform(-0.5, 0.5), main_place[1] + rng.uniform(-0.5, 0.5))
        area = main_area * rng.uniform(0.12, _OCCLUDER_AREA)
        objects.append(_draw_other(rng, _OCCLUDER_DEPTH, area, place))
    taken = [main_place]
    for slot in _depth_slots(count - len(objects)):
        # Like sizes in the world look smaller when farther away, which is a cue for depth.
        shrink = (2.0 * main.depth.centre / (slot[0] + slot[1])) ** 2
        area = main_area * min(_OTHER_AREA, shrink * rng.uniform(0.6, 1.6))
        taken.append(_draw_place(rng, taken))
        objects.append(_draw_other(rng, slot, area, taken[-1]))
    return tuple(objects)


# --------------------------------------------------------------------------------------------------------
# Surfaces: textures drawn once per scene, then looked up in every frame


@dataclass(frozen=True, slots=True)
class _Look:
    """The appearance of one surface before it is drawn."""

    texture: str
    colours_C3: Array
    detail: float
    rim: float  # how much darker the object gets towards its edge


def _draw_look(rng: Rng, families: dict[str, Texture], colours_C3: Array) -> _Look:
    names = tuple(families)
    return _Look(
        texture=names[int(rng.integers(len(names)))],
        colours_C3=colours_C3,
        detail=float(rng.uniform(1.2, 2.6)),
        rim=float(rng.uniform(0.0, 0.35)),
    )


class _Surface(NamedTuple):
    """A square texture over [-reach, reach] on both axes."""

    texels_3SS: Array
    reach: float

    def sample(self, x_N: Array, y_N: Array) -> Array:
        """Colours (3, N) at the given points, interpolated between the four nearest texels."""
        side = self.texels_3SS.shape[1]
        per_unit = (side - 1) / (2.0 * self.reach)
        column_N, right_N = _whole_and_part((x_N + self.reach) * per_unit, side - 2)
        row_N, down_N = _whole_and_part((y_N + self.reach) * per_unit, side - 2)
        corner_N = row_N * side + column_N
        upper = self._along_row(corner_N, right_N)
        lower = self._along_row(corner_N + side, right_N)
        return _mixed(upper, lower, down_N)

    def _along_row(self, corner_N: Indices, right_N: Array) -> Array:
        # mode="clip" skips numpy's buffered bounds check, which costs more than the look-up itself.
        texels = self.texels_3SS.reshape(3, -1)
        left = texels.take(corner_N, axis=1, mode="clip")
        return _mixed(left, texels.take(corner_N + 1, axis=1, mode="clip"), right_N)


def _whole_and_part(position_N: Array, last: int) -> tuple[Indices, Array]:
    """Splits positions into a texel number, 0 to ``last``, and the way to the next texel, 0 to 1."""
    position_N = np.clip(position_N, 0.0, last + 1.0)
    whole_N = np.minimum(position_N.astype(np.intp), last)
    return whole_N, position_N - whole_N.astype(np.float32)


def _mixed(first: Array, second: Array, share_N: Array) -> Array:
    """``first + share (second - first)``, reusing the memory of ``second``."""
    second -= first
    second *= share_N
    second += first
    return second


def _texel_axis(reach: float, pixels_per_unit: float) -> Array:
    """Texel positions along one side, about one per pixel of the image."""
    side = max(8, math.ceil(2.0 * reach * pixels_per_unit) + 1)
    return np.linspace(-reach, reach, side, dtype=np.float32)


def _background_surface(
    rng: Rng, looks: tuple[_Look, ...], depth: float, config: SceneConfig, haze_3: Array
) -> _Surface:
    """One texture, or two that meet in a wavy line, like ground and sky."""
    axis_S = _texel_axis(_BACKGROUND_REACH, config.size / 2)
    families = BACKGROUND_TEXTURES[config.split]
    layers = [
        _paint_field(families[look.texture](rng, axis_S, look.detail), look.colours_C3, haze_3, depth) for look in looks
    ]
    texels_3SS = layers[0]
    if len(layers) == 2:
        along, across = _turned(rng, axis_S)
        line = across + rng.uniform(-0.5, 0.5) + 0.1 * np.sin(rng.uniform(1.0, 5.0) * along + _phase(rng))
        texels_3SS = _mixed(layers[0], layers[1], _soft_step(line, config.size / 2))
    # No surface is perfectly even: a fine grain lets motion be seen everywhere.
    texels_3SS *= 1.0 + 0.05 * _noise(rng, axis_S, 9.0)
    return _Surface(texels_3SS, _BACKGROUND_REACH)


def _object_surface(rng: Rng, look: _Look, thing: _Object, config: SceneConfig, haze_3: Array) -> _Surface:
    axis_S = _texel_axis(_OBJECT_REACH, thing.size * config.size / 2)
    field_SS = OBJECT_TEXTURES[config.split][look.texture](rng, axis_S, look.detail)
    texels_3SS = _paint_field(field_SS, look.colours_C3, haze_3, thing.depth.centre)
    light_u, light_v = (float(light) for light in rng.uniform(-0.25, 0.25, 2))
    texels_3SS *= 1.0 + light_u * axis_S[None, :] + light_v * axis_S[:, None]
    return _Surface(texels_3SS, _OBJECT_REACH)


# --------------------------------------------------------------------------------------------------------
# Public interface


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
        if self.split not in get_args(Split):
            raise ValueError(f"split must be one of {get_args(Split)}, not {self.split!r}")


def _check_whole(name: str, value: int, least: int, most: int | None = None) -> None:
    """Raises a ValueError naming the setting unless it is a whole number within its limits."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be a whole number {limits}, not {value!r}")


class Frame(NamedTuple):
    """One image of a scene with its exact truth; objects without a visible pixel are left out.

    The main object is always instance 1, entry 0 of the arrays.
    """

    image_HW3: npt.NDArray[np.uint8]
    """Colours, edges anti-aliased, with mild sensor noise."""
    semantic_HW: npt.NDArray[np.uint8]
    """0 for background, class id + 1 for objects."""
    instance_HW: npt.NDArray[np.uint8]
    """0 for background, k + 1 for entry k of the arrays below."""
    depth_HW: npt.NDArray[np.float32]
    """Metres from the camera, always positive; the background is farther than every object."""
    boxes_K4: npt.NDArray[np.float32]
    """x0, y0, x1, y1 in pixels, half-open, tight around the visible part."""
    classes_K: npt.NDArray[np.int64]
    """Class ids, positions in ``CLASSES``."""
    tracks_K: npt.NDArray[np.int64]
    """Numbers of the objects in the scene, the same in every frame; the main object is number 0."""


class _Canvas(NamedTuple):
    """What is being drawn: far things first, nearer ones over them."""

    image_3P: Array
    mark_P: npt.NDArray[np.uint8]  # 0 for background, object number + 1
    depth_P: Array


class Scene:
    """One moving scene, fixed by (seed, split, index) and the allowed numbers of objects."""

    def __init__(self, config: SceneConfig, index: int) -> None:
        """Draws the scene's contents; its textures are made when the first frame is asked for."""
        _check_whole("index", index, 0, MAX_KEY)
        self.config = config
        self.index = int(index)
        rng = self._rng("layout")
        count = int(rng.integers(config.min_objects, config.max_objects + 1))
        self._camera = _draw_camera(rng)
        self._objects = _draw_objects(rng, self._camera, count)
        self._far_to_near = sorted(range(count), key=lambda k: -self._objects[k].depth.centre)
        self._depth = float(rng.uniform(*_BACKGROUND_DEPTH))
        tilt_x, tilt_y = rng.uniform(-_BACKGROUND_TILT, _BACKGROUND_TILT, 2)
        self._tilt = (float(tilt_x), float(tilt_y))
        self._draw_looks(self._rng("looks"))

    @property
    def label(self) -> int:
        """Class id of the main object."""
        return self._objects[0].body.class_id

    @property
    def object_textures(self) -> tuple[str, ...]:
        """Texture family of every object, the main object first."""
        return tuple(look.texture for look in self._looks)

    @property
    def background_textures(self) -> tuple[str, ...]:
        """Texture families of the background, one or two."""
        return tuple(look.texture for look in self._background_looks)

    @property
    def palette(self) -> Array:
        """All colours (C, 3) in [0, 255] that the scene was given, before light and haze."""
        return np.concatenate([look.colours_C3 for look in self._background_looks + self._looks])

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
        for k in self._far_to_near:
            self._paint(canvas, k, self._objects[k].pose(self._camera, t))
        return self._finish(canvas, t)

    def clip(self) -> npt.NDArray[np.uint8]:
        """The images (T, H, W, 3) of all frames."""
        return np.stack([self.frame(t).image_HW3 for t in range(self.config.frames)])

    def _rng(self, purpose: Literal["layout", "looks", "texels", "noise"], key: int = 0) -> Rng:
        """A random stream of its own for every purpose, so that no draw depends on what was asked before."""
        purposes = ("layout", "looks", "texels", "noise")
        split = get_args(Split).index(self.config.split)
        return np.random.default_rng([self.config.seed, split, self.index, purposes.index(purpose), key])

    def _draw_looks(self, rng: Rng) -> None:
        split = self.config.split
        grounds = [_draw_colours(rng, split, int(rng.integers(2, 4)), (0.05, 0.7)) for _ in range(2)]
        if rng.uniform() < 0.5:
            grounds.pop()
        self._background_looks = tuple(_draw_look(rng, BACKGROUND_TEXTURES[split], g) for g in grounds)
        self._haze_3 = _draw_colours(rng, split, 1, (0.0, 0.1))[0]
        taken_C3 = np.concatenate(grounds)
        looks = []
        for _ in self._objects:
            colours_C3 = _object_colours(rng, split, taken_C3)
            taken_C3 = np.concatenate([taken_C3, colours_C3])
            looks.append(_draw_look(rng, OBJECT_TEXTURES[split], colours_C3))
        self._looks = tuple(looks)

    @cached_property
    def _ground(self) -> _Surface:
        return _background_surface(self._rng("texels"), self._background_looks, self._depth, self.config, self._haze_3)

    @cached_property
    def _surfaces(self) -> tuple[_Surface, ...]:
        return tuple(
            _object_surface(self._rng("texels", k + 1), look, thing, self.config, self._haze_3)
            for k, (look, thing) in enumerate(zip(self._looks, self._objects, strict=True))
        )

    @cached_property
    def _centres(self) -> Array:
        """Screen positions of the pixel centres along one side."""
        size = self.config.size
        return ((np.arange(size) + 0.5) * (2.0 / size) - 1.0).astype(np.float32)

    def _background(self, t: float) -> _Canvas:
        """A canvas with the background plane as the camera sees it at time t."""
        shrink, roll = math.exp(-self._camera.log_zoom(t)), self._camera.roll(t)
        cos, sin = shrink * math.cos(roll), shrink * math.sin(roll)
        shift_x, shift_y = self._camera.shift(t, self._depth)
        x_1W, y_H1 = self._centres[None, :], self._centres[:, None]
        ground_x_P = ((cos * x_1W + shift_x) + sin * y_H1).ravel()
        ground_y_P = ((cos * y_H1 + shift_y) - sin * x_1W).ravel()
        return _Canvas(
            image_3P=self._ground.sample(ground_x_P, ground_y_P),
            mark_P=np.zeros(ground_x_P.size, np.uint8),
            depth_P=_tilted(self._depth, self._tilt, ground_x_P, ground_y_P),
        )

    def _paint(self, canvas: _Canvas, k: int, pose: _Pose) -> None:
        """Draws object k over the canvas, touching only the window of pixels it can reach."""
        thing, size = self._objects[k], self.config.size
        left, right = _window(pose.x, pose.reach(), size)
        top, bottom = _window(pose.y, pose.reach(), size)
        if left >= right or top >= bottom:
            return
        u_HW, v_HW = pose.local(self._centres[None, left:right], self._centres[top:bottom, None])
        distance_HW = _OUTLINES[thing.body.class_id](u_HW, v_HW, thing.body.form)
        # Coverage rises over one pixel and is one half on the outline, where the hard mask begins.
        cover_HW = 0.5 - distance_HW * (pose.scale * size / 2)
        inside_N = np.flatnonzero(cover_HW > 0.0)
        row_N, column_N = np.divmod(inside_N, right - left)
        pixel_N = (row_N + top) * size + (column_N + left)
        cover_N = np.minimum(cover_HW.take(inside_N), 1.0)
        u_N, v_N = u_HW.take(inside_N), v_HW.take(inside_N)

        colour_3N = self._surfaces[k].sample(u_N, v_N)
        colour_3N *= 1.0 - self._looks[k].rim * np.clip(1.0 + distance_HW.take(inside_N) * 8.0, 0.0, 1.0)
        below_3N = canvas.image_3P.take(pixel_N, axis=1)
        canvas.image_3P[:, pixel_N] = _mixed(below_3N, colour_3N, cover_N)

        hard_N = cover_N > 0.5
        solid_N = pixel_N[hard_N]
        canvas.mark_P[solid_N] = k + 1
        canvas.depth_P[solid_N] = _tilted(pose.depth, thing.tilt, u_N[hard_N], v_N[hard_N])

    def _finish(self, canvas: _Canvas, t: float) -> Frame:
        """Adds the noise of the sensor, and numbers the objects that are visible."""
        size = self.config.size
        # The bits of the time itself are the key, so that every fraction of a frame has noise of its own.
        (time_key,) = struct.unpack("<Q", struct.pack("<d", t))
        noise_3P = self._rng("noise", time_key).standard_normal(canvas.image_3P.shape, dtype=np.float32)
        noise_3P *= _NOISE
        noise_3P += canvas.image_3P
        image_3P = np.clip(np.rint(noise_3P), 0.0, 255.0).astype(np.uint8)

        counts = np.bincount(canvas.mark_P, minlength=len(self._objects) + 1)
        tracks_K = np.flatnonzero(counts[1:])
        classes_K = np.array([self._objects[k].body.class_id for k in tracks_K], np.int64)
        number, kind = np.zeros(counts.size, np.uint8), np.zeros(counts.size, np.uint8)
        number[tracks_K + 1] = np.arange(1, tracks_K.size + 1)
        kind[tracks_K + 1] = classes_K + 1
        mark_HW = canvas.mark_P.reshape(size, size)
        return Frame(
            image_HW3=np.ascontiguousarray(image_3P.T).reshape(size, size, 3),
            semantic_HW=kind[mark_HW],
            instance_HW=number[mark_HW],
            depth_HW=canvas.depth_P.reshape(size, size).astype(np.float32, copy=False),
            boxes_K4=np.array([_box(mark_HW == k + 1) for k in tracks_K], np.float32).reshape(-1, 4),
            classes_K=classes_K,
            tracks_K=tracks_K.astype(np.int64),
        )


def _window(centre: float, reach: float, size: int) -> tuple[int, int]:
    """First and past-the-last pixel along one side that something on the screen can touch."""
    # One more pixel on either side, for the soft edge.
    first = math.floor((centre - reach + 1.0) * size / 2) - 1
    end = math.ceil((centre + reach + 1.0) * size / 2) + 1
    return max(first, 0), min(end, size)


def _tilted(depth: float, tilt: tuple[float, float], x_N: Array, y_N: Array) -> Array:
    """Depth of points of a tilted plane."""
    return (depth * tilt[0]) * x_N + (depth * tilt[1]) * y_N + depth


def _box(mask_HW: npt.NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """Half-open box around a mask that is not empty."""
    rows, columns = np.flatnonzero(mask_HW.any(axis=1)), np.flatnonzero(mask_HW.any(axis=0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


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
