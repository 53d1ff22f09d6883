from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tyro
import videos
from tqdm import tqdm
from videos import number_of

from asc.data import prepare as module
from asc.data.prepare import PLAN_FILE, REPORT_FILE, Note, PrepareSettings, Source, make_tasks, prepare
from asc.data.shards import INDEX_FILE, ShardedClips, shard_name
from asc.data.video import read_frames

TIMES = ("seconds", "clips_per_second", "resumed")


def settings(src: Path, dst: Path, **given) -> PrepareSettings:
    """Whole small pictures, so that the stripes in them stay readable."""
    defaults = {"fps": 25.0, "short_side": 48, "size": None, "shard_clips": 2, "workers": 1}
    return PrepareSettings(src, dst, **(defaults | given))


def numbers(clips: ShardedClips, clip: int) -> list[int]:
    return [number_of(frame) for frame in clips.read(clip, range(clips.num_frames(clip)))]


def contents(folder: Path) -> dict[str, bytes]:
    """All files, without what a report says on time."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    report = json.loads(files[REPORT_FILE])
    files[REPORT_FILE] = json.dumps({name: x for name, x in report.items() if name not in TIMES}).encode()
    return files


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Seven small videos in two subfolders, among other files."""
    root = tmp_path_factory.mktemp("videos")
    for number in range(7):
        path = root / "ab"[number % 2] / f"{number}.mp4"
        path.parent.mkdir(exist_ok=True)
        videos.write(path, 8 + number, options={"preset": "ultrafast"})
    (root / "notes.txt").write_text("not a video")
    return root


@pytest.fixture(scope="module")
def expected(folder, tmp_path_factory) -> Path:
    """What an undisturbed run makes of them."""
    dst = tmp_path_factory.mktemp("expected")
    prepare(settings(folder, dst))
    return dst


# ---------------------------------------------------------------------------------------------- what comes out


def test_clips_are_the_videos_in_order_with_their_frames(folder, expected):
    clips = ShardedClips(expected)
    files = ["a/0.mp4", "a/2.mp4", "a/4.mp4", "a/6.mp4", "b/1.mp4", "b/3.mp4", "b/5.mp4"]
    assert [clips.source(clip) for clip in range(len(clips))] == files
    for clip, file in enumerate(files):
        assert numbers(clips, clip) == list(range(8 + int(file[2])))
        assert clips.content_hash(clip) == hashlib.sha256((folder / file).read_bytes()).hexdigest()
    report = json.loads((expected / REPORT_FILE).read_text())
    counts = {name: report[name] for name in ("files", "ignored", "planned", "clips", "frames", "skipped", "warnings")}
    assert counts == {
        "files": 7, "ignored": ["notes.txt"], "planned": 7, "clips": 7, "frames": 77, "skipped": [], "warnings": [],
    }  # fmt: skip
    assert sorted(path.name for path in expected.glob("*.tar")) == [shard_name(number) for number in range(4)]


def test_frames_are_those_read_from_the_video_but_for_jpeg(tmp_path):
    videos.write(tmp_path / "src.mp4", 20, size=(96, 64), rate=10)
    (tmp_path / "src").mkdir()
    shutil.move(tmp_path / "src.mp4", tmp_path / "src" / "a.mp4")
    prepare(settings(tmp_path / "src", tmp_path / "dst", fps=4.0, short_side=40, size=32, quality=95))
    clips = ShardedClips(tmp_path / "dst")
    read = [pixels for _, pixels in read_frames(tmp_path / "src" / "a.mp4", 4.0, short_side=40, crop=32)]
    got = clips.read(0, range(clips.num_frames(0)))
    assert len(got) == len(read) == 8
    assert all(a.shape == (32, 32, 3) and np.abs(a.astype(int) - b).mean() < 4 for a, b in zip(got, read, strict=True))


def test_long_recordings_are_cut_and_the_rest_is_a_clip(tmp_path):
    videos.write(tmp_path / "long.mkv", 27, rate=10)
    (tmp_path / "src").mkdir()
    shutil.move(tmp_path / "long.mkv", tmp_path / "src" / "long.mkv")
    # Three clips to a shard: the second shard begins amid the video.
    report = prepare(settings(tmp_path / "src", tmp_path / "dst", fps=10.0, clip_length=0.75, shard_clips=3))
    clips = ShardedClips(tmp_path / "dst")
    # A clip begins with the first frame at or after 0, 0.75, 1.5, 2.25 s.
    assert [numbers(clips, clip) for clip in range(len(clips))] == [
        list(range(0, 8)), list(range(8, 15)), list(range(15, 23)), list(range(23, 27)),
    ]  # fmt: skip
    assert {clips.source(clip) for clip in range(4)} == {"long.mkv"}
    assert [round(clips.start(clip), 1) for clip in range(4)] == [0, 0.8, 1.5, 2.3]
    assert (report.planned, report.clips, report.frames, report.skipped) == (4, 4, 27, [])


