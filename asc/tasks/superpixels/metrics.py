"""Quality of a label map, each measure a pure function of it and a truth.

A label map gives every pixel the number of its superpixel, a truth the number of its segment; a negative truth is void
and counts nowhere. Definitions follow Stutz, Hermans and Leibe, "Superpixels: an evaluation of the state of the art"
(2018), where nothing else is said. Shape letters: H, W rows and columns, S superpixels, G segments, O objects.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from asc.report.pictures import Labels, Pixels

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

TOLERANCE = 0.0025
"""How far borders may lie apart, as a share of the diagonal."""

# Steps to the four neighbours of a pixel, each with its axis.
_NEIGHBOURS: tuple[tuple[int, int], ...] = ((1, 0), (-1, 0), (1, 1), (-1, 1))


def split_regions(labels_HW: Labels) -> Counts:
    """Every 8-connected region of a superpixel as a superpixel of its own, numbered from 0."""
    from skimage.measure import label

    found_HW: Labels = label(_numbered(labels_HW) + 1, background=0, connectivity=2)  # type: ignore[no-untyped-call]
    return found_HW.astype(np.int64) - 1


def count_superpixels(labels_HW: Labels) -> int:
    """Number of different labels."""
    return len(np.unique(labels_HW))


# --- Against a segmentation -------------------------------------------------------------------------------


def overlaps(labels_HW: Labels, truth_HW: Labels) -> Counts:
    """Pixels (S, G) that each superpixel shares with each segment; void pixels are in none."""
    known_HW = truth_HW >= 0
    superpixel_P, segment_P = _numbered(labels_HW)[known_HW], truth_HW[known_HW].astype(np.int64)
    if not segment_P.size:
        raise ValueError("the truth holds nothing but void")
    superpixels, segments = int(superpixel_P.max()) + 1, int(segment_P.max()) + 1
    counts = np.bincount(superpixel_P * segments + segment_P, minlength=superpixels * segments)
    return counts.reshape(superpixels, segments).astype(np.int64)


def achievable_accuracy(labels_HW: Labels, truth_HW: Labels) -> float:
    """ASA: share of the pixels that are right when every superpixel is given the segment it shares most with."""
    counts_SG = overlaps(labels_HW, truth_HW)
    return float(counts_SG.max(axis=1).sum() / counts_SG.sum())


def undersegmentation_error(labels_HW: Labels, truth_HW: Labels) -> float:
    """UE in the form of Neubert and Protzel, which has no free parameter; lower is better.

    Every segment that a superpixel meets counts the smaller one of the two parts into which it cuts the superpixel:
    the sum over both of min(inside, outside), divided by the number of pixels.
    """
    counts_SG = overlaps(labels_HW, truth_HW)
    outside_SG = counts_SG.sum(axis=1, keepdims=True) - counts_SG
    return float(np.minimum(counts_SG, outside_SG).sum() / counts_SG.sum())


def tolerance_radius(height: int, width: int, tolerance: float = TOLERANCE) -> int:
    """The tolerance in whole pixels, halves rounded up: 1 for the images of BSDS."""
    return int(np.floor(tolerance * np.hypot(height, width) + 0.5))


def boundary_recall(labels_HW: Labels, truth_HW: Labels, tolerance: float = TOLERANCE) -> float:
    """Share of the true borders' pixels with a border of superpixels near; NaN where the truth has no border.

    Near is within the square of ``tolerance_radius``; pixels on both sides of a border are its pixels.
    """
    own_HW, true_HW = borders(labels_HW), borders(_without_void(truth_HW))
    return _share_near(true_HW, own_HW, tolerance_radius(own_HW.shape[0], own_HW.shape[1], tolerance))


def boundary_precision(labels_HW: Labels, truth_HW: Labels, tolerance: float = TOLERANCE) -> float:
    """Share of the superpixels' border pixels with a true border near; NaN where there is only one superpixel.

    The published tool divides the true border pixels that are met by themselves plus the superpixels' that are not near
    any; here both counts are of superpixels' border pixels, so that it is recall with the roles exchanged.
    """
    own_HW, true_HW = borders(labels_HW), borders(_without_void(truth_HW))
    return _share_near(own_HW, true_HW, tolerance_radius(own_HW.shape[0], own_HW.shape[1], tolerance))


def borders(labels_HW: Labels) -> Mask:
    """Pixels with another label than one of their four neighbours."""
    line_HW = np.zeros(labels_HW.shape, dtype=np.bool_)
    beside, below = labels_HW[:, :-1] != labels_HW[:, 1:], labels_HW[:-1] != labels_HW[1:]
    line_HW[:, :-1] |= beside
    line_HW[:, 1:] |= beside
    line_HW[:-1] |= below
    line_HW[1:] |= below
    return line_HW


def _share_near(asked_HW: Mask, others_HW: Mask, radius: int) -> float:
    if not asked_HW.any():
        return float("nan")
    # One row, then one column: the square around a pixel at a fraction of the work.
    near_HW = others_HW
    for axis in (0, 1):
        near_HW = ndimage.maximum_filter1d(near_HW, 2 * radius + 1, axis=axis, mode="constant")
    return float(near_HW[asked_HW].mean())


def _without_void(truth_HW: Labels) -> Labels:
    """Void pixels take the nearest segment, so that a border inside a void band is in its middle."""
    void_HW = truth_HW < 0
    if not void_HW.any() or void_HW.all():
        return truth_HW
    nearest_2HW = ndimage.distance_transform_edt(void_HW, return_distances=False, return_indices=True)
    filled_HW: Labels = truth_HW[tuple(nearest_2HW)]
    return filled_HW


# --- Without a truth --------------------------------------------------------------------------------------


def explained_variation(labels_HW: Labels, image_HW3: Pixels) -> float:
    """Share of the variance of the colours that is between superpixels; 1 for an image of one colour."""
    index_P, colours_P3 = _numbered(labels_HW).ravel(), image_HW3.reshape(-1, 3).astype(np.float64)
    colours_P3 = colours_P3 - colours_P3.mean(axis=0)
    total = float((colours_P3**2).sum())
    if total == 0:
        return 1.0
    sizes_S = np.bincount(index_P)
    between = sum(float((np.bincount(index_P, channel_P) ** 2 / sizes_S).sum()) for channel_P in colours_P3.T)
    return between / total


def compactness(labels_HW: Labels) -> float:
    """CO of Schick and others: 4π area / perimeter², mean over the superpixels by their area; 1 for disks.

    The perimeter is counted in edges of pixels, those at the rim of the image among them: a square has π / 4.
    """
    index_HW = _numbered(labels_HW)
    framed_HW = np.pad(index_HW, 1, constant_values=-1)
    middle = (slice(1, -1), slice(1, -1))
    edges_HW = sum((np.roll(framed_HW, step, axis)[middle] != index_HW).astype(np.int64) for step, axis in _NEIGHBOURS)
    areas_S = np.bincount(index_HW.ravel())
    perimeters_S = np.bincount(index_HW.ravel(), np.ravel(edges_HW))
    return float((areas_S * 4 * np.pi * areas_S / perimeters_S**2).sum() / index_HW.size)


# --- Against objects --------------------------------------------------------------------------------------


def best_overlaps(labels_HW: Labels, truth_HW: Labels) -> Floats:
    """For each object (segments from 1 on; 0 is the background) the best IoU of a single superpixel with it."""
    inside_SO, sizes_S1, areas_O = _object_counts(labels_HW, truth_HW)
    return np.asarray((inside_SO / (sizes_S1 + areas_O - inside_SO)).max(axis=0), dtype=np.float64)


def achievable_overlaps(labels_HW: Labels, truth_HW: Labels) -> Floats:
    """For each object the best IoU of any union of superpixels with it: what choosing well could reach.

    The best union takes superpixels by the ratio of what lies inside to what lies outside, down to some ratio.
    """
    inside_SO, sizes_S1, areas_O = _object_counts(labels_HW, truth_HW)
    best_O = np.zeros(len(areas_O))
    for number, area in enumerate(areas_O):
        inside_S, outside_S = inside_SO[:, number], (sizes_S1[:, 0] - inside_SO[:, number])
        met = inside_S > 0
        inside_S, outside_S = inside_S[met], outside_S[met]
        order = np.argsort(outside_S / inside_S, kind="stable")
        best_O[number] = (np.cumsum(inside_S[order]) / (area + np.cumsum(outside_S[order]))).max()
    return best_O


def _object_counts(labels_HW: Labels, truth_HW: Labels) -> tuple[Counts, Counts, Counts]:
    counts_SG = overlaps(labels_HW, truth_HW)
    areas_G = counts_SG.sum(axis=0)
    there = np.flatnonzero(areas_G[1:] > 0) + 1
    return counts_SG[:, there], counts_SG.sum(axis=1, keepdims=True), areas_G[there]


def _numbered(labels_HW: Labels) -> NDArray[Any]:
    """The labels as consecutive numbers from 0."""
    index = np.unique(labels_HW, return_inverse=True)[1]
    return index.reshape(labels_HW.shape).astype(np.int64)
