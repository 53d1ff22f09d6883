"""The engine of all trainings."""

import pytest
import torch
from torch import Tensor, nn

from asc.train import MachineConfig, TrainConfig, make_fabric


class Remembering(nn.Module):
    """Keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        self.given = given
        self.inside = torch.is_autocast_enabled("cpu")
        return given["depth"].sum() * self.scale


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_half_precision_rounds_nothing_that_is_learned_from(precision: str) -> None:
    fabric = make_fabric(TrainConfig(steps=1, precision=precision), MachineConfig(accelerator="cpu", devices=1))
    module = Remembering()
    depth = torch.tensor([1.2345678, 9.8765432])
    fabric.setup_module(module)({"depth": depth, "count": torch.tensor(3)})
    assert torch.equal(module.given["depth"], depth) and module.given["depth"].dtype == torch.float32
    assert module.inside == (precision == "bf16-mixed")
