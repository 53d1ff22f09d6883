"""Do the controllers hold the token budget in training?

    python benchmarks/budget_control.py [--seeds 3]

A small network trains for 200 real steps on the embedded scenes, from several starts of θ, with a jump of the weights
in the middle. Prints the share of the original tokens that the blocks work on at the end (the budget is 0.4).
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

import asc
from asc.data import SceneConfig, SceneDataset, normalise
from asc.pretrain.siamese import Siamese, SiameseConfig

SIZE, PATCH, DEPTH, CLIPS = 32, 4, 6, 96
PATCHES = (SIZE // PATCH) ** 2
STARTS = (-0.5, 0.0, 0.5, 0.9, 0.999)

# The paper's augmentation; the blur is left out, since 23 pixels wide it would cover a frame of 32.
AUGMENT = v2.Compose(
    [
        v2.RandomResizedCrop(SIZE, scale=(0.2, 1.0)),
        v2.RandomHorizontalFlip(),
        v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
        v2.RandomGrayscale(0.2),
    ]
)


def frame_pairs() -> Tensor:
    """Two frames of each clip as bytes ``(clips, 2, 3, 2 SIZE, 2 SIZE)``: larger than the crops, as videos are."""
    scenes = SceneDataset(SceneConfig(size=2 * SIZE, seed=1), CLIPS)
    frames = np.stack([[scenes[i].frame(t).image_HW3 for t in (0, 10)] for i in range(CLIPS)])
    return torch.from_numpy(frames).permute(0, 1, 4, 2, 3)


def clean(frames: Tensor) -> Tensor:
    resized = v2.functional.resize(frames, [SIZE, SIZE])
    return normalise(resized.permute(0, 2, 3, 1))


def augmented(frames: Tensor) -> Tensor:
    return normalise(torch.stack([AUGMENT(frame) for frame in frames]).permute(0, 2, 3, 1))


def small_model(superpixels: asc.SuperpixelConfig) -> asc.AscViT:
    return asc.AscViT(
        asc.VitConfig(width=64, depth=DEPTH, heads=2, patch_size=PATCH, image_size=SIZE, superpixels=superpixels)
    )


def train(model: asc.AscViT, frames: Tensor, steps: int, clips: int = 12, seed: int = 0) -> Iterator[int]:
    """Train, yielding after each step, so that the caller can look or interfere."""
    torch.manual_seed(seed)
    siamese = Siamese(model, SiameseConfig(projection=64, hidden=256, momentum=0.99, last_momentum=0.99))
    optimiser = torch.optim.AdamW([p for p in siamese.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.05)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 20)
        chosen = frames[torch.randint(0, len(frames), (clips,))]
        agreement = siamese(torch.stack([augmented(chosen[:, 0]), augmented(chosen[:, 1])]))
        optimiser.zero_grad()
        agreement.loss.backward()
        optimiser.step()
        model.update_thresholds()
        siamese.follow(step / steps)
        yield step


@torch.no_grad()
def token_share(model: asc.AscViT, images: Tensor) -> float:
    """Mean share of the original tokens that entered the blocks, counted from the label maps."""
    model.eval()
    labels = model.superpixels(images)
    counts = labels.flatten(2).amax(2) + 1
    model.train()
    entering = torch.cat([torch.full_like(counts[:1], labels[0, 0].numel()), counts[:-1]])
    return float(entering.double().mean()) / labels[0, 0].numel()


@torch.no_grad()
def jolt(model: asc.AscViT) -> None:
    """A jump of the weights: every matrix of the blocks gets noise of half its own deviation."""
    for parameter in model.blocks.parameters():
        if parameter.ndim > 1:
            parameter.add_(0.5 * parameter.std() * torch.randn_like(parameter))


def trained(start: float, neighbourhood: str, frames: Tensor, seed: int) -> asc.AscViT:
    """The network after 200 steps from θ = ``start`` and a jolt half-way."""
    torch.manual_seed(seed)
    # All blocks: the early third of six would be two layers that halve their tokens, which is no usual network.
    model = small_model(asc.SuperpixelConfig(neighbourhood=neighbourhood, blocks="all"))  # type: ignore[arg-type]
    for layer in model.superpixel_layers:
        layer.threshold.set_theta(start)
    for step in train(model, frames, steps=200, seed=seed):
        if step == 99:
            jolt(model)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs for each start and neighbourhood")
    seeds = parser.parse_args().seeds
    warnings.simplefilter("ignore", asc.SuperpixelWarning)
    torch.set_num_threads(1)  # so small a network only loses time with more
    frames = frame_pairs()
    print("| neighbourhood | start of θ | seed | augmented | clean | tokens after the last block |")
    print("|---|---|---|---|---|---|")
    for neighbourhood in ("global", "spatial"):
        for start in STARTS:
            for seed in range(seeds):
                model = trained(start, neighbourhood, frames, seed)
                shares = [token_share(model, images(frames[:, 0])) for images in (augmented, clean)]
                last = model.diagnostics()[DEPTH - 1].tokens_mean
                print(
                    f"| {neighbourhood} | {start} | {seed} | {shares[0]:.3f} | {shares[1]:.3f} | {last:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
