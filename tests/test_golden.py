"""Twenty steps of the recipe ``demo`` give the losses they always gave: no refactoring changes training unseen.

A change that is meant to alter training prints the new values with

    python tests/test_golden.py
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from asc.pretrain.run import pretrain
from asc.recipes.pretrain import demo
from asc.run_folder import read_log

GOLDEN = []


def losses(out: Path) -> list[float]:
    config = demo()
    pretrain(
        replace(
            config,
            out=out,
            # The schedule is that of the whole recipe; only the first steps of it are taken.
            machine=replace(config.machine, log_every=1, stop_after=None),
            train=replace(config.train, steps=20),
            watch=replace(config.watch, knn_every=0, knn_labelled=10, knn_judged=10, pictures=0),
        )
    )
    return [line["loss"] for line in read_log(out) if "loss" in line]


def test_the_first_steps_of_the_demo_are_what_they_were(tmp_path: Path) -> None:
    assert losses(tmp_path / "run") == pytest.approx(GOLDEN, rel=2e-3)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print([round(loss, 5) for loss in losses(Path(folder) / "run")])
