"""Keys become comparable features on the GPU: head mean, centring, unit length, in two launches each way.

The plain version is ``asc.grouping.graph.similarity_features``. Sums over an image are made in pieces of fixed
length, added in order: deterministic, and the same whatever else is in the batch. Shape letters: see
``asc.tokens``.
"""

# Kernels are compiled by Triton from their syntax: they have no Python types to check.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped, no-any-return"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from asc.kernels.launch import cdiv, launch, power_of_2

_PIECE = 512  # tokens that one program adds up
ALIGNED = 16  # entries of 4 bytes


class Comparison(NamedTuple):
    """How keys are made comparable; constant for a layer."""

    center: bool
    """Whether each image's mean key is taken away."""
    scale: float | None
    """Factor of the features; None: they get unit length."""
    smallest_norm: float
    """Shorter keys are divided by this."""
    tau: float = 1.0
    """Softness of the gate, in units of the threshold's width if ``relative``."""
    relative: bool = True
    """Whether it is."""
    cosine: bool = True
    """Whether θ is 1 - exp(u); else it is -sinh(u)."""
    by_size: bool = False
    """Whether a token weighs as much as it holds patches; else all weigh 1."""
    key_gradient: float = 0.0
    """Weight of the soft twin's gradient on the keys, in units of τ."""
    best_links: bool = False
    """Whether a token is linked with its best partner only; else with all above θ."""
    size_power: float = 0.0
    """How sizes count in the similarity of best links: see ``asc.grouping.graph.SizeWeight``."""


class Compared(NamedTuple):
    """Features in the forms that different parts of the layer need."""

    features_TD: Tensor
    """fp32, with gradient."""
    half_TD: Tensor
    """The same in fp16, for matrix products; eight times finer than bf16 for numbers below 1."""
    broken: Tensor
    """1 if any feature is NaN or infinite, else 0 (int32, one number, on the device)."""


class Prepared(NamedTuple):
    """All that one layer needs to begin with, from one pass over the keys."""

    features_TD: Tensor
    half_TD: Tensor
    """The features in fp16; the features themselves where no half precision was asked for."""
    norms_T: Tensor
    weights_T: Tensor
    parent_T: Tensor
    """Every token its own parent (int32)."""
    broken_BP: Tensor
    """Not 0 where a part of an image holds a feature that is not finite (int32)."""
    theta: Tensor
    tau: Tensor
    width: Tensor
    """Change of θ with u."""


class ThetaParts(NamedTuple):
    """The gradient of θ as the soft twin's passes leave it, for ``grad_of_keys`` to finish on its way."""

    parts_P: Tensor
    """See ``asc.kernels.gradient.Passed``."""
    width: Tensor
    tau: Tensor
    grad_u: Tensor
    """Where the result goes."""


def compared(
    keys: Tensor, cu_seqlens: Tensor, max_len: int, center: bool, scale: float | None, smallest_norm: float
) -> Compared:
    """Features of keys ``(T, D)`` or ``(T, H, D)``: of unit length, or multiplied by ``scale`` if there is one."""
    comparison = Comparison(center, scale, smallest_norm)
    return Compared(*_Compared.apply(with_heads(keys), cu_seqlens, max_len, comparison))


def with_heads(keys: Tensor) -> Tensor:
    """Keys as ``(T, H, D)``, the channels of a head beside one another."""
    keys_THD = keys[:, None] if keys.ndim == 2 else keys
    return keys_THD if keys_THD.stride(2) == 1 else keys_THD.contiguous()


