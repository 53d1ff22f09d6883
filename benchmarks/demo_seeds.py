"""How much does the recipe ``demo`` learn? kNN accuracy before and after, beside that of raw pixels, over seeds.

    python benchmarks/demo_seeds.py [--seeds 3] [--out runs/demo_seeds]

Each seed has its own scenes, weights and order. Finished seeds are not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

from asc.pretrain.run import RESULT_FILE, pretrain
from asc.recipes.pretrain import demo
from asc.run_folder import read_log


def accuracies(seed: int, out: Path, plain: bool = False) -> dict[str, float]:
    """kNN accuracy of the untrained network, of raw pixels and of the trained network."""
    config = demo()
    config = replace(
        config,
        out=out / f"{'plain_' if plain else ''}{seed}",
        plain=plain,
        train=replace(config.train, seed=seed),
        watch=replace(config.watch, pictures=0),
    )
    pretrain(config)
    first = read_log(config.out)[0]
    after = json.loads((config.out / RESULT_FILE).read_text())["knn"]
    return {"untrained": first["knn"], "pixels": first["knn_pixels"], "trained": after}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/demo_seeds"))
    parser.add_argument("--plain", action="store_true", help="the plain Vision Transformer")
    arguments = parser.parse_args()
    rows = []
    print("| seed | untrained | raw pixels | trained | minutes |\n|---|---|---|---|---|")
    for seed in range(arguments.seeds):
        begun = time.time()
        row = accuracies(seed, arguments.out, arguments.plain)
        rows.append(row)
        cells = " | ".join(f"{100 * row[name]:.1f}" for name in ("untrained", "pixels", "trained"))
        print(f"| {seed} | {cells} | {(time.time() - begun) / 60:.1f} |", flush=True)
    for name in ("untrained", "pixels"):
        gains = [100 * (row["trained"] - row[name]) for row in rows]
        print(f"median gain over {name}: {statistics.median(gains):.1f} points")


if __name__ == "__main__":
    main()
