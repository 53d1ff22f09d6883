"""The page of superpixels from end to end at a small size, and its command."""

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from test_report import Reader

import asc
import asc.report.gallery
import asc.show
from asc.cli import main
from asc.data import Scene, SceneConfig, normalise
from asc.report import draw_boundaries, enlarged, paint_means
from asc.report.gallery import open_photographs
from asc.show import SuperpixelsSettings, calibration_pictures, show_superpixels, shown_pictures

# Blocks that merge, by the depth of the network: the early third.
SHOWN = {12: [1, 2, 3, 4], 4: [1, 2]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(1)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, patch_size=8, depth=4, num_classes=3)
    file = tmp_path_factory.mktemp("weights") / "small.safetensors"
    safetensors.torch.save_file(model.state_dict(), file)
    return file


@pytest.fixture(scope="module")
def own_encoder(tmp_path_factory):
    """The folder of a run whose encoder has thresholds of its own, for a budget and a neighbourhood of its own."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    asc.save(make_encoder(calibrated=True), folder / "encoder")
    return folder


def make_encoder(calibrated, **settings):
    torch.manual_seed(2)
    superpixels = asc.SuperpixelConfig(budget=0.7, neighbourhood="spatial")
    config = {"width": 32, "depth": 4, "heads": 2, "patch_size": 8, "image_size": 48, "superpixels": superpixels}
    model = asc.AscViT(asc.VitConfig(**config | settings)).eval()
    if calibrated:
        scenes = [Scene(SceneConfig(size=48, seed=9), index).frame(0).image_HW3 for index in range(8)]
        model.calibrate(normalise(np.stack(scenes)))
    return model


@pytest.fixture(scope="module")
def own_pictures(tmp_path_factory):
    """A folder of pictures of several shapes, and something else."""
    folder, rng = tmp_path_factory.mktemp("my pictures"), np.random.default_rng(0)
    for name, (height, width) in {"b.png": (60, 90), "a.jpg": (100, 70), "c.PNG": (48, 48)}.items():
        small_hw3 = rng.integers(0, 256, (height // 10, width // 10, 3), dtype=np.uint8)
        Image.fromarray(small_hw3).resize((width, height), Image.Resampling.BICUBIC).save(folder / name)
    (folder / "notes.txt").write_text("none of them")
    return folder


@pytest.fixture(scope="module", params=["untrained", "weights"])
def settings(request, checkpoint, tmp_path_factory):
    # The model's patch size is 4, the weights' 8.
    out = tmp_path_factory.mktemp("shown") / "out"
    common = SuperpixelsSettings(out=out, scenes=2, photographs=("coffee",), calibration=3, seed=3)
    if request.param == "untrained":
        return replace(common, size=68)
    return replace(common, checkpoint=str(checkpoint))


@pytest.fixture(scope="module")
def shown(settings):
    page = show_superpixels(settings)
    assert page == settings.out / "index.html"
    return json.loads((settings.out / "superpixels.json").read_text()), Reader(page.read_text())


def rebuilt(settings, neighbourhood):
    """Labels and numbers from the library alone, for the same weights and images."""
    superpixels = asc.SuperpixelConfig(neighbourhood=neighbourhood)
    if settings.checkpoint is None:
        torch.manual_seed(settings.seed)
        model, size = asc.create_model(settings.model, superpixels, image_size=68).eval(), 68
    else:
        model, size = asc.from_timm(settings.checkpoint, superpixels), 64
    pictures = shown_pictures(settings, open_photographs(settings.photographs), size)
    model.calibrate(as_batch(calibration_pictures(settings, pictures, size)))
    return pictures, model.superpixels(as_batch(pictures)).numpy(), model


def as_batch(pictures):
    return normalise(np.stack([picture.image_HW3 for picture in pictures]))


@pytest.mark.parametrize("neighbourhood", ["global", "spatial"])
@pytest.mark.filterwarnings("ignore::asc.SuperpixelWarning")
def test_recorded_numbers_are_those_of_the_model(shown, settings, neighbourhood):
    record = shown[0]["groupings"][neighbourhood]
    pictures, labels_LBhw, model = rebuilt(settings, neighbourhood)
    assert list(record["pictures"]) == [picture.name for picture in pictures]
    for index, counted in enumerate(record["pictures"].values()):
        assert [entry["after_blocks"] for entry in counted] == list(range(1, len(labels_LBhw) + 1))
        for entry, labels_hw in zip(counted, labels_LBhw[:, index], strict=True):
            assert entry["tokens"] == labels_hw.max() + 1
            assert entry["largest_share"] == pytest.approx(np.bincount(labels_hw.ravel()).max() / labels_hw.size)
    for entry, stats in zip(record["blocks"], model.diagnostics().values(), strict=True):
        assert {name: entry[name] for name in asdict(stats)} == pytest.approx(asdict(stats))


def test_record_names_settings_and_versions(shown, settings):
    record, _ = shown
    assert record["seed"] == 3 and record["versions"]["torch"] == torch.__version__
    assert set(record["settings"]) == {field.name for field in fields(SuperpixelsSettings)}
    assert record["settings"]["checkpoint"] == settings.checkpoint
    expected = (68, 17 * 17, 12) if settings.checkpoint is None else (64, 8 * 8, 4)
    assert (record["size"], record["patches"], record["depth"]) == expected
    assert len(record["time_ratios"]) == 2 and all(ratio > 0 for ratio in record["time_ratios"].values())


@pytest.mark.filterwarnings("ignore::asc.SuperpixelWarning")
def test_page_shows_every_picture(shown, settings):
    expected = []
    grouped = [rebuilt(settings, neighbourhood)[:2] for neighbourhood in ("global", "spatial")]
    for index, picture in enumerate(grouped[0][0]):
        image_HW3 = enlarged(picture.image_HW3)
        expected.append(image_HW3)
        for _, labels_LBhw in grouped:
            for block in SHOWN[len(labels_LBhw)]:
                labels_hw = labels_LBhw[block - 1, index]
                expected += [draw_boundaries(image_HW3, labels_hw), paint_means(image_HW3, labels_hw)]
    read = shown[1].pictures
    assert len(read) == len(expected) == 3 * (1 + 2 * 2 * (4 if settings.checkpoint is None else 2))
    assert all(np.array_equal(got, want) for got, want in zip(read, expected, strict=True))


def test_page_shows_the_recorded_numbers(shown):
    record, read = shown
    assert record["title"] in read.text and record["calibrated_on"] in read.text
    for neighbourhood, grouping in record["groupings"].items():
        assert f"{record['time_ratios'][neighbourhood]:.2f} ({neighbourhood})" in read.text
        for entry in grouping["blocks"]:
            cells = [f"{entry['tokens_mean']:.0f}", str(entry["tokens_min"]), str(entry["tokens_max"])]
            cells += [f"{entry[name]:.0%}" for name in ("kept_share", "largest_share", "single_share")]
            assert " ".join([str(entry["after_blocks"]), *cells, f"{entry['theta']:.3f}"]) in read.text
        for name, counted in grouping["pictures"].items():
            assert name in read.text
            for block in SHOWN[record["depth"]]:
                tokens, largest = counted[block - 1]["tokens"], counted[block - 1]["largest_share"]
                assert f" {tokens} token" in read.text and f"largest: {largest:.1%}" in read.text
        assert all(message in read.text for message in grouping["warnings"])


def test_the_picture_shows_scenes_only(shown, settings):
    sheet = np.asarray(Image.open(settings.out / "superpixels.png"))
    side = shown[0]["size"]
    scene = Scene(SceneConfig(size=side, seed=3), 1).frame(8).image_HW3.repeat(3, axis=0).repeat(3, axis=1)
    assert sheet.shape[1] == 8 + (1 + min(3, len(SHOWN[shown[0]["depth"]]))) * (3 * side + 8)
    rows = [
        y for y in range(len(sheet) - 3 * side + 1) if np.array_equal(sheet[y : y + 3 * side, 8 : 8 + 3 * side], scene)
    ]
    # The second scene is the last row: below it there is only room for its caption.
    assert len(rows) == 1 and len(sheet) - rows[0] < 4 * side


def test_calibration_scenes_are_not_shown(settings):
    pictures = shown_pictures(settings, {}, 68)
    calibration = calibration_pictures(settings, pictures, 68)
    assert len(calibration) == 3
    assert not any(np.array_equal(a.image_HW3, b.image_HW3) for a in pictures for b in calibration)


def test_nothing_unfinished_is_left(shown, settings):
    assert {file.name for file in settings.out.iterdir()} == {"index.html", "superpixels.png", "superpixels.json"}


def test_warnings_of_the_library_are_on_the_page(tmp_path, capsys):
    model = "asc_vit_tiny_patch16"
    page = show_superpixels(
        SuperpixelsSettings(tmp_path, model=model, size=64, scenes=1, photographs=(), calibration=1, budget=0.12)
    )
    record = json.loads((tmp_path / "superpixels.json").read_text())
    messages = record["groupings"]["global"]["warnings"]
    assert any("into one component" in message for message in messages)
    text, printed = Reader(page.read_text()).text, capsys.readouterr().out
    assert all(message in text and message in printed for message in messages)
    assert str(page) in printed


def test_missing_photographs_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(asc.report.gallery, "files", lambda package: tmp_path)
    assert open_photographs(["coffee"]) == {}
    assert "skipped the photograph coffee" in capsys.readouterr().out


def test_photographs_are_centre_crops():
    photographs = open_photographs(["coffee", "rocket"])
    (*_, coffee, _) = shown_pictures(SuperpixelsSettings(scenes=1), photographs, 400)
    raw = np.asarray(photographs["coffee"])
    assert raw.shape == (400, 600, 3) and np.array_equal(coffee.image_HW3, raw[:, 100:500])


def test_building_models_leaves_the_random_state_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    asc.show.untrained_source(SuperpixelsSettings(model="asc_vit_tiny_patch16", size=32))
    assert torch.equal(torch.rand(1), expected)


# --- One's own encoder and pictures -----------------------------------------------------------------------


def shown_own(out, capsys, *argv):
    """What the command records, and its page."""
    assert main(["superpixels", "--out", str(out), *map(str, argv)]) == 0
    capsys.readouterr()
    return json.loads((out / "superpixels.json").read_text()), Reader((out / "index.html").read_text()).text


def centre_square(file, side):
    with Image.open(file) as opened:
        left, top = (opened.width - min(opened.size)) // 2, (opened.height - min(opened.size)) // 2
        box = (left, top, left + min(opened.size), top + min(opened.size))
        cropped = opened.convert("RGB").crop(box)
    return np.asarray(cropped.resize((side, side), Image.Resampling.LANCZOS))


def thetas(record, neighbourhood="spatial"):
    return [block["theta"] for block in record["groupings"][neighbourhood]["blocks"]]


@pytest.mark.filterwarnings("ignore::asc.SuperpixelWarning")
@pytest.mark.parametrize("place", ["", "encoder", "encoder/encoder.safetensors"])
def test_a_run_is_shown_as_it_is_on_pictures_of_ones_own(own_encoder, own_pictures, tmp_path, capsys, place):
    record, text = shown_own(tmp_path, capsys, "--checkpoint", own_encoder / place, "--images", own_pictures)
    model = asc.load(own_encoder / "encoder")
    own_thetas = [float(layer.threshold.theta()) for layer in model.superpixel_layers]
    images_HW3 = [centre_square(own_pictures / name, 48) for name in ("a.jpg", "b.png", "c.PNG")]
    labels_LBhw = model.superpixels(normalise(np.stack(images_HW3)))
    assert list(record["groupings"]) == ["spatial"] and thetas(record) == pytest.approx(own_thetas)
    pictures = record["groupings"]["spatial"]["pictures"]
    assert list(pictures) == ["a.jpg", "b.png", "c.PNG"]
    for index, counted in enumerate(pictures.values()):
        assert [entry["tokens"] for entry in counted] == [int(maps[index].max()) + 1 for maps in labels_LBhw]
    assert record["size"] == 48 and record["calibrated_on"] is None and "Thresholds are the encoder's own." in text
    sheet = np.asarray(Image.open(tmp_path / "superpixels.png"))
    drawn = images_HW3[0].repeat(5, axis=0).repeat(5, axis=1)
    assert any(np.array_equal(sheet[y : y + 240, 8:248], drawn) for y in range(60))


@pytest.mark.filterwarnings("ignore::asc.SuperpixelWarning")
def test_thresholds_are_set_anew_when_asked_or_when_there_are_none(own_encoder, own_pictures, tmp_path, capsys):
    asc.save(make_encoder(calibrated=False), tmp_path / "fresh")
    ours = ["--images", own_pictures, "--most-images", 2]
    asked, text = shown_own(tmp_path / "1", capsys, "--checkpoint", own_encoder, *ours, "--recalibrate")
    fresh, _ = shown_own(tmp_path / "2", capsys, "--checkpoint", tmp_path / "fresh", *ours)
    kept, _ = shown_own(tmp_path / "3", capsys, "--checkpoint", own_encoder, *ours)
    model = make_encoder(calibrated=False)
    model.calibrate(normalise(np.stack([centre_square(own_pictures / name, 48) for name in ("a.jpg", "b.png")])))
    expected = [float(layer.threshold.theta()) for layer in model.superpixel_layers]
    assert thetas(asked) == pytest.approx(expected) and thetas(fresh) == pytest.approx(expected)
    assert thetas(kept) != pytest.approx(expected, abs=1e-4)
    assert asked["calibrated_on"] == "these 2 pictures" and "calibrated on these 2 pictures" in text


@pytest.mark.filterwarnings("ignore::asc.SuperpixelWarning")
def test_a_plain_encoder_is_given_superpixels(own_pictures, tmp_path, capsys):
    asc.save(make_encoder(calibrated=False, superpixels=None), tmp_path / "plain")
    argv = ["--images", own_pictures, "--budget", 0.6, "--size", 64]
    record, text = shown_own(tmp_path / "out", capsys, "--checkpoint", tmp_path / "plain", *argv)
    assert list(record["groupings"]) == ["global", "spatial"] and record["size"] == 64
    assert "It was trained without superpixels and is given them here." in text
    model = make_encoder(False, superpixels=asc.SuperpixelConfig(budget=0.6, neighbourhood="spatial"))
    plain = asc.load(tmp_path / "plain").state_dict()
    model.load_state_dict(model.state_dict() | plain)
    files = [own_pictures / name for name in ("a.jpg", "b.png", "c.PNG")]
    model.calibrate(normalise(np.stack([centre_square(file, 64) for file in files])))
    assert thetas(record) == pytest.approx([float(layer.threshold.theta()) for layer in model.superpixel_layers])


@pytest.mark.filterwarnings("ignore::asc.SuperpixelWarning")
def test_networks_of_timm_see_their_own_colours(own_pictures, tmp_path, capsys):
    torch.manual_seed(1)
    name = "vit_tiny_patch16_224"  # trained with a mean and deviation of 0.5
    network = timm.create_model(name, num_classes=0)
    safetensors.torch.save_file(network.state_dict(), tmp_path / "weights.safetensors")
    source = f"timm:{name}@{tmp_path / 'weights.safetensors'}"
    record, _ = shown_own(tmp_path / "out", capsys, "--checkpoint", source, "--size", 96, "--images", own_pictures)
    model = asc.from_timm(network, asc.SuperpixelConfig(neighbourhood="global"))
    files = [own_pictures / file for file in ("a.jpg", "b.png", "c.PNG")]
    images_B3HW = normalise(np.stack([centre_square(file, 96) for file in files]), (0.5,) * 3, (0.5,) * 3)
    model.calibrate(images_B3HW)
    expected = [float(layer.threshold.theta()) for layer in model.superpixel_layers]
    assert thetas(record, "global")[: len(expected)] == pytest.approx(expected)


# --- The command line -------------------------------------------------------------------------------------


def error_line(capsys, *argv):
    """The one line that a wrong use prints."""
    assert main(["superpixels", *map(str, argv)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and printed.err.endswith("\n")
    assert printed.out == ""
    return printed.err


@pytest.mark.parametrize("ending", ["safetensors", "pth"])
def test_a_corrupt_checkpoint_is_named(ending, tmp_path, capsys):
    file = tmp_path / f"corrupt.{ending}"
    file.write_bytes(b"these are no weights" * 10)
    assert str(file) in error_line(capsys, "--checkpoint", file, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_of_another_network_are_named(tmp_path, capsys):
    file = tmp_path / "other.safetensors"
    safetensors.torch.save_file({"fc.weight": torch.zeros(2, 2)}, file)
    assert str(file) in error_line(capsys, "--checkpoint", file)


def test_a_missing_checkpoint_is_named_and_not_fetched(tmp_path, capsys):
    assert str(tmp_path / "vit_tiny") in error_line(capsys, "--checkpoint", tmp_path / "vit_tiny")


def test_wrong_heads_name_the_checkpoint(checkpoint, capsys):
    assert str(checkpoint) in error_line(capsys, "--checkpoint", checkpoint, "--heads", 5)


def test_encoders_and_pictures_that_cannot_be_shown_are_told_in_one_line(own_encoder, own_pictures, tmp_path, capsys):
    assert "there is no folder nowhere" in error_line(capsys, "--images", "nowhere")
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path / 'empty'} holds no image" in error_line(capsys, "--images", tmp_path / "empty")
    (tmp_path / "empty" / "broken.png").write_bytes(b"no picture")
    assert str(tmp_path / "empty" / "broken.png") in error_line(capsys, "--images", tmp_path / "empty")
    assert "most_images" in error_line(capsys, "--images", own_pictures, "--most-images", 0)
    assert "resnet18 has no superpixels and cannot be given" in error_line(capsys, "--checkpoint", "timm:resnet18")
    assert "--size 64" in error_line(capsys, "--checkpoint", "timm:vit_tiny_patch16_224", "--size", 66)
    assert "give --size 64" in error_line(capsys, "--checkpoint", own_encoder, "--size", 66)
    assert "for a budget of 0.7" in error_line(capsys, "--checkpoint", own_encoder, "--budget", 0.5)
    assert "weights file" in error_line(capsys, "--checkpoint", own_encoder, "--heads", 2)
    assert "checkpoint" in error_line(capsys, "--recalibrate")
    pooled = asc.SuperpixelConfig(blocks=(3,), keep=0.5)
    asc.save(make_encoder(calibrated=True, superpixels=pooled, pool="grouped"), tmp_path / "pooled")
    assert "no superpixels to show" in error_line(capsys, "--checkpoint", tmp_path / "pooled")
    assert not Path("superpixels").exists()


def test_wrong_settings_are_told_in_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert "scenes" in error_line(capsys, "--scenes", 0)
    assert "calibration" in error_line(capsys, "--calibration", 0)
    assert "asc_vit_huge_patch4" in error_line(capsys, "--model", "asc_vit_huge_patch4")
    assert "patch size 4; give --size 64" in error_line(capsys, "--size", 66)
    assert "size" in error_line(capsys, "--size", 8)
    assert "seed" in error_line(capsys, "--seed", -1)
    assert "budget" in error_line(capsys, "--budget", 3)
    assert "checkpoint" in error_line(capsys, "--heads", 3)
    assert str(tmp_path / "file") in error_line(capsys, "--out", tmp_path / "file")


def test_unknown_photographs_are_refused():
    with pytest.raises(ValueError, match="nobody"):
        show_superpixels(replace(SuperpixelsSettings(), photographs=("nobody",)))


def test_help_names_every_setting(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["superpixels", "--help"])
    shown = capsys.readouterr().out
    assert leaving.value.code == 0
    for field in fields(SuperpixelsSettings):
        assert f"--{field.name.replace('_', '-')}" in shown
