"""When to run a network plainly, when to record it, when to replay it, and when to let go of what was recorded.

Shape letters: see ``asc.tokens``.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from asc.layer import LayerRecord
from asc.replay.rooms import Count, TokenHistory, note_counts, superpixel_layers
from asc.tokens import Room
from asc.vit import AscViT

# A graph whose rooms are this much larger than they need be is recorded anew; looked at after so many passes, and then
# always after twice as many, since the number of tokens varies most in the beginning.
_TOO_LARGE, _FIRST_LOOK = 1.15, 32
# So many batches of another shape in a row are no longer the last ones of datasets.
_STRANGERS = 3
# So many passes in a row that were replayed are a good sign.
_SETTLED = 8
# Multiplications that one matrix of width x width needs for all patches of a step, or of a pass of inference; with more
# of them the GPU is busy for longer than the host, and room for tokens that are not there would be a loss. Measured in
# pre-training with tiny at 64 and 224 pixels and base at 224: 5e9, 1.5e10 and 6e10, all of which gain; in inference
# with tiny, small and base with patches of 16: 4e9 and 1.5e10 gain, 6e10 loses (docs/results/performance.md).
_MOST_WORK, _MOST_IN_INFERENCE = 1e11, 3e10

Result = TypeVar("Result")


class Recorded(ABC, Generic[Result]):
    """A pass, or both ways of a step, with fixed rooms. Images and results have their places in memory."""

    rooms: list[Room]
    records: list[LayerRecord]
    """What the layers of all encoders leave behind."""

    @abstractmethod
    def run(self, images: Tensor, meanwhile: Callable[[], None] | None) -> list[float] | None:
        """Replay it; returns what the layers found, three numbers each, and what the budgets want to know, if any.

        None where it does not hold any more. ``meanwhile`` is what the host may do while it would wait.
        """

    @abstractmethod
    def result(self) -> Result:
        """What the caller gets; the next replay leaves it alone."""


class Replayer(ABC, Generic[Result]):
    """Runs encoders on batches of one shape, from a graph once it is known how many tokens there are.

    Args:
        encoders: Those of ours have layers that need room.
        first: Passes that are run plainly before one is recorded; they show how the number of tokens varies.
    """

    def __init__(self, encoders: Sequence[nn.Module], first: int) -> None:
        self.encoders = list(encoders)
        self.possible = not any(obstacle(encoder) for encoder in self.encoders)
        self.history = TokenHistory([layer for encoder in self.encoders for layer in superpixel_layers(encoder)])
        self.recorded: Recorded[Result] | None = None
        self.replays = 0
        """Since it was recorded, and of those that fitted."""
        self._first = first
        self._kind: _Kind | None = None
        self._strangers = 0
        self._next_look = _FIRST_LOOK

    @abstractmethod
    def call(self, images: Tensor) -> Result:
        """The plain run."""

    @abstractmethod
    def record(self, images: Tensor) -> Recorded[Result]:
        """Record it with the rooms of the history."""

    def replay_or_run(self, images: Tensor, meanwhile: Callable[[], None] | None = None) -> Result:
        """What the plain run gives, either way."""
        kind = _Kind.of(images)
        if kind != self._kind:
            if self.recorded is not None and self._strangers < _STRANGERS:
                self._strangers += 1
                return self.call(images)
            self._begin(kind)
        self._strangers = 0
        if self.recorded is None and (len(self.history) < self._first or not self._could_record(images)):
            return self._run_plainly(images)
        assert self.recorded is not None
        told = self.recorded.run(images, meanwhile)
        if told is None:
            self._begin(kind)
            return self._run_plainly(images)
        counts = self.history.read(told)
        if not self.history.add(counts, self.recorded.rooms):
            if self.history.outgrown:
                self._next_look = _FIRST_LOOK
                self.let_go()
            return self._run_plainly(images)
        self._note(counts, told[3 * len(counts) :], images)
        result = self.recorded.result()
        self.replays += 1
        if self.replays == self._next_look:
            self._shrink_if_too_large()
        return result

    @property
    def is_settled(self) -> bool:
        """Whether the last passes were all replayed."""
        return self.replays >= _SETTLED and self.history.fitted_lately(_SETTLED)

    def let_go(self) -> None:
        """Of the graph and its memory."""
        self.recorded, self.replays = None, 0
        self.history.forget_misfits()

    def _begin(self, kind: _Kind) -> None:
        self.let_go()
        self._kind, self._next_look = kind, _FIRST_LOOK
        self.history.forget()

    def _run_plainly(self, images: Tensor) -> Result:
        result = self.call(images)
        self.history.note_run()
        return result

    def _could_record(self, images: Tensor) -> bool:
        try:
            self.recorded, self.replays = self.record(images), 0
        except RuntimeError as error:
            # The work comes first: it goes on as it would without graphs.
            self.possible = False
            reason = " ".join(str(error).split())[:200]
            warnings.warn(f"the network is not replayed, which makes it slower: {reason}", stacklevel=4)
        return self.recorded is not None

    def _note(self, counts: Sequence[Count], known: Sequence[float], images: Tensor) -> None:
        """Do on the host what layers do in a plain run."""
        assert self.recorded is not None
        shape_B3HW = images.flatten(0, -4).shape
        first = 0
        for encoder in self.encoders:
            own = slice(first, first + len(superpixel_layers(encoder)))
            if isinstance(encoder, AscViT):
                note_counts(encoder, self.recorded.records[own], counts[own], shape_B3HW)
            first = own.stop
        if known:
            ours = [encoder for encoder in self.encoders if isinstance(encoder, AscViT)]
            budgets = [encoder.budget for encoder in ours if encoder.budget is not None]
            for budget, numbers_K in zip(budgets, torch.tensor(known).chunk(len(budgets)), strict=True):
                budget.tell(numbers_K)

    def _shrink_if_too_large(self) -> None:
        assert self.recorded is not None
        self._next_look *= 2
        pairs = zip(self.recorded.rooms, self.history.rooms(), strict=True)
        if any(room.tokens > _TOO_LARGE * wanted.tokens for room, wanted in pairs):
            self.let_go()


class _Kind(NamedTuple):
    """Batches of one kind can be replayed by the same graph."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    precision: torch.dtype | None

    @staticmethod
    def of(images: Tensor) -> _Kind:
        device = images.device.type
        precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return _Kind(images.shape, images.dtype, images.device, precision)


