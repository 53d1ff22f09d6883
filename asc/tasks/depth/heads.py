"""The depth head, in the manner of Dense Prediction Transformers but for ragged tokens.

For every level a learned grid of queries attends to the tokens, which say where they are by the mean position code of
their patches. From the coarsest grid up, the grids are then joined by convolutions and self-attention. Shape letters:
see ``asc.tokens`` and ``asc.tasks.dense``; h, w rows and columns of a grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.convnext import LayerNorm2d

from asc.tasks.dense import LEVELS, cross_attention, mean_over_patches, position_codes, resized_maps
from asc.tokens import Tokens

STRIDES = (4, 8, 16, 32)
"""Pixels of a cell of the query grids, the first level first."""

# Two places score highest when they are one. With this gain of the (orthogonal) projection of the codes, a query
# begins by looking at a few tokens around it instead of at all alike.
_PLACE_GAIN = 1.8
# Channels behind the last grid, where every pixel has its own.
_PIXEL_CHANNELS = 32
# A sigmoid of this is 0.27: of 10 metres the usual depth of a room.
_FIRST_SHARE = -1.0


@dataclass(frozen=True)
class DepthHeadConfig:
    """What stands behind the encoder."""

    channels: int = 256
    """Width of the head; divisible by 4 and by ``heads``."""
    heads: int = 8
    """Attention heads."""
    attend_from: int = 16
    """Grids whose cells have at least so many pixels also attend to themselves; finer ones only have convolutions."""
    skip: bool = False
    """Whether a cell of a query grid also gets the mean value of the tokens that lie in it, beside what it attends to.
    The paper has no such short cut; short trainings learn faster with it."""
    blocks: tuple[int, ...] | None = None
    """Blocks, counted from 1, whose tokens the head sees; None: 3, 6, 9 and 12 of twelve, in proportion of others."""

    def __post_init__(self) -> None:
        if self.channels < 4 or self.heads < 1 or self.channels % 4 or self.channels % self.heads:
            raise ValueError(
                f"head.channels must be divisible by 4 and by head.heads, got {self.channels} channels and "
                f"{self.heads} heads"
            )


def grid_of(size: tuple[int, int], stride: int) -> tuple[int, int]:
    """Rows and columns of a grid over an image."""
    return math.ceil(size[0] / stride), math.ceil(size[1] / stride)


class Reassembly(nn.Module):
    """A grid of queries that attends to the tokens of one level."""

    def __init__(self, config: DepthHeadConfig, width: int, patch: int, grid: tuple[int, int]) -> None:
        super().__init__()
        channels = config.channels
        self.heads, self.skip, self.patch = config.heads, config.skip, patch
        self.queries = nn.Parameter(torch.empty(1, channels, *grid))
        self.size = nn.Linear(1, width)
        self.query = nn.Linear(channels, channels)
        self.key_value = nn.Linear(width, 2 * channels)
        # The same for queries and tokens, so that their scores measure how far apart they are.
        self.place = nn.Linear(channels, channels, bias=False)
        self.out = nn.Linear(channels, channels)
        nn.init.trunc_normal_(self.queries, std=0.02)
        nn.init.zeros_(self.size.weight)
        nn.init.zeros_(self.size.bias)
        nn.init.orthogonal_(self.place.weight, gain=_PLACE_GAIN)

    def forward(self, tokens: Tokens, size: tuple[int, int], stride: int) -> Tensor:
        """Features (B, C, h, w) of the cells of a grid over an image of the given size."""
        rows, columns = grid_of(size, stride)
        learned_QC = resized_maps(self.queries, rows, columns)[0].flatten(1).T
        query_QC = self.query(learned_QC) + self.place(self._codes(size, (rows, columns)))
        own_TC = self.place(self._token_codes(tokens))
        log_sizes_T1 = tokens.sizes_T.to(tokens.values_TC.dtype).log()[:, None]
        key_TC, value_TC = self.key_value(tokens.values_TC + self.size(log_sizes_T1)).chunk(2, dim=1)
        key_THD, value_THD = (x.unflatten(1, (self.heads, -1)) for x in (key_TC + own_TC, value_TC))
        query_BQHD = query_QC.unflatten(1, (self.heads, -1)).expand(tokens.batch, -1, -1, -1)
        mixed_BQC: Tensor = self.out(cross_attention(query_BQHD.contiguous(), key_THD, value_THD, tokens).flatten(2))
        map_BChw = (mixed_BQC + learned_QC).transpose(1, 2).reshape(tokens.batch, -1, rows, columns)
        if self.skip:
            map_BChw = map_BChw + F.adaptive_avg_pool2d(tokens.dense_BCHW(value_TC), (rows, columns))
        return map_BChw

    def _codes(self, size: tuple[int, int], grid: tuple[int, int]) -> Tensor:
        """Codes of the centres of cells, in patches: whole numbers are centres of patches."""
        device, channels = self.queries.device, self.queries.shape[1]
        sides = zip(size, grid, strict=True)
        places = [
            (torch.arange(cells, device=device) + 0.5) * (pixels / cells / self.patch) - 0.5 for pixels, cells in sides
        ]
        return position_codes(places[0], places[1], channels).to(self.queries.dtype)

    def _token_codes(self, tokens: Tokens) -> Tensor:
        rows, columns = (torch.arange(side, device=tokens.device).float() for side in tokens.grid)
        codes_NC = position_codes(rows, columns, self.queries.shape[1])
        return mean_over_patches(tokens, codes_NC).to(self.queries.dtype)


class Fusion(nn.Module):
    """Joins a grid with the coarser one below it: convolutions for what is near, self-attention for what is far."""

    def __init__(self, channels: int, heads: int, attends: bool) -> None:
        super().__init__()
        self.near = nn.Sequential(
            LayerNorm2d(channels),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )
        self.norm = nn.LayerNorm(channels) if attends else None
        self.far = nn.MultiheadAttention(channels, heads, batch_first=True) if attends else None

    def forward(self, own_BChw: Tensor, below_BChw: Tensor | None) -> Tensor:
        """The joined grid, in the size of ``own_BChw``."""
        if below_BChw is not None:
            own_BChw = own_BChw + resized_maps(below_BChw, *own_BChw.shape[2:])
        own_BChw = own_BChw + self.near(own_BChw)
        if self.norm is None or self.far is None:
            return own_BChw
        normed_BQC = self.norm(own_BChw.flatten(2).transpose(1, 2))
        mixed_BQC: Tensor = self.far(normed_BQC, normed_BQC, normed_BQC, need_weights=False)[0]
        return own_BChw + mixed_BQC.transpose(1, 2).reshape(own_BChw.shape)


class DepthHead(nn.Module):
    """Query grids, fusion from coarse to fine, and a small MLP for every pixel.

    Args:
        config: Its shape.
        width: Channels of the tokens.
        patch: Side of a patch in pixels.
        size: Height and width of the images that the query grids are made for; others interpolate them.
        far: Farthest depth in metres.
    """

    def __init__(self, config: DepthHeadConfig, width: int, patch: int, size: tuple[int, int], far: float) -> None:
        super().__init__()
        self.far = far
        channels, heads = config.channels, config.heads
        self.reassemblies = nn.ModuleList(Reassembly(config, width, patch, grid_of(size, stride)) for stride in STRIDES)
        self.fusions = nn.ModuleList(Fusion(channels, heads, stride >= config.attend_from) for stride in STRIDES)
        self.narrow = nn.Conv2d(channels, _PIXEL_CHANNELS, 3, padding=1)
        self.pixel = nn.Sequential(
            nn.GELU(), nn.Conv2d(_PIXEL_CHANNELS, _PIXEL_CHANNELS, 1), nn.GELU(), nn.Conv2d(_PIXEL_CHANNELS, 1, 1)
        )
        last = self.pixel[-1]
        assert isinstance(last, nn.Conv2d) and last.bias is not None
        nn.init.constant_(last.bias, _FIRST_SHARE)

    def forward(self, levels: Sequence[Tokens], size: tuple[int, int]) -> Tensor:
        """Metres (B, 1, H, W), between 0 and ``far``."""
        assert len(levels) == LEVELS
        grids = [
            reassemble(tokens, size, stride)
            for reassemble, tokens, stride in zip(self.reassemblies, levels, STRIDES, strict=True)
        ]
        joined_BChw: Tensor | None = None
        for fuse, grid_BChw in zip(reversed(self.fusions), reversed(grids), strict=True):
            joined_BChw = fuse(grid_BChw, joined_BChw)
        shares_B1HW = self.pixel(resized_maps(self.narrow(joined_BChw), *size))
        return self.far * F.sigmoid(shares_B1HW.float())
