"""An encoder with superpixels in regular tensors alone, for programs that know no ragged batches.

Every patch keeps its row; a superpixel lives in the row of its first patch, and the other rows take part in nothing. So
the results are those of ``AscViT``, but nothing is saved by merging: this is for running a trained encoder elsewhere,
not for speed.

Shape letters as in ``asc.tokens``, and L = P + N rows of an image.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asc.grouping.graph import SMALLEST_NORM, SizeWeight, weighted
from asc.layer import AdaptiveSuperpixelLayer
from asc.vit import AscViT, Block, patches_of


class Superpixels(NamedTuple):
    """Which rows are superpixels, and where every patch has gone."""

    active_BN: Tensor
    """Whether a row holds a superpixel (bool)."""
    sizes_BN: Tensor
    """Patches of each superpixel (fp32); 0 in rows that hold none."""
    row_of_BN: Tensor
    """The row of every patch's superpixel (int64)."""


class RegularEncoder(nn.Module):
    """Features ``(B, C)`` and label maps ``(B, H/p, W/p)`` of images of one size: what ``AscViT`` gives.

    Args:
        model: The encoder, whose parts are used as they are.
        image_hw: Height and width of the images.
    """

    position_1PC: Tensor
    near_NN: Tensor

    def __init__(self, model: AscViT, image_hw: tuple[int, int]) -> None:
        super().__init__()
        if reason := _obstacle(model):
            raise ValueError(f"superpixels of this encoder cannot be put into regular tensors: {reason}")
        self.vit = model.eval()
        self.grid = model.config.grid_of(image_hw)
        self.register_buffer("position_1PC", model._position(*self.grid).detach(), persistent=False)
        self.register_buffer("near_NN", _neighbours(self.grid), persistent=False)

    def forward(self, images_B3HW: Tensor) -> tuple[Tensor, Tensor]:
        """Features and labels; labels count the superpixels of each image from 0, in the order of their first patch."""
        values_BLC, found = self._embed(images_B3HW)
        for block in self.vit._blocks():
            values_BLC, keys_BLD = self._attend(block, values_BLC, found)
            if block.merges:
                assert block.superpixels is not None
                values_BLC, found = self._merge(block.superpixels, values_BLC, keys_BLD, found)
            values_BLC = values_BLC + block.ls2(block.mlp(block.norm2(values_BLC)))
        if not self.vit.config.norm_after_pool:
            values_BLC = self.vit.norm(values_BLC)
        number_BN = found.active_BN.long().cumsum(1) - 1
        labels_BN = number_BN.gather(1, found.row_of_BN)
        return self._pool(values_BLC, found), labels_BN.unflatten(1, self.grid)

    def _embed(self, images_B3HW: Tensor) -> tuple[Tensor, Superpixels]:
        config, (rows, columns) = self.vit.config, self.grid
        count = config.num_prefix
        patches_BNF = patches_of(images_B3HW, rows, columns)
        values_BLC = self.vit.patch_embed(patches_BNF) + self.position_1PC[:, -rows * columns :]
        if self.vit.prefix_tokens is not None:
            own_position = self.position_1PC[:, :count] if config.prefix_position else 0.0
            prefix_BPC = (self.vit.prefix_tokens + own_position).expand(images_B3HW.shape[0], -1, -1)
            values_BLC = torch.cat([prefix_BPC, values_BLC], dim=1)
        sizes_BN = torch.ones_like(values_BLC[:, count:, 0])
        row_of_BN = sizes_BN.long().cumsum(1) - 1
        return self.vit.norm_pre(values_BLC), Superpixels(sizes_BN > 0, sizes_BN, row_of_BN)

    def _attend(self, block: Block, values_BLC: Tensor, found: Superpixels) -> tuple[Tensor, Tensor]:
        """Values after the residual sum, and the mean keys of the heads."""
        attention, count = block.attn, self.vit.config.num_prefix
        qkv_BLF = attention.qkv(block.norm1(values_BLC))
        query, key, value = qkv_BLF.unflatten(2, (3, attention.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        query, key = attention.q_norm(query), attention.k_norm(key)
        weights_BN = found.sizes_BN if attention.proportional else found.active_BN.to(values_BLC.dtype)
        # Rows that hold nothing have the weight 0, which nobody attends to.
        logs_BL = F.pad(weights_BN.log(), (count, 0))
        mixed_BHLD = F.scaled_dot_product_attention(query, key, value, attn_mask=logs_BL[:, None, None])
        mixed_BLC = mixed_BHLD.transpose(1, 2).flatten(2)
        return values_BLC + block.ls1(attention.proj(mixed_BLC)), key.mean(1)

    def _merge(
        self, layer: AdaptiveSuperpixelLayer, values_BLC: Tensor, keys_BLD: Tensor, found: Superpixels
    ) -> tuple[Tensor, Superpixels]:
        count = self.vit.config.num_prefix
        prefix_BPC, values_BNC = values_BLC[:, :count], values_BLC[:, count:]
        keys_BND = keys_BLD[:, count:] if layer.config.source == "keys" else values_BNC
        if layer.projection is not None:
            keys_BND = layer.projection(values_BNC)
        linked_BNN = self._linked(layer, keys_BND, found)
        row_of_BN = _first_of_component(linked_BNN)
        places_N = torch.arange(row_of_BN.shape[1], device=row_of_BN.device)
        joined_BGN = ((row_of_BN[:, None] == places_N[:, None]) & found.active_BN[:, None]).to(values_BNC.dtype)
        weights_BN1 = (found.sizes_BN if layer.config.weight == "size" else torch.ones_like(found.sizes_BN))[..., None]
        totals_BG1 = (joined_BGN @ weights_BN1).clamp(min=1)
        merged_BGC = joined_BGN @ (values_BNC * weights_BN1) / totals_BG1
        sizes_BG = (joined_BGN @ found.sizes_BN[..., None])[..., 0]
        merged = Superpixels(sizes_BG > 0, sizes_BG, row_of_BN.gather(1, found.row_of_BN))
        return torch.cat([prefix_BPC, merged_BGC], dim=1), merged

    def _linked(self, layer: AdaptiveSuperpixelLayer, keys_BND: Tensor, found: Superpixels) -> Tensor:
        config = layer.config
        active_BN1 = found.active_BN[..., None].to(keys_BND.dtype)
        if config.center:
            mean_B1D = (keys_BND * active_BN1).sum(1, keepdim=True) / active_BN1.sum(1, keepdim=True)
            keys_BND = keys_BND - mean_B1D
        if config.similarity == "cosine":
            norms_BN1 = torch.linalg.vector_norm(keys_BND, dim=2, keepdim=True).clamp(min=SMALLEST_NORM)
            keys_BND = keys_BND / norms_BN1
        else:
            keys_BND = keys_BND * keys_BND.shape[2] ** -0.25
        similarity_BNN = keys_BND @ keys_BND.mT
        if config.size_weight:
            sizes_BN = found.sizes_BN.clamp(min=1)
            by_size = SizeWeight(sizes_BN, config.size_weight)
            similarity_BNN = weighted(similarity_BNN, by_size.factors(sizes_BN[:, :, None], sizes_BN[:, None]))
        linked_BNN = similarity_BNN > layer.threshold.theta()
        linked_BNN = linked_BNN & found.active_BN[:, :, None] & found.active_BN[:, None]
        return linked_BNN & self._touching(found) if config.neighbourhood == "spatial" else linked_BNN

    def _touching(self, found: Superpixels) -> Tensor:
        places_N = torch.arange(found.row_of_BN.shape[1], device=found.row_of_BN.device)
        member_BGN = (found.row_of_BN[:, None] == places_N[:, None]).to(self.near_NN.dtype)
        return (member_BGN @ self.near_NN @ member_BGN.mT) > 0

    def _pool(self, values_BLC: Tensor, found: Superpixels) -> Tensor:
        config = self.vit.config
        if config.pool == "grouped":
            values_BLC, found = self._merge(self.vit.superpixel_layers[-1], values_BLC, values_BLC, found)
        if config.pool == "class":
            pooled_BC = values_BLC[:, 0]
        else:
            weights_BN = found.sizes_BN if config.pool == "size" else found.active_BN.to(values_BLC.dtype)
            weights_BN1 = (weights_BN / weights_BN.sum(1, keepdim=True))[..., None]
            pooled_BC = (values_BLC[:, config.num_prefix :] * weights_BN1).sum(1)
        features_BC: Tensor = self.vit.norm(pooled_BC) if config.norm_after_pool else pooled_BC
        return features_BC


def _obstacle(model: AscViT) -> str:
    """Why it cannot be done; nothing if it can."""
    superpixels = model.config.superpixels
    if superpixels is None:
        return ""
    for name, possible in (("grouping", "components"), ("links", "all"), ("merge", "mean")):
        if getattr(superpixels, name) != possible:
            return f"{name} is {getattr(superpixels, name)!r}, which only works for {possible!r}"
    return ""


def _first_of_component(linked_BNN: Tensor) -> Tensor:
    """The smallest row that each row is connected with: labels spread until none changes."""
    batch, count, _ = linked_BNN.shape
    row_BN = torch.arange(count, device=linked_BNN.device).expand(batch, -1).clone()
    moving = torch.ones((), dtype=torch.bool, device=linked_BNN.device)
    found: tuple[Tensor, Tensor] = torch.ops.higher_order.while_loop(
        _still_moving, _spread, (row_BN, moving), (linked_BNN,)
    )
    return found[0]


def _still_moving(row_BN: Tensor, moving: Tensor, linked_BNN: Tensor) -> Tensor:
    return moving.clone()


def _spread(row_BN: Tensor, moving: Tensor, linked_BNN: Tensor) -> tuple[Tensor, Tensor]:
    nearest_BN = torch.where(linked_BNN, row_BN[:, None], row_BN.shape[1]).amin(2)
    smaller_BN = torch.minimum(row_BN, nearest_BN)
    # What a label's own row has become is connected, too: so labels come far in few rounds.
    smaller_BN = smaller_BN.gather(1, smaller_BN)
    smaller_BN = smaller_BN.gather(1, smaller_BN)
    return smaller_BN, (smaller_BN != row_BN).any()


def _neighbours(grid: tuple[int, int]) -> Tensor:
    """Which patches are among the 8 neighbours of which (fp32)."""
    rows, columns = grid
    places_N2 = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    distance_NN = (places_N2[:, None] - places_N2).abs().amax(2)
    return (distance_NN <= 1).float()
