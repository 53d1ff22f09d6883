"""How good features are: nearest neighbours, and a linear classifier on frozen features.

Shape letters: N images to learn from, M images to be recognised (Q of a block), C channels, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asc.tasks.classify.datasets import Metric
from asc.tasks.classify.images import Split
from asc.tasks.classify.logistic import LinearFits, fit_linear
from asc.tasks.classify.metrics import score

DECAYS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Weight decays that the linear classifier chooses from."""
# Similarities that a block of queries holds at most: 1 GB.
_BLOCK = 2**28


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


def knn_votes(
    features_NC: Tensor,
    labels: Tensor,
    queries_MC: Tensor,
    classes: int,
    neighbours: Sequence[int] = (10, 20),
    temperature: float = 0.07,
) -> dict[int, Tensor]:
    """Votes (M, K) of the nearest neighbours by cosine, each voting exp(cos / τ), for each number of neighbours.

    As DINO's; with several labels an image (labels (N, K)) the weighted mean of the neighbours' labels, where those
    that are not counted (-1) do not vote.
    """
    bank_CN = F.normalize(features_NC.float(), dim=1).T
    labels = labels.to(bank_CN.device)
    votes: dict[int, list[Tensor]] = {k: [] for k in neighbours}
    most = min(max(neighbours), len(labels))
    for queries_QC in queries_MC.split(max(1, min(1024, _BLOCK // len(labels)))):
        near_Qk, which_Qk = (F.normalize(queries_QC.float(), dim=1) @ bank_CN).topk(most, dim=1)
        # Relative to the nearest: exp(1 / τ) is large, and the ratio alone matters.
        weights_Qk = ((near_Qk - near_Qk[:, :1]) / temperature).exp()
        for k in neighbours:
            votes[k].append(_votes(weights_Qk[:, :k], labels[which_Qk[:, :k]], classes))
    return {k: torch.cat(parts) for k, parts in votes.items()}


def _votes(weights_Qk: Tensor, labels: Tensor, classes: int) -> Tensor:
    if labels.ndim == 3:
        counted_QkK = weights_Qk[:, :, None] * (labels >= 0)
        return (counted_QkK * labels).sum(1) / counted_QkK.sum(1).clamp(min=1e-12)
    return weights_Qk.new_zeros(len(weights_Qk), classes).scatter_add_(1, labels, weights_Qk)


def knn_accuracy(
    features_NC: Tensor, labels_N: Tensor, queries_MC: Tensor, truth_M: Tensor, k: int = 20, temperature: float = 0.07
) -> float:
    """Share of the queries that their ``k`` nearest neighbours by cosine recognise, each voting exp(cos / τ)."""
    votes_MK = knn_votes(features_NC, labels_N, queries_MC, int(labels_N.max()) + 1, [k], temperature)[k]
    return _accuracy(votes_MK, truth_M)


@dataclass(frozen=True)
class Choice:
    """A weight decay that was chosen on validation images."""

    decay: float
    """The best one; of equally good ones the largest."""
    values: dict[float, float]
    """The metric on the validation images, by weight decay."""
    fits: LinearFits
    """The classifiers it was chosen from."""

    @property
    def fit(self) -> LinearFits:
        """The classifier of the best weight decay: where the final fit begins."""
        return self.fits.only(self.fits.decays.index(self.decay))

    @property
    def at_the_edge(self) -> bool:
        """Whether a weight decay outside of those tried might be better."""
        return len(self.values) > 1 and self.decay in (min(self.values), max(self.values))


def choose_decay(
    features_NC: Tensor,
    labels: Tensor,
    held_MC: Tensor,
    held_labels: Tensor,
    classes: int,
    metric: Metric,
    decays: Sequence[float] = DECAYS,
) -> Choice:
    """Fit with all weight decays at once and choose one by the metric on the images held out."""
    # A hundred times as coarse as the final fit: enough to tell which decay is best.
    fits = fit_linear(features_NC, labels, classes, decays, tolerance=1e-3)
    values = {}
    for which, decay in enumerate(decays):
        values[decay] = score(metric, fits.scores_MK(which, held_MC).cpu(), held_labels.cpu())[metric]
    return Choice(max(values, key=lambda decay: (values[decay], decay)), values, fits)


def linear_accuracy(
    features_NC: Tensor, labels_N: Tensor, queries_MC: Tensor, truth_M: Tensor, decays: Sequence[float] = DECAYS
) -> float:
    """Accuracy of a linear classifier on standardised features.

    Its weight decay is chosen on every fifth image of the training part, never on the images to be recognised.
    """
    order_N = torch.randperm(len(labels_N), generator=torch.Generator().manual_seed(0))
    held_N = torch.zeros(len(labels_N), dtype=torch.bool)
    held_N[order_N[::5]] = True
    held_N, labels_N = held_N.to(features_NC.device), labels_N.to(features_NC.device)
    kept_N, classes = ~held_N, int(labels_N.max()) + 1
    choice = choose_decay(
        features_NC[kept_N], labels_N[kept_N], features_NC[held_N], labels_N[held_N], classes, "top1", decays
    )
    fit = fit_linear(features_NC, labels_N, classes, [choice.decay], start=choice.fit)
    return _accuracy(fit.scores_MK(0, queries_MC), truth_M)


def _accuracy(scores_MK: Tensor, truth_M: Tensor) -> float:
    return float((scores_MK.argmax(1) == truth_M.to(scores_MK.device)).double().mean())
