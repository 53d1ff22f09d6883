"""The command: make the cells that are missing, then report on all there are.

asc ablate all --out OUT --data SHARDS --images DIR --voc VOCdevkit --nyu NYU [--workers 3] [--minutes 9]
python -m asc.ablate.run all ...        the same where only PyTorch and its friends are installed
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn, get_args

import torch
from tqdm import tqdm

from asc.ablate.cells import CELLS, FAILED, Claim, now, read_cell, read_cells, take_over
from asc.ablate.report import write_report
from asc.ablate.study import Keep, Mode, Run, Study, content_of, labelled_sets
from asc.ablate.tables import TABLES, Part, TableName
from asc.ablate.training import speed_of
from asc.ablate.variants import PLAIN
from asc.ablate.work import clean_up, failed_since, missing_parts, work
from asc.data.clips import SCENES
from asc.recipes import depth as depth_recipes
from asc.recipes import detect as detect_recipes
from asc.recipes import segment as segment_recipes
from asc.report.words import plural
from asc.settings import run_command, with_words
from asc.tasks.depth.task import DepthConfig
from asc.tasks.detect.task import DetectConfig
from asc.tasks.segment.task import SegmentConfig
from asc.train import TrainingStoppedError, check_training
from asc.tune.recipe import find_recipe

LOGS = "logs"
_FAILURES = 1


@dataclass(frozen=True)
class AblateSettings:
    """Make the paper's ablation tables: train every variant with several seeds, judge the encoders, and report.

    A cell is one variant with one seed, judged by one task. Finished cells are small files that are never made again;
    whatever stops the command, the same command goes on.
    """

    table: Literal["layer", "threshold", "grouping", "aggregation", "all"]
    """Which of the paper's tables."""
    out: Path = Path("runs/ablate")
    """Folder of the cells and of the report."""
    data: tuple[str, ...] = (SCENES,)
    """Folders of videos or of prepared shards to pre-train on, or ``scenes`` for the embedded ones."""
    images: tuple[str, ...] = (SCENES,)
    """Labelled folders (train/<class>/, val/ or test/) or folders of such for kNN and linear classifiers, or
    ``scenes``."""
    voc: str = SCENES
    """The folder VOCdevkit of PASCAL VOC for segmentation and detection, or ``scenes``."""
    nyu: str = SCENES
    """NYU Depth v2 for depth, or ``scenes``."""
    folds: int = 0
    """Parts that all images of a labelled set are cut into, each of which is recognised from the others in turn: 5 is a
    good number where few images are judged. 0: the set's own parts."""
    recipe: str = "ablation"
    """Pre-training recipe that the variants change: a name (see ``asc pretrain --help``) or a file of ``asc tune``."""
    steps: int | None = None
    """Optimiser steps in place of the recipe's."""
    changes: tuple[str, ...] = ()
    """Other settings of the recipe, such as ``model.superpixels.budget=0.3``; of the dense trainings with their name in
    front: ``segment.train.steps=500``."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of every variant."""
    dense_seeds: int = 1
    """Number of seeds, the first ones, whose encoders are also judged by segmentation, detection and depth."""
    equal: Literal["steps", "time", "both"] = "steps"
    """What the variants have in common: optimiser steps, training time, or first the one and then the other."""
    train_minutes: float | None = None
    """Training time at equal time; None: as long as the plain network takes for the steps of the recipe."""
    rate_steps: int = 240
    """Steps of the short run that tells how many steps fit into a time; the first half is not counted."""
    only: tuple[str, ...] = ()
    """Variants, or runs such as ``plain-steps-0``, * for any part of a name; none: all of the table."""
    workers: int = 1
    """Processes that share the runs. More may work on the same folder, also on other computers."""
    loaders: int | None = None
    """Processes that load data, for each training; None: the cores shared out among the workers, 0 on a CPU."""
    minutes: float | None = None
    """No run is begun after so long."""
    merge: tuple[Path, ...] = ()
    """Folders of other runs of this command whose cells are taken over first."""
    encoders: Keep = "keep"
    """What is kept of a run that is judged: its encoder in half precision (``keep``), everything (``runs``) or nothing
    (``drop``)."""
    report_only: bool = False
    """Whether to only report on the cells that lie there; needs no data."""
    accelerator: str = "auto"
    """``auto``, ``cpu`` or ``cuda``."""


