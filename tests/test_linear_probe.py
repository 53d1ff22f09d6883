"""The fast linear classifier and kNN with several labels, against scikit-learn and cases computed by hand."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from asc.tasks.classify import logistic
from asc.tasks.classify.logistic import fit_linear
from asc.tasks.classify.probes import choose_decay, knn_votes

DECAYS = (1e-5, 1e-3, 1e-1)


def overlapping(count: int, channels: int, classes: int, noise: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of overlapping classes in channels that depend on each other and differ in scale by 300 to 1."""
    world = torch.Generator().manual_seed(0)
    centres = torch.randn(classes, channels, generator=world)
    mix = torch.randn(channels, channels, generator=world) * torch.logspace(0, -2.5, channels)
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=draw)
    points = centres[labels] + noise * torch.randn(count, channels, generator=draw)
    return points @ mix + 3.0, labels


def standardised(queries: torch.Tensor, points: torch.Tensor) -> np.ndarray:
    return StandardScaler().fit(points.double().numpy()).transform(queries.double().numpy())


def theirs(points: torch.Tensor, labels: torch.Tensor, decay: float) -> LogisticRegression:
    settings = {"C": 1 / (decay * len(labels)), "max_iter": 3000, "tol": 1e-7, "solver": "newton-cg"}
    return LogisticRegression(**settings).fit(standardised(points, points), labels.numpy())


@pytest.mark.parametrize(("classes", "noise"), [(2, 4.0), (10, 3.0), (30, 2.0)])
def test_predictions_are_those_of_scikit_learn_where_classes_overlap(classes: int, noise: float) -> None:
    points, labels = overlapping(1200, 48, classes, noise, seed=1)
    queries, truth = overlapping(2000, 48, classes, noise, seed=2)
    fits = fit_linear(points, labels, classes, DECAYS)
    assert all(fits.converged)
    best = 0.0
    for which, decay in enumerate(DECAYS):
        reference = theirs(points, labels, decay)
        standard = standardised(queries, points)
        ours = fits.scores_MK(which, queries).argmax(1).numpy()
        assert (ours == reference.predict(standard)).mean() >= 0.99, decay
        best = max(best, reference.score(standard, truth.numpy()))
    assert 0.6 < best < 0.9, "the test is meant for classes that cannot all be told apart"


def test_predictions_are_those_of_scikit_learn_on_real_images() -> None:
    # Handwritten digits of 8 x 8 pixels; some pixels are always empty.
    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    points, queries = images[:900].float(), images[900:].float()
    fits = fit_linear(points, labels[:900], 10, DECAYS)
    for which, decay in enumerate(DECAYS):
        reference = theirs(points, labels[:900], decay)
        ours = fits.scores_MK(which, queries).argmax(1).numpy()
        assert (ours == reference.predict(standardised(queries, points))).mean() >= 0.99, decay


def test_weights_are_those_of_scikit_learn() -> None:
    points, labels = overlapping(600, 12, 4, 2.0, seed=1)
    fits = fit_linear(points, labels, 4, [1e-2], tolerance=1e-7)
    reference = theirs(points, labels, 1e-2)
    coefficients = torch.from_numpy(reference.coef_).float() / points.std(0, correction=0)
    # The weights of all classes may move together without a change, but the decay puts their sum to zero.
    torch.testing.assert_close(fits.weights_RKC[0], coefficients, rtol=2e-3, atol=2e-4)
    scores = fits.scores_MK(0, points)
    standard = standardised(points, points)
    chances = torch.from_numpy(reference.predict_proba(standard)).float()
    torch.testing.assert_close(scores.softmax(1), chances, rtol=1e-2, atol=1e-3)


def test_several_labels_are_independent_problems_and_those_not_counted_do_not_count() -> None:
    points, _ = overlapping(500, 16, 3, 2.0, seed=1)
    draw = torch.Generator().manual_seed(5)
    answers = (points @ torch.randn(16, 3, generator=draw) + 5 * torch.randn(500, 3, generator=draw) > 0).long()
    answers[torch.rand(500, 3, generator=draw) < 0.2] = -1
    fits = fit_linear(points, answers, 3, [1e-2], tolerance=1e-7)
    standard = standardised(points, points)
    for label in range(3):
        counted = (answers[:, label] >= 0).numpy()
        settings = {"C": 1 / (1e-2 * counted.sum()), "max_iter": 3000, "tol": 1e-8}
        reference = LogisticRegression(**settings).fit(standard[counted], answers[:, label].numpy()[counted])
        ours = fits.scores_MK(0, points)[:, label].double().numpy()
        np.testing.assert_allclose(ours, reference.decision_function(standard), rtol=5e-3, atol=5e-3)


