"""What a training step of segmentation, detection and depth costs at the paper's sizes, against the plain ViT.

    python benchmarks/dense_speed.py --out runs/dense_speed.json

Networks of patches of 4 pixels see 512 × 512 pixels (16,384 tokens; batch 16 for segmentation, 8 for detection) and
crops of 416 × 352 or whole images of 640 × 480 (9,152 and 19,200 tokens; batch 8) for depth. A step is what training
does: forward, loss, backward, norm of the gradient, optimiser, thresholds, in bf16, with the heads and losses of
``asc.tasks`` and the settings of the paper's recipes. Superpixels and the plain ViT take turns in one process. Where
the paper's batch does not fit, it is halved until it does. ``--quick`` tries a miniature, on a CPU too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

# Two networks of very different tensors share the memory: without it, what one leaves behind does not fit the other.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import asc
from asc.bench.measure import Memory, half_precision, machine_record, out_of_memory, take_turns
from asc.data import Scene, SceneConfig, normalise
from asc.data.voc import VOC_CLASSES
from asc.files import write_whole
from asc.recipes import depth as depth_recipes
from asc.recipes import detect as detect_recipes
from asc.recipes import segment as segment_recipes
from asc.tasks.depth.data import DepthDataConfig, open_depth_data
from asc.tasks.depth.task import DepthTask
from asc.tasks.detect.data import SceneSet, Truth
from asc.tasks.detect.task import DetectBatch, DetectTask
from asc.tasks.segment.data import SEGMENT_CLASSES, SegmentDataConfig, open_segment_data
from asc.tasks.segment.task import SegmentTask
from asc.train import Task, TrainConfig, make_optimiser

PLAIN, SUPERPIXELS = "plain", "superpixels"
_CALIBRATION = 4
# Different images of a batch; drawing more would take longer than measuring.
_FRAMES = 8
_WARM_CALLS = 2
# Objects of an image, as many as VOC shows on average.
_OBJECTS = 3


@dataclass(frozen=True)
class Case:
    """A head at one size of images."""

    name: str
    head: Literal["mlp", "fpn", "fasterrcnn", "detr", "depth"]
    size: tuple[int, int]
    """Height and width in pixels."""
    batch: int
    """The paper's."""
    network: str
    """tiny, small, base; ``nano`` is for trying."""


_SHAPES: tuple[tuple[str, Literal["mlp", "fpn", "fasterrcnn", "detr", "depth"], tuple[int, int], int], ...] = (
    ("segmentation, `fpn`", "fpn", (512, 512), 16),
    ("depth, whole image", "depth", (480, 640), 8),
    ("detection, `fasterrcnn`", "fasterrcnn", (512, 512), 8),
    ("segmentation, `mlp`", "mlp", (512, 512), 16),
    ("depth, crop", "depth", (352, 416), 8),
    ("detection, `detr`", "detr", (512, 512), 8),
)


