"""The four ablation tables of the paper: their rows, their columns and the printed numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asc.ablate.variants import PLAIN

Part = Literal["judge", "segment", "detect", "depth"]
"""What an encoder is judged by: ``judge`` is kNN and a linear classifier, the others are trainings."""
TableName = Literal["layer", "threshold", "grouping", "aggregation"]


@dataclass(frozen=True)
class Column:
    """A column that the paper prints, and what stands for it here."""

    title: str
    """What is measured."""
    paper: str
    """What the paper measures."""
    part: Part
    """Which cells hold it."""
    metric: str
    """Name of the number there."""
    dataset: str = ""
    """For ``judge``: the first labelled set with this word in its name stands for the paper's dataset."""
    place: int = 0
    """For ``judge``: the place of the set that does so where no name fits."""
    percent: bool = True
    """Whether the number is a share, shown in per cent."""
    rises: bool = True
    """Whether higher is better."""

    def set_of(self, names: tuple[str, ...]) -> str:
        """The labelled set that stands for the paper's dataset."""
        place = self.place if -len(names) <= self.place < len(names) else 0
        return next((name for name in names if self.dataset in name), names[place])


@dataclass(frozen=True)
class AblationTable:
    """One of the paper's tables."""

    key: TableName
    """The word for it on the command line."""
    title: str
    """What it compares."""
    rows: tuple[str, ...]
    """Names of variants."""
    columns: tuple[Column, ...]
    """What the paper measures."""
    paper: dict[str, tuple[float, ...]]
    """The printed numbers by variant, in the order of the columns."""
    note: str = ""
    """What a reader must know."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """What the encoders of this table are judged by; kNN and linear always."""
        return tuple(dict.fromkeys(("judge", *(column.part for column in self.columns))))


_IMAGENET = Column("linear", "ImageNet linear", "judge", "linear", "imagenet")
_MIOU = Column("segmentation mIoU", "VOC mIoU", "segment", "miou")

LAYER = AblationTable(
    "layer",
    "Superpixel layer",
    ("superpixels", PLAIN, "control"),
    (
        _IMAGENET,
        Column("detection AP50", "VOC07 AP50", "detect", "ap50"),
        Column("depth δ<1.25", "NYU δ<1.25", "depth", "d1"),
    ),
    {"superpixels": (82.1, 77.5, 85.1), PLAIN: (78.6, 74.8, 82.4)},
    "The control groups the last tokens of a plain ViT for pooling only: it has the superpixels' votes but not their "
    "merging. What it has left at the end are votes.",
)

THRESHOLD = AblationTable(
    "threshold",
    "Threshold",
    ("learned", "equal", "total", "gradient", "printed", "fixed", PLAIN),
    (_IMAGENET, Column("linear", "CIFAR-100 linear", "judge", "linear", "cifar", 1), _MIOU),
    {"learned": (82.1, 79.1, 76.3), "printed": (80.3, 78.4, 74.8)},
    "The paper's learnable threshold, its full method, stands beside the budget with learned allocation; read to the "
    "letter it is the row of the gradient alone. Rows without a controller for each block are judged with the "
    "thresholds that the training left; the others have them set once more, as every encoder that is handed out.",
)

GROUPING = AblationTable(
    "grouping",
    "Grouping",
    ("global", "spatial", "bipartite", PLAIN),
    (_MIOU, Column("depth rel", "NYU rel", "depth", "rel", percent=False, rises=False)),
    {"global": (76.3, 0.128), "bipartite": (74.1, 0.137)},
    "All groupings have the same token budget and one vote for each token.",
)

AGGREGATION = AblationTable(
    "aggregation",
    "Aggregation",
    ("mean", "max", "attention"),
    (_IMAGENET, Column("linear", "Flowers linear", "judge", "linear", "flowers", -1)),
    {"mean": (82.1, 96.6), "max": (80.8, 95.2), "attention": (81.4, 96.1)},
)

TABLES: dict[TableName, AblationTable] = {table.key: table for table in (LAYER, THRESHOLD, GROUPING, AGGREGATION)}
