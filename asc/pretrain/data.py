"""From corpora of clips to batches of augmented frames.

Shape letters beside those of ``asc.pretrain.siamese``: H, W rows and columns of a stored frame, S side of an
augmented one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from asc.data.clips import SCENES, Clips, Findings, FolderClips, FolderSettings, SceneClips, read_leave_out, without
from asc.data.images import normalise
from asc.data.sampling import FrameChoice, Order, Slot, choose_frames
from asc.data.scenes import SceneConfig
from asc.pretrain.augment import AugmentConfig, Draws, apply, boxes_of, draw


@dataclass(frozen=True)
class DataConfig:
    """Where the clips come from and which of their frames are compared."""

    weights: tuple[float, ...] | None = None
    """Share of the samples that each folder of ``--data`` contributes; None: by its number of clips."""
    leave_out: Path | None = None
    """Text file that names clips to leave out, one a line: a file, a folder ending in /, or a file's SHA-256."""
    frames: FrameChoice = FrameChoice()
    """Which frames of a clip are compared."""
    folder: FolderSettings = FolderSettings()
    """How a folder of videos is read that was not prepared."""
    scenes: int = 1024
    """Number of embedded scenes, where ``--data`` is ``scenes``."""
    scene: SceneConfig = SceneConfig(frames=8, max_objects=1, contrast=0.3, markings=1.0)
    """What they show; their seed is that of the training and their split is always "train"."""


class Corpora(NamedTuple):
    """Everything to train on."""

    clips: list[Clips]
    findings: list[Findings]
    unused: list[str]
    """Entries of the leave-out list that named nothing."""


def open_corpora(data: Sequence[str], config: DataConfig, seed: int, memory: Path) -> Corpora:
    """Open every folder of ``data``; ``memory`` is a folder that keeps what was found out about videos."""
    if not data:
        raise ValueError("data names nothing to train on: give a folder of videos, prepared shards, or 'scenes'")
    if len(set(data)) < len(data):
        raise ValueError("data names the same folder twice; use data.weights to show one more often")
    entries = [] if config.leave_out is None else read_leave_out(config.leave_out)
    opened = Corpora([], [], [])
    named: set[str] = set()
    for number, source in enumerate(data):
        clips, findings = _open(source, config, seed, memory / f"videos_{number}.json")
        if entries:
            clips, findings.left_out, used = without(clips, entries)
            findings.clips, findings.frames = len(clips), sum(clips.num_frames(clip) for clip in range(len(clips)))
            named |= used
        opened.clips.append(clips)
        opened.findings.append(findings)
    opened.unused.extend(entry for entry in entries if entry not in named and entry.lower() not in named)
    return opened


def _open(source: str, config: DataConfig, seed: int, memory: Path) -> tuple[Clips, Findings]:
    if source == SCENES:
        scenes = SceneClips(replace(config.scene, split="train", seed=seed), config.scenes)
        return scenes, scenes.findings()
    from asc.data.shards import INDEX_FILE, ShardedClips

    if "://" in source or (Path(source) / INDEX_FILE).is_file():
        shards = ShardedClips(source)
        frames = sum(shards.num_frames(clip) for clip in range(len(shards)))
        return shards, Findings(source, len(shards), frames)
    videos = FolderClips(source, config.folder, memory)
    return videos, videos.findings()


class ClipBatch(NamedTuple):
    """Frames of the clips of one micro-batch, not yet augmented."""

    frames: Tensor | list[Tensor]
    """Bytes (V · B, 3, H, W), the first frames of all clips first; a list if the frames differ in size."""
    draws: Draws
    """How each is to be augmented."""
    boxes_B4: Tensor
    """Where each is cropped: worked out by the loader, so that the process that trains need not."""
    positions: list[int]
    """Places in the order of samples; name the batch in messages."""
    clips: int
    """B."""


class ClipDataset(Dataset[ClipBatch]):
    """Batches by the positions of their samples."""

    def __init__(self, order: Order, corpora: Sequence[Clips], choice: FrameChoice, augment: AugmentConfig) -> None:
        self.order = order
        self.corpora = list(corpora)
        self.choice = choice
        self.augment = augment

    def __getitem__(self, positions: list[int]) -> ClipBatch:
        slots = [self.order.slot(position) for position in positions]
        by_clip = [self._read(slot) for slot in slots]
        frames = [torch.from_numpy(clip[view]) for view in range(self.choice.views) for clip in by_clip]
        keys = [slot.key(self.order.seed, view) for view in range(self.choice.views) for slot in slots]
        stacked, draws = _stacked(frames), draw(self.augment, keys)
        return ClipBatch(stacked, draws, boxes_of(stacked, draws, self.augment), positions, len(slots))

    def _read(self, slot: Slot) -> list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
        clips = self.corpora[slot.corpus]
        count = clips.num_frames(slot.clip)
        return clips.read(slot.clip, choose_frames(self.choice, count, self.order.seed, slot.epoch, slot.sample))

    def sources(self, positions: Sequence[int]) -> list[str]:
        """The files that samples come from."""
        slots = [self.order.slot(position) for position in positions]
        return [f"{self.corpora[slot.corpus].name}: {self.corpora[slot.corpus].source(slot.clip)}" for slot in slots]


def _stacked(frames: list[Tensor]) -> Tensor | list[Tensor]:
    moved = [frame_HW3.permute(2, 0, 1) for frame_HW3 in frames]
    if len({frame.shape for frame in moved}) > 1:
        return [frame.contiguous() for frame in moved]
    return torch.stack(moved)


def augmented(batch: ClipBatch, config: AugmentConfig, device: torch.device) -> Tensor:
    """The augmented views (V, B, 3, S, S) on the device."""
    if isinstance(batch.frames, Tensor):
        frames: Tensor | list[Tensor] = batch.frames.to(device, non_blocking=True)
    else:
        frames = [frame.to(device, non_blocking=True) for frame in batch.frames]
    images_B3SS = apply(frames, batch.draws, config, batch.boxes_B4)
    images_VB3SS: Tensor = images_B3SS.unflatten(0, (-1, batch.clips))
    return images_VB3SS


def plain_frames(order: Order, corpora: Sequence[Clips], count: int, size: int) -> Tensor:
    """The middle frames of ``count`` clips (or of all, if there are fewer), normalised and not augmented."""
    slots = [order.slot(position) for position in range(min(count, order.epoch_length))]
    images = []
    for slot in slots:
        clips = corpora[slot.corpus]
        frame_HW3 = clips.read(slot.clip, [clips.num_frames(slot.clip) // 2])[0]
        images.append(central_square(torch.from_numpy(frame_HW3), size))
    return normalise(torch.stack(images))


def central_square(frame_HW3: Tensor, size: int) -> Tensor:
    """The largest central square of a frame in the asked size, as bytes."""
    side = min(frame_HW3.shape[:2])
    top, left = (frame_HW3.shape[0] - side) // 2, (frame_HW3.shape[1] - side) // 2
    square_13SS = frame_HW3[top : top + side, left : left + side].permute(2, 0, 1)[None].float()
    resized_13SS = F.interpolate(square_13SS, (size, size), mode="bilinear", antialias=True)
    return resized_13SS[0].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8)
