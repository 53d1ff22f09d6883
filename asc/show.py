"""``asc superpixels``: look at the superpixels a model forms, and write a page that shows them.

An encoder that has superpixels is shown as it is; one that has none is given them, and they are calibrated.

Shape letters: see ``asc.report.groupings``.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from asc.data import SceneConfig
from asc.files import write_whole
from asc.layer import Neighbourhood, SuperpixelConfig
from asc.report.gallery import (
    IMAGENET,
    Colours,
    Photograph,
    Picture,
    batch_of,
    check_photographs,
    open_folder,
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
from asc.report.pictures import Pixels, contact_sheet, draw_boundaries, enlarged
from asc.report.words import plural, versions
from asc.tasks.encoders import Encoder, open_encoder
from asc.vit import AscViT, create_model
from asc.weights import CONFIG_FILE, WEIGHTS_FILE, from_timm, without_superpixels

PAGE_FILE, PICTURE_FILE, RECORD_FILE = "index.html", "superpixels.png", "superpixels.json"

_NEIGHBOURHOODS: tuple[Neighbourhood, ...] = get_args(Neighbourhood)
_MEANING = {
    "global": "global: any two tokens of the image may join",
    "spatial": "spatial: only tokens whose regions touch may join",
}
# Rows of the picture.
_ROWS = 4
_UNTRAINED_SIZE = 224
# Forward passes of each model for the comparison of times; a round runs all models, one after another.
_ROUNDS = 3


@dataclass(frozen=True)
class SuperpixelsSettings:
    """Group pictures into superpixels, and write a page that shows them.

    The defaults need about a minute on two cores and no network.
    """

    out: Path = Path("superpixels")
    """Folder for the page (index.html), the picture (superpixels.png) and the numbers (superpixels.json)."""
    checkpoint: str | None = None
    """Encoder to show, such as the folder of a run, an encoder folder, a weights file or ``timm:NAME@FILE``; all kinds
    are in ``asc eval knn --help``. Its superpixels are shown as they are; one that has none is given them."""
    model: str = "asc_vit_tiny_patch4"
    """Untrained model to show, where there is no checkpoint: asc_vit_{tiny,small,base,large}_patch{4,8,16}."""
    images: Path | None = None
    """Folder of pictures of your own, shown in place of scenes and photographs."""
    most_images: int = 8
    """How many of them are shown, at most: the first by name."""
    size: int | None = None
    """Side of the square pictures in pixels, a multiple of the patch size. None: what the checkpoint was made for, or
    224."""
    scenes: int = 4
    """Number of drawn scenes to show, at least 1."""
    photographs: tuple[Photograph, ...] = get_args(Photograph)
    """Photographs to show, from those that come with scikit-image."""
    recalibrate: bool = False
    """Whether thresholds that a checkpoint brings are set anew on these pictures, to keep its budget."""
    calibration: int = 8
    """Number of frames, of scenes that are not shown, that thresholds are set on with the photographs; pictures of your
    own are enough without."""
    budget: float | None = None
    """Mean share of the original tokens that enters a block, over all blocks, where the superpixels are not a
    checkpoint's own. None: that of ``SuperpixelConfig``."""
    heads: int | None = None
    """Attention heads of the model of a weights file, if they are not 64 channels wide."""
    quick_gelu: bool = False
    """Whether the model of a weights file uses the quick GELU, as OpenAI's CLIP does."""
    seed: int = 0
    """Start of all random draws: untrained weights and scenes."""


