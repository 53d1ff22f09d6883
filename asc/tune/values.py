"""Settings of a run by their dotted names, such as ``model.superpixels.budget``, and their values as plain text."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Config = TypeVar("Config")

JOIN = "+"
"""What stands between the numbers of a setting that has several, such as ``0+1+2``."""
_WORDS = {"true": True, "false": False}
_NONE = "none"


def kind_of(config: Any, name: str) -> Any:
    """The type of a setting; a ValueError that says what is wrong with its name."""
    *sections, last = name.split(".")
    for section in sections:
        _check_field(config, section, name)
        config = getattr(config, section)
        if not is_dataclass(config):
            raise ValueError(f"there is no setting {name}: {section} has no settings of its own here")
    _check_field(config, last, name)
    if is_dataclass(getattr(config, last)):
        inner = ", ".join(field.name for field in fields(getattr(config, last)))
        raise ValueError(f"{name} is a group of settings; name one of them: {inner}")
    return get_type_hints(type(config))[last]


def _check_field(config: Any, field: str, name: str) -> None:
    known = [known.name for known in fields(config)]
    if field not in known:
        raise ValueError(f"there is no setting {name}: {field!r} is none of {', '.join(known)}")


def value_of(config: Any, name: str) -> Any:
    """The value that a setting has."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """The settings with some of them changed; values as ``plain`` gives them will do."""
    for name, value in values.items():
        typed = typed_value(value, kind_of(config, name), name)
        config = _with_value(config, name.split("."), typed, name)
    return config


def _with_value(config: Any, path: list[str], value: Any, name: str) -> Any:
    if len(path) > 1:
        value = _with_value(getattr(config, path[0]), path[1:], value, name)
    try:
        return replace(config, **{path[0]: value})
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def typed_value(value: Any, kind: Any, name: str) -> Any:
    """A text, or what JSON made of a value, in the type of its setting."""
    for option in _options(kind):
        try:
            return _converted(value, option)
        except (ValueError, TypeError):
            continue
    raise ValueError(
        f"{name} cannot be {value!r}; it must be {' or '.join(_named(option) for option in _options(kind))}"
    )


def plain(value: Any) -> Any:
    """A value as JSON and Optuna know it: a number, a truth, a text, or None."""
    if isinstance(value, tuple):
        return JOIN.join(str(part) for part in value)
    return str(value) if isinstance(value, Path) else value


def _options(kind: Any) -> list[Any]:
    if get_origin(kind) in (Union, types.UnionType):
        return [option for inner in get_args(kind) for option in _options(inner)]
    return [kind]


def _converted(value: Any, kind: Any) -> Any:
    """A value in one type; a ValueError or TypeError if it does not fit."""
    if kind is type(None):
        return _one_of(None if value == _NONE else value, (None,))
    if value is None:
        raise ValueError("only a setting that may be None can be None")
    if get_origin(kind) is Literal:
        return _one_of(value, get_args(kind))
    if get_origin(kind) is tuple:
        return _several(value, get_args(kind))
    if kind is bool:
        return _one_of(_WORDS.get(str(value).lower(), value), (True, False))
    if isinstance(value, bool):
        raise ValueError("a truth is no number")
    if kind is int and isinstance(value, float):
        return _one_of(int(value), (value,))
    if kind in (int, float, str, Path):
        return kind(value)
    raise TypeError(f"values of the type {kind} cannot be given as text")


def _one_of(value: Any, choices: tuple[Any, ...]) -> Any:
    if value not in choices:
        raise ValueError(f"{value} is none of {choices}")
    return value


def _several(value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    parts = value.split(JOIN) if isinstance(value, str) else list(value)
    if kinds[-1] is ...:
        kinds = (kinds[0],) * len(parts)
    return tuple(_converted(part, kind) for part, kind in zip(parts, kinds, strict=True))


def _named(kind: Any) -> str:
    if kind is type(None):
        return _NONE
    if get_origin(kind) is Literal:
        return ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"numbers joined by {JOIN}"
    if kind is bool:
        return "true or false"
    return {int: "a whole number", float: "a number", str: "a text"}.get(kind, str(getattr(kind, "__name__", kind)))
