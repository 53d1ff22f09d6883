"""Self-attention over ragged tokens: every image attends to its own tokens only.

Shape letters: see ``asc.tokens``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asc.kernels import kernels_take
from asc.tokens import Tokens

# On a CPU, up to so many tokens padding costs less than a call for each image.
_SHORT = 128


class Attention(nn.Module):
    """Multi-head self-attention that also hands out its keys.

    Args:
        channels: Width of the tokens.
        heads: Number of heads; divides ``channels``.
        qkv_bias: Whether queries, keys and values have a bias.
        qk_norm: Whether queries and keys pass a layer norm, as in some timm models.
        proportional: Whether a token counts as often as it holds patches, by adding the logarithm of its
            size to the attention scores (Token Merging).
        norm_eps: Added to the variance in the layer norms of ``qk_norm``.
    """

    def __init__(
        self,
        channels: int,
        heads: int,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        proportional: bool = False,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        if channels % heads:
            raise ValueError(f"width {channels} is not divisible by heads {heads}")
        self.heads = heads
        self.proportional = proportional
        self.qkv = nn.Linear(channels, 3 * channels, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(channels // heads, eps=norm_eps) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(channels // heads, eps=norm_eps) if qk_norm else nn.Identity()
        self.proj = nn.Linear(channels, channels)

    def forward(self, values_TC: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Attended values ``(T, C)`` and the keys ``(T, H, D)``; lengths and sizes come from ``tokens``."""
        mixed_TC, key_THD = self.mix(self.qkv(values_TC), tokens)
        return self.proj(mixed_TC), key_THD

    def mix(self, qkv_TF: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """What lies between the two projections: mixed values ``(T, C)``, and the keys."""
        total = qkv_TF.shape[0]
        query_THD, key_THD, value_THD = qkv_TF.view(total, 3, self.heads, -1).unbind(1)
        query_THD, key_THD = self.q_norm(query_THD), self.k_norm(key_THD)
        log_sizes_T = tokens.sizes_T.clamp(min=1).log().to(key_THD.dtype) if self.proportional else None
        return ragged_attention(query_THD, key_THD, value_THD, tokens, log_sizes_T).reshape(total, -1), key_THD


def ragged_attention(
    query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, tokens: Tokens, bias_T: Tensor | None = None
) -> Tensor:
    """Softmax attention inside each image; ``bias_T`` is added to the scores of each key."""
    width = query_THD.shape[2]
    if bias_T is not None:
        query_THD, key_THD, value_THD = _with_bias_channel(query_THD, key_THD, value_THD, bias_T)
    if tokens.is_regular:
        mixed_THD = _regular(query_THD, key_THD, value_THD, tokens.batch)
    elif query_THD.device.type == "cpu" and tokens.max_len > _SHORT:
        mixed_THD = _one_by_one(query_THD, key_THD, value_THD, tokens)
    elif query_THD.device.type == "cuda" and query_THD.dtype in (torch.float16, torch.bfloat16):
        mixed_THD = _packed(query_THD, key_THD, value_THD, tokens.cu_seqlens, tokens.max_len)
    else:
        mixed_THD = _padded(query_THD, key_THD, value_THD, tokens)
    return mixed_THD[..., :width]


def _packed(query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, borders: Tensor, longest: int) -> Tensor:
    if kernels_take(query_THD):
        from asc.kernels.attention import attention, attention_takes

        if attention_takes(query_THD, key_THD, value_THD):
            return attention(query_THD, key_THD, value_THD, borders, longest)
    # What torch.nn.attention.varlen.varlen_attn runs, without its custom operator, which takes the host longer than
    # the attention takes the device.
    mixed_THD: Tensor = torch.ops.aten._flash_attention_forward(
        query_THD, key_THD, value_THD, borders, borders, longest, longest, 0.0, False, False
    )[0]
    return mixed_THD


def _with_bias_channel(
    query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, bias_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Carry a bias of the keys as one more channel, so that every attention kernel can be used.

    Queries are scaled so that the kernel's default scale of the widened heads gives the scores of the
    original ones; the width grows to a multiple of 8 as the kernels want it.
    """
    width = query_THD.shape[2]
    wide = -(-(width + 1) // 8) * 8
    query_THD = F.pad(query_THD * (wide / width) ** 0.5, (0, 1), value=wide**0.5)
    key_THD = torch.cat([key_THD, bias_T[:, None, None].expand(-1, key_THD.shape[1], 1)], dim=2)
    fill = (0, wide - width - 1)
    return F.pad(query_THD, fill), F.pad(key_THD, fill), F.pad(value_THD, (0, wide - width))


def _regular(query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, batch: int) -> Tensor:
    query_BHND, key_BHND, value_BHND = (
        x_THD.unflatten(0, (batch, -1)).transpose(1, 2) for x_THD in (query_THD, key_THD, value_THD)
    )
    mixed_BHND = F.scaled_dot_product_attention(query_BHND, key_BHND, value_BHND)
    return mixed_BHND.transpose(1, 2).flatten(0, 1)


def _one_by_one(query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, tokens: Tokens) -> Tensor:
    # On a CPU this beats padding (no wasted arithmetic), and no image can feel its batch-mates.
    lengths = tokens.lengths_B().tolist()
    images = zip(query_THD.split(lengths), key_THD.split(lengths), value_THD.split(lengths), strict=True)
    return torch.cat([_regular(query, key, value, batch=1) for query, key, value in images])


def _padded(query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, tokens: Tokens) -> Tensor:
    lengths_B1 = tokens.lengths_B()[:, None]
    slots_M = torch.arange(tokens.max_len, device=query_THD.device)
    exists_BM = slots_M < lengths_B1
    rows_BM = torch.where(exists_BM, tokens.cu_seqlens[:-1, None] + slots_M, 0)
    query_BHMD, key_BHMD, value_BHMD = (x_THD[rows_BM].transpose(1, 2) for x_THD in (query_THD, key_THD, value_THD))
    mixed_BHMD = F.scaled_dot_product_attention(query_BHMD, key_BHMD, value_BHMD, attn_mask=exists_BM[:, None, None])
    return mixed_BHMD.transpose(1, 2)[exists_BM]
