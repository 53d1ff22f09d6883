"""The page of superpixels from end to end at a small size, and its command."""

import json
from dataclasses import asdict, fields, replace

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
from asc.show import SuperpixelsSettings, calibration_images, show_superpixels, shown_pictures

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
def settings(checkpoint, tmp_path_factory):
    # 68 is a multiple of the patch size 4, and 64 the nearest one of the checkpoint's 8.
    out = tmp_path_factory.mktemp("shown") / "out"
    return SuperpixelsSettings(
        out=out, size=68, scenes=2, photographs=("coffee",), calibration=3, checkpoint=checkpoint, seed=3
    )


@pytest.fixture(scope="module")
def shown(settings):
    page = show_superpixels(settings)
    assert page == settings.out / "index.html"
    return json.loads((settings.out / "superpixels.json").read_text()), Reader(page.read_text())


def rebuilt(settings, section, neighbourhood):
    """Labels and numbers from the library alone, for the same weights and images."""
    superpixels = asc.SuperpixelConfig(neighbourhood=neighbourhood)
    if section == 0:
        torch.manual_seed(settings.seed)
        model, size = asc.create_model(settings.model, superpixels, image_size=68).eval(), 68
    else:
        model, size = asc.from_timm(settings.checkpoint, superpixels), 64
    pictures = shown_pictures(settings, open_photographs(settings.photographs), size)
    model.calibrate(calibration_images(settings, pictures, size))
    labels = model.superpixels(normalise(np.stack([picture.image_HW3 for picture in pictures])))
    return pictures, labels.numpy(), model


@pytest.mark.parametrize("section", [0, 1])
@pytest.mark.parametrize("neighbourhood", ["global", "spatial"])
@pytest.mark.filterwarnings("ignore::asc.SuperpixelWarning")
def test_recorded_numbers_are_those_of_the_model(shown, settings, section, neighbourhood):
    record = shown[0]["sections"][section]["groupings"][neighbourhood]
    pictures, labels_LBhw, model = rebuilt(settings, section, neighbourhood)
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
    assert record["settings"]["checkpoint"] == str(settings.checkpoint)
    untrained, trained = record["sections"]
    assert (untrained["size"], untrained["patches"], untrained["depth"]) == (68, 17 * 17, 12)
    assert (trained["size"], trained["patches"], trained["depth"]) == (64, 8 * 8, 4)
    assert all(ratio > 0 for part in record["sections"] for ratio in part["time_ratios"].values())


@pytest.mark.filterwarnings("ignore::asc.SuperpixelWarning")
def test_page_shows_every_picture(shown, settings):
    expected = []
    for section in (0, 1):
        grouped = [rebuilt(settings, section, neighbourhood)[:2] for neighbourhood in ("global", "spatial")]
        for index, picture in enumerate(grouped[0][0]):
            image_HW3 = enlarged(picture.image_HW3)
            expected.append(image_HW3)
            for _, labels_LBhw in grouped:
                for block in SHOWN[len(labels_LBhw)]:
                    labels_hw = labels_LBhw[block - 1, index]
                    expected += [draw_boundaries(image_HW3, labels_hw), paint_means(image_HW3, labels_hw)]
    read = shown[1].pictures
    assert len(read) == len(expected) == 3 * (1 + 2 * 2 * 4) + 3 * (1 + 2 * 2 * 2)
    assert all(np.array_equal(got, want) for got, want in zip(read, expected, strict=True))


def test_page_shows_the_recorded_numbers(shown):
    record, read = shown
    for section in record["sections"]:
        assert section["title"] in read.text and section["calibrated_on"] in read.text
        for neighbourhood, grouping in section["groupings"].items():
            assert f"{section['time_ratios'][neighbourhood]:.2f} ({neighbourhood})" in read.text
            for entry in grouping["blocks"]:
                cells = [f"{entry['tokens_mean']:.0f}", str(entry["tokens_min"]), str(entry["tokens_max"])]
                cells += [f"{entry[name]:.0%}" for name in ("kept_share", "largest_share", "single_share")]
                assert " ".join([str(entry["after_blocks"]), *cells, f"{entry['theta']:.3f}"]) in read.text
            for name, counted in grouping["pictures"].items():
                assert name in read.text
                for block in SHOWN[section["depth"]]:
                    tokens, largest = counted[block - 1]["tokens"], counted[block - 1]["largest_share"]
                    assert f" {tokens} token" in read.text and f"largest: {largest:.1%}" in read.text
            assert all(message in read.text for message in grouping["warnings"])


def test_readme_picture_shows_scenes_only(shown, settings):
    sheet = np.asarray(Image.open(settings.out / "superpixels.png"))
    assert sheet.shape[1] == 8 + 4 * (68 + 8)
    scene = Scene(SceneConfig(size=68, seed=3), 1).frame(8).image_HW3
    rows = [y for y in range(len(sheet) - 67) if np.array_equal(sheet[y : y + 68, 8 : 8 + 68], scene)]
    # The second scene is the last row: below it there is only room for its caption.
    assert len(rows) == 1 and len(sheet) - rows[0] < 2 * 68


def test_calibration_scenes_are_not_shown(settings):
    pictures = shown_pictures(settings, {}, 68)
    images_BHW3 = normalise(np.stack([picture.image_HW3 for picture in pictures]))
    calibration = calibration_images(settings, pictures, 68)
    assert len(calibration) == 3
    assert not any(torch.equal(a, b) for a in images_BHW3 for b in calibration)


def test_nothing_unfinished_is_left(shown, settings):
    assert {file.name for file in settings.out.iterdir()} == {"index.html", "superpixels.png", "superpixels.json"}


def test_warnings_of_the_library_are_on_the_page(tmp_path, capsys):
    model = "asc_vit_tiny_patch16"
    page = show_superpixels(
        SuperpixelsSettings(tmp_path, model, size=64, scenes=1, photographs=(), calibration=1, budget=0.12)
    )
    record = json.loads((tmp_path / "superpixels.json").read_text())
    messages = record["sections"][0]["groupings"]["global"]["warnings"]
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


def test_wrong_settings_are_told_in_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert "scenes" in error_line(capsys, "--scenes", 0)
    assert "calibration" in error_line(capsys, "--calibration", 0)
    assert "asc_vit_huge_patch4" in error_line(capsys, "--model", "asc_vit_huge_patch4")
    assert "patch size 4" in error_line(capsys, "--size", 66)
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
