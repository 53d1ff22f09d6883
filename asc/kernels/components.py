"""Connected components on the GPU: lock-free union of minimum indices inside the tiles of the Gram matrix.

Every node has a parent of no larger index; a root is its own. An edge hooks the larger root under the smaller
by an atomic minimum (Komura; ECL-CC), so the root of a finished tree is the smallest index of its component,
whatever the order of the races: labels are deterministic. Similarities live in the registers of one tile only,
so memory is O(T). θ is read on the device and nothing waits for the host. Shape letters: see ``asc.tokens``.
"""

# Kernels are compiled by Triton from their syntax: they have no Python types to check.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped, no-any-return"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asc.kernels.launch import cdiv, launch, power_of_2

_NONE = tl.constexpr(2**31 - 1)  # larger than any index: no link, no root
_LOOK = tl.constexpr(8)  # tiles after which a program looks up the roots of its rows again


class Tiling(NamedTuple):
    """How the Gram matrix is cut; chosen by measurement (``benchmarks/kernels.py``)."""

    block: int = 32
    """Rows and columns of a tile, 16, 32 or 64; at least the number of threads, see ``join``."""
    splits: int = 4
    """Programs that share one row of tiles."""
    warps: int = 1
    stages: int = 2


def everywhere(
    features_TD: Tensor, cu_seqlens: Tensor, theta: Tensor, max_len: int, tiling: Tiling | None = None
) -> Tensor:
    """Smallest packed index of each token's component among all tokens of its image (int64).

    Half-precision features are multiplied as they are and accumulated in fp32; fp32 features in three tf32
    products, which is as exact as fp32. ``max_len`` bounds the lengths.
    """
    parent_T = torch.arange(features_TD.shape[0], dtype=torch.int32, device=features_TD.device)
    join_everywhere(features_TD, cu_seqlens, theta, parent_T, max_len, tiling)
    return roots(parent_T)


def join_everywhere(
    features_TD: Tensor,
    cu_seqlens: Tensor,
    theta: Tensor,
    parent_T: Tensor,
    max_len: int,
    tiling: Tiling | None = None,
) -> None:
    """Join all linked tokens in the forest ``parent_T`` (int32), in which each token starts as its own parent."""
    if max_len <= 1:
        return
    if tiling is None:
        tiling = Tiling()
    width, rows = features_TD.shape[1], cdiv(max_len, tiling.block)
    block_d = min(64, max(16, power_of_2(width)))
    precision = "tf32x3" if features_TD.dtype == torch.float32 else "ieee"
    launch(
        _join_tiles,
        (rows, min(tiling.splits, rows), cu_seqlens.shape[0] - 1),
        (features_TD, cu_seqlens, theta, parent_T),
        constants=(width, block_d, tiling.block, precision),
        warps=tiling.warps,
        stages=tiling.stages,
    )


def among_pairs(features_TD: Tensor, pairs_2E: Tensor, theta: Tensor) -> Tensor:
    """The same where only the listed pairs may be joined."""
    total, width = features_TD.shape
    parent_T = torch.arange(total, dtype=torch.int32, device=features_TD.device)
    count = pairs_2E.shape[1]
    if count:
        block_d = min(64, power_of_2(width))
        tensors = features_TD, pairs_2E.contiguous(), theta, parent_T
        launch(_join_pairs, (cdiv(count, 128), 1, 1), tensors, (count,), (width, block_d, 128))
    return roots(parent_T)


def roots(parent_T: Tensor) -> Tensor:
    """The root of every token's tree (int64)."""
    labels_T = torch.empty_like(parent_T, dtype=torch.int64)
    count = parent_T.shape[0]
    launch(_flatten, (cdiv(count, 256), 1, 1), (parent_T, labels_T), (count,), (256,))
    return labels_T


@triton.jit
def root_of(parent_ptr, node):
    """The root of every node of a vector; shortens the paths on the way."""
    # Volatile: other programs hook roots meanwhile. A value that is already old is an ancestor nevertheless.
    first_up = tl.load(parent_ptr + node, volatile=True)
    root = first_up
    up = tl.load(parent_ptr + root, volatile=True)
    while tl.max((up != root).to(tl.int32), axis=0) > 0:
        root = up
        up = tl.load(parent_ptr + root, volatile=True)
    # A plain store beside the others' atomics is harmless: it goes to nodes that were seen to be no roots, and
    # whoever lowers such a node's parent at the same time goes on to join what it found there, see join.
    tl.store(parent_ptr + node, root, mask=first_up != root)
    return root


