"""Pre-training as a user runs it: to the end, interrupted, continued, broken, in several processes."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pretrain_runs
import pytest
import torch
import videos
from PIL import Image

import asc
from asc.cli import main
from asc.data import Scene, SceneConfig, normalise
from asc.pretrain import run
from asc.pretrain.run import PretrainTask, pretrain
from asc.run_folder import RunFolder, read_log
from asc.settings import exit_code
from asc.train import TrainingStoppedError


def assert_same(one: object, other: object) -> None:
    """Bit by bit, through any nesting."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            if key != "seconds":
                assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def last_step(out: Path) -> int:
    try:
        return max((line["step"] for line in read_log(out)), default=-1)
    except FileNotFoundError:
        return -1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_killed_three_times_ends_with_the_very_same_weights(tmp_path: Path, workers: int) -> None:
    machine = {"workers": workers}
    whole = pretrain_runs.start(pretrain_runs.tiny(tmp_path / "whole", train={"steps": 24}, machine=machine))
    killed = pretrain_runs.tiny(tmp_path / "killed", train={"steps": 24}, machine=machine)
    draw = random.Random(workers)
    for after in sorted(draw.sample(range(2, 22), 3)):
        process = pretrain_runs.start(killed)
        while last_step(killed.out) < after:
            assert process.is_alive()
            time.sleep(0.003)
        time.sleep(draw.uniform(0.0, 0.03))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    final = pretrain_runs.start(killed)
    for process in (whole, final):
        process.join()
        assert process.exitcode == 0
    assert_same(pretrain_runs.newest_state(tmp_path / "whole"), pretrain_runs.newest_state(killed.out))
    encoders = [(tmp_path / name / "encoder" / "encoder.safetensors").read_bytes() for name in ("whole", "killed")]
    assert encoders[0] == encoders[1]
    losses = [[line["loss"] for line in read_log(tmp_path / name) if "loss" in line] for name in ("whole", "killed")]
    assert len(losses[0]) == 24 and losses[0] == losses[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_signal_to_all_processes_saves_and_the_same_command_continues(tmp_path: Path, workers: int) -> None:
    machine = {"checkpoint_every": 1000, "workers": workers}
    config = pretrain_runs.tiny(tmp_path / "run", train={"steps": 400}, machine=machine)
    process = pretrain_runs.start(config)
    while last_step(config.out) < 5:
        assert process.is_alive()
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGTERM)
    process.join()
    assert process.exitcode == 128 + signal.SIGTERM
    stopped_at = pretrain_runs.newest_state(config.out)["state"]["step"]
    assert last_step(config.out) == stopped_at >= 5
    with pytest.raises(TrainingStoppedError, match=f"step {stopped_at + 2} of 400"):
        pretrain(pretrain_runs.tiny(tmp_path / "run", train={"steps": 400}, machine={"stop_after": 2}))


def test_a_finished_run_leaves_everything_a_user_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = pretrain_runs.tiny(tmp_path / "run", machine={"keep_every": 6, "keep": 1})
    encoder = asc.load(pretrain(config))
    assert "load it with asc.load" in capsys.readouterr().out
    state = pretrain_runs.newest_state(config.out)
    # The encoder handed out is the target, with thresholds of its own.
    for name, parameter in encoder.named_parameters():
        if "budget" not in name:
            assert torch.equal(parameter, state["task"][f"siamese.target_encoder.{name}"]), name
    assert encoder(normalise(Scene(SceneConfig(size=16), 0).clip())).shape == (16, 32)
    log = read_log(config.out)
    by_step = {line["step"]: line for line in log if "loss" in line}
    assert sorted(by_step) == list(range(1, 13))
    assert {line["step"] for line in log if "knn" in line} == {0, 6, 12}
    assert all(f"block_{block:02d}/{name}" in by_step[12] for block in range(3) for name in ("theta", "largest_share"))
    assert {"feature_spread", "feature_rank", "tokens_share", "lr", "images_per_second"} <= by_step[12].keys()
    assert [file.name for file in sorted((config.out / "checkpoints").iterdir())] == [
        "step_000000006.pt",
        "step_000000012.pt",
    ]
    assert json.loads((config.out / "config.json").read_text())["train"]["steps"] == 12
    assert json.loads((config.out / "data.json").read_text())["corpora"][0]["clips"] == 20
    assert {file.name for file in (config.out / "superpixels").iterdir()} == {
        "step_000000000.png",
        "step_000000012.png",
    }
    assert list((config.out / "tensorboard").iterdir())
    # Once more: nothing is trained again and nothing is lost.
    before = (config.out / "encoder" / "encoder.safetensors").read_bytes()
    pretrain(config)
    assert (config.out / "encoder" / "encoder.safetensors").read_bytes() == before