class _Compared(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, keys_THD: Tensor, cu_seqlens: Tensor, max_len: int, comparison: Comparison
    ) -> tuple[Tensor, Tensor, Tensor]:
        nothing = cu_seqlens  # θ and the weights are not asked for
        found = prepare(keys_THD, cu_seqlens, max_len, comparison, True, nothing, nothing, full=False)
        broken = found.broken_BP.amax()
        ctx.save_for_backward(found.features_TD, found.norms_T, cu_seqlens)
        ctx.settings = max_len, comparison, keys_THD.shape[1], keys_THD.dtype
        ctx.mark_non_differentiable(found.half_TD, broken)
        ctx.set_materialize_grads(False)
        return found.features_TD, found.half_TD, broken

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
        if grad_TD is None:
            return (None,) * 4
        features_TD, norms_T, borders = ctx.saved_tensors
        grad_THD = grad_of_keys(grad_TD.contiguous(), features_TD, norms_T, borders, *ctx.settings)
        return grad_THD, None, None, None


def prepare(
    keys_THD: Tensor,
    cu_seqlens: Tensor,
    max_len: int,
    comparison: Comparison,
    half: bool,
    u: Tensor,
    sizes_T: Tensor,
    full: bool = True,
) -> Prepared:
    """Features of the keys and, if ``full``, θ from ``u``, the weights of the tokens and their first parents."""
    total, heads, width = keys_THD.shape
    batch, pieces, device = cu_seqlens.shape[0] - 1, cdiv(max_len, _PIECE), keys_THD.device
    block_d = power_of_2(width)
    rows = _rows(block_d)
    parts, stride = cdiv(max_len, rows), round_up(total)
    shape = heads, width, block_d, rows, _PIECE, keys_THD.stride(0), keys_THD.stride(1)
    sums_BSD = torch.empty(batch, pieces, width, dtype=torch.float32, device=device)
    if comparison.center:
        launch(_sum_keys, (pieces, batch, 1), (keys_THD, cu_seqlens, sums_BSD), (pieces,), shape)
    features_TD = torch.empty(total, width, dtype=torch.float32, device=device)
    half_TD = torch.empty(total, width, dtype=torch.float16, device=device) if half else features_TD
    # Norms, weights, and three single numbers, in rows whose beginnings are aligned.
    floats = torch.empty(2 * stride + 3 * ALIGNED, dtype=torch.float32, device=device)
    whole = torch.empty(stride + batch * parts, dtype=torch.int32, device=device)
    tensors = keys_THD, cu_seqlens, sums_BSD, sizes_T, u, features_TD, half_TD, floats, whole
    scale = 1.0 if comparison.scale is None else comparison.scale
    constants = (
        *shape,
        comparison.center,
        comparison.scale is None,
        scale,
        comparison.smallest_norm,
        half,
        full,
        comparison.by_size,
        comparison.cosine,
        comparison.tau,
        comparison.relative,
        ALIGNED,
    )
    launch(_compare, (parts, batch, 1), tensors, (stride, pieces), constants)
    theta, tau, theta_width = floats[2 * stride :].view(3, ALIGNED)[:, 0].unbind()
    norms_T, weights_T = floats[:total], floats[stride : stride + total]
    return Prepared(features_TD, half_TD, norms_T, weights_T, whole[:total], whole[stride:], theta, tau, theta_width)


