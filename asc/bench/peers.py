"""The networks that superpixels are compared with: timm's Vision Transformer, and Token Merging on top of it.

Shape letters: see ``asc.tokens``; A and Z are the tokens at even and odd places, R those of A that are merged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asc.vit import VitConfig

# Channels that sizes add to a head: one is needed, and the fastest attention kernels want them in eights.
SIZE_CHANNELS = 8


class TimmEncoder(nn.Module):
    """timm's Vision Transformer of the same shape as one of ours; can take the place of one in pre-training.

    Args:
        config: The shape of ours.
    """

    def __init__(self, config: VitConfig) -> None:
        from timm.models.vision_transformer import VisionTransformer  # slow to import, and seldom needed

        super().__init__()
        self.num_features = config.width
        self.budget = None
        self.superpixel_layers: list[nn.Module] = []
        self.vit: Any = VisionTransformer(
            img_size=config.image_hw,
            patch_size=config.patch_size,
            embed_dim=config.width,
            depth=config.depth,
            num_heads=config.heads,
            class_token=False,
            global_pool="avg",
            num_classes=0,
        )

    def forward(self, images_B3HW: Tensor) -> Tensor:
        """Mean feature of each image."""
        pooled_BC: Tensor = self.vit(images_B3HW)
        return pooled_BC

    def update_thresholds(self) -> None:
        """There are none."""


class TokenMergingEncoder(TimmEncoder):
    """Token Merging (Bolya et al., ICLR 2023): in every block the most similar pairs become one token.

    All images keep the same number of tokens, so that everything stays one regular tensor.

    Args:
        config: The shape of ours.
        tokens_after: Tokens that leave the attention of every block; a block can at most halve them.
        proportional: Whether attention counts a token as often as it holds patches, as its authors do.
    """

    def __init__(self, config: VitConfig, tokens_after: list[int], proportional: bool = True) -> None:
        super().__init__(config)
        self.tokens_after, self.proportional = tokens_after, proportional

    def forward(self, images_B3HW: Tensor) -> Tensor:
        """Mean feature of each image, over its tokens."""
        vit = self.vit
        values_BNC: Tensor = vit.norm_pre(vit._pos_embed(vit.patch_embed(images_B3HW)))
        patches = values_BNC.shape[1]
        sizes_BN1 = values_BNC.new_ones(*values_BNC.shape[:2], 1)
        for block, count in zip(vit.blocks, self.tokens_after, strict=True):
            merged = values_BNC.shape[1] < patches
            values_BNC, keys_BND = attend(block, values_BNC, sizes_BN1 if self.proportional and merged else None)
            fewer = min(values_BNC.shape[1] - count, values_BNC.shape[1] // 2)
            if fewer > 0:
                values_BNC, sizes_BN1 = merge_most_similar(values_BNC, sizes_BN1, keys_BND, fewer)
            values_BNC = values_BNC + block.mlp(block.norm2(values_BNC))
        pooled_BC: Tensor = vit.forward_head(vit.norm(values_BNC))
        return pooled_BC


def attend(block: Any, values_BNC: Tensor, sizes_BN1: Tensor | None) -> tuple[Tensor, Tensor]:
    """Values after the residual sum of a block's attention, and the keys' mean over heads; with sizes, a token counts
    as often as it holds patches."""
    attention = block.attn
    qkv_BNF: Tensor = attention.qkv(block.norm1(values_BNC))
    query, key, value = qkv_BNF.unflatten(2, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind()
    keys_BND = key.mean(1)
    width = value.shape[3]
    if sizes_BN1 is not None:
        query, key, value = _with_sizes(query, key, value, sizes_BN1)
    mixed = F.scaled_dot_product_attention(query, key, value, scale=width**-0.5)[..., :width]
    return values_BNC + attention.proj(mixed.transpose(1, 2).flatten(2)), keys_BND


def _with_sizes(
    query_BHND: Tensor, key_BHND: Tensor, value_BHND: Tensor, sizes_BN1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Logarithms of sizes as one more channel of the keys: a bias would forbid the fastest attention kernels."""
    width, empty = query_BHND.shape[3], SIZE_CHANNELS - 1
    logs_BHN1 = sizes_BN1.log().to(key_BHND.dtype)[:, None].expand(-1, key_BHND.shape[1], -1, -1)
    query_BHND = F.pad(F.pad(query_BHND, (0, 1), value=width**0.5), (0, empty))
    return query_BHND, F.pad(torch.cat([key_BHND, logs_BHN1], dim=3), (0, empty)), F.pad(value_BHND, (0, SIZE_CHANNELS))


def merge_most_similar(values_BNC: Tensor, sizes_BN1: Tensor, keys_BND: Tensor, fewer: int) -> tuple[Tensor, Tensor]:
    """Merge so many tokens at even places into their most similar partners at odd ones, by the mean over patches."""
    with torch.no_grad():
        unit_BND = F.normalize(keys_BND, dim=2)
        best_BA, partner_BA = (unit_BND[:, ::2] @ unit_BND[:, 1::2].mT).max(dim=2)
        order_BA1 = best_BA.argsort(dim=1, descending=True)[..., None]
        merged_BR1, stay_BS1 = order_BA1[:, :fewer], order_BA1[:, fewer:]
        into_BR1 = partner_BA[..., None].gather(1, merged_BR1)

    def joined(x_BNK: Tensor) -> Tensor:
        even_BAK, odd_BZK, width = x_BNK[:, ::2], x_BNK[:, 1::2], x_BNK.shape[2]
        moving_BRK = even_BAK.gather(1, merged_BR1.expand(-1, -1, width))
        odd_BZK = odd_BZK.scatter_add(1, into_BR1.expand(-1, -1, width), moving_BRK)
        return torch.cat([even_BAK.gather(1, stay_BS1.expand(-1, -1, width)), odd_BZK], dim=1)

    new_sizes_BN1 = joined(sizes_BN1)
    return joined(values_BNC * sizes_BN1) / new_sizes_BN1, new_sizes_BN1