@dataclass(frozen=True)
class Source:
    """Where models come from: the same weights with and without superpixels."""

    title: str
    """What the page calls them."""
    about: str
    """What the page says of them."""
    plain: AscViT
    """The Vision Transformer without superpixels."""
    models: Mapping[Neighbourhood, AscViT]
    """The same with superpixels, by neighbourhood."""
    size: int
    """Side of the pictures it is shown, in pixels."""
    calibrated: bool = False
    """Whether the thresholds are to stay as they are."""
    colours: Colours = IMAGENET
    """What its pixels are normalised by."""

    @property
    def patches(self) -> int:
        """Number of patches of a picture."""
        return (self.size // self.plain.config.patch_size) ** 2


@dataclass(frozen=True)
class Section:
    """Everything that the page says."""

    source: Source
    """Where the models come from."""
    pictures: list[Picture]
    """The pictures that are shown."""
    calibrated_on: str | None
    """The images that set the thresholds, in words; None: they are the checkpoint's own."""
    groupings: dict[Neighbourhood, Grouping]
    """The superpixels, by neighbourhood."""
    time_ratios: dict[Neighbourhood, float]
    """Time of a forward pass of one picture, divided by that of the plain Vision Transformer."""


def show_superpixels(settings: SuperpixelsSettings) -> Path:
    """Group the pictures, calibrating first what is not calibrated, and write page, picture and numbers.

    Returns:
        The page.
    """
    # Everything that can be wrong with the settings comes first, not after a minute of work.
    _check(settings)
    photographs = _opened_pictures(settings)
    source = open_source(settings)
    steps = len(source.models) * (1 if source.calibrated else 2) + 3
    with tqdm(total=steps, unit="step") as bar:
        section = _make_section(source, settings, photographs, bar)
        with _step(bar, "drawing"):
            page = _make_page(settings, section)
        with _step(bar, "writing"):
            _write(settings, section, page)
    for neighbourhood, grouping in section.groupings.items():
        for message in grouping.warnings:
            print(f"warning ({source.title}, {neighbourhood}): {message}")
    print(f"the page is {settings.out / PAGE_FILE}")
    return settings.out / PAGE_FILE


def _check(settings: SuperpixelsSettings) -> None:
    for name in ("scenes", "calibration", "most_images"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(settings, name)}")
    check_photographs(settings.photographs)
    if (settings.heads is not None or settings.quick_gelu) and not _is_weights_file(settings.checkpoint):
        raise ValueError("heads and quick_gelu describe the model of a weights file: give one as checkpoint, too")
    if settings.recalibrate and settings.checkpoint is None:
        raise ValueError("recalibrate is about the thresholds of a checkpoint: give one, too")
    SceneConfig(size=settings.size or _UNTRAINED_SIZE, seed=settings.seed)  # checks these two
    if settings.out.exists() and not settings.out.is_dir():
        raise ValueError(f"out must be a folder, but {settings.out} is a file")


# --- Models -----------------------------------------------------------------------------------------------


def open_source(settings: SuperpixelsSettings) -> Source:
    """The models that the settings ask for."""
    if settings.checkpoint is None:
        return untrained_source(settings)
    if settings.heads is None and not settings.quick_gelu:
        # timm's networks take the size that they are made for; as ours they take any.
        size = None if settings.checkpoint.startswith("timm:") else settings.size
        return _source_of(settings, settings.checkpoint, open_encoder(settings.checkpoint, size, setting="size"))
    given: dict[str, object] = {"quick_gelu": settings.quick_gelu}
    if settings.heads is not None:
        given["heads"] = settings.heads
    plain = from_timm(settings.checkpoint, superpixels=None, **given)
    size = settings.size or plain.config.image_hw[0]
    _check_size(size, plain.config.patch_size)
    return _given_superpixels(settings, Path(settings.checkpoint).stem, "", plain, size)


def untrained_source(settings: SuperpixelsSettings) -> Source:
    """The model of the settings with random weights."""
    size = settings.size or _UNTRAINED_SIZE
    _, _, patch = settings.model.rpartition("patch")
    if patch.isdecimal():
        _check_size(size, int(patch))

    def build(superpixels: SuperpixelConfig | None) -> AscViT:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            return create_model(settings.model, superpixels, image_size=size).eval()

    models = {name: build(config) for name, config in _superpixel_configs(settings).items()}
    return Source(f"Untrained: {settings.model}", "", build(None), models, size)


def _source_of(settings: SuperpixelsSettings, checkpoint: str, encoder: Encoder) -> Source:
    colours = Colours(encoder.mean, encoder.deviation)
    model = encoder.vit
    if model is None:
        try:
            model = from_timm(encoder.module, superpixels=None)
        except ValueError as error:
            raise ValueError(f"{checkpoint} has no superpixels and cannot be given any: {error}") from error
    size = settings.size or encoder.image_size
    _check_size(size, model.config.patch_size)
    superpixels = model.config.superpixels
    if superpixels is None:
        return _given_superpixels(settings, encoder.name, encoder.description, model, size, colours)
    if settings.budget is not None:
        raise ValueError(
            f"{checkpoint} has superpixels of its own, for a budget of {superpixels.budget:g}: leave out budget; "
            f"asc eval superpixels shows them at other numbers of tokens"
        )
    if model.config.pool == "grouped":
        raise ValueError(
            f"{checkpoint} has no superpixels to show: its last layer groups tokens for the pooled feature alone"
        )
    calibrated = all(bool(layer.threshold.calibrated) for layer in model.superpixel_layers)
    return Source(
        f"Encoder: {encoder.name}",
        f"{encoder.description}.",
        without_superpixels(model),
        {superpixels.neighbourhood: model},
        size,
        calibrated and not settings.recalibrate,
        colours,
    )


def _given_superpixels(
    settings: SuperpixelsSettings, name: str, description: str, plain: AscViT, size: int, colours: Colours = IMAGENET
) -> Source:
    """A Vision Transformer that has no superpixels, and the same with them."""

    def build(superpixels: SuperpixelConfig) -> AscViT:
        model = AscViT(replace(plain.config, superpixels=superpixels))
        model.load_state_dict(model.state_dict() | plain.state_dict())
        return model.eval()

    models = {neighbourhood: build(config) for neighbourhood, config in _superpixel_configs(settings).items()}
    about = "It was trained without superpixels and is given them here."
    about = f"{description}. {about}" if description else about
    return Source(f"Encoder: {name}", about, plain, models, size, colours=colours)


def _is_weights_file(checkpoint: str | None) -> bool:
    """Whether it is a file of weights alone, which says nothing of its network."""
    if checkpoint is None:
        return False
    path = Path(checkpoint)
    return path.is_file() and path.name not in (WEIGHTS_FILE, CONFIG_FILE)


def _check_size(size: int, patch: int) -> None:
    if size % patch:
        nearest = patch * max(1, round(size / patch))
        raise ValueError(f"size {size} is no multiple of the patch size {patch}; give --size {nearest}")


def _superpixel_configs(settings: SuperpixelsSettings) -> dict[Neighbourhood, SuperpixelConfig]:
    budget = SuperpixelConfig.budget if settings.budget is None else settings.budget
    return {
        neighbourhood: SuperpixelConfig(neighbourhood=neighbourhood, budget=budget) for neighbourhood in _NEIGHBOURHOODS
    }


# --- Pictures ---------------------------------------------------------------------------------------------


def _opened_pictures(settings: SuperpixelsSettings) -> dict[str, Image.Image]:
    if settings.images is not None:
        return open_folder(settings.images, settings.most_images)
    return open_photographs(settings.photographs)


def shown_pictures(settings: SuperpixelsSettings, photographs: dict[str, Image.Image], size: int) -> list[Picture]:
    """The pictures on the page: scenes, then photographs, or those of the folder alone."""
    own = photograph_pictures(photographs, size)
    if settings.images is not None:
        return own
    return scene_pictures(_scenes(settings, size), range(settings.scenes)) + own


def calibration_pictures(settings: SuperpixelsSettings, shown: Sequence[Picture], size: int) -> list[Picture]:
    """Images to calibrate on: frames of scenes that are not shown, and the few photographs there are; or those of the
    folder alone."""
    if settings.images is not None:
        return list(shown)
    indices = range(settings.scenes, settings.scenes + settings.calibration)
    return scene_pictures(_scenes(settings, size), indices) + [one for one in shown if not one.is_scene]


def _scenes(settings: SuperpixelsSettings, size: int) -> SceneConfig:
    return SceneConfig(size=size, seed=settings.seed)


# --- Measuring --------------------------------------------------------------------------------------------


def _make_section(
    source: Source, settings: SuperpixelsSettings, photographs: dict[str, Image.Image], bar: tqdm[None]
) -> Section:
    pictures = shown_pictures(settings, photographs, source.size)
    groupings = {}
    for neighbourhood, model in source.models.items():
        messages: list[str] = []
        if not source.calibrated:
            with _step(bar, f"calibrating, {neighbourhood}"), superpixel_warnings() as messages:
                calibrating = calibration_pictures(settings, pictures, source.size)
                model.calibrate(batch_of(calibrating, source.colours))
        with _step(bar, f"grouping, {neighbourhood}"):
            grouping = group(model, pictures, source.colours)
        groupings[neighbourhood] = replace(grouping, warnings=messages + grouping.warnings)
    with _step(bar, "timing"):
        ratios = _time_ratios(source.plain, source.models, batch_of(pictures[:1], source.colours))
    calibrated_on = None if source.calibrated else _calibrated_on(settings, len(photographs))
    return Section(source, pictures, calibrated_on, groupings, ratios)


def _calibrated_on(settings: SuperpixelsSettings, photographs: int) -> str:
    if settings.images is not None:
        return f"these {plural(photographs, 'picture')}"
    return f"{plural(settings.calibration, 'frame')} of other scenes and {plural(photographs, 'photograph')}"


@contextmanager
def _step(bar: tqdm[None], name: str) -> Iterator[None]:
    bar.set_description(name)
    yield
    bar.update()


@torch.no_grad()
def _time_ratios(
    plain: AscViT, models: Mapping[Neighbourhood, AscViT], image_13HW: Tensor
) -> dict[Neighbourhood, float]:
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


def _write(settings: SuperpixelsSettings, section: Section, page: Page) -> None:
    record = json.dumps(_record(settings, section), indent=2) + "\n"
    write_whole(settings.out / PICTURE_FILE, png_bytes(_sheet(section)))
    write_whole(settings.out / RECORD_FILE, record.encode())
    page.write(settings.out / PAGE_FILE)


def _sheet(section: Section) -> Pixels:
    """A few scenes, or pictures of the user's own: photographs that lie beside scenes have other owners."""
    grouping = next(iter(section.groupings.values()))
    after = spread_blocks(grouping, 3)
    rows, captions = [], []
    for index, picture in enumerate(section.pictures[:_ROWS]):
        if picture.is_scene != section.pictures[0].is_scene:
            break
        counted = grouping.counted(index)
        maps = [grouping.labels_LBhw[block - 1, index] for block in after]
        image_HW3 = enlarged(picture.image_HW3)  # leaves room for the words below it
        rows.append([image_HW3, *(draw_boundaries(image_HW3, labels_hw) for labels_hw in maps)])
        patches = f"{maps[0].size} patches"
        captions.append([patches, *(plural(counted[block - 1].tokens, "token") for block in after)])
    return contact_sheet(rows, ["input", *(f"after {plural(block, 'block')}" for block in after)], captions)


def _make_page(settings: SuperpixelsSettings, section: Section) -> Page:
    page = Page(
        "Adaptive Superpixel Coding: the superpixels a network forms",
        "Each block of the network joins tokens with similar keys into superpixels, so every picture has its "
        "own number of tokens. Upper pictures: borders of the superpixels. Lower pictures: every superpixel "
        "in its mean colour.",
    )
    _add_section(page, section)
    page.heading("About this page")
    numbers = versions()
    page.paragraph(
        f"Seed {settings.seed}, ASC {numbers['asc']}, PyTorch {numbers['torch']}. All numbers: {RECORD_FILE}."
    )
    return page


def _add_section(page: Page, section: Section) -> None:
    page.heading(section.source.title)
    if section.source.about:
        page.paragraph(section.source.about[:1].upper() + section.source.about[1:])
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
    thresholds = "Thresholds are the encoder's own."
    if section.calibrated_on is not None:
        each = " once for each neighbourhood," if len(source.models) > 1 else ""
        thresholds = f"Thresholds calibrated{each} on {section.calibrated_on}."
    return (
        f"{plural(config.depth, 'block')}, width {config.width}; pictures of {size} in {source.patches} "
        f"patches of {patch}. {thresholds}"
    )


def _time_line(section: Section) -> str:
    ratios = ", ".join(f"{ratio:.2f} ({name})" for name, ratio in section.time_ratios.items())
    threads = plural(torch.get_num_threads(), "thread")
    return (
        f"Time of a forward pass of one picture, as a multiple of the plain Vision Transformer's: {ratios}. "
        f"Median of {_ROUNDS} rounds on the CPU, {threads}."
    )


def _record(settings: SuperpixelsSettings, section: Section) -> dict[str, object]:
    return {
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "seed": settings.seed,
        "settings": {name: str(x) if isinstance(x, Path) else x for name, x in asdict(settings).items()},
    } | _section_record(section)


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
