"""Drawing one frame: the background, the objects over it from far to near, then the sensor and the truth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from asc.data.scenes.common import Array, Indices, Rng, cell_centres, mixed
from asc.data.scenes.markings import Placing, marked
from asc.data.scenes.motion import Body, Camera, Plane, Pose
from asc.data.scenes.shapes import OUTLINES
from asc.data.scenes.surfaces import Surface

NOISE: Final = 3.0
"""Standard deviation of the sensor noise, of 255."""


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


class Canvas(NamedTuple):
    """What is being drawn: far things first, nearer ones over them."""

    size: int  # side of the image in pixels
    image_3P: Array
    mark_P: npt.NDArray[np.uint8]  # 0 for background, object number + 1
    depth_P: Array


def background_canvas(size: int, plane: Plane, surface: Surface, camera: Camera, t: float) -> Canvas:
    """A canvas with the background plane as the camera sees it at time t."""
    centres = cell_centres(size)
    x_HW, y_HW = camera.to_plane(t, plane.depth, centres[None, :], centres[:, None])
    x_P, y_P = x_HW.ravel(), y_HW.ravel()
    return Canvas(
        size=size,
        image_3P=surface.sample(x_P, y_P),
        mark_P=np.zeros(size * size, np.uint8),
        depth_P=plane.depth_at(x_P, y_P),
    )


def paint_object(
    canvas: Canvas, mark: int, body: Body, pose: Pose, surface: Surface, rim: float, markings: float, placing: Placing
) -> None:
    """Draws an object over the canvas; ``markings``: see ``SceneConfig``."""
    pixel_N, cover_N, distance_N, u_N, v_N = _footprint(canvas.size, body, pose)
    colour_3N = surface.sample(u_N, v_N)
    if markings:
        colour_3N = marked(colour_3N, body.class_id, markings, placing, u_N, v_N)
    colour_3N *= 1.0 - rim * np.clip(1.0 + distance_N * 8.0, 0.0, 1.0)
    below_3N = canvas.image_3P.take(pixel_N, axis=1)
    canvas.image_3P[:, pixel_N] = mixed(below_3N, colour_3N, cover_N)

    # An image blends at edges, the truth does not: a pixel belongs to what covers more than half of it.
    hard_N = cover_N > 0.5
    solid_N = pixel_N[hard_N]
    canvas.mark_P[solid_N] = mark
    canvas.depth_P[solid_N] = pose.plane.depth_at(u_N[hard_N], v_N[hard_N])


class _Footprint(NamedTuple):
    """The pixels that an object touches, if only in part."""

    pixel_N: Indices
    cover_N: Array  # share of the pixel that the object covers
    distance_N: Array  # from the outline, in local units, negative inside
    u_N: Array
    v_N: Array


def _footprint(size: int, body: Body, pose: Pose) -> _Footprint:
    # Only the window of pixels that the object can reach is looked at; out of view it is empty.
    centres = cell_centres(size)
    left, right = _window(pose.x, pose.reach(), size)
    top, bottom = _window(pose.y, pose.reach(), size)
    u_HW, v_HW = pose.to_local(centres[None, left:right], centres[top:bottom, None])
    distance_HW = OUTLINES[body.class_id](u_HW, v_HW, body.form)
    # Coverage rises over one pixel and is one half on the outline.
    cover_HW = 0.5 - distance_HW * (pose.scale * size / 2)
    inside_N = np.flatnonzero(cover_HW > 0.0)
    row_N, column_N = np.divmod(inside_N, right - left)
    return _Footprint(
        pixel_N=(row_N + top) * size + (column_N + left),
        cover_N=np.minimum(cover_HW.take(inside_N), 1.0),
        distance_N=distance_HW.take(inside_N),
        u_N=u_HW.take(inside_N),
        v_N=v_HW.take(inside_N),
    )


def _window(centre: float, reach: float, size: int) -> tuple[int, int]:
    """First and past-the-last pixel along one side that something on the screen can touch."""
    # One more pixel on either side, for the soft edge.
    first = math.floor((centre - reach + 1.0) * size / 2) - 1
    end = math.ceil((centre + reach + 1.0) * size / 2) + 1
    return min(max(first, 0), size), min(max(end, 0), size)


def finished_frame(canvas: Canvas, rng: Rng, class_ids: Sequence[int]) -> Frame:
    """Adds the noise of the sensor, and numbers the objects that are visible."""
    size = canvas.size
    noisy_3P = canvas.image_3P + NOISE * rng.standard_normal(canvas.image_3P.shape, dtype=np.float32)
    image_P3 = np.clip(np.rint(noisy_3P.T), 0.0, 255.0).astype(np.uint8, order="C")

    tracks_K = np.flatnonzero(np.bincount(canvas.mark_P)[1:])
    classes_K = np.array(class_ids, np.int64)[tracks_K]
    # Tables from the marks on the canvas to the numbers and classes in the result.
    number, kind = np.zeros((2, len(class_ids) + 1), np.uint8)
    number[tracks_K + 1] = np.arange(1, tracks_K.size + 1)
    kind[tracks_K + 1] = classes_K + 1
    mark_HW = canvas.mark_P.reshape(size, size)
    return Frame(
        image_HW3=image_P3.reshape(size, size, 3),
        semantic_HW=kind[mark_HW],
        instance_HW=number[mark_HW],
        depth_HW=canvas.depth_P.reshape(size, size).astype(np.float32, copy=False),
        boxes_K4=np.array([_box(mark_HW == k + 1) for k in tracks_K], np.float32),
        classes_K=classes_K,
        tracks_K=tracks_K.astype(np.int64),
    )


def _box(mask_HW: npt.NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """Half-open box around a mask that is not empty."""
    rows, columns = np.flatnonzero(mask_HW.any(axis=1)), np.flatnonzero(mask_HW.any(axis=0))
    return columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
