"""How a dataset is found, opened and compared with its official release."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from asc.data.scenes import SceneConfig
from asc.tasks.classify.datasets import official
from asc.tasks.classify.datasets.folders import Parts, hold_out, is_plain, read_plain, several_labels, some
from asc.tasks.classify.datasets.parts import Dataset, FileImages, ImageSet, SceneImages
from asc.tasks.classify.datasets.registry import DATASETS, FOLDER, SCENES, Entry

SCENE_COUNTS = (2000, 500, 1000)
"""Embedded scenes to learn from, to choose settings by, and to be judged on."""
# Far from the seeds of pre-training, which begins at 0: a scene is not to be trained on and judged by.
_SCENE_SEED = 1_000_000


def open_dataset(
    name: str,
    root: Path | None = None,
    *,
    seed: int = 0,
    val_share: float | None = None,
    download: bool = False,
    scene: SceneConfig | None = None,
    scene_counts: tuple[int, int, int] = SCENE_COUNTS,
) -> Dataset:
    """Open a dataset from its official layout, or from ``train/<class>/`` and ``val`` or ``test`` of the same kind.

    Args:
        name: One of :data:`DATASETS`.
        root: The folder that holds the dataset's own folder (or that folder itself); a folder called ``name`` in it
            will do as well. Not needed for the scenes.
        seed: Start of the choice of validation images where there is no official part. The test part never depends
            on it.
        val_share: Share of the training part to choose where there is no validation part; None: that of the registry.
        download: Whether to get the dataset where it is not there.
        scene: Settings of the scenes; its split is set by the part.
        scene_counts: Scenes for training, validation and test.
    """
    if name not in DATASETS:
        raise ValueError(f"dataset must be one of {', '.join(DATASETS)}, not {name!r}")
    entry = DATASETS[name]
    if name == SCENES:
        return _open_scenes(entry, scene or SceneConfig(seed=_SCENE_SEED), scene_counts)
    if root is None:
        raise ValueError(f"the dataset {name} needs its folder: {entry.how_to_get}")
    parts, is_official = _read(name, entry, root, download)
    notes = [f"{name}: {note}" for note in [*parts.notes, *_differences(name, entry, parts, is_official)]]
    train, val = parts.train, parts.val
    if val is None:
        share = entry.val_share if val_share is None else val_share
        train, val = hold_out(train, f"{name}/val", share, seed)
    return Dataset(name, entry.metric, entry.multi_label, train, val, parts.test, notes)


def _open_scenes(entry: Entry, config: SceneConfig, counts: tuple[int, int, int]) -> Dataset:
    if min(counts) < 1:
        raise ValueError(f"scene_counts must be three numbers of at least 1, got {counts}")
    seen, unseen = replace(config, split="train"), replace(config, split="test")
    train = SceneImages(f"{SCENES}/train", seen, range(counts[0]))
    val = SceneImages(f"{SCENES}/val", seen, range(counts[0], counts[0] + counts[1]))
    return Dataset(SCENES, entry.metric, False, train, val, SceneImages(f"{SCENES}/test", unseen, range(counts[2])), [])


# --- Finding it -------------------------------------------------------------------------------------------


def _read(name: str, entry: Entry, root: Path, download: bool) -> tuple[Parts, bool]:
    """The parts, and whether they come from the official layout."""
    found = _find(name, entry, root)
    if found is None and download:
        _download(name, entry, root)
        found = _find(name, entry, root)
    if found is None:
        raise ValueError(_missing(name, entry, root))
    place, is_official = found
    if is_official:
        assert entry.read is not None
        return entry.read(place), True
    parts = read_plain(name, place)
    if not entry.multi_label:
        return parts, False
    train, val, test = (several_labels(part) if isinstance(part, FileImages) else None for part in parts[:3])
    assert train is not None and test is not None
    return Parts(train, val, test, parts.notes), False


def _places(name: str, entry: Entry, root: Path) -> list[Path]:
    root = root.absolute()
    return [root, root / name] + ([root.parent] if entry.home and root.name == entry.home else [])


def _find(name: str, entry: Entry, root: Path) -> tuple[Path, bool] | None:
    places = _places(name, entry, root)
    if entry.read is not None:
        for place in places:
            if not _lacking(entry, place):
                return place, True
    return next(((place, False) for place in places[:2] if is_plain(place)), None)


def _lacking(entry: Entry, place: Path) -> list[str]:
    return [names for names in entry.expects if official.first_there(place, names) is None]


def _missing(name: str, entry: Entry, root: Path) -> str:
    if entry.read is None:
        return f"{root} has not the layout train/<class>/ and val/<class>/ (or test/<class>/) of images"
    lacking = min((_lacking(entry, place) for place in _places(name, entry, root)), key=len)
    expected = some([names.replace("|", " or ") for names in lacking])
    return (
        f"{entry.title} is not in {root}, or not whole: it lacks {expected}. "
        f"Expected is the official layout, or train/<class>/ beside test/<class>/ or val/<class>/. "
        f"How to get it: {entry.how_to_get}"
    )


def _download(name: str, entry: Entry, root: Path) -> None:
    if entry.download is None:
        raise ValueError(
            f"{entry.title} cannot be downloaded by asc: {entry.how_to_get}. {_missing(name, entry, root)}"
        )
    root.mkdir(parents=True, exist_ok=True)
    try:
        entry.download(root.absolute())
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"getting {entry.title} into {root} failed ({error}). {entry.how_to_get}") from error


# --- Is it the whole? -------------------------------------------------------------------------------------


def _differences(name: str, entry: Entry, parts: Parts, is_official: bool) -> list[str]:
    """In what the copy differs from the official release."""
    notes = []
    if name != FOLDER and not is_official:
        notes.append("read from class folders, not from the official layout; its parts are those of the folders")
    if entry.classes and len(parts.train.classes) != entry.classes:
        notes.append(f"{len(parts.train.classes)} classes, officially {entry.classes}")
    if entry.counts is not None:
        notes += _count_notes(entry.counts, parts, is_official)
    for part in (parts.train, parts.test):
        empty = _empty_classes(part)
        if empty:
            notes.append(f"{part.name} shows nothing of {len(empty)} of its classes: {some(empty)}")
    return notes


def _count_notes(counts: tuple[int, int, int], parts: Parts, is_official: bool) -> list[str]:
    train, val, test = counts
    found_train, found_val = len(parts.train), 0 if parts.val is None else len(parts.val)
    if is_official:
        compared = [("training", found_train, train), ("validation", found_val, val)]
    else:
        compared = [("training and validation", found_train + found_val, train + val)]
    compared.append(("test", len(parts.test), test))
    return [
        f"{found:,} {what} images, officially {wanted:,}: results cannot be compared with those of the whole"
        for what, found, wanted in compared
        if found != wanted
    ]


def _empty_classes(part: ImageSet) -> list[str]:
    if part.labels.ndim == 2:
        shown = set((part.labels == 1).any(0).nonzero().flatten().tolist())
    else:
        shown = set(part.labels.unique().tolist())
    return [label for number, label in enumerate(part.classes) if number not in shown]
