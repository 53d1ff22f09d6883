"""Trainings of segmentation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from asc.data.scenes import SceneConfig
from asc.tasks.dense_run import WatchConfig
from asc.tasks.images import JointConfig
from asc.tasks.segment.data import SegmentDataConfig
from asc.tasks.segment.task import SegmentConfig
from asc.train import MachineConfig, TrainConfig


def small() -> SegmentConfig:
    """Any data at 128 pixels on one GPU: 16 crops × 1,500 steps.

    Command: ``asc train segment --encoder runs/small --data VOCDEVKIT`` (or no ``--data``: embedded scenes); the
    head is ``--head.kind mlp`` or ``fpn``.
    """
    return SegmentConfig(
        out=Path("runs/segment_small"),
        images=SegmentDataConfig(scene=SceneConfig(size=128, frames=8)),
        augment=JointConfig(size=(128, 128)),
        train=TrainConfig(steps=1500, batch=16, lr=3e-4, lr_batch=16, warmup_steps=100, clip=1.0),
        machine=MachineConfig(checkpoint_every=500),
    )


def paper() -> SegmentConfig:
    """The paper's settings: 512 × 512 pixels, 16 crops × 20,000 steps with 1,500 of warm-up.

    Command: ``asc train segment --recipe paper --encoder ENCODER --data VOCDEVKIT``. Time: not measured yet.
    The paper's score: 76.3 mIoU on PASCAL VOC 2012.
    """
    return SegmentConfig(
        out=Path("runs/segment_paper"),
        augment=JointConfig(size=(512, 512), scale=(0.5, 2.0)),
        train=TrainConfig(steps=20000, batch=16, lr=5e-5, lr_batch=16, warmup_steps=1500),
        watch=WatchConfig(every=2000),
        machine=MachineConfig(checkpoint_every=1000),
    )


RECIPES: dict[str, Callable[[], SegmentConfig]] = {"small": small, "paper": paper}
