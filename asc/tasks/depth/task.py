"""Depth as the training loop, the judge and the page see it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from asc.tasks.dense import DenseModel
from asc.tasks.dense_results import Judge, Kind
from asc.tasks.dense_run import DenseConfig, DenseTask
from asc.tasks.depth.data import DepthData, DepthDataConfig
from asc.tasks.depth.heads import DepthHead, DepthHeadConfig
from asc.tasks.depth.losses import DepthLossConfig, depth_loss
from asc.tasks.depth.metrics import DepthRange, DepthScores
from asc.tasks.depth.pictures import paint_depth
from asc.tasks.images import Pairs, Pixels, Truth
from asc.vit import AscViT

# Images that the mean depth of a set is taken from, at most.
_ENOUGH_FOR_A_MEAN = 200


@dataclass(frozen=True)
class DepthConfig(DenseConfig):
    """Everything about a training of depth."""

    images: DepthDataConfig = DepthDataConfig()
    """Which images of the data."""
    range: DepthRange = DepthRange()
    """Which pixels count."""
    head: DepthHeadConfig = DepthHeadConfig()
    """What stands behind the encoder."""
    loss: DepthLossConfig = DepthLossConfig()
    """What is minimised."""


class DepthJudge(Judge):
    """All scores over the pixels of the whole set."""

    def __init__(self, limits: DepthRange) -> None:
        self.scores = DepthScores(limits)

    def add(self, maps_KHW: Tensor, truth_HW: Tensor) -> float:
        """Count an image; its own score is less the relative error."""
        rel = self.scores.add(maps_KHW[0], truth_HW)["rel"]
        return 0.0 if math.isnan(rel) else -rel

    def values(self) -> dict[str, float]:
        """d1, d2, d3, rms and rel."""
        return self.scores.values()


class DepthKind(Kind):
    """Metres for every pixel."""

    name, title, main = "depth", "Depth", "d1"

    def __init__(self, limits: DepthRange, head: DepthHeadConfig) -> None:
        self.limits = limits
        self.head = head

    def judge(self) -> DepthJudge:
        """A judge that has seen nothing yet."""
        return DepthJudge(self.limits)

    def array(self, maps_KHW: Tensor) -> Truth:
        """Metres as fp32."""
        return maps_KHW[0].float().cpu().numpy()

    def show(self, maps_KHW: Tensor) -> Pixels:
        """The predicted depth in colours."""
        return paint_depth(self.array(maps_KHW), self.limits.far)

    def show_truth(self, truth_HW: Truth) -> Pixels:
        """The true depth in colours."""
        return paint_depth(truth_HW, self.limits.far)

    def told(self, score: float) -> str:
        """The relative error: the score is less than that, so that higher is better."""
        return f"rel {abs(score):.3f}"

    def record(self) -> dict[str, Any]:
        """Range and head."""
        return {"range": asdict(self.limits), "head": asdict(self.head)}


class DepthTask(DenseTask):
    """Learning to see depth."""

    config: DepthConfig

    def __init__(self, config: DepthConfig, data: DepthData, encoder: AscViT) -> None:
        head = DepthHead(
            config.head, encoder.config.width, encoder.config.patch_size, config.augment.size, config.range.far
        )
        model = DenseModel(encoder, head, config.head.blocks, config.tune.frozen)
        super().__init__(config, model, DepthKind(config.range, config.head), data.train, data.val)
        self.mean_depth = mean_depth(data.train, config.range)

    def loss(self, maps_BKSR: Tensor, truth_BSR: Tensor, images_B3SR: Tensor) -> Tensor:
        """L1, scale-invariant and edge-aware."""
        valid_BSR = self.config.range.valid(truth_BSR)
        return depth_loss(maps_BKSR[:, 0], truth_BSR, valid_BSR, images_B3SR, self.config.loss)

    def trivial(self) -> Tensor:
        """The mean depth of the training images, everywhere."""
        return torch.full((1, 1, 1), self.mean_depth)


def mean_depth(pairs: Pairs, limits: DepthRange) -> float:
    """Mean of the valid depths of the first few hundred images."""
    total, count = 0.0, 0
    for index in range(min(len(pairs), _ENOUGH_FOR_A_MEAN)):
        truth_HW = torch.tensor(pairs.read(index).truth_HW)
        valid_N = truth_HW[limits.valid(truth_HW)].double()
        total, count = total + float(valid_N.sum()), count + len(valid_N)
    if not count:
        raise ValueError(f"{pairs.name} has no depth between {limits.near} and {limits.far} metres; see range.far")
    return total / count
