"""Which settings are searched, and the values they may take.

A setting is named as on the command line of ``asc pretrain`` (``model.superpixels.budget``); the paper's have short
names. Its values are a list (``lr=1e-3,3e-3``), a range (``lr=1e-4..1e-2:log``), or a single one, which is then not
searched but simply set.

``batch`` is more than ``train.batch``: the learning rate is used as it stands at every batch, not scaled, because the
paper prints one list for both and searches them together; and every batch sees the same number of clips, so that
steps and warm-up shrink where it grows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asc.layer import SuperpixelConfig
from asc.pretrain.run import PretrainConfig
from asc.settings import kind_of, plain, typed_value, value_of, with_values
from asc.train import check_training
from asc.vit import AscViT

Point = dict[str, Any]
"""A value for every searched setting, as JSON knows it."""

PAPER_WORD = "paper"
PAPER = {
    "lr": "0.0005,0.001,0.0016,0.003,0.005",
    "weight_decay": "0.01,0.05,0.1,0.2",
    "batch": "512,1024,2048,4096",
    "theta": "0.05,0.1,0.2,0.5",
    "tau": "0.05,0.1,0.2,0.5",
    "budget": "0.25,0.3,0.4,0.5,0.6",
}
"""The paper's grid; the budget, which the paper does not know, is beside it."""

BATCH = "batch"
SHORT = {
    "lr": "train.lr",
    "weight_decay": "train.weight_decay",
    BATCH: "train.batch",
    "theta": "model.superpixels.theta",
    "tau": "model.superpixels.tau",
    "budget": "model.superpixels.budget",
}
"""Short names of the paper's settings."""
_SHORTENED = {name: short for short, name in SHORT.items() if short != BATCH}
_SUPERPIXELS = "model.superpixels."
# Where these come from, since a search has a setting of its own for each.
_ELSEWHERE = {
    "out": "--out",
    "data": "--data",
    "plain": "--plain",
    "train.seed": "--seeds",
    "watch.knn_data": "--images",
}


@dataclass(frozen=True)
class Values:
    """A list of values."""

    choices: tuple[Any, ...]

    def __str__(self) -> str:
        return ",".join("none" if choice is None else str(choice) for choice in self.choices)


@dataclass(frozen=True)
class Range:
    """All values between two."""

    low: float
    high: float
    log: bool
    """Whether factors matter and not differences."""
    whole: bool
    """Whether only whole numbers are meant."""

    def __str__(self) -> str:
        return f"{self.low}..{self.high}{':log' if self.log else ''}"


