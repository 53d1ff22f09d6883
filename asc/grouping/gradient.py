"""The gradient of a discrete grouping: straight through, with the slope of a soft twin.

Forward, a token is exactly the merge of its component. Backward, threshold and features (the normalised
keys) see what would happen if every token were instead the mean of *all* tokens (spatial: all that touch
it), weighted by the gate ``A = σ((S - θ) / τ)``:

    ỹ_i = Σ_j A_ij w_j x_j / D_i        D_i = Σ_j A_ij w_j        A_ii = 1: a token is its own neighbour

Where sizes count, S is the similarity that is compared with θ (``graph.SizeWeight``); the features then get r times the
slope, r the factor of their pair. Where only the best links count, the twin is still over all pairs: which link is the
best has no slope, and a pair that is not the best now can become it.

x is held constant here (it has its own gradient through the hard merge), and a group's gradient reaches
each member's ỹ_i by the member's share of the group.

When the image's feature gives every superpixel one vote, joining two also takes a vote away. The twin says
that too: a token's soft share of a vote is 1 / D_i, and the logarithm of a group's vote is the mean of its
members'. Shape letters: see ``asc.tokens``; R is a tile of rows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from asc.grouping.graph import SizeWeight, pair_similarities, tile_similarities, weighted
from asc.kernels import kernels_take
from asc.merging import group_sums, weighted_mean
from asc.tokens import Groups

GradientKind = Literal["straight_through", "bottleneck", "none"]

_TILE_ENTRIES = 1 << 20
# Up to so many tokens the images of a batch are cheaper side by side, filled up to one length, than one by one.
_SHORT = 128


class Gate(NamedTuple):
    """Everything the soft twin is made of, apart from the features and θ it differentiates."""

    values_TC: Tensor
    """Tokens before the merge, without gradient."""
    weights_T: Tensor
    """How much each token counts in a mean."""
    tau: Tensor
    """Softness of the gate, in units of S."""
    cu_seqlens: Tensor
    """Borders of the images."""
    pairs_2E: Tensor | None
    """The pairs that may be joined; None: all of one image."""
    half_TD: Tensor | None = None
    """The features in fp16, where half precision is good enough for this gradient."""
    max_len: int | None = None
    """Bound of the images' lengths, for kernels."""
    by_size: SizeWeight | None = None
    """How sizes count in S; None: they do not."""


def attach_soft_gradient(
    kind: GradientKind,
    merged_GC: Tensor,
    log_votes_T: Tensor | None,
    features_TD: Tensor,
    theta: Tensor,
    groups: Groups,
    gate: Gate,
) -> tuple[Tensor, Tensor | None]:
    """``merged_GC`` unchanged and zero log-votes, with gradients for ``features_TD`` and ``theta`` attached."""
    if kind == "none" or not (features_TD.requires_grad or theta.requires_grad):
        return merged_GC, None
    if log_votes_T is None:
        log_votes_T = torch.zeros_like(gate.weights_T)
    if kind == "bottleneck":
        return _attach_bottleneck_twin(merged_GC, log_votes_T, features_TD, theta, groups, gate)
    result: tuple[Tensor, Tensor] = _SoftTwin.apply(merged_GC, log_votes_T, features_TD, theta, groups, gate)
    return result


def scaled_gradient(features_TD: Tensor, weight: float, tau: Tensor) -> Tensor:
    """The features, whose gradient is multiplied by ``weight`` and τ.

    The slope of the gate is 1 / τ, and τ is 1e-3 or less where similarities crowd: unscaled, this gradient is
    hundreds of times that of the loss through the tokens, and the keys collapse (``docs/decisions.md``).
    """
    if not weight:
        return features_TD.detach()
    result: Tensor = _ScaledGradient.apply(features_TD, weight * tau)
    return result


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features_TD: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return features_TD.view_as(features_TD)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grad_TD * scale.to(grad_TD.dtype), None


