"""Any encoder by one string: our own runs, timm's models as peers, and untrained weights to compare with.

| source | what it is |
|---|---|
| ``runs/mine`` | the encoder of a finished run |
| ``runs/mine/encoder`` | a folder that ``asc.save`` wrote |
| ``weights.pth``, ``weights.safetensors`` | a file of weights of one of timm's plain Vision Transformers |
| ``timm:NAME@FILE`` | any of timm's models with the weights of a file |
| ``timm:NAME@pretrained`` | the same with weights that timm fetches |
| ``timm:NAME`` | the same, untrained |
| ``random``, ``random:plain`` | our network of the default shape, untrained, with or without superpixels |
| ``random:MODEL`` | one of ``asc.MODEL_NAMES``, untrained |
| ``random:FOLDER`` | untrained weights in the shape of a run's or folder's encoder |

Untrained weights take a seed behind an ``@``: ``random:plain@1``.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from asc.data.images import DEVIATION, MEAN, normalise
from asc.data.scenes import Scene, SceneConfig
from asc.vit import MODEL_NAMES, AscViT, VitConfig, create_model
from asc.weights import CONFIG_FILE, WEIGHTS_FILE, from_timm, load, load_state, read_state

PRETRAINED = "pretrained"
# Scenes that the thresholds of untrained superpixels are set on.
_CALIBRATION = 64
Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Encoder:
    """A network that turns images into features, and what its user must know of it."""

    source: str
    """What it was asked for by."""
    name: str
    """Short, for tables and file names."""
    module: nn.Module
    """Pooled features (B, C) of normalised images (B, 3, H, W); in evaluation mode."""
    num_features: int
    """C."""
    image_size: int
    """Side of the images it wants, in pixels."""
    mean: Triple
    """Mean colour it was trained with; pixels are normalised by it."""
    deviation: Triple
    """Standard deviation of the colours, likewise."""
    description: str
    """One line for a person."""
    config: dict[str, Any]
    """The shape, for the record."""

    @property
    def vit(self) -> AscViT | None:
        """The network itself where it is ours: dense tasks take its maps and tokens."""
        return self.module if isinstance(self.module, AscViT) else None

    @cached_property
    def identity(self) -> str:
        """Digest of weights and shape as they were when first asked for; the source does not count."""
        return weights_digest(self.module, self.config)


def weights_digest(module: nn.Module, config: Mapping[str, Any]) -> str:
    """Hex digest of weights and of the settings that say what is computed with them."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


