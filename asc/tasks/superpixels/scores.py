"""Scores of label maps, their means over images, and tables of them. Shape letters: see ``metrics``."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from asc.report.pictures import Labels
from asc.tasks.superpixels import metrics
from asc.tasks.superpixels.data import Sample

OURS, PATCHES = "ours", "patches"


class Metric(NamedTuple):
    """One column of the tables."""

    title: str
    """Short, for a head."""
    meaning: str
    """In words."""
    rising: bool | None
    """Whether higher is better; None: neither is."""


METRICS: dict[str, Metric] = {
    "asa": Metric("ASA", "achievable segmentation accuracy", True),
    "ue": Metric("UE", "undersegmentation error (Neubert and Protzel)", False),
    "boundary_recall": Metric("BR", "boundary recall", True),
    "boundary_precision": Metric("BP", "boundary precision", True),
    "explained_variation": Metric("EV", "explained variation of the colours", True),
    "compactness": Metric("CO", "compactness", None),
    "best_overlap": Metric("best IoU", "IoU of the best single superpixel with an object", True),
    "achievable_overlap": Metric("union IoU", "IoU of the best union of superpixels with an object", True),
}


@dataclass(frozen=True)
class Scores:
    """What one method got on one image."""

    count: int
    """Number of its superpixels."""
    values: dict[str, list[float]]
    """By metric: one value for the image, or one for each object. Undefined ones are left out."""

    def mean(self, metric: str) -> float | None:
        """The value of the image."""
        values = self.values[metric]
        return float(np.mean(values)) if values else None


def score(labels_HW: Labels, sample: Sample, objects: bool, tolerance: float, least_object: float) -> Scores:
    """All metrics of a label map, means over the annotators; ``least_object``: see ``big_objects``."""
    several = {
        "asa": [metrics.achievable_accuracy(labels_HW, truth_HW) for truth_HW in sample.truths],
        "ue": [metrics.undersegmentation_error(labels_HW, truth_HW) for truth_HW in sample.truths],
        "boundary_recall": [metrics.boundary_recall(labels_HW, truth_HW, tolerance) for truth_HW in sample.truths],
        "boundary_precision": [
            metrics.boundary_precision(labels_HW, truth_HW, tolerance) for truth_HW in sample.truths
        ],
        "explained_variation": [metrics.explained_variation(labels_HW, sample.image_HW3)],
        "compactness": [metrics.compactness(labels_HW)],
    }
    values = {name: _mean_of_known(numbers) for name, numbers in several.items()}
    if objects:
        big_HW = big_objects(sample.truths[0], least_object)
        values["best_overlap"] = metrics.best_overlaps(labels_HW, big_HW).tolist()
        values["achievable_overlap"] = metrics.achievable_overlaps(labels_HW, big_HW).tolist()
    return Scores(metrics.count_superpixels(labels_HW), values)


def _mean_of_known(numbers: Sequence[float]) -> list[float]:
    known = [number for number in numbers if not np.isnan(number)]
    return [float(np.mean(known))] if known else []


def big_objects(truth_HW: Labels, least: float) -> Labels:
    """The truth with objects that cover less than the share ``least`` of the image as a part of the background."""
    sizes_G = np.bincount(np.maximum(truth_HW, 0).ravel())
    small_G = np.flatnonzero(sizes_G < least * truth_HW.size)
    return np.where(np.isin(truth_HW, small_G), 0, truth_HW)


def left_out(truth_HW: Labels, least: float) -> int:
    """Number of objects that ``big_objects`` leaves out."""
    sizes_O = np.bincount(np.maximum(truth_HW, 0).ravel())[1:]
    return int(((sizes_O > 0) & (sizes_O < least * truth_HW.size)).sum())


# --- Over images ------------------------------------------------------------------------------------------


class Summary(NamedTuple):
    """Mean and standard deviation of a metric."""

    mean: float
    deviation: float | None
    """None for a single value."""
    values: int
    """How many: images, or objects."""

    def text(self) -> str:
        """For a table."""
        # Spaces that do not break: a page's narrow columns would set each on a line of its own.
        return f"{self.mean:.4f}" if self.deviation is None else f"{self.mean:.4f}\u00a0±\u00a0{self.deviation:.4f}"


def summary(numbers: Sequence[float]) -> Summary | None:
    """Of all values; None if there are none."""
    if not numbers:
        return None
    return Summary(float(np.mean(numbers)), float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None, len(numbers))


@dataclass(frozen=True)
class BlockTable:
    """Every method after one block, or at its number of superpixels."""

    after_blocks: int
    """Number of blocks that have run."""
    tokens: float
    """Mean number of tokens of an image, before they are split into regions."""
    counts: dict[str, float]
    """Mean number of superpixels of an image, by method."""
    cells: dict[str, dict[str, Summary]]
    """By method and metric."""
    better: dict[str, dict[str, tuple[int, int]]]
    """By peer and metric: on how many images ours is better, and of how many."""


ImageScores = Mapping[int, Mapping[str, Scores]]
"""Of one image: by block and method."""


def tabulate(images: Sequence[ImageScores], tokens: Sequence[Mapping[int, int]]) -> list[BlockTable]:
    """Means over the images, block by block."""
    tables = []
    for block in images[0]:
        methods = list(images[0][block])
        by_method = {method: [image[block][method] for image in images] for method in methods}
        cells = {method: _cells(several) for method, several in by_method.items()}
        counts = {method: float(np.mean([one.count for one in several])) for method, several in by_method.items()}
        peers = [method for method in methods if method not in (OURS, PATCHES)]
        better = {peer: _better(by_method[OURS], by_method[peer]) for peer in peers}
        mean_tokens = float(np.mean([counted[block] for counted in tokens]))
        tables.append(BlockTable(block, mean_tokens, counts, cells, better))
    return tables


def _cells(several: Sequence[Scores]) -> dict[str, Summary]:
    pooled = {name: [x for one in several for x in one.values[name]] for name in several[0].values}
    return {name: found for name, numbers in pooled.items() if (found := summary(numbers)) is not None}


def _better(ours: Sequence[Scores], peers: Sequence[Scores]) -> dict[str, tuple[int, int]]:
    found = {}
    for name in ours[0].values:
        rising = METRICS[name].rising
        pairs = [(one.mean(name), other.mean(name)) for one, other in zip(ours, peers, strict=True)]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        if rising is not None and known:
            found[name] = (sum(a > b if rising else a < b for a, b in known), len(known))
    return found


# --- Showing them -----------------------------------------------------------------------------------------


def heads(table: BlockTable) -> list[str]:
    """Names of the metrics that a table has, with the direction of better."""
    arrows = {True: " ↑", False: " ↓", None: ""}
    return [f"{METRICS[name].title}{arrows[METRICS[name].rising]}" for name in table.cells[OURS]]


def rows(table: BlockTable) -> list[list[str]]:
    """Name, number of superpixels and metrics of every method."""
    return [
        [method, f"{table.counts[method]:.1f}", *(_text(cells, name) for name in table.cells[OURS])]
        for method, cells in table.cells.items()
    ]


def _text(cells: Mapping[str, Summary], name: str) -> str:
    return cells[name].text() if name in cells else "–"


def markdown(title: str, notes: Sequence[str], tables: Sequence[BlockTable]) -> str:
    """A table for each block."""
    lines = [f"# {title}", "", *(f"- {note}" for note in notes), ""]
    for table in tables:
        lines += [f"## After block {table.after_blocks}: {table.tokens:.1f} tokens of an image", ""]
        lines += [_line(["method", "superpixels", *heads(table)]), _line(["---", *["---:"] * (1 + len(heads(table)))])]
        lines += [_line(row) for row in rows(table)]
        for peer, wins in table.better.items():
            told = ", ".join(f"{METRICS[name].title} {won} of {of}" for name, (won, of) in wins.items())
            lines += ["", f"Images on which ours is better than {peer}: {told}."]
        lines.append("")
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def csv_text(tables: Sequence[BlockTable]) -> str:
    """One line for every mean."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["after_blocks", "tokens", "method", "superpixels", "metric", "mean", "deviation", "values"])
    for table in tables:
        for method, cells in table.cells.items():
            for name, cell in cells.items():
                spread = "" if cell.deviation is None else f"{cell.deviation:.6f}"
                named = [table.after_blocks, f"{table.tokens:.2f}", method, f"{table.counts[method]:.2f}", name]
                writer.writerow([*named, f"{cell.mean:.6f}", spread, cell.values])
    return stream.getvalue()
