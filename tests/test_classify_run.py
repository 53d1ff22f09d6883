"""Protocols of classification as a user runs them: cached features, early stopping, interruptions, the suite."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import classify_runs
import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from torchvision.transforms import functional as tv

import asc
from asc.cli import main
from asc.data import Scene, SceneConfig, normalise
from asc.recipes.classify import BY_PROTOCOL, RECIPES, paper_finetune, paper_linear, paper_linear_imagenet
from asc.run_folder import RunFolder, read_log
from asc.tasks.classify.datasets import Dataset, ImageSet, open_dataset
from asc.tasks.classify.features import FeatureConfig, compute_features, features_of, learning_features
from asc.tasks.classify.results import Result, read_result, read_results
from asc.tasks.classify.run import FastLinearConfig, KnnConfig, TrainedConfig, evaluate
from asc.tasks.classify.task import ClassifyConfig, ClassifyTask
from asc.tasks.classify.views import CentreViews, TrainingViews, ViewConfig
from asc.tasks.encoders import Encoder, open_encoder
from asc.train import MachineConfig, TrainConfig, TrainingStoppedError, lr_at, make_optimiser

SCENE = SceneConfig(size=16, seed=1_000_000)
CPU = FeatureConfig(device="cpu")


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoders") / "mine"
    torch.manual_seed(0)
    config = asc.VitConfig(
        width=32, depth=3, heads=2, patch_size=4, image_size=16, superpixels=asc.SuperpixelConfig(budget=0.7)
    )
    model = asc.AscViT(config).eval()
    scenes = [Scene(SceneConfig(size=16), number).frame(0).image_HW3 for number in range(16)]
    model.calibrate(normalise(np.stack(scenes)))
    asc.save(model, folder / "encoder")
    return folder


def scenes(train: int = 40, val: int = 20, test: int = 20) -> Dataset:
    return open_dataset("scenes", scene=SCENE, scene_counts=(train, val, test))


def trained(encoder: Path, out: Path, **settings: Any) -> TrainedConfig:
    """A training of a few seconds; ``settings`` by section, such as ``train={"epochs": 3}``."""
    config = TrainedConfig(
        checkpoint=str(encoder),
        dataset="scenes",
        out=out,
        recipe="tiny",
        scene=SCENE,
        scene_counts=(40, 20, 20),
        classify=ClassifyConfig(frozen=False),
        train=TrainConfig(epochs=3, batch=8, lr=1e-3, lr_batch=8, warmup_steps=2),
        machine=MachineConfig(accelerator="cpu", log_every=1, checkpoint_every=3, workers=0),
    )
    for section, values in settings.items():
        now = getattr(config, section)
        config = replace(config, **{section: replace(now, **values) if isinstance(values, dict) else values})
    return config


def run_folder(out: Path) -> Path:
    (folder,) = (out / "runs").iterdir()
    return folder


class Watched:
    """A part of a dataset that reports every image that is opened, and refuses labels and images if it must."""

    def __init__(self, part: ImageSet, before: Callable[[], None]) -> None:
        self._part, self._before = part, before
        self.name, self.classes = part.name, part.classes

    @property
    def labels(self) -> torch.Tensor:
        self._before()
        return self._part.labels

    def __len__(self) -> int:
        return len(self._part)

    def image(self, index: int) -> Image.Image:
        self._before()
        return self._part.image(index)

    def source(self, index: int) -> str:
        return self._part.source(index)

    def key(self, index: int) -> str:
        return self._part.key(index)

    def fingerprint(self) -> str:
        return self._part.fingerprint()


# --- Views ------------------------------------------------------------------------------------------------


class OneImage:
    """A set of copies of one image."""

    name, classes = "one/train", ["a", "b"]

    def __init__(self, image: Image.Image, count: int = 6) -> None:
        self._image, self.labels = image, torch.arange(count) % 2

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        return self._image

    def source(self, index: int) -> str:
        return f"copy:{index}"

    def key(self, index: int) -> str:
        return self.source(index)

    def fingerprint(self) -> str:
        return "one"


def photo(width: int, height: int) -> Image.Image:
    """Smooth stripes, which look much the same whichever good filter resizes them."""
    y, x = np.mgrid[:height, :width]
    channels = [np.sin(x / 9), np.cos(y / 7), np.sin((x + y) / 11)]
    return Image.fromarray(((np.stack(channels, axis=2) + 1) * 127).astype(np.uint8))


@pytest.mark.parametrize("size", [(90, 60), (60, 90), (20, 14)])
def test_the_middle_is_that_of_torchvision_and_small_images_are_enlarged(size: tuple[int, int]) -> None:
    image = photo(*size)
    views = CentreViews(OneImage(image), 28, margin=32 / 28)
    batch = views[[4, 5, 6, 7]]
    assert batch.images_BSS3.shape == (2, 28, 28, 3) and batch.samples == [4, 5], "there is no sixth image"
    resized = tv.resize(image, 32, tv.InterpolationMode.BICUBIC)
    expected = np.asarray(tv.center_crop(resized, [28, 28])).astype(int)
    # Here the cut is exact, there it is rounded to whole pixels of the resized image.
    difference = np.abs(batch.images_BSS3[0].numpy().astype(int) - expected)[2:-2, 2:-2]
    assert difference.mean() < 12 and np.median(difference) < 8


def test_training_views_follow_from_seed_epoch_and_sample_alone() -> None:
    images = OneImage(photo(50, 40))
    views = TrainingViews(images, ViewConfig(), 16, seed=3)
    whole = views[list(range(12))]
    parts = [TrainingViews(images, ViewConfig(), 16, seed=3)[[position]] for position in range(12)]
    assert torch.equal(whole.images_BSS3, torch.cat([part.images_BSS3 for part in parts]))
    assert sorted(whole.samples[:6]) == sorted(whole.samples[6:]) == list(range(6)), "every epoch shows each once"
    assert whole.labels.tolist() == [sample % 2 for sample in whole.samples]
    assert len({view.numpy().tobytes() for view in whole.images_BSS3}) == 12, "each sample and epoch has its own view"
    other = TrainingViews(images, ViewConfig(), 16, seed=4)[[0]]
    assert not torch.equal(other.images_BSS3, whole.images_BSS3[:1])


def test_random_squares_have_one_size_and_lie_inside() -> None:
    # Left half black, right half white: the mean tells how far right a square lies.
    pixels = np.zeros((32, 64, 3), dtype=np.uint8)
    pixels[:, 32:] = 255
    view = ViewConfig(crop="random", margin=32 / 28, flip=0.0)
    batch = TrainingViews(OneImage(Image.fromarray(pixels), 60), view, 28, seed=0)[list(range(60))]
    shares = batch.images_BSS3.double().mean((1, 2, 3)) / 255
    # 28 of 64 columns at a uniform place: white begins 0 to 28 columns inside.
    assert shares.min() < 0.15 and shares.max() > 0.85 and abs(float(shares.mean()) - 0.5) < 0.15
    edges = (batch.images_BSS3[:, 14, :, 0].double().diff(dim=1) < -20).any()
    assert not bool(edges), "nothing is flipped"


# --- Cached features --------------------------------------------------------------------------------------


def test_features_are_computed_once_and_again_when_anything_differs(encoder_folder: Path, tmp_path: Path) -> None:
    opened: list[int] = []
    part = Watched(scenes().val, lambda: opened.append(1))

    def get(encoder: Encoder, margin: float = 1.0, images: ImageSet = part) -> tuple[torch.Tensor, int]:
        opened.clear()
        features = features_of(encoder, images, margin, CPU, tmp_path)
        return features, bool(opened)

    encoder = open_encoder(encoder_folder)
    first, computed = get(encoder)
    assert computed and first.shape == (20, 32)
    images = normalise(np.stack([np.asarray(part.image(index)) for index in range(20)]))
    torch.testing.assert_close(first, encoder.module(images), rtol=1e-4, atol=1e-5)
    again, computed = get(open_encoder(encoder_folder))
    assert not computed and torch.equal(again, first)
    assert get(encoder, margin=1.2)[1], "another cut"
    assert get(open_encoder(f"random:{encoder_folder}"))[1], "other weights"
    assert get(encoder, images=Watched(scenes().test, lambda: opened.append(1)))[1], "other images"
    assert len(list(tmp_path.iterdir())) == 4


def test_other_seeds_divide_the_same_images_and_find_their_features(encoder_folder: Path, tmp_path: Path) -> None:
    for split, count in (("train", 6), ("test", 3)):
        for label in ("round", "square"):
            folder = tmp_path / "data" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(np.random.default_rng([count, number]).integers(0, 255, (20, 20, 3), np.uint8)).save(
                    folder / f"{label}{number}.png"
                )
    encoder, cache = open_encoder(encoder_folder), tmp_path / "cache"
    for seed in range(3):
        dataset = open_dataset("folder", tmp_path / "data", seed=seed, val_share=0.5)
        train, val = learning_features(encoder, dataset, 1.0, CPU, cache)
        assert len(list(cache.iterdir())) == 1, "computed once for all seeds"
        for part, features in ((dataset.train, train), (dataset.val, val)):
            torch.testing.assert_close(features, compute_features(encoder, part, 1.0, CPU), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("damage", ["cut", "text", "empty"])
def test_broken_files_of_features_are_made_again(encoder_folder: Path, tmp_path: Path, damage: str) -> None:
    encoder, part = open_encoder(encoder_folder), scenes().val
    first = features_of(encoder, part, 1.0, CPU, tmp_path)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    file.write_bytes({"cut": content[:-50], "text": b"no features at all", "empty": b""}[damage])
    assert torch.equal(features_of(encoder, part, 1.0, CPU, tmp_path), first)
    assert torch.equal(safetensors.torch.load_file(file)["features"], first)


# --- kNN and the fast linear classifier -------------------------------------------------------------------


def test_the_fast_linear_classifier_opens_test_images_only_when_all_is_chosen(
    encoder_folder: Path, tmp_path: Path
) -> None:
    order: list[str] = []
    dataset = scenes()
    parts = {name: Watched(getattr(dataset, name), lambda name=name: order.append(name)) for name in ("train", "val")}
    test = Watched(dataset.test, lambda: order.append("test"))
    config = FastLinearConfig(
        checkpoint=str(encoder_folder), dataset="scenes", out=tmp_path, features=CPU, recipe="fast_linear"
    )
    result = evaluate(config, replace(dataset, test=test, **parts))
    assert order.index("test") > order.index("val") > 0
    assert set(order[order.index("test") :]) == {"test"}, "whatever was to be chosen was chosen before"
    assert result.chosen["decay"] in config.decays
    assert result.val["top1"] == max(result.chosen["val_by_decay"].values())
    assert result.data["images"] == {"train": 40, "val": 20, "test": 20} and result.metric == "top1"
    assert read_result(tmp_path / f"{result.name}.json") == result


def test_knn_reports_every_number_of_neighbours(encoder_folder: Path, tmp_path: Path) -> None:
    config = KnnConfig(checkpoint=str(encoder_folder), dataset="scenes", out=tmp_path, features=CPU, recipe="knn")
    result = evaluate(config, scenes())
    assert set(result.headline) == {"top1@10", "top1@20"} and {"top5@10", "mean_per_class@20"} <= set(result.test)
    assert all(0 <= value <= 1 for value in result.test.values())


def test_a_result_of_other_settings_or_images_is_not_taken_for_this_one(encoder_folder: Path, tmp_path: Path) -> None:
    config = KnnConfig(checkpoint=str(encoder_folder), dataset="scenes", out=tmp_path, features=CPU, recipe="knn")
    evaluate(config, scenes())
    with pytest.raises(ValueError, match=r"holds a result with other settings \(temperature\)"):
        evaluate(replace(config, temperature=0.1), scenes())
    with pytest.raises(ValueError, match="measured on other images of scenes"):
        evaluate(config, scenes(test=21))


# --- Training ---------------------------------------------------------------------------------------------


def test_early_stopping_never_looks_at_test_images(encoder_folder: Path, tmp_path: Path) -> None:
    touched: list[bool] = []

    def only_after_training() -> None:
        saved = RunFolder(run_folder(tmp_path), writes=False).load_checkpoint(torch.device("cpu"))
        assert saved is not None and saved.state["state"]["finished"], (
            "a test image was opened while something was chosen"
        )
        touched.append(True)

    dataset = scenes()
    # A learning rate of nothing: the first epoch is the best, and two more bring no progress.
    config = trained(
        encoder_folder, tmp_path, classify={"patience": 2.0}, train={"epochs": 50.0, "lr": 0.0, "warmup_steps": 0}
    )
    result = evaluate(config, replace(dataset, test=Watched(dataset.test, only_after_training)))
    assert len(touched) >= 20 and set(result.test) == {"top1", "mean_per_class", "top5"}
    assert result.chosen == {"epoch": 1.0, "ended_at_epoch": 3.0}


def test_the_best_weights_are_judged_not_the_last(encoder_folder: Path, tmp_path: Path) -> None:
    config = trained(encoder_folder, tmp_path, train={"epochs": 5.0, "lr": 0.01})
    result = evaluate(config)
    by_epoch = {line["step"] / 5: line["val_top1"] for line in read_log(run_folder(tmp_path)) if "val_top1" in line}
    assert len(by_epoch) == 5
    assert result.chosen["epoch"] == max(by_epoch, key=lambda epoch: (by_epoch[epoch], -epoch))
    assert result.val["top1"] == max(by_epoch.values())
    last = evaluate(replace(config, out=tmp_path / "last", classify=replace(config.classify, chosen="last")))
    assert last.chosen["epoch"] == 5.0 and last.val["top1"] == by_epoch[5.0]


def test_a_finished_training_is_handed_out_and_not_done_again(encoder_folder: Path, tmp_path: Path) -> None:
    config = trained(encoder_folder, tmp_path)
    result = evaluate(config)
    assert result.protocol == "finetune"
    tuned = open_encoder(run_folder(tmp_path))
    assert tuned.identity != result.encoder["identity"]
    before = (run_folder(tmp_path) / "log.jsonl").stat().st_mtime_ns
    assert evaluate(config) == result
    assert (run_folder(tmp_path) / "log.jsonl").stat().st_mtime_ns == before


def last_step(out: Path) -> int:
    try:
        return max((line["step"] for line in read_log(run_folder(out))), default=-1)
    except (FileNotFoundError, ValueError):
        return -1


def comparable(result: Result) -> dict[str, Any]:
    record = asdict(result)
    del record["seconds"], record["settings"]["out"]
    return record


def test_a_fine_tuning_killed_twice_ends_with_the_very_same_result(encoder_folder: Path, tmp_path: Path) -> None:
    def config(name: str) -> TrainedConfig:
        return trained(encoder_folder, tmp_path / name, classify={"patience": 3.0}, train={"epochs": 4.0})

    whole = classify_runs.start(config("whole"))
    draw = random.Random(0)
    for after in sorted(draw.sample(range(4, 18), 2)):
        process = classify_runs.start(config("killed"))
        while last_step(tmp_path / "killed") < after:
            assert process.is_alive()
            time.sleep(0.003)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    final = classify_runs.start(config("killed"))
    for process in (whole, final):
        process.join()
        assert process.exitcode == 0
    (one,), (other,) = (read_results([tmp_path / name]) for name in ("whole", "killed"))
    assert comparable(one) == comparable(other)
    for file in ("encoder/encoder.safetensors", "head.safetensors"):
        contents = [(run_folder(tmp_path / name) / file).read_bytes() for name in ("whole", "killed")]
        assert contents[0] == contents[1]


def test_other_settings_do_not_continue_a_training(encoder_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingStoppedError):
        evaluate(trained(encoder_folder, tmp_path, machine={"stop_after": 4}))
    with pytest.raises(ValueError, match=r"train\.lr was 0\.001 and is now 0\.5"):
        evaluate(trained(encoder_folder, tmp_path, train={"lr": 0.5}))
    assert evaluate(trained(encoder_folder, tmp_path)).chosen["ended_at_epoch"] == 3.0


# --- What learns ------------------------------------------------------------------------------------------


def task_of(encoder: Encoder, dataset: Dataset | None = None, **settings: Any) -> ClassifyTask:
    return ClassifyTask(encoder, dataset or scenes(), ClassifyConfig(**settings), ViewConfig(), TrainConfig(batch=8))


def step(task: ClassifyTask) -> None:
    """One step of training by hand."""
    optimiser = make_optimiser(task, TrainConfig(lr=0.01, weight_decay=0.0))
    task.train()
    task(task.prepare(task.views[list(range(8))], torch.device("cpu"))).loss.backward()
    for group in optimiser.param_groups:
        group["lr"] = 0.01 * group["lr_share"]
    optimiser.step()
    task.after_step(0.5)


def test_a_frozen_encoder_stays_as_it_is_in_weights_and_mode(encoder_folder: Path) -> None:
    encoder = open_encoder("timm:resnet18", image_size=32)  # with batch norm, which would show the wrong mode
    before = {name: tensor.clone() for name, tensor in encoder.module.state_dict().items()}
    task = task_of(encoder, frozen=True)
    head = task.head.weight.detach().clone()
    step(task)
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.module.state_dict().items())
    assert not torch.equal(task.head.weight, head)


@pytest.mark.parametrize("thresholds", ["frozen", "budget"])
def test_thresholds_stay_or_follow_their_budget_as_asked(encoder_folder: Path, thresholds: str) -> None:
    encoder = open_encoder(encoder_folder)
    assert encoder.vit is not None
    before = [layer.threshold.u.clone() for layer in encoder.vit.superpixel_layers]
    weights = encoder.vit.blocks[0].attn.qkv.weight.detach().clone()
    task = task_of(encoder, frozen=False, thresholds=thresholds)
    step(task)
    assert not torch.equal(encoder.vit.blocks[0].attn.qkv.weight, weights)
    same = [torch.equal(layer.threshold.u, u) for layer, u in zip(encoder.vit.superpixel_layers, before, strict=True)]
    assert all(same) if thresholds == "frozen" else not all(same)


def test_layer_decay_gives_every_block_its_share(encoder_folder: Path) -> None:
    task = task_of(open_encoder(encoder_folder), frozen=False, layer_decay=0.5)
    shares = {
        "head.weight": 1.0,
        "encoder.norm.weight": 0.5,
        "encoder.blocks.2.mlp.fc1.weight": 0.5,
        "encoder.blocks.0.attn.qkv.bias": 0.125,
        "encoder.patch_embed.weight": 0.0625,
        "encoder.pos_embed": 0.0625,
    }
    assert {name: task.lr_share(name) for name in shares} == shares
    peer = task_of(open_encoder("timm:vit_tiny_patch16_224", image_size=32), frozen=False, layer_decay=0.5)
    assert peer.lr_share("encoder.blocks.11.mlp.fc1.weight") == 0.5 and peer.lr_share("head.bias") == 1.0
    assert peer.lr_share("encoder.patch_embed.proj.weight") == 0.5**13
    assert all(0 < peer.lr_share(name) <= 1 for name, _ in peer.named_parameters())


class SeveralLabels(OneImage):
    """Images that show several classes, some of them not counted."""

    name, classes = "several/train", ["a", "b", "c"]

    def __init__(self, count: int = 24) -> None:
        super().__init__(photo(20, 20), count)
        self.labels = (torch.arange(3 * count).view(count, 3) % 5 < 2).long()
        self.labels[::4, 1] = -1


def test_several_labels_learn_by_yes_and_no_and_what_is_not_counted_does_not_count(
    tmp_path: Path,
) -> None:
    peer = "timm:resnet18"
    dataset = Dataset("several", "map11", True, SeveralLabels(), SeveralLabels(12), SeveralLabels(12))
    task = task_of(open_encoder(peer, image_size=32), dataset, frozen=True)
    inputs = task.prepare(task.views[list(range(8))], torch.device("cpu"))
    logits = task.train().head(task.encoder(inputs[0]))
    terms = []
    for row, label in zip(logits.tolist(), inputs[1].tolist(), strict=True):
        for value, answer in zip(row, label, strict=True):
            if answer >= 0:
                chance = 1 / (1 + np.exp(-value))
                terms.append(-np.log(chance if answer else 1 - chance))
    assert task(inputs).loss.item() == pytest.approx(np.mean(terms), rel=1e-5)
    for config in (
        KnnConfig(checkpoint=peer, image_size=32, dataset="several", out=tmp_path, features=CPU, recipe="knn"),
        FastLinearConfig(checkpoint=peer, image_size=32, dataset="several", out=tmp_path, features=CPU, recipe="fast"),
        trained(Path(peer), tmp_path, image_size=32, train={"epochs": 1.0}),
    ):
        assert all(0 < value <= 1 for value in evaluate(config, dataset).headline.values())


# --- Recipes and commands ---------------------------------------------------------------------------------


def test_the_papers_recipes_are_the_papers() -> None:
    imagenet, linear, full = (recipe("e", "d") for recipe in (paper_linear_imagenet, paper_linear, paper_finetune))
    for config in (imagenet, linear, full):
        train = config.train
        assert (train.optimiser, train.momentum, train.weight_decay, train.epochs) == ("sgd", 0.9, 1e-4, 100)
        assert train.lr_batch == train.batch and train.warmup_epochs == 0
    rates = [lr_at(imagenet.train, epoch * 10, 1000, 2560) for epoch in (0, 59, 60, 79, 80, 99)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    assert (imagenet.view.crop, imagenet.view.margin, imagenet.classify.frozen) == ("random", 256 / 224, True)
    assert lr_at(linear.train, 0, 1000, 2560) == 0.01 and lr_at(linear.train, 500, 1000, 2560) == pytest.approx(0.005)
    assert lr_at(full.train, 0, 1000, 2560) == 1e-4
    assert linear.classify.frozen and not full.classify.frozen
    assert linear.classify.patience == full.classify.patience == 10 and imagenet.classify.patience is None
    assert linear.view == ViewConfig(crop="resized", flip=0.5)
    assert sorted(RECIPES) == sorted(name for names in BY_PROTOCOL.values() for name in names)
    for name, recipe in RECIPES.items():
        assert recipe("e", "d").recipe == name and "Command: ``" in (recipe.__doc__ or "")


def suite(encoder: Path, out: Path) -> list[str]:
    return [
        *("eval", "suite", "--checkpoint", str(encoder), "timm:resnet18", "--datasets", "scenes", "pack"),
        *("--data", str(out.parent), "--protocols", "knn", "linear", "modern_finetune", "--seeds", "0", "1"),
        *("--out", str(out), "--image-size", "16", "--epochs", "1", "--scene.size", "16"),
        *("--scene-counts", "24", "12", "12", "--features.device", "cpu", "--machine.accelerator", "cpu"),
    ]


def test_the_suite_from_the_command_line_to_the_table(
    encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    colour_folder(tmp_path / "pack", RED_AND_BLUE)
    assert main(suite(encoder_folder, tmp_path / "out")) == 0
    table = (tmp_path / "out" / "tables.md").read_text()
    assert table in capsys.readouterr().out
    results = read_results([tmp_path / "out"])
    assert len(results) == 2 * 2 * 3 * 2
    assert "| **ours: mine, modern_finetune, 2 seeds** |" in table and "ours: timm-resnet18-untrained, knn" in table
    red_or_blue = [r for r in results if r.dataset == "pack" and r.recipe == "fast_linear"]
    assert len(red_or_blue) == 4 and all(result.test["top1"] == 1.0 for result in red_or_blue)
    for result in results:
        assert result.settings["recipe"] == result.recipe and {"asc", "torch", "python"} <= result.versions.keys()
        assert len(set(result.data["fingerprints"].values())) == 3 and result.device.endswith("CPU")
    written = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("*seed*.json")}
    assert main(suite(encoder_folder, tmp_path / "out")) == 0
    assert "was there already" in capsys.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("*seed*.json")} == written


def colour_folder(folder: Path, colours: dict[str, tuple[int, int, int]]) -> None:
    """A dataset whose classes are colours."""
    for part, count in (("train", 8), ("test", 3)):
        for label, colour in colours.items():
            (folder / part / label).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (20 + number, 18), colour).save(folder / part / label / f"{number}.png")


RED_AND_BLUE = {"red": (200, 30, 30), "blue": (30, 30, 200)}


def test_the_suite_goes_on_after_a_dataset_that_fails(
    encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("bad", "good", "worse"):
        colour_folder(tmp_path / name, RED_AND_BLUE)
    bad, worse = tmp_path / "bad" / "test" / "blue" / "1.png", tmp_path / "worse" / "train" / "red" / "1.png"
    for file in (bad, worse):
        file.write_bytes(b"no image")
    out = tmp_path / "out"
    words = ["--checkpoint", str(encoder_folder), "--data", str(tmp_path), "--out", str(out), "--protocols", "knn"]
    words += ["--image-size", "16", "--features.device", "cpu"]
    assert main(["eval", "suite", "--datasets", "bad", "good", "worse", *words]) == 2
    told = capsys.readouterr()
    assert [result.dataset for result in read_results([out])] == ["good"]
    table = (out / "tables.md").read_text()
    assert table in told.out and "good (top-1, k = 10)" in table and "worse" not in table
    last = told.err.strip().splitlines()[-1]
    assert last.startswith("error: 2 of 3 datasets failed: bad: ") and f"; worse: {worse}" in last and str(bad) in last
    assert main(["eval", "suite", "--datasets", "bad", *words[:5], str(tmp_path / "none"), *words[6:]]) == 2
    assert "1 of 1 dataset failed" in capsys.readouterr().err and not (tmp_path / "none" / "tables.md").exists()


def test_the_suite_goes_on_after_a_training_that_gives_up(
    encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_fast(checkpoint: str, dataset: str) -> TrainedConfig:
        config = paper_finetune(checkpoint, dataset)
        return replace(config, train=replace(config.train, lr=1e18, batch=2))

    monkeypatch.setitem(RECIPES, "paper_finetune", too_fast)
    for name in ("one", "two"):
        colour_folder(tmp_path / name, RED_AND_BLUE)
    words = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--protocols", "finetune", "--epochs", "9"]
    words += ["--image-size", "16", "--features.device", "cpu", "--machine.accelerator", "cpu"]
    command = ["eval", "suite", "--checkpoint", str(encoder_folder), "--datasets", "one", "two", *words]
    assert main(command) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith("error: 2 of 2 datasets failed: one: stopped at step") and "; two: stopped at step" in told


@pytest.mark.parametrize("protocol", ["knn", "linear", "finetune"])
def test_a_single_class_is_refused(
    encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], protocol: str
) -> None:
    colour_folder(tmp_path / "reds", {"red": (200, 30, 30)})
    command = ["eval", protocol, "--checkpoint", str(encoder_folder), "--data", str(tmp_path), "--dataset", "reds"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "the dataset reds has one class only, red" in last and not (tmp_path / "out").exists()


def test_a_damaged_result_is_named_when_it_is_left_out(
    encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    whole = evaluate(KnnConfig(checkpoint=str(encoder_folder), dataset="x", out=results, features=CPU), scenes())
    (results / "other.json").write_text('{"kind": "something else"}')
    damaged = results / "damaged.json"
    damaged.write_text((results / f"{whole.name}.json").read_text()[:100])
    assert main(["report", str(results), "--out", str(tmp_path / "report")]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note:")]
    assert notes == [f"note: {damaged} cannot be read as JSON and is left out"]
    assert "ours: mine" in (tmp_path / "report" / "tables.md").read_text()


def test_a_single_evaluation_from_the_command_line(encoder_folder: Path, tmp_path: Path) -> None:
    common = ["--dataset", "scenes", "--scene.size", "16", "--scene-counts", "24", "12", "12", "--out", str(tmp_path)]
    command = ["eval", "linear", "--recipe", "paper_linear", "--checkpoint", str(encoder_folder), *common]
    machine = ["--train.epochs", "2", "--train.batch", "8", "--machine.accelerator", "cpu"]
    assert main([*command, *machine]) == 0
    (result,) = read_results([tmp_path])
    assert (result.recipe, result.protocol) == ("paper_linear", "linear")
    assert result.settings["train"]["lr"] == 0.01 and result.settings["train"]["epochs"] == 2.0
    record = json.loads((run_folder(tmp_path) / "config.json").read_text())
    assert record["content"]["identity"] == result.encoder["identity"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "knn", "--dataset", "scenes", "--checkpoint", "nowhere"], "there is no encoder nowhere"),
        (
            ["eval", "knn", "--dataset", "nothing", "--checkpoint", "ENCODER"],
            "dataset must be one of imagenet, food101",
        ),
        (["eval", "linear", "--recipe", "magic", "--dataset", "scenes"], "recipe must be one of fast_linear"),
        (
            ["eval", "linear", "--dataset", "scenes", "--checkpoint", "ENCODER", "--decays", "0"],
            "decays must be positive",
        ),
        (
            ["eval", "knn", "--dataset", "scenes", "--checkpoint", "ENCODER", "--margin", "0.5"],
            "view.margin must be at",
        ),
        (["eval", "knn", "--dataset", "cifar10", "--checkpoint", "ENCODER"], "the dataset cifar10 needs its folder"),
        (["eval", "suite", "--checkpoint", "ENCODER", "--datasets", "scenes", "x"], "dataset 'x' is neither one of"),
        (
            ["eval", "suite", "--checkpoint", "ENCODER", "--datasets", "scenes", "--protocols", "magic"],
            "'magic' is no protocol or recipe",
        ),
        (["report", "no_such_result.json"], "no_such_result.json is no result of asc eval"),
    ],
)
def test_mistakes_are_told_in_one_line(
    encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    filled = [str(encoder_folder) if word == "ENCODER" else word for word in arguments]
    out = ["--out", str(tmp_path)] if filled[0] == "eval" else []
    assert main([*filled, *out]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error:") and message in error
