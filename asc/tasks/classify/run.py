"""One encoder judged on one dataset by one protocol: from settings to a result file.

OUT/<encoder>_<dataset>_<recipe>_seed<n>.json    the result
OUT/features/                                    features that were computed, to be used again
OUT/runs/<the same name>/                        the folder of a training: log, checkpoints, chosen weights
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor
from tqdm import tqdm

from asc.data.scenes import SceneConfig
from asc.files import write_whole
from asc.layer import SuperpixelWarning
from asc.pretrain.run import DATA_FILE
from asc.run_folder import RunFolder
from asc.tasks.classify.datasets import DATASETS, Dataset, open_dataset, overlap
from asc.tasks.classify.datasets.opening import SCENE_COUNTS
from asc.tasks.classify.features import FeatureConfig, check_features, features_of, learning_features
from asc.tasks.classify.logistic import fit_linear
from asc.tasks.classify.metrics import score
from asc.tasks.classify.probes import DECAYS, choose_decay, knn_votes
from asc.tasks.classify.results import Protocol, Result, device_name, plain, read_result, result_name, write_result
from asc.tasks.classify.task import ClassifyConfig, ClassifyTask
from asc.tasks.classify.views import ViewConfig
from asc.tasks.encoders import Encoder, open_encoder
from asc.train import MachineConfig, TrainConfig, Trainer, check_training, make_fabric
from asc.weights import save

RUNS, FEATURES, ENCODER, HEAD_FILE = "runs", "features", "encoder", "head.safetensors"
FOLDER = "folder"
# Far from the seeds of pre-training, which begins at 0: a scene is not to be trained on and judged by.
SCENE = SceneConfig(seed=1_000_000)
# Settings that may differ between a result and a command that asks for it again: where things lie and how they are
# computed. Weights and images are compared by their digests.
_FREE = ("checkpoint", "data", "out", "features", "machine", "download")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What is judged, and on what."""

    checkpoint: str
    """The encoder: the folder of a run, an encoder folder, a weights file, ``timm:NAME`` (untrained),
    ``timm:NAME@FILE``, ``timm:NAME@pretrained``, or untrained weights: ``random``, ``random:plain``,
    ``random:FOLDER`` (in the shape of a run's encoder), with ``@1`` behind it for another seed."""
    dataset: str
    """Name of the dataset, or of a folder below ``data`` with train/<class>/ and test/<class>/ or val/<class>/."""
    data: Path | None = None
    """Folder that holds the dataset; not needed for ``scenes``."""
    out: Path = Path("results")
    """Folder for results; the same command again continues or shows what lies there."""
    recipe: str = ""
    """Name of the settings that are the defaults of all others; ``--help`` shows those of the one given."""
    image_size: int | None = None
    """Side of the images for the network in pixels; None: what it was trained at."""
    download: bool = False
    """Whether to get the dataset if it is not there, where that can be done."""
    val_share: float | None = None
    """Share of the training images to choose settings by, where a dataset has no official ones; None: as registered."""
    scene: SceneConfig = SCENE
    """What the embedded scenes show, for the dataset ``scenes``."""
    scene_counts: tuple[int, int, int] = SCENE_COUNTS
    """Scenes to learn from, to choose settings by, and to be judged on."""


@dataclass(frozen=True, kw_only=True)
class KnnConfig(EvalConfig):
    """Nearest neighbours on frozen features."""

    neighbours: tuple[int, ...] = (10, 20)
    """Numbers of neighbours; all are reported."""
    temperature: float = 0.07
    """A neighbour votes by exp(cosine / temperature)."""
    margin: float = 1.0
    """Shorter side of an image as a multiple of the side of the square that is cut out of its middle."""
    seed: int = 0
    """Start of the choice of validation images where there are no official ones."""
    features: FeatureConfig = field(default_factory=FeatureConfig)
    """How features are computed."""


@dataclass(frozen=True, kw_only=True)
class FastLinearConfig(EvalConfig):
    """Logistic regression on frozen features, standardised, for several weight decays at once."""

    decays: tuple[float, ...] = (*DECAYS, 1.0)
    """Weight decays; the best on the validation images is fitted once more to training and validation images together.
    scikit-learn's C is 1 / (images · decay)."""
    margin: float = 1.0
    """Shorter side of an image as a multiple of the side of the square that is cut out of its middle."""
    seed: int = 0
    """Start of the choice of validation images where there are no official ones."""
    features: FeatureConfig = field(default_factory=FeatureConfig)
    """How features are computed."""


