"""Random changes of video frames that must leave their meaning alone.

Drawing is apart from applying. ``draw`` makes every random number on the host from the key of an image alone, so
that a run gives the same images with any number of processes and workers, any batch size and any order. ``apply``
has no randomness left in it and works on whole batches, on the CPU or a GPU.

Each operation equals its counterpart in ``torchvision.transforms.v2.functional`` on float images, in the order
crop, flip, jitter, grey, blur, normalise. Shape letters beside those of ``asc.tokens``: S side of the square
result, K tries for a crop.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asc.data.images import DEVIATION, MEAN
from asc.data.keyed import uniforms
from asc.kernels import kernels_take

# How often torchvision's RandomResizedCrop tries for a crop that fits before it takes the central one.
_TRIES = 10
# Random numbers of one image, in the order of the fields of Draws. Every parameter has its own numbers whether it
# is used or not, so that a changed setting leaves the other parameters of an image as they were.
_WIDTHS = (_TRIES, _TRIES, 2, 1, 1, 1, 4, 1, 1, 1)
_ORDERS = tuple(itertools.permutations(range(4)))
# What a colour adds to the brightness seen, as in torchvision.
LUMA = (0.2989, 0.587, 0.114)
# Taps farther out than this many sigma weigh less than 1e-10 of the middle one and vanish in fp32.
_REACH = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class AugmentConfig:
    """The paper's augmentation; each image of a pair gets its own.

    The paper names no probability for the jitter and the blur, so they always happen by default.
    """

    size: int = 224
    """Side of the square result in pixels."""
    crop_scale: tuple[float, float] = (0.2, 1.0)
    """Least and largest share of the frame's area that a crop covers."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Least and largest width / height of a crop before it is made square."""
    flip_probability: float = 0.5
    """How often left and right are exchanged."""
    jitter_probability: float = 1.0
    """How often the colours are jittered: brightness, contrast, saturation and hue in a random order."""
    brightness: float = 0.4
    """The brightness is multiplied by a factor from 1 ± this, never below 0."""
    contrast: float = 0.4
    """The distance from the mean brightness is multiplied by a factor from 1 ± this, never below 0."""
    saturation: float = 0.4
    """The distance from grey is multiplied by a factor from 1 ± this, never below 0."""
    hue: float = 0.1
    """The hue is turned by up to this share of the full circle either way; at most 0.5."""
    grey_probability: float = 0.2
    """How often the colours are dropped."""
    blur_probability: float = 1.0
    """How often the image is blurred."""
    blur_kernel: int = 23
    """Width of the Gaussian blur in pixels: odd, and its half less than ``size``."""
    blur_sigma: tuple[float, float] = (0.5, 0.5)
    """Least and largest standard deviation of the Gaussian blur in pixels."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1 pixel, got {self.size}")
        _check_range("crop_scale", self.crop_scale, highest=1.0)
        _check_range("crop_ratio", self.crop_ratio)
        _check_range("blur_sigma", self.blur_sigma)
        for name in ("flip_probability", "jitter_probability", "grey_probability", "blur_probability"):
            _check_number(name, getattr(self, name), highest=1.0)
        for name in ("brightness", "contrast", "saturation"):
            _check_number(name, getattr(self, name))
        _check_number("hue", self.hue, highest=0.5)
        if self.blur_kernel < 1 or self.blur_kernel % 2 == 0:
            raise ValueError(f"blur_kernel must be odd and positive, got {self.blur_kernel}")
        if self.blur_probability > 0 and self.blur_kernel // 2 >= self.size:
            raise ValueError(
                f"blur_kernel {self.blur_kernel} is too wide to mirror the borders of an image of size {self.size}: "
                f"take at most {2 * self.size - 1}, or set blur_probability to 0"
            )


def _check_number(name: str, value: float, highest: float = math.inf) -> None:
    if not (0 <= value <= highest and math.isfinite(value)):
        raise ValueError(f"{name} must be a finite number from 0 to {highest}, got {value}")


def _check_range(name: str, value: tuple[float, float], highest: float = math.inf) -> None:
    if len(value) != 2 or not (0 < value[0] <= value[1] <= highest and math.isfinite(value[1])):
        raise ValueError(f"{name} must be (least, largest) with 0 < least <= largest <= {highest}, got {value}")


class Draws(NamedTuple):
    """The random parameters of a batch: plain tensors on the host, one row for each image."""

    crop_share_BK: Tensor
    """Share of the frame's area, for each try at a crop (fp64)."""
    crop_ratio_BK: Tensor
    """Width / height, for each try at a crop (fp64)."""
    place_B2: Tensor
    """Where the crop lies between the frame's borders, from 0 = top, left to 1 = bottom, right (fp64)."""
    flip_B: Tensor
    """Whether left and right are exchanged."""
    jitter_B: Tensor
    """Whether the colours are jittered."""
    order_B4: Tensor
    """The jitter's operations (0 brightness, 1 contrast, 2 saturation, 3 hue) in the order they happen in (int64)."""
    factors_B4: Tensor
    """Factors for brightness, contrast and saturation, and the hue's turn (fp32)."""
    grey_B: Tensor
    """Whether the colours are dropped."""
    blur_B: Tensor
    """Whether the image is blurred."""
    sigma_B: Tensor
    """Standard deviation of the blur in pixels (fp32)."""


