"""``asc eval superpixels``: how good the superpixels of an encoder are, beside others of equal number.

Every image counts at its own number of superpixels: the square grid gets at least as many, SLIC as nearly as many as it
can be made to give. All are scored in pixels of the truth, after splitting into 8-connected regions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import numpy as np
from tqdm import tqdm

from asc.files import write_whole
from asc.report.page import Page, png_bytes
from asc.report.pictures import Labels, Pixels
from asc.report.words import plural, versions
from asc.tasks.classify.results import device_name
from asc.tasks.devices import accelerator_device
from asc.tasks.encoders import Encoder, open_encoder
from asc.tasks.evaluations import found_result, plain_settings
from asc.tasks.superpixels.data import QualityData, QualityDataConfig, Sample, open_quality_data
from asc.tasks.superpixels.metrics import TOLERANCE, split_regions
from asc.tasks.superpixels.model import Allocation, GroupingChange, SuperpixelMaker
from asc.tasks.superpixels.page import add_card, draw_over_counts, quality_page
from asc.tasks.superpixels.peers import METHODS, Method, Slic, enlarged_labels, grid_labels
from asc.tasks.superpixels.scores import (
    OURS,
    PATCHES,
    BlockTable,
    ImageScores,
    Scores,
    csv_text,
    left_out,
    markdown,
    score,
    tabulate,
)

RESULT_FILE, PAGE_FILE = "result.json", "index.html"
TABLE_FILE, CSV_FILE, PLOT_FILE = "superpixels.md", "superpixels.csv", "superpixels.png"

# A superpixel that covers more of an image than this, on average, leaves little to be judged.
_GIANT = 0.3


@dataclass(frozen=True)
class SlicConfig:
    """Settings of scikit-image's SLIC."""

    compactness: float = 10.0
    """Weight of nearness in the image against nearness of colours."""
    iterations: int = 10
    """Rounds of k-means."""
    sigma: float = 0.0
    """Width of a Gaussian that smooths the image first; 0: none."""

    def given(self) -> dict[str, float]:
        """As scikit-image calls them."""
        return {"compactness": self.compactness, "max_num_iter": self.iterations, "sigma": self.sigma}


