"""In what precision networks are computed: the same word, and the same default, for training and all that follows."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

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
