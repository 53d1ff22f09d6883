"""What is known of every dataset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torchvision.datasets as tv
from torchvision.datasets.utils import download_and_extract_archive

from asc.data.scenes import CLASSES
from asc.tasks.classify.datasets import official
from asc.tasks.classify.datasets.folders import Parts
from asc.tasks.classify.datasets.parts import Metric

SCENES, FOLDER = "scenes", "folder"


@dataclass(frozen=True)
class Entry:
    """What is known of a dataset."""

    title: str
    """Its name in texts."""
    classes: int
    """Number of classes; 0: whatever there is."""
    metric: Metric
    """What it is judged by."""
    splits: str
    """The parts, and what the paper says of them."""
    how_to_get: str
    """Where it comes from."""
    counts: tuple[int, int, int] | None = None
    """Official numbers of images for training, validation (0: no such part) and test; None: whatever there is."""
    val_share: float = 0.2
    """Share of the training part that is validation where there is no such part; about that of BYOL's protocol."""
    home: str = ""
    """The dataset's own folder, which lies in the folder that is given; it may be given itself."""
    expects: tuple[str, ...] = ()
    """What must be there, relative to the folder given; ``|`` separates alternatives."""
    read: Callable[[Path], Parts] | None = None
    """Reads the official layout."""
    download: Callable[[Path], object] | None = None
    """Gets it into a folder; None where it cannot be downloaded."""

    @property
    def multi_label(self) -> bool:
        """Whether an image may show several classes."""
        return self.metric == "map11"


def _download_voc(root: Path) -> None:
    for part in ("train", "test"):
        tv.VOCDetection(root, "2007", part, download=True)


def _download_sun(root: Path) -> None:
    tv.SUN397(root, download=True)
    # torchvision leaves the lists out.
    address = "https://vision.princeton.edu/projects/2010/SUN/download/Partitions.zip"
    download_and_extract_archive(address, str(root / "SUN397" / "Partitions"))


def _unpack_imagenet(root: Path) -> None:
    for part in ("train", "val"):
        tv.ImageNet(root, part)


_BY_FLAG = "asc gets it with download"

