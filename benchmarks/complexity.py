"""Images whose complexity differs much: as many tokens for each, or as many as it needs?

    python benchmarks/complexity.py --encoders ENCODER ... --data scenes BSDS500 VOCdevkit --tokens 64 [--size 64]

Components of one threshold give an image as many tokens as its content asks for. Beside them stand, with as many tokens
on average: the same components with a threshold for every image by itself, so that all images keep the same number,
which shows what the adaptive number alone is worth; the pairs of Token Merging, which always keep the same number; and
the square grid. Images are put in order by the number of segments in their truth and cut into three parts of equal
size. Tokens are scored as they are, not split into regions; thresholds are set without the truth.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats
from tqdm import tqdm

from asc.data.scenes import SceneConfig
from asc.files import write_whole
from asc.report.pictures import Labels
from asc.tasks.encoders import Encoder, open_encoder
from asc.tasks.superpixels.data import QualityData, QualityDataConfig, Sample, open_quality_data
from asc.tasks.superpixels.metrics import TOLERANCE
from asc.tasks.superpixels.model import Allocation, GroupingChange, SuperpixelMaker
from asc.tasks.superpixels.peers import enlarged_labels, grid_labels
from asc.tasks.superpixels.scores import score

COMPONENTS = {
    "components, all pairs": GroupingChange(grouping="components", neighbourhood="global", links="all"),
    "components, touching pairs": GroupingChange(grouping="components", neighbourhood="spatial", links="all"),
    "components, touching pairs, best links, Ward": GroupingChange(
        grouping="components", neighbourhood="spatial", links="best", size_weight=1.0
    ),
}
PAIRS_TITLE = "pairs of Token Merging"
PAIRS = GroupingChange(grouping="bipartite", neighbourhood="global", links="all", size_weight=0.0)
ADAPTIVE, SAME = "as many tokens as it needs", "as many tokens for each image"
PARTS = ("simple", "middle", "complex")
# Share of an image below which a segment or object is not counted.
LEAST_OBJECT = 0.001
# Numbers of tokens that spread by no more than this share of their mean are called the same.
ALIKE = 0.05


class Judged(NamedTuple):
    """One image under one way to choose its tokens."""

    tokens: float
    asa: float
    ue: float
    union: float | None
    """Mean over the objects of the best union's IoU; None: the truth marks no objects."""


class Images(NamedTuple):
    """Images with their truth, and how complex each is."""

    data: QualityData
    samples: list[Sample]
    segments: list[float]
    """Segments in the truth, mean over the annotators."""


def read(name: str, settings: argparse.Namespace) -> Images:
    scene = SceneConfig(size=2 * settings.size, frames=8, max_objects=settings.objects, split="test")
    config = QualityDataConfig(most=settings.most, scenes=settings.most, scene=scene)
    data = open_quality_data(name, config)
    samples = [data.read(index) for index in data.chosen(settings.most)]
    return Images(data, samples, [float(np.mean([segments(truth) for truth in one.truths])) for one in samples])


def segments(truth_HW: Labels) -> int:
    """Segments that cover at least a thousandth of the image; masks leave slivers where they were resized."""
    counts = np.unique(truth_HW[truth_HW >= 0], return_counts=True)[1]
    return int((counts >= LEAST_OBJECT * truth_HW.size).sum())


def judge(images: Images, sample: Sample, labels_HW: Labels) -> Judged:
    found = score(labels_HW, sample, images.data.objects, TOLERANCE, LEAST_OBJECT)
    asa, ue = found.mean("asa"), found.mean("ue")
    assert asa is not None and ue is not None
    return Judged(found.count, asa, ue, found.mean("achievable_overlap") if images.data.objects else None)


def superpixels(maker: SuperpixelMaker, sample: Sample) -> Labels:
    return enlarged_labels(maker.labels(sample.image_HW3)[maker.blocks[-1]], *sample.image_HW3.shape[:2])


def of_one_threshold(
    maker: SuperpixelMaker, images: Images, tokens: int, allocation: Allocation = "learned"
) -> list[Judged]:
    maker.calibrate([sample.image_HW3 for sample in images.samples], tokens, allocation)
    return [judge(images, sample, superpixels(maker, sample)) for sample in images.samples]


def of_own_thresholds(maker: SuperpixelMaker, images: Images, tokens: int) -> list[Judged]:
    judged = []
    for sample in tqdm(images.samples, desc="each by itself", leave=False):
        maker.calibrate([sample.image_HW3], tokens, "learned")
        judged.append(judge(images, sample, superpixels(maker, sample)))
    return judged


def of_grid(images: Images, tokens: int) -> list[Judged]:
    return [judge(images, sample, grid_labels(tokens, *sample.image_HW3.shape[:2])) for sample in images.samples]


def measure(encoder: Encoder, images: Images, settings: argparse.Namespace) -> dict[str, list[Judged]]:
    def maker(change: GroupingChange) -> SuperpixelMaker:
        return SuperpixelMaker(encoder, settings.size, change)

    found: dict[str, list[Judged]] = {}
    for title, change in COMPONENTS.items():
        found[f"{title}: {ADAPTIVE}"] = of_one_threshold(maker(change), images, settings.tokens)
        found[f"{title}: {SAME}"] = of_own_thresholds(maker(change), images, settings.tokens)
    # A layer of pairs can at most halve its tokens, so all layers must do their part.
    found[PAIRS_TITLE] = of_one_threshold(maker(PAIRS), images, settings.tokens, "equal")
    found["square grid"] = of_grid(images, settings.tokens)
    return found


