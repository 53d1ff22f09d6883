"""``asc ablate``: variants, cells that survive being killed and shared, and tables that say what the cells say."""

import csv
import dataclasses
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from scipy.sparse.csgraph import connected_components
from scipy.stats import ttest_rel

import asc
from asc.ablate.cells import FAILED, FINISHED, Claim, read_cells, take_over, write_cell
from asc.ablate.judge import crossed, fold_of
from asc.ablate.report import Evidence, Filled, Value, _curves
from asc.ablate.run import AblateSettings, main, make_study, run_ablate
from asc.ablate.study import Run, Study, labelled_sets
from asc.ablate.tables import TABLES, Column
from asc.ablate.variants import VARIANTS
from asc.cli import _parse
from asc.data import Scene, SceneConfig, normalise
from asc.grouping.budget import TokenBudget, mean_share
from asc.grouping.threshold import Threshold
from asc.recipes.pretrain import ablation
from asc.run_folder import read_log
from asc.settings import parse_command, with_words
from asc.train import TrainingStoppedError, lr_at
from asc.weights import read_state

STEPS = 8


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CHANGES = _words(
    """
    model.width=32 model.image_size=32 model.patch_size=8 augment.size=32 siamese.hidden=32
    siamese.projection=16 train.batch=8 train.warmup_steps=2 clips.scenes=16 clips.scene.size=32
    clips.scene.frames=4 watch.knn_labelled=60 watch.knn_judged=40 watch.calibration=8 machine.log_every=1
    machine.checkpoint_every=2
    """
)
DENSE = _words(
    """
    segment.train.steps=2 segment.train.batch=2 segment.images.scenes=4 segment.images.scenes_judged=3
    segment.images.scene.size=32 segment.augment.size=32+32 segment.head.channels=16
    segment.tune.calibration=2 depth.train.steps=2 depth.train.batch=2 depth.images.scenes=4
    depth.images.scenes_judged=3 depth.images.scene.size=32 depth.augment.size=32+32 depth.head.channels=16
    depth.tune.calibration=2 detect.train.steps=2 detect.train.batch=2 detect.sets.scenes=4
    detect.sets.test_scenes=3 detect.sets.scene.size=32 detect.augment.size=32 detect.watch.calibration=2
    detect.fasterrcnn.adapter_width=16 detect.fasterrcnn.hidden=16 detect.fasterrcnn.pyramid_width=16
    """
)


def tiny(out: Path, **settings: Any) -> AblateSettings:
    """Two variants and two seeds of a network that trains in a second."""
    values: dict[str, Any] = {
        "table": "layer",
        "out": out,
        "recipe": "demo",
        "steps": STEPS,
        "changes": (*CHANGES, *DENSE),
        "seeds": (0, 1),
        "dense_seeds": 0,
        "only": ("superpixels", "plain"),
        "accelerator": "cpu",
    }
    return AblateSettings(**values | settings)


def numbers(folder: Path) -> dict[str, Any]:
    """What the cells of a folder found out, without the time it took."""
    return {name: cell["values"] for name, cell in read_cells(folder).items()}


