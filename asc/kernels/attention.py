"""Attention inside each image of a ragged batch on the GPU: our forward pass, FlashAttention's backward.

The way forward is where a ragged batch loses most against a regular one: PyTorch's kernel for ragged batches was made
for older GPUs. The plain versions are in ``asc.attention``. Shape letters: see ``asc.tokens``; M queries and N keys of
one tile.
"""

# Kernels are compiled by Triton from their syntax: they have no Python types to check.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped, no-any-return"

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asc.kernels.launch import cdiv, launch

_LN2 = tl.constexpr(math.log(2.0))


class Tiles(NamedTuple):
    """How queries and keys are cut; chosen by measurement (``benchmarks/kernels.py``)."""

    queries: int = 128
    keys: int = 64
    warps: int = 8
    stages: int = 3


def attention(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    cu_seqlens: Tensor,
    max_len: int,
    tiles: Tiles | None = None,
) -> Tensor:
    """Softmax attention of every token to those of its image; heads of 16 to 128 channels, a power of 2."""
    mixed_THD: Tensor = _Attention.apply(query_THD, key_THD, value_THD, cu_seqlens, max_len, tiles)
    return mixed_THD


def attention_takes(query_THD: Tensor, key_THD: Tensor, value_THD: Tensor) -> bool:
    """Whether heads have a width that the kernel takes, and channels lie beside one another."""
    return query_THD.shape[2] in (16, 32, 64, 128) and all(x.stride(2) == 1 for x in (query_THD, key_THD, value_THD))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_THD: Tensor,
        key_THD: Tensor,
        value_THD: Tensor,
        cu_seqlens: Tensor,
        max_len: int,
        tiles: Tiles | None,
    ) -> Tensor:
        mixed_THD, logs_HT = attend(query_THD, key_THD, value_THD, cu_seqlens, max_len, tiles or Tiles())
        ctx.save_for_backward(query_THD, key_THD, value_THD, cu_seqlens, mixed_THD, logs_HT)
        ctx.max_len = max_len
        return mixed_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        query_THD, key_THD, value_THD, borders, mixed_THD, logs_HT = ctx.saved_tensors
        # The state of a random generator, which nothing is drawn from without dropout.
        unused = torch.empty(0, dtype=torch.uint64, device=borders.device)
        grads = torch.ops.aten._flash_attention_backward(
            grad_THD.contiguous(),
            query_THD,
            key_THD,
            value_THD,
            mixed_THD,
            logs_HT,
            borders,
            borders,
            ctx.max_len,
            ctx.max_len,
            0.0,
            False,
            unused,
            unused,
        )
        return (*grads, None, None, None)


def attend(
    query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, cu_seqlens: Tensor, max_len: int, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """Mixed values, and the logarithm of every query's sum of weights (fp32)."""
    total, heads, width = query_THD.shape
    mixed_THD = query_THD.new_empty(total, heads, width)
    logs_HT = torch.empty(heads, total, dtype=torch.float32, device=query_THD.device)
    tensors = query_THD, key_THD, value_THD, cu_seqlens, mixed_THD, logs_HT
    strides = tuple(stride for x in (query_THD, key_THD, value_THD) for stride in x.stride()[:2])
    # Powers of 2 are quicker than powers of e.
    scale = math.log2(math.e) * width**-0.5
    constants = (*strides, heads, width, scale, tiles.queries, tiles.keys)
    grid = cdiv(max_len, tiles.queries), heads, cu_seqlens.shape[0] - 1
    launch(_attend, grid, tensors, (total,), constants, tiles.warps, tiles.stages)
    return mixed_THD, logs_HT


@triton.jit
def _attend_to(
    query,
    key_ptr,
    value_ptr,
    first,
    end,
    highest,
    weights,
    mixed,
    KEY_T: tl.constexpr,
    VALUE_T: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One tile of keys and values: the running maximum, sum of weights and sum of weighted values."""
    keys = first + tl.arange(0, KEYS)
    channels = tl.arange(0, WIDTH)
    key_pointers = key_ptr + keys.to(tl.int64)[:, None] * KEY_T + channels[None, :]
    value_pointers = value_ptr + keys.to(tl.int64)[:, None] * VALUE_T + channels[None, :]
    if MASKED:
        key = tl.load(key_pointers, mask=keys[:, None] < end, other=0.0)
    else:
        key = tl.load(key_pointers)
    scores = tl.dot(query, tl.trans(key))
    if MASKED:
        scores = tl.where(keys[None, :] < end, scores, float("-inf"))
    now_highest = tl.maximum(highest, tl.max(scores, axis=1) * SCALE)
    weight = tl.exp2(scores * SCALE - now_highest[:, None])
    shrink = tl.exp2(highest - now_highest)
    if MASKED:
        value = tl.load(value_pointers, mask=keys[:, None] < end, other=0.0)
    else:
        value = tl.load(value_pointers)
    mixed = tl.dot(weight.to(value.dtype), value, mixed * shrink[:, None])
    return now_highest, weights * shrink + tl.sum(weight, axis=1), mixed


@triton.jit(do_not_specialize=["total"])
def _attend(
    query_ptr,
    key_ptr,
    value_ptr,
    borders_ptr,
    mixed_ptr,
    logs_ptr,
    total,
    QUERY_T: tl.constexpr,
    QUERY_H: tl.constexpr,
    KEY_T: tl.constexpr,
    KEY_H: tl.constexpr,
    VALUE_T: tl.constexpr,
    VALUE_H: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One program: some queries of one head of one image, over all keys of the image."""
    head, image = tl.program_id(1), tl.program_id(2)
    begin = tl.load(borders_ptr + image)
    end = tl.load(borders_ptr + image + 1)
    queries = begin + tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    if begin + tl.program_id(0) * QUERIES >= end:
        return
    channels = tl.arange(0, WIDTH)
    exists = queries < end
    pointers = query_ptr + queries.to(tl.int64)[:, None] * QUERY_T + head * QUERY_H + channels[None, :]
    query = tl.load(pointers, mask=exists[:, None], other=0.0)
    key_ptr += head * KEY_H
    value_ptr += head * VALUE_H
    highest = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    weights = tl.zeros((QUERIES,), dtype=tl.float32)
    mixed = tl.zeros((QUERIES, WIDTH), dtype=tl.float32)
    whole = begin + (end - begin) // KEYS * KEYS
    for first in range(begin, whole, KEYS):
        highest, weights, mixed = _attend_to(
            query, key_ptr, value_ptr, first, end, highest, weights, mixed, KEY_T, VALUE_T, WIDTH, SCALE, KEYS, False
        )
    if whole < end:
        highest, weights, mixed = _attend_to(
            query, key_ptr, value_ptr, whole, end, highest, weights, mixed, KEY_T, VALUE_T, WIDTH, SCALE, KEYS, True
        )
    mixed = mixed / weights[:, None]
    pointers = mixed_ptr + queries.to(tl.int64)[:, None] * (HEADS * WIDTH) + head * WIDTH + channels[None, :]
    tl.store(pointers, mixed.to(mixed_ptr.dtype.element_ty), mask=exists[:, None])
    logs = (highest + tl.log2(weights)) * _LN2
    tl.store(logs_ptr + head * total.to(tl.int64) + queries, logs, mask=exists)
