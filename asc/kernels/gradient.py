"""The soft twin's gradient over all pairs on the GPU: two passes over tiles, nothing of size N × N in memory.

The formulas and the plain version are in ``asc.grouping.gradient``. Each program owns a block of rows and walks
over all columns of its image, so there are no atomics and the result is deterministic: what a pair means for its
other end is computed again there rather than handed over.

With w_i x_i in place of x_i, and g_i / D_i in place of g_i from the second pass on, the derivative by S_ij as seen
from both ends is one inner product of concatenated rows:

    dS_ij + dS_ji = A'_ij ( [g_i, x_i] · [x_j, g_j] - e_i w_j - e_j w_i )      e_i = (g_i · ỹ_i + votes_i) / D_i

Where only θ learns, the sums of the gates and of their slopes over a row are all there is to know: one pass.

Shape letters: see ``asc.tokens``; U is 2C, a row [g_i, x_i].
"""

# Kernels are compiled by Triton from their syntax: they have no Python types to check.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped, no-any-return"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asc.grouping.graph import SizeWeight
from asc.kernels.best import size_factor, sizes_of
from asc.kernels.components import similarities, tile_of
from asc.kernels.launch import cdiv, launch, power_of_2
from asc.kernels.spare import existing, last_border


class Blocks(NamedTuple):
    """Shape of the tiles; chosen by measurement (``benchmarks/kernels.py``)."""

    rows: int = 64
    columns: int = 64
    channels: int = 64
    warps: int = 4
    stages: int = 3


# Images longer than this let an eighth of their rows speak for θ, which is one number for millions of pairs. Rows with
# long gradients say most, so they are heard more often, and count for less each time: the sum stays the same on
# average, with a fraction of the noise that every eighth row has (docs/results/gradient.md).
_ALL_ROWS, _EVERY = 1024, 8
# Added to the length of every row's gradient, in units of their mean: what a row says also depends on its neighbours.
_LEAST = 0.2
# Lengths are counted in whole numbers of this sum, so that no draw is lost or made twice by rounding.
_WHOLE = 1 << 29
# Three tf32 products for one of fp32 need three times the shared memory and registers.
_EXACT_BLOCKS = Blocks(rows=32, columns=32, channels=32, warps=4, stages=1)


class Spread(NamedTuple):
    """What spreads the gradients of groups over their tokens: a token's share is its weight over the total."""

    grad_GC: Tensor
    grad_votes_G: Tensor
    group_of_T: Tensor
    totals_G: Tensor
    weights_T: Tensor
    cu_seqlens: Tensor | None = None
    """Borders of the images where tokens behind the last do not exist; those get no gradient."""


