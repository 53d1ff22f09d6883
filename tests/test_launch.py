"""Where kernels are launched. Fake tensors lie on GPUs that need not exist; ``test_cuda`` launches on real ones."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from asc.kernels.launch import common_device


def on(*devices: str) -> list[torch.Tensor]:
    with FakeTensorMode():
        return [torch.empty(2, device=device) for device in devices]


@pytest.mark.parametrize(("device", "number"), [("cpu", -1), ("cuda:0", 0), ("cuda:3", 3)])
def test_a_kernel_runs_where_its_tensors_are(device: str, number: int) -> None:
    assert common_device(on(device, device, device)) == number


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:1"), ("cuda:1", "cpu"), ("cpu", "cpu", "cuda:0")])
def test_tensors_of_several_devices_are_refused_by_name(devices: tuple[str, ...]) -> None:
    places = ", ".join(dict.fromkeys(devices))
    with pytest.raises(ValueError, match=rf"several devices \({places}\); move the model"):
        common_device(on(*devices))
