"""What an encoder gets of canvases: the patches of the images, and nothing of what is empty beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from asc.tokens import Tokens
from asc.vit import AscViT


def images_alone(encoder: AscViT, real: Sequence[tuple[int, int]]) -> RemovableHandle:
    """A context in which the encoder works on no patch that is wholly empty, so that none is attended to or merged.

    ``real`` are the rows and columns of pixels that each image fills on its canvas, from the top left.
    """

    def drop_empty(_: torch.nn.Module, inputs: tuple[Tokens, *tuple[Tensor | None, ...]]) -> tuple[object, ...]:
        return without_empty(inputs[0], real, encoder.config.patch_size), *inputs[1:]

    return encoder.blocks[0].register_forward_pre_hook(drop_empty)


def without_empty(tokens: Tokens, real: Sequence[tuple[int, int]], patch: int) -> Tokens:
    """The patches that show something of an image, of tokens that are patches still.

    In the map an empty patch belongs to the image's patch next to it, but it counts in no size: so nothing touches
    what it did not touch before.
    """
    grids = [(math.ceil(rows / patch), math.ceil(columns / patch)) for rows, columns in real]
    prefix, columns = tokens.num_prefix, tokens.grid[1]
    lengths = [prefix + tall * wide for tall, wide in grids]
    if sum(lengths) == tokens.values_TC.shape[0]:
        return tokens
    # All numbers that the host needs it knows already: it never waits for the device.
    known_B3 = torch.tensor([(*grid, end) for grid, end in zip(grids, accumulate(lengths), strict=True)])
    tall_B, wide_B, ends_B = known_B3.to(tokens.device, non_blocking=True).unbind(1)
    borders = torch.cat([ends_B.new_zeros(1), ends_B])
    patches_N = torch.arange(tokens.patch_to_token_BN.shape[1], device=tokens.device)
    nearest = [
        torch.minimum(place_N, side_B[:, None] - 1)
        for place_N, side_B in ((patches_N // columns, tall_B), (patches_N % columns, wide_B))
    ]
    total = sum(lengths)
    images_B = torch.arange(tokens.batch, device=tokens.device)
    image_of_T = images_B.repeat_interleave(borders.diff(), output_size=total)
    place_T = torch.arange(total, device=tokens.device) - borders[image_of_T] - prefix  # below 0: a prefix token
    wide_T = wide_B[image_of_T]
    patch_T = torch.where(place_T < 0, place_T, place_T // wide_T * columns + place_T % wide_T)
    rows_T = tokens.cu_seqlens[image_of_T] + prefix + patch_T
    return replace(
        tokens,
        values_TC=tokens.values_TC.index_select(0, rows_T),
        cu_seqlens=borders.to(torch.int32),
        max_len=max(lengths),
        sizes_T=tokens.sizes_T[rows_T],
        patch_to_token_BN=borders[:-1, None] + prefix + nearest[0] * wide_B[:, None] + nearest[1],
    )
