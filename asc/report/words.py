"""Small phrases that every report needs."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch


def plural(count: int, noun: str) -> str:
    """The count and the noun, which takes an s unless it is one."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration(seconds: float) -> str:
    """A time that a reader grasps at once: 41 s, 4 min 7 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    return {"asc": _own_version(), "torch": torch.__version__, "python": platform.python_version()}


def _own_version() -> str:
    try:
        return version("adaptive-superpixel-coding")
    except PackageNotFoundError:
        return "unknown (not installed)"
