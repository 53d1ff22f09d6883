"""Detection by queries, after DETR: a decoder that attends to the superpixels themselves.

    tokens after blocks 3, 6, 9, 12 ─▶ norm, linear ─▶ + level ─▶ keys and values ─┐
        mean position code of their patches, their size ─────────▶ + keys          │
    learned queries ─▶ [ self-attention ─▶ attention to the tokens ─▶ MLP ] × layers ─▶ class and box of each query

No map is made of the tokens: a superpixel is one key however large it is. Each layer is judged, and each begins with
the boxes of the one before (``refine``), which also say where its queries look; DETR itself learns a fixed code for
every query instead and needs many more epochs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchvision.ops import box_convert

from asc.tasks.detect.data import Truth
from asc.tasks.detect.head import DetectionHead, View, full_precision
from asc.tasks.detect.losses import mean_objects, set_losses
from asc.tasks.detect.matching import MatchCost, corners, match
from asc.tasks.detect.metrics import Detections
from asc.tokens import Tokens

# The longest wave of a position code spans the image; the shortest is this many times shorter.
_WAVES = 100.0
# The longest image's tokens are filled up to a multiple of this: libraries look for a kernel anew at every new size.
_ROUND = 64


@dataclass(frozen=True)
class DetrConfig:
    """The head ``detr``."""

    blocks: tuple[int, ...] | None = None
    """Blocks, counted from 1, whose tokens are attended to; None: one after each quarter (3, 6, 9 and 12 of 12)."""
    queries: int = 100
    """Objects that can be found in an image."""
    width: int = 256
    """Channels of a query, a multiple of 8."""
    heads: int = 8
    """Attention heads; divides the width."""
    layers: int = 6
    """Layers of the decoder."""
    hidden: int = 1024
    """Hidden width of the layers' MLPs."""
    dropout: float = 0.0
    """Share of the values that are dropped at random while learning."""
    refine: bool = True
    """Whether each layer corrects the boxes of the one before; False: as in DETR."""
    no_object: float = 0.1
    """Weight, in the loss, of queries that have no object to find."""
    l1: float = 5.0
    """Weight of the distance of the boxes in the loss."""
    giou: float = 2.0
    """Weight of their generalised overlap in the loss."""
    cost: MatchCost = field(default_factory=MatchCost)
    """What queries are matched to objects by."""
    least_score: float = 0.01
    """Detections below this score are not reported."""

    def __post_init__(self) -> None:
        for name in ("queries", "layers", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"detr.{name} must be at least 1, got {getattr(self, name)}")
        if self.width % 8 or self.width % self.heads:
            raise ValueError(f"detr.width must be a multiple of 8 and of detr.heads, got {self.width}")


class Answers(NamedTuple):
    """What the queries say, layer by layer."""

    logits_LBQC: Tensor
    """Scores of the classes; the last one says that there is no object."""
    boxes_LBQ4: Tensor
    """Boxes (centre x, centre y, width, height) in shares of the image, not of the canvas."""


class Memory(NamedTuple):
    """What the queries attend to: the tokens of all levels, filled up to the longest image."""

    values_BMC: Tensor
    keys_BMC: Tensor
    """The same with a code of where each token lies and how large it is."""
    hidden_BM: Tensor
    """Where there is no token (bool)."""


