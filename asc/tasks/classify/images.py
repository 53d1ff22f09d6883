"""Labelled images to judge features on: a folder of them, or the embedded scenes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

from asc.data.images import normalise
from asc.data.scenes import CLASSES, Scene, SceneConfig

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
    judged = next((folder / name for name in _TEST_NAMES if (folder / name).is_dir()), None)
    if not (folder / "train").is_dir() or judged is None:
        raise ValueError(f"{folder} has not the layout train/<class>/ and val/<class>/ (or test/<class>/) of images")
    classes, number_of = find_classes(folder / "train")
    unknown = sorted(set(find_classes(judged)[0]) - set(classes))
    if unknown:
        raise ValueError(f"{judged} has classes that {folder / 'train'} does not know: {', '.join(unknown[:4])}")
    parts = [_images(part, number_of, size, most, seed) for part, most in ((folder / "train", train), (judged, test))]
    return Split(parts[0], parts[1], classes)


def _images(folder: Path, number_of: dict[str, int], size: int, most: int | None, seed: int) -> Labelled:
    present = {name: number for name, number in number_of.items() if (folder / name).is_dir()}
    files = make_dataset(str(folder), present, extensions=IMG_EXTENSIONS, allow_empty=True)
    if not files:
        raise ValueError(f"{folder} holds no images in class folders")
    if most is not None and len(files) > most:
        chosen = np.random.default_rng(seed).permutation(len(files))[:most]
        files = [files[index] for index in sorted(chosen)]
    images_BHW3 = np.stack([_open(file, size) for file, _ in files])
    return Labelled(normalise(images_BHW3), torch.tensor([label for _, label in files]))


def _open(file: str, size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    try:
        with Image.open(file) as opened:
            image = opened.convert("RGB")
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            box = (left, top, left + side, top + side)
            return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, box=box))
    except OSError as error:
        raise ValueError(f"{file}: not an image that can be read ({error})") from error