def table(folder: Path) -> list[list[str]]:
    """The lines of the CSV, without those that the clock has a part in."""
    lines = list(csv.reader((folder / "ablations.csv").open()))
    return [line for line in lines if line[3] not in ("seconds", "images_per_second")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole")
    run_ablate(tiny(out))
    return out


# --- The whole command ------------------------------------------------------------------------------------


def test_tables_are_the_mean_and_deviation_of_the_cells(whole: Path) -> None:
    cells = [json.loads(file.read_text()) for file in (whole / "cells").glob("*.json")]
    assert sorted((cell["variant"], cell["seed"]) for cell in cells) == [
        (variant, seed) for variant in ("plain", "superpixels") for seed in (0, 1)
    ]
    lines = {tuple(line[:4]): line[4:] for line in table(whole)[1:]}
    text = (whole / "ablations.md").read_text()
    for variant, printed in (("superpixels", "82.1"), ("plain", "78.6")):
        own = [cell["values"]["sets"]["scenes"]["linear"] for cell in cells if cell["variant"] == variant]
        mean, deviation = np.mean(own), np.std(own, ddof=1)
        line = lines["layer", "steps", variant, "linear, scenes"]
        assert [float(line[0]), float(line[1])] == pytest.approx([mean, deviation], abs=1e-6)
        assert line[2:] == ["2", printed]
        assert f"| {VARIANTS[variant].label} | {100 * mean:.1f} ± {100 * deviation:.1f} (2) | {printed} |" in text
        near = [cell["values"]["sets"]["scenes"]["knn"] for cell in cells if cell["variant"] == variant]
        assert float(lines["sets", "steps", variant, "knn, scenes"][0]) == pytest.approx(np.mean(near), abs=1e-6)
        share = statistics.fmean(cell["training"]["tokens_share"] for cell in cells if cell["variant"] == variant)
        assert float(lines["runs", "steps", variant, "tokens_share"][0]) == pytest.approx(share, abs=1e-6)
    # What is not measured is not there, and what was not asked for says nothing.
    assert lines["layer", "steps", "control", "linear, scenes"] == ["", "", "0", ""]
    assert "Scale and data differ" in text
    for name in ("ablations.png", "curves.png"):
        with Image.open(whole / name) as picture:
            assert picture.width > 600 and len(picture.convert("L").getcolors()) > 10


@pytest.mark.parametrize("made", [False, True])
def test_a_report_on_no_cells_is_refused_and_writes_nothing(tmp_path: Path, made: bool) -> None:
    out = tmp_path / "mistyped"
    if made:
        out.mkdir()
    with pytest.raises(ValueError, match=r"there are no cells in .*mistyped/cells; give the folder of a run"):
        run_ablate(tiny(out, report_only=True))
    with pytest.raises(ValueError, match=r"merge: there are no cells in .*nowhere"):
        run_ablate(tiny(out, report_only=True, merge=(tmp_path / "nowhere",)))
    assert list(tmp_path.rglob("*")) == ([out] if made else [])


def test_differences_to_the_plain_network_are_paired_by_seed(whole: Path) -> None:
    cells = [json.loads(file.read_text()) for file in (whole / "cells").glob("*.json")]
    by = {(cell["variant"], cell["seed"]): cell["values"]["sets"]["scenes"]["linear"] for cell in cells}
    ahead = [by["superpixels", seed] - by["plain", seed] for seed in (0, 1)]
    found = ttest_rel([by["superpixels", seed] for seed in (0, 1)], [by["plain", seed] for seed in (0, 1)])
    low, high = found.confidence_interval(0.95)
    shown = f"{100 * np.mean(ahead):+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
    text = (whole / "ablations.md").read_text()
    part = text[text.index("## Before the plain network, equal steps") :]
    assert f"| {VARIANTS['superpixels'].label} | {shown} | {shown} |" in part  # one set is the mean of all
    lines = {tuple(line[:4]): line[4:] for line in table(whole)[1:]}
    assert float(lines["before plain", "steps", "superpixels", "linear, mean"][0]) == pytest.approx(np.mean(ahead))


def test_at_equal_time_the_plain_networks_number_alone_says_nothing() -> None:
    table, number = TABLES["grouping"], Value((0.3,))
    rows = {"global": (None, number), "plain": (number, number)}
    assert Filled(table, "steps", ("mIoU", "rel"), rows).measured == [0, 1]
    # Its run is that of equal steps, whatever else was made at equal time.
    assert Filled(table, "time", ("mIoU", "rel"), rows).measured == [1]
    assert Filled(table, "time", ("mIoU", "rel"), {"plain": (number, number)}).measured == []


def test_knn_followed_on_other_images_is_not_drawn_beside(whole: Path, tmp_path: Path) -> None:
    cells = list(read_cells(whole).values())
    assert {tuple(cell["training"]["followed_on"]) for cell in cells} == {(60, 40)}
    assert "not drawn" not in (whole / "ablations.md").read_text()
    other = dict(cells[0], training=cells[0]["training"] | {"followed_on": [7, 3]})
    for cell in (other, *cells[1:]):
        write_cell(tmp_path, cell)
    run_ablate(tiny(tmp_path, report_only=True))
    assert "in 1 run, which are not drawn" in (tmp_path / "ablations.md").read_text()
    evidence = Evidence(list(read_cells(tmp_path).values()), None)
    drawn = _curves(evidence, ["layer"])
    curves = [curve for runs in drawn.values() for curve in runs]
    assert len(curves) == len(cells) and sum(not curve["knn"] for curve in curves) == 1
    assert all(curve["loss"] for curve in curves)
    # The table of aggregations has no plain network.
    assert {name for _, name in _curves(evidence, ["aggregation"])} == {"superpixels"}


def test_folds_are_drawn_evenly_and_every_image_is_recognised_once(whole: Path, tmp_path: Path) -> None:
    labels = torch.tensor([0] * 13 + [1] * 7 + [2] * 30)[torch.randperm(50, generator=torch.Generator().manual_seed(3))]
    fold = fold_of(labels, 5)
    for number in range(3):
        counts = torch.bincount(fold[labels == number], minlength=5)
        assert counts.max() - counts.min() <= 1
    assert torch.equal(fold, fold_of(labels, 5))
    # Features that are the class itself: all are recognised, from whichever part.
    features = torch.nn.functional.one_hot(labels).float() + 0.01 * torch.randn(50, 3)
    assert crossed(features, labels, 5) == {"knn": 1.0, "linear": 1.0, "judged": 50}
    # With folds the same encoders are other cells, judged on all of their images.
    with_folds = tiny(tmp_path, folds=3, seeds=(0,), only=("plain",))
    assert not set(names(with_folds)) & set(names(tiny(tmp_path, seeds=(0,), only=("plain",))))
    run_ablate(with_folds)
    plain = next(cell for cell in read_cells(whole).values() if cell["variant"] == "plain")
    (cell,) = read_cells(tmp_path).values()
    watch = make_study(with_folds).base.watch
    assert plain["values"]["sets"]["scenes"]["judged"] == watch.knn_judged
    assert cell["values"]["sets"]["scenes"]["judged"] == watch.knn_labelled + watch.knn_judged


# As on a machine that has little more than PyTorch.
_BARE = """
import sys
for name in ("tyro", "av", "sklearn", "optuna"):
    sys.modules[name] = None
from asc.ablate.run import main
sys.exit(main(sys.argv[1:]))
"""


def words_of(settings: AblateSettings) -> list[str]:
    """The command line for settings."""
    words: list[str] = [settings.table]
    for name, value in vars(settings).items():
        if name != "table" and value != getattr(AblateSettings, name):
            words += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else [value])]
    assert parse_command(AblateSettings, "asc", words) == settings
    return words


