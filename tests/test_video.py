from __future__ import annotations

import os
import pickle
from pathlib import Path

import av
import numpy as np
import pytest
import videos
from videos import number_of, picture

from asc.data import video
from asc.data.video import VideoError, find_videos, probe, read_at, read_frames


def numbers(path: Path, **settings) -> list[int]:
    return [number_of(pixels) for _, pixels in read_frames(path, **settings)]


def shown(ticks: list[int], time_ms: float) -> int:
    """Which frame a player shows, counted by hand."""
    return sum(tick <= time_ms for tick in ticks) - 1


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# ------------------------------------------------------------------------------------------------ folders


def test_finds_videos_in_order_and_says_what_it_ignored(tmp_path):
    for name in ("b/2.mp4", "b/10.MKV", "a.webm", "noending", "b.txt", "b/cover.JPG", ".hidden.mp4", ".cache/x.mp4"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = find_videos(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in found.videos] == ["a.webm", "b/10.MKV", "b/2.mp4", "noending"]
    ignored = [str(path.relative_to(tmp_path)) for path in found.ignored]
    assert ignored == [".cache", ".hidden.mp4", "b/cover.JPG", "b.txt"]


def test_links_that_form_a_loop_end(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.mp4").write_bytes(b"x")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "gone.mp4").symlink_to(tmp_path / "nowhere")
    found = find_videos(tmp_path)
    assert found.videos == [tmp_path / "a" / "1.mp4", tmp_path / "gone.mp4"]
    assert found.ignored == [tmp_path / "a" / "loop", tmp_path / "b"]


def test_a_pipe_is_ignored_and_a_folder_named_like_a_video_is_entered(tmp_path):
    (tmp_path / "x.mp4").mkdir()
    (tmp_path / "x.mp4" / "1.mp4").write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe.mp4")
    assert find_videos(tmp_path) == ([tmp_path / "x.mp4" / "1.mp4"], [tmp_path / "pipe.mp4"])


@pytest.mark.parametrize("name", ["missing", "empty", "notes"])
def test_a_folder_without_videos_is_named(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=f"{name}: no "):
        find_videos(tmp_path / name)


# ------------------------------------------------------------------------------------------- kinds of video

KINDS = {
    "h264.mp4": {},
    "h264.mkv": {},
    "h264.ts": {},
    "h264.flv": {},
    "h264.avi": {},
    "h264.264": {"format": "h264"},
    "mpeg4.avi": {"codec": "mpeg4"},
    "mpeg2.mpg": {"codec": "mpeg2video"},
    "vp8.webm": {"codec": "libvpx"},
    "jpeg.mjpeg": {"codec": "mjpeg", "pix_fmt": "yuvj420p"},
    "jpeg.avi": {"codec": "mjpeg", "pix_fmt": "yuvj420p"},
    "ten_bits.mp4": {"pix_fmt": "yuv420p10le"},
    "grey.mkv": {"codec": "ffv1", "pix_fmt": "gray"},
    "grey16.mkv": {"codec": "ffv1", "pix_fmt": "gray16le"},
    "odd.mkv": {"codec": "ffv1", "size": (63, 47)},
    "odd.mp4": {"pix_fmt": "yuv444p", "size": (63, 47)},
    "alpha.mkv": {"codec": "ffv1", "pix_fmt": "bgra"},
    "alpha.mov": {"codec": "qtrle", "pix_fmt": "argb"},
    "palette.gif": {"codec": "gif", "pix_fmt": "rgb8"},
    "raw.nut": {"codec": "rawvideo"},
    "open_gop.mp4": {"options": {"x264-params": "open-gop=1:bframes=3:keyint=10:min-keyint=10:scenecut=0"}},
    "intra_refresh.mkv": {"options": {"x264-params": "intra-refresh=1:keyint=10:scenecut=0"}},
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_gives_the_encoded_frames_at_their_times(tmp_path, name):
    size = KINDS[name].get("size", (64, 48))
    path = videos.write(tmp_path / name, 30, **{"gop": 10, **KINDS[name]})
    frames = list(read_frames(path))
    assert [number_of(pixels) for _, pixels in frames] == list(range(30))
    assert [time for time, _ in frames] == pytest.approx([k / 25 for k in range(30)], abs=6e-4)
    assert all(pixels.dtype == np.uint8 and pixels.flags.c_contiguous for _, pixels in frames)
    # Borders too: swscale's fast paths have left out odd last rows and columns before.
    without_colour = "grey" in name
    for number, (_, pixels) in enumerate(frames):
        expected = picture(number, *size).astype(float)
        expected = expected.mean(2, keepdims=True) if without_colour else expected
        error = np.abs(pixels - expected)
        worst = max(error[-1].mean(), error[:, -1].mean(), error.mean())
        assert worst < (30 if name.endswith("gif") else 12), name
    info = probe(path, count=True)
    assert (info.width, info.height, info.frames, info.counted) == (*size, 30, True)
    assert (info.duration, info.rate) == (pytest.approx(1.2, abs=2e-3), pytest.approx(25, rel=1e-3))
    assert (info.truncated, info.damaged, info.rotation) == (False, 0, 0)


@pytest.mark.parametrize("name", KINDS)
def test_read_at_gives_the_frames_of_read_frames(tmp_path, name):
    path = videos.write(tmp_path / name, 30, **{"gop": 10, **KINDS[name]})
    every = [pixels for _, pixels in read_frames(path)]
    order = [29, 3, 17, 17, 0, 25, 12]
    # The middle of the time a frame is shown, so that no rounding matters.
    got = read_at(path, [(k + 0.5) / 25 for k in order])
    assert np.array_equal(got, np.stack([every[k] for k in order]))
    # Every single target, so that each position relative to a keyframe is jumped to.
    for k in range(9, 30):
        assert np.array_equal(read_at(path, [(k + 0.5) / 25])[0], every[k]), k
        assert np.array_equal(next(read_frames(path, start=k / 25))[1], every[k]), k


@pytest.mark.parametrize("ending", ["mp4", "mkv"])
def test_far_frames_are_jumped_to(tmp_path, ending, monkeypatch):
    path = videos.write(tmp_path / f"long.{ending}", 32, rate=1, gop=4, options={"bf": "2"})
    every = [pixels for _, pixels in read_frames(path)]
    decoded = []
    decode = video._Reader._decode

    def counting(reader):
        for frame in decode(reader):
            decoded.append(frame.pts)
            yield frame

    monkeypatch.setattr(video._Reader, "_decode", counting)
    assert np.array_equal(read_at(path, [30.5])[0], every[30])
    assert len(decoded) < 12
    decoded.clear()
    assert np.array_equal(next(read_frames(path, fps=1, start=21))[1], every[21])
    assert len(decoded) < 12


@pytest.mark.parametrize("ending", ["mp4", "mkv"])
def test_variable_frame_rate_is_sampled_by_time(tmp_path, ending):
    ticks = [0, 10, 50, 300, 310, 330, 700, 710, 1000]
    path = videos.write(tmp_path / f"v.{ending}", len(ticks), ticks=ticks, options={"bf": "0"})
    assert [round(time * 1000) for time, _ in read_frames(path)] == ticks
    sampled = list(read_frames(path, fps=20))
    assert [time for time, _ in sampled[:21]] == [k / 20 for k in range(21)]
    assert [number_of(pixels) for _, pixels in sampled[:21]] == [shown(ticks, 50 * k) for k in range(21)]
    assert all(number_of(pixels) == 8 for _, pixels in sampled[21:])
    times = [0.999, 0.305, 0.045, 0.69]
    assert [number_of(pixels) for pixels in read_at(path, times)] == [shown(ticks, 1000 * t) for t in times]


@pytest.mark.parametrize("ending", ["mp4", "mkv", "ts"])
@pytest.mark.parametrize("rate", [24, 25, 30])
def test_the_own_rate_gives_every_frame_once(tmp_path, ending, rate):
    # Matroska rounds to milliseconds: frame 2 of 30 fps stands at 67 ms, after its own sample time.
    path = videos.write(tmp_path / f"r.{ending}", 30, rate=rate)
    assert numbers(path, fps=rate) == list(range(30))


def test_other_rates_and_parts(tmp_path):
    path = videos.write(tmp_path / "r.mp4", 30, rate=30)
    assert numbers(path, fps=10) == list(range(0, 30, 3))
    assert numbers(path, fps=60) == [k // 2 for k in range(60)]
    assert numbers(path, start=0.5, length=0.2) == [15, 16, 17, 18, 19, 20]
    assert numbers(path, fps=10, start=0.5, length=0.3) == [15, 18, 21]
    assert numbers(path, fps=10, start=0.95) == [28]
    assert numbers(path, threads=2) == list(range(30))


def test_a_frame_that_comes_twice_can_be_changed_once(tmp_path):
    path = videos.write(tmp_path / "r.mp4", 2)
    (_, first), (_, again) = list(read_frames(path, fps=50))[:2]
    first[:] = 0
    assert number_of(again) == 0 and again.any()


# ------------------------------------------------------------------------------------------------ pictures


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_rotation_turns_the_picture_clockwise(tmp_path, degrees):
    plain = videos.write(tmp_path / "plain.mp4", 3)
    turned = videos.turn(videos.write(tmp_path / "turned.mp4", 3), videos.TURNED[degrees])
    expected = [np.rot90(pixels, -degrees // 90) for _, pixels in read_frames(plain)]
    assert np.array_equal([pixels for _, pixels in read_frames(turned)], expected)
    assert np.array_equal(read_at(turned, [0.05]), expected[1:2])
    info = probe(turned)
    assert (info.rotation, info.height, info.width) == (degrees, *expected[0].shape[:2])


def test_a_mirrored_picture_is_not_taken_for_a_turned_one(tmp_path):
    plain = next(read_frames(videos.write(tmp_path / "plain.mp4", 1)))[1]
    path = videos.turn(videos.write(tmp_path / "mirrored.mp4", 1), videos.MIRRORED)
    assert np.array_equal(next(read_frames(path))[1], plain[:, ::-1])
    assert probe(path).rotation == 0


@pytest.mark.parametrize("matrix", [videos.TURNED[0], videos.TURNED[90]])
def test_short_side_keeps_the_aspect_and_crop_is_centred(tmp_path, matrix):
    path = videos.turn(videos.write(tmp_path / "a.mp4", 2, size=(128, 96)), matrix)
    shape = (24, 32, 3) if matrix == videos.TURNED[0] else (32, 24, 3)
    small = next(read_frames(path, short_side=24))[1]
    assert small.shape == shape
    square = next(read_frames(path, short_side=24, crop=20))[1]
    top, left = (shape[0] - 20) // 2, (shape[1] - 20) // 2
    assert np.array_equal(square, small[top : top + 20, left : left + 20])
    assert np.array_equal(read_at(path, [0.0], short_side=24, crop=20)[0], square)
    assert next(read_frames(path, short_side=200))[1].shape[:2] in ((200, 267), (267, 200))


@pytest.mark.parametrize("pix_fmt", ["bgra", "yuv420p"])
def test_shrinking_averages_and_does_not_pick_pixels(tmp_path, pix_fmt):
    path = tmp_path / "stripes.mkv"
    stripes_HW3 = np.zeros((96, 128, 3), np.uint8)
    stripes_HW3[:, ::2] = 255
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=25)
        stream.width, stream.height, stream.pix_fmt = 128, 96, pix_fmt
        frame = av.VideoFrame.from_ndarray(stripes_HW3, "rgb24").reformat(format=pix_fmt)
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    small = next(read_frames(path, short_side=24))[1]
    assert np.abs(small[2:-2, 2:-2].astype(int) - 128).max() < 6


@pytest.mark.parametrize(("matrix", "is_full"), [(1, False), (5, False), (1, True)])
@pytest.mark.parametrize("short_side", [None, 24])
def test_colours_follow_the_matrix_and_range_the_file_names(tmp_path, matrix, is_full, short_side):
    path, colour = tmp_path / "red.mp4", (200, 30, 60)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25, options={"crf": "1"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.colorspace, stream.color_range = matrix, 1 + is_full
        frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), colour, np.uint8), "rgb24")
        frame = frame.reformat(format="yuv420p", dst_colorspace=matrix, dst_color_range=1 + is_full)
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    pixels = next(read_frames(path, short_side=short_side))[1]
    assert np.abs(pixels.astype(int) - colour).max() <= 4


# ------------------------------------------------------------------------------------------------ bad files


def check_every_call_fails(path: Path, reason: str) -> None:
    before = open_files()
    for call in (lambda: probe(path), lambda: list(read_frames(path)), lambda: read_at(path, [0.0])):
        with pytest.raises(VideoError, match=reason) as caught:
            call()
        assert str(path) in str(caught.value)
        del caught
    assert open_files() == before


def test_an_empty_file_says_so(tmp_path):
    (tmp_path / "a.mp4").touch()
    check_every_call_fails(tmp_path / "a.mp4", "empty")


@pytest.mark.parametrize("name", ["text.mp4", "text.avi", "text.txt", "text.nfo"])
def test_text_is_no_video(tmp_path, name):
    (tmp_path / name).write_text("This is not a video.\n" * 200)
    check_every_call_fails(tmp_path / name, "not a video")


def test_a_playlist_does_not_lead_to_other_files(tmp_path):
    videos.write(tmp_path / "real.ts", 5)
    (tmp_path / "list.mp4").write_text("#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:9/x.ts\n")
    check_every_call_fails(tmp_path / "list.mp4", "list")


def test_noise_is_no_video(tmp_path):
    (tmp_path / "a.mp4").write_bytes(np.random.default_rng(0).bytes(5000))
    check_every_call_fails(tmp_path / "a.mp4", "not a video")


def test_a_folder_a_pipe_and_nothing_are_named(tmp_path):
    (tmp_path / "x.mp4").mkdir()
    check_every_call_fails(tmp_path / "x.mp4", "folder")
    os.mkfifo(tmp_path / "pipe.mp4")
    check_every_call_fails(tmp_path / "pipe.mp4", "regular file")
    check_every_call_fails(tmp_path / "missing.mp4", "No such file")


@pytest.mark.skipif(os.geteuid() == 0, reason="the root user may read everything")
def test_a_file_without_permission_is_named(tmp_path):
    path = videos.write(tmp_path / "a.mp4", 2)
    path.chmod(0)
    check_every_call_fails(path, "Permission")


def test_audio_alone_is_no_video(tmp_path):
    check_every_call_fails(videos.write_audio(tmp_path / "a.mp4"), "no video stream, only audio")


def test_the_cover_of_a_song_is_no_video(tmp_path):
    from PIL import Image

    Image.fromarray(picture(3)).save(tmp_path / "cover.jpg")
    path = videos.write_song_with_cover(tmp_path / "song.mp3", tmp_path / "cover.jpg")
    check_every_call_fails(path, "no video stream")


def test_an_mp4_without_its_end_has_no_index(tmp_path):
    check_every_call_fails(videos.cut(videos.write(tmp_path / "a.mp4", 20), 0.5, after=b"mdat"), "cut short")


@pytest.mark.parametrize(
    ("name", "mark", "settings"),
    [
        ("a.mp4", b"mdat", {"container_options": {"movflags": "faststart"}}),
        ("a.mkv", b"\x1f\x43\xb6\x75", {}),
        ("a.avi", b"movi", {"codec": "mpeg4"}),
        ("b.avi", b"movi", {"codec": "mjpeg", "pix_fmt": "yuvj420p"}),
    ],
)
def test_a_truncated_video_gives_what_is_left_and_says_so(tmp_path, name, mark, settings):
    path = videos.cut(videos.write(tmp_path / name, 30, **settings), 0.6, after=mark)
    info = probe(path, count=True)
    frames = list(read_frames(path))
    got = [number_of(pixels) for _, pixels in frames]
    # Near the cut a frame may miss that is stored after a later one; the others keep their own times.
    assert got[:6] == list(range(6)) and len(got) < 30
    assert [time for time, _ in frames] == pytest.approx([number / 25 for number in got], abs=6e-4)
    assert info.truncated and info.frames == len(got)
    assert info.duration == pytest.approx((got[-1] + 1) / 25, abs=2e-3)
    if name == "a.mp4":
        assert probe(path).truncated
    with pytest.raises(VideoError, match=r"no frame at 1\.100 s"):
        read_at(path, [0.0, 1.1])


def test_nothing_but_a_header_is_an_error(tmp_path):
    path = videos.write(tmp_path / "a.mkv", 20)
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"\x1f\x43\xb6\x75") + 12])
    check_every_call_fails(path, "decoded|not a video")


