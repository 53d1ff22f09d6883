"""The order of samples: seed and epoch alone decide, whoever reads."""

import pickle
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from asc.data.clips import LeftOut, SceneClips, without
from asc.data.sampling import BatchPlan, FrameChoice, Order, choose_frames
from asc.data.scenes import SceneConfig


def corpus(clips: int, seed: int = 0) -> SceneClips:
    return SceneClips(SceneConfig(size=16, frames=4, seed=seed), clips)


def positions(start: int, end: int, batch: int, parts: int, processes: int) -> list[int]:
    """What all processes together take, step by step."""
    plans = [BatchPlan(start, end, batch, parts, rank, processes) for rank in range(processes)]
    return [p for batches in zip(*plans, strict=True) for part in batches for p in part]


@pytest.mark.parametrize(("parts", "processes"), [(1, 1), (1, 2), (2, 1), (2, 3), (3, 4)])
def test_any_number_of_processes_takes_the_same_samples_in_the_same_order(parts: int, processes: int) -> None:
    assert positions(24, 96, 24, parts, processes) == list(range(24, 96))


def test_a_batch_that_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(ValueError, match="batch 10 cannot be shared out evenly"):
        BatchPlan(0, 100, batch=10, parts=2, rank=0, processes=3)


def test_every_epoch_shows_every_clip_once_in_another_order() -> None:
    order = Order([corpus(7), corpus(5)], None, seed=3)
    epochs = [[order.slot(12 * epoch + i)[:3] for i in range(12)] for epoch in range(3)]
    clips = {(0, clip) for clip in range(7)} | {(1, clip) for clip in range(5)}
    for number, epoch in enumerate(epochs):
        assert {slot[:2] for slot in epoch} == clips
        assert all(slot[2] == number for slot in epoch)
    assert len({tuple(slot[:2] for slot in epoch) for epoch in epochs}) == 3


def test_the_order_depends_on_the_seed() -> None:
    orders = [[Order([corpus(20)], None, seed).slot(i).clip for i in range(20)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_any_position_can_be_asked_for_first_and_after_a_journey_to_another_process() -> None:
    corpora, far = [corpus(9), corpus(4)], 1000
    expected = [Order(corpora, [1, 1], 5).slot(i) for i in range(far, far + 30)]
    moved = pickle.loads(pickle.dumps(Order(corpora, [1, 1], 5)))
    assert [moved.slot(i) for i in reversed(range(far, far + 30))] == expected[::-1]


def test_corpora_are_mixed_by_weight_and_each_shows_all_its_clips_before_it_starts_again() -> None:
    order = Order([corpus(10), corpus(30)], [3, 1], seed=0)
    slots = [order.slot(i) for i in range(400)]
    assert Counter(slot.corpus for slot in slots) == {0: 300, 1: 100}
    seen = Counter((slot.corpus, slot.clip) for slot in slots)
    assert {seen[0, clip] for clip in range(10)} == {30}
    assert {seen[1, clip] for clip in range(30)} <= {3, 4}
    # The same clip never comes twice with the same random numbers.
    assert len({(slot.sample, slot.epoch) for slot in slots}) == 400
    # Mixed, not one after another: a corpus of a quarter of the samples is missing from no stretch of 40.
    assert all(any(slot.corpus == 1 for slot in slots[i : i + 40]) for i in range(0, 400, 40))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "1 weights for 2 corpora"),
        ([1.0, -1.0], "positive"),
        ([1.0, 1e-9], "so small"),
        ([1, np.nan], "positive"),
    ],
)
def test_bad_weights_are_named(weights: Sequence[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Order([corpus(4), corpus(4)], weights, seed=0)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 48])
@pytest.mark.parametrize("spacing", ["intervals", "consecutive"])
def test_four_frames_of_a_clip_of_any_length(count: int, spacing: str) -> None:
    choice = FrameChoice(spacing, "all")
    seen = set()
    for sample in range(300):
        frames = choose_frames(choice, count, 0, 0, sample)
        assert len(frames) == 4 and frames == sorted(frames)
        assert frames[0] >= 0 and frames[-1] < count
        if spacing == "consecutive":
            assert frames == [min(frames[0] + step, count - 1) for step in range(4)]
        else:
            assert all(part * count / 4 - 1 < f < (part + 1) * count / 4 for part, f in enumerate(frames))
        seen.update(frames)
    assert seen == set(range(count))


def test_frames_of_an_interval_are_equally_likely() -> None:
    drawn = [choose_frames(FrameChoice("intervals", "all"), 16, 1, 0, sample) for sample in range(4000)]
    for part in range(4):
        counts = np.bincount([frames[part] - 4 * part for frames in drawn], minlength=4)
        assert np.abs(counts - 1000).max() < 5 * np.sqrt(750)  # five standard deviations of a fair draw


def test_a_pair_is_any_two_of_the_four_and_new_in_every_epoch() -> None:
    four = {sample: choose_frames(FrameChoice("intervals", "all"), 16, 0, 0, sample) for sample in range(600)}
    pairs = {sample: choose_frames(FrameChoice(), 16, 0, 0, sample) for sample in range(600)}
    places = Counter(tuple(four[sample].index(frame) for frame in pairs[sample]) for sample in pairs)
    assert set(places) == {(i, j) for i in range(4) for j in range(i + 1, 4)}
    assert min(places.values()) > 60
    assert any(pairs[sample] != choose_frames(FrameChoice(), 16, 0, 1, sample) for sample in range(5))


def test_a_list_leaves_out_files_folders_and_hashes() -> None:
    scenes = corpus(6)
    entries = ["scene 1", scenes.content_hash(4).upper(), "nothing of the kind"]
    kept, left_out, used = without(scenes, entries)
    assert isinstance(kept, LeftOut) and len(kept) == 4
    assert left_out == ["scene 1", "scene 4"]
    assert used == {"scene 1", scenes.content_hash(4)}
    assert [kept.source(clip) for clip in range(4)] == [f"scene {i}" for i in (0, 2, 3, 5)]
    assert np.array_equal(kept.read(2, [1])[0], scenes.read(3, [1])[0])
    order = kept.order(np.random.default_rng(0))
    assert sorted(order.tolist()) == [0, 1, 2, 3]


def test_a_list_that_leaves_nothing_is_refused() -> None:
    scenes = corpus(2)
    with pytest.raises(ValueError, match="names every clip"):
        without(scenes, ["scene 0", "scene 1"])
