"""The command line: ``asc demo`` and its siblings.

A command is a dataclass of settings and a function that takes it. To add one, add a line to ``COMMANDS``;
options and help come from the dataclass and the docstrings of its fields.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tyro

from asc.demo import DemoSettings, run_demo


class Command(NamedTuple):
    """What a word on the command line stands for."""

    settings: type
    """Dataclass of the settings; no two commands share one."""
    run: Callable[[Any], object]
    """Function that takes the settings."""


COMMANDS: dict[str, Command] = {
    "demo": Command(DemoSettings, run_demo),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (default: the arguments of the program) and return the exit code."""
    try:
        settings = _parse(sys.argv[1:] if argv is None else argv)
        _function_for(settings)(settings)
    except ValueError as error:
        # What a user got wrong is told in one line; a traceback would only hide it.
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


def _parse(argv: Sequence[str]) -> object:
    settings: object = tyro.extras.subcommand_cli_from_dict(
        {name: command.settings for name, command in COMMANDS.items()},
        prog="asc",
        description="Adaptive Superpixel Coding: Vision Transformers whose tokens are superpixels.",
        args=argv,
    )
    return settings


def _function_for(settings: object) -> Callable[[Any], object]:
    return next(command.run for command in COMMANDS.values() if command.settings is type(settings))


if __name__ == "__main__":
    sys.exit(main())