@triton.jit
def join(parent_ptr, a, b, active):
    """Join node a with node b where ``active``; both may be any nodes of their trees.

    The vectors must hold at least one entry for every thread, or an atomic's answer would have to be
    copied between threads.
    """
    active = active & (a != b)
    while tl.max(active.to(tl.int32), axis=0) > 0:
        high = tl.maximum(a, b)
        low = tl.minimum(a, b)
        old = tl.atomic_min(parent_ptr + high, low, mask=active, sem="relaxed")
        # If high was a root it hangs under low now. If not, its link to ``old`` may just have been replaced:
        # joining old with low restores it, and leads on to the root.
        active = active & (old != high) & (old != low)
        a = tl.where(active, old, a)
        b = tl.where(active, low, b)


@triton.jit
def _nodes_above(parent_ptr, tokens, end):
    """The parents of tokens; those beyond the image get _NONE, which reads as "no link" as an other end."""
    # Volatile also keeps the compiler from loading the same numbers again for every thread that compares them.
    return tl.load(parent_ptr + tokens, mask=tokens < end, other=_NONE, volatile=True)


@triton.jit
def _roots_above(parent_ptr, tokens, end):
    """The same, up to the roots."""
    return tl.where(tokens < end, root_of(parent_ptr, tl.minimum(tokens, end - 1)), _NONE)


@triton.jit
def _either(bits, others):
    return bits | others


@triton.jit
def _links_out(similarity, theta, row_nodes, column_nodes):
    """Not zero where a tile has a link between different nodes."""
    return tl.where(similarity > theta, row_nodes[:, None] ^ column_nodes[None, :], 0)


@triton.jit
def _rows_as_bits(links, rows, columns, end, BLOCK: tl.constexpr):
    """The links of every row as the bits of one number, the bit of column k at place k - row: see ``_join_some``."""
    number: tl.constexpr = tl.int32 if BLOCK <= 32 else tl.int64
    one = tl.full((BLOCK,), 1, dtype=number)
    bit = tl.where(columns < end, one << tl.arange(0, BLOCK).to(number), 0)
    bits = tl.reduce(tl.where(links != 0, bit[None, :], 0), 1, _either)
    shift = tl.arange(0, BLOCK).to(number)
    # What is shifted in from above is a copy of the highest bit, and has no business there.
    kept = (one << (BLOCK - 1 - shift) << 1) - 1
    turned = ((bits >> shift) & kept) | (bits << (BLOCK - 1 - shift) << 1)
    if BLOCK < 32:
        turned = turned & ((1 << BLOCK) - 1)
    return tl.where(rows < end, turned, 0)


