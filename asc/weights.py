"""Weights in and out: our own files, and those of timm's Vision Transformers.

A saved encoder is a folder with ``encoder.safetensors`` (weights, thresholds) and ``config.json`` (shape and
settings). Nothing is ever unpickled from a file with code in it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from asc.files import write_whole
from asc.layer import SuperpixelConfig
from asc.vit import AscViT, VitConfig

WEIGHTS_FILE, CONFIG_FILE = "encoder.safetensors", "config.json"

# How timm can make tokens one feature and we cannot.
_POOLS_OF_TIMM_ALONE = ("map", "max", "avgmax", "prr")
# Parts of timm's models that classify rather than encode.
_HEADS = ("head.", "head_dist.", "attn_pool.", "head_drop.", "mask_token")


def save(model: AscViT, folder: str | Path) -> None:
    """Write a model to a folder; ``asc.load`` reads it back."""
    folder = Path(folder)
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if not isinstance(model, AscViT):
        raise ValueError(f"asc.save takes an AscViT, got {type(model).__name__}; give it the network that is wrapped")
    state = _contiguous(model.state_dict())
    write_whole(folder / WEIGHTS_FILE, lambda file: safetensors.torch.save_file(state, file))
    write_whole(folder / CONFIG_FILE, json.dumps(asdict(model.config), indent=2).encode() + b"\n")


def load(folder: str | Path) -> AscViT:
    """The model that ``asc.save`` wrote to a folder, in evaluation mode."""
    folder = Path(folder)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is no saved encoder: it has no {name}")
    model = AscViT(_read_config(folder / CONFIG_FILE))
    load_state(model, read_state(folder / WEIGHTS_FILE), str(folder / WEIGHTS_FILE))
    return model.eval()


def _read_config(file: Path) -> VitConfig:
    try:
        settings = json.loads(file.read_text())
        superpixels = settings.pop("superpixels")
        if superpixels is not None:
            if isinstance(superpixels["blocks"], list):
                superpixels["blocks"] = tuple(superpixels["blocks"])
            superpixels = SuperpixelConfig(**superpixels)
        if isinstance(settings["image_size"], list):
            settings["image_size"] = tuple(settings["image_size"])
        return VitConfig(superpixels=superpixels, **settings)
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} does not describe a model: {error}") from error


def _contiguous(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in state.items()}


def read_state(file: str | Path) -> dict[str, Tensor]:
    """The tensors of a ``.safetensors`` or PyTorch file; of training checkpoints, the model in them."""
    file = Path(file)
    if not file.is_file():
        raise ValueError(f"there is no weights file {file}")
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{file} cannot be read as weights: {error}") from error
    for key in ("state_dict", "model", "teacher"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ValueError(f"{file} holds no table of named tensors")
    return state


def load_state(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Put weights into a model; every difference is an error that names it and the ``source``."""
    expected = model.state_dict()
    problems = [f"{name} is missing" for name in expected if name not in state]
    problems += [f"{name} is not part of this model" for name in state if name not in expected]
    problems += [
        f"{name} has the shape {tuple(state[name].shape)}, this model needs {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in state and state[name].shape != tensor.shape
    ]
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ValueError(f"{source} does not fit the model: {'; '.join(problems[:4])}{more}")
    model.load_state_dict(state)


def without_superpixels(model: AscViT) -> AscViT:
    """The plain network with the same weights: every patch stays a token."""
    # What groups the last tokens for the mean alone becomes the mean over patches.
    pool = "size" if model.config.pool == "grouped" else model.config.pool
    plain = AscViT(replace(model.config, superpixels=None, pool=pool))
    state = model.state_dict()
    plain.load_state_dict({name: state[name] for name in plain.state_dict()})
    return plain.to(model.pos_embed.device).eval()


def from_timm(
    source: str | Path | nn.Module | Mapping[str, Tensor],
    superpixels: SuperpixelConfig | None = VitConfig.superpixels,
    **settings: object,
) -> AscViT:
    """Any of timm's plain Vision Transformers, given superpixels. Calibrate it on a few images, then use it.

    Args:
        source: A weights file, a timm model, its state, or the name of a timm model, whose pre-trained
            weights are then fetched by timm.
        superpixels: How tokens are grouped; None: just the Vision Transformer.
        **settings: Fields of ``VitConfig`` that a weights file cannot tell: ``heads`` (64 channels each
            if not given), ``quick_gelu``, ``norm_eps``, ``image_size`` if not square, ``pool``. Models that timm
            pools in a way that we do not need a ``pool`` said.
    """
    label = source if isinstance(source, str | Path) else "the given timm weights"
    if isinstance(source, str | Path) and not Path(source).suffix and not Path(source).exists():
        source = _fetch_from_timm(str(source))
    if isinstance(source, nn.Module):
        settings = _settings_of_timm_model(source) | settings
        source = source.state_dict()
    elif isinstance(source, str | Path):
        source = read_state(source)
    state = {name: tensor for name, tensor in source.items() if not name.startswith(_HEADS)}
    _check_is_plain_vit(state, str(label))
    pools_by_attention = any(name.startswith("attn_pool.") for name in source)
    if settings.get("pool", "map" if pools_by_attention else None) in _POOLS_OF_TIMM_ALONE:
        raise ValueError(f"timm pools {label} in a way that we do not: give pool='size' for the mean of the tokens")
    try:
        config = replace(_config_from_state(state, settings.pop("image_size", None)), superpixels=superpixels)
        model = AscViT(replace(config, **settings))  # type: ignore[arg-type]
    except (IndexError, ValueError, RuntimeError) as error:
        raise ValueError(f"{label} does not give a Vision Transformer: {error}") from error
    translated = _translate(state, model)
    # Thresholds and fusion scores are ours alone: they keep their starting values.
    own = {name: t for name, t in model.state_dict().items() if "superpixels." in name or name.startswith("budget.")}
    load_state(model, own | translated, str(label))
    return model.eval()