def test_killed_in_the_middle_and_continued_by_two_workers_it_ends_with_the_same_table(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", _BARE, *words_of(tiny(tmp_path))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        # The third run in the middle of its training: two are finished, and there is something to continue.
        end = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < end:
            begun = list(tmp_path.glob("runs/*-1-*/pretrain/checkpoints/*.pt"))
            if begun and len(list(tmp_path.glob("cells/*.json"))) == 2:
                break
            time.sleep(0.002)
    finally:
        process.kill()
        process.wait()
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.glob("cells/*.json")}
    assert len(kept) == 2
    run_ablate(tiny(tmp_path, workers=2))
    assert "to make: 2 of 4 runs (linear classifiers and kNN 2 ×)\n" in capsys.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    said = "".join(file.read_text() for file in (tmp_path / "logs").glob("worker_*.log"))
    taken = [line for line in said.splitlines() if line.endswith(": judge")]
    assert sorted(taken) == ["plain-steps-1: judge", "superpixels-steps-1: judge"]  # neither of them twice
    assert said.count("at step") == 1  # the one that had begun went on, rather than begin again
    assert numbers(tmp_path) == numbers(whole)
    assert table(tmp_path) == table(whole)
    assert not list((tmp_path / "runs").iterdir())


def test_cells_of_several_folders_are_merged(whole: Path, tmp_path: Path) -> None:
    cells = read_cells(whole)
    for number, cell in enumerate(cells.values()):
        write_cell(tmp_path / ("one", "other")[number % 2], cell)
    # What failed elsewhere is finished here, whichever comes first.
    lost = next(iter(read_cells(tmp_path / "other").values()))
    broken = dict(lost) | {"status": FAILED, "reason": "no memory", "values": None, "training": None}
    write_cell(tmp_path / "one", broken)
    write_cell(tmp_path / "other", lost)
    merge = (tmp_path / "one", tmp_path / "other")
    run_ablate(tiny(tmp_path / "report", merge=merge, report_only=True, data=("nowhere",)))
    assert table(tmp_path / "report") == table(whole)
    # The same settings elsewhere ask for the same cells: nothing is left to do.
    run_ablate(tiny(tmp_path / "merged", merge=tuple(reversed(merge))))
    assert numbers(tmp_path / "merged") == numbers(whole)
    assert not (tmp_path / "merged" / "runs").exists()
    with pytest.raises(ValueError, match=r"there are no cells in .*nowhere"):
        take_over(tmp_path, tmp_path / "nowhere")


