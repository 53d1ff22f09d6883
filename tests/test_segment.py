"""Segmentation: scores and losses against independent ones, heads that learn, runs, and bad masks."""

import itertools
import json
import shutil
from pathlib import Path

import dense_runs
import numpy as np
import pretrain_runs
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from PIL import Image
from torchmetrics.classification import MulticlassJaccardIndex

import asc
from asc.data.scenes import Scene, SceneConfig
from asc.tasks.dense import InferenceConfig
from asc.tasks.segment.data import SEGMENT_CLASSES, SegmentDataConfig, open_segment_data
from asc.tasks.segment.heads import SegmentHeadConfig
from asc.tasks.segment.losses import SegmentLossConfig, cross_entropy, lovasz_softmax, segment_loss
from asc.tasks.segment.metrics import Confusion
from asc.tasks.segment.pictures import palette
from asc.tasks.segment.run import SegmentEvaluateSettings, SegmentPredictSettings, evaluate, predict, train
from asc.tasks.segment.task import SegmentConfig
from asc.train import TrainingStoppedError

# --- Scores -----------------------------------------------------------------------------------------------


def test_miou_of_a_confusion_matrix_made_by_hand() -> None:
    confusion = Confusion(4)
    confusion.add(torch.tensor([[0, 0, 1], [1, 1, 0]]), torch.tensor([[0, 0, 0], [1, 255, 255]]))
    confusion.add(torch.tensor([[2, 2]]), torch.tensor([[1, 2]]))
    assert confusion.counts_KK.tolist() == [[2, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    # Class 0: 2 of 3; class 1: 1 of 3; class 2: 1 of 2; class 3 is neither there nor predicted and does not count.
    torch.testing.assert_close(confusion.iou_K()[:3], torch.tensor([2 / 3, 1 / 3, 1 / 2], dtype=torch.float64))
    assert confusion.mean_iou() == pytest.approx((2 / 3 + 1 / 3 + 1 / 2) / 3)
    assert confusion.accuracy() == pytest.approx(4 / 6)


def test_miou_equals_torchmetrics_over_the_whole_set() -> None:
    generator = torch.Generator().manual_seed(0)
    confusion, peer = Confusion(21), MulticlassJaccardIndex(21, ignore_index=255)
    for _ in range(6):
        truth = torch.randint(0, 19, (1, 37, 23), generator=generator)
        predicted = torch.where(torch.rand(truth.shape, generator=generator) < 0.6, truth, (truth + 1) % 21)
        truth[torch.rand(truth.shape, generator=generator) < 0.1] = 255
        confusion.add(predicted, truth)
        peer.update(predicted, truth)
    assert confusion.mean_iou() == pytest.approx(float(peer.compute()), abs=1e-6)


def test_the_palette_is_that_of_the_official_masks() -> None:
    assert palette()[[0, 1, 2, 15, 20, 255]].tolist() == [
        [0, 0, 0], [128, 0, 0], [0, 128, 0], [192, 128, 128], [0, 64, 128], [224, 224, 192],
    ]  # fmt: skip


# --- Losses -----------------------------------------------------------------------------------------------


def certain(classes: torch.Tensor, number: int) -> torch.Tensor:
    """Scores (1, K, 1, N) of predictions without a doubt."""
    return 200.0 * F.one_hot(classes, number).double().T[None, :, None]


def jaccard_loss(wrong: set[int], members: set[int]) -> float:
    """One minus intersection over union, if just these pixels are wrong."""
    union = len(members | wrong)
    return 1 - len(members - wrong) / union if union else 0.0


def test_lovasz_of_certain_predictions_is_the_jaccard_loss() -> None:
    for truth_bits, predicted_bits in itertools.product(itertools.product((0, 1), repeat=4), repeat=2):
        truth, predicted = torch.tensor(truth_bits), torch.tensor(predicted_bits)
        wrong = set((truth != predicted).nonzero()[:, 0].tolist())
        present = truth.unique().tolist()
        expected = np.mean([jaccard_loss(wrong, set((truth == c).nonzero()[:, 0].tolist())) for c in present])
        found = lovasz_softmax(certain(predicted, 2), truth.view(1, 1, 4))
        assert float(found) == pytest.approx(expected, abs=1e-9)


def test_lovasz_is_the_extension_of_the_jaccard_loss_by_its_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        scores = torch.randn(2, 3, 2, 4, generator=generator, dtype=torch.float64)
        truth = torch.randint(0, 3, (2, 2, 4), generator=generator)
        truth[0, 0, 0] = 255
        known = truth != 255
        chances = scores.softmax(1).permute(0, 2, 3, 1)[known]
        losses = []
        for c in truth[known].unique().tolist():
            members = set((truth[known] == c).nonzero()[:, 0].tolist())
            errors = [1 - float(p) if i in members else float(p) for i, p in enumerate(chances[:, c])]
            order = sorted(range(len(errors)), key=lambda i: -errors[i])
            loss = 0.0
            for rank, pixel in enumerate(order):
                step = jaccard_loss(set(order[: rank + 1]), members) - jaccard_loss(set(order[:rank]), members)
                loss += errors[pixel] * step
            losses.append(loss)
        assert float(lovasz_softmax(scores, truth)) == pytest.approx(np.mean(losses), abs=1e-12)


def test_lovasz_by_hand() -> None:
    # Two pixels, the first of class 1 with chance 0.6 and the second of class 0 with chance 0.7: errors 0.4 and 0.3.
    # For class 1 a wrong first pixel makes the loss 1, the second none more: 0.4. For class 0: 0.4 / 2 + 0.3 / 2.
    chances = torch.tensor([[0.4, 0.7], [0.6, 0.3]], dtype=torch.float64)
    loss = lovasz_softmax(chances.log()[None, :, None], torch.tensor([[[1, 0]]]))
    assert float(loss) == pytest.approx((0.4 + 0.35) / 2)


def test_lovasz_has_the_gradient_of_its_values() -> None:
    scores = torch.randn(1, 3, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    truth = torch.tensor([[[0, 1, 255], [1, 0, 2]]])
    assert torch.autograd.gradcheck(lambda x: lovasz_softmax(x, truth), (scores,))


def test_void_pixels_do_not_count_in_any_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 4, 5, 6, generator=generator, requires_grad=True)
    truth = torch.randint(0, 4, (2, 5, 6), generator=generator)
    truth[:, 3:] = 255
    cut = segment_loss(scores[:, :, :3], truth[:, :3], SegmentLossConfig())
    torch.testing.assert_close(segment_loss(scores, truth, SegmentLossConfig()), cut)
    torch.testing.assert_close(cross_entropy(scores, truth), F.cross_entropy(scores[:, :, :3], truth[:, :3]))
    nothing = segment_loss(scores, torch.full_like(truth, 255), SegmentLossConfig())
    nothing.backward()
    assert nothing.item() == 0 and float(scores.grad.abs().sum()) == 0


def test_weights_of_the_losses() -> None:
    scores, truth = torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 4, 4).long()
    parts = cross_entropy(scores, truth), lovasz_softmax(scores, truth)
    torch.testing.assert_close(segment_loss(scores, truth, SegmentLossConfig()), parts[0] + 0.5 * parts[1])
    torch.testing.assert_close(segment_loss(scores, truth, SegmentLossConfig(0.0, 2.0)), 2 * parts[1])
    with pytest.raises(ValueError, match=r"loss\.cross_entropy and loss\.lovasz"):
        SegmentLossConfig(0.0, 0.0)


# --- Runs -------------------------------------------------------------------------------------------------


def learning(out: Path, encoder: str, kind: str, scenes: int = 4, size: int = 32, steps: int = 60) -> SegmentConfig:
    """A run that sees the scenes it is judged by, to learn them by heart."""
    return SegmentConfig(
        out=out,
        encoder=encoder,
        augment=dense_runs.unchanged(size),
        images=SegmentDataConfig(
            scenes=scenes, scenes_judged=scenes, scenes_unseen=False, scene=SceneConfig(size=size, frames=8)
        ),
        head=SegmentHeadConfig(kind=kind, channels=64, finest=2),  # type: ignore[arg-type]
        watch=dense_runs.WATCH,
        train=dense_runs.quick_training(steps, scenes, 3e-3),
        machine=dense_runs.MACHINE,
    )


def result_of(out: Path) -> dict[str, dict[str, float]]:
    return json.loads((out / "result.json").read_text())


@pytest.mark.parametrize("kind", ["mlp", "fpn"])
def test_every_head_learns_a_few_scenes_and_leaves_everything_a_user_needs(tmp_path: Path, kind: str) -> None:
    config = learning(tmp_path / "run", dense_runs.encoder_folder(tmp_path / "encoder"), kind)
    train(config)
    result = result_of(config.out)
    assert result["last"]["miou"] >= 0.65 > 2 * result["trivial"]["miou"]
    assert result["best"]["miou"] >= result["last"]["miou"] - 1e-9
    assert asc.load(config.out / "best" / "encoder").config.width == 64
    page = (config.out / "index.html").read_text()
    assert all(
        word in page for word in ("The worst cases", "after block 1", "after block 4", "truth", "scene 0 (train)")
    )
    judged = SegmentEvaluateSettings(config.out, tmp_path / "judged", images=config.images, accelerator="cpu")
    found = json.loads(evaluate(judged).read_text())
    assert found["scores"]["miou"] == pytest.approx(result["best"]["miou"], abs=1e-9)
    assert set(found["scores"]["iou"]) == {"background", *asc.data.CLASSES}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "fpn"])
