"""What the processes of one run must agree on."""

from __future__ import annotations

import torch
import torch.distributed
from torch import Tensor


def several_processes() -> bool:
    """Whether this process is one of several of the same run."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return ready and torch.distributed.get_world_size() > 1


def summed_over_processes(counts: Tensor) -> Tensor:
    """The element-wise sum over all processes of the run; the tensor itself where there is only one."""
    if several_processes():
        counts = counts.clone()
        torch.distributed.all_reduce(counts)
    return counts


def gathered_from_processes(rows: Tensor) -> tuple[Tensor, int]:
    """The rows of all processes one after another, and where this process' rows begin; no gradient.

    Every process must give equally many.
    """
    if not several_processes():
        return rows, 0
    gathered = [torch.empty_like(rows) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(gathered, rows.contiguous())
    return torch.cat(gathered), torch.distributed.get_rank() * len(rows)
