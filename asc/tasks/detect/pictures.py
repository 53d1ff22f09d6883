"""Boxes drawn on images, and the page that shows what a detector finds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.ops import box_iou

from asc.report.page import Figure, Page, Table
from asc.report.pictures import Pixels, draw_boundaries, enlarged
from asc.report.words import plural
from asc.tasks.detect.augment import fitted
from asc.tasks.detect.canvas import images_alone
from asc.tasks.detect.data import DetectionSet, Truth
from asc.tasks.detect.metrics import Detections, Scores
from asc.tasks.detect.task import Detector, Judged

# Well apart on photographs, and for readers who see no red or no green.
_COLOURS = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167))
_OVERLAP = 0.5
# Smaller pictures are enlarged to about this, so that the names beside the boxes can be read.
_SIDE = 256
# Larger ones are made smaller for the page, or it would weigh as much as the data.
_PAGE_SIDE = 320


def draw_boxes(image_HW3: Pixels, boxes_K4: Tensor, texts: Sequence[str], classes: Sequence[int]) -> Pixels:
    """The image with boxes, each in the colour of its class and with a text."""
    large_HW3 = enlarged(image_HW3, _SIDE)
    scale = large_HW3.shape[0] / image_HW3.shape[0]
    picture = Image.fromarray(large_HW3)
    draw = ImageDraw.Draw(picture)
    line = max(2, max(picture.size) // 200)
    font = ImageFont.load_default(max(11, max(picture.size) // 30))
    for box, text, number in zip((boxes_K4 * scale).tolist(), texts, classes, strict=True):
        colour = _COLOURS[number % len(_COLOURS)]
        # Boxes are half-open and a picture's lines lie on pixels: the last one belongs to the box.
        right, bottom = max(box[0], box[2] - 1), max(box[1], box[3] - 1)
        draw.rectangle((box[0], box[1], right, bottom), outline=colour, width=line)
        draw.rectangle(draw.textbbox((box[0] + line, box[1]), text, font=font), fill=colour)
        draw.text((box[0] + line, box[1]), text, fill=(0, 0, 0), font=font)
    return np.asarray(picture)


def draw_found(image_HW3: Pixels, found: Detections, names: Sequence[str], least: float) -> Pixels:
    """The image with the detections of at least this score."""
    sure = found.only(found.scores_K >= least)
    numbers = sure.classes_K.tolist()
    texts = [f"{names[number]} {score:.0%}" for number, score in zip(numbers, sure.scores_K.tolist(), strict=True)]
    return draw_boxes(image_HW3, sure.boxes_K4, texts, numbers)


def draw_truth(image_HW3: Pixels, truth: Truth, names: Sequence[str]) -> Pixels:
    """The image with its objects."""
    numbers = truth.classes_K.tolist()
    marks = truth.difficult_K.tolist()
    texts = [names[number] + (" (difficult)" if mark else "") for number, mark in zip(numbers, marks, strict=True)]
    return draw_boxes(image_HW3, truth.boxes_K4, texts, numbers)


def mistakes(found: Detections, truth: Truth, least: float) -> tuple[int, int]:
    """Objects that were missed and detections that are wrong, of those of at least this score."""
    sure = found.only(found.scores_K >= least)
    asked_K = ~truth.difficult_K
    if not len(sure.scores_K) or not len(truth.classes_K):
        return int(asked_K.sum()), len(sure.scores_K)
    fits_DK = box_iou(sure.boxes_K4, truth.boxes_K4) >= _OVERLAP
    fits_DK &= sure.classes_K[:, None] == truth.classes_K
    return int((asked_K & ~fits_DK.any(0)).sum()), int((~fits_DK.any(1)).sum())


def write_page(
    file: Path, title: str, detector: Detector, test: DetectionSet, judged: Judged, pictures: int, least: float = 0.5
) -> None:
    """A page with scores and pictures: the first test images, and those with most mistakes."""
    page = Page(title, "Input, superpixels after the last block, what was found, and what is there.")
    scores = judged.scores
    page.statement(f"AP50 {scores.area:.1%} (area), {scores.eleven:.1%} (11 points) on {plural(len(test), 'image')}.")
    page.tables([_table(scores, test.classes)])
    wrong = [sum(mistakes(*pair, least)) for pair in zip(judged.found, judged.truths, strict=True)]
    worst = sorted(range(len(wrong)), key=lambda index: -wrong[index])[:pictures]
    for heading, chosen in (("Some test images", list(range(min(pictures, len(test))))), ("The worst", worst)):
        page.heading(heading)
        page.paragraph(f"Detections of a score of at least {least:.0%} are drawn.")
        for index in chosen:
            _card(page, detector, test, judged, index, least)
    page.write(file)


def _table(scores: Scores, names: Sequence[str]) -> Table:
    rows = [
        [name, str(int(count)), _percent(area), _percent(eleven)]
        for name, count, area, eleven in zip(names, scores.objects_C, scores.area_C, scores.eleven_C, strict=True)
    ]
    mean = ["mean", str(int(scores.objects_C.sum())), _percent(scores.area), _percent(scores.eleven)]
    return Table(
        "Average precision at an overlap of 0.5", ["class", "objects", "area", "11 points"], [*rows, mean], True
    )


def _percent(value: Any) -> str:
    return "–" if np.isnan(value) else f"{value:.1%}"


def _card(page: Page, detector: Detector, test: DetectionSet, judged: Judged, index: int, least: float) -> None:
    original_HW3, truth = test[index]
    found = judged.found[index]
    missed, wrong = mistakes(found, truth, least)
    image_HW3, scale = _for_page(original_HW3)
    found = found._replace(boxes_K4=found.boxes_K4 * scale)
    truth = truth._replace(boxes_K4=truth.boxes_K4 * scale)
    count = int((found.scores_K >= least).sum())
    name = Path(test.name(index)).name
    start = Figure(
        [enlarged(image_HW3, _SIDE)], name, ["input", f"{original_HW3.shape[1]} × {original_HW3.shape[0]} pixels"]
    )
    shown_HW3, tokens = superpixels(detector, original_HW3)
    figures = [
        Figure([shown_HW3], f"{name}, superpixels", ["superpixels", plural(tokens, "token")]),
        Figure(
            [draw_found(image_HW3, found, detector.classes, least)],
            f"{name}, found",
            ["found", plural(count, "object"), f"{wrong} wrong, {missed} missed"],
        ),
        Figure(
            [draw_truth(image_HW3, truth, detector.classes)],
            f"{name}, truth",
            ["truth", plural(len(truth.classes_K), "object")],
        ),
    ]
    page.card(name, start, {"": figures})


def _for_page(image_HW3: Pixels) -> tuple[Pixels, float]:
    scale = min(1.0, _PAGE_SIDE / max(image_HW3.shape[:2]))
    if scale == 1.0:
        return image_HW3, scale
    height, width = (max(1, round(side * scale)) for side in image_HW3.shape[:2])
    return np.asarray(Image.fromarray(image_HW3).resize((width, height), Image.Resampling.LANCZOS)), scale


@torch.no_grad()
def superpixels(detector: Detector, image_HW3: Pixels) -> tuple[Pixels, int]:
    """The image as the encoder sees it, with its superpixels after the last block, and their number."""
    canvas_3SS, fit = fitted(image_HW3, detector.size)
    with images_alone(detector.encoder, [fit.real]):
        labels_LBhw = detector.encoder.superpixels(canvas_3SS[None].to(next(detector.parameters())))
    labels_hw = labels_LBhw[-1, 0].cpu().numpy()
    resized = Image.fromarray(image_HW3).resize((fit.real[1], fit.real[0]), Image.Resampling.BILINEAR)
    seen_SS3 = np.full((detector.size, detector.size, 3), 255, dtype=np.uint8)
    seen_SS3[: fit.real[0], : fit.real[1]] = np.asarray(resized)
    times = max(1, _SIDE // detector.size)
    drawn_HW3 = draw_boundaries(enlarged(seen_SS3, _SIDE), labels_hw)
    return drawn_HW3[: fit.real[0] * times, : fit.real[1] * times], len(np.unique(labels_hw))
