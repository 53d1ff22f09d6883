"""Layout: draws at random what is in a scene and how it moves, such that the main object stays in view."""

from __future__ import annotations

import itertools
import math
from typing import Final

import numpy as np

from asc.data.scenes.common import Rng, draw_angle, farthest
from asc.data.scenes.motion import Body, Camera, MovingObject, Plane, Wave
from asc.data.scenes.shapes import CLASSES, unit_area

MIN_MAIN_COVER: Final = 0.04
"""The main object covers at least this share of the image in every frame."""
MIN_MAIN_VISIBLE: Final = 0.4
"""At least this share of the main object's own area is visible in every frame."""

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
BACKGROUND_DEPTH: Final = (13.0, 20.0)
_BACKGROUND_TILT: Final = 0.07

# The view turned by the largest roll at the widest zoom, shifted by the largest pan and parallax, and a small
# margin for interpolation.
BACKGROUND_REACH: Final = (
    (math.cos(_ROLL) + math.sin(_ROLL)) * math.exp(_LOG_ZOOM) + _PAN + _TRACK / BACKGROUND_DEPTH[0] + 0.05
)
"""Half the side of the background that the camera can ever see."""


def _draw_wave(rng: Rng, centre: float, swing: float) -> Wave:
    period = rng.uniform(32.0, 72.0)
    return Wave(centre, swing, math.tau / period, draw_angle(rng))


def draw_camera(rng: Rng) -> Camera:
    """A camera that moves in every way it can, a little or a lot."""

    def swinging(most: float) -> Wave:
        return _draw_wave(rng, 0.0, most * rng.uniform(0.2, 1.0))

    return Camera(
        pan_x=swinging(_PAN),
        pan_y=swinging(0.6 * _PAN),
        track_x=swinging(_TRACK),
        track_y=swinging(0.5 * _TRACK),
        log_zoom=swinging(_LOG_ZOOM),
        roll=swinging(_ROLL),
    )


def draw_background(rng: Rng) -> Plane:
    """A tilted plane behind all objects."""
    depth = rng.uniform(*BACKGROUND_DEPTH)
    tilt_x, tilt_y = rng.uniform(-_BACKGROUND_TILT, _BACKGROUND_TILT, 2).tolist()
    return Plane(depth, (tilt_x, tilt_y))


def draw_objects(rng: Rng, camera: Camera, count: int) -> tuple[MovingObject, ...]:
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


def _depth_slots(count: int) -> list[tuple[float, float]]:
    """Disjoint depth ranges, so that no two objects ever pass through each other."""
    return list(itertools.pairwise(np.geomspace(*_OTHER_DEPTH, count + 1).tolist()))


def _draw_place(rng: Rng, taken: list[tuple[float, float]]) -> tuple[float, float]:
    """Of several random places the one farthest from those taken, so that objects spread over the view."""
    x, y = farthest(rng.uniform(-0.85, 0.85, (4, 2)), taken).tolist()
    return x, y


def _draw_main(rng: Rng, camera: Camera) -> MovingObject:
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
    return MovingObject(
        body=body,
        size=size,
        tracked=True,
        path_x=_draw_path(rng, room, 0.4),
        path_y=_draw_path(rng, room, 0.4),
        depth=depth,
        tilt=tilt,
    )


def _draw_other(rng: Rng, slot: tuple[float, float], area: float, place: tuple[float, float]) -> MovingObject:
    """Any other object: free to be hidden or cut by the border; ``area`` is its area on the screen."""
    body = _draw_body(rng)
    depth, tilt = _draw_depth(rng, *slot)
    return MovingObject(
        body=body,
        size=math.sqrt(area / body.unit_area),
        tracked=False,
        path_x=_draw_wave(rng, place[0], rng.uniform(0.05, 0.35)),
        path_y=_draw_wave(rng, place[1], rng.uniform(0.05, 0.25)),
        depth=depth,
        tilt=tilt,
    )


def _draw_body(rng: Rng) -> Body:
    class_id, form = int(rng.integers(len(CLASSES))), rng.uniform(-1.0, 1.0)
    return Body(
        class_id=class_id,
        form=form,
        unit_area=unit_area(class_id, form),
        log_stretch=_draw_wave(rng, rng.uniform(-_LOG_ASPECT, _LOG_ASPECT), _LOG_PULSE * rng.uniform()),
        bend=_draw_wave(rng, 0.0, _BEND * rng.uniform()),
        angle=draw_angle(rng),
        spin=rng.uniform(-0.06, 0.06),
    )


def _draw_depth(rng: Rng, low: float, high: float) -> tuple[Wave, tuple[float, float]]:
    """Depth and tilt of an object that stays inside the slot (low, high) in every point at every time."""
    middle = (low + high) / 2
    room = (high - low) / (high + low)  # relative to the middle; (1 ± 0.4 room)² stays within 1 ± room
    slope, direction = 0.4 * room * rng.uniform(), draw_angle(rng)
    depth = _draw_wave(rng, middle, middle * min(_DRIFT, 0.4 * room))
    return depth, (slope * math.cos(direction), slope * math.sin(direction))


def _draw_path(rng: Rng, reach: float, most_swing: float) -> Wave:
    """One coordinate of a path that never leaves [-reach, reach]."""
    swing = min(reach, most_swing) * rng.uniform(0.3, 1.0)
    return _draw_wave(rng, rng.uniform(-1.0, 1.0) * (reach - swing), swing)
