"""The weighted mean of every group on the GPU, and its gradient: two launches and one, members added in order.

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
from asc.kernels.spare import existing, last_border

# Most groups have very few members: programs take many of those side by side. A group of thousands would keep one
# such program busy long after all others have ended, so larger groups have their own, which take many members at once.
_FEW = 8
_FEW_ENTRIES, _MANY_ENTRIES = 2048, 8192  # of a tile: groups or members, times channels
_FEW_CHANNELS, _MANY_CHANNELS = 256, 64
_LOOKED_AT = 128  # groups that one program searches for large ones


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
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted means and the sums of the weights; also adds up sizes, and makes all votes zero, where given.

    ``cu_seqlens``, the images' borders among the groups: groups behind the last image do not exist, and become zero.
    """
    groups, channels = members_G.shape[0], values_TC.shape[1]
    mean_GC = values_TC.new_empty(groups, channels)
    totals_G = weights_T.new_empty(groups)
    with_sizes = sizes_T is not None and sizes_G is not None
    sizes = (sizes_T, sizes_G) if sizes_T is not None and sizes_G is not None else (members_G, members_G)
    votes = totals_G if votes_G is None else votes_G
    borders, batch = last_border(cu_seqlens, starts_G)
    tensors = (values_TC, weights_T, members_G, order_T, starts_G, *sizes, votes, borders, mean_GC, totals_G)
    block_c = min(_FEW_CHANNELS, power_of_2(channels))
    tile = _FEW_ENTRIES // block_c
    few = channels, block_c, tile, _FEW, with_sizes, votes_G is not None
    launch(_mean_of_few, (cdiv(groups, tile), cdiv(channels, block_c), 1), tensors, (groups, batch), few)
    block_c = min(_MANY_CHANNELS, power_of_2(channels))
    many = channels, block_c, _LOOKED_AT, _MANY_ENTRIES // block_c, _FEW, with_sizes
    grid = cdiv(groups, _LOOKED_AT), cdiv(channels, block_c), 1
    launch(_mean_of_many, grid, tensors, (groups, batch), many, warps=8)
    return mean_GC, totals_G


