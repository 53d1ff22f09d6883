"""The scene generator: its truth is checked against independent ways to compute it."""

import colorsys
import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage, stats
from skimage.draw import polygon2mask

from asc.data import CLASSES, Frame, Scene, SceneConfig, SceneDataset
from asc.data import scenes as module
from asc.data.scenes import layout, render, shapes, textures


def assert_same(a: Frame, b: Frame) -> None:
    for name, left, right in zip(Frame._fields, a, b, strict=True):
        assert left.tobytes() == right.tobytes(), name


def overlap(a_HW: np.ndarray, b_HW: np.ndarray) -> float:
    """Intersection over union of two masks."""
    return float((a_HW & b_HW).sum() / (a_HW | b_HW).sum())


def scenes_of(label: str, count: int, **settings_: int) -> list[Scene]:
    """The first scenes with this main object and nothing else."""
    config = SceneConfig(max_objects=1, **settings_)
    found = (Scene(config, i) for i in itertools.count())
    return list(itertools.islice((s for s in found if CLASSES[s.label] == label), count))


# Determinism ---------------------------------------------------------------------------------------------


def test_same_arguments_give_the_same_bytes_in_any_order():
    config = SceneConfig(size=48, frames=5, max_objects=4)
    forward, backward = Scene(config, 7), Scene(config, 7)
    frames = [forward.frame(t) for t in range(5)]
    for t in reversed(range(5)):
        assert_same(frames[t], backward.frame(t))
        assert_same(frames[t], Scene(config, 7).frame(t))
    assert_same(frames[0], forward.frame(-0.0))


@pytest.mark.parametrize(
    ("config", "index"),
    [(SceneConfig(), 4), (SceneConfig(seed=1), 3), (SceneConfig(split="test"), 3)],
)
def test_another_index_seed_or_split_is_another_scene(config, index):
    first, second = Scene(SceneConfig(), 3).frame(0), Scene(config, index).frame(0)
    assert np.abs(first.image_HW3.astype(int) - second.image_HW3).mean() > 10
    assert not np.array_equal(first.instance_HW, second.instance_HW)


def test_a_longer_clip_begins_with_the_shorter_one():
    short, long = Scene(SceneConfig(frames=3), 5), Scene(SceneConfig(frames=40), 5)
    np.testing.assert_array_equal(short.clip(), long.clip()[:3])


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_scene_is_the_same_at_every_resolution(split):
    for index in range(8):
        small = Scene(SceneConfig(size=64, split=split), index).frame(6)
        large = Scene(SceneConfig(size=192, split=split), index).frame(6)
        # The middle of every block of 3 × 3 pixels lies exactly on a pixel of the small image.
        assert (small.semantic_HW == large.semantic_HW[1::3, 1::3]).mean() > 0.999
        np.testing.assert_allclose(small.depth_HW, large.depth_HW[1::3, 1::3], rtol=1e-3)
        blocks = large.image_HW3.reshape(64, 3, 64, 3, 3).mean(axis=(1, 3))
        assert np.abs(small.image_HW3 - blocks).mean() < 8


def test_scenes_survive_pickling():
    scene = Scene(SceneConfig(), 2)
    before = scene.frame(1)
    assert_same(before, pickle.loads(pickle.dumps(scene)).frame(1))


def test_the_noise_differs_between_frames_and_is_mild():
    scene = Scene(SceneConfig(frames=2), 0)
    first, second = (scene.frame(t).image_HW3.astype(float) for t in (0, 1e-9))
    difference = first - second
    # The scene has not moved, so the difference is the noise of two frames.
    assert 0.8 * render.NOISE < difference.std() / math.sqrt(2) < 1.1 * render.NOISE
    assert abs(np.corrcoef(difference[:, :-1].ravel(), difference[:, 1:].ravel())[0, 1]) < 0.05


# The truth of one frame ----------------------------------------------------------------------------------