DATASETS: dict[str, Entry] = {
    "imagenet": Entry(
        title="ImageNet-1k",
        classes=1000,
        metric="top1",
        splits="train; the 50,000 validation images are the test part, as in the paper; validation is a share of train",
        how_to_get="register at https://image-net.org, put ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and "
        "ILSVRC2012_devkit_t12.tar.gz into the folder and unpack them with download",
        counts=(1_281_167, 0, 50_000),
        val_share=0.01,
        expects=("train", "val"),
        read=official.read_imagenet,
        download=_unpack_imagenet,
    ),
    "food101": Entry(
        title="Food-101",
        classes=101,
        metric="top1",
        splits="official train and test; validation is a share of train",
        how_to_get=f"{_BY_FLAG}, from https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/",
        counts=(75_750, 0, 25_250),
        val_share=0.1,
        home="food-101",
        expects=("food-101/images", "food-101/meta/train.json", "food-101/meta/test.json"),
        read=official.read_food101,
        download=lambda root: tv.Food101(root, download=True),
    ),
    "cifar10": Entry(
        title="CIFAR-10",
        classes=10,
        metric="top1",
        splits="official train and test (50,000 and 10,000, as in the paper); validation is a share of train",
        how_to_get=f"{_BY_FLAG}, from https://www.cs.toronto.edu/~kriz/cifar.html (the Python version)",
        counts=(50_000, 0, 10_000),
        val_share=0.1,
        home="cifar-10-batches-py",
        expects=tuple(
            f"cifar-10-batches-py/{file}"
            for file in ("batches.meta", *official.CIFAR10_BATCHES["train"], *official.CIFAR10_BATCHES["test"])
        ),
        read=official.read_cifar10,
        download=lambda root: tv.CIFAR10(root, download=True),
    ),
    "cifar100": Entry(
        title="CIFAR-100",
        classes=100,
        metric="top1",
        splits="official train and test (50,000 and 10,000, as in the paper); validation is a share of train",
        how_to_get=f"{_BY_FLAG}, from https://www.cs.toronto.edu/~kriz/cifar.html (the Python version)",
        counts=(50_000, 0, 10_000),
        val_share=0.1,
        home="cifar-100-python",
        expects=("cifar-100-python/meta", "cifar-100-python/train", "cifar-100-python/test"),
        read=official.read_cifar100,
        download=lambda root: tv.CIFAR100(root, download=True),
    ),
    "birdsnap": Entry(
        title="Birdsnap",
        classes=500,
        metric="top1",
        splits="official test list, all else is train; validation is a share of train",
        how_to_get="unpack http://thomasberg.org/datasets/birdsnap/1.1/birdsnap.tgz and run its get_birdsnap.py",
        counts=(47_386, 0, 2_443),
        val_share=0.1,
        home="birdsnap",
        expects=(official.BIRDSNAP_IMAGES, "birdsnap/species.txt", "birdsnap/images.txt", "birdsnap/test_images.txt"),
        read=official.read_birdsnap,
    ),
    "sun397": Entry(
        title="SUN397",
        classes=397,
        metric="top1",
        splits="official partition 1; validation is a share of its training list. The paper prints three parts of "
        "19,850 images each as official, but a partition has two",
        how_to_get=f"{_BY_FLAG}, from https://vision.princeton.edu/projects/2010/SUN/ (images, and Partitions.zip)",
        counts=(19_850, 0, 19_850),
        val_share=0.2,
        home="SUN397",
        expects=(official.SUN_CLASSES, *official.SUN_LISTS),
        read=official.read_sun397,
        download=_download_sun,
    ),
    "cars": Entry(
        title="Stanford Cars",
        classes=196,
        metric="top1",
        splits="official train and test; validation is a share of train",
        how_to_get="its site is gone; get a copy of cars_train, cars_test, devkit and cars_test_annos_withlabels.mat",
        counts=(8_144, 0, 8_041),
        val_share=0.2,
        home="stanford_cars",
        expects=(
            "stanford_cars/devkit/cars_meta.mat",
            "stanford_cars/devkit/cars_train_annos.mat",
            "stanford_cars/cars_test_annos_withlabels.mat",
            "stanford_cars/cars_train",
            "stanford_cars/cars_test",
        ),
        read=official.read_cars,
    ),
    "aircraft": Entry(
        title="FGVC-Aircraft",
        classes=100,
        metric="mean_per_class",
        splits="official train, val and test; the classes are the variants",
        how_to_get=f"{_BY_FLAG}, from https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/",
        counts=(3_334, 3_333, 3_333),
        val_share=0.2,
        home="fgvc-aircraft-2013b",
        expects=(
            "fgvc-aircraft-2013b/data/images",
            "fgvc-aircraft-2013b/data/variants.txt",
            *(f"fgvc-aircraft-2013b/data/images_variant_{part}.txt" for part in ("train", "val", "test")),
        ),
        read=official.read_aircraft,
        download=lambda root: tv.FGVCAircraft(root, download=True),
    ),
    "voc2007": Entry(
        title="VOC2007",
        classes=20,
        metric="map11",
        splits="official train, val (together the paper's 5,011 images) and test; classes shown by difficult objects "
        "alone are not counted",
        how_to_get=f"{_BY_FLAG}, from http://host.robots.ox.ac.uk/pascal/VOC/voc2007/ (trainval and test)",
        counts=(2_501, 2_510, 4_952),
        val_share=0.5,
        home="VOCdevkit",
        expects=(
            "VOCdevkit/VOC2007/JPEGImages",
            "VOCdevkit/VOC2007/Annotations|VOCdevkit/VOC2007/ImageSets/Main/aeroplane_train.txt",
            *(f"VOCdevkit/VOC2007/ImageSets/Main/{part}.txt" for part in ("train", "val", "test")),
        ),
        read=official.read_voc2007,
        download=_download_voc,
    ),
    "dtd": Entry(
        title="DTD",
        classes=47,
        metric="top1",
        splits="official split 1: train, val (together the paper's 3,760 images) and test",
        how_to_get=f"{_BY_FLAG}, from https://www.robots.ox.ac.uk/~vgg/data/dtd/",
        counts=(1_880, 1_880, 1_880),
        val_share=0.5,
        home="dtd",
        expects=(
            "dtd/images|dtd/dtd/images",
            *(f"dtd/labels/{part}1.txt|dtd/dtd/labels/{part}1.txt" for part in ("train", "val", "test")),
        ),
        read=official.read_dtd,
        download=lambda root: tv.DTD(root, download=True),
    ),
    "pets": Entry(
        title="Oxford-IIIT Pet",
        classes=37,
        metric="mean_per_class",
        splits="official trainval and test; validation is a share of trainval",
        how_to_get=f"{_BY_FLAG}, from https://www.robots.ox.ac.uk/~vgg/data/pets/",
        counts=(3_680, 0, 3_669),
        val_share=0.2,
        home="oxford-iiit-pet",
        expects=(
            "oxford-iiit-pet/images",
            *(f"oxford-iiit-pet/annotations/{part}.txt" for part in ("trainval", "test")),
        ),
        read=official.read_pets,
        download=lambda root: tv.OxfordIIITPet(root, download=True),
    ),
    "caltech101": Entry(
        title="Caltech-101",
        classes=102,
        metric="mean_per_class",
        splits="30 images a class for training, the rest for test, chosen at random once and for all; the 101 "
        "categories and the background class, as in the paper and in BYOL; validation is a share of train",
        how_to_get=f"{_BY_FLAG}, from https://data.caltech.edu/records/mzrjq-6wc02",
        counts=(3_060, 0, 6_084),
        val_share=1 / 6,
        home="caltech101",
        expects=(official.CALTECH_IMAGES,),
        read=official.read_caltech101,
        download=lambda root: tv.Caltech101(root, download=True),
    ),
    "flowers102": Entry(
        title="Oxford Flowers-102",
        classes=102,
        metric="mean_per_class",
        splits="official train, val (together the paper's 2,040 images) and test",
        how_to_get=f"{_BY_FLAG}, from https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",
        counts=(1_020, 1_020, 6_149),
        val_share=0.5,
        home="flowers-102",
        expects=("flowers-102/jpg", "flowers-102/setid.mat", "flowers-102/imagelabels.mat"),
        read=official.read_flowers102,
        download=lambda root: tv.Flowers102(root, download=True),
    ),
    SCENES: Entry(
        title="embedded scenes",
        classes=len(CLASSES),
        metric="top1",
        splits="scenes drawn by asc itself; textures and hues of the test part are never shown in the others",
        how_to_get="they need no data",
    ),
    FOLDER: Entry(
        title="folder of class folders",
        classes=0,
        metric="top1",
        splits="train/<class>/, and val/<class>/ or test/<class>/ or both; where only one of the two is there it is "
        "the test part, and validation is a share of train",
        how_to_get="sort images into class folders",
    ),
}
