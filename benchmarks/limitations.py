"""What the paper names as its limitations, measured on encoders that are trained already.

    python benchmarks/limitations.py PARTS --encoders RUN ... --plain RUN ... --data DIR [--shards DIR] --out OUT
    python benchmarks/limitations.py page --out OUT

| part | question |
|---|---|
| tokens | how many tokens are left on other images than those that the thresholds were set on? |
| views | are the same things grouped alike when an image is flipped, shifted or scaled, or when they move? |
| blocks | what does each block add to the grouping, and how often does it join two objects? |
| small | what becomes of small objects? |
| budgets | accuracy of one trained encoder when its thresholds are set to other budgets |

``--data`` holds the folders cifar10, tiny-imagenet, pets, flowers102, voc, nyu, bsds500 and video; ``--shards`` the
clips that the encoders learned from. Every part writes OUT/<part>.json; ``page`` prints their tables for
``docs/results/limitations.md``.

Shape letters: L blocks with a superpixel layer, B images, h, w rows and columns of patches, N points of an image, S
superpixels, O objects.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.optimize import brentq
from scipy.spatial import cKDTree
from skimage.metrics import variation_of_information
from sklearn.metrics import adjusted_rand_score
from torch import Tensor
from tqdm import tqdm

from asc.data.images import normalise
from asc.data.scenes import CLASSES, Frame, Scene, SceneConfig, Split
from asc.data.scenes.common import cell_centres
from asc.data.shards import ShardedClips
from asc.data.video import find_videos, read_frames
from asc.grouping.budget import mean_share
from asc.layer import SuperpixelWarning
from asc.pretrain.data import central_square
from asc.report.pictures import Labels, Pixels
from asc.tasks.classify.images import folder_split
from asc.tasks.classify.logistic import fit_linear
from asc.tasks.classify.probes import choose_decay, extract, knn_accuracy, linear_accuracy
from asc.tasks.encoders import open_encoder
from asc.tasks.segment.data import voc_folder
from asc.tasks.superpixels.data import VocObjects
from asc.tasks.superpixels.metrics import achievable_overlaps, best_overlaps, overlaps
from asc.tasks.superpixels.model import GroupingChange, changed_model
from asc.tasks.superpixels.peers import enlarged_labels, grid_labels
from asc.vit import AscViT
from asc.weights import without_superpixels

Record = dict[str, Any]

SIZE, PATCH = 64, 4
GRID = SIZE // PATCH
BATCH = 64


# --- Networks ---------------------------------------------------------------------------------------------


def network(source: str | Path) -> AscViT:
    model = open_encoder(source).vit
    if model is None or model.config.image_hw != (SIZE, SIZE) or model.config.patch_size != PATCH:
        raise ValueError(f"{source} is no network of ours for images of {SIZE} px in patches of {PATCH}")
    return model


def merging_part(model: AscViT) -> AscViT:
    """The blocks up to the last superpixel layer: they alone decide the grouping, in a third of the time."""
    superpixels, blocks = model.config.superpixels, model.config.superpixel_blocks
    assert superpixels is not None
    short = AscViT(
        replace(model.config, depth=max(blocks) + 1, superpixels=replace(superpixels, blocks=blocks, keep=0.8))
    )
    state = model.state_dict()
    short.load_state_dict({name: state[name] for name in short.state_dict()})
    return short.eval()


def set_shares(model: AscViT, shares_L: Sequence[float], images_BHW3: Pixels) -> None:
    """Set the thresholds so that every superpixel layer keeps its share of these images' tokens."""
    assert model.budget is not None
    model.budget.targets_L.copy_(torch.tensor(shares_L))
    model.calibrate(normalise(images_BHW3))


@torch.no_grad()
def groupings(model: AscViT, images_BHW3: Pixels, title: str) -> Labels:
    """Label maps (L, B, h, w) after every block with a superpixel layer."""
    layers = list(model.config.superpixel_blocks)
    parts = []
    for first in tqdm(range(0, len(images_BHW3), BATCH), desc=title, unit="batch", leave=False, disable=None):
        parts.append(model.superpixels(normalise(images_BHW3[first : first + BATCH]))[layers].numpy())
    return np.concatenate(parts, axis=1).astype(np.int64)


def counted(labels_LBhw: Labels) -> Labels:
    """Number of superpixels (L, B); they are counted from 0 in every image."""
    return np.asarray(labels_LBhw.max(axis=(2, 3)) + 1)


def kept_shares(labels_LBhw: Labels) -> list[float]:
    """Share of its input that every layer kept, over all images."""
    tokens = [labels_LBhw[0, 0].size, *counted(labels_LBhw).mean(axis=1)]
    return [float(after / before) for before, after in itertools.pairwise(tokens)]


def entering_share(tokens_L: Sequence[float], blocks: Sequence[int], depth: int) -> float:
    """What the budget limits: mean over all blocks of the share of the patches that enters them."""
    before = [GRID * GRID, *tokens_L]
    keep_L = np.array([after / first for first, after in itertools.pairwise(before)])
    return mean_share(keep_L, blocks, depth)


class Trained(NamedTuple):
    """A trained encoder and an untrained one of the same shape."""

    seed: int
    model: AscViT
    untrained: AscViT


def opened(arguments: argparse.Namespace) -> list[Trained]:
    folders = enumerate(arguments.encoders)
    return [Trained(seed, network(f), network(f"random:{f}@{seed}")) for seed, f in folders]


def matched(pair: Trained, images_BHW3: Pixels, title: str) -> dict[str, Labels]:
    """Groupings by the trained encoder, and by the untrained one set to leave as many tokens after every block."""
    labels_LBhw = groupings(merging_part(pair.model), images_BHW3, f"{title}, seed {pair.seed}")
    other = merging_part(pair.untrained)
    set_shares(other, kept_shares(labels_LBhw), images_BHW3[:128])
    return {"trained": labels_LBhw, "untrained": groupings(other, images_BHW3, f"{title}, untrained {pair.seed}")}


# --- Images -----------------------------------------------------------------------------------------------