def assert_numbered(frame: Frame) -> None:
    """Numbers run without gaps, and classes and boxes belong to the same numbers."""
    numbers = np.unique(frame.instance_HW[frame.instance_HW > 0])
    np.testing.assert_array_equal(numbers, np.arange(1, len(frame.classes_K) + 1))
    assert np.all(np.diff(frame.tracks_K) > 0)
    expected_HW = np.concatenate([[0], frame.classes_K + 1])[frame.instance_HW]
    np.testing.assert_array_equal(frame.semantic_HW, expected_HW)
    boxes = [(s[1].start, s[0].start, s[1].stop, s[0].stop) for s in ndimage.find_objects(frame.instance_HW)]
    np.testing.assert_array_equal(frame.boxes_K4, np.array(boxes, np.float32))


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(16, 80),
    objects=st.integers(1, 12),
    split=st.sampled_from(["train", "test"]),
    index=st.integers(0, 2**32 - 1),
    t=st.floats(0, 9),
)
def test_the_parts_of_a_frame_agree(size, objects, split, index, t):
    config = SceneConfig(size=size, frames=10, min_objects=objects, max_objects=objects, split=split)
    scene = Scene(config, index)
    frame = scene.frame(t)
    assert frame.image_HW3.shape == (size, size, 3)
    assert frame.image_HW3.dtype == frame.semantic_HW.dtype == frame.instance_HW.dtype == np.uint8
    assert frame.depth_HW.dtype == frame.boxes_K4.dtype == np.float32
    assert frame.classes_K.dtype == frame.tracks_K.dtype == np.int64
    assert frame.semantic_HW.shape == frame.instance_HW.shape == frame.depth_HW.shape == (size, size)

    assert_numbered(frame)
    assert frame.tracks_K[0] == 0
    assert frame.classes_K[0] == scene.label
    assert frame.tracks_K[-1] < objects

    count = len(frame.classes_K)
    depths = [frame.depth_HW[frame.instance_HW == k] for k in range(count + 1)]
    assert all(depth.min() > 0 for depth in depths if depth.size)
    assert all(depth.max() < layout.BACKGROUND_DEPTH[0] for depth in depths[1:])
    if depths[0].size:
        assert depths[0].min() > max(depth.max() for depth in depths[1:])


def drawn_alone(scene: Scene, k: int, t: float) -> tuple[np.ndarray, np.ndarray]:
    """Mask and depth of object k with nothing in front of it; depth is infinite elsewhere."""
    canvas = scene._background(t)
    scene._paint(canvas, k, t)
    mask_P = canvas.mark_P == k + 1
    shape = (scene.config.size, scene.config.size)
    return mask_P.reshape(shape), np.where(mask_P, canvas.depth_P, np.inf).reshape(shape)


def test_the_nearest_object_hides_the_others():
    config = SceneConfig(min_objects=6, max_objects=6)
    overlaps = 0
    for index in range(12):
        scene = Scene(config, index)
        frame = scene.frame(9)
        alone = [drawn_alone(scene, k, 9) for k in range(6)]
        depth_KHW = np.stack([depth for _, depth in alone])
        covered_HW = np.isfinite(depth_KHW).any(axis=0)
        np.testing.assert_array_equal(frame.instance_HW > 0, covered_HW)
        nearest_HW = depth_KHW.argmin(axis=0)
        track_HW = np.concatenate([[-1], frame.tracks_K])[frame.instance_HW]
        np.testing.assert_array_equal(track_HW[covered_HW], nearest_HW[covered_HW])
        np.testing.assert_array_equal(frame.depth_HW[covered_HW], depth_KHW.min(axis=0)[covered_HW])
        overlaps += int((np.isfinite(depth_KHW).sum(axis=0) > 1).sum())
    assert overlaps > 1000, "the scenes must show occlusion for this test to mean anything"


def test_hidden_objects_are_left_out_and_the_others_renumbered():
    config = SceneConfig(min_objects=12, max_objects=12)
    with_gaps = 0
    for index in range(30):
        scene = Scene(config, index)
        frame = scene.frame(0)
        nearest_HW = np.stack([drawn_alone(scene, k, 0)[1] for k in range(12)]).argmin(axis=0)
        np.testing.assert_array_equal(np.unique(nearest_HW[frame.instance_HW > 0]), frame.tracks_K)
        assert_numbered(frame)
        with_gaps += int(frame.tracks_K[-1] >= len(frame.tracks_K))
    assert with_gaps > 0, "an object before the last must be hidden for this test to mean anything"


def test_depth_varies_inside_objects_and_background():
    for index in range(6):
        frame = Scene(SceneConfig(), index).frame(0)
        for k in (0, 1):
            assert np.ptp(frame.depth_HW[frame.instance_HW == k]) > 0


