"""Images with metres for every pixel: NYU Depth v2 as its official file or as a folder, or the embedded scenes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from asc.data.scenes import Frame
from asc.tasks.images import (
    Pair,
    Pairs,
    PairsConfig,
    SceneFrames,
    Truth,
    checked_pair,
    file_key,
    image_files,
    read_image,
)

SCENES, MAT_FILE, SPLITS_FILE = "scenes", "nyu_depth_v2_labeled.mat", "splits.mat"
# What a truth is where a crop reaches beyond its image; unknown depth inside of it is 0.
OUTSIDE = -1.0


@dataclass(frozen=True)
class DepthDataConfig(PairsConfig):
    """Which images."""

    raw: bool = False
    """Whether the official file's measured depth is taken, with its holes, and not the filled-in one."""


@dataclass(frozen=True)
class DepthData:
    """What to learn from and what to be judged by."""

    train: Pairs
    val: Pairs


def open_depth_data(data: str, config: DepthDataConfig) -> DepthData:
    """``scenes``, the official file (or its folder, with splits.mat), or a folder ``{train,test}/{rgb,depth}/``."""
    if data == SCENES:
        return DepthData(*config.open_scenes(SceneDepth))
    path = Path(data)
    file = path if path.suffix == ".mat" else path / MAT_FILE
    if file.is_file():
        parts = read_splits(file.with_name(SPLITS_FILE))
        train, test = (MatDepth(file, name, parts[name], config.raw) for name in ("train", "test"))
        train.numbers = train.numbers[: config.most]
        return DepthData(train, test)
    if not (path / "train" / "rgb").is_dir():
        raise ValueError(f"{path} is no NYU Depth v2: it has neither {MAT_FILE} nor train/rgb/ and train/depth/")
    return DepthData(FolderDepth(path / "train", config.most), FolderDepth(path / "test"))


def checked_depth(depth_HW: Truth, source: str | Path) -> Truth:
    """Metres as fp32, 0 where they are unknown; an image without any is refused."""
    known_HW = np.isfinite(depth_HW) & (depth_HW > 0)
    if not known_HW.any():
        raise ValueError(f"{source} holds no valid depth at all; leave the image out")
    return np.where(known_HW, depth_HW, 0.0).astype(np.float32)


class _Metric(Pairs):
    padding = OUTSIDE

    def zoomed(self, truth_SR: Truth, factor: float) -> Truth:
        """What looks twice as large is half as far away."""
        inside_SR = truth_SR >= 0
        nearer_SR: Truth = np.where(inside_SR, truth_SR / np.float32(factor), truth_SR)
        return nearer_SR


class FolderDepth(_Metric):
    """Images ``rgb/NAME.*`` with 16-bit files ``depth/NAME.png`` in millimetres."""

    def __init__(self, folder: Path, most: int | None = None) -> None:
        self.name = str(folder)
        self.folder = folder
        self.files = image_files(folder / "rgb")[:most]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> Pair:
        """One image with its depth."""
        image, depth = self.files[index], self._depth(index)
        metres_HW = checked_depth(read_millimetres(depth) / 1000, depth)
        return checked_pair(read_image(image, as_stored=True), metres_HW, image, depth)

    def source(self, index: int) -> str:
        """The image's file."""
        return str(self.files[index])

    def key(self, index: int) -> str:
        """Both files."""
        return file_key(self.files[index], self._depth(index))

    def _depth(self, index: int) -> Path:
        return self.folder / "depth" / f"{self.files[index].stem}.png"


def read_millimetres(file: Path) -> Truth:
    """The numbers (H, W) of a 16-bit file."""
    try:
        with Image.open(file) as opened:
            if not opened.mode.startswith("I"):
                raise ValueError(f"{file} is no 16-bit depth in millimetres: its mode is {opened.mode}")
            return np.array(opened).astype(np.float32)
    except OSError as error:
        raise ValueError(f"{file}: not a depth file that can be read ({error})") from error


class MatDepth(_Metric):
    """Images of the official file of NYU Depth v2, by their numbers counted from 1."""

    def __init__(self, file: Path, part: str, numbers: list[int], raw: bool = False) -> None:
        self.name = f"{file.name} {part}"
        self.file = file
        self.numbers = numbers
        self.field = "rawDepths" if raw else "depths"
        self._opened: tuple[int, Any] | None = None
        count = len(self._open()["images"])
        if not numbers or not 1 <= min(numbers) <= max(numbers) <= count:
            raise ValueError(f"{file.with_name(SPLITS_FILE)} does not fit {file}, which holds the images 1 to {count}")

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_opened": None}

    def _open(self) -> Any:
        # Every process opens its own: a file that was open before a fork must not be read by two.
        if self._opened is None or self._opened[0] != os.getpid():
            try:
                opened: Any = import_module("h5py").File(self.file)
                _ = opened["images"], opened[self.field]
            except ModuleNotFoundError as error:
                raise ValueError(f"reading {self.file} needs h5py: pip install h5py") from error
            except (OSError, KeyError) as error:
                raise ValueError(f"{self.file} is not the labelled file of NYU Depth v2: {error}") from error
            self._opened = os.getpid(), opened
        return self._opened[1]

    def __len__(self) -> int:
        return len(self.numbers)

    def read(self, index: int) -> Pair:
        """One image with its depth; MATLAB counts the columns first."""
        file, place = self._open(), self.numbers[index] - 1
        image_HW3 = np.ascontiguousarray(file["images"][place].transpose(2, 1, 0))
        depth_HW = checked_depth(file[self.field][place].T, self.source(index))
        return checked_pair(image_HW3, depth_HW, self.source(index), self.source(index))

    def source(self, index: int) -> str:
        """The file, and the image's number."""
        return f"{self.file} image {self.numbers[index]}"

    def key(self, index: int) -> str:
        """The file, what is read of it, and the number."""
        return f"{file_key(self.file)} {self.field} {self.numbers[index]}"


def read_splits(file: Path) -> dict[str, list[int]]:
    """The official numbers of the images to learn from and to be judged by."""
    from scipy.io import loadmat

    if not file.is_file():
        raise ValueError(f"there is no {file}; it comes with the toolbox of NYU Depth v2 and must lie beside the data")
    try:
        found = loadmat(file)
        return {part: [int(x) for x in found[f"{part}Ndxs"].ravel()] for part in ("train", "test")}
    except (ValueError, KeyError, TypeError, NotImplementedError) as error:
        raise ValueError(f"{file} does not name the parts of NYU Depth v2: {error}") from error


class SceneDepth(SceneFrames, _Metric):
    """Scenes with the exact depth of every pixel: 2 to 4 metres for the main object, up to 25 for the background."""

    def truth_of(self, frame: Frame) -> Truth:
        """Metres."""
        return frame.depth_HW