def soft_gradient(
    spread: Spread,
    features_TD: Tensor,
    values_TC: Tensor,
    theta: Tensor,
    tau: Tensor,
    cu_seqlens: Tensor,
    max_len: int,
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (fp32) for the features and θ of Σ_i share_i (grad · ỹ_i - grad_votes log D_i), and the tokens'
    own gradients of their votes.

    fp16 features mean half precision: then values and gradients are multiplied in bf16, else all in fp32 (three
    tf32 products).
    """
    passed = soft_gradient_passes(spread, features_TD, values_TC, theta, tau, cu_seqlens, max_len, None, blocks)
    # Every pair was met from both ends.
    return passed.grad_features_TD, passed.grad_theta_P.sum() * -0.5, passed.grad_votes_T


class Passed(NamedTuple):
    """What the passes over all pairs leave behind."""

    grad_features_TD: Tensor
    grad_theta_P: Tensor
    """In parts, and from both ends of every pair: minus half its sum is the gradient of θ."""
    grad_votes_T: Tensor


class ThresholdGradient(NamedTuple):
    """What the one pass for θ leaves behind."""

    grad_TC: Tensor
    grad_votes_T: Tensor
    grad: Tensor


def soft_gradient_passes(
    spread: Spread,
    features_TD: Tensor,
    values_TC: Tensor,
    theta: Tensor,
    tau: Tensor,
    cu_seqlens: Tensor,
    max_len: int,
    grad_values_TC: Tensor | None,
    blocks: Blocks | None = None,
) -> Passed:
    """``soft_gradient``; also writes the hard merge's gradient of the values where there is a place for it."""
    half = features_TD.dtype == torch.float16
    rows_TU, votes_T = _packed_rows(spread, values_TC, half_type(features_TD) if half else None, grad_values_TC)
    if blocks is None:
        blocks = Blocks() if half else _EXACT_BLOCKS
    batch, (total, width), channels = cu_seqlens.shape[0] - 1, features_TD.shape, values_TC.shape[1]
    row_blocks = cdiv(max_len, blocks.rows)
    block_d = min(64, max(16, power_of_2(width)))
    block_c = min(blocks.channels, max(16, power_of_2(channels)))
    precision = "ieee" if half else "tf32x3"
    constants = (width, channels, block_d, block_c, blocks.rows, blocks.columns, precision)
    inputs = features_TD, rows_TU, spread.weights_T, theta, tau, cu_seqlens
    excess_T = torch.empty_like(votes_T)
    grid = row_blocks, batch, 1
    launch(_row_sums, grid, (*inputs, votes_T, excess_T), (), constants, blocks.warps, blocks.stages)
    grad_features_TD = torch.empty(total, width, dtype=torch.float32, device=features_TD.device)
    grad_theta_P = torch.empty(batch * row_blocks, dtype=torch.float32, device=features_TD.device)
    outputs = excess_T, grad_features_TD, grad_theta_P
    grid = row_blocks, cdiv(width, block_d), batch
    launch(_slopes, grid, (*inputs, *outputs), (row_blocks,), constants, blocks.warps, blocks.stages)
    return Passed(grad_features_TD, grad_theta_P, votes_T)


def threshold_gradient(
    spread: Spread,
    features_TD: Tensor,
    values_TC: Tensor,
    theta: Tensor,
    tau: Tensor,
    cu_seqlens: Tensor,
    max_len: int,
    scale: Tensor,
    sign: float,
    every: int | None = None,
    by_size: SizeWeight | None = None,
) -> ThresholdGradient:
    """``soft_gradient`` for θ alone, times ``scale`` and ``sign``; and the hard merge's gradient of the values.

    One of ``every`` n rows stands for all (None: chosen by the length of the images). ``by_size``: how sizes count.
    """
    half = features_TD.dtype == torch.float16
    blocks = Blocks() if half else _EXACT_BLOCKS
    heard = heard_rows(spread, values_TC, cu_seqlens, max_len, every)
    batch, width, channels = cu_seqlens.shape[0] - 1, features_TD.shape[1], values_TC.shape[1]
    row_blocks = cdiv(heard.slots, blocks.rows)
    block_d = min(64, max(16, power_of_2(width)))
    block_c = min(blocks.channels, max(16, power_of_2(channels)))
    parts_P = torch.empty(batch * row_blocks, dtype=torch.float32, device=features_TD.device)
    kind = _TRITON_TYPES[half_type(features_TD) if half else torch.float32]
    shape = width, channels, block_d, block_c, blocks.rows, blocks.columns
    power = 0.0 if by_size is None else float(by_size.power)
    constants = (*shape, "ieee" if half else "tf32x3", kind, heard.every, power)
    sizes = cu_seqlens if by_size is None else by_size.sizes_T
    inputs = features_TD, heard.grad_TC, values_TC, spread.weights_T, theta, tau, cu_seqlens, sizes, heard.votes_T
    tensors = *inputs, heard.rows_BK, heard.counts_BK, parts_P
    launch(_theta_slopes, (row_blocks, batch, 1), tensors, (heard.slots,), constants, blocks.warps, blocks.stages)
    return ThresholdGradient(heard.grad_TC, heard.votes_T, add_parts(parts_P, scale, -sign))


class Heard(NamedTuple):
    """The gradients of all tokens, and which of them speak for θ."""

    grad_TC: Tensor
    votes_T: Tensor
    every: int
    """How many rows one speaks for; 1: all speak, and nothing is chosen."""
    slots: int
    """Places for rows of an image."""
    rows_BK: Tensor
    counts_BK: Tensor
    """How much each row counts."""


def heard_rows(spread: Spread, values_TC: Tensor, cu_seqlens: Tensor, max_len: int, every: int | None = None) -> Heard:
    """Every row, or one of ``every`` n, drawn by the length of their gradients (None: by the length of the images)."""
    if every is None:
        every = 1 if max_len <= _ALL_ROWS else _EVERY
    lengths_T = torch.empty_like(spread.weights_T) if every > 1 else None
    grad_TC, votes_T = votes_and_hard_gradient(spread, values_TC, lengths_T)
    slots = cdiv(min(max_len, values_TC.shape[0]), every)
    # What is not looked at may be anything.
    chosen = cu_seqlens, votes_T
    if lengths_T is not None:
        chosen = _chosen_rows(lengths_T, cu_seqlens, slots, every)
    return Heard(grad_TC, votes_T, every, slots, *chosen)


def _chosen_rows(lengths_T: Tensor, cu_seqlens: Tensor, slots: int, every: int) -> tuple[Tensor, Tensor]:
    """Rows that speak for their image, in ``slots`` places each, and how much each counts."""
    batch = cu_seqlens.shape[0] - 1
    rows_BK = torch.empty(batch, slots, dtype=torch.int32, device=lengths_T.device)
    counts_BK = torch.empty(batch, slots, dtype=torch.float32, device=lengths_T.device)
    tensors = lengths_T, cu_seqlens, rows_BK, counts_BK
    launch(_choose_rows, (batch, 1, 1), tensors, (slots,), (every, _LEAST, float(_WHOLE), 1024), 4, 1)
    return rows_BK, counts_BK


def votes_and_hard_gradient(
    spread: Spread, values_TC: Tensor, lengths_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The hard merge's gradient of the values, and the tokens' own gradients of their votes.

    Where there is a place for them, the lengths of both together are written, too.
    """
    grad_TC = torch.empty_like(values_TC, dtype=spread.grad_GC.dtype)
    _, votes_T = _packed_rows(spread, values_TC, None, grad_TC, with_rows=False, lengths_T=lengths_T)
    return grad_TC, votes_T


def add_parts(parts_P: Tensor, scale: Tensor, factor: float) -> Tensor:
    """Sum of all parts in their order, times ``scale`` and ``factor``."""
    result = torch.empty_like(scale)
    launch(_add_parts, (1, 1, 1), (parts_P, scale, result), (parts_P.shape[0],), (float(factor),))
    return result


_TRITON_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def half_type(tensor: Tensor) -> torch.dtype:
    """What values and gradients are multiplied in where features are fp16."""
    # Gradients have the range of bf16, not of fp16. The interpreter cannot multiply bf16.
    return torch.bfloat16 if tensor.is_cuda else torch.float16


def _packed_rows(
    spread: Spread,
    values_TC: Tensor,
    dtype: torch.dtype | None,
    grad_values_TC: Tensor | None,
    with_rows: bool = True,
    lengths_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rows ``[g_i, w_i x_i]``, if they are wanted, and the votes' gradients of the tokens.

    Where there is a place for them, the lengths of the tokens' gradients are written, too.
    """
    total, channels = values_TC.shape
    block_c = power_of_2(channels)
    rows = max(1, 2048 // block_c)
    shape = (total, 2 * channels) if with_rows else (0,)
    rows_TU = values_TC.new_empty(shape, dtype=torch.float32 if dtype is None else dtype)
    votes_T = torch.empty_like(spread.weights_T)
    borders, batch = last_border(spread.cu_seqlens, spread.group_of_T)
    tensors = (
        spread.grad_GC.contiguous(),
        spread.grad_votes_G.contiguous(),
        spread.group_of_T,
        spread.totals_G,
        values_TC.contiguous(),
        spread.weights_T,
        rows_TU,
        votes_T,
        rows_TU if grad_values_TC is None else grad_values_TC,
        votes_T if lengths_T is None else lengths_T,
        borders,
    )
    constants = channels, block_c, rows, grad_values_TC is not None, with_rows, lengths_T is not None
    launch(_pack_rows, (cdiv(total, rows), 1, 1), tensors, (total, batch), constants)
    return rows_TU, votes_T


@triton.jit(do_not_specialize=["count", "batch"])
def _pack_rows(
    grad_ptr,
    grad_votes_ptr,
    group_of_ptr,
    totals_ptr,
    values_ptr,
    weights_ptr,
    rows_ptr,
    votes_ptr,
    grad_values_ptr,
    lengths_ptr,
    borders_ptr,
    count,
    batch,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    WITH_VALUES: tl.constexpr,
    WITH_ROWS: tl.constexpr,
    WITH_LENGTHS: tl.constexpr,
):
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, BLOCK_C)
    exists = tokens < existing(borders_ptr, count, batch)
    mask = exists[:, None] & (channels[None, :] < CHANNELS)
    # Tokens that do not exist get zeros.
    written = tokens < count
    written_row = written[:, None] & (channels[None, :] < CHANNELS)
    group = tl.load(group_of_ptr + tokens, mask=exists, other=0).to(tl.int64)
    weight = tl.load(weights_ptr + tokens, mask=exists, other=0.0)
    share = weight / tl.load(totals_ptr + group, mask=exists, other=1.0)
    votes = tl.load(grad_votes_ptr + group, mask=exists, other=0.0)
    tl.store(votes_ptr + tokens, votes * share, mask=written)
    grad = tl.load(grad_ptr + group[:, None] * CHANNELS + channels[None, :], mask=mask, other=0.0).to(tl.float32)
    grad = grad * share[:, None]
    if WITH_LENGTHS:
        tl.store(lengths_ptr + tokens, tl.sqrt(tl.sum(grad * grad, axis=1)) + tl.abs(votes * share), mask=written)
    row = tokens.to(tl.int64)[:, None]
    if WITH_ROWS:
        values = tl.load(values_ptr + row * CHANNELS + channels[None, :], mask=mask, other=0.0).to(tl.float32)
        pointers = rows_ptr + row * (2 * CHANNELS) + channels[None, :]
        kind = rows_ptr.dtype.element_ty
        tl.store(pointers, grad.to(kind), mask=written_row)
        tl.store(pointers + CHANNELS, (values * weight[:, None]).to(kind), mask=written_row)
    if WITH_VALUES:
        pointers = grad_values_ptr + row * CHANNELS + channels[None, :]
        tl.store(pointers, grad.to(grad_values_ptr.dtype.element_ty), mask=written_row)


@triton.jit
def _tile(matrix_ptr, tokens, end, channels, STRIDE: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    pointers = matrix_ptr + tokens.to(tl.int64)[:, None] * STRIDE + channels[None, :]
    if EVEN:
        return tl.load(pointers, mask=tokens[:, None] < end, other=0.0)
    return tl.load(pointers, mask=(tokens[:, None] < end) & (channels[None, :] < WIDTH), other=0.0)


@triton.jit
def _gates(
    features_ptr,
    row_tile,
    rows,
    columns,
    end,
    theta,
    tau,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gate of every pair of a tile; ``row_tile`` holds the first channels of the rows."""
    column_tile = tile_of(features_ptr, columns, end, tl.arange(0, BLOCK_D), WIDTH, WIDTH % BLOCK_D == 0)
    similarity = similarities(
        features_ptr, row_tile, column_tile, rows, columns, end, WIDTH, BLOCK_D, ROWS, COLUMNS, PRECISION
    )
    return tl.sigmoid((similarity - theta) / tau)


@triton.jit
def _row_sums(
    features_ptr,
    rows_ptr,
    weights_ptr,
    theta_ptr,
    tau_ptr,
    borders_ptr,
    votes_ptr,
    excess_ptr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """First pass: D_i and g_i · ỹ_i. Writes e_i, and g_i / D_i in place of g_i.

    A program reads and changes the g of its own rows only, and changes them when it has finished reading.
    """
    image = tl.program_id(1)
    begin = tl.load(borders_ptr + image)
    end = tl.load(borders_ptr + image + 1)
    first = begin + tl.program_id(0) * ROWS
    if first >= end:
        return
    theta = tl.load(theta_ptr)
    tau = tl.load(tau_ptr)
    rows = first + tl.arange(0, ROWS)
    even: tl.constexpr = CHANNELS % BLOCK_C == 0
    row_features = _tile(features_ptr, rows, end, tl.arange(0, BLOCK_D), WIDTH, WIDTH, WIDTH % BLOCK_D == 0)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    pulled = tl.zeros((ROWS,), dtype=tl.float32)
    for column in range(begin, end, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        weights = tl.load(weights_ptr + columns, mask=columns < end, other=0.0)
        gate = _gates(
            features_ptr, row_features, rows, columns, end, theta, tau, WIDTH, BLOCK_D, ROWS, COLUMNS, PRECISION
        )
        gate = tl.where(rows[:, None] == columns[None, :], 1.0, gate)
        pull = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, CHANNELS, BLOCK_C):
            channels = start + tl.arange(0, BLOCK_C)
            grad = _tile(rows_ptr, rows, end, channels, 2 * CHANNELS, CHANNELS, even)
            values = _tile(rows_ptr + CHANNELS, columns, end, channels, 2 * CHANNELS, CHANNELS, even)
            pull = tl.dot(grad, tl.trans(values), pull, input_precision=PRECISION)
        # The values carry their weights already; beyond the image they are zero.
        pulled += tl.sum(gate * pull, axis=1)
        total += tl.sum(gate * weights[None, :], axis=1)
    exists = rows < end
    inverse = 1.0 / total
    votes = tl.load(votes_ptr + rows, mask=exists, other=0.0)
    tl.store(excess_ptr + rows, (pulled * inverse + votes) * inverse, mask=exists)
    # The loops above must be through with the gradients before they are scaled in place.
    tl.debug_barrier()
    for start in range(0, CHANNELS, BLOCK_C):
        channels = start + tl.arange(0, BLOCK_C)
        pointers = rows_ptr + rows.to(tl.int64)[:, None] * (2 * CHANNELS) + channels[None, :]
        mask = exists[:, None] & (channels[None, :] < CHANNELS)
        grad = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        tl.store(pointers, (grad * inverse[:, None]).to(rows_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["row_blocks"])
def _slopes(
    features_ptr,
    rows_ptr,
    weights_ptr,
    theta_ptr,
    tau_ptr,
    borders_ptr,
    excess_ptr,
    grad_features_ptr,
    grad_theta_ptr,
    row_blocks,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Second pass: the derivative by every S_ij as seen from both ends, gathered in the features of row i."""
    image = tl.program_id(2)
    begin = tl.load(borders_ptr + image)
    end = tl.load(borders_ptr + image + 1)
    first = begin + tl.program_id(0) * ROWS
    own_theta_ptr = grad_theta_ptr + image * row_blocks + tl.program_id(0)
    if first >= end:
        tl.store(own_theta_ptr, 0.0)
        return
    theta = tl.load(theta_ptr)
    tau = tl.load(tau_ptr)
    rows = first + tl.arange(0, ROWS)
    exists = rows < end
    even: tl.constexpr = CHANNELS % BLOCK_C == 0
    row_features = _tile(features_ptr, rows, end, tl.arange(0, BLOCK_D), WIDTH, WIDTH, WIDTH % BLOCK_D == 0)
    row_weights = tl.load(weights_ptr + rows, mask=exists, other=0.0)
    row_excess = tl.load(excess_ptr + rows, mask=exists, other=0.0)
    out_channels = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    grad_features = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    slope_sum = tl.zeros((ROWS,), dtype=tl.float32)
    for column in range(begin, end, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        weights = tl.load(weights_ptr + columns, mask=columns < end, other=0.0)
        excess = tl.load(excess_ptr + columns, mask=columns < end, other=0.0)
        gate = _gates(
            features_ptr, row_features, rows, columns, end, theta, tau, WIDTH, BLOCK_D, ROWS, COLUMNS, PRECISION
        )
        pull = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, CHANNELS, BLOCK_C):
            channels = start + tl.arange(0, BLOCK_C)
            row_grad = _tile(rows_ptr, rows, end, channels, 2 * CHANNELS, CHANNELS, even)
            values = _tile(rows_ptr + CHANNELS, columns, end, channels, 2 * CHANNELS, CHANNELS, even)
            pull = tl.dot(row_grad, tl.trans(values), pull, input_precision=PRECISION)
            row_values = _tile(rows_ptr + CHANNELS, rows, end, channels, 2 * CHANNELS, CHANNELS, even)
            grad = _tile(rows_ptr, columns, end, channels, 2 * CHANNELS, CHANNELS, even)
            pull = tl.dot(row_values, tl.trans(grad), pull, input_precision=PRECISION)
        # Beyond the image pulls, weights and excess are all zero, so the slopes vanish there.
        level = row_excess[:, None] * weights[None, :] + row_weights[:, None] * excess[None, :]
        slope = gate * (1.0 - gate) / tau * (pull - level)
        slope = tl.where(rows[:, None] == columns[None, :], 0.0, slope)
        slope_sum += tl.sum(slope, axis=1)
        features = _tile(features_ptr, columns, end, out_channels, WIDTH, WIDTH, WIDTH % BLOCK_D == 0)
        # Slopes have the range of gradients, which fp16 has not: both sides take the type of the rows.
        kind: tl.constexpr = rows_ptr.dtype.element_ty
        features = features.to(tl.float32).to(kind)
        grad_features = tl.dot(slope.to(kind), features, grad_features, input_precision=PRECISION)
    mask = exists[:, None] & (out_channels[None, :] < WIDTH)
    pointers = grad_features_ptr + rows.to(tl.int64)[:, None] * WIDTH + out_channels[None, :]
    tl.store(pointers, grad_features, mask=mask)
    if tl.program_id(1) == 0:
        tl.store(own_theta_ptr, tl.sum(slope_sum, axis=0))


@triton.jit
def _lengths(lengths_ptr, tokens, end):
    lengths = tl.load(lengths_ptr + tokens, mask=tokens < end, other=0.0)
    # Of gradients that are not finite nothing sensible can be said, but no row may lie outside of its image.
    return tl.where(lengths < 1e30, lengths, 0.0)


@triton.jit
def _counted(lengths_ptr, tokens, end, least, scale):
    """Lengths of gradients in whole numbers of at least 1, beyond the image 0."""
    counted = ((_lengths(lengths_ptr, tokens, end) + least) * scale).to(tl.int32) + 1
    return tl.where(tokens < end, counted, 0)


@triton.jit(do_not_specialize=["slots"])
def _choose_rows(
    lengths_ptr,
    borders_ptr,
    rows_ptr,
    counts_ptr,
    slots,
    EVERY: tl.constexpr,
    LEAST: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draws rows at equal distances along the sum of their lengths; a long one that is drawn n times counts n times.

    Where the first draw lies depends on the image's place in the batch, so that over a shuffled training all rows are
    heard as they should be.
    """
    image = tl.program_id(0)
    begin = tl.load(borders_ptr + image)
    end = tl.load(borders_ptr + image + 1)
    draws = tl.cdiv(end - begin, EVERY)
    first_slot = image.to(tl.int64) * slots
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(begin, end, BLOCK):
        total += _lengths(lengths_ptr, start + tl.arange(0, BLOCK), end)
    # A row of no token: nothing is there.
    for start in range(0, draws, BLOCK):
        empty = start + tl.arange(0, BLOCK)
        tl.store(rows_ptr + first_slot + empty, tl.zeros((BLOCK,), dtype=tl.int32) + end, mask=empty < draws)
        tl.store(counts_ptr + first_slot + empty, tl.zeros((BLOCK,), dtype=tl.float32), mask=empty < draws)
    length = tl.sum(total, axis=0)
    least = LEAST * length / tl.maximum(end - begin, 1).to(tl.float32)
    scale = WHOLE / tl.maximum((1.0 + LEAST) * length, 1e-20)
    whole = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(begin, end, BLOCK):
        whole += _counted(lengths_ptr, start + tl.arange(0, BLOCK), end, least, scale)
    whole = tl.sum(whole, axis=0).to(tl.int64)
    # Multiples of the golden ratio spread most evenly.
    fraction = image.to(tl.float32) * 0.6180339887
    shift = ((fraction - tl.floor(fraction)) * whole.to(tl.float32)).to(tl.int64)
    shift = tl.minimum(shift, whole - 1)
    # All places must be empty before some are filled.
    tl.debug_barrier()
    passed = whole * 0
    for start in range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        counted = _counted(lengths_ptr, tokens, end, least, scale).to(tl.int64)
        up_to = passed + tl.cumsum(counted, axis=0)
        before = ((up_to - counted) * draws + shift) // whole
        drawn = (up_to * draws + shift) // whole - before
        count = drawn.to(tl.float32) * whole.to(tl.float32) / (draws * tl.maximum(counted, 1)).to(tl.float32)
        is_drawn = (drawn > 0) & (tokens < end)
        tl.store(rows_ptr + first_slot + before, tokens, mask=is_drawn)
        tl.store(counts_ptr + first_slot + before, count, mask=is_drawn)
        passed += tl.sum(counted, axis=0)


@triton.jit
def _rows_that_speak(chosen_ptr, counts_ptr, image, slots, places, begin, end, EVERY: tl.constexpr):
    """The rows in some places, and how often each counts; where all speak, those are the image's own, once each."""
    if EVERY == 1:
        return begin + places, tl.full(places.shape, 1.0, tl.float32)
    slot = image.to(tl.int64) * slots + places
    is_filled = places < tl.cdiv(end - begin, EVERY)
    rows = tl.load(chosen_ptr + slot, mask=is_filled, other=2147483647)
    return rows, tl.load(counts_ptr + slot, mask=is_filled, other=0.0)


@triton.jit(do_not_specialize=["slots"])
def _theta_slopes(
    features_ptr,
    grads_ptr,
    values_ptr,
    weights_ptr,
    theta_ptr,
    tau_ptr,
    borders_ptr,
    sizes_ptr,
    votes_ptr,
    chosen_ptr,
    counts_ptr,
    parts_ptr,
    slots,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    KIND: tl.constexpr,
    EVERY: tl.constexpr,
    POWER: tl.constexpr,
):
    """The only pass for θ: of every row, or of those chosen, D_i and g_i · ỹ_i, and how both change with the gates."""
    image = tl.program_id(1)
    begin = tl.load(borders_ptr + image)
    end = tl.load(borders_ptr + image + 1)
    own_ptr = parts_ptr + image * tl.num_programs(0) + tl.program_id(0)
    if tl.program_id(0) * ROWS * EVERY >= end - begin:
        tl.store(own_ptr, 0.0)
        return
    theta = tl.load(theta_ptr)
    tau = tl.load(tau_ptr)
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows, counts = _rows_that_speak(chosen_ptr, counts_ptr, image, slots, places, begin, end, EVERY)
    even: tl.constexpr = CHANNELS % BLOCK_C == 0
    row_features = _tile(features_ptr, rows, end, tl.arange(0, BLOCK_D), WIDTH, WIDTH, WIDTH % BLOCK_D == 0)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    pulled = tl.zeros((ROWS,), dtype=tl.float32)
    total_slope = tl.zeros((ROWS,), dtype=tl.float32)
    pulled_slope = tl.zeros((ROWS,), dtype=tl.float32)
    for column in range(begin, end, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        weights = tl.load(weights_ptr + columns, mask=columns < end, other=0.0)
        column_features = tile_of(features_ptr, columns, end, tl.arange(0, BLOCK_D), WIDTH, WIDTH % BLOCK_D == 0)
        similarity = similarities(
            features_ptr, row_features, column_features, rows, columns, end, WIDTH, BLOCK_D, ROWS, COLUMNS, PRECISION
        )
        if POWER > 0:
            factor = size_factor(
                sizes_of(sizes_ptr, rows, end)[:, None], sizes_of(sizes_ptr, columns, end)[None, :], POWER
            )
            similarity = 1.0 - (1.0 - similarity) * factor
        gate = tl.sigmoid((similarity - theta) / tau)
        itself = rows[:, None] == columns[None, :]
        slope = tl.where(itself, 0.0, gate * (1.0 - gate)) * weights[None, :]
        gate = tl.where(itself, 1.0, gate) * weights[None, :]
        pull = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, CHANNELS, BLOCK_C):
            channels = start + tl.arange(0, BLOCK_C)
            grad = _tile(grads_ptr, rows, end, channels, CHANNELS, CHANNELS, even).to(KIND)
            values = _tile(values_ptr, columns, end, channels, CHANNELS, CHANNELS, even).to(KIND)
            pull = tl.dot(grad, tl.trans(values), pull, input_precision=PRECISION)
        pulled += tl.sum(gate * pull, axis=1)
        total += tl.sum(gate, axis=1)
        pulled_slope += tl.sum(slope * pull, axis=1)
        total_slope += tl.sum(slope, axis=1)
    exists = rows < end
    votes = tl.load(votes_ptr + rows, mask=exists, other=0.0)
    inverse = 1.0 / tl.where(exists, total, 1.0)
    slopes = (pulled_slope - (pulled * inverse + votes) * total_slope) * inverse / tau * counts
    tl.store(own_ptr, tl.sum(tl.where(exists, slopes, 0.0), axis=0))


@triton.jit(do_not_specialize=["count"])
def _add_parts(parts_ptr, scale_ptr, out_ptr, count, FACTOR: tl.constexpr):
    total = tl.zeros((1024,), dtype=tl.float32)
    for start in range(0, count, 1024):
        parts = start + tl.arange(0, 1024)
        total += tl.load(parts_ptr + parts, mask=parts < count, other=0.0)
    tl.store(out_ptr, tl.sum(total, axis=0) * tl.load(scale_ptr) * FACTOR)
