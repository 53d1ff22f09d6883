"""One superpixel layer against the attention of the same block. Shape letters: see ``asc.tokens``."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import asc
from asc.bench.cells import Cell, Setup, reason_of
from asc.bench.inputs import SCENES, Source
from asc.bench.measure import Function, choose_attention, half_precision, take_turns, warm_up
from asc.layer import Neighbourhood
from asc.tokens import Tokens
from asc.vit import Block

# Images and tokens of each.
SHAPES = ((64, 3136), (512, 256))
NETWORKS = ("tiny", "base")
NEIGHBOURHOODS: tuple[Neighbourhood, ...] = ("global", "spatial")
LAYER, ATTENTION, SDPA = "layer", "attention", "sdpa alone"
WHAT_ATTENTION_IS = "norm, queries/keys/values, attention kernel, projection, residual sum"


def cells(quick: bool) -> list[Cell]:
    """Both neighbourhoods in blocks of two widths, at two numbers of tokens."""
    shapes, networks = (((2, 64),), ("tiny",)) if quick else (SHAPES, NETWORKS)
    return [
        Cell(
            "layer",
            cell_name(network, count, neighbourhood),
            {"network": network, "batch": batch, "count": count, "neighbourhood": neighbourhood},
            partial(_measure, network, batch, count, neighbourhood),
            needs_gpu=not quick,
        )
        for batch, count in shapes
        for network in networks
        for neighbourhood in NEIGHBOURHOODS
    ]


def cell_name(network: str, count: int, neighbourhood: str) -> str:
    """The name of a cell."""
    return f"layer-{network}-{count}-{neighbourhood}"


class LayerCase:
    """The first block of an untrained network, its layer calibrated for the default budget.

    Everything is as in training: the budget's share of the block receives the gradient of θ.
    """

    def __init__(
        self,
        network: str,
        batch: int,
        count: int,
        neighbourhood: Neighbourhood,
        device: torch.device,
        source: Source = SCENES,
    ):
        self.device, self.side = device, math.isqrt(count)
        config = asc.SuperpixelConfig(neighbourhood=neighbourhood)
        model = asc.create_model(f"asc_vit_{network}_patch4", config, image_size=4 * self.side).to(device)
        self.block: Block = next(model._blocks())
        assert self.block.superpixels is not None and model.budget is not None
        self.layer = self.block.superpixels
        self.heads = model.config.heads
        with torch.no_grad(), half_precision(device):
            self.embedded = model._embed(source.frames(batch, 4 * self.side, device))
            attended, keys_THD = self.block.attend(self.embedded)
            # As in a network: embedding and residual sum are fp32, keys are part of the queries, keys and values.
            keep = float(model.budget.targets_L[0])
            self.layer.calibrate(attended, keys_THD, keep)
        self.keys_THD = keys_THD.detach()
        self.attended = _leaf(attended)
        self.embedded = _leaf(self.embedded)
        self.target = torch.tensor(keep, device=device, requires_grad=True)
        attention = (self.block.norm1, self.block.attn)
        self.weights = [weight for module in attention for weight in module.parameters()]
        merged = self.merge()
        self.kept = merged.values_TC.shape[0] / attended.values_TC.shape[0]
        self.grad_GC, self.grad_TC = torch.randn_like(merged.values_TC), torch.randn_like(attended.values_TC)
        self.grad_votes_G = None if merged.log_votes_T is None else torch.randn_like(merged.log_votes_T)

    def merge(self) -> Tokens:
        """The superpixel layer."""
        with half_precision(self.device):
            merged: Tokens = self.layer(self.attended, self.keys_THD, self.target)
        return merged

    def merge_both(self) -> None:
        """The same and back, to the tokens and the threshold."""
        merged = self.merge()
        outputs, grads = [merged.values_TC], [self.grad_GC]
        if merged.log_votes_T is not None and self.grad_votes_G is not None:
            outputs, grads = [*outputs, merged.log_votes_T], [*grads, self.grad_votes_G]
        torch.autograd.grad(outputs, (self.attended.values_TC, self.target), grads)

    def attend(self) -> Tensor:
        """The attention in front of it."""
        with half_precision(self.device):
            return self.block.attend(self.embedded)[0].values_TC

    def attend_both(self) -> None:
        """The same and back, to the tokens and the weights."""
        torch.autograd.grad(self.attend(), (self.embedded.values_TC, *self.weights), self.grad_TC)


def _leaf(tokens: Tokens) -> Tokens:
    return tokens.with_values(tokens.values_TC.detach().requires_grad_())


def _measure(network: str, batch: int, count: int, neighbourhood: Neighbourhood, setup: Setup) -> dict[str, Any]:
    made = LayerCase(network, batch, count, neighbourhood, setup.device, setup.source)
    shape_BHND = batch, made.heads, count, made.keys_THD.shape[-1]
    kernel = choose_attention(shape_BHND, setup.device, grad=True)
    query, key, value = torch.randn(3, *shape_BHND, device=setup.device, dtype=made.keys_THD.dtype).unbind()
    attend: Function = partial(F.scaled_dot_product_attention, query, key, value)
    failed: dict[str, BaseException] = {}
    times = {}
    with torch.no_grad():
        times["forward"] = _times({LAYER: made.merge, ATTENTION: made.attend, SDPA: attend}, setup, failed)
    times["both"] = _times({LAYER: made.merge_both, ATTENTION: made.attend_both}, setup, failed)
    return {
        "times": times,
        "failed": {name: reason_of(error) for name, error in failed.items()},
        "kept": made.kept,
        "attention": WHAT_ATTENTION_IS,
        "attention_kernel": kernel._asdict(),
        "images": setup.source.record["images"],
    }


def _times(functions: dict[str, Function], setup: Setup, failed: dict[str, BaseException]) -> dict[str, Any]:
    working, broken = warm_up(functions)
    failed |= broken
    if LAYER in broken:
        raise broken[LAYER]
    timings = take_turns(working, setup.device, setup.rounds, setup.seconds)
    return {name: timing._asdict() for name, timing in timings.items()}
