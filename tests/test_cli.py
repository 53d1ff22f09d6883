"""The command line: words, recipes and what a user may get wrong."""

import pytest

from asc.cli import _parse, main
from asc.recipes.detect import paper_detr
from asc.recipes.segment import paper
from asc.tasks.depth.run import DepthPredictSettings
from asc.tasks.detect.run import DetectEvaluation
from asc.tasks.segment.task import SegmentConfig


def test_a_task_starts_from_its_recipe_and_every_setting_can_be_changed() -> None:
    settings = _parse(["train", "segment", "--recipe", "paper", "--train.batch", "4", "--head.kind", "mlp"])
    assert isinstance(settings, SegmentConfig)
    assert settings.train.batch == 4 and settings.head.kind == "mlp"
    assert settings.train.steps == paper().train.steps == 20_000
    assert _parse(["train", "detect", "--recipe=paper_detr"]) == paper_detr()


def test_trained_models_judge_and_predict() -> None:
    judged = _parse(["eval", "detect", "--model", "runs/cars", "--out", "here"])
    assert isinstance(judged, DetectEvaluation) and judged.data == "scenes"
    assert isinstance(
        _parse(["predict", "depth", "--model", "runs/room", "--images", "in", "--out", "out"]), DepthPredictSettings
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "segment", "--recipe", "large"], "recipe must be one of small, paper for asc train segment"),
        (["eval", "segment", "--model", "nowhere", "--out", "out"], "nowhere"),
        (["predict", "detect", "--model", "nowhere", "--images", "nowhere", "--out", "out"], "nowhere"),
        (["train", "depth", "--data", "nowhere"], "nowhere"),
        (["train", "segment", "--recipe"], "--recipe needs a name: small or paper"),
        (["train", "segment", "--recipe="], "--recipe needs a name: small or paper"),
        (["train", "depth", "--recipe", "--data", "nowhere"], "--recipe needs a name: "),
        (["eval", "linear", "--recipe"], "--recipe needs a name: fast_linear or paper_linear"),
        (["pretrain", "small", "--model.superpixels.tau", "-1"], "error: --model.superpixels: tau must be positive"),
        (["train", "detect", "--sets.scene.size", "3"], "error: --sets.scene: size must be"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


def test_what_is_wrong_with_a_single_option_is_told_beside_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["pretrain", "small", "--model.superpixels.tau", "little"])
    told = capsys.readouterr().err
    assert leaving.value.code == 2 and "--model.superpixels.tau" in told and "Softness" in told
