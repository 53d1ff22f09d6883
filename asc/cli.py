"""The command line: ``asc demo`` and its siblings.

A command is a dataclass of settings and a function that takes it. To add one, add a line to ``COMMANDS``;
options and help come from the dataclass and the docstrings of its fields.
"""

from __future__ import annotations

import inspect
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from asc.ablate.run import AblateSettings, run_ablate
from asc.bench.run import BenchSettings, run_bench
from asc.data.prepare import PrepareSettings, prepare
from asc.demo import DemoSettings, run_demo
from asc.export.run import ExportSettings, export
from asc.pretrain.run import PretrainConfig, pretrain
from asc.recipes import classify as classify_recipes
from asc.recipes import depth as depth_recipes
from asc.recipes import detect as detect_recipes
from asc.recipes import segment as segment_recipes
from asc.recipes.pretrain import RECIPES
from asc.report.command import ReportSettings, run_report
from asc.settings import exit_code
from asc.show import SuperpixelsSettings, show_superpixels
from asc.tasks.classify.run import FastLinearConfig, KnnConfig, TrainedConfig, evaluate
from asc.tasks.classify.suite import SuiteConfig, run_suite
from asc.tasks.depth import run as depth
from asc.tasks.depth.task import DepthConfig
from asc.tasks.detect import run as detect
from asc.tasks.detect.task import DetectConfig
from asc.tasks.segment import run as segment
from asc.tasks.segment.task import SegmentConfig
from asc.tasks.superpixels.run import SuperpixelQualityConfig, evaluate_superpixels
from asc.tune.recipe import SUFFIX, read_recipe
from asc.tune.run import TuneSettings, run_tune


class Command(NamedTuple):
    """What a word on the command line stands for."""

    settings: Any
    """Type of the settings; no two commands share one."""
    run: Callable[[Any], object]
    """Function that takes the settings."""


def _recipes(argv: Sequence[str]) -> Any:
    """The type of a pre-training config with one word for each recipe, whose values are the defaults."""
    choices = {name: recipe() for name, recipe in RECIPES.items()}
    descriptions = {name: inspect.cleandoc(recipe.__doc__ or "") for name, recipe in RECIPES.items()}
    if _is_recipe_file(argv):
        choices[_FILE], descriptions[_FILE] = read_recipe(Path(argv[1])), f"The recipe in {argv[1]}."
    return tyro.extras.subcommand_type_from_defaults(choices, descriptions, prefix_names=False)


def _evaluations(argv: Sequence[str]) -> Any:
    """The type of an evaluation's settings, one word for each protocol; ``--recipe`` decides the default values."""
    choices: dict[str, Any] = {}
    descriptions = {}
    for protocol, names in classify_recipes.BY_PROTOCOL.items():
        asked = _asked_recipe(argv, names) if argv[1:2] == [protocol] else None
        name = asked or names[0]
        if name not in names:
            raise ValueError(f"recipe must be one of {', '.join(names)} for asc eval {protocol}, not {name!r}")
        recipe = classify_recipes.RECIPES[name]
        choices[protocol] = recipe(tyro.MISSING, tyro.MISSING)
        others = f" Other recipes: {', '.join(f'--recipe {other}' for other in names if other != name)}."
        text = inspect.cleandoc(recipe.__doc__ or "")
        descriptions[protocol] = f"{text}\n\nRecipe: {name}.{others if len(names) > 1 else ''}"
    choices["suite"] = SuiteConfig(checkpoint=tyro.MISSING, datasets=tyro.MISSING)
    choices |= {name: kind(model=tyro.MISSING, out=tyro.MISSING) for name, kind in _DENSE_EVALUATIONS.items()}
    choices["superpixels"] = SuperpixelQualityConfig(checkpoint=tyro.MISSING, out=tyro.MISSING)
    for name in ("suite", *_DENSE_EVALUATIONS, "superpixels"):
        descriptions[name] = inspect.cleandoc(type(choices[name]).__doc__ or "")
    return tyro.extras.subcommand_type_from_defaults(choices, descriptions, prefix_names=False)


