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


def kernels_take(*tensors: Tensor) -> bool:
    """Whether the Triton kernels can work on all of these: on a GPU, in fp32 or half precision."""
    return all(_fits(tensor) for tensor in tensors) and triton_is_installed()


def _fits(tensor: Tensor) -> bool:
    on_device = tensor.is_cuda or (tensor.device.type == "cpu" and interpreted())
    return on_device and (tensor.dtype in _FLOATS or not tensor.is_floating_point()) and tensor.numel() > 0


def interpreted() -> bool:
    """Whether Triton runs in Python on the CPU, which is how kernels are tested without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def triton_is_installed() -> bool:
    """Whether there is anything to run kernels with."""
    return importlib.util.find_spec("triton") is not None
