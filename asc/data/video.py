"""Frames of videos of any kind that FFmpeg reads.

Times are seconds since the first frame of the video, and a frame is shown from its own time until the next
one's; so variable frame rates need no special care. A file that cannot be read gives a :class:`VideoError`
and never another sample in its place. Pixels are taken as square.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, cast

import av
import numpy as np
from av.container import InputContainer
from av.packet import Packet
from av.sidedata.sidedata import SideDataContainer
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]

# Endings that certainly name no video. Whatever is not listed is tried: FFmpeg knows hundreds of containers.
_OTHER_ENDINGS = """
    txt md rst log pdf doc docx html htm css json jsonl yaml yml toml xml ini cfg csv tsv xls xlsx db sqlite
    jpg jpeg png bmp tif tiff webp svg ico heic psd exr mp3 wav flac aac m4a opus srt vtt ass sub
    zip tar gz tgz bz2 xz zst 7z rar py pyc ipynb sh js c h cpp npy npz pt pth pkl h5 hdf5 parquet
    safetensors onnx part tmp crdownload md5 sha1 sha256 sig torrent
"""
NOT_VIDEO = frozenset(f".{ending}" for ending in _OTHER_ENDINGS.split())
# Demuxers that draw text as pictures: FFmpeg would turn a note into a film.
_TEXT_FORMATS = frozenset({"tty", "bin", "xbin", "adf", "idf"})
# Only these store every frame's or keyframe's time, so that a jump lands where decoding from the start would.
_INDEXED_AT_ONCE = "mp4"
_SEEKABLE = (_INDEXED_AT_ONCE, "matroska")
# A jump costs about as much as these frames: the decoder starts anew and refills its reordering buffer.
_JUMP_FRAMES = 8
# Matroska loads its index at the first jump; before that only a gap this long (seconds) is worth the risk.
_BLIND_JUMP = 5.0
# Timestamps that go back further than this (seconds) begin a new recording, e.g. of joined transport streams.
_BACKWARD = 1.0
# No film holds a frame this long (seconds); sampling such a gap would hardly end.
_FORWARD = 3600.0
_DEFAULT_RATE = 25.0
_PLANAR = ("yuv420p", "yuvj420p")
# Shrunk at least so much, a picture is the mean over areas: 0.4 of the time of the wide bicubic filter.
_FAR = 2.0


class VideoError(ValueError):
    """A video that cannot be read; the message names the file and the reason."""


class Found(NamedTuple):
    """The files below a folder, sorted by relative path."""

    videos: list[Path]
    """Files that could be videos."""
    ignored: list[Path]
    """What certainly holds none: other files, hidden ones and folders, links to folders already listed."""


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """What a video says of itself; see :func:`probe`."""

    path: Path
    width: int
    """Columns as shown, so after rotation."""
    height: int
    """Rows as shown, so after rotation."""
    duration: float
    """Seconds; exact if ``counted``, else the header's word."""
    frames: int
    """Number of frames; exact if ``counted``, else the header's word or duration times rate."""
    counted: bool
    """Whether the frames were decoded and counted rather than estimated."""
    rate: float
    """Mean frames a second."""
    codec: str
    pix_fmt: str
    rotation: int
    """Degrees (0, 90, 180, 270) by which the stored picture is turned clockwise to be shown, after it was
    mirrored left to right if the file asks for that."""
    truncated: bool
    """Whether the end of the file is certainly missing. Without ``count`` only containers that index every
    frame (MP4, MOV) can tell."""
    damaged: int
    """Packets that did not decode; 0 unless ``counted``."""


class _Shown(NamedTuple):
    time: float
    lasts: float
    frame: VideoFrame


def _error(path: Path, reason: str) -> VideoError:
    # A single argument, because data-loading workers rebuild an exception from its message alone.
    return VideoError(f"{path}: {reason}")


# ---------------------------------------------------------------------------------------------- the files


