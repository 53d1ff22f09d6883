"""Linear layers on a GPU in half precision whose way back reads the tokens less often, and the GELU between them.

PyTorch's own way back reads the gradient of a layer's output once more for the sum that is the bias's gradient. Here
that sum is taken where the gradient is made or, where a matrix product makes it, by a kernel that reads it as fast as
memory allows. The GELU's values are not kept for the way back but made again, by the kernel of its slope, which reads
the hidden values anyway. It costs little arithmetic, so that both are limited by memory alone: see ``_normal``.

The kernels are operators of PyTorch, ``asc::gelu``, ``asc::gelu_backward`` and ``asc::column_sums``, since compiled
networks are made of those. Shape letters: see ``asc.tokens``; H are hidden channels, F channels of a layer's output, P
programs.
"""

# Kernels are compiled by Triton from their syntax: they have no Python types to check.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped, no-any-return"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from asc.kernels import interpreted
from asc.kernels.launch import cdiv, launch, power_of_2

# Numbers of a tile: 8, which are 16 bytes, for each of 128 threads. Programs walk over the rows, so each leaves one
# sum behind: as many as a large GPU has at work at once, by the registers that the way back needs. Measured with
# ``benchmarks/kernels.py --only feed-forward``. The interpreter takes about as long for a large tile as for a small.
_TILE, _PROGRAMS, _WARPS = (1 << 14, 4, 4) if interpreted() else (1024, 1056, 4)
_BLOCKS = (256, 128, 64)  # columns of a tile, if they divide all columns
_DEVICES = ("cuda", "cpu")  # on a CPU interpreted


def linear(values_TC: Tensor, weight_FC: Tensor, bias_F: Tensor) -> Tensor:
    """``torch.nn.functional.linear`` of values in half precision."""
    dtype = values_TC.dtype
    out_TF: Tensor = _Linear.apply(values_TC, weight_FC.to(dtype), bias_F.to(dtype))
    return out_TF


def gelu_linear(hidden_TH: Tensor, hidden_bias_H: Tensor, weight_FH: Tensor, bias_F: Tensor) -> Tensor:
    """``linear(gelu(hidden_TH + hidden_bias_H), weight_FH, bias_F)`` of values in half precision."""
    dtype = hidden_TH.dtype
    out_TF: Tensor = _GeluLinear.apply(hidden_TH, hidden_bias_H, weight_FH.to(dtype), bias_F.to(dtype))
    return out_TF


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_TC: Tensor, weight_FC: Tensor, bias_F: Tensor) -> Tensor:
        ctx.save_for_backward(values_TC, weight_FC)
        return torch.addmm(bias_F, values_TC, weight_FC.t())

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor, ...]:
        values_TC, weight_FC = ctx.saved_tensors
        grad_TF = grad_TF.contiguous()
        return grad_TF @ weight_FC, grad_TF.t() @ values_TC, _summed(grad_TF)


class _GeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, hidden_bias_H: Tensor, weight_FH: Tensor, bias_F: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_TH, hidden_bias_H, weight_FH)
        active_TH = torch.ops.asc.gelu(hidden_TH, hidden_bias_H)
        return torch.addmm(bias_F, active_TH, weight_FH.t())

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor, ...]:
        hidden_TH, hidden_bias_H, weight_FH = ctx.saved_tensors
        grad_TF = grad_TF.contiguous()
        grad_active_TH = grad_TF @ weight_FH
        active_TH, grad_TH, sums_PH = torch.ops.asc.gelu_backward(hidden_TH, hidden_bias_H, grad_active_TH)
        return grad_TH, sums_PH.sum(0).to(hidden_bias_H.dtype), grad_TF.t() @ active_TH, _summed(grad_TF)


def _summed(rows_TF: Tensor) -> Tensor:
    sums_F: Tensor = torch.ops.asc.column_sums(rows_TF).sum(0).to(rows_TF.dtype)
    return sums_F


# --- Operators --------------------------------------------------------------------------------------------

torch.library.define("asc::gelu", "(Tensor hidden, Tensor bias) -> Tensor")
torch.library.define("asc::gelu_backward", "(Tensor hidden, Tensor bias, Tensor grad) -> (Tensor, Tensor, Tensor)")
torch.library.define("asc::column_sums", "(Tensor rows) -> Tensor")


def _columns(width: int) -> int:
    """Columns of a tile."""
    return next((block for block in _BLOCKS if width % block == 0), min(_BLOCKS[0], power_of_2(width)))


def _programs(width: int) -> int:
    """Programs that share the rows."""
    return cdiv(_PROGRAMS, cdiv(width, _columns(width)))


def _run(kernel: Any, tensors: tuple[Tensor, ...], programs: int, tiles: int = 1) -> None:
    """``tiles``: how many a program takes at once."""
    rows, width = tensors[0].shape
    block = _columns(width)
    constants = width, block, tiles * _TILE // block, width % block == 0
    launch(kernel, (programs, cdiv(width, block), 1), tensors, (rows,), constants, _WARPS)


def _gelu_op(hidden_TH: Tensor, bias_H: Tensor) -> Tensor:
    hidden_TH = hidden_TH.contiguous()
    active_TH = torch.empty_like(hidden_TH)
    # Half of the registers, so twice the programs are at work.
    _run(_gelu, (hidden_TH, bias_H.contiguous(), active_TH), 2 * _programs(hidden_TH.shape[1]))
    return active_TH


