"""The similarity graph: what is compared, and which pairs of tokens may be joined.

Both similarities are inner products of per-token *features*: ``S_ij = f_i · f_j``. Everything after this
file (components, gates, gradients, kernels) knows features only, and a ``SizeWeight`` where sizes count too. Shape
letters: see ``asc.tokens``; R is a tile of rows.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asc.tokens import Tokens

Similarity = Literal["cosine", "dot"]

# Below this norm a key carries no direction; dividing by it would turn rounding noise into similarity.
SMALLEST_NORM = 1e-6


class SizeWeight(NamedTuple):
    """How the sizes a and b of two tokens, in patches, count in their similarity (cosine only):

        S' = 1 - (1 - S) · (2ab / (a + b))^power

    Two single patches keep their S. With power 1 the distance 1 - S' is the criterion of Ward's clustering,
    ab / (a + b) · ‖f_a - f_b‖²: by how much the sum of squares grows when the two become one.
    """

    sizes_T: Tensor
    """Patches of each token (int64)."""
    power: float
    """0: sizes do not count; 1: as Ward has it."""

    def of_pairs(self, pairs_2E: Tensor) -> Tensor:
        """The factor of 1 - S for every listed pair (fp64)."""
        return self.factors(self.sizes_T[pairs_2E[0]], self.sizes_T[pairs_2E[1]])

    def of_tile(self, rows: slice, columns: slice) -> Tensor:
        """The factor of 1 - S for every pair of two stretches of tokens (fp64)."""
        return self.factors(self.sizes_T[rows, None], self.sizes_T[columns])

    def factors(self, a: Tensor, b: Tensor) -> Tensor:
        """The factor of 1 - S for tokens of a and b patches (fp64)."""
        # In fp64: a power of fp32 may round by its place in memory, and an image must not feel its batch-mates.
        a, b = a.double(), b.double()
        factors: Tensor = (2 * a * b / (a + b)) ** self.power
        return factors


class NonFiniteKeysError(ValueError):
    """Keys hold NaN or infinity: every comparison would be false and nothing would merge, silently."""


def similarity_features(
    keys_TD: Tensor, image_of_T: Tensor, batch: int, similarity: Similarity, center: bool
) -> Tensor:
    """Features whose inner products are the similarities, in fp32 (fp64 stays).

    ``cosine``: keys of unit length, so that S lies in [-1, 1]. ``dot``: the scaled dot product of
    attention, ``k_i · k_j / sqrt(D)``. ``center`` first takes each image's mean key away: keys share a
    large common part, and without it the similarities spread over the whole range instead of crowding
    just below 1.
    """
    keys_TD = keys_TD.to(torch.promote_types(keys_TD.dtype, torch.float32))
    if center:
        keys_TD = keys_TD - _image_mean_TD(keys_TD, image_of_T, batch)
    if similarity == "dot":
        scale: float = keys_TD.shape[1] ** -0.25
        return keys_TD * scale
    norms_T1: Tensor = torch.linalg.vector_norm(keys_TD, dim=1, keepdim=True)
    return keys_TD / norms_T1.clamp(min=SMALLEST_NORM)


def _image_mean_TD(keys_TD: Tensor, image_of_T: Tensor, batch: int) -> Tensor:
    sums_BD = keys_TD.new_zeros(batch, keys_TD.shape[1]).index_add(0, image_of_T, keys_TD)
    counts_B = torch.bincount(image_of_T, minlength=batch).to(keys_TD.dtype)
    return (sums_BD / counts_B[:, None])[image_of_T]


def check_finite(features_TD: Tensor) -> None:
    """Raise ``NonFiniteKeysError`` if a feature is NaN or infinite."""
    # A sum is non-finite as soon as one entry is, and costs one pass without a temporary.
    if not bool(torch.isfinite(features_TD.detach().sum())):
        raise non_finite_keys()


def non_finite_keys() -> NonFiniteKeysError:
    """The error that says so in plain words."""
    return NonFiniteKeysError(
        "the keys given to the superpixel layer hold NaN or infinite values, so no similarity can be "
        "compared; look for NaN in the input or for diverged weights"
    )


def touching_pairs(tokens: Tokens) -> Tensor:
    """All pairs of different superpixels that touch, each once, as packed indices ``(2, E)``.

    Two superpixels touch when a patch of one is among the 8 neighbours of a patch of the other. Costs
    O(patches) whatever the number of tokens is.
    """
    rows, columns = tokens.grid
    map_BHW = tokens.patch_to_token_BN.view(tokens.batch, rows, columns)
    neighbours = [
        (map_BHW[:, :, :-1], map_BHW[:, :, 1:]),
        (map_BHW[:, :-1], map_BHW[:, 1:]),
        (map_BHW[:, :-1, :-1], map_BHW[:, 1:, 1:]),
        (map_BHW[:, :-1, 1:], map_BHW[:, 1:, :-1]),
    ]
    a_M = torch.cat([a.flatten() for a, _ in neighbours])
    b_M = torch.cat([b.flatten() for _, b in neighbours])
    low_M, high_M = torch.minimum(a_M, b_M), torch.maximum(a_M, b_M)
    total = tokens.values_TC.shape[0]
    # A superpixel's pairs with itself become -1, which sorts first. One more -1 makes sure that there is one to cut
    # off: choosing the others by a mask would make the host wait a second time.
    codes_M = torch.where(low_M != high_M, low_M * total + high_M, -1)
    codes = torch.unique(F.pad(codes_M, (0, 1), value=-1))[1:]
    return torch.stack([codes // total, codes % total])


def pair_similarities(features_TD: Tensor, pairs_2E: Tensor, by_size: SizeWeight | None = None) -> Tensor:
    """Similarity of every listed pair."""
    similarity_E = (features_TD[pairs_2E[0]] * features_TD[pairs_2E[1]]).sum(dim=1)
    return similarity_E if by_size is None else weighted(similarity_E, by_size.of_pairs(pairs_2E))


def tile_similarities(features_TD: Tensor, rows: slice, columns: slice, by_size: SizeWeight | None = None) -> Tensor:
    """Similarity of every pair of two stretches of tokens."""
    similarity_RM = features_TD[rows] @ features_TD[columns].T
    return similarity_RM if by_size is None else weighted(similarity_RM, by_size.of_tile(rows, columns))


def weighted(similarity: Tensor, factors: Tensor) -> Tensor:
    """S' of ``SizeWeight`` from S and the factors of 1 - S."""
    return 1 - (1 - similarity) * factors.to(similarity.dtype)
