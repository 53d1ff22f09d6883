"""Connected components of the thresholded similarity graph, by interchangeable exact backends.

A backend answers two questions, and always with the same labels: every token gets the smallest packed
index of its component.

    everywhere(features_TD, cu_seqlens, theta, max_len)    pairs = all tokens of one image
    among_pairs(features_TD, pairs_2E, theta)              pairs = a given list

``reference`` is Algorithm 1 of the paper, ``cpu`` the fast one for the CPU, ``triton`` that for the GPU, ``torch``
runs on any device. Shape letters: see ``asc.tokens``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asc.grouping.graph import pair_similarities
from asc.kernels import kernels_take

# Rows of the similarity matrix made at once: large enough for a fast matrix product, small enough that the
# tile is still in the cache when it is read.
_TILE_ROWS = 256
# On a CPU, images of at most so many tokens are compared pair by pair: a call for each would cost more than its sums.
_SHORT = 64
# Entries of the similarity matrix the torch backend holds at once.
_MATRIX_ENTRIES = 1 << 26


class Backend(NamedTuple):
    """One exact way to find connected components."""

    everywhere: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    among_pairs: Callable[[Tensor, Tensor, Tensor], Tensor]


def components(
    features_TD: Tensor,
    cu_seqlens: Tensor,
    theta: Tensor,
    pairs_2E: Tensor | None = None,
    backend: str = "auto",
    max_len: int | None = None,
) -> Tensor:
    """Label the components of the graph whose edges are the pairs with similarity above ``theta``.

    Without ``pairs_2E`` all pairs of tokens of one image may be joined. ``max_len`` bounds the lengths of the
    images; without it the host waits to find out. Returns the smallest packed index of each token's component
    (int64).
    """
    chosen = get_backend(backend, features_TD.device)
    features_TD, theta = features_TD.detach().contiguous(), theta.detach()
    if pairs_2E is None:
        if max_len is None:
            max_len = int(cu_seqlens.diff().max())
        return chosen.everywhere(features_TD, cu_seqlens, theta, max_len)
    return chosen.among_pairs(features_TD, pairs_2E, theta)


def get_backend(name: str, device: torch.device) -> Backend:
    """The backend of that name; ``auto`` takes the fastest for the device."""
    if name == "auto":
        name = {"cpu": "cpu", "cuda": "triton"}.get(device.type, "torch")
    if name not in BACKENDS:
        raise ValueError(f"unknown components backend {name!r}; choose from auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]


def _images(features_TD: Tensor, cu_seqlens: Tensor, longer_than: int = 0) -> Iterator[tuple[int, Tensor]]:
    borders = cu_seqlens.tolist()
    for first, end in pairwise(borders):
        # A copy of its own gives every image the same memory alignment alone and in a batch. Matrix
        # products may round differently by alignment, and a partition must not depend on batch-mates.
        if end - first > longer_than:
            yield first, features_TD[first:end].clone()


# --- Algorithm 1 ------------------------------------------------------------------------------------------


def algorithm_1(adjacency_NN: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The paper's Algorithm 1, depth-first search, with a stack in place of its recursion.

    Nodes are started in rising order, so the first node of a component is its smallest.
    """
    label_N = np.full(adjacency_NN.shape[0], -1, dtype=np.int64)
    for node in range(adjacency_NN.shape[0]):
        if label_N[node] >= 0:
            continue
        label_N[node] = node
        stack = [node]
        while stack:
            current = stack.pop()
            neighbours = np.flatnonzero(adjacency_NN[current] & (label_N < 0))
            label_N[neighbours] = node
            stack.extend(neighbours.tolist())
    return label_N


def adjacency_matrix(features_ND: Tensor, theta: Tensor) -> NDArray[np.bool_]:
    """Dense symmetric adjacency of one image, made in tiles of rows."""
    count = features_ND.shape[0]
    adjacency_NN = np.empty((count, count), dtype=np.bool_)
    for first in range(0, count, _TILE_ROWS):
        rows = slice(first, first + _TILE_ROWS)
        adjacency_NN[rows] = (features_ND[rows] @ features_ND.T > theta).cpu().numpy()
    # The two halves of a matrix product may round differently; an undirected graph has one.
    upper_NN = np.triu(adjacency_NN)
    return upper_NN | upper_NN.T


def _reference_everywhere(features_TD: Tensor, cu_seqlens: Tensor, theta: Tensor, max_len: int) -> Tensor:
    labels = [
        torch.from_numpy(algorithm_1(adjacency_matrix(features_ND, theta))) + first
        for first, features_ND in _images(features_TD, cu_seqlens)
    ]
    return torch.cat(labels).to(features_TD.device)


def _reference_among_pairs(features_TD: Tensor, pairs_2E: Tensor, theta: Tensor) -> Tensor:
    total = features_TD.shape[0]
    linked_2E = pairs_2E[:, pair_similarities(features_TD, pairs_2E) > theta]
    return join_by_algorithm_1(torch.arange(total, device=features_TD.device), linked_2E)


def join_by_algorithm_1(labels_T: Tensor, linked_2E: Tensor) -> Tensor:
    """The same as ``join_links``, by Algorithm 1 on the links and those that the labels stand for."""
    total = labels_T.shape[0]
    adjacency_TT = np.zeros((total, total), dtype=np.bool_)
    adjacency_TT[np.arange(total), labels_T.cpu().numpy()] = True
    adjacency_TT[tuple(linked_2E.cpu().numpy())] = True
    return torch.from_numpy(algorithm_1(adjacency_TT | adjacency_TT.T)).to(labels_T.device)


# --- The CPU: union-find over tiles of the similarity matrix ----------------------------------------------


