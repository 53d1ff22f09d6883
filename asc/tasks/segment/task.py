"""Segmentation as the training loop, the judge and the page see it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asc.tasks.dense import DenseModel
from asc.tasks.dense_results import Judge, Kind
from asc.tasks.dense_run import DenseConfig, DenseTask
from asc.tasks.images import Pixels, Truth
from asc.tasks.segment.data import SegmentData, SegmentDataConfig
from asc.tasks.segment.heads import SegmentHeadConfig, make_head
from asc.tasks.segment.losses import SegmentLossConfig, segment_loss
from asc.tasks.segment.metrics import Confusion, confusion_matrix, iou
from asc.tasks.segment.pictures import paint_classes
from asc.vit import AscViT


@dataclass(frozen=True)
class SegmentConfig(DenseConfig):
    """Everything about a training of segmentation."""

    images: SegmentDataConfig = SegmentDataConfig()
    """Which images of the data."""
    head: SegmentHeadConfig = SegmentHeadConfig()
    """What stands behind the encoder."""
    loss: SegmentLossConfig = SegmentLossConfig()
    """What is minimised."""


class SegmentJudge(Judge):
    """Mean intersection over union of the whole set."""

    def __init__(self, classes: tuple[str, ...]) -> None:
        self.classes = classes
        self.confusion = Confusion(len(classes))

    def add(self, maps_KHW: Tensor, truth_HW: Tensor) -> float:
        """Count an image; its own score is the mean over the classes in it."""
        counts_KK = confusion_matrix(maps_KHW.argmax(0), truth_HW, len(self.classes))
        self.confusion.counts_KK += counts_KK
        own = float(iou(counts_KK).nanmean())
        # An image of void alone is as good as it can be.
        return own if own == own else 1.0

    def values(self) -> dict[str, float]:
        """mIoU and the share of right pixels."""
        return {"miou": self.confusion.mean_iou(), "accuracy": self.confusion.accuracy()}

    def details(self) -> dict[str, Any]:
        """Intersection over union by class; none for a class that never came up."""
        values = zip(self.classes, self.confusion.iou_K().tolist(), strict=True)
        return {"iou": {name: value if value == value else None for name, value in values}}


class SegmentKind(Kind):
    """A class for every pixel."""

    name, title, main = "segment", "Segmentation", "miou"

    def __init__(self, classes: tuple[str, ...], head: SegmentHeadConfig) -> None:
        self.classes = classes
        self.head = head

    def judge(self) -> SegmentJudge:
        """A judge that has seen nothing yet."""
        return SegmentJudge(self.classes)

    def array(self, maps_KHW: Tensor) -> Truth:
        """Classes as bytes."""
        return maps_KHW.argmax(0).cpu().numpy().astype(np.uint8)

    def show(self, maps_KHW: Tensor) -> Pixels:
        """The predicted classes in colours."""
        return paint_classes(self.array(maps_KHW))

    def show_truth(self, truth_HW: Truth) -> Pixels:
        """The true classes in colours."""
        return paint_classes(truth_HW)

    def told(self, score: float) -> str:
        """The mean over the classes in the image."""
        return f"miou {score:.3f}"

    def record(self) -> dict[str, Any]:
        """Classes and head."""
        return {"classes": list(self.classes), "head": asdict(self.head)}


def make_model(encoder: AscViT, head: SegmentHeadConfig, classes: int, frozen: bool) -> DenseModel:
    """The encoder with a new head."""
    made = make_head(head, encoder.config.width, encoder.config.patch_size, classes)
    return DenseModel(encoder, made, head.blocks, frozen)


class SegmentTask(DenseTask):
    """Learning to segment."""

    config: SegmentConfig

    def __init__(self, config: SegmentConfig, data: SegmentData, encoder: AscViT) -> None:
        model = make_model(encoder, config.head, len(data.classes), config.tune.frozen)
        super().__init__(config, model, SegmentKind(data.classes, config.head), data.train, data.val)
        self.classes = len(data.classes)

    def loss(self, maps_BKSR: Tensor, truth_BSR: Tensor, images_B3SR: Tensor) -> Tensor:
        """Cross-entropy and Lovász-Softmax."""
        return segment_loss(maps_BKSR, truth_BSR.long(), self.config.loss)

    def trivial(self) -> Tensor:
        """Background everywhere."""
        scores_K11 = torch.zeros(self.classes, 1, 1)
        scores_K11[0] = 1.0
        return scores_K11
