"""The superpixels of an encoder, at the size and the number of tokens that are asked for."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from asc.data.images import normalise
from asc.grouping.links import Links
from asc.layer import Grouping, Neighbourhood, Source, SuperpixelConfig, SuperpixelWarning
from asc.report.pictures import Labels, Pixels
from asc.tasks.encoders import Encoder
from asc.tasks.images import resized
from asc.vit import AscViT

Allocation = Literal["learned", "equal", "last"]

# The share that is calibrated for is corrected by what came out, at most so often or until it is this near.
_ROUNDS, _NEAR = 4, 0.01


@dataclass(frozen=True)
class GroupingChange:
    """Settings of the encoder's superpixel layers that may differ from its training; None: as it was trained."""

    grouping: Grouping | None = None
    """``components`` of the similarity graph, or ``bipartite``: the pairs of Token Merging, as many in every image."""
    neighbourhood: Neighbourhood | None = None
    """``global`` or ``spatial``: whether tokens must touch to be joined."""
    links: Links | None = None
    """``all`` or ``best``: whether a pair must also be the most similar one of one of its tokens to be joined."""
    size_weight: float | None = None
    """How much the sizes of two tokens count against joining them: 0, not at all, to 1, as in Ward's clustering."""
    center: bool | None = None
    """Whether each image's mean key is taken away before the comparison."""
    source: Source | None = None
    """What is compared: ``keys`` or ``tokens``."""
    blocks: tuple[int, ...] | None = None
    """Blocks that hold a superpixel layer, counted from 1."""

    def changed(self) -> dict[str, Any]:
        """The settings that are given, as ``SuperpixelConfig`` calls them."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if self.blocks is not None:
            given["blocks"] = tuple(block - 1 for block in self.blocks)
        return given


class SuperpixelMaker:
    """An encoder with the size of the images that it is shown.

    Args:
        encoder: One of ours.
        size: Shorter side of the images in pixels; None: the side that it was made for.
        change: How its superpixel layers differ from its training.
    """

    def __init__(self, encoder: Encoder, size: int | None, change: GroupingChange) -> None:
        if encoder.vit is None:
            raise ValueError(f"{encoder.source} is no network of ours, so it has no superpixels; give one of ours")
        if encoder.vit.config.pool == "grouped":
            raise ValueError(
                f"{encoder.source} has pool='grouped': its last layer groups tokens for the pooled feature alone and "
                f"makes no superpixels; give an encoder that pools another way"
            )
        self.model = changed_model(encoder.vit, change, encoder.source)
        self.size = encoder.image_size if size is None else size
        layers = self.model.superpixel_layers
        self.needs_calibration = bool(change.changed()) or not all(layer.threshold.calibrated for layer in layers)
        if self.size < self.model.config.patch_size:
            raise ValueError(f"size must be at least a patch of {self.model.config.patch_size} pixels, got {size}")

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks that hold a superpixel layer, counted from 1."""
        return tuple(block + 1 for block in self.model.config.superpixel_blocks)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches of an image: its shorter side is brought to ``size``, both to whole patches."""
        factor = self.size / min(height, width) / self.model.config.patch_size
        if factor > 1:
            raise ValueError(
                f"at size {self.size} a patch is smaller than a pixel of an image of {width} x {height}; "
                f"choose a size of at most {min(height, width) * self.model.config.patch_size}"
            )
        return max(1, math.floor(height * factor + 0.5)), max(1, math.floor(width * factor + 0.5))

    @torch.no_grad()
    def labels(self, image_HW3: Pixels) -> dict[int, Labels]:
        """The superpixel of every patch (h, w) after every block with a superpixel layer."""
        images_13HW = self._images([image_HW3], self.grid(*image_HW3.shape[:2]))
        with _quiet():
            labels_L1hw = self.model.superpixels(images_13HW).cpu().numpy()
        return {block: labels_L1hw[block - 1, 0] for block in self.blocks}

    def _images(self, images: Sequence[Pixels], grid: tuple[int, int]) -> Tensor:
        patch, like = self.model.config.patch_size, next(self.model.parameters())
        sides = (grid[0] * patch, grid[1] * patch)
        return normalise(np.stack([resized(image_HW3, *sides) for image_HW3 in images])).to(like)

    # --- The number of tokens -----------------------------------------------------------------------------

    def calibrate(self, images: Sequence[Pixels], tokens: int | None, allocation: Allocation) -> float:
        """Set the thresholds so that the last superpixel layer leaves about ``tokens`` of an image, on average.

        Every image keeps its own number. Upright images are turned for it and all get one shape, because they are
        calibrated as one batch; the share is then corrected by what the images in their own shapes gave.

        Args:
            images: A few dozen typical ones; no truth is needed.
            tokens: None: the shares that the blocks have from training.
            allocation: How the merging is spread over the blocks, see ``shares``.

        Returns:
            The mean number of tokens of these images.
        """
        lying = [image if image.shape[0] <= image.shape[1] else image.swapaxes(0, 1) for image in images]
        grids = [self.grid(*image.shape[:2]) for image in lying]
        batch_B3HW = self._images(lying, sorted(grids)[len(grids) // 2])
        if tokens is None:
            return self._calibrated(batch_B3HW, images)
        patches = float(np.mean([rows * columns for rows, columns in grids]))
        if not 1 <= tokens < patches:
            raise ValueError(
                f"tokens must be from 1 to less than the {patches:.0f} patches of an image, got {tokens}; a larger "
                f"size gives more patches"
            )
        trained_L = self._targets().clone()

        def reached(asked: float) -> float:
            self._set_targets(shares(trained_L, min(asked / patches, 1 - 1e-6), allocation))
            return self._calibrated(batch_B3HW, images)

        asked, tried = float(tokens), dict[float, float]()
        for _ in range(_ROUNDS):
            tried[asked] = reached(asked)
            if abs(tried[asked] - tokens) <= _NEAR * tokens:
                return tried[asked]
            asked = min(max(1.0, asked * tokens / tried[asked]), patches)
        return reached(min(tried, key=lambda asked: abs(tried[asked] - tokens)))

    def _calibrated(self, batch_B3HW: Tensor, images: Sequence[Pixels]) -> float:
        """Mean number of tokens of the images after calibration on the batch."""
        with _quiet():
            self.model.calibrate(batch_B3HW)
        return float(np.mean([len(np.unique(self.labels(image_HW3)[self.blocks[-1]])) for image_HW3 in images]))

    def _targets(self) -> Tensor:
        assert self.model.budget is not None
        return self.model.budget.targets_L

    def _set_targets(self, shares_L: Tensor) -> None:
        self._targets().copy_(shares_L)
        # Bipartite layers have no threshold and read their share directly.
        for layer, share in zip(self.model.superpixel_layers, shares_L, strict=True):
            layer.threshold.target.copy_(share)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings of blocks that join nothing or everything: in a single image, or by intent, that is no news."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SuperpixelWarning)
        yield


def shares(trained_L: Tensor, total: float, allocation: Allocation) -> Tensor:
    """Share of its tokens that every superpixel layer keeps, so that ``total`` of the patches are left in the end.

    ``learned``: in the proportions of training (of the logarithms); ``equal``: all the same; ``last``: only the last
    layer merges.
    """
    logs_L = trained_L.double().log()
    weights_L = torch.ones_like(logs_L)
    if allocation == "last":
        weights_L[:-1] = 0
    elif allocation == "learned" and float(logs_L.sum()) < 0:
        weights_L = logs_L / logs_L.sum()
    return (weights_L / weights_L.sum() * math.log(total)).exp().to(trained_L.dtype)


def changed_model(model: AscViT, change: GroupingChange, source: str) -> AscViT:
    """The same weights with other superpixel layers; a plain network gets those of ``SuperpixelConfig()``."""
    given = change.changed()
    if not given and model.budget is not None:
        return model
    superpixels = model.config.superpixels
    if superpixels is None or "blocks" in given:
        # What was learned of the blocks says nothing of others: all keep the same then.
        superpixels = replace(superpixels or SuperpixelConfig(), keep=0.8)
    if given.get("source") == "projection" and superpixels.source != "projection":
        raise ValueError(f"{source} was trained without a projection; choose keys or tokens as grouping.source")
    changed = AscViT(replace(model.config, superpixels=replace(superpixels, **given)))
    state, own = model.state_dict(), changed.state_dict()
    kept = {name: tensor for name, tensor in state.items() if name in own and tensor.shape == own[name].shape}
    changed.load_state_dict(own | kept)
    return changed.eval()
