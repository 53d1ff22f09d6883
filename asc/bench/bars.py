"""What must be shown, and whether it is: all worked out from the cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from asc.bench import components, cpu, growth, layer, networks
from asc.bench.cells import lacks_compiled
from asc.bench.contest import ASC, EAGER, MERGERS, OURS, PEERS
from asc.bench.inputs import KINDS

Results = Mapping[str, Any]


@dataclass(frozen=True)
class Bar:
    """One number that a cell must reach."""

    cell: str
    """Name of the cell."""
    what: str
    """The number, in words."""
    limit: float
    """How much it may be at most, or must be at least."""
    at_most: bool
    """Which of the two."""
    value: Callable[[Results], float | None]
    """The number, from the cell's results; None where it was not measured."""


@dataclass(frozen=True)
class Verdict:
    """A bar, and what came of it."""

    bar: Bar
    value: float | None
    passed: bool | None
    """None: not measured."""
    note: str = ""
    """Why it was not measured, or who did not take part."""


def verdicts(cells: Mapping[str, Mapping[str, Any]]) -> list[Verdict]:
    """All bars, in the order of the groups."""
    return [_verdict(bar, cells.get(bar.cell)) for bar in BARS]


def _verdict(bar: Bar, cell: Mapping[str, Any] | None) -> Verdict:
    if cell is None or cell["status"] != "measured":
        return Verdict(bar, None, None, "not run" if cell is None else f"{cell['status']}: {cell['reason']}")
    if lacks_compiled(cell):
        # The peers would not be at their best.
        return Verdict(bar, None, None, "compiled networks did not take part")
    value = bar.value(cell["results"])
    if value is None:
        return Verdict(bar, None, None, "a contestant is missing")
    lost = _absent(cell["results"]) if "contestants" in cell["results"] else ()
    note = f"without {', '.join(lost)}" if lost else ""
    return Verdict(bar, value, value <= bar.limit if bar.at_most else value >= bar.limit, note)


def _absent(results: Results) -> tuple[str, ...]:
    """Networks that could not take part, and those that were not asked to."""
    asked = results.get("networks") or EAGER
    return (*results.get("failed", ()), *(name for name in EAGER if name not in (ASC, *asked)))


# --- Numbers of cells -------------------------------------------------------------------------------------


def ratio_of_times(times: Mapping[str, Mapping[str, float]], ours: str, peer: str) -> float | None:
    """How many times as long ours takes."""
    return times[ours]["ms"] / times[peer]["ms"] if ours in times and peer in times else None


def fastest(results: Results, names: tuple[str, ...]) -> str | None:
    """The one of these contestants with the most images a second."""
    there = [name for name in names if name in results["contestants"]]
    return max(there, key=lambda name: results["contestants"][name]["images_per_s"], default=None)


def speed_ratio(results: Results, peers: tuple[str, ...] = PEERS, ours: tuple[str, ...] = OURS) -> float | None:
    """Images a second of the fastest of ours over those of the fastest peer."""
    return _ratio(results, "images_per_s", ours, peers)


def memory_ratio(results: Results, peers: tuple[str, ...] = PEERS, ours: tuple[str, ...] = OURS) -> float | None:
    """Peak memory of the fastest of ours over that of the fastest peer."""
    return _ratio(results, "peak_gb", ours, peers)


def _ratio(results: Results, number: str, ours: tuple[str, ...], peers: tuple[str, ...]) -> float | None:
    one, other = fastest(results, ours), fastest(results, peers)
    if one is None or other is None:
        return None
    above, below = (results["contestants"][name][number] for name in (one, other))
    return None if above is None or below is None else float(above / below)


# --- The bars ---------------------------------------------------------------------------------------------


def _kernel_ms(results: Results) -> float:
    return float(results["times"][components.KERNEL]["ms"])


def _number(name: str, results: Results) -> float | None:
    value = results[name]
    # Two digits are as much as a fit over noisy times can tell.
    return None if value is None else round(float(value), 2)


def _component_bars() -> list[Bar]:
    limits = {components.SIZES[0]: 0.45, components.SIZES[1]: 0.15}
    bars = []
    for size, limit in limits.items():
        shown = " × ".join(f"{number:,}" for number in size)
        for kind in KINDS:
            name = components.cell_name(kind, *size)
            bars.append(Bar(name, f"components, {shown}, {kind} keys: ms", limit, True, _kernel_ms))
    for size in components.SIZES:
        shown = " × ".join(f"{number:,}" for number in size)
        for kind in KINDS:
            what = f"components, {shown}, {kind} keys: tokens whose label rounding does not explain"
            bars.append(Bar(components.cell_name(kind, *size), what, 0, True, partial(_number, "outside")))
    return bars


def _layer_ratio(part: str, results: Results) -> float | None:
    return ratio_of_times(results["times"][part], layer.LAYER, layer.ATTENTION)


def _layer_bars() -> list[Bar]:
    limits = {
        ("forward", "global"): 0.5,
        ("forward", "spatial"): 0.5,
        ("both", "global"): 0.5,
        ("both", "spatial"): 0.3,
    }
    words = {"forward": "forward", "both": "forward and backward"}
    return [
        Bar(
            layer.cell_name(network, 3136, neighbourhood),
            f"{neighbourhood} layer of {network} at 3,136 tokens, {words[part]}: × time of attention",
            limit,
            True,
            partial(_layer_ratio, part),
        )
        for network in layer.NETWORKS
        for (part, neighbourhood), limit in limits.items()
    ]


def _network_bars() -> list[Bar]:
    bars = []
    for shape in (networks.TINY, networks.BASE, networks.SMALL_IMAGES):
        name = networks.cell_name("pretrain", shape)
        what = f"pre-training step, {shape.size}/{shape.patch}, {shape.pixels} px"
        small = shape == networks.SMALL_IMAGES
        bars.append(Bar(name, f"{what}: × images/s of the plain ViT", 1.3 if small else 2.5, False, speed_ratio))
        if not small:
            bars.append(Bar(name, f"{what}: × peak memory of the plain ViT", 0.5, True, memory_ratio))
        mergers = partial(speed_ratio, peers=MERGERS)
        bars.append(Bar(name, f"{what}: × images/s of Token Merging", 1.0, False, mergers))
    shape = networks.LARGE_IMAGES
    what = f"inference, {shape.size}/{shape.patch}, {shape.pixels} px: × images/s of the plain ViT"
    return [*bars, Bar(networks.cell_name("inference", shape), what, 3.0, False, speed_ratio)]


def _growth_bars() -> list[Bar]:
    name = growth.cell_name("tokens", growth.TOKENS)
    return [
        Bar(name, "components: time grows with tokens to the power", 2.0, True, partial(_number, "time_exponent")),
        Bar(name, "components: memory grows with tokens to the power", 1.0, True, partial(_number, "memory_exponent")),
    ]


def _cpu_ratio(results: Results) -> float | None:
    return ratio_of_times(results["times"], cpu.LABELS, cpu.PRODUCT)


def _cpu_bars() -> list[Bar]:
    what = "CPU, 3,136 tokens from {} keys to labels: × time of the product"
    return [Bar(cpu.cell_name(kind, cpu.COUNT), what.format(kind), 1.5, True, _cpu_ratio) for kind in cpu.KINDS]


BARS = (*_component_bars(), *_layer_bars(), *_network_bars(), *_growth_bars(), *_cpu_bars())
