"""Small copies of the official layouts of datasets. Every image has the one colour of its class."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from scipy.io import savemat

from asc.data.voc import VOC_CLASSES

_COLOURS = [(220, 30, 30), (30, 220, 30), (30, 30, 220), (220, 220, 30)]


class Copy(NamedTuple):
    """A layout, and what it must be read as."""

    write: Callable[[Path], None]
    classes: list[str]
    """The class of number k has the k-th colour."""
    train: int
    val: int | None
    """None where there is no such part."""
    test: int


def class_of(image: Image.Image) -> int:
    """The class that the colour of an image tells."""
    pixel = np.asarray(image.convert("RGB"), dtype=float).mean((0, 1))
    return int(np.argmin([np.abs(pixel - colour).sum() for colour in _COLOURS]))


def draw(file: Path, label: int, size: tuple[int, int] = (12, 10)) -> None:
    """An image of a class."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, _COLOURS[label]).save(file)


def write_text(file: Path, *lines: str) -> None:
    """A list of lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines))


def plain(root: Path, counts: dict[str, int], classes: tuple[str, ...] = ("ant", "bee")) -> None:
    """Class folders: ``counts`` images of every class in each part."""
    for part, count in counts.items():
        for label, name in enumerate(classes):
            for number in range(count):
                draw(root / part / name / f"{part}_{name}{number}.png", label)


def imagenet(root: Path) -> None:
    plain(root, {"train": 5, "val": 2}, ("n01440764", "n01443537"))


def food101(root: Path) -> None:
    for part, count in (("train", 5), ("test", 2)):
        listed = {name: [f"{name}/{part}{i}" for i in range(count)] for name in ("waffles", "apple_pie")}
        write_text(root / f"food-101/meta/{part}.json", json.dumps(listed))
        for name, stems in listed.items():
            for stem in stems:
                draw(root / f"food-101/images/{stem}.jpg", int(name == "waffles"))


def _batch(file: Path, labels: list[int], key: str) -> None:
    # As the official files are made: rows of 1024 red, 1024 green and 1024 blue bytes, pickled by an old numpy.
    rows = [np.repeat(np.array(_COLOURS[label], np.uint8), 1024) for label in labels]
    file.parent.mkdir(parents=True, exist_ok=True)
    pickled = pickle.dumps({"data": np.stack(rows), key: labels}, protocol=2)
    file.write_bytes(pickled.replace(b"numpy._core", b"numpy.core"))


def cifar10(root: Path) -> None:
    folder = root / "cifar-10-batches-py"
    for number in range(1, 6):
        _batch(folder / f"data_batch_{number}", [number % 3, 0, 1, 2], "labels")
    _batch(folder / "test_batch", [2, 1, 0], "labels")
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": ["airplane", "bird", "cat"]}, protocol=2))


def cifar100(root: Path) -> None:
    folder = root / "cifar-100-python"
    _batch(folder / "train", [0, 1, 2] * 4, "fine_labels")
    _batch(folder / "test", [2, 0, 1, 1], "fine_labels")
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": ["apple", "baby", "bear"]}, protocol=2))


def birdsnap(root: Path) -> None:
    package = root / "birdsnap"
    species = [("1", "Acadian_Flycatcher"), ("2", "Acorn_Woodpecker")]
    write_text(
        package / "species.txt",
        "id\tcommon\tscientific\tdir",
        *(f"{number}\t{name.replace('_', ' ')}\t-\t{name}" for number, name in species),
    )
    paths = [(f"{name}/{i}.jpg", number) for number, name in species for i in range(6)]
    write_text(
        package / "images.txt",
        "url\tmd5\tpath\tspecies_id",
        *(f"http://x\t0\t{path}\t{number}" for path, number in paths),
    )
    write_text(package / "test_images.txt", "path", "Acadian_Flycatcher/5.jpg", "Acorn_Woodpecker/0.jpg")
    for path, number in paths:
        draw(package / "images" / path, int(number) - 1)


def sun397(root: Path) -> None:
    # Not in alphabetical order: the number of a class is that of its line.
    classes = ["/b/bow_window/indoor", "/a/abbey"]
    write_text(root / "SUN397/ClassName.txt", *classes)
    for split, count in (("Training", 5), ("Testing", 3)):
        images = [
            (f"{name}/sun_{split.lower()}{i}.jpg", label) for label, name in enumerate(classes) for i in range(count)
        ]
        write_text(root / f"SUN397/Partitions/{split}_01.txt", *(image for image, _ in images))
        for image, label in images:
            draw(root / "SUN397" / image[1:], label)


def cars(root: Path) -> None:
    folder = root / "stanford_cars"
    (folder / "devkit").mkdir(parents=True)
    names = np.array(["AM General Hummer SUV 2000", "Acura RL Sedan 2012"], dtype=object)
    savemat(folder / "devkit/cars_meta.mat", {"class_names": names})
    kind = [("class", "O"), ("fname", "O")]
    for part, count, file in (
        ("train", 10, "devkit/cars_train_annos.mat"),
        ("test", 4, "cars_test_annos_withlabels.mat"),
    ):
        rows = [(i % 2 + 1, f"{i:05d}.jpg") for i in range(count)]
        savemat(folder / file, {"annotations": np.array(rows, dtype=kind)})
        for label, image in rows:
            draw(folder / f"cars_{part}" / image, label - 1)


def aircraft(root: Path) -> None:
    data = root / "fgvc-aircraft-2013b/data"
    variants = ["707-320", "DC-9-30", "Gulfstream IV"]
    write_text(data / "variants.txt", *variants)
    for start, part in enumerate(("train", "val", "test")):
        images = [(f"{start}{i:06d}", (i + start) % 3) for i in range(6 - start)]
        write_text(data / f"images_variant_{part}.txt", *(f"{image} {variants[label]}" for image, label in images))
        for image, label in images:
            draw(data / f"images/{image}.jpg", label)


def dtd(root: Path) -> None:
    for part, count in (("train", 3), ("val", 2), ("test", 4)):
        images = [(name, f"{name}/{name}_{part}{i}.jpg") for name in ("banded", "zigzagged") for i in range(count)]
        write_text(root / f"dtd/labels/{part}1.txt", *(image for _, image in images))
        write_text(root / f"dtd/labels/{part}2.txt", "banded/of_another_split.jpg")
        for name, image in images:
            draw(root / "dtd/images" / image, int(name == "zigzagged"))


def pets(
    root: Path, train: int = 10, test: int = 6, breeds: tuple[str, ...] = ("Abyssinian", "american_bulldog")
) -> None:
    folder = root / "oxford-iiit-pet"
    written: dict[int, bytes] = {}
    (folder / "images").mkdir(parents=True)
    for part, count in (("trainval", train), ("test", test)):
        images = [(f"{breeds[i % len(breeds)]}_{part}{i}", i % len(breeds)) for i in range(count)]
        write_text(folder / f"annotations/{part}.txt", *(f"{image} {label + 1} 1 1" for image, label in images))
        for image, label in images:
            file = folder / f"images/{image}.jpg"
            if label not in written:
                draw(file, label % len(_COLOURS))
                written[label] = file.read_bytes()
            file.write_bytes(written[label])


def caltech101(root: Path) -> None:
    for label, (name, count) in enumerate((("BACKGROUND_Google", 34), ("accordion", 32), ("yin_yang", 33))):
        for number in range(1, count + 1):
            draw(root / f"caltech101/101_ObjectCategories/{name}/image_{number:04d}.jpg", label)


def flowers102(root: Path) -> None:
    folder = root / "flowers-102"
    folder.mkdir(parents=True)
    labels = [number % 3 for number in range(12)]
    savemat(folder / "imagelabels.mat", {"labels": np.array(labels) + 1})
    savemat(folder / "setid.mat", {"trnid": [1, 3, 5], "valid": [2, 4, 6], "tstid": [12, 7, 8, 9, 10, 11]})
    for number, label in enumerate(labels, 1):
        draw(folder / f"jpg/image_{number:05d}.jpg", label)


VOC_OBJECTS: dict[str, list[tuple[str, bool]]] = {
    "000001": [("dog", False), ("person", False), ("person", True)],
    "000002": [("aeroplane", False)],
    "000003": [("cat", True), ("cat", True), ("dog", False)],
    "000004": [("tvmonitor", True)],
}
VOC_PARTS = {"train": ["000002"], "val": ["000001"], "test": ["000003", "000004"]}


def voc2007(root: Path, class_lists: bool = False) -> None:
    """By XML, or by the lists of every class alone."""
    voc = root / "VOCdevkit/VOC2007"
    for part, names in VOC_PARTS.items():
        write_text(voc / f"ImageSets/Main/{part}.txt", *names)
        for name in names:
            draw(voc / f"JPEGImages/{name}.jpg", 0)
            if not class_lists:
                write_text(voc / f"Annotations/{name}.xml", _annotation(VOC_OBJECTS[name]))
        for label in VOC_CLASSES if class_lists else []:
            rows = (f"{name} {_mark(VOC_OBJECTS[name], label):2d}" for name in names)
            write_text(voc / f"ImageSets/Main/{label}_{part}.txt", *rows)


def _annotation(objects: list[tuple[str, bool]]) -> str:
    things = "".join(
        f"<object><name>{name}</name><difficult>{int(difficult)}</difficult><part><name>head</name></part></object>"
        for name, difficult in objects
    )
    return f"<annotation><folder>VOC2007</folder>{things}</annotation>"


def _mark(objects: list[tuple[str, bool]], label: str) -> int:
    difficult = [hard for name, hard in objects if name == label]
    if not difficult:
        return -1
    return 0 if all(difficult) else 1


COPIES = {
    "imagenet": Copy(imagenet, ["n01440764", "n01443537"], 10, None, 4),
    "food101": Copy(food101, ["apple_pie", "waffles"], 10, None, 4),
    "cifar10": Copy(cifar10, ["airplane", "bird", "cat"], 20, None, 3),
    "cifar100": Copy(cifar100, ["apple", "baby", "bear"], 12, None, 4),
    "birdsnap": Copy(birdsnap, ["Acadian_Flycatcher", "Acorn_Woodpecker"], 10, None, 2),
    "sun397": Copy(sun397, ["bow_window/indoor", "abbey"], 10, None, 6),
    "cars": Copy(cars, ["AM General Hummer SUV 2000", "Acura RL Sedan 2012"], 10, None, 4),
    "aircraft": Copy(aircraft, ["707-320", "DC-9-30", "Gulfstream IV"], 6, 5, 4),
    "dtd": Copy(dtd, ["banded", "zigzagged"], 6, 4, 8),
    "pets": Copy(pets, ["Abyssinian", "American Bulldog"], 10, None, 6),
    "caltech101": Copy(caltech101, ["BACKGROUND_Google", "accordion", "yin_yang"], 90, None, 9),
    "flowers102": Copy(flowers102, [], 3, 3, 6),
}
"""All but VOC2007, whose images show several classes."""