def find_videos(folder: str | Path) -> Found:
    """Every file below ``folder`` that could be a video, and what was left out.

    Links are followed, but no folder is entered twice.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"{root}: no such folder of videos")
    found = Found([], [])
    _walk(root, set(), found)
    for files in found:
        files.sort(key=lambda path: path.relative_to(root).parts)
    if not found.videos:
        raise ValueError(f"{root}: no videos in this folder ({len(found.ignored)} other entries)")
    return found


def _walk(folder: Path, seen: set[tuple[int, int]], found: Found) -> None:
    status = folder.stat()
    if (status.st_dev, status.st_ino) in seen:
        found.ignored.append(folder)
        return
    seen.add((status.st_dev, status.st_ino))
    try:
        # Sorted, because the order decides under which of two links a folder is listed.
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise ValueError(f"{folder}: this folder cannot be listed ({error.strerror})") from error
    for entry in entries:
        if not entry.name.startswith(".") and entry.is_dir():
            _walk(entry, seen, found)
        else:
            (found.videos if _may_be_video(entry) else found.ignored).append(entry)


def _may_be_video(path: Path) -> bool:
    # A broken link stays in the list, so that opening it tells the user.
    is_file = path.is_file() or not path.exists()
    return is_file and not path.name.startswith(".") and path.suffix.lower() not in NOT_VIDEO


def _check_file(path: Path) -> None:
    """Explain what FFmpeg would report vaguely, or wait for forever (a pipe)."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise _error(path, "is a folder, not a video")
        if not stat.S_ISREG(status.st_mode):
            raise _error(path, "is not a regular file")
        if status.st_size == 0:
            raise _error(path, "the file is empty")
        with path.open("rb"):
            pass
    except OSError as error:
        raise _error(path, f"the file cannot be opened ({error.strerror})") from error


def _open(path: Path) -> InputContainer:
    _check_file(path)
    try:
        # "file:" and the whitelist keep names and playlists from reaching for anything but this disk.
        container = av.open(
            f"file:{os.fspath(path)}", "r", options={"protocol_whitelist": "file"}, metadata_errors="replace"
        )
    except (av.FFmpegError, OSError, ValueError) as error:
        raise _error(path, f"not a video FFmpeg can read, or cut short ({_words(error)})") from error
    if container.format.name in _TEXT_FORMATS:
        container.close()
        raise _error(path, "is text, not a video")
    return container


def _video_stream(path: Path, container: InputContainer) -> VideoStream:
    # The cover picture of a song counts as a video stream too.
    streams = [s for s in container.streams.video if not s.disposition & av.stream.Disposition.attached_pic]
    if not streams:
        kinds = ", ".join(sorted({stream.type for stream in container.streams}))
        raise _error(path, f"has no video stream, only {kinds or 'nothing'}")
    best = container.streams.best("video")
    stream = next((stream for stream in streams if stream is best), streams[0])
    if stream.codec_context is None:
        raise _error(path, "has a video stream for which there is no decoder")
    return stream


def _words(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error)


# ------------------------------------------------------------------------------------------- the decoding


