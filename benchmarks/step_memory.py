"""Memory that a compiled pre-training step needs, worked out on a CPU, with and without superpixels.

    TRITON_INTERPRET=1 python benchmarks/step_memory.py [--size tiny] [--pixels 224] [--images 128] [--spare 0 0.12]

What is alive at the worst moment follows from the shapes of tensors alone. So the step is run on a CPU with few images,
in bf16 and compiled, our kernels do nothing, and superpixel layers leave the number of tokens that the budget asks for,
and ``--spare`` more, which is the room of a replayed step. Two batches give the memory of any other. Weights and the
optimiser's state are added. Where the worst moment is, is said, too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# Products of bf16 are not safe on every processor; must be set before PyTorch is loaded.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import asc
from asc import attention, kernels
from asc.pretrain.siamese import Siamese, SiameseConfig
from asc.tokens import Room

PHASES = ("forward", "backward", "optimiser")
FEW = (2, 4)


class Peak(NamedTuple):
    """The worst moment of a step."""

    gb: float
    phase: str


def let_kernels_do_nothing() -> None:
    """And let attention take its kernel, as on a GPU."""
    for found in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"asc.kernels.{found.name}")
        if found.name != "launch" and hasattr(module, "launch"):
            module.launch = lambda *_, **__: None
    attention._kernel_takes = lambda _: True


def make_siamese(size: str, pixels: int, superpixels: bool, heads: SiameseConfig) -> Siamese:
    torch.manual_seed(0)
    config = asc.SuperpixelConfig() if superpixels else None
    return Siamese(asc.create_model(f"asc_vit_{size}_patch4", config, image_size=pixels), heads).train()


def make_step(size: str, pixels: int, superpixels: bool, spare: float, images: int) -> Callable[[], None]:
    """A function that takes a step, both encoders compiled."""
    # The usual heads would need more than so few images do; with a real batch it is the other way round.
    siamese = make_siamese(size, pixels, superpixels, SiameseConfig(projection=16, hidden=32))
    assert siamese.target_encoder is not None
    for network in (siamese.encoder, siamese.target_encoder):
        network.compile()
        left = float(images * (pixels // 4) ** 2)
        for layer in network.superpixel_layers:
            left *= float(layer.threshold.target)
            layer.room = Room(int(left * (1 + spare)), (pixels // 4) ** 2)
    optimiser = torch.optim.AdamW([p for p in siamese.parameters() if p.requires_grad], lr=0.0)
    images_VB3HW = torch.randn(2, images // 2, 3, pixels, pixels)

    def step() -> None:
        with record_function("forward"), torch.autocast("cpu", torch.bfloat16):
            loss = siamese(images_VB3HW).loss
        with record_function("backward"):
            loss.backward()
        with record_function("optimiser"):
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    return step


def peaks_of(step: Callable[[], None]) -> dict[str, float]:
    """Most bytes beyond those that are there before, in every phase."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    with tempfile.TemporaryDirectory() as folder:
        recorded.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Total Allocated"]) for e in events if e.get("name") == "[memory]")
    spans = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X" and e["name"] in PHASES}
    found = {}
    for phase, (begin, end) in spans.items():
        before = [total for at, total in changes if at < begin]
        found[phase] = max([*before[-1:], *(total for at, total in changes if begin <= at <= end)], default=0)
    return found


def peak(size: str, pixels: int, images: int, superpixels: bool, spare: float) -> Peak:
    """Of a step of so many images."""
    found = []
    for few in FEW:
        step = make_step(size, pixels, superpixels, spare, few)
        for _ in range(2):
            step()
        found.append(peaks_of(step))
        torch._dynamo.reset()
    # AdamW keeps two numbers for every weight that learns.
    weights = make_siamese(size, pixels, superpixels, SiameseConfig()).parameters()
    held = sum(weight.nbytes * (3 if weight.requires_grad else 1) for weight in weights)
    each = {phase: (found[1][phase] - found[0][phase]) / (FEW[1] - FEW[0]) for phase in PHASES}
    bytes_of = {phase: held + found[0][phase] + each[phase] * (images - FEW[0]) for phase in PHASES}
    worst = max(PHASES, key=lambda phase: bytes_of[phase])
    return Peak(bytes_of[worst] / 1e9, worst)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny", help="tiny, small or base")
    parser.add_argument("--pixels", type=int, default=224, help="side of an image")
    parser.add_argument("--images", type=int, default=128, help="a batch")
    parser.add_argument("--spare", type=float, nargs="+", default=[0.0, 0.12], help="room of superpixel layers")
    options = parser.parse_args()
    if not kernels.interpreted() or torch.cuda.is_available():
        parser.error("set TRITON_INTERPRET=1, and let PyTorch see no GPU: this is worked out on a CPU")
    if options.size not in ("tiny", "small", "base"):
        parser.error(f"--size is tiny, small or base, not {options.size}")
    if options.pixels < 4 or options.pixels % 4:
        parser.error(f"--pixels must be a multiple of 4, the side of a patch, got {options.pixels}")
    if min(options.spare) < 0:
        parser.error("--spare is a share of the tokens, at least 0")
    warnings.simplefilter("ignore")
    let_kernels_do_nothing()
    shape = options.size, options.pixels, options.images
    plain = peak(*shape, superpixels=False, spare=0.0)
    print(f"{options.size}/4, {options.pixels} px, {options.images} images: GB at the worst moment\n")
    print("| network | GB | × plain ViT | worst in |\n|---|---|---|---|")
    print(f"| plain ViT | {plain.gb:.1f} | | {plain.phase} |", flush=True)
    for spare in options.spare:
        ours = peak(*shape, superpixels=True, spare=spare)
        name = f"superpixels, room for {spare:.0%} more"
        print(f"| {name} | {ours.gb:.1f} | {ours.gb / plain.gb:.3f} | {ours.phase} |", flush=True)


if __name__ == "__main__":
    main()
