"""Every kernel compiles for the GPUs that people have, and asks for no more than those give. No GPU is needed."""

import re
from pathlib import Path

import pytest

pytest.importorskip("triton")
import compiled_kernels as compiled

from asc import kernels


@pytest.mark.skipif(kernels.interpreted(), reason="kernels are to be compiled")
def test_all_kernels_are_among_the_launches() -> None:
    sources = [Path(path) for path in Path(kernels.__path__[0]).glob("*.py")]
    named = {name for file in sources for name in re.findall(r"\b(?:launch|_run)\(\s*(_\w+)", file.read_text())}
    found = {launch.name for launch in compiled.launches()}
    # Chosen by a variable, which the pattern does not see.
    assert found == named | {"_grad_queries"} and len(named) > 25


# 8.9 has less shared memory than those that kernels were tuned on, and its products of tiles are those of 8.0 and 8.6;
# it takes two minutes.
@pytest.mark.skipif(kernels.interpreted(), reason="kernels are to be compiled")
@pytest.mark.parametrize(
    ("capability", "every"),
    [
        (89, False),
        *(pytest.param(*kind, marks=pytest.mark.slow) for kind in ((80, 0), (90, 1), (100, 0), (120, 1))),
    ],
)
def test_every_kernel_fits_every_gpu(capability: int, every: bool) -> None:
    found = {launch: compiled.needs(launch, capability) for launch in compiled.launches(every)}
    assert len(found) > 200
    too_much = {launch: need for launch, need in found.items() if need.shared > compiled.SHARED[capability]}
    assert not too_much
    fewer = {launch.name for launch, need in found.items() if need.stages < launch.stages}
    # A GPU with little shared memory loads less ahead for wide heads and, where Triton is 3.8 and not 3.6, for best
    # links in single precision.
    small = compiled.SHARED[capability] < 100 << 10
    assert fewer in ([{"_attend", "_grad_queries"}, {"_attend", "_grad_queries", "_join_best"}] if small else [set()])


def test_a_gpu_that_nobody_has_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["compiled_kernels.py", "--kernels", "_attend", "_nonsense"])
    with pytest.raises(SystemExit):
        compiled.main()
    assert "no kernel is called _nonsense; there are _add_parts, _attend" in capsys.readouterr().err