@dataclass(frozen=True, kw_only=True)
class TrainedConfig(EvalConfig):
    """A classifier that is trained on images, on a frozen encoder or together with it."""

    classify: ClassifyConfig = field(default_factory=ClassifyConfig)
    """What is trained, and which weights are taken in the end."""
    view: ViewConfig = field(default_factory=ViewConfig)
    """What is cut out of the images."""
    train: TrainConfig = TrainConfig()
    """How weights are learned; its seed also chooses the validation images where there are no official ones."""
    machine: MachineConfig = MachineConfig()
    """Where the work is done; may change between restarts."""


@dataclass
class _Finding:
    """What a protocol found out."""

    protocol: Protocol
    chosen: dict[str, Any]
    val: dict[str, float]
    test: dict[str, float]
    seconds: float
    device: torch.device
    notes: list[str]


def evaluate(config: EvalConfig, dataset: Dataset | None = None) -> Result:
    """Judge an encoder; a result that lies there already is not computed again.

    Args:
        config: ``KnnConfig``, ``FastLinearConfig`` or ``TrainedConfig``; see ``asc.recipes.classify``.
        dataset: Takes the place of the one that the settings name.
    """
    _check(config)
    encoder = open_encoder(config.checkpoint, config.image_size)
    if dataset is None:
        dataset = open_named(config)
        tell_notes(dataset)
    _check_classes(dataset)
    name = result_name(encoder.name, encoder.identity, dataset.name, config.recipe, seed_of(config))
    result = _finished(config, dataset, name)
    if result is not None:
        tqdm.write(f"{told(result)} (was there already)")
        return result
    if isinstance(config, TrainedConfig):
        return _train(config, encoder, dataset, name)
    if isinstance(config, KnnConfig):
        finding = _knn(config, encoder, dataset)
    else:
        assert isinstance(config, FastLinearConfig)
        finding = _linear(config, encoder, dataset)
    return _record(config, encoder, dataset, finding)


def tell_notes(dataset: Dataset) -> None:
    """Say in what a dataset differs from the official release; of several processes the first does."""
    for note in dataset.notes if int(os.environ.get("RANK", 0)) == 0 else []:
        tqdm.write(f"note: {note}")


def seed_of(config: EvalConfig) -> int:
    """The seed, wherever it stands."""
    if isinstance(config, TrainedConfig):
        return config.train.seed
    assert isinstance(config, KnnConfig | FastLinearConfig)
    return config.seed


def with_seed(config: EvalConfig, seed: int) -> EvalConfig:
    """The same with another seed."""
    if isinstance(config, TrainedConfig):
        return replace(config, train=replace(config.train, seed=seed))
    return replace(config, seed=seed)  # type: ignore[call-arg]


def open_named(config: EvalConfig) -> Dataset:
    """The dataset that the settings name: a registered one, or a folder of class folders below ``data``."""
    name, root = config.dataset, config.data
    if root is not None:
        check_datasets([name], root)
        if name not in DATASETS:
            name, root = FOLDER, root / name
    dataset = open_dataset(
        name,
        root,
        seed=seed_of(config),
        val_share=config.val_share,
        download=config.download,
        scene=config.scene,
        scene_counts=config.scene_counts,
    )
    # A folder is called what it is called, not "folder".
    own_name = config.dataset if config.dataset != FOLDER else (root or Path(FOLDER)).resolve().name
    return replace(dataset, name=own_name)


def _check(config: EvalConfig) -> None:
    if isinstance(config, TrainedConfig):
        check_training(config.train, config.machine)
        return
    assert isinstance(config, KnnConfig | FastLinearConfig)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(f"{config.recipe} runs in one process: start it without torchrun")
    check_features(config.features)
    ViewConfig(margin=config.margin)
    if isinstance(config, FastLinearConfig) and not (config.decays and all(decay > 0 for decay in config.decays)):
        raise ValueError(f"decays must be positive numbers, got {config.decays}")
    if isinstance(config, KnnConfig):
        if not (config.neighbours and all(k > 0 for k in config.neighbours)):
            raise ValueError(f"neighbours must be positive numbers, got {config.neighbours}")
        if not config.temperature > 0:
            raise ValueError(f"temperature must be positive, got {config.temperature}")


def _check_classes(dataset: Dataset) -> None:
    """Refuse what any network gets right; several labels of an image can be one class that is there or not."""
    classes = dataset.train.classes
    if len(classes) < 2 and dataset.train.labels.ndim == 1:
        raise ValueError(
            f"the dataset {dataset.name} has one class only, {', '.join(classes)}: there is nothing to tell apart; "
            f"give two class folders or more"
        )


