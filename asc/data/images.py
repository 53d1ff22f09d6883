"""Pixels as the network wants them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# The usual statistics of natural images (ImageNet), so that loaded weights see what they were trained on.
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)


def normalise(
    images_BHW3: NDArray[np.uint8] | Tensor,
    mean: tuple[float, float, float] = MEAN,
    deviation: tuple[float, float, float] = DEVIATION,
) -> Tensor:
    """Images of bytes ``(B, H, W, 3)`` as a normalised fp32 batch ``(B, 3, H, W)``.

    Some weights from elsewhere were trained with another ``mean`` and ``deviation``; give them theirs.
    """
    pixels = torch.as_tensor(images_BHW3)
    if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[3] != 3:
        raise ValueError(
            f"images must be bytes of the shape (batch, height, width, 3), got {pixels.dtype} {tuple(pixels.shape)}"
        )
    mean_311, deviation_311 = (torch.tensor(x, device=pixels.device)[:, None, None] for x in (mean, deviation))
    return (pixels.permute(0, 3, 1, 2).float() / 255 - mean_311) / deviation_311
