"""What the folder of a pre-training run says about it: numbers and curves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from asc.data.sampling import FrameChoice
from asc.layer import LayerStats
from asc.pretrain.run import RESULT_FILE
from asc.report.curves import Panel, draw_curves
from asc.report.page import Figure
from asc.run_folder import CONFIG_FILE, read_log

_KNN_NOTE = (
    "held-out scenes with unseen textures and hues; the number in the table is that of the encoder file, whose "
    "thresholds are set once more after the training"
)


@dataclass(frozen=True)
class Training:
    """A finished run, as its folder tells it."""

    config: dict[str, Any]
    """The resolved settings."""
    log: list[dict[str, Any]]
    """The lines of the log."""
    result: dict[str, Any]
    """What was measured on the encoder file."""

    @classmethod
    def read(cls, folder: Path) -> Training:
        """Read the folder of a finished run."""
        config, result = (json.loads((folder / name).read_text()) for name in (CONFIG_FILE, RESULT_FILE))
        return cls(config, read_log(folder), result)

    def curve(self, name: str) -> dict[int, float]:
        """The values that were logged under a name, by step."""
        # A run that was killed before its first checkpoint logged its first steps twice: the later line counts.
        values = {line["step"]: line[name] for line in self.log if line.get(name) is not None}
        return dict(sorted(values.items()))

    def last(self, name: str) -> float:
        """The last value that was logged under a name."""
        return next(reversed(self.curve(name).values()))

    @cached_property
    def knn(self) -> dict[str, float]:
        """kNN accuracy without training, of the raw pixels, and of the encoder file."""
        return {
            "untrained": self.curve("knn")[0],
            "pixels": self.curve("knn_pixels")[0],
            "trained": float(self.result["knn"]),
        }

    @property
    def steps(self) -> int:
        """Optimiser steps."""
        return max(self.curve("loss"))

    @property
    def seconds(self) -> float:
        """Time of the training, over all starts, from the images a second that were logged."""
        views = FrameChoice(**self.config["clips"]["frames"]).views
        images_of_a_step = self.config["train"]["batch"] * views
        before, seconds = 0, 0.0
        for step, images_per_second in self.curve("images_per_second").items():
            seconds += (step - before) * images_of_a_step / images_per_second
            before = step
        return seconds

    @property
    def warnings(self) -> list[str]:
        """What the run warned of, each once."""
        return list(dict.fromkeys(line["warning"] for line in self.log if "warning" in line))

    @property
    def blocks(self) -> list[dict[str, float]]:
        """The last numbers of every block in training."""
        names = LayerStats.__dataclass_fields__
        return [
            {"after_blocks": block + 1} | {name: self.last(f"block_{block:02d}/{name}") for name in names}
            for block in self.merging_blocks
        ]

    @property
    def merging_blocks(self) -> list[int]:
        """The blocks that hold a superpixel layer."""
        names = {name for line in self.log for name in line if name.endswith("/tokens_mean")}
        return sorted(int(name.removeprefix("block_").split("/")[0]) for name in names)

    def record(self) -> dict[str, object]:
        """All that the page says of the training, for a JSON file."""
        return {
            "knn": self.knn,
            "knn_by_step": self.curve("knn"),
            "steps": self.steps,
            "seconds": self.seconds,
            "parameters": self.result["parameters"],
            "tokens_share": self.last("tokens_share"),
            "last_loss": self.last("loss"),
            "blocks": self.blocks,
            "warnings": self.warnings,
            "config": self.config,
        }


def training_figures(training: Training) -> list[Figure]:
    """Curves of loss, kNN accuracy, tokens, and spread and rank of the representation."""
    levels = {"raw pixels": training.knn["pixels"], "untrained": training.knn["untrained"]}
    quality = Panel("kNN accuracy", {"in training": training.curve("knn")}, levels, share=True)
    return [
        _figure("Loss", "mean over the steps since the point before", _loss_panel(training)),
        _figure("kNN accuracy", _KNN_NOTE, quality),
        _figure("Tokens after each block", "mean of an image, augmented as for training", _token_panel(training)),
        _figure(
            "Spread and rank of the representation",
            "a batch that collapses to a point has spread 0 and rank 1",
            *_representation_panels(training),
        ),
    ]


def _loss_panel(training: Training) -> Panel:
    return Panel("loss", {"loss": training.curve("loss")}, from_zero=False)


def _token_panel(training: Training) -> Panel:
    names = {f"block {block + 1}": f"block_{block:02d}/tokens_mean" for block in training.merging_blocks}
    return Panel("tokens", {name: training.curve(key) for name, key in names.items()}, ordered=True)


def _representation_panels(training: Training) -> list[Panel]:
    kinds = {"features": "feature", "projections": "projection"}
    return [
        Panel(measure, {name: training.curve(f"{kind}_{measure}") for name, kind in kinds.items()})
        for measure in ("spread", "rank")
    ]


def _figure(title: str, note: str, *panels: Panel) -> Figure:
    return Figure([draw_curves(panels)], f"{title} over the steps of the training", [title, note])
