"""Superpixel quality: metrics against loops and cases by hand, peers, readers of datasets, and whole evaluations."""

import csv
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import dense_runs
import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from scipy.io import savemat

import asc
from asc.cli import _parse, main
from asc.data.scenes import Scene, SceneConfig
from asc.tasks.encoders import open_encoder
from asc.tasks.superpixels import metrics
from asc.tasks.superpixels.data import QualityDataConfig, open_quality_data, read_segmentations
from asc.tasks.superpixels.model import GroupingChange, SuperpixelMaker, shares
from asc.tasks.superpixels.peers import Slic, enlarged_labels, grid_labels, grid_shape, nearest_count
from asc.tasks.superpixels.run import SuperpixelQualityConfig, evaluate_superpixels
from asc.tasks.superpixels.scores import big_objects, left_out

SIX = ("asa", "ue", "boundary_recall", "boundary_precision", "explained_variation", "compactness")


def blobs(seed: int, shape: tuple[int, int] = (23, 31), labels: int = 6) -> np.ndarray[Any, Any]:
    """A label map of smooth regions, some of them in several pieces."""
    noise = np.random.default_rng(seed).normal(size=(labels, *shape))
    return np.argmax([ndimage.gaussian_filter(layer, 2) for layer in noise], axis=0)


# --- Metrics ----------------------------------------------------------------------------------------------


def test_metrics_of_a_case_by_hand() -> None:
    labels = np.array([[0, 0, 1, 1], [0, 0, 1, 1]])
    truth = np.array([[0, 0, 0, 1], [0, 0, 0, 1]])
    # The right superpixel is half in either segment: 2 pixels are wrong; both segments count min(2, 2) of it.
    assert metrics.achievable_accuracy(labels, truth) == 6 / 8
    assert metrics.undersegmentation_error(labels, truth) == 4 / 8
    # Borders: own in columns 1 and 2, true in columns 2 and 3.
    assert metrics.boundary_recall(labels, truth, tolerance=0) == metrics.boundary_precision(labels, truth, 0) == 0.5
    assert metrics.boundary_recall(labels, truth, tolerance=0.25) == 1
    # Two squares of 2 x 2, perimeter 8 each.
    assert metrics.compactness(labels) == pytest.approx(4 * math.pi * 4 / 64)
    assert metrics.best_overlaps(labels, truth).tolist() == [2 / 4]


def test_the_truth_itself_is_perfect_and_one_superpixel_is_not() -> None:
    truth, image = blobs(0), np.random.default_rng(0).integers(0, 256, (23, 31, 3)).astype(np.uint8)
    assert metrics.achievable_accuracy(truth, truth) == metrics.boundary_recall(truth, truth) == 1
    assert metrics.undersegmentation_error(truth, truth) == 0
    assert metrics.boundary_precision(truth, truth) == 1
    assert metrics.best_overlaps(truth, truth).tolist() == metrics.achievable_overlaps(truth, truth).tolist() == [1] * 5
    whole = np.zeros_like(truth)
    assert metrics.achievable_accuracy(whole, truth) == np.bincount(truth.ravel()).max() / truth.size
    assert metrics.explained_variation(whole, image) == pytest.approx(0, abs=1e-12)
    assert metrics.explained_variation(np.arange(truth.size).reshape(truth.shape), image) == pytest.approx(1)
    assert metrics.boundary_recall(whole, truth) == 0 and math.isnan(metrics.boundary_precision(whole, truth))
    assert math.isnan(metrics.boundary_recall(truth, whole))


@pytest.mark.parametrize("seed", range(4))
def test_metrics_equal_loops_over_pixels(seed: int) -> None:
    labels, truth = 7 * blobs(seed) + 3, blobs(seed + 100, labels=4)
    truth[:3, :5] = -1
    known = truth >= 0
    right, error = 0, 0
    for name in np.unique(labels[known]):
        inside = [int(((labels == name) & (truth == segment)).sum()) for segment in range(4)]
        right += max(inside)
        error += sum(min(count, sum(inside) - count) for count in inside)
    assert metrics.achievable_accuracy(labels, truth) == right / known.sum()
    assert metrics.undersegmentation_error(labels, truth) == error / known.sum()


