"""What is compared: every variant is a change of one and the same pre-training recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from asc.grouping.budget import equal_keep
from asc.layer import SuperpixelConfig
from asc.pretrain.run import PretrainConfig
from asc.vit import VitConfig

PLAIN = "plain"
"""The variant without superpixels: what the others are measured by, in accuracy and in time."""
PRINTED_THETA = 0.2


@dataclass(frozen=True)
class Variant:
    """A change of the recipe."""

    name: str
    """Short, for files."""
    label: str
    """What tables call it."""
    change: Callable[[PretrainConfig], PretrainConfig]
    """The recipe as this variant runs it."""
    calibrated: bool = True
    """Whether the thresholds are set on training frames before the first step."""
    recalibrated: bool = True
    """Whether they are set once more after pre-training, and for the images of dense tasks. Where the question is what
    a training does to the thresholds, the answer must not be undone."""


def _superpixels(config: PretrainConfig) -> SuperpixelConfig:
    superpixels = config.model.superpixels
    if superpixels is None or config.plain:
        raise ValueError("the recipe has no superpixels to ablate: model.superpixels is None, or plain is set")
    return superpixels


def _with(**settings: Any) -> Callable[[PretrainConfig], PretrainConfig]:
    """The recipe with other settings of the superpixels."""

    def change(config: PretrainConfig) -> PretrainConfig:
        superpixels = replace(_superpixels(config), **settings)
        return replace(config, model=replace(config.model, superpixels=superpixels))

    return change


def _plain(config: PretrainConfig) -> PretrainConfig:
    _superpixels(config)
    return replace(config, plain=True)


def _grouped_pool(config: PretrainConfig) -> PretrainConfig:
    """The plain network, whose last tokens get as many votes as superpixels would be left."""
    superpixels = replace(
        _superpixels(config),
        threshold="budget",
        grouping="components",
        neighbourhood="global",
        blocks=(config.model.depth - 1,),
        keep=last_share(config.model),
        # All tokens enter every block; the monitor of the training compares with this.
        budget=1.0,
    )
    return replace(config, model=replace(config.model, pool="grouped", superpixels=superpixels))


def last_share(model: VitConfig) -> float:
    """Share of the original tokens that is left at the end when all layers keep the same."""
    superpixels, blocks = model.superpixels, model.superpixel_blocks
    assert superpixels is not None
    keep = superpixels.keep or equal_keep(superpixels.budget, blocks, model.depth)
    return float(keep ** len(blocks))


_BUDGET: dict[str, Any] = {"threshold": "budget"}

_ALL = (
    Variant("superpixels", "superpixels (the recipe)", _with()),
    Variant(PLAIN, "plain ViT", _plain),
    Variant("control", "plain ViT, last tokens grouped for pooling only", _grouped_pool),
    Variant("learned", "budget, learned allocation", _with(**_BUDGET, learn_allocation=True)),
    Variant("equal", "budget, equal shares", _with(**_BUDGET, learn_allocation=False)),
    Variant(
        "total",
        "one controller for the total",
        _with(threshold="budget", learn_allocation=False, control="total"),
        recalibrated=False,
    ),
    Variant("gradient", "θ by gradient alone", _with(threshold="learnable"), recalibrated=False),
    Variant(
        "printed",
        f"θ fixed at {PRINTED_THETA}, as printed",
        _with(threshold="fixed", theta=PRINTED_THETA),
        calibrated=False,
        recalibrated=False,
    ),
    Variant("fixed", "θ fixed at its calibrated start", _with(threshold="fixed"), recalibrated=False),
    Variant("global", "components, all pairs", _with(grouping="components", neighbourhood="global")),
    Variant("spatial", "components, touching pairs", _with(grouping="components", neighbourhood="spatial")),
    Variant(
        "bipartite",
        "ToMe-style, one vote a token",
        _with(grouping="bipartite", neighbourhood="global", links="all", size_weight=0.0),
    ),
    Variant("mean", "mean", _with(merge="mean")),
    Variant("max", "max", _with(merge="max")),
    Variant("attention", "attention", _with(merge="attention")),
)

VARIANTS: dict[str, Variant] = {variant.name: variant for variant in _ALL}