def test_every_head_learns_eight_scenes_by_heart(tmp_path: Path, kind: str) -> None:
    encoder = dense_runs.encoder_folder(tmp_path / "encoder", image_size=64)
    train(learning(tmp_path / "run", encoder, kind, scenes=8, size=64, steps=200))
    assert result_of(tmp_path / "run")["last"]["miou"] >= 0.9


def short(out: Path, folder: str, **settings: object) -> SegmentConfig:
    config = dense_runs.changed(
        learning(out, folder, "fpn"),
        train={"steps": 6},
        augment={"scale": (0.5, 2.0), "flip_probability": 0.5, "jitter_probability": 0.5},
        watch={"every": 2},
        head={"channels": 16},
        images={"scenes_unseen": True},
    )
    return dense_runs.changed(config, **settings)


def test_a_stopped_run_continues_to_the_same_weights(tmp_path: Path) -> None:
    encoder = dense_runs.encoder_folder(tmp_path / "encoder", width=32)
    train(short(tmp_path / "whole", encoder))
    for _ in range(2):
        with pytest.raises(TrainingStoppedError, match="the same command continues"):
            train(short(tmp_path / "stopped", encoder, machine={"stop_after": 2}))
    train(short(tmp_path / "stopped", encoder))
    for part in ("best", "last"):
        for file in ("head.safetensors", "head.json", "encoder/encoder.safetensors"):
            whole, stopped = ((tmp_path / name / part / file).read_bytes() for name in ("whole", "stopped"))
            assert whole == stopped, (part, file)
    one, other = result_of(tmp_path / "whole"), result_of(tmp_path / "stopped")
    assert one["best"] == other["best"] and one["last"] == other["last"]
    assert pretrain_runs.newest_state(tmp_path / "stopped")["state"]["step"] == 6


