"""The measures of ``benchmarks/limitations.py``: maps between views, points that move, merges across objects."""

import itertools

import limitations
import numpy as np
import pytest
import torch
from limitations import WHOLE, View
from PIL import Image
from sklearn.metrics import adjusted_rand_score

from asc.data.images import normalise
from asc.data.scenes import Scene, SceneConfig
from asc.layer import SuperpixelConfig
from asc.vit import AscViT, VitConfig

VIEWS = [*limitations.VIEWS.values(), View(0.25, 0.125, 0.5, flip=True)]


@pytest.mark.parametrize("view", VIEWS)
def test_points_of_two_views_show_the_same_place_of_the_image(view: View) -> None:
    # The red channel says where a pixel of the image is from left to right, the green one from top to bottom.
    ramp = np.linspace(0, 255, 288)
    image = Image.fromarray(
        np.stack(np.broadcast_arrays(ramp[None, :], ramp[:, None], 0.0), axis=-1).round().astype(np.uint8)
    )
    whole_HW3, other_HW3 = WHOLE.image(image).astype(np.int64), view.image(image).astype(np.int64)
    for channel in (0, 1):
        one_N, other_N = limitations.shared_points(whole_HW3[..., channel], WHOLE, other_HW3[..., channel], view)
        assert len(one_N) > 1000
        # A pixel of 64 is four shades wide; both views round to their own pixels.
        assert np.abs(one_N - other_N).max() <= 5


def test_a_view_is_compared_where_both_see_the_image_and_nowhere_else() -> None:
    labels_hw = np.arange(256).reshape(16, 16)
    one_N, other_N = limitations.shared_points(labels_hw, WHOLE, labels_hw, limitations.VIEWS["mirrored"])
    assert np.array_equal(one_N.reshape(64, 64)[:, ::-1], other_N.reshape(64, 64))
    shifted = limitations.VIEWS["shifted by two patches, both ways"]
    one_N, other_N = limitations.shared_points(labels_hw, WHOLE, labels_hw, shifted)
    # Two patches to the right and two down, of rows of 16: 14 × 14 patches of 16 pixels are left.
    assert len(one_N) == 14 * 14 * 16
    assert np.array_equal(one_N - other_N, np.full(len(one_N), 2 * 16 + 2))


def test_agreement_of_a_case_by_hand() -> None:
    found = limitations.agreement(np.array([0, 0, 0, 1, 1, 1]), np.array([5, 5, 7, 7, 7, 7]))
    # Best IoU: {0, 1} of {0, 1, 2} is 2/3, {3, 4, 5} of {2, 3, 4, 5} 3/4. Together: 3 + 3 pairs, of which 1 + 3 stay.
    assert found["iou"] == pytest.approx((2 / 3 + 3 / 4) / 2)
    assert found["kept"] == pytest.approx(4 / 6)
    # By pairs: 4 agree together, 3 and 7 are together in one of the two, of 15 in all.
    chance = 6 * 7 / 15
    assert found["ari"] == pytest.approx((4 - chance) / ((6 + 7) / 2 - chance))


def test_points_that_move_keep_their_object_and_their_colour() -> None:
    scene = Scene(SceneConfig(size=64, split="test", min_objects=2), 3)
    first, second = scene.frame(4), scene.frame(8)
    moved = limitations.moved_points(scene, 4, 8)
    marks = [
        np.concatenate([[-1], frame.tracks_K])[frame.instance_HW.ravel()[pixels_N]]
        for frame, pixels_N in ((first, moved.before_N), (second, moved.after_N))
    ]
    assert np.array_equal(marks[0], moved.track_N) and np.array_equal(marks[1], moved.track_N)
    assert len(moved.before_N) > 0.6 * 64 * 64
    colours = [frame.image_HW3.reshape(-1, 3).astype(float) for frame in (first, second)]
    along = np.abs(colours[0][moved.before_N] - colours[1][moved.after_N]).mean()
    in_place = np.abs(colours[0] - colours[1]).mean()
    assert along < 0.5 * in_place


def test_points_of_a_still_moment_stay_where_they_are() -> None:
    moved = limitations.moved_points(Scene(SceneConfig(size=32), 0), 2, 2)
    assert np.array_equal(moved.before_N, moved.after_N) and len(moved.before_N) == 32 * 32