@pytest.mark.parametrize("tolerance", [0.0, 0.03, 0.06])
def test_borders_are_found_within_the_tolerance(tolerance: float) -> None:
    labels, truth = blobs(1), blobs(2)
    height, width = labels.shape
    radius = round(tolerance * math.hypot(height, width))

    def is_border(values: np.ndarray[Any, Any], y: int, x: int) -> bool:
        around = [(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)]
        return any(0 <= v < height and 0 <= u < width and values[v, u] != values[y, x] for v, u in around)

    def share(asked: np.ndarray[Any, Any], others: np.ndarray[Any, Any]) -> float:
        near = []
        for y, x in itertools.product(range(height), range(width)):
            if is_border(asked, y, x):
                rows, columns = (range(max(0, c - radius), c + radius + 1) for c in (y, x))
                square = [(v, u) for v in rows for u in columns if v < height and u < width]
                near.append(any(is_border(others, v, u) for v, u in square))
        return sum(near) / len(near)

    assert metrics.boundary_recall(labels, truth, tolerance) == pytest.approx(share(truth, labels))
    assert metrics.boundary_precision(labels, truth, tolerance) == pytest.approx(share(labels, truth))


def test_the_tolerance_is_that_of_the_benchmarks() -> None:
    assert metrics.tolerance_radius(321, 481) == 1 and metrics.tolerance_radius(480, 854) == 2
    assert metrics.tolerance_radius(64, 64) == 0


def test_a_border_in_a_void_band_is_in_its_middle() -> None:
    truth = np.array([[0, 0, -1, -1, -1, -1, 1, 1]] * 3)
    halves = np.array([[0] * 4 + [1] * 4] * 3)
    assert metrics.boundary_recall(halves, truth, tolerance=0) == 1
    assert metrics.achievable_accuracy(halves, truth) == 1


def test_explained_variation_is_the_variance_between_superpixels() -> None:
    labels, image = blobs(3), np.random.default_rng(1).integers(0, 256, (23, 31, 3)).astype(np.uint8)
    within = sum(image[labels == name].var(axis=0).sum() * (labels == name).sum() for name in np.unique(labels))
    total = image.reshape(-1, 3).var(axis=0).sum() * labels.size
    assert metrics.explained_variation(labels, image) == pytest.approx(1 - within / total)
    assert metrics.explained_variation(labels, np.full_like(image, 7)) == 1


def test_compactness_counts_edges_of_pixels() -> None:
    labels = blobs(4)
    framed = np.pad(labels, 1, constant_values=-1)
    expected = 0.0
    for name in np.unique(labels):
        mask = framed == name
        perimeter = sum((mask & ~np.roll(mask, step, axis)).sum() for step in (1, -1) for axis in (0, 1))
        expected += mask.sum() * 4 * math.pi * mask.sum() / perimeter**2 / labels.size
    assert metrics.compactness(labels) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_overlaps_with_objects_equal_a_search_over_all_unions(seed: int) -> None:
    labels, truth = blobs(seed, (12, 14), labels=7), blobs(seed + 50, (12, 14), labels=3)
    truth[truth == 1] = 5  # numbers may be missing
    truth[0, :4] = -1
    known = truth >= 0

    def overlap(names: tuple[int, ...], number: int) -> float:
        union, thing = np.isin(labels, names) & known, truth == number
        return float((union & thing).sum() / (union | thing).sum())

    names = [int(name) for name in np.unique(labels)]
    unions = [some for size in range(1, len(names) + 1) for some in itertools.combinations(names, size)]
    objects = [number for number in (2, 5) if (truth == number).any()]
    assert metrics.best_overlaps(labels, truth) == pytest.approx(
        [max(overlap((name,), number) for name in names) for number in objects]
    )
    assert metrics.achievable_overlaps(labels, truth) == pytest.approx(
        [max(overlap(some, number) for some in unions) for number in objects]
    )


