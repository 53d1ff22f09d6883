"""What superpixel layers found lately, and the room that follows from it. Shape letters: see ``asc.tokens``."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from asc.layer import AdaptiveSuperpixelLayer, LayerRecord
from asc.tokens import Room
from asc.vit import AscViT

# Passes that are remembered.
_REMEMBERED = 32
# Room beyond their mean: so many standard deviations, and at least this share. Recording takes as long as a dozen
# steps, a batch that does not fit as long as four: half the room was outgrown within 70 steps, which cost more than it
# would have saved in 1,500 (docs/results/performance.md).
_DEVIATIONS, _SPARE = 3.0, 0.12
# So many batches among those that did not fit are too many.
_TOO_OFTEN = 3
# Rooms are multiples of this, for the matrix products' sake; the longest image's, with this factor, of a tile.
_ROUND, _LONGEST_FACTOR, _LONGEST_ROUND = 256, 1.25, 64


def superpixel_layers(encoder: nn.Module) -> list[AdaptiveSuperpixelLayer]:
    """Those whose tokens need room; a peer's network has none."""
    return encoder.superpixel_layers if isinstance(encoder, AscViT) else []


class Count(NamedTuple):
    """What one superpixel layer found in one pass."""

    tokens: int
    longest: int
    broken: int


class TokenHistory:
    """What superpixel layers found in the last passes, and the rooms that follow from it."""

    def __init__(self, layers: Sequence[AdaptiveSuperpixelLayer]) -> None:
        self.layers = list(layers)
        self._found: list[deque[Count]] = [deque(maxlen=_REMEMBERED) for _ in self.layers]
        self._fitted: deque[bool] = deque(maxlen=_REMEMBERED)
        self._passes = 0

    def __len__(self) -> int:
        """Passes that were noted."""
        return self._passes

    def forget(self) -> None:
        """Begin anew."""
        for found in self._found:
            found.clear()
        self._fitted.clear()
        self._passes = 0

    def forget_misfits(self) -> None:
        """Of batches that did not fit nothing is known any more."""
        self._fitted.clear()

    def note_run(self) -> None:
        """Of a plain pass; waits for the device."""
        self._passes += 1
        for layer, found in zip(self.layers, self._found, strict=True):
            assert layer.record is not None
            lengths_B = layer.record.borders_out.diff()
            tokens, longest = torch.stack([lengths_B.sum(), lengths_B.max()]).tolist()
            found.append(Count(tokens, longest, 0))

    def read(self, told: Sequence[float]) -> list[Count]:
        """What the summaries of a replayed pass say, three numbers a layer."""
        return [Count(*(int(number) for number in told[3 * i : 3 * i + 3])) for i in range(len(self.layers))]

    def add(self, counts: Sequence[Count], rooms: Sequence[Room]) -> bool:
        """Note a replayed pass, if its tokens fitted; returns whether they did."""
        fitted = not any(
            count.broken or count.tokens > room.tokens or count.longest > room.longest
            for count, room in zip(counts, rooms, strict=True)
        )
        self._fitted.append(fitted)
        if fitted:
            self._passes += 1
            for found, count in zip(self._found, counts, strict=True):
                found.append(count)
        return fitted

    @property
    def outgrown(self) -> bool:
        """Whether batches did not fit too often."""
        return self._fitted.count(False) >= _TOO_OFTEN

    def fitted_lately(self, passes: int) -> bool:
        """Whether none of the last replayed passes failed to fit."""
        return all(list(self._fitted)[-passes:])

    def rooms(self) -> list[Room]:
        """For the next passes."""
        return [room_for(found) for found in self._found]


def room_for(found: Sequence[Count]) -> Room:
    """Room that the next passes will seldom exceed, by what the last ones found."""
    tokens = [count.tokens for count in found]
    mean = statistics.fmean(tokens)
    spare = max(_DEVIATIONS * statistics.pstdev(tokens), _SPARE * mean)
    longest = _LONGEST_FACTOR * max(count.longest for count in found)
    return Room(_rounded(max(mean + spare, max(tokens)), _ROUND), _rounded(longest, _LONGEST_ROUND))


def _rounded(number: float, unit: int) -> int:
    return -(-int(number + 1) // unit) * unit


@contextmanager
def rooms_given(layers: Sequence[AdaptiveSuperpixelLayer], rooms: Sequence[Room]) -> Iterator[None]:
    """Within it, layers do not wait for the number of tokens."""
    for layer, room in zip(layers, rooms, strict=True):
        layer.room = room
    try:
        yield
    finally:
        for layer in layers:
            layer.room = None


def note_counts(
    encoder: AscViT, records: Sequence[LayerRecord], counts: Sequence[Count], shape_B3HW: Sequence[int]
) -> None:
    """Do on the host what the layers of an encoder do in a plain pass."""
    images = shape_B3HW[0]
    rows, columns = encoder.config.grid_of((shape_B3HW[-2], shape_B3HW[-1]))
    tokens_in = images * rows * columns
    for layer, record, count in zip(encoder.superpixel_layers, records, counts, strict=True):
        layer.record = record
        layer.note(tokens_in, count.tokens, images, record.theta)
        tokens_in = count.tokens
