"""Does the pre-trained encoder help in segmentation, detection and depth, after a minute or two of training?

    python benchmarks/dense_study.py run --data-voc VOC --data-nyu NYU \\
        --encoders superpixels=RUN plain=OTHER_RUN random=random:RUN
    python benchmarks/dense_study.py merge runs/dense

A cell is one head and one encoder: the head is trained by its short recipe for a number of steps that is the same for
all encoders, judged once on the images it never saw, and written to OUT/<head>-<encoder>-<seed>.json, beside what the
best prediction without looking scores. Finished cells are left alone, and a cell that another process works on is
passed over: the same command may run several times at once, on one GPU or on several. ``merge`` prints the tables for
``docs/results/dense.md``.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torchvision

from asc.files import write_whole
from asc.recipes import depth as depth_recipes
from asc.recipes import detect as detect_recipes
from asc.recipes import segment as segment_recipes
from asc.report.words import plural, versions
from asc.run_folder import read_log
from asc.tasks.dense_run import RESULT_FILE
from asc.tasks.depth.run import train as train_depth
from asc.tasks.depth.task import DepthConfig
from asc.tasks.detect.data import open_test
from asc.tasks.detect.metrics import Detections, average_precision
from asc.tasks.detect.run import train as train_detect
from asc.tasks.detect.task import DetectConfig
from asc.tasks.segment.run import train as train_segment
from asc.tasks.segment.task import SegmentConfig
from asc.train import TrainConfig, TrainingStoppedError

Config = SegmentConfig | DetectConfig | DepthConfig
# Sides of crops are multiples of it, as of the patches of the encoders that the study is about.
PATCH = 4
TRAIN_LISTS, TEST_LIST = ("2012/trainval",), "2007/test"


@dataclass(frozen=True)
class Plan:
    """How one head is trained, whichever encoder it gets."""

    title: str
    """What tables call it."""
    task: Literal["segment", "detect", "depth"]
    data: Literal["voc", "nyu", "scenes"]
    steps: int
    """Steps for ``--minutes 1``; DETR gets twice the time of the others."""
    batch: int
    lr: float
    size: int
    """Side of a crop or a canvas in pixels; of a depth image the longer one, before it is cropped."""
    encoder_lr: float = 0.5
    """Share of the learning rate that the encoder gets: about a third of what it was pre-trained with, or less."""


PLANS = {
    "mlp": Plan("segmentation, `mlp`", "segment", "voc", steps=1200, batch=32, lr=5e-4, size=128),
    "fpn": Plan("segmentation, `fpn`", "segment", "voc", steps=1200, batch=32, lr=5e-4, size=128),
    "fasterrcnn": Plan("detection, `fasterrcnn`", "detect", "voc", steps=800, batch=16, lr=3e-4, size=160),
    "detr": Plan("detection, `detr`", "detect", "voc", steps=2400, batch=16, lr=2e-4, size=160),
    "detr_scenes": Plan("detection, `detr`, scenes", "detect", "scenes", steps=2400, batch=16, lr=2e-4, size=128),
    "depth": Plan("depth", "depth", "nyu", steps=1200, batch=32, lr=3e-4, size=160),
}

# The scores of each task, the one that counts first, and how tables write them.
SCORES = {
    "segment": {"miou": "mIoU %", "accuracy": "right pixels %"},
    "detect": {"ap50": "AP50 %", "ap50_eleven": "AP50, 11 points, %"},
    "depth": {
        "d1": "δ<1.25 %",
        "d2": "δ<1.25² %",
        "d3": "δ<1.25³ %",
        "rms": "rms (m), lower is better",
        "rel": "rel, lower is better",
    },
}
_NOT_SHARES = ("rms", "rel")
WITHOUT_LOOKING = {"segment": "all background", "detect": "no boxes", "depth": "mean depth"}


# --- One cell ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One head on one encoder."""

    head: str
    encoder: str
    """What tables call the encoder."""
    source: str
    """What it is opened by."""
    seed: int
    frozen: bool

    @property
    def name(self) -> str:
        return f"{self.head}-{self.encoder}-{self.seed}{'-frozen' if self.frozen else ''}"


