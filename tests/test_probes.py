"""kNN, the linear classifier and the signs of collapse, against scikit-learn and cases computed by hand."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

import asc
from asc.data.scenes import Scene, SceneConfig
from asc.pretrain.monitors import Learning, Monitor, effective_rank, spread
from asc.tasks.classify.images import folder_split, scene_split
from asc.tasks.classify.probes import extract, knn_accuracy, linear_accuracy


def clusters(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of four overlapping clusters; the centres are the same for every seed."""
    centres = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=generator)
    return centres[labels] + 1.3 * torch.randn(count, 12, generator=generator), labels


@pytest.mark.parametrize("k", [1, 7, 20])
def test_knn_is_that_of_scikit_learn(k: int) -> None:
    (bank, labels), (queries, truth) = clusters(300, 1), clusters(200, 2)

    def votes(distances: np.ndarray) -> np.ndarray:
        # scikit-learn measures unit vectors by distance: d² = 2 - 2 cos.
        return np.exp((1 - distances**2 / 2) / 0.07)

    unit = [torch.nn.functional.normalize(x, dim=1).numpy() for x in (bank, queries)]
    theirs = KNeighborsClassifier(k, weights=votes).fit(unit[0], labels).score(unit[1], truth)
    assert knn_accuracy(bank, labels, queries, truth, k) == pytest.approx(theirs, abs=1e-9)


def test_knn_takes_fewer_neighbours_where_there_are_fewer_images() -> None:
    (bank, labels), (queries, truth) = clusters(5, 1), clusters(2500, 2)
    assert 0 < knn_accuracy(bank, labels, queries, truth, 20) < 1


def test_linear_classifier_is_that_of_scikit_learn() -> None:
    (bank, labels), (queries, truth) = clusters(400, 1), clusters(300, 2)
    decay = 1e-2
    standardised = [(x - bank.mean(0)) / bank.std(0) for x in (bank, queries)]
    theirs = LogisticRegression(C=1 / (decay * len(labels)), max_iter=1000).fit(standardised[0], labels)
    ours = linear_accuracy(bank, labels, queries, truth, decays=[decay])
    assert ours == pytest.approx(theirs.score(standardised[1], truth), abs=0.004)


def test_weight_decay_is_chosen_without_looking_at_the_judged_images() -> None:
    (bank, labels), (queries, truth) = clusters(60, 1), clusters(300, 2)
    chosen = linear_accuracy(bank, labels, queries, truth)
    by_decay = [
        linear_accuracy(bank, labels, queries, truth, decays=[decay]) for decay in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
    ]
    assert chosen in by_decay
    # Judged images whose classes are shuffled cannot change what was fitted: only the score.
    shuffled = truth[torch.randperm(300, generator=torch.Generator().manual_seed(0))]
    assert linear_accuracy(bank, labels, queries, shuffled) < chosen


def test_features_do_not_depend_on_the_batch_and_the_mode_comes_back() -> None:
    model = asc.create_model("asc_vit_tiny_patch8", None, image_size=32, depth=2).train()
    images = torch.randn(7, 3, 32, 32)
    torch.testing.assert_close(extract(model, images, batch=2), extract(model, images, batch=7))
    assert model.training


def test_spread_and_rank_of_known_cases() -> None:
    same = torch.ones(64, 16) + 1e-4 * torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    free = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
    assert spread(same) < 1e-3 and spread(free) == pytest.approx(1, abs=0.02)
    flat = free.clone()
    flat[:, 3:] = 0
    assert effective_rank(flat) == pytest.approx(3, abs=0.05)
    assert effective_rank(free) == pytest.approx(16, abs=0.1)
    assert np.isnan(effective_rank(free * torch.nan))


def stats(tokens: float = 100.0, largest: float = 0.1) -> asc.LayerStats:
    return asc.LayerStats(tokens, 50, 150, 0.8, largest, 0.5, 0.9)


