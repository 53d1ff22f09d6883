"""The mean, the maximum or the attention fusion of every group on the GPU, and their gradients.

Two launches and one, for attention five and one. Members are taken in order, so the results are deterministic. The
plain versions are in ``asc.merging``. Shape letters: see ``asc.tokens``.
"""

# Kernels are compiled by Triton from their syntax: they have no Python types to check.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped, no-any-return"

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from asc.kernels.launch import cdiv, launch, power_of_2
from asc.kernels.spare import existing, last_border

if TYPE_CHECKING:
    from asc.merging import Fusion

# Most groups have very few members: programs take many of those side by side. A group of thousands would keep one
# such program busy long after all others have ended, so larger groups have their own, which take many members at once.
_FEW = 8
_FEW_ENTRIES, _MANY_ENTRIES = 2048, 8192  # of a tile: groups or members, times channels
_FEW_CHANNELS, _MANY_CHANNELS = 256, 64
_FEW_ROWS, _MANY_ROWS = 256, 1024  # at most, where there are few channels
_LOOKED_AT = 128  # groups that one program searches for large ones
_SCORES = 1024  # of one program


class Members(NamedTuple):
    """Which tokens make up which group."""

    group_of_T: Tensor
    members_G: Tensor
    """How many."""
    order_T: Tensor
    """The tokens sorted by group."""
    starts_G: Tensor
    """Where each group begins in that order."""
    token_borders: Tensor | None = None
    """Borders of the images, where tokens behind the last do not exist."""
    group_borders: Tensor | None = None
    """Borders of the images among the groups, where groups behind the last do not exist; those become zero."""


class Fused(NamedTuple):
    """Tokens made of groups."""

    values_GC: Tensor
    totals_G: Tensor
    """Sums of the weights."""
    kept: tuple[Tensor, ...]
    """What ``grad_of_fusion`` asks for."""


def sorted_fusion(
    fusion: Fusion, values_TC: Tensor, weights_T: Tensor, scores_T: Tensor | None, members: Members
) -> Tensor:
    """Values of every group; those of the tokens, and their scores, get gradients, the weights none."""
    fused_GC: Tensor = _SortedFusion.apply(values_TC, scores_T, fusion, weights_T, members)
    return fused_GC


class _SortedFusion(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values_TC: Tensor, scores_T: Tensor | None, fusion: Fusion, weights_T: Tensor, members: Members
    ) -> Tensor:
        values_TC = values_TC.contiguous()
        fused = fuse(fusion, values_TC, weights_T, scores_T, members)
        ctx.fusion = fusion
        ctx.save_for_backward(
            members.group_of_T,
            fused.totals_G,
            weights_T,
            *((values_TC, *fused.kept) if fused.kept else ()),
        )
        return fused.values_GC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_GC: Tensor) -> tuple[Tensor | None, ...]:
        group_of_T, totals_G, weights_T, *kept = ctx.saved_tensors
        if not kept:
            return spread(grad_GC, weights_T, group_of_T, totals_G, grad_GC.dtype), None, None, None, None
        return *grad_of_fusion(ctx.fusion, grad_GC, group_of_T, kept[0], kept[1:]), None, None, None


def fuse(
    fusion: Fusion,
    values_TC: Tensor,
    weights_T: Tensor,
    scores_T: Tensor | None,
    members: Members,
    sizes_T: Tensor | None = None,
    sizes_G: Tensor | None = None,
    votes_G: Tensor | None = None,
) -> Fused:
    """Values of every group; also adds up sizes, and makes all votes zero, where given.

    ``scores_T`` are attention's: how much a member counts is its weight times the exponential of its score.
    """
    if fusion != "attention":
        return _fuse(fusion == "max", values_TC, weights_T, members, sizes_T, sizes_G, votes_G)
    assert scores_T is not None
    scores_T1 = scores_T.contiguous()[:, None]
    top = _fuse(True, scores_T1, weights_T, members)
    counting_T = _weights_by_score(scores_T1, weights_T, members, top.values_GC)
    mean = _fuse(False, values_TC, counting_T, members, sizes_T, sizes_G, votes_G)
    return Fused(mean.values_GC, top.totals_G, (mean.values_GC, counting_T, mean.totals_G))


