"""From labels to groups on the GPU: consecutive numbers, members, borders, and the members in order.

The plain version is ``asc.tokens.groups_from_labels``. Here the tokens are also sorted by group (a counting sort
inside every image), so that merging can add up each group's members in a fixed order. One small transfer tells
the host all it needs. Shape letters: see ``asc.tokens``.
"""

# Kernels are compiled by Triton from their syntax: they have no Python types to check.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped, no-any-return"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asc.kernels.components import root_of
from asc.kernels.features import round_up
from asc.kernels.launch import cdiv, launch
from asc.tokens import Room

_CHUNK = 128  # tokens whose places are compared with one another at once


class Numbered(NamedTuple):
    """Groups, with room for one group per token; the first ``summary[0]`` entries of ``*_G`` are used."""

    group_of_T: Tensor
    members_G: Tensor
    cu_seqlens: Tensor
    order_T: Tensor
    """Tokens sorted by group, rising inside each group (int32)."""
    starts_G: Tensor
    """Where each group begins in ``order_T`` (int32)."""
    summary: Tensor
    """Number of groups, largest number of groups of an image, and the flag that was given (int32)."""
    patch_to_token_BN: Tensor | None = None
    """Map of the patches to the groups, where one was given."""


def number_groups(
    labels_T: Tensor, cu_seqlens: Tensor, max_len: int, flag: Tensor | None, room: Room | None = None
) -> Numbered:
    """Number the groups of ``labels_T`` (smallest packed index of each token's group) in order of first members.

    ``flag``, one int32, is handed through to the summary, so that it needs no transfer of its own.
    """
    batch, device = cu_seqlens.shape[0] - 1, labels_T.device
    flag_B = torch.zeros(batch, dtype=torch.int32, device=device) if flag is None else flag.expand(batch).contiguous()
    # A copy: the kernels shorten paths in place.
    parent_T = labels_T.to(torch.int32, copy=True)
    return number_trees(parent_T, cu_seqlens, max_len, flag_B, torch.int64, None, room)


def number_trees(
    parent_T: Tensor,
    cu_seqlens: Tensor,
    max_len: int,
    flags_BP: Tensor,
    dtype: torch.dtype,
    patch_to_token_BN: Tensor | None,
    room: Room | None = None,
) -> Numbered:
    """The same from a forest, whose paths are shortened; a flag is up where any of ``flags_BP`` is.

    ``dtype`` is that of the groups. A map of patches is composed with the groups. Where there is ``room`` for fewer
    groups than there are, borders, groups and map end there, so that nobody reads or writes beyond, and mean nothing;
    the summary has the truth.
    """
    total, batch, device = parent_T.shape[0], cu_seqlens.shape[0] - 1, parent_T.device
    stride = round_up(total)
    # Six rows with a number for each token, then two for each image.
    scratch = torch.empty(6 * stride + 2 * batch, dtype=torch.int32, device=device)
    # The new borders of the images, then the summary.
    borders = torch.empty(batch + 4, dtype=torch.int32, device=device)
    groups = torch.empty(2, stride, dtype=dtype, device=device)
    numbers = stride, flags_BP.numel() // batch
    launch(_place_members, (batch, 1, 1), (parent_T, cu_seqlens, flags_BP, scratch), numbers, (_CHUNK,), warps=8)
    map_in = scratch if patch_to_token_BN is None else patch_to_token_BN
    map_out = scratch if patch_to_token_BN is None else torch.empty_like(patch_to_token_BN)
    patches = 0 if patch_to_token_BN is None else patch_to_token_BN.shape[1]
    tensors = parent_T, cu_seqlens, scratch, map_in, groups, borders, map_out
    grid = cdiv(max(max_len, patches), 1024), batch, 1
    sizes = stride, batch, patches, *(Room(total, total) if room is None else room)
    launch(_write_groups, grid, tensors, sizes, (patch_to_token_BN is not None, 1024, 1024))
    group_of_T, members_G = groups.unbind()
    order_T, starts_G = scratch[4 * stride : 6 * stride].view(2, stride).unbind()
    return Numbered(
        group_of_T[:total],
        members_G,
        borders[: batch + 1],
        order_T[:total],
        starts_G,
        borders[batch + 1 :],
        None if patch_to_token_BN is None else map_out,
    )


