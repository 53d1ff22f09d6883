"""In what precision networks are computed, and what of them never is in half precision."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

Precision = Literal["auto", "32-true", "bf16-mixed", "64-true"]


def in_bf16(precision: str, device: torch.device) -> bool:
    """Whether networks are computed in bf16 there; with ``auto`` on GPUs that can, of compute capability 8.0 or more.

    Older ones imitate it, which takes longer than fp32.
    """
    if precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return precision in ("bf16-mixed", "bf16")


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """The precision of training, for what runs outside of the loop's forward pass."""
    return torch.autocast(device.type, torch.bfloat16) if in_bf16(precision, device) else nullcontext()


class NeverHalf(nn.Module):
    """A module whose numbers stay in fp32 when the network around it is turned into fp16 or bf16.

    Thresholds lie just below 1, where bf16 has no number between 0.996 and 1.
    """

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> NeverHalf:
        def applied(tensor: Tensor) -> Tensor:
            made = function(tensor)
            return tensor.to(made.device, torch.float32) if made.dtype in (torch.float16, torch.bfloat16) else made

        super()._apply(applied, recurse)  # type: ignore[no-untyped-call]
        return self
