"""Image files of every kind as RGB bytes, and folders of images of which some cannot be read."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from asc.tasks.classify.datasets import open_dataset
from asc.tasks.files import open_rgb
from asc.tasks.images import Readable, read_image, unread_note

SIXTEEN_HW = np.linspace(0, 65_535, 12 * 16).reshape(12, 16).round().astype(np.uint16)


def colours(height: int = 12, width: int = 16) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def saved(image: Image.Image, file: Path, **settings: object) -> Path:
    image.save(file, **settings)
    return file


# --- Kinds of files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "CMYK", "P", "YCbCr"])
def test_images_of_eight_bits_are_what_pillow_makes_of_them(mode: str, tmp_path: Path) -> None:
    ending = "jpg" if mode in ("CMYK", "YCbCr") else "png"
    file = saved(Image.fromarray(colours()).convert(mode), tmp_path / f"image.{ending}")
    assert np.array_equal(read_image(file), np.asarray(Image.open(file).convert("RGB")))
    assert read_image(file).dtype == np.uint8 and open_rgb(file).mode == "RGB"


@pytest.mark.parametrize(
    ("ending", "kind"), [("png", "<u2"), ("tif", "<u2"), ("tif", ">u2"), ("tif", "<i4"), ("pgm", "<i4")]
)
def test_sixteen_bits_are_brought_to_eight(ending: str, kind: str, tmp_path: Path) -> None:
    file = saved(Image.fromarray(SIXTEEN_HW.astype(kind)), tmp_path / f"image.{ending}")
    assert Image.open(file).mode.startswith("I")
    expected_HW = np.rint(SIXTEEN_HW / 257).astype(np.uint8)
    assert np.array_equal(read_image(file), expected_HW[..., None].repeat(3, 2))
    assert expected_HW.min() == 0 and expected_HW.max() == 255


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.full((4, 4), 0.5, np.float32), r"image\.tif: not an image that can be read \(its pixels are fractions"),
        (np.full((4, 4), 65_536, np.int32), r"image\.tif: .*its pixels go from 65536 to 65536, beyond 16 bits"),
        (np.arange(-3, 13, dtype=np.int32).reshape(4, 4), r"image\.tif: .*from -3 to 12, beyond 16 bits"),
    ],
)
def test_pixels_whose_white_is_not_known_are_refused(pixels: np.ndarray, message: str, tmp_path: Path) -> None:
    file = saved(Image.fromarray(pixels), tmp_path / "image.tif")
    with pytest.raises(ValueError, match=message):
        read_image(file)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_what_is_transparent_is_laid_on_white(mode: str, tmp_path: Path) -> None:
    opacity_HW = np.zeros((12, 16), dtype=np.uint8)
    opacity_HW[:, 4:8], opacity_HW[:, 8:] = 128, 255
    image = Image.fromarray(colours()).convert(mode)
    image.putalpha(Image.fromarray(opacity_HW))
    shares_HW1 = opacity_HW[..., None] / 255
    opaque_HW3 = np.asarray(image.convert("RGB")).astype(float)
    found_HW3 = read_image(saved(image, tmp_path / "image.png"))
    np.testing.assert_allclose(found_HW3, shares_HW1 * opaque_HW3 + (1 - shares_HW1) * 255, atol=1)
    assert (found_HW3[:, :4] == 255).all() and np.array_equal(found_HW3[:, 8:], opaque_HW3[:, 8:])


def test_a_transparent_colour_of_a_palette_or_of_grey_is_white(tmp_path: Path) -> None:
    palette = Image.fromarray(np.array([[0, 1], [1, 0]], dtype=np.uint8), mode="P")
    palette.putpalette([200, 10, 10, 10, 20, 30])
    expected = np.array([[[255] * 3, [10, 20, 30]], [[10, 20, 30], [255] * 3]])
    for ending in ("png", "gif"):
        assert np.array_equal(read_image(saved(palette, tmp_path / f"image.{ending}", transparency=0)), expected)
    grey = Image.fromarray(np.array([[5, 100]], dtype=np.uint8))
    assert read_image(saved(grey, tmp_path / "grey.png", transparency=5)).tolist() == [[[255] * 3, [100] * 3]]
    sixteen = Image.fromarray(np.array([[514, 25_700]], dtype=np.uint16))
    assert read_image(saved(sixteen, tmp_path / "deep.png", transparency=514)).tolist() == [[[255] * 3, [100] * 3]]


# --- Turned images ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("ending", ["jpg", "png", "webp", "tif"])
def test_images_are_turned_as_the_camera_noted(ending: str, orientation: int, tmp_path: Path) -> None:
    notes = Image.Exif()
    notes[0x0112] = orientation
    file = saved(Image.fromarray(colours(16, 24)), tmp_path / f"image.{ending}", exif=notes)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(file)).convert("RGB"))
    assert np.array_equal(read_image(file), expected)
    assert expected.shape == ((24, 16, 3) if orientation > 4 else (16, 24, 3))
    if ending != "tif":
        assert np.array_equal(read_image(file, as_stored=True), np.asarray(Image.open(file).convert("RGB")))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_notes_of_a_camera_hide_no_picture(tmp_path: Path) -> None:
    file = saved(Image.fromarray(colours()), tmp_path / "image.jpg", exif=b"Exif\x00\x00MM\x00\x2a\xff\xff\xff\xff\x01")
    assert read_image(file).shape == (12, 16, 3)
    text = PngInfo()
    text.add_text("Raw profile type exif", "no profile")
    assert read_image(saved(Image.fromarray(colours()), tmp_path / "image.png", pnginfo=text)).shape == (12, 16, 3)


def test_class_folders_are_turned_but_not_official_datasets(tmp_path: Path) -> None:
    notes = Image.Exif()
    notes[0x0112] = 6
    for part in ("train", "val"):
        for label in ("ant", "bee"):
            folder = tmp_path / part / label
            folder.mkdir(parents=True)
            Image.fromarray(colours(16, 24)).save(folder / f"{part}.jpg", exif=notes)
            Image.fromarray(colours(16, 24)).save(folder / f"{part}2.jpg")
    assert open_dataset("folder", tmp_path).test.image(0).size == (16, 24)
    assert open_dataset("imagenet", tmp_path).test.image(0).size == (24, 16)
    assert open_dataset("imagenet", tmp_path).val.image(0).size == (24, 16)


# --- Folders of which some images cannot be read ----------------------------------------------------------


def test_images_that_cannot_be_read_are_passed_over_and_named(tmp_path: Path) -> None:
    for number in range(6):
        Image.fromarray(colours(8, 8 + number)).save(tmp_path / f"{number}.png")
    (tmp_path / "1.png").write_bytes(b"no image")
    (tmp_path / "4.png").write_bytes((tmp_path / "4.png").read_bytes()[:60])
    images = Readable(sorted(tmp_path.iterdir()), ahead=2)
    found = dict(images)
    assert [image.shape[1] for image in found.values()] == [8, 10, 11, 13] and list(found) == [0, 1, 2, 3]
    assert [file.name for file in images.read] == ["0.png", "2.png", "3.png", "5.png"]
    assert images.told == "skipped: 2"
    one, other = images.skipped
    assert "1.png: not an image that can be read" in one and "4.png: not an image that can be read" in other


def test_a_folder_of_which_nothing_can_be_read_is_refused(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"no image can be read; the first: .*0\.png: not an image"):
        list(Readable(sorted(tmp_path.iterdir()), ahead=2))


def test_what_is_not_used_is_told_in_a_line() -> None:
    assert unread_note([]) == "" and unread_note(["a.gif"]) == "1 entry that is no image is not used: a.gif"
    assert unread_note(list("abcdef")) == "6 entries that are no images are not used: a, b, c, d and 2 more"
