"""Readers of the official layouts, one for each dataset.

A reader is given the folder that holds the dataset's own folder (``food-101``, ``VOCdevkit``, ...), after it was
checked that the lists are there. torchvision parses where its class takes the layout as it is handed out.
"""

from __future__ import annotations

import csv
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
import torchvision.datasets as tv
from numpy.typing import NDArray

from asc.data.voc import VOC_CLASSES
from asc.tasks.classify.datasets.folders import Parts, read_parts, some, walk_classes
from asc.tasks.classify.datasets.parts import ArrayImages, FileImages

# Of every class of Caltech-101; the rest is the test part.
_CALTECH_TRAIN = 30


def first_there(root: Path, alternatives: str) -> Path | None:
    """The first of several paths, separated by ``|``, that is there."""
    return next((root / name for name in alternatives.split("|") if (root / name).exists()), None)


def _place(root: Path, alternatives: str) -> Path:
    found = first_there(root, alternatives)
    assert found is not None  # a reader runs only where all it expects is there
    return found


def _listed(name: str, root: Path, files: Sequence[str | Path], labels: Any, classes: Sequence[str]) -> FileImages:
    """A part that a list names, all of whose images must be there."""
    part = _part(name, root, files, labels, classes)
    missing = [file for file in part.files if not (root / file).is_file()]
    if missing:
        raise ValueError(
            f"{root}: {len(missing)} of the {len(part):,} images that the lists of {name} name are not there: "
            f"{some(missing)}; unpack or get them again"
        )
    return part


def _part(name: str, root: Path, files: Sequence[str | Path], labels: Any, classes: Sequence[str]) -> FileImages:
    relative = [Path(file).relative_to(root).as_posix() for file in files]
    labels = torch.as_tensor(labels, dtype=torch.int64)
    if not relative:
        raise ValueError(f"{root}: the list of {name} names no image")
    if labels.ndim == 1 and not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
        raise ValueError(f"{root}: the list of {name} has labels beyond its {len(classes)} classes")
    return FileImages(name, list(classes), labels, root, relative, as_stored=True)


def _parsed(read: Callable[[], Any], *files: Path) -> Any:
    """What ``read`` makes of one or several lists, or a ValueError that names them."""
    try:
        return read()
    except Exception as error:  # parsers raise all kinds for a file that is not what it should be
        names = " or ".join(map(str, files))
        raise ValueError(f"{names}: cannot be read as the official file ({error!r}); get it again") from error


def _lines(file: Path) -> list[str]:
    text: str = _parsed(lambda: file.read_text(encoding="utf-8"), file)
    return [line.strip() for line in text.splitlines() if line.strip()]


def _numbers(file: Path, names: Iterable[str], classes: Sequence[str]) -> list[int]:
    """Numbers of the classes that a list names."""
    number_of = {label: number for number, label in enumerate(classes)}
    names = list(names)
    unknown = sorted(set(names) - number_of.keys())
    if unknown:
        raise ValueError(f"{file}: names classes that the dataset does not have: {some(unknown)}")
    return [number_of[name] for name in names]


# --- By torchvision's classes -----------------------------------------------------------------------------


def _torchvision(
    name: str,
    root: Path,
    lists: Mapping[str, Sequence[Path]],
    make: Callable[[str], tuple[Sequence[Any], Any, Sequence[str]]],
) -> list[FileImages]:
    """Parts for the names in ``lists``; ``make`` gives files, labels and classes of one."""
    parts = []
    for split, read in lists.items():
        files, labels, classes = _parsed(partial(make, split), *read)
        parts.append(_listed(f"{name}/{split}", root, files, labels, classes))
    if any(part.classes != parts[0].classes for part in parts):
        names = ", ".join(str(file) for read in lists.values() for file in read)
        raise ValueError(f"the lists {names} do not name the same classes")
    return parts


def read_food101(root: Path) -> Parts:
    """Food-101: ``food-101/meta/{train,test}.json``."""

    def make(split: str) -> tuple[Sequence[Any], Any, Sequence[str]]:
        opened = tv.Food101(root, split)
        return opened._image_files, opened._labels, opened.classes

    meta = root / "food-101" / "meta"
    train, test = _torchvision("food101", root, {part: [meta / f"{part}.json"] for part in ("train", "test")}, make)
    return Parts(train, None, test, [])


