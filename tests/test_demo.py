"""The demo from end to end on very few steps: trained, interrupted, continued, and told on its page."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from test_report import Reader

import asc
from asc.cli import main
from asc.data import Scene, normalise
from asc.demo import DemoSettings, demo_config, held_out_scenes, run_demo
from asc.pretrain.data import open_corpora
from asc.pretrain.run import PretrainTask
from asc.recipes import pretrain as recipes
from asc.report import draw_boundaries, enlarged, paint_means
from asc.run_folder import read_log
from asc.tasks.classify.images import scene_split
from asc.tasks.classify.probes import knn_accuracy, split_features

WHOLE_RECIPE = recipes.demo
STEPS = 4


def small_recipe():
    """The recipe with fewer scenes and images, so that a few steps take seconds."""
    recipe = WHOLE_RECIPE()
    return replace(
        recipe,
        clips=replace(recipe.clips, scenes=24),
        train=replace(recipe.train, batch=8, lr_batch=8, warmup_steps=2),
        watch=replace(recipe.watch, knn_every=2, knn_labelled=60, knn_judged=50, pictures=1, calibration=16),
        machine=replace(recipe.machine, accelerator="cpu", log_every=1),
    )


@pytest.fixture(autouse=True, scope="module")
def _small_recipe():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, "demo", small_recipe)
        yield


def arguments(out):
    return ["demo", "--out", out, "--steps", STEPS, "--seed", 3, "--scenes", 2, "--photographs", "coffee"]


def run_main(*argv):
    return main([str(word) for word in argv])


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return DemoSettings(tmp_path_factory.mktemp("demo") / "out", STEPS, seed=3, scenes=2, photographs=("coffee",))


@pytest.fixture(scope="module")
def demo(settings):
    page = run_demo(settings)
    assert page == settings.out / "index.html"
    return json.loads((settings.out / "demo.json").read_text()), Reader(page.read_text())


@pytest.fixture(scope="module")
def encoders(demo, settings):
    """Both encoders, each built without the demo's help."""
    config = demo_config(settings)
    corpora = open_corpora(config.data, config.clips, config.train.seed, settings.out / "found")
    task = PretrainTask(config, corpora, None)
    task.start(torch.device("cpu"))
    return {"untrained": task.siamese.encoder.eval(), "trained": asc.load(settings.out / "run" / "encoder")}


