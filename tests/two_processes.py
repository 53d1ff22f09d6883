"""Run by test_budget.py in two processes: train on different frames, write the thresholds of every step."""

import sys
import warnings
from pathlib import Path

import torch
from budget_control import augmented, clean, frame_pairs, small_model
from torch.nn.parallel import DistributedDataParallel

import asc


def main(folder: Path) -> None:
    warnings.simplefilter("ignore", asc.SuperpixelWarning)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    frames = frame_pairs()[rank::2]
    torch.manual_seed(0)
    model = small_model(asc.SuperpixelConfig())
    model.calibrate(clean(frames[:8, 0]))
    torch.manual_seed(rank)  # augmentation differs between the processes
    parallel = DistributedDataParallel(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = [thresholds(model)]
    for step in range(7):
        features = parallel(augmented(frames[step * 4 : step * 4 + 4, 0]))
        optimiser.zero_grad()
        features.square().sum().backward()
        optimiser.step()
        model.update_thresholds()
        steps.append(thresholds(model))
    torch.save(torch.stack(steps), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def thresholds(model: asc.AscViT) -> torch.Tensor:
    thetas = [layer.threshold.theta().detach() for layer in model.superpixel_layers]
    return torch.cat([torch.stack(thetas), model.budget.targets_L])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
