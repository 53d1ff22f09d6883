"""An encoder and a head as one detector, and its training on the one loop."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from asc.data.keyed import Key
from asc.data.loading import Place, Shuffled, make_loader
from asc.data.sampling import BatchPlan
from asc.files import write_whole
from asc.precision import Precision, autocast
from asc.pretrain.monitors import Monitor, by_block
from asc.run_folder import RunFolder
from asc.tasks.detect.augment import AugmentConfig, Fit, Placed, augmented, fitted, middle
from asc.tasks.detect.canvas import images_alone
from asc.tasks.detect.data import DataConfig, DetectionSet, Sample, Truth
from asc.tasks.detect.detr import DetrConfig, DetrHead
from asc.tasks.detect.fasterrcnn import FasterRcnnConfig, FasterRcnnHead
from asc.tasks.detect.head import DetectionHead, View, chosen_blocks
from asc.tasks.detect.matching import MatchCost
from asc.tasks.detect.metrics import Detections, Scores, average_precision
from asc.tasks.encoders import weights_digest
from asc.tasks.images import read_ahead
from asc.train import MachineConfig, Measures, Outcome, Task, TrainConfig
from asc.transfer import Transfer
from asc.vit import AscViT
from asc.weights import load, load_state, read_state, save

HeadName = Literal["fasterrcnn", "detr"]
ENCODER, HEAD_FILE, SETTINGS_FILE = "encoder", "head.safetensors", "detector.json"


@dataclass(frozen=True)
class WatchConfig:
    """How the quality is followed while training."""

    every: int = 1000
    """Steps between two judgements; 0: only at the end."""
    judged: int | None = None
    """Test images, at most, that are judged while training; at the end all are."""
    batch: int = 8
    """Test images that are looked at together."""
    pictures: int = 8
    """Test images that the page shows; as many of the worst ones come on top."""
    calibration: int = 16
    """Training images that the thresholds are set on before training; 0: they stay as they were loaded."""


@dataclass(frozen=True)
class DetectConfig:
    """Everything about the training of a detector."""

    out: Path
    """Folder of the run; the same command again continues what lies there."""
    data: str = "scenes"
    """The folder VOCdevkit of PASCAL VOC, or ``scenes`` for the embedded ones."""
    sets: DataConfig = field(default_factory=DataConfig)
    """Which of its images."""
    encoder: str = "random"
    """Where the encoder comes from: a run of pre-training, a folder, a weights file, or ``random``."""
    frozen: bool = False
    """Whether the encoder stays as it is and only the head learns."""
    encoder_lr: float = 1.0
    """Share of the learning rate that the encoder gets."""
    head: HeadName = "fasterrcnn"
    """``fasterrcnn``: proposals and regions on maps (the paper's appendix); ``detr``: queries that attend to the
    superpixels (the paper's text)."""
    fasterrcnn: FasterRcnnConfig = field(default_factory=FasterRcnnConfig)
    """Settings of that head."""
    detr: DetrConfig = field(default_factory=DetrConfig)
    """Settings of the other one."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """Size of the canvas, and the augmentation."""
    train: TrainConfig = TrainConfig()
    """How weights are learned."""
    watch: WatchConfig = field(default_factory=WatchConfig)
    """How the quality is followed."""
    machine: MachineConfig = MachineConfig()
    """Where the work is done; may change between restarts."""


# --- The detector -----------------------------------------------------------------------------------------


class Detector(nn.Module):
    """Finds objects in images.

    Args:
        encoder: The Vision Transformer, with or without superpixels.
        head: What finds objects in its tokens.
        classes: Names of the classes.
        size: Side of the canvas in pixels.
        blocks: Blocks after which the head looks, from 0.
        frozen: Whether the encoder does not learn.
    """

    def __init__(
        self,
        encoder: AscViT,
        head: DetectionHead,
        classes: Sequence[str],
        size: int,
        blocks: Sequence[int],
        frozen: bool = False,
    ) -> None:
        super().__init__()
        encoder.config.grid_of((size, size))
        self.encoder, self.head = encoder, head
        self.classes, self.size, self.blocks, self.frozen = tuple(classes), size, list(blocks), frozen
        # What no loss depends on must not wait for a gradient when several processes exchange theirs.
        for part in [encoder.norm, *encoder.blocks[max(blocks) + 1 :]]:
            part.requires_grad_(False)
        if frozen:
            encoder.requires_grad_(False)

    @property
    def identity(self) -> str:
        """Digest of weights and of all that says what is computed with them."""
        about = {"encoder": asdict(self.encoder.config), "classes": self.classes, "size": self.size}
        return weights_digest(self, about | {"head": _head_record(self.head)})

    def train(self, mode: bool = True) -> Detector:
        """Training mode, except for an encoder that does not learn."""
        super().train(mode)
        if self.frozen:
            self.encoder.eval()
        return self

    def view(self, images_B3SS: Tensor, real: list[tuple[int, int]]) -> View:
        """What the encoder makes of canvases."""
        learns = torch.is_grad_enabled() and not self.frozen
        with torch.set_grad_enabled(learns), images_alone(self.encoder, real):
            levels = self.encoder.forward_blocks(images_B3SS, self.blocks)
        return View(levels, real, self.encoder.config.patch_size)

    def losses(self, images_B3SS: Tensor, real: list[tuple[int, int]], truths: Sequence[Truth]) -> dict[str, Tensor]:
        """The parts of the loss, by name."""
        return self.head.losses(self.view(images_B3SS, real), truths)

    @torch.no_grad()
    def find(self, images: Sequence[NDArray[np.uint8]], precision: Precision = "auto") -> list[Detections]:
        """The objects in images of any sizes, in their own pixels and on the host; in evaluation mode."""
        device = next(self.parameters()).device
        canvases, fits = zip(*(fitted(image_HW3, self.size) for image_HW3 in images), strict=True)
        images_B3SS = torch.stack(canvases).to(next(self.parameters()))
        with autocast(device, precision):
            found = self.head.detect(self.view(images_B3SS, [fit.real for fit in fits]))
        return [_in_image(detections.cpu(), fit) for detections, fit in zip(found, fits, strict=True)]


def _in_image(found: Detections, fit: Fit) -> Detections:
    found = found._replace(boxes_K4=fit.to_image(found.boxes_K4))
    return found.only(found.scores_K.argsort(descending=True, stable=True))


def make_head(config: FasterRcnnConfig | DetrConfig, encoder: AscViT, classes: int) -> DetectionHead:
    """A head with fresh weights."""
    levels = len(chosen_blocks(config.blocks, encoder.config.depth))
    if isinstance(config, DetrConfig):
        return DetrHead(encoder.config.width, levels, classes, config)
    return FasterRcnnHead(encoder.config.width, levels, classes, config)


def make_detector(config: DetectConfig, encoder: AscViT, classes: Sequence[str]) -> Detector:
    """A detector with a fresh head."""
    settings: FasterRcnnConfig | DetrConfig = config.detr if config.head == "detr" else config.fasterrcnn
    blocks = chosen_blocks(settings.blocks, encoder.config.depth)
    head = make_head(settings, encoder, len(classes))
    return Detector(encoder, head, classes, config.augment.size, blocks, config.frozen)


# --- On disk ----------------------------------------------------------------------------------------------


def save_detector(detector: Detector, folder: Path) -> None:
    """Write a detector to a folder; ``load_detector`` reads it back."""
    save(detector.encoder, folder / ENCODER)
    state = {name: tensor.detach().contiguous() for name, tensor in detector.head.state_dict().items()}
    write_whole(folder / HEAD_FILE, lambda file: safetensors.torch.save_file(state, file))
    settings = _head_record(detector.head) | {"classes": detector.classes, "size": detector.size}
    write_whole(folder / SETTINGS_FILE, json.dumps(settings, indent=2).encode() + b"\n")


def _head_record(head: DetectionHead) -> dict[str, Any]:
    assert isinstance(head, DetrHead | FasterRcnnHead)
    return {"head": "detr" if isinstance(head, DetrHead) else "fasterrcnn", "settings": asdict(head.config)}


def load_detector(folder: Path) -> Detector:
    """The detector that a run left in its folder ``detector``, in evaluation mode."""
    folder = folder if (folder / SETTINGS_FILE).is_file() else folder / "detector"
    for name in (SETTINGS_FILE, HEAD_FILE):
        if not (folder / name).is_file():
            raise ValueError(f"{folder.parent} holds no trained detector: {folder / name} is missing")
    encoder = load(folder / ENCODER)
    try:
        settings = json.loads((folder / SETTINGS_FILE).read_text())
        name, classes, size = settings["head"], settings["classes"], settings["size"]
        if name not in get_args(HeadName):
            raise ValueError(f"unknown head {name!r}")
        config = _head_config(name, settings["settings"])
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / SETTINGS_FILE} does not describe a detector: {error}") from error
    head = make_head(config, encoder, len(classes))
    load_state(head, read_state(folder / HEAD_FILE), str(folder / HEAD_FILE))
    return Detector(encoder, head, classes, size, chosen_blocks(config.blocks, encoder.config.depth)).eval()


def _head_config(name: str, settings: Mapping[str, Any]) -> FasterRcnnConfig | DetrConfig:
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()
    }
    if name == "detr":
        return DetrConfig(**values | {"cost": MatchCost(**values["cost"])})
    return FasterRcnnConfig(**values)


# --- Batches ----------------------------------------------------------------------------------------------


class DetectBatch(NamedTuple):
    """Canvases of one micro-batch and what is on them."""

    images_B3SS: Tensor
    real: list[tuple[int, int]]
    truths: list[Truth]
    positions: list[int]
    """Places in the order of samples; name the batch in messages."""


class DetectDataset(Dataset[DetectBatch]):
    """Augmented batches by the positions of their samples."""

    def __init__(self, samples: DetectionSet, augment: AugmentConfig, seed: int, difficult: bool) -> None:
        self.samples, self.augment, self.seed, self.difficult = samples, augment, seed, difficult
        self.order = Shuffled(len(samples), seed)

    def __getitem__(self, positions: list[int]) -> DetectBatch:
        places = [self.order.place(position) for position in positions]
        placed = [self._placed(self.samples[place.sample], place) for place in places]
        images_B3SS = torch.stack([each.image_3SS for each in placed])
        return DetectBatch(images_B3SS, [each.real for each in placed], [each.truth for each in placed], positions)

    def _placed(self, sample: Sample, place: Place) -> Placed:
        truth = sample.truth if self.difficult else sample.truth.only(~sample.truth.difficult_K)
        return augmented(sample.image_HW3, truth, self.augment, Key(self.seed, place.epoch, place.sample, 0))

    def sources(self, positions: Sequence[int]) -> list[str]:
        """The images that samples come from."""
        return [self.samples.name(self.order.place(position).sample) for position in positions]


# --- Training ---------------------------------------------------------------------------------------------


class DetectTask(Task):
    """A detector learns from boxes."""

    def __init__(self, config: DetectConfig, encoder: AscViT, train: DetectionSet, test: DetectionSet) -> None:
        super().__init__()
        self.config, self.test = config, test
        self.dataset = DetectDataset(train, config.augment, config.train.seed, config.sets.difficult)
        self.epoch_length = len(train)
        torch.manual_seed(config.train.seed)
        self.detector = make_detector(config, encoder, train.classes)
        self._parts: dict[str, Tensor] = {}
        self._judged: Judged | None = None
        self._monitor = Monitor()

    def forward(self, batch: DetectBatch) -> Outcome:
        """Loss of a micro-batch."""
        parts = self.detector.losses(batch.images_B3SS, batch.real, batch.truths)
        self._parts = {name: part.detach() for name, part in parts.items()}
        return Outcome(torch.stack(list(parts.values())).sum(), len(batch.real))

    def batches(self, plan: BatchPlan, workers: int, pin: bool) -> DataLoader[Any]:
        """The micro-batches of the plan."""
        return make_loader(self.dataset, plan, workers, pin)

    def prepare(self, batch: DetectBatch, device: torch.device) -> DetectBatch:
        """The batch on the device."""
        # Which regions are sampled and what is dropped depends on the batch alone, not on what was drawn before it: so
        # a continued run goes on alike in any number of processes.
        seeds = np.random.SeedSequence([self.config.train.seed, batch.positions[0]])
        torch.manual_seed(int(seeds.generate_state(1)[0]))
        images_B3SS = batch.images_B3SS.to(device, non_blocking=True)
        return batch._replace(images_B3SS=images_B3SS, truths=[truth.to(device) for truth in batch.truths])

    def bad_batch(self, batch: DetectBatch) -> dict[str, Any]:
        """Canvases, boxes and files of a batch."""
        boxes = [truth.boxes_K4 for truth in batch.truths]
        return {"images": batch.images_B3SS, "boxes": boxes, "sources": self.dataset.sources(batch.positions)}

    def start(self, device: torch.device) -> None:
        """Set the thresholds on training images: what they were set on before may have been smaller or plainer."""
        count = min(self.config.watch.calibration, self.epoch_length)
        encoder = self.detector.encoder
        if encoder.budget is not None and count:
            samples = [self.dataset.samples[self.dataset.order.place(position).sample] for position in range(count)]
            # Canvases without an empty part, which the encoder never gets to see otherwise either.
            canvases = [fitted(middle(sample.image_HW3), self.detector.size)[0] for sample in samples]
            encoder.calibrate(torch.stack(canvases).to(next(self.parameters())))

    def after_step(self, progress: float) -> None:
        """Keep the tokens on budget while the encoder changes."""
        if not self.config.frozen:
            self.detector.encoder.update_thresholds()

    def forget_step(self) -> None:
        """What was counted in a step that was not taken says nothing."""
        for layer in self.detector.encoder.superpixel_layers:
            layer.threshold.reset_counts()

    def lr_share(self, name: str) -> float:
        """The encoder may learn more slowly."""
        return self.config.encoder_lr if name.startswith("detector.encoder.") else 1.0

    def parts_to_compile(self) -> list[nn.Module]:
        """The encoder."""
        return [self.detector.encoder]

    # --- Seeing it ----------------------------------------------------------------------------------------

    def measuring(self, step: int) -> Callable[[], Measures]:
        """Parts of the loss, and what every block does with its tokens."""
        names, parts = list(self._parts), Transfer(torch.stack([part.detach() for part in self._parts.values()]))
        diagnostics = self.detector.encoder.diagnosing()

        def finish() -> Measures:
            values = {f"loss_{name}": part for name, part in zip(names, parts.wait().tolist(), strict=True)}
            blocks = diagnostics()
            # Of the monitor's signs only those of the grouping say something here.
            return Measures(values | by_block(blocks), self._monitor.judge(step, 1.0, math.inf, blocks, 1.0))

        return finish

    def brief(self) -> dict[str, str]:
        """The last score."""
        return {} if self._judged is None else {"AP50": f"{self._judged.scores.area:.1%}"}

    def evaluation_due(self, step: int, last: bool) -> bool:
        """At the asked cadence and at the end."""
        every = self.config.watch.every
        return last or (step > 0 and every > 0 and step % every == 0)

    def evaluate(self, step: int, last: bool, folder: RunFolder) -> dict[str, float]:
        """Average precision on test images; at the end on all of them."""
        self._judged = self.judged(None if last else self.config.watch.judged)
        return {"ap50": self._judged.scores.area, "ap50_eleven": self._judged.scores.eleven}

    def judged(self, most: int | None = None) -> Judged:
        """What the detector finds in test images."""
        return judge(self.detector, self.test, self.config.watch.batch, self.config.train.precision, most)

    @property
    def final(self) -> Judged:
        """What the finished detector finds in all test images; of a run that was finished before, found once more."""
        if self._judged is None or len(self._judged.found) < len(self.test):
            self._judged = self.judged()
        return self._judged


class Judged(NamedTuple):
    """What a detector found in test images, and how good that is."""

    found: list[Detections]
    truths: list[Truth]
    scores: Scores


def check_classes(detector: Detector, test: DetectionSet) -> None:
    """Refuse images that show other things than the detector knows."""
    if tuple(detector.classes) != tuple(test.classes):
        known, shown = (", ".join(classes[:3]) for classes in (detector.classes, test.classes))
        raise ValueError(f"the detector knows other classes ({known}, …) than the test images show ({shown}, …)")


def judge(
    detector: Detector, test: DetectionSet, batch: int, precision: Precision = "auto", most: int | None = None
) -> Judged:
    """Let a detector look at test images, the first ``most`` of them, and compare with the truth."""
    check_classes(detector, test)
    was_training = detector.training
    detector.eval()
    found: list[Detections] = []
    truths: list[Truth] = []
    coming = read_ahead(test.__getitem__, len(test) if most is None else min(most, len(test)), 2 * batch)
    while samples := list(islice(coming, batch)):
        found += detector.find([sample.image_HW3 for sample in samples], precision)
        truths += [sample.truth for sample in samples]
    detector.train(was_training)
    return Judged(found, truths, average_precision(found, truths, len(test.classes)))
