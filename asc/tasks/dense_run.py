"""Training, judging and showing predictions for every pixel; what the kinds of prediction have in common.

The folder of a run holds, beside what every run has (see ``asc.run_folder``):

    best/, last/     the model: encoder/ as ``asc.save`` writes it, head.safetensors, head.json
    result.json      settings, versions and scores on the whole validation part
    index.html       input, superpixels, prediction and truth, the worst cases among them
"""

from __future__ import annotations

import io
import json
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from asc.data.images import normalise
from asc.data.loading import make_loader
from asc.data.sampling import BatchPlan
from asc.files import write_whole
from asc.layer import SuperpixelWarning
from asc.precision import autocast
from asc.pretrain.monitors import by_block
from asc.report.groupings import superpixel_warnings
from asc.report.page import Page, png_bytes
from asc.report.words import plural, versions
from asc.run_folder import RunFolder
from asc.tasks.dense import DenseModel, InferenceConfig, Sizes
from asc.tasks.dense_results import (
    Judged,
    Kind,
    Viewer,
    add_examples,
    judge_constant,
    judge_model,
    results_page,
)
from asc.tasks.devices import accelerator_device
from asc.tasks.encoders import open_encoder
from asc.tasks.evaluations import found_result, plain_settings
from asc.tasks.images import (
    JointConfig,
    PairBatch,
    PairDataset,
    Pairs,
    Readable,
    image_files,
    read_image,
    unread_note,
)
from asc.train import MachineConfig, Measures, Outcome, Task, TrainConfig, Trainer, check_training, make_fabric
from asc.vit import AscViT
from asc.weights import load, load_state, read_state, save

BEST, LAST, ENCODER, RESULT_FILE, PAGE_FILE = "best", "last", "encoder", "result.json", "index.html"
ARRAYS, PICTURES = "arrays", "pictures"
HEAD_WEIGHTS, HEAD_FILE = "head.safetensors", "head.json"


@dataclass(frozen=True)
class TuneConfig:
    """How the encoder takes part in the training."""

    frozen: bool = False
    """Whether it stays as it is and only the head learns."""
    encoder_lr: float = 1.0
    """Share of the learning rate that the encoder gets."""
    calibration: int = 32
    """Training crops that the thresholds are set on before training, since other images in another size come; 0: keep
    the thresholds of the encoder."""


@dataclass(frozen=True)
class WatchConfig:
    """How the quality is followed while training."""

    every: int = 500
    """Steps between two judgements on the validation part; 0: only at the end."""
    most: int | None = None
    """Images judged while training, at most; in the end all are."""
    pictures: int = 8
    """Images on the page: the first few, and as many of the worst."""


@dataclass(frozen=True)
class DenseConfig:
    """What all trainings of predictions for every pixel are told."""

    out: Path
    """Folder of the run; the same command again continues what lies there."""
    data: str = "scenes"
    """Folder of the data, or ``scenes`` for the embedded ones."""
    encoder: str = "random"
    """A run, an encoder folder, a weights file, or ``random``; see ``asc.tasks.encoders``."""
    tune: TuneConfig = TuneConfig()
    """How the encoder takes part."""
    augment: JointConfig = JointConfig()
    """Random changes of the training images."""
    inference: InferenceConfig = InferenceConfig()
    """How whole images are predicted."""
    watch: WatchConfig = WatchConfig()
    """How the quality is followed."""
    train: TrainConfig = TrainConfig()
    """How weights are learned."""
    machine: MachineConfig = MachineConfig()
    """Where the work is done; may change between restarts."""

    @property
    def sizes(self) -> Sizes:
        """What inference must know of the training."""
        return Sizes(self.augment.base or self.augment.size, self.augment.size)


# --- The task ---------------------------------------------------------------------------------------------