class _SoftTwin(torch.autograd.Function):
    """Identity of the merged tokens and votes whose backward also answers for features and threshold."""

    @staticmethod
    def forward(
        ctx: Any,
        merged_GC: Tensor,
        log_votes_T: Tensor,
        features_TD: Tensor,
        theta: Tensor,
        groups: Groups,
        gate: Gate,
    ) -> tuple[Tensor, Tensor]:
        sizes_T, power = (None, None) if gate.by_size is None else gate.by_size
        ctx.save_for_backward(features_TD, theta, *groups[:3], *gate[:6], sizes_T)
        ctx.max_len, ctx.power = gate.max_len, power
        return merged_GC.view_as(merged_GC), log_votes_T.new_zeros(groups.num_groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_GC: Tensor, grad_votes_G: Tensor) -> tuple[Tensor | None, ...]:
        features_TD, theta, *rest, sizes_T = ctx.saved_tensors
        by_size = None if sizes_T is None else SizeWeight(sizes_T, ctx.power)
        groups, gate = Groups(*rest[:3]), Gate(*rest[3:])._replace(max_len=ctx.max_len, by_size=by_size)
        plain = gate.pairs_2E is None and by_size is None and gate.max_len is not None
        if plain and kernels_take(features_TD, gate.values_TC, grad_GC):
            return _backward_by_kernel(grad_GC, grad_votes_G, features_TD, theta, groups, gate, ctx.needs_input_grad[2])
        share_T = gate.weights_T / group_sums(gate.weights_T, groups)[groups.group_of_T]
        grad_TC = grad_GC.to(share_T.dtype)[groups.group_of_T] * share_T[:, None]
        grad_votes_T = grad_votes_G[groups.group_of_T] * share_T
        grads = soft_gradient_everywhere if gate.pairs_2E is None else soft_gradient_among_pairs
        grad_features_TD, grad_theta = grads(grad_TC, grad_votes_T, features_TD, theta, gate, ctx.needs_input_grad[2])
        return grad_GC, grad_votes_T, grad_features_TD, grad_theta, None, None


def _backward_by_kernel(
    grad_GC: Tensor,
    grad_votes_G: Tensor,
    features_TD: Tensor,
    theta: Tensor,
    groups: Groups,
    gate: Gate,
    needs_features: bool,
) -> tuple[Tensor | None, ...]:
    from asc.kernels.gradient import Spread, soft_gradient, threshold_gradient

    assert gate.max_len is not None
    spread = Spread(grad_GC, grad_votes_G, groups.group_of_T, group_sums(gate.weights_T, groups), gate.weights_T)
    compared_TD = features_TD if gate.half_TD is None else gate.half_TD
    twin = compared_TD, gate.values_TC, theta, gate.tau, gate.cu_seqlens, gate.max_len
    if not needs_features:
        made = threshold_gradient(spread, *twin, scale=torch.ones_like(theta), sign=1.0)
        return grad_GC, made.grad_votes_T, None, made.grad, None, None
    grad_features_TD, grad_theta, grad_votes_T = soft_gradient(spread, *twin)
    return grad_GC, grad_votes_T, grad_features_TD, grad_theta, None, None


