"""Is the fast linear probe as good as a hundred epochs of SGD on the same features, and how much faster?

    python benchmarks/linear_probe.py --checkpoint RUN --data DIR [--dataset cifar10] [--seeds 3]

Features are computed once and kept. Then both learn from them on the same device: the fast probe fits all weight
decays, chooses one on the validation images and fits it once more; SGD is the paper's (momentum 0.9, learning rate 0.01
along a cosine, weight decay 0.0001, 256 images a batch, 100 epochs), with the epoch chosen on the validation images.
Features are standardised for both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from asc.tasks.classify.datasets import DATASETS, open_dataset
from asc.tasks.classify.features import FeatureConfig, features_of, learning_features
from asc.tasks.classify.logistic import fit_linear
from asc.tasks.classify.probes import choose_decay
from asc.tasks.encoders import open_encoder

EPOCHS, BATCH, RATE, DECAY = 100, 256, 0.01, 1e-4


def fast(train: tuple[Tensor, Tensor], val: tuple[Tensor, Tensor], classes: int) -> Tensor:
    """Weights (K, C + 1) of the fast probe."""
    choice = choose_decay(*train, *val, classes, "top1")
    both = [torch.cat(parts) for parts in zip(train, val, strict=True)]
    fit = fit_linear(*both, classes, [choice.decay], start=choice.fit)
    return torch.cat([fit.weights_RKC[0], fit.biases_RK[0, :, None]], dim=1)


def by_epochs(train: tuple[Tensor, Tensor], val: tuple[Tensor, Tensor], classes: int, seed: int) -> Tensor:
    """Weights of the epoch that is best on the validation images."""
    features_NC, labels_N = train
    torch.manual_seed(seed)
    layer = torch.nn.Linear(features_NC.shape[1], classes, device=features_NC.device)
    optimiser = torch.optim.SGD(layer.parameters(), lr=RATE, momentum=0.9, weight_decay=DECAY)
    steps = EPOCHS * -(-len(labels_N) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    best, chosen = -1.0, torch.empty(0)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(labels_N), device=labels_N.device).split(BATCH):
            optimiser.zero_grad()
            F.cross_entropy(layer(features_NC[rows]), labels_N[rows]).backward()
            optimiser.step()
            schedule.step()
        with torch.no_grad():
            right = float((layer(val[0]).argmax(1) == val[1]).float().mean())
            if right > best:
                best, chosen = right, torch.cat([layer.weight, layer.bias[:, None]], dim=1).clone()
    return chosen


def accuracy(weights_KF: Tensor, features_MC: Tensor, labels_M: Tensor) -> float:
    return 100 * float(((features_MC @ weights_KF[:, :-1].T + weights_KF[:, -1]).argmax(1) == labels_M).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--dataset", choices=DATASETS, default="cifar10")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path("runs/features"))
    arguments = parser.parse_args()
    config, encoder = FeatureConfig(), open_encoder(arguments.checkpoint)
    times: dict[str, list[float]] = {"fast": [], "epochs": []}
    scores: dict[str, list[float]] = {"fast": [], "epochs": []}
    for seed in range(arguments.seeds):
        data = open_dataset(arguments.dataset, arguments.data, seed=seed)
        learning = learning_features(encoder, data, 1.0, config, arguments.cache)
        judged = features_of(encoder, data.test, 1.0, config, arguments.cache)
        mean_C, deviation_C = learning[0].mean(0), learning[0].std(0).clamp(min=1e-6)
        train, val, test = (
            (((features_NC - mean_C) / deviation_C).to(config.torch_device), part.labels.to(config.torch_device))
            for features_NC, part in zip((*learning, judged), (data.train, data.val, data.test), strict=True)
        )
        classes = len(data.train.classes)
        for name in times:
            begun = time.monotonic()
            weights = fast(train, val, classes) if name == "fast" else by_epochs(train, val, classes, seed)
            found = accuracy(weights, *test)
            times[name].append(time.monotonic() - begun)
            scores[name].append(found)
    for name in times:
        print(f"{name}: {statistics.median(times[name]):.2f} s, accuracy {[round(value, 1) for value in scores[name]]}")
    print(
        f"the fast probe is {statistics.median(times['epochs']) / statistics.median(times['fast']):.1f} times as fast"
    )


if __name__ == "__main__":
    main()
