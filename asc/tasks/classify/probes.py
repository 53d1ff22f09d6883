"""How good features are: nearest neighbours, and a linear classifier on frozen features.

Shape letters: N images to learn from, M images to be recognised, C channels, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asc.tasks.classify.images import Split

# Weight decays that the linear classifier chooses from.
_DECAYS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


@torch.no_grad()
def extract(model: nn.Module, images_B3HW: Tensor, batch: int = 256) -> Tensor:
    """Features (B, C) on the CPU; the model is put into evaluation mode for it and back."""
    was_training = model.training
    model.eval()
    like = next(model.parameters())
    parts = [model(part.to(like)).float().cpu() for part in images_B3HW.split(batch)]
    model.train(was_training)
    return torch.cat(parts)


def split_features(model: nn.Module, split: Split, batch: int = 256) -> tuple[Tensor, Tensor]:
    """Features of both parts of a split."""
    return extract(model, split.train.images_B3HW, batch), extract(model, split.test.images_B3HW, batch)


def pixels(split: Split) -> tuple[Tensor, Tensor]:
    """The raw pixels in place of features: what any features must beat."""
    return split.train.images_B3HW.flatten(1), split.test.images_B3HW.flatten(1)


def knn_accuracy(
    features_NC: Tensor, labels_N: Tensor, queries_MC: Tensor, truth_M: Tensor, k: int = 20, temperature: float = 0.07
) -> float:
    """Share of the queries that their ``k`` nearest neighbours by cosine recognise, each voting exp(cos / τ)."""
    classes = int(labels_N.max()) + 1
    bank_CN = F.normalize(features_NC.float(), dim=1).T
    correct = 0
    for queries_QC, truth_Q in zip(queries_MC.split(1024), truth_M.split(1024), strict=True):
        near_Qk, which_Qk = (F.normalize(queries_QC.float(), dim=1) @ bank_CN).topk(min(k, len(labels_N)), dim=1)
        votes_QK = near_Qk.new_zeros(len(queries_QC), classes)
        votes_QK.scatter_add_(1, labels_N[which_Qk], (near_Qk / temperature).exp())
        correct += int((votes_QK.argmax(1) == truth_Q).sum())
    return correct / len(truth_M)


def linear_accuracy(
    features_NC: Tensor, labels_N: Tensor, queries_MC: Tensor, truth_M: Tensor, decays: Sequence[float] = _DECAYS
) -> float:
    """Accuracy of a linear classifier on standardised features.

    Its weight decay is chosen on every fifth image of the training part, never on the images to be recognised.
    """
    mean_C, deviation_C = features_NC.mean(0), features_NC.std(0).clamp(min=1e-6)
    features_NC, queries_MC = ((x - mean_C) / deviation_C for x in (features_NC, queries_MC))
    held_N = torch.zeros(len(labels_N), dtype=torch.bool)
    held_N[torch.randperm(len(labels_N), generator=torch.Generator().manual_seed(0))[::5]] = True
    classes = int(labels_N.max()) + 1

    def validated(decay: float) -> float:
        weights = _fit(features_NC[~held_N], labels_N[~held_N], classes, decay)
        return _accuracy(weights, features_NC[held_N], labels_N[held_N])

    best = max(decays, key=validated)
    return _accuracy(_fit(features_NC, labels_N, classes, best), queries_MC, truth_M)


def _fit(features_NC: Tensor, labels_N: Tensor, classes: int, decay: float) -> tuple[Tensor, Tensor]:
    weight_KC = torch.zeros(classes, features_NC.shape[1], device=features_NC.device, requires_grad=True)
    bias_K = torch.zeros(classes, device=features_NC.device, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight_KC, bias_K], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = F.cross_entropy(features_NC @ weight_KC.T + bias_K, labels_N) + decay * weight_KC.square().sum() / 2
        value.backward()
        return value

    optimiser.step(loss)
    return weight_KC.detach(), bias_K.detach()


def _accuracy(weights: tuple[Tensor, Tensor], features_MC: Tensor, truth_M: Tensor) -> float:
    predicted_M = (features_MC @ weights[0].T + weights[1]).argmax(1)
    return float((predicted_M == truth_M).float().mean())
