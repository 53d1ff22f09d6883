"""The kernels of the MLP against fp64: on a GPU, or interpreted on the CPU (see ``test_kernels``)."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from interpreting import assert_passes_interpreted
from scipy.special import ndtr
from torch import Tensor

import asc.vit
from asc.kernels import interpreted
from asc.vit import Mlp, _linear

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
HALF = torch.bfloat16 if ON_GPU else torch.float16
# Half a unit of the last place, at most.
DIGITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
BACKEND = "inductor" if ON_GPU else "aot_eager_decomp_partition"
runs_kernels = pytest.mark.skipif(not ON_GPU and not interpreted(), reason="runs in a process of its own")


@pytest.mark.skipif(ON_GPU or interpreted(), reason="the kernels run in this process")
def test_all_kernels_under_the_interpreter() -> None:
    assert_passes_interpreted(__file__)


def relative(found: Tensor, exact: Tensor) -> float:
    exact = exact.detach().double()
    return float((found.detach().double() - exact).norm() / exact.norm())


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_gelu_of_every_number_there_is(dtype: torch.dtype) -> None:
    import asc.kernels.feed_forward  # noqa: F401 (it makes the operators)

    if dtype == torch.bfloat16 and not ON_GPU:
        pytest.skip("the interpreter cuts bf16 off where it should round")
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    hidden = F.pad(every, (0, -len(every) % 192)).view(-1, 192).to(DEVICE)
    active = torch.ops.asc.gelu(hidden, torch.zeros(192, device=DEVICE))
    exact = hidden.cpu().double() * torch.from_numpy(ndtr(hidden.cpu().double().numpy()))
    assert len(every) > 63_000
    torch.testing.assert_close(active.cpu().double(), exact, rtol=1.01 * DIGITS[dtype], atol=3e-7)


def gradients(function: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    own = [tensor.clone().requires_grad_() for tensor in inputs]
    result = function(*own)
    result.backward(upstream.to(result.dtype))
    return [result.detach(), *(tensor.grad for tensor in own if tensor.grad is not None)]


@runs_kernels
@pytest.mark.parametrize(("rows", "hidden", "width"), [(1, 64, 64), (37, 200, 48), (700, 192, 60), (3000, 768, 192)])
def test_layers_and_their_gradients_equal_fp64(rows: int, hidden: int, width: int) -> None:
    from asc.kernels.feed_forward import gelu_linear, linear

    generator = torch.Generator().manual_seed(rows)
    shapes = [(rows, hidden), (hidden,), (width, hidden), (width,)]
    drawn = [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]
    values, hidden_bias, weight, bias = drawn
    # Values come in half precision, weights and biases as they are learned.
    given = [values.to(HALF), hidden_bias, weight / hidden**0.5, bias]
    upstream = torch.randn(rows, width, generator=generator).to(DEVICE, HALF)
    exact = [tensor.double() for tensor in given]

    found = gradients(gelu_linear, given, upstream)
    expected = gradients(lambda x, b, w, c: F.linear(F.gelu(x + b), w, c), exact, upstream.double())
    assert [tensor.dtype for tensor in found] == [HALF, HALF, *[torch.float32] * 3]
    assert max(relative(*pair) for pair in zip(found, expected, strict=True)) < 4 * DIGITS[HALF]

    found = gradients(linear, [given[0], *given[2:]], upstream)
    expected = gradients(F.linear, [exact[0], *exact[2:]], upstream.double())
    assert max(relative(*pair) for pair in zip(found, expected, strict=True)) < 4 * DIGITS[HALF]


@runs_kernels
def test_tensors_that_lie_apart_get_the_same_answer() -> None:
    import asc.kernels.feed_forward  # noqa: F401

    wide, bias = torch.randn(50, 128, device=DEVICE).to(HALF), torch.randn(128, device=DEVICE)[::2]
    apart, whole = wide[:, ::2], wide[:, ::2].contiguous()
    for operator, args in (
        (torch.ops.asc.gelu, (bias,)),
        (torch.ops.asc.gelu_backward, (bias, apart.flip(0))),
        (torch.ops.asc.column_sums, ()),
    ):
        torch.testing.assert_close(operator(apart, *args), operator(whole, *args), rtol=0, atol=0)


@runs_kernels
def test_operators_are_what_the_compiler_is_told() -> None:
    import asc.kernels.feed_forward  # noqa: F401

    hidden, bias = torch.randn(9, 200, device=DEVICE).to(HALF), torch.randn(200, device=DEVICE)
    for operator, args in (
        (torch.ops.asc.gelu, (hidden, bias)),
        (torch.ops.asc.gelu_backward, (hidden, bias, hidden.flip(0))),
        (torch.ops.asc.column_sums, (hidden,)),
    ):
        found = torch.library.opcheck(operator.default, args)
        assert set(found.values()) == {"SUCCESS"}


class Both(torch.nn.Module):
    """An MLP and a linear layer behind it, as a block has them."""

    def __init__(self, quick_gelu: bool = False) -> None:
        super().__init__()
        self.mlp, self.layer = Mlp(48, 192, quick_gelu), torch.nn.Linear(48, 60)

    def forward(self, values_TC: Tensor) -> Tensor:
        return _linear(self.mlp(values_TC), self.layer)


def run(module: Both, values: Tensor, half: bool) -> list[Tensor]:
    """Result, gradients, and what has the size of the hidden values and was kept for the way back."""
    own, kept = values.clone().requires_grad_(), set()

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape == (len(values), 192):
            kept.add(tensor.data_ptr())
        return tensor

    with torch.autocast(DEVICE, HALF, enabled=half), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        result = module(own)
    result.double().square().sum().backward()
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    assert own.grad is not None and len(grads) == 6
    return [result.detach(), own.grad, *grads, torch.tensor(len(kept))]


@runs_kernels
@pytest.mark.parametrize("quick_gelu", [False, True])
def test_compiled_and_not_the_mlp_equals_fp64(quick_gelu: bool) -> None:
    torch.manual_seed(0)
    plain, values = Both(quick_gelu).to(DEVICE), torch.randn(37, 48, device=DEVICE)
    *exact, _ = run(copy.deepcopy(plain).double(), values.double(), half=False)
    try:
        for compiled in (False, True):
            module = copy.deepcopy(plain)
            if compiled:
                module.compile(dynamic=True, backend=BACKEND)
            *found, kept = run(module, values, half=True)
            assert max(relative(*pair) for pair in zip(found, exact, strict=True)) < 8 * DIGITS[HALF]
            # The GELU's values are made again; the other one has no kernel, and only the compiler does that.
            assert int(kept) == 1 or (quick_gelu and not compiled)
    finally:
        torch._dynamo.reset()


@runs_kernels
def test_other_precisions_and_other_activations_go_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise AssertionError("a kernel was asked")

    monkeypatch.setattr("asc.kernels.feed_forward.gelu_linear", refuse)
    values = torch.randn(5, 48, device=DEVICE)
    for quick_gelu, dtype in ((False, torch.float32), (False, torch.float64), (True, HALF)):
        mlp = Mlp(48, 192, quick_gelu).to(DEVICE, dtype)
        hidden = mlp.fc1(values.to(dtype))
        active = hidden * torch.sigmoid(1.702 * hidden) if quick_gelu else F.gelu(hidden)
        torch.testing.assert_close(mlp(values.to(dtype)), mlp.fc2(active))
    with pytest.raises(AssertionError, match="a kernel was asked"):
        Mlp(48, 192, False).to(DEVICE, HALF)(values.to(HALF))


class Adapter(torch.nn.Module):
    """A low-rank correction in the place of a layer, as libraries for fine-tuning put it there."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor:
        return self.base.bias

    def forward(self, values_TC: Tensor) -> Tensor:
        return self.base(values_TC) + self.up(self.down(values_TC))


