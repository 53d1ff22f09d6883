"""Launching Triton kernels at little cost to the host.

Triton binds, specialises and looks up its arguments anew at every call, which takes the host longer than most of our
kernels take the device. Here that is done once for each set of constants and types; later calls hand over bare
addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources  # type: ignore[import-untyped]

from asc.kernels import interpreted

_ALIGNMENT = 16  # bytes; Triton compiles other code for addresses that are no multiple of it
_INTERPRETED = interpreted()  # like Triton, which decides when it is imported
_MOST_IMAGES = 65535  # of a launch: CUDA's limit for all dimensions of a grid but the first
_compiled: dict[tuple[Any, ...], Any] = {}


def cdiv(total: int, part: int) -> int:
    """How many parts cover the total. Triton's function of this name costs the host a microsecond."""
    return -(-total // part)


def power_of_2(number: int) -> int:
    """The smallest power of 2 that is no smaller than the number."""
    return 1 << (number - 1).bit_length()


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: Sequence[Tensor],
    numbers: tuple[int, ...] = (),
    constants: tuple[Any, ...] = (),
    warps: int = 4,
    stages: int = 3,
) -> None:
    """Run a kernel whose parameters are pointers, integers that it does not specialise on, and constants.

    The numbers may change from call to call without anything being compiled again.
    """
    if grid[1] > _MOST_IMAGES or grid[2] > _MOST_IMAGES:
        raise ValueError(f"a batch may have {_MOST_IMAGES:,} images on a GPU, got {max(grid[1:]):,}; split it")
    device = common_device(tensors)
    if _INTERPRETED:
        _launch_by_triton(kernel, grid, tensors, numbers, constants, warps, stages)
    elif device == torch._C._cuda_getDevice():
        _launch_there(device, kernel, grid, tensors, numbers, constants, warps, stages)
    else:
        # Triton launches on the current device, wherever the tensors are.
        with torch.cuda.device(device):
            _launch_there(device, kernel, grid, tensors, numbers, constants, warps, stages)


def common_device(tensors: Sequence[Tensor]) -> int:
    """The number of the GPU that holds all tensors, -1 for the CPU.

    A kernel only sees addresses: one of another device would be read as if it were its own.
    """
    device = tensors[0].get_device()
    for tensor in tensors:
        if tensor.get_device() != device:
            places = ", ".join(dict.fromkeys(str(tensor.device) for tensor in tensors))
            raise ValueError(
                f"tensors of one call lie on several devices ({places}); move the model and all that it is given to one"
            )
    return device


def _launch_there(
    device: int,
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: Sequence[Tensor],
    numbers: tuple[int, ...],
    constants: tuple[Any, ...],
    warps: int,
    stages: int,
) -> None:
    addresses = [tensor.data_ptr() for tensor in tensors]
    together = 0
    for address in addresses:
        together |= address
    if together % _ALIGNMENT:
        _launch_by_triton(kernel, grid, tensors, numbers, constants, warps, stages)
        return
    # A constant 1.0 and a constant 1 are equal as keys but not as code; no kernel of ours is given both.
    key = (id(kernel), device, constants, warps, stages, *[tensor.dtype for tensor in tensors])
    found = _compiled.get(key)
    if found is None:
        _compiled[key] = _launch_by_triton(kernel, grid, tensors, numbers, constants, warps, stages)
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    found.run(*grid, stream, found.function, found.packed_metadata, None, None, None, *addresses, *numbers, *constants)


def _launch_by_triton(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: Sequence[Tensor],
    numbers: tuple[int, ...],
    constants: tuple[Any, ...],
    warps: int,
    stages: int,
) -> Any:
    while True:
        try:
            return kernel[grid](*tensors, *numbers, *constants, num_warps=warps, num_stages=stages)
        except OutOfResources:
            # Stages were chosen on a GPU with 227 KB of shared memory for a program, others have 99. With fewer stages
            # less is loaded ahead; the result is the same.
            if stages == 1:
                raise
            stages -= 1
