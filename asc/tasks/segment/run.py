"""The commands: train, evaluate and predict segmentation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asc.tasks.dense import InferenceConfig, Sizes
from asc.tasks.dense_results import Viewer
from asc.tasks.dense_run import (
    DenseEvaluation,
    DensePrediction,
    evaluate_dense,
    load_model,
    predict_dense,
    read_record,
    train_dense,
)
from asc.tasks.segment.data import SegmentDataConfig, open_segment_data
from asc.tasks.segment.heads import SegmentHeadConfig, make_head
from asc.tasks.segment.task import SegmentConfig, SegmentKind, SegmentTask


@dataclass(frozen=True)
class SegmentEvaluateSettings(DenseEvaluation):
    """Judge a trained model."""

    data: str = "scenes"
    """Folder of PASCAL VOC 2012, or ``scenes``."""
    images: SegmentDataConfig = SegmentDataConfig()
    """Which images of the data."""


@dataclass(frozen=True)
class SegmentPredictSettings(DensePrediction):
    """Segment the images of a folder; arrays hold classes as bytes."""


def train(config: SegmentConfig) -> Path:
    """Train, or go on with a run that was interrupted; returns its folder."""
    data = open_segment_data(config.data, config.images)
    return train_dense(config, lambda encoder: SegmentTask(config, data, encoder))


def evaluate(settings: SegmentEvaluateSettings) -> Path:
    """Judge a trained model on the validation part; returns the file of the results."""
    viewer = open_model(settings.model, settings.inference, settings.accelerator)
    data = open_segment_data(settings.data, settings.images)
    known = viewer.kind.record()["classes"]
    if list(data.classes) != known:
        raise ValueError(f"{settings.model} knows the classes {', '.join(known[:4])}, …, not those of {settings.data}")
    return evaluate_dense(viewer, data.val, settings)


def predict(settings: SegmentPredictSettings) -> Path:
    """Write arrays and pictures for a folder of images; returns the folder."""
    viewer = open_model(settings.model, settings.inference, settings.accelerator)
    return predict_dense(viewer, settings)


def open_model(path: Path, inference: InferenceConfig, accelerator: str) -> Viewer:
    """A trained model."""
    folder, record = read_record(path, SegmentKind.name)
    blocks = record["blocks"]
    head = SegmentHeadConfig(**record["head"] | {"blocks": tuple(blocks)})
    classes = tuple(record["classes"])
    model = load_model(
        folder,
        lambda encoder: make_head(head, encoder.config.width, encoder.config.patch_size, len(classes)),
        blocks,
        accelerator,
    )
    sizes = Sizes(**{name: tuple(size) for name, size in record["sizes"].items()})
    return Viewer(model, SegmentKind(classes, head), sizes, inference)
