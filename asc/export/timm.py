"""An encoder without its superpixels as one of timm's Vision Transformers, for timm and for Hugging Face's hub.

What is left is a plain network: every patch stays a token. ``asc.from_timm`` is the way back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from asc.data.images import DEVIATION, MEAN
from asc.files import write_whole
from asc.vit import AscViT, VitConfig

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
# Any of timm's would do: all that makes up its shape is said.
_ARCHITECTURE = "vit_base_patch16_224"
_EPS = 1e-6  # of timm's norms
Triple = tuple[float, float, float]


def timm_settings(config: VitConfig) -> dict[str, Any]:
    """What ``timm.create_model`` must be told."""
    if config.norm_eps != _EPS:
        raise ValueError(f"norm_eps is {config.norm_eps:g}; timm takes {_EPS:g} alone from a file")
    return {
        "img_size": list(config.image_hw),
        "patch_size": config.patch_size,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": config.mlp_ratio,
        "qkv_bias": config.qkv_bias,
        "qk_norm": config.qk_norm,
        "init_values": config.layer_scale,
        "class_token": config.class_token,
        "reg_tokens": config.registers,
        "no_embed_class": not config.prefix_position,
        "pre_norm": config.norm_before,
        "fc_norm": config.norm_after_pool,
        "global_pool": "token" if config.pool == "class" else "avg",
        "num_classes": 0,
    } | ({"act_layer": "quick_gelu"} if config.quick_gelu else {})


def timm_state(model: AscViT) -> dict[str, Tensor]:
    """The weights under timm's names; those of superpixels are left out."""
    config, state = model.config, dict(model.state_dict())
    patch, width = config.patch_size, config.width
    named = {
        name: tensor
        for name, tensor in state.items()
        if name.startswith(("blocks.", "pos_embed", "norm_pre.")) and ".superpixels." not in name
    }
    final = "fc_norm" if config.norm_after_pool else "norm"
    named |= {f"{final}.{part}": state[f"norm.{part}"] for part in ("weight", "bias")}
    named["patch_embed.proj.weight"] = state["patch_embed.weight"].view(width, 3, patch, patch)
    if not config.norm_before:
        named["patch_embed.proj.bias"] = state["patch_embed.bias"]
    elif bool(state["patch_embed.bias"].any()):
        raise ValueError("timm's networks with a norm before the blocks have no bias of patches; this one's is not 0")
    if "prefix_tokens" in state:
        sizes = [int(config.class_token), config.registers]
        parts = zip(("cls_token", "reg_token"), state["prefix_tokens"].split(sizes, dim=1), strict=True)
        named |= {name: tensor for name, tensor in parts if tensor.shape[1]}
    return {name: tensor.contiguous() for name, tensor in named.items()}


def to_timm(model: AscViT) -> nn.Module:
    """The encoder without its superpixels as a network of timm's, with the same weights."""
    import timm

    network: nn.Module = timm.create_model(_ARCHITECTURE, **timm_settings(model.config))
    network.load_state_dict(timm_state(model))
    return network.eval()


def write_timm(model: AscViT, folder: Path, mean: Triple = MEAN, deviation: Triple = DEVIATION) -> None:
    """The folder for ``timm.create_model("local-dir:FOLDER", pretrained=True)``, or for Hugging Face's hub."""
    settings = timm_settings(model.config)
    about = {
        "architecture": _ARCHITECTURE,
        "num_classes": 0,
        "num_features": model.config.width,
        "global_pool": settings["global_pool"],
        "model_args": settings,
        "pretrained_cfg": {
            "input_size": [3, *model.config.image_hw],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "mean": list(mean),
            "std": list(deviation),
            "num_classes": 0,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
    state = timm_state(model)
    write_whole(folder / WEIGHTS_FILE, lambda file: safetensors.torch.save_file(state, file, {"format": "pt"}))
    write_whole(folder / CONFIG_FILE, json.dumps(about, indent=2).encode() + b"\n")


@torch.no_grad()
def difference_to_timm(model: AscViT, folder: Path, images_B3HW: Tensor) -> float:
    """How much the features of the network that timm reads from the folder differ at most from ours, which is plain."""
    import timm

    read = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    return float((read(images_B3HW) - model(images_B3HW)).abs().max())
