"""The spatial graph on the GPU: only tokens whose regions touch may be joined, found from the patch→token map.

Components need no list of pairs: every patch looks at four of its eight neighbours, and a pair that is met twice is
joined twice. For best links it offers itself to them, and every token takes its best offer. The gradient of θ counts a
pair once, so the tokens around every token are sorted, and those that come again are passed over. Plain versions:
``asc.grouping.graph.touching_pairs``, ``asc.grouping.links`` and ``asc.grouping.gradient.soft_gradient_among_pairs``.
Shape letters: see ``asc.tokens``.
"""

# Kernels are compiled by Triton from their syntax: they have no Python types to check.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped, no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asc.grouping.graph import SizeWeight
from asc.kernels.best import size_factor
from asc.kernels.components import join, root_of
from asc.kernels.gradient import Spread, ThresholdGradient, add_parts, heard_rows
from asc.kernels.launch import cdiv, launch, power_of_2

_PATCHES = 128  # of one program
_ROWS, _ENTRIES = 8, 16  # tokens of one program, and neighbours that it looks at together
_LARGEST = tl.constexpr(2**31 - 1)
_NO_OFFER = tl.constexpr(-(2**63))


def join_touching(
    features_TD: Tensor, patch_to_token_BN: Tensor, grid: tuple[int, int], theta: Tensor, parent_T: Tensor
) -> None:
    """Join all linked tokens that touch in the forest ``parent_T`` (int32), each token its own parent at first."""
    width, patches = features_TD.shape[1], patch_to_token_BN.numel()
    constants = width, min(64, power_of_2(width)), _PATCHES
    tensors = features_TD, patch_to_token_BN, theta, parent_T
    launch(_join_neighbours, (cdiv(patches, _PATCHES), 1, 1), tensors, (patches, *grid), constants)


def join_best_touching(
    features_TD: Tensor,
    patch_to_token_BN: Tensor,
    grid: tuple[int, int],
    theta: Tensor,
    parent_T: Tensor,
    by_size: SizeWeight | None,
) -> None:
    """Join each token with the best of those it touches, if that lies above θ, in the forest ``parent_T`` (int32).

    Among partners that are equally similar the first is the best.
    """
    width, patches, total = features_TD.shape[1], patch_to_token_BN.numel(), parent_T.shape[0]
    offers_T = torch.full((total,), _NO_OFFER.value, dtype=torch.int64, device=theta.device)
    power = 0.0 if by_size is None else float(by_size.power)
    # What is not looked at may be anything.
    sizes = parent_T if by_size is None else by_size.sizes_T
    constants = width, min(64, power_of_2(width)), _PATCHES, power
    tensors = features_TD, patch_to_token_BN, sizes, offers_T
    launch(_offer_to_neighbours, (cdiv(patches, _PATCHES), 1, 1), tensors, (patches, *grid), constants)
    launch(_take_offers, (cdiv(total, _PATCHES), 1, 1), (offers_T, theta, parent_T), (total,), (_PATCHES,))


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
    every: int | None = None,
    by_size: SizeWeight | None = None,
    in_patch_order: bool = False,
) -> ThresholdGradient:
    """Gradient of θ, times ``scale`` and ``sign``, and the hard merge's gradient of the values.

    One of ``every`` n rows, drawn as over all pairs (``asc.kernels.gradient``), stands for all (None: chosen by the
    length of the images). ``by_size``: how sizes count. ``in_patch_order``: token t is patch t and nothing else, so
    that the pairs of a token are met in a row, each once: nothing need be sorted.
    """
    heard = heard_rows(spread, values_TC, cu_seqlens, max_len, every)
    batch, (total, width), channels = patch_to_token_BN.shape[0], features_TD.shape, values_TC.shape[1]
    codes_E, starts_T = _codes_of_pairs(patch_to_token_BN, grid, total, max_len, in_patch_order)
    row_blocks = cdiv(heard.slots, _ROWS)
    parts_P = torch.empty(batch * row_blocks, dtype=torch.float32, device=theta.device)
    sizes = cu_seqlens if by_size is None else by_size.sizes_T
    twin = features_TD, heard.grad_TC, values_TC, spread.weights_T, theta, tau, heard.votes_T
    tensors = *twin, codes_E, starts_T, cu_seqlens, sizes, heard.rows_BK, heard.counts_BK, parts_P
    blocks = min(64, power_of_2(width)), min(256, power_of_2(channels)), _ROWS, _ENTRIES
    constants = width, channels, *blocks, heard.every, 0.0 if by_size is None else float(by_size.power)
    launch(_touching_slopes, (row_blocks, batch, 1), tensors, (max_len, heard.slots), constants)
    return ThresholdGradient(heard.grad_TC, heard.votes_T, add_parts(parts_P, scale, -sign))