def _fetch_from_timm(name: str) -> nn.Module:
    import timm

    try:
        model: nn.Module = timm.create_model(name, pretrained=True)
    except RuntimeError as error:
        raise ValueError(f"{name!r} is neither a file nor a timm model with weights: {error}") from error
    return model


def _settings_of_timm_model(model: nn.Module) -> dict[str, object]:
    """What a timm model knows and its weights alone do not tell."""
    from timm.layers.activations import QuickGELU
    from timm.models.vision_transformer import VisionTransformer

    if not isinstance(model, VisionTransformer):
        raise ValueError(f"{type(model).__name__} is not one of timm's plain Vision Transformers")
    block: Any = model.blocks[0]
    _check_works_alike(model, block)
    height, width = model.patch_embed.img_size
    pool = {"avg": "size", "token": "class"}.get(model.global_pool, model.global_pool)
    return ({"pool": pool} if pool else {}) | {
        "heads": block.attn.num_heads,
        "quick_gelu": isinstance(block.mlp.act, QuickGELU),
        "norm_eps": block.norm1.eps,
        "image_size": (height, width),
    }


def _check_works_alike(model: Any, block: Any) -> None:
    """Refuse what the names of a model's weights do not show."""
    from timm.layers.activations import GELU, QuickGELU
    from timm.models.vision_transformer import Attention, Block  # type: ignore[attr-defined]

    for part, ours in ((block, Block), (block.attn, Attention)):
        if type(part) is not ours:
            raise ValueError(f"{type(part).__name__} is not what we have in its place: timm's plain {ours.__name__}")
    activation = block.mlp.act
    exact = isinstance(activation, nn.GELU) and activation.approximate == "none"
    if not exact and not isinstance(activation, GELU | QuickGELU):
        raise ValueError(f"an MLP with {activation} is none of ours: we have GELU, exact, and QuickGELU")
    if model.global_pool == "avg" and model.pool_include_prefix:
        raise ValueError("a mean that includes prefix tokens is none of ours: give timm pool_include_prefix=False")


def _check_is_plain_vit(state: Mapping[str, Tensor], label: str) -> None:
    known = re.compile(
        r"(cls_token|reg_token|pos_embed|patch_embed\.proj\.(weight|bias)|(norm_pre|norm|fc_norm)\.(weight|bias)"
        r"|blocks\.\d+\.((norm1|norm2|attn\.(qkv|proj|q_norm|k_norm)|mlp\.fc[12])\.(weight|bias)|ls[12]\.gamma))"
    )
    unknown = [name for name in state if not known.fullmatch(name)]
    needed = ("pos_embed", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight")
    missing = [name for name in needed if name not in state]
    if unknown or missing:
        what = f"it holds {', '.join(unknown[:4])}" if unknown else f"it lacks {', '.join(missing)}"
        raise ValueError(f"{label} is not a plain Vision Transformer of timm's: {what}")


def _config_from_state(state: Mapping[str, Tensor], image_size: Any) -> VitConfig:
    width, _, patch, _ = state["patch_embed.proj.weight"].shape
    depth = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
    registers = state["reg_token"].shape[1] if "reg_token" in state else 0
    prefix = registers + ("cls_token" in state)
    positions = state["pos_embed"].shape[1]
    if image_size is not None:
        image_size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
        patches = math.prod(side // patch for side in image_size)
        if positions not in (patches, patches + prefix):
            raise ValueError(f"image_size {image_size} has {patches} patches, the weights have {positions} positions")
        prefix_position = positions > patches
    else:
        # With or without a position of their own for the prefix tokens: only one of the two leaves a square.
        prefix_position = prefix > 0 and math.isqrt(positions) ** 2 != positions
        image_size = patch * math.isqrt(positions - (prefix if prefix_position else 0))
    head_norm = state.get("blocks.0.attn.q_norm.weight")
    mean_pooled = "fc_norm.weight" in state or "cls_token" not in state
    return VitConfig(
        width=width,
        depth=depth,
        heads=max(1, width // (64 if head_norm is None else head_norm.shape[0])),
        patch_size=patch,
        image_size=image_size,
        mlp_ratio=state["blocks.0.mlp.fc1.weight"].shape[0] / width,
        superpixels=None,
        # A mean over patches stays one when patches are merged.
        pool="size" if mean_pooled else "class",
        class_token="cls_token" in state,
        registers=registers,
        prefix_position=prefix_position,
        qkv_bias="blocks.0.attn.qkv.bias" in state,
        qk_norm=head_norm is not None,
        layer_scale=1.0 if "blocks.0.ls1.gamma" in state else None,
        norm_before="norm_pre.weight" in state,
        norm_after_pool="fc_norm.weight" in state,
    )


def _translate(state: Mapping[str, Tensor], model: AscViT) -> dict[str, Tensor]:
    """timm's names and shapes as ours."""
    ours = {name: tensor for name, tensor in state.items() if name.startswith(("blocks.", "norm", "pos_embed"))}
    ours["patch_embed.weight"] = state["patch_embed.proj.weight"].flatten(1)
    # Models with a norm before the blocks have no bias here.
    ours["patch_embed.bias"] = state.get("patch_embed.proj.bias", torch.zeros(model.config.width))
    prefix = [state[name] for name in ("cls_token", "reg_token") if name in state]
    if prefix:
        ours["prefix_tokens"] = torch.cat(prefix, dim=1)
    for part in ("weight", "bias"):
        if f"fc_norm.{part}" in state:
            ours[f"norm.{part}"] = state[f"fc_norm.{part}"]
    return ours
