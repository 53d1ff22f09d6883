"""Compiled kernels. Each stands beside a plain reference in the room that uses it, and is tested against it.

Triton is optional: its modules are imported only when ``kernels_take`` says that they can run.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

# What the kernels compute with; anything else (fp64 above all) keeps to the plain paths.
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Compute capability from which GPUs multiply tiles as the kernels want them (Ampere). Older ones would keep half of
# each tile in slow memory, and not all kernels fit there.
_OLDEST = (8, 0)


def kernels_take(*tensors: Tensor) -> bool:
    """Whether the Triton kernels can work on all of these: on a GPU that has them, in fp32 or half precision."""
    return all(_fits(tensor) for tensor in tensors) and triton_is_installed()


def _fits(tensor: Tensor) -> bool:
    if tensor.is_cuda:
        on_device = gpu_has_kernels(tensor.get_device())
    else:
        on_device = tensor.device.type == "cpu" and interpreted()
    return on_device and (tensor.dtype in _FLOATS or not tensor.is_floating_point()) and tensor.numel() > 0


def interpreted() -> bool:
    """Whether Triton runs in Python on the CPU, which is how kernels are tested without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def gpu_has_kernels(device: int) -> bool:
    """Whether the kernels were made for that GPU."""
    return torch.cuda.get_device_capability(device) >= _OLDEST


@cache
def triton_is_installed() -> bool:
    """Whether there is anything to run kernels with.

    With AMD's GPUs there is not: their warps have 64 threads, and the kernels count on 32 (``components.join``).
    """
    return importlib.util.find_spec("triton") is not None and torch.version.hip is None