def held_out(config, count):
    scenes = [Scene(held_out_scenes(config), index) for index in range(count)]
    return [scene.frame(config.clips.scene.frames // 2).image_HW3 for scene in scenes]


# --- What it says is so -----------------------------------------------------------------------------------


def test_knn_accuracies_are_those_of_the_two_encoders_and_of_the_pixels(demo, settings, encoders):
    config = demo_config(settings)
    watch = config.watch
    split = scene_split(held_out_scenes(config), watch.knn_labelled, watch.knn_judged)
    for name, encoder in encoders.items():
        train, test = split_features(encoder, split)
        accuracy = knn_accuracy(train, split.train.labels_B, test, split.test.labels_B, watch.knn_neighbours)
        assert demo[0]["training"]["knn"][name] == pytest.approx(accuracy), name

    def votes(distances):
        return np.exp((1 - distances) / 0.07)

    judge = KNeighborsClassifier(watch.knn_neighbours, weights=votes, metric="cosine")
    judge.fit(split.train.images_B3HW.flatten(1).numpy(), split.train.labels_B.numpy())
    accuracy = judge.score(split.test.images_B3HW.flatten(1).numpy(), split.test.labels_B.numpy())
    assert demo[0]["training"]["knn"]["pixels"] == pytest.approx(accuracy)


def test_shown_scenes_are_the_first_of_those_that_are_judged(settings):
    config = demo_config(settings)
    judged = scene_split(held_out_scenes(config), 1, 2).test.images_B3HW
    assert torch.equal(normalise(np.stack(held_out(config, 2))), judged)
    assert held_out_scenes(config).split == "test" and held_out_scenes(config).seed != config.train.seed


@pytest.mark.parametrize("name", ["untrained", "trained"])
@pytest.mark.filterwarnings("ignore::asc.SuperpixelWarning")
def test_recorded_groupings_are_those_of_the_encoders(demo, settings, encoders, name):
    record = demo[0]["galleries"]["Superpixels of held-out scenes"][name]
    images_BHW3 = np.stack(held_out(demo_config(settings), 2))
    labels_LBhw = encoders[name].superpixels(normalise(images_BHW3)).numpy()
    for index, counted in enumerate(record["pictures"].values()):
        assert [entry["tokens"] for entry in counted] == [labels.max() + 1 for labels in labels_LBhw[:, index]]
    for entry, stats in zip(record["blocks"], encoders[name].diagnostics().values(), strict=True):
        assert {key: entry[key] for key in asdict(stats)} == pytest.approx(asdict(stats))


def test_the_record_tells_how_the_numbers_came_about(demo, settings):
    record, _ = demo
    assert record["seed"] == 3 and record["versions"]["torch"] == torch.__version__
    assert set(record["settings"]) == {field.name for field in fields(DemoSettings)}
    training, log = record["training"], read_log(settings.out / "run")
    assert training["steps"] == STEPS and training["config"]["train"]["seed"] == 3
    assert set(training["knn_by_step"]) == {"0", "2", "4"}
    assert training["parameters"] == sum(p.numel() for p in asc.load(settings.out / "run" / "encoder").parameters())
    last = [line for line in log if "loss" in line][-1]
    assert training["tokens_share"] == last["tokens_share"]
    assert [block["tokens_mean"] for block in training["blocks"]] == [last[f"block_0{k}/tokens_mean"] for k in (0, 1)]


# --- The page ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::asc.SuperpixelWarning")
def test_page_shows_curves_and_every_scene_before_and_after(demo, settings, encoders):
    plots, shown = demo[1].pictures[:4], demo[1].pictures[4:]
    assert all(plot.shape[1] > 800 and (plot[0, 0] == 255).all() and (plot < 128).any() for plot in plots)
    images = held_out(demo_config(settings), 2)
    expected = []
    grouped = [encoders[name].superpixels(normalise(np.stack(images))).numpy() for name in ("untrained", "trained")]
    for index, image_HW3 in enumerate(map(enlarged, images)):
        expected.append(image_HW3)
        for labels_LBhw in grouped:
            for labels_hw in labels_LBhw[:2, index]:  # after the two blocks that merge
                expected += [draw_boundaries(image_HW3, labels_hw), paint_means(image_HW3, labels_hw)]
    assert all(np.array_equal(got, want) for got, want in zip(shown, expected, strict=False))
    # The photograph takes as much room as each of the scenes.
    assert len(shown) == len(expected) // 2 * 3


def test_page_shows_the_recorded_numbers(demo):
    record, read = demo
    training = record["training"]
    for name, title in {"untrained": "untrained network", "pixels": "raw pixels", "trained": "after training"}.items():
        assert f"{title} {training['knn'][name]:.1%}" in read.text
    assert f"to {training['knn']['trained']:.1%};" in read.text and "4 steps on 24 unlabelled" in read.text
    assert f"parameters {training['parameters']:,}".replace(",", " ") in read.text
    assert f"{training['tokens_share']:.0%} of 64 patches" in read.text
    for gallery in record["galleries"].values():
        for grouping in gallery.values():
            for entry in grouping["blocks"]:
                assert f"{entry['after_blocks']} {entry['tokens_mean']:.0f} {entry['tokens_min']} " in read.text
            assert all(name in read.text for name in grouping["pictures"])
            assert all(message in read.text for message in grouping["warnings"])


def test_no_photographs_are_fine_and_warnings_of_the_run_are_on_the_page(demo, settings, capsys):
    log, record = settings.out / "run" / "log.jsonl", settings.out / "demo.json"
    kept = {file: file.read_text() for file in (log, record)}
    log.write_text(kept[log] + json.dumps({"step": STEPS, "warning": "something was <odd>"}) + "\n")
    text = Reader(run_demo(replace(settings, photographs=())).read_text()).text
    assert "something was <odd>" in text and "something was <odd>" not in demo[1].text
    again = json.loads(record.read_text())
    assert list(again["galleries"]) == ["Superpixels of held-out scenes"]
    # The run was finished: nothing was trained again.
    assert again["training"] == demo[0]["training"] | {
        "warnings": [*demo[0]["training"]["warnings"], "something was <odd>"]
    }
    for file, content in kept.items():
        file.write_text(content)
    knn = demo[0]["training"]["knn"]
    printed = capsys.readouterr().out
    assert f"{knn['untrained']:.1%} before training, {knn['trained']:.1%} after, {knn['pixels']:.1%} with" in printed
    assert str(settings.out / "index.html") in printed


# --- Interruptions and mistakes ---------------------------------------------------------------------------


def test_a_signal_stops_it_and_the_same_command_continues_to_the_same_encoder(
    demo, settings, tmp_path, monkeypatch, capsys
):
    after_step = PretrainTask.after_step

    def signalled(task, progress):
        after_step(task, progress)
        if progress == 0.5:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(PretrainTask, "after_step", signalled)
    assert run_main(*arguments(tmp_path)) == 128 + signal.SIGTERM
    assert "at step 2 of 4; all is saved, the same command continues" in capsys.readouterr().err
    assert not (tmp_path / "index.html").exists()
    monkeypatch.setattr(PretrainTask, "after_step", after_step)
    assert run_main(*arguments(tmp_path)) == 0
    files = [out / "run" / "encoder" / "encoder.safetensors" for out in (tmp_path, settings.out)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert json.loads((tmp_path / "demo.json").read_text())["training"]["knn"] == demo[0]["training"]["knn"]


def error_line(capsys, *argv):
    """The one line that a wrong use prints."""
    assert run_main("demo", *argv) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and printed.err.endswith("\n")
    assert printed.out == ""
    return printed.err


def test_a_run_with_other_settings_is_left_alone(demo, settings, capsys):
    before = {file: file.read_bytes() for file in sorted(settings.out.rglob("*")) if file.is_file()}
    error = error_line(capsys, "--out", settings.out, "--steps", 5, "--seed", 3)
    assert "train.steps was 4 and is now 5" in error and "--out" in error
    assert {file: file.read_bytes() for file in sorted(settings.out.rglob("*")) if file.is_file()} == before


def test_wrong_settings_are_told_in_one_line_before_any_work(tmp_path, capsys):
    (tmp_path / "file").touch()
    out = tmp_path / "new"
    assert "scenes must be at least 1" in error_line(capsys, "--out", out, "--scenes", 0)
    assert "steps must be at least 1" in error_line(capsys, "--out", out, "--steps", 0)
    assert "seed" in error_line(capsys, "--out", out, "--seed", -1)
    assert "seed" in error_line(capsys, "--out", out, "--seed", 2**32 - 1)
    assert str(tmp_path / "file") in error_line(capsys, "--out", tmp_path / "file")
    assert str(tmp_path / "file") in error_line(capsys, "--out", tmp_path / "file" / "below")
    with pytest.raises(ValueError, match="nobody"):
        run_demo(DemoSettings(out, photographs=("nobody",)))
    assert not out.exists()


def test_without_settings_it_is_the_recipe(monkeypatch):
    monkeypatch.setattr(recipes, "demo", WHOLE_RECIPE)
    config = demo_config(DemoSettings())
    assert replace(config, out=WHOLE_RECIPE().out) == WHOLE_RECIPE()


# --- The command line -------------------------------------------------------------------------------------


def test_help_of_the_program():
    shown = subprocess.run([sys.executable, "-m", "asc.cli", "--help"], capture_output=True, text=True, check=True)
    assert all(command in shown.stdout for command in ("demo", "superpixels", "pretrain")) and shown.stderr == ""


def test_help_names_every_setting(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["demo", "--help"])
    shown = capsys.readouterr().out
    assert leaving.value.code == 0
    for field in fields(DemoSettings):
        assert f"--{field.name.replace('_', '-')}" in shown


def test_an_unknown_command_is_a_wrong_use(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["dance"])
    assert leaving.value.code == 2
