"""An encoder as an ONNX file, superpixels included: for ONNX Runtime, TensorRT and the like."""

from __future__ import annotations

import importlib.util
import io
import json
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asc.export.regular import RegularEncoder
from asc.files import write_whole
from asc.vit import AscViT

INPUT, FEATURES, SUPERPIXELS = "images", "features", "superpixels"
_NEEDED = ("onnx", "onnxscript")


class OnnxCheck(NamedTuple):
    """How an ONNX file compares with the encoder that it was made of."""

    largest_difference: float
    """Of a feature."""
    images_that_differ: int
    """Images with a feature that differs by more than rounding does."""
    patches_elsewhere: int
    """Patches that lie in another superpixel: rounding can decide about a pair whose similarity is close to θ."""
    images: int
    """Images that were compared."""


class _FeaturesAlone(nn.Module):
    def __init__(self, encoder: RegularEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, images_B3HW: Tensor) -> Tensor:
        features_BC: Tensor = self.encoder(images_B3HW)[0]
        return features_BC


def write_onnx(model: AscViT, file: Path, image_hw: tuple[int, int], notes: Mapping[str, str]) -> None:
    """Write the file: ``images`` (any number, 3, H, W) to ``features``, and to ``superpixels`` if there are any."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"ONNX files need {' and '.join(missing)}: pip install 'adaptive-superpixel-coding[export]'")
    encoder = RegularEncoder(model, image_hw).cpu()
    names = [FEATURES] if model.config.superpixels is None else [FEATURES, SUPERPIXELS]
    module = encoder if len(names) > 1 else _FeaturesAlone(encoder)
    # Two, since a batch of one would be taken for a constant.
    example_B3HW = torch.zeros(2, 3, *image_hw)
    with TemporaryDirectory() as scratch, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own, on parts of PyTorch
        made = Path(scratch) / "encoder.onnx"
        with redirect_stdout(io.StringIO()):
            program = torch.onnx.export(
                module,
                (example_B3HW,),
                input_names=[INPUT],
                output_names=names,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
            )
        assert program is not None
        program.model.metadata_props.update(notes)
        program.save(str(made), external_data=False)
        write_whole(file, made.read_bytes())


@torch.no_grad()
def check_onnx(model: AscViT, file: Path, images_B3HW: Tensor) -> OnnxCheck | None:
    """Run the file by ONNX Runtime beside the encoder; None where that is not installed."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; it warns of constants that it has folded itself
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    found: list[Any] = session.run(None, {INPUT: images_B3HW.numpy()})
    features_BC = model(images_B3HW)
    differences_B = (torch.from_numpy(found[0]) - features_BC).abs().amax(1)
    elsewhere = 0
    if len(found) > 1:
        elsewhere = int((torch.from_numpy(found[1]) != model.superpixels(images_B3HW)[-1]).sum())
    rounding = 1e-3 * float(features_BC.abs().max())
    differ = int((differences_B > rounding).sum())
    return OnnxCheck(float(differences_B.max()), differ, elsewhere, len(images_B3HW))


def notes_of(mean: tuple[float, ...], deviation: tuple[float, ...], source: str) -> dict[str, str]:
    """What whoever opens the file must know."""
    return {"mean": json.dumps(mean), "deviation": json.dumps(deviation), "encoder": source}
