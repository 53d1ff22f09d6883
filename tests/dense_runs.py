"""Small encoders, images and trainings for the tests of dense predictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

import asc
from asc.data import Scene, SceneConfig, normalise
from asc.tasks.dense_run import WatchConfig
from asc.tasks.images import JointConfig
from asc.train import MachineConfig, TrainConfig

Config = TypeVar("Config")


def tiny_encoder(image_size: int = 32, budget: float | None = 0.7, width: int = 64, **settings: Any) -> asc.AscViT:
    """Four blocks, calibrated on scenes; ``budget`` None: without superpixels."""
    superpixels = None if budget is None else asc.SuperpixelConfig(budget=budget, blocks=(0, 1, 2, 3))
    shape = {"width": width, "depth": 4, "heads": 2, "patch_size": 4, "positions": "sincos"}
    torch.manual_seed(0)
    encoder = asc.AscViT(asc.VitConfig(image_size=image_size, superpixels=superpixels, **shape | settings))
    if budget is not None:
        encoder.calibrate(scenes(8, image_size))
    return encoder.eval()


def scenes(count: int, size: int = 32) -> torch.Tensor:
    """Normalised images."""
    frames = [Scene(SceneConfig(size=size), index).frame(0).image_HW3 for index in range(count)]
    return normalise(np.stack(frames))


WATCH = WatchConfig(every=0, pictures=2)


def changed(config: Config, **settings: Any) -> Config:
    """A config with other settings by section, such as ``train={"steps": 3}``."""
    for section, values in settings.items():
        now = getattr(config, section)
        config = replace(config, **{section: replace(now, **values) if isinstance(values, dict) else values})  # type: ignore[type-var]
    return config


def unchanged(size: int) -> JointConfig:
    """Crops of scenes that are the scenes themselves."""
    return JointConfig(size=(size, size), scale=(1.0, 1.0), flip_probability=0.0, jitter_probability=0.0)


def quick_training(steps: int, batch: int, lr: float) -> TrainConfig:
    return TrainConfig(
        steps=steps, batch=batch, lr=lr, lr_batch=batch, warmup_steps=steps // 10, clip=1.0, weight_decay=0.01
    )


MACHINE = MachineConfig(accelerator="cpu", workers=0, log_every=10, checkpoint_every=1000)


def encoder_folder(folder: Path, **settings: Any) -> str:
    """A saved tiny encoder."""
    asc.save(tiny_encoder(**settings), folder)
    return str(folder)
