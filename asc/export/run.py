"""The command ``asc export``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from asc.data.images import normalise
from asc.data.scenes import Scene, SceneConfig
from asc.export.onnx import check_onnx, notes_of, write_onnx
from asc.export.timm import difference_to_timm, write_timm
from asc.files import write_whole
from asc.report.words import versions
from asc.tasks.encoders import Encoder, open_encoder
from asc.vit import AscViT
from asc.weights import without_superpixels

Format = Literal["timm", "onnx"]
ONNX_FILE, RECORD_FILE, README_FILE = "encoder.onnx", "export.json", "README.md"
# Drawn scenes that both networks must see alike.
_COMPARED = 8
_MOST_DIFFERENCE = 1e-3


@dataclass(frozen=True)
class ExportSettings:
    """Write an encoder for other programs, and check that it is still the same there.

    ``timm``: a folder for ``timm.create_model("local-dir:OUT", pretrained=True)`` or Hugging Face's hub; superpixels
    are left out, since timm has none. ``onnx``: a file with superpixels, in regular tensors: the same results, but not
    the speed.
    """

    encoder: str
    """A run, a folder of ``asc.save``, or what else ``asc eval --checkpoint`` takes; a network of ours."""
    out: Path
    """Folder to write to."""
    format: Format = "timm"
    """``timm`` or ``onnx``."""
    image_size: int | None = None
    """Side of the images in pixels, for ``onnx``, which knows one size; None: the encoder's."""


def export(settings: ExportSettings) -> dict[str, Any]:
    """Run the command; returns the record."""
    writers: dict[str, Callable[[ExportSettings, Encoder, AscViT], dict[str, Any]]] = {"timm": _timm, "onnx": _onnx}
    if settings.format not in writers:
        raise ValueError(f"format must be one of {', '.join(writers)}, not {settings.format!r}")
    if settings.format == "timm" and settings.image_size is not None:
        raise ValueError("image_size is for onnx; timm resizes the position embedding itself: img_size=...")
    encoder = open_encoder(settings.encoder, settings.image_size)
    if encoder.vit is None:
        raise ValueError(f"encoder: {settings.encoder} is no network of ours, and needs no export")
    _check_free(settings, encoder)
    record = {
        "format": settings.format,
        "encoder": settings.encoder,
        "identity": encoder.identity,
        "description": encoder.description,
        "mean": encoder.mean,
        "deviation": encoder.deviation,
        "versions": versions(),
        "compared": False,
    }
    # First, so that the same command goes on where it was killed.
    _write_record(settings.out, record)
    record |= writers[settings.format](settings, encoder, encoder.vit.cpu().eval())
    _write_record(settings.out, record)
    return record


def _write_record(folder: Path, record: dict[str, Any]) -> None:
    write_whole(folder / RECORD_FILE, json.dumps(record, indent=2, default=str).encode() + b"\n")


def _check_free(settings: ExportSettings, encoder: Encoder) -> None:
    """Nothing is written over but an earlier export of the same encoder in the same format."""
    if not settings.out.exists() or not any(settings.out.iterdir()):
        return
    try:
        there = json.loads((settings.out / RECORD_FILE).read_text())
        what = f"the export of {there['encoder']} as {there['format']}"
        same = (there["identity"], there["format"]) == (encoder.identity, settings.format)
    except (OSError, ValueError, KeyError, TypeError):
        what, same = "other files", False
    if not same:
        raise ValueError(f"out: {settings.out} holds {what}; give a folder of its own")


def _timm(settings: ExportSettings, encoder: Encoder, model: AscViT) -> dict[str, Any]:
    write_timm(model, settings.out, encoder.mean, encoder.deviation)
    images_B3HW = _scenes(encoder, model.config.image_hw)
    difference = difference_to_timm(without_superpixels(model), settings.out, images_B3HW)
    if not difference <= _MOST_DIFFERENCE:
        raise ValueError(f"timm's network gives other features, by up to {difference:.2g}: do not use {settings.out}")
    left_out = model.config.superpixels is not None
    how = f'timm.create_model("local-dir:{settings.out}", pretrained=True)'
    print(f"{settings.out}: {how}; features differ by at most {difference:.1g} from ours")
    if left_out:
        print("superpixels are left out: it is the plain network with these weights, whose features are others")
    write_whole(settings.out / README_FILE, _timm_readme(encoder, left_out).encode())
    superpixels = "left out" if left_out else "none"
    return {"superpixels": superpixels, "compared": True, "largest_difference": difference}


def _timm_readme(encoder: Encoder, left_out: bool) -> str:
    without = "It was trained with superpixels (ASC). timm has none: every patch stays a token, features are others.\n"
    return (
        f"---\nlibrary_name: timm\ntags:\n- image-feature-extraction\n- timm\n---\n\n# {encoder.name}\n\n"
        f"{encoder.description}.\n{without if left_out else ''}\n"
        'Read it with `timm.create_model("local-dir:THIS_FOLDER", pretrained=True)`, or, once it is on the hub, with '
        '`timm.create_model("hf-hub:NAME", pretrained=True)`.\n'
        f"Pixels are normalised with mean {encoder.mean} and deviation {encoder.deviation}.\n"
    )


def _onnx(settings: ExportSettings, encoder: Encoder, model: AscViT) -> dict[str, Any]:
    side = settings.image_size
    image_hw = model.config.image_hw if side is None else (side, side)
    file = settings.out / ONNX_FILE
    print(f"writing {file}, which takes up to a minute", flush=True)
    write_onnx(model, file, image_hw, notes_of(encoder.mean, encoder.deviation, encoder.description))
    found = check_onnx(model, file, _scenes(encoder, image_hw))
    if found is None:
        print(f"{file}: not compared, since ONNX Runtime is not installed: pip install onnxruntime")
        return {"image_hw": image_hw}
    if 2 * found.images_that_differ > found.images:
        raise ValueError(
            f"ONNX Runtime gives other features for {found.images_that_differ} of {found.images} images, by up to "
            f"{found.largest_difference:.2g}: do not use {file}"
        )
    print(
        f"{file}: of {found.images} images {found.images_that_differ} differ by more than rounding, "
        f"{found.patches_elsewhere} patches lie in another superpixel (ONNX Runtime)"
    )
    return {"image_hw": image_hw, "compared": True, **found._asdict()}


def _scenes(encoder: Encoder, image_hw: tuple[int, int]) -> Tensor:
    """Drawn scenes of the size that is wanted, normalised as the encoder wants it."""
    side = max(16, *image_hw)
    pixels = np.stack([Scene(SceneConfig(size=side), number).frame(0).image_HW3 for number in range(_COMPARED)])
    return normalise(pixels[:, : image_hw[0], : image_hw[1]], encoder.mean, encoder.deviation)
