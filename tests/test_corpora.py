from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import videos

from asc.data.corpora import CORPORA, select
from asc.data.prepare import REPORT_FILE, PrepareSettings, prepare
from asc.data.shards import ShardedClips
from asc.data.video import find_videos


@pytest.fixture(scope="module")
def video(tmp_path_factory) -> Path:
    return videos.write(tmp_path_factory.mktemp("one") / "a.mp4", 30, rate=10)


def put(root: Path, video: Path, names: list[str]) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(video, root / name)


def prepared(root: Path, dst: Path, preset: str, **given):
    """The report and the source of every clip."""
    report = prepare(PrepareSettings(root, dst, preset, short_side=32, size=None, workers=1, **given))
    clips = ShardedClips(dst)
    return report, [clips.source(clip) for clip in range(len(clips))]


def test_the_papers_numbers():
    rates = {name: (corpus.fps, corpus.official_size) for name, corpus in CORPORA.items()}
    assert rates == {
        "moments": (16, "802,264 clips"),
        "kinetics700": (15, "545,317 clips"),
        "ego4d": (5, "3,670 hours"),
    }


def test_moments_takes_what_the_training_list_names(tmp_path, video):
    root = tmp_path / "Moments_in_Time_Raw"
    here = ["training/adult+male+singing/yt-_0zP9aP7JKk_16.mp4", "training/blocking/getty-1_4.mp4"]
    other = ["training/blocking/unlisted.mp4", "validation/blocking/flickr-0-1.mp4"]
    put(root, video, here + other)
    rows = ["adult+male+singing/yt-_0zP9aP7JKk_16.mp4", "blocking/getty-1_4.mp4", "blocking/gone_1.mp4"]
    (root / "trainingSet.csv").write_text("".join(f"{row},{row.split('/')[0]},3,1\n" for row in rows))
    (root / "validationSet.csv").write_text("blocking/flickr-0-1.mp4,blocking,3,1\n")
    report, sources = prepared(root, tmp_path / "dst", "moments")
    assert sources == here
    assert report.frames == 2 * 48  # three seconds at 16 a second
    assert report.coverage.missing == ["training/blocking/gone_1.mp4"] and report.coverage.extra == other
    assert "2 of 3 clips of the official training split are here" in str(report)
    assert "published size 802,264 clips" in str(report) and "1 missing, 2 not in the list" in str(report)
    stored = json.loads((tmp_path / "dst" / REPORT_FILE).read_text())["coverage"]
    assert (stored["present"], stored["listed"], stored["extra"]) == (2, 3, other)


@pytest.mark.parametrize("layout", ["flat", "classes"])
def test_kinetics_finds_its_clips_flat_or_by_class(tmp_path, video, layout):
    root = tmp_path / "k700"
    names = ["---QUuC4vJs_000084_000094", "-0a_b_1-xyz_000001_000011", "notlisted00_000001_000011"]
    classes = ["", "", ""] if layout == "flat" else ["testifying/", "playing piano/", "abseiling/"]
    put(root, video, [f"train/{folder}{name}.mp4" for folder, name in zip(classes, names, strict=True)])
    (root / "annotations").mkdir()
    (root / "annotations" / "train.csv").write_text(
        "label,youtube_id,time_start,time_end,split\n"
        "testifying,---QUuC4vJs,84,94,train\n"
        '"playing piano",-0a_b_1-xyz,1.0,11.0,train\n'
        "abseiling,gonegonegon,5,15,train\n"
    )
    report, sources = prepared(root, tmp_path / "dst", "kinetics700")
    assert {Path(source.partition(" at ")[0]).stem for source in sources} == set(names[:2])
    assert report.frames == 2 * 45
    coverage = report.coverage
    assert (coverage.present, coverage.listed, coverage.missing) == (2, 3, ["gonegonegon_000005_000015"])
    assert [Path(name).stem for name in coverage.extra] == names[2:]


def test_a_second_copy_of_a_clip_is_left_out_by_name(tmp_path, video):
    put(tmp_path, video, ["train/a/xxxxxxxxxxx_000001_000011.mp4", "train/xxxxxxxxxxx_000001_000011.mp4"])
    (tmp_path / "train.csv").write_text("youtube_id,time_start,time_end,label\nxxxxxxxxxxx,1,11,a\n")
    chosen, coverage = select("kinetics700", tmp_path, find_videos(tmp_path).videos)
    assert [path.parent.name for path in chosen] == ["a"]
    assert coverage.extra == ["train/xxxxxxxxxxx_000001_000011.mp4"]


@pytest.mark.parametrize("version", ["", "v2/"])
def test_ego4d_cuts_recordings_and_counts_hours_and_benchmarks(tmp_path, version):
    root = tmp_path / "ego4d_data"
    uids = [f"0000000{k}-98c0-42a8-90f9-4191013cc252" for k in range(3)]
    recording = videos.write(tmp_path / "a.mp4", 25, rate=1)
    put(root, recording, [f"{version}full_scale/{uid}.mp4" for uid in uids[:2]])
    splits = [{"split_em": "train", "split_av": None}, {"split_em": "val", "split_fho": "multi"}, {}]
    listed = [{"video_uid": uid, "duration_sec": 1800.0} | split for uid, split in zip(uids, splits, strict=True)]
    (root / "ego4d.json").write_text(json.dumps({"version": "2", "videos": listed, "clips": []}))
    (root / f"{version}full_scale" / "manifest.csv").write_text("video_uid\n")
    report, sources = prepared(root, tmp_path / "dst", "ego4d")
    names = [f"{version}full_scale/{uid}.mp4" for uid in uids[:2]]
    assert sources == [name for name in names for _ in range(3)]
    assert report.frames == 2 * 125
    assert (report.coverage.present_hours, report.coverage.listed_hours) == (1.0, 1.5)
    assert report.coverage.missing == [uids[2]]
    assert report.coverage.held_out == {uids[1]: "val of em, multi of fho"}
    assert "1.0 of 1.5 hours" in str(report) and "1 are in the val or test part" in str(report)


def test_settings_overrule_the_preset_and_the_list_may_lie_elsewhere(tmp_path, video):
    put(tmp_path / "root", video, ["training/a/1.mp4"])
    (tmp_path / "list.csv").write_text("a/1.mp4,a,3,1\n")
    given = {"fps": 4.0, "clip_length": 1.0, "annotations": tmp_path / "list.csv"}
    report, sources = prepared(tmp_path / "root", tmp_path / "dst", "moments", **given)
    assert (report.clips, report.frames, len(sources)) == (3, 12, 3)


@pytest.mark.parametrize("name", CORPORA)
def test_missing_and_wrong_lists_are_named(tmp_path, video, name):
    put(tmp_path, video, ["training/a/1.mp4"])
    found = find_videos(tmp_path).videos
    first = CORPORA[name].lists[0]
    with pytest.raises(ValueError, match=rf"no official list of .*{first}.*annotations"):
        select(name, tmp_path, found)
    for content in ("", "x\n", "{}", '{"videos": 3}', "\x00\xff"):
        (tmp_path / first).write_text(content)
        with pytest.raises(ValueError, match=rf"{first}: (not the official list|this list)"):
            select(name, tmp_path, found)


def test_a_folder_with_none_of_the_listed_videos_is_named(tmp_path, video):
    put(tmp_path, video, ["blocking/1.mp4"])
    (tmp_path / "trainingSet.csv").write_text("blocking/1.mp4,blocking,3,1\n")
    with pytest.raises(ValueError, match=r"none of the 1 videos .* such as training/blocking/1\.mp4"):
        select("moments", tmp_path, find_videos(tmp_path).videos)
