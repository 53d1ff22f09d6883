"""The commands: train a detector, judge one, let one look at a folder of images."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import torchvision
from torchvision.datasets.folder import IMG_EXTENSIONS
from tqdm import tqdm

from asc.files import write_whole
from asc.layer import SuperpixelWarning
from asc.precision import Precision
from asc.report.page import png_bytes
from asc.report.words import plural, versions
from asc.run_folder import RunFolder
from asc.tasks.detect.data import DataConfig, open_sets, open_test
from asc.tasks.detect.metrics import Detections, Scores
from asc.tasks.detect.pictures import draw_found, write_page
from asc.tasks.detect.task import (
    DetectConfig,
    Detector,
    DetectTask,
    HeadName,
    check_classes,
    judge,
    load_detector,
    save_detector,
)
from asc.tasks.devices import accelerator_device
from asc.tasks.encoders import open_encoder
from asc.tasks.evaluations import found_result, plain_settings
from asc.tasks.images import Readable, unread_note
from asc.train import Trainer, check_training, make_fabric
from asc.vit import AscViT

DETECTOR, RESULT_FILE, PAGE_FILE = "detector", "result.json", "index.html"
BOXES_FILE, SKIPPED_FILE = "boxes.json", "skipped.txt"


# --- asc train detect -------------------------------------------------------------------------------------


def train(config: DetectConfig) -> Path:
    """Train a detector, or go on with a run that was interrupted; judge it and write a page.

    Returns:
        The folder with the detector, for ``load_detector``.
    """
    _check(config)
    fabric = make_fabric(config.train, config.machine)
    folder = RunFolder(config.out, writes=fabric.is_global_zero)
    try:
        folder.begin(asdict(config), free=("machine", "out"))
        train_set, test_set = open_sets(config.data, config.sets)
        task = DetectTask(config, _encoder(config), train_set, test_set)
        with warnings.catch_warnings():
            # The monitor says the same with the step beside it, and the log keeps it.
            warnings.simplefilter("ignore", SuperpixelWarning)
            Trainer(task, config.train, config.machine, folder, fabric).run()
            if fabric.is_global_zero:
                _finish(task, folder)
        fabric.barrier()
    finally:
        folder.close()
    return config.out / DETECTOR


def _check(config: DetectConfig) -> None:
    check_training(config.train, config.machine)
    if config.head not in get_args(HeadName):
        raise ValueError(f"unknown head {config.head!r}; choose from {', '.join(get_args(HeadName))}")
    for name, least in (("every", 0), ("batch", 1), ("pictures", 0), ("calibration", 0)):
        if getattr(config.watch, name) < least:
            raise ValueError(f"watch.{name} must be at least {least}, got {getattr(config.watch, name)}")
    if config.watch.judged is not None and config.watch.judged < 1:
        raise ValueError(f"watch.judged must be at least 1, or None for all, got {config.watch.judged}")
    if not config.encoder_lr >= 0:
        raise ValueError(f"encoder_lr must be at least 0, got {config.encoder_lr}")


def _encoder(config: DetectConfig) -> AscViT:
    encoder = open_encoder(config.encoder, config.augment.size, "augment.size").vit
    if encoder is None:
        raise ValueError(
            f"encoder {config.encoder!r} gives no tokens to detect objects in: give one of our own, or a weights file "
            f"of a plain Vision Transformer"
        )
    return encoder


def _finish(task: DetectTask, folder: RunFolder) -> None:
    judged = task.final
    detector = task.detector.eval()
    save_detector(detector, folder.path / DETECTOR)
    record = {"settings": asdict(task.config)} | result(detector, judged.scores, len(judged.found))
    _write_json(folder.path / RESULT_FILE, record)
    title = f"Detection with {task.config.head}: {task.config.encoder} on {task.config.data}"
    write_page(folder.path / PAGE_FILE, title, detector, task.test, judged, task.config.watch.pictures)
    tqdm.write(f"AP50 {judged.scores.area:.1%}; the detector is {folder.path / DETECTOR}, pictures in {PAGE_FILE}")


def result(detector: Detector, scores: Scores, images: int) -> dict[str, Any]:
    """What there is to say of a detector's scores, for a JSON file."""
    per_class = zip(detector.classes, scores.area_C.tolist(), scores.eleven_C.tolist(), strict=True)
    return {
        "ap50": _number(scores.area),
        "ap50_eleven": _number(scores.eleven),
        "classes": {name: {"ap50": _number(area), "ap50_eleven": _number(ten)} for name, area, ten in per_class},
        "objects": dict(zip(detector.classes, scores.objects_C.tolist(), strict=True)),
        "images": images,
        "parameters": {
            "encoder": sum(parameter.numel() for parameter in detector.encoder.parameters()),
            "head": sum(parameter.numel() for parameter in detector.head.parameters()),
        },
        "versions": versions() | {"torchvision": torchvision.__version__},
    }


def _number(value: float) -> float | None:
    # JSON knows no NaN: a class of which there is nothing to find has no score.
    return None if value != value else value


def _write_json(file: Path, content: Any) -> None:
    write_whole(file, json.dumps(content, indent=2, default=str).encode() + b"\n")


