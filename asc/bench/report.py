"""From cells to one table, one file of numbers and one picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asc.bench import components, cpu, layer
from asc.bench.bars import Verdict, fastest, memory_ratio, ratio_of_times, speed_ratio, verdicts
from asc.bench.cells import read_cells
from asc.bench.contest import CONTESTANTS, MERGERS, OURS, PEERS
from asc.bench.plots import draw
from asc.files import write_whole

JSON_FILE, TABLE_FILE, PICTURE_FILE = "bench.json", "bench.md", "bench.png"

CellAnswer = Mapping[str, Any]
_NOTHING = "–"
_ABOUT = "Ratios are taken within a cell, in which all contestants take turns in one process. Times are medians."


def write_report(folder: Path) -> None:
    """Write ``bench.json``, ``bench.md`` and ``bench.png`` from the cells that lie there."""
    cells = read_cells(folder)
    judged = verdicts(cells)
    bars = [
        {
            "cell": verdict.bar.cell,
            "what": verdict.bar.what,
            "limit": verdict.bar.limit,
            "at_most": verdict.bar.at_most,
            "value": verdict.value,
            "passed": verdict.passed,
        }
        for verdict in judged
    ]
    merged = json.dumps({"bars": bars, "cells": list(cells.values())}, indent=2)
    write_whole(folder / JSON_FILE, merged.encode() + b"\n")
    write_whole(folder / TABLE_FILE, markdown(cells, judged).encode())
    write_whole(folder / PICTURE_FILE, lambda file: draw(cells, file))


def markdown(cells: Mapping[str, CellAnswer], judged: Sequence[Verdict]) -> str:
    """All tables."""
    measured = [cell for cell in cells.values() if cell["status"] == "measured"]
    parts = [
        f"# Benchmark\n\n{_ABOUT}",
        _bar_table(judged),
        _machines(measured),
    ]
    for group, (title, table) in _TABLES.items():
        own = [cell for cell in measured if cell["group"] == group]
        if own:
            parts.append(f"## {title}\n\n{table(own)}")
    left = [cell for cell in cells.values() if cell["status"] != "measured"]
    if left:
        rows = [[cell["name"], cell["status"], cell["reason"]] for cell in left]
        parts.append(f"## Cells without numbers\n\n{_table(['cell', 'what happened', 'why'], rows)}")
    return "\n\n".join(parts) + "\n"


# --- Bars and machines ------------------------------------------------------------------------------------


def _bar_table(judged: Sequence[Verdict]) -> str:
    counts = [sum(verdict.passed is wanted for verdict in judged) for wanted in (True, False, None)]
    rows = [
        [
            verdict.bar.what,
            f"{'≤' if verdict.bar.at_most else '≥'} {verdict.bar.limit:g}",
            _shown(verdict.value, 3),
            _word(verdict),
        ]
        for verdict in judged
    ]
    title = f"## Bars: {counts[0]} passed, {counts[1]} failed, {counts[2]} not measured"
    return f"{title}\n\n{_table(['what', 'bar', 'measured', ''], rows)}"


def _word(verdict: Verdict) -> str:
    if verdict.passed is None:
        return f"not measured ({verdict.note})"
    word = "pass" if verdict.passed else "**FAIL**"
    return f"{word} ({verdict.note})" if verdict.note else word


def _machines(cells: Sequence[CellAnswer]) -> str:
    groups: dict[str, set[str]] = {}
    for cell in cells:
        machine = cell["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        memory = f", {machine['memory_gb']} GB, CUDA {machine['cuda']}" if "memory_gb" in machine else ""
        threads = f", {machine['threads']} threads" if "memory_gb" not in machine else ""
        line = f"{machine['device']}{memory}{threads}; {machine['precision']}; seed {machine['seed']}; {versions}"
        groups.setdefault(line, set()).add(cell["group"])
    return "\n".join(["## Measured on", "", *(f"- {', '.join(sorted(own))}: {line}" for line, own in groups.items())])


# --- Groups -----------------------------------------------------------------------------------------------


def _component_table(cells: Sequence[CellAnswer]) -> str:
    names = (components.KERNEL, components.BMM, components.TORCH, components.SCIPY)
    heads = ["images × tokens × channels", "keys", *(f"{name}, ms" for name in names), "floor, ms"]
    heads += ["tokens kept", "labels that differ", f"pairs within {components.MARGIN:g} of θ", "not explained"]
    rows = []
    for cell in cells:
        settings, results = cell["settings"], cell["results"]
        size = " × ".join(f"{settings[name]:,}" for name in ("batch", "count", "width"))
        times = [_shown(results["times"].get(name, {}).get("ms"), 3) for name in names]
        exact = [f"{results[name]:,}" for name in ("differ", "close_pairs", "outside")]
        rows.append([size, settings["kind"], *times, _shown(results["floor_ms"], 3), f"{results['kept']:.2f}", *exact])
    notes = (
        "The torch backend, scipy and the product work on the same keys as the kernel. scipy labels **one** image of "
        "the batch, adjacency included; a batch takes it as many times as long as it has images. The floor is the "
        "whole Gram matrix at the rate of one large matrix product on the same device. Labels are compared with "
        "scipy's on the graph in fp64; differences are explained by pairs that rounding can put on either side of θ."
    )
    return f"{_table(heads, rows)}\n\n{notes}{_failures(cells)}"


def _layer_table(cells: Sequence[CellAnswer]) -> str:
    heads = ["block", "images × tokens", "neighbourhood", "forward, ms", "attention", "ratio", "sdpa alone"]
    heads += ["forward + backward, ms", "attention", "ratio", "tokens kept", "attention kernel"]
    rows = []
    for cell in cells:
        settings, results = cell["settings"], cell["results"]
        row = [settings["network"], f"{settings['batch']} × {settings['count']:,}", settings["neighbourhood"]]
        for part in ("forward", "both"):
            times = results["times"][part]
            own, peer = (_shown(times.get(name, {}).get("ms"), 3) for name in (layer.LAYER, layer.ATTENTION))
            row += [own, peer, _shown(ratio_of_times(times, layer.LAYER, layer.ATTENTION), 2)]
            if part == "forward":
                row.append(_shown(times.get(layer.SDPA, {}).get("ms"), 3))
        kernel = results["attention_kernel"]
        rows.append([*row, f"{results['kept']:.2f}", f"{kernel['usual']} (fastest alone: {kernel['fastest']})"])
    notes = (
        f"Attention: {layer.WHAT_ATTENTION_IS}. The way back gives the gradients of tokens and θ for the layer, of "
        "tokens and weights for attention."
    )
    return f"{_table(heads, rows)}\n\n{notes}{_failures(cells)}"


def _network_table(cells: Sequence[CellAnswer]) -> str:
    parts = []
    for cell in cells:
        settings, results = cell["settings"], cell["results"]
        title = f"### {settings['work']}: {settings['size']}/{settings['patch']}, {settings['pixels']} px"
        parts.append(f"{title}\n\n{'; '.join(_sums(results))}.\n\n{_contestants(results)}")
    return "\n\n".join(parts) + _failures(cells)


def _sums(results: Mapping[str, Any]) -> list[str]:
    sums = [f"batch {results['batch']} of {results.get('images', 'embedded scenes')}"]
    ours, peer, merger = (fastest(results, names) for names in (OURS, PEERS, MERGERS))
    if peer is not None:
        speed, memory = (_shown(ratio(results), 2) for ratio in (speed_ratio, memory_ratio))
        sums.append(f"{speed}× the images/s and {memory}× the memory of the plain ViT ({ours} / {peer})")
    if merger is not None:
        sums.append(f"{_shown(speed_ratio(results, MERGERS), 2)}× the images/s of {merger}")
    kernels = [results[name]["fastest"] for name in ("attention_kernel", "attention_kernel_of_mergers")]
    return [*sums, f"attention kernel of the plain ViT {kernels[0]}, of Token Merging {kernels[1]}"]


def _contestants(results: Mapping[str, Any]) -> str:
    rows = []
    for name in CONTESTANTS:
        if found := results["contestants"].get(name):
            tokens = " ".join(f"{count:.0f}" for count in found["tokens"])
            rate = f"{found['images_per_s']:.4g}"
            warm = _shown(found.get("seconds_to_warm_up"), 0)
            rows.append([name, rate, _shown(found["ms"], 2), _shown(found["peak_gb"], 2), warm, tokens])
    return _table(["", "images/s", "ms", "peak GB", "s to warm up", "tokens entering each block"], rows)


def _memory_table(cells: Sequence[CellAnswer]) -> str:
    rows = []
    for cell in cells:
        settings, results = cell["settings"], cell["results"]
        shape = f"{settings['size']}/{settings['patch']}, {settings['pixels']} px"
        for name, found in results["contestants"].items():
            numbers = [_shown(found["peak_gb"], 2), _shown(found["gb_per_image"], 4), f"{found['images_that_fit']:,}"]
            rows.append([shape, name, str(results["batch"]), *numbers])
    heads = ["training step", "", "batch", "peak GB", "GB for each image", "images that fit the device"]
    return _table(heads, rows) + _failures(cells)


def _growth_table(cells: Sequence[CellAnswer]) -> str:
    parts = []
    for cell in cells:
        results, shapes = cell["results"], cell["settings"]["shapes"]
        peaks = results["peak_mb"] or [None] * len(shapes)
        times = [timing["ms"] for timing in results["times"].values()]
        rows = [
            [str(batch), f"{count:,}", _shown(ms, 3), _shown(peak, 2)]
            for (batch, count), ms, peak in zip(shapes, times, peaks, strict=True)
        ]
        sums = (
            f"With the {cell['settings']['grows']}: time to the power {_shown(results['time_exponent'], 2)} "
            f"(between the last two {_shown(results['last_time_exponent'], 2)}), memory to the power "
            f"{_shown(results['memory_exponent'], 2)}."
        )
        parts.append(f"{sums}\n\n{_table(['images', 'tokens', 'ms', 'extra MB'], rows)}")
    return "\n\n".join(parts)


def _cpu_table(cells: Sequence[CellAnswer]) -> str:
    rows = []
    for cell in cells:
        times, count = cell["results"]["times"], cell["settings"]["count"]
        numbers = [_shown(times[name]["ms"], 2) for name in (cpu.LABELS, cpu.TORCH, cpu.PRODUCT)]
        ratios = [_shown(ratio_of_times(times, name, cpu.PRODUCT), 2) for name in (cpu.LABELS, cpu.TORCH)]
        rows.append([f"{count:,}", cell["settings"]["kind"], f"{cell['results']['kept']:.2f}", *numbers, *ratios])
    heads = [
        "tokens",
        "keys",
        "tokens kept",
        f"{cpu.LABELS}, ms",
        "by torch, ms",
        "product, ms",
        "ratio",
        "ratio of torch",
    ]
    return _table(heads, rows)


_TABLES: dict[str, tuple[str, Callable[[Sequence[CellAnswer]], str]]] = {
    "components": ("Connected components", _component_table),
    "layer": ("One superpixel layer against the attention of its block", _layer_table),
    "step": ("Training steps", _network_table),
    "inference": ("Inference", _network_table),
    "memory": ("Memory", _memory_table),
    "growth": ("Growth of connected components", _growth_table),
    "cpu": ("Connected components of one image on the CPU", _cpu_table),
}


# --- Words ------------------------------------------------------------------------------------------------


def _failures(cells: Sequence[CellAnswer]) -> str:
    lines = [
        f"- {cell['name']}: {name} could not take part: {reason}"
        for cell in cells
        for name, reason in cell["results"].get("failed", {}).items()
    ]
    return "\n\n" + "\n".join(lines) if lines else ""


def _shown(value: float | None, digits: int) -> str:
    return _NOTHING if value is None else f"{value:,.{digits}f}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines)