def cases_of(quick: bool, networks: Sequence[str], heads: Sequence[str]) -> list[Case]:
    shapes = [shape for shape in _SHAPES if shape[1] in heads]
    if quick:
        return [Case(name, head, (h // 64 * 4, w // 64 * 4), 2, "nano") for name, head, (h, w), _ in shapes]
    return [Case(*shape, network) for network in networks for shape in shapes]


# --- The very tasks ---------------------------------------------------------------------------------------


def make_encoder(case: Case, variant: str) -> asc.AscViT:
    size, settings = (case.network, {}) if case.network != "nano" else ("tiny", {"width": 48})
    superpixels = None if variant == PLAIN else asc.SuperpixelConfig()
    return asc.create_model(f"asc_vit_{size}_patch4", superpixels, image_size=case.size, **settings)


def make_task(case: Case, encoder: asc.AscViT) -> tuple[Task, TrainConfig]:
    """The task as its paper recipe makes it, with VOC's classes; its data are never read."""
    if case.head in ("mlp", "fpn"):
        segment = segment_recipes.paper()
        segment = replace(
            segment,
            head=replace(segment.head, kind=case.head),
            augment=replace(segment.augment, size=case.size),
        )
        scenes = open_segment_data("scenes", SegmentDataConfig(scenes=2, scenes_judged=2))
        return SegmentTask(segment, replace(scenes, classes=SEGMENT_CLASSES), encoder), segment.train
    if case.head == "depth":
        depth = depth_recipes.paper()
        depth = replace(depth, augment=replace(depth.augment, size=case.size))
        data = open_depth_data("scenes", DepthDataConfig(scenes=2, scenes_judged=2))
        return DepthTask(depth, data, encoder), depth.train
    detect = detect_recipes.paper() if case.head == "fasterrcnn" else detect_recipes.paper_detr()
    detect = replace(detect, augment=replace(detect.augment, size=case.size[0]))
    samples = SceneSet(detect.sets.scene, 2)
    samples.classes = VOC_CLASSES
    return DetectTask(detect, encoder, samples, samples), detect.train


def make_inputs(case: Case, images_B3HW: Tensor) -> Any:
    """What the task's ``prepare`` would give: images of scenes, and a truth that is random but of the usual shape."""
    generator = torch.Generator().manual_seed(0)
    batch, (height, width), device = len(images_B3HW), case.size, images_B3HW.device
    if case.head in ("mlp", "fpn"):
        coarse_B1hw = torch.randint(len(SEGMENT_CLASSES), (batch, 1, 4, 4), generator=generator).float()
        return images_B3HW, F.interpolate(coarse_B1hw, case.size).to(torch.uint8)[:, 0].to(device)
    if case.head == "depth":
        coarse_B1hw = 1 + 8 * torch.rand(batch, 1, 4, 4, generator=generator)
        return images_B3HW, F.interpolate(coarse_B1hw, case.size, mode="bilinear")[:, 0].to(device)
    limit_4 = torch.tensor([width, height, width, height])
    truths = []
    for _ in range(batch):
        corner_K2, side_K2 = torch.rand(2, _OBJECTS, 2, generator=generator)
        boxes_K4 = torch.cat([0.5 * corner_K2, 0.5 * corner_K2 + 0.1 + 0.4 * side_K2], dim=1) * limit_4
        classes_K = torch.randint(len(VOC_CLASSES), (_OBJECTS,), generator=generator)
        truths.append(Truth(boxes_K4, classes_K, torch.zeros(_OBJECTS, dtype=torch.bool)).to(device))
    return DetectBatch(images_B3HW, [case.size] * batch, truths, list(range(batch)))


class Step:
    """One training step of one contestant."""

    def __init__(self, case: Case, variant: str, images_B3HW: Tensor) -> None:
        device = images_B3HW.device
        self.memory = Memory(device)
        self.images_B3HW, self.case = images_B3HW, case
        self.task, self.train = self.memory.keep(partial(self._make, variant, device))
        self.optimiser = make_optimiser(self.task, self.train)
        for group in self.optimiser.param_groups:
            # So many steps on the same few images could end anywhere; the work does not depend on their size.
            group["lr"] = 1e-6
        self.batch = 0

    def _make(self, variant: str, device: torch.device) -> tuple[Task, TrainConfig]:
        torch.manual_seed(0)
        self.encoder = make_encoder(self.case, variant).to(device)
        task, train = make_task(self.case, self.encoder)
        if self.encoder.budget is not None:
            with half_precision(device):
                self.encoder.calibrate(self.images_B3HW[:_CALIBRATION])
        return task.to(device).train(), train

    def take(self, batch: int) -> None:
        """Let it work on so many images."""
        self.batch, self.inputs = batch, make_inputs(self.case, self.images_B3HW[:batch])

    def __call__(self) -> None:
        with half_precision(self.images_B3HW.device):
            loss = self.task(self.inputs).loss
        loss.backward()
        parameters = [p for group in self.optimiser.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, self.train.clip or torch.inf, foreach=True)
        self.optimiser.step()
        self.task.after_step(0.5)
        self.optimiser.zero_grad(set_to_none=True)

    def fit(self) -> bool:
        """Find the largest batch that fits, from the paper's down; whether there is one."""
        batch = self.case.batch
        while batch:
            try:
                self.take(batch)
                for _ in range(_WARM_CALLS):
                    # The state of the optimiser comes with the first step and stays.
                    self.memory.keep(self)
                return True
            except Exception as error:
                if not out_of_memory(error):
                    raise
                traceback.clear_frames(error.__traceback__)
            self.optimiser.zero_grad(set_to_none=True)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            print(f"  a batch of {batch} does not fit", flush=True)
            batch //= 2
        return False

    def tokens_left(self) -> float | None:
        stats = list(self.encoder.diagnostics().values())
        return stats[-1].tokens_mean if stats else None


# --- Measuring --------------------------------------------------------------------------------------------


def measure(case: Case, device: torch.device, rounds: int, seconds: float) -> dict[str, Any]:
    images_B3HW = images_of(case).to(device)
    steps = {variant: Step(case, variant, images_B3HW) for variant in (PLAIN, SUPERPIXELS)}
    fitting = {variant: step for variant, step in steps.items() if step.fit()}
    peaks = {variant: step.memory.peak_gb(step) for variant, step in fitting.items()}
    timings = take_turns(fitting, device, rounds, seconds)
    contestants = {
        variant: timings[variant]._asdict()
        | {
            "batch": step.batch,
            "images_per_s": 1e3 * step.batch / timings[variant].ms,
            "peak_gb": peaks[variant],
            "tokens_left": step.tokens_left(),
        }
        for variant, step in fitting.items()
    }
    return asdict(case) | {"tokens": case.size[0] * case.size[1] // 16, "contestants": contestants}


def images_of(case: Case) -> Tensor:
    """Normalised frames of scenes, drawn square and cut to the case's size; they repeat."""
    height, width = case.size
    frames_F3SS = drawn(max(height, width))
    return frames_F3SS[torch.arange(case.batch) % _FRAMES, :, :height, :width].contiguous()


@lru_cache
def drawn(side: int) -> Tensor:
    scenes = (Scene(SceneConfig(size=side), index) for index in range(_FRAMES))
    return normalise(np.stack([scene.frame(0).image_HW3 for scene in scenes]))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() and not arguments.quick else "cpu")
    record: dict[str, Any] = {"machine": machine_record(device, 0), "cases": [], "failed": {}}
    begun = time.monotonic()
    for case in cases_of(arguments.quick, arguments.networks, arguments.heads):
        label = f"{case.name}, {case.network}"
        if time.monotonic() - begun > arguments.limit:
            record["failed"][label] = "no time left"
            continue
        now = time.monotonic()
        try:
            record["cases"].append(measure(case, device, arguments.rounds, arguments.seconds))
        except Exception as error:  # one case less; the others go on
            traceback.print_exc()
            record["failed"][label] = f"{type(error).__name__}: {error}"[:300]
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        write_whole(arguments.out, json.dumps(record, indent=1).encode() + b"\n")
        print(f"{label}: {time.monotonic() - now:.0f} s", flush=True)
    write_whole(arguments.out, json.dumps(record, indent=1).encode() + b"\n")
    return record


# --- The table --------------------------------------------------------------------------------------------


def table(record: dict[str, Any]) -> str:
    titles = ["task", "network", "pixels", "tokens", "paper's batch"]
    for variant in (PLAIN, SUPERPIXELS):
        titles += [f"{variant}: batch", "ms", "images/s", "peak GB"]
    titles += ["tokens left", "speed", "memory of an image"]
    lines = [" | ".join(titles), " | ".join("---" for _ in titles)]
    lines += [" | ".join(row(case)) for case in record["cases"]]
    text = "\n".join(f"| {line} |" for line in lines)
    return "\n".join([text, *(f"\nnot measured: {name}: {why}" for name, why in record["failed"].items())])


def row(case: dict[str, Any]) -> list[str]:
    height, width = case["size"]
    cells = [case["name"], case["network"], f"{width} × {height}", f"{case['tokens']:,}", str(case["batch"])]
    for variant in (PLAIN, SUPERPIXELS):
        found = case["contestants"].get(variant)
        if found is None:
            cells += ["does not fit", "", "", ""]
            continue
        peak = "" if found["peak_gb"] is None else f"{found['peak_gb']:.1f}"
        cells += [str(found["batch"]), f"{found['ms']:.0f}", f"{found['images_per_s']:.1f}", peak]
    left = case["contestants"].get(SUPERPIXELS, {}).get("tokens_left")
    return [*cells, "" if left is None else f"{left:,.0f}", *ratios(case["contestants"])]


def ratios(contestants: dict[str, Any]) -> list[str]:
    """Superpixels over plain: images in a second, and peak memory divided by the images of the batch."""
    if len(contestants) < 2:
        return ["", ""]
    plain, ours = contestants[PLAIN], contestants[SUPERPIXELS]
    speed = f"{ours['images_per_s'] / plain['images_per_s']:.2f} ×"
    if plain["peak_gb"] is None:
        return [speed, ""]
    return [speed, f"{ours['peak_gb'] / ours['batch'] / (plain['peak_gb'] / plain['batch']):.2f} ×"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/dense_speed.json"))
    parser.add_argument("--networks", nargs="+", choices=("tiny", "small", "base"), default=["base", "tiny"])
    heads = tuple(dict.fromkeys(shape[1] for shape in _SHAPES))
    parser.add_argument("--heads", nargs="+", choices=heads, default=list(heads))
    parser.add_argument("--rounds", type=int, default=5, help="steps of each network that are timed, at most")
    parser.add_argument("--seconds", type=float, default=5.0, help="time for them in each case, roughly")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds after which no further case is begun")
    parser.add_argument("--quick", action="store_true", help="a miniature on the CPU")
    arguments = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", asc.SuperpixelWarning)
        print(table(run(arguments)))


if __name__ == "__main__":
    main()
