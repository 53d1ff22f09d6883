"""Average precision, matching and the losses of queries, against pycocotools, brute force and cases by hand."""

import contextlib
import io
from itertools import permutations

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from asc.tasks.detect.data import Truth
from asc.tasks.detect.losses import mean_objects, set_losses
from asc.tasks.detect.matching import Match, MatchCost, match
from asc.tasks.detect.metrics import Detections, average_precision

BOX = (0.0, 0.0, 10.0, 10.0)
FAR = (50.0, 50.0, 60.0, 60.0)


def truth(*boxes: tuple[float, ...], classes: list[int] | None = None, difficult: list[bool] | None = None) -> Truth:
    return Truth(
        torch.tensor(boxes).view(-1, 4),
        torch.tensor(classes or [0] * len(boxes), dtype=torch.int64),
        torch.tensor(difficult or [False] * len(boxes), dtype=torch.bool),
    )


def found(*rows: tuple[tuple[float, ...], float], classes: list[int] | None = None) -> Detections:
    boxes = torch.tensor([box for box, _ in rows]).view(-1, 4)
    scores = torch.tensor([score for _, score in rows])
    return Detections(boxes, scores, torch.tensor(classes or [0] * len(rows), dtype=torch.int64))


def scores_of(detections: list[Detections], truths: list[Truth]) -> tuple[float, float]:
    scores = average_precision(detections, truths, 1)
    return float(scores.eleven_C[0]), float(scores.area_C[0])


# --- By hand ----------------------------------------------------------------------------------------------


def test_everything_found_first_is_perfect_and_nothing_found_is_zero() -> None:
    assert scores_of([found((BOX, 0.9))], [truth(BOX)]) == (1.0, 1.0)
    assert scores_of([found()], [truth(BOX)]) == (0.0, 0.0)


def test_one_of_two_objects_after_a_mistake() -> None:
    # Precision 0, then 1/2 at recall 1/2: six of the eleven recalls (0 to 0.5) are reached.
    detections, truths = [found((FAR, 0.9), (BOX, 0.8))], [truth(BOX, (20.0, 20.0, 30.0, 30.0))]
    assert scores_of(detections, truths) == pytest.approx((6 * 0.5 / 11, 0.25))


def test_precision_is_that_of_the_best_later_recall() -> None:
    # right, wrong, right: precisions 1, 1/2, 2/3 at recalls 1/2, 1/2, 1.
    other = (20.0, 20.0, 30.0, 30.0)
    detections, truths = [found((BOX, 0.9), (FAR, 0.8), (other, 0.7))], [truth(BOX, other)]
    assert scores_of(detections, truths) == pytest.approx(((6 + 5 * 2 / 3) / 11, 0.5 + 0.5 * 2 / 3))


def test_an_object_found_twice_is_right_once() -> None:
    detections = [found((BOX, 0.9), (BOX, 0.8), (FAR, 0.7))]
    # right, wrong, right.
    assert scores_of(detections, [truth(BOX, FAR)]) == pytest.approx(((6 + 5 * 2 / 3) / 11, 0.5 + 0.5 * 2 / 3))


def test_a_second_box_does_not_count_for_the_object_that_it_overlaps_less() -> None:
    # Both detections overlap the first object most; by the protocol the second is wrong, though it would fit the other.
    objects = truth((0.0, 0.0, 10.0, 10.0), (0.0, 3.0, 10.0, 13.0))
    twice = found(((0.0, 0.0, 10.0, 10.0), 0.9), ((0.0, 1.0, 10.0, 11.0), 0.8))
    assert scores_of([twice], [objects])[1] == pytest.approx(0.5)


def test_difficult_objects_count_neither_way() -> None:
    marked = truth(BOX, FAR, difficult=[False, True])
    # Found or not, once or twice: nothing changes.
    assert scores_of([found((BOX, 0.9))], [marked]) == (1.0, 1.0)
    assert scores_of([found((FAR, 0.95), (FAR, 0.93), (BOX, 0.9))], [marked]) == (1.0, 1.0)
    only_difficult = average_precision([found((FAR, 0.9))], [truth(FAR, difficult=[True])], 1)
    assert np.isnan(only_difficult.area_C[0]) and only_difficult.objects_C[0] == 0


