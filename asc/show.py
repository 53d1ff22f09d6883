"""``asc superpixels``: calibrate a model, look at the superpixels it forms, and write a page that shows them.

Shape letters: see ``asc.report.groupings``.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from asc.data import SceneConfig
from asc.data.scenes import MIN_SIZE
from asc.files import write_whole
from asc.layer import Neighbourhood, SuperpixelConfig
from asc.report.gallery import (
    Photograph,
    Picture,
    batch_of,
    check_photographs,
    open_photographs,
    photograph_pictures,
    scene_pictures,
)
from asc.report.groupings import (
    BLOCK_TABLE_NOTE,
    Grouping,
    add_cards,
    block_table,
    group,
    spread_blocks,
    superpixel_warnings,
)
from asc.report.page import Page, png_bytes
from asc.report.pictures import Pixels, contact_sheet, draw_boundaries
from asc.report.words import plural, versions
from asc.vit import AscViT, create_model
from asc.weights import from_timm

PAGE_FILE, PICTURE_FILE, RECORD_FILE = "index.html", "superpixels.png", "superpixels.json"

_NEIGHBOURHOODS: tuple[Neighbourhood, ...] = get_args(Neighbourhood)
_MEANING = {
    "global": "global: any two tokens of the image may join",
    "spatial": "spatial: only tokens whose regions touch may join",
}
# Scenes in the picture for the README.
_PICTURE_SCENES = 4
# Forward passes of each model for the comparison of times; a round runs all models, one after another.
_ROUNDS = 3
_STEPS_OF_A_SECTION = 2 * len(_NEIGHBOURHOODS) + 2


@dataclass(frozen=True)
class SuperpixelsSettings:
    """Calibrate a model, group pictures into superpixels, and write a page that shows them.

    The defaults need about a minute on two cores and no network.
    """

    out: Path = Path("superpixels")
    """Folder for the page (index.html), the picture (superpixels.png) and the numbers (superpixels.json)."""
    model: str = "asc_vit_tiny_patch4"
    """Untrained model to show: asc_vit_{tiny,small,base,large}_patch{4,8,16}."""
    size: int = 224
    """Side of the square pictures in pixels; a checkpoint gets the nearest multiple of its patch size."""
    scenes: int = 4
    """Number of drawn scenes to show, at least 1."""
    photographs: tuple[Photograph, ...] = get_args(Photograph)
    """Photographs to show, from those that come with scikit-image."""
    calibration: int = 8
    """Number of frames, of scenes that are not shown, that the thresholds are set on with the photographs."""
    budget: float = SuperpixelConfig.budget
    """Mean share of the original tokens that enters a block, over all blocks."""
    checkpoint: Path | None = None
    """Weights file (.safetensors or .pth) of one of timm's plain Vision Transformers, shown in addition."""
    heads: int | None = None
    """Attention heads of the checkpoint's model, if they are not 64 channels wide."""
    quick_gelu: bool = False
    """Whether the checkpoint's model uses the quick GELU, as OpenAI's CLIP does."""
    seed: int = 0
    """Start of all random draws: untrained weights and scenes."""