def test_superpixels_are_split_into_regions_that_touch_at_corners_too() -> None:
    for labels in (blobs(5, labels=3), np.array([[4, 4, 9], [9, 9, 4], [4, 9, 9]])):
        split = metrics.split_regions(labels)
        regions = {name: ndimage.label(labels == name, np.ones((3, 3)))[0] for name in np.unique(labels)}
        expected = {(name, number) for name, found in regions.items() for number in np.unique(found[found > 0])}
        pairs = {
            (int(number), int(name), int(regions[name][y, x]))
            for (y, x), number in np.ndenumerate(split)
            for name in [labels[y, x]]
        }
        assert len(pairs) == len(expected) == metrics.count_superpixels(split) == split.max() + 1
    # The diagonal of the 4s is one region, and so are the 9s beside it.
    assert metrics.split_regions(np.array([[4, 9], [9, 4]])).tolist() == [[0, 1], [1, 0]]


def test_small_objects_are_counted_but_have_no_overlap() -> None:
    truth = np.zeros((20, 20), dtype=np.int64)
    truth[:10, :10], truth[15, 15], truth[0, 19] = 1, 3, -1
    assert left_out(truth, 0.01) == 1 and left_out(truth, 0) == 0
    assert np.unique(big_objects(truth, 0.01)).tolist() == [-1, 0, 1]


# --- Peers ------------------------------------------------------------------------------------------------


def test_labels_of_patches_are_enlarged_by_the_nearest() -> None:
    labels = np.arange(6).reshape(2, 3)
    assert np.array_equal(enlarged_labels(labels, 8, 12), labels.repeat(4, 0).repeat(4, 1))
    odd = enlarged_labels(np.arange(4 * 5).reshape(4, 5), 11, 13)
    expected = [[int((y + 0.5) * 4 / 11) * 5 + int((x + 0.5) * 5 / 13) for x in range(13)] for y in range(11)]
    assert odd.tolist() == expected


def test_the_grid_has_never_fewer_cells_and_hardly_more() -> None:
    for count in range(1, 400):
        rows, columns = grid_shape(count, 321, 481)
        assert count <= rows * columns <= count + 5, count
        if count > 5:
            assert 1 / 1.5 <= (321 / rows) / (481 / columns) <= 1.5
    for count in (1, 7, 256):
        rows, columns = grid_shape(count, 321, 481)
        assert metrics.count_superpixels(grid_labels(count, 321, 481)) == rows * columns
    assert grid_shape(24, 40, 60) == (4, 6) and grid_shape(24, 60, 40) == (6, 4)
    with pytest.raises(ValueError, match="17 cells does not fit an image of 4 x 4"):
        grid_shape(17, 4, 4)


@pytest.mark.parametrize("wanted", [12, 30, 55])
def test_slic_comes_near_to_the_number_of_ours(wanted: int) -> None:
    image = Scene(SceneConfig(size=64), 3).frame(0).image_HW3
    labels = Slic(image, {"compactness": 10.0}).labels(wanted)
    assert np.array_equal(np.unique(labels), np.arange(labels.max() + 1))
    assert abs(metrics.count_superpixels(labels) - wanted) <= 0.2 * wanted
    assert metrics.count_superpixels(metrics.split_regions(labels)) == metrics.count_superpixels(labels)


