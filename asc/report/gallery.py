"""Pictures to show superpixels on: frames of the embedded scenes, photographs that come with scikit-image, and one's
own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from PIL import Image
from torch import Tensor

from asc.data import CLASSES, Scene, SceneConfig, normalise
from asc.data.images import DEVIATION, MEAN
from asc.report.pictures import Pixels
from asc.tasks.files import open_rgb
from asc.tasks.images import image_files

Photograph = Literal["astronaut", "chelsea", "coffee", "rocket"]


@dataclass(frozen=True)
class Picture:
    """An image to show."""

    name: str
    """What the page calls it."""
    image_HW3: Pixels
    """Its pixels, in a square."""
    is_scene: bool
    """Whether our own code drew it; else it is a photograph."""


@dataclass(frozen=True)
class Colours:
    """What a network's pixels are normalised by."""

    mean: tuple[float, float, float] = MEAN
    """Of red, green and blue."""
    deviation: tuple[float, float, float] = DEVIATION
    """Standard deviation, likewise."""


IMAGENET = Colours()


def check_photographs(names: Sequence[str]) -> None:
    """Raises a ValueError if there is no such photograph."""
    if unknown := sorted(set(names) - set(get_args(Photograph))):
        known = ", ".join(get_args(Photograph))
        raise ValueError(f"unknown photographs {', '.join(unknown)}; choose from {known}")


def open_photographs(names: Sequence[str]) -> dict[str, Image.Image]:
    """Those of scikit-image's photographs that are on this computer; a line is printed for each other one."""
    # Read from the package itself: skimage.data would try to fetch what is missing.
    folder = files("skimage.data")
    found: dict[str, Image.Image] = {}
    for name in names:
        for file in (folder / f"{name}.png", folder / f"{name}.jpg"):
            if file.is_file():
                with file.open("rb") as stream:
                    found[name] = Image.open(stream).convert("RGB")
        if name not in found:
            print(f"skipped the photograph {name}: this scikit-image does not bring it along")
    return found


def open_folder(folder: Path, most: int) -> dict[str, Image.Image]:
    """The first images of a folder by name; a line is printed if there are more."""
    found = image_files(folder)
    if len(found) > most:
        print(f"shown: the first {most} of {len(found)} images in {folder}; more with --most-images")
    return {file.name: open_rgb(file) for file in found[:most]}


def photograph_pictures(photographs: dict[str, Image.Image], size: int) -> list[Picture]:
    """The largest central square of every photograph, ``size`` pixels wide."""
    return [Picture(name, square(photo, size), False) for name, photo in photographs.items()]


def scene_pictures(config: SceneConfig, indices: Sequence[int]) -> list[Picture]:
    """The middle frame of every scene."""
    return [_scene_picture(Scene(config, index)) for index in indices]


def batch_of(pictures: Sequence[Picture], colours: Colours = IMAGENET) -> Tensor:
    """The pictures (B, 3, H, W) as a network wants them."""
    return normalise(np.stack([picture.image_HW3 for picture in pictures]), colours.mean, colours.deviation)


def _scene_picture(scene: Scene) -> Picture:
    image_HW3 = scene.frame(scene.config.frames // 2).image_HW3
    return Picture(f"scene {scene.index} ({CLASSES[scene.label]})", image_HW3, True)


def square(photo: Image.Image, size: int) -> Pixels:
    """The largest central square of a photograph, ``size`` pixels wide."""
    side = min(photo.size)
    left, top = (photo.width - side) // 2, (photo.height - side) // 2
    cropped = photo.crop((left, top, left + side, top + side))
    return np.asarray(cropped.resize((size, size), Image.Resampling.LANCZOS))
