"""Tuning the GPU kernels: sweeps over shapes of tiles, and where a layer and a training step spend their time.

    python benchmarks/kernels.py [--out FILE.json] [--only tilings,blocks,...]

How fast they are next to their peers is for ``asc bench`` to say. Every part stands alone: what fails is printed with
its traceback, and the next goes on.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import cProfile
import io
import itertools
import json
import pstats
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import triton.testing
from torch.profiler import ProfilerActivity, profile

import asc
from asc.bench.contest import Job, PretrainStep, TrainStep
from asc.bench.inputs import KINDS, case, scene_frames
from asc.bench.layer import NEIGHBOURHOODS, LayerCase
from asc.bench.measure import half_precision
from asc.kernels import feed_forward
from asc.kernels import gradient as gradient_kernels
from asc.kernels import launch as launching
from asc.kernels.attention import AllTiles, Tiles, attend, attention, best_tiles, parts_of_counts
from asc.kernels.components import Tiling, everywhere
from asc.kernels.gradient import Blocks, Spread, soft_gradient

DEVICE = torch.device("cuda", 0)
SIZES = ((64, 3136), (256, 576), (512, 256))
WIDTH, HEADS = 64, 3
TILINGS = [
    Tiling(block=block, splits=splits, warps=warps) for block, warps in ((32, 1), (64, 2)) for splits in (2, 4, 8)
]
# Images, mean tokens, heads: blocks of tiny/4 at 224 and 64 pixels, and of base/4 at 224.
RAGGED = ((128, 849, 3), (128, 1630, 3), (128, 2261, 3), (512, 70, 3), (32, 849, 12))
TILES = [Tiles(64, 32), Tiles(64, 64), Tiles(64, 64, stages=2), Tiles(128, 32, 8), Tiles(128, 64, 8)]
# Tokens, and channels in the MLP or of queries, keys and values: tiny/4 at 64 pixels, base/4 at 224.
WIDE = ((40704, 768), (105472, 768), (25000, 3072), (40704, 192), (40704, 576), (25000, 2304))
BLOCKS = [
    Blocks(64, 64, 64, 4, 2),
    Blocks(64, 64, 64, 4, 3),
    Blocks(64, 64, 64, 4, 4),
    Blocks(64, 64, 32, 4, 4),
    Blocks(64, 32, 64, 4, 3),
    Blocks(32, 64, 64, 4, 3),
    Blocks(64, 128, 64, 4, 3),
    Blocks(128, 64, 64, 8, 3),
]

results: dict[str, object] = {}


@contextlib.contextmanager
def cell(name: str) -> Iterator[None]:
    """Run one part of the benchmark; a failure is printed and does not stop the others."""
    start = time.perf_counter()
    try:
        yield
    except Exception:
        print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
        results[f"{name} failed"] = traceback.format_exc()[-2000:]
    finally:
        torch.cuda.empty_cache()
    if time.perf_counter() - start > 5:
        print(f"  ({name}: {time.perf_counter() - start:.0f} s)", flush=True)


def record(name: str, **numbers: object) -> None:
    results[name] = numbers
    shown = "  ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in numbers.items()
    )
    print(f"{name:44s} {shown}", flush=True)


def milliseconds(function: Callable[[], object], budget: float = 60) -> float:
    return float(triton.testing.do_bench(function, warmup=15, rep=budget, return_mode="median"))


def bench_tilings() -> None:
    for batch, count in SIZES:
        cases = {}
        for kind in KINDS:
            with cell(f"case {kind}"):
                cases[kind] = case(kind, batch, count, WIDTH, DEVICE)
        expected = {kind: everywhere(*inputs) for kind, inputs in cases.items()}
        for tiling in TILINGS:
            with cell(f"tiling {batch}x{count} {tuple(tiling)}"):
                times, wrong = {}, 0
                for kind, inputs in cases.items():
                    wrong += int((everywhere(*inputs, tiling) != expected[kind]).sum())
                    times[kind] = milliseconds(lambda: everywhere(*inputs, tiling), 12)  # noqa: B023
                record(f"tiling {batch}x{count} {tuple(tiling)}", **times, differ=wrong)


def bench_attention() -> None:
    """Attention that counts sizes and attention that does not; then the tiles of its three kernels, one at a time."""
    for batch, count, heads in RAGGED:
        lengths = (count * (0.7 + 0.6 * torch.rand(batch))).long()
        borders = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(DEVICE, torch.int32)
        total, longest = int(lengths.sum()), int(lengths.max())
        qkv = torch.randn(total, 3, heads, WIDTH, device=DEVICE, dtype=torch.bfloat16)
        sizes = torch.randint(1, 9, (total,), device=DEVICE)
        name = f"attention {batch}x{count}x{heads}"
        for sized in (None, sizes):
            with cell(name):
                times = attention_times(qkv, borders, longest, sized, best_tiles(longest))
                record(f"{name} {'plain' if sized is None else 'sized'}", **times)
        for kernel in AllTiles._fields:
            for tiles in TILES:
                with cell(f"{name} {kernel} {tuple(tiles)}"):
                    chosen = best_tiles(longest)._replace(**{kernel: tiles})
                    record(f"{name} {kernel} {tuple(tiles)}", **attention_times(qkv, borders, longest, sizes, chosen))


def attention_times(
    qkv: torch.Tensor, borders: torch.Tensor, longest: int, sizes: torch.Tensor | None, tiles: AllTiles
) -> dict[str, float]:
    """Milliseconds of the forward kernel, and of both ways."""
    parts = None if sizes is None else parts_of_counts(sizes, WIDTH)
    leaf = qkv.requires_grad_()
    upstream = torch.randn_like(qkv[:, 0])

    def both_ways() -> None:
        torch.autograd.grad(attention(leaf, borders, longest, sizes_T=sizes, tiles=tiles), leaf, upstream)

    return {
        "forward": milliseconds(lambda: attend(qkv.detach(), borders, longest, parts, tiles.forward), 12),
        "both": milliseconds(both_ways, 12),
    }


def bench_blocks() -> None:
    for batch, count in SIZES:
        features, borders, theta, _ = case("image", batch, count, WIDTH, DEVICE)
        total = batch * count
        values, grads = torch.randn(2, total, HEADS * WIDTH, device="cuda")
        ones, group_of = torch.ones(total, device="cuda"), torch.arange(total, device="cuda")
        votes, tau = torch.randn(total, device="cuda"), 0.2 * (1 - theta)
        inputs = (Spread(grads, votes, group_of, ones, ones), features, values, theta, tau, borders, count)
        expected = soft_gradient(*inputs)[0]
        for blocks in BLOCKS:
            with cell(f"gradient {batch}x{count} {tuple(blocks)}"):
                found = soft_gradient(*inputs, blocks)[0]
                error = float((found - expected).norm() / expected.norm())
                spent = milliseconds(lambda: soft_gradient(*inputs, blocks), 25)  # noqa: B023
                record(f"gradient {batch}x{count} {tuple(blocks)}", ms=spent, error=error)


def check_gradient() -> None:
    """bf16 products against the plain formula in fp64, on image-like features."""
    from asc.grouping.gradient import Gate, soft_gradient_everywhere

    batch, count = 4, 576
    features, borders, theta, _ = case("image", batch, count, WIDTH, DEVICE)
    total = batch * count
    values, grads = torch.randn(2, total, 192, device="cuda") + 1
    ones, group_of = torch.ones(total, device="cuda"), torch.arange(total, device="cuda")
    votes, tau = torch.randn(total, device="cuda"), 0.2 * (1 - theta)
    gate = Gate(values.double(), ones.double(), tau.double(), borders, None)
    expected = soft_gradient_everywhere(grads.double(), votes.double(), features.double(), theta.double(), gate)
    for name, own in (("half", features), ("fp32", features.float())):
        spread = Spread(grads, votes, group_of, ones, ones)
        found = soft_gradient(spread, own, values, theta, tau, borders, count)
        record(
            f"gradient error {name}",
            features=float((found[0] - expected[0]).norm() / expected[0].norm()),
            theta=float((found[1] - expected[1]).abs() / expected[1].abs()),
        )


def profile_layer() -> None:
    """Launches and transfers of one superpixel layer of tiny/4."""
    for batch, count in SIZES:
        for neighbourhood in NEIGHBOURHOODS:
            name = f"layer {batch}x{count} {neighbourhood}"
            with cell(name):
                made = LayerCase("tiny", batch, count, neighbourhood, DEVICE)
                profile_calls(f"{name} forward", made.merge)
                profile_calls(f"{name} both", made.merge_both)


def profile_calls(name: str, function: Callable[[], object], top: int = 14) -> None:
    """Launches, host synchronisations, and where the device spends its time, in one call."""
    function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - start) * 1e3
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        function()
        torch.cuda.synchronize()
    launches, syncs, to_host = 0, -1, 0  # the last synchronisation is our own
    device_us: collections.Counter[str] = collections.Counter()
    calls: collections.Counter[str] = collections.Counter()
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            device_us[event.name] += event.device_time
            calls[event.name] += 1
            to_host += "DtoH" in event.name
        else:
            launches += "LaunchKernel" in event.name
            syncs += "Synchronize" in event.name
    busy = sum(device_us.values()) / 1e3
    record(f"profile {name}", wall_ms=wall, busy_ms=busy, launches=launches, syncs=syncs, to_host=to_host)
    for kernel, spent in device_us.most_common(top):
        print(f"    {spent / 1e3:8.3f} ms {calls[kernel]:5d} x {kernel[:100]}")


STEPS: dict[str, asc.SuperpixelConfig | None] = {
    "plain": None,
    "global": asc.SuperpixelConfig(),
    "global, no gradient": asc.SuperpixelConfig(gradient="none"),
    "spatial": asc.SuperpixelConfig(neighbourhood="spatial"),
}


def step_of(name: str, kind: type[Job] = TrainStep, compiled: bool = False) -> Callable[[], None]:
    """A step of tiny/4 on 512 images of 64 × 64, warm."""
    torch.manual_seed(0)
    images = scene_frames(512, 64, DEVICE)
    encoder = asc.create_model("asc_vit_tiny_patch4", STEPS[name], image_size=64).to(DEVICE)
    if STEPS[name] is not None:
        with half_precision(DEVICE):
            encoder.calibrate(images[:64])
    job = kind(encoder, DEVICE)
    if compiled:
        for one in job.encoders():
            one.compile()
    # The number of tokens changes from step to step: the allocator needs a few until it has seen all sizes.
    for _ in range(6):
        job(images)
    return lambda: job(images)


def profile_steps() -> None:
    for name in STEPS:
        with cell(f"step {name}"):
            profile_calls(f"step {name}", step_of(name), top=24)


def profile_pretraining() -> None:
    for name in ("plain", "global"):
        with cell(f"pre-training step {name}"):
            profile_calls(f"pre-training step {name}", step_of(name, PretrainStep), top=10)


def profile_compiled() -> None:
    for name in ("plain", "global"):
        with cell(f"step compiled {name}"):
            profile_calls(f"step compiled {name}", step_of(name, compiled=True), top=16)


def profile_host() -> None:
    """Where Python spends a step with superpixels, and how much the host is behind the device."""
    for name in ("plain", "global"):
        with cell(f"host {name}"):
            step = step_of(name)
            segments = torch.cuda.memory_stats()["segment.all.allocated"]
            compiled = len(launching._compiled)
            profiler = cProfile.Profile()
            profiler.enable()
            for _ in range(20):
                step()
            profiler.disable()
            torch.cuda.synchronize()
            # Both must be 0 once training is under way: memory asked of the driver, kernels compiled.
            record(
                f"host {name} new in 20 steps",
                device_allocations=torch.cuda.memory_stats()["segment.all.allocated"] - segments,
                kernels=len(launching._compiled) - compiled,
            )
            if name == "global":
                # The backward pass runs in a thread that cProfile does not see: its functions are timed alone.
                stream = io.StringIO()
                pstats.Stats(profiler, stream=stream).sort_stats("tottime").print_stats(45)
                print(stream.getvalue().replace(str(Path(asc.__file__).parents[1]), ""), flush=True)
                profile_backward(step)


def profile_backward(step: Callable[[], None]) -> None:
    """Python inside the backward pass, one node at a time, by the host's clock."""
    from asc.kernels.layer import _Join

    spent: list[float] = []
    original = _Join.backward

    def timed(*arguments: object) -> object:
        start = time.perf_counter()
        try:
            return original(*arguments)
        finally:
            spent.append(time.perf_counter() - start)

    _Join.backward = staticmethod(timed)
    try:
        for _ in range(5):
            step()
    finally:
        _Join.backward = staticmethod(original)
    record("host layer backward", us=statistics.median(spent) * 1e6, calls=len(spent))


