"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def write_whole(file: Path, content: bytes | Callable[[Path], object]) -> None:
    """Write a file so that at any moment either the old or the new one lies there whole.

    ``content`` is bytes, or a function that writes to the path it is given.
    """
    # In the same folder, because a rename is only atomic within one file system.
    unfinished = file.with_name(f".{file.name}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            unfinished.write_bytes(content)
        else:
            unfinished.touch()
            mode = unfinished.stat().st_mode
            content(unfinished)
            # Some libraries let nobody but the owner read what they write. Not all file systems know of that.
            with suppress(OSError):
                unfinished.chmod(mode)
        # Renaming a file whose bytes are still on their way to the disk would leave an empty one after a power cut.
        with unfinished.open("rb") as stream:
            os.fsync(stream.fileno())
        unfinished.replace(file)
        _settle(file.parent)
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error}; what was there before is untouched") from error
    finally:
        with suppress(OSError):  # the folder was not to be had, say
            unfinished.unlink(missing_ok=True)


def _settle(folder: Path) -> None:
    # Without this a power cut could lose the new name itself.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
