"""What is measured on: keys of several kinds, frames of the embedded scenes, images and encoders of one's own."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import asc
from asc.bench.measure import half_precision
from asc.data import SceneConfig, SceneDataset, normalise
from asc.grouping.budget import equal_keep
from asc.grouping.components import components
from asc.report.gallery import square
from asc.tasks.encoders import open_encoder
from asc.tasks.images import image_files, read_image
from asc.vit import AscViT

KINDS = ("random", "clustered", "chain", "image", "network")
_NETWORK = asc.VitConfig()
# Share of the tokens that stay: what a superpixel layer of a network keeps under the default budget.
KEEP = equal_keep(asc.SuperpixelConfig().budget, _NETWORK.superpixel_blocks, _NETWORK.depth)
_CHAIN_THETA = 0.9
# Different frames that a batch is made of; drawing more would take longer than measuring.
_FRAMES = 32
_SMALLEST_FRAME = 32


class Source(NamedTuple):
    """What networks see, and which network it is whose keys are taken."""

    images: Path | None = None
    """Folder of images; None: embedded scenes."""
    encoder: str | None = None
    """See ``asc.tasks.encoders``; None: an untrained network."""

    @property
    def record(self) -> dict[str, str]:
        """Both in words, for the files of cells that depend on them."""
        images = "embedded scenes" if self.images is None else str(self.images)
        return {"images": images, "encoder": self.encoder or "untrained"}

    def frames(self, count: int, size: int, device: torch.device) -> Tensor:
        """Square images, normalised."""
        if self.images is None:
            return scene_frames(count, size, device)
        return own_images(self.images, count, size, device)

    def network(self, width: int, side: int) -> AscViT:
        """The network, whose heads are so wide; an untrained one has one block, for so many patches a side."""
        if self.encoder is None:
            return asc.create_model("asc_vit_tiny_patch4", None, width=3 * width, depth=1, image_size=4 * side)
        model = open_encoder(self.encoder).vit
        if model is None or model.config.num_prefix:
            raise ValueError(f"encoder: {self.encoder} must be a network of ours without class and register tokens")
        if (own := model.config.width // model.config.heads) != width:
            raise ValueError(f"encoder: heads of {self.encoder} have {own} channels, this cell wants {width}")
        return model


SCENES = Source()


class Case(NamedTuple):
    """Input of connected components."""

    features_TD: Tensor
    """Of unit length; fp16 on a GPU, as the layer has them under autocast."""
    cu_seqlens: Tensor
    theta: Tensor
    length: int
    """Tokens of every image."""


def case(
    kind: str,
    batch: int,
    count: int,
    width: int,
    device: torch.device,
    seed: int = 0,
    source: Source = SCENES,
) -> Case:
    """Keys of a kind, and a threshold at which ``KEEP`` of the tokens stay (a chain: at which all are joined)."""
    torch.manual_seed(seed)
    features_TD = unit_keys(kind, batch, count, width, device, source)
    features_TD = features_TD.half() if device.type == "cuda" else features_TD
    cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=device) * count
    theta = torch.tensor(_CHAIN_THETA, device=device)
    if kind != "chain":
        theta = theta_keeping(features_TD, cu_seqlens, count)
    return Case(features_TD, cu_seqlens, theta, count)


def unit_keys(kind: str, batch: int, count: int, width: int, device: torch.device, source: Source) -> Tensor:
    """Keys ``(batch * count, width)`` of unit length."""
    if kind == "network":
        return F.normalize(network_keys(batch, count, width, device, source), dim=1)
    noise_BND = torch.randn(batch, count, width, device=device)
    if kind == "chain":
        # Neighbours along a walk are alike and the ends are not: the longest paths that a graph can have.
        phase_NF = torch.arange(count, device=device)[:, None] * torch.logspace(0, -4, width // 2, device=device)
        walk_ND = torch.cat([phase_NF.cos(), phase_NF.sin()], dim=1)
        orders = [torch.randperm(count, device=device) for _ in range(batch)]
        return F.normalize(torch.stack([walk_ND[order_N] for order_N in orders]), dim=2).flatten(0, 1)
    if kind == "random":
        keys_BND = noise_BND
    elif kind == "clustered":
        centres_BKD = torch.randn(batch, 40, width, device=device)
        chosen_BN1 = torch.randint(0, 40, (batch, count, 1), device=device)
        keys_BND = centres_BKD.gather(1, chosen_BN1.expand(-1, -1, width)) + 0.3 * noise_BND
    elif kind == "image":
        keys_BND = _fields_with_edges(batch, math.isqrt(count), width, device) + 0.15 * noise_BND
    else:
        raise ValueError(f"unknown kind of keys {kind!r}; choose from {', '.join(KINDS)}")
    return F.normalize(keys_BND - keys_BND.mean(1, keepdim=True), dim=2).flatten(0, 1)


def _fields_with_edges(batch: int, side: int, width: int, device: torch.device) -> Tensor:
    """Smooth in most places, with a few jumps, as keys of neighbouring patches are."""
    coarse_BDhw = torch.randn(batch, width, 7, 7, device=device)
    smooth_BDHW = F.interpolate(coarse_BDhw, size=(side, side), mode="bilinear", align_corners=False)
    regions_BDHW = F.interpolate(torch.randn(batch, width, 5, 5, device=device), size=(side, side), mode="nearest")
    return (smooth_BDHW + regions_BDHW).flatten(2).transpose(1, 2)


def theta_keeping(features_TD: Tensor, cu_seqlens: Tensor, count: int, keep: float = KEEP) -> Tensor:
    """The threshold at which so large a share of the tokens stays, found by halving."""
    own_T = torch.arange(features_TD.shape[0], device=features_TD.device)
    low, high = -12.0, 0.7
    for _ in range(14):
        middle = (low + high) / 2
        theta = torch.tensor(1 - math.exp(middle), device=features_TD.device)
        labels_T = components(features_TD, cu_seqlens, theta, max_len=count)
        kept = float((labels_T == own_T).float().mean())
        low, high = (middle, high) if kept > keep else (low, middle)
    return torch.tensor(1 - math.exp(low), device=features_TD.device)


# --- Images -----------------------------------------------------------------------------------------------


def network_keys(batch: int, count: int, width: int, device: torch.device, source: Source) -> Tensor:
    """Head-mean keys ``(batch * count, width)`` of a network's first block."""
    side = math.isqrt(count)
    model = source.network(width, side).to(device)
    images_B3HW = source.frames(batch, model.config.patch_size * side, device)
    with torch.no_grad(), half_precision(device):
        _, keys_THD = next(model._blocks()).attend(model._embed(images_B3HW))
    return keys_THD.float().mean(1)


