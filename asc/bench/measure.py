"""Clocks, memory, and what is noted about the machine."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_FEWEST_ROUNDS = 3
# Quick functions are timed several times in a row, within so many milliseconds.
_TURN_MS, _MOST_IN_A_TURN = 20.0, 10
# More than any GPU's cache: written before a kernel is timed, so that no contestant finds its input there already.
_CACHE_BYTES = 256 << 20
_PACKAGES = ("torch", "triton", "timm", "numpy", "scipy", "numba", "adaptive-superpixel-coding")

Function = Callable[[], object]
Result = TypeVar("Result")


class Timing(NamedTuple):
    """Times of one contestant."""

    ms: float
    """Median."""
    low: float
    """A quarter of the times are shorter."""
    high: float
    """A quarter of the times are longer."""
    samples: int
    """Number of times."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory, of the GPU or of the host, was not enough."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def warm_up(functions: Mapping[str, Function], calls: int = 3) -> tuple[dict[str, Function], dict[str, BaseException]]:
    """Call everything a few times; returns those that work, and why the others do not."""
    working: dict[str, Function] = {}
    failed: dict[str, BaseException] = {}
    for name, function in functions.items():
        try:
            for _ in range(calls):
                function()
            working[name] = function
        except Exception as error:  # one contestant less; the others go on
            traceback.clear_frames(error.__traceback__)  # or the error would hold on to all that was computed
            failed[name] = error
    return working, failed


def take_turns(
    functions: Mapping[str, Function],
    device: torch.device,
    rounds: int,
    seconds: float,
    calls: int = 1,
) -> dict[str, Timing]:
    """Times of functions that have been warmed up, round after round, so that a busy moment hits all alike.

    Single calls are meant for short kernels: the host runs ahead, so that only the device counts. More ``calls`` are
    timed in a row, from a device at rest, and shared out: for long functions, whose host part belongs to them.
    """
    clock = _CudaClock(device, calls) if device.type == "cuda" else _HostClock(calls)
    times: dict[str, list[float]] = {name: [] for name in functions}
    in_turn = dict.fromkeys(functions, 1)
    begun = time.perf_counter()
    for number in range(max(rounds, 1) + 1):
        for name, function in functions.items():
            for _ in range(in_turn[name]):
                clock.time(name, function)
        for name, ms in clock.collect():
            times[name].append(ms)
        if number == 0:  # tells how long each takes
            in_turn = {name: _repeats(values[0]) if calls == 1 else 1 for name, values in times.items()}
            times = {name: [] for name in functions}
        elif number >= min(_FEWEST_ROUNDS, rounds) and time.perf_counter() - begun > seconds:
            break
    return {name: _timing(values) for name, values in times.items()}


def _repeats(ms: float) -> int:
    return max(1, min(_MOST_IN_A_TURN, int(_TURN_MS / max(ms, 1e-3))))


def _timing(times: list[float]) -> Timing:
    ordered = sorted(times)
    quarter = len(ordered) // 4
    return Timing(statistics.median(ordered), ordered[quarter], ordered[-1 - quarter], len(ordered))


class _HostClock:
    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.times: list[tuple[str, float]] = []

    def time(self, name: str, function: Function) -> None:
        start = time.perf_counter()
        for _ in range(self.calls):
            function()
        self.times.append((name, 1e3 * (time.perf_counter() - start) / self.calls))

    def collect(self) -> list[tuple[str, float]]:
        times, self.times = self.times, []
        return times


class _CudaClock:
    def __init__(self, device: torch.device, calls: int) -> None:
        self.device, self.calls = device, calls
        self.cache = torch.empty(_CACHE_BYTES, dtype=torch.int8, device=device)
        self.marks: list[tuple[str, Any, Any]] = []

    def time(self, name: str, function: Function) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if self.calls > 1:
            torch.cuda.synchronize(self.device)
        else:
            self.cache.zero_()
        start.record()
        for _ in range(self.calls):
            function()
        end.record()
        self.marks.append((name, start, end))

    def collect(self) -> list[tuple[str, float]]:
        torch.cuda.synchronize(self.device)
        marks, self.marks = self.marks, []
        return [(name, start.elapsed_time(end) / self.calls) for name, start, end in marks]


