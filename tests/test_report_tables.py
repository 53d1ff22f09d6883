"""Tables of results: the paper's numbers as printed, ours beside them, means and deviations."""

import csv
import io
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from asc.cli import main
from asc.report.paper_numbers import ASC, COMPARISON, LINEAR_IMAGENET, TABLES, TRANSFER_LINEAR, also_printed
from asc.report.tables import CAVEAT, csv_text, make_tables, markdown
from asc.tasks.classify.datasets import DATASETS
from asc.tasks.classify.results import Protocol, Result, read_result, read_results, write_result


def result(
    dataset: str,
    value: float,
    protocol: Protocol = "linear",
    seed: int = 0,
    name: str = "mine",
    identity: str = "a1b2c3d4",
    **more: float,
) -> Result:
    metric = DATASETS[dataset].metric if dataset in DATASETS else "top1"
    names = [f"{metric}@10", f"{metric}@20"] if protocol == "knn" else [metric]
    return Result(
        protocol=protocol,
        recipe={"knn": "knn", "linear": "fast_linear", "finetune": "paper_finetune"}[protocol],
        dataset=dataset,
        metric=metric,
        seed=seed,
        encoder={"name": name, "identity": identity, "description": f"a small network called {name}"},
        data={"notes": [f"{dataset}: a copy of 9 images"]},
        settings={},
        chosen={},
        val={},
        test=dict.fromkeys(names, value) | more,
        seconds=1.0,
        device="CPU",
    )


def line_of(text: str, label: str, heading: str) -> list[str]:
    """The cells of a row, by its label and its table's heading."""
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    (row,) = [line for line in section.splitlines() if line.startswith((f"| {label}", f"| **{label}"))]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_every_column_is_a_dataset_that_is_known_and_every_row_is_full() -> None:
    for table in TABLES:
        assert all(column.dataset in DATASETS for column in table.columns)
        assert all(len(values) == len(table.columns) for values in table.rows.values()) and ASC in table.rows
    assert LINEAR_IMAGENET.rows["DINOv2, ViT-B"] == (83.2, None)


def test_what_the_paper_prints_twice_is_shown_twice() -> None:
    cifar = TRANSFER_LINEAR.columns[1]
    assert cifar.dataset == "cifar10" and also_printed(TRANSFER_LINEAR, ASC, cifar) == [(95.3, "the comparison table")]
    twice = {column.dataset for column in COMPARISON.columns if also_printed(COMPARISON, ASC, column)}
    assert twice == {"cifar10", "cifar100", "voc2007", "sun397"}
    assert (78.6, "the text") in also_printed(COMPARISON, "BYOL", COMPARISON.columns[0])
    text = markdown(make_tables([result("cifar10", 0.5)]))
    assert line_of(text, ASC, "Transfer, linear evaluation")[2] == "91.9 (95.3 in the comparison table)"


def test_our_rows_stand_in_the_papers_tables_with_mean_and_deviation() -> None:
    results = [
        result("cifar10", 0.471, seed=0),
        result("cifar10", 0.475, seed=1),
        result("cifar10", 0.488, seed=2),
        result("pets", 0.25),
        result("imagenet", 0.31, top5=0.55),
        result("cifar10", 0.8, protocol="finetune"),
    ]
    text = markdown(make_tables(results))
    assert CAVEAT in text and "Scale and data differ" in text
    row = line_of(text, "ours: mine, fast_linear, 3 seeds", "Transfer, linear evaluation")
    mean, deviation = statistics.mean([47.1, 47.5, 48.8]), statistics.stdev([47.1, 47.5, 48.8])
    assert row[2] == f"{mean:.1f} ± {deviation:.1f}" == "47.8 ± 0.9"
    assert row[10] == "25.0" and row[1] == "–"
    assert line_of(text, "ours: mine, fast_linear", "Linear evaluation on ImageNet")[1:] == ["31.0", "55.0"]
    comparison = line_of(text, "ours: mine, fast_linear", "Comparison with other methods, linear evaluation, ViT-B")
    assert comparison[1:4] == ["31.0", "55.0", "47.8 ± 0.9"]
    assert line_of(text, "ours: mine, paper_finetune", "Transfer, fine-tuned")[2] == "80.0"
    assert "- cifar10: a copy of 9 images" in text and "- mine: a small network called mine" in text