def _trainings(argv: Sequence[str]) -> Any:
    """The type of a task's config, one word for each task; ``--recipe`` decides the default values."""
    choices, descriptions = {}, {}
    for task, recipes in _TASK_RECIPES.items():
        asked = _asked_recipe(argv, tuple(recipes)) if argv[1:2] == [task] else None
        name = asked or next(iter(recipes))
        if name not in recipes:
            raise ValueError(f"recipe must be one of {', '.join(recipes)} for asc train {task}, not {name!r}")
        choices[task] = recipes[name]()
        text = inspect.cleandoc(recipes[name].__doc__ or "")
        others = ", ".join(f"--recipe {other}" for other in recipes if other != name)
        descriptions[task] = f"{text}\n\nRecipe: {name}. Other recipes: {others}."
    return tyro.extras.subcommand_type_from_defaults(choices, descriptions, prefix_names=False)


def _predictions() -> Any:
    """The type of the settings for a folder of images, one word for each task."""
    choices = {
        name: kind(model=tyro.MISSING, images=tyro.MISSING, out=tyro.MISSING) for name, kind in _PREDICTIONS.items()
    }
    descriptions = {name: inspect.cleandoc(kind.__doc__ or "") for name, kind in _PREDICTIONS.items()}
    return tyro.extras.subcommand_type_from_defaults(choices, descriptions, prefix_names=False)


_TASK_RECIPES: dict[str, Any] = {
    "segment": segment_recipes.RECIPES,
    "detect": detect_recipes.RECIPES,
    "depth": depth_recipes.RECIPES,
}
_DENSE_EVALUATIONS: dict[str, Any] = {
    "segment": segment.SegmentEvaluateSettings,
    "detect": detect.DetectEvaluation,
    "depth": depth.DepthEvaluateSettings,
}
_PREDICTIONS: dict[str, Any] = {
    "segment": segment.SegmentPredictSettings,
    "detect": detect.DetectPrediction,
    "depth": depth.DepthPredictSettings,
}


# The word that takes the place of a recipe's file once it is read.
_FILE = "file"
# How paths of settings begin inside tyro, and what follows where a further word chooses the settings.
_TYROS_OWN, _CHOSEN = "__tyro", "settings"


def _is_recipe_file(argv: Sequence[str]) -> bool:
    return len(argv) > 1 and argv[0] == "pretrain" and argv[1].endswith(SUFFIX)


def _asked_recipe(argv: Sequence[str], names: Sequence[str]) -> str | None:
    """What stands behind ``--recipe``: it must be known before the other settings can have defaults."""
    for number, word in enumerate(argv):
        option, sign, value = word.partition("=")
        if option == "--recipe":
            name = value if sign else next(iter(argv[number + 1 :]), "")
            if not name or name.startswith("-"):
                raise ValueError(f"--recipe needs a name: {' or '.join(names)}")
            return name
    return None


def _without_recipe(argv: Sequence[str]) -> list[str]:
    """The arguments without ``--recipe`` and its value: a task's config does not know of recipes."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--recipe":
            next(words, None)
        elif not word.startswith("--recipe="):
            kept.append(word)
    return kept


COMMANDS: dict[str, tuple[Command, ...]] = {
    "ablate": (Command(AblateSettings, run_ablate),),
    "bench": (Command(BenchSettings, run_bench),),
    "demo": (Command(DemoSettings, run_demo),),
    "eval": (
        Command(KnnConfig, evaluate),
        Command(FastLinearConfig, evaluate),
        Command(TrainedConfig, evaluate),
        Command(SuiteConfig, run_suite),
        Command(segment.SegmentEvaluateSettings, segment.evaluate),
        Command(detect.DetectEvaluation, detect.evaluate),
        Command(depth.DepthEvaluateSettings, depth.evaluate),
        Command(SuperpixelQualityConfig, evaluate_superpixels),
    ),
    "export": (Command(ExportSettings, export),),
    "predict": (
        Command(segment.SegmentPredictSettings, segment.predict),
        Command(detect.DetectPrediction, detect.predict),
        Command(depth.DepthPredictSettings, depth.predict),
    ),
    "prepare": (Command(PrepareSettings, prepare),),
    "pretrain": (Command(PretrainConfig, pretrain),),
    "report": (Command(ReportSettings, run_report),),
    "superpixels": (Command(SuperpixelsSettings, show_superpixels),),
    "train": (
        Command(SegmentConfig, segment.train),
        Command(DetectConfig, detect.train),
        Command(DepthConfig, depth.train),
    ),
    "tune": (Command(TuneSettings, run_tune),),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (default: the arguments of the program) and return the exit code."""

    def command() -> None:
        settings = _parse(sys.argv[1:] if argv is None else argv)
        _function_for(settings)(settings)

    return exit_code(command)


