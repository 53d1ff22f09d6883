"""The command: search for settings, alone or together with others, and hand the best ones out as a recipe.

asc tune --out OUT [--space paper batch=512] [--sampler tpe --trials 40] [--workers 3]
asc tune --out OUT --export best        writes OUT/best.json, for asc pretrain OUT/best.json
python -m asc.tune.run ...              the same where tyro is not installed
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from asc.files import write_whole
from asc.pretrain.run import RESULT_FILE, PretrainConfig
from asc.settings import run_command
from asc.train import TrainingStoppedError, total_steps
from asc.tune.page import FAILED, Row, best_row, read_rows, write_results
from asc.tune.recipe import find_recipe, write_recipe
from asc.tune.space import PAPER_WORD, Range, Space, make_space
from asc.tune.study import Choice, Job, Pruner, Sampler, Search, load_optuna
from asc.tune.trial import epoch_length, run_seed, run_trial
from asc.tune.validation import HeldClips, LabelledImages, labelled_sets, opened_clips

# Seconds between two looks at trials that others run, and between two pages.
_LOOK, _PAGE = 1.0, 60.0


@dataclass(frozen=True)
class TuneSettings:
    """Search for settings of pre-training: many short runs, judged by kNN on images held out of the training part."""

    out: Path = Path("runs/tune")
    """Folder of the search; the same command again goes on with it, and any number of processes and computers that
    share the folder work on it together."""
    recipe: str = "ablation"
    """Recipe of ``asc pretrain`` that the search is around, or a file that ``--export`` wrote."""
    data: tuple[str, ...] = ("scenes",)
    """Folders of videos or of prepared shards, or ``scenes`` for the embedded ones."""
    images: tuple[Path, ...] = ()
    """Folders of labelled images (train/<class>/) to judge by, the mean over them; nothing else of them is opened.
    None: embedded scenes."""
    space: tuple[str, ...] = (PAPER_WORD,)
    """What is searched: ``paper`` for the paper's grid, and settings with a list of values (``lr=1e-3,3e-3``), a
    range (``lr=1e-4..1e-2:log``) or one value, which is set and not searched (``train.steps=500``). Short names: lr,
    weight_decay, batch, theta, tau, budget; all else as in ``asc pretrain``. ``batch`` takes the learning rate as it
    stands and keeps the number of clips seen."""
    plain: bool = False
    """Whether to tune the plain Vision Transformer: the same space without the settings of superpixels. For a fair
    comparison give both the same number of trials."""
    sampler: Sampler = "grid"
    """``grid``: every point once, in random order; ``tpe``: near what was good; ``random``."""
    trials: int | None = None
    """Trials of the whole search, over all starts and processes; None: all points of the grid."""
    pruner: Pruner = "auto"
    """Whether trials that lag behind are given up: ``none``, ``median`` or ``hyperband``; ``auto``: none for a grid,
    else median."""
    seeds: tuple[int, ...] = (0,)
    """Every trial is run with each of these; the mean counts."""
    val_share: float = 0.05
    """Share of the labelled images that is judged, and of the clips that only the validation loss sees."""
    checks: int = 4
    """How often the kNN accuracy is measured in a run."""
    labelled: int = 5000
    """Images of each folder whose class is known, at most."""
    scenes: int = 4000
    """Labelled scenes, where there are no ``images``."""
    search_seed: int = 0
    """Start of the search's own random draws."""
    workers: int = 1
    """Processes on this computer; with several GPUs they take turns on them."""
    loaders: int | None = None
    """Processes that load data for each of them; None: by the number of cores."""
    minutes: float | None = None
    """No trial is begun after so long; 0 only makes the page."""
    stale: float = 120.0
    """Seconds without a sign of life after which a trial of another computer is taken over."""
    device: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``mps``."""
    export: str | None = None
    """Write the best values of the search in ``out`` as a recipe of this name, and search no further."""


def run_tune(settings: TuneSettings) -> Path:
    """Run the command.

    Returns:
        The page, or the recipe.
    """
    load_optuna()
    if settings.export is not None:
        return export_best(settings.out, settings.export)
    _check(settings)
    begun = time.monotonic()
    space = _space_of(settings)
    searches = settings.minutes is None or settings.minutes > 0
    if searches:
        _tell(settings, space)
        _look_at_data(settings, space)  # before anything is written: what is wrong with it is no fault of a point
    search = _open_search(settings, space)
    if searches and settings.workers == 1:
        _work(settings, search, space, begun)
    elif searches:
        _work_together(settings, search, begun)
    return _conclude(search)


def _look_at_data(settings: TuneSettings, space: Space) -> None:
    sets = labelled_sets(_labelled(settings), space.base.encoder.image_hw[0], space.base.clips.scene)
    first = _run_of(settings, space.base, settings.seeds[0])
    held = _clips(settings, first)
    total_steps(first.train, epoch_length(first, held))
    images = ", ".join(
        f"{name}: {len(split.test.labels_B)} images judged by {len(split.train.labels_B)}"
        for name, split in sets.items()
    )
    clips = sum(len(part) for part in held.held)
    whole = f"; nothing of {', '.join(held.whole)}, a single file" if held.whole else ""
    tqdm.write(f"held out: {images}; {clips} clips of other files than those learned from{whole}")


def _check(settings: TuneSettings) -> None:
    for name in ("workers", "checks", "labelled", "scenes"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(settings, name)}")
    if not 0 < settings.val_share < 1:
        raise ValueError(f"val_share must lie between 0 and 1, got {settings.val_share}")
    if not settings.seeds or len(set(settings.seeds)) < len(settings.seeds):
        raise ValueError(f"seeds must be one or more different numbers, got {settings.seeds}")
    if settings.trials is not None and settings.trials < 1:
        raise ValueError(f"trials must be at least 1, got {settings.trials}")
    if settings.trials is None and settings.sampler != "grid":
        raise ValueError(f"the sampler {settings.sampler} has no end of its own: give --trials")


def _space_of(settings: TuneSettings) -> Space:
    recipe = find_recipe(settings.recipe).config
    if recipe.plain and not settings.plain:
        raise ValueError(f"the recipe {settings.recipe} is one of the plain network: give --plain, or another recipe")
    space = make_space(settings.space, replace(recipe, plain=settings.plain), settings.plain)
    endless = [name for name, dimension in space.dimensions.items() if isinstance(dimension, Range)]
    if settings.sampler == "grid" and endless:
        raise ValueError(f"space: {endless[0]} is a range, and a grid needs values: list some, or use --sampler tpe")
    return space


def _open_search(settings: TuneSettings, space: Space) -> Search:
    recipe = find_recipe(settings.recipe)
    agreed = {
        "recipe": recipe.name,
        "recipe_settings": recipe.settings,
        "fixed": {name: value for name, value in space.fixed.items() if not name.startswith("machine.")},
        "space": space.texts(),
        "plain": settings.plain,
        "data": list(settings.data),
        "images": [str(folder) for folder in settings.images],
        "seeds": list(settings.seeds),
        "val_share": settings.val_share,
        "checks": settings.checks,
        "labelled": settings.labelled,
        "scenes": settings.scenes,
    }
    pruner = settings.pruner
    if pruner == "auto":
        pruner = "none" if settings.sampler == "grid" else "median"
    return Search(settings.out, agreed, pruner, settings.checks * len(settings.seeds), settings.stale)


def _tell(settings: TuneSettings, space: Space) -> None:
    size = "endless" if space.size is None else f"{space.size:,} points"
    tqdm.write(f"searched ({size}): {' '.join(space.texts())}")
    if space.dropped:
        tqdm.write(f"not searched, since the plain network has no superpixels: {', '.join(space.dropped)}")
    if space.size is not None and settings.trials is not None and settings.trials > space.size:
        tqdm.write(f"there are only {space.size:,} points: {settings.trials:,} trials will not be reached")


# --- One process ------------------------------------------------------------------------------------------


def _work(settings: TuneSettings, search: Search, space: Space, begun: float) -> None:
    """Run trials until there are none left, or the time is over."""
    choice = Choice(space, settings.sampler, settings.search_seed, settings.trials)
    waiting: list[int] = []
    page = time.monotonic()
    while settings.minutes is None or time.monotonic() - begun < 60 * settings.minutes:
        job = search.take(choice)
        if isinstance(job, Job):
            _run_job(job, settings, search, space)
        elif job:
            if job != waiting:
                tqdm.write(f"waiting for what other processes run: trial {', '.join(map(str, job))}")
            waiting = job
            time.sleep(_LOOK)
        else:
            return
        if settings.workers == 1 and time.monotonic() - page > _PAGE:
            _write_page(search)
            page = time.monotonic()
    tqdm.write("time is over; the same command goes on")


def _run_job(job: Job, settings: TuneSettings, search: Search, space: Space) -> None:
    words = ", ".join(f"{name}={value}" for name, value in job.point.items())
    tqdm.write(f"trial {job.number}{' goes on' if job.continued else ''}: {words}")
    with job.claim:
        try:
            record = _judged(job, settings, search, space)
        except (ValueError, TrainingStoppedError, torch.OutOfMemoryError) as error:
            if isinstance(error, TrainingStoppedError) and not error.gave_up:
                raise  # by a signal: the trial goes on another time
            record = {"failed": " ".join(str(error).split())}
        record |= {"trial": job.number, "point": job.point, "settings": space.settings(job.point)}
        write_whole(job.folder / RESULT_FILE, json.dumps(record, indent=2).encode() + b"\n")
        search.finish(job.number, record.get("knn"), record.get("given_up", False))
    if "failed" in record:
        tqdm.write(f"trial {job.number} failed: {record['failed']}")
    else:
        tqdm.write(f"trial {job.number}{' was given up' if record['given_up'] else ''}: kNN {record['knn']:.1%}")


def _judged(job: Job, settings: TuneSettings, search: Search, space: Space) -> dict[str, Any]:
    trial = search.trial(job.number)
    reported = set(search.trials()[job.number].intermediate_values)

    def run(config: PretrainConfig, place: int) -> dict[str, Any]:
        def report(check: int, knn: float) -> bool:
            at = place * settings.checks + check
            if at not in reported:  # else before an interruption
                trial.report(knn, at)
            return bool(trial.should_prune())

        sets = labelled_sets(_labelled(settings), config.encoder.image_hw[0], config.clips.scene)
        return run_seed(config, _clips(settings, config), sets, settings.checks, report)

    configs = {seed: _run_of(settings, space.config(job.point), seed) for seed in settings.seeds}
    return run_trial(job.folder, configs, run)


def _run_of(settings: TuneSettings, config: PretrainConfig, seed: int) -> PretrainConfig:
    machine = replace(config.machine, accelerator=settings.device, devices=1, workers=settings.loaders)
    train = replace(config.train, seed=seed)
    return replace(config, data=settings.data, plain=settings.plain, train=train, machine=machine)


def _labelled(settings: TuneSettings) -> LabelledImages:
    return LabelledImages(settings.images, settings.val_share, settings.labelled, settings.scenes)


def _clips(settings: TuneSettings, config: PretrainConfig) -> HeldClips:
    return opened_clips(settings.data, config.clips, config.train.seed, settings.out / "found", settings.val_share)


# --- Several processes ------------------------------------------------------------------------------------


def _work_together(settings: TuneSettings, search: Search, begun: float) -> None:
    """Start the workers, keep the page fresh, and pass a signal to stop on to them."""
    # A process that was forked from this one could not use the GPU.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["asc.tune.run"])
    if settings.minutes is not None:
        settings = replace(settings, minutes=settings.minutes - (time.monotonic() - begun) / 60)
    workers = [context.Process(target=_worker, args=(settings, number)) for number in range(settings.workers)]
    for worker in workers:
        worker.start()
    asked: list[int] = []

    def stop(number: int, _: object) -> None:
        asked.append(number)
        for worker in workers:
            worker.terminate()  # saves and ends

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        page = time.monotonic()
        while any(worker.is_alive() for worker in workers):
            workers[0].join(_LOOK)
            if not workers[0].is_alive():
                time.sleep(_LOOK)
            if time.monotonic() - page > _PAGE:
                _write_page(search)
                page = time.monotonic()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if asked:
        raise TrainingStoppedError("stopped; all is saved, the same command continues", code=128 + asked[0])
    failed = [worker.exitcode for worker in workers if worker.exitcode]
    if failed:
        raise TrainingStoppedError(
            f"{len(failed)} of {len(workers)} workers ended early (exit code {failed[0]}); the same command continues",
            code=1,
        )


def _worker(settings: TuneSettings, number: int) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // settings.workers))
    # Its own lock: tqdm's is shared by all workers, and one may be killed while it holds it.
    tqdm.set_lock(threading.RLock())
    _take_gpu(number)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        space = _space_of(settings)
        _work(settings, _open_search(settings, space), space, time.monotonic())
    except TrainingStoppedError as stopped:
        raise SystemExit(stopped.code) from None
    except ValueError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        raise SystemExit(2) from None


def _take_gpu(number: int) -> None:
    """See one GPU only, the workers taking turns; CUDA reads it when it is first used."""
    count, name = torch.cuda.device_count(), "CUDA_VISIBLE_DEVICES"
    if count > 1:
        seen = os.environ[name].split(",") if os.environ.get(name) else [str(gpu) for gpu in range(count)]
        os.environ[name] = seen[number % count]


def _end_with_parent() -> None:
    """Stop as at a signal when the command that started this process is gone: nobody could stop it any more."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