@dataclass(frozen=True)
class SuperpixelQualityConfig:
    """Judge the superpixels of an encoder: against segmentations by people (BSDS500) or masks of objects (PASCAL VOC,
    DAVIS, embedded scenes), beside the square grid and SLIC at equal numbers."""

    checkpoint: str
    """A run, an encoder folder, or ``random``; see ``asc.tasks.encoders``."""
    out: Path
    """Folder for result.json, superpixels.md, .csv, .png and the page index.html."""
    data: str = "scenes"
    """``scenes``, or a folder: BSDS500 (its root or one part of it), PASCAL VOC 2012, or DAVIS."""
    tokens: int | None = None
    """Tokens of an image, on average, that the last superpixel block is to leave: thresholds are set for it on
    ``calibration`` of the images. None: the encoder's own thresholds."""
    methods: tuple[Method, ...] = METHODS
    """Peers at equal numbers: ``grid``, ``slic``."""
    size: int | None = None
    """Shorter side of the images that the encoder sees, in pixels, their shape kept (to whole patches); None: the side
    it was made for. Scores are taken in the truth's own size."""
    images: QualityDataConfig = field(default_factory=QualityDataConfig)
    """Which images of the data."""
    grouping: GroupingChange = field(default_factory=GroupingChange)
    """Superpixel layers that differ from training; thresholds are then set anew."""
    allocation: Allocation = "learned"
    """How ``tokens`` are reached: the blocks merge in the proportions of training (``learned``), all by the same share
    (``equal``), or the last one alone (``last``)."""
    calibration: int = 32
    """Images, evenly spread, that thresholds are set on."""
    blocks: tuple[int, ...] | None = None
    """Blocks that are judged, counted from 1; None: all with a superpixel layer."""
    split: bool = True
    """Whether every superpixel is split into its 8-connected regions before it is counted and scored; if not, the
    tokens themselves are, which may lie in many places of the image."""
    tolerance: float = TOLERANCE
    """How far apart borders may lie in boundary recall and precision, as a share of the image's diagonal."""
    least_object: float = 0.001
    """Smaller objects, as a share of the image, have no overlap of their own; how many is in the result."""
    slic: SlicConfig = SlicConfig()
    """Settings of SLIC."""
    pictures: int = 6
    """Images on the page; half of them are the worst cases."""
    accelerator: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``mps``."""


@dataclass
class _Judged:
    """What was measured, image by image."""

    indices: list[int]
    scores: list[ImageScores] = field(default_factory=list)
    tokens: list[dict[int, int]] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)
    annotators: list[int] = field(default_factory=list)
    left_out: int = 0

    def worst(self, count: int) -> list[int]:
        """Places of the images whose last superpixels have the lowest accuracy, worst first."""
        last = [image[max(image)][OURS].mean("asa") or 0.0 for image in self.scores]
        return sorted(range(len(last)), key=lambda place: (last[place], place))[:count]


def evaluate_superpixels(config: SuperpixelQualityConfig) -> Path:
    """Judge the superpixels of an encoder; write tables, plot and page. Returns the file of the results."""
    _check(config)
    data = open_quality_data(config.data, config.images)
    indices = data.chosen(config.images.most)
    encoder = open_encoder(config.checkpoint)
    identity = encoder.identity
    maker = SuperpixelMaker(encoder, config.size, config.grouping)
    maker.model.to(accelerator_device(config.accelerator))
    blocks = _judged_blocks(config, maker)
    fingerprint = data.fingerprint(indices)
    contents = {"checkpoint": ("encoder.identity", identity), "data": ("data.fingerprint", fingerprint)}
    found = found_result(config.out / RESULT_FILE, config.out / PAGE_FILE, config, contents)
    if found is not None:
        _tell(found["blocks"][-1], f"was there already, more in {config.out}")
        return config.out / RESULT_FILE
    reached = _calibrated(config, maker, data, indices)
    judged = _judge(config, maker, data, indices, blocks)
    messages = _complaints(judged)
    tables = tabulate(judged.scores, judged.tokens)
    record = _record(config, maker, data, judged, tables, fingerprint) | {
        "encoder": {"name": encoder.name, "source": encoder.source, "identity": identity, "shape": encoder.config},
        "tokens": {"wanted": config.tokens, "mean_of_calibration_images": reached},
        "warnings": messages,
    }
    # Before anything is drawn: whatever happens to the pictures, the scores are kept.
    write_whole(config.out / RESULT_FILE, json.dumps(record, indent=2, default=str).encode() + b"\n")
    notes = _notes(config, maker, data, judged, reached)
    page, plot = _page(config, maker, encoder, data, judged, tables, notes)
    page.warnings("On the superpixels", messages)
    write_whole(config.out / TABLE_FILE, markdown(page.title, notes, tables).encode())
    write_whole(config.out / CSV_FILE, csv_text(tables).encode())
    write_whole(config.out / PLOT_FILE, png_bytes(plot))
    page.write(config.out / PAGE_FILE)
    _tell(record["blocks"][-1], f"more in {config.out}")
    return config.out / RESULT_FILE


def _check(config: SuperpixelQualityConfig) -> None:
    for name, least in (("tokens", 1), ("size", 1), ("calibration", 1), ("pictures", 0)):
        value = getattr(config, name)
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if unknown := sorted(set(config.methods) - set(METHODS)):
        raise ValueError(f"unknown methods {', '.join(unknown)}; choose from {', '.join(METHODS)}")
    if config.allocation not in get_args(Allocation):
        raise ValueError(f"unknown allocation {config.allocation!r}; choose from {', '.join(get_args(Allocation))}")
    for name in ("tolerance", "least_object"):
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"{name} is a share from 0 to less than 1, got {getattr(config, name)}")
    if config.out.exists() and not config.out.is_dir():
        raise ValueError(f"out must be a folder, but {config.out} is a file")


def _judged_blocks(config: SuperpixelQualityConfig, maker: SuperpixelMaker) -> tuple[int, ...]:
    if config.blocks is None:
        return maker.blocks
    if not config.blocks or not set(config.blocks) <= set(maker.blocks):
        known = ", ".join(map(str, maker.blocks))
        raise ValueError(f"blocks must be among those with a superpixel layer ({known}), got {config.blocks}")
    return tuple(sorted(set(config.blocks)))


def _calibrated(
    config: SuperpixelQualityConfig, maker: SuperpixelMaker, data: QualityData, indices: Sequence[int]
) -> float | None:
    """Mean number of tokens of the images that the thresholds were set on; None: they are the encoder's own."""
    if config.tokens is None and not maker.needs_calibration:
        return None
    count = min(config.calibration, len(indices))
    chosen = [indices[number * len(indices) // count] for number in range(count)]
    images = [data.read(index).image_HW3 for index in chosen]
    return maker.calibrate(images, config.tokens, config.allocation)


# --- Judging ----------------------------------------------------------------------------------------------


def _judge(
    config: SuperpixelQualityConfig,
    maker: SuperpixelMaker,
    data: QualityData,
    indices: list[int],
    blocks: Sequence[int],
) -> _Judged:
    judged = _Judged(indices)
    for index in tqdm(indices, unit="image", desc=data.name, disable=None):
        sample = data.read(index)
        labels = maker.labels(sample.image_HW3)
        maps = label_maps(config, maker, sample, {block: labels[block] for block in blocks})
        judged.scores.append(
            {
                block: {name: _score(config, data, sample, labels_HW) for name, labels_HW in methods.items()}
                for block, methods in maps.items()
            }
        )
        judged.tokens.append({block: len(np.unique(labels[block])) for block in blocks})
        sizes_S = np.unique(labels[blocks[-1]], return_counts=True)[1]
        judged.largest.append(float(sizes_S.max() / sizes_S.sum()))
        judged.annotators.append(len(sample.truths))
        judged.left_out += left_out(sample.truths[0], config.least_object) if data.objects else 0
    return judged


def _score(config: SuperpixelQualityConfig, data: QualityData, sample: Sample, labels_HW: Labels) -> Scores:
    return score(labels_HW, sample, data.objects, config.tolerance, config.least_object)


def label_maps(
    config: SuperpixelQualityConfig, maker: SuperpixelMaker, sample: Sample, labels: dict[int, Labels]
) -> dict[int, dict[str, Labels]]:
    """By block and method the superpixel of every pixel, from our labels of every patch.

    The patch grid stands beside all: in ASA, UE, BR and EV no superpixels made of patches can be better.
    """
    height, width = sample.image_HW3.shape[:2]
    slic = Slic(sample.image_HW3, config.slic.given(), config.split)
    rows, columns = maker.grid(height, width)
    patches_HW = enlarged_labels(np.arange(rows * columns).reshape(rows, columns), height, width)
    maps: dict[int, dict[str, Labels]] = {}
    for block, labels_hw in labels.items():
        ours_HW = enlarged_labels(labels_hw, height, width)
        ours_HW = split_regions(ours_HW) if config.split else ours_HW
        count = len(np.unique(ours_HW))
        maps[block] = {OURS: ours_HW}
        if "grid" in config.methods:
            maps[block]["grid"] = grid_labels(count, height, width)
        if "slic" in config.methods:
            maps[block]["slic"] = slic.labels(count)
        maps[block][PATCHES] = patches_HW
    return maps


def _complaints(judged: _Judged) -> list[str]:
    share = float(np.mean(judged.largest))
    if share < _GIANT:
        return []
    return [
        f"The largest superpixel covers {share:.0%} of an image on average, and small ones are the rest: a smaller "
        f"size, more tokens, or grouping.neighbourhood=spatial helps."
    ]


# --- Telling ----------------------------------------------------------------------------------------------


def _notes(
    config: SuperpixelQualityConfig, maker: SuperpixelMaker, data: QualityData, judged: _Judged, reached: float | None
) -> list[str]:
    notes = [f"{plural(len(judged.indices), 'image')} of {data.name}. {data.note}"]
    if config.split:
        notes.append("Superpixels are split into their 8-connected regions before they are counted and scored.")
    else:
        notes.append("Tokens are counted and scored as they are; one may lie in many places of an image.")
    notes.append(
        "Peers have, image by image, the number of superpixels of ours: the square grid at least as many, SLIC as "
        "nearly as it can be made to give. The patch grid has every patch alone: what superpixels of these patches can "
        "reach."
    )
    patch = maker.model.config.patch_size
    notes.append(f"The encoder sees images with a shorter side of {maker.size} pixels, in patches of {patch}.")
    if reached is not None:
        notes.append(f"Thresholds set for these images; those they were set on have {reached:.1f} tokens on average.")
    if judged.left_out:
        share = f"{config.least_object:.2%} of their image"
        notes.append(f"{plural(judged.left_out, 'object')} of less than {share} have no overlap of their own.")
    return notes


def _page(
    config: SuperpixelQualityConfig,
    maker: SuperpixelMaker,
    encoder: Encoder,
    data: QualityData,
    judged: _Judged,
    tables: Sequence[BlockTable],
    notes: Sequence[str],
) -> tuple[Page, Pixels]:
    plot = draw_over_counts(tables)
    page = quality_page(f"Superpixels of {encoder.name} on {data.name}", encoder.description, notes, tables, plot)
    worst = judged.worst((config.pictures + 1) // 2)
    others = [place for place in range(len(judged.indices)) if place not in worst][: config.pictures // 2]
    last = tables[-1].after_blocks
    for heading, places in (("The worst cases", worst), ("The first of the others", others)):
        if places:
            page.heading(heading)
        for place in places:
            index = judged.indices[place]
            sample = data.read(index)
            maps = label_maps(config, maker, sample, {last: maker.labels(sample.image_HW3)[last]})[last]
            maps.pop(PATCHES)
            add_card(page, data.title(index), sample, maps, judged.scores[place][last])
    return page, plot


def _record(
    config: SuperpixelQualityConfig,
    maker: SuperpixelMaker,
    data: QualityData,
    judged: _Judged,
    tables: Sequence[BlockTable],
    fingerprint: str,
) -> dict[str, Any]:
    device = next(maker.model.parameters()).device
    libraries = {name: version(name) for name in ("numpy", "scipy", "scikit-image")}
    return {
        "task": "superpixels",
        "settings": plain_settings(config),
        "superpixels": asdict(maker.model.config)["superpixels"],
        "size": maker.size,
        "thresholds": [float(layer.threshold.theta()) for layer in maker.model.superpixel_layers],
        "versions": versions() | libraries | {"device": device_name(device)},
        "data": {
            "name": data.name,
            "objects": data.objects,
            "note": data.note,
            "fingerprint": fingerprint,
            "objects_left_out": judged.left_out,
        },
        "blocks": [_block_record(table) for table in tables],
        "images": [_image_record(data, judged, place) for place in range(len(judged.indices))],
    }


def _block_record(table: BlockTable) -> dict[str, Any]:
    methods = {
        method: {"superpixels": table.counts[method]} | {name: cell._asdict() for name, cell in cells.items()}
        for method, cells in table.cells.items()
    }
    better = {
        peer: {name: {"better": won, "images": of} for name, (won, of) in wins.items()}
        for peer, wins in table.better.items()
    }
    return {"after_blocks": table.after_blocks, "tokens": table.tokens, "methods": methods, "ours_better": better}


def _image_record(data: QualityData, judged: _Judged, place: int) -> dict[str, Any]:
    blocks = [
        {
            "after_blocks": block,
            "tokens": judged.tokens[place][block],
            "methods": {name: _scores_record(scores) for name, scores in methods.items()},
        }
        for block, methods in judged.scores[place].items()
    ]
    return {
        "name": data.title(judged.indices[place]),
        "annotators": judged.annotators[place],
        "largest_share": judged.largest[place],
        "blocks": blocks,
    }


def _scores_record(scores: Scores) -> dict[str, Any]:
    objects = ("best_overlap", "achievable_overlap")
    values = {name: numbers if name in objects else scores.mean(name) for name, numbers in scores.values.items()}
    return {"superpixels": scores.count} | values


def _tell(block: Mapping[str, Any], last: str) -> None:
    for method, cells in block["methods"].items():
        told = [
            f"{name} {cells[name]['mean']:.4f}"
            for name in ("asa", "ue", "boundary_recall", "best_overlap")
            if name in cells
        ]
        print(f"{method}: {cells['superpixels']:.1f} superpixels, {', '.join(told)}")
    print(last)
