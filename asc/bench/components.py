"""Connected components: how fast, and how exact. Shape letters: see ``asc.tokens``."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asc.bench.cells import Cell, Setup, reason_of
from asc.bench.inputs import KINDS, Case, case
from asc.bench.measure import matmul_tflops, take_turns, warm_up
from asc.grouping.components import components

# Images, tokens of each, channels of a key.
SIZES = ((64, 3136, 64), (256, 576, 64), (512, 256, 64))
_QUICK_SIZES = ((2, 64, 16),)
# Similarities nearer to the threshold than this may fall on either side of it.
MARGIN = 1e-3
KERNEL, TORCH, SCIPY, BMM = "kernel", "torch", "scipy, one image", "bmm"


def cells(quick: bool) -> list[Cell]:
    """All kinds of keys at all sizes."""
    sizes = _QUICK_SIZES if quick else SIZES
    return [_cell(kind, *size, quick) for size in sizes for kind in KINDS]


def cell_name(kind: str, batch: int, count: int, width: int) -> str:
    """The name of a cell."""
    return f"components-{batch}x{count}x{width}-{kind}"


def _cell(kind: str, batch: int, count: int, width: int, quick: bool) -> Cell:
    settings = {"kind": kind, "batch": batch, "count": count, "width": width}
    return Cell(
        "components",
        cell_name(kind, batch, count, width),
        settings,
        partial(_measure, kind, batch, count, width),
        needs_gpu=not quick,
    )


def _measure(kind: str, batch: int, count: int, width: int, setup: Setup) -> dict[str, Any]:
    made = case(kind, batch, count, width, setup.device, setup.seed, setup.source)
    labels_T = components(made.features_TD, made.cu_seqlens, made.theta, max_len=count)
    exact = exactness(made, labels_T)
    dense_BND = made.features_TD.view(batch, count, width)
    # The reference multiplies as it is given: in half precision its products would be rounded to fp16.
    whole_TD = made.features_TD.float()
    arguments = made.cu_seqlens, made.theta
    functions = {
        KERNEL: lambda: components(made.features_TD, *arguments, max_len=count),
        BMM: lambda: torch.bmm(dense_BND, dense_BND.mT),
        TORCH: lambda: components(whole_TD, *arguments, backend="torch", max_len=count),
        SCIPY: lambda: scipy_labels(_linked(whole_TD[:count], float(made.theta))),
    }
    working, failed = warm_up(functions)
    if KERNEL in failed:
        raise failed[KERNEL]
    timings = take_turns(working, setup.device, setup.rounds, setup.seconds)
    tflops = matmul_tflops(setup.device)
    kept = int((labels_T == torch.arange(len(labels_T), device=setup.device)).sum())
    return {
        "times": {name: timing._asdict() for name, timing in timings.items()},
        "failed": {name: reason_of(error) for name, error in failed.items()},
        "matmul_tflops": tflops,
        "floor_ms": 2 * batch * count**2 * width / tflops / 1e9,
        "theta": float(made.theta),
        "tokens": len(labels_T),
        "kept": kept / len(labels_T),
        **exact._asdict(),
        **(setup.source.record if kind == "network" else {}),
    }


# --- Exactness --------------------------------------------------------------------------------------------


class Exactness(NamedTuple):
    """How labels compare with scipy's on the graph computed in fp64."""

    differ: int
    """Tokens whose label is another."""
    close_pairs: int
    """Pairs whose similarity is within ``MARGIN`` of the threshold, so that rounding may decide."""
    outside: int
    """Tokens whose label no rounding of those pairs explains: tokens joined by clear links that have different labels,
    or tokens of one label that even with all close pairs linked would not be joined."""


def exactness(made: Case, labels_T: Tensor) -> Exactness:
    """Compare labels with scipy's, image by image."""
    theta, found = float(made.theta), np.zeros(3, dtype=np.int64)
    for first in range(0, len(labels_T), made.length):
        features_ND = made.features_TD[first : first + made.length].double()
        labels_N = (labels_T[first : first + made.length] - first).cpu().numpy()
        similarity_NN = features_ND @ features_ND.T
        close = int(((similarity_NN - theta).abs() <= MARGIN).triu(1).sum())
        differ = int((labels_N != scipy_labels(_above(similarity_NN, theta))).sum())
        outside = 0
        if differ:
            clear_N = scipy_labels(_above(similarity_NN, theta + MARGIN))
            loose_N = scipy_labels(_above(similarity_NN, theta - MARGIN))
            outside = int(((labels_N != labels_N[clear_N]) | (loose_N != loose_N[labels_N])).sum())
        found += differ, close, outside
    return Exactness(*found.tolist())


class _Links(NamedTuple):
    pairs_2E: NDArray[np.int64]
    nodes: int


def _above(similarity_NN: Tensor, theta: float) -> _Links:
    linked_2E = (similarity_NN > theta).triu(1).nonzero().T
    return _Links(linked_2E.cpu().numpy(), similarity_NN.shape[0])


def _linked(features_ND: Tensor, theta: float) -> _Links:
    return _above(features_ND @ features_ND.T, theta)


def scipy_labels(links: _Links) -> NDArray[np.int64]:
    """For every node the smallest node of its component, by scipy."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    ones_E = np.ones(links.pairs_2E.shape[1], dtype=np.bool_)
    graph = coo_array((ones_E, tuple(links.pairs_2E)), shape=(links.nodes, links.nodes))
    _, labels_N = connected_components(graph.tocsr(), directed=False)
    _, first_G = np.unique(labels_N, return_index=True)
    return np.asarray(first_G[labels_N], dtype=np.int64)