def test_other_settings_do_not_continue_a_run_but_another_machine_does(tmp_path: Path) -> None:
    config = pretrain_runs.tiny(tmp_path / "run", machine={"stop_after": 2})
    with pytest.raises(TrainingStoppedError):
        pretrain(config)
    with pytest.raises(ValueError, match=r"train\.lr was 0\.001 and is now 0\.002"):
        pretrain(pretrain_runs.tiny(tmp_path / "run", train={"lr": 0.002}))
    pretrain(pretrain_runs.tiny(tmp_path / "run", machine={"workers": 1, "log_every": 4, "replay": False}))
    assert pretrain_runs.newest_state(tmp_path / "run")["state"]["step"] == 12


def test_a_command_that_failed_before_training_can_be_corrected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        pretrain(pretrain_runs.tiny(tmp_path / "run", data=(str(tmp_path / "mistyped"),)))
    pretrain(pretrain_runs.tiny(tmp_path / "run", train={"steps": 2}))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"] == ["scenes"]


def test_a_folder_can_hold_one_process_at_a_time(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ValueError, match="another process is writing"):
        pretrain(pretrain_runs.tiny(tmp_path / "run"))
    folder.close()


def test_a_spoiled_checkpoint_is_told_and_the_one_before_is_used(tmp_path: Path) -> None:
    with pytest.raises(TrainingStoppedError):
        pretrain(pretrain_runs.tiny(tmp_path / "run", machine={"stop_after": 4}))
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    newest.write_bytes(newest.read_bytes()[:1000])
    pretrain(pretrain_runs.tiny(tmp_path / "run"))
    log = read_log(tmp_path / "run")
    assert sorted({line["step"] for line in log}) == list(range(13))
    (told,) = (line["warning"] for line in log if "step_000000004.pt is damaged" in line.get("warning", ""))
    assert told.endswith("going on from the one before")


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_where_no_checkpoint_can_be_read_nothing_is_changed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(TrainingStoppedError):
        pretrain(pretrain_runs.tiny(run, machine={"stop_after": 4}))
    for file in (run / "checkpoints").iterdir():
        file.write_bytes(b"junk")
    before = contents(run)
    assert before.keys() >= {"log.jsonl", "data.json", "config.json"}
    with pytest.raises(ValueError, match=r"no checkpoint of .*run can be read, so nothing was changed: .*step_"):
        pretrain(pretrain_runs.tiny(run, machine={"stop_after": 4}))
    assert contents(run) == before


def test_a_disk_that_fails_does_not_end_in_an_older_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.save_checkpoint(1, {"a": 1}, keep=2, keep_every=None)
    # A folder in the place of a file cannot be read, and is not damaged either.
    (tmp_path / "run" / "checkpoints" / "step_000000002.pt").mkdir()
    with pytest.raises(ValueError, match=r"step_000000002.pt cannot be read now .*nothing was changed"):
        folder.load_checkpoint(torch.device("cpu"))
    folder.close()


def test_damaged_newer_checkpoints_do_not_push_out_new_ones(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.save_checkpoint(1, {"a": 1}, keep=2, keep_every=None)
    for step in (20, 24):
        (tmp_path / "run" / "checkpoints" / f"step_{step:09d}.pt").write_bytes(b"junk")
    for step in (4, 8, 12):
        folder.save_checkpoint(step, {"a": step}, keep=2, keep_every=None)
    assert [int(file.stem[-2:]) for file in folder.checkpoints()] == [8, 12, 20, 24]
    saved = folder.load_checkpoint(torch.device("cpu"))
    assert saved is not None and saved.state == {"a": 12} and len(saved.passed_over) == 2
    folder.close()


def test_the_same_data_may_be_spelled_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for data in (["videos"], ["./videos/"], [str(tmp_path / "videos")]):
        folder = RunFolder(tmp_path / "run")
        folder.begin({"data": data}, free=())
        folder.save_checkpoint(1, {}, keep=1, keep_every=None)
        folder.close()
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ValueError, match=r"data was .* and is now"):
        folder.begin({"data": ["others"]}, free=())
    (tmp_path / "run" / "config.json").write_text('{"data": ')
    with pytest.raises(ValueError, match=r"config.json cannot be read as JSON"):
        folder.begin({"data": ["videos"]}, free=())
    folder.close()