@triton.jit
def _place_of_lowest(bits):
    """The place of the lowest bit of every number: the exponent of that bit, read as a number."""
    lowest = bits & -bits
    if bits.dtype == tl.int64:
        return ((lowest.to(tl.float64).to(tl.int64, bitcast=True) >> 52) & 0x7FF).to(tl.int32) - 1023
    return ((lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127


@triton.jit
def _join_some(parent_ptr, row_nodes, bits, first_column, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """Join every row with some of its links; returns the others.

    Row i begins with column i, so that rows that are linked with the same columns join different ones of them.
    """
    for _ in tl.static_range(ROUNDS):
        column = first_column + (_place_of_lowest(bits) + tl.arange(0, BLOCK)) % BLOCK
        there = tl.load(parent_ptr + column, mask=bits != 0, other=0, volatile=True)
        join(parent_ptr, row_nodes, there, bits != 0)
        bits = bits & (bits - 1)
    return bits


@triton.jit
def _join_tile(similarity, theta, parent_ptr, bits, rows, columns, first_column, end, BLOCK: tl.constexpr):
    """Join all links of a tile; returns nodes above its rows.

    Each round at least halves the number of trees that still have a link to go.
    """
    row_nodes = _nodes_above(parent_ptr, rows, end)
    bits = _join_some(parent_ptr, row_nodes, bits, first_column, 2, BLOCK)
    while tl.max((bits != 0).to(tl.int32), axis=0) > 0:
        row_nodes = _roots_above(parent_ptr, rows, end)
        column_nodes = _roots_above(parent_ptr, columns, end)
        links = _links_out(similarity, theta, row_nodes, column_nodes)
        bits = _rows_as_bits(links, rows, columns, end, BLOCK)
        bits = _join_some(parent_ptr, row_nodes, bits, first_column, 2, BLOCK)
    # Both are above the rows, and parents have lower numbers than their children. No bits are left; Triton 3.6 cannot
    # compile a loop one of whose results nobody reads.
    return tl.minimum(row_nodes, _nodes_above(parent_ptr, rows, end)) + bits.to(tl.int32)


@triton.jit
def tile_of(features_ptr, tokens, end, channels, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Some channels of tokens; zero beyond the image."""
    pointers = features_ptr + tokens.to(tl.int64)[:, None] * WIDTH + channels[None, :]
    if EVEN:
        return tl.load(pointers, mask=tokens[:, None] < end, other=0.0)
    return tl.load(pointers, mask=(tokens[:, None] < end) & (channels[None, :] < WIDTH), other=0.0)


@triton.jit
def similarities(
    features_ptr,
    row_tile,
    column_tile,
    rows,
    columns,
    end,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Inner products of a tile; ``row_tile`` and ``column_tile`` hold the first channels."""
    even: tl.constexpr = WIDTH % BLOCK_D == 0
    channels = tl.arange(0, BLOCK_D)
    similarity = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    similarity = tl.dot(row_tile, tl.trans(column_tile), similarity, input_precision=PRECISION)
    for start in range(BLOCK_D, WIDTH, BLOCK_D):
        more_rows = tile_of(features_ptr, rows, end, start + channels, WIDTH, even)
        more_columns = tile_of(features_ptr, columns, end, start + channels, WIDTH, even)
        similarity = tl.dot(more_rows, tl.trans(more_columns), similarity, input_precision=PRECISION)
    return similarity


@triton.jit
def _join_tiles(
    features_ptr,
    borders_ptr,
    theta_ptr,
    parent_ptr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: its share of a row of tiles, from the diagonal to the right."""
    image = tl.program_id(2)
    end = tl.load(borders_ptr + image + 1)
    first_row = tl.load(borders_ptr + image) + tl.program_id(0) * BLOCK
    first_column = first_row + tl.program_id(1) * BLOCK
    # The grid fits the longest image; others have fewer tiles.
    if first_column >= end:
        return
    theta = tl.load(theta_ptr)
    rows = first_row + tl.arange(0, BLOCK)
    channels = tl.arange(0, BLOCK_D)
    even: tl.constexpr = WIDTH % BLOCK_D == 0
    row_tile = tile_of(features_ptr, rows, end, channels, WIDTH, even)
    # Any node above a token will do to see that two are joined already; that two are not is looked at closely.
    row_above = _nodes_above(parent_ptr, rows, end)
    step = tl.num_programs(1) * BLOCK
    for column in range(first_column, end, step):
        # Others have joined rows meanwhile: who looks now and then takes fewer of their links for new.
        if (column - first_column) // step % _LOOK == _LOOK - 1:
            row_above = _roots_above(parent_ptr, rows, end)
        columns = column + tl.arange(0, BLOCK)
        column_above = _nodes_above(parent_ptr, columns, end)
        column_tile = tile_of(features_ptr, columns, end, channels, WIDTH, even)
        similarity = similarities(
            features_ptr, row_tile, column_tile, rows, columns, end, WIDTH, BLOCK_D, BLOCK, BLOCK, PRECISION
        )
        links = _links_out(similarity, theta, row_above, column_above)
        if tl.max(links) > 0:
            bits = _rows_as_bits(links, rows, columns, end, BLOCK)
            row_above = _join_tile(similarity, theta, parent_ptr, bits, rows, columns, column, end, BLOCK)


@triton.jit(do_not_specialize=["count"])
def _join_pairs(
    features_ptr,
    pairs_ptr,
    theta_ptr,
    parent_ptr,
    count,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = pair < count
    left = tl.load(pairs_ptr + pair, mask=exists, other=0)
    right = tl.load(pairs_ptr + count + pair, mask=exists, other=0)
    similarity = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK_D):
        channels = start + tl.arange(0, BLOCK_D)
        mask = exists[:, None] & (channels[None, :] < WIDTH)
        a = tl.load(features_ptr + left[:, None] * WIDTH + channels[None, :], mask=mask, other=0.0)
        b = tl.load(features_ptr + right[:, None] * WIDTH + channels[None, :], mask=mask, other=0.0)
        similarity += tl.sum(a.to(tl.float32) * b.to(tl.float32), axis=1)
    linked = exists & (similarity > tl.load(theta_ptr))
    left_root = root_of(parent_ptr, left.to(tl.int32))
    right_root = root_of(parent_ptr, right.to(tl.int32))
    join(parent_ptr, left_root, right_root, linked)


@triton.jit(do_not_specialize=["count"])
def _flatten(parent_ptr, labels_ptr, count, BLOCK: tl.constexpr):
    node = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    root = root_of(parent_ptr, tl.minimum(node, count - 1))
    tl.store(labels_ptr + node, root.to(tl.int64), mask=node < count)
