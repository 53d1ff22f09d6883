"""The spatial graph on the GPU: only tokens whose regions touch may be joined, found from the patch→token map.

Components need no list of pairs: every patch looks at four of its eight neighbours, and a pair that is met twice is
joined twice. The gradient of θ counts a pair once, so the tokens around every token are sorted, and those that come
again are passed over. Plain versions: ``asc.grouping.graph.touching_pairs`` and
``asc.grouping.gradient.soft_gradient_among_pairs``. Shape letters: see ``asc.tokens``.
"""

# Kernels are compiled by Triton from their syntax: they have no Python types to check.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped, no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asc.kernels.components import join, root_of
from asc.kernels.gradient import Spread, ThresholdGradient, add_parts, votes_and_hard_gradient
from asc.kernels.launch import cdiv, launch, power_of_2

_PATCHES = 128  # of one program
_ROWS, _ENTRIES = 8, 16  # tokens of one program, and neighbours that it looks at together
_NOWHERE = tl.constexpr(2**62)  # larger than any code of a pair
# Images longer than this let a quarter of the batch speak for θ, which is one number for all pairs of all images.
_ALL_IMAGES, _EVERY = 1024, 4


def join_touching(
    features_TD: Tensor, patch_to_token_BN: Tensor, grid: tuple[int, int], theta: Tensor, parent_T: Tensor
) -> None:
    """Join all linked tokens that touch in the forest ``parent_T`` (int32), each token its own parent at first."""
    width, patches = features_TD.shape[1], patch_to_token_BN.numel()
    constants = width, min(64, power_of_2(width)), _PATCHES
    tensors = features_TD, patch_to_token_BN, theta, parent_T
    launch(_join_neighbours, (cdiv(patches, _PATCHES), 1, 1), tensors, (patches, *grid), constants)


def touching_threshold_gradient(
    spread: Spread,
    features_TD: Tensor,
    values_TC: Tensor,
    theta: Tensor,
    tau: Tensor,
    patch_to_token_BN: Tensor,
    grid: tuple[int, int],
    cu_seqlens: Tensor,
    max_len: int,
    scale: Tensor,
    sign: float,
    images: int | None = None,
) -> ThresholdGradient:
    """Gradient of θ, times ``scale`` and ``sign``, and the hard merge's gradient of the values.

    The first ``images`` stand for all (None: chosen by their length); batches are shuffled, so over a training all are
    heard alike.
    """
    batch, patches = patch_to_token_BN.shape
    if images is None:
        images = batch if max_len <= _ALL_IMAGES else cdiv(batch, _EVERY)
    grad_TC, votes_T = votes_and_hard_gradient(spread, values_TC)
    total, width = features_TD.shape
    tokens = min(total, images * max_len)
    codes_E = torch.empty(images * patches * 8, dtype=torch.int64, device=theta.device)
    tensors = patch_to_token_BN, codes_E
    launch(
        _write_codes, (cdiv(images * patches, _PATCHES), 1, 1), tensors, (images * patches, *grid, total), (_PATCHES,)
    )
    codes_E = codes_E.sort().values
    firsts_T = torch.arange(0, (tokens + 1) * total, total, device=theta.device)
    starts_T = torch.searchsorted(codes_E, firsts_T)
    channels = values_TC.shape[1]
    parts_P = torch.empty(cdiv(tokens, _ROWS), dtype=torch.float32, device=theta.device)
    inputs = features_TD, grad_TC, values_TC, spread.weights_T, theta, tau, votes_T, codes_E, starts_T, cu_seqlens
    constants = width, channels, min(64, power_of_2(width)), min(256, power_of_2(channels)), _ROWS, _ENTRIES
    launch(_touching_slopes, (parts_P.shape[0], 1, 1), (*inputs, parts_P), (total, images), constants)
    return ThresholdGradient(grad_TC, votes_T, add_parts(parts_P, scale, -sign * batch / images))