def test_a_cell_that_fails_says_why_and_stops_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tiny(tmp_path, seeds=(0,), steps=2)
    study = make_study(settings)
    first, second = wanted(study)
    in_the_way = tmp_path / "runs" / first.name
    in_the_way.parent.mkdir(parents=True)
    in_the_way.touch()
    with pytest.raises(TrainingStoppedError, match="1 cell failed") as stopped:
        run_ablate(settings)
    assert stopped.value.code == 1
    cells = {cell["variant"]: cell for cell in read_cells(tmp_path).values()}
    assert cells[first.variant]["status"] == FAILED and first.name in cells[first.variant]["reason"]
    assert cells[second.variant]["status"] == FINISHED
    assert "## Failed" in (tmp_path / "ablations.md").read_text()
    # The next command tries again.
    in_the_way.unlink()
    run_ablate(settings)
    assert {cell["status"] for cell in read_cells(tmp_path).values()} == {FINISHED}
    assert "## Failed" not in (tmp_path / "ablations.md").read_text()


def test_a_task_that_fails_leaves_the_others_of_its_encoder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    settings = tiny(
        out, table="threshold", seeds=(0,), dense_seeds=1, steps=2, only=("learned",), voc=str(tmp_path / "empty")
    )
    with pytest.raises(TrainingStoppedError, match="1 cell failed"):
        run_ablate(settings)
    cells = {cell["part"]: cell for cell in read_cells(out).values()}
    assert cells["judge"]["status"] == FINISHED and cells["segment"]["status"] == FAILED
    assert "has not the layout of PASCAL VOC" in cells["segment"]["reason"]
    assert len(list(out.glob("runs/*/encoder"))) == 1  # for the next try


def test_dense_tasks_reach_the_tables(tmp_path: Path) -> None:
    settings = tiny(tmp_path, seeds=(0,), dense_seeds=1, steps=3, only=("superpixels", "control"))
    run_ablate(settings)
    lines = {tuple(line[:4]): line[4:] for line in table(tmp_path)[1:]}
    for variant in ("superpixels", "control"):
        cell = next(c for c in read_cells(tmp_path).values() if (c["variant"], c["part"]) == (variant, "depth"))
        line = lines["layer", "steps", variant, "depth δ<1.25"]
        assert float(line[0]) == pytest.approx(cell["values"]["d1"], abs=1e-6) and line[2] == "1"
        assert lines["layer", "steps", variant, "detection AP50"][2] == "1"
    # What is asked for later is judged with the encoder that was kept, not trained once more.
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.glob("cells/*.json")}
    run_ablate(dataclasses.replace(settings, table="grouping", only=("global",)))
    new = [json.loads(file.read_text()) for file in tmp_path.glob("cells/*.json") if file not in kept]
    assert [(cell["variant"], cell["part"]) for cell in new] == [("superpixels", "segment")]
    assert {file: file.stat().st_mtime_ns for file in kept} == kept


def test_thresholds_are_treated_as_the_variant_says(tmp_path: Path) -> None:
    run_ablate(
        tiny(tmp_path, table="threshold", seeds=(0,), steps=3, only=("printed", "fixed", "total"), encoders="runs")
    )
    thetas, starts = {}, {}
    for folder in (tmp_path / "runs").iterdir():
        name = folder.name.split("-")[0]
        thetas[name] = [float(layer.threshold.theta()) for layer in asc.load(folder / "encoder").superpixel_layers]
        starts[name] = [value for key, value in read_log(folder / "pretrain")[1].items() if key.endswith("/theta")]
    assert thetas["printed"] == pytest.approx([0.2, 0.2])
    # Set once, before the first step, and then left alone; not set anew for the encoder that is judged.
    assert thetas["fixed"] == pytest.approx(starts["fixed"]) and thetas["fixed"] != pytest.approx([0.2, 0.2])
    assert thetas["total"] != pytest.approx(starts["total"])
    text = (tmp_path / "ablations.md").read_text()
    assert "θ fixed at 0.2, as printed, equal steps, seed 0" in text and "into one token" in text


