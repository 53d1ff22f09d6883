"""The mean token of every image on the GPU, and its gradient: one launch each, tokens added in order.

The plain version is ``asc.tokens.Tokens.mean_BC``. Shape letters: see ``asc.tokens``.
"""

# Kernels are compiled by Triton from their syntax: they have no Python types to check.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped, no-any-return"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from asc.kernels.launch import cdiv, launch, power_of_2
from asc.kernels.spare import clear_spare

_ENTRIES, _CHANNELS = 4096, 64  # of a tile


def pooled_mean(
    values_TC: Tensor,
    sizes_T: Tensor,
    log_votes_T: Tensor | None,
    cu_seqlens: Tensor,
    max_len: int,
    by_size: bool,
    padded: bool = False,
) -> Tensor:
    """Mean of each image's tokens by their votes, or by their sizes if ``by_size``; tokens of size 0 do not count."""
    votes_T = None if by_size else log_votes_T
    mean_BC: Tensor = _PooledMean.apply(values_TC, votes_T, sizes_T, cu_seqlens, max_len, by_size, padded)
    return mean_BC


class _PooledMean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values_TC: Tensor,
        votes_T: Tensor | None,
        sizes_T: Tensor,
        cu_seqlens: Tensor,
        max_len: int,
        by_size: bool,
        padded: bool,
    ) -> Tensor:
        values_TC, batch, channels = values_TC.contiguous(), cu_seqlens.shape[0] - 1, values_TC.shape[1]
        # Not all channels in one program: images alone are too few to keep a GPU busy.
        block_c = min(_CHANNELS, power_of_2(channels))
        constants = channels, block_c, _ENTRIES // block_c, by_size, votes_T is not None
        mean_BC = values_TC.new_empty(batch, channels)
        totals_B = torch.empty(batch, dtype=torch.float32, device=values_TC.device)
        inputs = values_TC, sizes_T, sizes_T if votes_T is None else votes_T, cu_seqlens, mean_BC, totals_B
        launch(_mean, (batch, cdiv(channels, block_c), 1), inputs, (), constants)
        ctx.save_for_backward(*inputs)
        ctx.settings = max_len, by_size, votes_T is not None, padded
        return mean_BC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BC: Tensor) -> tuple[Tensor | None, ...]:
        max_len, by_size, has_votes, padded = ctx.settings
        values_TC, _, votes_T, cu_seqlens, _, _ = inputs = ctx.saved_tensors
        channels = values_TC.shape[1]
        block_c = power_of_2(channels)
        rows = max(1, _ENTRIES // block_c)
        constants = channels, block_c, rows, by_size, has_votes
        grad_TC = torch.empty_like(values_TC)
        grad_votes_T = torch.empty_like(votes_T)
        tensors = (*inputs, grad_BC.contiguous(), grad_TC, grad_votes_T)
        launch(_mean_grad, (cdiv(max_len, rows), cu_seqlens.shape[0] - 1, 1), tensors, (), constants)
        if padded:
            clear_spare(grad_TC, cu_seqlens)
        return grad_TC, grad_votes_T if has_votes else None, None, None, None, None, None


@triton.jit
def _weights(sizes_ptr, votes_ptr, tokens, exists, BY_SIZE: tl.constexpr, HAS_VOTES: tl.constexpr):
    weight = tl.load(sizes_ptr + tokens, mask=exists, other=0).to(tl.float32)
    if not BY_SIZE:
        weight = tl.minimum(weight, 1.0)
    if HAS_VOTES:
        weight = weight * tl.exp(tl.load(votes_ptr + tokens, mask=exists, other=0.0).to(tl.float32))
    return weight


@triton.jit
def _mean(
    values_ptr,
    sizes_ptr,
    votes_ptr,
    borders_ptr,
    mean_ptr,
    totals_ptr,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    BY_SIZE: tl.constexpr,
    HAS_VOTES: tl.constexpr,
):
    image = tl.program_id(0)
    end = tl.load(borders_ptr + image + 1)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_C,), dtype=tl.float32)
    weights = tl.zeros((ROWS,), dtype=tl.float32)
    for first in range(tl.load(borders_ptr + image), end, ROWS):
        tokens = first + tl.arange(0, ROWS)
        exists = tokens < end
        weight = _weights(sizes_ptr, votes_ptr, tokens, exists, BY_SIZE, HAS_VOTES)
        pointers = values_ptr + tokens.to(tl.int64)[:, None] * CHANNELS + channels[None, :]
        values = tl.load(pointers, mask=exists[:, None] & (channels[None, :] < CHANNELS), other=0.0).to(tl.float32)
        total += tl.sum(values * weight[:, None], axis=0)
        weights += weight
    weight_sum = tl.sum(weights, axis=0)
    pointers = mean_ptr + image.to(tl.int64) * CHANNELS + channels
    tl.store(pointers, (total / weight_sum).to(mean_ptr.dtype.element_ty), mask=channels < CHANNELS)
    if tl.program_id(1) == 0:
        tl.store(totals_ptr + image, weight_sum)


@triton.jit
def _mean_grad(
    values_ptr,
    sizes_ptr,
    votes_ptr,
    borders_ptr,
    mean_ptr,
    totals_ptr,
    grad_ptr,
    grad_values_ptr,
    grad_votes_ptr,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    BY_SIZE: tl.constexpr,
    HAS_VOTES: tl.constexpr,
):
    image = tl.program_id(1)
    end = tl.load(borders_ptr + image + 1)
    first = tl.load(borders_ptr + image) + tl.program_id(0) * ROWS
    if first >= end:
        return
    tokens = first + tl.arange(0, ROWS)
    channels = tl.arange(0, BLOCK_C)
    exists = tokens < end
    inside = channels < CHANNELS
    mask = exists[:, None] & inside[None, :]
    share = _weights(sizes_ptr, votes_ptr, tokens, exists, BY_SIZE, HAS_VOTES) / tl.load(totals_ptr + image)
    own = image.to(tl.int64) * CHANNELS + channels
    grad = tl.load(grad_ptr + own, mask=inside, other=0.0).to(tl.float32)
    places = tokens.to(tl.int64)[:, None] * CHANNELS + channels[None, :]
    kind = grad_values_ptr.dtype.element_ty
    tl.store(grad_values_ptr + places, (grad[None, :] * share[:, None]).to(kind), mask=mask)
    if HAS_VOTES:
        # A vote draws the mean towards its token.
        mean = tl.load(mean_ptr + own, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(values_ptr + places, mask=mask, other=0.0).to(tl.float32)
        pull = tl.sum((values - mean[None, :]) * grad[None, :], axis=1) * share
        tl.store(grad_votes_ptr + tokens, pull.to(grad_votes_ptr.dtype.element_ty), mask=exists)
