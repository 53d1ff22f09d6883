"""What a model makes of pictures, block by block: numbers, tables and strips of pictures.

Shape letters: L blocks, B pictures, h and w rows and columns of the patch grid, N superpixels.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np

from asc.layer import LayerStats, SuperpixelWarning
from asc.report.gallery import IMAGENET, Colours, Picture, batch_of
from asc.report.page import Figure, Page, Table
from asc.report.pictures import Labels, draw_boundaries, enlarged, paint_means
from asc.report.words import plural
from asc.vit import AscViT

BLOCK_TABLE_NOTE = (
    "Tokens: mean, fewest and most of a picture. Kept: share of its tokens that the block keeps. Largest: "
    "share of the picture that its largest superpixel covers, mean over the pictures. Single: share of "
    "the block's tokens that join no other. θ: the similarity above which two tokens join."
)
"""What the columns of ``block_table`` mean."""


@dataclass(frozen=True)
class Counted:
    """What one block made of one picture."""

    after_blocks: int
    """Number of blocks that have run."""
    tokens: int
    """Superpixels of the picture."""
    largest_share: float
    """Share of the picture that the largest superpixel covers."""


@dataclass(frozen=True)
class Grouping:
    """The superpixels that one model makes of all pictures."""

    labels_LBhw: Labels
    """The superpixel of every patch, after every block, in every picture."""
    blocks: dict[int, LayerStats]
    """Numbers over all pictures, by the index of the block."""
    warnings: list[str]
    """What the library had to complain about."""

    def counted(self, picture: int) -> list[Counted]:
        """The numbers on one picture after every block."""
        maps_Lhw = self.labels_LBhw[:, picture]
        return [_count(labels_hw, after) for after, labels_hw in enumerate(maps_Lhw, start=1)]

    def record(self, pictures: Sequence[Picture]) -> dict[str, object]:
        """All numbers, for a JSON file."""
        return {
            "warnings": self.warnings,
            "blocks": [{"after_blocks": block + 1} | asdict(stats) for block, stats in self.blocks.items()],
            "pictures": {
                picture.name: [asdict(counted) for counted in self.counted(index)]
                for index, picture in enumerate(pictures)
            },
        }


def group(model: AscViT, pictures: Sequence[Picture], colours: Colours = IMAGENET) -> Grouping:
    """Let a model group pictures."""
    with superpixel_warnings() as messages:
        labels_LBhw = model.superpixels(batch_of(pictures, colours)).numpy()
        stats = model.diagnostics()
    return Grouping(labels_LBhw, stats, messages)


@contextmanager
def superpixel_warnings() -> Iterator[list[str]]:
    """Collect the library's warnings for the page; all others go on their way."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SuperpixelWarning)
        yield messages
    for warning in caught:
        if issubclass(warning.category, SuperpixelWarning):
            messages.append(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def block_table(caption: str, grouping: Grouping) -> Table:
    """The numbers of every block over all pictures."""
    head = ["block", "tokens", "fewest", "most", "kept", "largest", "single", "θ"]
    return Table(caption, head, [_block_row(block, stats) for block, stats in grouping.blocks.items()])


def add_cards(page: Page, pictures: Sequence[Picture], groupings: Mapping[str, Grouping]) -> None:
    """A card for every picture, with a strip over the blocks for every named grouping."""
    for index, picture in enumerate(pictures):
        strips = {name: _strip(grouping, index, picture) for name, grouping in groupings.items()}
        patches = next(iter(groupings.values())).labels_LBhw[0, index].size
        start = Figure([enlarged(picture.image_HW3)], picture.name, ["input", f"{patches} patches"])
        page.card(picture.name, start, strips)


def spread_blocks(grouping: Grouping, parts: int) -> list[int]:
    """Of the blocks that merge the first, then evenly spread ones up to the last, counted from 1."""
    merging = sorted(grouping.blocks)
    chosen = {0, *(max(0, round(len(merging) * part / parts) - 1) for part in range(1, parts + 1))}
    return [merging[place] + 1 for place in sorted(chosen)]


def _count(labels_hw: Labels, after_blocks: int) -> Counted:
    sizes_N = np.unique(labels_hw, return_counts=True)[1]
    return Counted(after_blocks, len(sizes_N), float(sizes_N.max() / labels_hw.size))


def _block_row(block: int, stats: LayerStats) -> list[str]:
    tokens = (f"{stats.tokens_mean:.0f}", str(stats.tokens_min), str(stats.tokens_max))
    shares = (stats.kept_share, stats.largest_share, stats.single_share)
    return [str(block + 1), *tokens, *(f"{share:.0%}" for share in shares), f"{stats.theta:.3f}"]


def _strip(grouping: Grouping, index: int, picture: Picture) -> list[Figure]:
    counted = grouping.counted(index)
    return [
        _grouped_figure(picture, grouping.labels_LBhw[block - 1, index], counted[block - 1])
        for block in spread_blocks(grouping, 4)
    ]


def _grouped_figure(picture: Picture, labels_hw: Labels, counted: Counted) -> Figure:
    title = f"after {plural(counted.after_blocks, 'block')}"
    image_HW3 = enlarged(picture.image_HW3)
    pictures = [draw_boundaries(image_HW3, labels_hw), paint_means(image_HW3, labels_hw)]
    lines = [title, plural(counted.tokens, "token"), f"largest: {counted.largest_share:.1%}"]
    return Figure(pictures, f"{picture.name}, superpixels {title}", lines)