class _Reader:
    """One open video: its frames with their times, from the start or from a keyframe."""

    def __init__(self, path: Path, threads: int) -> None:
        self.path = path
        self.threads = threads
        self.damaged = 0
        self.cut_short = False
        self._problem = ""
        self._start()
        self._look()

    def __enter__(self) -> _Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.container.close()

    def _start(self) -> None:
        self.container = _open(self.path)
        try:
            self.stream = _video_stream(self.path, self.container)
            self.stream.thread_count = self.threads
            self.stream.thread_type = "AUTO" if self.threads != 1 else "NONE"
            self._raw = self._decode()
            # Two frames show where time begins and whether there are timestamps at all.
            self._head = list(itertools.islice(self._raw, 2))
            if not self._head:
                raise _error(self.path, f"no frame of it can be decoded{self._problem}")
        except BaseException:
            self.container.close()
            raise
        self._at_start = True

    def _look(self) -> None:
        """Derive the facts that hold for the whole file."""
        stream, pts = self.stream, [frame.pts for frame in self._head]
        rate = stream.average_rate or stream.guessed_rate or stream.base_rate
        self.rate = float(rate) if rate else _DEFAULT_RATE
        self.step = 1 / self.rate
        base = stream.time_base
        names = self.container.format.name.split(",")
        # AVI knows no order of showing, only of storing; FFmpeg's guess is wrong where the two differ.
        is_guess = "avi" in names and bool(stream.codec_context.has_b_frames)
        self.timed = base is not None and None not in pts and len(set(pts)) == len(pts) and not is_guess
        self.tick = (base.numerator, base.denominator) if base is not None else (1, 1)
        self.origin = pts[0] or 0
        # Containers round times to their ticks (Matroska: 1 ms), so a frame counts as shown half a tick early.
        self.slack = min(max(self.tick[0] / self.tick[1] / 2, 1e-6), 1e-3)
        self.seekable = self.timed and any(name in names for name in _SEEKABLE)
        self._indexed = _INDEXED_AT_ONCE in names

    @property
    def first(self) -> VideoFrame:
        """The first frame."""
        return self._head[0]

    def _packets(self) -> Iterator[Packet[VideoStream] | None]:
        try:
            yield from self.container.demux(self.stream)
        except av.error.InvalidDataError:
            self.cut_short = True
            # The decoder still holds frames, which the demuxer's own last packet would have called for.
            yield None
        except av.FFmpegError as error:
            raise _error(self.path, f"reading failed ({_words(error)})") from error

    def _decode(self) -> Iterator[VideoFrame]:
        self._first_packet: Packet[VideoStream] | None = None
        for packet in self._packets():
            if packet is not None and packet.size and self._first_packet is None:
                self._first_packet = packet
            # A half packet decodes to a picture that was never in the video. Transport streams also call a packet
            # corrupt whose neighbours do not fit, e.g. where two were joined; it is whole, and others need it.
            is_half = packet is not None and packet.is_corrupt and self.container.format.name != "mpegts"
            self.cut_short |= is_half
            if is_half:
                self.damaged += 1
                continue
            try:
                frames = self.stream.decode(packet)
            except av.FFmpegError as error:
                self.damaged += 1
                self._problem = f" ({_words(error)})"
                continue
            yield from (frame for frame in frames if not frame.is_corrupt)

    def from_start(self) -> Iterator[_Shown]:
        """All frames in the order they are shown."""
        if not self._at_start:
            self.container.close()
            self.damaged, self.cut_short = 0, False
            self._start()
        self._at_start = False
        return self._timeline(itertools.chain(self._head, self._raw))

    def pays_to_jump(self, now: float, time: float) -> bool:
        """Whether a keyframe lies well after ``now`` and not after ``time``."""
        if not self.seekable or time <= now + _JUMP_FRAMES * self.step:
            return False
        if not self._indexed:
            return time - now > _BLIND_JUMP
        entries = self.stream.index_entries
        place = entries.search_timestamp(self._pts(time))
        return place >= 0 and self._seconds(entries[place].timestamp) > now + _JUMP_FRAMES * self.step

    def jump(self, time: float) -> Iterator[_Shown]:
        """Frames from the last keyframe before ``time``; from the start where a jump cannot be trusted."""
        self._at_start = False
        # The second try helps where frames after a keyframe are shown before it.
        for back in (0.0, 1.0):
            raw = self._frames_after_keyframe(self._pts(max(time - back, 0.0)))
            first = next(raw, None)
            if first is None or first.pts is None or self._seconds(first.pts) > time + self.slack:
                continue
            self._indexed = True
            return self._timeline(itertools.chain([first], raw))
        self.seekable = False
        return self.from_start()

    def _frames_after_keyframe(self, pts: int) -> Iterator[VideoFrame]:
        """Nothing unless the first frame is the keyframe itself, whole: then all that follow are as from the start."""
        try:
            self.container.seek(pts, stream=self.stream)
        except av.FFmpegError:
            return
        raw = self._decode()
        first = next(raw, None)
        packet = self._first_packet
        if first is None or packet is None or packet.pts is None or not packet.is_keyframe:
            return
        # Frames shown before the keyframe may lean on what was jumped over.
        while first is not None and first.pts is not None and first.pts < packet.pts:
            first = next(raw, None)
        if first is not None and first.pts == packet.pts:
            yield first
            yield from raw

    def _pts(self, time: float) -> int:
        return self.origin + math.floor((time + self.slack) * self.tick[1] / self.tick[0])

    def _seconds(self, pts: int) -> float:
        return (pts - self.origin) * self.tick[0] / self.tick[1]

    def _timeline(self, frames: Iterable[VideoFrame]) -> Iterator[_Shown]:
        """Give every frame a time that never goes back, whatever the file's timestamps do."""
        previous, shift = -math.inf, 0.0
        for number, frame in enumerate(frames):
            if not self.timed:
                time = number * self.step
            elif frame.pts is None:
                time = previous + self.step
            else:
                time = self._seconds(frame.pts) + shift
                if time < previous - _BACKWARD:
                    shift += previous + self.step - time
                    time = previous + self.step
            time = max(time, previous)
            if time > previous + _FORWARD and number:
                raise _error(self.path, f"its timestamps jump from {previous:.1f} s to {time:.1f} s")
            ticks = frame.duration if self.timed else 0
            yield _Shown(time, ticks * self.tick[0] / self.tick[1] if ticks else self.step, frame)
            previous = time