# --- asc eval detect --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DetectEvaluation:
    """Judge a detector by average precision at an overlap of 0.5, and write a page."""

    model: Path
    """Folder of a run of ``asc train detect``, or its folder ``detector``."""
    out: Path
    """Folder for the numbers (result.json) and the page (index.html)."""
    data: str = "scenes"
    """The folder VOCdevkit of PASCAL VOC, or ``scenes``."""
    sets: DataConfig = field(default_factory=DataConfig)
    """Which of its images: ``test``, or the settings of the scenes."""
    batch: int = 8
    """Images that are looked at together."""
    pictures: int = 8
    """Images that the page shows; as many of the worst ones come on top."""
    precision: Precision = "auto"
    """``auto``: bf16-mixed on a GPU that computes with bf16, else 32-true."""
    accelerator: str = "auto"
    """``auto``, ``cpu`` or ``cuda``."""


def evaluate(settings: DetectEvaluation) -> dict[str, Any]:
    """Judge a detector; returns what is written to ``result.json``."""
    _check_batch(settings.batch)
    if settings.pictures < 0:
        raise ValueError(f"pictures must be at least 0, got {settings.pictures}")
    file, page = settings.out / RESULT_FILE, settings.out / PAGE_FILE
    detector = load_detector(settings.model).to(accelerator_device(settings.accelerator))
    test = open_test(settings.data, settings.sets)
    check_classes(detector, test)
    content = {"model": {"identity": detector.identity}, "data": {"fingerprint": test.fingerprint()}}
    contents = {
        "model": ("model.identity", content["model"]["identity"]),
        "data": ("data.fingerprint", content["data"]["fingerprint"]),
    }
    found = found_result(file, page, settings, contents)
    if found is not None:
        print(f"{_told(found)}; was there already, more in {page}")
        return found
    judged = judge(detector, test, settings.batch, settings.precision)
    record = {"settings": plain_settings(settings)} | content | result(detector, judged.scores, len(judged.found))
    # Before the pictures are drawn: whatever happens to them, the scores are kept.
    _write_json(file, record)
    title = f"Detection by {settings.model} on {settings.data}"
    write_page(page, title, detector, test, judged, settings.pictures)
    print(f"{_told(record)}; {page}")
    return record


def _told(record: Mapping[str, Any]) -> str:
    area, eleven = ("–" if record[name] is None else f"{record[name]:.1%}" for name in ("ap50", "ap50_eleven"))
    return f"AP50 {area} (area), {eleven} (11 points)"


def _check_batch(batch: int) -> None:
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")


# --- asc predict detect -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class DetectPrediction:
    """Let a detector look at a folder of images: a picture with boxes for each, and all boxes in boxes.json."""

    model: Path
    """Folder of a run of ``asc train detect``, or its folder ``detector``."""
    images: Path
    """Folder of images, or one image."""
    out: Path
    """Folder for the pictures and the boxes."""
    least_score: float = 0.5
    """Detections below this score are left out."""
    batch: int = 8
    """Images that are looked at together."""
    precision: Precision = "auto"
    """``auto``: bf16-mixed on a GPU that computes with bf16, else 32-true."""
    accelerator: str = "auto"
    """``auto``, ``cpu`` or ``cuda``."""


def predict(settings: DetectPrediction) -> dict[str, Any]:
    """Find objects; returns what is written to ``boxes.json``: for each image its size and its boxes.

    A box is x0, y0, x1, y1 in pixels of the image, counted from 0, the last pixel's border included. Images that cannot
    be read are passed over and named in the end.
    """
    _check_batch(settings.batch)
    files = image_files(settings.images)
    detector = load_detector(settings.model).to(accelerator_device(settings.accelerator))
    record: dict[str, Any] = {}
    readable = Readable(files, 2 * settings.batch)
    coming = iter(tqdm(readable, total=len(files), unit="image", disable=None))
    while chosen := list(islice(coming, settings.batch)):
        images = [image_HW3 for _, image_HW3 in chosen]
        for (number, image_HW3), found in zip(chosen, detector.find(images, settings.precision), strict=True):
            name = _name(readable.read[number], settings.images)
            drawn_HW3 = draw_found(image_HW3, found, detector.classes, settings.least_score)
            write_whole(settings.out / f"{name}.png", png_bytes(drawn_HW3))
            objects = _as_record(found, detector, settings.least_score)
            record[name] = {"height": image_HW3.shape[0], "width": image_HW3.shape[1], "objects": objects}
    _write_json(settings.out / BOXES_FILE, record)
    readable.keep(settings.out / SKIPPED_FILE)
    count = sum(len(entry["objects"]) for entry in record.values())
    images_read = plural(len(readable.read), "image")
    print(f"{plural(count, 'object')} in {images_read}; pictures and {BOXES_FILE} are in {settings.out}")
    readable.tell(unread_note(_others(settings.images, files)))
    return record


def _name(file: Path, images: Path) -> str:
    return file.relative_to(images).as_posix() if images.is_dir() else file.name


def _others(folder: Path, files: Sequence[Path]) -> list[str]:
    known = set(files)
    others = (file for file in folder.rglob("*") if file.is_file() and file not in known)
    return sorted(_name(file, folder) for file in others)


def image_files(path: Path) -> list[Path]:
    """All images of a folder and the folders in it, or the one that is named."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"there is no folder or image {path}")
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMG_EXTENSIONS)
    if not files:
        raise ValueError(f"{path} holds no images ({', '.join(IMG_EXTENSIONS)})")
    return files


def _as_record(found: Detections, detector: Detector, least: float) -> list[dict[str, Any]]:
    sure = found.only(found.scores_K >= least)
    rows = zip(sure.boxes_K4.tolist(), sure.scores_K.tolist(), sure.classes_K.tolist(), strict=True)
    return [
        {"class": detector.classes[number], "score": round(score, 5), "box": [round(side, 2) for side in box]}
        for box, score, number in rows
    ]
