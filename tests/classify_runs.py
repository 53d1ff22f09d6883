"""Trainings of classifiers in processes that can be killed in the middle of one.

Apart from the tests, so that such a process need not import all that they do.
"""

from __future__ import annotations

import threading
from typing import Any

import pretrain_runs
import torch
from tqdm import tqdm

from asc.tasks.classify.run import TrainedConfig, evaluate


def run_in_child(config: TrainedConfig) -> None:
    torch.set_num_threads(1)
    # Its own lock: tqdm's is shared with all that are forked from the server, and this one may be killed holding it.
    tqdm.set_lock(threading.RLock())
    evaluate(config)


def start(config: TrainedConfig) -> Any:
    """A process that trains a classifier and judges it."""
    process = pretrain_runs.PROCESSES.Process(target=run_in_child, args=(config,))
    process.start()
    return process