def grad_of_keys(
    grad_TD: Tensor,
    features_TD: Tensor,
    norms_T: Tensor,
    cu_seqlens: Tensor,
    max_len: int,
    comparison: Comparison,
    heads: int,
    dtype: torch.dtype,
    theta: ThetaParts | None = None,
    sign: float = 1.0,
) -> Tensor:
    """Gradient of the keys ``(T, H, D)`` from that of the features.

    With ``theta`` that of the features is the soft twin's and still to be scaled, and ``sign`` times the gradient of
    θ goes to u (sign -1) or to the target share (1).
    """
    total, width = features_TD.shape
    batch, pieces = cu_seqlens.shape[0] - 1, cdiv(max_len, _PIECE)
    block_d = power_of_2(width)
    rows = _rows(block_d)
    scale = 1.0 if comparison.scale is None else comparison.scale
    shape = width, block_d, rows, _PIECE, comparison.scale is None, scale, comparison.smallest_norm
    sums_BSD = torch.empty(batch, pieces, width, dtype=torch.float32, device=features_TD.device)
    inputs = features_TD, grad_TD, norms_T, cu_seqlens, sums_BSD
    if comparison.center:
        launch(_sum_grads, (pieces, batch, 1), inputs, (pieces,), shape)
    grad_keys_TD = torch.empty(total, width, dtype=dtype, device=features_TD.device)
    # What stands in for a missing θ is never touched.
    theta_tensors = (sums_BSD,) * 4 if theta is None else theta
    numbers = pieces, 0 if theta is None else theta.parts_P.shape[0]
    head_share = (1.0 if theta is None else comparison.key_gradient) / heads
    constants = (*shape, comparison.center, head_share, theta is not None, sign)
    tensors = (*inputs, grad_keys_TD, *theta_tensors)
    launch(_grad_keys, (cdiv(max_len, rows), batch, 1), tensors, numbers, constants)
    return grad_keys_TD[:, None].expand(total, heads, width)


