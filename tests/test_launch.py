"""Where kernels are launched, and with what. Fake tensors lie on GPUs that need not exist; ``test_cuda`` launches on
real ones."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")
from triton.runtime.errors import OutOfResources

from asc import kernels
from asc.kernels import gpu_has_kernels, kernels_take, triton_is_installed
from asc.kernels.launch import _launch_by_triton, common_device, launch


def on(*devices: str) -> list[torch.Tensor]:
    # Where there is a GPU, fake tensors would first ask it for memory, which one of another number cannot give.
    with patch("torch._subclasses.fake_tensor.init_gpu_context"), FakeTensorMode():
        return [torch.empty(2, device=device) for device in devices]


@pytest.mark.parametrize(("device", "number"), [("cpu", -1), ("cuda:0", 0), ("cuda:3", 3)])
def test_a_kernel_runs_where_its_tensors_are(device: str, number: int) -> None:
    assert common_device(on(device, device, device)) == number


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:1"), ("cuda:1", "cpu"), ("cpu", "cpu", "cuda:0")])
def test_tensors_of_several_devices_are_refused_by_name(devices: tuple[str, ...]) -> None:
    places = ", ".join(dict.fromkeys(devices))
    with pytest.raises(ValueError, match=rf"several devices \({places}\); move the model"):
        common_device(on(*devices))


@pytest.mark.parametrize(("capability", "takes"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_gpus_that_kernels_were_not_made_for_keep_to_plain_paths(
    capability: tuple[int, int], takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    gpu_has_kernels.cache_clear()
    try:
        assert kernels_take(*on("cuda:0")) == takes
        assert not kernels_take(*on("cuda:0", "meta"))
    finally:
        gpu_has_kernels.cache_clear()


def test_amds_gpus_keep_to_plain_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = on("cuda:0")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not triton_is_installed.__wrapped__()
    monkeypatch.setattr(kernels, "gpu_has_kernels", lambda _: True)
    monkeypatch.setattr(kernels, "triton_is_installed", triton_is_installed.__wrapped__)
    assert not kernels_take(*tensors)


@pytest.mark.parametrize("grid", [(1, 65536, 1), (1, 1, 65536)])
def test_more_images_than_a_launch_can_have(grid: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="a batch may have 65,535 images on a GPU, got 65,536; split it"):
        launch(None, grid, on("cuda:0"))


class Hungry:
    """A kernel that Triton refuses to launch where a GPU has too little shared memory for its stages."""

    def __init__(self, bytes_each: int, limit: int) -> None:
        self.bytes_each, self.limit = bytes_each, limit
        self.asked: list[int] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., str]:
        def run(*arguments: object, num_warps: int, num_stages: int) -> str:
            self.asked.append(num_stages)
            if num_stages * self.bytes_each > self.limit:
                raise OutOfResources(num_stages * self.bytes_each, self.limit, "shared memory")
            return f"{grid} {arguments} {num_warps}"

        return run


def test_where_shared_memory_is_scarce_less_is_loaded_ahead() -> None:
    kernel, values = Hungry(40, 99), torch.zeros(2)
    assert _launch_by_triton(kernel, (1, 2, 3), [values], (7,), (8,), 4, 3) == f"(1, 2, 3) {(values, 7, 8)} 4"
    assert kernel.asked == [3, 2]


def test_what_no_number_of_stages_helps_is_an_error() -> None:
    kernel = Hungry(100, 99)
    with pytest.raises(OutOfResources, match="Required: 100, Hardware limit: 99"):
        _launch_by_triton(kernel, (1, 1, 1), [torch.zeros(2)], (), (), 4, 3)
    assert kernel.asked == [3, 2, 1]
