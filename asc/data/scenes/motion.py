"""Motion: where the camera and the objects are at any moment.

Everything moves in bounded waves, so the extremes of a movement are known when it is drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from asc.data.scenes.common import Array


@dataclass(frozen=True, slots=True)
class Wave:
    """A quantity that swings smoothly between ``centre - swing`` and ``centre + swing``; time in frames."""

    centre: float
    swing: float
    rate: float
    phase: float

    def __call__(self, t: float) -> float:
        """The quantity at time t."""
        return self.centre + self.swing * math.sin(self.rate * t + self.phase)


@dataclass(frozen=True, slots=True)
class Camera:
    """The camera turns (pan), moves sideways (track, in metres), changes its focal length, and rolls."""

    pan_x: Wave
    pan_y: Wave
    track_x: Wave
    track_y: Wave
    log_zoom: Wave
    roll: Wave

    def shift(self, t: float, depth: float) -> tuple[float, float]:
        """How far the view has moved, in screen units at zoom one, over a plane at this depth."""
        return (
            self.pan_x(t) + self.track_x(t) / depth,
            self.pan_y(t) + self.track_y(t) / depth,
        )

    def to_screen(self, t: float, depth: float, x: float, y: float) -> tuple[float, float]:
        """Where a point of the plane at this depth is seen."""
        zoom, roll = math.exp(self.log_zoom(t)), self.roll(t)
        cos, sin = zoom * math.cos(roll), zoom * math.sin(roll)
        shift_x, shift_y = self.shift(t, depth)
        x, y = x - shift_x, y - shift_y
        return cos * x - sin * y, sin * x + cos * y

    def to_plane(self, t: float, depth: float, x_1W: Array, y_H1: Array) -> tuple[Array, Array]:
        """The points x, y (H, W) of the plane at this depth that are seen at screen points."""
        shrink, roll = math.exp(-self.log_zoom(t)), self.roll(t)
        cos, sin = shrink * math.cos(roll), shrink * math.sin(roll)
        shift_x, shift_y = self.shift(t, depth)
        return (cos * x_1W + shift_x) + sin * y_H1, (cos * y_H1 + shift_y) - sin * x_1W


class Plane(NamedTuple):
    """The depth of a flat thing in its own coordinates."""

    depth: float
    tilt: tuple[float, float]  # relative change of depth per unit along either axis

    def depth_at(self, x_N: Array, y_N: Array) -> Array:
        """Depth (N) of points of the plane."""
        return (self.depth * self.tilt[0]) * x_N + (self.depth * self.tilt[1]) * y_N + self.depth


class Pose(NamedTuple):
    """Where an object is at one moment, on the screen and in depth."""

    x: float
    y: float
    scale: float  # screen length of one local unit, before the stretch
    stretch: float  # u axis is longer by this factor, v axis shorter: the area stays
    angle: float
    bend: float
    plane: Plane

    def reach(self) -> float:
        """Radius on the screen of a circle around the whole object."""
        return self.scale * max(self.stretch, 1.0 / self.stretch) * (1.0 + abs(self.bend))

    def to_local(self, x_1W: Array, y_H1: Array) -> tuple[Array, Array]:
        """Local coordinates u, v (H, W) of screen points: unturned, unstretched, then unbent."""
        cos, sin = math.cos(self.angle) / self.scale, math.sin(self.angle) / self.scale
        x_1W, y_H1 = x_1W - self.x, y_H1 - self.y
        u_HW = (cos / self.stretch) * x_1W + (sin / self.stretch) * y_H1
        v_HW = (cos * self.stretch) * y_H1 - (sin * self.stretch) * x_1W
        return u_HW - self.bend * v_HW * v_HW, v_HW


@dataclass(frozen=True, slots=True)
class Body:
    """What an object is and how it turns and deforms, wherever it goes."""

    class_id: int
    form: float
    unit_area: float
    log_stretch: Wave
    bend: Wave
    angle: float
    spin: float


@dataclass(frozen=True, slots=True)
class MovingObject:
    """A body on its way through the scene."""

    body: Body
    size: float  # scale on the screen at zoom one and middle depth
    tracked: bool  # the path is given on the screen (the camera's eye is on it) or in the world
    path_x: Wave
    path_y: Wave
    depth: Wave
    tilt: tuple[float, float]

    def pose(self, camera: Camera, t: float) -> Pose:
        """The object as the camera sees it at time t."""
        depth, x, y = self.depth(t), self.path_x(t), self.path_y(t)
        if not self.tracked:
            x, y = camera.to_screen(t, depth, x, y)
        return Pose(
            x=x,
            y=y,
            scale=self.size * math.exp(camera.log_zoom(t)) * self.depth.centre / depth,
            stretch=math.exp(self.body.log_stretch(t)),
            angle=self.body.angle + self.body.spin * t + camera.roll(t),
            bend=self.body.bend(t),
            plane=Plane(depth, self.tilt),
        )

    def area(self, pose: Pose) -> float:
        """Area on the screen of the whole object, hidden parts included (the image has an area of 4)."""
        return self.body.unit_area * pose.scale**2