def obstacle(encoder: nn.Module) -> str:
    """What in the network waits for the device, beside the number of tokens; nothing if nothing does."""
    layers = superpixel_layers(encoder)
    if not all(layer.can_go_unwatched for layer in layers):
        return "the settings of its superpixels are not those that one step of kernels is made for"
    return ""


def can_learn_replayed(encoder: nn.Module) -> bool:
    """Whether the way back can be recorded, too."""
    return not (isinstance(encoder, AscViT) and encoder.config.checkpoint_gradients)


def is_worth_replaying(encoder: nn.Module, images: int, size_hw: Sequence[int], learns: bool = True) -> bool:
    """Whether a training step, or inference, on so many images of such a size leaves the GPU waiting for the host."""
    if not isinstance(encoder, AscViT):
        return True
    rows, columns = encoder.config.grid_of((size_hw[0], size_hw[1]))
    work = images * rows * columns * encoder.config.width**2
    return work <= (_MOST_WORK if learns else _MOST_IN_INFERENCE)


def with_memory(run: Callable[[], Result], replayers: Sequence[Replayer[Any]]) -> Result:
    """Run it; graphs keep their memory to themselves, and are let go of where it does not suffice for both."""
    try:
        return run()
    except torch.OutOfMemoryError:
        if all(replayer.recorded is None for replayer in replayers):
            raise
    for replayer in replayers:
        replayer.let_go()
    return run()
