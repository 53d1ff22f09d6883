"""What every training loads its batches with."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
from functools import lru_cache, partial
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any, NamedTuple, TypeVar

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
        worker_init_fn=partial(_follow_the_trainer, os.getpid(), _ends(os.getpid())),
        # It draws a seed for its workers, who need none; from the global generator that would change later draws.
        generator=torch.Generator(),
    )


@lru_cache(1)
def _ends(process: int) -> Any:
    """A byte that workers share with the process that starts them: 1 once that process is about to end."""
    ends = multiprocessing.RawValue("b", 0)
    # Done right before multiprocessing sends the workers a signal to end, and waits until they have.
    Finalize(None, setattr, (ends, "value", 1), exitpriority=0)
    return ends


def _follow_the_trainer(trainer: int, ends: Any, worker: int) -> None:
    _end_with(trainer)
    _leave_signals_to_the_trainer(ends)


def _end_with(trainer: int) -> None:
    """End this process when that one is gone, even if it was killed.

    PyTorch watches a worker's parent, which is not the trainer where a server forks the workers (the default from
    Python 3.14 on): they would stay for ever, with all their memory.
    """
    if hasattr(os, "pidfd_open"):
        alive = os.pidfd_open(trainer)
        threading.Thread(target=lambda: (select.select([alive], [], []), os._exit(1)), daemon=True).start()


def _leave_signals_to_the_trainer(ends: Any) -> None:
    # A scheduler signals all processes of a job at once. A worker that died of it would take the run down
    # before the trainer has saved it; without the trainer, workers end by themselves.
    def end_with_the_trainer(number: int, frame: FrameType | None) -> None:
        # An error that nobody caught keeps the loader alive in its traceback: then this signal is all that a worker
        # hears of the end, and the trainer would wait for ever for one that ignores it.
        if ends.value:
            os._exit(0)

    signal.signal(signal.SIGTERM, end_with_the_trainer)
    for number in (signal.SIGINT, signal.SIGUSR1):
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
