"""One point of the space: pre-trained and judged, seed by seed.

    trials/0007/result.json             what came out, the mean over the seeds
    trials/0007/seed_0/                 the folder of a run, as ``asc pretrain`` makes it
    trials/0007/seed_0/result.json      what came out with this seed

A seed that was interrupted goes on from its last checkpoint; one that is finished is not run again.
"""

from __future__ import annotations

import json
import math
import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asc.data.clips import Clips
from asc.data.kept import keep_frames
from asc.data.sampling import Order
from asc.files import write_whole
from asc.layer import SuperpixelWarning
from asc.pretrain.data import ClipDataset, augmented
from asc.pretrain.run import RESULT_FILE, PretrainConfig, PretrainTask
from asc.report.words import versions
from asc.run_folder import RunFolder, read_log
from asc.tasks.classify.images import Split
from asc.tasks.classify.probes import knn_accuracy, pixels, split_features
from asc.train import Trainer, make_fabric, total_steps
from asc.tune.space import check_run
from asc.tune.validation import HeldClips, knn_error

Report = Callable[[int, float], bool]
"""Told the number of a check and the kNN accuracy there; answers whether to give the trial up."""

# Clips of one forward pass when the validation loss is measured, and of all of them.
_PASS, _MOST_CLIPS = 256, 2048