def read_aircraft(root: Path) -> Parts:
    """FGVC-Aircraft, the 100 variants: ``fgvc-aircraft-2013b/data/images_variant_*.txt``."""

    def make(split: str) -> tuple[Sequence[Any], Any, Sequence[str]]:
        opened = tv.FGVCAircraft(root, split)
        return opened._image_files, opened._labels, opened.classes

    data = root / "fgvc-aircraft-2013b" / "data"
    variants = data / "variants.txt"
    lists = {part: [data / f"images_variant_{part}.txt", variants] for part in ("train", "val", "test")}
    train, val, test = _torchvision("aircraft", root, lists, make)
    return Parts(train, val, test, [])


def read_pets(root: Path) -> Parts:
    """Oxford-IIIT Pet, the 37 breeds: ``oxford-iiit-pet/annotations/{trainval,test}.txt``."""

    def make(split: str) -> tuple[Sequence[Any], Any, Sequence[str]]:
        opened = tv.OxfordIIITPet(root, split)
        return opened._images, opened._labels, opened.classes

    lists = {part: [root / "oxford-iiit-pet" / "annotations" / f"{part}.txt"] for part in ("trainval", "test")}
    train, test = _torchvision("pets", root, lists, make)
    train.name = "pets/train"
    return Parts(train, None, test, [])


def read_cars(root: Path) -> Parts:
    """Stanford Cars: ``stanford_cars/devkit`` and ``stanford_cars/cars_test_annos_withlabels.mat``."""

    def make(split: str) -> tuple[Sequence[Any], Any, Sequence[str]]:
        opened = tv.StanfordCars(root, split)
        return [file for file, _ in opened._samples], [int(label) for _, label in opened._samples], opened.classes

    cars = root / "stanford_cars"
    meta = cars / "devkit" / "cars_meta.mat"
    lists = {
        "train": [cars / "devkit" / "cars_train_annos.mat", meta],
        "test": [cars / "cars_test_annos_withlabels.mat", meta],
    }
    train, test = _torchvision("cars", root, lists, make)
    return Parts(train, None, test, [])


class _Flowers102(tv.Flowers102):  # type: ignore[misc]
    def _check_integrity(self) -> bool:
        # torchvision compares checksums and does not say what it misses; a copy that differs is told by its counts.
        return True


def read_flowers102(root: Path) -> Parts:
    """Oxford Flowers: ``flowers-102/{setid,imagelabels}.mat``."""

    def make(split: str) -> tuple[Sequence[Any], Any, Sequence[str]]:
        opened = _Flowers102(root, split)
        return opened._image_files, opened._labels, opened.classes

    files = [root / "flowers-102" / name for name in ("setid.mat", "imagelabels.mat")]
    lists = dict.fromkeys(("train", "val", "test"), files)
    train, val, test = _torchvision("flowers102", root, lists, make)
    return Parts(train, val, test, [])


# --- Own readers ------------------------------------------------------------------------------------------


def read_imagenet(root: Path) -> Parts:
    """ImageNet-1k: ``train/<wnid>`` and ``val/<wnid>``; the validation images are the test part, as in the paper."""
    return read_parts("imagenet", root, None, "val", as_stored=True)