def grad_of_fusion(
    fusion: Fusion,
    grad_GC: Tensor,
    group_of_T: Tensor,
    values_TC: Tensor,
    kept: Sequence[Tensor],
    token_borders: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the tokens' values, and of their scores, for maximum and attention; the mean has ``spread``.

    Members that share a maximum share its gradient. Tokens behind the last image get zero.
    """
    if fusion == "max":
        largest_GC, ties_GC = kept
        return _spread_to_largest(grad_GC, group_of_T, values_TC, largest_GC, ties_GC, token_borders), None
    mean_GC, counting_T, totals_G = kept
    grad_scores_T = torch.empty_like(counting_T)
    scored = values_TC, mean_GC, grad_scores_T
    return spread(grad_GC, counting_T, group_of_T, totals_G, grad_GC.dtype, token_borders, scored), grad_scores_T


def _fuse(
    largest: bool,
    values_TC: Tensor,
    weights_T: Tensor,
    members: Members,
    sizes_T: Tensor | None = None,
    sizes_G: Tensor | None = None,
    votes_G: Tensor | None = None,
) -> Fused:
    """The weighted mean of every group, or its largest values and how many members have each."""
    members_G, starts_G = members.members_G, members.starts_G
    groups, channels = members_G.shape[0], values_TC.shape[1]
    fused_GC = values_TC.new_empty(groups, channels)
    totals_G = weights_T.new_empty(groups)
    ties_GC = torch.empty_like(fused_GC, dtype=torch.int32) if largest else members_G
    with_sizes = sizes_T is not None and sizes_G is not None
    sizes = (sizes_T, sizes_G) if sizes_T is not None and sizes_G is not None else (members_G, members_G)
    votes = totals_G if votes_G is None else votes_G
    borders, batch = last_border(members.group_borders, starts_G)
    inputs = values_TC, weights_T, members_G, members.order_T, starts_G, *sizes, votes, borders
    tensors = *inputs, fused_GC, totals_G, ties_GC
    block_c = min(_FEW_CHANNELS, power_of_2(channels))
    tile = min(_FEW_ROWS, _FEW_ENTRIES // block_c)
    few = channels, block_c, tile, _FEW, with_sizes, votes_G is not None, largest
    launch(_fuse_few, (cdiv(groups, tile), cdiv(channels, block_c), 1), tensors, (groups, batch), few)
    block_c = min(_MANY_CHANNELS, power_of_2(channels))
    rows = min(_MANY_ROWS, _MANY_ENTRIES // block_c)
    many = channels, block_c, _LOOKED_AT, rows, _FEW, with_sizes, largest
    grid = cdiv(groups, _LOOKED_AT), cdiv(channels, block_c), 1
    launch(_fuse_many, grid, tensors, (groups, batch), many, warps=8)
    return Fused(fused_GC, totals_G, (fused_GC, ties_GC) if largest else ())


def _weights_by_score(scores_T1: Tensor, weights_T: Tensor, members: Members, top_G1: Tensor) -> Tensor:
    """``weight exp(score)`` up to one factor for each group, which the mean divides out again."""
    counting_T, total = torch.empty_like(weights_T), weights_T.shape[0]
    borders, batch = last_border(members.token_borders, members.group_of_T)
    tensors = scores_T1, weights_T, members.group_of_T, top_G1, borders, counting_T
    launch(_weigh_by_score, (cdiv(total, _SCORES), 1, 1), tensors, (total, batch), (_SCORES,))
    return counting_T


def spread(
    grad_GC: Tensor,
    weights_T: Tensor,
    group_of_T: Tensor,
    totals_G: Tensor,
    dtype: torch.dtype,
    token_borders: Tensor | None = None,
    scored: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Each token's share of its group's gradient: ``grad_GC[group] * weight / total``.

    ``token_borders``: tokens behind the last image do not exist, and get zero. ``scored``: the values of the tokens,
    those of the groups, and a place for the gradients of the scores that the weights come from.
    """
    total, channels = group_of_T.shape[0], grad_GC.shape[1]
    block_c = power_of_2(channels)
    rows = max(1, 2048 // block_c)
    grad_TC = grad_GC.new_empty(total, channels, dtype=dtype)
    borders, batch = last_border(token_borders, group_of_T)
    scores = (totals_G, totals_G, totals_G) if scored is None else scored
    tensors = grad_GC.contiguous(), weights_T, group_of_T, totals_G, borders, grad_TC, *scores
    constants = channels, block_c, rows, scored is not None
    launch(_spread, (cdiv(total, rows), 1, 1), tensors, (total, batch), constants)
    return grad_TC


def _spread_to_largest(
    grad_GC: Tensor,
    group_of_T: Tensor,
    values_TC: Tensor,
    largest_GC: Tensor,
    ties_GC: Tensor,
    token_borders: Tensor | None,
) -> Tensor:
    total, channels = values_TC.shape
    block_c = power_of_2(channels)
    rows = max(1, 2048 // block_c)
    grad_TC = torch.empty_like(values_TC, dtype=grad_GC.dtype)
    borders, batch = last_border(token_borders, group_of_T)
    tensors = grad_GC.contiguous(), group_of_T, values_TC, largest_GC, ties_GC, borders, grad_TC
    constants = channels, block_c, rows
    launch(_give_to_largest, (cdiv(total, rows), 1, 1), tensors, (total, batch), constants)
    return grad_TC


@triton.jit
def _with_more(
    fused, ties, values_ptr, weights, tokens, valid, channels, CHANNELS: tl.constexpr, LARGEST: tl.constexpr
):
    """Sums with the weighted values of more tokens (rows), or maxima and how many members have them."""
    mask = valid[:, None] & (channels[None, :] < CHANNELS)
    pointers = values_ptr + tokens.to(tl.int64)[:, None] * CHANNELS + channels[None, :]
    more = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    if LARGEST:
        more = tl.where(mask, more, float("-inf"))
        ties = tl.where(more > fused, 1, ties + (mask & (more == fused)).to(tl.int32))
        fused = tl.maximum(fused, more, propagate_nan=tl.PropagateNan.ALL)
    else:
        fused += more * weights[:, None]
    return fused, ties


@triton.jit(do_not_specialize=["groups", "batch"])
def _fuse_few(
    values_ptr,
    weights_ptr,
    members_ptr,
    order_ptr,
    starts_ptr,
    sizes_ptr,
    sizes_out_ptr,
    votes_ptr,
    borders_ptr,
    fused_ptr,
    totals_ptr,
    ties_ptr,
    groups,
    batch,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUPS: tl.constexpr,
    FEW: tl.constexpr,
    WITH_SIZES: tl.constexpr,
    WITH_VOTES: tl.constexpr,
    LARGEST: tl.constexpr,
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
    fused = tl.full((GROUPS, BLOCK_C), float("-inf") if LARGEST else 0.0, tl.float32)
    ties = tl.zeros((GROUPS, BLOCK_C), dtype=tl.int32)
    weight = tl.zeros((GROUPS,), dtype=tl.float32)
    size = tl.zeros((GROUPS,), dtype=tl.int64)
    for member in range(0, tl.max(tl.where(few, count, 0), axis=0)):
        valid = few & (member < count)
        tokens = tl.load(order_ptr + start + member, mask=valid, other=0)
        more_weight = tl.load(weights_ptr + tokens, mask=valid, other=0.0)
        fused, ties = _with_more(fused, ties, values_ptr, more_weight, tokens, valid, channels, CHANNELS, LARGEST)
        weight += more_weight
        if WITH_SIZES:
            size += tl.load(sizes_ptr + tokens, mask=valid, other=0)
    places = own.to(tl.int64)[:, None] * CHANNELS + channels[None, :]
    mask = few[:, None] & (channels[None, :] < CHANNELS)
    if LARGEST:
        fused = tl.where(exists[:, None], fused, 0.0)
        tl.store(ties_ptr + places, ties, mask=mask)
    else:
        fused = fused / tl.where(few & exists, weight, 1.0)[:, None]
    tl.store(fused_ptr + places, fused.to(fused_ptr.dtype.element_ty), mask=mask)
    tl.store(totals_ptr + own, weight, mask=few & is_first_part)
    if WITH_SIZES:
        tl.store(sizes_out_ptr + own, size, mask=few & is_first_part)
    if WITH_VOTES:
        tl.store(votes_ptr + own, tl.zeros((GROUPS,), dtype=tl.float32), mask=room & is_first_part)


@triton.jit(do_not_specialize=["groups", "batch"])
def _fuse_many(
    values_ptr,
    weights_ptr,
    members_ptr,
    order_ptr,
    starts_ptr,
    sizes_ptr,
    sizes_out_ptr,
    votes_ptr,
    borders_ptr,
    fused_ptr,
    totals_ptr,
    ties_ptr,
    groups,
    batch,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    FEW: tl.constexpr,
    WITH_SIZES: tl.constexpr,
    LARGEST: tl.constexpr,
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
        fused = tl.full((ROWS, BLOCK_C), float("-inf") if LARGEST else 0.0, tl.float32)
        ties = tl.zeros((ROWS, BLOCK_C), dtype=tl.int32)
        weights = tl.zeros((ROWS,), dtype=tl.float32)
        size = tl.zeros((ROWS,), dtype=tl.int64)
        for done in range(0, members, ROWS):
            valid = done + rows < members
            tokens = tl.load(order_ptr + start + done + rows, mask=valid, other=0)
            more_weights = tl.load(weights_ptr + tokens, mask=valid, other=0.0)
            fused, ties = _with_more(fused, ties, values_ptr, more_weights, tokens, valid, channels, CHANNELS, LARGEST)
            weights += more_weights
            if WITH_SIZES:
                size += tl.load(sizes_ptr + tokens, mask=valid, other=0)
        weight = tl.sum(weights, axis=0)
        places = group * CHANNELS + channels
        if LARGEST:
            largest = tl.max(fused, axis=0)
            is_broken = tl.sum((fused != fused).to(tl.int32), axis=0) > 0
            tied = tl.sum(tl.where(fused == largest[None, :], ties, 0), axis=0)
            tl.store(ties_ptr + places, tied, mask=channels < CHANNELS)
            result = tl.where(is_broken, float("nan"), largest)
        else:
            result = tl.sum(fused, axis=0) / weight
        tl.store(fused_ptr + places, result.to(fused_ptr.dtype.element_ty), mask=channels < CHANNELS)
        if tl.program_id(1) == 0:
            tl.store(totals_ptr + group, weight)
            if WITH_SIZES:
                tl.store(sizes_out_ptr + group, tl.sum(size, axis=0))
        lane = tl.min(tl.where((count > FEW) & (lanes > lane), lanes, GROUPS), axis=0)


@triton.jit
def _places(tokens, group, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Where the rows of tokens and of their groups lie, and which of the channels there are."""
    channels = tl.arange(0, BLOCK_C)[None, :]
    return (
        tokens.to(tl.int64)[:, None] * CHANNELS + channels,
        group[:, None] * CHANNELS + channels,
        channels < CHANNELS,
    )


@triton.jit(do_not_specialize=["count", "batch"])
def _spread(
    grad_ptr,
    weights_ptr,
    group_of_ptr,
    totals_ptr,
    borders_ptr,
    out_ptr,
    values_ptr,
    mean_ptr,
    scores_ptr,
    count,
    batch,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    WITH_SCORES: tl.constexpr,
):
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = tokens < existing(borders_ptr, count, batch)
    group = tl.load(group_of_ptr + tokens, mask=exists, other=0).to(tl.int64)
    own, of_group, inside = _places(tokens, group, CHANNELS, BLOCK_C)
    mask = exists[:, None] & inside
    share = tl.load(weights_ptr + tokens, mask=exists, other=0.0) / tl.load(totals_ptr + group, mask=exists, other=1.0)
    grad = tl.load(grad_ptr + of_group, mask=mask, other=0.0).to(tl.float32) * share[:, None]
    tl.store(out_ptr + own, grad.to(out_ptr.dtype.element_ty), mask=(tokens[:, None] < count) & inside)
    if WITH_SCORES:
        value = tl.load(values_ptr + own, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + of_group, mask=mask, other=0.0).to(tl.float32)
        tl.store(scores_ptr + tokens, tl.sum(grad * (value - mean), axis=1), mask=tokens < count)


@triton.jit(do_not_specialize=["count", "batch"])
def _weigh_by_score(
    scores_ptr, weights_ptr, group_of_ptr, top_ptr, borders_ptr, out_ptr, count, batch, BLOCK: tl.constexpr
):
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = tokens < existing(borders_ptr, count, batch)
    group = tl.load(group_of_ptr + tokens, mask=exists, other=0)
    above = tl.load(scores_ptr + tokens, mask=exists, other=0.0) - tl.load(top_ptr + group, mask=exists, other=0.0)
    weights = tl.load(weights_ptr + tokens, mask=exists, other=0.0)
    tl.store(out_ptr + tokens, weights * tl.exp(above), mask=tokens < count)


@triton.jit(do_not_specialize=["count", "batch"])
def _give_to_largest(
    grad_ptr,
    group_of_ptr,
    values_ptr,
    largest_ptr,
    ties_ptr,
    borders_ptr,
    out_ptr,
    count,
    batch,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The gradient of a maximum goes to the members that have it, in equal shares."""
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = tokens < existing(borders_ptr, count, batch)
    group = tl.load(group_of_ptr + tokens, mask=exists, other=0).to(tl.int64)
    own, of_group, inside = _places(tokens, group, CHANNELS, BLOCK_C)
    mask = exists[:, None] & inside
    value = tl.load(values_ptr + own, mask=mask, other=0.0).to(tl.float32)
    is_largest = mask & (value == tl.load(largest_ptr + of_group, mask=mask, other=0.0).to(tl.float32))
    grad = tl.load(grad_ptr + of_group, mask=is_largest, other=0.0).to(tl.float32)
    grad = grad / tl.load(ties_ptr + of_group, mask=is_largest, other=1).to(tl.float32)
    tl.store(out_ptr + own, grad.to(out_ptr.dtype.element_ty), mask=(tokens[:, None] < count) & inside)