def test_the_plan_holds_every_clip_once_in_order():
    sources = [Source(f"{k}.mp4", 1, 1, clips) for k, clips in enumerate([1, 7, 2, 1, 30, 1])]
    tasks = make_tasks(settings(Path("a"), Path("b"), shard_clips=5), sources)
    assert [task.clips for task in tasks] == [5] * 8 + [2]
    assert [task.number for task in tasks] == list(range(9))
    planned = [(p.source.file, clip) for t in tasks for p in t.parts for clip in range(p.first, p.first + p.clips)]
    assert planned == [(source.file, clip) for source in sources for clip in range(source.clips)]
    assert sum(part.is_last for task in tasks for part in task.parts) == len(sources)


# ------------------------------------------------------------------------------------------------ bad videos


@pytest.fixture(scope="module")
def bad(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("bad")
    (root / "empty.mp4").write_bytes(b"")
    (root / "text.mp4").write_text("this is no video\n" * 50)
    (root / "broken_link.mp4").symlink_to(root / "nowhere.mp4")
    videos.write_audio(root / "audio.mp4")
    videos.write(root / "one_frame.mp4", 1)
    videos.write(root / "odd.mkv", 5, codec="ffv1", size=(63, 47))
    videos.write(root / "variable.mkv", 6, ticks=[0, 40, 400, 440, 480, 520])
    videos.write(root / "ten_bits.mp4", 5, pix_fmt="yuv420p10le")
    videos.write(root / "grey.mkv", 5, codec="ffv1", pix_fmt="gray")
    fast_start = {"movflags": "faststart"}
    videos.cut(videos.write(root / "truncated.mp4", 30, container_options=fast_start), 0.6, b"mdat")
    path = videos.write(root / "damaged.avi", 20, codec="mjpeg", pix_fmt="yuvj420p")
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = b"\x55" * 40
    path.write_bytes(data)
    shutil.copy(root / "ten_bits.mp4", root / "ten_bits_again.mp4")
    if os.geteuid():
        videos.write(root / "locked.mp4", 3).chmod(0)
    return root


def test_bad_videos_are_used_or_skipped_by_name_and_never_replaced(bad, tmp_path, capsys):
    report = prepare(settings(bad, tmp_path / "dst"))
    clips = ShardedClips(tmp_path / "dst")
    found = {clips.source(clip): numbers(clips, clip) for clip in range(len(clips))}
    reasons = {
        "empty.mp4": "empty", "text.mp4": "not a video", "broken_link.mp4": "cannot be opened",
        "audio.mp4": "no video stream",
    }  # fmt: skip
    if os.geteuid():
        reasons["locked.mp4"] = "cannot be opened"
    assert {note.file for note in report.skipped} == set(reasons)
    assert all(reasons[note.file] in note.text for note in report.skipped), report.skipped
    warned = {note.file: note.text for note in report.warnings}
    assert Note("truncated.mp4", "truncated: its end is missing") in report.warnings
    del warned["truncated.mp4"]
    assert warned == {"damaged.avi": "damaged: packets that did not decode: 1"}
    assert set(found) == {path.name for path in bad.iterdir()} - set(reasons)
    assert found["one_frame.mp4"] == [0]
    assert found["odd.mkv"] == found["ten_bits.mp4"] == found["grey.mkv"] == [0, 1, 2, 3, 4]
    # The frame before a lost one is shown on.
    assert len(found["damaged.avi"]) == 20 and set(range(20)) - set(found["damaged.avi"]) == {6}
    assert found["variable.mkv"] == [0] + [1] * 9 + [2, 3, 4, 5]
    assert found["truncated.mp4"][:10] == list(range(10)) and sorted(found["truncated.mp4"]) == found["truncated.mp4"]
    assert report.duplicates == [["ten_bits.mp4", "ten_bits_again.mp4"]]
    assert report.planned == len(found) + len(reasons) and report.clips == len(found)
    shown = capsys.readouterr().out
    assert f"skipped: {len(reasons)}" in shown and "empty.mp4: no clip: the file is empty" in shown


def test_rotated_videos_are_stored_upright(tmp_path):
    (tmp_path / "src").mkdir()
    videos.turn(videos.write(tmp_path / "src" / "a.mp4", 2), videos.TURNED[90])
    prepare(settings(tmp_path / "src", tmp_path / "dst"))
    assert ShardedClips(tmp_path / "dst").read(0, [0])[0].shape == (64, 48, 3)


def test_a_recording_shorter_than_it_says_is_reported(tmp_path):
    (tmp_path / "src").mkdir()
    path = videos.write(tmp_path / "src" / "a.mp4", 40, rate=10, container_options={"movflags": "faststart"})
    videos.cut(path, 0.5, b"mdat")
    report = prepare(settings(tmp_path / "src", tmp_path / "dst", fps=10.0, clip_length=1.0))
    assert 1 <= report.clips < report.planned == 4
    assert all(note.file == "a.mp4" and "no clip from" in note.text for note in report.skipped)
    assert "truncated: its end is missing" in [note.text for note in report.warnings]


def test_a_video_that_fails_midway_is_kept_up_to_there_with_a_warning(tmp_path):
    (tmp_path / "src").mkdir()
    # No film holds a frame for an hour.
    videos.write(tmp_path / "src" / "a.mkv", 4, ticks=[0, 40, 80, 4_000_000])
    report = prepare(settings(tmp_path / "src", tmp_path / "dst"))
    assert numbers(ShardedClips(tmp_path / "dst"), 0) == [0, 1]
    assert [(note.file, note.text[:31]) for note in report.warnings] == [("a.mkv", "only in part: its timestamps ju")]


def test_a_folder_of_bad_videos_only_gives_a_report_and_no_clips(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.mp4").write_bytes(b"")
    report = prepare(settings(tmp_path / "src", tmp_path / "dst"))
    assert (report.clips, report.frames, len(report.skipped)) == (0, 0, 1)
    with pytest.raises(ValueError, match=r"report\.json says why"):
        ShardedClips(tmp_path / "dst")


# --------------------------------------------------------------------------------------------------- resuming


def fork_and_kill(given: PrepareSettings, is_time) -> None:
    """Start a preparation in a process of its own and kill it when ``is_time``."""
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        # A lock of its own: tqdm's is shared with this process, and the child may be killed holding it.
        tqdm.set_lock(threading.RLock())
        # No file may be written faster than the parent can look.
        original = module.encode_frame
        module.encode_frame = lambda *args: time.sleep(0.004) or original(*args)
        prepare(given)
        os._exit(0)
    end = time.monotonic() + 30
    while not is_time() and time.monotonic() < end:
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_killed_at_several_moments_it_goes_on_and_the_bytes_are_the_same(folder, expected, tmp_path):
    dst = tmp_path / "dst"
    given = settings(folder, dst)
    moments = [
        lambda: (dst / PLAN_FILE).exists(),
        lambda: any(path.stat().st_size > 10_000 for path in dst.glob("*.tmp")),
        lambda: (dst / shard_name(0)).exists(),
        lambda: (dst / "shard-00001.json").exists(),
        lambda: (dst / f"{shard_name(3)}.tmp").exists(),
    ]
    for is_time in moments:
        fork_and_kill(given, is_time)
    assert (dst / shard_name(2)).exists() and not (dst / INDEX_FILE).exists()
    before = (dst / shard_name(2)).stat().st_mtime_ns
    report = prepare(given)
    assert (dst / shard_name(2)).stat().st_mtime_ns == before
    assert report.resumed == 6
    assert contents(dst) == contents(expected)


def test_a_finished_preparation_run_again_changes_nothing(folder, expected, tmp_path):
    shutil.copytree(expected, tmp_path / "dst")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "dst").glob("shard*")}
    report = prepare(settings(folder, tmp_path / "dst"))
    assert report.resumed == report.planned == 7
    assert contents(tmp_path / "dst") == contents(expected)
    assert times == {path: path.stat().st_mtime_ns for path in times}


