"""Which clip and which of its frames come when.

The order depends on the seed and the epoch alone, and the place in it is one number: how many samples all processes
together have taken. So any number of processes and workers sees the same data, and can take over from any other in
the middle of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from asc.data.clips import Clips
from asc.data.keyed import FRAME_CHOICE, Key, uniforms

Spacing = Literal["intervals", "consecutive"]
Pairing = Literal["two", "all"]

FRAMES = 4
"""Frames that are drawn from a clip, as in the paper."""
_PAIRS = tuple(combinations(range(FRAMES), 2))


@dataclass(frozen=True)
class FrameChoice:
    """Which frames of a clip are compared."""

    spacing: Spacing = "intervals"
    """``intervals``: the clip is cut into four equal parts and a random frame of each is taken; ``consecutive``: four
    frames in a row from a random place."""
    pairing: Pairing = "two"
    """``two``: a random two of the four frames are the pair; ``all``: every two of the four are compared."""

    def __post_init__(self) -> None:
        for name, choices in (("spacing", get_args(Spacing)), ("pairing", get_args(Pairing))):
            if getattr(self, name) not in choices:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; choose from {', '.join(choices)}")

    @property
    def views(self) -> int:
        """Frames of a clip that the network sees."""
        return 2 if self.pairing == "two" else FRAMES


def choose_frames(choice: FrameChoice, count: int, seed: int, epoch: int, sample: int) -> list[int]:
    """The frames of a clip of ``count`` frames for one epoch; in a clip of fewer than four, some come twice."""
    drawn = uniforms([(seed, epoch, sample, FRAME_CHOICE)], FRAMES + 1)[0]
    if choice.spacing == "intervals":
        places = [(part + drawn[part]) / FRAMES * count for part in range(FRAMES)]
    else:
        first = int(drawn[0] * max(1, count - FRAMES + 1))
        places = [first + step for step in range(FRAMES)]
    frames = [min(int(place), count - 1) for place in places]
    if choice.pairing == "all":
        return frames
    return [frames[part] for part in _PAIRS[int(drawn[FRAMES] * len(_PAIRS))]]


class Slot(NamedTuple):
    """One sample of the order: a clip, and how often it has been seen before."""

    corpus: int
    clip: int
    epoch: int
    """Round through the clip's own corpus: its frames and augmentation are drawn anew in each."""
    sample: int
    """Number of the clip among all corpora."""

    def key(self, seed: int, view: int) -> Key:
        """The key of the random numbers of one of its images."""
        return Key(seed, self.epoch, self.sample, view)


class Order:
    """The endless order of samples from one or several corpora.

    Args:
        corpora: The corpora.
        weights: Share of the samples that each contributes; None: as large as they are, so that an epoch shows every
            clip once.
        seed: Of the run.
    """

    def __init__(self, corpora: Sequence[Clips], weights: Sequence[float] | None, seed: int) -> None:
        self.seed = seed
        self._corpora = list(corpora)
        sizes = np.array([len(clips) for clips in corpora])
        self.epoch_length = int(sizes.sum())
        shares = _shares(sizes, weights)
        # Whole numbers for every epoch: then the samples taken from a corpus before an epoch are known at once.
        self._quotas = np.floor(np.cumsum(shares) * self.epoch_length + 0.5).astype(np.int64)
        self._quotas = np.diff(self._quotas, prepend=0)
        if not self._quotas.all():
            name = corpora[int(np.argmin(self._quotas))].name
            raise ValueError(f"the weight of {name} is so small that it would never be seen; raise it or leave it out")
        self._offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self._epoch = lru_cache(2)(self._make_epoch)
        self._clip_order = lru_cache(2 * len(sizes))(self._make_clip_order)

    def __getstate__(self) -> dict[str, object]:
        state = self.__dict__.copy()
        del state["_epoch"], state["_clip_order"]  # caches stay at home
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._epoch = lru_cache(2)(self._make_epoch)
        self._clip_order = lru_cache(2 * len(self._corpora))(self._make_clip_order)

    def slot(self, position: int) -> Slot:
        """The sample at a position, counted from the start of the training."""
        epoch, place = divmod(position, self.epoch_length)
        corpora, ranks = self._epoch(epoch)
        corpus = int(corpora[place])
        taken = epoch * int(self._quotas[corpus]) + int(ranks[place])
        own_epoch, own_place = divmod(taken, len(self._corpora[corpus]))
        clip = int(self._clip_order(corpus, own_epoch)[own_place])
        return Slot(corpus, clip, own_epoch, int(self._offsets[corpus]) + clip)

    def _make_epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The corpus of every place of an epoch, and how many of that corpus came before in it."""
        corpora = np.repeat(np.arange(len(self._quotas)), self._quotas)
        self._generator(epoch, 0).shuffle(corpora)
        ranks = np.empty_like(corpora)
        for corpus, quota in enumerate(self._quotas):
            ranks[corpora == corpus] = np.arange(quota)
        return corpora, ranks

    def _make_clip_order(self, corpus: int, epoch: int) -> NDArray[np.int64]:
        return self._corpora[corpus].order(self._generator(epoch, 1 + corpus))

    def _generator(self, epoch: int, purpose: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, epoch, purpose])))


def _shares(sizes: NDArray[np.int64], weights: Sequence[float] | None) -> NDArray[np.float64]:
    if weights is None:
        return np.asarray(sizes / sizes.sum(), dtype=np.float64)
    given = np.array(weights, dtype=np.float64)
    if given.shape != sizes.shape:
        raise ValueError(f"got {len(given)} weights for {len(sizes)} corpora; give one for each, or none")
    if not (np.isfinite(given).all() and (given > 0).all()):
        raise ValueError(f"weights must be positive numbers, got {', '.join(str(weight) for weight in weights)}")
    return np.asarray(given / given.sum(), dtype=np.float64)


class BatchPlan:
    """The positions of every batch of one process, from a given position on to the end.

    Args:
        start: Samples that all processes together have consumed.
        end: Samples after which the training is over.
        batch: Samples of one optimiser step, of all processes together.
        parts: Micro-batches of an optimiser step.
        rank: This process.
        processes: Number of processes.
    """

    def __init__(self, start: int, end: int, batch: int, parts: int = 1, rank: int = 0, processes: int = 1) -> None:
        if batch % (parts * processes):
            raise ValueError(
                f"batch {batch} cannot be shared out evenly: it must be a multiple of {processes} processes × "
                f"{parts} micro-batches (accumulate)"
            )
        self._starts = range(start, end, batch // parts)
        self._own = batch // (parts * processes)
        self._rank = rank

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[list[int]]:
        for first in self._starts:
            own = first + self._rank * self._own
            yield list(range(own, own + self._own))
