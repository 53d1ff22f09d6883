"""Labelled images to judge features on: a folder of them, or the embedded scenes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from asc.data.images import normalise
from asc.data.scenes import CLASSES, Scene, SceneConfig
from asc.tasks.classify.datasets.folders import TRAIN, read_parts
from asc.tasks.classify.datasets.parts import ImageSet

# The first of these folders that is there holds the images to be recognised.
_TEST_NAMES = ("val", "test", "validation")


class Labelled(NamedTuple):
    """Images with their classes."""

    images_B3HW: Tensor
    """Normalised fp32 images."""
    labels_B: Tensor
    """Their classes (int64)."""


class Split(NamedTuple):
    """Images to learn from and images to be recognised."""

    train: Labelled
    test: Labelled
    classes: list[str]


def scene_split(config: SceneConfig, train: int, test: int) -> Split:
    """Frames of scenes; those to be recognised have textures and hues that the others never show."""
    parts = [_scenes(replace(config, split="train"), train), _scenes(replace(config, split="test"), test)]
    return Split(parts[0], parts[1], list(CLASSES))


def _scenes(config: SceneConfig, count: int) -> Labelled:
    scenes = [Scene(config, index) for index in range(count)]
    images_BHW3 = np.stack([scene.frame(config.frames // 2).image_HW3 for scene in scenes])
    return Labelled(normalise(images_BHW3), torch.tensor([scene.label for scene in scenes]))


def folder_split(
    folder: str | Path, size: int, train: int | None = None, test: int | None = None, seed: int = 0
) -> Split:
    """Images in the usual layout ``train/<class>/*`` and ``val/<class>/*`` (or ``test``).

    Args:
        folder: Where they lie.
        size: Side of the images in pixels; shorter side resized, centre cut out.
        train: Most images to learn from, a random choice; None: all.
        test: Most images to be recognised, likewise.
        seed: Start of that choice.
    """
    folder = Path(folder)
    judged = next((name for name in _TEST_NAMES if (folder / name).is_dir()), None)
    if not (folder / TRAIN).is_dir() or judged is None:
        raise ValueError(f"{folder} has not the layout train/<class>/ and val/<class>/ (or test/<class>/) of images")
    parts = read_parts(folder.name, folder, None, judged)
    return Split(_images(parts.train, size, train, seed), _images(parts.test, size, test, seed), parts.train.classes)


def _images(part: ImageSet, size: int, most: int | None, seed: int) -> Labelled:
    chosen = np.arange(len(part))
    if most is not None and len(part) > most:
        chosen = np.sort(np.random.default_rng(seed).permutation(len(part))[:most])
    images_BHW3 = np.stack([_middle(part.image(int(index)), size) for index in chosen])
    return Labelled(normalise(images_BHW3), part.labels[torch.from_numpy(chosen)])


def _middle(image: Image.Image, size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    box = (left, top, left + side, top + side)
    return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, box=box))
