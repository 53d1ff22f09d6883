"""The recipe ``demo`` learns something: about five minutes for each seed."""

import statistics
from pathlib import Path

import pytest
from demo_seeds import accuracies


@pytest.mark.slow
def test_the_demo_learns_to_recognise_objects_with_unseen_textures(tmp_path: Path) -> None:
    runs = [accuracies(seed, tmp_path) for seed in range(3)]
    assert statistics.median(run["trained"] - run["untrained"] for run in runs) >= 0.10
    assert statistics.median(run["trained"] - run["pixels"] for run in runs) >= 0.10