def test_merges_and_pairs_across_objects_by_hand() -> None:
    # Six patches: tokens {0, 1}, {2}, {3}, {4}, {5}; objects 0 0 1 1 2 void. Then {0, 1, 2}, {3, 4}, {5}.
    before_N, after_N = np.array([0, 0, 1, 2, 3, 4]), np.array([0, 0, 0, 1, 1, 2])
    found = limitations.step_numbers(before_N, after_N, np.array([0, 0, 1, 1, 2, -1]))
    assert found["merges"] == 2 and found["crossing"] == 2
    # New pairs: 0-2, 1-2, 3-4, all across objects. Not yet together before: all ten pairs of the five but 0-1.
    assert found["joined_pairs"] == 3 and found["crossing_pairs"] == 3
    assert found["apart"] == 9 and found["apart_crossing"] == 8
    # Patch 2 among those of object 0, and one of 3 and 4 among those of the other.
    assert found["mixed"] == 2 and found["known"] == 5 and found["changed"] == 5
    entropies = [-sum(n / 6 * np.log2(n / 6) for n in sizes) for sizes in ((2, 1, 1, 1, 1), (3, 2, 1))]
    assert found["information"] == pytest.approx(entropies[0] - entropies[1])


def test_pairs_across_objects_against_a_loop() -> None:
    rng = np.random.default_rng(0)
    before_N = np.unique(rng.integers(0, 20, 40), return_inverse=True)[1]
    after_N = np.unique(rng.integers(0, 6, 20)[before_N], return_inverse=True)[1]
    truth_N = rng.integers(0, 3, 40)
    found = limitations.step_numbers(before_N, after_N, truth_N)
    apart = [(i, j) for i, j in itertools.combinations(range(40), 2) if before_N[i] != before_N[j]]
    joined = [(i, j) for i, j in apart if after_N[i] == after_N[j]]
    assert found["apart"] == len(apart) and found["joined_pairs"] == len(joined)
    assert found["crossing_pairs"] == sum(truth_N[i] != truth_N[j] for i, j in joined)
    assert limitations.agreement(before_N, after_N)["ari"] == pytest.approx(adjusted_rand_score(before_N, after_N))


def test_pixels_of_an_object_in_superpixels_of_something_else() -> None:
    truth_HW = np.zeros((64, 64), np.int64)
    truth_HW[:8, :8] = 1  # four patches
    labels_HW = np.zeros((64, 64), np.int64)
    labels_HW[:8, :4] = 1  # half of them by themselves, the other half with the background
    assert limitations.swallowed(labels_HW, truth_HW, [1]) == [0.5]
    (row,) = limitations.object_rows(labels_HW[None], truth_HW[None], {})
    assert limitations.bin_name(row["bin"]) == "4 to 8" and row["lost"] == 0.5 and row["best"] == 0.5


def test_averaging_takes_the_mean_of_every_superpixel() -> None:
    features_BNC, labels_Bhw = torch.randn(2, 4, 3), np.array([[[0, 1], [1, 0]], [[0, 0], [0, 1]]])
    mean_BNC = limitations.averaged(features_BNC, labels_Bhw)
    for image, labels_N in enumerate(labels_Bhw.reshape(2, -1)):
        for patch, label in enumerate(labels_N):
            torch.testing.assert_close(mean_BNC[image, patch], features_BNC[image, labels_N == label].mean(0))


def test_the_merging_blocks_alone_group_as_the_whole_network_does() -> None:
    torch.manual_seed(0)
    model = AscViT(VitConfig(width=24, depth=6, image_size=64, superpixels=SuperpixelConfig(blocks=(0, 1), budget=0.5)))
    images_BHW3 = np.stack([Scene(SceneConfig(size=64), index).frame(0).image_HW3 for index in range(4)])
    model.eval().calibrate(normalise(images_BHW3))
    short = limitations.merging_part(model)
    assert short.config.depth == 2
    whole_LBhw = model.superpixels(normalise(images_BHW3))[:2].numpy()
    assert np.array_equal(limitations.groupings(short, images_BHW3, ""), whole_LBhw)
    limitations.set_budget(model, 0.6)
    assert model.budget is not None
    shares_L = model.budget.targets_L.numpy()
    assert np.mean([1, shares_L[0], *[shares_L.prod()] * 4]) == pytest.approx(0.6, abs=1e-5)
