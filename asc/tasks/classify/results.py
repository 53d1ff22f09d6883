"""One file for each result: what was measured, of what, with which settings."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch

from asc.files import write_whole
from asc.report.words import versions

Protocol = Literal["knn", "linear", "finetune"]
KIND = "asc classification result"


@dataclass(frozen=True)
class Result:
    """A measurement of one encoder on one dataset by one protocol with one seed."""

    protocol: Protocol
    """``knn``, ``linear`` or ``finetune``."""
    recipe: str
    """How exactly; see ``asc.recipes.classify``."""
    dataset: str
    """Name of the dataset."""
    metric: str
    """What the dataset is judged by: ``top1``, ``mean_per_class`` or ``map11``."""
    seed: int
    """Start of all random draws."""
    encoder: dict[str, Any]
    """Name, source, identity (digest of the weights), description, shape."""
    data: dict[str, Any]
    """Fingerprints and numbers of images of the parts, notes on the copy, overlap with pre-training."""
    settings: dict[str, Any]
    """All settings."""
    chosen: dict[str, Any]
    """What was chosen on the validation images: weight decay or epoch."""
    val: dict[str, float]
    """Metrics on the validation images."""
    test: dict[str, float]
    """Metrics on the test images, which nothing was chosen by."""
    seconds: float
    """Time it took, cached features not counted."""
    device: str
    """What it was computed on."""
    versions: dict[str, str] = field(default_factory=versions)
    """Versions of what it was computed with."""
    kind: str = KIND
    """Tells these files from others."""

    @property
    def headline(self) -> dict[str, float]:
        """The dataset's metric on the test images; for kNN by the number of neighbours."""
        return {name: value for name, value in self.test.items() if name.partition("@")[0] == self.metric}

    @property
    def name(self) -> str:
        """Name of the file."""
        return result_name(self.encoder["name"], self.encoder["identity"], self.dataset, self.recipe, self.seed)


def result_name(encoder: str, identity: str, dataset: str, recipe: str, seed: int) -> str:
    """The name that a result's files begin with."""
    parts = (f"{encoder}-{identity[:6]}", dataset, recipe, f"seed{seed}")
    return "_".join("".join(letter if letter.isalnum() or letter in "-." else "-" for letter in part) for part in parts)


def device_name(device: torch.device) -> str:
    """A device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU" if device.type == "cpu" else device.type


def write_result(result: Result, folder: Path) -> Path:
    """Write a result to a folder."""
    file = folder / f"{result.name}.json"
    write_whole(file, json.dumps(asdict(result), indent=2, default=str).encode() + b"\n")
    return file


def read_result(file: Path) -> Result:
    """The result in a file."""
    try:
        record = json.loads(file.read_text())
        if not isinstance(record, dict) or record.get("kind") != KIND:
            raise ValueError("it is something else")
        known = {entry.name for entry in fields(Result)}
        if unknown := sorted(set(record) - known):
            raise ValueError(f"it has {', '.join(unknown)}, which this version does not know")
        return Result(**record)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{file} is no result of asc eval: {error}") from error


def read_results(places: Iterable[Path]) -> list[Result]:
    """Results in files and below folders; in folders, files of other kinds are passed over."""
    results: dict[Path, Result] = {}
    for place in places:
        if place.is_dir():
            for file in sorted(place.rglob("*.json")):
                if _is_result(file):
                    results[file.resolve()] = read_result(file)
        else:
            results[place.resolve()] = read_result(place)
    if not results:
        raise ValueError(f"there is no result in {', '.join(map(str, places)) or 'nothing'}; make some with asc eval")
    return list(results.values())


def _is_result(file: Path) -> bool:
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError):
        print(f"note: {file} cannot be read as JSON and is left out")
        return False
    return isinstance(record, dict) and record.get("kind") == KIND


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they look after a way through a file."""
    settings_there: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return settings_there
