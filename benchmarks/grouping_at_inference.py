"""What another grouping does to a trained encoder whose weights stay as they are.

    python benchmarks/grouping_at_inference.py --encoders ENCODER ... --images DIR ... [--most 3000]

Every encoder is used with each grouping below. Its thresholds are set on 128 images of the labelled set, without their
labels, so that all groupings leave the same number of tokens. Then linear classifiers and kNN, five folds, as
``asc ablate`` judges with ``--folds 5``.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from asc.ablate.judge import crossed
from asc.layer import SuperpixelWarning
from asc.tasks.classify.images import folder_split
from asc.tasks.classify.probes import extract
from asc.vit import AscViT
from asc.weights import load

ONLY: dict[str, Any] = {"size_weight": 0.0, "proportional_attention": False}
GROUPINGS: dict[str, dict[str, Any]] = {
    "all links": ONLY | {"links": "all"},
    "best links": ONLY | {"links": "best"},
    "best links, Ward's weight": ONLY | {"links": "best", "size_weight": 1.0},
    "all links, proportional attention": ONLY | {"links": "all", "proportional_attention": True},
    "all three": {"links": "best", "size_weight": 1.0, "proportional_attention": True},
}
CALIBRATION = 128


def regrouped(encoder: AscViT, settings: dict[str, Any], images_B3HW: Tensor) -> AscViT:
    """The encoder with another grouping, its thresholds set on these images."""
    superpixels = encoder.config.superpixels
    if superpixels is None:
        raise SystemExit("a plain ViT groups nothing: give encoders with superpixels")
    model = AscViT(replace(encoder.config, superpixels=replace(superpixels, **settings))).to(images_B3HW.device).eval()
    model.load_state_dict(encoder.state_dict())
    model.calibrate(images_B3HW)
    return model


def labelled(folder: Path, size: int, most: int, device: torch.device) -> tuple[Tensor, Tensor]:
    split = folder_split(folder, size)
    images_B3HW = torch.cat([split.train.images_B3HW, split.test.images_B3HW])
    labels_B = torch.cat([split.train.labels_B, split.test.labels_B])
    chosen = torch.randperm(len(labels_B), generator=torch.Generator().manual_seed(1))[:most]
    return images_B3HW[chosen].to(device), labels_B[chosen].to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoders", type=Path, nargs="+", required=True, help="folders for asc.load")
    parser.add_argument("--images", type=Path, nargs="+", required=True, help="labelled folders")
    parser.add_argument("--most", type=int, default=3000, help="images of a set, at most; a random choice")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    settings = parser.parse_args()
    warnings.simplefilter("ignore", SuperpixelWarning)
    print(
        "| set | encoder | grouping | tokens left | largest superpixel | linear | kNN |\n|---|---|---|---|---|---|---|"
    )
    for folder in settings.images:
        for path in settings.encoders:
            encoder = load(path).to(settings.device).eval()
            images, labels = labelled(folder, encoder.config.image_hw[0], settings.most, torch.device(settings.device))
            few = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:CALIBRATION]]
            for name, grouping in GROUPINGS.items():
                model = regrouped(encoder, grouping, few)
                model(few)
                last = list(model.diagnostics().values())[-1]
                found = crossed(extract(model, images), labels, 5)
                shares = f"{last.tokens_mean:.0f} | {last.largest_share:.0%}"
                line = f"| {folder.name} | {path.name} | {name} | {shares} |"
                tqdm.write(f"{line} {100 * found['linear']:.1f} | {100 * found['knn']:.1f} |")


if __name__ == "__main__":
    main()