def _codes_of_pairs(
    patch_to_token_BN: Tensor, grid: tuple[int, int], tokens: int, max_len: int, in_patch_order: bool
) -> tuple[Tensor, Tensor]:
    """A row of numbers for every token, one for each pair it is in, and where the rows begin."""
    patches = patch_to_token_BN.numel()
    row = 2 * max_len
    # Short numbers take half as many passes to sort.
    kind = torch.int32 if (tokens + 1) * row < 2**31 else torch.int64
    codes_E = torch.empty(patches * 8, dtype=kind, device=patch_to_token_BN.device)
    steps = (8, 1) if in_patch_order else (1, patches)
    tensors = patch_to_token_BN, codes_E
    launch(_write_codes, (cdiv(patches, _PATCHES), 1, 1), tensors, (patches, *grid, max_len, *steps), (_PATCHES,))
    if in_patch_order:
        return codes_E, torch.arange(0, 8 * (tokens + 1), 8, device=codes_E.device)
    codes_E = codes_E.sort().values
    firsts_T = torch.arange(0, (tokens + 1) * row, row, dtype=kind, device=codes_E.device)
    return codes_E, torch.searchsorted(codes_E, firsts_T)


@triton.jit
def _neighbour(patch, count, rows, columns, DOWN: tl.constexpr, RIGHT: tl.constexpr):
    """A neighbour of every patch, and whether it exists."""
    row = patch % (rows * columns) // columns + DOWN
    column = patch % columns + RIGHT
    exists = (patch < count) & (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    return patch + DOWN * columns + RIGHT, exists


@triton.jit
def _pair(
    features_ptr,
    map_ptr,
    patch,
    here,
    count,
    rows,
    columns,
    PLACE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PATCHES: tl.constexpr,
):
    """The token of one neighbour of every patch, their similarity, and whether there are two tokens at all.

    Places are to the right, and the three below; the others look from their side.
    """
    other, exists = _neighbour(patch, count, rows, columns, 0 if PLACE == 0 else 1, 1 if PLACE == 0 else PLACE - 2)
    there = tl.load(map_ptr + other, mask=exists, other=0)
    exists = exists & (here != there)
    similarity = tl.zeros((PATCHES,), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK_D):
        channels = start + tl.arange(0, BLOCK_D)
        mask = exists[:, None] & (channels[None, :] < WIDTH)
        a = tl.load(features_ptr + here[:, None] * WIDTH + channels[None, :], mask=mask, other=0.0)
        b = tl.load(features_ptr + there[:, None] * WIDTH + channels[None, :], mask=mask, other=0.0)
        similarity += tl.sum(a.to(tl.float32) * b.to(tl.float32), axis=1)
    return there, similarity, exists


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
    patch = tl.program_id(0) * PATCHES + tl.arange(0, PATCHES)
    theta = tl.load(theta_ptr)
    here = tl.load(map_ptr + patch, mask=patch < count, other=0)
    for place in tl.static_range(4):
        there, similarity, exists = _pair(
            features_ptr, map_ptr, patch, here, count, rows, columns, place, WIDTH, BLOCK_D, PATCHES
        )
        linked = exists & (similarity > theta)
        # Where there is no link the roots are not needed; token 0 stands in.
        root = root_of(parent_ptr, tl.where(linked, here, 0).to(tl.int32))
        other_root = root_of(parent_ptr, tl.where(linked, there, 0).to(tl.int32))
        join(parent_ptr, root, other_root, linked)


@triton.jit
def _in_order(bits):
    """Bits of numbers as integers that are in the same order; the same again turns them back."""
    return tl.where(bits < 0, bits ^ _LARGEST, bits)


@triton.jit
def _offer(similarity, partner):
    """One number: the larger, the more similar; among equals the larger, the smaller the partner's."""
    order = _in_order(similarity.to(tl.int32, bitcast=True)).to(tl.int64)
    return (order << 32) | (_LARGEST - partner)


@triton.jit(do_not_specialize=["count", "rows", "columns"])
def _offer_to_neighbours(
    features_ptr,
    map_ptr,
    sizes_ptr,
    offers_ptr,
    count,
    rows,
    columns,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PATCHES: tl.constexpr,
    POWER: tl.constexpr,
):
    """Every pair that touches is offered to both of its tokens, which keep the best offer."""
    patch = tl.program_id(0) * PATCHES + tl.arange(0, PATCHES)
    here = tl.load(map_ptr + patch, mask=patch < count, other=0)
    for place in tl.static_range(4):
        there, similarity, exists = _pair(
            features_ptr, map_ptr, patch, here, count, rows, columns, place, WIDTH, BLOCK_D, PATCHES
        )
        if POWER > 0:
            size = tl.load(sizes_ptr + here, mask=exists, other=1).to(tl.float32)
            other_size = tl.load(sizes_ptr + there, mask=exists, other=1).to(tl.float32)
            similarity = 1.0 - (1.0 - similarity) * size_factor(size, other_size, POWER)
        tl.atomic_max(offers_ptr + here, _offer(similarity, there), mask=exists, sem="relaxed")
        tl.atomic_max(offers_ptr + there, _offer(similarity, here), mask=exists, sem="relaxed")


@triton.jit(do_not_specialize=["total"])
def _take_offers(offers_ptr, theta_ptr, parent_ptr, total, TOKENS: tl.constexpr):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    offer = tl.load(offers_ptr + token, mask=token < total, other=_NO_OFFER)
    similarity = _in_order((offer >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
    linked = (offer != _NO_OFFER) & (similarity > tl.load(theta_ptr))
    partner = _LARGEST - (offer & _LARGEST).to(tl.int32)
    join(parent_ptr, token, tl.where(linked, partner, token), linked)


@triton.jit
def _nowhere(codes_ptr):
    """Larger than any code of a pair."""
    return 2**31 - 1 if codes_ptr.dtype.element_ty == tl.int32 else 2**62


@triton.jit(do_not_specialize=["count", "rows", "columns", "longest", "patch_step", "place_step"])
def _write_codes(map_ptr, codes_ptr, count, rows, columns, longest, patch_step, place_step, PATCHES: tl.constexpr):
    """For every patch and each of its neighbours a number for the pair of their tokens; none if it is one token.

    Tokens of an image are less than ``longest`` apart: the number tells one of them, and how far away the other is.
    """
    patch = tl.program_id(0) * PATCHES + tl.arange(0, PATCHES)
    here = tl.load(map_ptr + patch, mask=patch < count, other=0).to(tl.int64)
    first_place = codes_ptr + patch.to(tl.int64) * patch_step
    for place in tl.static_range(9):
        # The fifth of the nine places is the patch itself.
        if place != 4:
            other, exists = _neighbour(patch, count, rows, columns, place // 3 - 1, place % 3 - 1)
            there = tl.load(map_ptr + other, mask=exists, other=0).to(tl.int64)
            code = here * (2 * longest) + longest + there - here
            code = tl.where(exists & (here != there), code, _nowhere(codes_ptr))
            number = place - (place > 4)
            tl.store(first_place + number * place_step.to(tl.int64), code, mask=patch < count)


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


@triton.jit(do_not_specialize=["longest", "slots"])
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
    sizes_ptr,
    chosen_ptr,
    counts_ptr,
    parts_ptr,
    longest,
    slots,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    EVERY: tl.constexpr,
    POWER: tl.constexpr,
):
    """Of every row, or of those chosen, D_i and g_i · ỹ_i, and how both change with the gates."""
    theta = tl.load(theta_ptr)
    tau = tl.load(tau_ptr)
    lanes = tl.arange(0, ENTRIES)
    image = tl.program_id(1)
    begin = tl.load(borders_ptr + image)
    end = tl.load(borders_ptr + image + 1)
    first = tl.program_id(0) * ROWS
    slopes = tl.zeros((ENTRIES,), dtype=tl.float32)
    for place in range(first, tl.minimum(first + ROWS, tl.cdiv(end - begin, EVERY))):
        row = (begin + place).to(tl.int64)
        count = 1.0
        if EVERY > 1:
            slot = image.to(tl.int64) * slots + place
            # A place that is empty counts for nothing, whatever row is looked at.
            row = tl.minimum(tl.load(chosen_ptr + slot), end - 1).to(tl.int64)
            count = tl.load(counts_ptr + slot)
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
            valid = valid & (code != before) & (code != _nowhere(codes_ptr))
            other = tl.where(valid, code.to(tl.int64) - row * (2 * longest) - longest + row, 0)
            similarity = _products(features_ptr, row, other, valid, WIDTH, BLOCK_D, ENTRIES, features_ptr)
            if POWER > 0:
                size = tl.load(sizes_ptr + row).to(tl.float32)
                other_sizes = tl.load(sizes_ptr + other, mask=valid, other=1).to(tl.float32)
                similarity = 1.0 - (1.0 - similarity) * size_factor(size, other_sizes, POWER)
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
        slopes += (pull_slopes - level * gate_slopes) * inverse * count
    tl.store(parts_ptr + image * tl.num_programs(0) + tl.program_id(0), tl.sum(slopes, axis=0) / tau)
