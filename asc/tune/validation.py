"""What a search judges by, held out of what there is to learn from; test images are never opened.

Of labelled images 5% of the training part, class by class, are to be recognised by the rest of it. Of the clips that
are trained on, whole files are kept away, so that no scene of a video is on both sides.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from asc.data.clips import SCENES, Clips, LeftOut
from asc.data.images import normalise
from asc.data.scenes import SceneConfig
from asc.pretrain.data import Corpora, DataConfig, central_square, open_corpora
from asc.tasks.classify.datasets.folders import TRAIN, class_folders, held_out, hold_out, read_part
from asc.tasks.classify.datasets.parts import ImageSet, SceneImages
from asc.tasks.classify.images import Labelled, Split

# Far from the seeds of pre-training, which begin at 0, and from that of the evaluations.
_SCENE_SEED = 2_000_000
_SPLIT_SEED = 0


# --- Labelled images --------------------------------------------------------------------------------------


class LabelledImages(NamedTuple):
    """Which labelled images a search judges by."""

    folders: tuple[Path, ...]
    """Folders with ``train/<class>/``; none: embedded scenes."""
    share: float
    """Share of them that is to be recognised."""
    most: int
    """Images of a folder whose class is known, at most."""
    scenes: int
    """Number of scenes, both sides together."""


@lru_cache(2)
def labelled_sets(images: LabelledImages, size: int, scene: SceneConfig) -> dict[str, Split]:
    """What there is to be recognised, by name; remembered, since all trials of a process ask for the same."""
    if not images.folders:
        return {SCENES: _scene_set(images, replace(scene, size=size, split="train", seed=_SCENE_SEED))}
    names = Counter(folder.name for folder in images.folders)
    sets = {}
    for folder in images.folders:
        name = folder.name if names[folder.name] == 1 else str(folder)
        if name in sets:
            raise ValueError(f"images names {folder} twice")
        sets[name] = _folder_set(folder, size, images)
    return sets


def _folder_set(folder: Path, size: int, images: LabelledImages) -> Split:
    if not (folder / TRAIN).is_dir():
        raise ValueError(f"images: {folder} has no labelled images in {TRAIN}/<class>/")
    part, _ = read_part(f"{folder.name}/{TRAIN}", folder, TRAIN, class_folders(folder / TRAIN))
    known, judged = hold_out(part, f"{folder.name}/val", images.share, _SPLIT_SEED)
    if len(known) > images.most:
        chosen = np.random.default_rng(_SPLIT_SEED).permutation(len(known))[: images.most]
        known = known.take(known.name, np.sort(chosen))
    return Split(_loaded(known, size), _loaded(judged, size), part.classes)


def _scene_set(images: LabelledImages, config: SceneConfig) -> Split:
    everything = SceneImages(f"{SCENES}/{TRAIN}", config, range(images.scenes))
    judged = held_out(everything.labels, images.share, _SPLIT_SEED).tolist()
    known = sorted(set(range(images.scenes)) - set(judged))
    if not known or not judged:
        raise ValueError(f"scenes: {images.scenes} are too few to hold a share of {images.share} out; give more")
    parts = [SceneImages(SCENES, config, numbers) for numbers in (known, judged)]
    return Split(_loaded(parts[0], config.size), _loaded(parts[1], config.size), everything.classes)


def _loaded(part: ImageSet, size: int) -> Labelled:
    images = [central_square(torch.from_numpy(np.array(part.image(index))), size) for index in range(len(part))]
    return Labelled(normalise(torch.stack(images)), part.labels)


def knn_error(scores: dict[str, float], sets: dict[str, Split]) -> float:
    """Standard error of the mean accuracy over the sets, from the number of images that were judged."""
    variances = [scores[name] * (1 - scores[name]) / len(split.test.labels_B) for name, split in sets.items()]
    return math.sqrt(sum(variances)) / len(sets)


# --- Clips ------------------------------------------------------------------------------------------------


class HeldClips(NamedTuple):
    """Clips to learn from, and clips that are kept away."""

    learned: Corpora
    held: list[Clips]
    """Empty where no corpus consists of more than one file."""
    whole: list[str]
    """Corpora of a single file, of which nothing could be kept away."""


@lru_cache(4)
def opened_clips(data: tuple[str, ...], config: DataConfig, seed: int, memory: Path, share: float) -> HeldClips:
    """The clips, divided; remembered, since all trials of a process ask for the same."""
    with _alone(memory):
        corpora = open_corpora(data, config, seed, memory)
    learned: list[Clips] = []
    held: list[Clips] = []
    whole = []
    for clips in corpora.clips:
        away = set(_files_held_out([clips.source(clip) for clip in range(len(clips))], share))
        sides: tuple[list[int], list[int]] = ([], [])
        for clip in range(len(clips)):
            sides[clips.source(clip) in away].append(clip)
        learned.append(LeftOut(clips, np.array(sides[0], dtype=np.int64)))
        if away:
            held.append(LeftOut(clips, np.array(sides[1], dtype=np.int64)))
        else:
            whole.append(clips.name)
    return HeldClips(corpora._replace(clips=learned), held, whole)


def _files_held_out(sources: Sequence[str], share: float) -> list[str]:
    """Files with about that share of the clips; by their names alone, so that every computer chooses the same."""
    clips_of = Counter(sources)
    files = sorted(clips_of, key=lambda file: hashlib.sha256(file.encode()).digest())
    chosen: list[str] = []
    count = 0
    for file in files[:-1]:  # one must be left to learn from
        if chosen and count + clips_of[file] / 2 > share * len(sources):
            break
        chosen.append(file)
        count += clips_of[file]
    return chosen


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process of this computer is in here."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{socket.gethostname()}.lock").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