RUN = "import sys, tyro; from asc.data.prepare import *; prepare(tyro.cli(PrepareSettings, args=sys.argv[1:]))"


def test_several_processes_and_a_kill_change_no_byte_and_nobody_stays_behind(folder, expected, tmp_path):
    dst = tmp_path / "dst"
    line = [sys.executable, "-c", RUN, str(folder), str(dst)]
    line += ["--fps", "25", "--short-side", "48", "--size", "None", "--shard-clips", "2", "--workers", "3"]
    process = subprocess.Popen(line, stderr=subprocess.DEVNULL)
    while not list(dst.glob("shard*")):
        assert process.poll() is None
        time.sleep(0.002)
    workers = descendants(process.pid)
    assert len(workers) >= 3
    process.kill()
    process.wait()
    end = time.monotonic() + 10
    while (left := workers & running().keys()) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left
    prepare(settings(folder, dst))
    assert contents(dst) == contents(expected)


def running() -> dict[int, int]:
    """The parent of every process that is not a zombie."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(path.parent.name)] = int(fields[1])
    return parents


def descendants(process: int) -> set[int]:
    parents = running()
    found = {process}
    while new := {child for child, parent in parents.items() if parent in found} - found:
        found |= new
    return found - {process}


@pytest.mark.parametrize("change", ["new", "gone", "changed"])
def test_sources_that_changed_are_named(folder, expected, tmp_path, change):
    src, dst = tmp_path / "src", tmp_path / "dst"
    shutil.copytree(folder, src)
    shutil.copytree(expected, dst)
    if change == "new":
        shutil.copy2(src / "b" / "1.mp4", src / "b" / "9.mp4")
    elif change == "gone":
        (src / "b" / "1.mp4").unlink()
    else:
        os.utime(src / "b" / "1.mp4", (1, 1))
    with pytest.raises(ValueError, match=rf"not as it was .*: 1 {change} \(b/{9 if change == 'new' else 1}\.mp4\)"):
        prepare(settings(src, dst))
    assert contents(dst) == contents(expected)


def test_a_source_that_changes_while_it_is_read_is_named(folder, tmp_path, monkeypatch):
    src = tmp_path / "src"
    shutil.copytree(folder, src)
    original = module.encode_frame
    monkeypatch.setattr(module, "encode_frame", lambda *args: os.utime(src / "a" / "0.mp4", (1, 1)) or original(*args))
    with pytest.raises(ValueError, match=r"a/0\.mp4: the file has changed"):
        prepare(settings(src, tmp_path / "dst"))


@pytest.mark.parametrize(
    "given",
    [{"fps": 12.0}, {"size": 32}, {"quality": 80}, {"shard_clips": 3}, {"clip_length": 1.0}, {"short_side": 64}],
)
def test_other_settings_for_the_same_folder_are_named(folder, expected, given):
    before = contents(expected)
    with pytest.raises(ValueError, match=f"other settings .{next(iter(given))} was"):
        prepare(settings(folder, expected, **given))
    assert contents(expected) == before


# ------------------------------------------------------------------------------------------------- mistakes


def test_a_full_disk_is_a_clear_error_and_the_same_command_goes_on(folder, expected, tmp_path):
    dst = tmp_path / "dst"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Files may not grow beyond what the first shard needs; later ones are longer.
    resource.setrlimit(resource.RLIMIT_FSIZE, ((expected / shard_name(0)).stat().st_size + 512, hard))
    try:
        with pytest.raises(ValueError, match=r"dst=.*: writing failed \(File too large\).*same command goes on"):
            prepare(settings(folder, dst))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in dst.iterdir()) == [PLAN_FILE, "shard-00000.json", shard_name(0)]
    prepare(settings(folder, dst))
    assert contents(dst) == contents(expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fps": 0.0}, "fps must"),
        ({"fps": float("nan")}, "fps must"),
        ({"clip_length": -1.0}, "clip_length must"),
        ({"clip_length": 0.01}, "clip_length=0.01 holds no frame"),
        ({"short_side": 0}, "short_side must"),
        ({"size": 64}, "size=64 must not exceed short_side=48"),
        ({"quality": 101}, "quality must"),
        ({"shard_clips": 0}, "shard_clips must"),
        ({"workers": 0}, "workers must"),
        ({"annotations": Path("x.csv")}, "give a preset"),
    ],
)
def test_a_wrong_setting_is_named(folder, tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        prepare(settings(folder, tmp_path / "dst", **given))
    assert not (tmp_path / "dst").exists()


def test_folders_that_cannot_be_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        prepare(settings(tmp_path / "nowhere", tmp_path / "dst"))
    with pytest.raises(ValueError, match="inside src"):
        prepare(settings(folder, folder / "prepared"))
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ValueError, match="holds other files"):
        prepare(settings(folder, tmp_path))
    with pytest.raises(ValueError, match="cannot be used as a folder"):
        prepare(settings(folder, tmp_path / "mine.txt"))


def test_two_runs_do_not_write_to_one_folder(folder, tmp_path):
    with module._alone_in(tmp_path), pytest.raises(ValueError, match="another preparation"):
        prepare(settings(folder, tmp_path))


def test_the_command_line_of_the_readme():
    line = "videos shards --fps 16 --short-side 256 --size 224 --workers 4"
    parsed = tyro.cli(PrepareSettings, args=line.split())
    assert parsed == PrepareSettings(Path("videos"), Path("shards"), fps=16.0, short_side=256, size=224, workers=4)