def spread(
    grad_GC: Tensor,
    weights_T: Tensor,
    group_of_T: Tensor,
    totals_G: Tensor,
    dtype: torch.dtype,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Each token's share of its group's gradient: ``grad_GC[group] * weight / total``.

    ``cu_seqlens``: tokens behind the last image do not exist, and get zero.
    """
    total, channels = group_of_T.shape[0], grad_GC.shape[1]
    block_c = power_of_2(channels)
    rows = max(1, 2048 // block_c)
    grad_TC = grad_GC.new_empty(total, channels, dtype=dtype)
    borders, batch = last_border(cu_seqlens, group_of_T)
    tensors = grad_GC.contiguous(), weights_T, group_of_T, totals_G, borders, grad_TC
    launch(_spread, (cdiv(total, rows), 1, 1), tensors, (total, batch), (channels, block_c, rows))
    return grad_TC


@triton.jit
def _weighted(values_ptr, weights_ptr, tokens, valid, channels, CHANNELS: tl.constexpr):
    """Weighted values of tokens (rows) and their weights; zero where not ``valid``."""
    weights = tl.load(weights_ptr + tokens, mask=valid, other=0.0)
    mask = valid[:, None] & (channels[None, :] < CHANNELS)
    pointers = values_ptr + tokens.to(tl.int64)[:, None] * CHANNELS + channels[None, :]
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32) * weights[:, None], weights


@triton.jit(do_not_specialize=["groups", "batch"])
def _mean_of_few(
    values_ptr,
    weights_ptr,
    members_ptr,
    order_ptr,
    starts_ptr,
    sizes_ptr,
    sizes_out_ptr,
    votes_ptr,
    borders_ptr,
    mean_ptr,
    totals_ptr,
    groups,
    batch,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUPS: tl.constexpr,
    FEW: tl.constexpr,
    WITH_SIZES: tl.constexpr,
    WITH_VOTES: tl.constexpr,
):
    """One program: some channels of some groups, side by side, of which only those with few members are done."""
    own = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_first_part = tl.program_id(1) == 0
    room = own < groups
    exists = own < existing(borders_ptr, groups, batch)
    start = tl.load(starts_ptr + own, mask=exists, other=0)
    count = tl.load(members_ptr + own, mask=exists, other=0).to(tl.int32)
    # Groups that do not exist have no members, and become zero.
    few = room & (count <= FEW)
    total = tl.zeros((GROUPS, BLOCK_C), dtype=tl.float32)
    weight = tl.zeros((GROUPS,), dtype=tl.float32)
    size = tl.zeros((GROUPS,), dtype=tl.int64)
    for member in range(0, tl.max(tl.where(few, count, 0), axis=0)):
        valid = few & (member < count)
        tokens = tl.load(order_ptr + start + member, mask=valid, other=0)
        more, more_weight = _weighted(values_ptr, weights_ptr, tokens, valid, channels, CHANNELS)
        total += more
        weight += more_weight
        if WITH_SIZES:
            size += tl.load(sizes_ptr + tokens, mask=valid, other=0)
    pointers = mean_ptr + own.to(tl.int64)[:, None] * CHANNELS + channels[None, :]
    mean = total / tl.where(few & exists, weight, 1.0)[:, None]
    tl.store(pointers, mean.to(mean_ptr.dtype.element_ty), mask=few[:, None] & (channels[None, :] < CHANNELS))
    tl.store(totals_ptr + own, weight, mask=few & is_first_part)
    if WITH_SIZES:
        tl.store(sizes_out_ptr + own, size, mask=few & is_first_part)
    if WITH_VOTES:
        tl.store(votes_ptr + own, tl.zeros((GROUPS,), dtype=tl.float32), mask=room & is_first_part)


@triton.jit(do_not_specialize=["groups", "batch"])
def _mean_of_many(
    values_ptr,
    weights_ptr,
    members_ptr,
    order_ptr,
    starts_ptr,
    sizes_ptr,
    sizes_out_ptr,
    votes_ptr,
    borders_ptr,
    mean_ptr,
    totals_ptr,
    groups,
    batch,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    FEW: tl.constexpr,
    WITH_SIZES: tl.constexpr,
):
    """One program: some channels of those among its groups that have many members, one group after another."""
    lanes = tl.arange(0, GROUPS)
    first = tl.program_id(0) * GROUPS
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    exists = first + lanes < existing(borders_ptr, groups, batch)
    count = tl.load(members_ptr + first + lanes, mask=exists, other=0).to(tl.int32)
    rows = tl.arange(0, ROWS)
    lane = tl.min(tl.where(count > FEW, lanes, GROUPS), axis=0)
    while lane < GROUPS:
        group = (first + lane).to(tl.int64)
        start = tl.load(starts_ptr + group)
        members = tl.sum(tl.where(lanes == lane, count, 0), axis=0)
        total = tl.zeros((ROWS, BLOCK_C), dtype=tl.float32)
        weights = tl.zeros((ROWS,), dtype=tl.float32)
        size = tl.zeros((ROWS,), dtype=tl.int64)
        for done in range(0, members, ROWS):
            valid = done + rows < members
            tokens = tl.load(order_ptr + start + done + rows, mask=valid, other=0)
            more, more_weights = _weighted(values_ptr, weights_ptr, tokens, valid, channels, CHANNELS)
            total += more
            weights += more_weights
            if WITH_SIZES:
                size += tl.load(sizes_ptr + tokens, mask=valid, other=0)
        weight = tl.sum(weights, axis=0)
        mean = tl.sum(total, axis=0) / weight
        tl.store(mean_ptr + group * CHANNELS + channels, mean.to(mean_ptr.dtype.element_ty), mask=channels < CHANNELS)
        if tl.program_id(1) == 0:
            tl.store(totals_ptr + group, weight)
            if WITH_SIZES:
                tl.store(sizes_out_ptr + group, tl.sum(size, axis=0))
        lane = tl.min(tl.where((count > FEW) & (lanes > lane), lanes, GROUPS), axis=0)


@triton.jit(do_not_specialize=["count", "batch"])
def _spread(
    grad_ptr,
    weights_ptr,
    group_of_ptr,
    totals_ptr,
    borders_ptr,
    out_ptr,
    count,
    batch,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
):
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, BLOCK_C)
    exists = tokens < existing(borders_ptr, count, batch)
    inside = channels[None, :] < CHANNELS
    mask = exists[:, None] & inside
    group = tl.load(group_of_ptr + tokens, mask=exists, other=0).to(tl.int64)
    share = tl.load(weights_ptr + tokens, mask=exists, other=0.0) / tl.load(totals_ptr + group, mask=exists, other=1.0)
    grad = tl.load(grad_ptr + group[:, None] * CHANNELS + channels[None, :], mask=mask, other=0.0).to(tl.float32)
    pointers = out_ptr + tokens.to(tl.int64)[:, None] * CHANNELS + channels[None, :]
    tl.store(pointers, (grad * share[:, None]).to(out_ptr.dtype.element_ty), mask=(tokens[:, None] < count) & inside)
