"""The device that a command's setting ``accelerator`` means."""

from __future__ import annotations

import torch

from asc.train import check_accelerator


def accelerator_device(accelerator: str) -> torch.device:
    """``auto`` (a GPU where there is one), ``cpu``, ``cuda`` or ``mps``; one that is not here is a ValueError."""
    check_accelerator("accelerator", accelerator)
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(accelerator)
