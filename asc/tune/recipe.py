"""Recipes in files: a recipe of the library with some values changed, such as those that a search found best.

    {"recipe": "small", "plain": false, "data": ["shards"], "settings": {"train.lr": 0.003}, "found": {...}}

``asc pretrain FILE`` runs it, with any setting changed on the command line as usual.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from asc.files import write_whole
from asc.pretrain.run import PretrainConfig
from asc.recipes.pretrain import RECIPES
from asc.settings import with_values

SUFFIX = ".json"


class Recipe(NamedTuple):
    """Where a run comes from."""

    name: str
    """The recipe of the library."""
    settings: dict[str, Any]
    """What is changed in it, by dotted name."""
    config: PretrainConfig
    """The run itself."""


def find_recipe(name: str) -> Recipe:
    """A recipe by its name, or by its file."""
    if name in RECIPES:
        return Recipe(name, {}, RECIPES[name]())
    if not name.endswith(SUFFIX):
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, or a file of asc tune --export, not {name!r}")
    return _read(Path(name))


def read_recipe(file: Path) -> PretrainConfig:
    """The run that a file describes."""
    return _read(file).config


def _read(file: Path) -> Recipe:
    try:
        content = json.loads(file.read_text())
        name, settings, plain, data = (content[key] for key in ("recipe", "settings", "plain", "data"))
        config = replace(RECIPES[name](), out=Path("runs") / file.stem, plain=bool(plain), data=tuple(data))
        return Recipe(name, dict(settings), with_values(config, settings))
    except (OSError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        reason = f"{error} is missing or unknown" if isinstance(error, KeyError) else error
        raise ValueError(f"{file} is no recipe that can be read ({reason}); asc tune --export writes one") from error


def write_recipe(
    folder: Path, name: str, search: Mapping[str, Any], values: Mapping[str, Any], found: Mapping[str, Any]
) -> Path:
    """Write the recipe of a point.

    Args:
        folder: Where to.
        name: Of the recipe, and of its file.
        search: The settings of the search.
        values: The settings of the point, by dotted name.
        found: How it was found, for the reader.
    """
    if not re.fullmatch(r"[\w-]+", name):
        raise ValueError(f"export must be a name of letters, digits, - and _, got {name!r}")
    settings = {**search["recipe_settings"], **search["fixed"], **values}
    content = {
        "recipe": search["recipe"],
        "plain": search["plain"],
        "data": search["data"],
        # Where a search was run is no part of what it found.
        "settings": {name: value for name, value in settings.items() if not name.startswith("machine.")},
        "found": dict(found),
    }
    file = folder / f"{name}{SUFFIX}"
    write_whole(file, json.dumps(content, indent=2).encode() + b"\n")
    return file