def test_where_there_is_no_bar_lines_tell_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain(pretrain_runs.tiny(tmp_path / "run"))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    # The first step that is logged; the others come within seconds.
    assert len(lines) == 1 and re.fullmatch(r"step 1 of 12: loss [-\d.]+, img/s \d+, tokens \d+%, kNN .*", lines[0])


class _Poisoned(PretrainTask):
    """Spoils the weights at chosen steps, as an overflow does."""

    bad_steps: tuple[int, ...] = ()

    def prepare(self, batch: run.ClipBatch, device: torch.device) -> torch.Tensor:
        images = super().prepare(batch, device)
        return images * torch.nan if batch.positions[0] // 8 + 1 in self.bad_steps else images


@pytest.mark.parametrize("plain", [False, True])
def test_the_third_loss_that_is_no_number_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    monkeypatch.setattr(run, "PretrainTask", _Poisoned)
    monkeypatch.setattr(_Poisoned, "bad_steps", (3, 7))
    pretrain(pretrain_runs.tiny(tmp_path / "two", plain=plain))
    state = pretrain_runs.newest_state(tmp_path / "two")
    assert state["state"]["non_finite"] == 2
    assert all(torch.isfinite(value).all() for value in state["task"].values() if value.is_floating_point())
    monkeypatch.setattr(_Poisoned, "bad_steps", (3, 7, 10))
    with pytest.raises(TrainingStoppedError, match=r"for the third time; the last good checkpoint is step_000000008"):
        pretrain(pretrain_runs.tiny(tmp_path / "three", plain=plain))
    assert pretrain_runs.newest_state(tmp_path / "three")["state"]["step"] == 8
    bad = torch.load(next((tmp_path / "three").glob("bad_batch_step_000000010*.pt")), weights_only=True)
    assert bad["batches"][0]["frames"].dtype == torch.uint8
    assert len(bad["batches"][0]["sources"]) == 8 and "scene" in bad["batches"][0]["sources"][0]
    warned = [line["step"] for line in read_log(tmp_path / "three") if "not taken" in line.get("warning", "")]
    assert len(warned) == 3


def test_collapse_of_the_grouping_is_said_in_plain_words(tmp_path: Path) -> None:
    superpixels = asc.SuperpixelConfig(threshold="fixed", theta=-1.0, blocks="all")
    pretrain(pretrain_runs.tiny(tmp_path / "run", model={"superpixels": superpixels}, train={"steps": 2}))
    warnings = [line["warning"] for line in read_log(tmp_path / "run") if "warning" in line]
    assert any("block 1 joins almost every image into one token" in warning for warning in warnings)
    assert len(warnings) == len({w.split(": ", 1)[1][:8] for w in warnings}), "a block is named once, not at every step"


def test_collapse_of_the_representation_is_said_in_plain_words(tmp_path: Path) -> None:
    # A target that follows at once and a fierce learning rate: the projections shrink to a point.
    config = pretrain_runs.tiny(
        tmp_path / "run",
        plain=True,
        train={"steps": 60, "lr": 0.3, "clip": None, "weight_decay": 2.0},
        siamese={"momentum": 0.0, "last_momentum": 0.0},
    )
    pretrain(config)
    warnings = [line["warning"] for line in read_log(tmp_path / "run") if "warning" in line]
    assert any("the representation" in warning and "collaps" in warning for warning in warnings)


def test_micro_batches_take_the_same_samples_and_the_mean_of_their_gradients(tmp_path: Path) -> None:
    # Without batch norm's help from the whole batch the gradients differ; the samples and the step count do not.
    pretrain(pretrain_runs.tiny(tmp_path / "run", train={"accumulate": 2, "steps": 3}))
    state = pretrain_runs.newest_state(tmp_path / "run")
    assert state["state"]["step"] == 3
    assert len([line for line in read_log(tmp_path / "run") if "loss" in line]) == 3


