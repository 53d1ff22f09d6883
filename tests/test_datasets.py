"""Every dataset from a small copy of its official layout, from broken copies, and from plain class folders."""

import hashlib
import json
import pickle
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import official_copies as copies
import pytest
import torch
import torchvision.datasets as tv
import videos
from PIL import Image
from pretrain_runs import tiny

import asc
from asc.data.scenes import Scene, SceneConfig
from asc.data.shards import ShardWriter, write_index
from asc.data.voc import VOC_CLASSES
from asc.pretrain.run import pretrain
from asc.tasks.classify.datasets import DATASETS, Dataset, ImageSet, open_dataset, overlap
from asc.tasks.classify.run import KnnConfig, evaluate

LISTED = [name for name in copies.COPIES if name not in ("imagenet", "cifar10", "cifar100", "birdsnap", "caltech101")]


def shown_as_labelled(part: ImageSet) -> bool:
    return all(copies.class_of(part.image(i)) == int(part.labels[i]) for i in range(len(part)))


def sources(*parts: ImageSet) -> list[str]:
    return [part.source(i) for part in parts for i in range(len(part))]


# --- Official layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", copies.COPIES)
def test_an_official_layout_has_its_classes_parts_and_images(name: str, tmp_path: Path) -> None:
    copy = copies.COPIES[name]
    copy.write(tmp_path)
    dataset = open_dataset(name, tmp_path)
    if name == "flowers102":
        assert len(dataset.train.classes) == 102 and dataset.train.classes[:2] == [
            "pink primrose",
            "hard-leaved pocket orchid",
        ]
    else:
        assert dataset.train.classes == copy.classes
    if copy.val is None:
        assert len(dataset.train) + len(dataset.val) == copy.train and len(dataset.val) > 0
    else:
        assert (len(dataset.train), len(dataset.val)) == (copy.train, copy.val)
    assert len(dataset.test) == copy.test
    assert [part.name for part in (dataset.train, dataset.val, dataset.test)] == [
        f"{name}/{part}" for part in ("train", "val", "test")
    ]
    for part in (dataset.train, dataset.val, dataset.test, dataset.trainval):
        assert part.labels.shape == (len(part),) and part.labels.dtype == torch.int64
        assert shown_as_labelled(part)
    everything = sources(dataset.train, dataset.val, dataset.test)
    assert len(set(everything)) == len(everything)
    assert sorted(sources(dataset.trainval)) == sorted(sources(dataset.train, dataset.val))
    official = DATASETS[name].counts
    assert official is not None and any(f"officially {official[2]:,}" in note for note in dataset.notes)


def test_a_known_image_is_in_the_part_and_class_its_list_says(tmp_path: Path) -> None:
    for name in ("sun397", "aircraft", "birdsnap"):
        copies.COPIES[name].write(tmp_path)
    sun = open_dataset("sun397", tmp_path).test
    place = sources(sun).index(str(tmp_path / "SUN397/a/abbey/sun_testing2.jpg"))
    assert sun.classes[int(sun.labels[place])] == "abbey"
    planes = open_dataset("aircraft", tmp_path).val
    place = sources(planes).index(str(tmp_path / "fgvc-aircraft-2013b/data/images/1000001.jpg"))
    assert planes.classes[int(planes.labels[place])] == "Gulfstream IV"
    birds = open_dataset("birdsnap", tmp_path).test
    assert sources(birds) == [
        str(tmp_path / "birdsnap/images" / file) for file in ("Acadian_Flycatcher/5.jpg", "Acorn_Woodpecker/0.jpg")
    ]


@pytest.mark.parametrize("class_lists", [False, True], ids=["xml", "lists"])
def test_voc_has_several_labels_an_image_and_difficult_ones_are_not_counted(class_lists: bool, tmp_path: Path) -> None:
    copies.voc2007(tmp_path, class_lists)
    dataset = open_dataset("voc2007", tmp_path)
    assert dataset.multi_label and dataset.metric == "map11" and dataset.train.classes == list(VOC_CLASSES)
    assert (len(dataset.train), len(dataset.val), len(dataset.test)) == (1, 1, 2)

    def said(part: ImageSet, index: int) -> dict[str, int]:
        row = part.labels[index].tolist()
        return {name: value for name, value in zip(part.classes, row, strict=True) if value}

    assert said(dataset.train, 0) == {"aeroplane": 1}
    assert said(dataset.val, 0) == {"dog": 1, "person": 1}
    assert said(dataset.test, 0) == {"cat": -1, "dog": 1}
    assert said(dataset.test, 1) == {"tvmonitor": -1}
    assert dataset.trainval.labels.shape == (2, 20)


