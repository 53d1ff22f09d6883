"""Videos made on the spot, every frame of which tells its number even after lossy coding."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

BITS = 5
WIDTH, HEIGHT = 64, 48
# The display matrix of a track header: 16.16 fixed point a, b, u, c, d, v, x, y, w (ISO 14496-12, 8.3.2).
_ONE = 1 << 16
TURNED = {0: (1, 0, 0, 1), 90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}
MIRRORED = (-1, 0, 0, 1)


def picture(number: int, width: int = WIDTH, height: int = HEIGHT) -> NDArray[np.uint8]:
    """Above the bits of ``number`` as stripes, below dark red on the left and grey on the right."""
    stripes_W = np.arange(width) * BITS // width
    pixels_HW3 = np.zeros((height, width, 3), np.uint8)
    pixels_HW3[: height // 2] = (((number >> stripes_W) & 1) * 200 + 25)[:, None]
    pixels_HW3[height // 2 :, : width // 2] = (120, 20, 20)
    pixels_HW3[height // 2 :, width // 2 :] = 128
    return pixels_HW3


def number_of(pixels_HW3: NDArray[np.uint8]) -> int:
    """Read the number back."""
    height, width = pixels_HW3.shape[:2]
    grey_W = pixels_HW3[height // 8 : height * 3 // 8].mean((0, 2))
    middles = [grey_W[int((bit + 0.5) * width / BITS)] for bit in range(BITS)]
    assert all(abs(value - 125) > 50 for value in middles), f"no clear stripes: {middles}"
    return sum(int(value > 125) << bit for bit, value in enumerate(middles))


def write(
    path: Path,
    frames: int = 20,
    *,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    rate: int = 25,
    ticks: Sequence[int] | None = None,
    size: tuple[int, int] = (WIDTH, HEIGHT),
    gop: int = 5,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    format: str | None = None,
) -> Path:
    """A video of ``frames`` pictures numbered from 0, at ``rate`` or shown at ``ticks`` (milliseconds)."""
    with av.open(str(path), "w", format=format, container_options=container_options or {}) as container:
        stream = container.add_stream(codec, rate=rate, options=options or {})
        stream.width, stream.height = size
        stream.pix_fmt = pix_fmt
        stream.gop_size = gop
        if ticks is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(picture(number, *size), "rgb24").reformat(format=pix_fmt)
            frame.pts = number if ticks is None else ticks[number]
            frame.time_base = Fraction(1, rate) if ticks is None else Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def write_audio(path: Path) -> Path:
    """A second of silence."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16000, layout="mono")
        for start in range(0, 16000, 1024):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            frame.sample_rate, frame.pts = 16000, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def write_song_with_cover(path: Path, picture_file: Path) -> Path:
    """An audio file whose only picture is its cover."""
    cover = picture_file.read_bytes()
    kind, text = b"image/jpeg\0", b"\0"
    body = b"\0" + kind + b"\3" + text + cover
    frame = b"APIC" + len(body).to_bytes(4, "big") + b"\0\0" + body
    size = len(frame)
    synchsafe = bytes((size >> shift) & 0x7F for shift in (21, 14, 7, 0))
    # Silent MPEG-1 layer 3 frames of 128 kbit/s and 44.1 kHz, 417 bytes each.
    silence = (b"\xff\xfb\x90\xc4" + bytes(413)) * 40
    path.write_bytes(b"ID3\3\0\0" + synchsafe + frame + silence)
    return path


def turn(path: Path, matrix: tuple[int, int, int, int]) -> Path:
    """Overwrite the display matrix ``a, b, c, d`` in the track header of an MP4, as a phone writes it."""
    data = bytearray(path.read_bytes())
    # Version 0: 4 bytes of name, 4 of version and flags, 20 of times and track, 8 + 8 of layer and volume.
    place = data.index(b"tkhd") + 4 + 4 + 20 + 8 + 8
    a, b, c, d = (value * _ONE for value in matrix)
    old = [int.from_bytes(data[place + 4 * k : place + 4 * k + 4], "big") for k in range(9)]
    assert old == [_ONE, 0, 0, 0, _ONE, 0, 0, 0, 1 << 30], old
    for k, value in enumerate((a, b, 0, c, d, 0, 0, 0, 1 << 30)):
        data[place + 4 * k : place + 4 * k + 4] = value.to_bytes(4, "big", signed=True)
    path.write_bytes(data)
    return path


def cut(path: Path, share: float, after: bytes) -> Path:
    """Keep only a share of what follows a mark, e.g. the name of the part that holds the frames."""
    data = path.read_bytes()
    place = data.index(after)
    path.write_bytes(data[: place + int((len(data) - place) * share)])
    return path