def test_equal_time_is_steps_by_measured_speed(tmp_path: Path) -> None:
    run_ablate(tiny(tmp_path, seeds=(0,), equal="both", rate_steps=8, encoders="runs"))
    speeds = {
        json.loads(file.read_text())["variant"]: json.loads(file.read_text()) for file in tmp_path.glob("speeds/*")
    }
    assert speeds.keys() == {"plain", "superpixels"} and all(speed["alone"] for speed in speeds.values())
    rates = {name: speed["steps_per_second"] for name, speed in speeds.items()}
    cells = {(cell["variant"], cell["mode"]): cell["training"] for cell in read_cells(tmp_path).values()}
    # The plain network is the measure: its run serves both tables.
    assert cells.keys() == {("superpixels", "steps"), ("superpixels", "time"), ("plain", "steps")}
    plan = cells["superpixels", "time"]["plan"]
    assert plan["seconds"] == pytest.approx(STEPS / rates["plain"])
    assert plan["steps"] == round(plan["seconds"] * rates["superpixels"])
    assert cells["superpixels", "time"]["seconds"] > 0
    (folder,) = tmp_path.glob("runs/superpixels-time-*")
    train = make_study(tiny(tmp_path)).base.train
    rates_of_learning = {line["step"]: line["lr"] for line in read_log(folder / "pretrain") if "lr" in line}
    expected = {step: lr_at(train, step - 1, plan["steps"], 16) for step in range(1, plan["steps"] + 1)}
    assert rates_of_learning == pytest.approx(expected)
    text = (tmp_path / "ablations.md").read_text()
    assert text.count(f"| plain ViT | time | 1 | {STEPS} |") == 1


def test_minutes_are_a_time_of_training_of_their_own(tmp_path: Path) -> None:
    study = make_study(tiny(tmp_path, equal="time", train_minutes=0.5))
    runs = study.runs(["layer"])
    assert {run.mode for run in runs} == {"time"} and study.seconds == 30.0
    assert "plain" in {run.variant for run in runs}


# --- Names ------------------------------------------------------------------------------------------------


def wanted(study: Study) -> list[Run]:
    return [run for run in study.runs(["layer"]) if run.variant in ("superpixels", "plain")]


def names(settings: AblateSettings) -> list[str]:
    study = make_study(settings)
    return [study.cell_name(run, part) for run in wanted(study) for part in run.parts]


def labelled(folder: Path, content: str = "x") -> str:
    for part in ("train", "val"):
        (folder / part / "cat").mkdir(parents=True)
        (folder / part / "cat" / "1.jpg").write_text(content)
    return str(folder)


def test_other_settings_are_other_cells_and_other_places_are_not(tmp_path: Path) -> None:
    settings = tiny(tmp_path / "out", seeds=(0,), dense_seeds=1, images=(labelled(tmp_path / "here" / "cats"),))
    before = names(settings)
    assert len(before) == len(set(before)) == 6  # two variants: judged, detection, depth
    same: Sequence[dict[str, Any]] = (
        {"out": tmp_path / "elsewhere"},
        {"images": (labelled(tmp_path / "there" / "cats"),)},
        {"images": (str(tmp_path / "here"),)},  # a folder of such
        {"changes": (*settings.changes, "machine.checkpoint_every=7", "watch.knn_every=3")},
        {"workers": 3, "loaders": 2, "rate_steps": 50, "minutes": 1.0},
    )
    for change in same:
        assert names(dataclasses.replace(settings, **change)) == before, change
    all_differ: Sequence[dict[str, Any]] = (
        {"steps": 13},
        {"seeds": (1,)},
        {"changes": (*settings.changes, "train.lr=0.1")},
        {"changes": (*settings.changes, "siamese.momentum=0.5")},
        {"changes": (*settings.changes, "clips.scenes=17")},
    )
    for change in all_differ:
        assert not set(names(dataclasses.replace(settings, **change))) & set(before), change
    some_differ: Sequence[tuple[dict[str, Any], str]] = (
        ({"images": (labelled(tmp_path / "more" / "cats", "longer"),)}, "judge"),
        ({"changes": (*settings.changes, "depth.train.lr=0.1")}, "depth"),
        ({"changes": (*settings.changes, "detect.sets.scenes=5")}, "detect"),
    )
    for change, part in some_differ:
        new = set(names(dataclasses.replace(settings, **change))) - set(before)
        assert len(new) == 2 and all(f"-{part}-" in name for name in new), change
    # A plain network does not depend on how superpixels are made: it is not trained again for other ones.
    changed = names(dataclasses.replace(settings, changes=(*settings.changes, "model.superpixels.budget=0.7")))
    assert set(changed) & set(before) == {name for name in before if name.startswith("plain")}