@triton.jit
def _neighbour(patch, count, rows, columns, DOWN: tl.constexpr, RIGHT: tl.constexpr):
    """A neighbour of every patch, and whether it exists."""
    row = patch % (rows * columns) // columns + DOWN
    column = patch % columns + RIGHT
    exists = (patch < count) & (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    return patch + DOWN * columns + RIGHT, exists


@triton.jit
def _join_neighbour(
    features_ptr,
    map_ptr,
    parent_ptr,
    theta,
    patch,
    here,
    count,
    rows,
    columns,
    DOWN: tl.constexpr,
    RIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PATCHES: tl.constexpr,
):
    other, exists = _neighbour(patch, count, rows, columns, DOWN, RIGHT)
    there = tl.load(map_ptr + other, mask=exists, other=0)
    exists = exists & (here != there)
    similarity = tl.zeros((PATCHES,), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK_D):
        channels = start + tl.arange(0, BLOCK_D)
        mask = exists[:, None] & (channels[None, :] < WIDTH)
        a = tl.load(features_ptr + here[:, None] * WIDTH + channels[None, :], mask=mask, other=0.0)
        b = tl.load(features_ptr + there[:, None] * WIDTH + channels[None, :], mask=mask, other=0.0)
        similarity += tl.sum(a.to(tl.float32) * b.to(tl.float32), axis=1)
    linked = exists & (similarity > theta)
    # Where there is no link the roots are not needed; token 0 stands in.
    root = root_of(parent_ptr, tl.where(linked, here, 0).to(tl.int32))
    other_root = root_of(parent_ptr, tl.where(linked, there, 0).to(tl.int32))
    join(parent_ptr, root, other_root, linked)


@triton.jit(do_not_specialize=["count", "rows", "columns"])
def _join_neighbours(
    features_ptr,
    map_ptr,
    theta_ptr,
    parent_ptr,
    count,
    rows,
    columns,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PATCHES: tl.constexpr,
):
    """To the right, and the three below; the others look from their side."""
    patch = tl.program_id(0) * PATCHES + tl.arange(0, PATCHES)
    theta = tl.load(theta_ptr)
    here = tl.load(map_ptr + patch, mask=patch < count, other=0)
    for place in tl.static_range(4):
        _join_neighbour(
            features_ptr,
            map_ptr,
            parent_ptr,
            theta,
            patch,
            here,
            count,
            rows,
            columns,
            0 if place == 0 else 1,
            1 if place == 0 else place - 2,
            WIDTH,
            BLOCK_D,
            PATCHES,
        )


@triton.jit(do_not_specialize=["count", "rows", "columns", "total"])
def _write_codes(map_ptr, codes_ptr, count, rows, columns, total, PATCHES: tl.constexpr):
    """For every patch and each of its neighbours a number for the pair of their tokens; none if it is one token."""
    patch = tl.program_id(0) * PATCHES + tl.arange(0, PATCHES)
    here = tl.load(map_ptr + patch, mask=patch < count, other=0)
    for place in tl.static_range(9):
        # The fifth of the nine places is the patch itself.
        if place != 4:
            other, exists = _neighbour(patch, count, rows, columns, place // 3 - 1, place % 3 - 1)
            there = tl.load(map_ptr + other, mask=exists, other=0)
            code = tl.where(exists & (here != there), here * total + there, _NOWHERE)
            row = place - (place > 4)
            tl.store(codes_ptr + row * count.to(tl.int64) + patch, code, mask=patch < count)


@triton.jit
def _products(
    matrix_ptr, row, others, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr, OTHER_PTR
):
    """Inner products of one row with rows of another matrix."""
    result = tl.zeros((ENTRIES,), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        channels = start + tl.arange(0, BLOCK)
        own = tl.load(matrix_ptr + row * WIDTH + channels, mask=channels < WIDTH, other=0.0).to(tl.float32)
        mask = valid[:, None] & (channels[None, :] < WIDTH)
        more = tl.load(OTHER_PTR + others[:, None] * WIDTH + channels[None, :], mask=mask, other=0.0)
        result += tl.sum(more.to(tl.float32) * own[None, :], axis=1)
    return result


@triton.jit(do_not_specialize=["total", "images"])
def _touching_slopes(
    features_ptr,
    grads_ptr,
    values_ptr,
    weights_ptr,
    theta_ptr,
    tau_ptr,
    votes_ptr,
    codes_ptr,
    starts_ptr,
    borders_ptr,
    parts_ptr,
    total,
    images,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Of every row D_i and g_i · ỹ_i, and how both change with the gates; see ``asc.kernels.gradient``."""
    theta = tl.load(theta_ptr)
    tau = tl.load(tau_ptr)
    lanes = tl.arange(0, ENTRIES)
    first = tl.program_id(0) * ROWS
    tokens = tl.minimum(ROWS, tl.load(borders_ptr + images) - first)
    slopes = tl.zeros((ENTRIES,), dtype=tl.float32)
    for token in range(0, tokens):
        row = (first + token).to(tl.int64)
        start = tl.load(starts_ptr + row)
        stop = tl.load(starts_ptr + row + 1)
        # The token itself comes first, with a gate of 1 that does not move.
        own = lanes == 0
        itself = row + tl.zeros((ENTRIES,), dtype=tl.int64)
        gates = tl.where(own, tl.load(weights_ptr + row), 0.0)
        pulls = gates * _products(grads_ptr, row, itself, own, CHANNELS, BLOCK_C, ENTRIES, values_ptr)
        gate_slopes = tl.zeros((ENTRIES,), dtype=tl.float32)
        pull_slopes = tl.zeros((ENTRIES,), dtype=tl.float32)
        for entry in range(start, stop, ENTRIES):
            places = entry + lanes
            valid = places < stop
            code = tl.load(codes_ptr + places, mask=valid, other=0)
            before = tl.load(codes_ptr + places - 1, mask=valid & (places > start), other=-1)
            valid = valid & (code != before)
            other = tl.where(valid, code - row * total, 0)
            similarity = _products(features_ptr, row, other, valid, WIDTH, BLOCK_D, ENTRIES, features_ptr)
            pull = _products(grads_ptr, row, other, valid, CHANNELS, BLOCK_C, ENTRIES, values_ptr)
            weight = tl.load(weights_ptr + other, mask=valid, other=0.0)
            gate = tl.sigmoid((similarity - theta) / tau)
            slope = gate * (1.0 - gate) * weight
            gates += gate * weight
            pulls += gate * weight * pull
            gate_slopes += slope
            pull_slopes += slope * pull
        inverse = 1.0 / tl.sum(gates, axis=0)
        level = tl.sum(pulls, axis=0) * inverse + tl.load(votes_ptr + row)
        slopes += (pull_slopes - level * gate_slopes) * inverse
    tl.store(parts_ptr + tl.program_id(0), tl.sum(slopes, axis=0) / tau)
