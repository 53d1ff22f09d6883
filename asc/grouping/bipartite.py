"""ToMe-style grouping: every other token may join its most similar partner, a fixed share of them does.

The alternative of the paper's grouping ablation (Token Merging, Bolya et al., ICLR 2023), on ragged tokens
and with the same labels as connected components. Shape letters: see ``asc.tokens``; M is the longest image,
A and Z its even (joining) and odd (receiving) tokens, F those of A that do join.
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


def tokens_kept(count: int, keep: float) -> int:
    """How many of so many tokens stay."""
    # In fp32 as above: rounded otherwise, a half could go the other way.
    wanted = int((keep * torch.tensor(count)).round())
    return max(wanted, count - (count + 1) // 2) if count > 1 else count


def bipartite_regular(features_TD: Tensor, batch: int, keep: float) -> Tensor:
    """The same where all images have as many tokens: nothing in it depends on what the device finds.

    Of every image ``tokens_kept`` groups are made, whatever the features are.
    """
    features_BMD = features_TD.detach().unflatten(0, (batch, -1))
    count = features_BMD.shape[1]
    own_BM = torch.arange(features_TD.shape[0], device=features_TD.device).view(batch, count)
    fewer = count - tokens_kept(count, keep)
    if fewer == 0:
        return own_BM.flatten()
    best_BA, partner_BA = (features_BMD[:, ::2] @ features_BMD[:, 1::2].transpose(1, 2)).max(dim=2)
    first_BF = best_BA.argsort(dim=1, descending=True, stable=True)[:, :fewer]
    joins_BA = torch.zeros_like(best_BA, dtype=torch.bool).scatter_(1, first_BF, True)
    receiver_BM = own_BM.clone()
    receiver_BM[:, ::2] = torch.where(joins_BA, own_BM.gather(1, 2 * partner_BA + 1), own_BM[:, ::2])
    return _label_of_receivers(receiver_BM.flatten())


def _highest(score_BA: Tensor, count_B: Tensor) -> Tensor:
    """The ``count_B`` highest finite scores of each row."""
    rank_BA = score_BA.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (rank_BA < count_B[:, None]) & score_BA.isfinite()


def _label_by_smallest(joining: Tensor, receiving: Tensor, total: int) -> Tensor:
    """Labels of the stars that joining tokens form around their receivers."""
    receiver_T = torch.arange(total, device=joining.device)
    receiver_T[joining] = receiving
    return _label_of_receivers(receiver_T)


def _label_of_receivers(receiver_T: Tensor) -> Tensor:
    label_T = torch.arange(receiver_T.shape[0], device=receiver_T.device)
    smallest_T = label_T.scatter_reduce(0, receiver_T, label_T, "amin")
    return smallest_T[receiver_T]
