"""Run by test_siamese.py in two processes: batch norm of unequal parts of one batch."""

import sys
from pathlib import Path

import torch

from asc.pretrain.batchnorm import SyncedBatchNorm


def main(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(0)
    own = slice(0, 13) if rank == 0 else slice(13, 20)
    rows = torch.randn(20, 5, generator=generator).mul(3).add(100)[own].requires_grad_()
    weight = torch.randn(20, 5, generator=generator)[own]
    norm = SyncedBatchNorm(5)
    normed = norm(rows)
    (normed * weight).sum().backward()
    result = {"normed": normed.detach(), "gradient": rows.grad, "weight_gradient": norm.weight.grad}
    result |= {"running_mean": norm.running_mean, "running_var": norm.running_var}
    torch.save(result, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