def test_it_does_not_matter_which_decays_are_fitted_together_or_how_the_work_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points, labels = overlapping(300, 10, 5, 2.0, seed=1)
    together = fit_linear(points, labels, 5, DECAYS, tolerance=1e-7)
    monkeypatch.setattr(logistic, "_CPU_BLOCK", 7 * 5)
    monkeypatch.setattr(logistic, "_KEPT", 0)
    for which, decay in enumerate(DECAYS):
        alone = fit_linear(points, labels, 5, [decay], tolerance=1e-7)
        chances = alone.scores_MK(0, points).softmax(1)
        torch.testing.assert_close(chances, together.scores_MK(which, points).softmax(1), rtol=1e-2, atol=1e-3)


def test_classes_that_can_be_told_apart_channels_that_never_change_and_classes_that_never_occur() -> None:
    points = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    labels = (points[:, 0] > 0).long()
    points[:, 0] += 4 * labels
    points[:, 3] = 7.0
    # The bias of the class that never occurs has no best value, the lower the better: it must only stay finite.
    fits = fit_linear(points, labels, 3, [1e-6, 1e-2])
    assert bool(fits.weights_RKC.isfinite().all()) and bool(fits.biases_RK.isfinite().all())
    for which in range(2):
        assert torch.equal(fits.scores_MK(which, points).argmax(1), labels)
    assert bool((fits.weights_RKC[:, :, 3] == 0).all())


def test_decays_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"weight decays must be positive numbers, got \(0\.0,\)"):
        fit_linear(torch.randn(8, 2), torch.zeros(8, dtype=torch.int64), 2, (0.0,))


def test_the_decay_is_the_best_on_the_images_held_out() -> None:
    # Many channels of noise and few images: without weight decay the fit is useless.
    draw = torch.Generator().manual_seed(0)
    labels, held = torch.randint(0, 2, (60,), generator=draw), torch.randint(0, 2, (400,), generator=draw)
    points, queries = (torch.randn(len(x), 50, generator=draw) + 0.5 * x[:, None] for x in (labels, held))
    choice = choose_decay(points, labels, queries, held, 2, "top1", (1e-6, 1e-1, 1.0, 1e4))
    by_hand = {}
    for decay in (1e-6, 1e-1, 1.0, 1e4):
        standard = standardised(queries, points)
        by_hand[decay] = theirs(points, labels, decay).score(standard, held.numpy())
    assert choice.decay == max(by_hand, key=lambda decay: (round(by_hand[decay], 3), decay))
    assert choice.values == pytest.approx(by_hand, abs=0.01)
    assert not choice.at_the_edge
    assert choose_decay(points, labels, queries, held, 2, "top1", (1e-6, 1e-5)).at_the_edge


def test_neighbours_with_several_labels_vote_for_each_and_abstain_where_not_counted() -> None:
    bank = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    labels = torch.tensor([[1, 0], [0, -1], [1, 1]])
    votes = knn_votes(bank, labels, torch.tensor([[2.0, 0.0]]), 2, neighbours=(1, 2, 3), temperature=1.0)
    near, middle, far = 1.0, float(np.exp(-1)), float(np.exp(-2))
    assert votes[1].tolist() == [[1.0, 0.0]]
    assert votes[2].tolist()[0] == pytest.approx([near / (near + middle), 0.0])
    expected = [(near + far) / (near + middle + far), far / (near + far)]
    assert votes[3].tolist()[0] == pytest.approx(expected)


def test_the_minimum_is_the_same_wherever_the_search_begins() -> None:
    points, labels = overlapping(400, 12, 5, 1.5, seed=3)
    points[:, 4] = 2.0  # a channel that never changes
    rough = fit_linear(points[:300], labels[:300], 5, [1e-2, 1e-3], tolerance=1e-2)
    from_zero = fit_linear(points, labels, 5, [1e-3])
    from_there = fit_linear(points, labels, 5, [1e-3], start=rough.only(1))
    assert from_there.converged[0] and from_there.steps[0] < from_zero.steps[0]
    torch.testing.assert_close(from_there.weights_RKC, from_zero.weights_RKC, atol=1e-3, rtol=1e-3)
