"""Training of detectors, from minutes on one GPU to the paper's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from asc.tasks.detect.augment import AugmentConfig
from asc.tasks.detect.detr import DetrConfig
from asc.tasks.detect.fasterrcnn import FasterRcnnConfig
from asc.tasks.detect.task import DetectConfig, WatchConfig
from asc.train import MachineConfig, TrainConfig


def small() -> DetectConfig:
    """Faster R-CNN at 128 pixels: the embedded scenes, or VOC with ``--data VOCdevkit``.

    Command: ``asc train detect --encoder RUN``. Time: minutes on one GPU.
    """
    return DetectConfig(
        out=Path("runs/detect_small"),
        fasterrcnn=FasterRcnnConfig(
            anchors=(8, 16, 32, 64, 128), adapter_width=256, proposals=(1000, 500), region_samples=128
        ),
        augment=AugmentConfig(size=128, scale=(0.7, 1.4)),
        train=TrainConfig(steps=2000, batch=16, lr=3e-4, lr_batch=16, warmup_steps=100, weight_decay=1e-4, clip=10.0),
        watch=WatchConfig(every=500, judged=200, batch=32),
        machine=MachineConfig(checkpoint_every=500),
    )


def small_detr() -> DetectConfig:
    """Queries at 128 pixels; else as ``small``. Queries learn more slowly than proposals: it takes more steps.

    Command: ``asc train detect --recipe small_detr --encoder RUN``. Time: minutes on one GPU.
    """
    config = small()
    return replace(
        config,
        out=Path("runs/detect_small_detr"),
        head="detr",
        detr=DetrConfig(queries=50, layers=4),
        train=replace(config.train, steps=6000, lr=2e-4, clip=1.0),
    )


def paper() -> DetectConfig:
    """The paper's Faster R-CNN on PASCAL VOC 2007: SGD, 24,000 steps of 8 images.

    Command: ``asc train detect --recipe paper --data VOCdevkit --encoder RUN``. Time: not measured yet.
    The paper's score: 77.5 AP50. The paper does not name the size of the images; 512 is that of its segmentation.
    """
    return DetectConfig(
        out=Path("runs/detect_paper"),
        data="VOCdevkit",
        train=TrainConfig(
            steps=24_000,
            batch=8,
            optimiser="sgd",
            momentum=0.9,
            lr=1e-3,
            lr_batch=8,
            schedule="steps",
            drops=(18 / 24, 22 / 24),
            warmup_steps=0,
            weight_decay=1e-4,
            clip=10.0,
        ),
        watch=WatchConfig(every=4000, judged=500),
    )


def paper_detr() -> DetectConfig:
    """The paper's detection by queries on PASCAL VOC 2007; its text gives no settings, so they are those of DETR.

    Command: ``asc train detect --recipe paper_detr --data VOCdevkit --encoder RUN``. Time and score: not measured yet.
    """
    config = paper()
    train = replace(config.train, optimiser="adamw", lr=1e-4, clip=0.1)
    detr = DetrConfig(hidden=2048, dropout=0.1)
    return replace(config, out=Path("runs/detect_paper_detr"), head="detr", detr=detr, train=train, encoder_lr=0.1)


RECIPES: dict[str, Callable[[], DetectConfig]] = {
    "small": small,
    "small_detr": small_detr,
    "paper": paper,
    "paper_detr": paper_detr,
}
