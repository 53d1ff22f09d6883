"""What our kernels need of a GPU, worked out without one: shared memory, registers, memory that registers spill to.

    python benchmarks/compiled_kernels.py [--capability 80 89 90 100 120] [--kernels _attend _slopes] [--every]

Layers, attention and all else that launches a kernel are run on tensors that have a device but no data, once forward
and once back, and what they would launch is written down. Triton then compiles each launch for the GPUs that are
named by their compute capability. A table says what the hungriest launch of each kernel needs. A launch that needs more
shared memory than a GPU has loads less ahead (``asc.kernels.launch``): then the table says how many stages are left.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from asc import AdaptiveSuperpixelLayer, SuperpixelConfig, Tokens, kernels
from asc.kernels.launch import common_device
from asc.tokens import Room

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Bytes of shared memory that one program may have, by the GPU's compute capability.
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
POINTERS = {F32: "*fp32", F16: "*fp16", BF16: "*bf16", torch.int32: "*i32", torch.int64: "*i64"}
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"key_gradient": 1.0},
    {"center": True, "threshold": "learnable", "key_gradient": 1.0},
    {"similarity": "dot", "key_gradient": 1.0},
    {"weight": "size"},
    {"merge": "max"},
    {"merge": "attention"},
    {"links": "best", "size_weight": 1.0},
    {"neighbourhood": "spatial"},
    {"neighbourhood": "spatial", "links": "best", "size_weight": 1.0},
)
GRID = (56, 56)


class Shape(NamedTuple):
    """Tokens and keys of a layer."""

    channels: int
    heads: int
    key_width: int
    values: torch.dtype
    keys: torch.dtype


# As in tiny, in base, and a layer by itself in single precision.
SHAPES = (Shape(192, 3, 64, F32, BF16), Shape(768, 12, 64, BF16, BF16), Shape(768, 1, 768, F32, F32))
OTHER_SHAPES = (
    Shape(384, 6, 64, F32, BF16),
    Shape(1024, 16, 64, F32, BF16),
    Shape(192, 3, 40, F16, F16),
    Shape(1280, 10, 128, BF16, BF16),
    Shape(48, 3, 16, F32, F32),
    Shape(200, 1, 200, F32, BF16),
)
# Lengths of the longest image, for which attention has other tiles.
LENGTHS = (200, 1000, 3136)


class Launch(NamedTuple):
    """All that decides what is compiled."""

    kernel: Any
    dtypes: tuple[torch.dtype, ...]
    numbers: int
    constants: tuple[Any, ...]
    warps: int
    stages: int

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)


class Needs(NamedTuple):
    """Of one program."""

    shared: int
    registers: int
    spilled: int
    stages: int


# --- What is launched -------------------------------------------------------------------------------------


@contextmanager
def noted() -> Iterator[dict[Launch, None]]:
    """Launches meanwhile: nothing runs, but each kind is kept once, in order."""
    found: dict[Launch, None] = {}

    def note(
        kernel: Any,
        grid: Sequence[int],
        tensors: Sequence[Tensor],
        numbers: Sequence[int] = (),
        constants: tuple[Any, ...] = (),
        warps: int = 4,
        stages: int = 3,
    ) -> None:
        common_device(tensors)
        dtypes = tuple(tensor.dtype for tensor in tensors)
        found[Launch(kernel, dtypes, len(numbers), constants, warps, stages)] = None

    names = (f"asc.kernels.{module.name}" for module in pkgutil.iter_modules(kernels.__path__))
    modules = [module for module in map(importlib.import_module, names) if hasattr(module, "launch")]
    plain = {module: module.launch for module in modules}
    has_kernels = kernels.gpu_has_kernels
    try:
        kernels.gpu_has_kernels = lambda device: True
        for module in modules:
            module.launch = note
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
            yield found
    finally:
        kernels.gpu_has_kernels = has_kernels
        for module, launch in plain.items():
            module.launch = launch


def launches(every: bool = False) -> list[Launch]:
    """What the whole library launches; not ``every`` width and type, but each kernel."""
    with noted() as found:
        for settings, shape in itertools.product(SETTINGS, SHAPES + OTHER_SHAPES if every else SHAPES):
            run_layer(shape, settings)
        for dtype, by_size, length in itertools.product((BF16, F16) if every else (BF16,), (False, True), LENGTHS):
            run_attention(dtype, by_size, length)
        for dtype, width in itertools.product((BF16, F16), (192, 768, 3072, 200)):
            run_feed_forward(dtype, width)
        for by_size, dtype in itertools.product((False, True), (F32, BF16)):
            run_pooling(by_size, dtype)
        run_components()
        run_parts()
        run_colours()
    return list(found)


def walk_back(results: Iterable[Tensor]) -> None:
    """The way back of our own operations. PyTorch's engine would want a GPU, so they are called one by one."""
    left, met = [result.grad_fn for result in results], set()
    while left:
        node = left.pop()
        if node is None or node in met:
            continue
        met.add(node)
        if hasattr(node, "_forward_cls"):
            node.apply(*(torch.empty(one.shape, dtype=one.dtype) for one in node._input_metadata))
        left += [following for following, _ in node.next_functions]