def test_caltech_learns_from_thirty_images_a_class_whatever_the_seed(tmp_path: Path) -> None:
    copies.caltech101(tmp_path)
    first, second = (open_dataset("caltech101", tmp_path, seed=seed) for seed in (0, 1))
    assert Counter(first.trainval.labels.tolist()) == {0: 30, 1: 30, 2: 30}
    assert Counter(first.val.labels.tolist()) == {0: 5, 1: 5, 2: 5}
    assert sources(first.test) == sources(second.test) and sources(first.val) != sources(second.val)
    reference = tv.Caltech101(tmp_path)
    assert len(first.trainval) + len(first.test) == len(reference) + 34  # torchvision leaves the background out


def test_dtd_is_read_where_torchvision_puts_it(tmp_path: Path) -> None:
    copies.dtd(tmp_path / "dtd")
    ours, theirs = open_dataset("dtd", tmp_path).val, tv.DTD(tmp_path, "val")
    assert sources(ours) == [str(file) for file in theirs._image_files]
    assert ours.labels.tolist() == theirs._labels and ours.classes == theirs.classes


def test_the_whole_official_dataset_has_no_notes(tmp_path: Path) -> None:
    copies.pets(tmp_path, 3680, 3669, tuple(f"breed_{number:02d}" for number in range(37)))
    assert open_dataset("pets", tmp_path).notes == []


def test_every_entry_tells_its_parts_and_where_to_get_it() -> None:
    assert list(DATASETS)[-2:] == ["scenes", "folder"] and len(DATASETS) == 15
    per_class = {name for name, entry in DATASETS.items() if entry.metric == "mean_per_class"}
    assert per_class == {"aircraft", "pets", "caltech101", "flowers102"}
    for entry in DATASETS.values():
        assert entry.splits and entry.how_to_get and 0 < entry.val_share < 1


# --- Where it lies ----------------------------------------------------------------------------------------


def test_the_folder_may_be_the_datasets_own_or_hold_one_of_its_name(tmp_path: Path) -> None:
    copies.food101(tmp_path / "all" / "food101")
    found = [open_dataset("food101", tmp_path / place) for place in ("all", "all/food101", "all/food101/food-101")]
    assert len({dataset.fingerprint() for dataset in found}) == 1


def test_a_fingerprint_is_the_same_whichever_of_its_folders_is_given(tmp_path: Path) -> None:
    copies.caltech101(tmp_path)
    copies.dtd(tmp_path / "a")
    copies.dtd(tmp_path / "b" / "dtd")
    caltech = [open_dataset("caltech101", tmp_path / place) for place in ("", "caltech101")]
    textures = [open_dataset("dtd", tmp_path / place) for place in ("a", "a/dtd", "b", "b/dtd")]
    for found in (caltech, textures):
        assert len({dataset.fingerprint() for dataset in found}) == 1


def test_plain_folders_do_for_any_dataset(tmp_path: Path) -> None:
    copies.plain(tmp_path, {"train": 4, "val": 2, "test": 3})
    dataset = open_dataset("food101", tmp_path)
    assert [len(part) for part in (dataset.train, dataset.val, dataset.test)] == [8, 4, 6]
    assert shown_as_labelled(dataset.test) and dataset.metric == "top1"
    assert any("read from class folders" in note for note in dataset.notes)
    assert any("2 classes, officially 101" in note for note in dataset.notes)
    assert any("12 training and validation images, officially 75,750" in note for note in dataset.notes)


def test_the_official_layout_comes_before_plain_folders(tmp_path: Path) -> None:
    copies.food101(tmp_path)
    copies.plain(tmp_path, {"train": 4, "test": 3})
    assert open_dataset("food101", tmp_path).train.classes == ["apple_pie", "waffles"]


