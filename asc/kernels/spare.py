"""Rows that belong to no image: where a batch has room for more tokens than it holds, they must stay zero.

Layers that work token by token do not know which rows are spare. Zeros stay finite in them on the way forward, and
zero gradients stay zero on the way back, so spare rows never reach a weight. Shape letters: see ``asc.tokens``.
"""

# Kernels are compiled by Triton from their syntax: they have no Python types to check.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asc.kernels.launch import cdiv, launch

_PROGRAMS = 128
_ENTRIES = 4096


def clear_spare(rows_TF: Tensor, cu_seqlens: Tensor) -> None:
    """Write zeros into all rows behind the last image's; the tensor is contiguous."""
    total = rows_TF.shape[0]
    width = rows_TF.numel() // max(total, 1)
    batch = cu_seqlens.shape[0] - 1
    programs = min(_PROGRAMS, cdiv(rows_TF.numel(), _ENTRIES))
    if programs:
        launch(_clear, (programs, 1, 1), (rows_TF, cu_seqlens), (batch, total, width), (_ENTRIES,))


def last_border(cu_seqlens: Tensor | None, stand_in: Tensor) -> tuple[Tensor, int]:
    """Arguments of a kernel that asks ``existing``; without borders all rows exist, and the stand-in is never read."""
    return (stand_in, -1) if cu_seqlens is None else (cu_seqlens, cu_seqlens.shape[0] - 1)


@triton.jit
def existing(borders_ptr, rows, batch):
    """How many of the rows belong to an image; all if there are no borders."""
    count = rows
    if batch >= 0:
        count = tl.load(borders_ptr + batch).to(tl.int32)
    return count


@triton.jit(do_not_specialize=["batch", "total", "width"])
def _clear(rows_ptr, borders_ptr, batch, total, width, ENTRIES: tl.constexpr):
    first = tl.load(borders_ptr + batch).to(tl.int64) * width
    end = total.to(tl.int64) * width
    step = tl.num_programs(0) * ENTRIES
    for start in range(first + tl.program_id(0) * ENTRIES, end, step):
        places = start + tl.arange(0, ENTRIES)
        tl.store(rows_ptr + places, tl.zeros((ENTRIES,), dtype=rows_ptr.dtype.element_ty), mask=places < end)
