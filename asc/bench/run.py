"""The command: measure the cells that are missing, then report on all there are.

asc bench --out OUT [--only components step-train-tiny*] [--minutes 9]
python -m asc.bench.run ...        the same where only PyTorch and its friends are installed
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import get_args

import torch
from tqdm import tqdm

from asc.bench import components, cpu, growth, layer, networks
from asc.bench.bars import verdicts
from asc.bench.cells import (
    CELLS,
    Cell,
    Group,
    Setup,
    is_done,
    networks_of,
    read_cells,
    run_cell,
    take_over,
    write_cell,
)
from asc.bench.contest import EAGER
from asc.bench.inputs import Source
from asc.bench.report import TABLE_FILE, write_report
from asc.bench.together import measure_together
from asc.settings import run_command
from asc.tasks.images import image_files

# Their cells have much to prepare.
_OF_NETWORKS: tuple[Group, ...] = ("step", "inference", "memory")


@dataclass(frozen=True)
class BenchSettings:
    """Measure how fast superpixels are next to their peers, in cells that can be run in any order and place."""

    out: Path = Path("runs/bench")
    """Folder of the cells and of the report; cells that lie there are not measured again."""
    only: tuple[str, ...] = ()
    """Groups (components, layer, step, inference, memory, growth, cpu) or names of cells, * for any part of a name;
    none: all."""
    again: bool = False
    """Whether cells that are there already are measured again."""
    merge: tuple[Path, ...] = ()
    """Folders of other runs whose cells are taken over first."""
    minutes: float | None = None
    """No cell is begun after so long; 0 only makes the report."""
    quick: bool = False
    """Whether to try everything at tiny sizes, on any machine; the numbers mean nothing."""
    device: str = "auto"
    """``auto``, ``cuda`` or ``cpu``."""
    compile: bool = True
    """Whether networks that ``torch.compile`` makes take part; they take most of the time. Never with ``quick``."""
    networks: tuple[str, ...] = ()
    """Networks that take part beside the superpixels, of plain ViT, timm, pairs (ours) and Token Merging; none named:
    all. Cells that lack one of them are measured again, with those that they have."""
    images: Path | None = None
    """Folder of images for all that networks see; none: embedded scenes, whose numbers of superpixels differ more than
    those of photographs. Cells of other images are measured again: better take another ``out``."""
    encoder: str | None = None
    """Encoder whose keys are those of kind ``network`` in the groups components and cpu: a run, or what ``asc eval
    --checkpoint`` takes, with heads of 64 channels; none: an untrained network. Other cells do not depend on it."""
    memory: float = 0.4
    """Largest share of the GPU's memory that a network may need; decides the batch."""
    seconds: float = 20.0
    """Time for one measurement, about."""
    together: int = 1
    """So many cells of steps, inference and memory are prepared at the same time, by a process each, and timed one
    after another: compiling takes most of their time, and is work for other cores. All of them must fit on the GPU."""
    seed: int = 0
    """Start of all random draws."""


def run_bench(settings: BenchSettings) -> Path:
    """Run the command.

    Returns:
        The file of tables.
    """
    setup, wanted = _setup(settings), _wanted(settings)
    settings.out.mkdir(parents=True, exist_ok=True)
    for folder in settings.merge:
        others = read_cells(folder)
        if not others:
            raise ValueError(f"merge: there are no cells in {folder / CELLS}; give the folder of another run")
        take_over(settings.out, others)
    _measure_missing(wanted, setup, settings)
    write_report(settings.out)
    passed = [verdict.passed for verdict in verdicts(read_cells(settings.out))]
    print(f"{passed.count(True)} bars passed, {passed.count(False)} failed, {passed.count(None)} not measured")
    print(f"report: {settings.out / TABLE_FILE}")
    return settings.out / TABLE_FILE


def all_cells(quick: bool) -> list[Cell]:
    """Every cell there is, in the order in which they are run."""
    return [
        *components.cells(quick),
        *layer.cells(quick),
        *growth.cells(quick),
        *cpu.cells(quick),
        *networks.step_cells(quick),
        *networks.inference_cells(quick),
        *networks.memory_cells(quick),
    ]


def _wanted(settings: BenchSettings) -> list[Cell]:
    cells = all_cells(settings.quick)
    for word in settings.only:
        if not any(_is_meant(word, cell) for cell in cells):
            groups = ", ".join(get_args(Group))
            raise ValueError(
                f"only: {word!r} is neither a group ({groups}) nor the name of a cell such as {cells[0].name}"
            )
    return [cell for cell in cells if not settings.only or any(_is_meant(word, cell) for word in settings.only)]


