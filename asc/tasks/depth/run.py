"""The commands: train, evaluate and predict depth."""

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
from asc.tasks.depth.data import DepthDataConfig, open_depth_data
from asc.tasks.depth.heads import DepthHead, DepthHeadConfig
from asc.tasks.depth.metrics import DepthRange
from asc.tasks.depth.task import DepthConfig, DepthKind, DepthTask


@dataclass(frozen=True)
class DepthEvaluateSettings(DenseEvaluation):
    """Judge a trained model."""

    data: str = "scenes"
    """NYU Depth v2 (its official file, or a folder of images), or ``scenes``."""
    images: DepthDataConfig = DepthDataConfig()
    """Which images of the data."""


@dataclass(frozen=True)
class DepthPredictSettings(DensePrediction):
    """Predict the depth of the images of a folder; arrays hold metres."""


def train(config: DepthConfig) -> Path:
    """Train, or go on with a run that was interrupted; returns its folder."""
    data = open_depth_data(config.data, config.images)
    return train_dense(config, lambda encoder: DepthTask(config, data, encoder))


def evaluate(settings: DepthEvaluateSettings) -> Path:
    """Judge a trained model on the validation part; returns the file of the results."""
    viewer = open_model(settings.model, settings.inference, settings.accelerator)
    data = open_depth_data(settings.data, settings.images)
    return evaluate_dense(viewer, data.val, settings)


def predict(settings: DepthPredictSettings) -> Path:
    """Write arrays and pictures for a folder of images; returns the folder."""
    viewer = open_model(settings.model, settings.inference, settings.accelerator)
    return predict_dense(viewer, settings)


def open_model(path: Path, inference: InferenceConfig, accelerator: str) -> Viewer:
    """A trained model."""
    folder, record = read_record(path, DepthKind.name)
    blocks, limits = record["blocks"], DepthRange(**record["range"])
    head = DepthHeadConfig(**record["head"] | {"blocks": tuple(blocks)})
    sizes = Sizes(**{name: tuple(size) for name, size in record["sizes"].items()})
    model = load_model(
        folder,
        lambda encoder: DepthHead(head, encoder.config.width, encoder.config.patch_size, sizes.window, limits.far),
        blocks,
        accelerator,
    )
    return Viewer(model, DepthKind(limits, head), sizes, inference)