def test_datasets_and_protocols_that_the_paper_lacks_have_tables_of_their_own() -> None:
    text = markdown(make_tables([result("pack", 0.125), result("scenes", 0.6, protocol="knn")]))
    assert line_of(text, "ours: mine, fast_linear, 1 seed", "Linear evaluation, other datasets")[1] == "12.5"
    assert "scenes (top-1, k = 10)" in text
    assert line_of(text, "ours: mine, knn", "Nearest neighbours")[1:] == ["60.0", "60.0"]
    assert text.count("No result of ours yet.") == 4


def test_encoders_of_one_name_are_told_apart_and_runs_can_be_pooled() -> None:
    results = [result("cifar10", 0.4, name="run_0", identity="aaaaaaaa"), result("cifar10", 0.5, name="run_1")]
    text = markdown(make_tables([*results, replace(results[0], encoder=results[0].encoder | {"identity": "bbbbbbbb"})]))
    heading = "Transfer, linear evaluation"
    assert line_of(text, "ours: run_0 (aaaaaa), fast_linear, 1 seed", heading)[2] == "40.0"
    assert line_of(text, "ours: run_0 (bbbbbb), fast_linear, 1 seed", heading)[2] == "40.0"
    assert line_of(text, "ours: run_1, fast_linear, 1 seed", heading)[2] == "50.0"
    pooled = markdown(make_tables(results, pool=True))
    assert line_of(pooled, "ours: run, fast_linear, 2 runs", heading)[2] == "45.0 ± 7.1"


def test_the_csv_holds_every_number_once() -> None:
    tables = make_tables([result("cifar10", 0.4), result("cifar10", 0.5, seed=1)])
    rows = list(csv.DictReader(io.StringIO(csv_text(tables))))
    printed = sum(value is not None for table in TABLES for values in table.rows.values() for value in values)
    ours = [row for row in rows if row["ours"] == "1"]
    assert len(rows) - len(ours) == printed and {row["table"] for row in ours} == {"comparison", "transfer_linear"}
    assert all(float(row["mean"]) == 45.0 and row["values"] == "2" for row in ours)
    assert float(ours[0]["deviation"]) == pytest.approx(statistics.stdev([40, 50]), abs=1e-4)
    (pets,) = [
        row for row in rows if row["table"] == "transfer_finetuned" and row["row"] == ASC and row["dataset"] == "pets"
    ]
    assert float(pets["mean"]) == 92.3


def test_the_command_writes_markdown_csv_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_result(result("cifar10", 0.4), tmp_path / "results")
    write_result(result("cifar10", 0.4, protocol="knn"), tmp_path / "results" / "deeper")
    (tmp_path / "results" / "config.json").write_text("{}")
    assert main(["report", str(tmp_path / "results"), str(file), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "tables.md").read_text()
    assert text in capsys.readouterr().out and text.count("ours: mine, fast_linear, 1 seed") == 2
    assert "ours: mine, knn, 1 seed" in text
    assert (tmp_path / "out" / "tables.csv").read_text().startswith("table,row,ours")
    with Image.open(tmp_path / "out" / "tables.png") as picture:
        assert min(picture.size) > 300


def test_files_that_are_no_results_are_named(tmp_path: Path) -> None:
    good = write_result(result("cifar10", 0.4), tmp_path)
    assert read_result(good) == result("cifar10", 0.4)
    (tmp_path / "other.json").write_text('{"kind": "something"}')
    (tmp_path / "newer.json").write_text(good.read_text().replace('"seconds"', '"moments"'))
    for file, message in {
        "missing.json": "missing.json is no result of asc eval",
        "other.json": "it is something else",
        "newer.json": "it has moments, which this version does not know",
    }.items():
        with pytest.raises(ValueError, match=message):
            read_results([tmp_path / file])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"there is no result in .*empty; make some with asc eval"):
        read_results([tmp_path / "empty"])
