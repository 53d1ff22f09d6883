"""Settings as text: of a run by dotted names such as ``model.superpixels.budget``, of a command by its words."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from asc.train import TrainingStoppedError

Config = TypeVar("Config")

JOIN = "+"
"""What stands between the numbers of a setting that has several, such as ``0+1+2``."""
_WORDS = {"true": True, "false": False}
_NONE = "none"


def kind_of(config: Any, name: str) -> Any:
    """The type of a setting; a ValueError that says what is wrong with its name."""
    kind, value = _hint_and_value(config, name)
    if is_dataclass(value):
        inner = ", ".join(field.name for field in fields(value))
        raise ValueError(f"{name} is a group of settings; name one of them: {inner}")
    return kind


def _hint_and_value(config: Any, name: str) -> tuple[Any, Any]:
    *sections, last = name.split(".")
    for section in sections:
        _check_field(config, section, name)
        config = getattr(config, section)
        if not is_dataclass(config):
            raise ValueError(f"there is no setting {name}: {section} has no settings of its own here")
    _check_field(config, last, name)
    return get_type_hints(type(config))[last], getattr(config, last)


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
    """The settings with some of them changed, all at once, since some only fit together; values as ``plain`` gives
    them will do."""
    changed: Config = _with_all(config, {name: _typed(config, name, value) for name, value in values.items()}, "")
    return changed


def _typed(config: Any, name: str, value: Any) -> Any:
    # A group of settings cannot be given as text, but some can be left out.
    if value in (None, _NONE) and type(None) in _options(_hint_and_value(config, name)[0]):
        return None
    return typed_value(value, kind_of(config, name), name)


def with_words(config: Config, words: Sequence[str]) -> Config:
    """The same from words such as ``train.steps=500``."""
    values = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign:
            raise ValueError(f"{word!r} gives no value; write it as train.steps=500")
        values[name] = value
    return with_values(config, values)


def _with_all(config: Any, values: Mapping[str, Any], place: str) -> Any:
    own = {name: value for name, value in values.items() if "." not in name}
    below: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, point, rest = name.partition(".")
        if point:
            below.setdefault(section, {})[rest] = value
    for section, changes in below.items():
        own[section] = _with_all(own.get(section, getattr(config, section)), changes, f"{place}{section}.")
    try:
        return replace(config, **own)
    except ValueError as error:
        raise ValueError(f"{', '.join(place + name for name in values)}: {error}") from error


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


# --- Commands without tyro --------------------------------------------------------------------------------


def run_command(
    kind: Callable[..., Config], run: Callable[[Config], object], program: str, words: Sequence[str]
) -> int:
    """Run a command as ``asc.cli`` does, but without what it needs; returns the exit code.

    Args:
        kind: The dataclass of the command's settings.
        run: Function that takes them.
        program: What the user called.
        words: What stood behind that.
    """
    return exit_code(lambda: run(parse_command(kind, program, words)))


def exit_code(command: Callable[[], object]) -> int:
    """Run a command and say how it ended, as a program does."""
    try:
        command()
    except ValueError as error:
        # What a user got wrong is told in one line; a traceback would only hide it.
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except TrainingStoppedError as stopped:
        print(stopped, file=sys.stderr)
        return stopped.code
    except BrokenPipeError:
        # Whoever read along, `head` say, has enough. What is still unwritten must not fail once more at the very end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}; check the path and its permissions", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped by Ctrl-C; what was finished is kept", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def parse_command(kind: Callable[..., Config], program: str, words: Sequence[str]) -> Config:
    """The settings that the words say, by the fields of their dataclass; those without a default need no name."""
    parser = argparse.ArgumentParser(prog=program, description=kind.__doc__)
    types_by_name = get_type_hints(kind)
    for field in fields(kind):  # type: ignore[arg-type]
        reading = _reading(types_by_name[field.name])
        if field.default is MISSING:
            parser.add_argument(field.name, **reading)
        else:
            parser.add_argument(f"--{field.name.replace('_', '-')}", default=field.default, **reading)
    given = vars(parser.parse_args(words)).items()
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given})


def _reading(kind: Any) -> dict[str, Any]:
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) is tuple:
        return {"nargs": "*", "type": get_args(kind)[0]}
    return {"type": next((inner for inner in get_args(kind) if inner is not type(None)), kind)}
