"""Judging predictions for every pixel, and showing them. Shape letters: see ``asc.tasks.dense``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asc.data.images import normalise
from asc.precision import Precision, autocast
from asc.report.page import Figure, Page, Table
from asc.report.pictures import draw_boundaries, enlarged
from asc.report.words import plural
from asc.tasks.dense import DenseModel, InferenceConfig, Sizes, predict
from asc.tasks.encoders import weights_digest
from asc.tasks.images import Pairs, Pixels, Truth, covering_size, padded_to_patches, read_ahead, resized

# Longest side of a picture of superpixels, where whole pixels allow it: lines must not hide the patches between them.
_SIDE = 480
# Pairs that are read before their turn.
_AHEAD = 16


class Judge(ABC):
    """Compares predictions with the truth, image by image."""

    @abstractmethod
    def add(self, maps_KHW: Tensor, truth_HW: Tensor) -> float:
        """Take an image into account; returns a score of it alone, higher is better."""

    @abstractmethod
    def values(self) -> dict[str, float]:
        """The scores over all images."""

    def details(self) -> dict[str, Any]:
        """More for the record than the scores."""
        return {}


class Kind(ABC):
    """What is predicted, and what it looks like."""

    name: str
    """The word for it on the command line."""
    title: str
    """What a page calls it."""
    main: str
    """The score that decides which weights are best; higher is better."""

    @abstractmethod
    def judge(self) -> Judge:
        """A judge that has seen nothing yet."""

    @abstractmethod
    def array(self, maps_KHW: Tensor) -> Truth:
        """The prediction (H, W) as it is handed out."""

    @abstractmethod
    def show(self, maps_KHW: Tensor) -> Pixels:
        """A picture of a prediction."""

    @abstractmethod
    def show_truth(self, truth_HW: Truth) -> Pixels:
        """A picture of the truth."""

    @abstractmethod
    def told(self, score: float) -> str:
        """The score of an image alone, as the judge gives it, with the name of its measure."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """What a saved model must say of its head to be made again."""


class Judged(NamedTuple):
    """What came out of judging."""

    values: dict[str, float]
    """Scores over all images."""
    details: dict[str, Any]
    """More than the scores."""
    scores: dict[int, float]
    """Of each image alone, by its number."""

    def worst(self, count: int) -> list[int]:
        """The images with the lowest scores, worst first."""
        return sorted(self.scores, key=lambda number: (self.scores[number], number))[:count]


def judge_model(
    model: DenseModel,
    pairs: Pairs,
    judge: Judge,
    sizes: Sizes,
    inference: InferenceConfig,
    precision: Precision = "auto",
    most: int | None = None,
) -> Judged:
    """Judge a model on the first ``most`` pairs, or on all."""
    truths: dict[int, Truth] = {}

    def images() -> Iterator[tuple[int, Pixels]]:
        count = len(pairs) if most is None else min(most, len(pairs))
        for number, pair in enumerate(read_ahead(pairs.read, count, 2 * inference.batch)):
            truths[number] = pair.truth_HW
            yield number, pair.image_HW3

    scores: dict[int, float] = {}
    for number, maps_KHW in predict(model, images(), sizes, inference, precision):
        truth_HW = torch.tensor(truths.pop(number), device=maps_KHW.device)
        scores[number] = judge.add(maps_KHW, truth_HW)
    if not scores:
        raise ValueError(f"{pairs.name} names no image to be judged by")
    return Judged(judge.values(), judge.details(), scores)


def judge_constant(maps_K11: Tensor, pairs: Pairs, judge: Judge) -> dict[str, float]:
    """The scores of one and the same prediction for every pixel: what any network must beat."""
    for pair in read_ahead(pairs.read, len(pairs), _AHEAD):
        truth_HW = torch.tensor(pair.truth_HW)
        judge.add(maps_K11.expand(-1, *truth_HW.shape), truth_HW)
    return judge.values()


# --- Pages ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Viewer:
    """A model with all that is needed to judge and show what it predicts."""

    model: DenseModel
    kind: Kind
    sizes: Sizes
    inference: InferenceConfig
    precision: Precision = "auto"

    @property
    def identity(self) -> str:
        """Digest of weights and of all that says what is computed with them."""
        about = {
            "encoder": asdict(self.model.encoder.config),
            "blocks": self.model.blocks,
            "sizes": asdict(self.sizes),
            "kind": self.kind.record(),
        }
        return weights_digest(self.model, about)

    def predictions(self, images: Iterable[tuple[int, Pixels]]) -> Iterator[tuple[int, Tensor]]:
        """See ``asc.tasks.dense.predict``."""
        return predict(self.model, images, self.sizes, self.inference, self.precision)

    def judged(self, pairs: Pairs, most: int | None = None) -> Judged:
        """See ``judge_model``."""
        return judge_model(self.model, pairs, self.kind.judge(), self.sizes, self.inference, self.precision, most)

    def add_card(
        self, page: Page, title: str, image_HW3: Pixels, maps_KHW: Tensor, truth_HW: Truth | None = None
    ) -> None:
        """Input, superpixels, prediction and, where it is known, the truth."""
        shown = [Figure([enlarged(self.kind.show(maps_KHW))], f"{title}, prediction", ["prediction"])]
        if truth_HW is not None:
            shown.append(Figure([enlarged(self.kind.show_truth(truth_HW))], f"{title}, truth", ["truth"]))
        height, width = image_HW3.shape[:2]
        first = Figure([enlarged(image_HW3)], title, ["input", f"{width} × {height} pixels"])
        page.card(title, first, {"what the network makes of it": [*self._superpixels(title, image_HW3), *shown]})

    def _superpixels(self, title: str, image_HW3: Pixels) -> list[Figure]:
        """The image as the network sees it whole, with its superpixels at the first and the last level."""
        encoder = self.model.encoder
        if encoder.budget is None:
            return []
        height, width = covering_size(image_HW3.shape[0], image_HW3.shape[1], self.sizes.base)
        small_HW3 = resized(image_HW3, height, width)
        like = next(self.model.parameters())
        images_13HW = padded_to_patches(normalise(small_HW3[None]).to(like), encoder.config.patch_size)
        with autocast(like.device, self.precision):
            labels_Lhw = encoder.superpixels(images_13HW)[:, 0].cpu().numpy()
        figures = []
        for block in (self.model.blocks[0], self.model.blocks[-1]):
            labels_HW = _pixelwise(labels_Lhw[block - 1], encoder.config.patch_size)[:height, :width]
            large_HW3 = enlarged(small_HW3, _SIDE)
            times = len(large_HW3) // height
            picture_HW3 = draw_boundaries(large_HW3, _pixelwise(labels_HW, times))
            tokens = plural(len(np.unique(labels_Lhw[block - 1])), "superpixel")
            figures.append(Figure([picture_HW3], f"{title}, superpixels", [f"after block {block}", tokens]))
        return figures


def _pixelwise(labels_hw: Truth, times: int) -> Truth:
    return labels_hw.repeat(times, 0).repeat(times, 1)


def results_page(title: str, lead: str, judged: Judged, trivial: Mapping[str, float] | None) -> Page:
    """A page with the scores; examples come below."""
    page = Page(title, lead)
    rows = [["model", *(f"{value:.4f}" for value in judged.values.values())]]
    if trivial is not None:
        rows.append(["one prediction for all pixels", *(f"{trivial[name]:.4f}" for name in judged.values)])
    page.tables(
        [Table(f"Scores on {plural(len(judged.scores), 'image')}", ["", *judged.values], rows, named_rows=True)]
    )
    return page


def add_examples(page: Page, viewer: Viewer, pairs: Pairs, judged: Judged, count: int) -> None:
    """The worst cases, and as many others: the first of the rest."""
    if count < 1:
        return
    worst = judged.worst((count + 1) // 2)
    others = [number for number in judged.scores if number not in worst][: count // 2]
    for heading, numbers in (("The worst cases", worst), ("The first of the others", sorted(others))):
        if not numbers:
            continue
        page.heading(heading)
        read = {number: pairs.read(number) for number in numbers}
        maps = dict(viewer.predictions((number, pair.image_HW3) for number, pair in read.items()))
        for number, (image_HW3, truth_HW) in read.items():
            title = f"{pairs.source(number)}: {viewer.kind.told(judged.scores[number])}"
            viewer.add_card(page, title, image_HW3, maps[number], truth_HW)