def _is_meant(word: str, cell: Cell) -> bool:
    return word == cell.group or fnmatchcase(cell.name, word)


def _setup(settings: BenchSettings) -> Setup:
    if settings.device not in ("auto", "cuda", "cpu"):
        raise ValueError(f"device must be auto, cuda or cpu, not {settings.device!r}")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but PyTorch finds no GPU; use --device cpu or auto")
    if settings.together < 1:
        raise ValueError(f"together must be at least 1, got {settings.together}")
    if not 0 < settings.memory <= 1:
        raise ValueError(f"memory must lie in (0, 1], got {settings.memory}")
    kind = settings.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    if unknown := sorted(set(settings.networks) - set(EAGER)):
        raise ValueError(f"networks: there is no {', '.join(unknown)}; choose from {', '.join(EAGER)}")
    if settings.images is not None:
        image_files(settings.images)
    source = Source(settings.images, settings.encoder)
    if settings.encoder is not None:
        if settings.quick:
            raise ValueError("encoder: not with quick, whose keys are narrower than those of any encoder")
        source.network(cpu.WIDTH, side=1)
    setup = Setup(
        device,
        settings.seed,
        seconds=settings.seconds,
        compiled=settings.compile,
        memory_share=settings.memory,
        networks=settings.networks,
        source=source,
    )
    return replace(setup, rounds=1, seconds=0.5, compiled=False) if settings.quick else setup


def _measure_missing(wanted: Sequence[Cell], setup: Setup, settings: BenchSettings) -> None:
    there = {} if settings.again else read_cells(settings.out)
    missing = [cell for cell in wanted if not is_done(there.get(cell.name), cell, setup)]
    begun = time.monotonic()
    with tqdm(total=len(missing), unit="cell", disable=not missing) as bar:
        for row in _rows(missing, settings.together):
            if settings.minutes is not None and time.monotonic() - begun >= 60 * settings.minutes:
                left = len(missing) - bar.n
                bar.write(f"time is over: {left} cells are left; the same command goes on with them")
                break
            bar.set_description(f"{row[0].name} and {len(row) - 1} more" if row[1:] else row[0].name)
            jobs = [(cell, replace(setup, networks=networks_of(there.get(cell.name), setup))) for cell in row]
            for name, code in measure(jobs, settings.out):
                if trouble := _trouble(name, code, settings.out):
                    bar.write(trouble)
                bar.update()
            _check_device(setup.device)


def _rows(cells: Sequence[Cell], together: int) -> Iterator[list[Cell]]:
    """Cells that are measured alone, and those of networks in rows that are prepared together."""
    row: list[Cell] = []
    for cell in cells:
        if cell.group not in _OF_NETWORKS:
            yield [cell]
            continue
        row.append(cell)
        if len(row) == together:
            yield row
            row = []
    if row:
        yield row


def measure(jobs: Sequence[tuple[Cell, Setup]], out: Path) -> Iterator[tuple[str, int | None]]:
    """Measure cells, several of them together; yields each one's name and its process' exit code."""
    alone = list(jobs) if len(jobs) == 1 else []
    for name, code in () if alone else measure_together(jobs, out):
        if not code and read_cells(out)[name]["status"] == "out of memory":
            # It may be the others that took the room.
            alone += [job for job in jobs if job[0].name == name]
        else:
            yield name, code
    for cell, setup in alone:
        write_cell(out, run_cell(cell, setup))
        yield cell.name, 0


def _trouble(name: str, code: int | None, out: Path) -> str:
    """What there is to say of a cell that has ended, if anything."""
    if code:
        return f"{name}: its process ended with exit code {code}; the same command tries it again"
    answer = read_cells(out)[name]
    return "" if answer["status"] == "measured" else f"{name}: {answer['status']}: {answer['reason']}"


def _check_device(device: torch.device) -> None:
    """A kernel that failed badly takes the whole process along: later cells would fail for no reason of their own."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise ValueError(
                f"the GPU does not answer after the last cell ({error}); run the same command again"
            ) from error


def main(words: Sequence[str] | None = None) -> int:
    """Run the command without ``asc.cli``; returns the exit code."""
    return run_command(BenchSettings, run_bench, "python -m asc.bench.run", sys.argv[1:] if words is None else words)


if __name__ == "__main__":
    sys.exit(main())