@triton.jit(do_not_specialize=["stride", "flag_parts"])
def _place_members(
    parent_ptr,
    borders_ptr,
    flags_ptr,
    scratch_ptr,
    stride,
    flag_parts,
    CHUNK: tl.constexpr,
):
    """One image: number its groups, and each token's place inside its group.

    Rows of the scratch: the group's number, the token's place, the group's members, and where it starts among the
    sorted tokens; all but the second at the position of the group's first member. Then the sorted tokens, and where
    each group starts among them. Behind the rows the groups of every image, and its flag.
    """
    rank_ptr = scratch_ptr
    place_ptr = scratch_ptr + stride
    members_ptr = scratch_ptr + 2 * stride
    start_ptr = scratch_ptr + 3 * stride
    counts_ptr = scratch_ptr + 6 * stride
    image = tl.program_id(0)
    begin = tl.load(borders_ptr + image)
    end = tl.load(borders_ptr + image + 1)
    lanes = tl.arange(0, CHUNK)
    groups = 0
    for chunk in range(begin, end, CHUNK):
        tokens = chunk + lanes
        exists = tokens < end
        label = tl.where(exists, root_of(parent_ptr, tl.minimum(tokens, end - 1)), -1)
        is_first = (label == tokens).to(tl.int32)
        tl.store(rank_ptr + tokens, groups + tl.cumsum(is_first, axis=0) - 1, mask=is_first > 0)
        groups += tl.sum(is_first, axis=0)
        # Both counts in one sum: members before a token in the low half, members behind it in the high half.
        side = tl.where(lanes[None, :] < lanes[:, None], 1, tl.where(lanes[None, :] > lanes[:, None], 1 << 16, 0))
        both = tl.sum(tl.where(label[:, None] == label[None, :], side, 0), axis=1)
        earlier = both & 0xFFFF
        is_last = exists & (both < (1 << 16))
        # A group begins with its first member, so only groups of earlier chunks have a count to go on from.
        before = tl.load(members_ptr + label, mask=exists & (label < chunk), other=0)
        place = before + earlier
        tl.store(place_ptr + tokens, place, mask=exists)
        # All must have read the counts before the last member in this chunk renews them, and the next chunk
        # must see the new ones.
        tl.debug_barrier()
        tl.store(members_ptr + label, place + 1, mask=is_last)
        tl.debug_barrier()
    tl.store(counts_ptr + image, groups)
    flag = 0
    for part in range(0, flag_parts, CHUNK):
        parts = part + lanes
        own = tl.load(flags_ptr + image * flag_parts + parts, mask=parts < flag_parts, other=0)
        flag = tl.maximum(flag, tl.max(own, axis=0))
    tl.store(counts_ptr + tl.num_programs(0) + image, flag)
    placed = 0
    for chunk in range(begin, end, CHUNK):
        tokens = chunk + lanes
        label = tl.load(parent_ptr + tokens, mask=tokens < end, other=-1)
        is_first = label == tokens
        members = tl.load(members_ptr + tokens, mask=is_first, other=0)
        tl.store(start_ptr + tokens, begin + placed + tl.cumsum(members, axis=0) - members, mask=is_first)
        placed += tl.sum(members, axis=0)


@triton.jit(do_not_specialize=["stride", "batch", "patches", "room", "room_longest"])
def _write_groups(
    parent_ptr,
    borders_ptr,
    scratch_ptr,
    map_ptr,
    groups_ptr,
    new_borders_ptr,
    new_map_ptr,
    stride,
    batch,
    patches,
    room,
    room_longest,
    HAS_MAP: tl.constexpr,
    CHUNK: tl.constexpr,
    IMAGES: tl.constexpr,
):
    """Every token its group, every group its members; the groups of earlier images come first."""
    piece, image = tl.program_id(0), tl.program_id(1)
    counts_ptr = scratch_ptr + 6 * stride
    summary_ptr = new_borders_ptr + batch + 1
    offset = 0
    kept = 0
    total = 0
    longest = 0
    flag = 0
    for start in range(0, batch, IMAGES):
        images = start + tl.arange(0, IMAGES)
        counts = tl.load(counts_ptr + images, mask=images < batch, other=0)
        fitting = tl.minimum(counts, room_longest)
        offset += tl.sum(tl.where(images < image, fitting, 0), axis=0)
        kept += tl.sum(fitting, axis=0)
        total += tl.sum(counts, axis=0)
        longest = tl.maximum(longest, tl.max(counts, axis=0))
        flag = tl.maximum(flag, tl.max(tl.load(counts_ptr + batch + images, mask=images < batch, other=0), axis=0))
    kept = tl.minimum(kept, room)
    if piece == 0:
        tl.store(new_borders_ptr + image, tl.minimum(offset, room))
        if image == batch - 1:
            tl.store(new_borders_ptr + batch, kept)
            tl.store(summary_ptr, total)
            tl.store(summary_ptr + 1, longest)
            tl.store(summary_ptr + 2, flag)
    lanes = piece * CHUNK + tl.arange(0, CHUNK)
    tokens = tl.load(borders_ptr + image) + lanes
    exists = tokens < tl.load(borders_ptr + image + 1)
    label = tl.load(parent_ptr + tokens, mask=exists, other=-1)
    rank = tl.load(scratch_ptr + label, mask=exists, other=0)
    group = offset + tl.minimum(rank, room_longest - 1)
    kind = groups_ptr.dtype.element_ty
    tl.store(groups_ptr + tokens, tl.minimum(group, kept - 1).to(kind), mask=exists)
    start = tl.load(scratch_ptr + 3 * stride + label, mask=exists, other=0)
    place = tl.load(scratch_ptr + stride + tokens, mask=exists, other=0)
    tl.store(scratch_ptr + 4 * stride + start + place, tokens, mask=exists)
    is_first = exists & (label == tokens) & (rank < room_longest) & (group < room)
    members = tl.load(scratch_ptr + 2 * stride + tokens, mask=is_first, other=0)
    tl.store(groups_ptr + stride + group, members.to(kind), mask=is_first)
    tl.store(scratch_ptr + 5 * stride + group, start, mask=is_first)
    if HAS_MAP:
        places = image.to(tl.int64) * patches + lanes
        token = tl.load(map_ptr + places, mask=lanes < patches, other=0)
        root = tl.load(parent_ptr + token, mask=lanes < patches, other=0)
        new = offset + tl.minimum(tl.load(scratch_ptr + root, mask=lanes < patches, other=0), room_longest - 1)
        tl.store(new_map_ptr + places, tl.minimum(new, kept - 1).to(tl.int64), mask=lanes < patches)