def test_the_monitor_says_each_thing_once_and_again_after_it_was_well() -> None:
    monitor = Monitor(budget=0.4)
    well = {0: stats(), 1: stats()}
    assert monitor.judge(1, 0.9, 40, well, 0.41) == []
    (first,) = monitor.judge(2, 0.9, 40, {0: stats(), 1: stats(largest=0.95)}, 0.41)
    assert "step 2: block 1 has a giant component" in first and "95%" in first
    assert monitor.judge(3, 0.9, 40, {0: stats(), 1: stats(largest=0.95)}, 0.41) == []
    assert monitor.judge(4, 0.9, 40, well, 0.41) == []
    assert len(monitor.judge(5, 0.9, 40, {0: stats(tokens=1.0), 1: stats(largest=0.95)}, 0.41)) == 2
    assert "has collapsed" in monitor.judge(6, 0.01, 40, well, 0.41)[0]
    assert "is collapsing" in monitor.judge(7, 0.9, 1.2, well, 0.41)[0]
    assert "the budget is 40%" in monitor.judge(8, 0.9, 40, well, 0.6)[0]
    assert Monitor(budget=None).judge(8, 0.9, 40, well, 0.6) == []


def test_scene_split_shows_the_labelled_scenes_of_both_splits() -> None:
    split = scene_split(SceneConfig(size=16, seed=5), train=6, test=4)
    assert split.train.images_B3HW.shape == (6, 3, 16, 16) and len(split.test.labels_B) == 4
    assert split.test.labels_B.tolist() == [
        Scene(SceneConfig(size=16, seed=5, split="test"), i).label for i in range(4)
    ]


def test_folders_of_images_are_read_by_class_and_bad_ones_named(tmp_path: Path) -> None:
    for part, classes in (("train", "ab"), ("test", "b")):
        for label in classes:
            (tmp_path / part / label).mkdir(parents=True)
            for number in range(4):
                colour = (200, 0, 0) if label == "a" else (0, 0, 200)
                Image.new("RGB", (20 + number, 12), colour).save(tmp_path / part / label / f"{number}.png")
    split = folder_split(tmp_path, 8)
    assert split.classes == ["a", "b"]
    assert split.train.labels_B.tolist() == [0] * 4 + [1] * 4 and split.test.labels_B.tolist() == [1] * 4
    assert bool((split.train.images_B3HW[:4, 0] > split.train.images_B3HW[4:, 0]).all())
    assert len(folder_split(tmp_path, 8, train=3).train.labels_B) == 3
    (tmp_path / "test" / "c").mkdir()
    with pytest.raises(ValueError, match=r"classes that .* does not know: c"):
        folder_split(tmp_path, 8)
    (tmp_path / "test" / "c").rmdir()
    (tmp_path / "train" / "a" / "bad.png").write_text("no image")
    with pytest.raises(ValueError, match=r"bad\.png: not an image"):
        folder_split(tmp_path, 8)
    with pytest.raises(ValueError, match="has not the layout"):
        folder_split(tmp_path / "train", 8)


def test_the_monitor_tells_when_half_the_training_taught_nothing() -> None:
    monitor, well = Monitor(), {0: stats()}
    # 1,000 judged images at 25%: the noise is 1.4 points, twice that is what luck can do.
    assert monitor.judge(1, 0.9, 40, well, 1.0, Learning(0.25, 0.26, 1000, 0.4)) == []
    (said,) = monitor.judge(2, 0.9, 40, well, 1.0, Learning(0.25, 0.26, 1000, 0.6))
    assert "hardly above the untrained 25.0%" in said
    assert monitor.judge(3, 0.9, 40, well, 1.0, Learning(0.25, 0.29, 1000, 0.8)) == []


def test_the_monitor_tells_of_keys_that_crowd() -> None:
    crowded = {2: dataclasses.replace(stats(), theta=0.9999)}
    (said,) = Monitor().judge(1, 0.9, 40, crowded, 1.0)
    assert "keys of block 2 crowd" in said
    assert Monitor(cosine=False).judge(1, 0.9, 40, crowded, 1.0) == []