def test_pretraining_on_a_folder_of_videos_with_labelled_images(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    for name in ("a", "b", "c"):
        videos.write(tmp_path / "videos" / f"{name}.mp4", 12)
    (tmp_path / "videos" / "broken.mp4").write_text("no video")
    for part in ("train", "val"):
        for label in ("x", "y"):
            (tmp_path / "images" / part / label).mkdir(parents=True)
            for number in range(3):
                pixels = np.random.default_rng(number).integers(0, 255, (20, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / part / label / f"{number}.png")
    config = pretrain_runs.tiny(
        tmp_path / "run",
        data=(str(tmp_path / "videos"),),
        watch={"knn_data": tmp_path / "images"},
        train={"steps": 3},
        machine={"workers": 1},
    )
    pretrain(config)
    record = json.loads((tmp_path / "run" / "data.json").read_text())["corpora"][0]
    assert record["clips"] == 3 and list(record["skipped"]) == ["broken.mp4"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "no/such/folder"], "no/such/folder"),
        (["--augment.size", "24"], "augment.size is 24 but model.image_size is 48"),
        (["--clips.weights", "1", "2"], "clips.weights has 2 numbers for 1 data folders"),
        (["--train.batch", "0"], "train.batch must be at least 1"),
        (["--clips.leave-out", "no_list.txt"], "no_list.txt cannot be read"),
        (["--watch.knn-data", "no_images"], "no_images has not the layout"),
        (["--train.steps", "0"], "the training has no step"),
        (["--machine.accelerator", "tpu"], "machine.accelerator must be one of auto, cpu, cuda, mps, got 'tpu'"),
        (["--machine.accelerator", "mps"], "machine.accelerator is mps, but PyTorch finds no such GPU"),
        (["--machine.stop-after", "0"], "machine.stop_after must be at least 1"),
        (["--watch.pictures", "-1"], "watch.pictures must be at least 0"),
        (["--watch.knn-labelled", "0"], "watch.knn_labelled must be at least 1"),
        (["--watch.knn-neighbours", "0"], "watch.knn_neighbours must be at least 1"),
        (["--data", ".", "--clips.folder.fps", "0"], "clips.folder.fps must be a positive number"),
    ],
)
def test_bad_settings_are_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code = main(["pretrain", "demo", "--out", str(tmp_path / "run"), "--watch.knn-judged", "9", *arguments])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2 and error.startswith("error:") and message in error


def test_a_refused_run_leaves_nothing_behind(tmp_path: Path) -> None:
    arguments = ["pretrain", "demo", "--data", "no/such/folder", "--out"]
    (tmp_path / "mine").mkdir()
    for name in ("new", "mine"):
        assert main([*arguments, str(tmp_path / name)]) == 2
    # A folder that was there before is left alone.
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine"]


def test_paths_that_cannot_be_used_are_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["pretrain", "demo", "--out", str(tmp_path / "file" / "run")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'file' / 'run'}")


def test_an_interruption_outside_of_the_loop_is_no_crash(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it for what runs behind
    try:
        assert exit_code(lambda: signal.raise_signal(signal.SIGINT)) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "stopped by Ctrl-C; what was finished is kept\n"


def torchrun(out: Path, *arguments: str) -> None:
    """Two processes on this computer, as a user starts them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run(
        [*command, str(Path(__file__).with_name("two_process_pretrain.py")), str(out), *arguments],
        check=True,
        env=environment,
        timeout=300,
        capture_output=True,
    )


def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    # In double precision, since Adam's first steps are signs of gradients and turn any rounding into a full step.
    torchrun(tmp_path / "two")
    for name, settings in (
        ("plain", {"plain": True, "train": {"steps": 20, "precision": "64-true"}}),
        ("superpixels", {"train": {"steps": 5}}),
    ):
        pretrain(pretrain_runs.tiny(tmp_path / "one" / name, **settings))
        losses = [
            [line["loss"] for line in read_log(tmp_path / count / name) if "loss" in line] for count in ("one", "two")
        ]
        states = [pretrain_runs.newest_state(tmp_path / count / name)["task"] for count in ("one", "two")]
        if name == "plain":
            assert np.abs(np.subtract(*losses)).max() < 1e-5
            for key, value in states[0].items():
                assert torch.allclose(value, states[1][key], rtol=0, atol=1e-5), key
        else:
            assert np.abs(np.subtract(*losses)).max() < 1e-3
            thresholds = [torch.load(tmp_path / "two" / f"thresholds_{rank}.pt") for rank in range(2)]
            assert torch.equal(*thresholds)