def _cpu_everywhere(features_TD: Tensor, cu_seqlens: Tensor, theta: Tensor, max_len: int) -> Tensor:
    from asc.kernels import union_find

    parent_T = np.arange(features_TD.shape[0], dtype=np.int64)
    features_TD, threshold = _precise(features_TD, theta)
    borders = cu_seqlens.to(torch.int32).contiguous()
    # By an image's own length, never by its batch-mates': the two ways round differently.
    union_find.join_short_images(features_TD.numpy(), borders.numpy(), _SHORT, threshold, parent_T)
    union_find.flatten(parent_T)
    for first, features_ND in _images(features_TD, cu_seqlens, longer_than=_SHORT):
        parent_N = np.arange(features_ND.shape[0], dtype=np.int64)
        for row in range(0, features_ND.shape[0], _TILE_ROWS):
            # Only the upper triangle: half the arithmetic, and each pair is compared once.
            tile_RM = features_ND[row : row + _TILE_ROWS] @ features_ND[row:].T
            union_find.join_tile(tile_RM.numpy(), row, threshold, parent_N)
        union_find.flatten(parent_N)
        parent_T[first : first + parent_N.shape[0]] = parent_N + first
    return torch.from_numpy(parent_T)


def _cpu_among_pairs(features_TD: Tensor, pairs_2E: Tensor, theta: Tensor) -> Tensor:
    from asc.kernels import union_find

    parent_T = np.arange(features_TD.shape[0], dtype=np.int64)
    features_TD, threshold = _precise(features_TD, theta)
    pairs_2E = pairs_2E.to(torch.int64).contiguous()
    union_find.join_pairs(features_TD.numpy(), pairs_2E.numpy(), threshold, parent_T)
    union_find.flatten(parent_T)
    return torch.from_numpy(parent_T)


def _precise(features_TD: Tensor, theta: Tensor) -> tuple[Tensor, np.floating[Any]]:
    """Features in fp32, where they are no finer themselves, and the threshold to compare them with."""
    if features_TD.dtype == torch.float64:
        return features_TD, np.float64(theta.item())
    return features_TD.float(), np.float32(theta.item())


# --- Any device: rounds of hooking and pointer jumping on all images at once ------------------------------


def _torch_everywhere(features_TD: Tensor, cu_seqlens: Tensor, theta: Tensor, max_len: int) -> Tensor:
    labels_T = torch.arange(features_TD.shape[0], device=features_TD.device)
    linked: list[Tensor] = []
    entries = 0
    for first, features_ND in _images(features_TD, cu_seqlens):
        linked.append(_linked_pairs(features_ND, theta) + first)
        entries += features_ND.shape[0] ** 2
        if entries >= _MATRIX_ENTRIES:
            labels_T = join_links(labels_T, torch.cat(linked, dim=1))
            linked, entries = [], 0
    return join_links(labels_T, torch.cat(linked, dim=1)) if linked else labels_T


def _linked_pairs(features_ND: Tensor, theta: Tensor) -> Tensor:
    rows = max(1, _MATRIX_ENTRIES // features_ND.shape[0])
    linked = []
    for first in range(0, features_ND.shape[0], rows):
        above_RM = (features_ND[first : first + rows] @ features_ND[first:].T > theta).triu(1)
        linked.append(above_RM.nonzero().T + first)
    return torch.cat(linked, dim=1)


def _torch_among_pairs(features_TD: Tensor, pairs_2E: Tensor, theta: Tensor) -> Tensor:
    labels_T = torch.arange(features_TD.shape[0], device=features_TD.device)
    return join_links(labels_T, pairs_2E[:, pair_similarities(features_TD, pairs_2E) > theta])


def join_links(labels_T: Tensor, linked_2E: Tensor) -> Tensor:
    """Join the ends of every linked pair; labels only ever fall, to the smallest index of the component."""
    while linked_2E.shape[1]:
        roots_2E = labels_T[linked_2E]
        low_E = roots_2E.amin(0)
        # Hook the larger root under the smallest root that any of its links leads to.
        labels_T = labels_T.scatter_reduce(0, roots_2E.amax(0), low_E, "amin")
        labels_T = _jump_to_roots(labels_T)
        linked_2E = linked_2E[:, labels_T[linked_2E[0]] != labels_T[linked_2E[1]]]
    return labels_T


def _jump_to_roots(labels_T: Tensor) -> Tensor:
    while True:
        jumped_T = labels_T[labels_T]
        if torch.equal(jumped_T, labels_T):
            return labels_T
        labels_T = jumped_T


# --- The GPU: union of minimum indices inside the tiles of the similarity matrix ----------------------------


def _triton_everywhere(features_TD: Tensor, cu_seqlens: Tensor, theta: Tensor, max_len: int) -> Tensor:
    # fp64, tensors on a CPU and machines without Triton keep to plain PyTorch.
    if not kernels_take(features_TD):
        return _torch_everywhere(features_TD, cu_seqlens, theta, max_len)
    from asc.kernels.components import everywhere

    return everywhere(features_TD, cu_seqlens.contiguous(), theta.to(features_TD.device, torch.float32), max_len)


def _triton_among_pairs(features_TD: Tensor, pairs_2E: Tensor, theta: Tensor) -> Tensor:
    if not kernels_take(features_TD):
        return _torch_among_pairs(features_TD, pairs_2E, theta)
    from asc.kernels.components import among_pairs

    return among_pairs(features_TD, pairs_2E, theta.to(features_TD.device, torch.float32))


BACKENDS: dict[str, Backend] = {
    "reference": Backend(_reference_everywhere, _reference_among_pairs),
    "cpu": Backend(_cpu_everywhere, _cpu_among_pairs),
    "torch": Backend(_torch_everywhere, _torch_among_pairs),
    "triton": Backend(_triton_everywhere, _triton_among_pairs),
}
