"""Attention inside each image of a ragged batch on the GPU, and its gradient: three launches, four where sizes count.

PyTorch's kernels for ragged batches were made for older GPUs, and take longer. Queries, keys and values stay in the
one matrix that a projection made, and so do their gradients. Weights are never in memory: the way
back makes them anew from the logarithm of every query's sum, once for the queries and once for the keys, so that each
program adds up what is its own and the result is deterministic. Plain versions: ``asc.attention``. Shape letters: see
``asc.tokens``.
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
from torch.autograd.function import once_differentiable

from asc.kernels import interpreted
from asc.kernels.launch import cdiv, launch
from asc.kernels.spare import clear_spare

_WIDTHS = (16, 32, 64, 128)
# Powers of 2 are quicker than powers of e.
_LOG2E = tl.constexpr(math.log2(math.e))
# Channels that a product of tiles has at least. A number that is to be added to a whole column of scores is written in
# parts that bf16 holds, and added by a product with ones; that saves a third of all instructions.
_PARTS = tl.constexpr(16)
# Tokens of the longest image up to which smaller tiles are quicker.
_SHORT, _MEDIUM = 256, 1280


class Tiles(NamedTuple):
    """How queries and keys are cut; chosen by measurement."""

    own: int = 64
    """Queries, or keys, whose result a program makes."""
    others: int = 64
    """Keys, or queries, that it looks at together."""
    warps: int = 4
    stages: int = 3


class AllTiles(NamedTuple):
    """Tiles of the three kernels."""

    forward: Tiles = Tiles()
    queries: Tiles = Tiles()
    keys: Tiles = Tiles(others=32)


def best_tiles(max_len: int) -> AllTiles:
    """What was quickest on an H200 with heads of 64 channels."""
    if max_len <= _SHORT:
        return AllTiles(Tiles(others=32), Tiles(others=32))
    return AllTiles() if max_len <= _MEDIUM else AllTiles(forward=Tiles(own=128, warps=8))


def attention(
    qkv_T3HD: Tensor,
    cu_seqlens: Tensor,
    max_len: int,
    padded: bool = False,
    sizes_T: Tensor | None = None,
    tiles: AllTiles | None = None,
) -> Tensor:
    """Softmax attention of every token to those of its image, from queries, keys and values side by side.

    ``padded``: rows behind the last image's belong to none; they are not read, and are zero in the mixed values and in
    the gradient. ``sizes_T`` (int64): a token is looked at as if it were there so many times, at least once.
    """
    tiles = tiles or best_tiles(max_len)
    mixed_THD: Tensor = _Attention.apply(qkv_T3HD, cu_seqlens, max_len, padded, sizes_T, tiles)
    return mixed_THD


def attention_takes(width: int) -> bool:
    """Whether the kernels take heads of so many channels."""
    return width in _WIDTHS


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_T3HD: Tensor,
        cu_seqlens: Tensor,
        max_len: int,
        padded: bool,
        sizes_T: Tensor | None,
        tiles: AllTiles,
    ) -> Tensor:
        _, _, heads, width = qkv_T3HD.shape
        if qkv_T3HD.stride()[1:] != (heads * width, width, 1):
            qkv_T3HD = qkv_T3HD.contiguous()
        parts_TP = None if sizes_T is None else parts_of_counts(sizes_T, width)
        mixed_THD, logs_HT = attend(qkv_T3HD, cu_seqlens, max_len, parts_TP, tiles.forward)
        if padded:
            clear_spare(mixed_THD, cu_seqlens)
        ctx.save_for_backward(qkv_T3HD, cu_seqlens, mixed_THD, logs_HT, sizes_T, parts_TP)
        ctx.max_len, ctx.padded, ctx.tiles = max_len, padded, tiles
        return mixed_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        qkv_T3HD, cu_seqlens, mixed_THD, logs_HT, sizes_T, parts_TP = ctx.saved_tensors
        grad_THD = grad_THD.contiguous()
        grad_T3HD = attention_gradient(
            grad_THD, qkv_T3HD, cu_seqlens, mixed_THD, logs_HT, ctx.max_len, sizes_T, parts_TP, ctx.tiles
        )
        if ctx.padded:
            clear_spare(grad_T3HD, cu_seqlens)
        return grad_T3HD, None, None, None, None, None


def parts_of_counts(sizes_T: Tensor, width: int) -> Tensor:
    """What a key that counts several times adds to its scores before they are scaled, in parts."""
    total = sizes_T.shape[0]
    parts_TP = _empty_parts(sizes_T.device, total)
    launch(_write_counts, (cdiv(total, 128), 1, 1), (sizes_T, parts_TP), (total,), (width**0.5, 128))
    return parts_TP


def _empty_parts(device: torch.device, *shape: int) -> Tensor:
    # Triton's interpreter cannot multiply bf16.
    kind = torch.float32 if interpreted() else torch.bfloat16
    return torch.empty(*shape, _PARTS.value, dtype=kind, device=device)


def attend(
    qkv_T3HD: Tensor, cu_seqlens: Tensor, max_len: int, parts_TP: Tensor | None, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """Mixed values, and the binary logarithm of every query's sum of weights (fp32)."""
    total, _, heads, width = qkv_T3HD.shape
    mixed_THD = qkv_T3HD.new_empty(total, heads, width)
    logs_HT = torch.empty(heads, total, dtype=torch.float32, device=qkv_T3HD.device)
    # What is not looked at may be anything.
    tensors = qkv_T3HD, cu_seqlens, cu_seqlens if parts_TP is None else parts_TP, mixed_THD, logs_HT
    constants = qkv_T3HD.stride(0), heads, width, width**-0.5, tiles.own, tiles.others, parts_TP is not None
    grid = cdiv(max_len, tiles.own), heads, cu_seqlens.shape[0] - 1
    launch(_attend, grid, tensors, (total,), constants, tiles.warps, tiles.stages)
    return mixed_THD, logs_HT


