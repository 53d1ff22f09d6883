"""Image files of any kind as RGB bytes, alike for every task. Shape letters: H, W rows and columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import ExifTags, Image

# What undoes each orientation that a camera may note; 1 is upright.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# From 16 bits to 8: 65,535 = 257 · 255.
_STEP = 257
_WHITE = (255, 255, 255, 255)


def open_rgb(file: Path, as_stored: bool = False) -> Image.Image:
    """An image in RGB at its full size; a ValueError that names the file if it cannot be read to its end.

    Images of 16 bits are brought to 8, and what is transparent is laid on white.

    Args:
        file: The image.
        as_stored: Leave it as its pixels lie in the file, since a mask or boxes belong to them; else it is turned as
            its EXIF orientation says, which is how people see it.
    """
    try:
        with Image.open(file) as opened:
            # Pillow turns TIFF files itself while it loads them: only then is it known what is left to do.
            opened.load()
            turn = None if as_stored else _turn(opened)
            image = _in_rgb(opened)
    # Pillow's decoders raise all of these for damaged files.
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(f"{file}: not an image that can be read ({error}); get it again or remove it") from error
    return image if turn is None else image.transpose(turn)


def file_size(file: Path) -> int:
    """Bytes of a file that should be there."""
    try:
        return file.stat().st_size
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from error


def _turn(opened: Image.Image) -> Image.Transpose | None:
    try:
        return _TURNS.get(opened.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # whatever is wrong with the notes of a camera, the picture can be seen without
        return None


def _in_rgb(opened: Image.Image) -> Image.Image:
    if opened.mode == "F":
        raise ValueError("its pixels are fractions, and which one is white is not known; save it with 8 or 16 bits")
    if opened.mode.startswith("I"):
        return _from_sixteen_bits(opened)
    if opened.has_transparency_data:
        coloured = opened.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", coloured.size, _WHITE), coloured).convert("RGB")
    return opened.convert("RGB")


def _from_sixteen_bits(opened: Image.Image) -> Image.Image:
    values_HW = np.asarray(opened).astype(np.int64)
    least, most = int(values_HW.min()), int(values_HW.max())
    if least < 0 or most > _STEP * 255:
        raise ValueError(f"its pixels go from {least} to {most}, beyond 16 bits; save it with 8 or 16 bits")
    bytes_HW = ((values_HW + _STEP // 2) // _STEP).astype(np.uint8)
    # A grey PNG may name one value that is transparent.
    bytes_HW[values_HW == opened.info.get("transparency", -1)] = 255
    return Image.fromarray(bytes_HW).convert("RGB")