class DenseTask(Task):
    """Fine-tuning for a prediction for every pixel."""

    best_score: Tensor
    best_step: Tensor

    def __init__(self, config: DenseConfig, model: DenseModel, kind: Kind, train: Pairs, val: Pairs) -> None:
        super().__init__()
        self.config = config
        self.model = model
        self.kind = kind
        self.dataset = PairDataset(train, config.augment, config.train.seed)
        self.val = val
        self.epoch_length = len(train)
        # Kept with the weights: a continued run must know what it has to beat.
        self.register_buffer("best_score", torch.tensor(-torch.inf, dtype=torch.float64))
        self.register_buffer("best_step", torch.tensor(0))
        self._shown = ""
        self.final: Judged | None = None

    @abstractmethod
    def loss(self, maps_BKSR: Tensor, truth_BSR: Tensor, images_B3SR: Tensor) -> Tensor:
        """What is minimised."""

    @abstractmethod
    def trivial(self) -> Tensor:
        """The best prediction (K, 1, 1) without looking at an image."""

    # --- What the loop asks for ---------------------------------------------------------------------------

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Outcome:
        """Loss of a micro-batch."""
        images_B3SR, truth_BSR = inputs
        maps_BKSR = self.model(images_B3SR)
        # Sums over millions of pixels need more digits than half precision has.
        with torch.autocast(images_B3SR.device.type, enabled=False):
            return Outcome(self.loss(maps_BKSR, truth_BSR, images_B3SR), len(images_B3SR))

    def batches(self, plan: BatchPlan, workers: int, pin: bool) -> DataLoader[Any]:
        """The micro-batches of the plan."""
        return make_loader(self.dataset, plan, workers, pin)

    def prepare(self, batch: PairBatch, device: torch.device) -> tuple[Tensor, Tensor]:
        """Normalised crops and their truth."""
        images_B3SR = batch.images_B3SR.to(device, non_blocking=True)
        return normalise(images_B3SR.permute(0, 2, 3, 1)), batch.truth_BSR.to(device, non_blocking=True)

    def bad_batch(self, batch: PairBatch) -> dict[str, Any]:
        """Crops and files of a batch."""
        sources = self.dataset.sources(batch.positions)
        return {"images": batch.images_B3SR, "truth": batch.truth_BSR, "sources": sources}

    def start(self, device: torch.device) -> None:
        """Set the thresholds on training crops: other images in another size come than the encoder has seen."""
        count = min(self.config.tune.calibration, len(self.dataset.pairs))
        if count and self.model.encoder.budget is not None:
            images_B3SR, _ = self.prepare(self.dataset[list(range(count))], device)
            with autocast(device, self.config.train.precision):
                self.model.encoder.calibrate(images_B3SR.to(next(self.parameters()).dtype))

    def after_step(self, progress: float) -> None:
        """The controllers of the thresholds follow."""
        if not self.config.tune.frozen:
            self.model.encoder.update_thresholds()

    def forget_step(self) -> None:
        """What was counted in a step that was not taken says nothing."""
        for layer in self.model.encoder.superpixel_layers:
            layer.threshold.reset_counts()

    def lr_share(self, name: str) -> float:
        """The encoder's share."""
        return self.config.tune.encoder_lr if name.startswith("model.encoder.") else 1.0

    def parts_to_compile(self) -> list[nn.Module]:
        """The encoder."""
        return [self.model.encoder]

    def measuring(self, step: int) -> Callable[[], Measures]:
        """What every block leaves of its tokens; a giant component is told."""
        diagnostics = self.model.encoder.diagnosing()

        def finish() -> Measures:
            with superpixel_warnings() as messages:
                blocks = diagnostics()
            return Measures(by_block(blocks), messages)

        return finish

    def brief(self) -> dict[str, str]:
        """The last score."""
        return {self.kind.main: self._shown} if self._shown else {}

    def evaluation_due(self, step: int, last: bool) -> bool:
        """At the start for the trivial prediction, at the cadence, and at the end."""
        every = self.config.watch.every
        return step == 0 or last or (every > 0 and step % every == 0)

    def evaluate(self, step: int, last: bool, folder: RunFolder) -> dict[str, float]:
        """Scores on the validation part; better weights than ever before are written to ``best/``."""
        if step == 0:
            return {f"trivial/{name}": value for name, value in self.trivial_scores.items()}
        judged = self.judged(self.config.watch.most)
        score = judged.values[self.kind.main]
        if last and len(judged.scores) == len(self.val):
            self.final = judged
        self._shown = f"{score:.3f}"
        if score > float(self.best_score):
            self.best_score.fill_(score)
            self.best_step.fill_(step)
            save_model(self.model, folder.path / BEST, self.record())
        return {f"val/{name}": value for name, value in judged.values.items()}

    @cached_property
    def trivial_scores(self) -> dict[str, float]:
        """The scores of the trivial prediction."""
        return judge_constant(self.trivial(), self.val, self.kind.judge())

    def record(self) -> dict[str, Any]:
        """What a saved model must say to be used."""
        sizes = asdict(self.config.sizes)
        return {"task": self.kind.name, "blocks": list(self.model.blocks), "sizes": sizes} | self.kind.record()

    def judged(self, most: int | None = None) -> Judged:
        """The model as it is, judged on the validation part."""
        config = self.config
        return judge_model(
            self.model, self.val, self.kind.judge(), config.sizes, config.inference, config.train.precision, most
        )


# --- Models on disk ---------------------------------------------------------------------------------------