def test_equal_scores_keep_the_order_they_come_in() -> None:
    right, wrong = (BOX, 0.5), (FAR, 0.5)
    assert scores_of([found(right, wrong)], [truth(BOX)])[1] == 1.0
    assert scores_of([found(wrong, right)], [truth(BOX)])[1] == 0.5
    # Also between images.
    assert scores_of([found(wrong), found(right)], [truth(), truth(BOX)])[1] == 0.5


def test_a_class_without_objects_has_no_score_and_is_no_part_of_the_mean() -> None:
    scores = average_precision([found((BOX, 0.9), (FAR, 0.8), classes=[0, 1])], [truth(BOX)], 3)
    assert scores.area_C[0] == 1.0 and np.isnan(scores.area_C[1:]).all() and scores.area == scores.eleven == 1.0
    assert np.isnan(average_precision([found((BOX, 0.9))], [truth()], 2).area)


def test_an_overlap_of_exactly_one_half_is_enough_and_of_another_class_never() -> None:
    half = (0.0, 0.0, 10.0, 20.0)
    assert scores_of([found((half, 0.9))], [truth(BOX)])[1] == 1.0
    assert scores_of([found(((0.0, 0.0, 10.0, 20.1), 0.9))], [truth(BOX)])[1] == 0.0
    other = average_precision([found((BOX, 0.9), classes=[1])], [truth(BOX)], 2)
    assert other.area_C[0] == 0.0


def test_three_of_ten_objects_reach_the_recall_of_three_tenths() -> None:
    objects = [(20.0 * i, 0.0, 20.0 * i + 10, 10.0) for i in range(10)]
    # Recalls 0, 0.1, 0.2 and 0.3: four of the eleven.
    assert scores_of([found(*((box, 0.9) for box in objects[:3]))], [truth(*objects)])[0] == pytest.approx(4 / 11)


# --- Against pycocotools ----------------------------------------------------------------------------------


