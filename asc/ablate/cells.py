"""The files of cells, and the locks by which processes share the runs among them."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from asc.files import write_whole

CELLS, LOCKS = "cells", ".locks"
FINISHED, FAILED = "finished", "failed"
_FIELDS = (
    "name",
    "variant",
    "stands_for",
    "mode",
    "seed",
    "part",
    "protocol",
    "status",
    "reason",
    "values",
    "training",
    "warnings",
    "settings",
    "machine",
    "when",
)

Cell = Mapping[str, Any]


def now() -> str:
    """The time, such that later ones sort behind."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


# --- Files ------------------------------------------------------------------------------------------------


def cell_file(folder: Path, name: str) -> Path:
    """Where a cell lies."""
    return folder / CELLS / f"{name}.json"


def write_cell(folder: Path, cell: Cell) -> None:
    """Keep what a cell has shown."""
    write_whole(cell_file(folder, cell["name"]), json.dumps(cell, indent=1).encode() + b"\n")


def read_cell(folder: Path, name: str) -> Cell | None:
    """A cell by its name, if it is there."""
    file = cell_file(folder, name)
    return _read(file) if file.is_file() else None


def read_cells(folder: Path) -> dict[str, Cell]:
    """All cells of a folder, by name."""
    cells = [_read(file) for file in sorted((folder / CELLS).glob("*.json"))]
    return {cell["name"]: cell for cell in cells}


def _read(file: Path) -> Cell:
    try:
        cell = json.loads(file.read_text())
        missing = [field for field in _FIELDS if field not in cell]
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{file} is no cell of asc ablate ({error}); remove it to make it again") from error
    if missing:
        raise ValueError(f"{file} is no cell of asc ablate: it lacks {', '.join(missing)}; remove it")
    found: Cell = cell
    return found


def is_finished(folder: Path, name: str) -> bool:
    """Whether a cell need never be made again."""
    cell = read_cell(folder, name)
    return cell is not None and cell["status"] == FINISHED


def take_over(folder: Path, other: Path) -> None:
    """Add the cells of another folder; of two with one name a finished one counts, then the one that lies here."""
    cells = read_cells(other)
    if not cells:
        raise ValueError(f"merge: there are no cells in {other / CELLS}; give the folder of another run")
    own = read_cells(folder)
    for name, cell in cells.items():
        if name not in own or (own[name]["status"] != FINISHED and cell["status"] == FINISHED):
            write_cell(folder, cell)


# --- Locks ------------------------------------------------------------------------------------------------


class Claim:
    """A run that this process works on.

    The lock is the kernel's: it ends with the process that holds it, however that dies, and on a shared folder it
    holds between computers as far as the file system has locks.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.file = folder / LOCKS / f"{name}.lock"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        # The file stays when the lock is given back: removing it would let two processes hold "the" lock.
        self._stream = self.file.open("a+")
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.held = True
        except OSError:
            self.held = False
            self._stream.close()
            return
        self._stream.truncate(0)
        self._stream.write(f"{socket.gethostname()} {os.getpid()}\n")
        self._stream.flush()

    def release(self) -> None:
        """Let others have it."""
        self._stream.close()

    def holder_is_dead(self) -> bool:
        """Whether the process that took the lock is gone: then its last children give it back any moment."""
        words = self.file.read_text().split()
        if len(words) != 2 or words[0] != socket.gethostname():
            return False
        try:
            os.kill(int(words[1]), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False