def draw(config: AugmentConfig, keys: Sequence[tuple[int, int, int, int]]) -> Draws:
    """The random parameters of one image for each key ``(seed, epoch, sample, view)``; see ``asc.data.keyed``.

    The crop's place in pixels waits for ``crop_boxes``, since it depends on the size of the frame.
    """
    parts = torch.from_numpy(uniforms(keys, sum(_WIDTHS))).split(_WIDTHS, dim=1)
    share_BK, ratio_BK, place_B2, flip_B1, jitter_B1, order_B1, factors_B4, grey_B1, blur_B1, sigma_B1 = parts
    spreads = (config.brightness, config.contrast, config.saturation)
    ranges = [(max(0.0, 1 - spread), 1 + spread) for spread in spreads] + [(-config.hue, config.hue)]
    low_4, high_4 = torch.tensor(ranges, dtype=torch.float64).unbind(1)
    log_ratio = (math.log(config.crop_ratio[0]), math.log(config.crop_ratio[1]))
    return Draws(
        crop_share_BK=_between(share_BK, *config.crop_scale),
        crop_ratio_BK=_between(ratio_BK, *log_ratio).exp(),
        place_B2=place_B2.clone(),
        flip_B=flip_B1[:, 0] < config.flip_probability,
        jitter_B=jitter_B1[:, 0] < config.jitter_probability,
        order_B4=torch.tensor(_ORDERS)[(order_B1[:, 0] * len(_ORDERS)).long()],
        factors_B4=(low_4 + (high_4 - low_4) * factors_B4).float(),
        grey_B=grey_B1[:, 0] < config.grey_probability,
        blur_B=blur_B1[:, 0] < config.blur_probability,
        sigma_B=_between(sigma_B1[:, 0], *config.blur_sigma).float(),
    )


