"""Small pre-training runs, and processes that can be killed in the middle of one."""

from __future__ import annotations

import multiprocessing
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import asc
from asc.data.scenes import SceneConfig
from asc.pretrain.augment import AugmentConfig
from asc.pretrain.data import DataConfig
from asc.pretrain.run import PretrainConfig, WatchConfig, pretrain
from asc.pretrain.siamese import SiameseConfig
from asc.run_folder import RunFolder
from asc.train import MachineConfig, TrainConfig, TrainingStoppedError

# A server that has everything imported forks in no time, and its children can be killed without harm.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["pretrain_runs"])


def tiny(out: Path, **settings: Any) -> PretrainConfig:
    """A run of a few seconds; ``settings`` by section, such as ``train={"steps": 3}``."""
    config = PretrainConfig(
        out=out,
        clips=DataConfig(scenes=20, scene=SceneConfig(size=24)),
        model=asc.VitConfig(
            width=32,
            depth=3,
            heads=2,
            patch_size=4,
            image_size=16,
            superpixels=asc.SuperpixelConfig(budget=0.7, blocks="all"),
        ),
        augment=AugmentConfig(size=16, blur_kernel=5),
        siamese=SiameseConfig(projection=16, hidden=32, momentum=0.9),
        train=TrainConfig(steps=12, batch=8, lr=1e-3, lr_batch=8, warmup_steps=3, clip=3.0),
        watch=WatchConfig(knn_every=6, knn_labelled=40, knn_judged=20, pictures_every=0, pictures=2, calibration=16),
        machine=MachineConfig(accelerator="cpu", log_every=1, checkpoint_every=2, workers=0),
    )
    for section, values in settings.items():
        now = getattr(config, section)
        config = replace(config, **{section: replace(now, **values) if isinstance(values, dict) else values})
    return config


def run_in_child(config: PretrainConfig) -> None:
    torch.set_num_threads(1)
    os.setpgrp()  # so that a signal can be sent to it and all its workers, as schedulers do
    # Its own lock: tqdm's is shared with all that are forked from the server, and this one may be killed holding it.
    tqdm.set_lock(threading.RLock())
    try:
        pretrain(config)
    except TrainingStoppedError as stopped:
        raise SystemExit(stopped.code) from None


def start(config: PretrainConfig) -> Any:
    """A process that pre-trains."""
    process = PROCESSES.Process(target=run_in_child, args=(config,))
    process.start()
    return process


def newest_state(out: Path) -> dict[str, Any]:
    """The last checkpoint of a run."""
    folder = RunFolder(out, writes=False)
    saved = folder.load_checkpoint(torch.device("cpu"))
    assert saved is not None
    return saved.state