def test_a_number_is_searched_for() -> None:
    assert nearest_count(lambda asked: 2 * asked + 1, 41, 1000) == 20
    # Steps of ten: 40 and 50 are as near to 45, and the peer gets the more.
    asked = nearest_count(lambda number: number // 10 * 10 + 10, 45, 1000)
    assert asked // 10 * 10 + 10 == 50


# --- Datasets ---------------------------------------------------------------------------------------------


def write_bsds(images: Path, truth: Path, names: tuple[str, ...] = ("12084", "3096")) -> dict[str, list[Any]]:
    """Photographs with two or three segmentations each, nested as in the official files."""
    images.mkdir(parents=True)
    truth.mkdir(parents=True)
    written = {}
    for number, name in enumerate(names):
        shape = (33, 49) if number % 2 else (49, 33)
        pixels = np.random.default_rng(number).integers(0, 256, (*shape, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(images / f"{name}.jpg")
        maps = [blobs(10 * number + person, shape).astype(np.uint16) + 1 for person in range(2 + number)]
        cells = np.empty((1, len(maps)), dtype=object)
        for person, segments in enumerate(maps):
            borders = metrics.borders(segments).astype(np.uint8)
            cells[0, person] = {"Segmentation": segments, "Boundaries": borders}
        savemat(truth / f"{name}.mat", {"groundTruth": cells})
        written[name] = maps
    return written


@pytest.mark.parametrize(
    ("layout", "root"),
    [
        (("val/images", "val/groundTruth"), "val"),
        (("val/images", "val/groundTruth"), "."),
        (("data/images/val", "data/groundTruth/val"), "."),
        (("images/val", "groundTruth/val"), "."),
    ],
)
def test_bsds_is_read_from_its_layouts(layout: tuple[str, str], root: str, tmp_path: Path) -> None:
    written = write_bsds(tmp_path / layout[0], tmp_path / layout[1])
    data = open_quality_data(str(tmp_path / root), QualityDataConfig())
    assert [data.title(index) for index in range(len(data))] == list(written)
    assert data.name == "BSDS500 val" and not data.objects
    sample = data.read(1)
    assert sample.image_HW3.shape == (33, 49, 3) and len(sample.truths) == 3
    for found, segments in zip(sample.truths, written["3096"], strict=True):
        assert np.array_equal(found, segments.astype(int) - 1)
    before = data.fingerprint([0, 1])
    assert before != data.fingerprint([0]) and before == data.fingerprint([0, 1])


def test_bsds_tells_what_is_wrong_with_its_files(tmp_path: Path) -> None:
    images, truth = tmp_path / "images", tmp_path / "groundTruth"
    write_bsds(images, truth)
    data = open_quality_data(str(tmp_path), QualityDataConfig())
    (truth / "12084.mat").write_bytes(b"not a file of Matlab's")
    with pytest.raises(ValueError, match=r"12084\.mat is no ground truth of BSDS500"):
        data.read(0)
    savemat(truth / "12084.mat", {"other": np.zeros(3)})
    with pytest.raises(ValueError, match=r"12084\.mat is no ground truth of BSDS500"):
        read_segmentations(truth / "12084.mat")
    Image.new("RGB", (20, 20)).save(images / "3096.jpg")
    with pytest.raises(ValueError, match=r"3096\.mat has 49 x 33 pixels but its image .*3096\.jpg has 20 x 20"):
        data.read(1)
    (truth / "3096.mat").unlink()
    with pytest.raises(ValueError, match=r"there is no .*3096\.mat, the segmentations of .*3096\.jpg"):
        data.read(1)


def save_mask(mask: np.ndarray[Any, Any], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(mask.astype(np.uint8), mode="P")
    picture.putpalette([value for index in range(256) for value in (index, 0, 255 - index)])
    picture.save(file)


def write_davis(root: Path) -> np.ndarray[Any, Any]:
    mask = np.zeros((30, 40), dtype=np.uint8)
    mask[5:15, 5:20], mask[18:25, 25:35], mask[0, 0] = 1, 2, 255
    for sequence, frames in (("bear", 5), ("camel", 3), ("not-listed", 2)):
        for number in range(frames):
            file = root / "JPEGImages" / "480p" / sequence / f"{number:05d}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 30), (number, 0, 0)).save(file)
            save_mask(mask, root / "Annotations" / "480p" / sequence / f"{number:05d}.png")
    lists = root / "ImageSets"
    for file, text in (("2017/val.txt", "bear\ncamel\n"), ("2016/val.txt", "camel\n")):
        (lists / file).parent.mkdir(parents=True, exist_ok=True)
        (lists / file).write_text(text)
    return mask


def test_davis_is_read_by_its_lists(tmp_path: Path) -> None:
    mask = write_davis(tmp_path)
    data = open_quality_data(str(tmp_path), QualityDataConfig(every=2))
    names = [data.title(index) for index in range(len(data))]
    assert names == ["bear/00000", "bear/00002", "bear/00004", "camel/00000", "camel/00002"]
    truth = data.read(1).truths[0]
    assert truth[0, 0] == -1 and np.array_equal(truth.ravel()[1:], mask.ravel()[1:]) and data.objects
    assert data.chosen(2) == [0, 2] and data.chosen(None) == [0, 1, 2, 3, 4]
    # In 2016 the objects of a frame are one.
    single = open_quality_data(str(tmp_path), QualityDataConfig(every=1, year=2016))
    assert len(single) == 3 and np.unique(single.read(0).truths[0]).tolist() == [-1, 0, 1]
    (tmp_path / "Annotations" / "480p" / "bear" / "00002.png").unlink()
    with pytest.raises(ValueError, match=r"there is no .*00002\.png, the mask of .*00002\.jpg; get the annotations"):
        data.read(1)
    with pytest.raises(ValueError, match=r"there is no list .*2017/test-dev\.txt; images\.part"):
        open_quality_data(str(tmp_path), QualityDataConfig(part="test-dev"))


def test_the_archive_of_davis_2016_lists_frames_and_has_black_and_white_masks(tmp_path: Path) -> None:
    write_davis(tmp_path)
    line = "/JPEGImages/480p/{0}/{1}.jpg /Annotations/480p/{0}/{1}.png"
    for year in ("2016", "2017"):
        (tmp_path / "ImageSets" / year / "val.txt").unlink()
    file = tmp_path / "ImageSets" / "480p" / "val.txt"
    file.parent.mkdir()
    file.write_text("\n".join(line.format("camel", f"{number:05d}") for number in range(3)))
    mask_file = tmp_path / "Annotations" / "480p" / "camel" / "00000.png"
    white = np.zeros((30, 40), dtype=np.uint8)
    white[3:9] = 255
    Image.fromarray(white).save(mask_file)
    data = open_quality_data(str(tmp_path), QualityDataConfig(every=1, year=2016))
    assert len(data) == 3 and np.array_equal(data.read(0).truths[0], white > 0)
    Image.fromarray(white // 2).save(mask_file)
    with pytest.raises(ValueError, match=r"00000\.png is no mask of objects"):
        data.read(0)


def write_voc(root: Path) -> np.ndarray[Any, Any]:
    folder = root / "VOCdevkit" / "VOC2012"
    classes = np.zeros((24, 32), dtype=np.uint8)
    classes[2:10, 2:12], classes[2:10, 20:30], classes[14:20, 5:25], classes[12, :] = 8, 8, 12, 255
    save_mask(classes, folder / "SegmentationClass" / "2008_000001.png")
    (folder / "JPEGImages").mkdir()
    Image.new("RGB", (32, 24)).save(folder / "JPEGImages" / "2008_000001.jpg")
    (folder / "ImageSets" / "Segmentation").mkdir(parents=True)
    (folder / "ImageSets" / "Segmentation" / "val.txt").write_text("2008_000001\n")
    return classes


def test_voc_objects_are_its_masks_or_the_regions_of_classes(tmp_path: Path) -> None:
    classes = write_voc(tmp_path)
    data = open_quality_data(str(tmp_path), QualityDataConfig())
    truth = data.read(0).truths[0]
    # Two cats apart from each other are two objects, the dog is the third.
    assert "8-connected region of a class" in data.note and np.unique(truth).tolist() == [-1, 0, 1, 2, 3]
    assert {(int(a), int(b)) for a, b in zip(classes.ravel(), truth.ravel(), strict=True)} == {
        (0, 0),
        (255, -1),
        (8, 1),
        (8, 2),
        (12, 3),
    }
    objects = np.where(classes == 8, 1, 0)
    save_mask(objects, tmp_path / "VOCdevkit" / "VOC2012" / "SegmentationObject" / "2008_000001.png")
    data = open_quality_data(str(tmp_path), QualityDataConfig())
    assert np.array_equal(data.read(0).truths[0], objects) and "SegmentationObject" in data.note


def test_unknown_folders_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder nowhere"):
        open_quality_data("nowhere", QualityDataConfig())
    with pytest.raises(ValueError, match="none of the known layouts"):
        open_quality_data(str(tmp_path), QualityDataConfig())
    for settings, message in (({"most": 0}, r"images\.most"), ({"year": 2018}, r"images\.year")):
        with pytest.raises(ValueError, match=message):
            QualityDataConfig(**settings)


# --- The encoder's superpixels ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    asc.save(dense_runs.tiny_encoder(), folder)
    return folder


def maker_of(encoder: Path, size: int | None = None, **change: Any) -> SuperpixelMaker:
    return SuperpixelMaker(open_encoder(encoder), size, GroupingChange(**change))


def pictures(count: int) -> list[np.ndarray[Any, Any]]:
    """Lying, upright and square images."""
    frames = [Scene(SceneConfig(size=72), index).frame(0).image_HW3 for index in range(count)]
    cuts = [(48, 72), (72, 48), (72, 72)]
    return [frame[: cuts[n % 3][0], : cuts[n % 3][1]] for n, frame in enumerate(frames)]


def test_images_keep_their_shape_and_labels_are_those_of_the_model(encoder: Path) -> None:
    maker = maker_of(encoder)
    assert maker.grid(321, 481) == (8, 12) and maker.grid(50, 40) == (10, 8)
    image = pictures(1)[0]
    labels = maker.labels(image)
    small = Image.fromarray(image).resize((48, 32), Image.Resampling.BILINEAR)
    with torch.no_grad():
        expected = maker.model.superpixels(asc.data.normalise(np.array(small)[None]))
    assert list(labels) == [1, 2, 3, 4]
    for block, labels_hw in labels.items():
        assert np.array_equal(labels_hw, expected[block - 1, 0].numpy())


@pytest.mark.parametrize("change", [{}, {"neighbourhood": "spatial"}, {"blocks": (2, 3), "source": "tokens"}])
def test_thresholds_are_set_for_a_number_of_tokens(encoder: Path, change: dict[str, Any]) -> None:
    maker = maker_of(encoder, 48, **change)
    images = pictures(9)
    reached = maker.calibrate(images, 60, "learned")
    counts = [len(np.unique(maker.labels(image)[maker.blocks[-1]])) for image in images]
    assert reached == np.mean(counts) == pytest.approx(60, rel=0.1)
    assert len(set(counts)) > 1  # each image has its own
    if "blocks" in change:
        assert maker.blocks == (2, 3)
    with pytest.raises(ValueError, match="tokens must be from 1 to less than the 192 patches of an image, got 500"):
        maker.calibrate(images, 500, "learned")


def test_pairs_of_token_merging_leave_as_many_tokens_in_every_image(encoder: Path) -> None:
    maker = maker_of(encoder, 48, grouping="bipartite")
    squares = pictures(9)[2::3]
    assert maker.calibrate(squares, 60, "learned") == pytest.approx(60, rel=0.1)
    counts = {len(np.unique(maker.labels(image)[maker.blocks[-1]])) for image in squares}
    assert len(counts) == 1


def test_shares_of_blocks_multiply_to_the_total() -> None:
    trained = torch.tensor([0.5, 0.9, 0.8])
    for allocation in ("learned", "equal", "last"):
        assert float(shares(trained, 0.2, allocation).prod()) == pytest.approx(0.2)
    assert shares(trained, float(trained.prod()), "learned").tolist() == pytest.approx(trained.tolist())
    assert shares(trained, 0.2, "last").tolist()[:2] == [1, 1]


def test_superpixel_layers_can_differ_from_training(encoder: Path) -> None:
    trained, spatial = open_encoder(encoder).vit, maker_of(encoder, neighbourhood="spatial", center=True)
    assert trained is not None and not maker_of(encoder).needs_calibration and spatial.needs_calibration
    superpixels = spatial.model.config.superpixels
    assert superpixels is not None and trained.config.superpixels is not None
    assert superpixels == replace(trained.config.superpixels, neighbourhood="spatial", center=True)
    for name, tensor in trained.state_dict().items():
        assert torch.equal(tensor, spatial.model.state_dict()[name]), name
    image = pictures(1)[0]
    spatial.calibrate([image], 30, "learned")
    labels = spatial.labels(image)[4]
    # What joins only when it touches never comes in pieces.
    assert metrics.count_superpixels(metrics.split_regions(labels)) == metrics.count_superpixels(labels)


# --- The whole evaluation ---------------------------------------------------------------------------------


def on_scenes(encoder: str | Path, out: Path, **settings: Any) -> SuperpixelQualityConfig:
    images = QualityDataConfig(scenes=4, scene=SceneConfig(size=64, split="test"))
    return SuperpixelQualityConfig(
        **{"checkpoint": str(encoder), "out": out, "images": images, "pictures": 3, "accelerator": "cpu"} | settings
    )


def test_an_untrained_encoder_is_judged_on_scenes(encoder: Path, tmp_path: Path) -> None:
    result = json.loads(evaluate_superpixels(on_scenes(encoder, tmp_path, tokens=40)).read_text())
    assert [block["after_blocks"] for block in result["blocks"]] == [1, 2, 3, 4]
    maker = maker_of(encoder)
    data = open_quality_data("scenes", on_scenes(encoder, tmp_path).images)
    images = [data.read(index).image_HW3 for index in range(4)]
    reached = maker.calibrate(images, 40, "learned")
    assert result["tokens"] == {"wanted": 40, "mean_of_calibration_images": reached}
    for number, image in enumerate(result["images"]):
        truth = data.read(number).truths[0]
        for block in image["blocks"]:
            raw = maker.labels(images[number])[block["after_blocks"]]
            labels = metrics.split_regions(raw.repeat(8, 0).repeat(8, 1))
            methods = block["methods"]
            assert block["tokens"] == len(np.unique(raw)) and methods["ours"]["superpixels"] == labels.max() + 1
            assert methods["ours"]["asa"] == metrics.achievable_accuracy(labels, truth)
            assert methods["ours"]["best_overlap"] == metrics.best_overlaps(labels, truth).tolist()
            rows, columns = grid_shape(methods["ours"]["superpixels"], 64, 64)
            row, column = ([int((place + 0.5) * cells / 64) for place in range(64)] for cells in (rows, columns))
            grid = np.array([[y * columns + x for x in column] for y in row])
            assert methods["grid"]["superpixels"] == rows * columns >= methods["ours"]["superpixels"]
            assert methods["grid"]["ue"] == metrics.undersegmentation_error(grid, truth)
            assert methods["slic"]["superpixels"] == pytest.approx(methods["ours"]["superpixels"], rel=0.35, abs=3)
            assert methods["patches"]["superpixels"] == 64 and methods["patches"]["asa"] >= methods["ours"]["asa"]
    last = result["blocks"][-1]["methods"]
    own = [image["blocks"][-1]["methods"]["ours"] for image in result["images"]]
    assert last["ours"]["asa"]["mean"] == pytest.approx(np.mean([one["asa"] for one in own]))
    assert last["ours"]["asa"]["deviation"] == pytest.approx(np.std([one["asa"] for one in own], ddof=1))
    pooled = [value for one in own for value in one["best_overlap"]]
    assert last["ours"]["best_overlap"]["mean"] == pytest.approx(np.mean(pooled))
    assert last["ours"]["best_overlap"]["values"] == len(pooled)
    assert len(result["data"]["fingerprint"]) == 64 and result["versions"]["scikit-image"]
    _check_files(tmp_path, result)


def _check_files(out: Path, result: dict[str, Any]) -> None:
    with (out / "superpixels.csv").open() as stream:
        lines = list(csv.DictReader(stream))
    assert len(lines) == 4 * 4 * 8
    found = next(
        line for line in lines if (line["after_blocks"], line["method"], line["metric"]) == ("4", "grid", "ue")
    )
    assert float(found["mean"]) == pytest.approx(result["blocks"][3]["methods"]["grid"]["ue"]["mean"], abs=1e-6)
    table = (out / "superpixels.md").read_text()
    assert table.count("\n| ours | ") == 4 and "UE ↓" in table and "ours is better than slic" in table
    page = (out / "index.html").read_text()
    # The plot, and for three images the input, the truth and three methods.
    assert page.count("<img") == 1 + 3 * 5 and "The worst cases" in page
    assert Image.open(out / "superpixels.png").size[0] > 500


def test_bsds_scores_are_means_over_annotators_and_tokens_can_be_left_whole(encoder: Path, tmp_path: Path) -> None:
    write_bsds(tmp_path / "images", tmp_path / "groundTruth")
    config = on_scenes(encoder, tmp_path / "out", data=str(tmp_path), methods=("grid",), blocks=(4,), split=False)
    result = json.loads(evaluate_superpixels(replace(config, pictures=0)).read_text())
    data, maker = open_quality_data(str(tmp_path), QualityDataConfig()), maker_of(encoder)
    for number, image in enumerate(result["images"]):
        sample = data.read(number)
        raw = maker.labels(sample.image_HW3)[4]
        labels = enlarged_labels(raw, *sample.truths[0].shape)
        (block,) = image["blocks"]
        ours = block["methods"]["ours"]
        assert set(block["methods"]) == {"ours", "grid", "patches"} and set(ours) == {"superpixels", *SIX}
        assert image["annotators"] == len(sample.truths) == 2 + number
        recalls = [metrics.boundary_recall(labels, truth) for truth in sample.truths]
        assert ours["boundary_recall"] == pytest.approx(np.mean(recalls))
        assert ours["superpixels"] == block["tokens"] == len(np.unique(raw))
    assert result["tokens"] == {"wanted": None, "mean_of_calibration_images": None}


def test_an_evaluation_is_not_computed_twice_nor_overwritten(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_bsds(tmp_path / "images", tmp_path / "groundTruth")
    config = on_scenes(encoder, tmp_path / "out", data=str(tmp_path), methods=(), pictures=0)
    file = evaluate_superpixels(config)
    first, written = capsys.readouterr().out, file.stat().st_mtime_ns
    assert evaluate_superpixels(config) == file and file.stat().st_mtime_ns == written
    assert capsys.readouterr().out == first.replace("more in", "was there already, more in")
    with pytest.raises(ValueError, match=r"holds a result with other settings \(split was True and is now False\)"):
        evaluate_superpixels(replace(config, split=False))
    asc.save(dense_runs.tiny_encoder(width=32), tmp_path / "other")
    with pytest.raises(ValueError, match=r"\(checkpoint was .* and is now '.*other' \(content .*\)\); give"):
        evaluate_superpixels(replace(config, checkpoint=str(tmp_path / "other")))
    Image.new("RGB", (33, 49)).save(tmp_path / "images" / "12084.jpg")
    with pytest.raises(ValueError, match=r"\(data was .* and is now"):
        evaluate_superpixels(config)
    assert file.stat().st_mtime_ns == written


def test_a_plain_network_can_be_given_superpixels(tmp_path: Path) -> None:
    asc.save(dense_runs.tiny_encoder(budget=None), tmp_path / "plain")
    config = on_scenes(tmp_path / "plain", tmp_path / "out", tokens=30, methods=(), pictures=0)
    result = json.loads(evaluate_superpixels(replace(config, grouping=GroupingChange(blocks=(4,)))).read_text())
    (block,) = result["blocks"]
    assert block["after_blocks"] == 4 and block["tokens"] == pytest.approx(30, rel=0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"checkpoint": "nowhere"}, "there is no encoder nowhere"),
        ({"checkpoint": "timm:resnet18"}, "timm:resnet18 is no network of ours"),
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"tokens": 64}, "tokens must be from 1 to less than the 64 patches"),
        ({"size": 2}, "size must be at least a patch of 4 pixels"),
        ({"size": 300}, "choose a size of at most 256"),
        ({"methods": ("slic", "felzenszwalb")}, "unknown methods felzenszwalb"),
        ({"blocks": (5,)}, "blocks must be among those with a superpixel layer"),
        ({"tolerance": 1.5}, "tolerance is a share"),
        ({"pictures": -1}, "pictures must be at least 0, got -1"),
        ({"accelerator": "tpu"}, "accelerator must be one of"),
        ({"allocation": "first"}, "unknown allocation 'first'"),
        ({"grouping": GroupingChange(source="projection")}, "trained without a projection"),
    ],
)
def test_mistakes_are_told(settings: dict[str, Any], message: str, encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate_superpixels(on_scenes(**{"encoder": encoder, "out": tmp_path, "pictures": 0} | settings))


def test_the_command_is_understood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "eval superpixels --checkpoint RUN --data DAVIS --out DIR --tokens 256 --methods grid slic"
    settings = _parse([*words.split(), "--grouping.neighbourhood", "spatial", "--images.every", "5"])
    assert isinstance(settings, SuperpixelQualityConfig)
    assert settings.tokens == 256 and settings.grouping.neighbourhood == "spatial" and settings.images.every == 5
    assert main(["eval", "superpixels", "--checkpoint", "random", "--data", "nowhere", "--out", str(tmp_path)]) == 2
    assert "there is no folder nowhere" in capsys.readouterr().err
