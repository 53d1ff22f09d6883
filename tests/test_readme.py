"""What the README says is true."""

import re
from pathlib import Path

import pytest

from asc.cli import main
from asc.data.prepare import PrepareSettings
from asc.pretrain.run import PretrainConfig

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
    assert [main(line.split()) for line in lines] == [0, 0]
    prepare, pretrain = given
    assert isinstance(prepare, PrepareSettings) and prepare.dst == Path("shards")
    assert isinstance(pretrain, PretrainConfig) and pretrain.data == ("shards",) and pretrain.out == Path("runs/mine")
