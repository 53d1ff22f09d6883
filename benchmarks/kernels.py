"""How fast the superpixel layer is on a GPU: its kernels, the whole layer, and a training step, against attention.

    python benchmarks/kernels.py [--out FILE.json] [--only components,tilings,...]

All times are medians of one run on one GPU, so only their ratios mean anything. Every cell stands alone: what fails is
printed with its traceback, and the next goes on.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import cProfile
import io
import itertools
import json
import math
import pstats
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
import triton.testing
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import asc
from asc.grouping.components import BACKENDS
from asc.kernels import components as component_kernels
from asc.kernels import gradient as gradient_kernels
from asc.kernels import launch as launching
from asc.kernels.components import Tiling, everywhere
from asc.kernels.gradient import Blocks, soft_gradient
from asc.pretrain.siamese import Siamese
from asc.tokens import Tokens

SIZES = ((64, 3136), (256, 576), (512, 256))
KINDS = ("random", "clustered", "chain", "image")
WIDTH, HEADS, KEEP = 64, 3, 0.8
TILINGS = [
    Tiling(block, splits, skip, warps)
    for block, warps in ((128, 4), (64, 4), (64, 2), (32, 2))
    for skip in (False, True)
    for splits in (2, 8)
]
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


def unit(rows: Tensor) -> Tensor:
    return F.normalize(rows.float(), dim=-1)


def keys_of(kind: str, batch: int, count: int) -> Tensor:
    """Features ``(batch * count, 64)`` of unit length."""
    noise = torch.randn(batch, count, WIDTH, device="cuda")
    if kind == "random":
        keys = noise
    elif kind == "clustered":
        centres = torch.randn(batch, 40, WIDTH, device="cuda")
        chosen = torch.randint(0, 40, (batch, count, 1), device="cuda").expand(-1, -1, WIDTH)
        keys = centres.gather(1, chosen) + 0.3 * noise
    elif kind == "chain":
        phase = torch.arange(count, device="cuda")[:, None] * torch.logspace(0, -4, WIDTH // 2, device="cuda")
        walk = torch.cat([phase.cos(), phase.sin()], dim=1)
        keys = torch.stack([walk[torch.randperm(count, device="cuda")] for _ in range(batch)])
    else:  # smooth fields with edges, as keys of neighbouring patches are
        side = math.isqrt(count)
        coarse = torch.randn(batch, WIDTH, 7, 7, device="cuda")
        smooth = F.interpolate(coarse, size=(side, side), mode="bilinear", align_corners=False)
        regions = F.interpolate(torch.randn(batch, WIDTH, 5, 5, device="cuda"), size=(side, side), mode="nearest")
        keys = (smooth + regions).flatten(2).transpose(1, 2) + 0.15 * noise
    keys = keys - keys.mean(1, keepdim=True) if kind != "chain" else keys
    return unit(keys).flatten(0, 1)


def borders_of(batch: int, count: int) -> Tensor:
    return torch.arange(batch + 1, dtype=torch.int32, device="cuda") * count


def kept_share(labels: Tensor) -> float:
    return float((labels == torch.arange(len(labels), device="cuda")).float().mean())


def theta_keeping(features: Tensor, borders: Tensor, count: int, keep: float) -> Tensor:
    low, high = -12.0, 0.7
    for _ in range(14):
        middle = (low + high) / 2
        theta = torch.tensor(1 - math.exp(middle), device="cuda")
        low, high = (middle, high) if kept_share(everywhere(features, borders, theta, count)) > keep else (low, middle)
    return torch.tensor(1 - math.exp(low), device="cuda")


def case(kind: str, batch: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    features, borders = keys_of(kind, batch, count).half(), borders_of(batch, count)
    theta = torch.tensor(0.9, device="cuda") if kind == "chain" else theta_keeping(features, borders, count, KEEP)
    return features, borders, theta


def attention_inputs(batch: int, count: int, grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (
        torch.randn(batch, HEADS, count, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=grad)
        for _ in range(3)
    )
    return query, key, value


def bench_components() -> None:
    for batch, count in SIZES:
        query, key, value = attention_inputs(batch, count, grad=False)
        attention = milliseconds(lambda: F.scaled_dot_product_attention(query, key, value))  # noqa: B023
        for kind in KINDS:
            with cell(f"components {batch}x{count} {kind}"):
                features, borders, theta = case(kind, batch, count)
                labels = everywhere(features, borders, theta, count)
                # The torch backend on the same rounded numbers: only sums in another order may differ.
                few = min(batch, 4) * count
                plain = BACKENDS["torch"].everywhere(features[:few].float(), borders[:5], theta, count)
                dense = features.view(batch, count, WIDTH)
                record(
                    f"components {batch}x{count} {kind}",
                    ms=milliseconds(lambda: everywhere(features, borders, theta, count)),  # noqa: B023
                    bmm=milliseconds(lambda: torch.bmm(dense, dense.mT)),  # noqa: B023
                    attention=attention,
                    kept=kept_share(labels),
                    theta=float(theta),
                    differ=int((labels[:few] != plain).sum()),
                )


def bench_tilings() -> None:
    for batch, count in SIZES:
        cases = {}
        for kind in KINDS:
            with cell(f"case {kind}"):
                cases[kind] = case(kind, batch, count)
        expected = {kind: everywhere(*inputs, count) for kind, inputs in cases.items()}
        for tiling in TILINGS:
            with cell(f"tiling {batch}x{count} {tuple(tiling)}"):
                times, wrong = {}, 0
                for kind, inputs in cases.items():
                    wrong += int((everywhere(*inputs, count, tiling) != expected[kind]).sum())
                    times[kind] = milliseconds(lambda: everywhere(*inputs, count, tiling), 12)  # noqa: B023
                record(f"tiling {batch}x{count} {tuple(tiling)}", **times, differ=wrong)


def bench_blocks() -> None:
    for batch, count in SIZES:
        features, borders, theta = case("image", batch, count)
        total = batch * count
        values, grads = torch.randn(2, total, HEADS * WIDTH, device="cuda")
        ones, group_of = torch.ones(total, device="cuda"), torch.arange(total, device="cuda")
        votes, tau = torch.randn(total, device="cuda"), 0.2 * (1 - theta)
        inputs = (grads, votes, group_of, ones, features, values, ones, theta, tau, borders, count)
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
    features, borders, theta = case("image", batch, count)
    total = batch * count
    values, grads = torch.randn(2, total, 192, device="cuda") + 1
    ones, group_of = torch.ones(total, device="cuda"), torch.arange(total, device="cuda")
    votes, tau = torch.randn(total, device="cuda"), 0.2 * (1 - theta)
    gate = Gate(values.double(), ones.double(), tau.double(), borders, None)
    expected = soft_gradient_everywhere(grads.double(), votes.double(), features.double(), theta.double(), gate)
    for name, own in (("half", features), ("fp32", features.float())):
        found = soft_gradient(grads, votes, group_of, ones, own, values, ones, theta, tau, borders, count)
        record(
            f"gradient error {name}",
            features=float((found[0] - expected[0]).norm() / expected[0].norm()),
            theta=float((found[1] - expected[1]).abs() / expected[1].abs()),
        )


class LayerCase:
    """One superpixel layer on image-like keys, as in a block of tiny/4 under autocast."""

    def __init__(self, batch: int, count: int, neighbourhood: str) -> None:
        torch.manual_seed(0)
        side = math.isqrt(count)
        channels = HEADS * WIDTH
        self.layer = asc.AdaptiveSuperpixelLayer(channels, asc.SuperpixelConfig(neighbourhood=neighbourhood)).cuda()
        self.values = torch.randn(batch, count, channels, device="cuda", requires_grad=True)
        qkv = torch.randn(batch * count, 3, HEADS, WIDTH, device="cuda").bfloat16()
        qkv[:, 1] = keys_of("image", batch, count)[:, None].bfloat16()
        self.keys = qkv[:, 1].requires_grad_()
        self.target = torch.tensor(KEEP, device="cuda", requires_grad=True)
        self.grid = side, side
        self.layer.calibrate(self.tokens(), self.keys, KEEP)
        self.upstream = torch.randn(batch * count, channels, device="cuda")

    def tokens(self) -> Tokens:
        return Tokens.from_dense(self.values, self.grid)

    def forward(self) -> Tokens:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            merged: Tokens = self.layer(self.tokens_once, self.keys, self.target)
        return merged

    def both(self) -> None:
        merged = self.forward()
        grad = self.upstream[: merged.values_TC.shape[0]]
        torch.autograd.grad(merged.values_TC, (self.values, self.keys, self.target), grad)


def bench_layer() -> None:
    for batch, count in SIZES:
        query, key, value = attention_inputs(batch, count, grad=True)
        upstream = torch.randn_like(query)

        def attend() -> Tensor:
            return F.scaled_dot_product_attention(query, key, value)  # noqa: B023

        def attend_both() -> None:
            torch.autograd.grad(attend(), (query, key, value), upstream)  # noqa: B023

        with cell(f"attention {batch}x{count}"):
            record(f"attention {batch}x{count}", forward=milliseconds(attend), both=milliseconds(attend_both, 120))
        for neighbourhood in ("global", "spatial"):
            with cell(f"layer {batch}x{count} {neighbourhood}"):
                made = LayerCase(batch, count, neighbourhood)
                made.tokens_once = made.tokens()
                merged = made.forward()
                record(
                    f"layer {batch}x{count} {neighbourhood}",
                    forward=milliseconds(made.forward),
                    both=milliseconds(made.both, 120),
                    kept=merged.values_TC.shape[0] / (batch * count),
                )
                profile_calls(f"layer {batch}x{count} {neighbourhood} forward", made.forward)
                profile_calls(f"layer {batch}x{count} {neighbourhood} both", made.both)


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


class StepCase:
    """A training step of tiny/4 on 512 images of 64 × 64, in bf16; ``siamese``: with target, heads and average."""

    def __init__(self, config: asc.SuperpixelConfig | None, siamese: bool = False, compiled: bool = False) -> None:
        torch.manual_seed(0)
        coarse = torch.randn(512, 3, 9, 9, device="cuda")
        smooth = F.interpolate(coarse, size=(64, 64), mode="bicubic")
        self.images = smooth + 0.1 * torch.randn(512, 3, 64, 64, device="cuda")
        self.model = asc.create_model("asc_vit_tiny_patch4", config, image_size=64).cuda().train()
        if config is not None:
            self.model.calibrate(self.images[:64])
        self.siamese = Siamese(self.model).cuda().train() if siamese else None
        if compiled:
            encoders = [self.model] if self.siamese is None else [self.model, self.siamese.target_encoder]
            for encoder in encoders:
                for block in encoder.blocks:
                    block.compile(dynamic=True)
        trained = self.model if self.siamese is None else self.siamese
        learned = [parameter for parameter in trained.parameters() if parameter.requires_grad]
        self.optimiser = torch.optim.AdamW(learned, lr=1e-4, fused=True)
        self.weight = torch.randn(512, 192, device="cuda")

    def forward(self) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            if self.siamese is not None:
                loss: Tensor = self.siamese(self.images.unflatten(0, (2, 256))).loss
            else:
                loss = (self.model(self.images).float() * self.weight).sum()
        return loss

    def backward(self, loss: Tensor) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()

    def update(self) -> None:
        self.optimiser.step()
        self.model.update_thresholds()
        if self.siamese is not None:
            self.siamese.follow(0.5)

    def step(self) -> None:
        self.backward(self.forward())
        self.update()

    def parts(self) -> tuple[float, float, float, float]:
        """Milliseconds of forward, backward and update, each waited for, and of a step waited for once."""
        marks = [_now()]
        loss = self.forward()
        marks.append(_now())
        self.backward(loss)
        marks.append(_now())
        self.update()
        marks.append(_now())
        self.step()
        marks.append(_now())
        forward, backward, update, whole = (1e3 * (end - start) for start, end in itertools.pairwise(marks))
        return forward, backward, update, whole


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def time_steps(name: str, made: StepCase, plain: float | None, repeats: int = 12) -> float:
    """Record the median step; returns its images per second."""
    # The number of tokens changes from step to step: the allocator needs a few until it has seen all sizes.
    for _ in range(6):
        made.step()
    torch.cuda.reset_peak_memory_stats()
    forward, backward, update, whole = (
        statistics.median(times) for times in zip(*(made.parts() for _ in range(repeats)), strict=True)
    )
    rate = 512e3 / whole
    record(
        name,
        images_per_s=rate,
        ratio=rate / (plain or math.nan),
        ms=whole,
        forward=forward,
        backward=backward,
        update=update,
        peak_gb=torch.cuda.max_memory_allocated() / 1e9,
    )
    return rate


def bench_step() -> None:
    plain = None
    for name, config in STEPS.items():
        with cell(f"step {name}"):
            made = StepCase(config)
            rate = time_steps(f"step {name}", made, plain)
            plain = rate if config is None else plain
            profile_calls(f"step {name}", made.step, top=24)
            del made


def bench_siamese() -> None:
    """The step of pre-training as its loop does it: both encoders, heads, loss, optimiser, thresholds, average."""
    plain = None
    for name in ("plain", "global"):
        with cell(f"step siamese {name}"):
            made = StepCase(STEPS[name], siamese=True)
            rate = time_steps(f"step siamese {name}", made, plain)
            plain = rate if name == "plain" else plain
            profile_calls(f"step siamese {name}", made.step, top=10)
            del made


def bench_compiled() -> None:
    """The same with the token-wise parts compiled; the first steps compile."""
    plain = None
    for name in ("plain", "global"):
        with cell(f"step compiled {name}"):
            made = StepCase(STEPS[name], compiled=True)
            rate = time_steps(f"step compiled {name}", made, plain)
            plain = rate if name == "plain" else plain
            profile_calls(f"step compiled {name}", made.step, top=16)
            del made


def bench_host() -> None:
    """Where Python spends a step with superpixels, and how much the host is behind the device."""
    for name in ("plain", "global"):
        with cell(f"host {name}"):
            made = StepCase(STEPS[name])
            time_steps(f"host {name}", made, None)
            segments = torch.cuda.memory_stats()["segment.all.allocated"]
            compiled = len(launching._compiled)
            profiler = cProfile.Profile()
            profiler.enable()
            for _ in range(20):
                made.step()
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
                profile_backward(made)
            del made


def profile_backward(made: StepCase) -> None:
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
            made.step()
    finally:
        _Join.backward = staticmethod(original)
    record("host layer backward", us=statistics.median(spent) * 1e6, calls=len(spent))


def bench_ragged() -> None:
    """Time of components as the images grow, up to 16,384 tokens."""
    for count in (256, 1024, 4096, 16384):
        with cell(f"growth {count}"):
            batch = max(1, 65536 // count)
            features, borders, theta = case("image", batch, count)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            spent = milliseconds(lambda: everywhere(features, borders, theta, count), 30)  # noqa: B023
            record(
                f"growth {batch}x{count}",
                ms=spent,
                ns_per_pair=spent * 1e6 / (batch * count * count / 2),
                extra_mb=(torch.cuda.max_memory_allocated() - before) / 1e6,
            )


PARTS: dict[str, Callable[[], None]] = {
    "check": check_gradient,
    "components": bench_components,
    "layer": bench_layer,
    "step": bench_step,
    "host": bench_host,
    "siamese": bench_siamese,
    "blocks": bench_blocks,
    "tilings": bench_tilings,
    "growth": bench_ragged,
}
# Run when named only: compiling takes longer than all the others together.
SLOW_PARTS: dict[str, Callable[[], None]] = {"compiled": bench_compiled}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="also write the numbers as JSON")
    parser.add_argument("--only", help=f"parts to run, separated by commas: {', '.join(PARTS | SLOW_PARTS)}")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    warnings.simplefilter("ignore", asc.SuperpixelWarning)
    print(f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name()}")
    print(f"defaults: {component_kernels._tiling_for(torch.float16, 3136)}, {gradient_kernels.Blocks()}")
    for name in options.only.split(",") if options.only else PARTS:
        with cell(name):
            (PARTS | SLOW_PARTS)[name]()
        if options.out:
            options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