class TrialTask(PretrainTask):
    """Pre-training that is judged by what was held out, and may be given up on the way.

    Args:
        config: The run.
        clips: To learn from, and held out.
        sets: Labelled images by name.
        report: Asked at every check but the last.
    """

    def __init__(self, config: PretrainConfig, clips: HeldClips, sets: Mapping[str, Split], report: Report) -> None:
        super().__init__(config, clips.learned, next(iter(sets.values())))
        self.sets = dict(sets)
        self.scores: dict[str, float] = {}
        self._held = _Held(config, clips.held) if clips.held else None
        self._report = report
        self._given_up = False

    def knn(self) -> float:
        """Mean kNN accuracy over all sets; those of the sets are in ``scores``."""
        self.scores = {
            name: self._score(split, *split_features(self.target, split)) for name, split in self.sets.items()
        }
        return statistics.fmean(self.scores.values())

    def _score(self, split: Split, known_NC: torch.Tensor, judged_MC: torch.Tensor) -> float:
        labels_N, truth_M = split.train.labels_B, split.test.labels_B
        return knn_accuracy(known_NC, labels_N, judged_MC, truth_M, self.config.watch.knn_neighbours)

    def evaluate(self, step: int, last: bool, folder: RunFolder) -> dict[str, float]:
        """kNN accuracy on all sets and the loss on clips that were held out."""
        values = super().evaluate(step, last, folder)
        if "knn_pixels" in values:
            scores = [self._score(split, *pixels(split)) for split in self.sets.values()]
            values["knn_pixels"] = statistics.fmean(scores)
        if "knn" in values:
            values |= {f"knn/{name}": score for name, score in self.scores.items()}
            if self._held is not None:
                values["validation_loss"] = self._held.loss(self)
            if step and not last:
                self._given_up = self._report(step // self.config.watch.knn_every, values["knn"])
        return values

    def finished(self) -> bool:
        """Whether the trial was given up."""
        return self._given_up


class _Held:
    """Clips that were held out, always the same frames of them in the same augmentation."""

    def __init__(self, config: PretrainConfig, clips: list[Clips]) -> None:
        kept = keep_frames(clips, config.machine.cache_gb)
        order = Order(kept, None, config.train.seed)
        self._dataset = ClipDataset(order, kept, config.clips.frames, config.augment)
        self._count = min(order.epoch_length, _MOST_CLIPS)

    @torch.no_grad()
    def loss(self, task: PretrainTask) -> float:
        """Mean loss of a clip."""
        siamese, total = task.siamese, 0.0
        was_training = siamese.training
        siamese.eval()
        device = next(siamese.parameters()).device
        # Passes of equal length, since the batch norm of a handful of clips would be another one.
        for positions in np.array_split(np.arange(self._count), math.ceil(self._count / _PASS)):
            batch = self._dataset[positions.tolist()]
            total += float(siamese(augmented(batch, task.config.augment, device)).loss) * len(positions)
        siamese.train(was_training)
        return total / self._count


def run_seed(
    config: PretrainConfig, clips: HeldClips, sets: Mapping[str, Split], checks: int, report: Report
) -> dict[str, Any]:
    """Train and judge one seed, or go on with it.

    Args:
        config: The run; its ``out`` is the folder of this seed.
        clips: What is learned from and what is held out.
        sets: Labelled images.
        checks: How often the kNN accuracy is measured on the way.
        report: See :data:`Report`.

    Returns:
        The record of the seed, as it is written to its ``result.json``.
    """
    file = config.out / RESULT_FILE
    if file.is_file():
        record: dict[str, Any] = json.loads(file.read_text())
        return record
    steps = total_steps(config.train, epoch_length(config, clips))
    watch = replace(config.watch, knn_every=math.ceil(steps / checks), pictures=0, pictures_every=0)
    config = replace(config, watch=watch)
    check_run(config)
    fabric = make_fabric(config.train, config.machine)
    folder = RunFolder(config.out)
    try:
        held = {"clips": [len(part) for part in clips.held], "images": _counts(sets)}
        folder.begin(asdict(config) | {"held_out": held}, free=("machine", "out"))
        task = TrialTask(config, clips, sets, report)
        trainer = Trainer(task, config.train, config.machine, folder, fabric)
        with warnings.catch_warnings():
            # The monitor says the same with the step beside it, and the log keeps it.
            warnings.simplefilter("ignore", SuperpixelWarning)
            trainer.run()
            record = _judged(task, trainer, folder)
        write_whole(file, json.dumps(record, indent=2).encode() + b"\n")
        for checkpoint in folder.checkpoints():
            checkpoint.unlink()  # the record is what a search is for; its checkpoints would fill the disk
    finally:
        folder.close()
    return record


def epoch_length(config: PretrainConfig, clips: HeldClips) -> int:
    """Clips of one round through the data, without what is held out."""
    return Order(clips.learned.clips, config.clips.weights, config.train.seed).epoch_length


def _counts(sets: Mapping[str, Split]) -> dict[str, list[int]]:
    return {name: [len(split.train.labels_B), len(split.test.labels_B)] for name, split in sets.items()}


def _judged(task: TrialTask, trainer: Trainer, folder: RunFolder) -> dict[str, Any]:
    task.finished_encoder()
    knn = task.knn()
    log = read_log(folder.path)
    curve = {line["step"]: line["knn"] for line in log if line.get("knn") is not None}
    return {
        "seed": task.config.train.seed,
        "knn": knn,
        "knn_by_set": task.scores,
        "knn_error": knn_error(task.scores, task.sets),
        "judged": _counts(task.sets),
        "knn_by_step": curve,
        "knn_pixels": _last(log, "knn_pixels"),
        "validation_loss": _last(log, "validation_loss"),
        "loss": _last(log, "loss"),
        "tokens_share": _last(log, "tokens_share"),
        "images_per_second": _last(log, "images_per_second"),
        "steps": trainer.state.step,
        "given_up": trainer.state.finished,
        "seconds": trainer.state.seconds,
        "warnings": list(dict.fromkeys(line["warning"] for line in log if "warning" in line)),
        "versions": versions(),
    }


def _last(log: list[dict[str, Any]], name: str) -> float | None:
    return next((line[name] for line in reversed(log) if line.get(name) is not None), None)


def combined(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of a trial: means over its seeds, warnings of all of them."""
    numbers = ("knn", "validation_loss", "loss", "tokens_share", "images_per_second", "knn_pixels")
    means = {name: _mean([record[name] for record in records]) for name in numbers}
    sets = records[0]["knn_by_set"]
    return means | {
        "knn_by_set": {name: statistics.fmean(record["knn_by_set"][name] for record in records) for name in sets},
        # The judged images are the same for every seed: more seeds do not make them more.
        "knn_error": statistics.fmean(record["knn_error"] for record in records),
        "knn_by_seed": {str(record["seed"]): record["knn"] for record in records},
        "judged": records[0]["judged"],
        "steps": sum(record["steps"] for record in records),
        "seconds": sum(record["seconds"] for record in records),
        "given_up": records[-1]["given_up"],
        "warnings": list(dict.fromkeys(message for record in records for message in record["warnings"])),
        "versions": records[-1]["versions"],
    }


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def run_trial(
    folder: Path, configs: Mapping[int, PretrainConfig], run: Callable[[PretrainConfig, int], dict[str, Any]]
) -> dict[str, Any]:
    """All seeds of a trial, until one is given up; ``run`` takes the run and the place of its seed."""
    records = []
    for place, (seed, config) in enumerate(configs.items()):
        records.append(run(replace(config, out=folder / f"seed_{seed}"), place))
        if records[-1]["given_up"]:
            break
    return combined(records)
