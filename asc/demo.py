"""``asc demo``: pre-train on the embedded scenes, and write a page that shows what was learned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

import torch

from asc.data.sampling import Order
from asc.data.scenes import CLASSES, MAX_KEY, SceneConfig
from asc.files import write_whole
from asc.pretrain.data import open_corpora, plain_frames
from asc.pretrain.run import PretrainConfig, pretrain, untrained_encoder
from asc.recipes import pretrain as recipes
from asc.report.gallery import (
    Photograph,
    Picture,
    check_photographs,
    open_photographs,
    photograph_pictures,
    scene_pictures,
)
from asc.report.groupings import BLOCK_TABLE_NOTE, Grouping, add_cards, block_table, group, superpixel_warnings
from asc.report.page import Page, Table
from asc.report.training import Training, training_figures
from asc.report.words import duration, plural, versions
from asc.vit import AscViT
from asc.weights import load

PAGE_FILE, RECORD_FILE, RUN_FOLDER = "index.html", "demo.json", "run"


@dataclass(frozen=True)
class DemoSettings:
    """Pre-train a small network on the embedded scenes, and write a page that shows what it learned.

    The defaults need about four minutes on two cores and no network. Interrupted, the same command continues.
    """

    out: Path = Path("demo")
    """Folder for the page (index.html), the numbers (demo.json) and the training run (run/)."""
    steps: int | None = None
    """Optimiser steps; None: as many as the recipe ``demo`` of ``asc pretrain`` has."""
    seed: int = 0
    """Start of all random draws: weights, scenes, order of the data, augmentation."""
    scenes: int = 6
    """Number of held-out scenes to show, at least 1."""
    photographs: tuple[Photograph, ...] = get_args(Photograph)
    """Photographs to show, from those that come with scikit-image."""


@dataclass(frozen=True)
class Gallery:
    """The same pictures, grouped by both encoders."""

    title: str
    """What the page calls the pictures."""
    note: str
    """What a reader should know of them."""
    pictures: list[Picture]
    """The pictures."""
    groupings: dict[str, Grouping]
    """What the encoders make of them, by ``untrained`` and ``trained``."""


def run_demo(settings: DemoSettings) -> Path:
    """Train, compare with the untrained network, and write page and numbers.

    Returns:
        The page.
    """
    _check(settings)
    config = demo_config(settings)
    trained = load(pretrain(config))
    training = Training.read(config.out)
    galleries = _galleries(settings, config, {"untrained": _untrained(config), "trained": trained})
    record = json.dumps(_record(settings, training, galleries), indent=2) + "\n"
    write_whole(settings.out / RECORD_FILE, record.encode())
    _make_page(settings, training, galleries).write(settings.out / PAGE_FILE)
    print(_knn_line(training))
    print(f"the page is {settings.out / PAGE_FILE}")
    return settings.out / PAGE_FILE


def _check(settings: DemoSettings) -> None:
    for name, value in (("scenes", settings.scenes), ("steps", settings.steps)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    # One less than scenes allow, because those to be recognised have the next seed.
    if not 0 <= settings.seed < MAX_KEY:
        raise ValueError(f"seed must be a whole number from 0 to {MAX_KEY - 1}, got {settings.seed}")
    check_photographs(settings.photographs)
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out must be a folder, but {settings.out} is none: {error}; give another --out") from error


def demo_config(settings: DemoSettings) -> PretrainConfig:
    """The recipe ``demo`` with the steps and the seed of the settings."""
    recipe = recipes.demo()
    steps = recipe.train.steps if settings.steps is None else settings.steps
    return replace(recipe, out=settings.out / RUN_FOLDER, train=replace(recipe.train, steps=steps, seed=settings.seed))


# --- Superpixels before and after -------------------------------------------------------------------------


def _untrained(config: PretrainConfig) -> AscViT:
    """The encoder that the run began with, with thresholds from the frames that the run took for it."""
    corpora = open_corpora(config.data, config.clips, config.train.seed, config.out / "found")
    order = Order(corpora.clips, config.clips.weights, config.train.seed)
    frames_B3HW = plain_frames(order, corpora.clips, config.watch.calibration, config.encoder.image_hw[0])
    # The numbers of its blocks are on the page, so a warning of a threshold it starts with adds nothing.
    with superpixel_warnings():
        return untrained_encoder(config, frames_B3HW)


def held_out_scenes(config: PretrainConfig) -> SceneConfig:
    """The scenes that kNN accuracy is measured on: another seed, and textures and hues of their own."""
    size = config.encoder.image_hw[0]
    return replace(config.clips.scene, size=size, seed=config.train.seed + 1, split="test")


def _galleries(settings: DemoSettings, config: PretrainConfig, encoders: dict[str, AscViT]) -> list[Gallery]:
    photographs = photograph_pictures(open_photographs(settings.photographs), config.encoder.image_hw[0])
    scenes = scene_pictures(held_out_scenes(config), range(settings.scenes))
    shown = [
        ("Superpixels of held-out scenes", "Textures and hues that the training never showed.", scenes),
        ("Superpixels of photographs", "Nothing like these was in the training.", photographs),
    ]
    return [
        Gallery(title, note, pictures, {name: group(encoder, pictures) for name, encoder in encoders.items()})
        for title, note, pictures in shown
        if pictures
    ]


# --- What is written --------------------------------------------------------------------------------------


def _make_page(settings: DemoSettings, training: Training, galleries: Sequence[Gallery]) -> Page:
    page = Page(
        "Adaptive Superpixel Coding: pre-training on moving scenes",
        "A Vision Transformer whose tokens are superpixels learns, without labels, from pairs of frames that belong "
        "to the same clip.",
    )
    page.statement(_result_line(training))
    page.warnings("Warnings of the training (blocks counted from 0)", training.warnings)
    page.tables([_knn_table(training), _run_table(training)])
    page.paragraph(
        "kNN accuracy: share of the held-out scenes whose main shape the nearest labelled scenes name, compared "
        "by the features of a frozen network. Labels are used for this measurement only, never for training."
    )
    page.heading("The training")
    page.plots(training_figures(training))
    for gallery in galleries:
        _add_gallery(page, gallery)
    page.heading("About this page")
    page.paragraph(BLOCK_TABLE_NOTE)
    numbers = versions()
    page.paragraph(
        f"Seed {settings.seed}, ASC {numbers['asc']}, PyTorch {numbers['torch']}. All numbers: {RECORD_FILE}; the "
        f"run with its log and the encoder file: {RUN_FOLDER}/."
    )
    return page


def _result_line(training: Training) -> str:
    knn, scenes = training.knn, training.config["clips"]["scenes"]
    return (
        f"{plural(training.steps, 'step')} on {scenes} unlabelled moving scenes, {duration(training.seconds)}, took "
        f"the kNN accuracy on held-out scenes with unseen textures and hues from {knn['untrained']:.1%} (untrained "
        f"network) to {knn['trained']:.1%}; raw pixels reach {knn['pixels']:.1%}, guessing {1 / len(CLASSES):.0%}."
    )


def _knn_line(training: Training) -> str:
    knn = training.knn
    return (
        f"kNN accuracy on held-out scenes: {knn['untrained']:.1%} before training, {knn['trained']:.1%} after, "
        f"{knn['pixels']:.1%} with raw pixels"
    )


def _knn_table(training: Training) -> Table:
    names = {"untrained": "untrained network", "pixels": "raw pixels", "trained": "after training"}
    rows = [[name, f"{training.knn[key]:.1%}"] for key, name in names.items()]
    return Table("kNN on held-out scenes, unseen textures and hues", ["features", "accuracy"], rows, named_rows=True)


def _run_table(training: Training) -> Table:
    model = training.config["model"]
    patches, last = (model["image_size"] // model["patch_size"]) ** 2, training.blocks[-1]["tokens_mean"]
    rows = [
        ["training time", duration(training.seconds)],
        ["steps", f"{training.steps} × {training.config['train']['batch']} clips"],
        ["tokens kept, mean over the blocks", f"{training.last('tokens_share'):.0%} of {patches} patches"],
        ["tokens after the last block", f"{last:.1f} of {patches}"],
        ["parameters", f"{training.result['parameters']:,}".replace(",", " ")],
        ["network", f"{plural(model['depth'], 'block')}, width {model['width']}, {model['image_size']} px frames"],
    ]
    return Table("The run", [], rows, named_rows=True)


def _add_gallery(page: Page, gallery: Gallery) -> None:
    page.heading(gallery.title)
    page.paragraph(
        f"{gallery.note} Upper pictures: borders of the superpixels. Lower pictures: every superpixel in its mean "
        "colour. Both encoders have their thresholds from the same training frames."
    )
    for name, grouping in gallery.groupings.items():
        page.warnings(f"Warnings, {name} (blocks counted from 0)", grouping.warnings)
    count = plural(len(gallery.pictures), "picture")
    page.tables([block_table(f"{name.capitalize()}, {count}", found) for name, found in gallery.groupings.items()])
    add_cards(page, gallery.pictures, gallery.groupings)


def _record(settings: DemoSettings, training: Training, galleries: Sequence[Gallery]) -> dict[str, object]:
    return {
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "seed": settings.seed,
        "settings": asdict(settings) | {"out": str(settings.out)},
        "training": training.record(),
        "galleries": {gallery.title: _gallery_record(gallery) for gallery in galleries},
    }


def _gallery_record(gallery: Gallery) -> dict[str, object]:
    return {name: grouping.record(gallery.pictures) for name, grouping in gallery.groupings.items()}