# --- Frozen features --------------------------------------------------------------------------------------


def _features(
    config: KnnConfig | FastLinearConfig, encoder: Encoder, dataset: Dataset, part: Literal["learning", "test"]
) -> list[Tensor]:
    """Features of the training and validation part, or of the test part, on the device to work on."""
    cache = config.features.cache or config.out / FEATURES
    with warnings.catch_warnings():
        # That a layer merges nothing or all in some batch is no matter for whoever only wants a number.
        warnings.simplefilter("ignore", SuperpixelWarning)
        if part == "test":
            found = [features_of(encoder, dataset.test, config.margin, config.features, cache)]
        else:
            found = [*learning_features(encoder, dataset, config.margin, config.features, cache)]
    return [features_NC.to(config.features.torch_device) for features_NC in found]


def _knn(config: KnnConfig, encoder: Encoder, dataset: Dataset) -> _Finding:
    train_NC, val_NC = _features(config, encoder, dataset, "learning")
    (test_NC,) = _features(config, encoder, dataset, "test")
    begun = time.monotonic()

    def judged(bank_NC: Tensor, labels: Tensor, queries_MC: Tensor, truth: Tensor) -> dict[str, float]:
        classes = len(dataset.train.classes)
        votes = knn_votes(bank_NC, labels, queries_MC, classes, config.neighbours, config.temperature)
        by_k = {k: score(dataset.metric, votes_MK.cpu(), truth) for k, votes_MK in votes.items()}
        return {f"{name}@{k}": value for k, values in by_k.items() for name, value in values.items()}

    train, both = dataset.train.labels, torch.cat([dataset.train.labels, dataset.val.labels])
    val = judged(train_NC, train, val_NC, dataset.val.labels)
    test = judged(torch.cat([train_NC, val_NC]), both, test_NC, dataset.test.labels)
    return _Finding("knn", {}, val, test, time.monotonic() - begun, config.features.torch_device, [])


def _linear(config: FastLinearConfig, encoder: Encoder, dataset: Dataset) -> _Finding:
    train_NC, val_NC = _features(config, encoder, dataset, "learning")
    begun = time.monotonic()
    classes, metric = len(dataset.train.classes), dataset.metric
    train_labels, val_labels = dataset.train.labels.to(train_NC.device), dataset.val.labels.to(train_NC.device)
    choice = choose_decay(train_NC, train_labels, val_NC, dataset.val.labels, classes, metric, config.decays)
    which = config.decays.index(choice.decay)
    val = score(metric, choice.fits.scores_MK(which, val_NC).cpu(), dataset.val.labels)
    both_NC, labels = torch.cat([train_NC, val_NC]), torch.cat([train_labels, val_labels])
    fit = fit_linear(both_NC, labels, classes, [choice.decay], start=choice.fit)
    seconds = time.monotonic() - begun
    # Only now, when nothing is left to choose.
    (test_NC,) = _features(config, encoder, dataset, "test")
    test = score(metric, fit.scores_MK(0, test_NC).cpu(), dataset.test.labels)
    notes = []
    if choice.at_the_edge:
        notes.append(f"the best weight decay {choice.decay:g} is the last of those tried; try more with --decays")
    if not all(fit.converged):
        notes.append(f"the final fit ended after {fit.steps[0]} steps before it came within its tolerance")
    chosen = {"decay": choice.decay, "val_by_decay": {f"{decay:g}": value for decay, value in choice.values.items()}}
    return _Finding("linear", chosen, val, test, seconds, config.features.torch_device, notes)


# --- Training ---------------------------------------------------------------------------------------------


def _train(config: TrainedConfig, encoder: Encoder, dataset: Dataset, name: str) -> Result:
    fabric = make_fabric(config.train, config.machine)
    folder = RunFolder(config.out / RUNS / name, writes=fabric.is_global_zero)
    try:
        # Weights and images decide what comes out; where they lie does not.
        content = {"identity": encoder.identity, "images": [dataset.train.fingerprint(), dataset.val.fingerprint()]}
        folder.begin(asdict(config) | {"content": content}, free=_FREE)
        task = ClassifyTask(encoder, dataset, config.classify, config.view, config.train, config.machine.replay)
        with warnings.catch_warnings():
            # The log tells how many tokens are left; see also classify.thresholds.
            warnings.simplefilter("ignore", SuperpixelWarning)
            trainer = Trainer(task, config.train, config.machine, folder, fabric)
            trainer.run()
            if fabric.is_global_zero:
                _record(config, encoder, dataset, _judged(config, task, trainer, folder))
        fabric.barrier()
    finally:
        folder.close()
    return read_result(config.out / f"{name}.json")


