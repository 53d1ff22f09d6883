"""Pictures against independent references, and pages read back with the standard HTML parser."""

import base64
import io
from html.parser import HTMLParser

import numpy as np
import pytest
import scipy.ndimage
import skimage.segmentation
from PIL import Image

from asc.report import (
    Figure,
    Page,
    Table,
    boundaries,
    contact_sheet,
    draw_boundaries,
    paint_means,
    pixel_labels,
    png_bytes,
    write_whole,
)


def random_image(rng, height=24, width=36):
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


class Reader(HTMLParser):
    """Everything a test asks of a page: pictures, text, tags, addresses."""

    def __init__(self, html):
        super().__init__()
        self.pictures, self.words, self.tags, self.addresses = [], [], set(), []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        values = dict(attrs)
        self.addresses += [values[name] for name in ("src", "href") if name in values]
        if tag == "img":
            head, data = values["src"].split(",")
            assert head == "data:image/png;base64" and values["alt"]
            picture = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
            assert picture.format == "PNG"
            assert picture.size == (int(values["width"]), int(values["height"]))
            self.pictures.append(np.asarray(picture))

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(self.words)


@pytest.mark.parametrize("seed", range(5))
def test_boundaries_are_those_between_pixels_in_scikit_image(seed):
    labels_HW = np.random.default_rng(seed).integers(0, 3, (9, 13))
    # Of the doubled grid, odd columns and odd rows stand for the gaps between pixels.
    between = skimage.segmentation.find_boundaries(labels_HW, mode="subpixel", background=-1)
    expected_HW = np.zeros((9, 13), bool)
    expected_HW[:, :-1] |= between[::2, 1::2]
    expected_HW[:-1] |= between[1::2, ::2]
    assert np.array_equal(boundaries(labels_HW), expected_HW)


def test_boundaries_of_a_case_made_by_hand():
    labels_HW = np.array([[0, 0, 1], [0, 0, 1], [2, 2, 2]])
    assert boundaries(labels_HW).astype(int).tolist() == [[0, 1, 0], [1, 1, 1], [0, 0, 0]]


def test_one_superpixel_has_no_boundary():
    image_HW3 = random_image(np.random.default_rng(0))
    assert np.array_equal(draw_boundaries(image_HW3, np.zeros((6, 9), int)), image_HW3)


def test_lines_are_drawn_on_boundaries_and_nowhere_else():
    rng = np.random.default_rng(1)
    image_HW3, labels_hw = random_image(rng), rng.integers(0, 4, (6, 9))
    before = image_HW3.copy()
    drawn_HW3 = draw_boundaries(image_HW3, labels_hw, (1, 2, 3))
    line_HW = boundaries(np.kron(labels_hw, np.ones((4, 4), int)))
    assert (drawn_HW3[line_HW] == (1, 2, 3)).all()
    assert np.array_equal(drawn_HW3[~line_HW], image_HW3[~line_HW])
    assert np.array_equal(image_HW3, before)


@pytest.mark.parametrize("labels", [[0, 1, 2, 3], [7, 7, 100, -5]])
def test_mean_colours_are_those_of_scipy(labels):
    rng = np.random.default_rng(2)
    image_HW3, labels_hw = random_image(rng), rng.choice(labels, (6, 9))
    painted_HW3 = paint_means(image_HW3, labels_hw)
    labels_HW = np.kron(labels_hw, np.ones((4, 4), int))
    for label in np.unique(labels):
        means = [scipy.ndimage.mean(image_HW3[..., c], labels_HW, label) for c in range(3)]
        assert (painted_HW3[labels_HW == label] == np.rint(means)).all()
    assert painted_HW3.dtype == np.uint8 and painted_HW3.shape == image_HW3.shape


def test_labels_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="5 × 9 patches do not fit a picture of 24 × 36"):
        pixel_labels(np.zeros((5, 9), int), 24, 36)


def test_contact_sheet_holds_every_picture():
    rng = np.random.default_rng(3)
    rows = [[random_image(rng) for _ in range(3)] for _ in range(2)]
    bare = contact_sheet(rows, gap=5)
    assert bare.shape == (5 + 2 * 29, 5 + 3 * 41, 3) and bare.dtype == np.uint8
    for y, row in enumerate(rows):
        for x, picture in enumerate(row):
            assert np.array_equal(bare[5 + y * 29 :, 5 + x * 41 :][:24, :36], picture)


def test_contact_sheet_writes_headings_and_captions():
    white = np.full((40, 60, 3), 255, np.uint8)
    plain = contact_sheet([[white, white]])
    sheet = contact_sheet([[white, white]], ["a", "b"], [["c", "d"]])
    assert (plain == 255).all() and sheet.shape[0] > plain.shape[0]
    inked = (sheet < 128).any(axis=2)
    middle = sheet.shape[1] // 2
    parts = [inked[:20, :middle], inked[:20, middle:], inked[-20:, :middle], inked[-20:, middle:]]
    assert all(part.any() for part in parts)


def test_contact_sheet_refuses_unequal_pictures():
    small, large = np.zeros((4, 4, 3), np.uint8), np.zeros((5, 5, 3), np.uint8)
    for rows in ([], [[]], [[small, large]], [[small], [small, small]]):
        with pytest.raises(ValueError, match="contact sheet"):
            contact_sheet(rows)


def test_page_holds_every_picture_and_every_word():
    rng = np.random.default_rng(4)
    first, *others = [random_image(rng) for _ in range(5)]
    page = Page("A title", "a lead")
    page.heading("a heading")
    page.paragraph("a paragraph")
    page.warnings("take care", ["one warning", "another"])
    page.tables([Table("a table", ["left", "right"], [["11", "12"], ["21", "22"]])])
    figures = [Figure(others[:2], "an alt", ["bold", "thin"]), Figure(others[2:], "an alt", ["x"])]
    page.card("a card", Figure([first], "an alt", ["input"]), {"a strip": figures})
    read = Reader(page.html())
    assert len(read.pictures) == 5
    assert all(np.array_equal(got, want) for got, want in zip(read.pictures, [first, *others], strict=True))
    words = "A title|a lead|a heading|a paragraph|take care|one warning|another|a table|left|right|11|12|21|22"
    for word in f"{words}|a card|a strip|bold|thin|input".split("|"):
        assert word in read.text


def test_page_needs_nothing_from_outside_and_no_script():
    page = Page('<script>alert("1")</script>')
    page.paragraph('<img src="https://example.org/x.png">')
    page.card("<b>", Figure([np.zeros((2, 2, 3), np.uint8)], '" onerror="x', ["<i>"]), {"&": []})
    read = Reader(page.html())
    assert "script" not in read.tags and "i" not in read.tags
    assert '<img src="https://example.org/x.png">' in read.text
    assert all(address.startswith("data:") for address in read.addresses)
    assert "prefers-color-scheme: dark" in page.html() and 'name="viewport"' in page.html()


def test_no_warnings_leave_no_box():
    page = Page("x")
    page.warnings("take care", [])
    assert "take care" not in page.html()


def test_png_keeps_every_pixel():
    image_HW3 = random_image(np.random.default_rng(5))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png_bytes(image_HW3)))), image_HW3)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "new folder" / "file.txt"
    write_whole(file, b"old")
    with pytest.raises(TypeError):
        write_whole(file, None)
    assert file.read_bytes() == b"old"
    write_whole(file, b"new")
    assert file.read_bytes() == b"new" and [f.name for f in file.parent.iterdir()] == ["file.txt"]
