"""Does training suffer where θ's gradient comes from every eighth row alone?

    python benchmarks/theta_training.py --data SHARDS --images DIR --seeds 0 1 2 --folds 5 --out runs/sampled

Takes the options of ``asc ablate layer`` and makes its runs of superpixels at equal steps, with one difference: rows
are sampled at every length, where the GPU's kernel samples them beyond 1,024 tokens alone, and a CPU never. To be
compared with the same runs of ``asc ablate layer``.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from asc.ablate.run import main
from asc.grouping import gradient as plain_gradient
from asc.kernels import gradient as kernel_gradient

_exact = plain_gradient.soft_gradient_everywhere


def sampled(
    grad_TC: Tensor,
    grad_votes_T: Tensor,
    features_TD: Tensor,
    theta: Tensor,
    gate: plain_gradient.Gate,
    needs_features: bool = True,
) -> tuple[Tensor | None, Tensor]:
    """What the kernel does: a row counts by its own gradients, so those of the others are left out."""
    assert not needs_features, "only the gradient of θ is sampled"
    every, lengths_B = kernel_gradient._EVERY, gate.cu_seqlens.diff()
    image_T = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
    row_T = torch.arange(len(grad_TC)) - gate.cu_seqlens[:-1][image_T]
    share_T = every * (row_T % every == image_T % every).to(grad_TC.dtype)
    return _exact(grad_TC * share_T[:, None], grad_votes_T * share_T, features_TD, theta, gate, needs_features)


if __name__ == "__main__":
    kernel_gradient._ALL_ROWS = 0
    plain_gradient.soft_gradient_everywhere = sampled
    # One worker: another process would not know of the change.
    sys.exit(main(["layer", *sys.argv[1:], "--only", "superpixels-steps-*", "--workers", "1"]))
