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
_HALF = (torch.float16, torch.bfloat16)


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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def mix(self, qkv_TF: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """What lies between the two projections: mixed values ``(T, C)``, and the keys."""
        total = qkv_TF.shape[0]
        qkv_T3HD = qkv_TF.view(total, 3, self.heads, -1)
        normed = not isinstance(self.q_norm, nn.Identity)
        # Before anything is merged all tokens count the same.
        by_size = self.proportional and not tokens.is_unmerged
        if not normed and not tokens.is_steady and _kernel_takes(qkv_T3HD):
            return _by_kernel(qkv_T3HD, tokens, by_size).view(total, -1), qkv_T3HD[:, 1]
        query_THD, key_THD, value_THD = qkv_T3HD.unbind(1)
        query_THD, key_THD = self.q_norm(query_THD), self.k_norm(key_THD)
        return ragged_attention(query_THD, key_THD, value_THD, tokens, by_size).reshape(total, -1), key_THD


def ragged_attention(
    query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, tokens: Tokens, by_size: bool = False
) -> Tensor:
    """Softmax attention inside each image; ``by_size``: a token counts as often as it holds patches."""
    in_half_precision = value_THD.is_cuda and value_THD.dtype in _HALF
    if in_half_precision and not tokens.is_steady and _kernel_takes(value_THD):
        # Under autocast, norms hand out fp32.
        parts = [x_THD.to(value_THD.dtype) for x_THD in (query_THD, key_THD, value_THD)]
        return _by_kernel(torch.stack(parts, dim=1), tokens, by_size)
    width = query_THD.shape[2]
    if by_size:
        log_sizes_T = tokens.sizes_T.clamp(min=1).log().to(key_THD.dtype)
        query_THD, key_THD, value_THD = _with_bias_channel(query_THD, key_THD, value_THD, log_sizes_T)
    if in_half_precision and not tokens.is_steady:
        mixed_THD = _packed(query_THD, key_THD, value_THD, tokens)
    elif tokens.is_regular:
        mixed_THD = _regular(query_THD, key_THD, value_THD, tokens.batch)
    elif query_THD.device.type == "cpu" and tokens.max_len > _SHORT:
        mixed_THD = _one_by_one(query_THD, key_THD, value_THD, tokens)
    else:
        mixed_THD = _masked(query_THD, key_THD, value_THD, tokens)
    return mixed_THD[..., :width]


def _kernel_takes(x: Tensor) -> bool:
    """Whether our kernels take heads of this kind, whose channels are the last dimension."""
    if not (x.is_cuda and x.dtype in _HALF and kernels_take(x)):
        return False
    from asc.kernels.attention import attention_takes

    return attention_takes(x.shape[-1])


def _by_kernel(qkv_T3HD: Tensor, tokens: Tokens, by_size: bool) -> Tensor:
    from asc.kernels.attention import attention

    sizes_T = tokens.sizes_T if by_size else None
    return attention(qkv_T3HD, tokens.cu_seqlens, tokens.max_len, tokens.padded, sizes_T)


def _packed(query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, tokens: Tokens) -> Tensor:
    # Under autocast, norms hand out fp32.
    query_THD, key_THD = query_THD.to(value_THD.dtype), key_THD.to(value_THD.dtype)
    if not tokens.padded:
        return _flash(query_THD, key_THD, value_THD, tokens)
    # FlashAttention writes nothing to spare rows, neither of its result nor of its gradients.
    spare_T11 = (torch.arange(value_THD.shape[0], device=value_THD.device) >= tokens.cu_seqlens[-1])[:, None, None]
    query_THD, key_THD, value_THD = (x_THD.masked_fill(spare_T11, 0) for x_THD in (query_THD, key_THD, value_THD))
    return _flash(query_THD, key_THD, value_THD, tokens).masked_fill(spare_T11, 0)


def _flash(query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, tokens: Tokens) -> Tensor:
    # What torch.nn.attention.varlen.varlen_attn runs, without its custom operator, which takes the host longer than
    # the attention takes the device.
    borders, longest = tokens.cu_seqlens, tokens.max_len
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
    spare = query_THD.shape[0] - sum(lengths)
    images = list(zip(*(x_THD.split([*lengths, spare]) for x_THD in (query_THD, key_THD, value_THD)), strict=True))
    mixed_THD = torch.cat([_regular(query, key, value, batch=1) for query, key, value in images[:-1]])
    return F.pad(mixed_THD, (0, 0, 0, 0, 0, spare)) if spare else mixed_THD


def _masked(query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, tokens: Tokens) -> Tensor:
    lengths_B1 = tokens.lengths_B()[:, None]
    slots_M = torch.arange(tokens.max_len, device=query_THD.device)
    exists_BM = slots_M < lengths_B1
    places_BM = tokens.cu_seqlens[:-1, None] + slots_M
    rows_BM = torch.where(exists_BM, places_BM, 0)
    query_BHMD, key_BHMD, value_BHMD = (x_THD[rows_BM].transpose(1, 2) for x_THD in (query_THD, key_THD, value_THD))
    mixed_BHMD = F.scaled_dot_product_attention(query_BHMD, key_BHMD, value_BHMD, attn_mask=exists_BM[:, None, None])
    mixed_BMHD = mixed_BHMD.transpose(1, 2)
    if not tokens.padded:
        return mixed_BMHD[exists_BM]
    # Slots without a token go behind the last row, so that the host need not know how many tokens there are.
    total = query_THD.shape[0]
    target_BM = torch.where(exists_BM, places_BM, total)
    mixed_THD = mixed_BMHD.new_zeros(total + 1, *mixed_BMHD.shape[2:])
    return mixed_THD.index_copy(0, target_BM.flatten(), mixed_BMHD.flatten(0, 1))[:total]
