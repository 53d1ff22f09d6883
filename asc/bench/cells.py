"""A cell: one measurement that stands alone, and its file."""

from __future__ import annotations

import gc
import json
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from asc.bench.inputs import SCENES, Source
from asc.bench.measure import machine_record, out_of_memory
from asc.files import write_whole

Group = Literal["components", "layer", "step", "inference", "memory", "growth", "cpu"]
CELLS = "cells"
_FIELDS = ("name", "group", "settings", "status", "reason", "results", "machine", "when")


def _at_once() -> None:
    """Nobody else is at work."""


@dataclass(frozen=True)
class Setup:
    """What all cells of a run have in common."""

    device: torch.device
    """Where everything but the group ``cpu`` is measured."""
    seed: int = 0
    """Start of all random draws."""
    rounds: int = 9
    """Most rounds in which the contestants take turns."""
    seconds: float = 20.0
    """No round of a measurement begins after so long, if there were three already."""
    compiled: bool = True
    """Whether contestants that ``torch.compile`` makes take part."""
    memory_share: float = 0.4
    """Largest share of the GPU's memory that a contestant may need."""
    networks: tuple[str, ...] = ()
    """Networks that take part beside the superpixels; none named: all."""
    source: Source = SCENES
    """What networks see, and whose keys are taken."""
    before_timing: Callable[[], None] = _at_once
    """Called when all is warm and only the times are left to measure; see ``asc.bench.together``."""


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    group: Group
    name: str
    """Unique; says all that matters, and names the file."""
    settings: Mapping[str, Any]
    """The same for programs to read."""
    measure: Callable[[Setup], dict[str, Any]]
    """Does it; what it returns goes into the file."""
    needs_gpu: bool = True
    """Whether it means nothing on a CPU."""


def run_cell(cell: Cell, setup: Setup) -> dict[str, Any]:
    """Measure a cell; what goes wrong becomes part of the answer."""
    answer: dict[str, Any] = {"name": cell.name, "group": cell.group, "settings": dict(cell.settings)}
    answer |= {"status": "measured", "reason": None, "results": None}
    begun = time.perf_counter()
    if cell.needs_gpu and setup.device.type != "cuda":
        answer |= {"status": "skipped", "reason": "needs a GPU"}
    else:
        answer |= _measured(cell, setup)
    answer |= {"seconds": time.perf_counter() - begun, "when": datetime.now(UTC).isoformat(timespec="seconds")}
    answer["machine"] = machine_record(torch.device("cpu") if cell.group == "cpu" else setup.device, setup.seed)
    _tidy(setup)
    return answer


def _measured(cell: Cell, setup: Setup) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        try:
            torch.manual_seed(setup.seed)
            answer["results"] = cell.measure(setup)
        except Exception as error:  # whatever it is, the other cells can still be measured
            status = "out of memory" if out_of_memory(error) else "failed"
            answer |= {"status": status, "reason": reason_of(error), "traceback": traceback.format_exc()}
    # They belong to the numbers; on the screen they would break the progress bar.
    answer["warnings"] = list(dict.fromkeys(str(warning.message) for warning in seen))
    return answer


def reason_of(error: BaseException) -> str:
    """One line on what went wrong."""
    text = " ".join(str(error).split()) or type(error).__name__
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"{kind}{text}"[:300]


def _tidy(setup: Setup) -> None:
    if setup.compiled:
        # Compiled code is kept by shape, up to a limit that a row of cells would reach.
        torch._dynamo.reset()
    if setup.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


# --- Files ------------------------------------------------------------------------------------------------


def write_cell(folder: Path, answer: Mapping[str, Any]) -> None:
    """Keep what a cell has shown."""
    write_whole(folder / CELLS / f"{answer['name']}.json", json.dumps(answer, indent=2).encode() + b"\n")


def read_cells(folder: Path) -> dict[str, dict[str, Any]]:
    """All cells of a folder, by name."""
    cells = {}
    for file in sorted((folder / CELLS).glob("*.json")):
        try:
            answer = json.loads(file.read_text())
            missing = [field for field in _FIELDS if field not in answer]
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"{file} is no cell of asc bench ({error}); remove it to measure it again") from error
        if missing:
            raise ValueError(f"{file} is no cell of asc bench: it lacks {', '.join(missing)}; remove it")
        cells[answer["name"]] = answer
    return cells


def take_over(folder: Path, others: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the cells of another run: what was measured beats what was not, then the newest counts."""
    own = read_cells(folder)
    for name, answer in others.items():
        if name not in own or _rank(answer) > _rank(own[name]):
            write_cell(folder, answer)


def _rank(answer: Mapping[str, Any]) -> tuple[bool, bool, str]:
    return answer["status"] == "measured", answer["status"] != "skipped", answer["when"]


def is_done(answer: Mapping[str, Any] | None, cell: Cell, setup: Setup) -> bool:
    """Whether a cell need not be run.

    One that only lacked a GPU must be, as soon as there is one; so must one in which compiled networks, or some of
    those that are wanted now, did not take part, and one whose networks saw other images or were others.
    """
    if answer is None:
        return False
    if answer["status"] == "skipped":
        return cell.needs_gpu and setup.device.type != "cuda"
    if setup.compiled and lacks_compiled(answer):
        return False
    return not _lacks_networks(answer, setup) and not _has_another_source(answer, setup)


def _lacks_networks(answer: Mapping[str, Any], setup: Setup) -> bool:
    took_part = set(_took_part(answer))
    # None named, then or now, means all of them.
    return bool(took_part) and not (setup.networks and took_part.issuperset(setup.networks))


def networks_of(answer: Mapping[str, Any] | None, setup: Setup) -> tuple[str, ...]:
    """The networks to measure a cell with: those that are wanted, and those that it has, so that no number is lost."""
    if answer is None or answer["status"] != "measured" or "contestants" not in answer["results"]:
        return setup.networks
    took_part = _took_part(answer)
    return tuple(dict.fromkeys((*took_part, *setup.networks))) if took_part and setup.networks else ()


def _took_part(answer: Mapping[str, Any]) -> tuple[str, ...]:
    """The networks that a cell was measured with, beside the superpixels; none: all of them."""
    return tuple(answer["results"].get("networks", ())) if answer["status"] == "measured" else ()


def _has_another_source(answer: Mapping[str, Any], setup: Setup) -> bool:
    results = answer["results"] if answer["status"] == "measured" else {}
    return any(results.get(name, wanted) != wanted for name, wanted in setup.source.record.items())


def lacks_compiled(answer: Mapping[str, Any]) -> bool:
    """Whether a cell was measured without its compiled networks."""
    return answer["status"] == "measured" and answer["results"].get("compiled") is False