# Commands whose settings are chosen by a further word, and what they are for.
_SEVERAL = {
    "pretrain": "Train an encoder on videos, by one of several recipes, or by a file that asc tune --export wrote.",
    "eval": "Judge an encoder by classification (kNN, a linear classifier, fine-tuning, a suite of them) or by "
    "its superpixels, or a model for segmentation, detection or depth.",
    "train": "Train segmentation, detection or depth on an encoder.",
    "predict": "Let a trained model look at a folder of images.",
}


def _parse(argv: Sequence[str]) -> object:
    # Hundreds of settings: only those of the command that is asked for are looked at, the others are named.
    kinds = {name: _kind_of(name, argv) if argv[:1] == [name] else _named(name) for name in COMMANDS}
    with _naming_options():
        settings: object = tyro.extras.subcommand_cli_from_dict(
            kinds,
            prog="asc",
            description="Adaptive Superpixel Coding: Vision Transformers whose tokens are superpixels.",
            args=_words(argv),
            # Superpixels or not is the setting ``plain``: a word of its own for it would only confuse.
            config=(tyro.conf.AvoidSubcommands,),
        )
    return settings


@contextmanager
def _naming_options() -> Iterator[None]:
    """Groups of settings that refuse their values are named as on the command line; tyro would name them by a path of
    its own. All else that tyro says stays as it is."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            yield
    except SystemExit as leaving:
        # What tyro ends the program by: the path of a group, or else an option, which it names well.
        group = getattr(leaving.__context__, "arg", None)
        if isinstance(group, str):
            raise ValueError(f"{_option_of(group)}{getattr(leaving.__context__, 'message', '')}") from None
        sys.stderr.write(said.getvalue())
        raise
    sys.stderr.write(said.getvalue())


def _option_of(group: str) -> str:
    """The beginning of a group's options, with a colon; nothing for a command as a whole."""
    outer, *inner = group.split(".")
    path = inner[1:] if inner[:1] == [_CHOSEN] else inner
    return f"--{'.'.join(path)}: " if outer.startswith(_TYROS_OWN) and path else ""


def _words(argv: Sequence[str]) -> Sequence[str]:
    """The arguments as the settings know them."""
    if argv[:1] == ["train"]:
        return _without_recipe(argv)
    return ["pretrain", _FILE, *argv[2:]] if _is_recipe_file(argv) else argv


def _kind_of(name: str, argv: Sequence[str]) -> Any:
    """The type of a command's settings."""
    if name == "ablate":
        # Which table is a word, not an option.
        return tyro.conf.PositionalRequiredArgs[AblateSettings]
    if name not in _SEVERAL:
        return COMMANDS[name][0].settings
    if name == "pretrain":
        kind = _recipes(argv)
    elif name == "predict":
        kind = _predictions()
    else:
        kind = _evaluations(argv) if name == "eval" else _trainings(argv)
    return _with_words(kind, _SEVERAL[name])


def _named(name: str) -> Callable[[], object]:
    """A command that can only be listed."""

    def listed() -> object:
        raise AssertionError(f"{name} was asked for after all")

    listed.__doc__ = _SEVERAL.get(name) or inspect.getdoc(COMMANDS[name][0].settings)
    return listed


def _with_words(kind: Any, description: str) -> Callable[[Any], object]:
    """A command whose settings are chosen by a further word."""

    def chosen(settings: Any) -> object:
        return settings

    chosen.__annotations__ = {_CHOSEN: Annotated[kind, tyro.conf.arg(name="")], "return": object}
    chosen.__doc__ = description
    return chosen


def _function_for(settings: object) -> Callable[[Any], object]:
    commands = (command for several in COMMANDS.values() for command in several)
    return next(command.run for command in commands if command.settings is type(settings))


if __name__ == "__main__":
    sys.exit(main())