def soft_gradient_everywhere(
    grad_TC: Tensor,
    grad_votes_T: Tensor,
    features_TD: Tensor,
    theta: Tensor,
    gate: Gate,
    needs_features: bool = True,
) -> tuple[Tensor | None, Tensor]:
    """Gradients of Σ_i (grad_i · ỹ_i - grad_votes_i log D_i) over all pairs of each image.

    In tiles: never N × N in memory. Those of the features are left out where nobody needs them.
    """
    borders = gate.cu_seqlens.tolist()
    longest = max(end - first for first, end in pairwise(borders))
    if longest <= _SHORT:
        return _soft_gradient_side_by_side(grad_TC, grad_votes_T, features_TD, theta, gate, longest, needs_features)
    grad_features_TD = torch.zeros_like(features_TD) if needs_features else None
    grad_theta = torch.zeros_like(theta)
    for first, end in pairwise(borders):
        rows = max(1, _TILE_ENTRIES // (end - first))
        for row in range(first, end, rows):
            tile = slice(row, min(row + rows, end))
            slope_RN = _slopes_of_tile(grad_TC, grad_votes_T, features_TD, theta, gate, tile, slice(first, end))
            grad_theta -= slope_RN.sum()
            if grad_features_TD is not None:
                if gate.by_size is not None:
                    slope_RN *= gate.by_size.of_tile(tile, slice(first, end)).to(slope_RN.dtype)
                grad_features_TD[tile] += slope_RN @ features_TD[first:end]
                grad_features_TD[first:end] += slope_RN.T @ features_TD[tile]
    return grad_features_TD, grad_theta


def _soft_gradient_side_by_side(
    grad_TC: Tensor,
    grad_votes_T: Tensor,
    features_TD: Tensor,
    theta: Tensor,
    gate: Gate,
    longest: int,
    needs_features: bool,
) -> tuple[Tensor | None, Tensor]:
    """The same with all images in one product, filled up with tokens of no weight to the length of the longest (M)."""
    slots_M = torch.arange(longest, device=features_TD.device)
    exists_BM = slots_M < gate.cu_seqlens.diff()[:, None]
    rows_BM = torch.where(exists_BM, gate.cu_seqlens[:-1, None] + slots_M, 0)
    weights_B1M = (gate.weights_T[rows_BM] * exists_BM)[:, None]
    features_BMD = features_TD[rows_BM]
    similarity_BMM = features_BMD @ features_BMD.mT
    factors_BMM = None
    if gate.by_size is not None:
        sizes_BM = gate.by_size.sizes_T[rows_BM]
        factors_BMM = gate.by_size.factors(sizes_BM[:, :, None], sizes_BM[:, None]).to(similarity_BMM.dtype)
        similarity_BMM = weighted(similarity_BMM, factors_BMM)
    gate_BMM = torch.sigmoid((similarity_BMM - theta) / gate.tau)
    slope_BMM = gate_BMM * (1 - gate_BMM) / gate.tau
    gate_BMM.diagonal(dim1=1, dim2=2).fill_(1.0)
    slope_BMM.diagonal(dim1=1, dim2=2).zero_()
    pull_BMM = grad_TC[rows_BM] @ gate.values_TC.to(grad_TC.dtype)[rows_BM].mT
    weighted_BMM = gate_BMM * weights_B1M
    # A token weighs at least itself; only rows that are none can have a total of zero, and must not become NaN.
    total_BM1 = torch.where(exists_BM, weighted_BMM.sum(2), 1.0)[:, :, None]
    mean_pull_BM1 = (weighted_BMM * pull_BMM).sum(2, keepdim=True) / total_BM1
    excess_BMM = pull_BMM - mean_pull_BM1 - grad_votes_T[rows_BM][:, :, None]
    slope_BMM *= weights_B1M * excess_BMM / total_BM1 * exists_BM[:, :, None]
    grad_theta = -slope_BMM.sum().to(theta.dtype)
    if not needs_features:
        return None, grad_theta
    if factors_BMM is not None:
        slope_BMM *= factors_BMM
    grad_features_BMD = (slope_BMM + slope_BMM.mT) @ features_BMD
    return grad_features_BMD[exists_BM], grad_theta


def _slopes_of_tile(
    grad_TC: Tensor,
    grad_votes_T: Tensor,
    features_TD: Tensor,
    theta: Tensor,
    gate: Gate,
    tile: slice,
    image: slice,
) -> Tensor:
    """Derivative of the sum above by S_ij (sizes counted in), for i in ``tile`` and j in ``image``."""
    values_NC = gate.values_TC[image].to(grad_TC.dtype)
    weights_N = gate.weights_T[image]
    gate_RN = torch.sigmoid((tile_similarities(features_TD, tile, image, gate.by_size) - theta) / gate.tau)
    slope_RN = gate_RN * (1 - gate_RN) / gate.tau
    own_R = torch.arange(gate_RN.shape[0], device=gate_RN.device)
    own_column_R = own_R + (tile.start - image.start)
    gate_RN[own_R, own_column_R] = 1.0
    slope_RN[own_R, own_column_R] = 0.0
    pull_RN = grad_TC[tile] @ values_NC.T
    weighted_RN = gate_RN * weights_N
    total_R1 = weighted_RN.sum(1, keepdim=True)
    mean_pull_R1 = (weighted_RN * pull_RN).sum(1, keepdim=True) / total_R1
    return slope_RN * weights_N * (pull_RN - mean_pull_R1 - grad_votes_T[tile, None]) / total_R1


def soft_gradient_among_pairs(
    grad_TC: Tensor,
    grad_votes_T: Tensor,
    features_TD: Tensor,
    theta: Tensor,
    gate: Gate,
    needs_features: bool = True,
) -> tuple[Tensor | None, Tensor]:
    """The same gradients over the listed pairs, each seen from both of its ends."""
    assert gate.pairs_2E is not None
    slope_F = _slopes_of_pairs(grad_TC, grad_votes_T, features_TD, theta, gate)
    slope_E1 = slope_F.view(2, -1).sum(0)[:, None]
    grad_theta = -slope_E1.sum().to(theta.dtype)
    if not needs_features:
        return None, grad_theta
    if gate.by_size is not None:
        slope_E1 = slope_E1 * gate.by_size.of_pairs(gate.pairs_2E)[:, None].to(slope_E1.dtype)
    grad_features_TD = torch.zeros_like(features_TD)
    grad_features_TD.index_add_(0, gate.pairs_2E[0], slope_E1 * features_TD[gate.pairs_2E[1]])
    grad_features_TD.index_add_(0, gate.pairs_2E[1], slope_E1 * features_TD[gate.pairs_2E[0]])
    return grad_features_TD, grad_theta


def _slopes_of_pairs(grad_TC: Tensor, grad_votes_T: Tensor, features_TD: Tensor, theta: Tensor, gate: Gate) -> Tensor:
    """Derivative of the sum above by S of every pair, as its first token sees it, then as its second does."""
    assert gate.pairs_2E is not None
    here_F, there_F = torch.cat([gate.pairs_2E, gate.pairs_2E.flip(0)], dim=1)
    values_TC, weights_T = gate.values_TC.to(grad_TC.dtype), gate.weights_T
    similarity_E = pair_similarities(features_TD, gate.pairs_2E, gate.by_size)
    gate_F = torch.sigmoid((similarity_E - theta) / gate.tau).repeat(2)
    pull_F = (grad_TC[here_F] * values_TC[there_F]).sum(1)
    own_pull_T = (grad_TC * values_TC).sum(1)
    weighted_F = gate_F * weights_T[there_F]
    total_T = weights_T.index_add(0, here_F, weighted_F)
    mean_pull_T = (own_pull_T * weights_T).index_add(0, here_F, weighted_F * pull_F) / total_T
    excess_F = pull_F - (mean_pull_T + grad_votes_T)[here_F]
    return weighted_F * (1 - gate_F) / gate.tau * excess_F / total_T[here_F]


# --- The other surrogate: gates on bottlenecks --------------------------------------------------------------


def _attach_bottleneck_twin(
    merged_GC: Tensor, log_votes_T: Tensor, features_TD: Tensor, theta: Tensor, groups: Groups, gate: Gate
) -> tuple[Tensor, Tensor]:
    """The same with a gate on the weakest link of the best path between two tokens.

    Two tokens share a component exactly when that bottleneck exceeds θ, so this twin softens the
    components themselves where the other softens single edges. It costs N × N memory and N steps for each
    image: for studies on small images.
    """
    soft_parts, vote_parts = [], []
    for first, end in pairwise(gate.cu_seqlens.tolist()):
        image = slice(first, end)
        similarity_NN = tile_similarities(features_TD, image, image, gate.by_size)
        bottleneck_NN = _bottlenecks(similarity_NN, _allowed(gate.pairs_2E, first, end))
        gate_NN = torch.sigmoid((bottleneck_NN - theta) / gate.tau)
        weighted_NN = gate_NN * gate.weights_T[first:end]
        total_N1 = weighted_NN.sum(1, keepdim=True)
        soft_parts.append(weighted_NN @ gate.values_TC[first:end].to(weighted_NN.dtype) / total_N1)
        vote_parts.append(-total_N1.log())
    soft_GC = weighted_mean(torch.cat(soft_parts), gate.weights_T, groups)
    votes_G = weighted_mean(log_votes_T[:, None] + torch.cat(vote_parts), gate.weights_T, groups)[:, 0]
    return merged_GC + (soft_GC - soft_GC.detach()).to(merged_GC.dtype), votes_G - votes_G.detach()


def _allowed(pairs_2E: Tensor | None, first: int, end: int) -> Tensor | None:
    if pairs_2E is None:
        return None
    count = end - first
    own_2E = pairs_2E[:, (pairs_2E[0] >= first) & (pairs_2E[0] < end)] - first
    allowed_NN = torch.zeros(count, count, dtype=torch.bool, device=pairs_2E.device)
    allowed_NN[own_2E[0], own_2E[1]] = True
    return allowed_NN | allowed_NN.T


def _bottlenecks(similarity_NN: Tensor, allowed_NN: Tensor | None) -> Tensor:
    """Similarity of the weakest link on the path between any two tokens in the maximum spanning tree.

    Prim's algorithm grows the tree by one token a step; the bottleneck to every token already in the tree
    is the smaller of the new link and the bottleneck of the token it hangs on.
    """
    fixed_NN = similarity_NN.detach()
    if allowed_NN is not None:
        fixed_NN = fixed_NN.masked_fill(~allowed_NN, -torch.inf)
    count = fixed_NN.shape[0]
    # For each pair the two ends of its bottleneck link; a token is infinitely close to itself.
    link_NN2 = torch.zeros(count, count, 2, dtype=torch.int64, device=fixed_NN.device)
    height_NN = fixed_NN.new_full((count, count), torch.inf)
    best_N, parent_N = fixed_NN[0].clone(), torch.zeros(count, dtype=torch.int64, device=fixed_NN.device)
    in_tree_N = torch.zeros(count, dtype=torch.bool, device=fixed_NN.device)
    in_tree_N[0] = True
    for _ in range(count - 1):
        new = best_N.masked_fill(in_tree_N, -torch.inf).argmax()
        parent = parent_N[new]
        weaker_N = best_N[new] < height_NN[parent]
        link = torch.stack([new, parent])
        link_row_N2 = torch.where(weaker_N[:, None], link, link_NN2[parent])
        height_N = torch.minimum(best_N[new], height_NN[parent])
        link_NN2[new, in_tree_N] = link_NN2[in_tree_N, new] = link_row_N2[in_tree_N]
        height_NN[new, in_tree_N] = height_NN[in_tree_N, new] = height_N[in_tree_N]
        in_tree_N[new] = True
        closer_N = fixed_NN[new] > best_N
        best_N = torch.where(closer_N, fixed_NN[new], best_N)
        parent_N = torch.where(closer_N, new, parent_N)
    bottleneck_NN = similarity_NN[link_NN2[..., 0], link_NN2[..., 1]]
    is_self_NN = torch.eye(count, dtype=torch.bool, device=fixed_NN.device)
    return bottleneck_NN.masked_fill(is_self_NN, torch.inf)
