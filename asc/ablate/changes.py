"""Settings of a config changed by words such as ``train.steps=500``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

Config = TypeVar("Config")


def with_changes(config: Config, words: Sequence[str]) -> Config:
    """A config with other settings; all at once, since some only fit together."""
    tree: dict[str, Any] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign:
            raise ValueError(f"changes: {word!r} gives no value; write it as train.steps=500")
        *way, last = name.split(".")
        branch = tree
        for part in way:
            branch = branch.setdefault(part, {})
            if not isinstance(branch, dict):
                raise ValueError(f"changes: {word!r} changes a setting that another change replaces")
        branch[last] = value
    return _changed(config, tree, "")


def _changed(config: Config, tree: dict[str, Any], place: str) -> Config:
    known = [field.name for field in fields(config)] if is_dataclass(config) else []
    new = {}
    for name, change in tree.items():
        if name not in known:
            raise ValueError(f"changes: there is no setting {place}{name}; {_choices(place, known)}")
        old = getattr(config, name)
        if isinstance(change, dict):
            new[name] = _changed(old, change, f"{place}{name}.")
        else:
            new[name] = _value(change, old, f"{place}{name}")
    return replace(config, **new)  # type: ignore[type-var]


def _choices(place: str, known: Sequence[str]) -> str:
    if not known:
        return f"{place.rstrip('.')} has no settings of its own"
    return f"choose from {', '.join(known)}"


def _value(text: str, old: object, name: str) -> Any:
    try:
        value = frozen(json.loads(text))
    except json.JSONDecodeError:
        value = text
    if value is None:
        return None
    if isinstance(old, bool) != isinstance(value, bool) or is_dataclass(old):
        raise ValueError(f"changes: {name} cannot be {text}; it is {old!r} now")
    if isinstance(old, int | float) and not isinstance(value, int | float):
        raise ValueError(f"changes: {name} must be a number, got {text}")
    return float(value) if isinstance(old, float) else value


def frozen(value: Any) -> Any:
    """Lists as tuples."""
    return tuple(frozen(each) for each in value) if isinstance(value, list) else value