def test_damage_inside_loses_frames_but_neither_order_nor_the_rest(tmp_path):
    path = videos.write(tmp_path / "a.avi", 30, codec="mjpeg", pix_fmt="yuvj420p")
    data = bytearray(path.read_bytes())
    place = len(data) // 2
    data[place : place + 100] = bytes(100)
    path.write_bytes(data)
    frames = list(read_frames(path))
    assert 25 <= len(frames) <= 30
    clear = [number_of(pixels) for _, pixels in (frames[:12] + frames[-12:])]
    assert clear == sorted(clear) and clear[0] == 0 and clear[-1] == 29


def test_one_frame_is_a_video(tmp_path):
    path = videos.write(tmp_path / "a.mp4", 1)
    assert numbers(path) == numbers(path, fps=25) == [0]
    assert probe(path).frames == 1
    assert read_at(path, [0.0, 0.02]).shape == (2, 48, 64, 3)


@pytest.mark.parametrize("ending", ["mjpeg", "h264"])
def test_without_timestamps_frames_follow_at_the_stated_rate(tmp_path, ending):
    codec = {"mjpeg": {"codec": "mjpeg", "pix_fmt": "yuvj420p"}, "h264": {}}[ending]
    path = videos.write(tmp_path / f"a.{ending}", 10, **codec)
    assert [time for time, _ in read_frames(path)] == pytest.approx([k / 25 for k in range(10)])
    assert numbers(path, fps=12.5) == [0, 2, 4, 6, 8]
    info = probe(path)
    assert info.counted and info.frames == 10


