"""The demo: calibrate a model, look at the superpixels it forms, and write a page that shows them.

Shape letters: L blocks, B pictures, h and w rows and columns of the patch grid; others see ``asc.tokens``.
"""

from __future__ import annotations

import json
import math
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from asc.data import CLASSES, Scene, SceneConfig, normalise
from asc.data.scenes import MIN_SIZE
from asc.layer import LayerStats, Neighbourhood, SuperpixelConfig, SuperpixelWarning
from asc.report.page import Figure, Page, Table, png_bytes, write_whole
from asc.report.pictures import Labels, Pixels, contact_sheet, draw_boundaries, paint_means
from asc.vit import AscViT, create_model
from asc.weights import from_timm

Photograph = Literal["astronaut", "chelsea", "coffee", "rocket"]

PAGE_FILE, PICTURE_FILE, RECORD_FILE = "index.html", "superpixels.png", "demo.json"

_NEIGHBOURHOODS: tuple[Neighbourhood, ...] = get_args(Neighbourhood)
_MEANING = {
    "global": "global: any two tokens of the image may join",
    "spatial": "spatial: only tokens whose regions touch may join",
}
# Scenes in the picture for the README, and the frame that is taken of every scene.
_PICTURE_SCENES = 4
_FRAME = 8
# Forward passes of each model for the comparison of times; a round runs all models, one after another.
_ROUNDS = 3
_STEPS_OF_A_SECTION = 2 * len(_NEIGHBOURHOODS) + 2


@dataclass(frozen=True)
class DemoSettings:
    """Calibrate a model, group pictures into superpixels, and write a page that shows them.

    The defaults need about a minute on two cores and no network.
    """

    out: Path = Path("demo")
    """Folder for the page (index.html), the picture (superpixels.png) and the numbers (demo.json)."""
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
class Picture:
    """An image to show."""

    name: str
    """What the page calls it."""
    image_HW3: Pixels
    """Its pixels, in a square."""
    is_scene: bool
    """Whether our own code drew it; else it is a photograph."""


@dataclass(frozen=True)
class Counted:
    """What one block made of one picture."""

    after_blocks: int
    """Number of blocks that have run."""
    tokens: int
    """Superpixels of the picture."""
    largest_share: float
    """Share of the picture that the largest superpixel covers."""


@dataclass(frozen=True)
class Grouping:
    """The superpixels that a calibrated model makes of all pictures, under one neighbourhood."""

    labels_LBhw: Labels
    """The superpixel of every patch, after every block, in every picture."""
    blocks: dict[int, LayerStats]
    """Numbers over all pictures, by the index of the block."""
    warnings: list[str]
    """What the library had to complain about."""

    def counted(self, picture: int) -> list[Counted]:
        """The numbers on one picture after every block."""
        maps_Lhw = self.labels_LBhw[:, picture]
        return [_count(labels_hw, after) for after, labels_hw in enumerate(maps_Lhw, start=1)]


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


def run_demo(settings: DemoSettings) -> Path:
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


def _check(settings: DemoSettings) -> None:
    for name in ("scenes", "calibration"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(settings, name)}")
    if unknown := sorted(set(settings.photographs) - set(get_args(Photograph))):
        known = ", ".join(get_args(Photograph))
        raise ValueError(f"unknown photographs {', '.join(unknown)}; choose from {known}")
    if settings.checkpoint is None and (settings.heads is not None or settings.quick_gelu):
        raise ValueError("heads and quick_gelu describe the model of a checkpoint: give a checkpoint, too")
    SceneConfig(size=settings.size, seed=settings.seed)  # checks these two
    if settings.out.exists() and not settings.out.is_dir():
        raise ValueError(f"out must be a folder, but {settings.out} is a file")


# --- Models -----------------------------------------------------------------------------------------------