def run_ablate(settings: AblateSettings) -> Path:
    """Run the command; a cell that failed ends it with an error after all others are made.

    Returns:
        The file of tables.
    """
    _check(settings)
    tables: tuple[TableName, ...] = get_args(TableName) if settings.table == "all" else (settings.table,)
    for folder in settings.merge:
        take_over(settings.out, folder)
    if settings.report_only:
        if not read_cells(settings.out):
            raise ValueError(
                f"out: there are no cells in {settings.out / CELLS}; give the folder of a run of this command"
            )
        return write_report(settings.out, tables, None)
    settings.out.mkdir(parents=True, exist_ok=True)
    begun, study = now(), make_study(settings)
    runs = _wanted(study, tables, settings.only)
    broken = _make_missing(study, runs, settings, begun)
    clean_up(study, runs)
    chosen = {(mode, part): study.protocol(mode, part) for mode in get_args(Mode) for part in get_args(Part)}
    file = write_report(settings.out, tables, chosen)
    _judge_outcome(study, runs, begun, broken)
    return file


def _check(settings: AblateSettings) -> None:
    for name, least in (("workers", 1), ("dense_seeds", 0), ("rate_steps", 4)):
        if getattr(settings, name) < least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(settings, name)}")
    if settings.folds < 0 or settings.folds == 1:
        raise ValueError(f"folds must be at least 2, or 0 for the parts that a set has, got {settings.folds}")
    if not settings.seeds or len(set(settings.seeds)) < len(settings.seeds) or min(settings.seeds) < 0:
        raise ValueError(f"seeds must be different whole numbers of at least 0, got {settings.seeds}")
    if settings.train_minutes is not None and not settings.train_minutes > 0:
        raise ValueError(f"train_minutes must be positive, got {settings.train_minutes}")
    if settings.train_minutes is not None and settings.equal == "steps":
        raise ValueError("train_minutes needs equal time or both")


# --- What to do -------------------------------------------------------------------------------------------


def make_study(settings: AblateSettings) -> Study:
    """The study that settings ask for."""
    configs: dict[str, Any] = {"": find_recipe(settings.recipe).config} | _dense_configs(settings)
    if settings.steps is not None:
        configs[""] = replace(configs[""], train=replace(configs[""].train, steps=settings.steps))
    for task, words in _by_task(settings.changes, configs).items():
        configs[task] = with_words(configs[task], words)
    for task, config in configs.items():
        machine = replace(config.machine, devices=1, accelerator=settings.accelerator, workers=_loaders(settings))
        configs[task] = replace(config, machine=machine)
        check_training(config.train, machine)
    if configs[""].train.steps is None:
        raise ValueError(f"the recipe {settings.recipe} counts epochs; give the number of optimiser steps by --steps")
    modes: dict[str, tuple[Mode, ...]] = {"steps": ("steps",), "time": ("time",), "both": ("steps", "time")}
    data = tuple(_absolute(source) for source in settings.data)
    return Study(
        out=settings.out.resolve(),
        base=replace(configs[""], data=data),
        segment=configs["segment"],
        detect=configs["detect"],
        depth=configs["depth"],
        data=" ".join(content_of("data", source) for source in data),
        voc=content_of("voc", settings.voc),
        nyu=content_of("nyu", settings.nyu),
        sets=labelled_sets(settings.images),
        seeds=settings.seeds,
        dense_seeds=settings.dense_seeds,
        modes=modes[settings.equal],
        seconds=None if settings.train_minutes is None else 60 * settings.train_minutes,
        rate_steps=settings.rate_steps,
        folds=settings.folds,
        encoders=settings.encoders,
    )


def _by_task(changes: Sequence[str], configs: Mapping[str, Any]) -> dict[str, list[str]]:
    """The changes of every config, without its name in front."""
    found: dict[str, list[str]] = {}
    for change in changes:
        first, _, rest = change.partition(".")
        task, word = (first, rest) if first in configs else ("", change)
        found.setdefault(task, []).append(word)
    return found