def without_data(module: nn.Module) -> nn.Module:
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(torch.empty(parameter.shape), parameter.requires_grad))
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype))
    return module


def some(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=dtype.is_floating_point)


def borders() -> Tensor:
    return torch.empty(3, dtype=torch.int32)


def run_layer(shape: Shape, settings: dict[str, Any]) -> None:
    """Twice, as in two blocks: the second one has tokens that are no patches, and rows behind the last one."""
    with torch.device("cpu"):
        layer = AdaptiveSuperpixelLayer(shape.channels, SuperpixelConfig(**settings))
    without_data(layer).train()
    images, patches = 2, GRID[0] * GRID[1]
    # With room for them no number of tokens is asked for.
    layer.room = Room(images * patches * 7 // 8, patches)
    target = some() if layer.config.threshold == "budget" else None
    values_BNC = some(images, patches, shape.channels, dtype=shape.values)
    keys_THD = some(images * patches, shape.heads, shape.key_width, dtype=shape.keys)
    once = layer(Tokens.from_dense(values_BNC, GRID), keys_THD, target)
    twice = layer(once, keys_THD[: len(once.values_TC)], target)
    walk_back(x for x in (twice.values_TC, twice.log_votes_T) if x is not None)


def run_attention(dtype: torch.dtype, by_size: bool, length: int) -> None:
    from asc.kernels.attention import _WIDTHS, attention

    sizes_T = some(2 * length, dtype=torch.int64) if by_size else None
    for width in _WIDTHS:
        qkv_T3HD = some(2 * length, 3, 2, width, dtype=dtype)
        walk_back([attention(qkv_T3HD, borders(), length, True, sizes_T)])


def run_feed_forward(dtype: torch.dtype, width: int) -> None:
    from asc.kernels.feed_forward import _column_sums_op, _gelu_backward_op, _gelu_op

    hidden_TH, bias_H = some(1000, width, dtype=dtype), some(width)
    _gelu_op(hidden_TH, bias_H)
    _gelu_backward_op(hidden_TH, bias_H, hidden_TH)
    _column_sums_op(hidden_TH)


def run_pooling(by_size: bool, dtype: torch.dtype) -> None:
    from asc.kernels.pooling import pooled_mean

    values_TC, sizes_T = some(1000, 768, dtype=dtype), some(1000, dtype=torch.int64)
    walk_back([pooled_mean(values_TC, sizes_T, some(1000), borders(), 600, by_size, True)])


def run_components() -> None:
    """By themselves, as calibration asks for them."""
    from asc.grouping.components import components
    from asc.grouping.graph import SizeWeight
    from asc.kernels.best import best_components

    pairs_2E, by_size = some(2, 5000, dtype=torch.int64), SizeWeight(some(1000, dtype=torch.int64), 1.0)
    for dtype, width in itertools.product((F16, F32), (64, 200, 768)):
        features_TD = some(1000, width, dtype=dtype)
        components(features_TD, borders(), some(), max_len=600)
        components(features_TD, borders(), some(), pairs_2E)
        for size_weight in (None, by_size):
            best_components(features_TD, borders(), some(), 600, size_weight)


def run_parts() -> None:
    """Parts of which the layer is put together where its settings are rare ones."""
    from asc.kernels.features import compared
    from asc.kernels.gradient import Spread, soft_gradient
    from asc.kernels.merging import Members, sorted_fusion

    row_T, starts_G = some(1000, dtype=torch.int32), some(501, dtype=torch.int32)
    members = Members(row_T, row_T[:500], row_T, starts_G, None, None)
    for dtype in (F32, BF16):
        values_TC = some(1000, 192, dtype=dtype)
        for fusion, scores_T in (("mean", None), ("max", None), ("attention", some(1000))):
            walk_back([sorted_fusion(fusion, values_TC, some(1000), scores_T, members)])
        walk_back(compared(some(1000, 3, 64, dtype=dtype), borders(), 600, True, None, 1e-6)[:1])
        spread = Spread(some(500, 192, dtype=dtype), some(500), row_T, some(500), some(1000))
        features_TD = some(1000, 64, dtype=F32 if dtype == F32 else F16)
        soft_gradient(spread, features_TD, values_TC, some(), some(), borders(), 600)


def run_colours() -> None:
    from asc.kernels.colours import recolour

    recolour(some(8, 3, 224, 224), some(8, 11))


# --- What it needs ----------------------------------------------------------------------------------------


def needs(launch: Launch, capability: int) -> Needs:
    """Of a launch on a GPU, with as many stages as it has shared memory for; fewer than are wanted if need be."""
    for stages in range(launch.stages, 0, -1):
        compiled = compile_for(launch, capability, stages)
        shared = int(compiled.metadata.shared)
        if shared <= SHARED[capability] or stages == 1:
            break
    return Needs(shared, *registers_and_spills(compiled.asm["cubin"]), stages)


def compile_for(launch: Launch, capability: int, stages: int) -> Any:
    """By Triton, as it would be compiled where it runs: addresses are aligned, integers not specialised on."""
    names, tensors = launch.kernel.arg_names, len(launch.dtypes)
    types = [*(POINTERS[dtype] for dtype in launch.dtypes), *["i32"] * launch.numbers]
    first = len(types)
    source = ASTSource(
        fn=launch.kernel,
        signature=dict(zip(names, types + ["constexpr"] * (len(names) - first), strict=True)),
        constexprs={(first + place,): value for place, value in enumerate(launch.constants)},
        attrs={(place,): [["tt.divisibility", 16]] for place in range(tensors)},
    )
    options = {"num_warps": launch.warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def registers_and_spills(binary: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of memory in place of more of them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--capability", type=int, nargs="+", choices=SHARED, default=[89, 90], help="kinds of GPU, 90 for 9.0"
    )
    parser.add_argument("--kernels", nargs="*", help="names, such as _attend; none: all")
    parser.add_argument("--every", action="store_true", help="all widths and types (about five minutes a GPU)")
    options = parser.parse_args()
    if kernels.interpreted():
        parser.error("unset TRITON_INTERPRET: kernels are to be compiled")
    wanted = launches(options.every)
    known = sorted({launch.name for launch in wanted})
    if unknown := set(options.kernels or ()) - set(known):
        parser.error(f"no kernel is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    print("| GPU | kernel | launches | shared KB | registers | spilled bytes | stages |\n|---|---|---|---|---|---|---|")
    for capability, name in itertools.product(options.capability, options.kernels or known):
        mine = [launch for launch in wanted if launch.name == name]
        found = [needs(launch, capability) for launch in mine]
        most = Needs(*(max(numbers) for numbers in zip(*found, strict=True)))
        fewer = sum(need.stages < launch.stages for need, launch in zip(found, mine, strict=True))
        stages = f"{fewer} launches with fewer than wanted" if fewer else "as wanted"
        row = name, len(mine), f"{most.shared / 1024:.1f}", most.registers, most.spilled, stages
        print(f"| {capability / 10:.1f} | {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
