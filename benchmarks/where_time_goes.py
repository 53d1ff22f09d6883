"""Where the time of a whole pre-training step goes, by parts, with and without superpixels.

    python benchmarks/where_time_goes.py [--size tiny] [--pixels 224] [--images 128] [--photographs DIR] [--plainly]

On a GPU the times of its kernels, sorted into parts by their names, of a step that is compiled and replayed as in
training (``--plainly``: neither); what the GPU waits for is not in them. On a CPU the times of PyTorch's operations and
of the layer's own functions, of a step as it is.
"""

from __future__ import annotations

import argparse
import collections
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

import asc
from asc import layer as layers
from asc.bench.contest import ASC, COMPILED, PLAIN, REPLAYED, Contestant, Shape, make_encoder
from asc.bench.inputs import Source
from asc.grouping import gradient as gradients
from asc.replay.replayer import is_worth_replaying

# What a name has in it, and which part that is; the first that fits counts.
PARTS = {
    "gradient of θ": r"_slopes|_row_sums|_pack_rows|_choose_rows|_add_parts|_write_codes|_sum_grads",
    "similarities and components": r"_join_|_offer|_flatten|_compare|_sum_keys|_write_(theta|groups)|_place_members",
    "merging": r"_fuse_|_spread|_weigh_by_score|_give_to_largest|_clear",
    "attention": r"_attend|_grad_queries|_grad_keys|_write_counts|sdpa|flash|fmha|scaled_dot_product",
    "matrix products": r"gemm|nvjet|cutlass|xmma|splitK|aten::(add|b|m)*mm|convolution|onednn",
    "optimiser, moving average": r"adam|[Ll]erp|multi_tensor|_foreach",
    "copies": r"[Mm]emcpy|[Mm]emset|(?<!_to_)copy",
}
REST = "norms, activations, sums, the rest"
LABEL = "part: "
# Functions that a CPU runs in place of kernels.
LABELLED: tuple[tuple[Any, str, str], ...] = (
    (layers, "components", "similarities and components"),
    (layers, "similarity_features", "similarities and components"),
    (layers, "groups_from_labels", "similarities and components"),
    (layers.Merge, "forward", "merging"),
    (gradients._SoftTwin, "backward", "gradient of θ"),
)
STEPS = 3


@contextmanager
def labelled() -> Iterator[None]:
    """Give functions the names of their parts."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in LABELLED]
    for (owner, name, function), (*_, part) in zip(before, LABELLED, strict=True):
        named = _named(function, part)
        setattr(owner, name, staticmethod(named) if name == "backward" else named)
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, staticmethod(function) if name == "backward" else function)


def _named(function: Callable[..., Any], part: str) -> Callable[..., Any]:
    def run(*arguments: Any, **settings: Any) -> Any:
        with record_function(LABEL + part):
            return function(*arguments, **settings)

    return run


def part_of(name: str) -> str:
    """The part that a kernel or an operation belongs to."""
    return next((part for part, pattern in PARTS.items() if re.search(pattern, name)), REST)


def times_of(step: Callable[[], None], device: torch.device) -> tuple[dict[str, float], float]:
    """Milliseconds of every part of a step, and of the whole by the clock."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    wait()
    begun = time.perf_counter()
    for _ in range(STEPS):
        step()
    wait()
    whole = 1e3 * (time.perf_counter() - begun) / STEPS
    with profile(activities=activities) as recorded:
        for _ in range(STEPS):
            step()
        wait()
    spent: collections.Counter[str] = collections.Counter()
    for event in recorded.events():
        if on_gpu and event.device_type == torch.autograd.DeviceType.CUDA:
            spent[part_of(event.name)] += event.device_time / 1e3 / STEPS
        elif not on_gpu:
            spent[_label_above(event) or part_of(event.name)] += event.self_cpu_time_total / 1e3 / STEPS
    return dict(spent), whole


def _label_above(event: Any) -> str | None:
    while event is not None:
        if event.name.startswith(LABEL):
            return str(event.name.removeprefix(LABEL))
        event = event.cpu_parent
    return None


def make_step(name: str, shape: Shape, images_B3HW: Tensor, plainly: bool) -> Callable[[], None]:
    """A step that is warm, and replayed where that is worth it."""
    device, kind = images_B3HW.device, ""
    if device.type == "cuda" and not plainly:
        worth_it = is_worth_replaying(make_encoder(name, shape), len(images_B3HW), images_B3HW.shape[-2:])
        kind = REPLAYED if worth_it else COMPILED
    contestant = Contestant(name + kind, shape, "pretrain", device, None)
    if name == ASC:
        for encoder in contestant.job.encoders():
            encoder.calibrate(images_B3HW[:32])
    contestant.peak_gb(images_B3HW)  # which warms it up
    return lambda: contestant(images_B3HW)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny", help="tiny, small or base")
    parser.add_argument("--pixels", type=int, default=224, help="side of an image")
    parser.add_argument("--images", type=int, help="a batch; 128 by default, 4 on a CPU")
    parser.add_argument("--photographs", type=Path, help="a folder of images in place of embedded scenes")
    parser.add_argument("--plainly", action="store_true", help="neither compiled nor replayed")
    options = parser.parse_args()
    if options.images is not None and (options.images < 4 or options.images % 2):
        parser.error("--images must be even, and at least 4: its halves are the two frames of the clips")
    warnings.simplefilter("ignore", asc.SuperpixelWarning)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    count = options.images or (128 if device.type == "cuda" else 4)
    shape = Shape(options.size, 4, options.pixels, count)
    images_B3HW = Source(options.photographs).frames(count, shape.pixels, device)
    found = {}
    with labelled():
        for name in (ASC, PLAIN):
            torch.manual_seed(0)
            found[name] = times_of(make_step(name, shape, images_B3HW, options.plainly), device)
    print(
        f"{shape.name}, {count} images, {torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, ms a step\n"
    )
    print(f"| part | {ASC} | share | {PLAIN} | share |\n|---|---|---|---|---|")
    sums = {name: sum(times.values()) for name, (times, _) in found.items()}
    for part in (*PARTS, REST):
        cells = [f"{t.get(part, 0):.1f} | {t.get(part, 0) / sums[name]:.0%}" for name, (t, _) in found.items()]
        print(f"| {part} | {' | '.join(cells)} |")
    print(f"| all parts | {' | '.join(f'{total:.1f} | ' for total in sums.values())} |")
    print(f"| by the clock | {' | '.join(f'{whole:.1f} | ' for _, whole in found.values())} |")


if __name__ == "__main__":
    main()
