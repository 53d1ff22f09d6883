"""Run by test_pretrain.py in two processes with half the batch each."""

import sys
from pathlib import Path

import pretrain_runs
import torch

from asc.pretrain import run
from asc.pretrain.run import PretrainTask, pretrain


class _Watched(PretrainTask):
    """Keeps the thresholds of every step."""

    def after_step(self, progress: float) -> None:
        super().after_step(progress)
        self.thresholds = [*getattr(self, "thresholds", []), self._thetas()]

    def _thetas(self) -> torch.Tensor:
        return torch.stack([layer.threshold.theta().detach() for layer in self.siamese.encoder.superpixel_layers])


def main(out: Path) -> None:
    pretrain(pretrain_runs.tiny(out / "plain", plain=True, train={"steps": 20, "precision": "64-true"}))
    tasks: list[_Watched] = []
    run.PretrainTask = lambda *arguments: tasks.append(_Watched(*arguments)) or tasks[0]  # type: ignore
    pretrain(pretrain_runs.tiny(out / "superpixels", train={"steps": 5}))
    torch.save(torch.stack(tasks[0].thresholds), out / f"thresholds_{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
