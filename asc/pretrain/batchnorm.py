"""Batch norm over the batch of all processes together, on any device.

PyTorch's own ``SyncBatchNorm`` refuses CPU tensors; this one is built on the all-reduce that every backend has. Shape
letters: B rows of this process, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from asc.distributed import several_processes


class SyncedBatchNorm(nn.BatchNorm1d):
    """``nn.BatchNorm1d`` whose statistics are those of all processes' rows; with one process it is just that."""

    def forward(self, rows_BC: Tensor) -> Tensor:
        """Normalised rows."""
        if not (self.training and several_processes()):
            return super().forward(rows_BC)
        # Statistics of half-precision rows would lose digits.
        rows_BC = rows_BC.to(torch.promote_types(rows_BC.dtype, torch.float32))
        count = all_reduce(rows_BC.new_tensor(float(rows_BC.shape[0])))
        mean_C = all_reduce(rows_BC.sum(0)) / count
        centred_BC = rows_BC - mean_C
        # Two passes, as the mean of squares minus the squared mean cancels.
        variance_C = all_reduce(centred_BC.square().sum(0)) / count
        self._remember(mean_C.detach(), variance_C.detach(), count)
        normed_BC: Tensor = centred_BC * torch.rsqrt(variance_C + self.eps)
        return normed_BC * self.weight + self.bias if self.affine else normed_BC

    @torch.no_grad()
    def _remember(self, mean_C: Tensor, variance_C: Tensor, count: Tensor) -> None:
        if not self.track_running_stats:
            return
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean_C, self.momentum)
        # PyTorch normalises by the biased variance but remembers the unbiased one.
        self.running_var.lerp_(variance_C * count / (count - 1), self.momentum)
