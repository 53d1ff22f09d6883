"""The ragged batch of tokens that flows through the network.

Shape letters used in all of ``asc``:

    B images        T tokens of all images, packed one image after another
    N patches       G groups = tokens after a merge (packed like T)
    C channels      D width of a head-mean key       H heads
    P prefix tokens (class, registers) of one image  E pairs of touching tokens
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asc.kernels import kernels_take


class Groups(NamedTuple):
    """Which token of the next layer every token of this layer becomes a part of."""

    group_of_T: Tensor
    """Packed index of the new token (int64)."""
    members_G: Tensor
    """How many tokens each new token joins (int64)."""
    cu_seqlens: Tensor
    """Borders of the images among the new tokens (int32, B + 1)."""
    order_T: Tensor | None = None
    """Tokens sorted by group, where a kernel has sorted them (int32)."""
    starts_G: Tensor | None = None
    """Where each group begins in ``order_T`` (int32)."""
    max_len: int | None = None
    """Largest number of groups of an image, where the host knows it."""
    flag: int = 0
    """The flag given to ``groups_from_labels``."""
    summary: Tensor | None = None
    """Number of groups, largest number of an image, and the flag (int32, on the device), where the host has not been
    told of them."""

    @property
    def num_groups(self) -> int:
        """Number of new tokens of the whole batch."""
        return self.members_G.shape[0]


class Room(NamedTuple):
    """How much a merge makes room for where the host is not to wait for the number of groups."""

    tokens: int
    """Of all images together."""
    longest: int
    """Of one image."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of a batch of images, each image with its own number of them.

    Every image's tokens are ordered: first ``num_prefix`` prefix tokens, then superpixels by their first
    member. The patch-to-token map is composed at every merge and never recomputed; dense maps, pictures
    and pooling all read it.
    """

    values_TC: Tensor
    """Token features, images one after another."""
    cu_seqlens: Tensor
    """Image b owns rows ``cu_seqlens[b]:cu_seqlens[b + 1]`` (int32, B + 1)."""
    max_len: int
    """An upper bound of the longest image's length (exact on the CPU)."""
    sizes_T: Tensor
    """Patches each token holds (int64); 0 for prefix tokens."""
    patch_to_token_BN: Tensor
    """Packed index of the token that holds each patch (int64)."""
    grid: tuple[int, int]
    """Rows and columns of the patch grid."""
    num_prefix: int = 0
    """Prefix tokens at the head of every image; never merged."""
    log_votes_T: Tensor | None = None
    """Zeros that carry a gradient: how a superpixel's one vote in the mean depends on the grouping. Without
    them the gradient would not know that joining two superpixels also takes away one of their votes."""
    padded: bool = False
    """Whether there may be rows behind the last image's that belong to none; they take part in nothing that mixes
    tokens, and get no gradient. See ``asc.replay``."""

    @staticmethod
    def from_dense(values_BNC: Tensor, grid: tuple[int, int] | None = None, num_prefix: int = 0) -> Tokens:
        """Pack a regular batch, prefix tokens first, one token for each patch.

        ``grid`` is the (rows, columns) of the patches; without one they count as a single row, which is
        fine as long as no spatial neighbourhood or dense map is asked for.
        """
        if values_BNC.ndim != 3 or 0 in values_BNC.shape:
            raise ValueError(
                f"tokens must be a non-empty (images, tokens, channels) tensor, got shape {tuple(values_BNC.shape)}"
            )
        batch, length, channels = values_BNC.shape
        patches = length - num_prefix
        grid = (1, patches) if grid is None else grid
        if patches < 1 or grid[0] * grid[1] != patches:
            raise ValueError(f"grid {grid} does not hold the {patches} patch tokens of an image")
        device = values_BNC.device
        first_B1 = torch.arange(batch, device=device)[:, None] * length
        sizes_BL = torch.ones(batch, length, dtype=torch.int64, device=device)
        sizes_BL[:, :num_prefix] = 0
        return Tokens(
            values_TC=values_BNC.reshape(batch * length, channels),
            cu_seqlens=torch.arange(batch + 1, dtype=torch.int32, device=device) * length,
            max_len=length,
            sizes_T=sizes_BL.view(-1),
            patch_to_token_BN=first_B1 + torch.arange(num_prefix, length, device=device),
            grid=grid,
            num_prefix=num_prefix,
        )

    @property
    def batch(self) -> int:
        """Number of images."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def device(self) -> torch.device:
        """Device of every tensor of the batch."""
        return self.values_TC.device

    @property
    def is_regular(self) -> bool:
        """Whether all images certainly have the same length, so that packing is a mere view."""
        return not self.padded and self.batch * self.max_len == self.values_TC.shape[0]

    @property
    def was_merged(self) -> bool:
        """Whether there are fewer tokens than patches."""
        rows, columns = self.grid
        return self.values_TC.shape[0] < self.batch * (rows * columns + self.num_prefix)

    @property
    def is_unmerged(self) -> bool:
        """Whether every patch is a token of its own, as far as the host knows: it does not count padded tokens."""
        return not self.padded and not self.was_merged

    @property
    def is_steady(self) -> bool:
        """Whether all images have the same length, and will have it the next time.

        A single image's superpixels are regular only by chance, and for every new length PyTorch's attention is planned
        anew on recent GPUs, which takes a hundred times as long as running it.
        """
        return self.is_regular and (self.batch > 1 or not self.was_merged)

    def lengths_B(self) -> Tensor:
        """Tokens of each image, prefix included."""
        return self.cu_seqlens.diff()

    def image_of_T(self) -> Tensor:
        """The image each token belongs to."""
        images_B = torch.arange(self.batch, device=self.device)
        return images_B.repeat_interleave(self.lengths_B(), output_size=self.values_TC.shape[0])

    def with_values(self, values_TC: Tensor) -> Tokens:
        """The same grouping with other features."""
        # Written out: ``dataclasses.replace`` takes several times as long, and every block calls this twice.
        return Tokens(
            values_TC,
            self.cu_seqlens,
            self.max_len,
            self.sizes_T,
            self.patch_to_token_BN,
            self.grid,
            self.num_prefix,
            self.log_votes_T,
            self.padded,
        )

    def merged(self, groups: Groups, values_GC: Tensor, log_votes_G: Tensor | None = None) -> Tokens:
        """The batch after its tokens were joined into ``groups`` with the features ``values_GC``."""
        sizes_G = self.sizes_T.new_zeros(groups.num_groups).index_add_(0, groups.group_of_T, self.sizes_T)
        max_len = groups.max_len
        if max_len is None:
            # On a GPU the old bound stays valid and spares one transfer to the host.
            max_len = self.max_len if self.device.type == "cuda" else int(groups.cu_seqlens.diff().max())
        return replace(
            self,
            values_TC=values_GC,
            cu_seqlens=groups.cu_seqlens,
            max_len=max_len,
            sizes_T=sizes_G,
            patch_to_token_BN=groups.group_of_T[self.patch_to_token_BN],
            log_votes_T=log_votes_G,
        )

    def without_prefix(self) -> tuple[Tokens, Tensor]:
        """The superpixels alone, and the rows they had in this batch."""
        if self.num_prefix == 0:
            return self, torch.arange(self.values_TC.shape[0], device=self.device)
        images_B1 = torch.arange(self.batch + 1, device=self.device, dtype=torch.int32)
        cu_seqlens = self.cu_seqlens - self.num_prefix * images_B1
        total = self.values_TC.shape[0] - self.batch * self.num_prefix
        rows_T = torch.arange(total, device=self.device, dtype=torch.int32)
        # Rows behind the last image's count as that one's: they come from behind it, too.
        image_of_T = torch.searchsorted(cu_seqlens[1:], rows_T, right=True).clamp(max=self.batch - 1)
        rows_T = rows_T + self.num_prefix * (image_of_T + 1)
        # The map is shifted by the prefix tokens of the images up to and including its own.
        shift_B1 = self.num_prefix * (images_B1[:-1, None] + 1).long()
        patches = replace(
            self,
            values_TC=self.values_TC.index_select(0, rows_T),
            cu_seqlens=cu_seqlens,
            max_len=self.max_len - self.num_prefix,
            sizes_T=self.sizes_T.index_select(0, rows_T),
            patch_to_token_BN=self.patch_to_token_BN - shift_B1,
            num_prefix=0,
            log_votes_T=None if self.log_votes_T is None else self.log_votes_T.index_select(0, rows_T),
        )
        return patches, rows_T

    def with_prefix(self, prefix_BPC: Tensor) -> Tokens:
        """The batch with prefix tokens put at the head of every image; undoes ``without_prefix``."""
        count = prefix_BPC.shape[1]
        images_B1 = torch.arange(self.batch + 1, device=self.device, dtype=torch.int32)
        cu_seqlens = self.cu_seqlens + count * images_B1
        is_prefix_T = torch.zeros(self.values_TC.shape[0] + self.batch * count, dtype=torch.bool, device=self.device)
        prefix_rows_BP = cu_seqlens[:-1, None] + torch.arange(count, device=self.device)
        is_prefix_T.index_fill_(0, prefix_rows_BP.flatten(), True)
        # Row k of the result is the k-th prefix token or the k-th superpixel, whichever kind stands there.
        prefix_rank_T = is_prefix_T.cumsum(0) - 1
        other_rank_T = (~is_prefix_T).cumsum(0) - 1
        rows_T = torch.where(is_prefix_T, self.values_TC.shape[0] + prefix_rank_T, other_rank_T)
        shift_B1 = count * (images_B1[:-1, None] + 1).long()
        fill = (0, self.batch * count)
        return replace(
            self,
            values_TC=torch.cat([self.values_TC, prefix_BPC.flatten(0, 1)]).index_select(0, rows_T),
            cu_seqlens=cu_seqlens,
            max_len=self.max_len + count,
            sizes_T=F.pad(self.sizes_T, fill).index_select(0, rows_T),
            patch_to_token_BN=self.patch_to_token_BN + shift_B1,
            num_prefix=count,
            log_votes_T=None if self.log_votes_T is None else F.pad(self.log_votes_T, fill).index_select(0, rows_T),
        )

    def dense_BCHW(self, values_TC: Tensor | None = None) -> Tensor:
        """A dense map in which every patch has the features of its token."""
        values_TC = self.values_TC if values_TC is None else values_TC
        # Not by an index: on a GPU its way back sorts, and adds the patches of one token one after another.
        dense_MC = values_TC.index_select(0, self.patch_to_token_BN.flatten())
        dense_BNC = dense_MC.view(self.batch, -1, dense_MC.shape[1])
        return dense_BNC.transpose(1, 2).reshape(self.batch, -1, *self.grid)

    def prefix_BPC(self) -> Tensor:
        """The prefix tokens of every image."""
        rows_BP = self.cu_seqlens[:-1, None] + torch.arange(self.num_prefix, device=self.device)
        return self.values_TC.index_select(0, rows_BP.flatten()).view(*rows_BP.shape, -1)

    def label_map_BHW(self) -> Tensor:
        """The number of the superpixel that holds each patch, counted from 0 in every image."""
        first_B1 = self.cu_seqlens[:-1, None].long() + self.num_prefix
        return (self.patch_to_token_BN - first_B1).view(self.batch, *self.grid)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def mean_BC(self, by_size: bool = False) -> Tensor:
        """Mean feature of each image over its superpixels.

        Every superpixel counts once; with ``by_size`` every patch does. Prefix tokens never count.
        """
        if kernels_take(self.values_TC):
            from asc.kernels.pooling import pooled_mean

            return pooled_mean(
                self.values_TC, self.sizes_T, self.log_votes_T, self.cu_seqlens, self.max_len, by_size, self.padded
            )
        # Accumulated in fp32 at least: half-precision sums over thousands of tokens lose digits.
        dtype = torch.promote_types(self.values_TC.dtype, torch.float32)
        weights_T = (self.sizes_T if by_size else self.sizes_T.clamp(max=1)).to(dtype)
        if self.log_votes_T is not None and not by_size:
            weights_T = weights_T * self.log_votes_T.exp()
        image_of_T = self.image_of_T()
        weighted_TC = self.values_TC.to(dtype) * weights_T[:, None]
        sums_BC = weighted_TC.new_zeros(self.batch, weighted_TC.shape[1]).index_add(0, image_of_T, weighted_TC)
        totals_B = weights_T.new_zeros(self.batch).index_add(0, image_of_T, weights_T)
        return (sums_BC / totals_B[:, None]).to(self.values_TC.dtype)

    def check(self) -> Tokens:
        """Check every invariant and return the batch; for tests and bug hunts, not for the hot path."""
        total, batch = self.values_TC.shape[0], self.batch
        patches = self.grid[0] * self.grid[1]
        lengths_B = self.lengths_B()
        assert self.cu_seqlens.dtype == torch.int32, "cu_seqlens must be int32"
        assert int(self.cu_seqlens[0]) == 0 and int(self.cu_seqlens[-1]) == total, "cu_seqlens must span all tokens"
        assert int(lengths_B.min()) >= self.num_prefix + 1, "every image needs at least one superpixel"
        assert int(lengths_B.max()) <= self.max_len, "max_len must bound every length"
        assert self.sizes_T.shape == (total,), "one size for each token"
        assert self.patch_to_token_BN.shape == (batch, patches), "one token for each patch"
        counted_T = torch.bincount(self.patch_to_token_BN.flatten(), minlength=total)
        assert torch.equal(counted_T, self.sizes_T), "sizes must count the patches that map to each token"
        is_prefix_T = torch.zeros(total, dtype=torch.bool, device=self.device)
        for offset in range(self.num_prefix):
            is_prefix_T[self.cu_seqlens[:-1].long() + offset] = True
        assert torch.equal(self.sizes_T == 0, is_prefix_T), "the map must be onto the superpixels, and only those"
        assert torch.equal(self.image_of_T()[self.patch_to_token_BN], _rows_like(self.patch_to_token_BN)), (
            "a patch may only map to a token of its own image"
        )
        return self


def _rows_like(map_BN: Tensor) -> Tensor:
    return torch.arange(map_BN.shape[0], device=map_BN.device)[:, None].expand_as(map_BN)


def groups_from_labels(
    labels_T: Tensor,
    cu_seqlens: Tensor,
    max_len: int | None = None,
    flag: Tensor | None = None,
    expected: Room | None = None,
) -> Groups:
    """Number the groups of a labelling consecutively.

    ``labels_T`` holds for each token the smallest packed index of its component. The groups come out in
    the order of their first members, so images stay contiguous. ``flag`` is one int32 on the device that
    the host wants to know as well; it rides along with the number of groups. Where ``expected`` says exactly how many
    groups there are, kernels do not let the host wait.
    """
    if max_len is not None and kernels_take(labels_T):
        return _groups_by_kernel(labels_T, cu_seqlens, max_len, flag, expected)
    is_first_T = labels_T == torch.arange(labels_T.shape[0], device=labels_T.device)
    firsts_T1 = F.pad(is_first_T.cumsum(0), (1, 0))
    group_of_T = firsts_T1[labels_T]
    # Reading the number of groups is the one number a layer asks of the device.
    num_groups = int(firsts_T1[-1])
    members_G = torch.zeros(num_groups, dtype=torch.int64, device=labels_T.device)
    members_G.index_add_(0, group_of_T, torch.ones_like(group_of_T))
    borders = firsts_T1[cu_seqlens.long()].to(torch.int32)
    return Groups(group_of_T, members_G, borders, flag=0 if flag is None else int(flag))


def _groups_by_kernel(
    labels_T: Tensor, cu_seqlens: Tensor, max_len: int, flag: Tensor | None, expected: Room | None
) -> Groups:
    from asc.kernels.numbering import number_groups

    found = number_groups(labels_T, cu_seqlens, max_len, flag, expected)
    if expected is not None:
        count, longest = expected
        places = found.order_T, found.starts_G[:count]
        members_G = found.members_G[:count]
        return Groups(found.group_of_T, members_G, found.cu_seqlens, *places, longest, summary=found.summary)
    # The one transfer of a layer.
    count, longest, flag_value = found.summary.tolist()
    members_G, starts_G = found.members_G[:count], found.starts_G[:count]
    return Groups(found.group_of_T, members_G, found.cu_seqlens, found.order_T, starts_G, longest, flag_value)
