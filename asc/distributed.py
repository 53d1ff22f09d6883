"""What the processes of one run must agree on."""

from __future__ import annotations

import torch
from torch import Tensor


def summed_over_processes(counts: Tensor) -> Tensor:
    """The element-wise sum over all processes of the run; the tensor itself where there is only one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        counts = counts.clone()
        torch.distributed.all_reduce(counts)
    return counts