def test_in_plain_folders_an_image_of_several_classes_lies_in_each(tmp_path: Path) -> None:
    copies.plain(tmp_path, {"train": 4, "test": 2}, ("cat", "dog"))
    shutil.copy(tmp_path / "test/cat/test_cat0.png", tmp_path / "test/dog/test_cat0.png")
    test = open_dataset("voc2007", tmp_path).test
    labels = {Path(test.source(i)).name: test.labels[i].tolist() for i in range(len(test))}
    assert labels == {
        "test_cat0.png": [1, 1],
        "test_cat1.png": [1, 0],
        "test_dog0.png": [0, 1],
        "test_dog1.png": [0, 1],
    }


@pytest.mark.parametrize("given", ["val", "test", "validation"])
def test_the_only_other_part_of_a_folder_is_the_test_part(given: str, tmp_path: Path) -> None:
    copies.plain(tmp_path, {"train": 10, given: 3})
    dataset = open_dataset("folder", tmp_path, val_share=0.3)
    assert [len(part) for part in (dataset.train, dataset.val, dataset.test)] == [14, 6, 6]
    assert all(f"/{given}/" in source for source in sources(dataset.test))
    assert all("/train/" in source for source in sources(dataset.trainval)) and dataset.notes == []


def test_imagenet_is_judged_on_its_validation_images(tmp_path: Path) -> None:
    copies.imagenet(tmp_path)
    (tmp_path / "test").mkdir()  # the official test images have no classes
    dataset = open_dataset("imagenet", tmp_path)
    assert all("/val/" in source for source in sources(dataset.test))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A folder, and the address under which it is served."""
    monkeypatch.setenv("no_proxy", "*")
    folder = tmp_path / "site"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_dataset_is_downloaded_where_it_can_be(
    site: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = site
    copies.food101(folder)
    with tarfile.open(folder / "food-101.tar.gz", "w:gz") as tar:
        tar.add(folder / "food-101", "food-101")
    monkeypatch.setattr(tv.Food101, "_URL", f"{address}/food-101.tar.gz")
    monkeypatch.setattr(tv.Food101, "_MD5", hashlib.md5((folder / "food-101.tar.gz").read_bytes()).hexdigest())
    assert len(open_dataset("food101", tmp_path / "new", download=True).test) == 4
    monkeypatch.setattr(tv.Food101, "_URL", f"{address}/gone.tar.gz")
    with pytest.raises(ValueError, match=r"getting Food-101 into .* failed"):
        open_dataset("food101", tmp_path / "newer", download=True)
    with pytest.raises(ValueError, match=r"Birdsnap cannot be downloaded by asc: unpack .*get_birdsnap\.py"):
        open_dataset("birdsnap", tmp_path / "new", download=True)
    with pytest.raises(ValueError, match=r"getting ImageNet-1k into .* failed .*ILSVRC2012_devkit"):
        open_dataset("imagenet", tmp_path / "new", download=True)


# --- Broken copies ----------------------------------------------------------------------------------------


def written(name: str, root: Path) -> None:
    copies.voc2007(root) if name == "voc2007" else copies.COPIES[name].write(root)


@pytest.mark.parametrize("name", [*copies.COPIES, "voc2007"])
def test_what_is_missing_is_named_with_how_to_get_it(name: str, tmp_path: Path) -> None:
    written(name, tmp_path)
    for alternatives in DATASETS[name].expects:
        present = next(tmp_path / place for place in alternatives.split("|") if (tmp_path / place).exists())
        aside = tmp_path / "aside"
        present.rename(aside)
        with pytest.raises(ValueError) as error:
            open_dataset(name, tmp_path)
        assert present.relative_to(tmp_path).as_posix() in str(error.value)
        assert DATASETS[name].how_to_get in str(error.value)
        aside.rename(present)
    open_dataset(name, tmp_path)


@pytest.mark.parametrize("name", [*copies.COPIES, "voc2007"])
def test_a_damaged_list_is_named(name: str, tmp_path: Path) -> None:
    written(name, tmp_path)
    lists = [tmp_path / place for names in DATASETS[name].expects for place in names.split("|")]
    for file in (file for file in lists if file.is_file()):
        content = file.read_bytes()
        file.write_bytes(b"\xff\xfe\x00 no list \x80")
        with pytest.raises(ValueError, match=file.name):
            open_dataset(name, tmp_path)
        file.write_bytes(content)


@pytest.mark.parametrize("name", [*LISTED, "voc2007"])
def test_a_listed_image_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    written(name, tmp_path)
    victim = Path(open_dataset(name, tmp_path).test.source(1))
    victim.unlink()
    with pytest.raises(ValueError, match=rf"1 of the .* images .* are not there: .*{victim.name}"):
        open_dataset(name, tmp_path)


def test_birds_whose_address_is_dead_are_told_and_left_out(tmp_path: Path) -> None:
    copies.birdsnap(tmp_path)
    (tmp_path / "birdsnap/images/Acadian_Flycatcher/3.jpg").unlink()
    dataset = open_dataset("birdsnap", tmp_path)
    assert len(dataset.trainval) == 9 and shown_as_labelled(dataset.trainval)
    assert any("1 of the 12 listed images are not there: Acadian_Flycatcher/3.jpg" in note for note in dataset.notes)
    copies.write_text(tmp_path / "birdsnap/test_images.txt", "path", "Dodo/1.jpg")
    with pytest.raises(ValueError, match=r"test_images\.txt: names images that images\.txt does not: Dodo/1\.jpg"):
        open_dataset("birdsnap", tmp_path)


@pytest.mark.parametrize("name", ["food101", "imagenet", "voc2007"])
def test_a_truncated_image_is_named_when_it_is_opened(name: str, tmp_path: Path) -> None:
    written(name, tmp_path)
    part = open_dataset(name, tmp_path).test
    file = Path(part.source(1))
    Image.effect_noise((64, 64), 80).convert("RGB").save(file)
    file.write_bytes(file.read_bytes()[:-700])
    assert part.image(0).mode == "RGB"
    with pytest.raises(ValueError, match=rf"{file.name}: not an image that can be read"):
        part.image(1)


def test_lists_that_name_unknown_classes_are_refused(tmp_path: Path) -> None:
    for name in ("dtd", "sun397", "aircraft", "food101"):
        copies.COPIES[name].write(tmp_path)
    for name, file, line in (
        ("dtd", tmp_path / "dtd/labels/test1.txt", "wrong/wrong_1.jpg"),
        ("sun397", tmp_path / "SUN397/Partitions/Testing_01.txt", "/w/wrong/sun_1.jpg"),
        ("aircraft", tmp_path / "fgvc-aircraft-2013b/data/images_variant_test.txt", "0000001 wrong"),
    ):
        with file.open("a") as stream:
            stream.write(line + "\n")
        with pytest.raises(ValueError, match=rf"{file.name}.*wrong"):
            open_dataset(name, tmp_path)
    copies.write_text(tmp_path / "food-101/meta/test.json", json.dumps({"wrong": ["wrong/1"]}))
    copies.draw(tmp_path / "food-101/images/wrong/1.jpg", 0)
    with pytest.raises(ValueError, match="do not name the same classes"):
        open_dataset("food101", tmp_path)


@pytest.mark.parametrize("name", ["folder", "imagenet", "pets"])
def test_class_folders_that_training_does_not_know_are_refused(name: str, tmp_path: Path) -> None:
    copies.plain(tmp_path, {"train": 4, "val": 2})
    copies.draw(tmp_path / "val/wasp/1.png", 2)
    with pytest.raises(ValueError, match=r"val has classes that .*train does not know: wasp"):
        open_dataset(name, tmp_path)


def test_files_that_are_no_images_are_told(tmp_path: Path) -> None:
    copies.plain(tmp_path / "plain", {"train": 4, "test": 2})
    (tmp_path / "plain/train/ant/.DS_Store").write_bytes(b"")
    (tmp_path / "plain/train/list.csv").write_text("")
    (tmp_path / "plain/train/wasp").mkdir()
    notes = open_dataset("folder", tmp_path / "plain").notes
    assert "train: 3 entries that are no images are not used" in notes[0]
    assert all(name in notes[0] for name in ("ant/.DS_Store", "list.csv", "wasp/ (no image in it)"))
    assert "shows nothing of 1 of its classes: wasp" in notes[1]
    copies.caltech101(tmp_path)
    (tmp_path / "caltech101/101_ObjectCategories/BACKGROUND_Google/tmp").write_text("")
    dataset = open_dataset("caltech101", tmp_path)
    assert "BACKGROUND_Google/tmp" in dataset.notes[0] and len(dataset.test) == 9


def test_folders_without_images_or_classes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has not the layout train/<class>/"):
        open_dataset("folder", tmp_path)
    copies.draw(tmp_path / "train/ant/1.png", 0)
    copies.draw(tmp_path / "val/ILSVRC2012_val_00000001.JPEG", 0)
    with pytest.raises(ValueError, match=r"val holds no class folders"):
        open_dataset("imagenet", tmp_path)
    (tmp_path / "val/ant").mkdir()
    with pytest.raises(ValueError, match=r"val holds no images in class folders"):
        open_dataset("imagenet", tmp_path)


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("open('harm', 'w')",)


def test_pickles_that_would_run_code_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    copies.cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py/data_batch_3").write_bytes(pickle.dumps({"data": Harmful(), "labels": [0]}))
    with pytest.raises(ValueError, match=r"data_batch_3.*builtins\.eval does not belong"):
        open_dataset("cifar10", tmp_path)
    assert not (tmp_path / "harm").exists()


def test_cifar_files_without_matching_labels_are_refused(tmp_path: Path) -> None:
    copies.cifar10(tmp_path)
    file = tmp_path / "cifar-10-batches-py/test_batch"
    pixels = np.zeros((2, 3072), np.uint8)
    for labels in ([0], [0, 3], [0, -1]):
        file.write_bytes(pickle.dumps({"data": pixels, "labels": labels}))
        with pytest.raises(ValueError, match=r"test_batch.* labels for 3 classes"):
            open_dataset("cifar10", tmp_path)


def test_unknown_names_and_missing_folders_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dataset must be one of imagenet, .*, folder, not 'mnist'"):
        open_dataset("mnist", Path())
    with pytest.raises(ValueError, match="the dataset pets needs its folder"):
        open_dataset("pets")


def test_a_name_that_is_neither_a_dataset_nor_a_folder_is_refused(tmp_path: Path) -> None:
    shape = {"width": 32, "depth": 2, "heads": 2, "patch_size": 8, "image_size": 16}
    asc.save(asc.AscViT(asc.VitConfig(**shape, superpixels=None)), tmp_path / "encoder")
    config = KnnConfig(checkpoint=str(tmp_path / "encoder"), dataset="nothere", data=tmp_path, out=tmp_path / "out")
    message = r"dataset 'nothere' is neither one of imagenet, .* nor a folder below .*: there is no folder .*/nothere$"
    with pytest.raises(ValueError, match=message):
        evaluate(config)


# --- Validation -------------------------------------------------------------------------------------------


def test_the_validation_share_has_every_class_in_proportion(tmp_path: Path) -> None:
    copies.plain(tmp_path, {"train": 20, "test": 1})
    for number in range(20, 60):
        copies.draw(tmp_path / f"train/bee/{number}.png", 1)
    copies.draw(tmp_path / "train/cow/only.png", 2)
    first = open_dataset("folder", tmp_path, val_share=0.1)
    assert Counter(first.val.labels.tolist()) == {0: 2, 1: 6}  # the only cow is to be learned from
    assert Counter(first.train.labels.tolist()) == {0: 18, 1: 54, 2: 1}
    assert not set(sources(first.val)) & set(sources(first.train)) and shown_as_labelled(first.val)
    again, other = (open_dataset("folder", tmp_path, val_share=0.1, seed=seed) for seed in (0, 1))
    assert sources(first.val) == sources(again.val) != sources(other.val)
    assert sources(first.test) == sources(other.test)
    for share in (0.0, 1.0):
        with pytest.raises(ValueError, match="val_share must lie between 0 and 1"):
            open_dataset("folder", tmp_path, val_share=share)


def test_too_few_images_for_a_validation_share_are_refused(tmp_path: Path) -> None:
    copies.plain(tmp_path, {"train": 1, "test": 1})
    with pytest.raises(ValueError, match=r"folder/train has 2 images, too few"):
        open_dataset("folder", tmp_path)


# --- The parts --------------------------------------------------------------------------------------------


def test_scenes_need_no_data_and_are_judged_on_unseen_surfaces() -> None:
    config = SceneConfig(size=16, seed=3)
    dataset = open_dataset("scenes", scene=config, scene_counts=(5, 3, 4))
    assert [len(part) for part in (dataset.train, dataset.val, dataset.test)] == [5, 3, 4]
    judged = Scene(SceneConfig(size=16, seed=3, split="test"), 2)
    assert int(dataset.test.labels[2]) == judged.label
    np.testing.assert_array_equal(np.asarray(dataset.test.image(2)), judged.frame(8).image_HW3)
    assert dataset.val.source(0) == "scenes train seed 3:5"
    assert dataset.trainval.source(5) == dataset.val.source(0)
    with pytest.raises(ValueError, match="scene_counts"):
        open_dataset("scenes", scene_counts=(5, 0, 4))


def test_a_fingerprint_stays_with_the_content_and_not_with_the_place(tmp_path: Path) -> None:
    copies.plain(tmp_path / "a", {"train": 4, "test": 2})
    copies.cifar10(tmp_path / "a")

    def prints(root: Path) -> list[str]:
        opened: list[Dataset] = [open_dataset(name, root) for name in ("folder", "cifar10")]
        return [dataset.fingerprint() for dataset in opened]

    first = prints(tmp_path / "a")
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert prints(tmp_path / "b") == first
    with (tmp_path / "b/test/ant/test_ant0.png").open("ab") as stream:
        stream.write(b"more")
    copies._batch(tmp_path / "b/cifar-10-batches-py/test_batch", [2, 1, 1], "labels")
    assert not set(prints(tmp_path / "b")) & set(first)
    parts = open_dataset("folder", tmp_path / "b")
    assert len({part.fingerprint() for part in (parts.train, parts.val, parts.test, parts.trainval)}) == 4


@pytest.mark.parametrize("name", ["folder", "cifar10", "scenes"])
def test_parts_can_be_sent_to_other_processes(name: str, tmp_path: Path) -> None:
    copies.plain(tmp_path, {"train": 4, "test": 2})
    copies.cifar10(tmp_path)
    part = open_dataset(name, tmp_path, scene=SceneConfig(size=16), scene_counts=(2, 1, 1)).trainval
    sent = pickle.loads(pickle.dumps(part))
    assert sent.fingerprint() == part.fingerprint()
    assert sent.image(1).tobytes() == part.image(1).tobytes()
    with pytest.raises(IndexError):
        part.image(len(part))


def test_grey_and_transparent_images_come_in_colour(tmp_path: Path) -> None:
    copies.plain(tmp_path, {"train": 4, "test": 2})
    Image.new("L", (8, 6), 90).save(tmp_path / "test/ant/test_ant0.png")
    Image.new("RGBA", (8, 6), (10, 20, 30, 40)).save(tmp_path / "test/ant/test_ant1.png")
    test = open_dataset("folder", tmp_path).test
    assert [test.image(i).getpixel((0, 0)) for i in (0, 1)] == [(90, 90, 90), (217, 218, 220)]


# --- Overlap with pre-training ----------------------------------------------------------------------------


def test_images_named_as_videos_and_copies_of_files_are_found(tmp_path: Path) -> None:
    for file in ("v_Surfing_g01_c01_000017.png", "harbour.png", "0001.png", "other.png"):
        for part in ("train", "test"):
            copies.draw(tmp_path / "data" / part / "sea" / file, 1, (len(file), 9))
            copies.draw(tmp_path / "data" / part / "land" / f"land{file}", 0)
    seen = tmp_path / "seen"
    for name in ("Surfing/v_Surfing_g01_c01.mp4", "HARBOUR.mp4", "0001.mp4"):
        (seen / name).parent.mkdir(parents=True, exist_ok=True)
        (seen / name).write_bytes(b"video")
    shutil.copy(tmp_path / "data/test/sea/other.png", seen / "kept.png")
    dataset = open_dataset("folder", tmp_path / "data")
    found = overlap(dataset, [seen])
    assert found.files == 4 and found.not_compared == []
    on_test = [line for line in found.same_name if line.startswith("folder/test")]
    assert on_test == [
        "folder/test harbour.png = HARBOUR.mp4",
        "folder/test v_Surfing_g01_c01_000017.png = Surfing/v_Surfing_g01_c01.mp4",
    ]
    assert f"folder/test other.png = {seen / 'kept.png'}" in found.same_content
    lines = found.lines()
    assert len(lines) == 2 and "have the bytes" in lines[0] and "4 evaluation images bear the name" in lines[1]
    assert found.record() == {
        "files": 4,
        "same_content": len(found.same_content),
        "same_name": 4,
        "examples": found.same_content + found.same_name,
        "not_compared": [],
    }
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/lake.mp4").write_bytes(b"")
    clean = overlap(dataset, [tmp_path / "elsewhere", tmp_path / "gone"])
    assert clean.same_name == clean.same_content == []
    assert clean.lines() == [
        f"not compared with pre-training: {tmp_path / 'gone'} is no folder that is here",
        "no evaluation image is found among 1 pre-training files by name or content",
    ]


def test_the_record_of_a_run_tells_what_it_saw(tmp_path: Path) -> None:
    footage = tmp_path / "footage"
    for name in ("harbour", "forest", "left"):
        (footage / name).mkdir(parents=True)
        videos.write(footage / name / f"{name}.mp4", 4)
    (tmp_path / "leave_out.txt").write_text("left/\n")
    out = tmp_path / "run"
    pretrain(
        tiny(
            out,
            data=("scenes", str(footage)),
            clips={"leave_out": tmp_path / "leave_out.txt"},
            train={"steps": 1, "warmup_steps": 0},
            watch={"knn_every": 0},
        )
    )
    for name in ("harbour_12", "forest", "left", "new"):
        for part in ("train", "test"):
            copies.draw(tmp_path / f"data/{part}/x/{name}.png", 0)
    dataset = open_dataset("folder", tmp_path / "data")

    def named(source: Path) -> set[str]:
        return {line.split(" = ")[0].split(" ")[1] for line in overlap(dataset, [source]).same_name}

    assert named(out) == named(out / "encoder" / "encoder.safetensors") == {"harbour_12.png", "forest.png"}
    shutil.rmtree(footage)  # the run remembers the names
    assert named(out) == {"harbour_12.png", "forest.png"}
    scenes = open_dataset("scenes", scene=SceneConfig(size=16, seed=0), scene_counts=(15, 15, 2))
    found = overlap(scenes, [out])
    assert len(found.same_name) == 20  # the run has scenes 0 to 19; those of the test part are others
    apart = overlap(open_dataset("scenes", scene_counts=(2, 2, 2)), [out])
    assert apart.same_name == [] and apart.files == 22
    (out / "data.json").write_text("{}")
    assert "the record of this run cannot be read" in overlap(scenes, [out]).lines()[0]


def test_shards_are_compared_by_the_names_of_their_videos(tmp_path: Path) -> None:
    copies.plain(tmp_path / "data", {"train": 4, "test": 2})
    for number, names in enumerate((["a/test_ant0.mp4"], ["b/other.mp4", "b/train_bee3.mkv"])):
        with ShardWriter(tmp_path, number) as writer:
            for name in names:
                writer.begin_clip(name, "0" * 64, 0.0)
                writer.add_frame(b"jpeg")
            writer.finish({})
    write_index(tmp_path, 2)
    found = overlap(open_dataset("folder", tmp_path / "data"), [tmp_path])
    assert found.files == 3 and found.same_content == found.not_compared == []
    assert {line.split(" ", 1)[1] for line in found.same_name} == {
        "test_ant0.png = a/test_ant0.mp4",
        "train_bee3.png = b/train_bee3.mkv",
    }


def test_images_without_files_of_their_own_are_said_not_to_be_compared(tmp_path: Path) -> None:
    copies.cifar10(tmp_path)
    found = overlap(open_dataset("cifar10", tmp_path), [])
    assert len(found.not_compared) == 3 and "no names and files of their own" in found.lines()[0]
