"""The file of an evaluation: what must be in it to know it again, so that nothing is computed twice or overwritten."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asc.run_folder import dotted

# Settings that may differ between a result and a command that asks for it again: where things lie and how they are
# computed. Weights and data are compared by their digests.
_FREE = ("out", "accelerator")
_SHOWN = 3


def plain_settings(settings: Any) -> dict[str, Any]:
    """The settings of a dataclass as they look after a way through a file."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(settings), default=str))
    return plain


def found_result(
    file: Path, page: Path, settings: Any, contents: Mapping[str, tuple[str, str]]
) -> dict[str, Any] | None:
    """The record of this very evaluation, if it is there; one of other settings in its place is an error.

    An evaluation whose page is not there was interrupted: None, it is made again.

    Args:
        file: The record.
        page: The page, which is written last.
        settings: The command's dataclass.
        contents: By the setting that says where something lies: where the record has its digest, such as
            ``encoder.identity``, and the digest of what lies there now.
    """
    if file.parent.exists() and not file.parent.is_dir():
        raise ValueError(f"out must be a folder, but {file.parent} is a file")
    if not file.is_file():
        return None
    record = _read(file)
    before = dotted(record)
    now = dotted({"settings": plain_settings(settings)})
    changes = [
        f"{name.removeprefix('settings.')} was {before.get(name)!r} and is now {now.get(name)!r}"
        for name in sorted(now.keys() | {name for name in before if name.startswith("settings.")})
        if name.removeprefix("settings.") not in (*_FREE, *contents) and before.get(name) != now.get(name)
    ]
    for setting, (place, digest) in contents.items():
        named_alike = before.get(f"settings.{setting}") == now.get(f"settings.{setting}")
        # Where settings differ that choose among the data, it is they that the user must see.
        if before.get(place) != digest and not (named_alike and changes):
            was = _content(before, setting, str(before.get(place)))
            changes.insert(0, f"{setting} was {was} and is now {_content(now, setting, digest)}")
    if changes:
        more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
        raise ValueError(
            f"{file} holds a result with other settings ({'; '.join(changes[:_SHOWN])}{more}); give the same settings "
            f"to see it, another --out, or remove it"
        )
    return record if page.is_file() else None


def _read(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error}); give another --out or remove it") from error
    if not isinstance(record, dict) or not isinstance(record.get("settings"), dict):
        raise ValueError(f"{file} is no result of asc eval; give another --out or remove it")
    return record


def _content(values: Mapping[str, Any], setting: str, digest: str) -> str:
    return f"{values.get(f'settings.{setting}')!r} (content {digest[:8]})"
