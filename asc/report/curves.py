"""Curves over the steps of a training, as pictures for a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from asc.report.pictures import Pixels

# Inches and dots: at the width of a phone the text is still as large as the page's captions.
_WIDTH, _HEIGHT, _DPI = 4.0, 2.9, 220
_LEVEL_STYLES = ("--", ":")
_ABOVE: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.02, 0.98), "borderaxespad": 0.0}
# A curve of so few points would be a bare line, or nothing at all, without marks.
_FEW_POINTS = 15


@dataclass(frozen=True)
class Panel:
    """One pair of axes: curves that share a scale."""

    label: str
    """What the vertical axis shows."""
    curves: Mapping[str, Mapping[int, float]]
    """Values by step, by the name of the curve; a single curve needs no name."""
    levels: Mapping[str, float] = field(default_factory=dict)
    """Horizontal lines to compare with, by name."""
    share: bool = False
    """Whether the values are shares, shown in per cent."""
    from_zero: bool = True
    """Whether the vertical axis begins at 0."""
    ordered: bool = False
    """Whether the curves have an order, which their colours then show."""


def draw_curves(panels: Sequence[Panel]) -> Pixels:
    """Panels above each other with one axis of steps, on white paper."""
    # The settings of a user's own matplotlib must not turn the page dark or the text tiny.
    with matplotlib.style.context("default"):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=_DPI, layout="constrained", facecolor="white")
        canvas: Any = FigureCanvasAgg(figure)  # needs no screen
        axes_list = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
        for number, (axes, panel) in enumerate(zip(axes_list, panels, strict=True)):
            _draw_panel(axes, panel)
            if number == 0 or _names(panel) != _names(panels[number - 1]):
                _add_legend(axes, _names(panel))
        axes_list[-1].set_xlabel("step")
        canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])


def _draw_panel(axes: Any, panel: Panel) -> None:
    colours = _colours(panel)
    for (name, values), colour in zip(panel.curves.items(), colours, strict=True):
        marker = "o" if len(values) <= _FEW_POINTS else None
        axes.plot(list(values), list(values.values()), color=colour, label=name, marker=marker, markersize=3.5)
    for number, (name, level) in enumerate(panel.levels.items()):
        axes.axhline(level, color="#5f6368", linestyle=_LEVEL_STYLES[number % 2], linewidth=1.2, label=name)
    axes.set_ylabel(panel.label)
    axes.grid(color="#e4e6e9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))
    if panel.from_zero:
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # some room, so that marks at the top stay whole
    if panel.share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _names(panel: Panel) -> list[str]:
    return [*panel.curves, *panel.levels]


def _add_legend(axes: Any, names: Sequence[str]) -> None:
    if len(names) > 1:
        # Above the axes it can hide no curve, wherever the curves run.
        axes.legend(fontsize=8.5, frameon=False, ncols=4, columnspacing=1, handlelength=1.5, **_ABOVE)


def _colours(panel: Panel) -> list[Any]:
    if panel.ordered:
        # Without the palest end of the map, which white paper swallows.
        return list(matplotlib.colormaps["viridis"](np.linspace(0.0, 0.85, len(panel.curves))))
    return list(matplotlib.colormaps["tab10"].colors[: len(panel.curves)])  # type: ignore[attr-defined]