def test_a_frozen_encoder_stays_as_it_is(tmp_path: Path) -> None:
    encoder = dense_runs.encoder_folder(tmp_path / "encoder", width=32)
    train(short(tmp_path / "run", encoder, tune={"frozen": True, "calibration": 0}))
    before, after = (asc.load(path).state_dict() for path in (encoder, tmp_path / "run" / "last" / "encoder"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_plain_encoder_can_be_trained(tmp_path: Path) -> None:
    encoder = dense_runs.encoder_folder(tmp_path / "encoder", width=32, budget=None)
    train(short(tmp_path / "run", encoder, train={"steps": 2}))
    assert "superpixels" not in (tmp_path / "run" / "index.html").read_text()


def test_a_folder_of_images_is_predicted(tmp_path: Path) -> None:
    encoder = dense_runs.encoder_folder(tmp_path / "encoder", width=32)
    train(short(tmp_path / "run", encoder, train={"steps": 2}))
    (tmp_path / "images").mkdir()
    for name, side in (("a.jpg", 30), ("a.png", 45)):
        Image.fromarray(Scene(SceneConfig(size=64), 0).frame(0).image_HW3[:side]).save(tmp_path / "images" / name)
    for mode in ("whole", "slide"):
        inference = InferenceConfig(mode=mode)  # type: ignore[arg-type]
        out = predict(
            SegmentPredictSettings(tmp_path / "run", tmp_path / "images", tmp_path / mode, inference, accelerator="cpu")
        )
        for name, side in (("a.jpg", 30), ("a.png", 45)):
            classes = np.load(out / "arrays" / f"{name}.npy")
            assert classes.shape == (side, 64) and classes.dtype == np.uint8 and classes.max() <= 10
            assert (np.asarray(Image.open(out / "pictures" / f"{name}.png")) == palette()[classes]).all()
        assert "a.png" in (out / "index.html").read_text()


def test_images_that_cannot_be_read_are_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = dense_runs.encoder_folder(tmp_path / "encoder", width=32)
    train(short(tmp_path / "run", encoder, train={"steps": 1}))
    images = tmp_path / "images"
    images.mkdir()
    for number in range(4):
        Image.fromarray(Scene(SceneConfig(size=32), number).frame(0).image_HW3).save(images / f"{number}.png")
    (images / "1.png").write_bytes(b"no image")
    (images / "film.gif").write_bytes(b"film")
    settings = SegmentPredictSettings(
        tmp_path / "run", images, tmp_path / "out", InferenceConfig(batch=2), 2, accelerator="cpu"
    )
    capsys.readouterr()
    predict(settings)
    assert sorted(file.name for file in (tmp_path / "out/arrays").iterdir()) == [f"{n}.png.npy" for n in (0, 2, 3)]
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("3 images: ") and told[1] == "skipped: 1"
    assert told[2].startswith(f"{images / '1.png'}: not an image that can be read")
    assert told[3:] == ["1 entry that is no image is not used: film.gif"]
    page = (tmp_path / "out/index.html").read_text()
    assert "skipped: 1" in page and "1.png: not an image that can be read" in page and "film.gif" in page
    # The first two that could be read have pictures on the page.
    assert all(f"<h3>{name}.png</h3>" in page for name in (0, 2)) and "<h3>3.png</h3>" not in page
    for number in (0, 2, 3):
        (images / f"{number}.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"no image can be read; the first: .*0\.png"):
        predict(dense_runs.changed(settings, out=tmp_path / "other"))
    assert not (tmp_path / "other").exists()
    with pytest.raises(ValueError, match="pictures must be at least 0, got -1"):
        predict(dense_runs.changed(settings, pictures=-1))


def test_an_evaluation_is_not_computed_twice_nor_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = dense_runs.encoder_folder(tmp_path / "encoder", width=32)
    config = short(tmp_path / "run", encoder, train={"steps": 1})
    train(config)
    settings = SegmentEvaluateSettings(config.out, tmp_path / "out", images=config.images, accelerator="cpu")
    file = evaluate(settings)
    first, written = capsys.readouterr().out.splitlines()[-1], file.stat().st_mtime_ns
    shutil.move(config.out, tmp_path / "moved")
    assert evaluate(dense_runs.changed(settings, model=tmp_path / "moved")) == file
    again = capsys.readouterr().out.splitlines()[-1]
    assert again == first.replace("; more in", "; was there already, more in") and "miou" in again
    result = json.loads(file.read_text())
    for changes, message in (
        ({"most": 3}, "most was None and is now 3"),
        ({"inference": {"mode": "slide"}}, r"inference\.mode was 'whole' and is now 'slide'"),
        ({"images": {"scenes_judged": 3}}, r"images\.scenes_judged was 4 and is now 3\);"),
        ({"model": tmp_path / "moved/last"}, r"model was '.*run' \(content .*\) and is now '.*last' \(content .*\)"),
    ):
        if "model" in changes:
            weights = safetensors.torch.load_file(tmp_path / "moved/last/head.safetensors")
            name = next(iter(weights))
            safetensors.torch.save_file(weights | {name: weights[name] + 1}, tmp_path / "moved/last/head.safetensors")
        other = dense_runs.changed(settings, **{"model": tmp_path / "moved"} | changes)
        with pytest.raises(ValueError, match=rf"result\.json holds a result with other settings \(.*{message}"):
            evaluate(other)
    assert file.stat().st_mtime_ns == written
    # Without its page it was interrupted: it is made again, with the same result.
    (tmp_path / "out/index.html").unlink()
    evaluate(dense_runs.changed(settings, model=tmp_path / "moved"))
    assert (tmp_path / "out/index.html").is_file() and result_of(tmp_path / "out")["scores"] == result["scores"]
    # The record of a training is no less safe.
    with pytest.raises(ValueError, match=r"moved/result\.json holds a result with other settings"):
        evaluate(dense_runs.changed(settings, model=tmp_path / "moved", out=tmp_path / "moved"))
    file.write_text("no record")
    with pytest.raises(ValueError, match=r"result\.json cannot be read .*; give another --out or remove it"):
        evaluate(dense_runs.changed(settings, model=tmp_path / "moved"))


def test_scores_are_kept_where_the_page_cannot_be_drawn(voc: Path, tmp_path: Path) -> None:
    encoder = dense_runs.encoder_folder(tmp_path / "encoder", width=32)
    train(short(tmp_path / "run", encoder, data=str(voc), train={"steps": 1}, watch={"pictures": 0}))
    (tmp_path / "out/index.html").mkdir(parents=True)
    settings = SegmentEvaluateSettings(tmp_path / "run", tmp_path / "out", data=str(voc), accelerator="cpu")
    with pytest.raises(ValueError, match=r"index\.html cannot be written"):
        evaluate(settings)
    assert 0 <= result_of(tmp_path / "out")["scores"]["miou"] <= 1
    # Other images of the same name and place are other data.
    (tmp_path / "out/index.html").rmdir()
    Image.new("RGB", (56, 40)).save(voc / "VOCdevkit/VOC2012/JPEGImages/2007_2.jpg")
    with pytest.raises(ValueError, match=r"\(data was '.*' \(content .*\) and is now '.*' \(content .*\)\)"):
        evaluate(settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_told(tmp_path: Path) -> None:
    encoder = dense_runs.encoder_folder(tmp_path / "encoder", width=32)
    train(short(tmp_path / "run", encoder, train={"steps": 1}))
    with pytest.raises(ValueError, match="accelerator is cuda, but PyTorch finds no such GPU"):
        evaluate(SegmentEvaluateSettings(tmp_path / "run", tmp_path / "out", accelerator="cuda"))
    with pytest.raises(ValueError, match=r"accelerator must be one of .*, got 'tpu'"):
        evaluate(SegmentEvaluateSettings(tmp_path / "run", tmp_path / "out", accelerator="tpu"))


def test_a_model_for_another_task_or_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "head.json").write_text('{"task": "depth"}')
    with pytest.raises(ValueError, match="holds a model for depth, not for segment"):
        predict(SegmentPredictSettings(tmp_path, tmp_path, tmp_path))
    with pytest.raises(ValueError, match="holds no trained model"):
        predict(SegmentPredictSettings(tmp_path / "nothing", tmp_path, tmp_path))


# --- PASCAL VOC -------------------------------------------------------------------------------------------


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    """Four images of 40 x 56 pixels in the official layout."""
    folder = tmp_path / "VOCdevkit" / "VOC2012"
    for part in ("JPEGImages", "SegmentationClass", "SegmentationClassAug", "ImageSets/Segmentation"):
        (folder / part).mkdir(parents=True)
    for index in range(4):
        frame = Scene(SceneConfig(size=56), index).frame(0)
        Image.fromarray(frame.image_HW3[:40]).save(folder / "JPEGImages" / f"2007_{index}.jpg")
        mask = Image.fromarray(frame.semantic_HW[:40], mode="P")
        mask.putpalette(palette().tobytes())
        mask.save(folder / ("SegmentationClassAug" if index == 3 else "SegmentationClass") / f"2007_{index}.png")
    (folder / "ImageSets/Segmentation/train.txt").write_text("2007_0\n2007_1\n")
    (folder / "ImageSets/Segmentation/val.txt").write_text("2007_2\n")
    return tmp_path


def test_voc_is_read_with_its_augmented_list_where_there_is_one(voc: Path) -> None:
    data = open_segment_data(str(voc), SegmentDataConfig())
    assert (len(data.train), len(data.val), data.classes) == (2, 1, SEGMENT_CLASSES) and len(SEGMENT_CLASSES) == 21
    image, mask = data.train.read(1)
    assert image.shape == (40, 56, 3)
    assert (mask == Scene(SceneConfig(size=56), 1).frame(0).semantic_HW[:40]).all()
    listed = "\n/JPEGImages/2007_0.jpg /SegmentationClassAug/2007_0.png\n2007_1\n2007_3\n"
    (voc / "VOCdevkit/VOC2012/ImageSets/Segmentation/trainaug.txt").write_text(listed)
    more = open_segment_data(str(voc / "VOCdevkit"), SegmentDataConfig()).train
    assert len(more) == 3 and more.read(2).truth_HW.shape == (40, 56)
    assert len(open_segment_data(str(voc), SegmentDataConfig(train="train", most=1)).train) == 1


def test_voc_can_be_trained_on(voc: Path, tmp_path: Path) -> None:
    encoder = dense_runs.encoder_folder(tmp_path / "encoder", width=32)
    train(short(tmp_path / "run", encoder, data=str(voc), train={"steps": 2}, inference={"mode": "slide"}))
    assert set(result_of(tmp_path / "run")["last"]["iou"]) == set(SEGMENT_CLASSES)  # type: ignore[call-overload]
    settings = SegmentEvaluateSettings(tmp_path / "run", tmp_path / "judged", accelerator="cpu")
    with pytest.raises(
        ValueError, match="knows the classes background, aeroplane, bicycle, bird, …, not those of scenes"
    ):
        evaluate(settings)


def spoil_mask(voc: Path, content: object) -> None:
    file = voc / "VOCdevkit/VOC2012/SegmentationClass/2007_0.png"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        Image.fromarray(content).save(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no picture", r"2007_0\.png: not a mask that can be read"),
        (np.full((40, 56), 21, np.uint8), r"2007_0\.png holds the class 21; classes go from 0 to 20, and 255 for void"),
        (np.zeros((40, 55), np.uint8), r"2007_0\.png has 55 x 40 pixels but its image .*2007_0\.jpg has 56 x 40"),
        (np.zeros((40, 56, 3), np.uint8), r"2007_0\.png is no mask of classes: its mode is RGB"),
    ],
)
def test_bad_masks_are_named(voc: Path, content: object, message: str) -> None:
    spoil_mask(voc, content)
    with pytest.raises(ValueError, match=message):
        open_segment_data(str(voc), SegmentDataConfig()).train.read(0)


def test_other_bad_data_are_named(voc: Path) -> None:
    folder = voc / "VOCdevkit/VOC2012"
    with pytest.raises(ValueError, match=r"there is no list .*nothing\.txt"):
        open_segment_data(str(voc), SegmentDataConfig(train="nothing"))
    with pytest.raises(ValueError, match="has not the layout of PASCAL VOC"):
        open_segment_data(str(voc / "elsewhere"), SegmentDataConfig())
    (folder / "JPEGImages/2007_1.jpg").unlink()
    with pytest.raises(ValueError, match=r"2007_1\.jpg: not an image that can be read"):
        open_segment_data(str(voc), SegmentDataConfig()).train.read(1)
    (folder / "ImageSets/Segmentation/train.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"train\.txt names no image"):
        open_segment_data(str(voc), SegmentDataConfig())


def test_an_image_of_void_alone_can_be_judged(voc: Path, tmp_path: Path) -> None:
    (voc / "VOCdevkit/VOC2012/ImageSets/Segmentation/val.txt").write_text("2007_2\n2007_0\n")
    spoil_mask(voc, np.full((40, 56), 255, np.uint8))
    encoder = dense_runs.encoder_folder(tmp_path / "encoder", width=32)
    train(short(tmp_path / "run", encoder, data=str(voc), train={"steps": 1}))
    assert 0 <= result_of(tmp_path / "run")["last"]["miou"] <= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head": {"kind": "unet"}}, r"unknown head\.kind 'unet'"),
        ({"head": {"blocks": (1, 2, 3)}}, r"head\.blocks must be 4 blocks from 1 to 4"),
        (
            {"augment": {"size": (30, 30)}},
            r"augment\.size 30 is no multiple of the encoder's patch size 4; give --augment\.size 28 28",
        ),
        ({"watch": {"most": 0}}, r"watch\.most must be at least 1"),
        ({"images": {"scenes": 0}}, "names no image to learn from"),
        ({"images": {"scenes_judged": 0}}, "names no image to be judged by"),
        ({"encoder": "nowhere"}, "there is no encoder nowhere"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    encoder = dense_runs.encoder_folder(tmp_path / "encoder", width=32)
    with pytest.raises(ValueError, match=message):
        train(short(tmp_path / "run", encoder, train={"steps": 1}, **settings))