class _Asked(NamedTuple):
    """The size of images that was asked for."""

    sides: tuple[int, ...]
    setting: str

    @property
    def image_size(self) -> int | None:
        # Square or not, the shorter side is what untrained positions are made for.
        return min(self.sides, default=None)

    def check(self, patch: int) -> None:
        """Refuse sizes that are no whole patches, and say which ones near by are."""
        wrong = list(dict.fromkeys(str(side) for side in self.sides if side % patch))
        if wrong:
            fitting = " ".join(str(max(1, side // patch) * patch) for side in self.sides)
            raise ValueError(
                f"{self.setting} {' and '.join(wrong)} is no multiple of the encoder's patch size {patch}; "
                f"give --{self.setting.replace('_', '-')} {fitting}"
            )


def open_encoder(
    source: str | Path, image_size: int | tuple[int, int] | None = None, setting: str = "image_size"
) -> Encoder:
    """The encoder that a source names; see the top of this file for what it may be.

    Args:
        source: A run, a folder, a weights file, ``timm:...`` or ``random...``.
        image_size: Side of the images it is to be used with, or height and width, which must both be whole patches;
            None: the side it was trained at.
        setting: What the user knows the size by; messages name it.
    """
    source = str(source)
    sides = () if image_size is None else image_size if isinstance(image_size, tuple) else (image_size,)
    if min(sides, default=1) < 1:
        raise ValueError(f"{setting} must be at least 1 pixel, got {min(sides)}")
    asked = _Asked(sides, setting)
    kind, _, rest = source.partition(":")
    if kind == "timm":
        return _open_timm(source, rest, asked)
    if source.partition("@")[0] == "random" or kind == "random":
        return _open_random(source, asked)
    path = Path(source)
    if path.is_file() and path.name not in (WEIGHTS_FILE, CONFIG_FILE):
        return _of_vit(source, path.stem, from_timm(path, superpixels=None), asked, "weights file")
    folder = _encoder_folder(path)
    named = folder.resolve()
    name = named.parent.name if named.name == "encoder" else named.name
    return _of_vit(source, name, load(folder), asked, "trained")


def _encoder_folder(path: Path) -> Path:
    """Where ``asc.load`` finds the encoder that a path means."""
    if path.is_file():
        path = path.parent
    if not path.is_dir():
        raise ValueError(
            f"there is no encoder {path}: give the folder of a run, an encoder folder, a weights file, "
            f"timm:NAME, timm:NAME@FILE, or random"
        )
    for folder in (path, path / "encoder"):
        if (folder / WEIGHTS_FILE).is_file():
            return folder
    if (path / "checkpoints").is_dir():
        raise ValueError(f"the run {path} has no encoder yet: it is not finished; the same command continues it")
    raise ValueError(f"{path} holds no encoder: neither {WEIGHTS_FILE} nor encoder/{WEIGHTS_FILE} is there")


def _of_vit(source: str, name: str, model: AscViT, asked: _Asked, how: str) -> Encoder:
    config = model.config
    height, width = config.image_hw
    asked.check(config.patch_size)
    image_size = asked.image_size
    if image_size is None:
        if height != width:
            raise ValueError(f"{source} was made for images of {height} x {width}; give {asked.setting} for squares")
        image_size = height
    kind = "plain ViT" if config.superpixels is None else f"superpixel ViT (budget {config.superpixels.budget:g})"
    shape = f"width {config.width}, {config.depth} blocks, patches of {config.patch_size}"
    trained_at = "" if (height, width) == (image_size, image_size) else f", made for {height} px"
    description = f"{kind}, {shape}, {image_size} px{trained_at}, {how}"
    return Encoder(
        source, name, model.eval(), model.num_features, image_size, MEAN, DEVIATION, description, asdict(config)
    )


# --- Untrained weights ------------------------------------------------------------------------------------


def _open_random(source: str, asked: _Asked) -> Encoder:
    shape, seed = _seed_of(source)
    what = shape.partition(":")[2]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AscViT(_random_config(source, what, asked))
    model.eval()
    size = asked.image_size or model.config.image_hw[0]
    if model.budget is not None:
        scenes = [Scene(SceneConfig(size=size), index) for index in range(_CALIBRATION)]
        model.calibrate(normalise(np.stack([scene.frame(0).image_HW3 for scene in scenes])))
    kind = what if what in ("", "plain", *MODEL_NAMES) else Path(what).name
    # A seed that was asked for is always said, so that a row of a table can hold all of them.
    name = "-".join(part for part in ("random", kind, str(seed) if shape != source else "") if part)
    return _of_vit(source, name, model, asked, f"untrained, seed {seed}")


def _seed_of(source: str) -> tuple[str, int]:
    shape, mark, seed = source.rpartition("@")
    if not mark:
        return source, 0
    if not seed.isdecimal():
        raise ValueError(f"{source}: behind the @ of untrained weights stands a seed such as 1, not {seed!r}")
    return shape, int(seed)


def _random_config(source: str, what: str, asked: _Asked) -> VitConfig:
    size = asked.image_size or VitConfig.image_size
    if what in ("", "plain"):
        asked.check(VitConfig.patch_size)
        config = VitConfig(image_size=size)
        return replace(config, superpixels=None) if what == "plain" else config
    if what in MODEL_NAMES:
        asked.check(int(what.rpartition("patch")[2]))
        return create_model(what, image_size=size).config
    if not Path(what).exists():
        raise ValueError(
            f"{source}: {what!r} is neither 'plain', nor a model ({', '.join(MODEL_NAMES[:3])}, …), nor a folder"
        )
    config = load(_encoder_folder(Path(what))).config
    asked.check(config.patch_size)
    return config


# --- Peers ------------------------------------------------------------------------------------------------


def _open_timm(source: str, wanted: str, asked: _Asked) -> Encoder:
    from timm.data.config import resolve_model_data_config

    name, _, weights = wanted.partition("@")
    fetch = weights == PRETRAINED
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _timm_model(source, name, fetch, asked.image_size)
    if weights and not fetch:
        load_state(model, _timm_state(model, Path(weights)), weights)
    settings = resolve_model_data_config(model)  # type: ignore[no-untyped-call]
    size = asked.image_size or int(settings["input_size"][-1])
    how = f"weights {weights}" if weights else "untrained"
    description = f"timm's {name}, {size} px, {how}"
    label = f"timm-{name}" + (f"-{Path(weights).stem}" if weights and not fetch else "" if fetch else "-untrained")
    config = {"timm": name, "image_size": size}
    mean, deviation = _triple(settings["mean"]), _triple(settings["std"])
    features = _width_of_features(source, model.eval(), size)
    return Encoder(source, label, model, features, size, mean, deviation, description, config)


def _timm_model(source: str, name: str, fetch: bool, image_size: int | None) -> nn.Module:
    import timm

    sized: dict[str, Any] = {} if image_size is None else {"img_size": image_size}
    try:
        try:
            model: nn.Module = timm.create_model(name, pretrained=fetch, num_classes=0, **sized)
        except TypeError:
            # Networks without positions take images of any size and do not know the setting.
            model = timm.create_model(name, pretrained=fetch, num_classes=0)
    except Exception as error:  # timm and the hub it fetches from raise many kinds
        raise ValueError(f"{source}: timm cannot make {name!r}: {error}; timm.list_models() names them") from error
    return model


def _timm_state(model: nn.Module, file: Path) -> dict[str, Tensor]:
    """The weights of a file as the model wants them: its own translation applied, without a classifier."""
    state = read_state(file)
    translate = getattr(importlib.import_module(type(model).__module__), "checkpoint_filter_fn", None)
    if translate is not None:
        state = translate(state, model)
    cfg: Any = model.pretrained_cfg
    heads = cfg.get("classifier") or ()
    heads = (heads,) if isinstance(heads, str) else tuple(heads)
    own = model.state_dict()
    return {
        key: value for key, value in state.items() if key in own or not key.startswith(tuple(f"{h}." for h in heads))
    }


def _triple(values: Any) -> Triple:
    first, second, third = (float(value) for value in values)
    return first, second, third


@torch.no_grad()
def _width_of_features(source: str, model: nn.Module, size: int) -> int:
    """Found by trying: what a model says of itself is not always what comes out; and the size is tested with it."""
    try:
        features = model(torch.zeros(1, 3, size, size))
    except Exception as error:
        raise ValueError(f"{source} does not take images of {size} x {size}: {error}") from error
    if not isinstance(features, Tensor) or features.ndim != 2:
        raise ValueError(f"{source} gives no pooled features (B, C)")
    return int(features.shape[1])