# --- What came out ----------------------------------------------------------------------------------------


def _write_page(search: Search) -> Path:
    with search.writing():
        return write_results(search)


def _conclude(search: Search) -> Path:
    rows = read_rows(search)
    page = _write_page(search)
    best = best_row(rows)
    if best is not None:
        print(f"best of {len(rows)}: trial {best.number}, kNN {best.record['knn']:.1%}: {best.words()}")
    print(f"page: {page}")
    if rows and all(row.state == FAILED for row in rows):
        raise ValueError(f"every trial failed; the first because: {_reason(rows)}")
    return page


def _reason(rows: Sequence[Row]) -> str:
    return str(min(rows, key=lambda row: row.number).record.get("failed"))


def export_best(out: Path, name: str) -> Path:
    """Write the best values of a search as a recipe.

    Returns:
        Its file, for ``asc pretrain``.
    """
    search = Search(out, None)
    best = best_row(read_rows(search))
    if best is None:
        raise ValueError(f"no trial of the search in {out} is finished yet; there is nothing to export")
    found = {"search": str(out), "trial": best.number, "knn": best.record["knn"], "warnings": best.warnings}
    file = write_recipe(out, name, search.settings, best.record["settings"], found)
    for warning in best.warnings:
        print(f"warning: the best trial was told: {warning}")
    command = f"asc pretrain {shlex.quote(str(file))}"
    print(f"trial {best.number} (kNN {best.record['knn']:.1%}) is the recipe {file}; run it: {command}")
    return file


def main(words: Sequence[str] | None = None) -> int:
    """Run the command without ``asc.cli``; returns the exit code."""
    return run_command(TuneSettings, run_tune, "python -m asc.tune.run", sys.argv[1:] if words is None else words)


if __name__ == "__main__":
    sys.exit(main())
