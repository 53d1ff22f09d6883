"""Tests of Triton kernels without a GPU: in a process of their own, because Triton decides at its import whether to
interpret."""

import os
import subprocess
import sys
from pathlib import Path


def assert_passes_interpreted(file: str) -> None:
    """All tests of a file pass with their kernels interpreted on the CPU."""
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", file]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).parent.parent
    found = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert " passed" in found.stdout
