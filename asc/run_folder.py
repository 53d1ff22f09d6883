"""The folder of a run: what was asked for, how it went, and everything needed to go on after any interruption.

    config.json           the resolved settings
    log.jsonl             a line of numbers or a warning for every logged step
    tensorboard/          the same numbers as curves
    checkpoints/          the newest few, and every n-th for good

Files are written beside their place and renamed, so that whatever happens, what lies there is whole.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asc.files import write_whole

CONFIG_FILE, LOG_FILE, LOCK_FILE = "config.json", "log.jsonl", ".lock"
CHECKPOINTS, TENSORBOARD = "checkpoints", "tensorboard"


class Checkpoint(NamedTuple):
    """What a run goes on from."""

    state: dict[str, Any]
    passed_over: list[str]
    """In words, those that are newer but cannot be read."""


class RunFolder:
    """A run on disk.

    Args:
        path: The folder; made if it is not there.
        writes: Whether this process writes; of several processes only the first does.
    """

    def __init__(self, path: Path, writes: bool = True) -> None:
        if path.exists() and not path.is_dir():
            raise ValueError(f"out must be a folder for the run, but {path} is a file")
        self.path = path
        self.writes = writes
        self._board: Any = None
        self._is_new = not path.exists()
        if writes:
            (path / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
            self._lock = _locked(path / LOCK_FILE)

    def begin(self, config: Mapping[str, Any], free: Sequence[str]) -> bool:
        """Save the settings, or check that they are those of the run that lies here already.

        Settings in the sections ``free`` may differ: they do not change what comes out.

        Returns:
            Whether there is a run to continue.
        """
        file = self.path / CONFIG_FILE
        wanted = json.loads(json.dumps(config, default=str))
        # Before the first checkpoint nothing is computed yet that other settings could spoil.
        if file.is_file() and self.checkpoints():
            self._compare(self._saved_settings(file), wanted, free)
        if self.writes:
            write_whole(file, json.dumps(wanted, indent=2).encode() + b"\n")
        return bool(self.checkpoints())

    def _saved_settings(self, file: Path) -> dict[str, Any]:
        try:
            settings: dict[str, Any] = json.loads(file.read_text())
        except ValueError as error:
            raise ValueError(
                f"{file} cannot be read as JSON ({error}); mend it, or remove it if this command has the same settings"
            ) from error
        return settings

    def _compare(self, before: Mapping[str, Any], now: Mapping[str, Any], free: Sequence[str]) -> None:
        old, new = dotted(before), dotted(now)
        changed = [
            f"{name} was {old.get(name)!r} and is now {new.get(name)!r}"
            for name in sorted(old.keys() | new.keys())
            if not _means_the_same(old.get(name), new.get(name)) and name.split(".")[0] not in free
        ]
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise ValueError(
                f"{self.path} holds a run with other settings: {'; '.join(changed[:3])}{more}. "
                f"Give the same settings to continue it, or another --out for a new run"
            )

    # --- Checkpoints --------------------------------------------------------------------------------------

    def checkpoints(self) -> list[Path]:
        """All checkpoints, oldest first."""
        return sorted((self.path / CHECKPOINTS).glob("step_*.pt"))

    def save_checkpoint(self, step: int, state: Mapping[str, Any], keep: int, keep_every: int | None) -> None:
        """Write a checkpoint, then remove those that are neither among the newest ``keep`` nor an n-th one."""
        if not self.writes:
            return
        file = self.path / CHECKPOINTS / f"step_{step:09d}.pt"
        write_whole(file, lambda temporary: torch.save(dict(state), temporary))
        # Newer ones could not be read, or this run would have gone on from there; their turn comes again.
        for old in [other for other in self.checkpoints() if other <= file][:-keep]:
            if keep_every is None or int(old.stem.split("_")[1]) % keep_every:
                old.unlink()

    def load_checkpoint(self, device: torch.device) -> Checkpoint | None:
        """The newest checkpoint that can be read; None: there is none at all."""
        passed_over: list[str] = []
        for file in reversed(self.checkpoints()):
            try:
                return Checkpoint(torch.load(file, map_location=device, weights_only=True), passed_over)
            except (OSError, MemoryError, torch.OutOfMemoryError) as error:
                # It may well be whole: going on from an older one, or anew, would throw it away.
                raise ValueError(
                    f"the checkpoint {file} cannot be read now ({_first_line(error)}); nothing was changed, try again "
                    f"when that is mended"
                ) from error
            except Exception as error:  # whatever is wrong with the file, an older one may be whole
                passed_over.append(f"the checkpoint {file} is damaged ({_first_line(error)})")
        if passed_over:
            raise ValueError(
                f"no checkpoint of {self.path} can be read, so nothing was changed: {passed_over[0]}. Copy them "
                f"there again if you have them elsewhere; to start anew give another --out, or remove that folder"
            )
        return None

    # --- The log ------------------------------------------------------------------------------------------

    def rewind_log(self, step: int) -> None:
        """Forget what was logged after ``step``: it will be logged again."""
        file = self.path / LOG_FILE
        if self.writes and file.is_file():
            kept = [line for line in read_log(self.path) if line["step"] <= step]
            write_whole(file, "".join(json.dumps(line) + "\n" for line in kept).encode())

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Add a line, and the numbers of it to the curves."""
        if not self.writes:
            return
        line = json.dumps({"step": step} | {name: _plain(value) for name, value in values.items()})
        with (self.path / LOG_FILE).open("a") as stream:
            stream.write(line + "\n")
        for name, value in values.items():
            if isinstance(value, int | float):
                self.board(step).add_scalar(name, value, step)

    def board(self, step: int) -> Any:
        """The writer of TensorBoard's files."""
        if self._board is None:
            from torch.utils.tensorboard import SummaryWriter

            # Curves after this step come from a run that did not get as far as its next checkpoint.
            self._board = SummaryWriter(str(self.path / TENSORBOARD), purge_step=step)
        return self._board

    def close(self) -> None:
        """Finish all files."""
        if self._board is not None:
            self._board.close()
            self._board = None
        if self.writes:
            if self._is_new:
                self._leave_no_trace()
            self._lock.close()

    def _leave_no_trace(self) -> None:
        """Of a run that was refused before it did anything nothing is to stay."""
        checkpoints = self.path / CHECKPOINTS
        nothing_yet = {CONFIG_FILE, LOCK_FILE, CHECKPOINTS}
        if {entry.name for entry in self.path.iterdir()} <= nothing_yet and not any(checkpoints.iterdir()):
            checkpoints.rmdir()
            for name in (CONFIG_FILE, LOCK_FILE):
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's log; a last line that was cut off by a crash does not count."""
    lines = []
    for text in (path / LOG_FILE).read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def _locked(file: Path) -> Any:
    stream = file.open("a")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        stream.close()
        raise ValueError(f"another process is writing to {file.parent}; wait for it, or give another --out") from error
    return stream


def dotted(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by names such as ``train.lr``."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= dotted(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _means_the_same(before: Any, now: Any) -> bool:
    """Whether two values are one, however a path was written."""
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_means_the_same, before, now))
    if isinstance(before, str) and isinstance(now, str):
        return before == now or os.path.abspath(before) == os.path.abspath(now)  # noqa: PTH100 (links are kept)
    return bool(before == now)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _plain(value: Any) -> Any:
    # JSON knows no NaN; null says "no number" everywhere.
    return None if isinstance(value, float) and not math.isfinite(value) else value