def untrained_source(settings: DemoSettings) -> Source:
    """The model of the settings with random weights."""

    def build(superpixels: SuperpixelConfig | None) -> AscViT:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            return create_model(settings.model, superpixels, image_size=settings.size).eval()

    models = {name: build(config) for name, config in _superpixel_configs(settings).items()}
    return Source(f"Untrained: {settings.model}", build(None), models, settings.size)


def checkpoint_source(settings: DemoSettings, file: Path) -> Source:
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


def _superpixel_configs(settings: DemoSettings) -> dict[Neighbourhood, SuperpixelConfig]:
    return {
        neighbourhood: SuperpixelConfig(neighbourhood=neighbourhood, budget=settings.budget)
        for neighbourhood in _NEIGHBOURHOODS
    }


# --- Pictures ---------------------------------------------------------------------------------------------


def open_photographs(names: Sequence[str]) -> dict[str, Image.Image]:
    """Those of scikit-image's photographs that are on this computer; a line is printed for each other one."""
    # Read from the package itself: skimage.data would try to fetch what is missing.
    folder = files("skimage.data")
    found: dict[str, Image.Image] = {}
    for name in names:
        for file in (folder / f"{name}.png", folder / f"{name}.jpg"):
            if file.is_file():
                with file.open("rb") as stream:
                    found[name] = Image.open(stream).convert("RGB")
        if name not in found:
            print(f"skipped the photograph {name}: this scikit-image does not bring it along")
    return found


def shown_pictures(settings: DemoSettings, photographs: dict[str, Image.Image], size: int) -> list[Picture]:
    """The pictures on the page: scenes, then photographs."""
    scenes = [_scene_picture(settings, size, index) for index in range(settings.scenes)]
    return scenes + [Picture(name, _square(photo, size), False) for name, photo in photographs.items()]


def calibration_images(settings: DemoSettings, shown: Sequence[Picture], size: int) -> Tensor:
    """Images to calibrate on: frames of scenes that are not shown, and the few photographs there are."""
    indices = range(settings.scenes, settings.scenes + settings.calibration)
    unseen = [_scene_picture(settings, size, index).image_HW3 for index in indices]
    photographs = [picture.image_HW3 for picture in shown if not picture.is_scene]
    return normalise(np.stack(unseen + photographs))


def _scene_picture(settings: DemoSettings, size: int, index: int) -> Picture:
    scene = Scene(SceneConfig(size=size, seed=settings.seed), index)
    return Picture(f"scene {index} ({CLASSES[scene.label]})", scene.frame(_FRAME).image_HW3, True)


def _square(photo: Image.Image, size: int) -> Pixels:
    side = min(photo.size)
    left, top = (photo.width - side) // 2, (photo.height - side) // 2
    cropped = photo.crop((left, top, left + side, top + side))
    return np.asarray(cropped.resize((size, size), Image.Resampling.LANCZOS))


# --- Measuring --------------------------------------------------------------------------------------------


def _make_section(
    source: Source, settings: DemoSettings, photographs: dict[str, Image.Image], bar: tqdm[None]
) -> Section:
    pictures = shown_pictures(settings, photographs, source.size)
    images_B3HW = normalise(np.stack([picture.image_HW3 for picture in pictures]))
    calibration_B3HW = calibration_images(settings, pictures, source.size)
    groupings = {}
    for neighbourhood, model in source.models.items():
        with _superpixel_warnings() as messages:
            with _step(bar, f"calibrating, {neighbourhood}"):
                model.calibrate(calibration_B3HW)
            with _step(bar, f"grouping, {neighbourhood}"):
                labels_LBhw = model.superpixels(images_B3HW).numpy()
                stats = model.diagnostics()
        groupings[neighbourhood] = Grouping(labels_LBhw, stats, messages)
    with _step(bar, "timing"):
        ratios = _time_ratios(source.plain, source.models, images_B3HW[:1])
    frames = _plural(settings.calibration, "frame")
    calibrated_on = f"{frames} of other scenes and {_plural(len(photographs), 'photograph')}"
    return Section(source, pictures, calibrated_on, groupings, ratios)


