"""Random numbers named by a key, the same whichever process, worker or batch asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FRAME_CHOICE = 2**32
"""The ``view`` of the numbers that choose a clip's frames; the images of a clip count from 0."""


class Key(NamedTuple):
    """Names the random numbers of one image of one clip; each number is at least 0 and below 2**64."""

    seed: int
    """Of the run."""
    epoch: int
    """Round through the data."""
    sample: int
    """Place of the clip in the data, not in the batch."""
    view: int
    """Which of the clip's images; see also ``FRAME_CHOICE``."""


def uniforms(keys: Sequence[tuple[int, int, int, int]], count: int) -> NDArray[np.float64]:
    """``count`` numbers in [0, 1) for each key, a row for each.

    Philox turns (key, counter) into random bits. The four numbers fill its key and the upper half of its counter,
    which the few numbers of a row cannot reach: rows of different keys never share numbers, and no hash is needed.
    The raw bits are used since numpy keeps those alone the same in all its versions.
    """
    bits_BU = np.empty((len(keys), count), dtype=np.uint64)
    for row, numbers in enumerate(keys):
        if len(numbers) != 4 or not all(0 <= number < 2**64 for number in numbers):
            raise ValueError(f"a key is (seed, epoch, sample, view), each from 0 to 2**64 - 1; got {tuple(numbers)}")
        seed, epoch, sample, view = numbers
        # Arrays, because numpy takes plain large integers through floats and loses their last digits.
        key_2 = np.array([seed, epoch], dtype=np.uint64)
        counter_4 = np.array([0, 0, sample, view], dtype=np.uint64)
        bits_BU[row] = np.random.Philox(key=key_2, counter=counter_4).random_raw(count)
    return np.asarray((bits_BU >> np.uint64(11)) * 2.0**-53, dtype=np.float64)
