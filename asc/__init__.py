"""Adaptive Superpixel Coding: Vision Transformers whose tokens are superpixels the network forms itself."""

from asc.export.timm import to_timm
from asc.layer import AdaptiveSuperpixelLayer, LayerStats, SuperpixelConfig, SuperpixelWarning
from asc.replay import ReplayedEncoder, replayed
from asc.tokens import Tokens
from asc.vit import MODEL_NAMES, AscViT, VitConfig, create_model
from asc.weights import from_timm, load, save

__all__ = [
    "MODEL_NAMES",
    "AdaptiveSuperpixelLayer",
    "AscViT",
    "LayerStats",
    "ReplayedEncoder",
    "SuperpixelConfig",
    "SuperpixelWarning",
    "Tokens",
    "VitConfig",
    "create_model",
    "from_timm",
    "load",
    "replayed",
    "save",
    "to_timm",
]
