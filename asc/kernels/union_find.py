"""Union-find for the CPU, compiled by Numba: joining by minimum index, so labels need no second pass.

Every function works in place on ``parent_N``, a forest in which a node's parent never has a larger index.
Compiled once for the signatures given here and cached beside this file.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import njit
from numpy.typing import NDArray

Labels = NDArray[np.int64]
Floats = NDArray[np.floating[Any]]
Function = TypeVar("Function", bound=Callable[..., Any])


def _compiled(*signatures: str) -> Callable[[Function], Function]:
    def compile_now(function: Function) -> Any:
        try:
            return njit([*signatures], cache=True, nogil=True)(function)
        except RuntimeError:
            warnings.warn(
                "compiled code cannot be kept, neither beside ASC nor in the home folder, and is made anew at every "
                "start; set NUMBA_CACHE_DIR to a folder that can be written to",
                RuntimeWarning,
                stacklevel=2,
            )
            return njit([*signatures], nogil=True)(function)

    return compile_now


@_compiled("int64(int64[::1], int64)")
def _root(parent_N: Labels, node: int) -> int:
    while parent_N[node] != node:
        # Path halving: every second node on the way is lifted, which keeps all paths short.
        parent_N[node] = parent_N[parent_N[node]]
        node = parent_N[node]
    return node


@_compiled("int64(int64[::1], int64, int64)")
def _join(parent_N: Labels, root: int, node: int) -> int:
    """Join ``node`` to the tree of ``root`` and return the root of both."""
    other = _root(parent_N, node)
    if other < root:
        parent_N[root] = other
        return other
    parent_N[other] = root
    return root


@_compiled("void(float32[:, ::1], int64, float32, int64[::1])", "void(float64[:, ::1], int64, float64, int64[::1])")
def join_tile(tile_RM: Floats, first: int, theta: np.floating[Any], parent_N: Labels) -> None:
    """Join all pairs above ``theta`` in a tile whose corner lies on the diagonal at ``first``."""
    rows, columns = tile_RM.shape
    for row in range(rows):
        root = _root(parent_N, first + row)
        for column in range(row + 1, columns):
            # Most links lead to nodes that hang under this root already: one look settles those.
            if tile_RM[row, column] > theta and parent_N[first + column] != root:
                root = _join(parent_N, root, first + column)


@_compiled(
    "void(float32[:, ::1], int32[::1], int64, float32, int64[::1])",
    "void(float64[:, ::1], int32[::1], int64, float64, int64[::1])",
)
def join_short_images(
    features_TD: Floats, cu_seqlens: NDArray[np.int32], longest: int, theta: np.floating[Any], parent_T: Labels
) -> None:
    """Join all pairs above ``theta`` inside every image of at most ``longest`` tokens."""
    for image in range(cu_seqlens.shape[0] - 1):
        if cu_seqlens[image + 1] - cu_seqlens[image] > longest:
            continue
        for left in range(cu_seqlens[image], cu_seqlens[image + 1]):
            root = _root(parent_T, left)
            for right in range(left + 1, cu_seqlens[image + 1]):
                if parent_T[right] == root:
                    continue
                similarity = features_TD.dtype.type(0)
                for channel in range(features_TD.shape[1]):
                    similarity += features_TD[left, channel] * features_TD[right, channel]
                if similarity > theta:
                    root = _join(parent_T, root, right)


@_compiled(
    "void(float32[:, ::1], int64[:, ::1], float32, int64[::1])",
    "void(float64[:, ::1], int64[:, ::1], float64, int64[::1])",
)
def join_pairs(features_TD: Floats, pairs_2E: NDArray[np.int64], theta: np.floating[Any], parent_T: Labels) -> None:
    """Join those of the listed pairs whose similarity lies above ``theta``."""
    for pair in range(pairs_2E.shape[1]):
        left, right = pairs_2E[0, pair], pairs_2E[1, pair]
        similarity = features_TD.dtype.type(0)
        for channel in range(features_TD.shape[1]):
            similarity += features_TD[left, channel] * features_TD[right, channel]
        if similarity > theta:
            _join(parent_T, _root(parent_T, left), right)


@_compiled("void(int64[::1])")
def flatten(parent_N: Labels) -> None:
    """Point every node straight at its root."""
    for node in range(parent_N.shape[0]):
        # Parents come first and are flat already, so one step reaches the root.
        parent_N[node] = parent_N[parent_N[node]]