def round_up(count: int) -> int:
    """The next number of 4-byte entries after which an address is aligned as well as before."""
    return -(-count // ALIGNED) * ALIGNED


def _rows(block_d: int) -> int:
    return max(1, 4096 // block_d)


@triton.jit
def _head_mean(
    keys_ptr,
    tokens,
    channels,
    mask,
    HEADS: tl.constexpr,
    STRIDE_T: tl.constexpr,
    STRIDE_H: tl.constexpr,
):
    pointers = keys_ptr + tokens.to(tl.int64)[:, None] * STRIDE_T + channels[None, :]
    total = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    for head in tl.static_range(1, HEADS):
        total += tl.load(pointers + head * STRIDE_H, mask=mask, other=0.0).to(tl.float32)
    return total / HEADS


@triton.jit
def _image_mean(sums_ptr, image, length, pieces, channels, WIDTH: tl.constexpr, PIECE: tl.constexpr):
    total = tl.zeros(channels.shape, dtype=tl.float32)
    for piece in range(0, tl.cdiv(length, PIECE)):
        pointers = sums_ptr + (image * pieces + piece).to(tl.int64) * WIDTH + channels
        total += tl.load(pointers, mask=channels < WIDTH, other=0.0)
    return total / length


@triton.jit(do_not_specialize=["pieces"])
def _sum_keys(
    keys_ptr,
    borders_ptr,
    sums_ptr,
    pieces,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    STRIDE_T: tl.constexpr,
    STRIDE_H: tl.constexpr,
):
    piece, image = tl.program_id(0), tl.program_id(1)
    first = tl.load(borders_ptr + image) + piece * PIECE
    end = tl.minimum(first + PIECE, tl.load(borders_ptr + image + 1))
    channels = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for start in range(first, end, ROWS):
        tokens = start + tl.arange(0, ROWS)
        mask = (tokens[:, None] < end) & (channels[None, :] < WIDTH)
        total += tl.sum(_head_mean(keys_ptr, tokens, channels, mask, HEADS, STRIDE_T, STRIDE_H), axis=0)
    pointers = sums_ptr + (image * pieces + piece).to(tl.int64) * WIDTH + channels
    tl.store(pointers, total, mask=channels < WIDTH)


@triton.jit
def _write_theta(u_ptr, out_ptr, COSINE: tl.constexpr, TAU: tl.constexpr, RELATIVE: tl.constexpr, GAP: tl.constexpr):
    """θ, τ, and the width of θ; see ``asc.grouping.threshold``."""
    u = tl.load(u_ptr).to(tl.float32)
    if COSINE:
        width = tl.exp(u)
        theta = 1.0 - width
    else:
        width = (tl.exp(u) + tl.exp(-u)) * 0.5
        theta = (tl.exp(-u) - tl.exp(u)) * 0.5
    tl.store(out_ptr, theta)
    if RELATIVE:
        tl.store(out_ptr + GAP, width * TAU)
    else:
        tl.store(out_ptr + GAP, TAU)
    tl.store(out_ptr + 2 * GAP, width)


@triton.jit(do_not_specialize=["stride", "pieces"])
def _compare(
    keys_ptr,
    borders_ptr,
    sums_ptr,
    sizes_ptr,
    u_ptr,
    features_ptr,
    half_ptr,
    floats_ptr,
    whole_ptr,
    stride,
    pieces,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    STRIDE_T: tl.constexpr,
    STRIDE_H: tl.constexpr,
    CENTER: tl.constexpr,
    UNIT: tl.constexpr,
    SCALE: tl.constexpr,
    SMALLEST: tl.constexpr,
    HALF: tl.constexpr,
    FULL: tl.constexpr,
    BY_SIZE: tl.constexpr,
    COSINE: tl.constexpr,
    TAU: tl.constexpr,
    RELATIVE: tl.constexpr,
    GAP: tl.constexpr,
):
    part, image = tl.program_id(0), tl.program_id(1)
    broken_ptr = whole_ptr + stride + image * tl.num_programs(0) + part
    if FULL:  # noqa: SIM102 (known when compiled, the other only when run)
        if part + image == 0:
            _write_theta(u_ptr, floats_ptr + 2 * stride, COSINE, TAU, RELATIVE, GAP)
    begin = tl.load(borders_ptr + image)
    end = tl.load(borders_ptr + image + 1)
    first = begin + part * ROWS
    if first >= end:
        tl.store(broken_ptr, 0)
        return
    tokens = first + tl.arange(0, ROWS)
    channels = tl.arange(0, BLOCK_D)
    mask = (tokens[:, None] < end) & (channels[None, :] < WIDTH)
    feature = _head_mean(keys_ptr, tokens, channels, mask, HEADS, STRIDE_T, STRIDE_H)
    if CENTER:
        mean = _image_mean(sums_ptr, image, end - begin, pieces, channels, WIDTH, PIECE)
        feature = tl.where(mask, feature - mean[None, :], 0.0)
    if UNIT:
        norm = tl.sqrt(tl.sum(feature * feature, axis=1))
        feature = feature / tl.maximum(norm, SMALLEST)[:, None]
        tl.store(floats_ptr + tokens, norm, mask=tokens < end)
    else:
        feature = feature * SCALE
    # NaN and infinity are told by their exponent. Arithmetic would not do: a product minus itself becomes one
    # fused operation, and that leaves the product's rounding error.
    exponent = feature.to(tl.int32, bitcast=True) & 0x7F800000
    tl.store(broken_ptr, tl.max((exponent == 0x7F800000).to(tl.int32)))
    pointers = tokens.to(tl.int64)[:, None] * WIDTH + channels[None, :]
    tl.store(features_ptr + pointers, feature, mask=mask)
    if HALF:
        tl.store(half_ptr + pointers, feature.to(tl.float16), mask=mask)
    if FULL:
        tl.store(whole_ptr + tokens, tokens, mask=tokens < end)
        weight = tl.full((ROWS,), 1.0, dtype=tl.float32)
        if BY_SIZE:
            # A prefix token holds no patch but stays itself: any weight but zero does that.
            weight = tl.maximum(tl.load(sizes_ptr + tokens, mask=tokens < end, other=1), 1).to(tl.float32)
        tl.store(floats_ptr + stride + tokens, weight, mask=tokens < end)


@triton.jit
def _grad_of_centred(
    features_ptr,
    grads_ptr,
    norms_ptr,
    tokens,
    channels,
    end,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    SCALE: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """Gradient of the centred keys: that of the features, less what only changes a key's length."""
    mask = (tokens[:, None] < end) & (channels[None, :] < WIDTH)
    pointers = tokens.to(tl.int64)[:, None] * WIDTH + channels[None, :]
    grad = tl.load(grads_ptr + pointers, mask=mask, other=0.0).to(tl.float32)
    if UNIT:
        feature = tl.load(features_ptr + pointers, mask=mask, other=0.0)
        norm = tl.load(norms_ptr + tokens, mask=tokens < end, other=1.0)
        # Keys below the smallest norm are divided by a constant: their length has a gradient too.
        along = tl.where(norm >= SMALLEST, tl.sum(feature * grad, axis=1), 0.0)
        grad = (grad - feature * along[:, None]) / tl.maximum(norm, SMALLEST)[:, None]
    else:
        grad = grad * SCALE
    return grad


@triton.jit(do_not_specialize=["pieces"])
def _sum_grads(
    features_ptr,
    grads_ptr,
    norms_ptr,
    borders_ptr,
    sums_ptr,
    pieces,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    UNIT: tl.constexpr,
    SCALE: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    piece, image = tl.program_id(0), tl.program_id(1)
    first = tl.load(borders_ptr + image) + piece * PIECE
    end = tl.minimum(first + PIECE, tl.load(borders_ptr + image + 1))
    channels = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for start in range(first, end, ROWS):
        tokens = start + tl.arange(0, ROWS)
        grad = _grad_of_centred(features_ptr, grads_ptr, norms_ptr, tokens, channels, end, WIDTH, UNIT, SCALE, SMALLEST)
        total += tl.sum(grad, axis=0)
    pointers = sums_ptr + (image * pieces + piece).to(tl.int64) * WIDTH + channels
    tl.store(pointers, total, mask=channels < WIDTH)


@triton.jit(do_not_specialize=["pieces", "theta_parts"])
def _grad_keys(
    features_ptr,
    grads_ptr,
    norms_ptr,
    borders_ptr,
    sums_ptr,
    grad_keys_ptr,
    theta_parts_ptr,
    theta_width_ptr,
    tau_ptr,
    grad_u_ptr,
    pieces,
    theta_parts,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    UNIT: tl.constexpr,
    SCALE: tl.constexpr,
    SMALLEST: tl.constexpr,
    CENTER: tl.constexpr,
    HEAD_SHARE: tl.constexpr,
    WITH_THETA: tl.constexpr,
    SIGN: tl.constexpr,
):
    image = tl.program_id(1)
    if WITH_THETA:  # noqa: SIM102 (known when compiled, the other only when run)
        if tl.program_id(0) + image == 0:
            total = tl.zeros((1024,), dtype=tl.float32)
            for start in range(0, theta_parts, 1024):
                parts = start + tl.arange(0, 1024)
                total += tl.load(theta_parts_ptr + parts, mask=parts < theta_parts, other=0.0)
            # Every pair was met from both ends, hence the half.
            tl.store(grad_u_ptr, tl.sum(total, axis=0) * tl.load(theta_width_ptr) * (-0.5 * SIGN))
    begin = tl.load(borders_ptr + image)
    end = tl.load(borders_ptr + image + 1)
    first = begin + tl.program_id(0) * ROWS
    if first >= end:
        return
    tokens = first + tl.arange(0, ROWS)
    channels = tl.arange(0, BLOCK_D)
    grad = _grad_of_centred(features_ptr, grads_ptr, norms_ptr, tokens, channels, end, WIDTH, UNIT, SCALE, SMALLEST)
    if CENTER:
        grad -= _image_mean(sums_ptr, image, end - begin, pieces, channels, WIDTH, PIECE)[None, :]
    if WITH_THETA:
        grad *= tl.load(tau_ptr)
    pointers = grad_keys_ptr + tokens.to(tl.int64)[:, None] * WIDTH + channels[None, :]
    mask = (tokens[:, None] < end) & (channels[None, :] < WIDTH)
    tl.store(pointers, (grad * HEAD_SHARE).to(grad_keys_ptr.dtype.element_ty), mask=mask)
