"""Features of whole datasets, computed once and kept on disk.

A file of features belongs to the weights of the encoder, the content of the images' part and the way the images are
cut out; where one of these differs, another file is made. Shape letters: N images, C channels.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from tqdm import tqdm

from asc.data.images import normalise
from asc.data.loading import make_loader
from asc.data.sampling import BatchPlan
from asc.files import write_whole
from asc.precision import autocast, in_bf16
from asc.tasks.classify.datasets import Dataset, ImageSet
from asc.tasks.classify.datasets.parts import SortedImages
from asc.tasks.classify.views import CentreViews
from asc.tasks.encoders import Encoder

FeaturePrecision = Literal["auto", "fp32", "bf16"]
# Goes into the key of the files: raise it when features of the same images come out otherwise.
_VERSION = 2


@dataclass(frozen=True)
class FeatureConfig:
    """How features are computed; of this, only the precision changes them."""

    device: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or another of torch's devices."""
    precision: FeaturePrecision = "auto"
    """``auto``: bf16 where torch's autocast chooses it, on a GPU that computes with it; fp32 elsewhere."""
    batch: int = 256
    """Images at a time."""
    workers: int | None = None
    """Processes that open images; None: by the number of cores, 0 on a CPU."""
    cache: Path | None = None
    """Folder of the files of features; None: ``features`` in the folder of the results."""

    @property
    def torch_device(self) -> torch.device:
        """The device that is meant."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            return torch.device(self.device)
        except RuntimeError as error:
            raise ValueError(f"features.device {self.device!r} is no device of torch's") from error

    @property
    def reduced(self) -> bool:
        """Whether bf16 is used."""
        return in_bf16(self.precision, self.torch_device)


def features_of(encoder: Encoder, images: ImageSet, margin: float, config: FeatureConfig, cache: Path) -> Tensor:
    """Features (N, C) of a part of a dataset on the CPU in fp32: those on disk, or computed and put there."""
    file = _file(encoder, images, margin, config, cache)
    found = _read(file, len(images), encoder.num_features)
    if found is not None:
        return found
    features_NC = compute_features(encoder, images, margin, config)
    about = {"encoder": encoder.description, "images": images.name, "margin": str(margin)}
    write_whole(file, lambda path: safetensors.torch.save_file({"features": features_NC}, path, about))
    return features_NC


def learning_features(
    encoder: Encoder, dataset: Dataset, margin: float, config: FeatureConfig, cache: Path
) -> tuple[Tensor, Tensor]:
    """Features of the training and of the validation part.

    They are computed and kept together: another seed divides the same images in another way, and finds them there.
    """
    together = SortedImages(dataset.trainval)
    sorted_NC = features_of(encoder, together, margin, config, cache)
    features_NC = torch.empty_like(sorted_NC)
    features_NC[torch.tensor(together.order)] = sorted_NC
    train_NC, val_NC = features_NC.split([len(dataset.train), len(dataset.val)])
    return train_NC, val_NC


def _file(encoder: Encoder, images: ImageSet, margin: float, config: FeatureConfig, cache: Path) -> Path:
    how = f"{_VERSION} {encoder.image_size} {margin!r} {encoder.mean} {encoder.deviation} {config.reduced}"
    key = hashlib.sha256(f"{encoder.identity} {images.fingerprint()} {how}".encode()).hexdigest()[:24]
    return cache / f"{encoder.name}_{images.name.replace('/', '-')}_{key}.safetensors"


def _read(file: Path, count: int, channels: int) -> Tensor | None:
    if not file.is_file():
        return None
    try:
        features_NC = safetensors.torch.load_file(file)["features"]
        if features_NC.shape == (count, channels) and bool(features_NC.isfinite().all()):
            return features_NC
        problem = f"it holds {tuple(features_NC.shape)} numbers in place of {(count, channels)}, or some that are none"
    except (OSError, KeyError, safetensors.SafetensorError) as error:
        problem = str(error)
    tqdm.write(f"the features {file} cannot be used ({problem}); they are made again")
    return None


@torch.no_grad()
def compute_features(encoder: Encoder, images: ImageSet, margin: float, config: FeatureConfig) -> Tensor:
    """Features (N, C) of the middles of all images, on the CPU in fp32; the encoder stays on the device."""
    device = config.torch_device
    module = encoder.module.to(device).eval()
    parts = []
    with tqdm(total=len(images), unit="image", desc=f"features of {images.name}", disable=None) as bar:
        views = CentreViews(images, encoder.image_size, margin)
        plan = BatchPlan(0, len(images), config.batch)
        for batch in make_loader(views, plan, loading_workers(config.workers, device), device.type == "cuda"):
            pixels_B3SS = normalise(batch.images_BSS3.to(device, non_blocking=True), encoder.mean, encoder.deviation)
            with autocast(device, config.precision):
                features_BC = module(pixels_B3SS)
            parts.append(features_BC.float().cpu())
            bar.update(len(batch.samples))
    features_NC = torch.cat(parts)
    if not bool(features_NC.isfinite().all()):
        raise ValueError(f"{encoder.source} gives features of {images.name} that are no numbers; try precision fp32")
    return features_NC


def loading_workers(asked: int | None, device: torch.device) -> int:
    """Processes that open images: beside a GPU the cores have nothing better to do."""
    if asked is not None:
        return asked
    return min(16, os.cpu_count() or 1) if device.type == "cuda" else 0


def check_features(config: FeatureConfig) -> None:
    """Refuse settings that cannot work."""
    if config.batch < 1:
        raise ValueError(f"features.batch must be at least 1, got {config.batch}")
    if config.workers is not None and config.workers < 0:
        raise ValueError(f"features.workers must be at least 0, got {config.workers}")
    if config.torch_device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("features.device is cuda, but torch finds no GPU here")
