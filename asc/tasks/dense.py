"""Predictions for every pixel from ragged superpixel tokens: features at several depths, and inference at any size.

    images ─▶ encoder ─▶ tokens after blocks 3, 6, 9, 12 ─▶ head ─▶ maps (B, K, H, W)

Heads get the tokens, not maps: what works token by token costs less there, and a head may attend to superpixels
themselves. ``Tokens.dense_BCHW`` makes a map of them, through which gradients reach every merged patch. Shape letters:
see ``asc.tokens``; Q queries, K channels of a prediction, H, W rows and columns of an image (of heads before a D).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asc.data.images import normalise
from asc.precision import Precision, autocast
from asc.tasks.images import Pixels, covering_size, padded_to_patches, resized
from asc.tokens import Tokens
from asc.vit import AscViT

LEVELS = 4
"""Depths at which heads see the tokens."""

Mode = Literal["whole", "slide"]


# --- Features ---------------------------------------------------------------------------------------------


def level_blocks(depth: int, blocks: Sequence[int] | None = None) -> tuple[int, ...]:
    """Blocks, counted from 1, whose tokens heads see: 3, 6, 9 and 12 of twelve, and in proportion of other depths."""
    if blocks is None:
        return tuple(math.ceil(depth * level / LEVELS) for level in range(1, LEVELS + 1))
    if len(blocks) != LEVELS or list(blocks) != sorted(blocks) or not 1 <= blocks[0] <= blocks[-1] <= depth:
        raise ValueError(f"head.blocks must be {LEVELS} blocks from 1 to {depth} in rising order, got {tuple(blocks)}")
    return tuple(blocks)


class DenseModel(nn.Module):
    """An encoder and a head for every pixel: normalised images (B, 3, H, W) to maps (B, K, H, W).

    Args:
        encoder: The network; trained along unless ``frozen``.
        head: Takes the tokens of every level and the (height, width) to predict.
        blocks: See ``level_blocks``.
        frozen: Whether the encoder stays as it is.
    """

    def __init__(
        self, encoder: AscViT, head: nn.Module, blocks: Sequence[int] | None = None, frozen: bool = False
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.frozen = frozen
        self.blocks = level_blocks(encoder.config.depth, blocks)
        # The tokens between blocks differ a lot in strength; the encoder's own norm fits the last ones only.
        self.norms = nn.ModuleList(nn.LayerNorm(encoder.config.width) for _ in self.blocks)
        self.head = head
        if frozen:
            encoder.requires_grad_(False)
        else:
            # The last norm serves the pooled feature, which no dense task asks for.
            encoder.norm.requires_grad_(False)

    def levels(self, images_B3HW: Tensor) -> list[Tokens]:
        """The normed tokens of every level, without prefix tokens."""
        with torch.no_grad() if self.frozen else nullcontext():
            levels = self.encoder.forward_blocks(images_B3HW, [block - 1 for block in self.blocks])
        bare = [tokens.without_prefix()[0] for tokens in levels]
        return [tokens.with_values(norm(tokens.values_TC)) for tokens, norm in zip(bare, self.norms, strict=True)]

    def forward(self, images_B3HW: Tensor) -> Tensor:
        """The head's maps in the size of the images, fp32 at least."""
        maps_BKHW: Tensor = self.head(self.levels(images_B3HW), tuple(images_B3HW.shape[2:]))
        return maps_BKHW

    def train(self, mode: bool = True) -> DenseModel:
        """Training mode, in which a frozen encoder takes no part."""
        super().train(mode)
        if self.frozen:
            self.encoder.eval()
        return self


# --- Positions of merged tokens, and attention to them ----------------------------------------------------


