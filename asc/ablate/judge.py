"""What an encoder is judged by: kNN and a linear classifier on labelled images, and short trainings of dense tasks."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asc.ablate.study import SCENE_SEED, LabelledSet, Run, Study
from asc.ablate.tables import Part
from asc.report.groupings import superpixel_warnings
from asc.tasks.classify.images import Split, folder_split, scene_split
from asc.tasks.classify.probes import knn_accuracy, linear_accuracy, split_features
from asc.tasks.dense_run import RESULT_FILE
from asc.tasks.depth import run as depth
from asc.tasks.depth.task import DepthConfig
from asc.tasks.detect import run as detect
from asc.tasks.detect.task import DetectConfig
from asc.tasks.segment import run as segment
from asc.weights import load

# Splits that a process keeps: those of every labelled set, and the smaller one that trainings are followed on.
_KEPT_SPLITS = 8
# What is kept of the scores of a dense task.
_SCORES = {"segment": ("miou", "accuracy"), "depth": ("d1", "d2", "d3", "rms", "rel"), "detect": ("ap50",)}


def split_of(study: Study, labelled: LabelledSet, most: tuple[int, int] | None = None) -> Split:
    """The images of a labelled set in the size of the network: all, or at most so many of each part."""
    size = study.base.encoder.image_hw[0]
    if labelled.path is not None:
        return _folder(labelled.path, size, *(most or (None, None)))
    watch = study.base.watch
    scene = replace(study.base.clips.scene, size=size, seed=SCENE_SEED)
    return _scenes(scene, watch.knn_labelled, watch.knn_judged)


_folder = lru_cache(_KEPT_SPLITS)(folder_split)
_scenes = lru_cache(1)(scene_split)


def judged(study: Study, run: Run, part: Part, encoder: Path, out: Path) -> tuple[dict[str, Any], list[str]]:
    """The numbers of a cell, and warnings; ``out`` is the folder of a training that may be needed."""
    if part == "judge":
        return _by_labelled_images(study, encoder)
    return _by_dense_task(study, run, part, encoder, out), []


def _by_labelled_images(study: Study, encoder: Path) -> tuple[dict[str, Any], list[str]]:
    accelerator = study.base.machine.accelerator
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(encoder).to(accelerator)
    sets: dict[str, dict[str, float]] = {}
    with superpixel_warnings() as messages:
        for labelled in study.sets:
            split = split_of(study, labelled)
            features = [part.to(accelerator) for part in split_features(model, split)]
            labels = [split.train.labels_B.to(accelerator), split.test.labels_B.to(accelerator)]
            if study.folds:
                sets[labelled.name] = crossed(torch.cat(features), torch.cat(labels), study.folds)
            else:
                sets[labelled.name] = _recognised(features[0], labels[0], features[1], labels[1])
    return {"sets": sets}, messages


def _recognised(features_NC: Tensor, labels_N: Tensor, queries_MC: Tensor, truth_M: Tensor) -> dict[str, float]:
    return {
        "knn": knn_accuracy(features_NC, labels_N, queries_MC, truth_M),
        "linear": linear_accuracy(features_NC, labels_N, queries_MC, truth_M),
        "judged": len(truth_M),
    }


def crossed(features_NC: Tensor, labels_N: Tensor, folds: int) -> dict[str, float]:
    """Every fold recognised from all others; each image counts once."""
    fold_N = fold_of(labels_N.cpu(), folds).to(labels_N.device)
    found = []
    for fold in range(folds):
        own_N = fold_N == fold
        found.append(_recognised(features_NC[~own_N], labels_N[~own_N], features_NC[own_N], labels_N[own_N]))
    total = sum(one["judged"] for one in found)
    means = {name: sum(one[name] * one["judged"] for one in found) / total for name in ("knn", "linear")}
    return means | {"judged": total}


def fold_of(labels_N: Tensor, folds: int) -> Tensor:
    """The fold of every image: drawn, the same for every encoder, and as many of a class in each as can be."""
    order_N = torch.randperm(len(labels_N), generator=torch.Generator().manual_seed(0))
    by_class_N = order_N[labels_N[order_N].argsort(stable=True)]
    fold_N = torch.empty_like(order_N)
    fold_N[by_class_N] = torch.arange(len(labels_N)) % folds
    return fold_N


def _by_dense_task(study: Study, run: Run, part: Part, encoder: Path, out: Path) -> dict[str, float]:
    config = replace(study.dense_config(part, run.variant, run.seed), out=out, encoder=str(encoder))
    if isinstance(config, DetectConfig):
        detect.train(config)
    elif isinstance(config, DepthConfig):
        depth.train(config)
    else:
        segment.train(config)
    result = json.loads((out / RESULT_FILE).read_text())
    scores = result if part == "detect" else result["last"]
    values = {name: scores[name] for name in _SCORES[part]}
    for name, value in values.items():
        if value is None:
            raise ValueError(f"{config.data} gives no {name}: there is nothing to find in its test images")
    return values
