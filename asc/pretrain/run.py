"""Pre-training from a folder of videos to an encoder file."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from asc.data.images import DEVIATION, MEAN
from asc.data.kept import keep_frames
from asc.data.loading import make_loader
from asc.data.sampling import BatchPlan, Order
from asc.files import write_whole
from asc.layer import LayerStats, SuperpixelWarning
from asc.pretrain.augment import AugmentConfig
from asc.pretrain.data import (
    ClipBatch,
    ClipDataset,
    Corpora,
    DataConfig,
    augmented,
    open_corpora,
    plain_frames,
)
from asc.pretrain.monitors import Learning, Monitor, by_block, effective_rank, spread
from asc.pretrain.replay import Replay
from asc.pretrain.siamese import Agreement, Siamese, SiameseConfig
from asc.report.page import png_bytes
from asc.report.pictures import contact_sheet, draw_boundaries
from asc.run_folder import RunFolder
from asc.tasks.classify.images import Split, folder_split, scene_split
from asc.tasks.classify.probes import knn_accuracy, pixels, split_features
from asc.train import MachineConfig, Measures, Outcome, Task, TrainConfig, Trainer, check_training, make_fabric
from asc.transfer import Transfer
from asc.vit import AscViT, VitConfig
from asc.weights import save

ENCODER, PICTURES, DATA_FILE, RESULT_FILE = "encoder", "superpixels", "data.json", "result.json"


@dataclass(frozen=True)
class WatchConfig:
    """How the quality is followed while training."""

    knn_every: int = 500
    """Steps between two measurements of kNN accuracy; 0: only before and after."""
    knn_data: Path | None = None
    """Folder of labelled images (train/<class>/, val/<class>/); None: the embedded scenes."""
    knn_labelled: int = 2000
    """Images, at most, whose class is known."""
    knn_judged: int = 1000
    """Images, at most, whose class is to be found."""
    knn_neighbours: int = 20
    """Neighbours that vote."""
    pictures_every: int = 500
    """Steps between two pictures of the superpixels of the same few frames; 0: only before and after."""
    pictures: int = 6
    """Number of those frames."""
    calibration: int = 64
    """Training frames that the thresholds are set on, before training and once more for the encoder file; 0: they start
    at ``model.superpixels.theta`` and stay where training leaves them."""


@dataclass(frozen=True)
class PretrainConfig:
    """Everything about a pre-training run."""

    out: Path
    """Folder of the run; the same command again continues what lies there."""
    data: tuple[str, ...] = ("scenes",)
    """Folders of videos or of prepared shards, or ``scenes`` for the embedded ones."""
    clips: DataConfig = DataConfig()
    """Clips and their frames."""
    model: VitConfig = VitConfig()
    """Shape of the encoder."""
    plain: bool = False
    """Whether to train the plain Vision Transformer, without superpixels."""
    augment: AugmentConfig = AugmentConfig()
    """Augmentation of the frames."""
    siamese: SiameseConfig = SiameseConfig()
    """Heads, target and loss."""
    train: TrainConfig = TrainConfig()
    """How weights are learned."""
    watch: WatchConfig = WatchConfig()
    """How the quality is followed."""
    machine: MachineConfig = MachineConfig()
    """Where the work is done; may change between restarts."""

    @property
    def encoder(self) -> VitConfig:
        """Shape of the encoder with or without superpixels, as asked for."""
        return replace(self.model, superpixels=None) if self.plain else self.model


class PretrainTask(Task):
    """Two frames of a clip must agree."""

    untrained_knn: Tensor
    """kNN accuracy before the first step; a continued run does not measure it again."""

    def __init__(self, config: PretrainConfig, corpora: Corpora, judged_on: Split) -> None:
        super().__init__()
        self.config = config
        self.corpora = keep_frames(corpora.clips, config.machine.cache_gb)
        self.order = Order(self.corpora, config.clips.weights, config.train.seed)
        self.epoch_length = self.order.epoch_length
        self.dataset = ClipDataset(self.order, self.corpora, config.clips.frames, config.augment)
        self.judged_on = judged_on
        torch.manual_seed(config.train.seed)
        self.siamese = Siamese(AscViT(config.encoder), config.siamese)
        budgeted = config.encoder.superpixels is not None and config.encoder.superpixels.threshold == "budget"
        superpixels = config.model.superpixels
        self._monitor = Monitor(
            superpixels.budget if budgeted and superpixels else None,
            cosine=superpixels is not None and superpixels.similarity == "cosine",
        )
        self.register_buffer("untrained_knn", torch.tensor(float("nan")))
        self._progress = self._knn_progress = 0.0
        self._replay = Replay(self.siamese) if config.machine.replay else None
        self._last: Agreement | None = None
        self._share = 1.0
        self._knn: float | None = None

    @property
    def target(self) -> AscViT:
        """The encoder that is judged and handed out."""
        return self.siamese.target_encoder or self.siamese.encoder

    # --- What the loop asks for ---------------------------------------------------------------------------

    def forward(self, images_VB3HW: Tensor) -> Outcome:
        """Loss of a micro-batch."""
        if self._replay is None:
            self._last = agreement = self.siamese(images_VB3HW)
        else:
            self._last = agreement = self._replay(images_VB3HW, self.meanwhile)
        return Outcome(agreement.loss, images_VB3HW.shape[0] * images_VB3HW.shape[1])

    def batches(self, plan: BatchPlan, workers: int, pin: bool) -> DataLoader[Any]:
        """The micro-batches of the plan."""
        return make_loader(self.dataset, plan, workers, pin)

    def prepare(self, batch: ClipBatch, device: torch.device) -> Tensor:
        """Augmented frames."""
        return augmented(batch, self.config.augment, device)

    def bad_batch(self, batch: ClipBatch) -> dict[str, Any]:
        """Frames and files of a batch."""
        return {"frames": batch.frames, "positions": batch.positions, "sources": self.dataset.sources(batch.positions)}

    def start(self, device: torch.device) -> None:
        """Set the thresholds of both encoders on training frames, so that training begins on budget."""
        encoder = self.siamese.encoder
        if encoder.budget is not None and self.config.watch.calibration:
            encoder.calibrate(self._frames(self.config.watch.calibration))
            if self.siamese.target_encoder is not None:
                self.siamese.target_encoder.load_state_dict(encoder.state_dict())

    def after_step(self, progress: float) -> None:
        """The budget's shares first, since the target takes them over."""
        self._progress = progress
        self.siamese.encoder.update_thresholds()
        self.siamese.follow(progress)

    def forget_step(self) -> None:
        """What was counted in a step that was not taken says nothing."""
        for layer in self.siamese.encoder.superpixel_layers:
            layer.threshold.reset_counts()

    def parts_to_compile(self) -> list[nn.Module]:
        """Both encoders; each compiles what has no data-dependent shapes inside."""
        encoders = [self.siamese.encoder, self.siamese.target_encoder]
        return [encoder for encoder in encoders if encoder is not None]

    # --- Seeing it ----------------------------------------------------------------------------------------

    def measuring(self, step: int) -> Callable[[], Measures]:
        """Spread and rank of the representation, and what every block does with its tokens."""
        assert self._last is not None
        last, siamese = self._last, self.siamese
        rows = {"feature": Transfer(last.features_BC.detach()), "projection": Transfer(last.projections_BZ.detach())}
        diagnostics = siamese.encoder.diagnosing()
        of_target = siamese.target_encoder.diagnosing() if siamese.target_encoder is not None else dict

        def finish() -> Measures:
            values: dict[str, float] = {}
            for name, transfer in rows.items():
                values[f"{name}_spread"] = spread(transfer.wait())
                values[f"{name}_rank"] = effective_rank(transfer.wait())
            blocks = diagnostics()
            self._share = self._mean_share(blocks)
            if blocks:
                values["tokens_share"] = self._share
            values |= by_block(blocks)
            for block, stats in of_target().items():
                values[f"block_{block:02d}/target_tokens_mean"] = stats.tokens_mean
            return Measures(values, self._judge(step, values, blocks))

        return finish

    def _judge(self, step: int, values: Mapping[str, float], blocks: Mapping[int, LayerStats]) -> list[str]:
        return self._monitor.judge(
            step, values["projection_spread"], values["projection_rank"], blocks, self._share, self._learning()
        )

    def _learning(self) -> Learning | None:
        if self._knn is None:
            return None
        judged = len(self.judged_on.test.labels_B)
        return Learning(float(self.untrained_knn), self._knn, judged, self._knn_progress)

    def _mean_share(self, blocks: Mapping[int, LayerStats]) -> float:
        """Mean share of the original tokens that entered the blocks in the last forward pass."""
        rows, columns = self.config.encoder.grid_of(self.config.encoder.image_hw)
        tokens, shares = 1.0, []
        for block in range(self.config.encoder.depth):
            shares.append(tokens)
            if block in blocks:
                tokens = blocks[block].tokens_mean / (rows * columns)
        return sum(shares) / len(shares)

    def brief(self) -> dict[str, str]:
        """Tokens kept and the last kNN accuracy."""
        shown = {} if self.config.plain else {"tokens": f"{self._share:.0%}"}
        return shown if self._knn is None else shown | {"kNN": f"{self._knn:.1%}"}

    def evaluation_due(self, step: int, last: bool) -> bool:
        """Whether kNN or pictures are wanted now."""
        return (
            step == 0 or last or _due(step, self.config.watch.knn_every) or _due(step, self.config.watch.pictures_every)
        )

    def evaluate(self, step: int, last: bool, folder: RunFolder) -> dict[str, float]:
        """kNN accuracy of the target encoder, and pictures, each at its cadence."""
        watch = self.config.watch
        values: dict[str, float] = {}
        if step == 0 or last or _due(step, watch.knn_every):
            values["knn"] = self._knn = self.knn()
            self._knn_progress = self._progress
        if step == 0:
            self.untrained_knn.fill_(values["knn"])
            values["knn_pixels"] = self._knn_of(*pixels(self.judged_on))
        if not self.config.plain and watch.pictures and (step == 0 or last or _due(step, watch.pictures_every)):
            self._draw(step, folder)
        return values

    def knn(self) -> float:
        """kNN accuracy of the target encoder."""
        return self._knn_of(*split_features(self.target, self.judged_on))

    def _knn_of(self, train_NC: Tensor, test_MC: Tensor) -> float:
        train, test = self.judged_on.train, self.judged_on.test
        return knn_accuracy(train_NC, train.labels_B, test_MC, test.labels_B, self.config.watch.knn_neighbours)

    def _draw(self, step: int, folder: RunFolder) -> None:
        images_B3HW = self._frames(self.config.watch.pictures)
        was_training = self.target.training
        labels_LBhw = self.target.eval().superpixels(images_B3HW).cpu().numpy()
        self.target.train(was_training)
        shown_BHW3 = _as_bytes(images_B3HW.float().cpu())
        merging = self.config.encoder.superpixel_blocks
        places = {len(merging) * part // 3 for part in range(3)} | {len(merging) - 1}
        after = [merging[place] for place in sorted(places)]
        scale = max(1, 128 // shown_BHW3.shape[1])
        rows, captions = [], []
        for index, image_HW3 in enumerate(shown_BHW3):
            large_HW3 = image_HW3.repeat(scale, 0).repeat(scale, 1)
            rows.append([large_HW3, *(draw_boundaries(large_HW3, labels_LBhw[block, index]) for block in after)])
            captions.append(["", *(f"{labels_LBhw[block, index].max() + 1} tokens" for block in after)])
        headings = ["input", *(f"block {block + 1}" for block in after)]
        sheet_HW3 = contact_sheet(rows, headings, captions)
        write_whole(folder.path / PICTURES / f"step_{step:09d}.png", png_bytes(sheet_HW3))
        folder.board(step).add_image("superpixels", sheet_HW3, step, dataformats="HWC")

    def _frames(self, count: int) -> Tensor:
        """Training frames as they are, on the device and in the precision of the network."""
        size = self.config.encoder.image_hw[0]
        return plain_frames(self.order, self.corpora, count, size).to(next(self.parameters()))

    def finished_encoder(self) -> AscViT:
        """The target encoder, its thresholds set once more on training frames as they are, without augmentation."""
        encoder = self.target.eval()
        if encoder.budget is not None and self.config.watch.calibration:
            encoder.calibrate(self._frames(self.config.watch.calibration))
        return encoder


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _as_bytes(images_B3HW: Tensor) -> Any:
    mean_311, deviation_311 = (torch.tensor(x)[:, None, None] for x in (MEAN, DEVIATION))
    bytes_B3HW = ((images_B3HW * deviation_311 + mean_311) * 255).round().clamp(0, 255).to(torch.uint8)
    return bytes_B3HW.permute(0, 2, 3, 1).numpy()


# --- The command ------------------------------------------------------------------------------------------


def pretrain(config: PretrainConfig) -> Path:
    """Train, or go on with a run that was interrupted, and write the encoder.

    Returns:
        The folder with ``encoder.safetensors`` and ``config.json``, for ``asc.load``.
    """
    _check(config)
    fabric = make_fabric(config.train, config.machine)
    folder = RunFolder(config.out, writes=fabric.is_global_zero)
    try:
        folder.begin(asdict(config), free=("machine", "out"))
        if fabric.is_global_zero:
            corpora = open_corpora(config.data, config.clips, config.train.seed, config.out / "found")
            _tell(corpora, folder)
        fabric.barrier()
        if not fabric.is_global_zero:
            corpora = open_corpora(config.data, config.clips, config.train.seed, config.out / "found")
        task = PretrainTask(config, corpora, _judged_on(config))
        with warnings.catch_warnings():
            # The monitor says the same with the step beside it, and the log keeps it.
            warnings.simplefilter("ignore", SuperpixelWarning)
            Trainer(task, config.train, config.machine, folder, fabric).run()
            encoder = task.finished_encoder()  # by all processes together, since they calibrate together
            if fabric.is_global_zero:
                _finish(task, encoder, folder)
        fabric.barrier()
    finally:
        folder.close()
    return config.out / ENCODER


def _check(config: PretrainConfig) -> None:
    check_training(config.train, config.machine)
    size = config.encoder.image_hw
    if size != (config.augment.size, config.augment.size):
        raise ValueError(
            f"augment.size is {config.augment.size} but model.image_size is {config.model.image_size}; set both alike"
        )
    if config.clips.weights is not None and len(config.clips.weights) != len(config.data):
        raise ValueError(f"clips.weights has {len(config.clips.weights)} numbers for {len(config.data)} data folders")
    least = {"calibration": 0, "knn_every": 0, "pictures_every": 0, "pictures": 0}
    for name, number in (least | {"knn_labelled": 1, "knn_judged": 1, "knn_neighbours": 1}).items():
        if getattr(config.watch, name) < number:
            raise ValueError(f"watch.{name} must be at least {number}, got {getattr(config.watch, name)}")


def _judged_on(config: PretrainConfig) -> Split:
    size, watch = config.encoder.image_hw[0], config.watch
    if watch.knn_data is not None:
        return folder_split(watch.knn_data, size, watch.knn_labelled, watch.knn_judged)
    # Another seed than the clips' own: no scene is trained on and judged by.
    scene = replace(config.clips.scene, size=size, seed=config.train.seed + 1)
    return scene_split(scene, watch.knn_labelled, watch.knn_judged)


def untrained_encoder(config: PretrainConfig, frames_B3HW: Tensor) -> AscViT:
    """The encoder as the run begins with it, its thresholds set on these frames."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        encoder = AscViT(config.encoder).eval()
    if encoder.budget is not None:
        encoder.calibrate(frames_B3HW)
    return encoder


def _tell(corpora: Corpora, folder: RunFolder) -> None:
    for findings in corpora.findings:
        for line in findings.lines():
            tqdm.write(line)
    for entry in corpora.unused:
        tqdm.write(f"warning: the leave-out list names {entry}, which is in no corpus")
    record = {"corpora": [asdict(findings) for findings in corpora.findings], "unused_entries": corpora.unused}
    write_whole(folder.path / DATA_FILE, json.dumps(record, indent=2).encode() + b"\n")


def _finish(task: PretrainTask, encoder: AscViT, folder: RunFolder) -> None:
    knn = task.knn()
    save(encoder, folder.path / ENCODER)
    result = {"knn": knn, "parameters": sum(parameter.numel() for parameter in encoder.parameters())}
    write_whole(folder.path / RESULT_FILE, json.dumps(result, indent=2).encode() + b"\n")
    tqdm.write(f"the encoder is {folder.path / ENCODER} (kNN accuracy {knn:.1%}); load it with asc.load")