def attention_gradient(
    grad_THD: Tensor,
    qkv_T3HD: Tensor,
    cu_seqlens: Tensor,
    mixed_THD: Tensor,
    logs_HT: Tensor,
    max_len: int,
    sizes_T: Tensor | None,
    parts_TP: Tensor | None,
    tiles: AllTiles,
) -> Tensor:
    """Gradient of queries, keys and values side by side from that of the mixed values."""
    total, _, heads, width = qkv_T3HD.shape
    grad_T3HD = qkv_T3HD.new_empty(total, 3, heads, width)
    parts_HTP = _empty_parts(logs_HT.device, heads, total)
    inputs = grad_THD, qkv_T3HD, cu_seqlens
    sizes, parts = (cu_seqlens if there is None else there for there in (sizes_T, parts_TP))
    # Queries first: they write their logarithms and pulls in parts, which the keys need.
    queries = _grad_queries, (parts, mixed_THD, logs_HT, parts_HTP), tiles.queries
    keys = _grad_keys, (sizes, parts_HTP), tiles.keys
    for kernel, others, tile in (queries, keys):
        constants = qkv_T3HD.stride(0), heads, width, width**-0.5, tile.own, tile.others, parts_TP is not None
        grid = cdiv(max_len, tile.own), heads, cu_seqlens.shape[0] - 1
        launch(kernel, grid, (*inputs, *others, grad_T3HD), (total,), constants, tile.warps, tile.stages)
    return grad_T3HD


