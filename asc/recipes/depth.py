"""Trainings of depth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from asc.tasks.dense_run import TuneConfig, WatchConfig
from asc.tasks.depth.heads import DepthHeadConfig
from asc.tasks.depth.metrics import DepthRange
from asc.tasks.depth.task import DepthConfig
from asc.tasks.images import JointConfig
from asc.train import MachineConfig, TrainConfig


def small() -> DepthConfig:
    """NYU Depth v2 at 160 × 120 pixels on one GPU: 16 crops of 128 × 96 × 1,500 steps.

    Command: ``asc train depth --encoder runs/small --data NYU`` (a folder ``{train,test}/{rgb,depth}/``, or the
    official file with splits.mat beside it). For the embedded scenes, take the recipe ``scenes``.
    """
    return DepthConfig(
        out=Path("runs/depth_small"),
        data="nyu",
        augment=JointConfig(size=(96, 128), base=(120, 160), scale=(1.0, 1.0), hue=0.0),
        head=DepthHeadConfig(channels=128, heads=4),
        train=TrainConfig(steps=1500, batch=16, lr=3e-4, lr_batch=16, warmup_steps=100, clip=1.0),
        machine=MachineConfig(checkpoint_every=500),
    )


def scenes() -> DepthConfig:
    """The embedded scenes at 64 pixels, whose backgrounds are up to 25 metres away and count to the border.

    Command: ``asc train depth --recipe scenes --encoder runs/small``.
    """
    return DepthConfig(
        out=Path("runs/depth_scenes"),
        augment=JointConfig(size=(64, 64), scale=(1.0, 1.0)),
        range=DepthRange(far=30.0, crop="none"),
        head=DepthHeadConfig(channels=128, heads=4),
        train=TrainConfig(steps=1000, batch=16, lr=3e-4, lr_batch=16, warmup_steps=100, clip=1.0),
        machine=MachineConfig(checkpoint_every=500),
    )


def paper() -> DepthConfig:
    """The paper's settings: 640 × 480 pixels, 8 crops of 416 × 352, 25 epochs with 2,000 steps of warm-up.

    Command: ``asc train depth --recipe paper --encoder ENCODER --data NYU``. Time: not measured yet.
    The paper's scores: δ<1.25 85.1%, rms 0.533, rel 0.128.
    """
    return DepthConfig(
        out=Path("runs/depth_paper"),
        data="nyu",
        tune=TuneConfig(calibration=8),
        augment=JointConfig(
            size=(352, 416),
            base=(480, 640),
            scale=(1.0, 1.0),
            jitter_probability=1.0,
            brightness=0.2,
            contrast=0.2,
            saturation=0.2,
            hue=0.0,
        ),
        train=TrainConfig(
            epochs=25, batch=8, optimiser="adam", lr=1e-4, lr_batch=8, warmup_steps=2000, weight_decay=0.0
        ),
        watch=WatchConfig(every=1000),
        machine=MachineConfig(checkpoint_every=500),
    )


RECIPES: dict[str, Callable[[], DepthConfig]] = {"small": small, "scenes": scenes, "paper": paper}
