"""The colours of augmented images on the GPU: jitter, grey and normalisation of a whole batch in one launch.

The plain version is in ``asc.pretrain.augment``. One program works on one image, whose pixels stay in the cache
between its two walks over them.
"""

# Kernels are compiled by Triton from their syntax: they have no Python types to check.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped, no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asc.data.images import DEVIATION, MEAN
from asc.kernels.launch import launch
from asc.pretrain.augment import LUMA, Draws

_BLOCK, _WARPS = 1024, 8  # pixels of a step of a walk: four a thread, so that it reads 16 bytes at once
_LUMA_RED, _LUMA_GREEN, _LUMA_BLUE = (tl.constexpr(share) for share in LUMA)
_MEAN_RED, _MEAN_GREEN, _MEAN_BLUE = (tl.constexpr(mean) for mean in MEAN)
_DEVIATION_RED, _DEVIATION_GREEN, _DEVIATION_BLUE = (tl.constexpr(deviation) for deviation in DEVIATION)


def packed(draws: Draws) -> Tensor:
    """Everything about the colours and the blur (fp32, B x 11), so that one transfer takes it to the GPU.

    Columns: 0 to 3 the order, 4 to 7 the factors, 8 whether to jitter, 9 whether to drop the colours, 10 the sigma.
    """
    flags = draws.jitter_B[:, None], draws.grey_B[:, None]
    return torch.cat([draws.order_B4, draws.factors_B4, *flags, draws.sigma_B[:, None]], dim=1)


def recolour(pixels_B3SS: Tensor, packed_BK: Tensor) -> None:
    """Jitter, grey and normalise contiguous images from 0 to 1 in place, each by its own row of ``packed``."""
    assert pixels_B3SS.is_contiguous() and packed_BK.is_contiguous()
    batch, _, height, width = pixels_B3SS.shape
    constants = height * width, packed_BK.shape[1], _BLOCK
    launch(_recolour, (batch, 1, 1), (pixels_B3SS, packed_BK), (), constants, warps=_WARPS, stages=1)


@triton.jit
def _recolour(pixels_ptr, packed_ptr, PIXELS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    image = tl.program_id(0).to(tl.int64)
    red_ptr = pixels_ptr + image * 3 * PIXELS
    own_ptr = packed_ptr + image * COLUMNS
    grey = tl.load(own_ptr + 9) > 0
    operations = 0
    mean = 0.0
    if tl.load(own_ptr + 8) > 0:
        operations = 4
        mean = _mean_before_contrast(red_ptr, own_ptr, PIXELS, BLOCK)
    for first in range(0, PIXELS, BLOCK):
        pixels = first + tl.arange(0, BLOCK)
        red, green, blue = _loaded(red_ptr, pixels, PIXELS)
        red, green, blue = _jittered(red, green, blue, own_ptr, operations, mean)
        luma = _luma(red, green, blue)
        red, green, blue = tl.where(grey, luma, red), tl.where(grey, luma, green), tl.where(grey, luma, blue)
        exists = pixels < PIXELS
        tl.store(red_ptr + pixels, (red - _MEAN_RED) / _DEVIATION_RED, mask=exists)
        tl.store(red_ptr + PIXELS + pixels, (green - _MEAN_GREEN) / _DEVIATION_GREEN, mask=exists)
        tl.store(red_ptr + 2 * PIXELS + pixels, (blue - _MEAN_BLUE) / _DEVIATION_BLUE, mask=exists)


@triton.jit
def _mean_before_contrast(red_ptr, own_ptr, PIXELS: tl.constexpr, BLOCK: tl.constexpr):
    """The mean luma at the moment of the contrast. What comes before it is worked out twice and never stored."""
    before = 0
    for place in range(1, 4):
        before = tl.where(tl.load(own_ptr + place) == 1, place, before)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, PIXELS, BLOCK):
        pixels = first + tl.arange(0, BLOCK)
        red, green, blue = _loaded(red_ptr, pixels, PIXELS)
        red, green, blue = _jittered(red, green, blue, own_ptr, before, 0.0)
        total += tl.where(pixels < PIXELS, _luma(red, green, blue), 0.0)
    return tl.sum(total, axis=0) / PIXELS


@triton.jit
def _loaded(red_ptr, pixels, PIXELS: tl.constexpr):
    exists = pixels < PIXELS
    red = tl.load(red_ptr + pixels, mask=exists, other=0.0)
    green = tl.load(red_ptr + PIXELS + pixels, mask=exists, other=0.0)
    blue = tl.load(red_ptr + 2 * PIXELS + pixels, mask=exists, other=0.0)
    return red, green, blue


@triton.jit
def _jittered(red, green, blue, own_ptr, operations, mean):
    """After the first so many operations of the image's own order."""
    for place in range(operations):
        operation = tl.load(own_ptr + place).to(tl.int32)
        factor = tl.load(own_ptr + 4 + operation)
        if operation == 3:
            red, green, blue = _turned(red, green, blue, factor)
        else:
            # Brightness draws away from black, contrast from the mean, saturation from the pixel's own grey.
            origin = tl.where(operation == 2, _luma(red, green, blue), tl.where(operation == 1, mean, 0.0))
            rest = origin * (1 - factor)
            red, green, blue = (
                _bounded(red * factor + rest),
                _bounded(green * factor + rest),
                _bounded(blue * factor + rest),
            )
    return red, green, blue


@triton.jit
def _turned(red, green, blue, turn):
    highest = tl.maximum(tl.maximum(red, green), blue)
    chroma = highest - tl.minimum(tl.minimum(red, green), blue)
    scale = 1 / tl.maximum(chroma, 1e-12)
    from_blue, from_green = (red - green) * scale + 4, (blue - red) * scale + 2
    hue = tl.where(highest == red, (green - blue) * scale, tl.where(highest == green, from_green, from_blue))
    ahead = hue + 6 * turn
    red = highest - chroma * _share(ahead)
    green = highest - chroma * _share(ahead - 2)
    blue = highest - chroma * _share(ahead - 4)
    return red, green, blue


@triton.jit
def _share(ahead):
    """How much of the chroma a channel lacks whose own colour is so many sixths of the circle away."""
    # Exact halves are rounded up here and to even by torch: the distance is 3 either way.
    return _bounded(tl.abs(ahead - 6 * tl.floor(ahead / 6 + 0.5)) - 1)


@triton.jit
def _luma(red, green, blue):
    return red * _LUMA_RED + green * _LUMA_GREEN + blue * _LUMA_BLUE


@triton.jit
def _bounded(values):
    return tl.minimum(tl.maximum(values, 0.0), 1.0)