def spread(files: Sequence[Any], most: int) -> list[Any]:
    count = min(most, len(files))
    return [files[number * len(files) // count] for number in range(count)]


def square(image: Image.Image, box: tuple[float, float, float] = (0.0, 0.0, 1.0)) -> Pixels:
    """A square of the centred square (left, top and side as shares of it), as the probes read images."""
    side = min(image.size)
    left, top = (image.width - side) // 2 + box[0] * side, (image.height - side) // 2 + box[1] * side
    cut = (left, top, left + box[2] * side, top + box[2] * side)
    return np.asarray(image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BICUBIC, box=cut))


def folder_images(folder: Path, most: int) -> Pixels:
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg", ".png"))
    if not files:
        raise ValueError(f"there are no images below {folder}; --data must hold the folders named in --help")
    return np.stack([square(Image.open(file)) for file in spread(files, most)])


def video_images(folder: Path, most: int) -> Pixels:
    """One frame of every clip, half a second after its start."""
    files = spread(find_videos(folder).videos, most)
    return np.stack([next(read_frames(file, start=0.5, short_side=SIZE, crop=SIZE))[1] for file in files])


def training_images(folder: Path, most: int, read: Callable[[Pixels], Pixels]) -> Pixels:
    """The middle frame of prepared clips, brought to size by ``read``."""
    clips = ShardedClips(folder)
    return np.stack([read(clips.read(c, [clips.num_frames(c) // 2])[0]) for c in spread(range(len(clips)), most)])


def as_in_training(frame_HW3: Pixels) -> Pixels:
    return central_square(torch.from_numpy(frame_HW3), SIZE).numpy()


def blurred(images_BHW3: Pixels) -> Pixels:
    """Half the size and back: what an image of 32 px looks like at 64."""
    half = [Image.fromarray(image).resize((SIZE // 2, SIZE // 2), Image.Resampling.BICUBIC) for image in images_BHW3]
    return np.stack([np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BICUBIC)) for image in half])


def noisy(images_BHW3: Pixels, deviation: float = 3.0) -> Pixels:
    noise = np.random.default_rng(0).normal(0.0, deviation, images_BHW3.shape)
    return np.clip(images_BHW3 + noise, 0, 255).round().astype(np.uint8)


class Annotated(NamedTuple):
    """Images with their objects."""

    images_BHW3: Pixels
    truths_BHW: Labels
    """0 background, then objects; -1: void."""


def scene_frames(count: int, most_objects: int, split: Split = "test") -> list[Frame]:
    config = SceneConfig(size=SIZE, split=split, max_objects=most_objects)
    numbers = tqdm(range(count), desc="scenes", leave=False, disable=None)
    return [Scene(config, index).frame(config.frames // 2) for index in numbers]


def annotated_scenes(count: int, most_objects: int) -> Annotated:
    frames = scene_frames(count, most_objects)
    return Annotated(
        np.stack([frame.image_HW3 for frame in frames]),
        np.stack([frame.instance_HW.astype(np.int64) for frame in frames]),
    )


def annotated_voc(folder: Path, most: int) -> Annotated:
    data = VocObjects(voc_folder(folder), "val")
    samples = [data.read(index) for index in data.chosen(most)]
    images = [square(Image.fromarray(sample.image_HW3)) for sample in samples]
    return Annotated(np.stack(images), np.stack([_square_truth(sample.truths[0]) for sample in samples]))


def _square_truth(truth_HW: Labels) -> Labels:
    height, width = truth_HW.shape
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return enlarged_labels(truth_HW[top : top + side, left : left + side], SIZE, SIZE)


def patch_truth(truth_HW: Labels) -> Labels:
    """The object that most pixels of every patch belong to (h, w); void counts like an object."""
    pixels_NP = truth_HW.reshape(GRID, PATCH, GRID, PATCH).swapaxes(1, 2).reshape(GRID * GRID, -1)
    most_N = [np.bincount(pixels_P + 1).argmax() - 1 for pixels_P in pixels_NP]
    return np.array(most_N, dtype=np.int64).reshape(GRID, GRID)


# --- Comparing two groupings ------------------------------------------------------------------------------


class View(NamedTuple):
    """A square of an image: left, top and side as shares of the image's centred square, mirrored or not."""

    left: float
    top: float
    side: float
    flip: bool = False

    def image(self, image: Image.Image) -> Pixels:
        pixels_HW3 = square(image, (self.left, self.top, self.side))
        return pixels_HW3[:, ::-1].copy() if self.flip else pixels_HW3


def labels_at(labels_hw: Labels, view: View, x_N: NDArray[np.float64], y_N: NDArray[np.float64]) -> Labels:
    """The labels of a view at points of the image; -1 outside of it."""
    across_N, down_N = (x_N - view.left) / view.side, (y_N - view.top) / view.side
    inside_N = (across_N > 0) & (across_N < 1) & (down_N > 0) & (down_N < 1)
    if view.flip:
        across_N = 1 - across_N
    rows, columns = labels_hw.shape
    row_N = np.clip((down_N * rows).astype(np.int64), 0, rows - 1)
    column_N = np.clip((across_N * columns).astype(np.int64), 0, columns - 1)
    return np.where(inside_N, labels_hw[row_N, column_N], -1)


def shared_points(one_hw: Labels, first: View, other_hw: Labels, second: View) -> tuple[Labels, Labels]:
    """Labels of both views at the pixels of the first that the second sees, too."""
    centres = (np.arange(SIZE) + 0.5) / SIZE * first.side
    x_HW, y_HW = np.meshgrid(centres + first.left, centres + first.top)
    one_N, other_N = (
        labels_at(labels, v, x_HW.ravel(), y_HW.ravel()) for labels, v in ((one_hw, first), (other_hw, second))
    )
    both_N = (one_N >= 0) & (other_N >= 0)
    return one_N[both_N], other_N[both_N]


def agreement(one_N: Labels, other_N: Labels) -> dict[str, float]:
    """How alike two groupings of the same points are.

    ``ari``: adjusted Rand index, 0 by chance, 1 if equal; ``iou``: best IoU of the superpixels of the first with one of
    the second, mean over points; ``kept``: of two points together in the first, the share together in the second.
    """
    counts_SS = overlaps(one_N, np.unique(other_N, return_inverse=True)[1])
    first_S, second_S = counts_SS.sum(axis=1), counts_SS.sum(axis=0)
    iou_SS = counts_SS / (first_S[:, None] + second_S - counts_SS)
    together = float((first_S * (first_S - 1)).sum())
    return {
        "ari": float(adjusted_rand_score(one_N, other_N)),
        "iou": float((iou_SS.max(axis=1) * first_S).sum() / first_S.sum()),
        "kept": float((counts_SS * (counts_SS - 1)).sum()) / together if together else math.nan,
    }


def mean_agreement(pairs: Iterable[tuple[Labels, Labels]]) -> dict[str, float]:
    found = [agreement(one_N, other_N) for one_N, other_N in pairs if len(one_N) > 1]
    return {name: float(np.nanmean([each[name] for each in found])) for name in found[0]} | {"images": len(found)}


# --- Points that move -------------------------------------------------------------------------------------


class Moved(NamedTuple):
    """Points of a scene that are seen at two times."""

    before_N: Labels
    """Their pixels, row by row, at the first time."""
    after_N: Labels
    """At the second."""
    track_N: Labels
    """Numbers of their objects; -1: background."""


def moved_points(scene: Scene, first: float, second: float) -> Moved:
    """For every pixel of the first time the pixel that shows the same point of the same surface at the second."""
    places = [_surfaces(scene, t) for t in (first, second)]
    found: list[tuple[Labels, Labels, Labels]] = []
    for track in sorted(places[0].keys() & places[1].keys()):
        (pixel_N, at_N2, _), (other_M, at_M2, step) = places[0][track], places[1][track]
        distance_N, nearest_N = cKDTree(at_M2).query(at_N2)
        # Nearer than one pixel is wide: the point is in view and nothing is in front of it.
        seen_N = distance_N < 0.75 * step
        found.append((pixel_N[seen_N], other_M[nearest_N[seen_N]], np.full(int(seen_N.sum()), track)))
    return Moved(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def _surfaces(scene: Scene, t: float) -> dict[int, tuple[Labels, NDArray[np.float64], float]]:
    """Visible pixels of every surface, where on the surface they are, and how far apart neighbours are there."""
    frame, centres = scene.frame(t), cell_centres(scene.config.size)
    x_1W, y_H1 = centres[None, :], centres[:, None]
    # The scenes tell masks but not motion; their own geometry does.
    camera, plane, objects = scene._camera, scene._plane, scene._objects
    places = {-1: (0, camera.to_plane(t, plane.depth, x_1W, y_H1))}
    for mark, track in enumerate(frame.tracks_K.tolist(), start=1):
        places[track] = (mark, objects[track].pose(camera, t).to_local(x_1W, y_H1))
    found = {}
    for track, (mark, (u_HW, v_HW)) in places.items():
        at_HW2 = np.stack(np.broadcast_arrays(u_HW, v_HW), axis=-1)
        steps = [np.median(np.linalg.norm(np.diff(at_HW2, axis=axis), axis=-1)) for axis in (0, 1)]
        pixel_N = np.flatnonzero(frame.instance_HW.ravel() == mark)
        if len(pixel_N):
            found[track] = (pixel_N, at_HW2.reshape(-1, 2)[pixel_N], float(max(steps)))
    return found


# --- Part: tokens -----------------------------------------------------------------------------------------


def token_sets(arguments: argparse.Namespace) -> dict[str, Callable[[], Pixels]]:
    data, most = arguments.data, arguments.images
    sets: dict[str, Callable[[], Pixels]] = {}
    if arguments.shards is not None:
        training = partial(training_images, arguments.shards, most)
        sets["training frames, read as in training"] = lambda: training(as_in_training)
        sets["… read as the probes do (bicubic)"] = lambda: training(lambda frame: square(Image.fromarray(frame)))
        sets["… halved and enlarged"] = lambda: blurred(training(as_in_training))
        sets["… with noise (σ = 3 of 255)"] = lambda: noisy(training(as_in_training))
    sets |= {
        f"video/{name}, one frame a clip": partial(video_images, data / "video" / name, most)
        for name in ("davis", "ucf101", "misc")
    }
    folders = (
        "cifar10/test",
        "tiny-imagenet/val",
        "pets/test",
        "flowers102/test",
        "nyu/test/rgb",
        "bsds500/val/images",
    )
    sets |= {name: partial(folder_images, data / name, most) for name in folders}
    sets["voc (2012 val)"] = lambda: annotated_voc(data / "voc", most).images_BHW3
    sets["embedded scenes (test)"] = lambda: annotated_scenes(most, 3).images_BHW3
    return sets


def part_tokens(arguments: argparse.Namespace) -> Record:
    models = [network(folder) for folder in arguments.encoders]
    shorts = [merging_part(model) for model in models]
    rows = []
    for name, images in tqdm(token_sets(arguments).items(), desc="datasets", disable=None):
        images_BHW3 = images()
        for seed, (model, short) in enumerate(zip(models, shorts, strict=True)):
            labels_LBhw = groupings(short, images_BHW3, name)
            rows.append({"dataset": name, "seed": seed, "images": len(images_BHW3)} | token_numbers(model, labels_LBhw))
    targets = [model.budget.targets_L.tolist() for model in models if model.budget is not None]
    budgets = [model.budget.budget for model in models if model.budget is not None]
    return {"rows": rows, "targets": targets, "budgets": budgets}


def token_numbers(model: AscViT, labels_LBhw: Labels) -> Record:
    counts_LB = counted(labels_LBhw)
    last_B = counts_LB[-1]
    largest = [np.bincount(labels_hw.ravel()).max() / labels_hw.size for labels_hw in labels_LBhw[-1]]
    return {
        "kept": kept_shares(labels_LBhw),
        "entering": entering_share(counts_LB.mean(axis=1).tolist(), model.config.superpixel_blocks, model.config.depth),
        "left": float(last_B.mean()),
        "deviation": float(last_B.std(ddof=1)),
        "least": int(last_B.min()),
        "most": int(last_B.max()),
        "under_eight": float((last_B < 8).mean()),
        "largest": float(np.mean(largest)),
    }


def page_tokens(record: Record) -> list[str]:
    shares = " · ".join(f"{np.mean(share):.2f}" for share in zip(*record["targets"], strict=True))
    budget = np.mean(record["budgets"])
    lines = [f"Trained for: kept by the blocks {shares}; mean share entering a block {budget:.2f}.", ""]
    head = (
        "images | tokens left, of 256 | σ over images | least – most | < 8 tokens | largest superpixel | entering share"
    )
    lines += table_head("images of", *head.split(" | "), "kept by the blocks")
    for name, rows in grouped(record["rows"], "dataset").items():
        kept = " · ".join(f"{np.mean(share):.2f}" for share in zip(*(row["kept"] for row in rows), strict=True))
        lines.append(
            line(
                name,
                rows[0]["images"],
                spread_text([row["left"] for row in rows], 0),
                f"{np.mean([row['deviation'] for row in rows]):.0f}",
                f"{min(row['least'] for row in rows)} – {max(row['most'] for row in rows)}",
                f"{100 * np.mean([row['under_eight'] for row in rows]):.0f}%",
                f"{100 * np.mean([row['largest'] for row in rows]):.0f}%",
                spread_text([row["entering"] for row in rows], 2),
                kept,
            )
        )
    return lines


# --- Part: views ------------------------------------------------------------------------------------------

WHOLE = View(0.0, 0.0, 64 / 72)
VIEWS = {
    "mirrored": WHOLE._replace(flip=True),
    "shifted by half a patch, both ways": View(2 / 72, 2 / 72, 64 / 72),
    "shifted by two patches, both ways": View(8 / 72, 8 / 72, 64 / 72),
    "¾ of it, enlarged": View(8 / 72, 8 / 72, 48 / 72),
}
FIRST_FRAME, LATER = 4, (1, 4, 8)


def part_views(arguments: argparse.Namespace) -> Record:
    data = VocObjects(voc_folder(arguments.data / "voc"), "val")
    photographs = [Image.fromarray(data.read(index).image_HW3) for index in data.chosen(arguments.images // 2)]
    scenes = [Scene(SceneConfig(size=SIZE, split="test"), index) for index in range(arguments.images // 2)]
    views = [WHOLE, *VIEWS.values()]
    images_BHW3 = np.stack([view.image(photograph) for view in views for photograph in photographs])
    times = [FIRST_FRAME, *(FIRST_FRAME + step for step in LATER)]
    frames_BHW3 = np.stack([scene.frame(t).image_HW3 for t in times for scene in scenes])
    moved = {step: [moved_points(scene, FIRST_FRAME, FIRST_FRAME + step) for scene in scenes] for step in LATER}
    rows = []
    for pair in opened(arguments):
        for who, labels_LBhw in matched(pair, images_BHW3, "views").items():
            last_VBhw = labels_LBhw[-1].reshape(len(views), len(photographs), GRID, GRID)
            rows += view_rows(last_VBhw, {"who": who, "seed": pair.seed})
        for who, labels_LBhw in matched(pair, frames_BHW3, "frames").items():
            last_TBhw = labels_LBhw[-1].reshape(len(times), len(scenes), GRID, GRID)
            rows += motion_rows(last_TBhw, moved, {"who": who, "seed": pair.seed})
    return {"rows": rows}


def as_grids(labels_Bhw: Labels) -> list[Labels]:
    """Square grids, drawn in pixels, each with the number of superpixels of its image."""
    return [grid_labels(int(labels_hw.max()) + 1, SIZE, SIZE) for labels_hw in labels_Bhw]


def view_rows(last_VBhw: Labels, about: Record) -> list[Record]:
    """The agreement of every view with the whole image; beside it that of grids and that with the next image."""
    rows, whole_Bhw = [], last_VBhw[0]
    for (name, view), other_Bhw in zip(VIEWS.items(), last_VBhw[1:], strict=True):
        kinds = {about["who"]: list(zip(whole_Bhw, other_Bhw, strict=True))}
        if about["who"] == "trained":
            kinds["grid"] = list(zip(as_grids(whole_Bhw), as_grids(other_Bhw), strict=True))
            kinds["another image"] = list(zip(whole_Bhw, np.roll(other_Bhw, 1, axis=0), strict=True))
        tokens = [float(labels_Bhw.max(axis=(1, 2)).mean()) + 1 for labels_Bhw in (whole_Bhw, other_Bhw)]
        for who, pairs in kinds.items():
            found = mean_agreement(shared_points(one, WHOLE, other, view) for one, other in pairs)
            rows.append(about | {"who": who, "view": name, "tokens": tokens} | found)
    return rows


def motion_rows(last_TBhw: Labels, moved: dict[int, list[Moved]], about: Record) -> list[Record]:
    """The agreement over time: of all points that are seen twice, and of those of the main object alone."""
    rows, before_Bhw = [], last_TBhw[0]
    for (step, points), after_Bhw in zip(moved.items(), last_TBhw[1:], strict=True):
        kinds = {about["who"]: (list(map(_large, before_Bhw)), list(map(_large, after_Bhw)))}
        if about["who"] == "trained":
            kinds["grid"] = (as_grids(before_Bhw), as_grids(after_Bhw))
            kinds["another image"] = (kinds["trained"][0], kinds["trained"][1][1:] + kinds["trained"][1][:1])
        tokens = [float(labels_Bhw.max(axis=(1, 2)).mean()) + 1 for labels_Bhw in (before_Bhw, after_Bhw)]
        for who, (before, after) in kinds.items():
            for place, only in (("all points", None), ("main object", 0)):
                pairs = [_tracked(*three, only) for three in zip(before, after, points, strict=True)]
                view = f"{step} frame{'s' if step > 1 else ''} later, {place}"
                rows.append(about | {"who": who, "view": view, "tokens": tokens} | mean_agreement(pairs))
    return rows


def _large(labels_hw: Labels) -> Labels:
    return enlarged_labels(labels_hw, SIZE, SIZE)


def _tracked(before_HW: Labels, after_HW: Labels, points: Moved, only: int | None) -> tuple[Labels, Labels]:
    meant_N = np.ones(len(points.track_N), bool) if only is None else points.track_N == only
    return before_HW.ravel()[points.before_N[meant_N]], after_HW.ravel()[points.after_N[meant_N]]


def page_views(record: Record) -> list[str]:
    names = ("trained", "untrained", "grid", "another image")
    titles = ("trained", "untrained, as many tokens", "square grid, as many cells", "trained, of another image")
    lines = []
    for key, what in (
        ("ari", "adjusted Rand index"),
        ("kept", "of two points together, share still together"),
        ("iou", "best IoU"),
    ):
        lines += table_head(what, *titles)
        for view, rows in grouped(record["rows"], "view").items():
            cells = [[row[key] for row in rows if row["who"] == name] for name in names]
            lines.append(line(view, *(spread_text(values, 2) for values in cells)))
        lines.append("")
    lines += table_head("tokens left", "of the image", "of the view")
    for view, rows in grouped(record["rows"], "view").items():
        tokens = [row["tokens"] for row in rows if row["who"] == "trained"]
        lines.append(line(view, *(spread_text([pair[i] for pair in tokens], 0) for i in (0, 1))))
    return lines


# --- Part: blocks -----------------------------------------------------------------------------------------


def part_blocks(arguments: argparse.Namespace) -> Record:
    sets = {
        "scenes": annotated_scenes(arguments.images, 6),
        "voc": annotated_voc(arguments.data / "voc", arguments.images),
    }
    rows = []
    for pair in opened(arguments):
        for name, images in sets.items():
            truths = [patch_truth(truth_HW) for truth_HW in images.truths_BHW]
            for who, labels_LBhw in matched(pair, images.images_BHW3, name).items():
                rows += block_rows(labels_LBhw, truths, {"data": name, "who": who, "seed": pair.seed})
    share = float(np.mean([row["tokens"] for row in rows if row["block"] == 4 and row["who"] == "trained"])) / GRID**2
    images_BHW3 = sets["voc"].images_BHW3[: arguments.images // 2]
    return {"rows": rows, "anew": grouped_anew(arguments.plain[0], images_BHW3, share), "share": share}


def block_rows(labels_LBhw: Labels, truths: Sequence[Labels], about: Record) -> list[Record]:
    rows = []
    before_Bhw = np.broadcast_to(np.arange(GRID * GRID).reshape(GRID, GRID), labels_LBhw[0].shape)
    for block, after_Bhw in enumerate(labels_LBhw, start=1):
        several = zip(before_Bhw, after_Bhw, truths, strict=True)
        found = [step_numbers(one.ravel(), other.ravel(), truth.ravel()) for one, other, truth in several]
        sums = {name: float(np.sum([each[name] for each in found])) for name in found[0]}
        rows.append(
            about
            | {"block": block, "tokens": float(after_Bhw.max(axis=(1, 2)).mean()) + 1, "images": len(found)}
            | {
                "information": sums["information"] / len(found),
                "changed": sums["changed"] / sums["patches"],
                "mixed": sums["mixed"] / sums["known"],
                "crossing": sums["crossing"] / max(sums["merges"], 1.0),
                "pairs": sums["crossing_pairs"] / max(sums["joined_pairs"], 1.0),
                "chance": sums["apart_crossing"] / max(sums["apart"], 1.0),
            }
        )
        before_Bhw = after_Bhw
    return rows


def step_numbers(before_N: Labels, after_N: Labels, truth_N: Labels) -> dict[str, float]:
    """What one block did to one image: all are counts, but for ``information`` (bits).

    A merge joins one token more to a group, so a group of m tokens took m - 1; of these at least (objects - 1) joined
    different objects, an object being what most patches of a token belong to. Void patches count nowhere but in
    ``information`` and ``changed``.
    """
    sizes = [np.bincount(labels_N)[labels_N] for labels_N in (before_N, after_N)]
    known_N = truth_N >= 0
    numbers = {
        "information": float(sum(variation_of_information(before_N, after_N))),
        "changed": int((sizes[0] != sizes[1]).sum()),
        "patches": len(before_N),
        "known": int(known_N.sum()),
    }
    if not known_N.any():
        return numbers | dict.fromkeys(
            ("mixed", "merges", "crossing", "joined_pairs", "crossing_pairs", "apart", "apart_crossing"), 0.0
        )
    before_N, after_N, truth_N = before_N[known_N], after_N[known_N], truth_N[known_N]
    counts_SG, groups_SG = overlaps(before_N, truth_N), overlaps(after_N, truth_N)
    _, first_S = np.unique(before_N, return_index=True)
    group_S, object_S = np.unique(after_N, return_inverse=True)[1][first_S], counts_SG.argmax(axis=1)
    objects = len(np.unique(np.stack([group_S, object_S]), axis=1)[0])
    together = [_pairs(counts) for counts in (counts_SG, groups_SG)]
    everything = _pairs(overlaps(np.zeros_like(truth_N), truth_N))
    return numbers | {
        "mixed": float(len(truth_N) - groups_SG.max(axis=1).sum()),
        "merges": len(group_S) - len(groups_SG),
        "crossing": objects - len(groups_SG),
        "joined_pairs": together[1][0] - together[0][0],
        "crossing_pairs": together[1][1] - together[0][1],
        "apart": everything[0] - together[0][0],
        "apart_crossing": everything[1] - together[0][1],
    }


def _pairs(counts_SG: Labels) -> tuple[float, float]:
    """Pairs of patches in the same group; and those of them that belong to different objects."""
    alike = float((counts_SG * (counts_SG - 1)).sum() / 2)
    sizes_S = counts_SG.sum(axis=1)
    together = float((sizes_S * (sizes_S - 1)).sum() / 2)
    return together, together - alike


def grouped_anew(plain: Path, images_BHW3: Pixels, share: float) -> list[Record]:
    """What if every block grouped the patches from scratch? The plain network's keys say, block by block."""
    model, rows, last = network(plain), [], None
    for block in tqdm(range(1, model.config.depth + 1), desc="blocks of the plain network", disable=None):
        single = merging_part(changed_model(model, GroupingChange(blocks=(block,)), str(plain)))
        set_shares(single, [share], images_BHW3[:64])
        labels_Bhw = groupings(single, images_BHW3, f"block {block}")[0]
        row: Record = {"block": block, "tokens": float(labels_Bhw.max(axis=(1, 2)).mean()) + 1}
        if last is not None:
            row |= mean_agreement((one.ravel(), other.ravel()) for one, other in zip(last, labels_Bhw, strict=True))
        rows.append(row)
        last = labels_Bhw
    return rows


def page_blocks(record: Record) -> list[str]:
    lines = []
    head = (
        "tokens left | VI to the block before, bits | patches with new company | patches among those of another object"
    )
    more = "merges that join two objects | joined pairs of two objects | of all pairs still apart"
    for data, rows in grouped(record["rows"], "data").items():
        lines += [f"{data}, {rows[0]['images']} images:", ""]
        lines += table_head("", "block", *head.split(" | "), *more.split(" | "))
        for (who, block), cells in grouped(rows, "who", "block").items():
            numbers = [spread_text([row[key] for row in cells], 2) for key in ("information",)]
            shares = ("changed", "mixed", "crossing", "pairs", "chance")
            percents = [f"{spread_text([100 * row[key] for row in cells], 0)}%" for key in shares]
            lines.append(line(who, block, spread_text([row["tokens"] for row in cells], 0), *numbers, *percents))
        lines.append("")
    lines += [f"Every block from scratch, plain network, {100 * record['share']:.0f}% of the patches left:", ""]
    lines += table_head("block", "tokens", "ARI with the block before", "pairs still together")
    for row in record["anew"]:
        texts = [f"{row[key]:.2f}" if key in row else "–" for key in ("ari", "kept")]
        lines.append(line(row["block"], f"{row['tokens']:.0f}", *texts))
    return lines


# --- Part: small ------------------------------------------------------------------------------------------

EDGES = (0, 2, 4, 8, 16, 32, GRID * GRID + 1)
READ_OUT = ("superpixels", "plain", "plain, averaged in superpixels", "plain, averaged in grid cells")
DECAYS = (1e-4, 1e-3, 1e-2)
FALSE_ALARM = 0.1


def size_bin(patches: float) -> int:
    return int(np.searchsorted(EDGES, patches, side="right")) - 1


def bin_name(which: int) -> str:
    low, high = EDGES[which], EDGES[which + 1]
    return f"under {high}" if not low else f"{low} to {high}" if which < len(EDGES) - 2 else f"over {low}"


def part_small(arguments: argparse.Namespace) -> Record:
    sets = {
        "scenes": annotated_scenes(arguments.images, 6),
        "voc": annotated_voc(arguments.data / "voc", arguments.images),
    }
    rows = []
    pairs = opened(arguments)
    for name, images in sets.items():
        for pair in pairs:
            for who, labels_LBhw in matched(pair, images.images_BHW3, name).items():
                kinds = {who: labels_LBhw[-1]}
                if who == "trained":
                    kinds["grid"] = np.stack(as_grids(labels_LBhw[-1]))
                    kinds["patches"] = np.broadcast_to(np.arange(GRID**2).reshape(GRID, GRID), labels_LBhw[-1].shape)
                for kind, labels in kinds.items():
                    rows += object_rows(labels, images.truths_BHW, {"data": name, "who": kind, "seed": pair.seed})
    return {"rows": rows, "read_out": read_out(arguments, pairs)}


def object_rows(labels_Bhw: Labels, truths_BHW: Labels, about: Record) -> list[Record]:
    """Means over the objects of a size."""
    found: list[list[tuple[float, float, float]]] = [[] for _ in EDGES[1:]]
    for labels_hw, truth_HW in zip(labels_Bhw, truths_BHW, strict=True):
        large_HW = enlarged_labels(labels_hw, SIZE, SIZE)
        areas_G = np.bincount(truth_HW[truth_HW >= 0], minlength=1)
        numbers = (np.flatnonzero(areas_G[1:]) + 1).tolist()
        if numbers:
            measures = zip(
                best_overlaps(large_HW, truth_HW),
                achievable_overlaps(large_HW, truth_HW),
                swallowed(large_HW, truth_HW, numbers),
                strict=True,
            )
            for number, values in zip(numbers, measures, strict=True):
                found[size_bin(areas_G[number] / PATCH**2)].append(values)
    rows = []
    for which, objects in enumerate(found):
        if objects:
            best, union, lost = np.mean(objects, axis=0).tolist()
            rows.append(about | {"bin": which, "objects": len(objects), "best": best, "union": union, "lost": lost})
    return rows


def swallowed(labels_HW: Labels, truth_HW: Labels, numbers: Sequence[int]) -> list[float]:
    """Share of each object's pixels that are in superpixels which hold more of something else."""
    counts_SG = overlaps(labels_HW, truth_HW)
    owner_S = counts_SG.argmax(axis=1)
    return [float(counts_SG[owner_S != number, number].sum() / counts_SG[:, number].sum()) for number in numbers]


class Patches(NamedTuple):
    """Patches of many scenes."""

    features_NC: Tensor
    class_N: Tensor
    """-1 for background, else the class of the object."""
    bin_N: Tensor
    """Size of the object; -1 for background."""


def read_out(arguments: argparse.Namespace, pairs: Sequence[Trained]) -> list[Record]:
    """What a linear classifier can tell of single patches: object or background, and the class of the object."""
    learn, judged = arguments.images, arguments.images
    frames = scene_frames(learn + judged, 6, split="train")
    images_BHW3 = np.stack([frame.image_HW3 for frame in frames])
    truth = [patch_truth(frame.instance_HW.astype(np.int64)) for frame in frames]
    class_BN = torch.stack([_classes(frame, hw) for frame, hw in zip(frames, truth, strict=True)])
    bin_BN = torch.stack([_bins(frame, hw) for frame, hw in zip(frames, truth, strict=True)])
    rows = []
    for pair, plain in zip(pairs, arguments.plain, strict=False):
        own_BNC, plain_BNC = dense(pair.model, images_BHW3), dense(network(plain), images_BHW3)
        last_Bhw = groupings(merging_part(pair.model), images_BHW3, "groupings")[-1]
        in_cells = np.stack([grid_labels(int(hw.max()) + 1, GRID, GRID) for hw in last_Bhw])
        several = (own_BNC, plain_BNC, averaged(plain_BNC, last_Bhw), averaged(plain_BNC, in_cells))
        for who, features_BNC in zip(READ_OUT, several, strict=True):
            parts = [
                Patches(features_BNC[b].flatten(0, 1), class_BN[b].flatten(), bin_BN[b].flatten())
                for b in (slice(learn), slice(learn, None))
            ]
            rows += [{"who": who, "seed": pair.seed} | row for row in (*told_apart(*parts), *classes_told(*parts))]
    return rows


def _classes(frame: Frame, patches_hw: Labels) -> Tensor:
    return torch.from_numpy(np.concatenate([[-1], frame.classes_K])[patches_hw.ravel()])


def _bins(frame: Frame, patches_hw: Labels) -> Tensor:
    areas = np.bincount(frame.instance_HW.ravel(), minlength=len(frame.classes_K) + 1) / PATCH**2
    return torch.from_numpy(np.array([-1, *map(size_bin, areas[1:])])[patches_hw.ravel()])


@torch.no_grad()
def dense(model: AscViT, images_BHW3: Pixels) -> Tensor:
    """Features (B, N, C) of every patch: those of its token after the last norm."""
    parts = []
    for first in tqdm(range(0, len(images_BHW3), BATCH), desc="features", unit="batch", leave=False, disable=None):
        images_B3HW = normalise(images_BHW3[first : first + BATCH])
        (map_BChw,) = model.forward_intermediates(images_B3HW, indices=[-1], norm=True, intermediates_only=True)
        parts.append(map_BChw.flatten(2).mT)
    return torch.cat(parts)


def averaged(features_BNC: Tensor, labels_Bhw: Labels) -> Tensor:
    """Every patch takes the mean of its superpixel: merging and nothing else."""
    labels_BN1 = torch.from_numpy(labels_Bhw.reshape(len(labels_Bhw), -1, 1))
    index_BNC = labels_BN1.expand_as(features_BNC)
    sums_BSC = torch.zeros_like(features_BNC).scatter_reduce(1, index_BNC, features_BNC, "mean", include_self=False)
    return sums_BSC.gather(1, index_BNC)


def fitted(features_NC: Tensor, labels_N: Tensor, classes: int) -> Callable[[Tensor], Tensor]:
    """A linear classifier whose decay was chosen on the last fifth of the scenes to learn from."""
    cut = len(labels_N) * 4 // 5
    choice = choose_decay(features_NC[:cut], labels_N[:cut], features_NC[cut:], labels_N[cut:], classes, "top1", DECAYS)
    fit = fit_linear(features_NC, labels_N, classes, [choice.decay], start=choice.fit, tolerance=1e-3)
    return lambda queries_MC: fit.scores_MK(0, queries_MC)


def told_apart(learn: Patches, judged: Patches) -> list[Record]:
    """Share of the objects' patches that are found where a tenth of the background is taken for objects, too."""
    every = slice(None, None, 4)
    scores = fitted(learn.features_NC[every], (learn.class_N[every] >= 0).long(), 2)
    margin_M = scores(judged.features_NC).diff(dim=1)[:, 0]
    # On the background that is judged: so all encoders are compared at the same share of false alarms.
    threshold = float(np.quantile(margin_M[judged.class_N < 0].numpy(), 1 - FALSE_ALARM))
    return _by_size("object or background", margin_M > threshold, judged)


def classes_told(learn: Patches, judged: Patches) -> list[Record]:
    """Share of the objects' patches whose class is right, of ten."""
    own_N, own_M = learn.class_N >= 0, judged.class_N >= 0
    scores = fitted(learn.features_NC[own_N], learn.class_N[own_N], len(CLASSES))
    of_objects = Patches(judged.features_NC[own_M], judged.class_N[own_M], judged.bin_N[own_M])
    return _by_size("class", scores(of_objects.features_NC).argmax(dim=1) == of_objects.class_N, of_objects)


def _by_size(question: str, right_M: Tensor, judged: Patches) -> list[Record]:
    rows = []
    for which in range(-1, len(EDGES) - 1):
        chosen_M = judged.bin_N == which
        if chosen_M.any():
            share = float(right_M[chosen_M].float().mean())
            rows.append({"question": question, "bin": which, "patches": int(chosen_M.sum()), "share": share})
    return rows


def page_small(record: Record) -> list[str]:
    names = ("trained", "untrained", "grid", "patches")
    titles = ("trained", "untrained", "square grid, as many", "patches, not merged")
    lines = []
    measures = (
        ("lost", "pixels in superpixels of something else, %"),
        ("union", "best union, IoU"),
        ("best", "best superpixel, IoU"),
    )
    for data, rows in grouped(record["rows"], "data").items():
        for key, what in measures:
            lines += table_head(f"{data}: size in patches", "objects", *(f"{what}: {titles[0]}", *titles[1:]))
            for which, cells in sorted(grouped(rows, "bin").items()):
                factor, digits = (100, 0) if key == "lost" else (1, 2)
                values = [[factor * row[key] for row in cells if row["who"] == name] for name in names]
                texts = (spread_text(value, digits) for value in values)
                lines.append(line(bin_name(which), cells[0]["objects"], *texts))
            lines.append("")
    for question, rows in grouped(record["read_out"], "question").items():
        lines += table_head(f"{question}: size in patches", "patches judged", *READ_OUT)
        for which, cells in sorted(grouped(rows, "bin").items()):
            values = [[100 * row["share"] for row in cells if row["who"] == name] for name in READ_OUT]
            name = "background" if which < 0 else bin_name(which)
            lines.append(line(name, cells[0]["patches"], *(spread_text(value, 1) for value in values)))
        lines.append("")
    return lines


# --- Part: budgets ----------------------------------------------------------------------------------------

BUDGETS = (0.25, 0.3, 0.4, 0.55, 0.75)
CALIBRATION = 125
AS_TRAINED, UNMERGED = "θ as trained", "1 (nothing merged)"


def part_budgets(arguments: argparse.Namespace) -> Record:
    split = folder_split(arguments.data / "cifar10", SIZE, arguments.learn, arguments.judged)
    # Spread over all, because they are sorted by class.
    typical_B3HW = split.train.images_B3HW[:: max(1, len(split.train.labels_B) // CALIBRATION)]
    rows = finished_rows(arguments)
    done = {(row["budget"], row["seed"]) for row in rows}
    for seed, folder in enumerate(arguments.encoders):
        for name in tqdm((AS_TRAINED, *BUDGETS, UNMERGED), desc=f"budgets, seed {seed}", disable=None):
            if (str(name), seed) in done:
                continue
            model = network(folder)
            if name == UNMERGED:
                model = without_superpixels(model)
            elif name != AS_TRAINED:
                set_budget(model, float(name))
                model.calibrate(typical_B3HW)
            rows.append({"budget": str(name), "seed": seed} | judged_features(model, split))
            write(arguments.out, "budgets", arguments, {"rows": rows})
    return {"rows": rows}


def finished_rows(arguments: argparse.Namespace) -> list[Record]:
    """What an earlier start of the longest part has finished with the same images and encoders."""
    file = arguments.out / "budgets.json"
    record = json.loads(file.read_text()) if file.is_file() else {"rows": []}
    return list(record["rows"]) if record.get("settings") == settings_of(arguments) else []


def set_budget(model: AscViT, budget: float) -> None:
    """Shares under another budget, in the proportions of training (of their logarithms)."""
    assert model.budget is not None
    trained_L = model.budget.targets_L.double().numpy()
    blocks, depth = model.config.superpixel_blocks, model.config.depth
    power = brentq(lambda power: mean_share(trained_L**power, blocks, depth) - budget, 1e-3, 50.0)
    model.budget.targets_L.copy_(torch.from_numpy(trained_L**power))


def judged_features(model: AscViT, split: Any) -> Record:
    features_NC = extract(model, split.train.images_B3HW, BATCH)
    queries, tokens = [], []
    for images_B3HW in split.test.images_B3HW.split(BATCH):
        queries.append(extract(model, images_B3HW))
        stats = model.diagnostics().values() if model.budget is not None else ()
        tokens.append([stat.tokens_mean * len(images_B3HW) for stat in stats])
    four = (features_NC, split.train.labels_B, torch.cat(queries), split.test.labels_B)
    tokens_L = (np.sum(tokens, axis=0) / len(split.test.labels_B)).tolist()
    blocks = model.config.superpixel_blocks if model.budget is not None else ()
    return {
        "knn": 100 * knn_accuracy(*four),
        "linear": 100 * linear_accuracy(*four),
        "left": tokens_L[-1] if tokens_L else float(GRID * GRID),
        "entering": entering_share(tokens_L, blocks, model.config.depth) if tokens_L else 1.0,
    }


def page_budgets(record: Record) -> list[str]:
    lines = table_head("budget", "entering share, measured", "tokens left, of 256", "kNN", "linear", "seeds")
    order = [AS_TRAINED, *map(str, BUDGETS), UNMERGED]
    for budget, rows in sorted(grouped(record["rows"], "budget").items(), key=lambda item: order.index(item[0])):
        cells = (("entering", 2), ("left", 0), ("knn", 1), ("linear", 1))
        texts = (spread_text([row[key] for row in rows], digits) for key, digits in cells)
        lines.append(line(budget, *texts, len(rows)))
    return lines


# --- Writing ----------------------------------------------------------------------------------------------


def grouped(rows: Iterable[Record], *keys: str) -> dict[Any, list[Record]]:
    """Rows by the value of a key, or by the values of several."""
    found: dict[Any, list[Record]] = {}
    for row in rows:
        found.setdefault(row[keys[0]] if len(keys) == 1 else tuple(row[key] for key in keys), []).append(row)
    return found


def spread_text(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation over seeds."""
    if not values:
        return "–"
    text = f"{statistics.mean(values):.{digits}f}"
    return f"{text} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else text


def line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def table_head(*titles: str) -> list[str]:
    return [line(*titles), line(*["---"] * len(titles))]


def write(out: Path, part: str, arguments: argparse.Namespace, record: Record) -> None:
    about = {
        "part": part,
        "settings": settings_of(arguments),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{part}.json").write_text(json.dumps(about | record, indent=1))


def settings_of(arguments: argparse.Namespace) -> Record:
    return {name: _plain(value) for name, value in vars(arguments).items() if name != "parts"}


def _plain(value: Any) -> Any:
    # Names alone: where things lie on one computer is no one else's concern.
    return (
        [_plain(each) for each in value]
        if isinstance(value, list)
        else value.name
        if isinstance(value, Path)
        else value
    )


PARTS = {
    "tokens": (part_tokens, page_tokens),
    "views": (part_views, page_views),
    "blocks": (part_blocks, page_blocks),
    "small": (part_small, page_small),
    "budgets": (part_budgets, page_budgets),
}


def print_page(out: Path) -> None:
    for part, (_, page) in PARTS.items():
        file = out / f"{part}.json"
        if file.is_file():
            print(f"\n## {part}\n", *page(json.loads(file.read_text())), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "page"])
    parser.add_argument("--encoders", type=Path, nargs="+", default=[], help="trained with superpixels, one a seed")
    parser.add_argument("--plain", type=Path, nargs="+", default=[], help="trained without, one a seed")
    parser.add_argument("--data", type=Path, help="folder with cifar10, voc and the others")
    parser.add_argument("--shards", type=Path, help="prepared clips that the encoders learned from")
    parser.add_argument("--out", type=Path, default=Path("runs/limitations"))
    parser.add_argument("--images", type=int, default=200, help="images of a dataset, at most; views uses half as many")
    parser.add_argument("--learn", type=int, default=1000, help="budgets: images to learn from")
    parser.add_argument("--judged", type=int, default=500, help="budgets: images to be recognised")
    arguments = parser.parse_args()
    # An image of few superpixels is what is being measured here, not news.
    warnings.simplefilter("ignore", SuperpixelWarning)
    for part in arguments.parts:
        if part == "page":
            print_page(arguments.out)
            continue
        if not arguments.encoders or arguments.data is None or (part in ("blocks", "small") and not arguments.plain):
            parser.error(f"{part} needs --encoders and --data, and blocks and small need --plain")
        begun = time.monotonic()
        write(arguments.out, part, arguments, PARTS[part][0](arguments))
        print(f"{part}: {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