def averaged(founds: Sequence[dict[str, list[Judged]]]) -> dict[str, list[Judged]]:
    """Means over the encoders, image by image."""
    return {
        title: [
            Judged(*(None if None in values else float(np.mean(values)) for values in zip(*ones, strict=True)))
            for ones in zip(*(found[title] for found in founds), strict=True)
        ]
        for title in founds[0]
    }


# --- Tables -----------------------------------------------------------------------------------------------


def parts_of(segments: Sequence[float]) -> list[np.ndarray]:
    """Places of the images of each part, from few segments to many."""
    return np.array_split(np.argsort(segments, kind="stable"), len(PARTS))


def mean_of(judged: Sequence[Judged], places: Sequence[int], value: Callable[[Judged], float | None]) -> str:
    known = [number for place in places if (number := value(judged[place])) is not None]
    return f"{np.mean(known):.3f}" if known else "–"


def table(images: Images, found: dict[str, list[Judged]]) -> str:
    parts = parts_of(images.segments)
    told = ", ".join(
        f"{name} {np.mean([images.segments[place] for place in places]):.1f}"
        for name, places in zip(PARTS, parts, strict=True)
    )
    lines = [
        f"{images.data.name}: {len(images.samples)} images; segments in the truth: {told}.",
        "",
        "| tokens by | tokens: simple, middle, complex | rank correlation with segments | ASA, all | UE: all | "
        "simple | middle | complex | union IoU, all |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    everywhere = range(len(images.samples))
    for title, judged in found.items():
        counts = ", ".join(f"{np.mean([judged[place].tokens for place in places]):.0f}" for places in parts)
        tokens = [one.tokens for one in judged]
        # The order of numbers that are as good as the same says nothing.
        varied = np.std(tokens) > ALIKE * np.mean(tokens)
        rank = f"{stats.spearmanr(tokens, images.segments).statistic:.2f}" if varied else "–"
        errors = [mean_of(judged, places, lambda one: one.ue) for places in (everywhere, *parts)]
        asa, union = (mean_of(judged, everywhere, value) for value in (lambda one: one.asa, lambda one: one.union))
        lines.append(f"| {' | '.join([title, counts, rank, asa, *errors, union])} |")
    return "\n".join([*lines, "", *differences(images, found)])


def differences(images: Images, found: dict[str, list[Judged]]) -> list[str]:
    """What the adaptive number alone is worth, and what components are, image by image."""
    lines = []
    for title in COMPONENTS:
        own = found[f"{title}: {ADAPTIVE}"]
        peers = {SAME: found[f"{title}: {SAME}"], PAIRS_TITLE: found[PAIRS_TITLE]}
        told = ", ".join(f"{less_error(own, peer)} than with {name}" for name, peer in peers.items())
        lines.append(f"- {title}, {ADAPTIVE}: UE lower by {told}")
    return lines


def less_error(own: Sequence[Judged], peer: Sequence[Judged]) -> str:
    """How much lower the undersegmentation error is, with the 95% interval of the mean over the images (t)."""
    less = np.array([other.ue - one.ue for one, other in zip(own, peer, strict=True)])
    half = stats.t.ppf(0.975, len(less) - 1) * less.std(ddof=1) / np.sqrt(len(less))
    return f"{less.mean():.4f} ± {half:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoders", nargs="+", required=True, help="encoders, as asc eval superpixels takes them")
    parser.add_argument("--data", nargs="+", default=["scenes"], help="scenes, or folders of BSDS500 or PASCAL VOC")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an image, on average")
    parser.add_argument("--size", type=int, default=64, help="shorter side of the images that the encoder sees")
    parser.add_argument("--most", type=int, default=100, help="images of a dataset, at most")
    parser.add_argument("--objects", type=int, default=8, help="objects of a scene, at most")
    parser.add_argument("--out", type=Path, help="file for the numbers of every image, as JSON")
    settings = parser.parse_args()
    if settings.most < len(PARTS):
        parser.error(f"--most must be at least {len(PARTS)}: images are cut into as many parts")
    try:
        run(settings)
    except ValueError as error:
        parser.error(str(error))


def run(settings: argparse.Namespace) -> None:
    """Print the tables; the numbers so far are kept after every encoder."""
    record: dict[str, object] = {}
    encoders = [open_encoder(source) for source in settings.encoders]
    for name in settings.data:
        images, founds = read(name, settings), []
        for encoder in encoders:
            founds.append(measure(encoder, images, settings))
            print(f"\n{encoder.source}\n\n{table(images, founds[-1])}", flush=True)
            record[f"{name}, {encoder.source}"] = {"segments": images.segments} | founds[-1]
            if settings.out is not None:
                write_whole(settings.out, json.dumps(record).encode() + b"\n")
        if len(founds) > 1:
            print(f"\nmean of {len(founds)} encoders, image by image\n\n{table(images, averaged(founds))}", flush=True)


if __name__ == "__main__":
    main()
