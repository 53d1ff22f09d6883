"""The cells as one picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from asc.bench import components, cpu, layer
from asc.bench.bars import memory_ratio, ratio_of_times, speed_ratio
from asc.bench.contest import EAGER, MERGERS

Cells = list[Mapping[str, Any]]
_WIDTH, _BAR, _DPI = 9.0, 0.28, 130


def draw(cells: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """A panel for every group that was measured."""
    measured = [cell for cell in cells.values() if cell["status"] == "measured"]
    panels = []
    for groups, panel in _PANELS.items():
        own = [cell for cell in measured if cell["group"] in groups]
        if own:
            panels.append((own, panel))
    heights = [1.0 + _BAR * (len(own) + 3) if panel is not _draw_growth else 3.0 for own, panel in panels]
    with matplotlib.style.context("default"):
        size = _WIDTH, max(2.0, sum(heights))
        figure = Figure(figsize=size, dpi=_DPI, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)  # needs no screen
        if panels:
            all_axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
            for axes, (own, panel) in zip(all_axes, panels, strict=True):
                panel(axes, own)
                axes.grid(axis="x", color="#e4e6e9", linewidth=0.8)
                axes.set_axisbelow(True)
                axes.spines[["top", "right"]].set_visible(False)
                axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        else:
            figure.text(0.5, 0.5, "nothing measured yet", ha="center")
        figure.savefig(str(file), format="png")


def _draw_components(axes: Any, cells: Cells) -> None:
    names = (components.KERNEL, components.BMM, components.TORCH)
    series = {name: [cell["results"]["times"].get(name, {}).get("ms") for cell in cells] for name in names}
    series["floor"] = [cell["results"]["floor_ms"] for cell in cells]
    _points(axes, [cell["name"].removeprefix("components-") for cell in cells], series)
    axes.set_xscale("log")
    axes.set_xlabel("ms")
    axes.set_title("Connected components", fontsize=10)


def _draw_layer(axes: Any, cells: Cells) -> None:
    series = {
        words: [ratio_of_times(cell["results"]["times"][part], layer.LAYER, layer.ATTENTION) for cell in cells]
        for part, words in (("forward", "forward"), ("both", "forward + backward"))
    }
    _points(axes, [cell["name"].removeprefix("layer-") for cell in cells], series)
    axes.set_xlabel("time of the superpixel layer / time of attention")
    axes.set_title("One superpixel layer", fontsize=10)


def _draw_networks(axes: Any, cells: Cells) -> None:
    results = [cell["results"] for cell in cells]
    series = {
        "images/s / plain ViT": [speed_ratio(found) for found in results],
        "images/s / Token Merging": [speed_ratio(found, MERGERS) for found in results],
        "memory / plain ViT": [memory_ratio(found) for found in results],
    }
    _points(axes, [cell["name"] for cell in cells], series)
    axes.axvline(1.0, color="#5f6368", linewidth=1.0)
    axes.set_xlim(left=0)
    axes.set_xlabel("ratio to the fastest peer")
    axes.set_title("Whole networks with superpixels", fontsize=10)


def _draw_memory(axes: Any, cells: Cells) -> None:
    series = {
        name: [cell["results"]["contestants"].get(name, {}).get("gb_per_image") for cell in cells] for name in EAGER
    }
    _points(axes, [cell["name"].removeprefix("memory-") for cell in cells], series)
    axes.set_xscale("log")
    axes.set_xlabel("GB for each image of a training step")
    axes.set_title("Memory", fontsize=10)


def _draw_growth(axes: Any, cells: Cells) -> None:
    for cell in cells:
        results, settings = cell["results"], cell["settings"]
        times = [timing["ms"] for timing in results["times"].values()]
        power = f"{settings['grows']}: time, power {results['time_exponent']:.2f}"
        axes.plot(settings["sizes"], times, marker="o", markersize=3.5, label=power)
        if results["peak_mb"]:
            power = f"{settings['grows']}: memory, power {results['memory_exponent']:.2f}"
            axes.plot(settings["sizes"], results["peak_mb"], marker="s", markersize=3.5, linestyle="--", label=power)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tokens of an image, or images")
    axes.set_ylabel("ms, MB")
    axes.set_title("Growth of connected components", fontsize=10)


def _draw_cpu(axes: Any, cells: Cells) -> None:
    names = {cpu.LABELS: "our CPU backend", cpu.TORCH: "torch backend"}
    series = {
        words: [ratio_of_times(cell["results"]["times"], name, cpu.PRODUCT) for cell in cells]
        for name, words in names.items()
    }
    _points(axes, [cell["name"].removeprefix("cpu-") for cell in cells], series)
    axes.set_xscale("log")
    axes.set_xlabel("time from keys to labels / time of the product")
    axes.set_title("Connected components of one image on the CPU", fontsize=10)


def _points(axes: Any, labels: list[str], series: Mapping[str, list[float | None]]) -> None:
    for (name, values), marker in zip(series.items(), "osD^v", strict=False):
        there = [(value, -place) for place, value in enumerate(values) if value is not None]
        if there:
            axes.scatter(*zip(*there, strict=True), marker=marker, s=26, label=name)
    axes.set_yticks([-place for place in range(len(labels))], labels, fontsize=7)
    axes.set_ylim(0.5 - len(labels), 0.5)


_PANELS: dict[tuple[str, ...], Callable[[Any, Cells], None]] = {
    ("components",): _draw_components,
    ("layer",): _draw_layer,
    ("step", "inference"): _draw_networks,
    ("memory",): _draw_memory,
    ("growth",): _draw_growth,
    ("cpu",): _draw_cpu,
}