def _dense_configs(settings: AblateSettings) -> dict[str, SegmentConfig | DetectConfig | DepthConfig]:
    """The short recipes, judged at the end only and without pictures."""
    segment, detect = segment_recipes.small(), detect_recipes.small()
    depth = depth_recipes.scenes() if settings.nyu == SCENES else depth_recipes.small()
    voc = _absolute(settings.voc)
    return {
        "segment": replace(
            segment,
            data=voc,
            head=replace(segment.head, kind="mlp"),
            watch=replace(segment.watch, every=0, pictures=0),
        ),
        "detect": replace(
            detect,
            data=voc,
            sets=replace(detect.sets, **_detection_lists(settings.voc)),
            watch=replace(detect.watch, every=0, pictures=0),
        ),
        "depth": replace(depth, data=_absolute(settings.nyu), watch=replace(depth.watch, every=0, pictures=0)),
    }


def _detection_lists(voc: str) -> dict[str, Any]:
    """The lists of VOC 2007 as the paper has them, or those of 2012 where they are missing."""
    roots = (Path(voc), Path(voc) / "VOCdevkit")

    def first(*lists: str) -> str:
        files = {name: f"VOC{name.replace('/', '/ImageSets/Main/')}.txt" for name in lists}
        return next((name for name, file in files.items() if any((r / file).is_file() for r in roots)), lists[0])

    return {"train": (first("2007/trainval", "2012/trainval"),), "test": first("2007/test", "2012/val")}


def _absolute(source: str) -> str:
    return source if source == SCENES or "://" in source else str(Path(source).resolve())


def _loaders(settings: AblateSettings) -> int | None:
    if settings.loaders is not None or settings.workers == 1 or not torch.cuda.is_available():
        return settings.loaders
    return max(1, min(16, (os.cpu_count() or 1) // settings.workers))


def _wanted(study: Study, tables: Sequence[TableName], only: Sequence[str]) -> list[Run]:
    runs = study.runs(tables)
    for word in only:
        if not any(_is_meant(word, run) for run in runs):
            names = ", ".join(dict.fromkeys(name for key in tables for name in TABLES[key].rows))
            raise ValueError(f"only: {word!r} is neither a variant ({names}) nor a run such as {runs[0].short}")
    return [run for run in runs if not only or any(_is_meant(word, run) for word in only)]


def _is_meant(word: str, run: Run) -> bool:
    return any(fnmatchcase(name, word) for name in (*run.stands_for, run.short))


# --- Doing it ---------------------------------------------------------------------------------------------


def _make_missing(study: Study, runs: Sequence[Run], settings: AblateSettings, begun: str) -> list[str]:
    """Make what is missing; returns which workers ended badly."""
    end = None if settings.minutes is None else time.time() + 60 * settings.minutes
    missing = [run for run in runs if missing_parts(study, run)]
    if not missing or (end is not None and time.time() >= end):
        return []
    print(_to_make(study, runs, missing), flush=True)
    _measure_speeds(study, missing)
    if settings.workers == 1:
        work(study, runs, begun, lambda: end is None or time.time() < end)
        return []
    return _share_out(study, runs, settings.workers, begun, end)


def _to_make(study: Study, runs: Sequence[Run], missing: Sequence[Run]) -> str:
    """What is about to be done, so that nobody waits for more than they meant."""
    parts = Counter(part for run in missing for part in missing_parts(study, run))
    names = {"judge": "linear classifiers and kNN", "segment": "segmentation", "detect": "detection", "depth": "depth"}
    judged = ", ".join(f"{names[part]} {count} ×" for part, count in parts.items())
    return f"to make: {len(missing)} of {plural(len(runs), 'run')} ({judged})"


def _measure_speeds(study: Study, missing: Sequence[Run]) -> None:
    """Measure all speeds before the work begins, so that no other run is in their way."""
    variants = dict.fromkeys(run.variant for run in missing if run.mode == "time")
    if variants and study.seconds is None:
        variants = {PLAIN: None} | variants
    alone = all(_is_free(study, run) for run in missing)
    for variant in variants:
        try:
            speed = speed_of(study, variant, alone)
            print(f"{variant}: {speed:.2f} steps/s", flush=True)
        except TrainingStoppedError:
            raise
        except Exception as error:  # its cells will say why
            print(f"{variant}: its speed could not be measured: {' '.join(str(error).split())}", flush=True)


def _is_free(study: Study, run: Run) -> bool:
    claim = Claim(study.out, run.name)
    if claim.held:
        claim.release()
    return claim.held


def _share_out(study: Study, runs: Sequence[Run], workers: int, begun: str, end: float | None) -> list[str]:
    """Let several processes work, and say which ended badly; told to stop, they save first."""
    # Spawned: a GPU that this process has used cannot be used by its forks.
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_worker, args=(study, runs, workers, number, begun, end)) for number in range(workers)
    ]
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        for number, process in enumerate(processes):
            with _own_gpu(number):
                process.start()
        print(f"{plural(workers, 'worker')}; what they say is in {study.out / LOGS}", flush=True)
        with tqdm(total=len(runs), unit="run", disable=None) as bar:
            while any(process.is_alive() for process in processes):
                time.sleep(1.0)
                bar.update(sum(not missing_parts(study, run) for run in runs) - bar.n)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
        for process in processes:
            process.join()
        signal.signal(signal.SIGTERM, before)
    return [f"worker {n} ended with code {p.exitcode}" for n, p in enumerate(processes) if p.exitcode]