@dataclass(frozen=True)
class Source:
    """Where models come from: the same weights with and without superpixels."""

    title: str
    """What the page calls them."""
    plain: AscViT
    """The Vision Transformer without superpixels."""
    models: dict[Neighbourhood, AscViT]
    """The same with superpixels, by neighbourhood; not yet calibrated."""
    size: int
    """Side of the pictures it is shown, in pixels."""

    @property
    def patches(self) -> int:
        """Number of patches of a picture."""
        return (self.size // self.plain.config.patch_size) ** 2


@dataclass(frozen=True)
class Section:
    """Everything that the page says on one set of weights."""

    source: Source
    """Where the models come from."""
    pictures: list[Picture]
    """The pictures that are shown."""
    calibrated_on: str
    """The images that set the thresholds, in words."""
    groupings: dict[Neighbourhood, Grouping]
    """The superpixels, by neighbourhood."""
    time_ratios: dict[Neighbourhood, float]
    """Time of a forward pass of one picture, divided by that of the plain Vision Transformer."""


def show_superpixels(settings: SuperpixelsSettings) -> Path:
    """Calibrate the models, group the pictures, and write page, picture and numbers.

    Returns:
        The page.
    """
    # Everything that can be wrong with the settings comes first, not after a minute of work.
    _check(settings)
    sources = [untrained_source(settings)]
    if settings.checkpoint is not None:
        sources.append(checkpoint_source(settings, settings.checkpoint))
    photographs = open_photographs(settings.photographs)
    with tqdm(total=_STEPS_OF_A_SECTION * len(sources) + 1, unit="step") as bar:
        sections = [_make_section(source, settings, photographs, bar) for source in sources]
        page = _make_page(settings, sections, bar)
        with _step(bar, "writing"):
            _write(settings, sections, page)
    for section in sections:
        for neighbourhood, grouping in section.groupings.items():
            for message in grouping.warnings:
                print(f"warning ({section.source.title}, {neighbourhood}): {message}")
    print(f"the page is {settings.out / PAGE_FILE}")
    return settings.out / PAGE_FILE


def _check(settings: SuperpixelsSettings) -> None:
    for name in ("scenes", "calibration"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(settings, name)}")
    check_photographs(settings.photographs)
    if settings.checkpoint is None and (settings.heads is not None or settings.quick_gelu):
        raise ValueError("heads and quick_gelu describe the model of a checkpoint: give a checkpoint, too")
    SceneConfig(size=settings.size, seed=settings.seed)  # checks these two
    if settings.out.exists() and not settings.out.is_dir():
        raise ValueError(f"out must be a folder, but {settings.out} is a file")


# --- Models -----------------------------------------------------------------------------------------------


def untrained_source(settings: SuperpixelsSettings) -> Source:
    """The model of the settings with random weights."""

    def build(superpixels: SuperpixelConfig | None) -> AscViT:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            return create_model(settings.model, superpixels, image_size=settings.size).eval()

    models = {name: build(config) for name, config in _superpixel_configs(settings).items()}
    return Source(f"Untrained: {settings.model}", build(None), models, settings.size)


def checkpoint_source(settings: SuperpixelsSettings, file: Path) -> Source:
    """The model in timm's weights file."""
    # Asked here because from_timm would take a name without an ending for one of timm's models.
    if not file.is_file():
        raise ValueError(f"there is no weights file {file}")
    given: dict[str, object] = {"quick_gelu": settings.quick_gelu}
    if settings.heads is not None:
        given["heads"] = settings.heads

    def build(superpixels: SuperpixelConfig | None) -> AscViT:
        try:
            return from_timm(file, superpixels, **given)
        except ValueError as error:
            if str(file) in str(error):
                raise
            raise ValueError(f"{file}: {error}") from error

    plain = build(None)
    models = {name: build(config) for name, config in _superpixel_configs(settings).items()}
    patch = plain.config.patch_size
    size = patch * max(math.ceil(MIN_SIZE / patch), round(settings.size / patch))
    return Source(f"Pre-trained: {file.name}", plain, models, size)


def _superpixel_configs(settings: SuperpixelsSettings) -> dict[Neighbourhood, SuperpixelConfig]:
    return {
        neighbourhood: SuperpixelConfig(neighbourhood=neighbourhood, budget=settings.budget)
        for neighbourhood in _NEIGHBOURHOODS
    }


# --- Pictures ---------------------------------------------------------------------------------------------


def shown_pictures(settings: SuperpixelsSettings, photographs: dict[str, Image.Image], size: int) -> list[Picture]:
    """The pictures on the page: scenes, then photographs."""
    scenes = scene_pictures(_scenes(settings, size), range(settings.scenes))
    return scenes + photograph_pictures(photographs, size)


def calibration_images(settings: SuperpixelsSettings, shown: Sequence[Picture], size: int) -> Tensor:
    """Images to calibrate on: frames of scenes that are not shown, and the few photographs there are."""
    indices = range(settings.scenes, settings.scenes + settings.calibration)
    photographs = [picture for picture in shown if not picture.is_scene]
    return batch_of(scene_pictures(_scenes(settings, size), indices) + photographs)


def _scenes(settings: SuperpixelsSettings, size: int) -> SceneConfig:
    return SceneConfig(size=size, seed=settings.seed)


# --- Measuring --------------------------------------------------------------------------------------------


def _make_section(
    source: Source, settings: SuperpixelsSettings, photographs: dict[str, Image.Image], bar: tqdm[None]
) -> Section:
    pictures = shown_pictures(settings, photographs, source.size)
    calibration_B3HW = calibration_images(settings, pictures, source.size)
    groupings = {}
    for neighbourhood, model in source.models.items():
        with _step(bar, f"calibrating, {neighbourhood}"), superpixel_warnings() as messages:
            model.calibrate(calibration_B3HW)
        with _step(bar, f"grouping, {neighbourhood}"):
            grouping = group(model, pictures)
        groupings[neighbourhood] = replace(grouping, warnings=messages + grouping.warnings)
    with _step(bar, "timing"):
        ratios = _time_ratios(source.plain, source.models, batch_of(pictures[:1]))
    frames = plural(settings.calibration, "frame")
    calibrated_on = f"{frames} of other scenes and {plural(len(photographs), 'photograph')}"
    return Section(source, pictures, calibrated_on, groupings, ratios)


@contextmanager
def _step(bar: tqdm[None], name: str) -> Iterator[None]:
    bar.set_description(name)
    yield
    bar.update()


@torch.no_grad()
def _time_ratios(plain: AscViT, models: dict[Neighbourhood, AscViT], image_13HW: Tensor) -> dict[Neighbourhood, float]:
    def seconds(model: AscViT) -> float:
        start = time.perf_counter()
        model(image_13HW)
        return time.perf_counter() - start

    ratios: dict[Neighbourhood, list[float]] = {neighbourhood: [] for neighbourhood in models}
    # One picture alone can warn of what the page says of it anyway: how many tokens it has.
    with superpixel_warnings():
        for _ in range(_ROUNDS):
            base = seconds(plain)
            for neighbourhood, model in models.items():
                ratios[neighbourhood].append(seconds(model) / base)
    return {neighbourhood: statistics.median(rounds) for neighbourhood, rounds in ratios.items()}


# --- What is written --------------------------------------------------------------------------------------


def _write(settings: SuperpixelsSettings, sections: Sequence[Section], page: Page) -> None:
    record = json.dumps(_record(settings, sections), indent=2) + "\n"
    write_whole(settings.out / PICTURE_FILE, png_bytes(_readme_picture(sections[0])))
    write_whole(settings.out / RECORD_FILE, record.encode())
    page.write(settings.out / PAGE_FILE)


def _readme_picture(section: Section) -> Pixels:
    """Scenes only, because photographs have owners."""
    grouping = section.groupings["global"]
    after = spread_blocks(grouping, 3)
    rows, captions = [], []
    for index, picture in enumerate(section.pictures[:_PICTURE_SCENES]):
        if not picture.is_scene:
            break
        counted = grouping.counted(index)
        maps = [grouping.labels_LBhw[block - 1, index] for block in after]
        rows.append([picture.image_HW3, *(draw_boundaries(picture.image_HW3, labels_hw) for labels_hw in maps)])
        patches = f"{maps[0].size} patches"
        captions.append([patches, *(plural(counted[block - 1].tokens, "token") for block in after)])
    return contact_sheet(rows, ["input", *(f"after {plural(block, 'block')}" for block in after)], captions)


def _make_page(settings: SuperpixelsSettings, sections: Sequence[Section], bar: tqdm[None]) -> Page:
    page = Page(
        "Adaptive Superpixel Coding: the superpixels a network forms",
        "Each block of the network joins tokens with similar keys into superpixels, so every picture has its "
        "own number of tokens. Upper pictures: borders of the superpixels. Lower pictures: every superpixel "
        "in its mean colour.",
    )
    for section in sections:
        with _step(bar, "drawing"):
            _add_section(page, section)
    page.heading("About this page")
    numbers = versions()
    page.paragraph(
        f"Seed {settings.seed}, ASC {numbers['asc']}, PyTorch {numbers['torch']}. All numbers: {RECORD_FILE}."
    )
    return page


def _add_section(page: Page, section: Section) -> None:
    page.heading(section.source.title)
    page.paragraph(_model_line(section))
    page.paragraph(_time_line(section))
    for neighbourhood, grouping in section.groupings.items():
        page.warnings(f"Warnings, {neighbourhood} (blocks counted from 0)", grouping.warnings)
    count = plural(len(section.pictures), "picture")
    page.tables(
        [
            block_table(f"{neighbourhood.capitalize()}, {count}", grouping)
            for neighbourhood, grouping in section.groupings.items()
        ]
    )
    page.paragraph(BLOCK_TABLE_NOTE)
    add_cards(page, section.pictures, {_MEANING[name]: grouping for name, grouping in section.groupings.items()})


def _model_line(section: Section) -> str:
    source, config = section.source, section.source.plain.config
    size, patch = (f"{side} × {side} pixels" for side in (source.size, config.patch_size))
    return (
        f"{plural(config.depth, 'block')}, width {config.width}; pictures of {size} in {source.patches} "
        f"patches of {patch}. Thresholds calibrated once for each neighbourhood, on {section.calibrated_on}."
    )


def _time_line(section: Section) -> str:
    ratios = ", ".join(f"{ratio:.2f} ({name})" for name, ratio in section.time_ratios.items())
    threads = plural(torch.get_num_threads(), "thread")
    return (
        f"Time of a forward pass of one picture, as a multiple of the plain Vision Transformer's: {ratios}. "
        f"Median of {_ROUNDS} rounds on the CPU, {threads}."
    )


def _record(settings: SuperpixelsSettings, sections: Sequence[Section]) -> dict[str, object]:
    return {
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "seed": settings.seed,
        "settings": {name: str(x) if isinstance(x, Path) else x for name, x in asdict(settings).items()},
        "sections": [_section_record(section) for section in sections],
    }


def _section_record(section: Section) -> dict[str, object]:
    config = section.source.plain.config
    return {
        "title": section.source.title,
        "depth": config.depth,
        "width": config.width,
        "patch_size": config.patch_size,
        "size": section.source.size,
        "patches": section.source.patches,
        "calibrated_on": section.calibrated_on,
        "time_ratios": section.time_ratios,
        "groupings": {name: grouping.record(section.pictures) for name, grouping in section.groupings.items()},
    }
