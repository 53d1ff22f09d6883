"""Several encoders on several datasets by several protocols, in one table."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from tqdm import tqdm

from asc.data.scenes import SceneConfig
from asc.recipes.classify import RECIPES, recipe_named
from asc.report.tables import write_report
from asc.report.words import plural
from asc.tasks.classify.datasets.opening import SCENE_COUNTS
from asc.tasks.classify.features import FeatureConfig
from asc.tasks.classify.results import Result
from asc.tasks.classify.run import (
    SCENE,
    EvalConfig,
    FastLinearConfig,
    KnnConfig,
    TrainedConfig,
    check_datasets,
    evaluate,
    open_named,
    tell_notes,
    with_seed,
)
from asc.tasks.encoders import open_encoder
from asc.train import MachineConfig, TrainingStoppedError


@dataclass(frozen=True, kw_only=True)
class SuiteConfig:
    """Several datasets and protocols at once; what is finished is not computed again."""

    checkpoint: tuple[str, ...]
    """Encoders: folders of runs, encoder folders, weights files, ``timm:NAME``, ``random`` and so on; see
    ``asc eval knn --help``."""
    datasets: tuple[str, ...]
    """Names of datasets, or of folders below ``data`` with train/<class>/ and test/<class>/ or val/<class>/."""
    data: Path | None = None
    """Folder that holds the datasets."""
    protocols: tuple[str, ...] = ("knn", "linear")
    """``knn``, ``linear``, ``finetune``, or names of recipes."""
    seeds: tuple[int, ...] = (0,)
    """Seeds; the table shows mean and standard deviation."""
    out: Path = Path("results")
    """Folder for results and the table; see ``asc eval knn --help``."""
    image_size: int | None = None
    """Side of the images for the network in pixels; None: what it was trained at."""
    epochs: float | None = None
    """Epochs of what is trained, in place of the recipes'."""
    download: bool = False
    """Whether to get datasets that are not there, where that can be done."""
    val_share: float | None = None
    """Share of the training images to choose settings by, where a dataset has no official ones; None: as registered."""
    pool: bool = False
    """Whether encoders whose names differ only in a number at the end are one row of the table."""
    features: FeatureConfig = field(default_factory=FeatureConfig)
    """How features are computed."""
    machine: MachineConfig = field(default_factory=lambda: MachineConfig(devices=1))
    """Where what is trained is trained: one process."""
    scene: SceneConfig = SCENE
    """What the embedded scenes show, for the dataset ``scenes``."""
    scene_counts: tuple[int, int, int] = SCENE_COUNTS
    """Scenes to learn from, to choose settings by, and to be judged on."""


def run_suite(config: SuiteConfig) -> list[Result]:
    """Judge all encoders and write the table; datasets that fail end it with an error after all others are judged."""
    _check(config)
    recipes = [recipe_named(word) for word in config.protocols]
    results: list[Result] = []
    failed: dict[str, Exception] = {}
    for dataset in config.datasets:
        try:
            for result in _judged(config, recipes, dataset):
                results.append(result)
        except (ValueError, TrainingStoppedError, torch.OutOfMemoryError) as error:
            if isinstance(error, TrainingStoppedError) and not error.gave_up:
                raise  # by a signal
            # The others can still be judged.
            tqdm.write(f"{dataset} is left, since it failed: {error}")
            failed[dataset] = error
    if results:
        write_report(results, config.out, config.pool)
    if failed:
        reasons = "; ".join(f"{dataset}: {error}" for dataset, error in failed.items())
        raise ValueError(f"{len(failed)} of {plural(len(config.datasets), 'dataset')} failed: {reasons}")
    return results


def _judged(config: SuiteConfig, recipes: Sequence[str], dataset: str) -> Iterator[Result]:
    """All that is to be found out on a dataset, one after another."""
    for seed in config.seeds:
        configs = [
            with_seed(_adapted(config, RECIPES[recipe](checkpoint, dataset)), seed)
            for checkpoint in config.checkpoint
            for recipe in recipes
        ]
        opened = open_named(configs[0])
        if seed == config.seeds[0]:
            tell_notes(opened)
        for one in configs:
            yield evaluate(one, opened)


def _check(config: SuiteConfig) -> None:
    for name in ("checkpoint", "datasets", "protocols", "seeds"):
        values = getattr(config, name)
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name} must name at least one, and none twice; got {', '.join(map(str, values))}")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 or (config.machine.devices or 1) > 1:
        raise ValueError(
            "the suite runs in one process; train on several GPUs with asc eval finetune into the same --out, and the "
            "suite takes the result"
        )
    check_datasets(config.datasets, config.data)
    for word in config.protocols:
        recipe_named(word)
    for checkpoint in config.checkpoint:
        open_encoder(checkpoint, config.image_size)


def _adapted(suite: SuiteConfig, config: EvalConfig) -> EvalConfig:
    config = replace(
        config,
        data=suite.data,
        out=suite.out,
        image_size=suite.image_size,
        download=suite.download,
        val_share=suite.val_share,
        scene=suite.scene,
        scene_counts=suite.scene_counts,
    )
    if isinstance(config, KnnConfig | FastLinearConfig):
        return replace(config, features=suite.features)
    assert isinstance(config, TrainedConfig)
    epochs = config.train.epochs if suite.epochs is None else suite.epochs
    machine = replace(suite.machine, devices=1)
    return replace(config, machine=machine, train=replace(config.train, epochs=epochs))
