"""Which precision ``auto`` means where. Only the GPU's own answer, its compute capability, is made up."""

from types import SimpleNamespace

import pytest
import torch

from asc.precision import autocast, in_bf16

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(("major", "has_bf16"), [(7, False), (8, True), (9, True)])
def test_a_gpu_that_only_imitates_bf16_computes_in_fp32(
    major: int, has_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=major))
    assert in_bf16("auto", GPU) == has_bf16
    # Who asks for it gets it, and who asks for another does not.
    assert in_bf16("bf16-mixed", GPU) and not in_bf16("32-true", GPU)


@pytest.mark.parametrize(("precision", "rounds"), [("auto", False), ("bf16-mixed", True), ("64-true", False)])
def test_a_cpu_rounds_only_when_asked_to(precision: str, rounds: bool) -> None:
    with autocast(CPU, precision):
        assert torch.is_autocast_enabled("cpu") == rounds
    assert not torch.is_autocast_enabled("cpu")
