"""The command line: ``asc demo`` and its siblings.

A command is a dataclass of settings and a function that takes it. To add one, add a line to ``_commands``;
options and help come from the dataclass and the docstrings of its fields.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import tyro

from asc.data.prepare import PrepareSettings, prepare
from asc.demo import DemoSettings, run_demo
from asc.pretrain.run import PretrainConfig, pretrain
from asc.recipes.pretrain import RECIPES
from asc.show import SuperpixelsSettings, show_superpixels
from asc.train import TrainingStoppedError


class Command(NamedTuple):
    """What a word on the command line stands for."""

    settings: Any
    """Type of the settings; no two commands share one."""
    run: Callable[[Any], object]
    """Function that takes the settings."""


def _recipes() -> Any:
    """The type of a pre-training config with one word for each recipe, whose values are the defaults."""
    choices = {name: recipe() for name, recipe in RECIPES.items()}
    descriptions = {name: inspect.cleandoc(recipe.__doc__ or "") for name, recipe in RECIPES.items()}
    return tyro.extras.subcommand_type_from_defaults(choices, descriptions, prefix_names=False)


COMMANDS: dict[str, Command] = {
    "demo": Command(DemoSettings, run_demo),
    "prepare": Command(PrepareSettings, prepare),
    "pretrain": Command(PretrainConfig, pretrain),
    "superpixels": Command(SuperpixelsSettings, show_superpixels),
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
    except TrainingStoppedError as stopped:
        print(stopped, file=sys.stderr)
        return stopped.code
    return 0


def _parse(argv: Sequence[str]) -> object:
    types = {name: command.settings for name, command in COMMANDS.items()}
    settings: object = tyro.extras.subcommand_cli_from_dict(
        types | {"pretrain": Annotated[_recipes(), tyro.conf.arg(name="")]},
        prog="asc",
        description="Adaptive Superpixel Coding: Vision Transformers whose tokens are superpixels.",
        args=argv,
        # Superpixels or not is the setting ``plain``: a word of its own for it would only confuse.
        config=(tyro.conf.AvoidSubcommands,),
    )
    return settings


def _function_for(settings: object) -> Callable[[Any], object]:
    return next(command.run for command in COMMANDS.values() if command.settings is type(settings))


if __name__ == "__main__":
    sys.exit(main())
