"""Does training with superpixels teach as much as the plain Vision Transformer, in as many steps?

    python benchmarks/pretrain_study.py run --data SHARDS --images IMAGES --seeds 0 1 2
    python benchmarks/pretrain_study.py merge runs/study/*.json

A cell is one variant and seed of the recipe ``small``: it is trained, judged by kNN and a linear classifier on every
labelled folder below IMAGES (train/<class>/ and test/ or val/), and written to OUT/<variant>_<seed>.json; cells that
are there already are left alone, so that the study can be made piece by piece and on several computers. ``merge``
prints the tables for ``docs/results/pretraining.md`` and draws its curves.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import asc
from asc.pretrain.run import PretrainConfig, pretrain
from asc.recipes.pretrain import small
from asc.run_folder import read_log
from asc.tasks.classify.images import folder_split
from asc.tasks.classify.probes import knn_accuracy, linear_accuracy, split_features

SETS = ("cifar10", "tiny-imagenet", "pets", "flowers102")
VARIANTS = ("superpixels", "spatial", "plain")


def config_of(variant: str, seed: int, arguments: argparse.Namespace) -> PretrainConfig:
    """The recipe ``small`` as one cell runs it; kNN is followed on the first of the labelled folders."""
    config = small()
    superpixels = config.model.superpixels
    assert superpixels is not None
    if variant == "spatial":
        config = replace(config, model=replace(config.model, superpixels=replace(superpixels, neighbourhood="spatial")))
    return replace(
        config,
        out=arguments.out / f"{variant}_{seed}",
        data=(str(arguments.data),),
        plain=variant == "plain",
        train=replace(config.train, seed=seed, steps=arguments.steps or config.train.steps),
        watch=replace(config.watch, knn_data=arguments.images / SETS[0]),
        machine=replace(config.machine, workers=arguments.workers),
    )


def judged(encoder: asc.AscViT, images: Path) -> dict[str, dict[str, float]]:
    """Accuracy in percent on every labelled folder."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    encoder = encoder.to(device).eval()
    result = {}
    for name in SETS:
        split = folder_split(images / name, encoder.config.image_hw[0])
        features, queries = (part.to(device) for part in split_features(encoder, split))
        labels, truth = split.train.labels_B.to(device), split.test.labels_B.to(device)
        result[name] = {
            "knn": 100 * knn_accuracy(features, labels, queries, truth),
            "linear": 100 * linear_accuracy(features, labels, queries, truth),
        }
        print(f"  {name}: kNN {result[name]['knn']:.1f}, linear {result[name]['linear']:.1f}", flush=True)
    return result


def run_cell(variant: str, seed: int, arguments: argparse.Namespace) -> None:
    file = arguments.out / f"{variant}_{seed}.json"
    if file.exists():
        print(f"{file} is there already")
        return
    config = config_of(variant, seed, arguments)
    begun = time.time()
    encoder = asc.load(pretrain(config))
    seconds = time.time() - begun
    record = {
        "variant": variant,
        "seed": seed,
        "steps": config.train.steps,
        "seconds": seconds,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "torch": torch.__version__,
        "results": judged(encoder, arguments.images),
        "log": read_log(config.out),
    }
    file.write_text(json.dumps(record))
    print(f"{variant}, seed {seed}: {seconds:.0f} s", flush=True)


# --- Merging ----------------------------------------------------------------------------------------------


def spread_text(values: Sequence[float]) -> str:
    """Mean, and half the width of the 95% interval by Student's t."""
    if len(values) < 2:
        return f"{values[0]:.1f}"
    factor = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(values), 2.0)
    return f"{statistics.mean(values):.1f} ± {factor * statistics.stdev(values) / len(values) ** 0.5:.1f}"


def merge(files: Sequence[Path], pictures: Path) -> None:
    cells = [json.loads(file.read_text()) for file in files]
    variants = [variant for variant in VARIANTS if any(cell["variant"] == variant for cell in cells)]
    for probe in ("linear", "knn"):
        print(f"\n| {probe} | {' | '.join(SETS)} | mean | seeds |\n|---|{'---|' * (len(SETS) + 2)}")
        for variant in variants:
            own = [cell for cell in cells if cell["variant"] == variant]
            columns = [[cell["results"][name][probe] for cell in own] for name in SETS]
            means = [statistics.mean(values) for values in zip(*columns, strict=True)]
            print(f"| {variant} | {' | '.join(map(spread_text, [*columns, means]))} | {len(own)} |")
    print(
        "\n| variant | seed | steps | last loss | projection spread | feature rank | tokens share | warnings |",
        "\n|---|---|---|---|---|---|---|---|",
        sep="",
    )
    for cell in sorted(cells, key=lambda cell: (cell["variant"], cell["seed"])):
        lines = [line for line in cell["log"] if "loss" in line]
        last = lines[-1]
        warned = sum("warning" in line for line in cell["log"])
        print(
            f"| {cell['variant']} | {cell['seed']} | {cell['steps']} | {last['loss']:.3f} | "
            f"{last['projection_spread']:.2f} | {last['feature_rank']:.0f} | {last.get('tokens_share', 1.0):.2f} | "
            f"{warned} |"
        )
    draw(cells, pictures)


def draw(cells: Sequence[dict[str, Any]], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, tokens) = pyplot.subplots(1, 2, figsize=(11, 4))
    colours = dict(zip(VARIANTS, ("C0", "C2", "C1"), strict=True))
    named: set[str] = set()
    for cell in cells:
        lines = [line for line in cell["log"] if "loss" in line]
        steps, variant = [line["step"] for line in lines], cell["variant"]
        label = None if variant in named else variant
        named.add(variant)
        losses.plot(steps, [line["loss"] for line in lines], colours[variant], lw=0.8, label=label)
    shown = next((cell for cell in cells if cell["variant"] == "superpixels"), cells[0])
    lines = [line for line in shown["log"] if "block_00/tokens_mean" in line]
    blocks = sorted(name for name in (lines[0] if lines else {}) if name.endswith("/tokens_mean"))
    for number, name in enumerate(blocks):
        tokens.plot(
            [line["step"] for line in lines],
            [line[name] for line in lines],
            color=pyplot.cm.viridis(number / max(1, len(blocks))),
            lw=0.9,
            label=f"block {number}",
        )
    losses.set(xlabel="step", ylabel="loss", title="loss")
    tokens.set(
        xlabel="step", ylabel="tokens after the block", title=f"tokens, {shown['variant']}, seed {shown['seed']}"
    )
    losses.legend()
    if blocks:
        tokens.legend(fontsize=6, ncol=2)
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "pretraining.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train and judge cells")
    run.add_argument("--data", required=True, help="prepared shards or a folder of videos")
    run.add_argument("--images", type=Path, required=True, help=f"folder with {', '.join(SETS)}")
    run.add_argument("--out", type=Path, default=Path("runs/study"))
    run.add_argument("--variants", nargs="+", choices=VARIANTS, default=["superpixels", "plain"])
    run.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    run.add_argument("--steps", type=int, default=None, help="other than the recipe's, for a trial")
    run.add_argument("--workers", type=int, default=None, help="processes that load data; fewer when cells run at once")
    merged = commands.add_parser("merge", help="tables and curves of finished cells")
    merged.add_argument("files", type=Path, nargs="+")
    merged.add_argument("--pictures", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    if arguments.command == "merge":
        merge(arguments.files, arguments.pictures)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        for variant in arguments.variants:
            run_cell(variant, seed, arguments)


if __name__ == "__main__":
    main()