def test_a_disk_has_the_area_of_its_ellipse():
    for scene in scenes_of("disk", 4, size=128):
        for t in (0, 7, 15):
            mask_HW = scene.frame(t).instance_HW == 1
            pose = scene._objects[0].pose(scene._camera, t)
            a, b = (64 * pose.scale * stretch for stretch in (pose.stretch, 1 / pose.stretch))
            assert mask_HW.sum() == pytest.approx(math.pi * a * b, rel=0.02)
            assert scene.main_area(t) == pytest.approx(math.pi * a * b, rel=0.01)
            # The second moments of an ellipse are a²/4 and b²/4; bending changes them a little.
            moments = np.linalg.eigvalsh(np.cov(np.argwhere(mask_HW).T))
            np.testing.assert_allclose(2 * np.sqrt(moments), sorted((a, b)), rtol=0.05)


def corners(name: str, form: float) -> np.ndarray:
    """Corners of a shape in local coordinates, from its definition as a polygon."""
    if name == "triangle":
        v = np.array([0.96, -0.48, -0.48])
        u = np.array([0.0, 0.96, -0.96]) * math.cos(math.pi / 6)
        return np.stack([u - 0.1 * form * v, v], axis=1)
    radius = np.where(np.arange(10) % 2 == 0, 1.0, 0.46 + 0.05 * form)
    angle = math.pi / 2 + np.arange(10) * math.pi / 5
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)


@pytest.mark.parametrize("name", ["triangle", "star"])
def test_masks_match_polygons_carried_forward(name):
    """The generator maps pixels back into the shape; here the shape is carried forward onto the screen."""
    size = 160
    for scene in scenes_of(name, 4, size=size):
        for t in (0, 11):
            thing = scene._objects[0]
            pose = thing.pose(scene._camera, t)
            ends = corners(name, thing.body.form)
            # Bending makes straight edges curved: go along them in small steps.
            steps = np.linspace(0, 1, 20, endpoint=False)[:, None]
            edges = [a + steps * (b - a) for a, b in zip(ends, np.roll(ends, -1, axis=0), strict=True)]
            u, v = np.concatenate(edges).T
            u, v = (u + pose.bend * v * v) * pose.stretch, v / pose.stretch
            cos, sin = math.cos(pose.angle), math.sin(pose.angle)
            x = pose.x + pose.scale * (cos * u - sin * v)
            y = pose.y + pose.scale * (sin * u + cos * v)
            row_column = (np.stack([y, x], axis=1) + 1) * size / 2 - 0.5
            reference_HW = polygon2mask((size, size), row_column)
            assert overlap(scene.frame(t).instance_HW == 1, reference_HW) > 0.98


def test_shapes_fit_the_unit_disk_and_are_large_enough():
    """The guarantees about the main object rest on both."""
    # A step that no straight outline falls onto, or whole rows of points would lie exactly on an edge.
    axis, step = np.linspace(-1.4, 1.4, 563, dtype=np.float32, retstep=True)
    radius = np.hypot(axis[None, :], axis[:, None])
    for class_id, outline in enumerate(shapes.OUTLINES):
        for form in (-1.0, -0.3, 0.4, 1.0):
            inside = outline(axis[None, :], axis[:, None], form) < 0
            assert radius[inside].max() <= 1.005
            area = inside.sum() * step**2
            assert area == pytest.approx(shapes.unit_area(class_id, form), rel=0.01)
            assert area > 1.03


@pytest.mark.parametrize(
    ("name", "form", "area"),
    [
        ("disk", 0.0, math.pi),
        ("square", 0.0, 1.34**2),
        ("triangle", 0.7, 3 * math.sqrt(3) * 0.48**2),
        ("star", 1.0, 5 * 0.51 * math.sin(math.pi / 5)),
        ("ring", -1.0, math.pi * (1 - 0.42**2)),
        ("cross", 1.0, 4 * 0.93 * 0.64 - 0.64**2),
        ("heart", 0.5, (4 + math.pi) * 0.53**2),
        ("arrow", 0.0, 0.8 * 0.9 + 0.56 * 1.04),
        ("hourglass", -1.0, 4 * (0.1 * 0.745 + 0.68 * 0.745**2 / 2)),
    ],
)
def test_shapes_have_their_exact_areas(name, form, area):
    assert shapes.unit_area(CLASSES.index(name), form) == pytest.approx(area, rel=0.01)


