"""A folder of videos as a corpus: each file is used rightly or named, and none stands in for another."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import videos

from asc.data.clips import FolderClips, FolderSettings, SceneClips, read_leave_out, without
from asc.data.scenes import Scene, SceneConfig

AS_STORED = FolderSettings(fps=25, short_side=videos.HEIGHT, crop=None)


def bad_folder(folder: Path) -> Path:
    """Everything that a folder from the wild may hold."""
    videos.write(folder / "good.mp4", 20)
    (folder / "empty.mp4").touch()
    (folder / "text.mp4").write_text("These are my holidays.\n" * 40)
    videos.cut(videos.write(folder / "truncated.mkv", 20), 0.5, b"\x1f\x43\xb6\x75")
    videos.write(folder / "one_frame.mp4", 1)
    videos.write(folder / "odd_size.mkv", 6, codec="ffv1", size=(63, 47))
    videos.write(folder / "variable_rate.mkv", 6, ticks=[0, 40, 200, 240, 480, 520])
    videos.turn(videos.write(folder / "rotated.mp4", 6), videos.TURNED[90])
    videos.write(folder / "ten_bit.mkv", 6, codec="ffv1", pix_fmt="yuv420p10le")
    videos.write(folder / "grey.mkv", 6, codec="ffv1", pix_fmt="gray")
    videos.write_audio(folder / "audio_only.m4a").rename(folder / "audio_only.mp4")
    (folder / "nowhere.mp4").symlink_to(folder / "not_there.mp4")
    (folder / "notes.txt").write_text("not a video")
    locked = videos.write(folder / "locked.mp4", 3)
    locked.chmod(0)
    return folder


def test_every_file_of_a_bad_folder_is_used_rightly_or_named(tmp_path: Path) -> None:
    clips = FolderClips(bad_folder(tmp_path), AS_STORED, workers=1)
    findings = clips.findings()
    # The super-user may read what nobody may.
    unreadable = set() if os.geteuid() == 0 else {"locked.mp4"}
    assert set(findings.skipped) == {"empty.mp4", "text.mp4", "audio_only.mp4", "nowhere.mp4"} | unreadable
    assert all(name in reason for name, reason in findings.skipped.items())
    assert set(findings.damaged) == {"truncated.mkv"}
    assert findings.ignored == ["notes.txt"]
    number = {clips.source(clip): clip for clip in range(len(clips))}
    used = {"good.mp4", "truncated.mkv", "one_frame.mp4", "odd_size.mkv", "variable_rate.mkv", "rotated.mp4"}
    assert set(number) - {"locked.mp4"} == used | {"ten_bit.mkv", "grey.mkv"}
    assert clips.num_frames(number["good.mp4"]) == 20
    assert clips.num_frames(number["one_frame.mp4"]) == 1
    assert 1 <= clips.num_frames(number["truncated.mkv"]) < 20
    # Shown at 0, 40, 200, 240, 480 and 520 ms: at 25 frames a second the third picture lasts for one frame only.
    assert [videos.number_of(f) for f in clips.read(number["variable_rate.mkv"], [0, 1, 4, 5, 6, 11, 12])] == [
        *(0, 1, 1, 2, 3, 3, 4)
    ]
    assert clips.read(number["rotated.mp4"], [0])[0].shape[0] > clips.read(number["rotated.mp4"], [0])[0].shape[1]
    for name in used - {"rotated.mp4", "variable_rate.mkv"} | {"ten_bit.mkv", "grey.mkv"}:
        count = clips.num_frames(number[name])
        shown = [videos.number_of(frame) for frame in clips.read(number[name], range(count))]
        assert shown == list(range(count)), name


def test_frames_come_in_the_order_asked_for_and_may_come_twice(tmp_path: Path) -> None:
    videos.write(tmp_path / "a.mp4", 20)
    clips = FolderClips(tmp_path, AS_STORED, workers=1)
    for where in (clips, pickle.loads(pickle.dumps(clips))):
        assert [videos.number_of(frame) for frame in where.read(0, [7, 19, 0, 7])] == [7, 19, 0, 7]


def test_long_recordings_are_cut_into_clips_without_gap_or_overlap(tmp_path: Path) -> None:
    videos.write(tmp_path / "long.mp4", 23)
    clips = FolderClips(tmp_path, FolderSettings(fps=25, clip_length=0.2, short_side=48, crop=None), workers=1)
    assert [clips.num_frames(clip) for clip in range(len(clips))] == [5, 5, 5, 5, 3]
    shown = [videos.number_of(f) for clip in range(len(clips)) for f in clips.read(clip, range(clips.num_frames(clip)))]
    assert shown == list(range(23))


def test_what_was_found_out_is_kept_and_changed_files_are_looked_at_again(tmp_path: Path) -> None:
    memory, folder = tmp_path / "found.json", tmp_path / "videos"
    folder.mkdir()
    videos.write(folder / "a.mp4", 5)
    videos.write(folder / "b.mp4", 5)
    FolderClips(folder, AS_STORED, memory, workers=1)
    memory.write_text(memory.read_text().replace('"duration": 0.2', '"duration": 0.12', 1))
    clips = FolderClips(folder, AS_STORED, memory, workers=1)
    assert [clips.num_frames(clip) for clip in range(2)] == [3, 5]
    videos.write(folder / "a.mp4", 9)
    clips = FolderClips(folder, AS_STORED, memory, workers=1)
    assert [clips.num_frames(clip) for clip in range(2)] == [9, 5]
    memory.write_text('[{"file": "a.m')
    assert len(FolderClips(folder, AS_STORED, memory, workers=1)) == 2


def test_a_folder_in_which_nothing_is_readable_says_why(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_text("no video at all")
    with pytest.raises(ValueError, match=r"none of its 1 files can be read as video .*a\.mp4"):
        FolderClips(tmp_path, AS_STORED, workers=1)


def test_videos_are_left_out_by_file_folder_and_hash(tmp_path: Path) -> None:
    for name in ("a/1.mp4", "a/2.mp4", "b/1.mp4", "b/3.mp4"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        videos.write(tmp_path / name, 3 + int(name[2]) + len(name) * (name[0] == "b"))
    clips = FolderClips(tmp_path, AS_STORED, workers=1)
    wanted = tmp_path / "list.txt"
    wanted.write_text(f"# withheld\nb/1.mp4\n\n{clips.content_hash(1)}  # by content\na/none.mp4\n")
    kept, left_out, used = without(clips, read_leave_out(wanted))
    assert [kept.source(clip) for clip in range(len(kept))] == ["a/1.mp4", "b/3.mp4"]
    assert left_out == ["a/2.mp4", "b/1.mp4"]
    assert used == {"b/1.mp4", clips.content_hash(1)}
    assert without(clips, ["b/"])[1] == ["b/1.mp4", "b/3.mp4"]


def test_bad_leave_out_lists_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing\.txt cannot be read"):
        read_leave_out(tmp_path / "missing.txt")
    (tmp_path / "empty.txt").write_text("# nothing\n")
    with pytest.raises(ValueError, match=r"empty\.txt names nothing"):
        read_leave_out(tmp_path / "empty.txt")


def test_scenes_are_those_of_the_scene_module() -> None:
    config = SceneConfig(size=16, frames=6)
    clips = SceneClips(config, 3)
    for clip in (0, 1, 2, 0):
        expected = [Scene(config, clip).frame(t).image_HW3 for t in (5, 0, 5)]
        assert all(np.array_equal(a, b) for a, b in zip(clips.read(clip, [5, 0, 5]), expected, strict=True))