def scene_frames(count: int, size: int, device: torch.device) -> Tensor:
    """Frames of embedded scenes, normalised."""
    frames_F3HW = _drawn(min(count, _FRAMES), max(size, _SMALLEST_FRAME))
    if frames_F3HW.shape[-1] != size:
        frames_F3HW = F.interpolate(frames_F3HW, size=(size, size), mode="bilinear", antialias=True)
    return _repeated(frames_F3HW, count).to(device)


def own_images(folder: Path, count: int, size: int, device: torch.device) -> Tensor:
    """The largest central squares of the images of a folder, normalised."""
    photographs = [Image.fromarray(read_image(file)) for file in image_files(folder)[:count]]
    images_F3HW = normalise(np.stack([square(photograph, size) for photograph in photographs]))
    return _repeated(images_F3HW, count).to(device)


def _repeated(images_F3HW: Tensor, count: int) -> Tensor:
    """Where there are too few, they come again, mirrored and not."""
    rounds = [images_F3HW.flip(3) if number % 2 else images_F3HW for number in range(-(-count // len(images_F3HW)))]
    return torch.cat(rounds)[:count]


@lru_cache(maxsize=4)
def _drawn(count: int, size: int) -> Tensor:
    scenes = SceneDataset(SceneConfig(size=size), count)
    return normalise(np.stack([scenes[index].frame(0).image_HW3 for index in range(count)]))
