"""The search for settings: what is searched, what it is judged by, and that it survives being killed and shared."""

import csv
import json
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pretrain_runs
import pytest
import torch
import videos
from PIL import Image
from tqdm import tqdm

from asc.cli import _parse, main
from asc.data.clips import FolderSettings
from asc.pretrain.data import DataConfig
from asc.pretrain.run import PretrainConfig
from asc.recipes.pretrain import RECIPES, small
from asc.run_folder import read_log
from asc.settings import parse_command, value_of
from asc.tune.page import importance, read_rows
from asc.tune.recipe import read_recipe
from asc.tune.run import TuneSettings, run_tune
from asc.tune.run import main as main_without_tyro
from asc.tune.space import make_space
from asc.tune.study import JOURNAL, OWNER, Choice, Claim, Job, Search, is_abandoned
from asc.tune.trial import run_seed
from asc.tune.validation import LabelledImages, labelled_sets, opened_clips

pretrain_runs.PROCESSES.set_forkserver_preload(["pretrain_runs", "asc.tune.run"])

STEPS = 12
TINY = (
    "model.width=32 model.depth=3 model.heads=2 model.image_size=16 model.superpixels.blocks=all augment.size=16 "
    "augment.blur_kernel=5 siamese.projection=16 siamese.hidden=32 siamese.momentum=0.9 "
    f"train.steps={STEPS} train.batch=8 train.lr_batch=8 train.warmup_steps=3 clips.scenes=20 clips.scene.size=24 "
    "watch.calibration=16 machine.log_every=1 machine.checkpoint_every=4"
).split()


def tiny(out: Path, *space: str, **changes: Any) -> TuneSettings:
    """A search of a second a trial."""
    settings = TuneSettings(out, space=(*space, *TINY), scenes=60, val_share=0.2, checks=2, loaders=0, device="cpu")
    return replace(settings, **changes)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Like the children's: sums by several threads are others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def search_in_child(settings: TuneSettings) -> None:
    torch.set_num_threads(1)
    os.setpgrp()
    tqdm.set_lock(threading.RLock())
    run_tune(settings)


def start(settings: TuneSettings) -> Any:
    process = pretrain_runs.PROCESSES.Process(target=search_in_child, args=(settings,))
    process.start()
    return process


def results(out: Path) -> dict[int, dict[str, Any]]:
    """What lies in the folders of the trials."""
    files = sorted((out / "trials").glob("*/result.json"))
    return {int(file.parent.name): json.loads(file.read_text()) for file in files}


def lines_up_to(folder: Path, step: int) -> list[dict[str, Any]]:
    return [line for line in read_log(folder) if line["step"] <= step]


def points_tried(out: Path) -> list[str]:
    return sorted(json.dumps(trial.params, sort_keys=True) for trial in Search(out, None).trials())


# --- A whole search ---------------------------------------------------------------------------------------

