"""Components on the CPU: one image from keys to labels, against the bare product of the keys."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asc.bench.cells import Cell, Setup
from asc.bench.inputs import Source, network_keys, theta_keeping
from asc.bench.measure import Function, take_turns, warm_up
from asc.grouping.components import components
from asc.grouping.graph import similarity_features

COUNT, WIDTH = 3136, 64
KINDS = ("network", "random", "clustered", "joined")
LABELS, TORCH, PRODUCT = "keys to labels", "keys to labels by torch", "product"


def cells(quick: bool) -> list[Cell]:
    """Four kinds of keys; they run on the CPU whatever else there is."""
    count = 144 if quick else COUNT
    return [
        Cell(
            "cpu",
            cell_name(kind, count),
            {"kind": kind, "count": count, "width": WIDTH},
            partial(_measure, kind, count),
            needs_gpu=False,
        )
        for kind in KINDS
    ]


def cell_name(kind: str, count: int) -> str:
    """The name of a cell."""
    return f"cpu-{count}x{WIDTH}-{kind}"


def _measure(kind: str, count: int, setup: Setup) -> dict[str, Any]:
    keys_ND, theta = _keys(kind, count, setup.source)
    borders = torch.tensor([0, count], dtype=torch.int32)
    image_of_N = torch.zeros(count, dtype=torch.int64)

    def labels(backend: str) -> Tensor:
        features_ND = similarity_features(keys_ND, image_of_N, 1, "cosine", center=False)
        return components(features_ND, borders, theta, backend=backend, max_len=count)

    functions: dict[str, Function] = {
        LABELS: partial(labels, "cpu"),
        TORCH: partial(labels, "torch"),
        PRODUCT: lambda: keys_ND @ keys_ND.T,
    }
    with torch.no_grad():
        working, failed = warm_up(functions)
        if failed:
            raise next(iter(failed.values()))
        timings = take_turns(working, torch.device("cpu"), setup.rounds, setup.seconds)
        kept = len(labels("cpu").unique()) / count
    return {
        "times": {name: timing._asdict() for name, timing in timings.items()},
        "kept": kept,
        "theta": float(theta),
        **(setup.source.record if kind in ("network", "joined") else {}),
    }


def _keys(kind: str, count: int, source: Source) -> tuple[Tensor, Tensor]:
    """Keys and a threshold that suits them."""
    if kind == "random":
        return torch.randn(count, WIDTH), torch.tensor(0.4)
    if kind == "clustered":
        centres_ND = torch.randn(40, WIDTH)[torch.randint(0, 40, (count,))]
        return centres_ND + 0.3 * torch.randn(count, WIDTH), torch.tensor(0.9)
    keys_ND = network_keys(1, count, WIDTH, torch.device("cpu"), source)
    if kind == "joined":
        return keys_ND, torch.tensor(-1.0)
    borders = torch.tensor([0, count], dtype=torch.int32)
    return keys_ND, theta_keeping(F.normalize(keys_ND, dim=1), borders, count)