@dataclass(frozen=True)
class Space:
    """What is searched around a recipe."""

    base: PretrainConfig
    """The recipe with all that is set and not searched."""
    fixed: dict[str, Any]
    """What is set, by dotted name."""
    dimensions: dict[str, Values | Range]
    """What is searched."""
    dropped: tuple[str, ...]
    """What was asked for but means nothing to the plain network."""

    def settings(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """The dotted settings of a point."""
        values = {SHORT.get(name, name): value for name, value in point.items() if name != BATCH}
        config = with_values(self.base, values)
        superpixels = config.model.superpixels
        if "theta" in point and superpixels is not None and superpixels.threshold != "budget":
            values["watch.calibration"] = 0  # else the thresholds would be set anew before the first step
        if BATCH in point:
            values |= _of_batch(config, point[BATCH])
        return values

    def config(self, point: Mapping[str, Any]) -> PretrainConfig:
        """The run of a point."""
        return with_values(self.base, self.settings(point))

    def texts(self) -> list[str]:
        """The searched settings as they could be given."""
        return [f"{name}={dimension}" for name, dimension in self.dimensions.items()]

    @property
    def size(self) -> int | None:
        """Number of points; None where a range has no end of them."""
        count = 1
        for dimension in self.dimensions.values():
            if isinstance(dimension, Range):
                return None
            count *= len(dimension.choices)
        return count

    def points(self, seed: int) -> Iterator[Point]:
        """Every point of a finite space, in a random order, so that the first few are a fair sample of all."""
        choices = [values.choices for values in self.dimensions.values() if isinstance(values, Values)]
        everything = list(itertools.product(*choices))
        random.Random(seed).shuffle(everything)
        for chosen in everything:
            yield dict(zip(self.dimensions, chosen, strict=True))


def _of_batch(config: PretrainConfig, batch: int) -> dict[str, Any]:
    factor = config.train.batch / batch
    values: dict[str, Any] = {"train.batch": batch, "train.lr_batch": batch}
    for name in ("train.steps", "train.warmup_steps"):
        steps = value_of(config, name)
        if steps is not None:
            values[name] = max(1, round(steps * factor))
    return values


# --- Reading it -------------------------------------------------------------------------------------------


def make_space(texts: Sequence[str], recipe: PretrainConfig, without_superpixels: bool) -> Space:
    """The space that the words of ``--space`` describe.

    Args:
        texts: ``paper`` for the paper's grid, ``name=values`` for a setting; a setting that is named overrides the
            paper's values.
        recipe: What is not searched.
        without_superpixels: Whether settings of superpixels are left out, for the plain network.
    """
    asked: dict[str, Values | Range] = {}
    for text in texts:
        if text != PAPER_WORD:
            name, values = _read(text, recipe)
            if name in asked:
                raise ValueError(f"space: {name} is named twice; give all its values in one list")
            asked[name] = values
    dropped = tuple(name for name in asked if without_superpixels and _is_superpixels(name))
    asked = {name: values for name, values in asked.items() if name not in dropped}
    fixed = _fixed_settings(recipe, asked)
    base = with_values(recipe, fixed)
    used = _used(base.model.superpixels, asked, without_superpixels)
    _check_used(asked, used)
    if PAPER_WORD in texts:
        for name, values_text in PAPER.items():
            if name in used:
                asked.setdefault(name, _read(f"{name}={values_text}", recipe)[1])
    searched = {name: values for name, values in asked.items() if not _is_fixed(values)}
    if not searched:
        raise ValueError("space: nothing is searched: give a setting at least two values, such as lr=1e-3,3e-3")
    space = Space(base, fixed, searched, dropped)
    _check_values(space)
    return space


def _read(text: str, recipe: PretrainConfig) -> tuple[str, Values | Range]:
    name, equals, values = text.partition("=")
    if not equals or not name or not values:
        raise ValueError(f"space: {text!r} is neither {PAPER_WORD} nor of the form name=value,value or name=low..high")
    setting = SHORT.get(name, name)
    if setting in _ELSEWHERE:
        raise ValueError(f"space: {name} is given by {_ELSEWHERE[setting]}")
    try:
        kind = kind_of(recipe, setting)
        dimension = _read_range(values, kind, name) if ".." in values else _read_list(values, kind, name)
    except ValueError as error:
        raise ValueError(f"space: {error}; short names are {', '.join(SHORT)}") from error
    if setting.startswith("machine.") and not _is_fixed(dimension):
        raise ValueError(f"space: {name} changes nothing that is learned; give it one value")
    return _SHORTENED.get(name, name), dimension


def _read_list(text: str, kind: Any, name: str) -> Values:
    choices = tuple(plain(typed_value(part.strip(), kind, name)) for part in text.split(","))
    if len(set(choices)) < len(choices):
        raise ValueError(f"{name} has the same value twice in {text!r}")
    return Values(choices)


def _read_range(text: str, kind: Any, name: str) -> Range:
    ends, _, scale = text.partition(":")
    if scale not in ("", "log"):
        raise ValueError(f"{name}={text!r}: behind a range only :log may stand")
    low, high = (typed_value(end.strip(), kind, name) for end in ends.split("..", 1))
    if any(isinstance(end, bool) or not isinstance(end, int | float) for end in (low, high)):
        raise ValueError(f"{name}={text!r}: only numbers have a range; give a list")
    if not low < high:
        raise ValueError(f"{name}={text!r}: the first number of a range must be the smaller one")
    if scale == "log" and not low > 0:
        raise ValueError(f"{name}={text!r}: a :log range begins above 0")
    return Range(low, high, scale == "log", whole=isinstance(low, int) and isinstance(high, int))


def _is_fixed(dimension: Values | Range) -> bool:
    return isinstance(dimension, Values) and len(dimension.choices) == 1


def _is_superpixels(name: str) -> bool:
    return SHORT.get(name, name).startswith(_SUPERPIXELS)


def _fixed_settings(recipe: PretrainConfig, asked: Mapping[str, Values | Range]) -> dict[str, Any]:
    """The dotted settings of everything that has one value."""
    given = {
        name: values.choices[0] for name, values in asked.items() if isinstance(values, Values) and _is_fixed(values)
    }
    return Space(recipe, {}, {}, ()).settings(given)


def _used(superpixels: SuperpixelConfig | None, asked: Mapping[str, Any], without_superpixels: bool) -> set[str]:
    """The paper's settings that make a difference to this network."""
    used = {"lr", "weight_decay", BATCH}
    if superpixels is None or without_superpixels:
        return used
    kinds = set(asked.get(f"{_SUPERPIXELS}threshold", Values((superpixels.threshold,))).choices)
    components = superpixels.grouping == "components"
    allocates = "budget" in kinds and superpixels.learn_allocation and superpixels.keep is None
    if components and kinds & {"fixed", "learnable"}:
        used.add("theta")
    learns = allocates or "learnable" in kinds or superpixels.key_gradient > 0
    if components and superpixels.gradient != "none" and learns:
        used.add("tau")
    if superpixels.keep is None and ("budget" in kinds or not components):
        used.add("budget")
    return used


def _check_used(asked: Mapping[str, Any], used: set[str]) -> None:
    for name in sorted(set(asked) & set(SHORT) - used):
        raise ValueError(
            f"space: {name} makes no difference here: theta needs model.superpixels.threshold fixed or learnable, "
            f"budget needs it to be budget, tau needs a threshold that learns"
        )


def _check_values(space: Space) -> None:
    """Refuse now what a trial would stumble over later; each value by itself."""
    for name, dimension in space.dimensions.items():
        values = dimension.choices if isinstance(dimension, Values) else (dimension.low, dimension.high)
        for value in values:
            try:
                config = space.config({name: value})
                check_run(config)
                if SHORT.get(name, name).startswith("model."):
                    AscViT(config.encoder)  # knows best what it cannot be
            except ValueError as error:
                raise ValueError(f"space: {name}={value}: {error}") from error


def check_run(config: PretrainConfig) -> None:
    """Refuse a run that cannot work."""
    check_training(config.train, config.machine)
    if config.encoder.image_hw != (config.augment.size, config.augment.size):
        raise ValueError(
            f"augment.size is {config.augment.size} but model.image_size is {config.model.image_size}; set both alike"
        )
