"""The weighted mean of every group on the GPU, and its gradient: one launch each, members added in order.

The plain version is ``asc.merging.weighted_mean``. Shape letters: see ``asc.tokens``.
"""

# Kernels are compiled by Triton from their syntax: they have no Python types to check.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped, no-any-return"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from asc.kernels.launch import cdiv, launch, power_of_2

# Most groups have very few members: those are read in one small tile.
_FEW = 4


def sorted_mean(
    values_TC: Tensor, weights_T: Tensor, group_of_T: Tensor, members_G: Tensor, order_T: Tensor, starts_G: Tensor
) -> Tensor:
    """Weighted mean of every group; ``order_T`` holds the tokens sorted by group, ``starts_G`` where each begins.

    The weights get no gradient.
    """
    mean_GC: Tensor = _SortedMean.apply(values_TC, weights_T, group_of_T, members_G, order_T, starts_G)
    return mean_GC


class _SortedMean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values_TC: Tensor,
        weights_T: Tensor,
        group_of_T: Tensor,
        members_G: Tensor,
        order_T: Tensor,
        starts_G: Tensor,
    ) -> Tensor:
        mean_GC, totals_G = mean_of_groups(values_TC.contiguous(), weights_T, members_G, order_T, starts_G)
        ctx.save_for_backward(weights_T, group_of_T, totals_G)
        return mean_GC

    @staticmethod
    def backward(ctx: Any, grad_GC: Tensor) -> tuple[Tensor | None, ...]:
        weights_T, group_of_T, totals_G = ctx.saved_tensors
        return (spread(grad_GC, weights_T, group_of_T, totals_G, grad_GC.dtype), None, None, None, None, None)


def mean_of_groups(
    values_TC: Tensor,
    weights_T: Tensor,
    members_G: Tensor,
    order_T: Tensor,
    starts_G: Tensor,
    sizes_T: Tensor | None = None,
    sizes_G: Tensor | None = None,
    votes_G: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted means and the sums of the weights; also adds up sizes, and makes all votes zero, where given."""
    groups, channels = members_G.shape[0], values_TC.shape[1]
    block_c = power_of_2(channels)
    mean_GC = values_TC.new_empty(groups, channels)
    totals_G = weights_T.new_empty(groups)
    with_sizes = sizes_T is not None and sizes_G is not None
    sizes = (sizes_T, sizes_G) if sizes_T is not None and sizes_G is not None else (members_G, members_G)
    votes = totals_G if votes_G is None else votes_G
    tensors = (values_TC, weights_T, members_G, order_T, starts_G, *sizes, votes, mean_GC, totals_G)
    constants = channels, block_c, _FEW, max(_FEW, 4096 // block_c), with_sizes, votes_G is not None
    launch(_mean, (groups, 1, 1), tensors, (), constants, warps=2 if block_c <= 256 else 4)
    return mean_GC, totals_G


def spread(grad_GC: Tensor, weights_T: Tensor, group_of_T: Tensor, totals_G: Tensor, dtype: torch.dtype) -> Tensor:
    """Each token's share of its group's gradient: ``grad_GC[group] * weight / total``."""
    total, channels = group_of_T.shape[0], grad_GC.shape[1]
    block_c = power_of_2(channels)
    rows = max(1, 2048 // block_c)
    grad_TC = grad_GC.new_empty(total, channels, dtype=dtype)
    tensors = grad_GC.contiguous(), weights_T, group_of_T, totals_G, grad_TC
    launch(_spread, (cdiv(total, rows), 1, 1), tensors, (total,), (channels, block_c, rows))
    return grad_TC


@triton.jit
def _weighted_rows(
    values_ptr,
    weights_ptr,
    order_ptr,
    sizes_ptr,
    start,
    count,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    WITH_SIZES: tl.constexpr,
):
    """Sum of the weighted values, of the weights, and of the sizes of the next ROWS members."""
    row = tl.arange(0, ROWS)
    channels = tl.arange(0, BLOCK_C)
    tokens = tl.load(order_ptr + start + row, mask=row < count, other=0)
    weights = tl.load(weights_ptr + tokens, mask=row < count, other=0.0)
    size = start.to(tl.int64) * 0
    if WITH_SIZES:
        size = tl.sum(tl.load(sizes_ptr + tokens, mask=row < count, other=0), axis=0)
    mask = (row[:, None] < count) & (channels[None, :] < CHANNELS)
    pointers = values_ptr + tokens.to(tl.int64)[:, None] * CHANNELS + channels[None, :]
    values = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return tl.sum(values * weights[:, None], axis=0), tl.sum(weights, axis=0), size


@triton.jit
def _mean(
    values_ptr,
    weights_ptr,
    members_ptr,
    order_ptr,
    starts_ptr,
    sizes_ptr,
    sizes_out_ptr,
    votes_ptr,
    mean_ptr,
    totals_ptr,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    WITH_SIZES: tl.constexpr,
    WITH_VOTES: tl.constexpr,
):
    group = tl.program_id(0)
    start = tl.load(starts_ptr + group)
    count = tl.load(members_ptr + group).to(tl.int32)
    total, weight, size = _weighted_rows(
        values_ptr, weights_ptr, order_ptr, sizes_ptr, start, count, CHANNELS, BLOCK_C, FEW, WITH_SIZES
    )
    for done in range(FEW, count, MANY):
        more, more_weight, more_size = _weighted_rows(
            values_ptr,
            weights_ptr,
            order_ptr,
            sizes_ptr,
            start + done,
            count - done,
            CHANNELS,
            BLOCK_C,
            MANY,
            WITH_SIZES,
        )
        total += more
        weight += more_weight
        size += more_size
    channels = tl.arange(0, BLOCK_C)
    pointers = mean_ptr + group.to(tl.int64) * CHANNELS + channels
    tl.store(pointers, (total / weight).to(mean_ptr.dtype.element_ty), mask=channels < CHANNELS)
    tl.store(totals_ptr + group, weight)
    if WITH_SIZES:
        tl.store(sizes_out_ptr + group, size)
    if WITH_VOTES:
        tl.store(votes_ptr + group, 0.0)


@triton.jit(do_not_specialize=["count"])
def _spread(
    grad_ptr,
    weights_ptr,
    group_of_ptr,
    totals_ptr,
    out_ptr,
    count,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
):
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, BLOCK_C)
    exists = tokens < count
    mask = exists[:, None] & (channels[None, :] < CHANNELS)
    group = tl.load(group_of_ptr + tokens, mask=exists, other=0).to(tl.int64)
    share = tl.load(weights_ptr + tokens, mask=exists, other=0.0) / tl.load(totals_ptr + group, mask=exists, other=1.0)
    grad = tl.load(grad_ptr + group[:, None] * CHANNELS + channels[None, :], mask=mask, other=0.0).to(tl.float32)
    pointers = out_ptr + tokens.to(tl.int64)[:, None] * CHANNELS + channels[None, :]
    tl.store(pointers, (grad * share[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