def _shown_at(reader: _Reader, times: Iterable[float]) -> Iterator[tuple[float, VideoFrame]]:
    """The frame shown at each of these ascending times; ends where the video does."""
    shown = reader.from_start()
    held, ahead = next(shown), next(shown, None)
    for time in times:
        if reader.pays_to_jump(held.time, time):
            shown = reader.jump(time)
            held, ahead = next(shown), next(shown, None)
        while ahead is not None and ahead.time - reader.slack <= time:
            held, ahead = ahead, next(shown, None)
        if ahead is None and time >= held.time + held.lasts - reader.slack:
            return
        yield time, held.frame


def _every_frame(reader: _Reader, start: float, stop: float) -> Iterator[tuple[float, VideoFrame]]:
    shown = reader.jump(start) if reader.pays_to_jump(0.0, start) else reader.from_start()
    for time, _, frame in shown:
        if time >= stop - reader.slack:
            return
        if time >= start - reader.slack:
            yield time, frame


# ------------------------------------------------------------------------------------------- the pictures


class _Orientation(NamedTuple):
    transpose: bool
    flip_rows: bool
    flip_columns: bool
    rotation: int


def _orientation(frame: VideoFrame) -> _Orientation:
    """How the stored picture is turned and mirrored to be shown."""
    # ``rotation`` alone cannot tell a mirrored picture (also "180") from a turned one; 0 may be mirrored too.
    try:
        matrix = cast(SideDataContainer, frame.side_data)["DISPLAYMATRIX"]
    except (KeyError, ValueError):
        # None there; or a kind of side data that PyAV does not know hides it, and the angle must do.
        quarter = -round(frame.rotation / 90) % 4
        return _Orientation(quarter % 2 == 1, quarter in (2, 3), quarter in (1, 2), quarter * 90)
    a, b, _, c, d = np.frombuffer(bytes(matrix), np.int32)[:5].tolist()
    # A stored pixel (x, y) is shown at (a·x + c·y, b·x + d·y).
    mirror = -1 if a * d < b * c else 1
    rotation = round(math.degrees(math.atan2(mirror * b, mirror * a)) / 90) % 4 * 90
    if abs(a) >= abs(b):
        return _Orientation(False, d < 0, a < 0, rotation)
    return _Orientation(True, b < 0, c < 0, rotation)


