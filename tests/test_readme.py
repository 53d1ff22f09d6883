"""What the README says is true."""

import re
from pathlib import Path

import pytest

from asc.cli import main
from asc.data.prepare import PrepareSettings
from asc.export.run import ExportSettings
from asc.pretrain.run import PretrainConfig
from asc.report.command import ReportSettings
from asc.tasks.classify.run import FastLinearConfig, TrainedConfig
from asc.tasks.classify.suite import SuiteConfig
from asc.tasks.segment.run import SegmentPredictSettings
from asc.tasks.segment.task import SegmentConfig

README = Path(__file__).parent.parent / "README.md"


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert example is not None
    exec(compile(example[1], "README.md", "exec"), {})
    assert "torch.Size([8, 192]) torch.Size([8, 192, 24, 24]) LayerStats(" in capsys.readouterr().out


def test_every_file_it_names_exists() -> None:
    for path in re.findall(r"`((?:asc|docs)/[\w./]*)`|\((docs/[\w./]*)\)|`(\w+\.md)`", README.read_text()):
        name = "".join(path)
        assert (README.parent / name).exists(), name


def test_its_commands_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr("asc.cli._function_for", lambda settings: given.append)
    lines = re.findall(r"^asc (.*?)(?: +#.*)?$", README.read_text(), re.MULTILINE)
    assert [main(line.split()) for line in lines] == [0] * 9
    prepare, pretrain, suite, finetune, peer, report, train, predict, exported = given
    assert isinstance(prepare, PrepareSettings) and prepare.dst == Path("shards")
    assert isinstance(pretrain, PretrainConfig) and pretrain.data == ("shards",) and pretrain.out == Path("runs/mine")
    assert isinstance(suite, SuiteConfig) and suite.datasets == ("cifar10", "pets", "flowers102")
    # What one command writes is what the next one reads.
    assert isinstance(finetune, TrainedConfig) and Path(finetune.checkpoint) == pretrain.out
    assert isinstance(peer, FastLinearConfig) and peer.checkpoint.startswith("timm:")
    assert isinstance(report, ReportSettings) and report.results == (suite.out,)
    assert isinstance(train, SegmentConfig) and Path(train.encoder) == pretrain.out
    assert isinstance(predict, SegmentPredictSettings) and predict.model == train.out
    assert isinstance(exported, ExportSettings) and exported.format == "timm"
