"""Faster R-CNN on the maps of a Vision Transformer: the paper's adapter, a feature pyramid, torchvision's heads.

    tokens after a block ─▶ norm, 1×1 to 512 ─▶ dense map ─▶ own stride ─▶ 2 residual blocks ─▶ 1×1 to 256 ─┐
    (one such row for each of the blocks 3, 6, 9, 12)                               feature pyramid ◀────────┘
                                                          region proposals, RoI heads ◀──┘

All blocks of a Vision Transformer work at the stride of its patches, while a pyramid wants a coarser map at every
level. As in ViTDet the maps are brought to their strides by averaging (coarser) or bilinear interpolation (finer):
the earliest block gives the finest map. The 1×1 convolution is run on the tokens before they are spread out, which
gives the same numbers for a fraction of the work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.convnext import LayerNorm2d
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from asc.tasks.detect.data import Truth
from asc.tasks.detect.head import DetectionHead, View, full_precision
from asc.tasks.detect.metrics import Detections
from asc.tokens import Tokens

_RATIOS = (0.5, 1.0, 2.0)
_POOLED = 7
# torchvision sends a region of 224 pixels to the level whose anchors have 128.
_REGION_TO_ANCHOR = 224 / 128


@dataclass(frozen=True)
class FasterRcnnConfig:
    """The head ``fasterrcnn``."""

    blocks: tuple[int, ...] | None = None
    """Blocks, counted from 1, whose maps are used; None: one after each quarter (3, 6, 9 and 12 of 12)."""
    strides: tuple[int, ...] = (4, 8, 16, 32)
    """Pixels from one place of each level's map to the next: a power of 2, twice as many at every level."""
    anchors: tuple[int, ...] = (32, 64, 128, 256, 512)
    """Side of the anchors of every level and of one more above them; each comes in the ratios 1:2, 1:1 and 2:1."""
    adapter_width: int = 512
    """Channels inside the adapter."""
    pyramid_width: int = 256
    """Channels of the pyramid."""
    hidden: int = 1024
    """Width of the two layers that judge a region."""
    proposals: tuple[int, int] = (2000, 1000)
    """Regions that are kept for the second stage, in training and in use."""
    proposal_samples: int = 256
    """Anchors of an image that the first stage learns from in a step."""
    region_samples: int = 512
    """Regions of an image that the second stage learns from in a step."""
    least_score: float = 0.05
    """Detections below this score are not reported."""
    suppress: float = 0.5
    """Of two detections of a class that overlap more than this, only the surer one is reported."""
    most: int = 100
    """Most detections of an image."""

    def __post_init__(self) -> None:
        doubling = all(later == 2 * earlier for earlier, later in zip(self.strides, self.strides[1:], strict=False))
        if not self.strides or self.strides[0] < 1 or not math.log2(self.strides[0]).is_integer() or not doubling:
            raise ValueError(f"fasterrcnn.strides must be powers of 2, each twice the one before; got {self.strides}")
        if len(self.anchors) != len(self.strides) + 1:
            raise ValueError(
                f"fasterrcnn.anchors needs a size for each of the {len(self.strides)} strides and one more, "
                f"got {len(self.anchors)}"
            )


class FasterRcnnHead(DetectionHead):
    """Proposes regions and judges them."""

    def __init__(self, width: int, levels: int, classes: int, config: FasterRcnnConfig) -> None:
        super().__init__()
        if levels != len(config.strides):
            raise ValueError(_stride_for_each(levels, config))
        self.config = config
        channels = config.pyramid_width
        self.adapters = nn.ModuleList(Adapter(width, stride, config) for stride in config.strides)
        self.pyramid = FeaturePyramidNetwork([channels] * levels, channels, extra_blocks=LastLevelMaxPool())
        self.proposer = _proposer(config)
        self.judge = _judge(config, classes)

    def losses(self, view: View, truths: Sequence[Truth]) -> dict[str, Tensor]:
        """Losses of both stages."""
        targets = [{"boxes": truth.boxes_K4, "labels": truth.classes_K + 1} for truth in truths]
        maps, canvases = self._maps(view)
        regions, first = self.proposer(canvases, maps, targets)
        _, second = self.judge(maps, regions, canvases.image_sizes, targets)
        return {
            "proposal_score": first["loss_objectness"],
            "proposal_box": first["loss_rpn_box_reg"],
            "class": second["loss_classifier"],
            "box": second["loss_box_reg"],
        }

    def detect(self, view: View) -> list[Detections]:
        """The regions that show something."""
        maps, canvases = self._maps(view)
        regions, _ = self.proposer(canvases, maps)
        results, _ = self.judge(maps, regions, canvases.image_sizes)
        return [Detections(found["boxes"], found["scores"], found["labels"] - 1) for found in results]

    def _maps(self, view: View) -> tuple[dict[str, Tensor], ImageList]:
        real_BN = view.real_patches_BN()
        maps = {
            str(number): adapter(tokens, real_BN, view.patch)
            for number, (adapter, tokens) in enumerate(zip(self.adapters, view.levels, strict=True))
        }
        # torchvision makes anchors in the type of the maps.
        pyramid = {name: full_precision(map_BCHW) for name, map_BCHW in self.pyramid(maps).items()}
        rows, columns = (side * view.patch for side in view.levels[0].grid)
        # Of the canvases nothing but their shape is asked for.
        canvas_B3SS = pyramid["0"].new_empty(1).expand(len(view.real), 3, rows, columns)
        return pyramid, ImageList(canvas_B3SS, view.real)