def test_plain_runs_stand_in_the_table_of_any_superpixels(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "cells", tmp_path / "cells")
    for cell in read_cells(whole).values():
        if cell["variant"] == "superpixels":  # as other settings of the superpixels would leave them
            other = {"recipe": "other", "plain": cell["protocol"]["plain"]}
            write_cell(tmp_path, dict(cell) | {"name": f"{cell['name']}x", "protocol": other})
    run_ablate(tiny(tmp_path, minutes=0.0))
    assert table(tmp_path) == table(whole)
    assert "2 cells of other settings" in (tmp_path / "ablations.md").read_text()


def test_the_same_thing_in_several_tables_is_one_run(tmp_path: Path) -> None:
    study = make_study(tiny(tmp_path, recipe="ablation", changes=(), seeds=(0,), dense_seeds=1))
    runs = {run.variant: run for run in study.runs(TABLES)}
    assert len(runs) == len(study.runs(TABLES)) == 12
    assert runs["superpixels"].stands_for == ("superpixels", "learned", "global", "mean")
    assert set(runs["superpixels"].parts) == {"judge", "segment", "detect", "depth"}
    assert runs["max"].parts == ("judge",)
    # Under another recipe other variants coincide.
    spatial = make_study(tiny(tmp_path, changes=("model.superpixels.neighbourhood=spatial",)))
    alike = {run.variant: run.stands_for for run in spatial.runs(TABLES)}
    assert "spatial" in alike["superpixels"] and "global" in alike


def test_groupings_have_the_same_budget() -> None:
    study = make_study(AblateSettings("grouping"))
    for name in ("global", "spatial", "bipartite", "equal", "total"):
        encoder = asc.AscViT(study.config(name, 0).encoder)
        assert encoder.budget is not None
        assert encoder.budget.budget == pytest.approx(ablation().model.superpixels.budget)  # type: ignore[union-attr]
    control, default = (asc.AscViT(study.config(name, 0).encoder) for name in ("control", "superpixels"))
    # The control has as many votes as tokens would be left: four layers that keep alike.
    assert control.budget.targets_L.tolist() == pytest.approx([float(default.budget.targets_L.prod())])


def test_columns_find_the_set_that_stands_for_the_papers() -> None:
    sets = ("cifar10", "flowers102", "pets", "tiny-imagenet")
    found = {
        column.paper: column.set_of(sets) for table in TABLES.values() for column in table.columns if column.dataset
    }
    assert found == {
        "ImageNet linear": "tiny-imagenet",
        "CIFAR-100 linear": "cifar10",
        "Flowers linear": "flowers102",
    }
    assert Column("", "", "judge", "linear", "flowers", -1).set_of(("a", "b")) == "b"


# --- The command line -------------------------------------------------------------------------------------


def test_command_lines_with_and_without_tyro_agree() -> None:
    words = _words(
        "all --out x --images a b --seeds 3 4 --equal both --train-minutes 0.5 --only plain --no-report-only"
    )
    assert parse_command(AblateSettings, "asc", words) == _parse(["ablate", *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recipe", "huge"], "recipe must be one of"),
        (["--recipe", "paper_tiny"], "counts epochs; give the number of optimiser steps by --steps"),
        (["--only", "plane"], "'plane' is neither a variant"),
        (["--seeds", "1", "1"], "seeds must be different"),
        (["--voc", "nowhere"], "voc: there is no"),
        (["--images", "tests"], "holds no labelled images"),
        (["--train-minutes", "1"], "needs equal time"),
        (["--folds", "1"], "folds must be at least 2"),
        (["--changes", "train.step=1"], "there is no setting train.step: 'step' is none of"),
        (["--changes", "train.steps"], "gives no value"),
        (["--changes", "train.lr=fast"], "train.lr cannot be 'fast'; it must be a number"),
        (["--changes", "model.superpixels=none"], "no superpixels to ablate"),
        (["--changes", "train.batch=0"], "train.batch must be at least 1"),
    ],
)
def test_mistakes_are_told_in_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["layer", "--out", str(tmp_path), *words]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


def test_changes_that_only_fit_together_are_made_together() -> None:
    config = with_words(ablation(), ["model.patch_size=7", "model.image_size=49", "clips.frames.spacing=intervals"])
    assert config.model.grid_of(config.model.image_hw) == (7, 7)
    assert with_words(config, ["train.lr=1", "train.betas=0.5+0.6"]).train.betas == (0.5, 0.6)