# --- Memory -----------------------------------------------------------------------------------------------


class Memory:
    """Most memory that a contestant needs; what others hold beside it does not count. On a CPU nothing is known."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held = 0

    def keep(self, function: Callable[[], Result]) -> Result:
        """Call a function whose allocations stay: weights, the state of an optimiser."""
        before = self._allocated()
        result = function()
        self.held += self._allocated() - before
        return result

    def peak_gb(self, function: Function) -> float | None:
        """Gigabytes (10⁹ bytes) at the worst moment of a call, with all that is kept."""
        if self.device.type != "cuda":
            function()
            return None
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        now = self._allocated()
        function()
        torch.cuda.synchronize(self.device)
        return (self.held + torch.cuda.max_memory_allocated(self.device) - now) / 1e9

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0


# --- The device -------------------------------------------------------------------------------------------


@contextmanager
def half_precision(device: torch.device) -> Iterator[None]:
    """bf16 autocast on a GPU, as training uses it; on a CPU nothing."""
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        yield


def matmul_tflops(device: torch.device) -> float:
    """The rate that the device reaches in one large matrix product: the floor under everything."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    working, _ = warm_up({"product": lambda: a @ b})
    return 2 * size**3 / take_turns(working, device, rounds=3, seconds=5)["product"].ms / 1e9


class AttentionChoice(NamedTuple):
    """Which of PyTorch's attention kernels are meant."""

    usual: str
    """The one that PyTorch takes by itself."""
    fastest: str
    """The one that was fastest here."""
    times: dict[str, float]
    """Milliseconds of all that can run."""


def choose_attention(shape_BHND: tuple[int, int, int, int], device: torch.device, grad: bool) -> AttentionChoice:
    """Try PyTorch's attention kernels on a shape, forward or forward and backward."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query, key, value = (torch.randn(shape_BHND, device=device, dtype=dtype, requires_grad=grad) for _ in range(3))
    usual = SDPBackend(torch._fused_sdp_choice(query, key, value)).name
    kinds = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION") if device.type == "cuda" else (usual,)

    def attend(kind: str) -> Tensor | None:
        with attention_kernel(kind):
            mixed_BHND = F.scaled_dot_product_attention(query, key, value)
        if not grad:
            return mixed_BHND
        torch.autograd.grad(mixed_BHND, (query, key, value), mixed_BHND.detach())
        return None

    working, _ = warm_up({kind: lambda kind=kind: attend(kind) for kind in kinds})  # type: ignore[misc]
    times = {name: timing.ms for name, timing in take_turns(working, device, rounds=3, seconds=3).items()}
    return AttentionChoice(usual, min(times, key=lambda name: times[name]) if times else usual, times)


@contextmanager
def attention_kernel(name: str) -> Iterator[None]:
    """Let PyTorch use this attention kernel alone."""
    with sdpa_kernel(getattr(SDPBackend, name)):
        yield


def machine_record(device: torch.device, seed: int) -> dict[str, Any]:
    """Versions, device, precision and seed, for the file of a cell."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "none"
    # The package can also be used from a source tree; torch says more of itself than its metadata.
    versions["torch"] = torch.__version__
    record: dict[str, Any] = {"versions": versions, "seed": seed, "threads": torch.get_num_threads()}
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        record |= {"device": found.name, "memory_gb": round(found.total_memory / 1e9, 1), "cuda": torch.version.cuda}
        return record | {"precision": "bf16 autocast"}
    return record | {"device": _processor(), "precision": "fp32"}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def exponent(sizes: list[int], values: list[float]) -> float:
    """p of the best fit ``value ~ size^p``: the slope in a plot with logarithmic axes."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    return statistics.linear_regression(x, y).slope
