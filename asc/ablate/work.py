"""One process at work: it takes the next free run, trains it and judges its encoder, until none is left."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

import torch

from asc.ablate.cells import FAILED, FINISHED, Claim, is_finished, now, read_cell, write_cell
from asc.ablate.judge import judged
from asc.ablate.study import Run, Study
from asc.ablate.tables import Part
from asc.ablate.training import RUNS, Trained, device_name, settle, trained
from asc.report.words import versions
from asc.train import TrainingStoppedError

# The children of a process that was killed hold its lock until they notice; that takes them a few seconds.
_PATIENCE, _PAUSE = 20.0, 0.2


def missing_parts(study: Study, run: Run) -> list[Part]:
    """The cells of a run that are not finished."""
    return [part for part in run.parts if not is_finished(study.out, study.cell_name(run, part))]


def failed_since(study: Study, run: Run, begun: str) -> list[Part]:
    """The cells of a run that failed after a time; a failure of an earlier command is tried again."""
    cells = {part: read_cell(study.out, study.cell_name(run, part)) for part in run.parts}
    return [part for part, cell in cells.items() if cell and cell["status"] == FAILED and cell["when"] >= begun]


def work(study: Study, runs: Sequence[Run], begun: str, goes_on: Callable[[], bool]) -> None:
    """Make the cells of runs; what other processes are at is left to them.

    Args:
        study: What all cells have in common.
        runs: The runs, in the order in which they are taken.
        begun: When the command began.
        goes_on: Asked before every run: whether to take another one.
    """
    while goes_on():
        taken = _next_free(study, runs, begun)
        if taken is None:
            return
        run, claim = taken
        try:
            make_cells(study, run)
        finally:
            claim.release()


def _next_free(study: Study, runs: Sequence[Run], begun: str) -> tuple[Run, Claim] | None:
    end = time.monotonic() + _PATIENCE
    while True:
        dying = False
        for run in runs:
            if not _is_open(study, run, begun):
                continue
            claim = Claim(study.out, run.name)
            if not claim.held:
                dying |= claim.holder_is_dead()
            elif _is_open(study, run, begun):  # another one may have finished it just now
                return run, claim
            else:
                claim.release()
        if not dying or time.monotonic() > end:
            return None
        time.sleep(_PAUSE)


def _is_open(study: Study, run: Run, begun: str) -> bool:
    return bool(missing_parts(study, run)) and not failed_since(study, run, begun)


def make_cells(study: Study, run: Run) -> None:
    """Train a run and write its missing cells; what goes wrong becomes the answer of a cell."""
    parts = missing_parts(study, run)
    print(f"{run.short}: {', '.join(parts)}", flush=True)
    try:
        encoder = trained(study, run)
    except Exception as error:
        _raise_if_asked(error)
        for part in parts:
            _write_failure(study, run, part, "pre-training", error)
        _tidy(study)
        return
    for part in parts:
        try:
            _make_cell(study, run, part, encoder)
        except Exception as error:  # the other cells can still be made
            _raise_if_asked(error)
            _write_failure(study, run, part, part, error)
        _tidy(study)
    if not missing_parts(study, run):
        settle(study, run)


def _make_cell(study: Study, run: Run, part: Part, encoder: Trained) -> None:
    begun, name = time.monotonic(), study.cell_name(run, part)
    values, warned = judged(study, run, part, encoder.encoder, study.out / RUNS / run.name / name)
    # The curves are the same for all cells of a run.
    training = {key: value for key, value in encoder.record.items() if part == "judge" or key != "curves"}
    answer = {"status": FINISHED, "reason": None, "values": values, "training": training, "warnings": warned}
    _write(study, run, part, answer | {"seconds": time.monotonic() - begun})


def _write_failure(study: Study, run: Run, part: Part, stage: str, error: Exception) -> None:
    text = " ".join(str(error).split()) or type(error).__name__
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    reason = f"{stage}: {kind}{text}"[:500]
    print(f"{run.short}: failed: {reason}", flush=True)
    answer: dict[str, object] = {"status": FAILED, "reason": reason, "values": None, "training": None}
    _write(study, run, part, answer | {"warnings": [], "traceback": traceback.format_exc()})


def _write(study: Study, run: Run, part: Part, answer: Mapping[str, object]) -> None:
    cell = {
        "name": study.cell_name(run, part),
        "variant": run.variant,
        "stands_for": run.stands_for,
        "mode": run.mode,
        "seed": run.seed,
        "part": part,
        "protocol": study.protocol(run.mode, part)._asdict(),
    }
    settings = {
        "training": study.training(run.variant, run.mode, run.seed),
        "judging": study.judging(part, run.variant, run.seed),
    }
    place = {"device": device_name(study.base.machine), "versions": versions()}
    write_cell(study.out, cell | dict(answer) | {"when": now(), "machine": place, "settings": settings})


def _raise_if_asked(error: Exception) -> None:
    """Being told to stop is no failure of a cell."""
    if isinstance(error, TrainingStoppedError) and not error.gave_up:
        raise error


def _tidy(study: Study) -> None:
    if device_name(study.base.machine) != "cpu":
        gc.collect()
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            # A kernel that failed badly takes the whole process along: later cells would fail for no reason of theirs.
            raise ValueError(f"the GPU does not answer any more ({error}); run the same command again") from error
        torch.cuda.empty_cache()


def clean_up(study: Study, runs: Sequence[Run]) -> None:
    """Settle the runs that were finished, but whose process ended before it could."""
    for run in runs:
        if (study.out / RUNS / run.name).is_dir() and not missing_parts(study, run):
            claim = Claim(study.out, run.name)
            if claim.held:
                settle(study, run)
                claim.release()
