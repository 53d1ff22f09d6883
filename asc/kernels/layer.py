"""The whole superpixel layer on the GPU as one step of autograd: six launches forward, three back, one number read.

Forward it takes one more to round what is kept where the threshold learns. Back it takes five where the keys learn from
the grouping too, one more where groups are not merged by their mean, and a few more to sort the pairs that touch where
only those may be joined.

For components over all pairs or, where keys learn from attention alone, over those that touch or over best links;
``asc.layer`` puts other settings together from parts that do the same. Shape letters: see ``asc.tokens``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from asc.grouping.graph import SizeWeight, non_finite_keys
from asc.kernels.best import join_best
from asc.kernels.components import join_everywhere
from asc.kernels.features import Comparison, Prepared, ThetaParts, grad_of_keys, prepare, with_heads
from asc.kernels.gradient import Spread, half_type, soft_gradient_passes, threshold_gradient
from asc.kernels.merging import Members, fuse, grad_of_fusion, spread
from asc.kernels.numbering import number_trees
from asc.kernels.spare import clear_spare
from asc.kernels.touching import join_best_touching, join_touching, touching_threshold_gradient
from asc.tokens import Room, Tokens

if TYPE_CHECKING:
    from asc.merging import Fusion


class Joined(NamedTuple):
    """Tokens after the layer, and what it keeps on record."""

    tokens: Tokens
    members_G: Tensor
    """int32."""
    theta: Tensor
    summary: Tensor
    """Number of tokens, most tokens of an image, and not 0 if a key was not finite (int32, on the device)."""


def join_similar(
    tokens: Tokens,
    keys: Tensor,
    u: Tensor,
    target: Tensor | None,
    comparison: Comparison,
    soft: bool,
    spatial: bool,
    room: Room | None = None,
    fusion: Fusion = "mean",
    scores_T: Tensor | None = None,
) -> Joined:
    """Merge tokens whose keys are similar; ``soft``: with the soft twin's gradient for keys and threshold.

    ``spatial``: only tokens that touch; for those, and for best links, the keys get no gradient. The threshold's
    gradient goes to ``target`` if there is one, else to ``u``. With ``room`` nothing is read from the device: the
    tokens are padded to it, and the caller finds in the summary whether they fitted; if they did not, the result is
    worthless. ``fusion`` is how groups become tokens, ``scores_T`` its scores where it has any.
    """
    assert not ((spatial or comparison.best_links) and comparison.key_gradient)
    keys_THD = with_heads(keys)
    soft = soft and torch.is_grad_enabled() and _learns(keys_THD, u, target, comparison)
    if not comparison.key_gradient:
        keys_THD = keys_THD.detach()
    values_GC, log_votes_G, sizes_G, members_G, borders, map_BN, theta, summary, longest = _Join.apply(
        *(tokens.values_TC, keys_THD, tokens.log_votes_T, u, target, scores_T),
        *(tokens, comparison, soft, spatial, room, fusion),
    )
    votes_G = log_votes_G if soft else None
    padded = room is not None
    merged = Tokens(values_GC, borders, longest, sizes_G, map_BN, tokens.grid, tokens.num_prefix, votes_G, padded)
    return Joined(merged, members_G, theta, summary)


def _learns(keys_THD: Tensor, u: Tensor, target: Tensor | None, comparison: Comparison) -> bool:
    keys_learn = comparison.key_gradient > 0 and keys_THD.requires_grad
    return keys_learn or (u if target is None else target).requires_grad


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values_TC: Tensor,
        keys_THD: Tensor,
        log_votes_T: Tensor | None,
        u: Tensor,
        target: Tensor | None,
        scores_T: Tensor | None,
        tokens: Tokens,
        comparison: Comparison,
        soft: bool,
        spatial: bool,
        room: Room | None,
        fusion: Fusion,
    ) -> tuple[Any, ...]:
        values_TC, borders, longest = values_TC.contiguous(), tokens.cu_seqlens, tokens.max_len
        # Dot products have no bound that fp16 would be sure to hold.
        half = comparison.scale is None and keys_THD.dtype != torch.float32
        made = prepare(keys_THD, borders, longest, comparison, half, u, tokens.sizes_T)
        old_map_BN = tokens.patch_to_token_BN.contiguous()
        # Before anything is merged all sizes are 1, and say nothing.
        sizes_count = comparison.size_power > 0 and not tokens.is_unmerged
        by_size = SizeWeight(tokens.sizes_T, comparison.size_power) if sizes_count else None
        place = tokens.grid if spatial else None
        _link(made, borders, longest, comparison.best_links, by_size, old_map_BN, place)
        if room is not None:
            room = Room(min(room.tokens, values_TC.shape[0]), min(room.longest, longest))
        found = number_trees(made.parent_T, borders, longest, made.broken_BP, torch.int32, old_map_BN, room)
        if room is None:
            # The one transfer of a layer.
            count, new_longest, broken = found.summary.tolist()
            if broken:
                raise non_finite_keys()
        else:
            count, new_longest = room
        members_G = found.members_G[:count]
        sizes_G = tokens.sizes_T.new_empty(count)
        log_votes_G = made.weights_T.new_empty(count)
        members = Members(
            found.group_of_T,
            members_G,
            found.order_T,
            found.starts_G,
            borders if tokens.padded else None,
            None if room is None else found.cu_seqlens,
        )
        fused = fuse(fusion, values_TC, made.weights_T, scores_T, members, tokens.sizes_T, sizes_G, log_votes_G)
        ctx.padded, ctx.dtype = tokens.padded, values_TC.dtype
        ctx.settings = longest, comparison, soft, keys_THD.shape[1], keys_THD.dtype
        ctx.fusion, ctx.num_fused = fusion, len(fused.kept)
        ctx.grid = place
        ctx.in_patch_order = tokens.is_unmerged and tokens.num_prefix == 0
        kept: list[Tensor | None] = [made.weights_T, values_TC if soft or fused.kept else None]
        if soft and half and not spatial and not fused.kept:
            # Read in half precision only, so nothing is lost by keeping no more: it is most of what a layer keeps.
            kept[1] = values_TC.to(half_type(made.half_TD))
        if soft:
            kept += [made.half_TD, made.theta, made.tau, made.width]
            if comparison.key_gradient:
                kept += [made.features_TD, made.norms_T]
            else:
                kept += [old_map_BN if spatial else None, tokens.sizes_T if by_size is not None else None]
        ctx.save_for_backward(found.group_of_T, fused.totals_G, borders, *fused.kept, *kept)
        records = sizes_G, members_G, found.cu_seqlens, found.patch_to_token_BN, made.theta, found.summary
        ctx.mark_non_differentiable(*records, *(() if soft else (log_votes_G,)))
        # Or zeros would be made for all that has no gradient, a launch for each.
        ctx.set_materialize_grads(False)
        return fused.values_GC, log_votes_G, *records, new_longest

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_GC: Tensor | None, grad_votes_G: Tensor | None, *_: object
    ) -> tuple[Tensor | None, ...]:
        comparison, soft = ctx.settings[1:3]
        group_of_T, totals_G, borders, *kept = ctx.saved_tensors
        fused, (weights_T, values_TC, *rest) = kept[: ctx.num_fused], kept[ctx.num_fused :]
        if grad_GC is None and (not soft or grad_votes_G is None):
            return (None,) * 12
        existing = borders if ctx.padded else None
        if grad_GC is None:
            grad_GC = values_TC.new_zeros(totals_G.shape[0], values_TC.shape[1], dtype=ctx.dtype)
        hard_TC = grad_scores_T = None
        if fused:
            hard_TC, grad_scores_T = grad_of_fusion(ctx.fusion, grad_GC, group_of_T, values_TC, fused, existing)
        if not soft:
            if hard_TC is None:
                hard_TC = spread(grad_GC, weights_T, group_of_T, totals_G, grad_GC.dtype, existing)
            return (hard_TC, *(None,) * 4, grad_scores_T, *(None,) * 6)
        if grad_votes_G is None:
            grad_votes_G = torch.zeros_like(totals_G)
        groups = Spread(grad_GC, grad_votes_G, group_of_T, totals_G, weights_T, existing)
        if comparison.key_gradient:
            grads = _grads_of_keys_and_threshold(ctx, groups, borders, values_TC, *rest)
        else:
            grads = _grads_of_threshold(ctx, groups, borders, values_TC, *rest)
        to_target, needs_u = ctx.needs_input_grad[4], ctx.needs_input_grad[3]
        return (
            grads.values_TC if hard_TC is None else hard_TC,
            grads.keys_THD,
            grads.votes_T if ctx.needs_input_grad[2] else None,
            grads.threshold if needs_u and not to_target else None,
            grads.threshold if to_target else None,
            grad_scores_T,
            *(None,) * 6,
        )


def _link(
    made: Prepared,
    borders: Tensor,
    longest: int,
    best_links: bool,
    by_size: SizeWeight | None,
    map_BN: Tensor,
    grid: tuple[int, int] | None,
) -> None:
    """Join the tokens that are linked; where there is a grid, only those that touch."""
    if grid is not None and best_links:
        join_best_touching(made.half_TD, map_BN, grid, made.theta, made.parent_T, by_size)
    elif grid is not None:
        join_touching(made.half_TD, map_BN, grid, made.theta, made.parent_T)
    elif best_links:
        join_best(made.half_TD, borders, made.theta, made.parent_T, longest, by_size)
    else:
        join_everywhere(made.half_TD, borders, made.theta, made.parent_T, longest)


class _Grads(NamedTuple):
    values_TC: Tensor
    """Of groups that are merged by their mean."""
    keys_THD: Tensor | None
    votes_T: Tensor
    threshold: Tensor
    """Of the target share, or of u where there is none."""


def _grads_of_threshold(
    ctx: Any,
    groups: Spread,
    borders: Tensor,
    values_TC: Tensor,
    half_TD: Tensor,
    theta: Tensor,
    tau: Tensor,
    theta_width: Tensor,
    map_BN: Tensor | None,
    sizes_T: Tensor | None,
) -> _Grads:
    """There is a map where only touching tokens join, and sizes where those count."""
    twin, place = (groups, half_TD, values_TC, theta, tau), (borders, ctx.settings[0], theta_width, _sign(ctx))
    by_size = None if sizes_T is None else SizeWeight(sizes_T, ctx.settings[1].size_power)
    if map_BN is not None:
        made = touching_threshold_gradient(
            *twin, map_BN, ctx.grid, *place, by_size=by_size, in_patch_order=ctx.in_patch_order
        )
    else:
        made = threshold_gradient(*twin, *place, by_size=by_size)
    return _Grads(made.grad_TC, None, made.grad_votes_T, made.grad)


def _grads_of_keys_and_threshold(
    ctx: Any,
    groups: Spread,
    borders: Tensor,
    values_TC: Tensor,
    half_TD: Tensor,
    theta: Tensor,
    tau: Tensor,
    theta_width: Tensor,
    features_TD: Tensor,
    norms_T: Tensor,
) -> _Grads:
    longest, comparison, _, heads, dtype = ctx.settings
    grad_TC = torch.empty_like(values_TC, dtype=groups.grad_GC.dtype)
    passed = soft_gradient_passes(groups, half_TD, values_TC, theta, tau, borders, longest, grad_TC)
    grad_u = torch.empty_like(theta)
    parts = ThetaParts(passed.grad_theta_P, theta_width, tau, grad_u)
    grad_THD = grad_of_keys(
        passed.grad_features_TD, features_TD, norms_T, borders, longest, comparison, heads, dtype, parts, _sign(ctx)
    )
    if ctx.padded:
        clear_spare(grad_THD[:, 0], borders)
    return _Grads(grad_TC, grad_THD, passed.grad_votes_T, grad_u)


def _sign(ctx: Any) -> float:
    """A larger target share is a higher θ, a larger u a lower one."""
    return 1.0 if ctx.needs_input_grad[4] else -1.0