def plan_of(head: str, arguments: argparse.Namespace) -> Plan:
    """The plan with what the command line says otherwise."""
    plan = PLANS[head]
    changes = {
        name: value for name in ("batch", "lr", "size", "encoder_lr") if (value := getattr(arguments, name)) is not None
    }
    steps = arguments.steps or max(1, round(arguments.minutes * plan.steps))
    return replace(plan, steps=steps, **changes)


def training(recipe: TrainConfig, plan: Plan, seed: int) -> TrainConfig:
    """The recipe's way of learning for as long as the plan says."""
    warmup = min(100, plan.steps // 10)
    return replace(
        recipe, steps=plan.steps, batch=plan.batch, lr=plan.lr, lr_batch=plan.batch, warmup_steps=warmup, seed=seed
    )


def config_of(cell: Cell, arguments: argparse.Namespace) -> Config:
    """The recipe ``small`` of the head as this cell runs it."""
    plan = plan_of(cell.head, arguments)
    make = {"segment": segment_config, "detect": detect_config, "depth": depth_config}[plan.task]
    config = make(cell, plan, arguments)
    # A checkpoint takes longer than the steps it would save.
    machine = replace(config.machine, workers=arguments.workers, checkpoint_every=1_000_000, keep=1)
    return replace(
        config,
        out=arguments.out / "runs" / cell.name,
        encoder=cell.source,
        train=training(config.train, plan, cell.seed),
        machine=machine,
    )


def segment_config(cell: Cell, plan: Plan, arguments: argparse.Namespace) -> SegmentConfig:
    config = segment_recipes.small()
    return replace(
        config,
        data=str(arguments.data_voc),
        head=replace(config.head, kind=cell.head),
        tune=replace(config.tune, frozen=cell.frozen, encoder_lr=plan.encoder_lr),
        augment=replace(config.augment, size=(plan.size, plan.size)),
        inference=replace(config.inference, batch=plan.batch),
        watch=replace(config.watch, every=0, pictures=arguments.pictures),
    )


def depth_config(cell: Cell, plan: Plan, arguments: argparse.Namespace) -> DepthConfig:
    config = depth_recipes.small()
    # Crops that miss little more than a frame around the image: where something lies tells much of how far it is.
    base = (3 * plan.size // 4, plan.size)
    crop = tuple((side - plan.size // 20) // PATCH * PATCH for side in base)
    return replace(
        config,
        data=str(arguments.data_nyu),
        tune=replace(config.tune, frozen=cell.frozen, encoder_lr=plan.encoder_lr),
        augment=replace(config.augment, size=crop, base=base),
        inference=replace(config.inference, batch=plan.batch),
        watch=replace(config.watch, every=0, pictures=arguments.pictures),
    )


def detect_config(cell: Cell, plan: Plan, arguments: argparse.Namespace) -> DetectConfig:
    config = detect_recipes.small() if cell.head == "fasterrcnn" else detect_recipes.small_detr()
    anchors = tuple(max(1, plan.size * 2**level // 16) for level in range(5))
    scenes = plan.data == "scenes"
    return replace(
        config,
        data="scenes" if scenes else str(arguments.data_voc),
        sets=replace(
            config.sets,
            train=TRAIN_LISTS,
            test=TEST_LIST,
            scenes=arguments.scenes,
            scene=replace(config.sets.scene, size=plan.size),
        ),
        frozen=cell.frozen,
        encoder_lr=plan.encoder_lr,
        fasterrcnn=replace(config.fasterrcnn, anchors=anchors),
        augment=replace(config.augment, size=plan.size),
        watch=replace(config.watch, every=0, judged=None, pictures=arguments.pictures),
    )


def train(config: Config) -> dict[str, Any]:
    """Train and judge; what the run wrote about it."""
    if isinstance(config, SegmentConfig):
        train_segment(config)
    elif isinstance(config, DepthConfig):
        train_depth(config)
    else:
        train_detect(config)
    result: dict[str, Any] = json.loads((config.out / RESULT_FILE).read_text())
    return result


def scores_of(config: Config, result: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """The scores of the last weights, and those of the best prediction without looking at an image."""
    if not isinstance(config, DetectConfig):
        task = "segment" if isinstance(config, SegmentConfig) else "depth"
        return {name: result["last"][name] for name in SCORES[task]}, {
            name: result["trivial"][name] for name in SCORES[task]
        }
    test = open_test(config.data, config.sets)
    nothing = Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    truths = [test[index].truth for index in range(len(test))]
    trivial = average_precision([nothing] * len(truths), truths, len(test.classes))
    return {name: result[name] for name in SCORES["detect"]}, {"ap50": trivial.area, "ap50_eleven": trivial.eleven}


def speed_of(config: Config) -> dict[str, Any]:
    """Seconds of the steps alone, speed and tokens; from the log, so that a run may have been continued."""
    lines = [line for line in read_log(config.out) if "images_per_second" in line]
    steps = [line["step"] for line in lines]
    images = [config.train.batch * (now - before) for before, now in zip([0, *steps], steps, strict=False)]
    seconds = sum(count / line["images_per_second"] for count, line in zip(images, lines, strict=True))
    blocks = sorted(name for name in lines[-1] if name.endswith("/tokens_mean"))
    return {
        "train_seconds": seconds,
        "images_per_second": statistics.median(line["images_per_second"] for line in lines),
        "tokens_left": lines[-1][blocks[-1]] if blocks else None,
        "last_loss": lines[-1]["loss"],
        "warnings": sum("warning" in line for line in read_log(config.out)),
    }


def peak_gb() -> float | None:
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None


def without_places(settings: dict[str, Any]) -> dict[str, Any]:
    """What decides the scores: neither where the run lies nor how the work is done."""
    return {name: value for name, value in settings.items() if name not in ("out", "machine")}


def run_cell(cell: Cell, arguments: argparse.Namespace) -> None:
    config = config_of(cell, arguments)
    settings = json.loads(json.dumps(asdict(config), default=str))
    file = arguments.out / f"{cell.name}.json"
    if file.exists():
        if without_places(json.loads(file.read_text())["settings"]) != without_places(settings):
            raise ValueError(f"{file} was made with other settings; give another --out, or take the file away")
        print(f"{file} is there already", flush=True)
        return
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    begun = time.time()
    result = train(config)
    seconds = time.time() - begun
    scores, trivial = scores_of(config, result)
    plan = PLANS[cell.head]
    record = asdict(cell) | {
        "title": plan.title,
        "task": plan.task,
        "data": plan.data,
        "scores": scores,
        "trivial": trivial,
        "images_judged": result["images"],
        "steps": config.train.steps,
        "batch": config.train.batch,
        "seconds": seconds,
        "peak_gb": peak_gb(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": versions() | {"torchvision": torchvision.__version__},
        "settings": settings,
    }
    record |= speed_of(config)
    write_whole(file, json.dumps(record, indent=1).encode() + b"\n")
    told = ", ".join(f"{name} {value:.4f} (without looking {trivial[name]:.4f})" for name, value in scores.items())
    print(f"{cell.name}: {told}; {record['train_seconds']:.0f} s of steps, {seconds:.0f} s in all", flush=True)


@contextmanager
def claimed(file: Path) -> Iterator[bool]:
    """Whether no other process works on it; the claim ends with the process, however that ends."""
    with file.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def run(arguments: argparse.Namespace) -> int:
    (arguments.out / "runs").mkdir(parents=True, exist_ok=True)
    failed, stopped = [], 0
    for cell in cells_of(arguments):
        if stopped:
            return stopped
        with claimed(arguments.out / "runs" / f"{cell.name}.lock") as free:
            if not free:
                print(f"{cell.name} is being worked on by another process", flush=True)
                continue
            try:
                run_cell(cell, arguments)
            except TrainingStoppedError as error:
                # Not raised on: a traceback would hold on to the loader, whose workers would never be let go.
                print(error, flush=True)
                stopped = error.code or 1
            except Exception:  # the other cells can do without it
                traceback.print_exc()
                failed.append(cell.name)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)
    return stopped or (1 if failed else 0)


def cells_of(arguments: argparse.Namespace) -> list[Cell]:
    encoders = [encoder.partition("=") for encoder in arguments.encoders]
    for name, _, source in encoders:
        if not name or not source or not name.replace("_", "").isalnum():
            raise SystemExit(f"--encoders takes NAME=SOURCE with a name of letters and digits, got {name!r}")
    needed = {PLANS[head].data for head in arguments.heads}
    for data in needed - {"scenes"}:
        if getattr(arguments, f"data_{data}") is None:
            raise SystemExit(f"the heads {', '.join(arguments.heads)} need --data-{data}")
    return [
        Cell(head, name, source, seed, arguments.frozen)
        for seed in arguments.seeds
        for head in arguments.heads
        for name, _, source in encoders
    ]


# --- Merging ----------------------------------------------------------------------------------------------


def shown(score: str, values: Sequence[float]) -> str:
    """The mean, and the lowest and highest where there are several seeds."""
    factor, digits = (1, 3) if score in _NOT_SHARES else (100, 1)
    mean = f"{factor * statistics.mean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    return f"{mean} ({factor * min(values):.{digits}f} to {factor * max(values):.{digits}f})"


def row_name(cell: dict[str, Any]) -> str:
    return cell["encoder"] + (", frozen" if cell["frozen"] else "")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(head), " | ".join("---" for _ in head), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def merge(folders: Sequence[Path]) -> None:
    files = sorted(file for folder in folders for file in ([folder] if folder.is_file() else folder.glob("*.json")))
    cells = [json.loads(file.read_text()) for file in files]
    if not cells:
        raise SystemExit("no finished cell is there")
    heads = [head for head in PLANS if any(cell["head"] == head for cell in cells)]
    names = list(dict.fromkeys(row_name(cell) for cell in cells))
    names.sort(key=lambda name: (name.endswith(", frozen"), name.startswith("random")))
    by_place: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in cells:
        by_place.setdefault((cell["head"], row_name(cell)), []).append(cell)
    check_alike(cells)
    print(overview(heads, names, by_place))
    for head in heads:
        print(details(head, names, by_place))
    print(cost(heads, names, by_place))
    print(surroundings(cells))


def check_alike(cells: Sequence[dict[str, Any]]) -> None:
    """Refuse to put cells side by side that did not learn alike."""
    for head in PLANS:
        ways = {json.dumps(cell["settings"]["train"] | {"seed": 0}) for cell in cells if cell["head"] == head}
        if len(ways) > 1:
            raise SystemExit(f"the cells of {head} were trained with different settings: merge them apart")


Places = dict[tuple[str, str], list[dict[str, Any]]]


def any_of(head: str, names: Sequence[str], places: Places) -> dict[str, Any]:
    return next(places[head, name][0] for name in names if (head, name) in places)


def overview(heads: Sequence[str], names: Sequence[str], places: Places) -> str:
    """The main score of every head."""
    columns = []
    for head in heads:
        cell = any_of(head, names, places)
        score, words = next(iter(SCORES[cell["task"]].items()))
        columns.append((head, score, f"{cell['title']}: {words}"))
    rows = [
        [name, *(_scores(places.get((head, name), []), "scores", score) for head, score, _ in columns)]
        for name in names
    ]
    trivial = [_scores([any_of(head, names, places)], "trivial", score) for head, score, _ in columns]
    return table(["encoder", *(words for _, _, words in columns)], [*rows, ["without looking", *trivial]])


def _scores(cells: Sequence[dict[str, Any]], kind: str, score: str) -> str:
    return shown(score, [cell[kind][score] for cell in cells]) if cells else ""


def details(head: str, names: Sequence[str], places: Places) -> str:
    """All scores of one head."""
    cell = any_of(head, names, places)
    scores = SCORES[cell["task"]]
    rows = [
        [name, *(_scores(places[head, name], "scores", score) for score in scores), str(len(places[head, name]))]
        for name in names
        if (head, name) in places
    ]
    rows.append([WITHOUT_LOOKING[cell["task"]], *(_scores([cell], "trivial", score) for score in scores), ""])
    train = cell["settings"]["train"]
    share = cell["settings"].get("encoder_lr", cell["settings"].get("tune", {}).get("encoder_lr"))
    head_line = (
        f"{cell['title'].capitalize()}: {cell['steps']} steps of {cell['batch']} images, learning rate {train['lr']:g} "
        f"(encoder × {share:g}), judged on {plural(cell['images_judged'], 'image')}.\n"
    )
    return f"{head_line}\n{table(['encoder', *scores.values(), 'seeds'], rows)}"


def cost(heads: Sequence[str], names: Sequence[str], places: Places) -> str:
    """What the trainings took."""
    rows = []
    for head in heads:
        for name in names:
            for cell in places.get((head, name), [])[:1]:
                tokens = "all" if cell["tokens_left"] is None else f"{cell['tokens_left']:.0f}"
                peak = "" if cell["peak_gb"] is None else f"{cell['peak_gb']:.1f}"
                numbers = [f"{cell['train_seconds']:.0f}", f"{cell['images_per_second']:.0f}", peak, tokens]
                rows.append([cell["title"], name, *numbers, f"{cell['last_loss']:.3f}", str(cell["warnings"])])
    columns = ["seconds of training", "images/s", "peak GB", "tokens left", "last loss", "warnings"]
    return table(["head", "encoder", *columns], rows)


def surroundings(cells: Sequence[dict[str, Any]]) -> str:
    found = {json.dumps({"device": cell["device"]} | cell["versions"]) for cell in cells}
    return "\n".join(", ".join(f"{name} {value}" for name, value in json.loads(one).items()) for one in sorted(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="train and judge cells")
    one.add_argument("--data-voc", type=Path, help="folder that holds VOCdevkit")
    one.add_argument("--data-nyu", type=Path, help="folder {train,test}/{rgb,depth}/, or the official file")
    one.add_argument("--encoders", nargs="+", required=True, metavar="NAME=SOURCE", help="see asc.tasks.encoders")
    one.add_argument("--heads", nargs="+", choices=PLANS, default=list(PLANS))
    one.add_argument("--seeds", "--seed", type=int, nargs="+", default=[0])
    one.add_argument("--minutes", type=float, default=1.0, help="how long a training is to take on one H200")
    one.add_argument("--out", type=Path, default=Path("runs/dense"))
    one.add_argument("--workers", type=int, default=4, help="processes that load data, for each training")
    one.add_argument("--pictures", type=int, default=0, help="images on the page of each run")
    one.add_argument("--scenes", type=int, default=1000, help="scenes to learn from, where a head learns from scenes")
    one.add_argument("--frozen", action="store_true", help="the encoder stays as it is")
    for name, kind in (("steps", int), ("batch", int), ("size", int), ("lr", float), ("encoder-lr", float)):
        one.add_argument(f"--{name}", type=kind, help="in place of the plan's")
    merged = commands.add_parser("merge", help="tables of finished cells")
    merged.add_argument("folders", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "merge":
        merge(arguments.folders)
        return
    sys.exit(run(arguments))


if __name__ == "__main__":
    main()