def save_model(model: DenseModel, folder: Path, record: dict[str, Any]) -> None:
    """Write encoder, head and what is needed to use them."""
    save(model.encoder, folder / ENCODER)
    state = {name: x.detach().contiguous() for name, x in model.state_dict().items() if not name.startswith("encoder.")}
    write_whole(folder / HEAD_WEIGHTS, lambda file: safetensors.torch.save_file(state, file))
    write_whole(folder / HEAD_FILE, json.dumps(record, indent=2).encode() + b"\n")


def read_record(path: Path, task: str) -> tuple[Path, dict[str, Any]]:
    """The folder of a saved model at or below a path (a run has ``best/`` and ``last/``), and its record."""
    for folder in (path, path / BEST, path / LAST):
        if (folder / HEAD_FILE).is_file():
            record: dict[str, Any] = json.loads((folder / HEAD_FILE).read_text())
            if record.get("task") != task:
                raise ValueError(f"{folder} holds a model for {record.get('task')}, not for {task}")
            return folder, record
    raise ValueError(f"{path} holds no trained model: neither {HEAD_FILE} nor {BEST}/{HEAD_FILE} is there")


def load_model(
    folder: Path, head: Callable[[AscViT], nn.Module], blocks: Sequence[int], accelerator: str
) -> DenseModel:
    """The model of a folder in evaluation mode; ``head`` makes the head that its record asks for."""
    encoder = load(folder / ENCODER)
    model = DenseModel(encoder, head(encoder), blocks)
    state = {f"encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}
    load_state(model, state | read_state(folder / HEAD_WEIGHTS), str(folder / HEAD_WEIGHTS))
    return model.to(accelerator_device(accelerator)).eval()


def surroundings(model: DenseModel) -> dict[str, str]:
    """What numbers may depend on beside the settings."""
    device = next(model.parameters()).device
    return versions() | {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type}


# --- The run ----------------------------------------------------------------------------------------------


def train_dense(config: DenseConfig, make_task: Callable[[AscViT], DenseTask]) -> Path:
    """Train, or go on with a run that was interrupted; write the model, the results and the page.

    Returns:
        The folder of the run.
    """
    _check(config)
    fabric = make_fabric(config.train, config.machine)
    folder = RunFolder(config.out, writes=fabric.is_global_zero)
    try:
        folder.begin(asdict(config), free=("machine", "out"))
        opened = open_encoder(config.encoder, config.augment.size, "augment.size")
        if opened.vit is None:
            raise ValueError(f"encoder {config.encoder} gives pooled features only; dense tasks need a network of ours")
        torch.manual_seed(config.train.seed)
        task = make_task(opened.vit)
        with warnings.catch_warnings():
            # What one batch shows is no news while the thresholds follow the training; the log tells of giants.
            warnings.simplefilter("ignore", SuperpixelWarning)
            Trainer(task, config.train, config.machine, folder, fabric).run()
            if fabric.is_global_zero:
                _finish(task, folder, opened.description)
        fabric.barrier()
    finally:
        folder.close()
    return config.out


def _check(config: DenseConfig) -> None:
    check_training(config.train, config.machine)
    for name, value in (("tune.calibration", config.tune.calibration), ("watch.every", config.watch.every)):
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    if config.tune.encoder_lr < 0:
        raise ValueError(f"tune.encoder_lr must be at least 0, got {config.tune.encoder_lr}")
    if config.watch.most is not None and config.watch.most < 1:
        raise ValueError(f"watch.most must be at least 1, or None for all, got {config.watch.most}")


def _finish(task: DenseTask, folder: RunFolder, encoder: str) -> None:
    save_model(task.model, folder.path / LAST, task.record())
    kind, config = task.kind, task.config
    last = task.final or task.judged()
    result: dict[str, Any] = {
        "task": kind.name,
        "encoder": encoder,
        "settings": plain_settings(config),
        "versions": surroundings(task.model),
        "parameters": sum(parameter.numel() for parameter in task.model.parameters()),
        "images": len(last.scores),
        "trivial": task.trivial_scores,
        "best": {"step": int(task.best_step), kind.main: float(task.best_score)},
        "last": last.values | last.details,
    }
    write_whole(folder.path / RESULT_FILE, json.dumps(result, indent=2).encode() + b"\n")
    page = results_page(f"{kind.title} of {task.val.name}", encoder, last, result["trivial"])
    viewer = Viewer(task.model, kind, config.sizes, config.inference, config.train.precision)
    add_examples(page, viewer, task.val, last, config.watch.pictures)
    page.write(folder.path / PAGE_FILE)
    score = f"{kind.main} {last.values[kind.main]:.4f}"
    tqdm.write(f"{score} on {task.val.name}; models, {RESULT_FILE} and {PAGE_FILE} are in {folder.path}")


# --- Judging and predicting with a saved model ------------------------------------------------------------


@dataclass(frozen=True)
class DenseEvaluation:
    """Judge a trained model."""

    model: Path
    """Folder of a run (its best weights are taken), or its ``best/`` or ``last/``."""
    out: Path
    """Folder for ``result.json`` and the page."""
    data: str = "scenes"
    """Folder of the data, or ``scenes`` for the embedded ones."""
    inference: InferenceConfig = InferenceConfig()
    """How whole images are predicted."""
    most: int | None = None
    """Images judged, at most."""
    pictures: int = 8
    """Images on the page; half of them are the worst cases."""
    accelerator: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``mps``."""


@dataclass(frozen=True)
class DensePrediction:
    """Predict every pixel of the images of a folder."""

    model: Path
    """Folder of a run (its best weights are taken), or its ``best/`` or ``last/``."""
    images: Path
    """Folder of images."""
    out: Path
    """Folder for arrays, pictures and a page."""
    inference: InferenceConfig = InferenceConfig()
    """How whole images are predicted."""
    pictures: int = 24
    """Images on the page, at most."""
    accelerator: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``mps``."""


def evaluate_dense(viewer: Viewer, pairs: Pairs, settings: DenseEvaluation) -> Path:
    """Judge a saved model; write ``result.json`` and the page."""
    _check_shown(settings.pictures)
    if settings.most is not None and settings.most < 1:
        raise ValueError(f"most must be at least 1, or None for all, got {settings.most}")
    out = settings.out
    identity, fingerprint = viewer.identity, pairs.fingerprint(settings.most)
    contents = {"model": ("model.identity", identity), "data": ("data.fingerprint", fingerprint)}
    found = found_result(out / RESULT_FILE, out / PAGE_FILE, settings, contents)
    if found is not None:
        print(f"{_told(found['scores'])}; was there already, more in {out}")
        return out / RESULT_FILE
    with superpixel_warnings() as messages:
        judged = viewer.judged(pairs, settings.most)
    result: dict[str, Any] = {
        "task": viewer.kind.name,
        "settings": plain_settings(settings),
        "model": {"identity": identity},
        "data": {"name": pairs.name, "fingerprint": fingerprint},
        "versions": surroundings(viewer.model),
        "images": len(judged.scores),
        "scores": judged.values | judged.details,
    }
    # Before the pictures are drawn: whatever happens to them, the scores are kept.
    write_whole(out / RESULT_FILE, json.dumps(result, indent=2).encode() + b"\n")
    with superpixel_warnings() as shown:
        page = results_page(f"{viewer.kind.title} of {pairs.name}", plural(len(judged.scores), "image"), judged, None)
        add_examples(page, viewer, pairs, judged, settings.pictures)
    page.warnings("On the superpixels", list(dict.fromkeys([*messages, *shown])))
    page.write(out / PAGE_FILE)
    print(f"{_told(result['scores'])}; more in {out}")
    return out / RESULT_FILE


def _told(scores: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in scores.items() if isinstance(value, float))


def _check_shown(pictures: int) -> None:
    if pictures < 0:
        raise ValueError(f"pictures must be at least 0, got {pictures}")


def predict_dense(viewer: Viewer, settings: DensePrediction) -> Path:
    """Write for every image of a folder the prediction as an array and as a picture, and a page of the first few.

    Images that cannot be read are passed over and named in the end.
    """
    _check_shown(settings.pictures)
    files, out = image_files(settings.images), settings.out
    page = Page(f"{viewer.kind.title} of {settings.images}", plural(len(files), "image"))
    images = Readable(files, 2 * settings.inference.batch)
    with superpixel_warnings() as messages:
        for number, maps_KHW in viewer.predictions(tqdm(images, total=len(files), unit="image", disable=None)):
            file = images.read[number]
            _write_prediction(viewer, maps_KHW, out, file.name)
            if number < settings.pictures:
                viewer.add_card(page, file.name, read_image(file), maps_KHW)
    unread = unread_note(_others(settings.images, files))
    if unread:
        page.paragraph(unread)
    page.warnings(images.told, images.skipped)
    page.warnings("On the superpixels", messages)
    page.write(out / PAGE_FILE)
    print(f"{plural(len(images.read), 'image')}: {out / ARRAYS}, {out / PICTURES} and {out / PAGE_FILE}")
    images.tell(unread)
    return out


def _others(folder: Path, files: Sequence[Path]) -> list[str]:
    known = set(files)
    return sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir() if entry not in known)


def _write_prediction(viewer: Viewer, maps_KHW: Tensor, out: Path, name: str) -> None:
    # The whole name with its ending: a.jpg and a.png may lie side by side.
    array = io.BytesIO()
    np.save(array, viewer.kind.array(maps_KHW))
    write_whole(out / ARRAYS / f"{name}.npy", array.getvalue())
    write_whole(out / PICTURES / f"{name}.png", png_bytes(viewer.kind.show(maps_KHW)))
