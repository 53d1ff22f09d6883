"""ToMe-style grouping: every other token may join its most similar partner, a fixed share of them does.

The alternative of the paper's grouping ablation (Token Merging, Bolya et al., ICLR 2023), on ragged tokens
and with the same labels as connected components. Shape letters: see ``asc.tokens``; M is the longest image,
A and Z its even (joining) and odd (receiving) tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def bipartite(features_TD: Tensor, cu_seqlens: Tensor, max_len: int, keep: float) -> Tensor:
    """Label tokens with the smallest packed index of their group, keeping ``keep`` of every image's tokens.

    At most half of an image's tokens can join others in one step.
    """
    features_TD = features_TD.detach()
    lengths_B = cu_seqlens.diff().long()
    first_B1 = cu_seqlens[:-1, None].long()
    slots_M = torch.arange(max_len, device=features_TD.device)
    exists_BM = slots_M < lengths_B[:, None]
    packed_BM = torch.where(exists_BM, first_B1 + slots_M, 0)
    features_BMD = features_TD[packed_BM]
    similarity_BAZ = features_BMD[:, ::2] @ features_BMD[:, 1::2].transpose(1, 2)
    if similarity_BAZ.shape[2] == 0:
        return torch.arange(features_TD.shape[0], device=features_TD.device)
    similarity_BAZ = similarity_BAZ.masked_fill(~exists_BM[:, None, 1::2], -torch.inf)
    similarity_BAZ = similarity_BAZ.masked_fill(~exists_BM[:, ::2, None], -torch.inf)
    best_BA, partner_BA = similarity_BAZ.max(dim=2)
    joins_BA = _highest(best_BA, lengths_B - (keep * lengths_B).round().long())
    receiver_BA = packed_BM.gather(1, 2 * partner_BA + 1)
    return _label_by_smallest(packed_BM[:, ::2][joins_BA], receiver_BA[joins_BA], features_TD.shape[0])


def _highest(score_BA: Tensor, count_B: Tensor) -> Tensor:
    """The ``count_B`` highest finite scores of each row."""
    rank_BA = score_BA.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (rank_BA < count_B[:, None]) & score_BA.isfinite()


def _label_by_smallest(joining: Tensor, receiving: Tensor, total: int) -> Tensor:
    """Labels of the stars that joining tokens form around their receivers."""
    label_T = torch.arange(total, device=joining.device)
    receiver_T = label_T.clone()
    receiver_T[joining] = receiving
    smallest_T = label_T.scatter_reduce(0, receiver_T, label_T, "amin")
    return smallest_T[receiver_T]
