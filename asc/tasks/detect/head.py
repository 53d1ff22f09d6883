"""What every detection head takes and gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asc.tasks.detect.data import Truth
from asc.tasks.detect.metrics import Detections
from asc.tokens import Tokens


class View(NamedTuple):
    """Canvases as an encoder sees them."""

    levels: list[Tokens]
    """The tokens after chosen blocks, the earliest block first."""
    real: list[tuple[int, int]]
    """Rows and columns of pixels that each image fills on its canvas; the rest is empty."""
    patch: int
    """Side of a patch in pixels."""

    def real_patches_BN(self) -> Tensor:
        """Which patches show something of the image (bool)."""
        tokens = self.levels[0]
        rows_h, columns_w = (torch.arange(side, device=tokens.device) * self.patch for side in tokens.grid)
        limit_B2 = self.limits_B2()
        inside_Bh, inside_Bw = rows_h < limit_B2[:, :1], columns_w < limit_B2[:, 1:]
        return (inside_Bh[:, :, None] & inside_Bw[:, None, :]).flatten(1)

    def limits_B2(self) -> Tensor:
        """``real`` on the device."""
        return torch.tensor(self.real).to(self.levels[0].device, non_blocking=True)


class DetectionHead(nn.Module, ABC):
    """Finds objects in what an encoder makes of canvases; boxes are in pixels of the canvas."""

    @abstractmethod
    def losses(self, view: View, truths: Sequence[Truth]) -> dict[str, Tensor]:
        """The parts of the loss, by name; their sum is learned from."""

    @abstractmethod
    def detect(self, view: View) -> list[Detections]:
        """What is found in each image, nothing outside of it."""


def chosen_blocks(blocks: Sequence[int] | None, depth: int) -> list[int]:
    """Indices of the blocks after which a head looks; ``blocks`` counts from 1, None: one after each quarter."""
    if blocks is None:
        return [round(depth * quarter / 4) - 1 for quarter in range(1, 5)] if depth >= 4 else list(range(depth))
    if not blocks or not all(1 <= block <= depth for block in blocks) or list(blocks) != sorted(set(blocks)):
        raise ValueError(f"blocks must rise and be from 1 to {depth}, the depth of the encoder; got {tuple(blocks)}")
    return [block - 1 for block in blocks]


def full_precision(values: Tensor) -> Tensor:
    """At least fp32: where things are cannot be told in half precision, which knows no odd pixel above 256."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
