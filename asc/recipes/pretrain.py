"""Pre-training runs, from minutes on a laptop to the paper's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from asc.data.clips import FolderSettings
from asc.layer import SuperpixelConfig
from asc.pretrain.augment import AugmentConfig
from asc.pretrain.data import DataConfig
from asc.pretrain.run import PretrainConfig, WatchConfig
from asc.pretrain.siamese import SiameseConfig
from asc.train import MachineConfig, TrainConfig
from asc.vit import VitConfig


def demo() -> PretrainConfig:
    """The embedded scenes on a CPU: a network of 4 blocks that learns to tell objects by their markings.

    Command: ``asc pretrain demo`` (``asc demo`` also writes a page). Time: about 4.5 minutes on two cores.
    Expect: kNN accuracy on held-out scenes, ten labelled images a class, from 12% to between 35 and 50%, by seed
    (``docs/results/demo.md``).
    """
    return PretrainConfig(
        out=Path("runs/demo"),
        model=VitConfig(
            width=64,
            depth=4,
            heads=2,
            patch_size=6,
            image_size=48,
            positions="sincos",
            superpixels=SuperpixelConfig(budget=0.55),
        ),
        # A few hundred steps are not enough to see through colours that jitter only a little.
        augment=AugmentConfig(
            size=48,
            crop_scale=(0.5, 1.0),
            brightness=0.8,
            contrast=0.8,
            saturation=0.8,
            hue=0.5,
            grey_probability=0.5,
            blur_probability=0.0,
        ),
        # In so few steps, the other clips of a batch as negatives teach much faster.
        siamese=SiameseConfig(projection=128, hidden=512, momentum=0.9, last_momentum=0.95, loss="contrastive"),
        train=TrainConfig(steps=450, batch=128, lr=3e-3, lr_batch=128, warmup_steps=45, clip=3.0),
        watch=WatchConfig(knn_every=75, knn_labelled=100, knn_judged=1000, knn_neighbours=10, pictures_every=150),
        machine=MachineConfig(log_every=10, checkpoint_every=100),
    )


def small() -> PretrainConfig:
    """Any videos at 64 pixels on one GPU: ViT-Tiny with patches of 4, 256 clips × 2,000 steps.

    Command: ``asc pretrain small --data DIR``. Time: three at once took 216 s on one H200 in bf16.
    Expect: from 802 clips 53% linear accuracy on CIFAR-10 (``docs/results/pretraining.md``); the kNN accuracy in the
    log is on the embedded scenes unless ``--watch.knn-data`` names labelled images.
    """
    return PretrainConfig(
        out=Path("runs/small"),
        clips=DataConfig(folder=FolderSettings(short_side=96, crop=96)),
        model=VitConfig(image_size=64),
        augment=AugmentConfig(size=64),
        siamese=SiameseConfig(hidden=1024, momentum=0.99),
        train=TrainConfig(steps=2000, batch=256, lr=1e-3, lr_batch=256, warmup_steps=200, clip=3.0),
    )


def ablation() -> PretrainConfig:
    """``small`` with half the steps, for comparing settings.

    Command: ``asc pretrain ablation --data DIR``. Time: about two minutes on one H200.
    """
    config = small()
    return replace(config, out=Path("runs/ablation"), train=replace(config.train, steps=1000))


def paper_tiny() -> PretrainConfig:
    """The paper's settings with a ViT-Tiny: 224 pixels, patches of 4, 512 clips a batch, 100 epochs.

    Command: ``torchrun --nproc-per-node 8 -m asc.cli pretrain paper_tiny --data MOMENTS KINETICS EGO4D`` (folders made
    by ``asc prepare --preset``). Time and score: not measured yet; it needs a cluster.
    """
    return _paper("tiny", VitConfig(superpixels=_PAPER_SUPERPIXELS))


def paper_base() -> PretrainConfig:
    """The paper's settings with a ViT-Base; else as ``paper_tiny``.

    Command: ``torchrun --nproc-per-node 8 -m asc.cli pretrain paper_base --data MOMENTS KINETICS EGO4D``.
    Time: not measured yet. The paper's score: 82.1% linear accuracy on ImageNet.
    """
    return _paper("base", VitConfig(width=768, heads=12, superpixels=_PAPER_SUPERPIXELS))


# The paper merges in every block, and in its attention a superpixel counts as much as a patch.
_PAPER_SUPERPIXELS = SuperpixelConfig(blocks="all", proportional_attention=False)


def _paper(name: str, model: VitConfig) -> PretrainConfig:
    return PretrainConfig(
        out=Path(f"runs/paper_{name}"),
        model=model,
        siamese=SiameseConfig(last_momentum=SiameseConfig.momentum),
        train=TrainConfig(),
        watch=WatchConfig(knn_every=2000, pictures_every=2000),
        machine=MachineConfig(checkpoint_every=1000, keep_every=20000),
    )


RECIPES: dict[str, Callable[[], PretrainConfig]] = {
    "demo": demo,
    "small": small,
    "ablation": ablation,
    "paper_tiny": paper_tiny,
    "paper_base": paper_base,
}