def _between(uniform: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * uniform


def crop_boxes(draws: Draws, sizes_B2: Tensor, config: AugmentConfig) -> Tensor:
    """The crops (top, left, height, width) of frames of the given heights and widths (int64, B x 4).

    As in torchvision, the first try that fits into the frame counts; if none does, the largest central crop whose
    ratio is allowed.
    """
    frames_B2 = sizes_B2.double()
    shares_BK = draws.crop_share_BK * frames_B2.prod(1, keepdim=True)
    tries_BK2 = torch.stack([shares_BK / draws.crop_ratio_BK, shares_BK * draws.crop_ratio_BK], dim=2).sqrt().round()
    fits_BK = ((tries_BK2 > 0) & (tries_BK2 <= frames_B2[:, None])).all(2)
    first_B = fits_BK.int().argmax(1)
    chosen_B2 = tries_BK2[torch.arange(len(first_B)), first_B]
    heights_B, widths_B = frames_B2.unbind(1)
    least, largest = config.crop_ratio
    largest_B2 = torch.stack([widths_B / least, heights_B * largest], dim=1).round().clamp(min=1)
    fits_B1 = fits_BK.any(1, keepdim=True)
    crops_B2 = torch.where(fits_B1, chosen_B2, torch.minimum(largest_B2, frames_B2))
    free_B2 = frames_B2 - crops_B2
    # A place just below 1 may round up to the first one outside.
    drawn_B2 = torch.minimum((draws.place_B2 * (free_B2 + 1)).floor(), free_B2)
    corners_B2 = torch.where(fits_B1, drawn_B2, (free_B2 / 2).floor())
    return torch.cat([corners_B2, crops_B2], dim=1).long()


def boxes_of(images: Tensor | Sequence[Tensor], draws: Draws, config: AugmentConfig) -> Tensor:
    """The crops of these images, see ``crop_boxes``."""
    _check(images, len(draws.flip_B))
    return crop_boxes(draws, torch.tensor([frame.shape[1:] for frame in images]), config)


def apply(
    images: Tensor | Sequence[Tensor], draws: Draws, config: AugmentConfig, boxes_B4: Tensor | None = None
) -> Tensor:
    """The augmented and normalised images (fp32, B x 3 x S x S) on the device of the given ones.

    ``images`` are bytes: a batch (B, 3, H, W), or a list of (3, H, W) that may differ in size. ``boxes_B4`` are their
    ``boxes_of``, where another process has worked them out already.
    """
    if boxes_B4 is None:
        boxes_B4 = boxes_of(images, draws, config)
    if isinstance(images, Tensor) and images.is_cuda:
        pixels_B3SS = _cropped_together(images, boxes_B4, config.size, draws.flip_B)
    else:
        pixels_B3SS = _cropped(list(images), boxes_B4, config.size)
        if len(rows := _rows(draws.flip_B, pixels_B3SS)):
            pixels_B3SS[rows] = pixels_B3SS.index_select(0, rows).flip(-1)
    return _changed(pixels_B3SS, draws, config)


def _check(images: Tensor | Sequence[Tensor], count: int) -> None:
    if len(images) != count or count == 0:
        raise ValueError(f"every image needs its own row of draws, got {len(images)} images and {count} rows")
    for frame in images:
        if frame.dtype != torch.uint8 or frame.ndim != 3 or frame.shape[0] != 3 or 0 in frame.shape:
            raise ValueError(
                f"images must be bytes of the shape (3, height, width), got {frame.dtype} {tuple(frame.shape)}"
            )


def _cropped(frames: list[Tensor], boxes_B4: Tensor, size: int) -> Tensor:
    """The crops in the size of the result, from 0 to 1."""
    pixels_B3SS = torch.empty(len(frames), 3, size, size, device=frames[0].device)
    for row, (top, left, height, width) in enumerate(boxes_B4.tolist()):
        crop_13HW = frames[row][None, :, top : top + height, left : left + width].float()
        pixels_B3SS[row] = F.interpolate(crop_13HW, (size, size), mode="bilinear", antialias=True)[0]
    return pixels_B3SS.div_(255)


def _cropped_together(images_B3HW: Tensor, boxes_B4: Tensor, size: int, flip_B: Tensor | None = None) -> Tensor:
    """The same crops, flipped on the way, by two products with banded matrices.

    Two launches on a GPU that touch the pixels, instead of several for each image.
    """
    flip_B = torch.zeros(len(boxes_B4), dtype=torch.bool) if flip_B is None else flip_B
    drawn_B5 = _beside(images_B3HW, torch.cat([boxes_B4, flip_B[:, None]], dim=1))
    top_B, left_B, height_B, width_B, flip_B = drawn_B5.unbind(1)
    order_S = torch.arange(size, device=images_B3HW.device)
    # The result's columns in reverse where it is flipped: no pixel has to be moved for it.
    order_BS = torch.where(flip_B[:, None] == 1, order_S.flip(0), order_S)
    rows_BSH = _resampling(top_B, height_B, order_S[None], images_B3HW.shape[2])
    columns_BSW = _resampling(left_B, width_B, order_BS, images_B3HW.shape[3])
    # Products in full fp32: with reduced precision neighbouring pixels would differ from the other path's.
    with torch.autocast(images_B3HW.device.type, enabled=False):
        pixels_B3SW = rows_BSH[:, None] @ images_B3HW.float()
        pixels_B3SS: Tensor = pixels_B3SW @ columns_BSW[:, None].transpose(2, 3)
    return pixels_B3SS.div_(255)


def _resampling(first_B: Tensor, length_B: Tensor, order_BS: Tensor, total: int) -> Tensor:
    """Weights (B, S, total) by which an antialiased bilinear resize of a part of a line makes its S pixels.

    ``order_BS`` says which of its pixels comes at each place.
    """
    scale_B11 = (length_B.float() / order_BS.shape[1])[:, None, None]
    reach_B11 = scale_B11.clamp(min=1)
    centre_BS1 = (order_BS[:, :, None] + 0.5) * scale_B11
    place_B1L = torch.arange(total, device=first_B.device)[None, None] - first_B[:, None, None]
    inside_B1L = (place_B1L >= 0) & (place_B1L < length_B[:, None, None])
    weights_BSL = (1 - ((place_B1L + 0.5 - centre_BS1) / reach_B11).abs()).clamp(min=0) * inside_B1L
    weights_BSL /= weights_BSL.sum(2, keepdim=True)
    return weights_BSL


def _changed(pixels_B3SS: Tensor, draws: Draws, config: AugmentConfig) -> Tensor:
    """Jittered, grey, blurred and normalised, each image by its own row of ``draws``; the pixels given are lost."""
    if kernels_take(pixels_B3SS):
        from asc.kernels.colours import packed, recolour

        packed_BK = _beside(pixels_B3SS, packed(draws))
        # Normalises before the blur instead of after it: the blur's weights add up to 1, so that nothing changes.
        recolour(pixels_B3SS, packed_BK)
        return _blur(pixels_B3SS, draws.blur_B, packed_BK[:, -1], config)
    _jitter(pixels_B3SS, draws)
    if len(rows := _rows(draws.grey_B, pixels_B3SS)):
        pixels_B3SS[rows] = _luma(pixels_B3SS.index_select(0, rows)).expand(-1, 3, -1, -1)
    pixels_B3SS = _blur(pixels_B3SS, draws.blur_B, _beside(pixels_B3SS, draws.sigma_B), config)
    mean_311, deviation_311 = (_beside(pixels_B3SS, torch.tensor(x))[:, None, None] for x in (MEAN, DEVIATION))
    return pixels_B3SS.sub_(mean_311).div_(deviation_311)


def _blur(pixels_B3SS: Tensor, blur_B: Tensor, sigma_B: Tensor, config: AugmentConfig) -> Tensor:
    """Blur the images chosen on the host; ``sigma_B`` lies beside the pixels, which may be changed in place."""
    radius = min(config.blur_kernel // 2, math.ceil(_REACH * config.blur_sigma[1]))
    if blur_B.all():
        return _blurred(pixels_B3SS, sigma_B, radius)
    if len(rows := _rows(blur_B, pixels_B3SS)):
        pixels_B3SS[rows] = _blurred(pixels_B3SS.index_select(0, rows), sigma_B[rows], radius)
    return pixels_B3SS


def _rows(chosen_B: Tensor, pixels_B3SS: Tensor) -> Tensor:
    # Found on the host, where the draws lie: their number shapes the work, and a GPU need not be asked for it.
    return _beside(pixels_B3SS, chosen_B.nonzero()[:, 0])


def _beside(pixels_B3SS: Tensor, values: Tensor) -> Tensor:
    # Without a wait, so that the host can prepare the next steps while a GPU works on these.
    return values.to(pixels_B3SS.device, non_blocking=True)


def _jitter(pixels_B3SS: Tensor, draws: Draws) -> None:
    """Adjust the colours in place, in each image's own order: one after another, but the same ones together."""
    factors_B4 = _beside(pixels_B3SS, draws.factors_B4)
    for place in range(4):
        for operation, adjusted in enumerate((_brightened, _contrasted, _saturated, _turned)):
            rows = _rows(draws.jitter_B & (draws.order_B4[:, place] == operation), pixels_B3SS)
            if len(rows):
                factors_B111 = factors_B4[rows, operation].view(-1, 1, 1, 1)
                pixels_B3SS[rows] = adjusted(pixels_B3SS.index_select(0, rows), factors_B111)


def _luma(pixels_B3SS: Tensor) -> Tensor:
    red, green, blue = pixels_B3SS.split(1, dim=1)
    luma_B1SS: Tensor = (red * LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])
    return luma_B1SS


def _brightened(pixels_B3SS: Tensor, factors_B111: Tensor) -> Tensor:
    return (pixels_B3SS * factors_B111).clamp_(0, 1)


def _contrasted(pixels_B3SS: Tensor, factors_B111: Tensor) -> Tensor:
    mean_B111 = _luma(pixels_B3SS).mean((1, 2, 3), keepdim=True)
    return (pixels_B3SS * factors_B111).add_(mean_B111 * (1 - factors_B111)).clamp_(0, 1)


def _saturated(pixels_B3SS: Tensor, factors_B111: Tensor) -> Tensor:
    return (pixels_B3SS * factors_B111).add_(_luma(pixels_B3SS).mul_(1 - factors_B111)).clamp_(0, 1)


def _turned(pixels_B3SS: Tensor, turns_B111: Tensor) -> Tensor:
    """The hue turned by a share of the full circle; value and chroma, hence the saturation, stay as they are.

    In sixths of the circle, a channel is at its highest within 1 of its own colour, at its lowest farther than 2
    away, and linear between. That spares the six cases by which HSV is usually undone.
    """
    red, green, blue = pixels_B3SS.split(1, dim=1)
    # Far faster than aminmax, which torch does not vectorise over such a dimension.
    highest = pixels_B3SS.amax(1, keepdim=True)
    chroma = highest - pixels_B3SS.amin(1, keepdim=True)
    # Where the chroma is 0 the hue is any, and 0 / tiny = 0 does as well as another.
    scale = 1 / chroma.clamp(min=1e-12)
    from_blue, from_green = (red - green) * scale + 4, (blue - red) * scale + 2
    hue = torch.where(highest == red, (green - blue) * scale, torch.where(highest == green, from_green, from_blue))
    own_hue_311 = torch.arange(0, 6, 2, device=pixels_B3SS.device)[:, None, None]
    ahead = hue + 6 * turns_B111 - own_hue_311
    # Distance from the channel's own colour on the circle, from 0 to 3.
    distance = ahead.sub_((ahead / 6).round_(), alpha=6).abs_()
    return highest - chroma * distance.sub_(1).clamp_(0, 1)


def _blurred(pixels_B3SS: Tensor, sigma_B: Tensor, radius: int) -> Tensor:
    """Gaussian blur along both axes, the borders mirrored.

    A sum of shifted images: with a few taps this beats a convolution with one group for each channel of each image,
    and no reduced-precision mode of convolutions can touch it.
    """
    size = pixels_B3SS.shape[-1]
    offsets_1T = torch.arange(-radius, radius + 1, device=sigma_B.device)[None]
    weights_BT = (-0.5 * (offsets_1T / sigma_B[:, None]) ** 2).softmax(1)
    for axis, padding in ((2, (0, 0, radius, radius)), (3, (radius, radius, 0, 0))):
        padded = F.pad(pixels_B3SS, padding, mode="reflect")
        pixels_B3SS = torch.zeros_like(pixels_B3SS)
        for tap in range(2 * radius + 1):
            pixels_B3SS.addcmul_(padded.narrow(axis, tap, size), weights_BT[:, tap].view(-1, 1, 1, 1))
    return pixels_B3SS