def test_depth_images_are_no_labelled_set(tmp_path: Path) -> None:
    labelled(tmp_path / "cats")
    (tmp_path / "nyu" / "train" / "depth").mkdir(parents=True)
    assert [one.name for one in labelled_sets([str(tmp_path)])] == ["cats"]


# --- Locks and files --------------------------------------------------------------------------------------


def hold(folder: Path) -> None:
    claim = Claim(folder, "run")
    assert claim.held
    (folder / "held").touch()
    time.sleep(60)


def test_a_run_belongs_to_one_process_until_it_dies(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=hold, args=(tmp_path,))
    process.start()
    end = time.monotonic() + 30
    while not (tmp_path / "held").exists() and time.monotonic() < end:
        time.sleep(0.01)
    other = Claim(tmp_path, "run")
    assert not other.held and not other.holder_is_dead()
    process.kill()
    process.join()
    mine = Claim(tmp_path, "run")
    assert mine.held and mine.file.read_text().split()[1] == str(os.getpid())
    assert not Claim(tmp_path, "run").held
    mine.release()
    assert Claim(tmp_path, "run").held


def test_a_broken_cell_is_named(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "cells", tmp_path / "cells")
    (tmp_path / "cells" / "x.json").write_text("{}")
    with pytest.raises(ValueError, match=r"x\.json is no cell of asc ablate: it lacks name"):
        read_cells(tmp_path)


def test_kept_encoders_have_half_precision_but_for_their_thresholds(whole: Path) -> None:
    for folder in (whole / "encoders").iterdir():
        model = asc.load(folder / "encoder")
        images = normalise(np.stack([Scene(SceneConfig(size=32), index).frame(0).image_HW3 for index in range(4)]))
        assert model(images).shape == (4, 32)
        state = read_state(folder / "encoder" / "encoder.safetensors")
        assert state["blocks.0.attn.qkv.weight"].dtype == torch.float16
        # A threshold in half precision would group otherwise.
        assert all(x.dtype == torch.float32 for name, x in state.items() if name.endswith(".threshold.u"))


# --- What the network offers for it -----------------------------------------------------------------------


def grouped_pool(**settings: Any) -> asc.AscViT:
    torch.manual_seed(0)
    shape = {"width": 48, "depth": 3, "heads": 3, "patch_size": 4, "image_size": 32, "pool": "grouped"}
    superpixels = {"superpixels": asc.SuperpixelConfig(blocks=(2,), keep=0.3)}
    return asc.AscViT(asc.VitConfig(**shape | superpixels | settings)).eval()


def scenes(count: int) -> torch.Tensor:
    return normalise(np.stack([Scene(SceneConfig(size=32), index).frame(0).image_HW3 for index in range(count)]))


def test_a_grouped_pool_votes_once_a_group_and_merges_nothing(tmp_path: Path) -> None:
    model, images = grouped_pool(), scenes(6)
    model.calibrate(images)
    tokens = model.forward_tokens(images)
    assert tokens.values_TC.shape[0] == 6 * 64
    theta = float(model.superpixel_layers[0].threshold.theta())
    pooled, groups = [], 0
    for values_NC in tokens.values_TC.detach().split(64):
        unit_NC = F.normalize(values_NC, dim=1)
        count, labels = connected_components((unit_NC @ unit_NC.T > theta).numpy())
        groups += count
        means = [values_NC[torch.from_numpy(labels == label)].mean(0) for label in range(count)]
        pooled.append(torch.stack(means).mean(0))
    assert groups / (6 * 64) == pytest.approx(0.3, abs=0.02)
    torch.testing.assert_close(model(images), torch.stack(pooled), atol=1e-5, rtol=1e-4)
    # Everything but the pooled feature is the plain network's.
    plain = asc.AscViT(dataclasses.replace(model.config, superpixels=None, pool="superpixel")).eval()
    plain.load_state_dict({name: x for name, x in model.state_dict().items() if name in plain.state_dict()})
    for ours, theirs in zip(
        model.forward_intermediates(images)[1], plain.forward_intermediates(images)[1], strict=True
    ):
        assert torch.equal(ours, theirs)
    asc.save(model, tmp_path)
    assert torch.equal(asc.load(tmp_path)(images), model(images))


