"""Detection from files to boxes: reading VOC, augmentation, both heads, training, judging, predicting."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pretrain_runs
import pytest
import torch
from PIL import Image
from test_pretrain import assert_same

import asc
from asc.data import Scene, SceneConfig
from asc.data.keyed import Key
from asc.data.sampling import BatchPlan
from asc.data.voc import VOC_CLASSES
from asc.recipes.detect import RECIPES
from asc.run_folder import read_log
from asc.tasks.detect.augment import AugmentConfig, augmented, fitted
from asc.tasks.detect.data import DataConfig, Truth, VocSet, open_sets, read_annotation
from asc.tasks.detect.detr import DetrConfig, mean_code, wave_code
from asc.tasks.detect.fasterrcnn import FasterRcnnConfig
from asc.tasks.detect.head import chosen_blocks
from asc.tasks.detect.pictures import mistakes
from asc.tasks.detect.run import DetectEvaluation, DetectPrediction, evaluate, predict, train
from asc.tasks.detect.task import DetectConfig, DetectDataset, Detector, WatchConfig, load_detector, make_detector
from asc.train import MachineConfig, TrainConfig, TrainingStoppedError, lr_at

HEADS = ("fasterrcnn", "detr")
SIZE = 64
# The steps are few and fierce, the thresholds lag behind.
pytestmark = pytest.mark.filterwarnings("ignore:block . merged nothing")


# --- Small problems ---------------------------------------------------------------------------------------


def encoder(seed: int = 0, **settings: object) -> asc.AscViT:
    torch.manual_seed(seed)
    shape = {"width": 48, "depth": 4, "heads": 2, "patch_size": 8, "positions": "sincos"}
    settings = shape | {"superpixels": asc.SuperpixelConfig(budget=0.7)} | settings
    model = asc.AscViT(asc.VitConfig(image_size=SIZE, **settings))
    if model.budget is not None:
        model.calibrate(torch.stack([fitted(scene_image(index), SIZE)[0] for index in range(8)]))
    return model


def scene_image(index: int) -> np.ndarray:
    return Scene(SceneConfig(size=SIZE), index).frame(0).image_HW3


def tiny(out: Path, head: str, scenes: int = 4, **settings: object) -> DetectConfig:
    """A detector that overfits a few scenes in seconds."""
    asc.save(encoder(), out / "given")
    config = DetectConfig(
        out=out / "run",
        encoder=str(out / "given"),
        head=head,
        sets=DataConfig(
            scenes=scenes, same_scenes=True, scene=SceneConfig(size=SIZE, frames=1, contrast=0.3, markings=1.0)
        ),
        fasterrcnn=FasterRcnnConfig(
            anchors=(8, 16, 32, 64, 96),
            adapter_width=32,
            pyramid_width=32,
            hidden=64,
            proposals=(100, 50),
            proposal_samples=64,
            region_samples=32,
        ),
        detr=DetrConfig(queries=12, width=64, heads=4, layers=3, hidden=128),
        augment=AugmentConfig(size=SIZE, flip_probability=0, scale=(1, 1), jitter_probability=0),
        train=TrainConfig(
            steps=60, batch=scenes, lr=2e-3, lr_batch=scenes, warmup_steps=10, weight_decay=1e-4, clip=1.0
        ),
        watch=WatchConfig(every=0, calibration=4, pictures=2),
        machine=MachineConfig(accelerator="cpu", log_every=10, workers=0),
    )
    return replace(config, **settings)


@pytest.fixture(scope="module", params=HEADS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DetectConfig:
    config = tiny(tmp_path_factory.mktemp(request.param), request.param)
    train(config)
    return config


def untrained(head: str, refine: bool = True) -> Detector:
    config = tiny_settings(head)
    config = replace(config, detr=replace(config.detr, refine=refine))
    torch.manual_seed(1)
    return make_detector(config, encoder(), [f"class {number}" for number in range(10)])


def tiny_settings(head: str) -> DetectConfig:
    config = DetectConfig(out=Path("unused"), head=head, augment=AugmentConfig(size=SIZE))
    small = FasterRcnnConfig(anchors=(8, 16, 32, 64, 96), adapter_width=16, pyramid_width=16, hidden=32)
    return replace(config, fasterrcnn=small, detr=DetrConfig(queries=8, width=32, heads=4, layers=2, hidden=64))


def boxes_of(*boxes: tuple[float, ...]) -> Truth:
    count = len(boxes)
    return Truth(torch.tensor(boxes).view(-1, 4).float(), torch.arange(count), torch.zeros(count, dtype=torch.bool))


# --- PASCAL VOC -------------------------------------------------------------------------------------------

OBJECT = "<object><name>{}</name><difficult>{}</difficult><bndbox>{}</bndbox><part><name>head</name></part></object>"


def box_xml(xmin: float, ymin: float, xmax: float, ymax: float) -> str:
    return f"<xmin>{xmin}</xmin><ymin>{ymin}</ymin><xmax>{xmax}</xmax><ymax>{ymax}</ymax>"


def annotation(*objects: str) -> str:
    return f"<annotation><filename>x.jpg</filename>{''.join(objects)}</annotation>"


def voc(root: Path, annotations: dict[str, str], year: str = "2007", part: str = "trainval") -> Path:
    folder = root / "VOCdevkit" / f"VOC{year}"
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name, text in annotations.items():
        (folder / "Annotations" / f"{name}.xml").write_text(text)
        Image.new("RGB", (40, 30), (200, 10, 10)).save(folder / "JPEGImages" / f"{name}.jpg")
    (folder / "ImageSets" / "Main" / f"{part}.txt").write_text("\n".join(annotations) + "\n")
    return folder


def test_voc_is_read_from_its_official_layout(tmp_path: Path) -> None:
    cat = OBJECT.format("cat", 0, box_xml(1, 1, 40, 30))
    dog = OBJECT.format("dog", 1, box_xml(3, 5, 4, 10.5))
    voc(tmp_path, {"000001": annotation(cat, dog), "000002": annotation()})
    voc(tmp_path, {"2008_000001": annotation(cat)}, year="2012")
    voc(tmp_path, {"000009": annotation(dog)}, part="test")
    config = DataConfig(train=("2007/trainval", "2012/trainval"))
    for root in (tmp_path, tmp_path / "VOCdevkit"):
        learned, judged = open_sets(str(root), config)
        assert len(learned) == 3 and len(judged) == 1 and learned.name(2).endswith("2008_000001.jpg")
    image, truth = learned[0]
    assert image.shape == (30, 40, 3) and image[0, 0, 0] > 150
    # From 1 and with the last pixel, to from 0 and without: the whole image is 0 to 40 and 0 to 30.
    assert truth.boxes_K4.tolist() == [[0, 0, 40, 30], [2, 4, 4, 10.5]]
    assert [VOC_CLASSES[number] for number in truth.classes_K] == ["cat", "dog"]
    assert truth.difficult_K.tolist() == [False, True]
    empty = learned[1].truth
    assert empty.boxes_K4.shape == (0, 4) and len(empty.classes_K) == len(empty.difficult_K) == 0


def test_a_box_that_sticks_out_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "a.xml"
    file.write_text(annotation(OBJECT.format("cat", 0, box_xml(-5, 10, 99, 30))))
    assert read_annotation(file, 40, 30).boxes_K4.tolist() == [[0, 9, 40, 30]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (annotation(OBJECT.format("cat", 0, box_xml(50, 1, 60, 9))), "covers nothing of the image of 40 × 30"),
        (annotation(OBJECT.format("cat", 0, box_xml(9, 1, 4, 9))), "covers nothing"),
        (annotation(OBJECT.format("unicorn", 0, box_xml(1, 1, 4, 9))), "'unicorn', which is none of VOC's classes"),
        (annotation(OBJECT.format("cat", 0, "<xmin>3</xmin>")), "has no box of four numbers"),
        (annotation(OBJECT.format("cat", 0, box_xml(1, 1, 4, float("nan")))), "has no box of four numbers"),
        ("<annotation><object>", "is no XML that can be read"),
    ],
)
def test_bad_annotations_are_named(tmp_path: Path, text: str, message: str) -> None:
    voc(tmp_path, {"000001": annotation(), "000007": text})
    with pytest.raises(ValueError, match=rf"000007\.xml .*{message}"):
        VocSet(tmp_path, ["2007/trainval"])


def test_lists_that_are_not_there_are_told_with_those_that_are(tmp_path: Path) -> None:
    for part in ("train", "val", "trainval", "cat_train"):
        voc(tmp_path, {"000001": annotation()}, "2012", part)
    advice = r"such as --sets\.train 2012/train --sets\.test 2012/val; there are 2012/train, 2012/trainval, 2012/val$"
    for root in (tmp_path, tmp_path / "VOCdevkit"):
        with pytest.raises(ValueError, match=rf"holds no VOC2007, which the list 2007/trainval belongs to: .*{advice}"):
            open_sets(str(root), DataConfig())
    (tmp_path / "VOCdevkit/VOC2007").mkdir()
    with pytest.raises(ValueError, match=rf"there is no list .*VOC2007/ImageSets/Main/trainval\.txt; .*{advice}"):
        open_sets(str(tmp_path), DataConfig())
    learned, judged = open_sets(str(tmp_path), DataConfig(train=("2012/train",), test="2012/val"))
    assert len(learned) == len(judged) == 1


def test_the_size_must_fit_the_patches(tmp_path: Path) -> None:
    config = tiny(tmp_path, "detr", augment=AugmentConfig(size=60))
    with pytest.raises(ValueError, match=r"augment\.size 60 is no multiple of .* size 8; give --augment\.size 56$"):
        train(config)


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    folder = voc(tmp_path, {"000001": annotation(), "000002": annotation()})
    with pytest.raises(ValueError, match="holds no VOC2012"):
        VocSet(tmp_path, ["2012/trainval"])
    with pytest.raises(ValueError, match=r"there is no list .*Main/val\.txt"):
        VocSet(tmp_path, ["2007/val"])
    with pytest.raises(ValueError, match="named as year/name"):
        VocSet(tmp_path, ["trainval"])
    (folder / "JPEGImages" / "000001.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"000001\.jpg: not an image that can be read"):
        VocSet(tmp_path, ["2007/trainval"])
    (folder / "JPEGImages" / "000001.jpg").unlink()
    with pytest.raises(ValueError, match=r"JPEGImages/000001\.jpg is missing"):
        VocSet(tmp_path, ["2007/trainval"])
    voc(tmp_path, {"000001": annotation(), "000002": annotation()})
    (folder / "Annotations" / "000002.xml").unlink()
    with pytest.raises(ValueError, match=r"Annotations/000002\.xml is missing"):
        VocSet(tmp_path, ["2007/trainval"])


# --- The canvas -------------------------------------------------------------------------------------------


def marked_image(height: int, width: int, box: tuple[int, int, int, int]) -> np.ndarray:
    image = np.zeros((height, width, 3), dtype=np.uint8)
    image[box[1] : box[3], box[0] : box[2]] = 255
    return image


def extent(pixels_3SS: torch.Tensor) -> list[int]:
    """The box around the bright pixels."""
    rows, columns = (pixels_3SS[0] > 0.2).nonzero(as_tuple=True)
    return [int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1]


def test_boxes_stay_around_their_objects_through_every_augmentation() -> None:
    image, truth = marked_image(60, 90, (8, 10, 50, 45)), boxes_of((8, 10, 50, 45))
    config = AugmentConfig(size=80, scale=(0.4, 2.0), least_visible=0.05)
    seen, scales = 0, set()
    for epoch in range(40):
        placed = augmented(image, truth, config, Key(3, epoch, 5, 0))
        assert placed.image_3SS.shape == (3, 80, 80)
        # Beside the image there is nothing at all.
        assert not placed.image_3SS[:, placed.real[0] :].any() and not placed.image_3SS[:, :, placed.real[1] :].any()
        if len(placed.truth.boxes_K4):
            seen += 1
            np.testing.assert_allclose(placed.truth.boxes_K4[0].tolist(), extent(placed.image_3SS), atol=1.6)
        scales.add(placed.real)
    assert seen > 30 and len(scales) > 5


def test_an_object_that_is_almost_cut_away_does_not_count() -> None:
    image, truth = marked_image(64, 64, (0, 0, 8, 8)), boxes_of((0, 0, 8, 8), (28, 28, 36, 36))
    config = AugmentConfig(size=32, scale=(1.5, 1.5), flip_probability=0.0)
    kept = [augmented(image, truth, config, Key(0, epoch, 0, 0)).truth for epoch in range(60)]
    assert {tuple(part.classes_K.tolist()) for part in kept} == {(0, 1), (1,)}
    for part in kept:
        sides = part.boxes_K4[:, 2:] - part.boxes_K4[:, :2]
        assert (part.boxes_K4 >= 0).all() and (part.boxes_K4 <= 32).all()
        assert (sides.prod(1) >= 0.3 * (8 * 0.75) ** 2 - 1e-3).all()


def test_augmentation_follows_from_seed_epoch_and_sample_alone() -> None:
    samples, _ = open_sets("scenes", DataConfig(scenes=6, test_scenes=1, scene=SceneConfig(size=32)))
    dataset = DetectDataset(samples, AugmentConfig(size=32), seed=7, difficult=False)
    together = dataset[list(range(12))]
    for position in (11, 3, 0):
        alone = dataset[[position]]
        assert torch.equal(alone.images_B3SS[0], together.images_B3SS[position])
        assert_same(list(alone.truths[0]), list(together.truths[position]))
    (plan,) = list(BatchPlan(4, 8, 4))
    assert torch.equal(dataset[plan].images_B3SS, together.images_B3SS[4:8])
    # The same sample looks different in the next epoch.
    order = [dataset.order.place(position) for position in range(12)]
    again = next(p for p in range(6, 12) if order[p].sample == order[0].sample)
    assert not torch.equal(together.images_B3SS[0], together.images_B3SS[again])


def test_boxes_on_the_canvas_go_back_to_the_image() -> None:
    for height, width in ((30, 90), (90, 30), (64, 64), (7, 200)):
        canvas, fit = fitted(np.full((height, width, 3), 255, np.uint8), SIZE)
        assert max(fit.real) == SIZE and (canvas[0] > 1).sum() == fit.real[0] * fit.real[1]
        whole = torch.tensor([[0.0, 0.0, fit.real[1], fit.real[0]], [-5.0, -5.0, 500.0, 500.0]])
        assert fit.to_image(whole).tolist() == [[0, 0, width, height]] * 2


# --- Heads ------------------------------------------------------------------------------------------------


def test_blocks_are_those_of_the_paper() -> None:
    assert chosen_blocks(None, 12) == [2, 5, 8, 11]
    assert chosen_blocks((3, 6, 9, 12), 12) == chosen_blocks(None, 12)
    assert chosen_blocks(None, 3) == [0, 1, 2]
    for bad in ((), (0, 3), (3, 13), (6, 3)):
        with pytest.raises(ValueError, match="blocks must rise"):
            chosen_blocks(bad, 12)


def test_the_place_of_a_token_is_the_mean_of_its_patches_inside_the_image() -> None:
    model = encoder()
    canvas, fit = fitted(scene_image(3)[:40], SIZE)
    tokens = model.forward_blocks(canvas[None].repeat(2, 1, 1, 1), [3])[0]
    code = wave_code(torch.rand(2, 64, 2, generator=torch.Generator().manual_seed(0)), 8)
    real = torch.zeros(2, 8, 8, dtype=torch.bool)
    real[:, : fit.real[0] // 8] = True
    means, counts = mean_code(tokens, code, real.flatten(1))
    assert len(means) < 128
    for token in range(len(means)):
        held = (tokens.patch_to_token_BN == token) & real.flatten(1)
        assert counts[token] == held.sum()
        if held.any():
            torch.testing.assert_close(means[token], code[held].mean(0))


@pytest.mark.parametrize(("head", "refine"), [("fasterrcnn", True), ("detr", True), ("detr", False)])
def test_gradients_reach_the_patch_embedding_through_merged_tokens(head: str, refine: bool) -> None:
    detector = untrained(head, refine).train()
    images = torch.stack([fitted(scene_image(index), SIZE)[0] for index in range(3)])
    view = detector.view(images, [(SIZE, SIZE)] * 3)
    assert len(view.levels) == 4 and view.levels[-1].values_TC.shape[0] < 0.8 * 3 * 64
    # Also with an image in which there is nothing.
    truths = [boxes_of((10, 10, 40, 50), (30, 5, 60, 30)), boxes_of(), boxes_of((0, 0, 64, 64))]
    losses = detector.losses(images, [(SIZE, SIZE)] * 3, truths)
    assert all(torch.isfinite(part) for part in losses.values())
    sum(losses.values()).backward()
    waiting = [name for name, p in detector.named_parameters() if p.requires_grad and p.grad is None]
    assert waiting == [], "every parameter that learns has a gradient"
    assert detector.encoder.patch_embed.weight.grad.abs().sum() > 0
    assert detector.encoder.pos_embed.grad.abs().sum() > 0


@pytest.mark.parametrize("head", HEADS)
def test_half_precision_gives_losses_and_boxes_in_full(head: str) -> None:
    detector = untrained(head).train()
    images = torch.stack([fitted(scene_image(index), SIZE)[0] for index in range(2)])
    with torch.autocast("cpu", torch.bfloat16):
        losses = detector.losses(images, [(SIZE, SIZE)] * 2, [boxes_of((10, 10, 40, 50))] * 2)
        found = detector.eval().head.detect(detector.view(images, [(SIZE, SIZE)] * 2))
    assert all(part.dtype == torch.float32 and torch.isfinite(part) for part in losses.values())
    assert all(part.boxes_K4.dtype == part.scores_K.dtype == torch.float32 for part in found)


def test_an_image_is_found_the_same_whatever_is_in_its_batch(trained: DetectConfig) -> None:
    detector = load_detector(trained.out)
    samples, _ = open_sets("scenes", trained.sets)
    first, second = samples[0].image_HW3, samples[1].image_HW3
    # Wide, high and large ones: on the canvas each has another part empty.
    images = [first[:40], first, np.concatenate([second, second]), second.repeat(3, 0).repeat(3, 1)]
    together = detector.find(images)
    assert sum(len(found.scores_K) for found in together) > 4
    for image, found in zip(images, together, strict=True):
        (alone,) = detector.find([image])
        assert torch.equal(alone.classes_K, found.classes_K)
        torch.testing.assert_close(alone.scores_K, found.scores_K, rtol=0, atol=1e-5)
        scale = max(image.shape)
        torch.testing.assert_close(alone.boxes_K4 / scale, found.boxes_K4 / scale, rtol=0, atol=1e-5)
        limit = torch.tensor([image.shape[1], image.shape[0]] * 2)
        assert (found.boxes_K4 >= 0).all() and (found.boxes_K4 <= limit).all()


REAL = [(40, 64), (64, 17), (64, 64)]


def canvases(real: list[tuple[int, int]], beside: float) -> torch.Tensor:
    """Images at the top left, and random numbers of a strength in the patches beside them."""
    images = torch.stack([fitted(scene_image(index), SIZE)[0] for index in range(len(real))])
    noise = beside * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    for image, other, (rows, columns) in zip(images, noise, real, strict=True):
        tall, wide = -(-rows // 8) * 8, -(-columns // 8) * 8
        image[:, rows:tall], image[:, :, columns:wide] = 0, 0
        image[:, tall:], image[:, :, wide:] = other[:, tall:], other[:, :, wide:]
    return images


@pytest.mark.parametrize("head", HEADS)
def test_what_lies_beside_an_image_has_no_say_in_what_is_found(head: str) -> None:
    detector = untrained(head).eval()
    found = [detector.head.detect(detector.view(canvases(REAL, beside), REAL)) for beside in (0.0, 100.0)]
    assert all(len(each.scores_K) for each in found[0])
    for empty, noisy in zip(*found, strict=True):
        assert_same(list(empty), list(noisy))


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize("superpixels", [None, "global", "spatial"])
def test_tokens_on_a_canvas_are_those_of_the_image_alone(superpixels: str | None, class_token: bool) -> None:
    settings = (
        None if superpixels is None else asc.SuperpixelConfig(budget=0.7, neighbourhood=superpixels, weight="size")
    )
    model = encoder(superpixels=settings, class_token=class_token).eval()
    detector = Detector(model, untrained("detr").head, ["a"], SIZE, [0, 1, 2, 3])
    images = canvases(REAL, 100.0)
    view = detector.view(images, REAL)
    for number, (rows, columns) in enumerate([(40, 64), (64, 24), (64, 64)]):
        # An encoder for images of just this size, with the canvas' position codes of their places.
        alone = asc.AscViT(replace(model.config, image_size=(rows, columns))).eval()
        codes = model.pos_embed.unflatten(1, (8, 8))[:, : rows // 8, : columns // 8].flatten(1, 2)
        alone.load_state_dict(model.state_dict() | {"pos_embed": codes})
        wanted = alone.forward_blocks(images[number : number + 1, :, :rows, :columns])
        for ours, theirs in zip(view.levels, wanted, strict=True):
            first, end = ours.cu_seqlens[number : number + 2].tolist()
            torch.testing.assert_close(ours.values_TC[first:end], theirs.values_TC, rtol=0, atol=1e-5)
            assert torch.equal(ours.sizes_T[first:end], theirs.sizes_T)
            map_HW = ours.label_map_BHW()[number, : rows // 8, : columns // 8]
            assert torch.equal(map_HW, theirs.label_map_BHW()[0])
    if superpixels is not None:
        assert view.levels[-1].values_TC.shape[0] < 0.9 * view.levels[0].values_TC.shape[0]


def test_settings_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="powers of 2"):
        FasterRcnnConfig(strides=(4, 8, 12, 32))
    with pytest.raises(ValueError, match=r"anchors needs a size for each of the 4 strides and one more, got 4"):
        FasterRcnnConfig(anchors=(8, 16, 32, 64))
    with pytest.raises(ValueError, match="multiple of 8"):
        DetrConfig(width=100)
    with pytest.raises(ValueError, match="not divisible by the patch size"):
        make_detector(replace(tiny_settings("detr"), augment=AugmentConfig(size=60)), encoder(), ["a"])
    two = replace(tiny_settings("fasterrcnn"), fasterrcnn=FasterRcnnConfig(blocks=(2, 4)))
    advice = (
        r"strides has 4 numbers for the maps of 2 blocks: .* --fasterrcnn\.strides 4 8 --fasterrcnn\.anchors 32 64 128,"
    )
    with pytest.raises(ValueError, match=advice):
        make_detector(two, encoder(), ["a"])
    # The advice holds, and where levels are lacking it goes on by doubling.
    fitting = FasterRcnnConfig(blocks=(2, 4), strides=(4, 8), anchors=(8, 16, 32), adapter_width=16, pyramid_width=16)
    make_detector(replace(two, fasterrcnn=fitting), encoder(), ["a"])
    five = FasterRcnnConfig(blocks=(1, 2, 3, 4), strides=(4, 8, 16), anchors=(8, 16, 32, 64))
    with pytest.raises(ValueError, match=r"strides 4 8 16 32 --fasterrcnn\.anchors 8 16 32 64 128,"):
        make_detector(replace(two, fasterrcnn=five), encoder(), ["a"])


# --- Training ---------------------------------------------------------------------------------------------


def test_a_short_training_fits_four_scenes(trained: DetectConfig) -> None:
    result = json.loads((trained.out / "result.json").read_text())
    assert result["ap50"] >= 0.7 and result["ap50_eleven"] >= 0.7
    assert result["images"] == 4 and result["settings"]["head"] == trained.head
    assert {"asc", "torch", "torchvision", "python"} <= result["versions"].keys()
    shown = [name for name, count in result["objects"].items() if count]
    assert all((result["classes"][name]["ap50"] is None) == (name not in shown) for name in result["classes"])
    log = read_log(trained.out)
    assert log[-1]["ap50"] == result["ap50"] and any("loss_box" in line or "loss_giou" in line for line in log)
    page = (trained.out / "index.html").read_text()
    assert "scene 0" in page and "The worst" in page and "truth" in page and page.count("<img") >= 4 * 4


def test_a_saved_detector_finds_the_same_and_is_judged_alike(
    trained: DetectConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = DetectEvaluation(trained.out, tmp_path, sets=trained.sets, pictures=1, batch=3, accelerator="cpu")
    record = evaluate(settings)
    before = json.loads((trained.out / "result.json").read_text())
    assert record["ap50"] == pytest.approx(before["ap50"], abs=1e-6) and record["classes"] == before["classes"]
    file = tmp_path / "result.json"
    written = file.stat().st_mtime_ns
    capsys.readouterr()
    assert evaluate(replace(settings, model=trained.out / "detector")) == record == json.loads(file.read_text())
    assert "was there already" in capsys.readouterr().out and (tmp_path / "index.html").is_file()
    with pytest.raises(ValueError, match=r"holds a result with other settings \(batch was 3 and is now 2\)"):
        evaluate(replace(settings, batch=2))
    with pytest.raises(ValueError, match=r"\(model was .* \(content .* and is now .*; batch was 3 and is now 2\)"):
        other = tiny(tmp_path / "other", trained.head, train=replace(trained.train, steps=1))
        evaluate(replace(settings, model=train(other), batch=2))
    with pytest.raises(ValueError, match=r"\(sets\.scenes was 4 and is now 3\)"):
        evaluate(replace(settings, sets=replace(settings.sets, scenes=3)))
    assert file.stat().st_mtime_ns == written
    for bad, message in (
        ({"pictures": -1}, "pictures must be at least 0"),
        ({"accelerator": "tpu"}, "accelerator must"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(replace(settings, **bad))
    with pytest.raises(ValueError, match="knows other classes"):
        folder = voc(tmp_path, {"000001": annotation()}, part="test").parent
        evaluate(replace(settings, data=str(folder)))


def test_a_folder_of_images_gives_pictures_and_boxes(
    trained: DetectConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples, _ = open_sets("scenes", trained.sets)
    (tmp_path / "in" / "deeper").mkdir(parents=True)
    Image.fromarray(samples[0].image_HW3).resize((200, 200)).save(tmp_path / "in" / "one.png")
    Image.fromarray(samples[1].image_HW3).save(tmp_path / "in" / "deeper" / "two.png")
    settings = DetectPrediction(trained.out, tmp_path / "in", tmp_path / "out", 0.3, accelerator="cpu")
    record = predict(settings)
    assert json.loads((tmp_path / "out" / "boxes.json").read_text()) == record
    assert sorted(record) == ["deeper/two.png", "one.png"] and record["one.png"]["width"] == 200
    assert (tmp_path / "out" / "deeper" / "two.png.png").is_file()
    # The detector has learned this scene by heart: its main object is found, in pixels of the larger image.
    main = samples[0].truth.boxes_K4[0] * 200 / SIZE
    boxes = torch.tensor([found["box"] for found in record["one.png"]["objects"]])
    assert (boxes - main).abs().mean(1).min() < 20
    with pytest.raises(ValueError, match="holds no images"):
        predict(replace(settings, images=trained.out / "checkpoints"))
    # A file that cannot be read and one that is none are passed over and named.
    (tmp_path / "in" / "bad.jpg").write_bytes(b"no image")
    (tmp_path / "in" / "deeper" / "film.gif").write_bytes(b"film")
    capsys.readouterr()
    assert predict(replace(settings, batch=2)) == record
    told = capsys.readouterr().out.splitlines()
    assert told[0].endswith(f"in 2 images; pictures and boxes.json are in {tmp_path / 'out'}")
    assert told[1] == "skipped: 1" and "bad.jpg: not an image that can be read" in told[2]
    assert told[3:] == ["1 entry that is no image is not used: deeper/film.gif"]
    assert (tmp_path / "out" / "skipped.txt").read_text() == told[2] + "\n"
    (tmp_path / "in" / "bad.jpg").unlink()
    predict(settings)
    assert not (tmp_path / "out" / "skipped.txt").exists()
    (tmp_path / "in" / "bad.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"no image can be read; the first: .*bad\.jpg"):
        predict(replace(settings, images=tmp_path / "in" / "bad.jpg"))
    with pytest.raises(ValueError, match="holds no trained detector"):
        predict(replace(settings, model=tmp_path))


@pytest.mark.parametrize("head", HEADS)
def test_a_stopped_run_continues_to_the_very_same_weights(tmp_path: Path, head: str) -> None:
    def config(name: str, **machine: object) -> DetectConfig:
        base = tiny(tmp_path / name, head, scenes=6)
        base = replace(base, augment=AugmentConfig(size=SIZE), detr=replace(base.detr, dropout=0.1))
        base = replace(base, encoder=str(tmp_path / "whole" / "given"), watch=replace(base.watch, every=2, pictures=0))
        return replace(base, train=replace(base.train, steps=5), machine=replace(base.machine, **machine))

    train(config("whole"))
    for _ in range(2):
        with pytest.raises(TrainingStoppedError, match="the same command continues"):
            train(config("parts", stop_after=2))
    train(config("parts"))
    assert_same(
        pretrain_runs.newest_state(tmp_path / "whole" / "run"), pretrain_runs.newest_state(tmp_path / "parts" / "run")
    )
    weights = [(tmp_path / name / "run/detector/head.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]


def test_a_frozen_encoder_stays_as_it_is_and_a_slow_one_learns(tmp_path: Path) -> None:
    config = tiny(tmp_path, "detr", frozen=True)
    config = replace(
        config, train=replace(config.train, steps=2), watch=replace(config.watch, calibration=0, pictures=0)
    )
    before, after = asc.load(config.encoder), load_detector(train(config)).encoder
    assert_same(dict(before.state_dict()), dict(after.state_dict()))
    slow = load_detector(train(replace(config, frozen=False, encoder_lr=0.1, out=tmp_path / "slow"))).encoder
    moved = (slow.patch_embed.weight - before.patch_embed.weight).abs().max()
    # Two steps of Adam, with a tenth of 0.001 and of 0.002.
    assert 0 < moved < 0.1 * 0.0031


def test_the_paper_recipe_lowers_the_learning_rate_where_the_paper_says() -> None:
    config = RECIPES["paper"]().train
    assert (config.optimiser, config.momentum, config.weight_decay, config.clip) == ("sgd", 0.9, 1e-4, 10.0)
    rates = [lr_at(config, step, 24_000, 5011) for step in (0, 17_999, 18_000, 21_999, 22_000, 23_999)]
    assert rates == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4, 1e-5, 1e-5])
    assert RECIPES["paper_detr"]().train.optimiser == "adamw" and RECIPES["paper_detr"]().head == "detr"


def test_an_encoder_without_tokens_is_refused(tmp_path: Path) -> None:
    config = tiny(tmp_path, "detr", encoder="timm:resnet18")
    with pytest.raises(ValueError, match="gives no tokens to detect objects in"):
        train(config)


def test_mistakes_are_objects_missed_and_boxes_that_fit_nothing(trained: DetectConfig) -> None:
    truth = boxes_of((0, 0, 10, 10), (20, 20, 30, 30))
    found = (
        load_detector(trained.out)
        .find([scene_image(0)])[0]
        ._replace(
            boxes_K4=torch.tensor([[0.0, 0, 10, 9], [0, 0, 10, 10], [40, 40, 50, 50]]),
            scores_K=torch.tensor([0.9, 0.8, 0.2]),
            classes_K=torch.tensor([0, 1, 2]),
        )
    )
    assert mistakes(found, truth, least=0.5) == (1, 1)
    assert mistakes(found, truth, least=0.1) == (1, 2)
    assert mistakes(found, truth._replace(difficult_K=torch.tensor([False, True])), least=0.5) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_each_head_fits_eight_scenes(tmp_path: Path, head: str) -> None:
    config = tiny(tmp_path, head, scenes=8)
    config = replace(config, train=replace(config.train, steps=200))
    train(config)
    assert json.loads((config.out / "result.json").read_text())["ap50"] >= 0.9