@contextmanager
def _own_gpu(number: int) -> Iterator[None]:
    """Where there are several GPUs, processes that are started here see one of them, in turn."""
    name, count = "CUDA_VISIBLE_DEVICES", torch.cuda.device_count()
    before = os.environ.get(name)
    if count > 1:
        visible = before.split(",") if before else [str(gpu) for gpu in range(count)]
        os.environ[name] = visible[number % count]
    try:
        yield
    finally:
        if count > 1:
            os.environ.pop(name)
            os.environ.update({} if before is None else {name: before})


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise TrainingStoppedError("stopped; what was begun is saved, the same command continues", code=128 + number)


def _worker(study: Study, runs: Sequence[Run], workers: int, number: int, begun: str, end: float | None) -> None:
    file = study.out / LOGS / f"worker_{number}.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    parent = multiprocessing.parent_process()
    try:
        # Without the process that started it, nobody waits for it any more.
        work(study, runs, begun, lambda: bool(parent and parent.is_alive()) and (end is None or time.time() < end))
    except TrainingStoppedError as stopped:
        print(stopped, flush=True)
        raise SystemExit(stopped.code) from None


def _judge_outcome(study: Study, runs: Sequence[Run], begun: str, broken: Sequence[str]) -> None:
    """Say what is left; cells that failed and workers that ended badly end the command with an error."""
    left = [run for run in runs if missing_parts(study, run)]
    failed = {run.short: failed_since(study, run, begun) for run in left}
    for run in left:
        for part in failed[run.short]:
            cell = read_cell(study.out, study.cell_name(run, part))
            assert cell is not None and cell["status"] == FAILED
            print(f"{run.short}: {cell['reason']}")
    others = [run for run in left if not failed[run.short]]
    elsewhere = [run for run in others if not _is_free(study, run)]
    if elsewhere:
        print(f"{plural(len(elsewhere), 'run')} being made by other processes")
    waiting = len(others) - len(elsewhere)
    if waiting:
        print(f"{plural(waiting, 'run')} left; the same command goes on with them")
    count = sum(len(parts) for parts in failed.values())
    if count:
        raise TrainingStoppedError(f"{plural(count, 'cell')} failed; the same command tries again", code=_FAILURES)
    if broken:
        raise TrainingStoppedError(f"{', '.join(broken)}; see {study.out / LOGS}", code=_FAILURES)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command without ``asc.cli``; returns the exit code."""
    return run_command(AblateSettings, run_ablate, "python -m asc.ablate.run", sys.argv[1:] if words is None else words)


if __name__ == "__main__":
    sys.exit(main())
