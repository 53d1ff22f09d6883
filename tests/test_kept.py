"""Decoded frames that are kept in memory: the same pixels, read once, for all processes."""

import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from asc.data import SceneConfig, kept
from asc.data.clips import Pixels, SceneClips
from asc.data.kept import KeptClips, keep_frames

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there is no such memory")
FRAMES, SIZE = 5, 16
PLENTY = 1 << 20


class Noted(SceneClips):
    """Scenes that note in a file what is read of them, whichever process asks; clip 2 is of another size."""

    def __init__(self, log: Path, clips: int = 4) -> None:
        super().__init__(SceneConfig(size=SIZE, frames=FRAMES), clips)
        self.log = log

    def read(self, clip: int, frames: Sequence[int]) -> list[Pixels]:
        with self.log.open("a") as log:
            log.writelines(f"{clip} {frame}\n" for frame in frames)
        found = super().read(clip, frames)
        return [np.ascontiguousarray(pixels_HW3[: SIZE - 2]) for pixels_HW3 in found] if clip == 2 else found

    def was_read(self) -> list[str]:
        """What was read since the last question."""
        lines = self.log.read_text().split("\n")[:-1]
        self.log.write_text("")
        return lines


@pytest.fixture
def noted(tmp_path: Path) -> Noted:
    (tmp_path / "log").write_text("")
    return Noted(tmp_path / "log")


def assert_same(found: Sequence[Pixels], expected: Sequence[Pixels]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_frame_is_read_once_and_stays_the_same(noted: Noted) -> None:
    keeper = KeptClips(noted, PLENTY)
    noted.was_read()
    assert_same(keeper.read(1, [3, 0, 3]), SceneClips.read(noted, 1, [3, 0, 3]))
    assert noted.was_read() == ["1 3", "1 0"]
    assert_same(keeper.read(1, [0, 4, 3]), SceneClips.read(noted, 1, [0, 4, 3]))
    assert noted.was_read() == ["1 4"]
    assert (len(keeper), keeper.num_frames(3), keeper.source(2)) == (4, FRAMES, "scene 2")
    assert keeper.content_hash(1) == noted.content_hash(1)


def test_what_a_clip_does_not_have_is_asked_of_the_corpus(noted: Noted) -> None:
    keeper = KeptClips(noted, PLENTY)
    _read_all(keeper)
    for frame in (-1, FRAMES):
        with pytest.raises(ValueError, match="frame"):
            keeper.read(0, [frame])


def test_frames_of_another_size_are_read_anew(noted: Noted) -> None:
    keeper = KeptClips(noted, PLENTY)
    noted.was_read()
    for _ in range(2):
        assert [pixels_HW3.shape for pixels_HW3 in keeper.read(2, [1])] == [(SIZE - 2, SIZE, 3)]
        assert noted.was_read() == ["2 1"]


def test_no_more_memory_than_allowed(noted: Noted) -> None:
    frame = SIZE * SIZE * 3 + 4
    keeper = KeptClips(noted, 7 * frame + frame // 2)
    assert keeper.bytes == 7 * frame
    for clip in range(4):
        keeper.read(clip, range(FRAMES))
    noted.was_read()
    for clip in (0, 1, 3):
        assert_same(keeper.read(clip, range(FRAMES)), SceneClips.read(noted, clip, range(FRAMES)))
    # Seven frames: all of the first clip, two of the second.
    assert noted.was_read() == [f"1 {frame}" for frame in (2, 3, 4)] + [f"3 {frame}" for frame in range(FRAMES)]
    assert_same(KeptClips(noted, 1).read(0, [1]), SceneClips.read(noted, 0, [1]))


def test_corpora_share_the_memory(noted: Noted) -> None:
    frame = SIZE * SIZE * 3 + 4
    first, second, third = keep_frames([noted, noted, noted], 30 * frame / 1e9)
    assert isinstance(first, KeptClips) and first.bytes == 20 * frame
    assert isinstance(second, KeptClips) and second.bytes == 10 * frame
    assert third is noted
    assert keep_frames([noted], 0) == [noted]


def test_no_more_than_a_quarter_of_the_memory_there_is(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < kept.available_bytes() <= pages
    frame = SIZE * SIZE * 3 + 4
    monkeypatch.setattr(kept, "available_bytes", lambda: 4 * 3 * frame)
    (keeper,) = keep_frames([noted], 1.0)
    assert isinstance(keeper, KeptClips) and keeper.bytes == 3 * frame


def _read_all(keeper: KeptClips) -> None:
    for clip in (0, 1):
        keeper.read(clip, range(FRAMES))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_one_process_has_read_is_there_for_others(noted: Noted, method: str) -> None:
    keeper = KeptClips(noted, PLENTY)
    process = multiprocessing.get_context(method).Process(target=_read_all, args=(keeper,))
    process.start()
    process.join()
    assert process.exitcode == 0 and len(noted.was_read()) == 1 + 2 * FRAMES
    for clip in (0, 1):
        assert_same(keeper.read(clip, range(FRAMES)), SceneClips.read(noted, clip, range(FRAMES)))
    assert noted.was_read() == []


def test_half_a_frame_is_not_taken_for_one(noted: Noted) -> None:
    keeper = KeptClips(noted, PLENTY)
    keeper.read(0, [2])
    keeper._pixels_FHW3[2, SIZE // 2 :] = 0
    noted.was_read()
    assert_same(keeper.read(0, [2]), SceneClips.read(noted, 0, [2]))
    assert noted.was_read() == ["0 2"]


def test_nothing_stays_open(noted: Noted) -> None:
    before = list(Path("/proc/self/fd").iterdir())
    for _ in range(5):
        KeptClips(noted, PLENTY).read(0, [0])
    assert len(list(Path("/proc/self/fd").iterdir())) == len(before)
