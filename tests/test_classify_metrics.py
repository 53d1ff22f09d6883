"""The metrics of classification, against scikit-learn and cases computed by hand."""

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    precision_recall_curve,
    top_k_accuracy_score,
)

from asc.tasks.classify.metrics import average_precision_11, mean_per_class, score, top_k


def some_scores(images: int, classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (images,), generator=generator)
    scores = torch.randn(images, classes, generator=generator)
    scores[torch.arange(images), labels] += 1
    return scores, labels


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_top_k_is_that_of_scikit_learn(k: int) -> None:
    scores, labels = some_scores(500, 9)
    theirs = top_k_accuracy_score(labels, scores.numpy(), k=k, labels=np.arange(9))
    assert top_k(scores, labels, k) == pytest.approx(theirs, abs=1e-12)


def test_mean_per_class_is_balanced_accuracy_of_scikit_learn() -> None:
    scores, labels = some_scores(400, 7)
    # A class that does not occur is not averaged over.
    labels[labels == 3] = 4
    scores[:, 3] = -9
    theirs = balanced_accuracy_score(labels, scores.argmax(1))
    assert mean_per_class(scores, labels) == pytest.approx(theirs, abs=1e-12)
    assert theirs != pytest.approx(accuracy_score(labels, scores.argmax(1)), abs=1e-3)


def test_of_equal_scores_the_class_with_the_smaller_number_comes_first() -> None:
    scores = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [2.0, 2.0, 2.0]])
    assert top_k(scores, torch.tensor([0, 1, 2]), 1) == pytest.approx(1 / 3)
    assert top_k(scores, torch.tensor([0, 1, 2]), 2) == pytest.approx(2 / 3)
    assert top_k(scores, torch.tensor([0, 1, 2]), 3) == 1
    assert top_k(scores, scores.argmax(1), 1) == 1


def ap(scores: list[float], labels: list[int]) -> float:
    return float(average_precision_11(torch.tensor(scores)[:, None], torch.tensor(labels)[:, None])[0])


def test_11_points_by_hand() -> None:
    # Positives at places 1, 3 and 6: precisions 1, 2/3 and 1/2 up to the recalls 1/3, 2/3 and 1.
    scores, labels = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4], [1, 0, 1, 0, 0, 1]
    # Recalls 0 to 0.3 reach the first, 0.4 to 0.6 the second, 0.7 to 1 the third.
    assert ap(scores, labels) == pytest.approx((4 * 1 + 3 * 2 / 3 + 4 * 1 / 2) / 11, abs=1e-12)
    # The precision is the best of all further cuts: a miss at the first place costs less than it seems.
    assert ap([5, 4, 3, 2, 1], [0, 1, 1, 1, 1]) == pytest.approx(4 / 5, abs=1e-12)
    assert ap([2, 1], [1, 0]) == 1 and ap([2, 1], [0, 1]) == 0.5


def test_a_recall_of_exactly_three_tenths_is_reached() -> None:
    # Ten positives, three of them first: 3/10 must count for the point 0.3, which 3 * 0.1 > 0.3 would miss.
    labels = [1] * 3 + [0] * 10 + [1] * 7
    scores = [float(-i) for i in range(20)]
    assert ap(scores, labels) == pytest.approx((4 * 1 + 7 * 10 / 20) / 11, abs=1e-12)


def test_images_of_equal_score_pass_together_in_whatever_order_they_come() -> None:
    # One cut after three images (2 right of 3), one after all four (2 of 4).
    for labels in ([1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 0, 0]):
        assert ap([0.5, 0.5, 0.5, 0.1], labels) == pytest.approx(2 / 3, abs=1e-12)
    assert ap([0.5] * 4, [1, 0, 0, 0]) == 0.25


def test_difficult_images_are_as_if_they_were_not_there() -> None:
    scores, labels = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4], [1, 0, 1, 0, 0, 1]
    with_difficult = ap([0.95, *scores[:3], 0.65, *scores[3:]], [-1, *labels[:3], -1, *labels[3:]])
    assert with_difficult == ap(scores, labels)


def test_11_points_on_the_curve_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(300, 6, generator=generator) < 0.2).long()
    # Few distinct scores, so that there are many ties.
    scores = (torch.randn(300, 6, generator=generator) * 2 + labels).round()
    ours = average_precision_11(scores, labels)
    for column in range(6):
        precision, recall, _ = precision_recall_curve(labels[:, column], scores[:, column])
        # The last point of their curve (recall 0, precision 1) is no cut.
        precision, recall = precision[:-1], recall[:-1]
        best = [precision[recall >= point - 1e-9].max() for point in np.arange(11) / 10]
        assert float(ours[column]) == pytest.approx(np.mean(best), abs=1e-12)


def test_classes_without_positives_are_left_out_and_counted() -> None:
    labels = torch.tensor([[1, 0, -1], [0, 0, 0], [1, 0, 0]])
    scores = torch.tensor([[3.0, 1.0, 1.0], [2.0, 2.0, 2.0], [1.0, 3.0, 3.0]])
    values = score("map11", scores, labels)
    # Class 0: recalls up to 0.5 at precision 1, the rest at 2/3.
    assert values == {"map11": pytest.approx((6 + 5 * 2 / 3) / 11), "classes_without_positives": 2.0}
    with pytest.raises(ValueError, match="no class has a positive"):
        score("map11", scores, torch.zeros_like(labels))


def test_the_metric_asked_for_comes_first_with_its_companions() -> None:
    scores, labels = some_scores(100, 9)
    assert list(score("top1", scores, labels)) == ["top1", "mean_per_class", "top5"]
    values = score("mean_per_class", scores, labels)
    assert list(values) == ["mean_per_class", "top1", "top5"]
    assert values["top5"] == top_k(scores, labels, 5)
    assert list(score("top1", scores[:, :5], labels.clamp(max=4))) == ["top1", "mean_per_class"]


def test_low_precision_scores_are_taken_as_they_are() -> None:
    scores, labels = some_scores(100, 9)
    halves = scores.bfloat16()
    assert score("top1", halves, labels) == score("top1", halves.float(), labels)


def test_scores_that_cannot_be_judged_are_refused() -> None:
    scores, labels = some_scores(10, 4)
    scores[3, 2] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        score("top1", scores, labels)
    with pytest.raises(ValueError, match="do not fit"):
        score("top1", scores.nan_to_num(), labels[:5])
    with pytest.raises(ValueError, match="labels go from 0 to 7"):
        top_k(scores.nan_to_num(), torch.tensor([0, 7, *labels[2:].tolist()]), 1)
    with pytest.raises(ValueError, match="do not fit"):
        score("map11", scores.nan_to_num(), labels)
    with pytest.raises(ValueError, match="table of images and classes"):
        score("top1", torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