def _judged(config: TrainedConfig, task: ClassifyTask, trainer: Trainer, folder: RunFolder) -> _Finding:
    task.take_chosen()
    head = {name: tensor.detach().cpu().contiguous() for name, tensor in task.head.state_dict().items()}
    write_whole(folder.path / HEAD_FILE, lambda path: safetensors.torch.save_file(head, path))
    if task.about.vit is not None and not config.classify.frozen:
        save(task.about.vit, folder.path / ENCODER)
    val = task.judge(task.dataset.val)
    chosen = {"epoch": task.chosen_epoch, "ended_at_epoch": _epochs(config, task, trainer.state.step)}
    protocol: Protocol = "linear" if config.classify.frozen else "finetune"
    device = trainer.fabric.device
    return _Finding(protocol, chosen, val, task.test(), trainer.state.seconds, device, [])


def _epochs(config: TrainedConfig, task: ClassifyTask, step: int) -> float:
    return step * config.train.batch / task.epoch_length


# --- The record -------------------------------------------------------------------------------------------


def _fingerprints(dataset: Dataset) -> dict[str, str]:
    return {part: getattr(dataset, part).fingerprint() for part in ("train", "val", "test")}


def _finished(config: EvalConfig, dataset: Dataset, name: str) -> Result | None:
    """The result of this very command, if it is there; one of other settings under its name is an error."""
    file = config.out / f"{name}.json"
    if not file.is_file():
        return None
    result = read_result(file)
    before = {key: value for key, value in result.settings.items() if key not in _FREE}
    now = {key: value for key, value in plain(asdict(config)).items() if key not in _FREE}
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if changed:
        raise ValueError(
            f"{file} holds a result with other settings ({', '.join(changed)}); give the same settings to see it, "
            f"another --out, or remove it"
        )
    if result.data["fingerprints"] != _fingerprints(dataset):
        raise ValueError(f"{file} was measured on other images of {dataset.name}; give another --out, or remove it")
    return result


def _record(config: EvalConfig, encoder: Encoder, dataset: Dataset, finding: _Finding) -> Result:
    about = {
        "name": encoder.name,
        "source": encoder.source,
        "identity": encoder.identity,
        "description": encoder.description,
        "image_size": encoder.image_size,
        "num_features": encoder.num_features,
        "config": plain(encoder.config),
    }
    parts = {"train": dataset.train, "val": dataset.val, "test": dataset.test}
    in_common = _overlap(dataset, config.checkpoint)
    data = {
        "fingerprints": _fingerprints(dataset),
        "images": {name: len(part) for name, part in parts.items()},
        "classes": len(dataset.train.classes),
        "notes": [*dataset.notes, *finding.notes],
        "overlap": in_common,
    }
    result = Result(
        finding.protocol,
        config.recipe,
        dataset.name,
        dataset.metric,
        seed_of(config),
        about,
        data,
        plain(asdict(config)),
        finding.chosen,
        finding.val,
        finding.test,
        finding.seconds,
        device_name(finding.device),
    )
    file = write_result(result, config.out)
    for line in finding.notes:
        tqdm.write(f"note: {line}")
    tqdm.write(f"{told(result)}; {file}")
    return result


def _overlap(dataset: Dataset, checkpoint: str) -> list[str]:
    """What the dataset and the pre-training data of a run's encoder have in common, in words."""
    path = Path(checkpoint)
    # An encoder folder and the file in it lie in the folder of the run.
    for run in (path, *path.parents[:2]) if path.exists() else ():
        if (run / DATA_FILE).is_file():
            found = overlap(dataset, [run]).lines()
            for line in found:
                tqdm.write(f"note: {line}")
            return found
    return [f"not compared with pre-training: {checkpoint} does not say what it was trained on"]


def told(result: Result) -> str:
    """A result in one line."""
    values = ", ".join(f"{name} {value:.1%}" for name, value in result.headline.items())
    return f"{result.encoder['name']} on {result.dataset}, {result.recipe}, seed {result.seed}: {values}"


def check_datasets(names: Sequence[str], data: Path | None) -> None:
    """Refuse names that mean nothing, before hours are spent on those before them."""
    for name in names:
        if name not in DATASETS and not (data is not None and (data / name).is_dir()):
            place = "a folder; say by --data where datasets lie"
            if data is not None:
                place = f"a folder below {data}: there is no folder {data / name}"
            raise ValueError(f"dataset {name!r} is neither one of {', '.join(DATASETS)} nor {place}")