class _Arrays(pickle.Unpickler):
    """Reads pickles of numpy arrays and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """The few names that arrays are made of."""
        if (module, name) == ("_codecs", "encode") or (
            module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype", "scalar")
        ):
            # The files were written by a numpy whose inner modules had other names.
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a file of images")


def _unpickled(file: Path) -> Any:
    with file.open("rb") as stream:
        return _Arrays(stream, encoding="latin1").load()


def _batch(file: Path, label_key: str, classes: int) -> tuple[NDArray[np.uint8], list[int]]:
    entry = _unpickled(file)
    pixels_N3HW = np.asarray(entry["data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
    labels = [int(label) for label in entry[label_key]]
    if len(labels) != len(pixels_N3HW) or any(not 0 <= label < classes for label in labels):
        raise ValueError(f"{len(pixels_N3HW)} images, {len(labels)} labels for {classes} classes")
    return pixels_N3HW.transpose(0, 2, 3, 1), labels


def _cifar(
    name: str, root: Path, folder: str, batches: Mapping[str, Sequence[str]], meta: str, keys: tuple[str, str]
) -> Parts:
    # Not by torchvision: it refuses whatever has another checksum, and unpickles without a guard.
    label_key, names_key = keys
    meta_file = root / folder / meta
    classes = _parsed(lambda: [str(label) for label in _unpickled(meta_file)[names_key]], meta_file)

    def part(split: str) -> ArrayImages:
        files = [root / folder / batch for batch in batches[split]]
        read = [_parsed(partial(_batch, file, label_key, len(classes)), file) for file in files]
        images_NHW3 = np.concatenate([images for images, _ in read])
        labels = torch.tensor([label for _, labels in read for label in labels], dtype=torch.int64)
        return ArrayImages(f"{name}/{split}", classes, labels, images_NHW3, f"{folder}/{split}", np.arange(len(labels)))

    return Parts(part("train"), None, part("test"), [])


CIFAR10_BATCHES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
CIFAR100_BATCHES = {"train": ["train"], "test": ["test"]}


def read_cifar10(root: Path) -> Parts:
    """CIFAR-10, the Python version: ``cifar-10-batches-py``."""
    return _cifar("cifar10", root, "cifar-10-batches-py", CIFAR10_BATCHES, "batches.meta", ("labels", "label_names"))


def read_cifar100(root: Path) -> Parts:
    """CIFAR-100, the Python version, the 100 fine labels: ``cifar-100-python``."""
    return _cifar("cifar100", root, "cifar-100-python", CIFAR100_BATCHES, "meta", ("fine_labels", "fine_label_names"))


DTD_LABELS = "dtd/labels|dtd/dtd/labels"


def read_dtd(root: Path) -> Parts:
    """DTD, the first of its ten splits: ``dtd/labels/{train,val,test}1.txt``."""
    labels = _place(root, DTD_LABELS)
    names = {part: _lines(labels / f"{part}1.txt") for part in ("train", "val", "test")}
    classes = sorted({name.split("/")[0] for name in names["train"]})

    def part(split: str) -> FileImages:
        numbers = _numbers(labels / f"{split}1.txt", (name.split("/")[0] for name in names[split]), classes)
        files = [labels.parent / "images" / name for name in names[split]]
        return _listed(f"dtd/{split}", labels.parent, files, numbers, classes)

    return Parts(part("train"), part("val"), part("test"), [])


SUN_LISTS = tuple(
    "|".join(f"{folder}/{split}_01.txt" for folder in ("SUN397/Partitions", "Partitions", "SUN397"))
    for split in ("Training", "Testing")
)
SUN_CLASSES = "SUN397/ClassName.txt|SUN397/Partitions/ClassName.txt|Partitions/ClassName.txt"


def read_sun397(root: Path) -> Parts:
    """SUN397, the first of its ten partitions: ``Partitions/{Training,Testing}_01.txt``."""
    classes = _lines(_place(root, SUN_CLASSES))

    def part(split: str, alternatives: str) -> FileImages:
        file = _place(root, alternatives)
        names = _lines(file)
        numbers = _numbers(file, (name.rsplit("/", 1)[0] for name in names), classes)
        files = [root / "SUN397" / name.lstrip("/") for name in names]
        # "/a/abbey" is called "abbey", "/b/bow_window/indoor" is called "bow_window/indoor".
        return _listed(f"sun397/{split}", root, files, numbers, [label[3:] for label in classes])

    return Parts(part("train", SUN_LISTS[0]), None, part("test", SUN_LISTS[1]), [])


BIRDSNAP_IMAGES = "birdsnap/images|birdsnap/download/images"


def read_birdsnap(root: Path) -> Parts:
    """Birdsnap: ``species.txt``, ``images.txt`` and ``test_images.txt``.

    The official package holds addresses, many of them dead by now; images that are not there are told, not demanded.
    """
    package, images = root / "birdsnap", _place(root, BIRDSNAP_IMAGES)
    species = _table(package / "species.txt", "id", "dir")
    listed = _table(package / "images.txt", "path", "species_id")
    test = set(_lines(package / "test_images.txt")) - {"path"}
    strange = sorted(test - {path for path, _ in listed})
    if strange:
        raise ValueError(f"{package / 'test_images.txt'}: names images that images.txt does not: {some(strange)}")
    labels = _numbers(package / "images.txt", (number for _, number in listed), [number for number, _ in species])
    label_of = dict(zip((path for path, _ in listed), labels, strict=True))
    gone = [path for path in label_of if not (images / path).is_file()]
    here = sorted(label_of.keys() - set(gone))

    def part(split: str, paths: list[str]) -> FileImages:
        files, labels = [images / path for path in paths], [label_of[path] for path in paths]
        return _part(f"birdsnap/{split}", root, files, labels, [name for _, name in species])

    notes = [f"{len(gone):,} of the {len(label_of):,} listed images are not there: {some(gone)}"] if gone else []
    train = [path for path in here if path not in test]
    return Parts(part("train", train), None, part("test", [path for path in here if path in test]), notes)


def _table(file: Path, *columns: str) -> list[tuple[str, ...]]:
    def read() -> list[tuple[str, ...]]:
        with file.open(newline="", encoding="utf-8") as stream:
            rows = csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)
            return [tuple(row[column] for column in columns) for row in rows]

    table: list[tuple[str, ...]] = _parsed(read, file)
    return table


CALTECH_IMAGES = "caltech101/101_ObjectCategories|caltech-101/101_ObjectCategories|101_ObjectCategories"


def read_caltech101(root: Path) -> Parts:
    """Caltech-101 with its background class: 30 images a class to learn from, all others are the test part.

    There is no official split. The choice is random and always the same, so that results can be compared.
    """
    folder = _place(root, CALTECH_IMAGES)
    walked = walk_classes(folder.parent, folder.name)
    classes = sorted(set(walked.classes))
    labels = _numbers(folder, walked.classes, classes)
    whole = _part("caltech101", folder.parent, [folder.parent / file for file in walked.files], labels, classes)
    generator = np.random.default_rng(0)
    train = np.concatenate(
        [
            generator.permutation(np.flatnonzero(whole.labels.numpy() == number))[:_CALTECH_TRAIN]
            for number in range(len(classes))
        ]
    )
    test = np.setdiff1d(np.arange(len(whole)), train)
    if not len(test):
        raise ValueError(f"{folder}: no class has more than {_CALTECH_TRAIN} images, so none is left for the test part")
    return Parts(
        whole.take("caltech101/train", np.sort(train)), None, whole.take("caltech101/test", test), walked.notes
    )


# --- VOC2007 ----------------------------------------------------------------------------------------------


def read_voc2007(root: Path) -> Parts:
    """VOC2007: the lists of ``VOCdevkit/VOC2007/ImageSets/Main``; labels by its lists of classes or by the XML."""
    voc = root / "VOCdevkit" / "VOC2007"
    parts = []
    for split in ("train", "val", "test"):
        names = _lines(voc / "ImageSets" / "Main" / f"{split}.txt")
        files = [voc / "JPEGImages" / f"{name}.jpg" for name in names]
        parts.append(_listed(f"voc2007/{split}", root, files, _voc_labels(voc, split, names), VOC_CLASSES))
    return Parts(parts[0], parts[1], parts[2], [])


def _voc_labels(voc: Path, split: str, names: Sequence[str]) -> list[list[int]]:
    lists = [voc / "ImageSets" / "Main" / f"{label}_{split}.txt" for label in VOC_CLASSES]
    if all(file.is_file() for file in lists):
        columns = [_voc_list(file, names) for file in lists]
        return [list(row) for row in zip(*columns, strict=True)]
    return [_voc_objects(voc / "Annotations" / f"{name}.xml") for name in names]


def _voc_list(file: Path, names: Sequence[str]) -> list[int]:
    # In these lists 1 is shown, -1 is not shown, 0 is shown by difficult objects alone.
    meaning = {"1": 1, "-1": 0, "0": -1}
    said = _parsed(lambda: {name: meaning[mark] for name, mark in map(str.split, _lines(file))}, file)
    missing = [name for name in names if name not in said]
    if missing:
        raise ValueError(f"{file}: says nothing of {some(missing)}; get it again")
    return [said[name] for name in names]


def _voc_objects(file: Path) -> list[int]:
    def read() -> list[int]:
        labels = [0] * len(VOC_CLASSES)
        for thing in ElementTree.parse(file).getroot().iter("object"):
            number = VOC_CLASSES.index(thing.findtext("name", ""))
            if (thing.findtext("difficult") or "0").strip() != "1":
                labels[number] = 1
            elif labels[number] == 0:
                labels[number] = -1
        return labels

    labels: list[int] = _parsed(read, file)
    return labels
