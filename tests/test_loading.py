"""Loading in worker processes: how they end."""

import subprocess
import sys
import time
from pathlib import Path

import pytest


def is_alive(process: int) -> bool:
    """Whether it runs; one that has ended but was not asked for its exit code does not."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


# In a file, as a user's script: what is uncaught there ends the process.
SCRIPT = """
import multiprocessing, os, sys, time
from torch.utils.data import Dataset
from asc.data.loading import make_loader
from asc.data.sampling import BatchPlan


class Numbers(Dataset):
    def __getitem__(self, positions):
        if sys.argv[1] == "data" and positions[0] == 4:
            raise RuntimeError("no such sample")
        time.sleep(60 if sys.argv[1] == "slow" and positions[0] > 4 else 0)
        return positions


def learn():
    # The traceback of an error keeps the iterator alive, and so its workers.
    batches = iter(make_loader(Numbers(), BatchPlan(0, 4000, 2), workers=2, pin=False))
    while next(batches)[0] != 4:
        pass
    raise RuntimeError("a bad step")


class Workers(Dataset):
    def __getitem__(self, positions):
        return os.getpid()


def wait_to_be_killed():
    batches = iter(make_loader(Workers(), BatchPlan(0, 4000, 2), workers=2, pin=False))
    print(*{next(batches) for _ in range(8)}, flush=True)
    time.sleep(60)


if __name__ == "__main__":
    if sys.argv[1] in ("fork", "forkserver", "spawn"):
        multiprocessing.set_start_method(sys.argv[1])
        wait_to_be_killed()
    if sys.argv[1] == "child":
        child = multiprocessing.Process(target=learn)
        child.start()
        child.join()
        sys.exit(child.exitcode)
    learn()
"""


@pytest.mark.parametrize("where", ["loop", "data", "slow", "child"])
def test_an_error_in_the_middle_of_an_epoch_ends_the_process_and_its_workers(tmp_path: Path, where: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    begun = time.monotonic()
    ended = subprocess.run([sys.executable, str(script), where], capture_output=True, text=True, timeout=40)
    assert ended.returncode == 1
    message = "no such sample" if where == "data" else "a bad step"
    assert "Traceback" in ended.stderr and f"RuntimeError: {message}" in ended.stderr
    assert "killed" not in ended.stderr
    assert time.monotonic() - begun < 20


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes in /proc")
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_end_with_a_trainer_that_is_killed(tmp_path: Path, method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen([sys.executable, str(script), method], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        workers = [int(word) for word in trainer.stdout.readline().split()]
        assert len(workers) == 2 and all(map(is_alive, workers))
        trainer.kill()
    end = time.monotonic() + 20
    while any(map(is_alive, workers)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(is_alive, workers))