class _Converter:
    """Decoded frames as upright RGB arrays of one size."""

    def __init__(self, path: Path, first: VideoFrame, short_side: int | None, crop: int | None, threads: int) -> None:
        self.path, self.threads = path, threads
        # One reformatter for each step of all frames keeps its tables between them.
        self.scaler, self.colourer = VideoReformatter(), VideoReformatter()
        self.orientation = _orientation(first)
        # A video may change its size midway; like a player, keep that of the first frame.
        width, height = first.width, first.height
        if short_side is not None:
            scale = short_side / min(width, height)
            width, height = max(1, round(width * scale)), max(1, round(height * scale))
        self.width, self.height, self.crop = width, height, crop
        if crop is not None and crop > min(width, height):
            raise _error(path, f"crop={crop} is larger than the picture of {width}x{height}; give short_side={crop}")

    def __call__(self, frame: VideoFrame) -> Pixels:
        try:
            # Swscale is four times as fast when it scales planes and converts them to RGB afterwards; the common
            # format is worth the extra step. Its bicubic filter widens when it shrinks, so this is antialiased.
            if frame.format.name in _PLANAR and (frame.width, frame.height) != (self.width, self.height):
                frame = self._scale(frame, frame.format.name, self.scaler)
            picture = self._scale(frame, "rgb24", self.colourer)
        except (av.FFmpegError, ValueError) as error:
            raise _error(
                self.path, f"its pixels ({frame.format.name}) cannot be converted ({_words(error)})"
            ) from error
        # Seen in place, only what is left after cutting is copied.
        plane = picture.planes[0]
        padded_HL = np.frombuffer(memoryview(plane), np.uint8).reshape(self.height, plane.line_size)
        pixels_HW3 = padded_HL[:, : 3 * self.width].reshape(self.height, self.width, 3)
        return self._cropped(self._upright(pixels_HW3)).copy(order="C")

    def _scale(self, frame: VideoFrame, kind: str, reformatter: VideoReformatter) -> VideoFrame:
        is_far = min(frame.width / self.width, frame.height / self.height) >= _FAR
        method = Interpolation.AREA if is_far else Interpolation.BICUBIC
        return reformatter.reformat(frame, self.width, self.height, kind, interpolation=method, threads=self.threads)

    def _upright(self, pixels_HW3: Pixels) -> Pixels:
        turn = self.orientation
        pixels_HW3 = pixels_HW3.transpose(1, 0, 2) if turn.transpose else pixels_HW3
        return pixels_HW3[:: -1 if turn.flip_rows else 1, :: -1 if turn.flip_columns else 1]

    def _cropped(self, pixels_HW3: Pixels) -> Pixels:
        if self.crop is None:
            return pixels_HW3
        top, left = ((side - self.crop) // 2 for side in pixels_HW3.shape[:2])
        return pixels_HW3[top : top + self.crop, left : left + self.crop]


# ------------------------------------------------------------------------------------------ what users call


def probe(path: str | Path, count: bool = False) -> VideoInfo:
    """Size, length and coding of a video; at least its first frame decodes.

    With ``count`` the whole video is decoded, so ``frames`` and ``duration`` are exact and ``truncated`` and
    ``damaged`` complete. Videos without timestamps or a length are always counted.
    """
    path = Path(path)
    with _Reader(path, threads=1) as reader:
        stream, first = reader.stream, reader.first
        stated = _stated_duration(reader)
        turn = _orientation(first)
        truncated = _index_ends_early(reader)
        pix_fmt, codec, frames = first.format.name, stream.codec_context.name, stream.frames
        duration = stated or 0.0
        counted = count or not reader.timed or not stated
        if counted:
            frames = 0
            for frames, shown in enumerate(reader.from_start(), start=1):  # noqa: B007
                duration = shown.time + shown.lasts
            is_short = stated is not None and reader.timed and duration < stated - 2 * reader.step
            truncated = truncated or reader.cut_short or is_short
        return VideoInfo(
            path=path,
            width=first.height if turn.transpose else first.width,
            height=first.width if turn.transpose else first.height,
            duration=duration,
            frames=frames or max(1, round(duration * reader.rate)),
            counted=counted,
            rate=reader.rate,
            codec=codec,
            pix_fmt=pix_fmt,
            rotation=turn.rotation,
            truncated=truncated,
            damaged=reader.damaged if counted else 0,
        )


def _stated_duration(reader: _Reader) -> float | None:
    """Seconds of the video stream by its header, if that can be trusted."""
    if reader.stream.duration:
        return reader.stream.duration * reader.tick[0] / reader.tick[1]
    tag = reader.stream.metadata.get("DURATION", "")
    if len(parts := tag.split(":")) == 3:
        # Matroska writes "00:01:02.5"; whatever else stands there is no length.
        with contextlib.suppress(ValueError):
            return sum(float(part) * unit for part, unit in zip(parts, (3600, 60, 1), strict=True))
    # The container's length is that of its longest stream, so it speaks for a lone one only.
    if reader.container.duration and len(reader.container.streams) == 1:
        return reader.container.duration / av.time_base
    return None


def _index_ends_early(reader: _Reader) -> bool:
    entries = reader.stream.index_entries
    # The last few are enough: frames lie in the file in the order of the index.
    ends = [entry.pos + entry.size for entry in entries[-16:]]
    return max(ends, default=0) > reader.path.stat().st_size


def read_frames(
    path: str | Path,
    fps: float | None = None,
    start: float = 0.0,
    length: float | None = None,
    *,
    short_side: int | None = None,
    crop: int | None = None,
    threads: int = 1,
    flaws: list[str] | None = None,
) -> Iterator[tuple[float, Pixels]]:
    """Frames of a video in the order they are shown: pairs of a time and the RGB bytes ``(H, W, 3)``.

    With ``fps`` the times are ``start + k / fps`` and each comes with the frame shown then; without, every frame
    comes with its own time. ``start`` and ``length`` (seconds) pick a part. ``short_side`` resizes the shorter
    side to so many pixels and keeps the aspect; ``crop`` then cuts a centred square. ``threads`` decode: one by
    default, because many workers read at once; 0 means one for each core. When reading ends, ``flaws`` gets a line
    for each kind of damage that was met.
    """
    for name, value in (("fps", fps), ("length", length)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive number, got {value}")
    _check_settings(start, short_side, crop, threads)
    return _read_frames(
        Path(path), fps, start, math.inf if length is None else start + length, short_side, crop, threads, flaws
    )


def _read_frames(
    path: Path,
    fps: float | None,
    start: float,
    stop: float,
    short_side: int | None,
    crop: int | None,
    threads: int,
    flaws: list[str] | None,
) -> Iterator[tuple[float, Pixels]]:
    with _Reader(path, threads) as reader:
        convert = _Converter(path, reader.first, short_side, crop, threads)
        shown = _every_frame(reader, start, stop) if fps is None else _shown_at(reader, _ticks(fps, start, stop))
        last, pixels, time = None, None, start
        for time, frame in shown:
            # A frame that comes twice is copied, so that nobody changes two samples at once.
            pixels = pixels.copy() if frame is last and pixels is not None else convert(frame)
            last = frame
            yield time, pixels
        if last is None and start > 0:
            raise _error(path, f"has no frame at or after start={start:g} s within the asked length")
        if flaws is not None:
            # The next sample would have come one step of the slower of the two rates later.
            end = time + max(reader.step, 1 / fps if fps else 0.0)
            flaws.extend(_flaws(reader, end if stop == math.inf else None))


def _flaws(reader: _Reader, end: float | None) -> Iterator[str]:
    """What was wrong with a video read up to ``end`` (seconds; None if it was left before)."""
    stated = _stated_duration(reader)
    is_short = end is not None and stated is not None and reader.timed and end < stated - 2 * reader.step
    if reader.cut_short or is_short or _index_ends_early(reader):
        yield "truncated: its end is missing"
    if reader.damaged:
        yield f"damaged: packets that did not decode: {reader.damaged}"


def _ticks(fps: float, start: float, stop: float) -> Iterator[float]:
    # Divided anew each time: a sum of steps would drift. The margin spares a sample born of rounding alone.
    return itertools.takewhile(lambda time: time < stop - 1e-9, (start + k / fps for k in itertools.count()))


def read_at(
    path: str | Path,
    times: Sequence[float] | NDArray[np.floating],
    *,
    short_side: int | None = None,
    crop: int | None = None,
    threads: int = 1,
) -> Pixels:
    """The frames shown at these times (seconds, any order) as RGB bytes ``(T, H, W, 3)``.

    They are those :func:`read_frames` gives, but keyframes are jumped to where that spares decoding. A time
    after the end is a :class:`VideoError`.
    """
    path, wanted = Path(path), [float(time) for time in times]
    if not wanted:
        raise ValueError("times must name at least one time")
    _check_settings(min(wanted), short_side, crop, threads, name="times")
    order = sorted(set(wanted))
    _check_settings(order[-1], short_side, crop, threads, name="times")
    frames: dict[float, Pixels] = {}
    with _Reader(path, threads) as reader:
        convert = _Converter(path, reader.first, short_side, crop, threads)
        last = None
        for time, frame in _shown_at(reader, order):
            frames[time] = frames[order[len(frames) - 1]] if frame is last else convert(frame)
            last = frame
    if len(frames) < len(order):
        raise _error(path, f"has no frame at {order[len(frames)]:.3f} s: it ends before")
    return np.stack([frames[time] for time in wanted])


def _check_settings(time: float, short_side: int | None, crop: int | None, threads: int, name: str = "start") -> None:
    if not 0 <= time < math.inf:
        raise ValueError(f"{name} must be at least 0 s and finite, got {time}")
    for setting, value in (("short_side", short_side), ("crop", crop)):
        if value is not None and value < 1:
            raise ValueError(f"{setting} must be at least 1 pixel, got {value}")
    if short_side is not None and crop is not None and crop > short_side:
        raise ValueError(f"crop={crop} must not exceed short_side={short_side}")
    if threads < 0:
        raise ValueError(f"threads must be at least 0, got {threads}")
