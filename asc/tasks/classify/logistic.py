"""Logistic regression with several weight decays fitted at once, on a CPU or a GPU.

For each weight decay λ the objective is that of scikit-learn's ``LogisticRegression`` with C = 1 / (N·λ): the mean
cross-entropy plus λ/2 · ‖weights‖², the bias free, on standardised features. Several labels an image are independent
yes-no problems. All problems share two large matrix products a step, and nothing else in a step is large: that is what
makes it quick on a GPU, where one problem after another would wait for the host.

The solver is Newton's method, each step found by conjugate gradients. Features are rotated onto their principal axes
first, in which the diagonal of the curvature says almost everything and makes the gradients converge quickly. Unlike
L-BFGS, which was tried, it also arrives where classes can be told apart and the weight decay is small.

Shape letters: N images (n of a block), C channels, F = C + 1 with the bias, K classes, R weight decays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Numbers that a block of logits holds at most: what a CPU's cache takes, and what keeps a GPU busy.
_CPU_BLOCK, _GPU_BLOCK = 2**18, 2**26
# Numbers that all probabilities may take to be kept between products, rather than computed again: 4 GB.
_KEPT = 2**30
_MOST_INNER = 200
# Two losses closer than this share of them are equal in fp32.
_NOISE = 1e-7


@dataclass(frozen=True)
class LinearFits:
    """One linear classifier for each weight decay, for features as they are (the standardisation is folded in)."""

    decays: tuple[float, ...]
    """The weight decays."""
    weights_RKC: Tensor
    """Weights."""
    biases_RK: Tensor
    """Biases."""
    steps: tuple[int, ...]
    """Newton steps that each needed."""
    converged: tuple[bool, ...]
    """Whether the gradient came below the tolerance; if not, the steps or the digits of fp32 were used up."""

    def only(self, which: int) -> LinearFits:
        """The classifier of one weight decay alone."""
        one = slice(which, which + 1)
        return LinearFits(
            self.decays[one], self.weights_RKC[one], self.biases_RK[one], self.steps[one], self.converged[one]
        )

    def scores_MK(self, which: int, features_MC: Tensor) -> Tensor:
        """Logits by the classifier of one weight decay."""
        return features_MC.float() @ self.weights_RKC[which].T + self.biases_RK[which]


def fit_linear(
    features_NC: Tensor,
    labels: Tensor,
    classes: int,
    decays: Sequence[float],
    most_steps: int = 100,
    tolerance: float = 1e-5,
    start: LinearFits | None = None,
) -> LinearFits:
    """Fit a linear classifier for each weight decay.

    Args:
        features_NC: Features of the images to learn from, on the device to work on.
        labels: Classes (N,), or (N, K) with 1 for yes, 0 for no and -1 for not counted.
        classes: K.
        decays: Weight decays, positive.
        most_steps: Steps after which a problem that has not converged is left as it is.
        tolerance: A problem is solved when no entry of the gradient is larger than this share of the loss (at most 1).
        start: Classifiers to begin with, one for each weight decay; None: all weights zero.
    """
    if not decays or not all(decay > 0 for decay in decays):
        raise ValueError(f"weight decays must be positive numbers, got {tuple(decays)}")
    features_NC = features_NC.float()
    mean_C = features_NC.mean(0)
    # A feature that is always the same says nothing: it becomes zero.
    deviation_C = features_NC.std(0, correction=0)
    deviation_C = torch.where(deviation_C > 1e-6 * mean_C.abs().clamp(min=1e-6), deviation_C, torch.inf)
    standard_NC = (features_NC - mean_C) / deviation_C
    axes_CC = torch.linalg.eigh((standard_NC.T @ standard_NC / len(standard_NC)).double()).eigenvectors.float()
    ones_N1 = torch.ones(len(standard_NC), 1, device=standard_NC.device)
    objective = _Objective(torch.cat([standard_NC @ axes_CC, ones_N1], dim=1), labels, classes)
    # For two classes scikit-learn penalises the difference of their weights, whose square is twice the sum of squares.
    factor = 2.0 if classes == 2 and labels.ndim == 1 else 1.0
    solver = _Solver(objective, factor * torch.tensor(decays))
    if start is not None:
        finite_C = deviation_C.nan_to_num(posinf=0.0)
        biases_RK1 = (start.biases_RK + start.weights_RKC @ mean_C)[..., None]
        solver.begin_at(torch.cat([(start.weights_RKC * finite_C) @ axes_CC, biases_RK1], dim=2))
    solver.run(most_steps, tolerance)
    weights_RKC = solver.solution_RKF[..., :-1] @ axes_CC.T / deviation_C
    biases_RK = solver.solution_RKF[..., -1] - weights_RKC @ mean_C
    return LinearFits(tuple(decays), weights_RKC, biases_RK, tuple(solver.steps), tuple(solver.converged))


class _Objective:
    """Losses, gradients and curvatures of many linear classifiers on the same features, whose last column is 1."""

    def __init__(self, features_NF: Tensor, labels: Tensor, classes: int) -> None:
        self.features_NF, self.classes = features_NF, classes
        self.labels = labels.to(features_NF.device)
        self.multi_label = labels.ndim == 2
        if self.multi_label:
            self.share_NK = (self.labels >= 0) / (self.labels >= 0).sum(0).clamp(min=1)
        self.block = _GPU_BLOCK if features_NF.is_cuda else _CPU_BLOCK

    def gradient(self, weights_RKF: Tensor, decay_R: Tensor) -> tuple[Tensor, Tensor]:
        """Losses (R, fp64) and gradients (R, K, F)."""
        loss_R = torch.zeros(len(weights_RKF), dtype=torch.float64, device=weights_RKF.device)
        gradient_QF = torch.zeros_like(weights_RKF.flatten(0, 1))
        for rows in self.blocks(weights_RKF):
            logits_nRK = self.logits(weights_RKF, rows)
            losses_R, error_nRK = (self._yes_no if self.multi_label else self._one_of_many)(logits_nRK, rows)
            loss_R += losses_R
            gradient_QF.addmm_(error_nRK.flatten(1).T, self.features_NF[rows])
        gradient_RKF = gradient_QF.view(weights_RKF.shape)
        penalised_RKC = weights_RKF[..., :-1]
        gradient_RKF[..., :-1] += decay_R[:, None, None] * penalised_RKC
        loss_R += decay_R * penalised_RKC.square().sum((1, 2), dtype=torch.float64) / 2
        return loss_R, gradient_RKF

    def blocks(self, weights_RKF: Tensor) -> list[slice]:
        """Images that are worked on together."""
        rows = max(1, self.block // (weights_RKF.shape[0] * weights_RKF.shape[1]))
        return [slice(first, first + rows) for first in range(0, len(self.features_NF), rows)]

    def logits(self, weights_RKF: Tensor, rows: slice) -> Tensor:
        """What all classifiers say of some images (n, R, K)."""
        logits_nQ = self.features_NF[rows] @ weights_RKF.flatten(0, 1).T
        return logits_nQ.view(-1, *weights_RKF.shape[:2])

    def _one_of_many(self, logits_nRK: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        logs_nRK = logits_nRK.log_softmax(2)
        which_nR1 = self.labels[rows, None, None].expand(-1, logs_nRK.shape[1], 1)
        count = len(self.labels)
        losses_R = -logs_nRK.gather(2, which_nR1)[..., 0].sum(0, dtype=torch.float64) / count
        error_nRK = logs_nRK.exp_()
        error_nRK.scatter_add_(2, which_nR1, torch.full_like(which_nR1, -1, dtype=error_nRK.dtype))
        return losses_R, error_nRK.div_(count)

    def _yes_no(self, logits_nRK: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        share_n1K = self.share_NK[rows, None]
        wanted_nRK = self.labels[rows, None].clamp(min=0).to(logits_nRK.dtype).expand_as(logits_nRK)
        losses_nRK = F.binary_cross_entropy_with_logits(logits_nRK, wanted_nRK, reduction="none")
        losses_R = (losses_nRK * share_n1K).sum((0, 2), dtype=torch.float64)
        return losses_R, (logits_nRK.sigmoid() - wanted_nRK) * share_n1K


class _Curvature:
    """Products of a second derivative with vectors of weights."""

    def __init__(self, objective: _Objective, weights_RKF: Tensor, decay_R: Tensor) -> None:
        self.objective, self.weights_RKF, self.decay_R = objective, weights_RKF, decay_R
        self.blocks = objective.blocks(weights_RKF)
        keeps = weights_RKF.shape[0] * weights_RKF.shape[1] * len(objective.features_NF) <= _KEPT
        self.kept = [self._probabilities(rows) for rows in self.blocks] if keeps else None

    def __call__(self, vectors_RKF: Tensor, left_R: Tensor) -> Tensor:
        """The products for the problems ``left_R``, of which these are the vectors."""
        objective = self.objective
        product_QF = torch.zeros_like(vectors_RKF.flatten(0, 1))
        for rows, chance_nRK in self._chances():
            if len(left_R) < chance_nRK.shape[1]:
                chance_nRK = chance_nRK[:, left_R]
            along_nRK = objective.logits(vectors_RKF, rows)
            if objective.multi_label:
                along_nRK *= chance_nRK * (1 - chance_nRK) * objective.share_NK[rows, None]
            else:
                along_nRK -= (chance_nRK * along_nRK).sum(2, keepdim=True)
                along_nRK *= chance_nRK
            product_QF.addmm_(along_nRK.flatten(1).T, objective.features_NF[rows])
        if not objective.multi_label:
            product_QF /= len(objective.features_NF)
        product_RKF = product_QF.view(vectors_RKF.shape)
        product_RKF[..., :-1] += self.decay_R[left_R, None, None] * vectors_RKF[..., :-1]
        return product_RKF

    def diagonal(self) -> Tensor:
        """The second derivative by each weight alone."""
        objective = self.objective
        diagonal_QF = torch.zeros_like(self.weights_RKF.flatten(0, 1))
        for rows, chance_nRK in self._chances():
            bend_nRK = chance_nRK * (1 - chance_nRK)
            bend_nRK *= objective.share_NK[rows, None] if objective.multi_label else 1 / len(objective.features_NF)
            diagonal_QF.addmm_(bend_nRK.flatten(1).T, objective.features_NF[rows].square())
        diagonal_RKF = diagonal_QF.view(self.weights_RKF.shape)
        diagonal_RKF[..., :-1] += self.decay_R[:, None, None]
        return diagonal_RKF.clamp_(min=1e-12)

    def _chances(self) -> Iterator[tuple[slice, Tensor]]:
        for number, rows in enumerate(self.blocks):
            yield rows, self._probabilities(rows) if self.kept is None else self.kept[number]

    def _probabilities(self, rows: slice) -> Tensor:
        logits_nRK = self.objective.logits(self.weights_RKF, rows)
        return logits_nRK.sigmoid() if self.objective.multi_label else logits_nRK.softmax(2)


class _Solver:
    """Newton's method for several problems in step; a problem that is solved takes no more part."""

    def __init__(self, objective: _Objective, decay_R: Tensor) -> None:
        device, width = objective.features_NF.device, objective.features_NF.shape[1]
        self.objective, self.decay_R = objective, decay_R.to(device)
        self.solution_RKF = torch.zeros(len(decay_R), objective.classes, width, device=device)
        self.steps = [0] * len(decay_R)
        self.converged = [False] * len(decay_R)
        self.left = torch.arange(len(decay_R), device=device)
        self.begin_at(self.solution_RKF)

    def begin_at(self, point_RKF: Tensor) -> None:
        """Begin with these weights."""
        self.point_RKF = point_RKF.clone()
        self.loss_R, self.gradient_RKF = self.objective.gradient(self.point_RKF, self.decay_R)

    def run(self, most_steps: int, tolerance: float) -> None:
        """Solve all problems."""
        for step in range(most_steps + 1):
            # Where classes can be told apart, losses and gradients are tiny long before the weights have arrived.
            solved_R = self.gradient_RKF.abs().amax((1, 2)) <= tolerance * self.loss_R.clamp(max=1)
            self._put_aside(step, solved_R, solved_R | (step == most_steps))
            if not len(self.left):
                return
            stuck_R = self._search(self._direction())
            # Where even the shortest step brings nothing, fp32 can do no better; that is not called converged.
            self._put_aside(step, torch.zeros_like(stuck_R), stuck_R)

    def _put_aside(self, step: int, solved_R: Tensor, done_R: Tensor) -> None:
        """Take problems out."""
        done = done_R.tolist()
        if not any(done):
            return
        for place, (is_done, is_solved) in enumerate(zip(done, solved_R.tolist(), strict=True)):
            if is_done:
                problem = int(self.left[place])
                self.solution_RKF[problem] = self.point_RKF[place]
                self.steps[problem], self.converged[problem] = step, is_solved
        for name in ("left", "point_RKF", "loss_R", "gradient_RKF", "decay_R"):
            setattr(self, name, getattr(self, name)[~done_R])

    def _direction(self) -> Tensor:
        """Newton's steps by conjugate gradients, the more exact the nearer the minimum."""
        curvature = _Curvature(self.objective, self.point_RKF, self.decay_R)
        diagonal_RKF = curvature.diagonal()
        step_RKF = torch.zeros_like(self.gradient_RKF)
        rest_RKF = -self.gradient_RKF
        along_RKF = rest_RKF / diagonal_RKF
        square_R = _inner(rest_RKF, along_RKF)
        enough_R = square_R * (square_R / self.loss_R).sqrt().clamp(max=0.25)
        left_R = torch.arange(len(square_R), device=square_R.device)
        for _ in range(_MOST_INNER):
            product_RKF = curvature(along_RKF, left_R)
            rate_R = square_R / _inner(along_RKF, product_RKF).clamp(min=1e-30)
            step_RKF.index_add_(0, left_R, rate_R[:, None, None] * along_RKF)
            rest_RKF = rest_RKF - rate_R[:, None, None] * product_RKF
            scaled_RKF = rest_RKF / diagonal_RKF
            before_R, square_R = square_R, _inner(rest_RKF, scaled_RKF)
            along_RKF = scaled_RKF + (square_R / before_R)[:, None, None] * along_RKF
            on_R = square_R > enough_R
            on = on_R.tolist()
            if not any(on):
                break
            if not all(on):
                left_R, enough_R, square_R = left_R[on_R], enough_R[on_R], square_R[on_R]
                rest_RKF, along_RKF, diagonal_RKF = rest_RKF[on_R], along_RKF[on_R], diagonal_RKF[on_R]
        return step_RKF

    def _search(self, direction_RKF: Tensor) -> Tensor:
        """Go along the directions, each problem as far as its loss falls; returns which could not go at all."""
        slope_R = _inner(self.gradient_RKF, direction_RKF)
        length_R = torch.ones_like(slope_R)
        start_RKF, start_R = self.point_RKF.clone(), self.loss_R.clone()
        open_R = torch.arange(len(slope_R), device=slope_R.device)
        for _ in range(12):
            trial_RKF = start_RKF[open_R] + length_R[open_R, None, None] * direction_RKF[open_R]
            loss_R, gradient_RKF = self.objective.gradient(trial_RKF, self.decay_R[open_R])
            enough_R = start_R[open_R] * (1 + _NOISE) + 1e-4 * length_R[open_R] * slope_R[open_R]
            good_R = loss_R <= enough_R
            places_R = open_R[good_R]
            self.point_RKF[places_R], self.gradient_RKF[places_R] = trial_RKF[good_R], gradient_RKF[good_R]
            self.loss_R[places_R] = loss_R[good_R]
            open_R, gradient_RKF = open_R[~good_R], gradient_RKF[~good_R]
            if not len(open_R):
                break
            # The loss is convex: between here and there its slope crosses zero, about where the line through both says.
            there_R = _inner(gradient_RKF, direction_RKF[open_R])
            share_R = slope_R[open_R] / (slope_R[open_R] - there_R)
            length_R[open_R] *= share_R.nan_to_num(0.5).clamp(0.1, 0.7)
        stuck_R = torch.zeros(len(slope_R), dtype=torch.bool, device=slope_R.device)
        stuck_R[open_R] = True
        return stuck_R


def _inner(one_RKF: Tensor, other_RKF: Tensor) -> Tensor:
    return (one_RKF * other_RKF).sum((1, 2))
