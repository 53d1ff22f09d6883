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
# Rows of a tile: as many as threads, see ``join``. Columns: as many as registers allow.
_ROWS, _COLUMNS, _WARPS = 64, 32, 2


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
        (cdiv(max_len, _ROWS), cu_seqlens.shape[0] - 1, 1),
        (features_TD, cu_seqlens, theta, parent_T, sizes),
        constants=(width, block_d, _ROWS, _COLUMNS, power, precision),
        warps=_WARPS,
    )


@triton.jit
def sizes_of(sizes_ptr, tokens, end):
    """Patches of tokens; 1 beyond the image."""
    return tl.load(sizes_ptr + tokens, mask=tokens < end, other=1).to(tl.float32)


@triton.jit
def size_factor(sizes, others, POWER: tl.constexpr):
    """The factor of 1 - S for pairs of tokens: see ``asc.grouping.graph.SizeWeight``."""
    # A root is quicker than a quotient.
    root = tl.rsqrt(sizes + others)
    factor = 2.0 * sizes * (root * root * others)
    if POWER != 1.0:
        factor = tl.exp2(POWER * tl.log2(factor))
    return factor


@triton.jit
def _look_at(
    nearest,
    place,
    features_ptr,
    row_tile,
    rows,
    sizes_ptr,
    row_sizes,
    column,
    end,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    POWER: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One tile: for every row and every place in a tile the smallest distance so far, and where its tile begins."""
    columns = column + tl.arange(0, COLUMNS)
    column_tile = tile_of(features_ptr, columns, end, tl.arange(0, BLOCK_D), WIDTH, WIDTH % BLOCK_D == 0)
    similarity = similarities(
        features_ptr, row_tile, column_tile, rows, columns, end, WIDTH, BLOCK_D, ROWS, COLUMNS, PRECISION
    )
    distance = 1.0 - similarity
    if POWER > 0:
        distance *= size_factor(row_sizes[:, None], sizes_of(sizes_ptr, columns, end)[None, :], POWER)
    if MASKED:
        others = (columns[None, :] < end) & (columns[None, :] != rows[:, None])
        distance = tl.where(others, distance, float("inf"))
    nearer = distance < nearest
    return tl.where(nearer, distance, nearest), tl.where(nearer, column, place)


@triton.jit
def _join_best(
    features_ptr,
    borders_ptr,
    theta_ptr,
    parent_ptr,
    sizes_ptr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    POWER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: the partners of some tokens of one image."""
    image = tl.program_id(1)
    begin = tl.load(borders_ptr + image)
    end = tl.load(borders_ptr + image + 1)
    first = begin + tl.program_id(0) * ROWS
    if first >= end:
        return
    rows = first + tl.arange(0, ROWS)
    row_tile = tile_of(features_ptr, rows, end, tl.arange(0, BLOCK_D), WIDTH, WIDTH % BLOCK_D == 0)
    row_sizes = sizes_of(sizes_ptr, rows, end) if POWER > 0 else rows
    nearest = tl.full((ROWS, COLUMNS), float("inf"), dtype=tl.float32)
    place = tl.full((ROWS, COLUMNS), 0, dtype=tl.int32)
    own = features_ptr, row_tile, rows, sizes_ptr, row_sizes
    # In their order, so that of equals the first is found; only a few tiles hold the rows themselves, or no tokens.
    whole = begin + (end - begin) // COLUMNS * COLUMNS
    for column in range(begin, first, COLUMNS):
        nearest, place = _look_at(
            nearest, place, *own, column, end, WIDTH, BLOCK_D, ROWS, COLUMNS, POWER, PRECISION, False
        )
    for column in range(first, tl.minimum(first + ROWS, end), COLUMNS):
        nearest, place = _look_at(
            nearest, place, *own, column, end, WIDTH, BLOCK_D, ROWS, COLUMNS, POWER, PRECISION, True
        )
    for column in range(first + ROWS, whole, COLUMNS):
        nearest, place = _look_at(
            nearest, place, *own, column, end, WIDTH, BLOCK_D, ROWS, COLUMNS, POWER, PRECISION, False
        )
    if whole >= first + ROWS and whole < end:
        nearest, place = _look_at(
            nearest, place, *own, whole, end, WIDTH, BLOCK_D, ROWS, COLUMNS, POWER, PRECISION, True
        )
    distance = tl.min(nearest, axis=1)
    columns = place + tl.arange(0, COLUMNS)[None, :]
    partner = tl.min(tl.where(nearest == distance[:, None], columns, _NONE), axis=1)
    linked = (rows < end) & (1.0 - distance > tl.load(theta_ptr))
    itself = tl.minimum(rows, end - 1)
    join(parent_ptr, itself, tl.where(linked, partner, itself), linked)
