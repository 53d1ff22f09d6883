"""Training steps, pre-training steps, inference and memory of whole networks."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from asc.bench.cells import Cell, Group, Setup
from asc.bench.contest import Contest, Shape, Work
from asc.bench.measure import take_turns

TINY, BASE, SMALL_IMAGES = Shape("tiny", 4, 224), Shape("base", 4, 224), Shape("tiny", 4, 64)
LARGE_IMAGES = Shape("base", 4, 512)
_OTHERS = tuple(
    Shape(size, patch, pixels) for pixels in (224, 96, 512) for patch in (4, 16) for size in ("tiny", "base", "small")
)
# The shapes with a bar come first, so that they are measured even where time is short.
_STEPS = tuple(dict.fromkeys((TINY, BASE, SMALL_IMAGES, *_OTHERS)))
_INFERENCES = tuple(dict.fromkeys((LARGE_IMAGES, *_OTHERS)))
_MEMORIES = (TINY, BASE, LARGE_IMAGES, Shape("small", 4, 224))
_QUICK = (Shape("nano", 4, 32, most=4),)
# So many calls in a row make one time: the host may run ahead from step to step, as it does in training.
_CALLS = 3


def step_cells(quick: bool) -> list[Cell]:
    """Pre-training steps, which have bars, then training steps."""
    shapes = _QUICK if quick else _STEPS
    works: tuple[Work, ...] = ("pretrain", "train")
    return [_cell("step", work, shape, quick) for work in works for shape in shapes]


def inference_cells(quick: bool) -> list[Cell]:
    """Features of images."""
    return [_cell("inference", "inference", shape, quick) for shape in (_QUICK if quick else _INFERENCES)]


def memory_cells(quick: bool) -> list[Cell]:
    """Memory that a training step needs for each image."""
    return [
        Cell("memory", f"memory-{shape.name}", asdict(shape), partial(_measure_memory, shape))
        for shape in (_QUICK if quick else _MEMORIES)
    ]


def cell_name(work: Work, shape: Shape) -> str:
    """The name of a cell."""
    return f"inference-{shape.name}" if work == "inference" else f"step-{work}-{shape.name}"


def _cell(group: Group, work: Work, shape: Shape, quick: bool) -> Cell:
    settings = asdict(shape) | {"work": work}
    return Cell(group, cell_name(work, shape), settings, partial(_measure, work, shape), needs_gpu=not quick)


def _measure(work: Work, shape: Shape, setup: Setup) -> dict[str, Any]:
    contest = Contest(shape, work, setup)
    batch = contest.run()
    images_B3HW = contest.images_B3HW[:batch]
    functions = {name: partial(contestant, images_B3HW) for name, contestant in contest.running.items()}
    setup.before_timing()
    timings = take_turns(functions, setup.device, setup.rounds, setup.seconds, _CALLS)
    return {
        "batch": batch,
        "contestants": {
            name: timing._asdict()
            | {
                "images_per_s": 1e3 * batch / timing.ms,
                "peak_gb": contest.peaks_gb[name],
                "tokens": contest.entering_tokens(name),
                "seconds_to_warm_up": contest.seconds_to_warm_up[name],
            }
            for name, timing in timings.items()
        },
        "failed": contest.failed,
        "compiled": setup.compiled,
        "networks": setup.networks,
        "images": setup.source.record["images"],
        "attention_kernel": contest.attention._asdict(),
        "attention_kernel_of_mergers": contest.attention_of_mergers._asdict(),
    }


def _measure_memory(shape: Shape, setup: Setup) -> dict[str, Any]:
    # What is compiled for one batch would be compiled anew for half of it, and could need another share.
    contest = Contest(shape, "train", replace(setup, compiled=False))
    batch = contest.run()
    total_gb = torch.cuda.get_device_properties(setup.device).total_memory / 1e9
    return {
        "batch": batch,
        "contestants": {name: _growth_of_memory(contest, name, batch, total_gb) for name in contest.running},
        "failed": contest.failed,
        "images": setup.source.record["images"],
        "total_gb": total_gb,
    }


def _growth_of_memory(contest: Contest, name: str, batch: int, total_gb: float) -> dict[str, float]:
    contestant = contest.running[name]
    whole, half = contest.peaks_gb[name], contestant.peak_gb(contest.images_B3HW[: batch // 2])
    assert whole is not None and half is not None
    each = (whole - half) / (batch - batch // 2)
    return {"peak_gb": whole, "gb_per_image": each, "images_that_fit": int((total_gb - whole) / each) + batch}