def _gelu_backward_op(hidden_TH: Tensor, bias_H: Tensor, grad_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hidden_TH, grad_TH = hidden_TH.contiguous(), grad_TH.contiguous()
    active_TH, grad_hidden_TH = torch.empty_like(hidden_TH), torch.empty_like(grad_TH)
    programs = _programs(hidden_TH.shape[1])
    sums_PH = hidden_TH.new_empty(programs, hidden_TH.shape[1], dtype=torch.float32)
    _run(_gelu_backward, (hidden_TH, bias_H.contiguous(), grad_TH, active_TH, grad_hidden_TH, sums_PH), programs)
    return active_TH, grad_hidden_TH, sums_PH


def _column_sums_op(rows_TF: Tensor) -> Tensor:
    rows_TF = rows_TF.contiguous()
    programs = _programs(rows_TF.shape[1])
    sums_PF = rows_TF.new_empty(programs, rows_TF.shape[1], dtype=torch.float32)
    _run(_column_sums, (rows_TF, sums_PF), programs, tiles=2)
    return sums_PF


def _gelu_fake(hidden_TH: Tensor, bias_H: Tensor) -> Tensor:
    return torch.empty_like(hidden_TH, memory_format=torch.contiguous_format)


def _gelu_backward_fake(hidden_TH: Tensor, bias_H: Tensor, grad_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    active_TH, grad_hidden_TH = _gelu_fake(hidden_TH, bias_H), _gelu_fake(grad_TH, bias_H)
    return active_TH, grad_hidden_TH, _column_sums_fake(hidden_TH)


def _column_sums_fake(rows_TF: Tensor) -> Tensor:
    width = rows_TF.shape[1]
    return rows_TF.new_empty(_programs(width), width, dtype=torch.float32)


torch.library.impl("asc::gelu", _DEVICES, _gelu_op)
torch.library.impl("asc::gelu_backward", _DEVICES, _gelu_backward_op)
torch.library.impl("asc::column_sums", _DEVICES, _column_sums_op)
torch.library.register_fake("asc::gelu", _gelu_fake)
torch.library.register_fake("asc::gelu_backward", _gelu_backward_fake)
torch.library.register_fake("asc::column_sums", _column_sums_fake)


# --- Kernels ----------------------------------------------------------------------------------------------


@triton.jit
def _normal(x):
    """Φ(x), and exp(-x² / 2).

    Formula 26.2.17 of Abramowitz and Stegun, which is off by 7.5e-8 at most: half precision cannot tell. It takes half
    of the instructions of the error function, with which these kernels would wait for arithmetic, and shares the
    exponential with the slope. The square of a reciprocal root is the cheapest reciprocal.
    """
    root = tl.rsqrt(1.0 + 0.2316419 * tl.abs(x))
    t = root * root
    bell = tl.exp2(x * x * -0.7213475204444817)
    # The coefficients are divided by √2π.
    tail = t * (0.12741479 + t * (-0.14224836 + t * (0.71070687 + t * (-0.72657601 + t * 0.53070271)))) * bell
    return tl.where(x < 0, tail, 1.0 - tail), bell


@triton.jit
def _place(first, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """Where the numbers of a tile lie, and which of them exist."""
    row = first + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    mask = (row < rows)[:, None]
    if not EVEN:
        mask = mask & (column < WIDTH)[None, :]
    return places, mask


@triton.jit
def _columns_of(vector_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return tl.load(vector_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _store_sums(sums_ptr, total, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums_ptr + tl.program_id(0) * WIDTH + column, tl.sum(total, axis=0), mask=column < WIDTH)


@triton.jit(do_not_specialize=["rows"])
def _gelu(
    hidden_ptr,
    bias_ptr,
    active_ptr,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
):
    bias = _columns_of(bias_ptr, WIDTH, BLOCK)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        places, mask = _place(first, rows, WIDTH, BLOCK, ROWS, EVEN)
        x = tl.load(hidden_ptr + places, mask=mask, other=0.0).to(tl.float32) + bias
        below, _ = _normal(x)
        tl.store(active_ptr + places, (x * below).to(active_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _gelu_backward(
    hidden_ptr,
    bias_ptr,
    grad_ptr,
    active_ptr,
    grad_hidden_ptr,
    sums_ptr,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
):
    bias = _columns_of(bias_ptr, WIDTH, BLOCK)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        places, mask = _place(first, rows, WIDTH, BLOCK, ROWS, EVEN)
        x = tl.load(hidden_ptr + places, mask=mask, other=0.0).to(tl.float32) + bias
        grad = tl.load(grad_ptr + places, mask=mask, other=0.0).to(tl.float32)
        below, bell = _normal(x)
        tl.store(active_ptr + places, (x * below).to(active_ptr.dtype.element_ty), mask=mask)
        grad = grad * (below + x * (0.3989422804014327 * bell))
        tl.store(grad_hidden_ptr + places, grad.to(grad_hidden_ptr.dtype.element_ty), mask=mask)
        total += grad
    _store_sums(sums_ptr, total, WIDTH, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def _column_sums(
    rows_ptr, sums_ptr, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr
):
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        places, mask = _place(first, rows, WIDTH, BLOCK, ROWS, EVEN)
        total += tl.load(rows_ptr + places, mask=mask, other=0.0).to(tl.float32)
    _store_sums(sums_ptr, total, WIDTH, BLOCK)