class DetrHead(DetectionHead):
    """Queries, a decoder, and what is read from it."""

    def __init__(self, width: int, levels: int, classes: int, config: DetrConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.width
        self.enter = nn.ModuleList(_entrance(width, channels) for _ in range(levels))
        # Three axes each, like other positions: weight decay is for matrices.
        self.levels_1LC = nn.Parameter(0.02 * torch.randn(1, levels, channels))
        self.queries_1QC = nn.Parameter(0.02 * torch.randn(1, config.queries, channels))
        self.size_code = nn.Linear(1, channels)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(channels)
        self.classify = nn.Linear(channels, classes + 1)
        self.locate_hidden, self.locate = nn.Linear(channels, channels), nn.Linear(channels, 4)
        if config.refine:
            self.starts_1Q4 = nn.Parameter(_spread_boxes(config.queries)[None])
            self.place_code = nn.Sequential(nn.Linear(2 * channels, channels), nn.ReLU(), nn.Linear(channels, channels))
            # At first every layer leaves the boxes where they are.
            nn.init.zeros_(self.locate.weight)
            nn.init.zeros_(self.locate.bias)
        else:
            self.places_1QC = nn.Parameter(torch.randn(1, config.queries, channels))

    def losses(self, view: View, truths: Sequence[Truth]) -> dict[str, Tensor]:
        """Losses of all layers, weighted."""
        answers = self._answers(view)
        label_K = torch.cat([truth.classes_K for truth in truths])
        counts = [len(truth.classes_K) for truth in truths]
        target_K4 = _in_shares(torch.cat([truth.boxes_K4 for truth in truths]), view.real, counts)
        matches = match(*answers, label_K, target_K4, counts, self.config.cost)
        objects = mean_objects(len(label_K), label_K.device)
        weights = {"class": 1.0, "l1": self.config.l1, "giou": self.config.giou}
        layers = [
            set_losses(logits_BQC, boxes_BQ4, matched, label_K, target_K4, self.config.no_object, objects)
            for logits_BQC, boxes_BQ4, matched in zip(*answers, matches, strict=True)
        ]
        return {name: weight * torch.stack([parts[name] for parts in layers]).sum() for name, weight in weights.items()}

    def detect(self, view: View) -> list[Detections]:
        """The likeliest class of every query that is sure enough."""
        answers = self._answers(view)
        score_BQ, label_BQ = answers.logits_LBQC[-1].softmax(2)[..., :-1].max(2)
        # Relative to the image: there is no box outside of it.
        corners_BQ4 = corners(answers.boxes_LBQ4[-1]).clamp(0, 1)
        # Image by image on the host: there every choice of a few queries would be a wait for the device.
        corners_BQ4, score_BQ, label_BQ = corners_BQ4.cpu(), score_BQ.cpu(), label_BQ.cpu()
        found = []
        for (rows, columns), box_Q4, score_Q, label_Q in zip(view.real, corners_BQ4, score_BQ, label_BQ, strict=True):
            box_Q4 = box_Q4 * box_Q4.new_tensor([columns, rows] * 2)
            full_Q = (box_Q4[:, 2:] > box_Q4[:, :2]).all(1)
            found.append(Detections(box_Q4, score_Q, label_Q).only((score_Q >= self.config.least_score) & full_Q))
        return found

    def _answers(self, view: View) -> Answers:
        memory = self._memory(view)
        batch = len(view.real)
        state_BQC = self.queries_1QC.expand(batch, -1, -1)
        start_BQ4 = self.starts_1Q4.expand(batch, -1, -1) if self.config.refine else None
        logits, boxes = [], []
        for layer in self.layers:
            place_BQC = self._place_of_queries(start_BQ4, batch)
            state_BQC = layer(state_BQC, place_BQC, memory)
            read_BQC = self.norm(state_BQC)
            moved_BQ4 = full_precision(self.locate(self.locate_hidden(read_BQC).relu()))
            if start_BQ4 is not None:
                moved_BQ4 = moved_BQ4 + start_BQ4
                start_BQ4 = moved_BQ4.detach()
            logits.append(full_precision(self.classify(read_BQC)))
            boxes.append(moved_BQ4.sigmoid())
        return Answers(torch.stack(logits), torch.stack(boxes))

    def _place_of_queries(self, start_BQ4: Tensor | None, batch: int) -> Tensor:
        if start_BQ4 is None:
            return self.places_1QC.expand(batch, -1, -1)
        place_BQC: Tensor = self.place_code(wave_code(start_BQ4.sigmoid(), self.config.width // 2))
        return place_BQC

    # --- What is attended to ------------------------------------------------------------------------------

    def _memory(self, view: View) -> Memory:
        real_BN = view.real_patches_BN()
        code_BNC = self._code_of_patches(view)
        parts = [
            self._level(tokens.without_prefix()[0], enter, level_C, code_BNC, real_BN)
            for tokens, enter, level_C in zip(view.levels, self.enter, self.levels_1LC[0], strict=True)
        ]
        return Memory(*(torch.cat(part, dim=1) for part in zip(*parts, strict=True)))

    def _code_of_patches(self, view: View) -> Tensor:
        """Position codes of the middles of all patches, in shares of the image."""
        tokens, limit_B2 = view.levels[0], view.limits_B2()
        middles = [(torch.arange(side, device=tokens.device) + 0.5) * view.patch for side in tokens.grid]
        rows_N, columns_N = (place.flatten() for place in torch.meshgrid(*middles, indexing="ij"))
        shares_BN2 = torch.stack([columns_N / limit_B2[:, 1:], rows_N / limit_B2[:, :1]], dim=2)
        return wave_code(shares_BN2.to(self.queries_1QC.dtype), self.config.width // 2)

    def _level(self, tokens: Tokens, enter: nn.Module, level_C: Tensor, code_BNC: Tensor, real_BN: Tensor) -> Memory:
        code_TC, patches_T = mean_code(tokens, code_BNC, real_BN)
        share_T = patches_T / real_BN.sum(1)[tokens.image_of_T()]
        place_TC = code_TC + self.size_code(share_T.log()[:, None])
        value_TC = enter(tokens.values_TC) + level_C
        rows_BM, exists_BM = _rows(tokens)
        # Selected, not indexed: back, indexing would sort the rows and add up what comes to one of them in turn.
        shape = (*rows_BM.shape, -1)
        filled = [x_TC.index_select(0, rows_BM.flatten()).view(shape) for x_TC in (value_TC, value_TC + place_TC)]
        return Memory(filled[0], filled[1], ~exists_BM)


class DecoderLayer(nn.Module):
    """Self-attention of the queries, attention to the tokens, MLP; normed before each."""

    def __init__(self, config: DetrConfig) -> None:
        super().__init__()
        width = config.width
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.among = nn.MultiheadAttention(width, config.heads, config.dropout, batch_first=True)
        self.look = nn.MultiheadAttention(width, config.heads, config.dropout, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, config.hidden), nn.ReLU(), nn.Dropout(config.dropout), nn.Linear(config.hidden, width)
        )
        self.drop = nn.Dropout(config.dropout)

    def forward(self, state_BQC: Tensor, place_BQC: Tensor, memory: Memory) -> Tensor:
        """The next state of the queries."""
        normed_BQC = self.norms[0](state_BQC)
        asked_BQC = normed_BQC + place_BQC
        state_BQC = state_BQC + self.drop(self.among(asked_BQC, asked_BQC, normed_BQC, need_weights=False)[0])
        seen_BQC, _ = self.look(
            self.norms[1](state_BQC) + place_BQC,
            memory.keys_BMC,
            memory.values_BMC,
            key_padding_mask=memory.hidden_BM,
            need_weights=False,
        )
        state_BQC = state_BQC + self.drop(seen_BQC)
        changed_BQC: Tensor = state_BQC + self.drop(self.mlp(self.norms[2](state_BQC)))
        return changed_BQC


def wave_code(shares: Tensor, channels: int) -> Tensor:
    """Sines and cosines (…, D · channels) of numbers (…, D) between 0 and 1."""
    rates_R = 2 * math.pi * _WAVES ** torch.linspace(0, 1, channels // 2, device=shares.device)
    angles = full_precision(shares)[..., None] * rates_R
    return torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(-2)


def mean_code(tokens: Tokens, code_BNC: Tensor, real_BN: Tensor) -> tuple[Tensor, Tensor]:
    """The mean code of every token's patches that show something of the image, and their number."""
    token_P, weight_P = tokens.patch_to_token_BN.flatten(), real_BN.flatten().to(code_BNC.dtype)
    total, channels = tokens.values_TC.shape[0], code_BNC.shape[2]
    sums_TC = code_BNC.new_zeros(total, channels).index_add(0, token_P, code_BNC.flatten(0, 1) * weight_P[:, None])
    patches_T = weight_P.new_zeros(total).index_add(0, token_P, weight_P)
    return sums_TC / patches_T.clamp(min=1)[:, None], patches_T


def _rows(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The rows of every image's tokens side by side, and which places hold one; at the others stand any rows."""
    places_M = torch.arange(-(-tokens.max_len // _ROUND) * _ROUND, device=tokens.device)
    exists_BM = places_M < tokens.lengths_B()[:, None]
    return (tokens.cu_seqlens[:-1, None] + places_M) % tokens.values_TC.shape[0], exists_BM


def _in_shares(boxes_K4: Tensor, real: Sequence[tuple[int, int]], counts: Sequence[int]) -> Tensor:
    """Boxes of a batch, so many of each image, in shares of their images."""
    # One transfer for all, which the host does not wait for.
    sides_B4 = torch.tensor([(columns, rows) * 2 for rows, columns in real], dtype=boxes_K4.dtype)
    sides_K4 = sides_B4.repeat_interleave(torch.tensor(counts), dim=0).to(boxes_K4.device, non_blocking=True)
    shares_K4: Tensor = box_convert(boxes_K4 / sides_K4, "xyxy", "cxcywh")
    return shares_K4


def _spread_boxes(count: int) -> Tensor:
    """Logits of boxes that begin evenly spread over the image, each as large as a third of its sides."""
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    numbers_Q = torch.arange(count)
    middle_Q2 = torch.stack([(numbers_Q % columns + 0.5) / columns, (numbers_Q // columns + 0.5) / rows], dim=1)
    return torch.cat([middle_Q2, torch.full((count, 2), 1 / 3)], dim=1).logit()


def _entrance(width: int, channels: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, channels))