def bench_feed_forward() -> None:
    """The kernels of the MLP beside PyTorch's, microseconds; programs and tiles."""
    for rows, width in WIDE:
        hidden, grad = torch.randn(2, rows, width, device=DEVICE, dtype=torch.bfloat16).unbind()
        bias = torch.randn(width, device=DEVICE)
        microseconds("gelu, torch", rows, width, lambda h=hidden: F.gelu(h))
        microseconds("column sums, torch", rows, width, lambda g=grad: g.sum(0))
        before = feed_forward._TILE, feed_forward._PROGRAMS
        for tile, programs in itertools.product((512, 1024, 2048), (1056, 1536, 2112)):
            feed_forward._TILE, feed_forward._PROGRAMS = tile, programs
            for name, arguments in (
                ("gelu", (hidden, bias)),
                ("gelu_backward", (hidden, bias, grad)),
                ("column_sums", (grad,)),
            ):
                microseconds(
                    name, rows, width, partial(getattr(torch.ops.asc, name), *arguments), tile=tile, programs=programs
                )
        feed_forward._TILE, feed_forward._PROGRAMS = before


def microseconds(name: str, rows: int, width: int, function: Callable[[], object], **settings: int) -> None:
    shown = " ".join(f"{key} {value}" for key, value in settings.items())
    us = 1e3 * triton.testing.do_bench(function, warmup=5, rep=20, return_mode="median")
    record(f"{name} {rows} × {width} {shown}".strip(), us=us)


PARTS: dict[str, Callable[[], None]] = {
    "check": check_gradient,
    "layer": profile_layer,
    "step": profile_steps,
    "host": profile_host,
    "pretraining": profile_pretraining,
    "blocks": bench_blocks,
    "tilings": bench_tilings,
    "attention": bench_attention,
    "feed-forward": bench_feed_forward,
}
# Run when named only: compiling takes longer than all the others together.
SLOW_PARTS: dict[str, Callable[[], None]] = {"compiled": profile_compiled}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="also write the numbers as JSON")
    parser.add_argument("--only", help=f"parts to run, separated by commas: {', '.join(PARTS | SLOW_PARTS)}")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    warnings.simplefilter("ignore", asc.SuperpixelWarning)
    print(f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name()}")
    print(f"defaults: {Tiling()}, {gradient_kernels.Blocks()}")
    for name in options.only.split(",") if options.only else PARTS:
        with cell(name):
            (PARTS | SLOW_PARTS)[name]()
        if options.out:
            options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