def test_the_image_has_edges_where_the_masks_have():
    on_edges, elsewhere = [], []
    for split, index in itertools.product(("train", "test"), range(15)):
        frame = Scene(SceneConfig(split=split), index).frame(3)
        image = frame.image_HW3.astype(float)
        step = np.abs(np.diff(image, axis=1)).sum(axis=-1)
        edge = np.diff(frame.instance_HW.astype(int), axis=1) != 0
        on_edges.append(step[edge].mean())
        elsewhere.append(step[~ndimage.binary_dilation(edge, iterations=2)].mean())
    ratios = np.array(on_edges) / np.array(elsewhere)
    assert np.median(ratios) > 3
    assert ratios.min() > 1.2


def test_edges_are_blended():
    """Along the outline of a lone object a share of pixels lies between the colours on both sides."""
    scene = scenes_of("disk", 1, size=96)[0]
    calm = scene._background(0)
    before = calm.image_3P.copy()
    scene._paint(calm, 0, 0)
    changed = np.abs(calm.image_3P - before).max(axis=0) > 1e-3
    hard = calm.mark_P == 1
    soft = changed & ~hard
    perimeter = 2 * math.sqrt(math.pi * hard.sum())
    assert 0.3 * perimeter < soft.sum() < 1.5 * perimeter


# The main object -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_main_object_stays_visible_and_largest(split):
    config = SceneConfig(size=48, frames=32, max_objects=5, split=split)
    for index in range(40):
        scene = Scene(config, index)
        for t in range(0, 32, 2):
            frame = scene.frame(t)
            visible = int((frame.instance_HW == 1).sum())
            assert visible >= module.MIN_MAIN_COVER * 48 * 48
            assert visible >= module.MIN_MAIN_VISIBLE * scene.main_area(t)
            poses = [thing.pose(scene._camera, t) for thing in scene._objects]
            areas = [thing.area(pose) for thing, pose in zip(scene._objects, poses, strict=True)]
            assert max(areas) == areas[0]


def test_labels_are_balanced_and_independent_of_the_texture():
    scenes = [Scene(SceneConfig(), i) for i in range(1200)]
    counts = np.bincount([scene.label for scene in scenes], minlength=10)
    assert len(counts) == len(CLASSES) == 10
    assert stats.chisquare(counts).pvalue > 1e-3
    for name_of in (lambda s: s.object_textures[0], lambda s: s.background_textures[0]):
        names = sorted({name_of(scene) for scene in scenes})
        table = np.zeros((10, len(names)))
        for scene in scenes:
            table[scene.label, names.index(name_of(scene))] += 1
        assert stats.chi2_contingency(table).pvalue > 1e-3


# Motion --------------------------------------------------------------------------------------------------


def test_motion_is_smooth_small_per_frame_and_large_per_clip():
    near, far, near_overlap, far_overlap = [], [], [], []
    for index in range(25):
        scene = Scene(SceneConfig(), index)
        frames = [scene.frame(t) for t in range(16)]
        images = [frame.image_HW3.astype(float) for frame in frames]
        masks = [frame.instance_HW == 1 for frame in frames]
        near.append(np.mean([np.abs(a - b).mean() for a, b in itertools.pairwise(images)]))
        far.append(np.abs(images[0] - images[-1]).mean())
        near_overlap.append(min(overlap(a, b) for a, b in itertools.pairwise(masks)))
        far_overlap.append(overlap(masks[0], masks[-1]))
    assert np.mean(near) < 0.6 * np.mean(far)
    assert np.mean(near_overlap) > 0.8
    assert min(near_overlap) > 0.55
    assert np.mean(far_overlap) < 0.7


def test_fractional_times_lie_between_frames():
    scene = Scene(SceneConfig(size=96), 11)
    before, between, after = (scene.frame(t).instance_HW == 1 for t in (4, 4.5, 5))
    assert overlap(between, before) > overlap(before, after)
    assert overlap(between, after) > overlap(before, after)