@triton.jit
def _rows(matrix_ptr, tokens, end, STRIDE: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Rows of tokens; zero beyond the image."""
    pointers = matrix_ptr + tokens.to(tl.int64)[:, None] * STRIDE + tl.arange(0, WIDTH)[None, :]
    if MASKED:
        return tl.load(pointers, mask=tokens[:, None] < end, other=0.0)
    return tl.load(pointers)


@triton.jit
def _counts(sizes_ptr, tokens, end):
    """How often each token counts; once at least, as prefix tokens do."""
    sizes = tl.load(sizes_ptr + tokens, mask=tokens < end, other=1)
    return tl.maximum(sizes.to(tl.int32), 1).to(tl.float32)


@triton.jit
def _rounded(numbers):
    return numbers.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _in_parts(numbers, FIRST: tl.constexpr):
    """Every number as the sum of three that bf16 holds, side by side from place FIRST on."""
    first = _rounded(numbers)
    second = _rounded(numbers - first)
    third = _rounded(numbers - first - second)
    place = tl.arange(0, _PARTS)[None, :] - FIRST
    parts = tl.where(place == 0, first[:, None], tl.where(place == 1, second[:, None], third[:, None]))
    return tl.where((place >= 0) & (place < 3), parts, 0.0)


@triton.jit
def _add_parts(sums, parts, FIRST: tl.constexpr):
    """Add to every column the number whose parts are there from place FIRST on."""
    place = tl.arange(0, _PARTS)[None, :] + tl.zeros((sums.shape[0], 1), dtype=tl.int32) - FIRST
    ones = tl.where((place >= 0) & (place < 3), 1.0, 0.0).to(parts.dtype)
    return tl.dot(ones, tl.trans(parts), sums)


@triton.jit(do_not_specialize=["total"])
def _write_counts(sizes_ptr, parts_ptr, total, FACTOR: tl.constexpr, TOKENS: tl.constexpr):
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    logs = tl.log(_counts(sizes_ptr, tokens, total)) * FACTOR
    _store_rows(parts_ptr, tokens, total, _in_parts(logs, 0), _PARTS, _PARTS)


@triton.jit
def _scores(query, key, parts_ptr, keys, end, SIZED: tl.constexpr, MASKED: tl.constexpr):
    """Products of queries and keys; those of a key that counts several times are larger."""
    scores = tl.dot(query, tl.trans(key))
    if SIZED:
        scores = _add_parts(scores, _rows(parts_ptr, keys, end, _PARTS, _PARTS, MASKED), 0)
    return scores


@triton.jit
def _store_rows(matrix_ptr, tokens, end, rows, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    pointers = matrix_ptr + tokens.to(tl.int64)[:, None] * STRIDE + tl.arange(0, WIDTH)[None, :]
    tl.store(pointers, rows.to(matrix_ptr.dtype.element_ty), mask=tokens[:, None] < end)


@triton.jit
def _attend_to(
    query,
    key_ptr,
    value_ptr,
    parts_ptr,
    first,
    end,
    highest,
    weights,
    mixed,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    KEYS: tl.constexpr,
    SIZED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One tile of keys and values: the running maximum, sum of weights and sum of weighted values."""
    keys = first + tl.arange(0, KEYS)
    key = _rows(key_ptr, keys, end, STRIDE, WIDTH, MASKED)
    scores = _scores(query, key, parts_ptr, keys, end, SIZED, MASKED)
    if MASKED:
        scores = tl.where(keys[None, :] < end, scores, float("-inf"))
    now_highest = tl.maximum(highest, tl.max(scores, axis=1) * SCALE)
    weight = tl.exp2(scores * SCALE - now_highest[:, None])
    shrink = tl.exp2(highest - now_highest)
    value = _rows(value_ptr, keys, end, STRIDE, WIDTH, MASKED)
    mixed = tl.dot(weight.to(value.dtype), value, mixed * shrink[:, None])
    return now_highest, weights * shrink + tl.sum(weight, axis=1), mixed


@triton.jit(do_not_specialize=["total"])
def _attend(
    qkv_ptr,
    borders_ptr,
    parts_ptr,
    mixed_ptr,
    logs_ptr,
    total,
    STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SIZED: tl.constexpr,
):
    """One program: some queries of one head of one image, over all keys of the image."""
    head, image = tl.program_id(1), tl.program_id(2)
    begin = tl.load(borders_ptr + image)
    end = tl.load(borders_ptr + image + 1)
    queries = begin + tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    if begin + tl.program_id(0) * QUERIES >= end:
        return
    query = _rows(qkv_ptr + head * WIDTH, queries, end, STRIDE, WIDTH, True)
    key_ptr = qkv_ptr + (HEADS + head) * WIDTH
    value_ptr = qkv_ptr + (2 * HEADS + head) * WIDTH
    scale: tl.constexpr = SCALE * _LOG2E
    highest = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    weights = tl.zeros((QUERIES,), dtype=tl.float32)
    mixed = tl.zeros((QUERIES, WIDTH), dtype=tl.float32)
    whole = begin + (end - begin) // KEYS * KEYS
    sources = query, key_ptr, value_ptr, parts_ptr
    for first in range(begin, whole, KEYS):
        highest, weights, mixed = _attend_to(
            *sources, first, end, highest, weights, mixed, STRIDE, WIDTH, scale, KEYS, SIZED, False
        )
    if whole < end:
        highest, weights, mixed = _attend_to(
            *sources, whole, end, highest, weights, mixed, STRIDE, WIDTH, scale, KEYS, SIZED, True
        )
    _store_rows(mixed_ptr + head * WIDTH, queries, end, mixed / weights[:, None], HEADS * WIDTH, WIDTH)
    tl.store(logs_ptr + head * total.to(tl.int64) + queries, highest + tl.log2(weights), mask=queries < end)


@triton.jit
def _pull_of_keys(
    query,
    grad,
    logs,
    pulls,
    key_ptr,
    value_ptr,
    parts_ptr,
    first,
    end,
    sums,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    OTHERS: tl.constexpr,
    SIZED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Some queries and one tile of keys: add the keys, weighted by the gradient of their scores."""
    keys = first + tl.arange(0, OTHERS)
    key = _rows(key_ptr, keys, end, STRIDE, WIDTH, MASKED)
    value = _rows(value_ptr, keys, end, STRIDE, WIDTH, MASKED)
    scores = _scores(query, key, parts_ptr, keys, end, SIZED, MASKED)
    weight = tl.exp2(scores * SCALE - logs[:, None])
    if MASKED:
        weight = tl.where(keys[None, :] < end, weight, 0.0)
    slope = weight * (tl.dot(grad, tl.trans(value)) - pulls[:, None])
    return tl.dot(slope.to(key.dtype), key, sums)


@triton.jit(do_not_specialize=["total"])
def _grad_queries(
    grad_ptr,
    qkv_ptr,
    borders_ptr,
    parts_ptr,
    mixed_ptr,
    logs_ptr,
    told_ptr,
    grad_qkv_ptr,
    total,
    STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    OWN: tl.constexpr,
    OTHERS: tl.constexpr,
    SIZED: tl.constexpr,
):
    """One program: some queries of one head of one image, over all keys.

    For the keys it also writes, in parts, what is to be added to products of queries and of gradients: the logarithm of
    every query's sum, and grad · mixed.
    """
    head, image = tl.program_id(1), tl.program_id(2)
    begin = tl.load(borders_ptr + image)
    end = tl.load(borders_ptr + image + 1)
    queries = begin + tl.program_id(0) * OWN + tl.arange(0, OWN)
    if begin + tl.program_id(0) * OWN >= end:
        return
    exists = queries < end
    row: tl.constexpr = HEADS * WIDTH
    query = _rows(qkv_ptr + head * WIDTH, queries, end, STRIDE, WIDTH, True)
    grad = _rows(grad_ptr + head * WIDTH, queries, end, row, WIDTH, True)
    mixed = _rows(mixed_ptr + head * WIDTH, queries, end, row, WIDTH, True)
    pulls = tl.sum(grad.to(tl.float32) * mixed.to(tl.float32), axis=1)
    # Queries beyond the image get no weight.
    logs = tl.load(logs_ptr + head * total.to(tl.int64) + queries, mask=exists, other=float("inf"))
    key_ptr = qkv_ptr + (HEADS + head) * WIDTH
    value_ptr = qkv_ptr + (2 * HEADS + head) * WIDTH
    scale: tl.constexpr = SCALE * _LOG2E
    told = _in_parts(tl.where(exists, -logs / scale, 0.0), 0) + _in_parts(-pulls, 3)
    _store_rows(told_ptr + head * total.to(tl.int64) * _PARTS, queries, end, told, _PARTS, _PARTS)
    sums = tl.zeros((OWN, WIDTH), dtype=tl.float32)
    whole = begin + (end - begin) // OTHERS * OTHERS
    sources = query, grad, logs, pulls, key_ptr, value_ptr, parts_ptr
    for first in range(begin, whole, OTHERS):
        sums = _pull_of_keys(*sources, first, end, sums, STRIDE, WIDTH, scale, OTHERS, SIZED, False)
    if whole < end:
        sums = _pull_of_keys(*sources, whole, end, sums, STRIDE, WIDTH, scale, OTHERS, SIZED, True)
    _store_rows(grad_qkv_ptr + head * WIDTH, queries, end, sums * SCALE, 3 * row, WIDTH)


@triton.jit
def _pull_of_queries(
    key,
    value,
    query_ptr,
    grad_ptr,
    told_ptr,
    first,
    end,
    key_sums,
    value_sums,
    STRIDE: tl.constexpr,
    ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    OTHERS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Some keys and one tile of queries: add what the queries' gradients mean for keys and values."""
    queries = first + tl.arange(0, OTHERS)
    query = _rows(query_ptr, queries, end, STRIDE, WIDTH, MASKED)
    # Queries beyond the image have no gradient and no pull: whatever their weight is, they add nothing.
    grad = _rows(grad_ptr, queries, end, ROW, WIDTH, MASKED)
    told = _rows(told_ptr, queries, end, _PARTS, _PARTS, MASKED)
    weight = tl.exp2(_add_parts(tl.dot(key, tl.trans(query)), told, 0) * SCALE)
    value_sums = tl.dot(weight.to(grad.dtype), grad, value_sums)
    slope = weight * _add_parts(tl.dot(value, tl.trans(grad)), told, 3)
    return tl.dot(slope.to(query.dtype), query, key_sums), value_sums


@triton.jit(do_not_specialize=["total"])
def _grad_keys(
    grad_ptr,
    qkv_ptr,
    borders_ptr,
    sizes_ptr,
    told_ptr,
    grad_qkv_ptr,
    total,
    STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    OWN: tl.constexpr,
    OTHERS: tl.constexpr,
    SIZED: tl.constexpr,
):
    """One program: some keys and values of one head of one image, over all queries."""
    head, image = tl.program_id(1), tl.program_id(2)
    begin = tl.load(borders_ptr + image)
    end = tl.load(borders_ptr + image + 1)
    keys = begin + tl.program_id(0) * OWN + tl.arange(0, OWN)
    if begin + tl.program_id(0) * OWN >= end:
        return
    row: tl.constexpr = HEADS * WIDTH
    key = _rows(qkv_ptr + (HEADS + head) * WIDTH, keys, end, STRIDE, WIDTH, True)
    value = _rows(qkv_ptr + (2 * HEADS + head) * WIDTH, keys, end, STRIDE, WIDTH, True)
    query_ptr = qkv_ptr + head * WIDTH
    grad_ptr += head * WIDTH
    told_ptr += head * total.to(tl.int64) * _PARTS
    scale: tl.constexpr = SCALE * _LOG2E
    key_sums = tl.zeros((OWN, WIDTH), dtype=tl.float32)
    value_sums = tl.zeros((OWN, WIDTH), dtype=tl.float32)
    whole = begin + (end - begin) // OTHERS * OTHERS
    sources = key, value, query_ptr, grad_ptr, told_ptr
    for first in range(begin, whole, OTHERS):
        key_sums, value_sums = _pull_of_queries(
            *sources, first, end, key_sums, value_sums, STRIDE, row, WIDTH, scale, OTHERS, False
        )
    if whole < end:
        key_sums, value_sums = _pull_of_queries(
            *sources, whole, end, key_sums, value_sums, STRIDE, row, WIDTH, scale, OTHERS, True
        )
    if SIZED:
        # All weights of a key have the same factor.
        counts = _counts(sizes_ptr, keys, end)[:, None]
        key_sums *= counts
        value_sums *= counts
    _store_rows(grad_qkv_ptr + (HEADS + head) * WIDTH, keys, end, key_sums * SCALE, 3 * row, WIDTH)
    _store_rows(grad_qkv_ptr + (2 * HEADS + head) * WIDTH, keys, end, value_sums, 3 * row, WIDTH)
