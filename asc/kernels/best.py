"""Components of best links on the GPU: every token asks for one partner, the most similar token of its image.

One pass over all pairs finds the partners and joins them, so there is no list of links. The plain version is
``asc.grouping.links``. Shape letters: see ``asc.tokens``.
"""

# Kernels are compiled by Triton from their syntax: they have no Python types to check.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped, no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asc.grouping.graph import SizeWeight
from asc.kernels.components import join, roots, similarities, tile_of
from asc.kernels.launch import cdiv, launch, power_of_2

_NONE = tl.constexpr(2**31 - 1)  # larger than any index
# Rows and columns of a tile; as many as threads, see ``join``.
_BLOCK, _WARPS = 64, 2


def best_components(
    features_TD: Tensor, cu_seqlens: Tensor, theta: Tensor, max_len: int, by_size: SizeWeight | None
) -> Tensor:
    """Smallest packed index of each token's component in the graph of best links above θ (int64)."""
    parent_T = torch.arange(features_TD.shape[0], dtype=torch.int32, device=features_TD.device)
    join_best(features_TD, cu_seqlens, theta, parent_T, max_len, by_size)
    return roots(parent_T)


def join_best(
    features_TD: Tensor,
    cu_seqlens: Tensor,
    theta: Tensor,
    parent_T: Tensor,
    max_len: int,
    by_size: SizeWeight | None,
) -> None:
    """Join each token with its best partner above θ in the forest ``parent_T`` (int32), in which each token starts as
    its own parent. Among partners that are equally similar the first is the best."""
    width = features_TD.shape[1]
    block_d = min(64, max(16, power_of_2(width)))
    precision = "tf32x3" if features_TD.dtype == torch.float32 else "ieee"
    power = 0.0 if by_size is None else float(by_size.power)
    # What is not looked at may be anything.
    sizes = cu_seqlens if by_size is None else by_size.sizes_T
    launch(
        _join_best,
        (cdiv(max_len, _BLOCK), cu_seqlens.shape[0] - 1, 1),
        (features_TD, cu_seqlens, theta, parent_T, sizes),
        constants=(width, block_d, _BLOCK, power, precision),
        warps=_WARPS,
    )


@triton.jit
def sizes_of(sizes_ptr, tokens, end):
    """Patches of tokens; 1 beyond the image."""
    return tl.load(sizes_ptr + tokens, mask=tokens < end, other=1).to(tl.float32)


@triton.jit
def weighed(similarity, row_sizes, column_sizes, POWER: tl.constexpr):
    """Similarities in which sizes count: see ``asc.grouping.graph.SizeWeight``."""
    rows, columns = row_sizes[:, None], column_sizes[None, :]
    factor = 2.0 * rows * columns / (rows + columns)
    if POWER != 1.0:
        factor = tl.exp2(POWER * tl.log2(factor))
    return 1.0 - (1.0 - similarity) * factor


@triton.jit
def _join_best(
    features_ptr,
    borders_ptr,
    theta_ptr,
    parent_ptr,
    sizes_ptr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    POWER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: the partners of some tokens of one image."""
    image = tl.program_id(1)
    begin = tl.load(borders_ptr + image)
    end = tl.load(borders_ptr + image + 1)
    first = begin + tl.program_id(0) * BLOCK
    if first >= end:
        return
    rows = first + tl.arange(0, BLOCK)
    channels = tl.arange(0, BLOCK_D)
    even: tl.constexpr = WIDTH % BLOCK_D == 0
    row_tile = tile_of(features_ptr, rows, end, channels, WIDTH, even)
    highest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    partner = tl.full((BLOCK,), _NONE, dtype=tl.int32)
    for column in range(begin, end, BLOCK):
        columns = column + tl.arange(0, BLOCK)
        column_tile = tile_of(features_ptr, columns, end, channels, WIDTH, even)
        similarity = similarities(
            features_ptr, row_tile, column_tile, rows, columns, end, WIDTH, BLOCK_D, BLOCK, PRECISION
        )
        if POWER > 0:
            similarity = weighed(similarity, sizes_of(sizes_ptr, rows, end), sizes_of(sizes_ptr, columns, end), POWER)
        others = (columns[None, :] < end) & (columns[None, :] != rows[:, None])
        similarity = tl.where(others, similarity, float("-inf"))
        highest_here = tl.max(similarity, axis=1)
        first_here = tl.min(tl.where(similarity == highest_here[:, None], columns[None, :], _NONE), axis=1)
        partner = tl.where(highest_here > highest, first_here, partner)
        highest = tl.maximum(highest, highest_here)
    linked = (rows < end) & (highest > tl.load(theta_ptr))
    own = tl.minimum(rows, end - 1)
    join(parent_ptr, own, tl.where(linked, partner, own), linked)