def _stride_for_each(levels: int, config: FasterRcnnConfig) -> str:
    strides, anchors = _doubled(config.strides, levels), _doubled(config.anchors, levels + 1)
    return (
        f"fasterrcnn.strides has {len(config.strides)} numbers for the maps of {levels} blocks: it takes one for each, "
        f"and fasterrcnn.anchors one more; give --fasterrcnn.strides {strides} --fasterrcnn.anchors {anchors}, or "
        f"other blocks by --fasterrcnn.blocks"
    )


def _doubled(sides: Sequence[int], count: int) -> str:
    """The first numbers, and as many doubled ones as are lacking."""
    more = [sides[-1] * 2 ** (number + 1) for number in range(count - len(sides))]
    return " ".join(map(str, [*sides[:count], *more]))


class Adapter(nn.Module):
    """The paper's adapter for one block: tokens in, a map of the pyramid's width and of its own stride out."""

    def __init__(self, width: int, stride: int, config: FasterRcnnConfig) -> None:
        super().__init__()
        self.stride = stride
        self.norm = nn.LayerNorm(width)
        self.enter = nn.Linear(width, config.adapter_width)
        self.residuals = nn.Sequential(Residual(config.adapter_width), Residual(config.adapter_width))
        self.leave = nn.Conv2d(config.adapter_width, config.pyramid_width, 1)

    def forward(self, tokens: Tokens, real_BN: Tensor, patch: int) -> Tensor:
        """The map; nothing of what lies beside the images comes in."""
        entered_TC = self.enter(self.norm(tokens.values_TC))
        dense_BChw = tokens.dense_BCHW(entered_TC) * real_BN.view(tokens.batch, 1, *tokens.grid)
        map_BCHW: Tensor = self.leave(self.residuals(self._to_stride(dense_BChw, patch)))
        return map_BCHW

    def _to_stride(self, dense_BChw: Tensor, patch: int) -> Tensor:
        if patch == self.stride:
            return dense_BChw
        rows, columns = (math.ceil(side * patch / self.stride) for side in dense_BChw.shape[2:])
        if patch < self.stride:
            return F.adaptive_avg_pool2d(dense_BChw, (rows, columns))
        return F.interpolate(dense_BChw, (rows, columns), mode="bilinear")


class Residual(nn.Module):
    """Two 3×3 convolutions beside a skip connection.

    Normed over the channels of each place: so neither batch-mates nor the empty part of the canvas have a say.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            LayerNorm2d(channels, eps=1e-6),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            LayerNorm2d(channels, eps=1e-6),
        )

    def forward(self, map_BCHW: Tensor) -> Tensor:
        """A map of the same shape."""
        return F.relu(map_BCHW + self.body(map_BCHW))


# --- torchvision's parts ----------------------------------------------------------------------------------


def _proposer(config: FasterRcnnConfig) -> RegionProposalNetwork:
    generator = AnchorGenerator(tuple((side,) for side in config.anchors), (_RATIOS,) * len(config.anchors))
    kept = dict(zip(("training", "testing"), config.proposals, strict=True))
    return RegionProposalNetwork(
        generator,
        _FullPrecisionProposals(config.pyramid_width, len(_RATIOS)),
        fg_iou_thresh=0.7,
        bg_iou_thresh=0.3,
        batch_size_per_image=config.proposal_samples,
        positive_fraction=0.5,
        pre_nms_top_n=kept,
        post_nms_top_n=kept,
        nms_thresh=0.7,
    )


def _judge(config: FasterRcnnConfig, classes: int) -> RoIHeads:
    return RoIHeads(
        _CanvasRoIAlign(config),
        TwoMLPHead(config.pyramid_width * _POOLED**2, config.hidden),
        _FullPrecisionJudgement(config.hidden, classes + 1),
        fg_iou_thresh=0.5,
        bg_iou_thresh=0.5,
        batch_size_per_image=config.region_samples,
        positive_fraction=0.25,
        bbox_reg_weights=None,
        score_thresh=config.least_score,
        nms_thresh=config.suppress,
        detections_per_img=config.most,
    )


class _FullPrecisionProposals(RPNHead):  # type: ignore[misc]
    """Offsets in full precision, whichever they were computed in: torchvision decodes boxes in their type."""

    def forward(self, maps: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        scores, offsets = super().forward(maps)
        return [full_precision(score) for score in scores], [full_precision(offset) for offset in offsets]


class _FullPrecisionJudgement(FastRCNNPredictor):  # type: ignore[misc]
    """Likewise."""

    def forward(self, regions_RC: Tensor) -> tuple[Tensor, Tensor]:
        scores, offsets = super().forward(regions_RC)
        return full_precision(scores), full_precision(offsets)


class _CanvasRoIAlign(MultiScaleRoIAlign):  # type: ignore[misc]
    """Finds the scale of its maps by the canvas; torchvision takes the largest image, which may be smaller."""

    def __init__(self, config: FasterRcnnConfig) -> None:
        level = min(2, len(config.strides) - 1)
        super().__init__(
            [str(number) for number in range(len(config.strides))],
            output_size=_POOLED,
            sampling_ratio=2,
            canonical_scale=round(_REGION_TO_ANCHOR * config.anchors[level]),
            canonical_level=int(math.log2(config.strides[level])),
        )
        self.stride = config.strides[0]

    def forward(self, maps: dict[str, Tensor], regions: list[Tensor], real: list[tuple[int, int]]) -> Tensor:
        rows, columns = (side * self.stride for side in maps["0"].shape[2:])
        pooled_RCPP: Tensor = super().forward(maps, regions, [(rows, columns)] * len(real))
        return pooled_RCPP