def test_the_camera_moves_the_background():
    """The depth plane is fixed to the background, so a moving camera changes the depth seen in a corner."""
    for index in range(5):
        scene = Scene(SceneConfig(max_objects=1), index)
        first, last = (scene._background(t) for t in (0, 15))
        assert np.abs(first.depth_P - last.depth_P).max() > 0.01
        assert np.abs(first.image_3P - last.image_3P).mean() > 2


def test_parallax_falls_with_depth():
    """What a sideways movement of the camera adds to its turn is inversely proportional to depth."""
    camera = Scene(SceneConfig(), 0)._camera

    def moved(depth: float) -> np.ndarray:
        return np.subtract(camera.shift(12, depth), camera.shift(0, depth))

    turn = moved(1e12)
    np.testing.assert_allclose(moved(4.0) - turn, 2 * (moved(8.0) - turn), rtol=1e-6)
    assert np.linalg.norm(moved(4.0) - turn) > 0.01


# Splits --------------------------------------------------------------------------------------------------


def test_splits_share_no_texture_and_no_hue():
    seen = {}
    for split in ("train", "test"):
        scenes = [Scene(SceneConfig(split=split), i) for i in range(150)]
        names = {name for s in scenes for name in s.object_textures + s.background_textures}
        assert names == set(module.OBJECT_TEXTURES[split]) | set(module.BACKGROUND_TEXTURES[split])
        hues = [colorsys.rgb_to_hsv(*colour)[0] for s in scenes for colour in s.palette.tolist()]
        seen[split] = names, np.array(hues)
        inside = [any(low - 1e-3 <= h <= high + 1e-3 for low, high in module.HUES[split]) for h in hues]
        assert all(inside)
    assert not seen["train"][0] & seen["test"][0]
    gap = np.abs(seen["train"][1][:, None] - seen["test"][1][None])
    assert np.minimum(gap, 1 - gap).min() > 0.02


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_texture_stays_in_range_and_shows_a_pattern(split):
    axis = np.linspace(-1.1, 1.1, 60, dtype=np.float32)
    for name, texture in (module.OBJECT_TEXTURES[split] | module.BACKGROUND_TEXTURES[split]).items():
        field = texture(np.random.default_rng(0), axis, 2.0)
        assert field.shape == (60, 60), name
        assert field.dtype == np.float32, name
        assert field.min() >= 0 and field.max() <= 1, name
        assert field.std() > 0.08, name


def test_lattices_are_interpolated_by_cubic_splines():
    lattice = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
    axis = np.linspace(-1.1, 1.1, 77, dtype=np.float32)
    position = (axis.astype(float) + 1.1) * 7.0 + 1.0
    reference = np.stack(
        [ndimage.map_coordinates(column, [position], order=3, prefilter=False) for column in lattice.T],
        axis=1,
    )
    np.testing.assert_allclose(textures.stretched(lattice, axis, 7.0), reference, atol=1e-5)


# Settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("size", 15),
        ("size", 64.0),
        ("frames", 0),
        ("min_objects", 0),
        ("max_objects", 0),
        ("max_objects", 21),
        ("split", "validation"),
        ("seed", -1),
        ("seed", 2**32),
        ("seed", True),
    ],
)
def test_bad_settings_are_named(setting, value):
    with pytest.raises(ValueError, match=rf"^{setting} must be"):
        SceneConfig(**{setting: value})


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"^index must be"):
        Scene(SceneConfig(), -1)
    with pytest.raises(ValueError, match=r"^length must be"):
        SceneDataset(SceneConfig(), -1)
    for t in (-0.1, 16, math.nan):
        with pytest.raises(ValueError, match=r"^t must be"):
            Scene(SceneConfig(frames=16), 0).frame(t)


def test_the_dataset_holds_the_scenes_in_order():
    config = SceneConfig(size=32, frames=3)
    dataset = SceneDataset(config, 4)
    assert len(dataset) == 4
    assert [scene.index for scene in dataset] == [0, 1, 2, 3]
    assert_same(dataset[2].frame(1), Scene(config, 2).frame(1))
    clip = dataset.clip(3)
    assert clip.shape == (3, 32, 32, 3)
    assert clip.dtype == np.uint8
    np.testing.assert_array_equal(clip[2], Scene(config, 3).frame(2).image_HW3)
    for index in (-1, 4):
        with pytest.raises(IndexError):
            dataset[index]
