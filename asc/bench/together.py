"""Cells that are prepared at the same time, by a process each, and timed one after another.

Compiling takes most of the time of a cell of networks. It is work for the host's other cores, and changes no number as
long as nobody else is at work while a cell is timed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import NamedTuple

import torch

from asc.bench.cells import Cell, Setup, run_cell, write_cell

# The compiler starts as many processes of its own as this says, for each of ours.
_COMPILERS = "TORCHINDUCTOR_COMPILE_THREADS"


class _Child(NamedTuple):
    """A process that prepares a cell, says so, and waits for its turn."""

    name: str
    process: BaseProcess
    ready: Event
    turn: Event

    @property
    def is_preparing(self) -> bool:
        """Whether it is still at it; one that has ended has nothing to time, or failed."""
        return self.process.is_alive() and not self.ready.is_set()


def measure_together(jobs: Sequence[tuple[Cell, Setup]], out: Path) -> Iterator[tuple[str, int | None]]:
    """Measure cells and write them; yields the name of each, and its process' exit code, as soon as it has ended."""
    threads = max(1, (os.cpu_count() or 1) // len(jobs))
    children: list[_Child] = []
    try:
        with _few_compilers(threads):
            children.extend(_start(cell, setup, out, threads) for cell, setup in jobs)
        while any(child.is_preparing for child in children):
            time.sleep(0.05)
        for child in children:
            child.turn.set()
            # Until it is gone: it takes the device and the host a while to clear up.
            child.process.join()
            yield child.name, child.process.exitcode
    finally:
        for child in children:
            child.process.kill()


def _start(cell: Cell, setup: Setup, out: Path, threads: int) -> _Child:
    context = multiprocessing.get_context("spawn")  # a GPU cannot be shared with a fork
    ready, turn = context.Event(), context.Event()
    process = context.Process(target=_prepare_and_measure, args=(cell, setup, out, threads, ready, turn))
    process.start()
    return _Child(cell.name, process, ready, turn)


def _prepare_and_measure(cell: Cell, setup: Setup, out: Path, threads: int, ready: Event, turn: Event) -> None:
    # Ctrl-C reaches all processes; the first of them ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)

    def wait_for_turn() -> None:
        if setup.device.type == "cuda":
            torch.cuda.synchronize(setup.device)
            torch.cuda.empty_cache()
        ready.set()
        parent = multiprocessing.parent_process()
        while not turn.wait(1.0):
            if parent is not None and not parent.is_alive():
                os._exit(1)

    write_cell(out, run_cell(cell, replace(setup, before_timing=wait_for_turn)))


@contextmanager
def _few_compilers(threads: int) -> Iterator[None]:
    before = os.environ.get(_COMPILERS)
    os.environ.setdefault(_COMPILERS, str(threads))
    try:
        yield
    finally:
        if before is None:
            del os.environ[_COMPILERS]
