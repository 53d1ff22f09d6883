from __future__ import annotations

import io
import json
import multiprocessing
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image

from asc.data import shards
from asc.data.shards import INDEX_FILE, WINDOW, ShardedClips, ShardWriter, encode_frame, shard_name, write_index

SIZES = [[3, 1], [5], [], [2, 4, 1]]  # frames of the clips of each shard; one shard is empty


def pixels(shard: int, clip: int, frame: int) -> np.ndarray:
    """A smooth picture that is different for every frame, and not square."""
    colour = np.array([40 * shard + 20, 60 * clip + 20, 30 * frame + 20]).astype(np.uint8) // 2
    rows = np.arange(12, dtype=np.uint8)[:, None, None]
    return np.ascontiguousarray(np.broadcast_to(colour + rows, (12, 16, 3)))


def write(folder: Path, sizes: list[list[int]] = SIZES, seed: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    for number, clips in enumerate(sizes):
        with ShardWriter(folder, number) as shard:
            for clip, frames in enumerate(clips):
                shard.begin_clip(f"a/{number}.mp4", f"{seed}{number}".rjust(64, "0"), 2.5 * clip)
                for frame in range(frames):
                    shard.add_frame(encode_frame(pixels(number, clip, frame), 95))
            shard.finish({})
    write_index(folder, len(sizes))
    return folder


PLACES = [(number, clip) for number, clips in enumerate(SIZES) for clip in range(len(clips))]


def check_all(clips: ShardedClips) -> None:
    assert len(clips) == len(PLACES)
    for clip, (number, place) in enumerate(PLACES):
        count = SIZES[number][place]
        assert clips.num_frames(clip) == count
        assert (clips.source(clip), clips.start(clip)) == (f"a/{number}.mp4", 2.5 * place)
        assert clips.content_hash(clip) == f"0{number}".rjust(64, "0")
        wanted = [count - 1, 0, 0, *range(count)]
        frames = clips.read(clip, wanted)
        for frame, got in zip(wanted, frames, strict=True):
            assert got.shape == (12, 16, 3) and got.dtype == np.uint8 and got.flags.c_contiguous and got.flags.writeable
            assert np.abs(got.astype(int) - pixels(number, place, frame)).mean() < 3


def test_every_frame_comes_back_in_any_order_and_repeated(tmp_path):
    check_all(ShardedClips(write(tmp_path / "made")))


@pytest.mark.parametrize("has_torchvision", [True, False])
def test_decoding_agrees_with_pillow(tmp_path, monkeypatch, has_torchvision):
    if not has_torchvision:
        monkeypatch.setattr(shards, "decode_jpeg", None)
    folder = write(tmp_path / "made")
    with tarfile.open(folder / shard_name(3)) as archive:
        expected = np.asarray(Image.open(archive.extractfile("00003-00001.0002.jpg")))
    assert np.array_equal(ShardedClips(folder).read(4, [2])[0], expected)


def test_a_shard_is_a_tar_file_that_other_tools_read(tmp_path):
    folder = write(tmp_path / "made")
    listed = subprocess.run(["tar", "tf", folder / shard_name(0)], capture_output=True, text=True, check=True).stdout
    assert listed.split() == [f"00000-00000.{k:04d}.jpg" for k in range(3)] + ["00000-00001.0000.jpg"]
    with tarfile.open(folder / shard_name(0)) as archive:
        picture = Image.open(io.BytesIO(archive.extractfile("00000-00000.0001.jpg").read()))
        assert picture.format == "JPEG" and picture.size == (16, 12)


def test_webdataset_sees_one_sample_for_each_clip(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    folder = write(tmp_path / "made")
    samples = list(webdataset.WebDataset(str(folder / shard_name(0)), shardshuffle=False))
    assert [sample["__key__"] for sample in samples] == ["00000-00000", "00000-00001"]
    assert sorted(key for key in samples[0] if not key.startswith("__")) == ["0000.jpg", "0001.jpg", "0002.jpg"]


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="no account of bytes read")
def test_two_frames_cost_two_small_reads(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    jpeg = encode_frame(noise, 95)
    with ShardWriter(tmp_path, 0) as shard:
        shard.begin_clip("a.mp4", "0" * 64, 0.0)
        for _ in range(200):
            shard.add_frame(jpeg)
        shard.finish({})
    write_index(tmp_path, 1)
    clips = ShardedClips(tmp_path)
    clips.read(0, [0])
    empty = bytes_read()
    before = bytes_read()
    clips.read(0, [3, 150])
    assert bytes_read() - before - (before - empty) <= 2 * len(jpeg)


def test_importing_needs_no_video_library():
    code = "import sys; sys.modules['av'] = None; import asc.data.shards"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------------------------------------- processes


def read_in_process(clips: ShardedClips, queue: multiprocessing.Queue) -> None:
    queue.put([frame.sum() for clip in range(len(clips)) for frame in clips.read(clip, [0])])


def test_forked_processes_and_pickles_read_the_same_with_their_own_files(tmp_path):
    clips = ShardedClips(write(tmp_path / "made"))
    expected = [frame.sum() for clip in range(len(clips)) for frame in clips.read(clip, [0])]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=read_in_process, args=(clips, queue))
    process.start()
    assert queue.get(timeout=30) == expected
    process.join()
    copy = pickle.loads(pickle.dumps(clips))
    assert [frame.sum() for clip in range(len(copy)) for frame in copy.read(clip, [0])] == expected
    assert not set(copy._open.values()) & set(clips._open.values())


def test_no_more_files_stay_open_than_a_window(tmp_path):
    folder = write(tmp_path / "made", [[1]] * (WINDOW + 8))
    before = len(list(Path("/proc/self/fd").iterdir()))
    clips = ShardedClips(folder)
    for clip in range(len(clips)):
        clips.read(clip, [0])
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= WINDOW + 1  # the index
    del clips
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# -------------------------------------------------------------------------------------------------- order


def test_the_order_of_a_folder_is_a_full_shuffle_that_the_generator_decides(tmp_path):
    clips = ShardedClips(write(tmp_path / "made", [[1] * 8] * 4))
    orders = [clips.order(np.random.default_rng(seed)).tolist() for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(32))


def test_a_stream_mixes_a_window_and_needs_every_shard_once(tmp_path):
    count, each = 3 * WINDOW, 16
    folder = write(tmp_path / "made", [[1] * each] * count)
    clips = ShardedClips(f"file://{folder}", cache=tmp_path / "cache")
    order = clips.order(np.random.default_rng(0))
    assert sorted(order.tolist()) == list(range(count * each))
    assert order.tolist() == clips.order(np.random.default_rng(0)).tolist()
    first_use, last_use = {}, {}
    for time, clip in enumerate(order.tolist()):
        first_use.setdefault(clip // each, time)
        last_use[clip // each] = time
    in_use = [sum(first_use[s] <= t <= last_use[s] for s in range(count)) for t in range(len(order))]
    assert max(in_use) <= WINDOW + 1
    # Mixed: neighbours in the order come from the same shard hardly more often than chance within the window.
    same = np.mean(order[1:] // each == order[:-1] // each)
    assert same < 4 / WINDOW


# --------------------------------------------------------------------------------------- object storage


@pytest.fixture
def memory(tmp_path):
    """A prepared folder in fsspec's in-memory object storage."""
    storage = fsspec.filesystem("memory")
    folder = write(tmp_path / "made")
    storage.put(str(folder), "/corpus", recursive=True)
    yield storage
    storage.rm("/corpus", recursive=True)


def test_object_storage_gives_the_same_frames_and_fetches_every_shard_once(memory, tmp_path, monkeypatch):
    fetched = []
    original = type(memory).get_file
    monkeypatch.setattr(
        type(memory), "get_file", lambda self, a, b, **k: fetched.append(a) or original(self, a, b, **k)
    )
    clips = ShardedClips("memory://corpus", cache=tmp_path / "cache")
    check_all(clips)
    check_all(ShardedClips("memory://corpus", cache=tmp_path / "cache"))
    assert sorted(fetched) == [f"/corpus/{shard_name(number)}" for number in (0, 1, 3)]


def test_a_pickled_stream_reads_on_in_another_process(tmp_path):
    folder = write(tmp_path / "made")
    clips = ShardedClips(f"file://{folder}", cache=tmp_path / "cache")
    check_all(pickle.loads(pickle.dumps(clips)))


def test_the_cache_keeps_its_size_and_gives_up_what_was_used_longest_ago(tmp_path):
    folder = write(tmp_path / "made", [[4]] * (WINDOW + 10))
    size = (folder / shard_name(0)).stat().st_size
    clips = ShardedClips(f"file://{folder}", cache=tmp_path / "cache", cache_gb=(WINDOW + 2) * size / 1e9)
    for clip in range(len(clips)):
        clips.read(clip, [3])
    kept = sorted(path.name for path in (tmp_path / "cache").glob("*/shard-*.tar"))
    assert kept == [shard_name(number) for number in range(8, WINDOW + 10)]
    assert np.abs(clips.read(0, [1])[0].astype(int) - pixels(0, 0, 1)).mean() < 3


def test_a_cache_too_small_for_a_window_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cache_gb"):
        ShardedClips(f"file://{write(tmp_path / 'made')}", cache=tmp_path / "cache", cache_gb=1e-6)


def test_another_corpus_at_the_same_address_does_not_meet_the_old_shards(memory, tmp_path):
    ShardedClips("memory://corpus", cache=tmp_path / "cache").read(0, [0])
    memory.put(str(write(tmp_path / "other", [[2]], seed=1)), "/", recursive=True)
    memory.mv("/corpus", "/old", recursive=True)
    memory.mv("/other", "/corpus", recursive=True)
    clips = ShardedClips("memory://corpus", cache=tmp_path / "cache")
    assert len(clips) == 1 and clips.num_frames(0) == 2
    assert clips.content_hash(0).endswith("10")
    clips.read(0, [1])
    memory.rm("/old", recursive=True)


@pytest.mark.parametrize("url", ["memory://nothing", "nonsense://a/b", "file:///no/such/folder"])
def test_an_address_without_clips_is_named(tmp_path, url):
    with pytest.raises(ValueError, match=url):
        ShardedClips(url, cache=tmp_path)


# --------------------------------------------------------------------------------------------- mistakes


def test_wrong_numbers_and_folders_are_named(tmp_path):
    clips = ShardedClips(write(tmp_path / "made"))
    with pytest.raises(ValueError, match=r"frames \[0, 3\] asked of a/0.mp4, which has 3"):
        clips.read(0, [0, 3])
    with pytest.raises(ValueError, match=r"\[-1\]"):
        clips.read(0, [-1])
    with pytest.raises(IndexError, match="clip 6"):
        clips.read(6, [0])
    with pytest.raises(ValueError, match="asc prepare"):
        ShardedClips(tmp_path)
    empty = write(tmp_path / "empty", [[]])
    with pytest.raises(ValueError, match=r"empty.*no clips"):
        ShardedClips(empty)


def test_damage_is_an_error_that_names_the_shard(tmp_path):
    folder = write(tmp_path / "made")
    shard = folder / shard_name(1)
    data = shard.read_bytes()
    shard.write_bytes(data[:512] + bytes(len(data) - 512))
    with pytest.raises(ValueError, match=r"shard-00001\.tar: no picture at byte 512"):
        ShardedClips(folder).read(2, [0])
    shard.write_bytes(data[:-512])
    with pytest.raises(ValueError, match=r"shard-00001\.tar: has \d+ bytes, but the index says"):
        ShardedClips(folder).read(2, [0])
    shard.unlink()
    with pytest.raises(ValueError, match=r"shard-00001\.tar: cannot be opened"):
        ShardedClips(folder).read(2, [0])


def test_a_damaged_index_is_named(tmp_path):
    index = write(tmp_path / "made") / INDEX_FILE
    data = index.read_bytes()
    for damaged in (b"", data[:100], b"\xff" * 50, data[:-40]):
        index.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"index\.safetensors: not an index"):
            ShardedClips(tmp_path / "made")
    index.write_bytes(data.replace(b'"asc_shards":"1"', b'"asc_shards":"9"'))
    with pytest.raises(ValueError, match="another version"):
        ShardedClips(tmp_path / "made")


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), ShardWriter(tmp_path, 0) as shard:
        shard.begin_clip("a.mp4", "0" * 64, 0.0)
        shard.add_frame(b"x" * 100_000)
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_the_list_beside_a_shard_is_plain_json(tmp_path):
    folder = write(tmp_path / "made")
    listed = json.loads((folder / "shard-00003.json").read_text())
    assert [len(clip["frame_bytes"]) for clip in listed["clips"]] == [2, 4, 1]
