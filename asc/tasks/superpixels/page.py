"""The page on superpixel quality: tables, metrics over the number of superpixels, and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing

from asc.report.page import Figure, Page, Table
from asc.report.pictures import Labels, Pixels, draw_boundaries, enlarged
from asc.report.words import plural
from asc.tasks.superpixels.data import Sample
from asc.tasks.superpixels.scores import METRICS, OURS, PATCHES, BlockTable, Scores, heads, rows

TITLES = {OURS: "ours", "grid": "square grid", "slic": "SLIC", PATCHES: "patch grid"}
"""What a reader calls the methods."""

_COLOURS = {OURS: "#1f77b4", "grid": "#7f7f7f", "slic": "#d62728"}
_PANEL = (3.1, 2.6)
_ACROSS = 3


def draw_over_counts(tables: Sequence[BlockTable]) -> Pixels:
    """A panel for each metric: its mean over the mean number of superpixels, a point for each block."""
    names = [name for name in METRICS if name in tables[0].cells[OURS]]
    down = -(-len(names) // _ACROSS)
    with matplotlib.style.context("default"):
        size = (_PANEL[0] * _ACROSS, _PANEL[1] * down)
        drawing = Drawing(figsize=size, dpi=150, layout="constrained", facecolor="white")
        canvas: Any = FigureCanvasAgg(drawing)  # needs no screen
        panels = drawing.subplots(down, _ACROSS, squeeze=False).ravel()
        for axes, name in zip(panels, names, strict=False):
            _draw_metric(axes, name, tables)
        for axes in panels[len(names) :]:
            axes.set_visible(False)
        panels[0].legend(fontsize=7, frameon=False)
        canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])


def _draw_metric(axes: Any, name: str, tables: Sequence[BlockTable]) -> None:
    for method, colour in _COLOURS.items():
        found = [
            (table.counts[method], table.cells[method][name].mean) for table in tables if _has(table, method, name)
        ]
        if found:
            axes.plot(*zip(*sorted(found), strict=True), marker="o", markersize=4, color=colour, label=TITLES[method])
    if _has(tables[0], PATCHES, name):
        level = tables[0].cells[PATCHES][name].mean
        axes.axhline(level, color="#202124", linestyle=":", linewidth=1, label=TITLES[PATCHES])
    axes.set_title(METRICS[name].meaning, fontsize=7)
    axes.set_ylabel(METRICS[name].title, fontsize=8)
    axes.set_xlabel("superpixels", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(color="#e4e6e9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def _has(table: BlockTable, method: str, name: str) -> bool:
    return name in table.cells.get(method, {})


def quality_page(title: str, lead: str, notes: Sequence[str], tables: Sequence[BlockTable], plot: Pixels) -> Page:
    """Numbers and curves; pictures come below."""
    page = Page(title, lead)
    page.statement(_statement(tables[-1]))
    page.tables([_page_table(table) for table in reversed(tables)])
    meanings = "; ".join(f"{metric.title}: {metric.meaning}" for metric in _shown_metrics(tables[0]))
    page.paragraph(
        f"Mean ± standard deviation over the images, of objects over the objects; below, on how many images ours is "
        f"better. {meanings}."
    )
    for note in notes:
        page.paragraph(note)
    caption = ["Metrics over the number of superpixels", "a point for each block; the patch grid is the limit of ours"]
    page.plots([Figure([plot], "metrics over the number of superpixels", caption)])
    return page


def _shown_metrics(table: BlockTable) -> list[Any]:
    return [METRICS[name] for name in table.cells[OURS]]


def _statement(table: BlockTable) -> str:
    parts = []
    for method in (OURS, "grid", "slic"):
        if method in table.cells:
            told = [f"{METRICS[name].title} {table.cells[method][name].mean:.3f}" for name in _first(table, method)]
            parts.append(f"{TITLES[method]} {', '.join(told)}")
    count = f"{table.counts[OURS]:.0f} superpixels of an image"
    return f"After block {table.after_blocks}, at {count}: {'; '.join(parts)}."


def _first(table: BlockTable, method: str) -> list[str]:
    wanted = ("asa", "ue", "boundary_recall", "best_overlap")
    return [name for name in wanted if name in table.cells[method]]


def _page_table(table: BlockTable) -> Table:
    caption = f"After block {table.after_blocks}: {table.tokens:.0f} tokens of an image"
    named = [[TITLES[method], *others] for method, *others in rows(table)]
    for peer, wins in table.better.items():
        won = [_won(wins.get(name)) for name in table.cells[OURS]]
        named.append([f"ours better than {TITLES[peer]}", "", *won])
    return Table(caption, ["", "superpixels", *heads(table)], named, named_rows=True)


def _won(found: tuple[int, int] | None) -> str:
    return "–" if found is None else f"{found[0]} of {found[1]}"


def add_card(page: Page, title: str, sample: Sample, maps: Mapping[str, Labels], scores: Mapping[str, Scores]) -> None:
    """An image, the truth of its first annotator, and the borders of every method."""
    image_HW3 = enlarged(sample.image_HW3)
    height, width = sample.image_HW3.shape[:2]
    people = len(sample.truths)
    truth = Figure(
        [draw_boundaries(image_HW3, sample.truths[0])],
        f"{title}, truth",
        ["truth", f"first of {plural(people, 'annotator')}" if people > 1 else "exact borders"],
    )
    drawn = [
        Figure(
            [draw_boundaries(image_HW3, labels_HW)],
            f"{title}, borders: {TITLES[method]}",
            [TITLES[method], plural(scores[method].count, "superpixel"), *_lines(scores[method])],
        )
        for method, labels_HW in maps.items()
    ]
    first = Figure([image_HW3], title, ["input", f"{width} × {height} pixels"])
    page.card(title, first, {"borders": [truth, *drawn]})


def _lines(scores: Scores) -> list[str]:
    wanted = ("asa", "ue", "boundary_recall", "best_overlap")
    found = {name: scores.mean(name) for name in wanted if name in scores.values}
    return [f"{METRICS[name].title} {value:.3f}" for name, value in found.items() if value is not None]