def test_joined_recordings_whose_time_starts_anew_play_on(tmp_path):
    one = videos.write(tmp_path / "one.ts", 30, rate=10, options={"bf": "0"})
    path = tmp_path / "both.ts"
    path.write_bytes(one.read_bytes() * 2)
    frames = list(read_frames(path))
    times = [time for time, _ in frames]
    assert [number_of(pixels) for _, pixels in frames] == [*range(30), *range(30)]
    assert np.all(np.diff(times) >= 0) and times[-1] == pytest.approx(5.9, abs=0.2)


# ------------------------------------------------------------------------------------------------- settings


def test_times_outside_the_video_are_errors(tmp_path):
    path = videos.write(tmp_path / "a.mp4", 10)
    with pytest.raises(VideoError, match=r"no frame at 0\.400 s"):
        read_at(path, [0.1, 0.4])
    with pytest.raises(VideoError, match="start=7"):
        list(read_frames(path, start=7))
    with pytest.raises(VideoError, match="crop=49"):
        list(read_frames(path, crop=49))


@pytest.mark.parametrize(
    "settings",
    [{"fps": 0}, {"fps": float("nan")}, {"start": -1}, {"length": 0}, {"short_side": 0}, {"crop": -1}, {"threads": -1}],
)
def test_a_wrong_setting_is_named(tmp_path, settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        read_frames(tmp_path / "a.mp4", **settings)


@pytest.mark.parametrize("times", [[], [-0.1], [0.0, float("inf")], [float("nan"), 0.0], [0.0, float("nan")]])
def test_wrong_times_are_named(tmp_path, times):
    with pytest.raises(ValueError, match="times"):
        read_at(tmp_path / "a.mp4", times)


def test_files_are_closed_even_when_reading_stops_early(tmp_path):
    path = videos.write(tmp_path / "a.mp4", 30)
    before = open_files()
    frames = read_frames(path)
    next(frames)
    frames.close()
    list(read_frames(path))
    read_at(path, [1.0])
    probe(path)
    assert open_files() == before


def test_errors_survive_the_way_out_of_a_worker(tmp_path):
    with pytest.raises(VideoError) as caught:
        probe(tmp_path / "a.mp4")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
