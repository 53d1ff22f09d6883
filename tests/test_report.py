"""Pictures against independent references, and pages read back with the standard HTML parser."""

import base64
import io
import os
from html.parser import HTMLParser

import matplotlib
import numpy as np
import pytest
import scipy.ndimage
import skimage.segmentation
from PIL import Image

from asc.files import write_whole
from asc.report import (
    Figure,
    Page,
    Table,
    boundaries,
    contact_sheet,
    draw_boundaries,
    enlarged,
    paint_means,
    pixel_labels,
    png_bytes,
)
from asc.report.curves import Panel, draw_curves
from asc.report.training import Training, training_figures
from asc.report.words import duration, plural


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


@pytest.mark.parametrize(("side", "times"), [(240, 6), (36, 1), (71, 1), (72, 2), (10, 1)])
def test_an_enlarged_image_repeats_its_pixels(side, times):
    image_HW3 = random_image(np.random.default_rng(6))
    large_HW3 = enlarged(image_HW3, side)
    assert np.array_equal(large_HW3, np.kron(image_HW3, np.ones((times, times, 1), np.uint8)))


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


def test_plots_statements_and_named_rows_are_on_the_page():
    page = Page("x")
    page.statement("the <result>")
    page.tables([Table("facts", [], [["<speed>", "5"], ["weight", "7"]], named_rows=True)])
    image_HW3 = random_image(np.random.default_rng(7))
    page.plots([Figure([image_HW3], "a curve", ["loss", "falls"])])
    read = Reader(page.html())
    assert "the <result>" in read.text and "<speed> 5 weight 7" in read.text and "loss falls" in read.text
    assert "thead" not in read.tags and page.html().count('<th scope="row">') == 2
    assert np.array_equal(read.pictures[0], image_HW3)


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
    usual = file.stat().st_mode

    def write_for_the_owner_alone(path):
        path.unlink(missing_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))

    write_whole(file, write_for_the_owner_alone)
    assert file.stat().st_mode == usual
    write_whole(file, b"new")
    assert file.read_bytes() == b"new" and [f.name for f in file.parent.iterdir()] == ["file.txt"]


# --- Curves and the story of a run ------------------------------------------------------------------------


def has_colour(picture_HW3, colour):
    return bool((np.abs(picture_HW3.astype(int) - colour).max(axis=2) <= 8).any())


@pytest.mark.parametrize("values", [{}, {4: 0.5}, {1: 0.1, 2: 0.4, 3: 0.2}, {step: step / 50 for step in range(50)}])
def test_curves_are_drawn_on_white_paper_whatever_the_users_own_settings(values):
    blue, grey = (31, 119, 180), (95, 99, 104)
    panels = [Panel("accuracy", {"a": values}, {"level": 0.3}, share=True), Panel("loss", {"a": values})]
    with matplotlib.rc_context({"axes.facecolor": "black", "figure.facecolor": "black", "font.size": 3}):
        styled = draw_curves(panels)
    assert np.array_equal(styled, draw_curves(panels))
    assert styled.dtype == np.uint8 and np.median(styled) == 255
    assert has_colour(styled, grey) and has_colour(styled, blue)


def test_curves_with_an_order_have_colours_of_their_own():
    curves = {f"block {number}": {0: number, 10: number} for number in range(4)}
    ordered = draw_curves([Panel("tokens", curves, ordered=True)])
    first, last = (matplotlib.colormaps["viridis"](x, bytes=True)[:3] for x in (0.0, 0.85))
    assert has_colour(ordered, first) and has_colour(ordered, last)


def made_up_training():
    blocks = {f"block_0{block}/{name}": 5.0 - block for block in range(2) for name in ("tokens_mean", "theta")}
    rest = ("tokens_min", "tokens_max", "kept_share", "largest_share", "single_share")
    blocks |= {f"block_0{block}/{name}": 1.0 for block in range(2) for name in rest}
    measures = {f"{kind}_{name}": 0.5 for kind in ("feature", "projection") for name in ("spread", "rank")}
    log = [
        {"step": 0, "knn": 0.1, "knn_pixels": 0.2},
        # Killed before a checkpoint, the run began again and logged step 10 once more.
        {"step": 10, "loss": 9.0, "images_per_second": 1.0},
        {"step": 10, "warning": "odd"},
        {"step": 0, "knn": 0.1, "knn_pixels": 0.2},
        {"step": 10, "loss": 3.0, "images_per_second": 80.0} | blocks | measures,
        {"step": 10, "warning": "odd"},
        {"step": 20, "loss": None, "images_per_second": 40.0},
        {"step": 25, "loss": 2.0, "images_per_second": 20.0, "tokens_share": 0.5},
        {"step": 25, "knn": 0.4},
    ]
    config = {"train": {"batch": 8}, "clips": {"frames": {"pairing": "two"}}, "model": {"depth": 2}}
    return Training(config, log, {"knn": 0.45, "parameters": 7})


def test_a_training_is_read_from_its_log():
    training = made_up_training()
    assert training.knn == {"untrained": 0.1, "pixels": 0.2, "trained": 0.45}
    assert training.curve("loss") == {10: 3.0, 25: 2.0} and training.curve("knn") == {0: 0.1, 25: 0.4}
    assert training.steps == 25 and training.warnings == ["odd"]
    # Sixteen images a step: ten steps at 80 a second, ten at 40, five at 20.
    assert training.seconds == pytest.approx(2 + 4 + 4)
    assert [(block["after_blocks"], block["tokens_mean"]) for block in training.blocks] == [(1, 5.0), (2, 4.0)]
    assert training.record()["tokens_share"] == 0.5
    titles = [figure.caption[0] for figure in training_figures(training)]
    assert titles[:3] == ["Loss", "kNN accuracy", "Tokens after each block"] and "rank" in titles[3]


def test_times_and_counts_read_well():
    times = [duration(seconds) for seconds in (0.2, 59.4, 59.6, 247, 7512)]
    assert times == ["0 s", "59 s", "1 min 0 s", "4 min 7 s", "2 h 5 min"]
    assert plural(1, "step") == "1 step" and plural(2, "step") == "2 steps"