def test_a_grouped_pool_is_held_to_its_share_and_silent_where_nothing_is_pooled() -> None:
    model, images = grouped_pool().train(), scenes(4)
    model.superpixel_layers[0].threshold.set_theta(0.5)
    model.forward_intermediates(images)
    model.update_thresholds()
    assert model.diagnostics() == {}
    for _ in range(60):
        model(images)
        model.update_thresholds()
    assert model.diagnostics()[2].kept_share == pytest.approx(0.3, abs=0.1)
    (model(images) * torch.randn(4, 48)).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_grouped_pool_on_top_of_merging_leaves_the_tokens_as_they_are() -> None:
    merging = asc.SuperpixelConfig(blocks=(0, 2), keep=0.5)
    model, images = grouped_pool(superpixels=merging), scenes(6)
    model.calibrate(images)
    tokens = model.forward_tokens(images)
    lengths = tokens.cu_seqlens.diff().tolist()
    assert sum(lengths) / (6 * 64) == pytest.approx(0.5, abs=0.02)
    # Up to the pooled feature it is the network that merges in the first block alone.
    alone = dataclasses.replace(model.config, superpixels=dataclasses.replace(merging, blocks=(0,)), pool="superpixel")
    first = asc.AscViT(alone).eval()
    # Of the budget, which knows two layers, merging needs nothing.
    state = {name: x for name, x in model.state_dict().items() if not name.startswith(("budget", "blocks.2.superp"))}
    first.load_state_dict(state, strict=False)
    assert torch.equal(first.forward_tokens(images).values_TC, tokens.values_TC)
    assert torch.equal(first.superpixels(images), model.superpixels(images))
    theta, pooled, groups = float(model.superpixel_layers[1].threshold.theta()), [], 0
    for values_NC in tokens.values_TC.detach().split(lengths):
        unit_NC = F.normalize(values_NC, dim=1)
        count, labels = connected_components((unit_NC @ unit_NC.T > theta).numpy())
        groups += count
        means = [values_NC[torch.from_numpy(labels == label)].mean(0) for label in range(count)]
        pooled.append(torch.stack(means).mean(0))
    assert groups / sum(lengths) == pytest.approx(0.5, abs=0.04)
    torch.testing.assert_close(model(images), torch.stack(pooled), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"superpixels": None}, "blocks include the last one, 2"),
        ({"superpixels": asc.SuperpixelConfig(blocks=(0,))}, "blocks include the last one, 2"),
        ({"superpixels": asc.SuperpixelConfig(blocks=(2,))}, "give a keep"),
    ],
)
def test_a_grouped_pool_says_what_it_needs(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"pool='grouped' .*{message}"):
        grouped_pool(**settings)


def test_one_controller_for_the_total_moves_all_thresholds_alike() -> None:
    budget = TokenBudget(0.5, (0, 2), 4, floor=0.5, learn=False, control="total")
    thresholds = [Threshold("budget", "cosine", theta) for theta in (0.9, 0.99)]
    starts = [float(threshold.u) for threshold in thresholds]
    budget.update(thresholds)  # nothing counted: nothing moves
    assert [float(threshold.u) for threshold in thresholds] == starts
    for threshold, counts in zip(thresholds, ((100, 80), (80, 8)), strict=True):
        threshold.count(*counts)
    budget.update(thresholds)
    # By hand: 1, 0.8, 0.8 and 0.08 of the tokens enter the blocks, 0.67 on average: too many, so u rises.
    share = (1 + 0.8 + 0.8 + 0.08) / 4
    assert mean_share(np.array([0.8, 0.1]), (0, 2), 4) == pytest.approx(share)
    step = 0.3 * np.log(share / (1 - share))  # the budget of 0.5 has log-odds of 0
    moved = [float(threshold.u) - start for threshold, start in zip(thresholds, starts, strict=True)]
    assert moved == pytest.approx([step, step], rel=1e-4)
    # A controller for each block would have moved them apart: the second one keeps a tenth.
    apart = TokenBudget(0.5, (0, 2), 4, floor=0.5, learn=False)
    for threshold, counts in zip(thresholds, ((100, 80), (80, 8)), strict=True):
        threshold.count(*counts)
    before = [float(threshold.u) for threshold in thresholds]
    apart.update(thresholds)
    assert float(thresholds[0].u) > before[0] and float(thresholds[1].u) < before[1]


def test_the_allocation_is_not_learned_under_one_controller() -> None:
    superpixels = asc.SuperpixelConfig(budget=0.7, control="total")
    model = asc.AscViT(asc.VitConfig(width=48, depth=3, heads=3, image_size=32, superpixels=superpixels))
    assert model.budget is not None and not model.budget.allocation.requires_grad