@contextmanager
def _step(bar: tqdm[None], name: str) -> Iterator[None]:
    bar.set_description(name)
    yield
    bar.update()


@contextmanager
def _superpixel_warnings() -> Iterator[list[str]]:
    """Collect the library's warnings for the page; all others go on their way."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SuperpixelWarning)
        yield messages
    for warning in caught:
        if issubclass(warning.category, SuperpixelWarning):
            messages.append(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


@torch.no_grad()
def _time_ratios(plain: AscViT, models: dict[Neighbourhood, AscViT], image_13HW: Tensor) -> dict[Neighbourhood, float]:
    def seconds(model: AscViT) -> float:
        start = time.perf_counter()
        model(image_13HW)
        return time.perf_counter() - start

    ratios: dict[Neighbourhood, list[float]] = {neighbourhood: [] for neighbourhood in models}
    # One picture alone can warn of what the page says of it anyway: how many tokens it has.
    with _superpixel_warnings():
        for _ in range(_ROUNDS):
            base = seconds(plain)
            for neighbourhood, model in models.items():
                ratios[neighbourhood].append(seconds(model) / base)
    return {neighbourhood: statistics.median(rounds) for neighbourhood, rounds in ratios.items()}


def _count(labels_hw: Labels, after_blocks: int) -> Counted:
    sizes_N = np.unique(labels_hw, return_counts=True)[1]
    return Counted(after_blocks, len(sizes_N), float(sizes_N.max() / labels_hw.size))


# --- What is written --------------------------------------------------------------------------------------


def _spread(depth: int, parts: int) -> list[int]:
    """The first block, then evenly spread ones up to the last, counted from 1."""
    return sorted({1, *(max(1, round(depth * part / parts)) for part in range(1, parts + 1))})


def _write(settings: DemoSettings, sections: Sequence[Section], page: Page) -> None:
    record = json.dumps(_record(settings, sections), indent=2) + "\n"
    write_whole(settings.out / PICTURE_FILE, png_bytes(_readme_picture(sections[0])))
    write_whole(settings.out / RECORD_FILE, record.encode())
    page.write(settings.out / PAGE_FILE)


def _readme_picture(section: Section) -> Pixels:
    """Scenes only, because photographs have owners."""
    grouping = section.groupings["global"]
    after = _spread(len(grouping.labels_LBhw), 3)
    rows, captions = [], []
    for index, picture in enumerate(section.pictures[:_PICTURE_SCENES]):
        if not picture.is_scene:
            break
        counted = grouping.counted(index)
        maps = [grouping.labels_LBhw[block - 1, index] for block in after]
        rows.append([picture.image_HW3, *(draw_boundaries(picture.image_HW3, labels_hw) for labels_hw in maps)])
        patches = f"{maps[0].size} patches"
        captions.append([patches, *(_plural(counted[block - 1].tokens, "token") for block in after)])
    return contact_sheet(rows, ["input", *(f"after {_plural(block, 'block')}" for block in after)], captions)


def _make_page(settings: DemoSettings, sections: Sequence[Section], bar: tqdm[None]) -> Page:
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
    versions = f"ASC {_own_version()}, PyTorch {torch.__version__}"
    page.paragraph(f"Seed {settings.seed}, {versions}. All numbers: {RECORD_FILE}.")
    return page


def _add_section(page: Page, section: Section) -> None:
    page.heading(section.source.title)
    page.paragraph(_model_line(section))
    page.paragraph(_time_line(section))
    for neighbourhood, grouping in section.groupings.items():
        page.warnings(f"Warnings, {neighbourhood} (blocks counted from 0)", grouping.warnings)
    count = _plural(len(section.pictures), "picture")
    page.tables(
        [
            _block_table(f"{neighbourhood.capitalize()}, {count}", grouping)
            for neighbourhood, grouping in section.groupings.items()
        ]
    )
    page.paragraph(
        "Tokens: mean, fewest and most of a picture. Kept: share of its tokens that the block keeps. Largest: "
        "share of the picture that its largest superpixel covers, mean over the pictures. Single: share of "
        "the block's tokens that join no other. θ: the similarity above which two tokens join."
    )
    for index, picture in enumerate(section.pictures):
        _add_picture(page, section, index, picture)


def _add_picture(page: Page, section: Section, index: int, picture: Picture) -> None:
    start = Figure([picture.image_HW3], picture.name, ["input", f"{section.source.patches} patches"])
    strips = {_MEANING[name]: _strip(grouping, index, picture) for name, grouping in section.groupings.items()}
    page.card(picture.name, start, strips)


def _model_line(section: Section) -> str:
    source, config = section.source, section.source.plain.config
    size, patch = (f"{side} × {side} pixels" for side in (source.size, config.patch_size))
    return (
        f"{_plural(config.depth, 'block')}, width {config.width}; pictures of {size} in {source.patches} "
        f"patches of {patch}. Thresholds calibrated once for each neighbourhood, on {section.calibrated_on}."
    )


def _time_line(section: Section) -> str:
    ratios = ", ".join(f"{ratio:.2f} ({name})" for name, ratio in section.time_ratios.items())
    threads = _plural(torch.get_num_threads(), "thread")
    return (
        f"Time of a forward pass of one picture, as a multiple of the plain Vision Transformer's: {ratios}. "
        f"Median of {_ROUNDS} rounds on the CPU, {threads}."
    )


def _block_table(caption: str, grouping: Grouping) -> Table:
    head = ["block", "tokens", "fewest", "most", "kept", "largest", "single", "θ"]
    return Table(caption, head, [_block_row(block, stats) for block, stats in grouping.blocks.items()])


def _block_row(block: int, stats: LayerStats) -> list[str]:
    tokens = (f"{stats.tokens_mean:.0f}", str(stats.tokens_min), str(stats.tokens_max))
    shares = (stats.kept_share, stats.largest_share, stats.single_share)
    return [str(block + 1), *tokens, *(f"{share:.0%}" for share in shares), f"{stats.theta:.3f}"]


def _strip(grouping: Grouping, index: int, picture: Picture) -> list[Figure]:
    counted = grouping.counted(index)
    return [
        _grouped_figure(picture, grouping.labels_LBhw[block - 1, index], counted[block - 1])
        for block in _spread(len(counted), 4)
    ]


def _grouped_figure(picture: Picture, labels_hw: Labels, counted: Counted) -> Figure:
    title = f"after {_plural(counted.after_blocks, 'block')}"
    pictures = [draw_boundaries(picture.image_HW3, labels_hw), paint_means(picture.image_HW3, labels_hw)]
    lines = [title, _plural(counted.tokens, "token"), f"largest: {counted.largest_share:.1%}"]
    return Figure(pictures, f"{picture.name}, superpixels {title}", lines)


def _record(settings: DemoSettings, sections: Sequence[Section]) -> dict[str, object]:
    return {
        "versions": {"asc": _own_version(), "torch": torch.__version__},
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
        "groupings": {name: _grouping_record(g, section.pictures) for name, g in section.groupings.items()},
    }


def _grouping_record(grouping: Grouping, pictures: Sequence[Picture]) -> dict[str, object]:
    return {
        "warnings": grouping.warnings,
        "blocks": [{"after_blocks": block + 1} | asdict(stats) for block, stats in grouping.blocks.items()],
        "pictures": {
            picture.name: [asdict(counted) for counted in grouping.counted(index)]
            for index, picture in enumerate(pictures)
        },
    }


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _own_version() -> str:
    try:
        return version("adaptive-superpixel-coding")
    except PackageNotFoundError:
        return "unknown (not installed)"
