"""The tables as bars, and what happened in training as curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import matplotlib.style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from asc.ablate.variants import VARIANTS

if TYPE_CHECKING:
    from asc.ablate.report import Filled

_WIDTH, _PANEL, _DPI = 11.0, 3.2, 130
_GREY = "#9aa0a6"


def draw_tables(filled: Sequence[Filled], file: Path) -> None:
    """A row of panels for every table that has a number of ours, one panel for each column that has one.

    The paper's numbers are written beside: on our axis they would squeeze the differences between our rows.
    """
    shown = [(one, columns) for one in filled if (columns := one.measured)]
    figure, panels = _figure(max(1, len(shown)), max((len(columns) for _, columns in shown), default=1))
    for row, (one, columns) in enumerate(shown):
        for place, axes in enumerate(panels[row]):
            if place < len(columns):
                _draw_column(axes, one, columns[place], named=place == 0)
            else:
                axes.set_axis_off()
    if not shown:
        panels[0, 0].set_axis_off()
    figure.suptitle("Ours: mean and deviation over seeds. Grey: the paper's numbers, at another scale", fontsize=10)
    _save(figure, file)


def _draw_column(axes: Any, one: Filled, number: int, named: bool) -> None:
    column = one.table.columns[number]
    factor = 100 if column.percent else 1
    for place, (variant, values) in enumerate(one.rows.items()):
        value = values[number]
        if value is not None:
            spread = factor * (value.deviation or 0.0)
            axes.errorbar(factor * value.mean, -place, xerr=spread, fmt="o", color=_colour(variant), capsize=3)
        if variant in one.table.paper:
            printed = f"{one.table.paper[variant][number]:g}"
            beside = axes.get_yaxis_transform()
            axes.text(0.99, -place, printed, transform=beside, color=_GREY, ha="right", va="center", fontsize=7)
    names = [VARIANTS[variant].label for variant in one.rows]
    axes.set_yticks([-place for place in range(len(names))], names if named else [""] * len(names), fontsize=7)
    axes.set_ylim(0.6 - len(names), 0.6)
    axes.margins(x=0.25)
    axes.set_title(f"{one.titles[number]}{'' if column.rises else ' (less is better)'}, equal {one.mode}", fontsize=8)
    axes.grid(axis="x", color="#e4e6e9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw_curves(curves: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], file: Path) -> None:
    """Tokens and kNN accuracy over the steps, a line for every run, a row of panels for what is equal."""
    modes = list(dict.fromkeys(mode for mode, _ in curves))
    figure, panels = _figure(max(1, len(modes)), len(_CURVES))
    for row, mode in enumerate(modes):
        for axes, (name, label) in zip(panels[row], _CURVES.items(), strict=True):
            for (own_mode, variant), runs in curves.items():
                if own_mode == mode:
                    _draw_runs(axes, variant, [run[name] for run in runs])
            axes.set_xlabel("step")
            axes.set_title(f"{label}, {mode}", fontsize=9)
            axes.grid(color="#e4e6e9", linewidth=0.8)
            axes.spines[["top", "right"]].set_visible(False)
        panels[row, -1].legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        panels[row, 0].set_yscale("log")
    if not modes:
        for axes in panels[0]:
            axes.set_axis_off()
    _save(figure, file)


_CURVES = {"tokens_left": "tokens left at the end, share of all", "knn": "kNN accuracy, first labelled set"}


def _draw_runs(axes: Any, variant: str, runs: Sequence[Mapping[str, float]]) -> None:
    for number, curve in enumerate(curve for curve in runs if curve):
        steps = [int(step) for step in curve]
        label = VARIANTS[variant].label if number == 0 else None
        axes.plot(steps, list(curve.values()), color=_colour(variant), linewidth=1.0, label=label)


def _colour(variant: str) -> Any:
    """A variant has its colour in every picture."""
    return matplotlib.colormaps["tab20"](list(VARIANTS).index(variant) % 20)


def _figure(rows: int, columns: int) -> tuple[Figure, Any]:
    with matplotlib.style.context("default"):
        size = _WIDTH, 0.6 + _PANEL * rows
        figure = Figure(figsize=size, dpi=_DPI, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)  # needs no screen
        return figure, figure.subplots(rows, columns, squeeze=False)


def _save(figure: Figure, file: Path) -> None:
    with matplotlib.style.context("default"):
        figure.savefig(str(file), format="png")