def position_codes(rows_R: Tensor, columns_S: Tensor, width: int) -> Tensor:
    """Codes (R · S, width) of the places of a grid, given in patches: waves of many lengths along both sides."""
    rates_Q = 100.0 ** -(torch.arange(width // 4, device=rows_R.device) / (width // 4))
    rows_RS, columns_RS = torch.meshgrid(rows_R, columns_S, indexing="ij")
    angles_NQ = [place_RS.flatten()[:, None] * rates_Q for place_RS in (rows_RS, columns_RS)]
    return torch.cat([wave(angle_NQ) for angle_NQ in angles_NQ for wave in (torch.sin, torch.cos)], dim=1)


def mean_over_patches(tokens: Tokens, codes_NC: Tensor) -> Tensor:
    """For each token the mean of its patches' codes (T, C); all images share the codes of the grid."""
    total = tokens.values_TC.shape[0]
    sums_TC = codes_NC.new_zeros(total, codes_NC.shape[1])
    rows_BNC = codes_NC.expand(tokens.batch, -1, -1)
    sums_TC.index_add_(0, tokens.patch_to_token_BN.flatten(), rows_BNC.flatten(0, 1))
    return sums_TC / tokens.sizes_T.clamp(min=1)[:, None]


def cross_attention(query_BQHD: Tensor, key_THD: Tensor, value_THD: Tensor, tokens: Tokens) -> Tensor:
    """Every image's queries attend to its own tokens: (B, Q, H, D)."""
    batch, queries = query_BQHD.shape[:2]
    if tokens.is_steady:
        key_BMHD, value_BMHD = (x_THD.unflatten(0, (batch, -1)) for x_THD in (key_THD, value_THD))
        return _attended(query_BQHD, key_BMHD, value_BMHD)
    if query_BQHD.is_cuda and query_BQHD.dtype in (torch.float16, torch.bfloat16):
        borders_q = torch.arange(batch + 1, dtype=torch.int32, device=tokens.device) * queries
        flat_THD = query_BQHD.flatten(0, 1)
        mixed_THD: Tensor = torch.ops.aten._flash_attention_forward(
            flat_THD, key_THD, value_THD, borders_q, tokens.cu_seqlens, queries, tokens.max_len, 0.0, False, False
        )[0]
        return mixed_THD.view_as(query_BQHD)
    # One by one: no padding, and no image can feel its batch-mates.
    lengths = tokens.lengths_B().tolist()
    images = zip(query_BQHD.split(1), key_THD.split(lengths), value_THD.split(lengths), strict=True)
    return torch.cat([_attended(query, key[None], value[None]) for query, key, value in images])


def _attended(query_BQHD: Tensor, key_BMHD: Tensor, value_BMHD: Tensor) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in (query_BQHD, key_BMHD, value_BMHD))
    mixed_BHQD: Tensor = F.scaled_dot_product_attention(query, key, value)
    return mixed_BHQD.transpose(1, 2)


# --- Inference --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InferenceConfig:
    """How whole images are predicted."""

    mode: Mode = "whole"
    """``whole``: an image at once; ``slide``: in windows of the size of a training crop, averaged where they overlap.
    """
    overlap: float = 1 / 3
    """Share of a window that the next one covers again."""
    batch: int = 8
    """Images or windows that go through the network together, at most."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"unknown inference.mode {self.mode!r}; choose from {', '.join(get_args(Mode))}")
        if not 0 <= self.overlap < 1:
            raise ValueError(f"inference.overlap must lie in [0, 1), got {self.overlap}")
        if self.batch < 1:
            raise ValueError(f"inference.batch must be at least 1, got {self.batch}")


@dataclass(frozen=True)
class Sizes:
    """What the training saw, so that inference can show the network the same."""

    base: tuple[int, int]
    """Height and width that every image is brought to, the smallest size that covers both."""
    window: tuple[int, int]
    """Height and width of a training crop."""


@torch.no_grad()
def predict(
    model: DenseModel,
    images: Iterable[tuple[int, Pixels]],
    sizes: Sizes,
    config: InferenceConfig,
    precision: Precision = "auto",
) -> Iterator[tuple[int, Tensor]]:
    """Numbered images in, the number and the maps (K, H, W) of each in its own size out, in any order.

    Only images of one size go through the network together: padding to a common size would make a prediction depend
    on the batch. The model is put into evaluation mode.
    """
    model.eval()
    like = next(model.parameters())
    waiting: dict[tuple[int, int], list[tuple[int, Pixels]]] = {}

    def run(size: tuple[int, int]) -> Iterator[tuple[int, Tensor]]:
        group = waiting.pop(size)
        pixels_BHW3 = torch.stack([torch.tensor(resized(image_HW3, *size)) for _, image_HW3 in group])
        images_B3HW = normalise(pixels_BHW3.to(like.device)).to(like.dtype)
        with autocast(like.device, precision):
            maps_BKHW = predict_scaled(model, images_B3HW, sizes.window, config)
        for (number, image_HW3), maps_KHW in zip(group, maps_BKHW, strict=True):
            yield number, resized_maps(maps_KHW[None], image_HW3.shape[0], image_HW3.shape[1])[0]

    for number, image_HW3 in images:
        size = covering_size(image_HW3.shape[0], image_HW3.shape[1], sizes.base)
        waiting.setdefault(size, []).append((number, image_HW3))
        if len(waiting[size]) == config.batch:
            yield from run(size)
    for size in list(waiting):
        yield from run(size)


def predict_scaled(model: DenseModel, images_B3HW: Tensor, window: tuple[int, int], config: InferenceConfig) -> Tensor:
    """Maps (B, K, H, W) of normalised images of the size that the network is to see."""
    if config.mode == "whole":
        return padded_prediction(model, images_B3HW)
    height, width = images_B3HW.shape[2:]
    sums_BKHW, counts_HW = None, images_B3HW.new_zeros(height, width)
    for top in starts(height, window[0], config.overlap):
        for left in starts(width, window[1], config.overlap):
            part = (..., slice(top, top + window[0]), slice(left, left + window[1]))
            maps_BKHW = padded_prediction(model, images_B3HW[part])
            if sums_BKHW is None:
                sums_BKHW = maps_BKHW.new_zeros(*maps_BKHW.shape[:2], height, width)
            sums_BKHW[part] += maps_BKHW
            counts_HW[part] += 1
    assert sums_BKHW is not None
    return sums_BKHW / counts_HW


def padded_prediction(model: DenseModel, images_B3HW: Tensor) -> Tensor:
    """Maps of images of any size: padded to whole patches with the mean colour, and the padding cut off again."""
    height, width = images_B3HW.shape[2:]
    padded_B3HW = padded_to_patches(images_B3HW, model.encoder.config.patch_size)
    maps_BKHW: Tensor = model(padded_B3HW)
    return maps_BKHW[..., :height, :width].float()


def starts(length: int, window: int, overlap: float) -> list[int]:
    """Where windows begin along a side: evenly spread, the last one ending with the side."""
    if length <= window:
        return [0]
    stride = max(1, round(window * (1 - overlap)))
    count = math.ceil((length - window) / stride) + 1
    return [round(number * (length - window) / (count - 1)) for number in range(count)]


def resized_maps(maps_BKHW: Tensor, height: int, width: int) -> Tensor:
    """Maps in another size, bilinear."""
    if maps_BKHW.shape[2:] == (height, width):
        return maps_BKHW
    return F.interpolate(maps_BKHW, (height, width), mode="bilinear", align_corners=False)