def adapted(both: Both) -> Both:
    both = copy.deepcopy(both)
    both.mlp.fc1, both.mlp.fc2, both.layer = (Adapter(x) for x in (both.mlp.fc1, both.mlp.fc2, both.layer))
    return both.to(DEVICE)


def with_adapters_added(both: Both) -> Both:
    """The same network of plain layers."""
    both = copy.deepcopy(both)
    for place, name in ((both.mlp, "fc1"), (both.mlp, "fc2"), (both, "layer")):
        adapter = getattr(place, name)
        adapter.base.weight.data += adapter.up.weight.data @ adapter.down.weight.data
        setattr(place, name, adapter.base)
    return both


@pytest.mark.parametrize("half", [False, pytest.param(True, marks=runs_kernels)])
@pytest.mark.parametrize("compiled", [False, True])
def test_adapters_in_the_place_of_layers_take_part(half: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    network, values = adapted(Both()), torch.randn(37, 48, device=DEVICE)
    expected = with_adapters_added(network).double()(values.double())
    try:
        if compiled:
            network.compile(dynamic=True, backend=BACKEND)
        with torch.autocast(DEVICE, HALF, enabled=half):
            found = network(values)
    finally:
        torch._dynamo.reset()
    assert relative(found, expected) < (8 * DIGITS[HALF] if half else 1e-5)


@pytest.mark.parametrize("half", [False, pytest.param(True, marks=runs_kernels)])
def test_hooks_of_layers_are_called(half: bool) -> None:
    both, seen = Both().to(DEVICE), []
    for layer in (both.mlp.fc1, both.mlp.fc2, both.layer):
        layer.register_forward_hook(lambda module, *_: seen.append(module))
    with torch.autocast(DEVICE, HALF, enabled=half):
        both(torch.randn(5, 48, device=DEVICE))
    assert seen == [both.mlp.fc1, both.mlp.fc2, both.layer]


def test_without_a_gpu_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asc.vit, "_INTERPRETED", False)
    assert asc.vit._half_precision_for_kernels(torch.ones(2, dtype=torch.float16)) is None
    monkeypatch.setattr(asc.vit, "_INTERPRETED", True)
    assert asc.vit._half_precision_for_kernels(torch.ones(2, dtype=torch.float16)) == torch.float16
    assert asc.vit._half_precision_for_kernels(torch.ones(2)) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert asc.vit._half_precision_for_kernels(torch.ones(2)) == torch.bfloat16
