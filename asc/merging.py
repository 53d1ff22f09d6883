"""Groups of tokens become tokens: mean, max or attention fusion. Shape letters: see ``asc.tokens``."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from asc.kernels import kernels_take
from asc.tokens import Groups, Tokens

Fusion = Literal["mean", "max", "attention"]


def token_weights(tokens: Tokens, by_size: bool) -> Tensor:
    """How much each token counts in a merge: once, or once for each of its patches."""
    dtype = torch.promote_types(tokens.values_TC.dtype, torch.float32)
    if not by_size:
        return torch.ones(tokens.sizes_T.shape, dtype=dtype, device=tokens.device)
    # Prefix tokens hold no patch but stay themselves: any weight but zero does that.
    return tokens.sizes_T.clamp(min=1).to(dtype)


class Merge(nn.Module):
    """Fuse the members of each group into one token.

    Args:
        fusion: ``mean`` (the paper's choice), ``max`` over each channel, or ``attention``: a learned score
            of every member, softmax over the group; its score starts at zero, that is at the mean.
        channels: Width of the tokens; only needed by ``attention``.
    """

    def __init__(self, fusion: Fusion, channels: int) -> None:
        super().__init__()
        if fusion not in ("mean", "max", "attention"):
            raise ValueError(f"unknown merge {fusion!r}; choose from mean, max, attention")
        self.fusion = fusion
        self.score: nn.Linear | None = None
        if fusion == "attention":
            # No bias: the softmax over a group would not feel it.
            self.score = nn.Linear(channels, 1, bias=False)
            nn.init.zeros_(self.score.weight)

    def forward(self, values_TC: Tensor, weights_T: Tensor, groups: Groups) -> Tensor:
        """Values of the groups; ``weights_T`` says how much each member counts (not used by max)."""
        scores_T = self.scores(values_TC)
        order_T, starts_G = groups.order_T, groups.starts_G
        if kernels_take(values_TC, weights_T) and order_T is not None and starts_G is not None:
            from asc.kernels.merging import Members, sorted_fusion

            members = Members(groups.group_of_T, groups.members_G, order_T, starts_G)
            return sorted_fusion(self.fusion, values_TC, weights_T, scores_T, members)
        if self.fusion == "max":
            return _max(values_TC, groups)
        if scores_T is not None:
            weights_T = weights_T * _stable_exp(scores_T.to(weights_T.dtype), groups)
        return weighted_mean(values_TC, weights_T, groups)

    def scores(self, values_TC: Tensor) -> Tensor | None:
        """The learned score of every token, in fp32 at least; None where none is learned."""
        if self.score is None:
            return None
        with torch.autocast(values_TC.device.type, enabled=False):
            scores_T: Tensor = self.score(values_TC.to(self.score.weight.dtype))[:, 0]
        return scores_T


def weighted_mean(values_TC: Tensor, weights_T: Tensor, groups: Groups) -> Tensor:
    """Weighted mean of every group, accumulated in the precision of the weights."""
    weighted_TC = values_TC * weights_T[:, None]
    sums_GC = weighted_TC.new_zeros(groups.num_groups, values_TC.shape[1])
    sums_GC = sums_GC.index_add(0, groups.group_of_T, weighted_TC)
    return (sums_GC / group_sums(weights_T, groups)[:, None]).to(values_TC.dtype)


def group_sums(weights_T: Tensor, groups: Groups) -> Tensor:
    """Sum of the weights of every group."""
    return weights_T.new_zeros(groups.num_groups).index_add(0, groups.group_of_T, weights_T)


def _max(values_TC: Tensor, groups: Groups) -> Tensor:
    index_TC = groups.group_of_T[:, None].expand_as(values_TC)
    # Lower than any value: on the way back, what is there before would get a share of a maximum that it equals.
    lowest_GC = values_TC.new_full((groups.num_groups, values_TC.shape[1]), -torch.inf)
    return lowest_GC.scatter_reduce(0, index_TC, values_TC, "amax", include_self=False)


def _stable_exp(scores_T: Tensor, groups: Groups) -> Tensor:
    """exp(score) up to one factor for each group, which the mean divides out again."""
    top_G = scores_T.new_zeros(groups.num_groups)
    top_G = top_G.scatter_reduce(0, groups.group_of_T, scores_T.detach(), "amax", include_self=False)
    return (scores_T - top_G[groups.group_of_T]).exp()
