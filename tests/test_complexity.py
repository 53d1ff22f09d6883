"""``benchmarks/complexity.py``: as many tokens as an image needs, or as many for each."""

import argparse
from pathlib import Path

import complexity
import numpy as np
import pytest
import torch
from complexity import ADAPTIVE, COMPONENTS, PAIRS_TITLE, SAME, Judged
from scipy import stats

from asc.layer import SuperpixelConfig
from asc.tasks.encoders import open_encoder
from asc.vit import AscViT, VitConfig
from asc.weights import save

SETTINGS = argparse.Namespace(tokens=24, size=32, most=6, objects=6)


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = VitConfig(
        width=32, depth=2, heads=2, patch_size=4, image_size=32, superpixels=SuperpixelConfig(blocks="all", budget=0.75)
    )
    folder = tmp_path_factory.mktemp("encoder")
    save(AscViT(config), folder)
    return folder


def test_one_threshold_gives_each_image_its_own_number_and_own_thresholds_give_all_the_same(
    encoder_folder: Path,
) -> None:
    images = complexity.read("scenes", SETTINGS)
    found = complexity.measure(open_encoder(str(encoder_folder)), images, SETTINGS)
    assert len(images.samples) == 6
    for title in COMPONENTS:
        adaptive, same = ([one.tokens for one in found[f"{title}: {how}"]] for how in (ADAPTIVE, SAME))
        assert np.mean(adaptive) == pytest.approx(24, rel=0.06) and np.mean(same) == pytest.approx(24, rel=0.06)
        assert np.std(adaptive) > 2 * np.std(same)
    # Of 64 patches pairs leave 24 by keeping as large a share in both blocks.
    assert len({one.tokens for one in found[PAIRS_TITLE]}) == 1
    assert {one.tokens for one in found["square grid"]} <= {24, 25, 26}
    assert all(0 < one.asa <= 1 and one.union is not None for judged in found.values() for one in judged)
    text = complexity.table(images, found)
    assert all(f"{title}: {ADAPTIVE}" in text for title in COMPONENTS) and PAIRS_TITLE in text


def test_encoders_are_averaged_image_by_image() -> None:
    founds = [
        {"a": [Judged(4, 0.5, 0.1, None), Judged(8, 0.7, 0.3, 0.2)]},
        {"a": [Judged(6, 0.6, 0.2, None), Judged(8, 0.9, 0.1, 0.4)]},
    ]
    (mean,) = complexity.averaged(founds).values()
    assert mean[0].tokens == 5 and mean[0].union is None
    assert mean[1] == pytest.approx((8, 0.8, 0.2, 0.3))


def test_images_are_cut_into_three_parts_by_their_segments() -> None:
    parts = complexity.parts_of([5, 1, 9, 2, 7, 3])
    assert [part.tolist() for part in parts] == [[1, 3], [5, 0], [4, 2]]


def test_void_and_slivers_are_no_segments() -> None:
    truth = np.zeros((100, 100), dtype=np.int64)
    truth[0, :50], truth[1, :9], truth[2:4, :5] = -1, 1, 2
    assert complexity.segments(truth) == 2  # 0 and 2; 1 has nine pixels of 10,000


def test_less_error_is_a_paired_interval() -> None:
    errors = np.array([[0.10, 0.30, 0.20, 0.25], [0.15, 0.32, 0.21, 0.33]])
    own, peer = ([Judged(1, 0.9, float(error), None) for error in row] for row in errors)
    told = complexity.less_error(own, peer)
    mean, half = (float(word) for word in told.split(" ± "))
    less = errors[1] - errors[0]
    low, high = stats.ttest_1samp(less, 0).confidence_interval(0.95)
    assert mean == pytest.approx(less.mean(), abs=1e-4)
    assert (mean - half, mean + half) == pytest.approx((low, high), abs=2e-4)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--encoders", "nowhere"], "there is no encoder nowhere"),
        (["--encoders", "random", "--data", "nowhere"], "there is no folder nowhere"),
        (["--encoders", "random", "--most", "2"], "--most must be at least 3"),
    ],
)
def test_mistakes_are_told_in_a_line(
    words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["complexity.py", *words])
    with pytest.raises(SystemExit):
        complexity.main()
    assert told in capsys.readouterr().err
