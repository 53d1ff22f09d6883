"""What every training loads its batches with."""

from __future__ import annotations

import signal
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from asc.data.sampling import BatchPlan

Batch = TypeVar("Batch")


def make_loader(dataset: Dataset[Batch], plan: BatchPlan, workers: int, pin: bool) -> DataLoader[Batch]:
    """The batches of the plan, one after another; the dataset makes a whole batch from a list of positions."""
    return DataLoader(
        dataset,
        batch_size=None,  # the plan names the samples of every batch
        sampler=plan,
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=4 if workers else None,
        worker_init_fn=_leave_signals_to_the_trainer,
        # It draws a seed for its workers, who need none; from the global generator that would change later draws.
        generator=torch.Generator(),
    )


def _leave_signals_to_the_trainer(worker: int) -> None:
    # A scheduler signals all processes of a job at once. A worker that died of it would take the run down
    # before the trainer has saved it; without the trainer, workers end by themselves.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


class Place(NamedTuple):
    """One sample of a shuffled order."""

    sample: int
    """Its number in the data."""
    epoch: int
    """Rounds through the data before it."""


class Shuffled:
    """The endless order of the samples of one set, shuffled anew in every epoch; depends on seed and epoch alone."""

    def __init__(self, count: int, seed: int) -> None:
        if count < 1:
            raise ValueError("there is no sample to learn from")
        self.count = count
        self.seed = seed

    def place(self, position: int) -> Place:
        """The sample at a position, counted from the start of the training."""
        epoch, rank = divmod(position, self.count)
        return Place(int(_permutation(self.count, self.seed, epoch)[rank]), epoch)


@lru_cache(8)
def _permutation(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(count)
