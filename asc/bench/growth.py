"""How time and memory of connected components grow with the tokens of an image, and with the images."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from asc.bench.cells import Cell, Setup
from asc.bench.inputs import Case, case
from asc.bench.measure import Function, Memory, exponent, take_turns, warm_up
from asc.grouping.components import components

_WIDTH = 64
_KIND = "image"
TOKENS, IMAGES = (256, 576, 1024, 2304, 4096, 9216, 16384), 4
BATCHES, COUNT = (1, 4, 16, 64, 256), 1024


def cells(quick: bool) -> list[Cell]:
    """Growth with tokens, and growth with images."""
    tokens, images = ((64, 144, 256), 2) if quick else (TOKENS, IMAGES)
    batches, count = ((1, 2, 4), 64) if quick else (BATCHES, COUNT)
    by_tokens = [(images, number) for number in tokens]
    by_images = [(number, count) for number in batches]
    return [_cell("tokens", by_tokens, tokens, quick), _cell("batch", by_images, batches, quick)]


def cell_name(grows: str, sizes: tuple[int, ...]) -> str:
    """The name of a cell."""
    return f"growth-{grows}-{sizes[0]}-{sizes[-1]}"


def _cell(grows: str, shapes: list[tuple[int, int]], sizes: tuple[int, ...], quick: bool) -> Cell:
    settings = {"grows": grows, "shapes": shapes, "sizes": list(sizes), "width": _WIDTH, "kind": _KIND}
    measure = partial(_measure, shapes, list(sizes))
    return Cell("growth", cell_name(grows, sizes), settings, measure, needs_gpu=not quick)


def _measure(shapes: list[tuple[int, int]], sizes: list[int], setup: Setup) -> dict[str, Any]:
    made = [case(_KIND, batch, count, _WIDTH, setup.device, setup.seed) for batch, count in shapes]
    functions: dict[str, Function] = {str(size): partial(_label, one) for size, one in zip(sizes, made, strict=True)}
    working, failed = warm_up(functions)
    if failed:
        raise next(iter(failed.values()))
    # What a call allocates: union-find and labels; the features were there before.
    peaks = [Memory(setup.device).peak_gb(function) for function in working.values()]
    timings = take_turns(working, setup.device, setup.rounds, setup.seconds)
    times = [timings[str(size)].ms for size in sizes]
    known = [1e3 * peak for peak in peaks if peak is not None]
    return {
        "times": {name: timing._asdict() for name, timing in timings.items()},
        "peak_mb": known or None,
        "time_exponent": exponent(sizes, times),
        "last_time_exponent": exponent(sizes[-2:], times[-2:]),
        "memory_exponent": exponent(sizes, known) if known else None,
    }


def _label(made: Case) -> torch.Tensor:
    return components(made.features_TD, made.cu_seqlens, made.theta, max_len=made.length)