def random_problem(seed: int, images: int, classes: int) -> tuple[list[Detections], list[Truth]]:
    """Objects on a lattice, so that they do not overlap; detections near some of them, and some anywhere."""
    draw = np.random.default_rng(seed)
    detections, truths = [], []
    for _ in range(images):
        cells = draw.permutation(16)[: draw.integers(0, 9)]
        corners = np.stack([cells % 4 * 50 + 5, cells // 4 * 50 + 5], 1) + draw.uniform(0, 8, (len(cells), 2))
        boxes = np.concatenate([corners, corners + draw.uniform(15, 32, (len(cells), 2))], 1)
        labels = draw.integers(0, classes, len(cells))
        seen = draw.random(len(cells)) < 0.8
        near = boxes[seen] + draw.normal(0, 2.5, (int(seen.sum()), 4))
        anywhere = draw.uniform(0, 150, (draw.integers(0, 6), 2))
        loose = np.concatenate([anywhere, anywhere + draw.uniform(10, 40, anywhere.shape)], 1)
        swapped = np.where(draw.random(len(near)) < 0.2, draw.integers(0, classes, len(near)), labels[seen])
        rows = np.concatenate([near, loose])
        kinds = np.concatenate([swapped, draw.integers(0, classes, len(loose))])
        scores = draw.random(len(rows)) + np.concatenate([np.full(len(near), 0.3), np.zeros(len(loose))])
        detections.append(
            Detections(torch.from_numpy(rows).float(), torch.from_numpy(scores).float(), torch.from_numpy(kinds))
        )
        truths.append(
            Truth(torch.from_numpy(boxes).float(), torch.from_numpy(labels), torch.zeros(len(labels), dtype=torch.bool))
        )
    return detections, truths


def coco_ap50(detections: list[Detections], truths: list[Truth], classes: int) -> np.ndarray:
    def box(corners: list[float]) -> list[float]:
        return [corners[0], corners[1], corners[2] - corners[0], corners[3] - corners[1]]

    annotations, results = [], []
    for image, (one, other) in enumerate(zip(detections, truths, strict=True)):
        for corners, label in zip(other.boxes_K4.tolist(), other.classes_K.tolist(), strict=True):
            entry = {"id": len(annotations) + 1, "image_id": image, "category_id": label, "bbox": box(corners)}
            annotations.append(entry | {"area": entry["bbox"][2] * entry["bbox"][3], "iscrowd": 0})
        for corners, score, label in zip(*(part.tolist() for part in one), strict=True):
            results.append({"image_id": image, "category_id": label, "bbox": box(corners), "score": score})
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {
            "images": [{"id": image} for image in range(len(truths))],
            "annotations": annotations,
            "categories": [{"id": number} for number in range(classes)],
        }
        coco.createIndex()
        judge = COCOeval(coco, coco.loadRes(results), "bbox")
        judge.params.iouThrs = np.array([0.5])
        judge.evaluate()
        judge.accumulate()
    return judge.eval["precision"][0, :, :, 0, -1].mean(0)


@pytest.mark.parametrize("seed", range(4))
def test_the_area_form_is_that_of_pycocotools(seed: int) -> None:
    detections, truths = random_problem(seed, images=120, classes=3)
    ours = average_precision(detections, truths, 3).area_C
    theirs = coco_ap50(detections, truths, 3)
    assert ours.min() > 0.2 and ours.max() < 0.95, "the problem should be neither hopeless nor easy"
    np.testing.assert_allclose(ours, theirs, atol=0.01)


# --- Matching and losses ----------------------------------------------------------------------------------


def giou_by_hand(one: list[float], other: list[float]) -> float:
    """Of two boxes (centre x, centre y, width, height)."""
    a, b = ([x - w / 2, y - h / 2, x + w / 2, y + h / 2] for x, y, w, h in (one, other))
    width, height = (max(0.0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1))
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
    union = sum(areas) - width * height
    hull = (max(a[2], b[2]) - min(a[0], b[0])) * (max(a[3], b[3]) - min(a[1], b[1]))
    return width * height / union - (hull - union) / hull


def random_boxes(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.cat(
        [0.2 + 0.6 * torch.rand(count, 2, generator=generator), 0.1 + 0.3 * torch.rand(count, 2, generator=generator)],
        1,
    )


@pytest.mark.parametrize("objects", [(0, 3), (1, 4), (5, 2)])
def test_the_matching_has_the_least_cost_of_all(objects: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(sum(objects))
    logits = torch.randn(2, 2, 5, 4, generator=generator)
    boxes = random_boxes(20, generator).view(2, 2, 5, 4)
    labels = [torch.randint(0, 3, (count,), generator=generator) for count in objects]
    targets = [random_boxes(count, generator) for count in objects]
    weights = MatchCost(label=1.5, l1=3.0, giou=2.5)
    matches = match(logits, boxes, torch.cat(labels), torch.cat(targets), objects, weights)

    def cost(layer: int, image: int, query: int, number: int) -> float:
        box, target = boxes[layer, image, query].tolist(), targets[image][number].tolist()
        probability = logits[layer, image, query].softmax(0)[labels[image][number]].item()
        distance = sum(abs(a - b) for a, b in zip(box, target, strict=True))
        return 3.0 * distance - 1.5 * probability - 2.5 * giou_by_hand(box, target)

    for layer in range(2):
        for image, count in enumerate(objects):
            own = matches[layer].image_M == image
            queries = matches[layer].query_M[own].tolist()
            numbers = (matches[layer].object_M[own] - sum(objects[:image])).tolist()
            assert sorted(numbers) == list(range(count)) and len(set(queries)) == count
            ours = sum(cost(layer, image, q, n) for q, n in zip(queries, numbers, strict=True))
            all_costs = [
                sum(cost(layer, image, q, n) for n, q in enumerate(chosen)) for chosen in permutations(range(5), count)
            ]
            assert ours == pytest.approx(min(all_costs), abs=1e-5)


def test_more_objects_than_queries_and_scores_that_are_no_numbers_can_be_matched() -> None:
    generator = torch.Generator().manual_seed(0)
    targets, labels = random_boxes(4, generator), torch.zeros(4, dtype=torch.int64)
    boxes = random_boxes(2, generator)[None, None]
    for logits in (torch.randn(1, 1, 2, 3, generator=generator), torch.full((1, 1, 2, 3), torch.nan)):
        (pairs,) = match(logits, boxes, labels, targets, [4], MatchCost())
        assert sorted(pairs.query_M.tolist()) == [0, 1] and len(set(pairs.object_M.tolist())) == 2


def pairs_of(*pairs: tuple[int, int, int]) -> Match:
    return Match(*torch.tensor(pairs, dtype=torch.int64).view(-1, 3).T)


def test_losses_of_a_case_by_hand() -> None:
    # Two queries; the first is to find an object of class 1 at its own place but half as wide.
    logits = torch.tensor([[[0.0, 2.0, 0.0], [0.0, 0.0, 1.0]]])
    boxes = torch.tensor([[[0.5, 0.5, 0.4, 0.2], [0.2, 0.2, 0.1, 0.1]]])
    target = torch.tensor([[0.5, 0.5, 0.2, 0.2]])
    losses = set_losses(logits, boxes, pairs_of((0, 0, 0)), torch.tensor([1]), target, 0.1, 1.0)
    right, none = (-np.log(np.exp(x) / (np.exp(x) + 2)) for x in (2.0, 1.0))
    assert losses["class"].item() == pytest.approx((right + 0.1 * none) / 1.1, abs=1e-6)
    assert losses["l1"].item() == pytest.approx(0.2, abs=1e-6)
    # Half the box, and the hull is the larger box: 1 - 1/2.
    assert losses["giou"].item() == pytest.approx(0.5, abs=1e-5)


def test_pairs_of_several_images_are_told_apart() -> None:
    generator = torch.Generator().manual_seed(3)
    logits, boxes, targets = (
        torch.randn(2, 4, 3, generator=generator),
        random_boxes(8, generator).view(2, 4, 4),
        random_boxes(3, generator),
    )
    labels, pairs = torch.tensor([0, 1, 1]), pairs_of((0, 2, 0), (1, 0, 2), (1, 3, 1))
    losses = set_losses(logits, boxes, pairs, labels, targets, 0.1, 3.0)
    wanted = torch.tensor([[2, 2, 0, 2], [1, 2, 2, 1]])
    weight = torch.where(wanted == 2, 0.1, 1.0)
    by_query = -logits.log_softmax(2).gather(2, wanted[..., None])[..., 0]
    assert losses["class"].item() == pytest.approx(((weight * by_query).sum() / weight.sum()).item(), abs=1e-6)
    found = [boxes[0, 2], boxes[1, 0], boxes[1, 3]]
    wanted_boxes = [targets[0], targets[2], targets[1]]
    distance = sum((a - b).abs().sum().item() for a, b in zip(found, wanted_boxes, strict=True)) / 3
    overlap = sum(1 - giou_by_hand(a.tolist(), b.tolist()) for a, b in zip(found, wanted_boxes, strict=True)) / 3
    assert (losses["l1"].item(), losses["giou"].item()) == pytest.approx((distance, overlap), abs=1e-5)


def test_boxes_that_do_not_touch_still_have_a_gradient() -> None:
    boxes = torch.tensor([[[0.1, 0.5, 0.1, 0.1]]], requires_grad=True)
    target = torch.tensor([[0.9, 0.5, 0.1, 0.1]])
    losses = set_losses(torch.zeros(1, 1, 2), boxes, pairs_of((0, 0, 0)), torch.tensor([0]), target, 0.1, 1.0)
    assert losses["giou"].item() == pytest.approx(1 - giou_by_hand([0.1, 0.5, 0.1, 0.1], target[0].tolist()), abs=1e-5)
    losses["giou"].backward()
    assert boxes.grad[0, 0, 0] < 0, "to the right, where the object is"


def test_without_any_object_only_the_class_is_learned() -> None:
    none, no_boxes = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4)
    (pairs,) = match(torch.zeros(1, 1, 3, 4), torch.rand(1, 1, 3, 4), none, no_boxes, [0], MatchCost())
    objects = mean_objects(0, torch.device("cpu"))
    losses = set_losses(torch.zeros(1, 3, 4), torch.rand(1, 3, 4), pairs, none, no_boxes, 0.1, objects)
    assert losses["l1"] == losses["giou"] == 0 and losses["class"].item() == pytest.approx(np.log(4))
