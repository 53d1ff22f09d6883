"""Graphs in which a similarity above θ is not all that a link needs: sizes count, or only the best links do.

Such a graph is no matter of features alone, so its links are listed and then joined; the backends of ``components`` and
their kernels are for the plain graph. Shape letters: see ``asc.tokens``; R is a tile of rows, M one of columns, F the
links of one piece of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from asc.grouping.components import join_by_algorithm_1, join_links
from asc.grouping.graph import SizeWeight, pair_similarities, tile_similarities
from asc.kernels import kernels_take

Links = Literal["all", "best"]

# Similarities held at once, and links that are gathered before they are joined.
_TILE_ENTRIES = 1 << 22


def linked_components(
    features_TD: Tensor,
    cu_seqlens: Tensor,
    theta: Tensor,
    pairs_2E: Tensor | None,
    links: Links,
    by_size: SizeWeight | None,
    backend: str = "auto",
    max_len: int | None = None,
) -> Tensor:
    """Label the components of the graph of chosen links; the smallest packed index of each token's component (int64).

    A link is a pair (of ``pairs_2E``; without them of one image) whose similarity, with sizes counted as ``by_size``
    says, lies above ``theta``. Of those ``best`` leaves the pairs that are the best pair of at least one of their two
    tokens: the one of highest similarity, among equals that with the smaller partner. That is one step of Borůvka's
    algorithm: every token asks for one partner, which makes long chains of chance similarities rare.
    ``max_len`` bounds the lengths of the images; without it they are looked up.
    """
    # A list of links needs no features: one way to join them serves all devices, beside Algorithm 1.
    join = join_by_algorithm_1 if backend == "reference" else join_links
    features_TD, theta = features_TD.detach(), theta.detach()
    labels_T = torch.arange(features_TD.shape[0], device=features_TD.device)
    if links == "best" and pairs_2E is None and backend in ("auto", "triton") and kernels_take(features_TD):
        from asc.kernels.best import best_components

        longest = int(cu_seqlens.diff().max()) if max_len is None else max_len
        return best_components(features_TD.contiguous(), cu_seqlens, theta, longest, by_size)
    if pairs_2E is not None:
        return join(labels_T, _among_pairs(features_TD, pairs_2E, theta, links, by_size))
    for linked_2F in _gathered(_everywhere(features_TD, cu_seqlens, theta, links, by_size)):
        labels_T = join(labels_T, linked_2F)
    return labels_T


def _among_pairs(
    features_TD: Tensor, pairs_2E: Tensor, theta: Tensor, links: Links, by_size: SizeWeight | None
) -> Tensor:
    similarity_E = pair_similarities(features_TD, pairs_2E, by_size)
    linked_E = similarity_E > theta
    if links == "best":
        linked_E &= _best_of_listed(similarity_E, pairs_2E, features_TD.shape[0])
    return pairs_2E[:, linked_E]


def _best_of_listed(similarity_E: Tensor, pairs_2E: Tensor, total: int) -> Tensor:
    """Whether each listed pair is the best one of at least one of its tokens."""
    both_2E = similarity_E.expand(2, -1)
    partner_2E = pairs_2E.flip(0)
    highest_T = similarity_E.new_full((total,), -torch.inf)
    highest_T.scatter_reduce_(0, pairs_2E.flatten(), both_2E.flatten(), "amax")
    partner_if_highest_2E = torch.where(both_2E == highest_T[pairs_2E], partner_2E, total)
    best_T = pairs_2E.new_full((total,), total)
    best_T.scatter_reduce_(0, pairs_2E.flatten(), partner_if_highest_2E.flatten(), "amin")
    return (best_T[pairs_2E] == partner_2E).any(0)


def _everywhere(
    features_TD: Tensor, cu_seqlens: Tensor, theta: Tensor, links: Links, by_size: SizeWeight | None
) -> Iterator[Tensor]:
    """The links of every image, in tiles: never N × N in memory."""
    of_tile = _best_of_tile if links == "best" else _all_of_tile
    for first, end in pairwise(cu_seqlens.tolist()):
        # A copy of its own, as in ``components``: products may round by alignment.
        features_ND = features_TD[first:end].clone()
        own = None if by_size is None else SizeWeight(by_size.sizes_T[first:end], by_size.power)
        rows = max(1, _TILE_ENTRIES // (end - first))
        for row in range(0, end - first, rows):
            yield of_tile(features_ND, slice(row, min(row + rows, end - first)), theta, own) + first


def _best_of_tile(features_ND: Tensor, tile: slice, theta: Tensor, by_size: SizeWeight | None) -> Tensor:
    similarity_RN = tile_similarities(features_ND, tile, slice(0, features_ND.shape[0]), by_size)
    similarity_RN.diagonal(tile.start).fill_(-torch.inf)
    highest_R, best_R = similarity_RN.max(dim=1)
    own_R = torch.arange(tile.start, tile.stop, device=best_R.device)
    return torch.stack([own_R, best_R])[:, highest_R > theta]


def _all_of_tile(features_ND: Tensor, tile: slice, theta: Tensor, by_size: SizeWeight | None) -> Tensor:
    # Only the upper triangle: each pair is compared once.
    similarity_RM = tile_similarities(features_ND, tile, slice(tile.start, features_ND.shape[0]), by_size)
    linked_2F: Tensor = (similarity_RM > theta).triu(1).nonzero().T + tile.start
    return linked_2F


def _gathered(pieces: Iterator[Tensor]) -> Iterator[Tensor]:
    """Pieces put together to a worthwhile number of links: each join looks at all tokens."""
    waiting: list[Tensor] = []
    count = 0
    for linked_2F in pieces:
        waiting.append(linked_2F)
        count += linked_2F.shape[1]
        if count >= _TILE_ENTRIES:
            yield torch.cat(waiting, dim=1)
            waiting, count = [], 0
    if waiting:
        yield torch.cat(waiting, dim=1)