GRID = ("lr=1e-3,3e-3", "budget=0.6,0.8")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search that nothing interrupted."""
    out = tmp_path_factory.mktemp("finished")
    run_tune(tiny(out, *GRID))
    return out


def test_a_search_killed_in_the_middle_goes_on_where_it_was(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny(tmp_path / "killed", *GRID)
    second = settings.out / "trials" / "0001" / "seed_0"
    process = start(settings)
    while not list(second.glob("checkpoints/step_*04.pt")):
        assert process.is_alive()
        time.sleep(0.003)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    newest = max(int(file.stem.split("_")[1]) for file in second.glob("checkpoints/step_*.pt"))
    assert 0 < newest < STEPS
    before, first = lines_up_to(second, newest), settings.out / "trials" / "0000" / "result.json"
    untouched = first.stat().st_mtime_ns

    run_tune(settings)
    said = capsys.readouterr().out
    assert "trial 1 goes on" in said and f"continuing {second} at step {newest} of {STEPS}" in said
    # The time that every step took stands in the log: these steps were not run again.
    assert lines_up_to(second, newest) == before and any("images_per_second" in line for line in before)
    assert first.stat().st_mtime_ns == untouched
    assert len(points_tried(settings.out)) == len(set(points_tried(settings.out))) == 4
    for number, whole in results(finished).items():
        continued = results(settings.out)[number]
        for name in ("point", "knn", "knn_by_set", "validation_loss", "loss", "steps"):
            assert continued[name] == whole[name]


def test_the_best_trial_is_the_one_with_the_highest_accuracy(finished: Path) -> None:
    trials = results(finished)
    assert {(trial["point"]["lr"], trial["point"]["budget"]) for trial in trials.values()} == {
        (lr, budget) for lr in (1e-3, 3e-3) for budget in (0.6, 0.8)
    }
    highest = max(trial["knn"] for trial in trials.values())
    study = Search(finished, None).study
    assert study.best_value == highest == trials[study.best_trial.number]["knn"]
    rows = list(csv.DictReader((finished / "trials.csv").open()))
    assert [float(row["knn"]) for row in rows] == sorted((trial["knn"] for trial in trials.values()), reverse=True)
    best = rows[0]
    page = (finished / "index.html").read_text()
    assert f"Best: trial {best['trial']} with kNN accuracy {highest:.1%}" in page
    for trial in trials.values():
        assert trial["settings"] == {
            "train.lr": trial["point"]["lr"],
            "model.superpixels.budget": trial["point"]["budget"],
        }
        for message in trial["warnings"]:
            assert message.split(":")[0] in page
    assert page.count("<img") == 3  # the history, and one picture for each of the two settings


def test_a_trial_is_judged_by_scenes_and_clips_that_were_held_out(finished: Path) -> None:
    trial = results(finished)[0]
    known, judged = trial["judged"]["scenes"]
    assert known + judged == 60 and 8 <= judged <= 16  # a fifth of each of ten classes, at least one
    # 20 clips of a file each, of which a fifth is held out: the run saw the other 16.
    config = json.loads((finished / "trials" / "0000" / "seed_0" / "config.json").read_text())
    assert config["held_out"]["clips"] == [4]
    log = read_log(finished / "trials" / "0000" / "seed_0")
    losses = [line["validation_loss"] for line in log if "validation_loss" in line]
    assert len(losses) == 3 and losses[-1] == trial["validation_loss"] and losses[0] != losses[-1]


def test_a_finished_search_is_not_run_again(finished: Path) -> None:
    times = {file: file.stat().st_mtime_ns for file in finished.glob("trials/*/result.json")}
    assert run_tune(tiny(finished, *GRID)) == run_tune(tiny(finished, *GRID, minutes=0)) == finished / "index.html"
    assert {file: file.stat().st_mtime_ns for file in finished.glob("trials/*/result.json")} == times
    with pytest.raises(ValueError, match=r"other settings: space was \['lr=0.001,0.003', .* is now \['lr=0.001,0.004'"):
        run_tune(tiny(finished, "lr=1e-3,4e-3", GRID[1]))


def test_the_best_values_become_a_recipe_that_pretrain_runs(finished: Path, tmp_path: Path) -> None:
    best = max(results(finished).values(), key=lambda trial: (trial["knn"], -trial["trial"]))
    assert main(["tune", "--out", str(finished), "--export", "best"]) == 0
    file = finished / "best.json"
    config = read_recipe(file)
    assert config.train.lr == best["point"]["lr"] and config.model.width == 32
    assert not any(name.startswith("machine.") for name in json.loads(file.read_text())["settings"])
    few = ["--train.steps", "2", "--watch.knn-labelled", "20", "--watch.knn-judged", "10", "--watch.pictures", "0"]
    assert main(["pretrain", str(file), "--out", str(tmp_path), *few, "--machine.accelerator", "cpu"]) == 0
    ran = json.loads((tmp_path / "config.json").read_text())
    assert ran["train"]["lr"] == best["point"]["lr"] and ran["train"]["steps"] == 2
    assert ran["model"]["superpixels"]["budget"] == best["point"]["budget"]
    assert (tmp_path / "encoder" / "encoder.safetensors").is_file()


def test_the_command_that_is_told_works_where_the_folder_has_a_blank(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my search's"
    shutil.copytree(finished, folder)
    assert main(["tune", "--out", str(folder), "--export", "best"]) == 0
    told = capsys.readouterr().out.strip().partition("run it: ")[2]
    assert shlex.split(told) == ["asc", "pretrain", str(folder / "best.json")]


def test_two_processes_share_one_search(tmp_path: Path) -> None:
    settings = tiny(tmp_path, "lr=1e-3,2e-3", "weight_decay=0.01,0.1", "budget=0.7")
    processes = [start(settings), start(settings)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(points_tried(tmp_path)) == len(set(points_tried(tmp_path))) == len(results(tmp_path)) == 4
    owners = {json.loads(file.read_text())["process"] for file in tmp_path.glob(f"trials/*/{OWNER}")}
    assert owners == {process.pid for process in processes}


def test_workers_of_one_command_share_the_work_and_its_settings(tmp_path: Path) -> None:
    run_tune(tiny(tmp_path, "lr=1e-3,2e-3", "budget=0.7", workers=2))
    assert sorted(trial["point"]["lr"] for trial in results(tmp_path).values()) == [1e-3, 2e-3]


def test_a_trial_that_breaks_is_told_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--out", str(tmp_path), "--device", "cpu", "--loaders", "0", "--scenes", "60", "--checks", "1"]
    space = ["--space", "lr=1e-3,1e30", "budget=0.3,0.7", *TINY]
    assert main_without_tyro([*words, *space, "--val-share", "0.2", "--plain"]) == 0
    by_lr = {trial["point"]["lr"]: trial for trial in results(tmp_path).values()}
    assert "the loss is nan" in by_lr[1e30]["failed"]
    # This one is the plain network, for which the budget is nothing to search.
    assert by_lr[1e-3]["knn"] is not None and by_lr[1e-3]["tokens_share"] is None
    said = capsys.readouterr().out
    assert "best of 2" in said and "has no superpixels: budget, model.superpixels.blocks" in said
    page = (tmp_path / "index.html").read_text()
    assert "Trials that failed" in page and "lr 1e+30" in page


# --- What it is judged by ---------------------------------------------------------------------------------


def labelled_folder(folder: Path, images: int) -> Path:
    """Red and blue images to learn from, and test images that nobody may look at."""
    draw = np.random.default_rng(0)
    for label, colour in (("red", 0), ("blue", 2)):
        for part in ("train", "test", "val"):
            (folder / part / label).mkdir(parents=True)
        for number in range(images):
            pixels = draw.integers(0, 90, (20, 24, 3)).astype(np.uint8)
            pixels[..., colour] += 120
            Image.fromarray(pixels).save(folder / "train" / label / f"{number}.png")
        for part in ("test", "val"):
            (folder / part / label / "secret.png").write_bytes(b"no image")
    return folder


def test_test_images_are_never_opened_and_the_mean_over_folders_counts(tmp_path: Path) -> None:
    folders = (labelled_folder(tmp_path / "one", 20), labelled_folder(tmp_path / "two", 40))
    touched: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.scandir", "os.listdir") and arguments and isinstance(arguments[0], str | Path):
            touched.append(str(arguments[0]))

    sys.addaudithook(note)
    settings = tiny(
        tmp_path / "out", "lr=1e-3,3e-3", "budget=0.7", images=folders, trials=1, val_share=0.05, seeds=(0, 3)
    )
    run_tune(settings)
    seen = list(touched)
    for folder in folders:
        assert any(name.startswith(str(folder / "train" / "red")) for name in seen)
        assert not any(name.startswith((str(folder / "test"), str(folder / "val"))) for name in seen)
    trial = results(settings.out)[0]
    assert trial["judged"] == {"one": [38, 2], "two": [76, 4]}
    assert trial["knn"] == pytest.approx(np.mean(list(trial["knn_by_set"].values())))
    assert trial["knn"] == pytest.approx(np.mean([trial["knn_by_seed"][seed] for seed in ("0", "3")]))
    assert trial["knn_by_set"].keys() == {"one", "two"} and trial["knn"] == 1.0  # colours are easy


def test_known_and_judged_images_share_none_and_both_have_all_classes(tmp_path: Path) -> None:
    folder = labelled_folder(tmp_path, 20)
    (split,) = labelled_sets(LabelledImages((folder,), 0.1, 1000, 0), 16, small().clips.scene).values()
    assert (
        len(split.train.labels_B) == 36 and split.test.labels_B.tolist().count(0) == 2 == len(split.test.labels_B) / 2
    )
    known = {image.numpy().tobytes() for image in split.train.images_B3HW}
    assert len(known) == 36 and not any(image.numpy().tobytes() in known for image in split.test.images_B3HW)


def folder_of_videos(folder: Path, count: int) -> tuple[tuple[str, ...], DataConfig]:
    """Videos that are cut into three clips each."""
    folder.mkdir()
    for number in range(count):
        videos.write(folder / f"{number}.mp4", 12)
    return (str(folder),), DataConfig(folder=FolderSettings(fps=25, clip_length=0.16, short_side=48, crop=None))


def test_clips_are_held_out_by_whole_files(tmp_path: Path) -> None:
    data, config = folder_of_videos(tmp_path / "videos", 8)
    learned, held, whole = opened_clips(data, config, 0, tmp_path / "found", 0.2)
    files = [{part.source(clip) for clip in range(len(part))} for part in (learned.clips[0], held[0])]
    assert not files[0] & files[1] and len(files[0] | files[1]) == 8 and not whole
    assert len(learned.clips[0]) + len(held[0]) == 24 and len(held[0]) == 6  # of 8 files of 3 clips, 2
    assert [videos.number_of(held[0].read(clip, [0])[0]) for clip in range(3)] == [0, 4, 8]  # read from their places


def test_a_corpus_of_one_file_is_named_and_learned_from_whole(tmp_path: Path) -> None:
    data, config = folder_of_videos(tmp_path / "videos", 1)
    learned, held, whole = opened_clips(data, config, 0, tmp_path / "found", 0.2)
    assert len(learned.clips[0]) == 3 and not held and whole == list(data)


# --- What is searched -------------------------------------------------------------------------------------


def with_threshold(kind: str) -> tuple[str, ...]:
    return ("paper", f"model.superpixels.threshold={kind}")


@pytest.mark.parametrize(
    ("space", "plain", "sizes"),
    [
        (("paper",), False, {"lr": 5, "weight_decay": 4, "batch": 4, "tau": 4, "budget": 5}),
        (("paper",), True, {"lr": 5, "weight_decay": 4, "batch": 4}),
        (with_threshold("fixed"), False, {"lr": 5, "weight_decay": 4, "batch": 4, "theta": 4}),
        (with_threshold("learnable"), False, {"lr": 5, "weight_decay": 4, "batch": 4, "theta": 4, "tau": 4}),
        (("paper", "batch=512", "lr=1e-3,2e-3"), False, {"lr": 2, "weight_decay": 4, "tau": 4, "budget": 5}),
        (("budget=0.3,0.4", "lr=1e-3,2e-3"), True, {"lr": 2}),
    ],
)
def test_the_papers_grid_holds_what_makes_a_difference(
    space: tuple[str, ...], plain: bool, sizes: dict[str, int]
) -> None:
    made = make_space(space, replace(RECIPES["ablation"](), plain=plain), plain)
    assert {name: len(values.choices) for name, values in made.dimensions.items()} == sizes
    points = [json.dumps(point, sort_keys=True) for point in made.points(0)]
    assert len(points) == len(set(points)) == made.size == np.prod(list(sizes.values()))


def test_values_reach_the_run_in_their_types() -> None:
    texts = ["model.superpixels.blocks=0+1,all", "train.clip=none,1.0", "model.superpixels.center=true,false"]
    space = make_space(["lr=1e-4..1e-2:log", "model.registers=0..4", *texts], small(), False)
    point = {"lr": 5e-4, "model.registers": 3, "model.superpixels.blocks": "0+1", "train.clip": None}
    config = space.config(point | {"model.superpixels.center": True})
    assert isinstance(config, PretrainConfig) and config.model.superpixels is not None
    assert config.model.superpixels.blocks == (0, 1) and config.model.superpixels.center is True
    assert config.train.clip is None and config.train.lr == 5e-4 and config.model.registers == 3
    assert space.size is None and all(value_of(space.base, name) is not None for name in ("train.lr", "model.width"))


def test_a_larger_batch_keeps_the_learning_rate_and_the_clips_seen() -> None:
    recipe = small()
    config = make_space(["paper"], recipe, False).config({"lr": 0.003, "batch": 1024})
    train = config.train
    assert train.lr * train.batch / train.lr_batch == 0.003  # as the loop computes it
    assert recipe.train.steps is not None and train.steps is not None
    assert train.steps * train.batch == recipe.train.steps * recipe.train.batch
    assert train.warmup_steps == 50 and recipe.train.warmup_steps == 200


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lr"], "space: 'lr' is neither paper nor of the form"),
        (["lr=fast,1e-3"], "space: lr cannot be 'fast'; it must be a number"),
        (["lr=1e-3,0.001"], "lr has the same value twice"),
        (["lr=1e-3,2e-3", "train.lr=5e-3"], "lr is named twice"),
        (["lr=1e-2..1e-4"], "the first number of a range must be the smaller one"),
        (["lr=0..1e-2:log"], "a :log range begins above 0"),
        (["lr=1e-4..1e-2:linear"], "behind a range only :log may stand"),
        (["lr=1e-4..1e-2"], "lr is a range, and a grid needs values"),
        (["train.speed=1,2"], "there is no setting train.speed: 'speed' is none of"),
        (["model.superpixels=1,2"], "model.superpixels is a group of settings"),
        (["model.pool=mean,size"], "model.pool cannot be 'mean'; it must be superpixel, size, class"),
        (["train.batch=8.5,9"], "train.batch cannot be '8.5'; it must be a whole number"),
        (["budget=0.4,1.5"], "space: budget=1.5: "),
        (["weight_decay=-1,0.1"], "space: weight_decay=-1.0: train.weight_decay must be a number of at least 0"),
        (["theta=0.1,0.2"], "theta makes no difference here"),
        (["train.seed=0,1"], "train.seed is given by --seeds"),
        (["machine.log_every=1,2"], "machine.log_every changes nothing that is learned"),
        (["lr=1e-3"], "nothing is searched"),
    ],
)
def test_mistakes_in_the_space_name_the_setting(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "--out", str(tmp_path / "out"), "--space", *words]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recipe", "huge"], "recipe must be one of demo, small"),
        (["--sampler", "tpe"], "the sampler tpe has no end of its own: give --trials"),
        (["--val-share", "1.5"], "val_share must lie between 0 and 1"),
        (["--images", "nowhere"], "images: nowhere has no labelled images in train/<class>/"),
        (["--export", "best"], "there is no search in"),
    ],
)
def test_other_mistakes_are_told_in_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_without_tyro(["--out", str(tmp_path), *words]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1
    assert not (tmp_path / JOURNAL).exists()  # the corrected command is not held to the mistake


def test_without_optuna_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["tune", "--trials", "1"]) == 2
    assert "pip install 'adaptive-superpixel-coding[tune]'" in capsys.readouterr().err


def test_both_command_lines_read_the_same_settings() -> None:
    words = ["--space", "paper", "batch=512", "--seeds", "0", "1", "--sampler", "tpe", "--trials", "9", "--plain"]
    assert parse_command(TuneSettings, "asc", words) == _parse(["tune", *words])
    assert parse_command(TuneSettings, "asc", []) == _parse(["tune"]) == TuneSettings()


# --- How points are chosen and taken ----------------------------------------------------------------------


def rehearsed(out: Path, choice: Choice, pruner: Any = "none") -> list[dict[str, Any]]:
    """The points of a search whose trials take no time: the nearer to lr 3e-3, the better."""
    search = Search(out, {"name": "rehearsal"}, pruner)
    points = []
    while isinstance(job := search.take(choice), Job):
        with job.claim:
            points.append(job.point)
            search.finish(job.number, 1 - abs(job.point["lr"] - 3e-3))
    return points


@pytest.mark.parametrize("sampler", ["grid", "tpe", "random"])
def test_no_sampler_tries_a_point_twice_and_all_find_the_end(tmp_path: Path, sampler: Any) -> None:
    space = make_space(["lr=1e-3,2e-3,3e-3,4e-3", "weight_decay=0.01,0.1,0.2"], small(), False)
    points = rehearsed(tmp_path, Choice(space, sampler, 0, 100))
    assert sorted(point["lr"] * 1000 + point["weight_decay"] for point in points) == sorted(
        lr + decay for lr in (1, 2, 3, 4) for decay in (0.01, 0.1, 0.2)
    )


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_samplers_stay_in_their_ranges_and_end_with_the_trials(tmp_path: Path, sampler: Any) -> None:
    space = make_space(["lr=1e-4..1e-2:log", "model.registers=0..4"], small(), False)
    points = rehearsed(tmp_path, Choice(space, sampler, 0, 15))
    assert len(points) == 15
    assert all(1e-4 <= point["lr"] <= 1e-2 and point["model.registers"] in range(5) for point in points)
    again = rehearsed(tmp_path / "again", Choice(space, sampler, 0, 15))
    assert again == points  # the search's own draws have a seed


def test_what_matters_is_found_by_the_importance(tmp_path: Path) -> None:
    space = make_space(["lr=1e-3,2e-3,3e-3,4e-3", "weight_decay=0.01,0.05,0.1,0.2"], small(), False)
    rehearsed(tmp_path, Choice(space, "grid", 0, None))
    shares = importance(Search(tmp_path, None))
    assert max(shares, key=shares.__getitem__) == "lr" and sum(shares.values()) == pytest.approx(1)


def test_a_trial_that_lags_behind_is_given_up(tmp_path: Path) -> None:
    space = make_space(["lr=1e-4..1e-2:log"], small(), False)
    search = Search(tmp_path, {}, "median")
    verdicts = []
    for knn in (0.5, 0.5, 0.5, 0.5, 0.5, 0.1, 0.9):
        job = search.take(Choice(space, "random", 0, 7))
        assert isinstance(job, Job)
        trial = search.trial(job.number)
        with job.claim:
            trial.report(knn, 1)
            verdicts.append(trial.should_prune())
            search.finish(job.number, knn, given_up=verdicts[-1])
    assert verdicts == [False, False, False, False, False, True, False]
    assert [row.state for row in sorted(read_rows(search), key=lambda row: row.number)][5] == "given up"


def seed_parts(tmp_path: Path, *space: str) -> tuple[PretrainConfig, Any, Any]:
    config = make_space(["lr=1e-3,2e-3", *space, *TINY], RECIPES["ablation"](), False).config({"lr": 1e-3})
    config = replace(config, out=tmp_path / "run", machine=replace(config.machine, accelerator="cpu", workers=0))
    clips = opened_clips(("scenes",), config.clips, 0, tmp_path / "found", 0.2)
    return config, clips, labelled_sets(LabelledImages((), 0.2, 100, 60), 16, config.clips.scene)


def test_a_run_that_is_given_up_ends_at_that_check(tmp_path: Path) -> None:
    reports = []

    def give_up(check: int, knn: float) -> bool:
        reports.append((check, knn))
        return check == 2

    record = run_seed(*seed_parts(tmp_path, "budget=0.7"), 4, give_up)
    assert record["given_up"] and record["steps"] == STEPS // 2 and [check for check, _ in reports] == [1, 2]
    assert [record["knn_by_step"][step] for step in (STEPS // 4, STEPS // 2)] == [knn for _, knn in reports]


def test_a_threshold_that_is_searched_is_the_one_the_network_runs_with(tmp_path: Path) -> None:
    parts = seed_parts(tmp_path, "model.superpixels.threshold=fixed", "theta=0.5")
    run_seed(*parts, 1, lambda check, knn: False)
    thetas = {line["block_00/theta"] for line in read_log(tmp_path / "run") if "block_00/theta" in line}
    assert [pytest.approx(theta, abs=1e-6) for theta in thetas] == [0.5]


# --- What a crash or another computer leaves behind -------------------------------------------------------


def test_a_trial_belongs_to_its_owner_until_that_is_gone(tmp_path: Path) -> None:
    assert is_abandoned(tmp_path, 60)  # killed before it could write its name
    with Claim(tmp_path):
        assert not is_abandoned(tmp_path, 0)
    assert is_abandoned(tmp_path, 60)
    # Another computer, whose locks do not reach this one: the signs of life decide.
    (tmp_path / OWNER).write_text(json.dumps({"host": "elsewhere", "process": 1}))
    assert not is_abandoned(tmp_path, 60)
    os.utime(tmp_path / OWNER, (time.time() - 61, time.time() - 61))
    assert is_abandoned(tmp_path, 60)


def test_a_line_that_a_crash_cut_off_does_not_spoil_the_search(tmp_path: Path) -> None:
    space = make_space(["lr=1e-3,2e-3,3e-3"], small(), False)
    assert len(rehearsed(tmp_path, Choice(space, "grid", 0, 1))) == 1
    with (tmp_path / JOURNAL).open("a") as stream:
        stream.write('{"op_code": 4, "worker_')
    assert len(rehearsed(tmp_path, Choice(space, "grid", 0, None))) == 2
    assert len(set(points_tried(tmp_path))) == 3
