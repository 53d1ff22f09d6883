"""Pre-training of one run, and how fast a variant trains."""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import safetensors.torch
import torch
from torch import Tensor
from tqdm import tqdm

from asc.ablate.cells import now
from asc.ablate.judge import split_of
from asc.ablate.study import Run, Study
from asc.ablate.variants import PLAIN, VARIANTS, Variant
from asc.files import write_whole
from asc.layer import SuperpixelWarning
from asc.pretrain.data import Corpora, open_corpora
from asc.pretrain.run import ENCODER, PretrainConfig, PretrainTask
from asc.run_folder import RunFolder, read_log
from asc.tasks.classify.images import Split
from asc.train import MachineConfig, Trainer, TrainingStoppedError, make_fabric
from asc.vit import AscViT
from asc.weights import CONFIG_FILE, WEIGHTS_FILE, read_state, save

RUNS, ENCODERS, SPEEDS = "runs", "encoders", "speeds"
PLAN_FILE, TRAINED_FILE, PRETRAIN = "plan.json", "trained.json", "pretrain"
# Measurements of kNN accuracy in the course of a run, and points that are kept of a curve.
_KNN_POINTS, _CURVE_POINTS = 10, 200
# Share of the steps of a measurement of speed that only warm up: until steps are replayed without trouble.
_WARM = 0.5


class AblationTask(PretrainTask):
    """Pre-training that treats the thresholds as its variant asks for, and knows the time it spends on judging."""

    evaluation_seconds: Tensor

    def __init__(self, config: PretrainConfig, corpora: Corpora, judged_on: Split, variant: Variant) -> None:
        super().__init__(config, corpora, judged_on)
        self.variant = variant
        self.register_buffer("evaluation_seconds", torch.zeros((), dtype=torch.float64))

    def start(self, device: torch.device) -> None:
        """Set the thresholds, unless they are to stay where they are."""
        if self.variant.calibrated:
            super().start(device)

    def evaluate(self, step: int, last: bool, folder: RunFolder) -> dict[str, float]:
        """As in any pre-training, by the clock."""
        begun = time.perf_counter()
        values = super().evaluate(step, last, folder)
        if step:  # the loop's own clock begins after the first evaluation
            self.evaluation_seconds += time.perf_counter() - begun
        return values

    def finished_encoder(self) -> AscViT:
        """The target encoder, its thresholds set once more or left as they are."""
        return super().finished_encoder() if self.variant.recalibrated else self.target.eval()


class _SpeedTask(AblationTask):
    """Only for the clock."""

    def __init__(self, config: PretrainConfig, corpora: Corpora, judged_on: Split, variant: Variant) -> None:
        super().__init__(config, corpora, judged_on, variant)
        self.times: list[float] = []

    def evaluation_due(self, step: int, last: bool) -> bool:
        """Never."""
        return False

    def after_step(self, progress: float) -> None:
        """Note the time; the loop has waited for the device in this step."""
        super().after_step(progress)
        self.times.append(time.perf_counter())


def _train(task: AblationTask, folder: RunFolder) -> Trainer:
    """Run a task to its end."""
    config = task.config
    trainer = Trainer(task, config.train, config.machine, folder, make_fabric(config.train, config.machine))
    with _quiet():
        trainer.run()
    return trainer


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the layers' warnings: the monitor says the same with the step beside it, and the log keeps it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SuperpixelWarning)
        yield


# --- How many steps ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How long a run trains; kept in its folder, so that a continued run goes on by the same plan."""

    steps: int
    """Optimiser steps."""
    seconds: float | None = None
    """Time that these steps should take; None: the steps were asked for."""
    steps_per_second: float | None = None
    """Speed that the steps come from."""

    @classmethod
    def of(cls, study: Study, run: Run) -> Self:
        """The plan in the folder of a run, made if there is none."""
        file = study.out / RUNS / run.name / PLAN_FILE
        if file.is_file():
            return cls(**json.loads(file.read_text()))
        plan = cls._made(study, run)
        _write_json(file, asdict(plan))
        return plan

    @classmethod
    def _made(cls, study: Study, run: Run) -> Self:
        wanted = study.base.train.steps
        assert wanted is not None
        if run.mode == "steps":
            return cls(wanted)
        seconds = study.seconds
        if seconds is None:
            seconds = wanted / speed_of(study, PLAIN)
        rate = speed_of(study, run.variant)
        return cls(max(1, round(seconds * rate)), seconds, rate)


def device_name(machine: MachineConfig) -> str:
    """Where the work is done."""
    on_gpu = torch.cuda.is_available() and machine.accelerator in ("auto", "cuda")
    return torch.cuda.get_device_name() if on_gpu else "cpu"


def speed_of(study: Study, variant: str, alone: bool = False) -> float:
    """Optimiser steps a second of a variant on this machine: from its file, or measured now.

    ``alone``: whether no other process of the study is at work, which goes into the file.
    """
    device = device_name(study.base.machine)
    file = study.out / SPEEDS / f"{study.speed_name(variant, device)}.json"
    if not file.is_file():
        rate = measure_speed(study, variant)
        record = {"variant": variant, "steps_per_second": rate, "steps": study.rate_steps, "device": device}
        _write_json(file, record | {"alone": alone, "when": now()})
    return float(json.loads(file.read_text())["steps_per_second"])


def measure_speed(study: Study, variant: str) -> float:
    """Optimiser steps a second in a short run of the very config, its first steps not counted."""
    config, count = study.config(variant, study.seeds[0]), study.rate_steps
    with TemporaryDirectory(prefix="speed_", dir=study.out) as scratch:
        config = replace(
            config,
            out=Path(scratch),
            train=replace(config.train, steps=max(count, config.train.steps or 0) + 1),
            machine=replace(config.machine, stop_after=count, checkpoint_every=count + 1),
        )
        folder = RunFolder(config.out)
        try:
            corpora = open_corpora(config.data, config.clips, config.train.seed, config.out / "found")
            task = _SpeedTask(config, corpora, _followed(study, config), VARIANTS[variant])
            _train(task, folder)
        except TrainingStoppedError as stopped:
            if stopped.code:
                raise
        finally:
            folder.close()
    warm = max(1, int(_WARM * count))
    return (count - warm) / (task.times[-1] - task.times[warm - 1])


def _followed(study: Study, config: PretrainConfig) -> Split:
    """The images that the kNN accuracy is followed on: some of the first labelled set."""
    watch = config.watch
    return split_of(study, study.sets[0], (watch.knn_labelled, watch.knn_judged))


# --- The run ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A pre-trained encoder."""

    encoder: Path
    """Its folder."""
    record: Mapping[str, Any]
    """How the training went."""


def trained(study: Study, run: Run) -> Trained:
    """The encoder of a run: as it lies there, or trained now, from the last checkpoint on."""
    for place in (study.out / RUNS / run.name, study.out / ENCODERS / run.name):
        if (place / TRAINED_FILE).is_file():
            return Trained(place / ENCODER, json.loads((place / TRAINED_FILE).read_text()))
    place, plan = study.out / RUNS / run.name, Plan.of(study, run)
    config = study.config(run.variant, run.seed)
    config = replace(
        config,
        out=place / PRETRAIN,
        train=replace(config.train, steps=plan.steps),
        watch=replace(config.watch, knn_every=-(-plan.steps // _KNN_POINTS), pictures=0),
    )
    folder = RunFolder(config.out)
    try:
        folder.begin(asdict(config), free=("machine", "out"))
        corpora = open_corpora(config.data, config.clips, config.train.seed, config.out / "found")
        for line in (line for findings in corpora.findings for line in findings.lines()):
            tqdm.write(line)
        followed = _followed(study, config)
        task = AblationTask(config, corpora, followed, VARIANTS[run.variant])
        trainer = _train(task, folder)
        with _quiet():
            save(task.finished_encoder(), place / ENCODER)
    finally:
        folder.close()
    seconds = trainer.state.seconds - float(task.evaluation_seconds)
    record = _record(config, plan, seconds, read_log(config.out))
    # With other numbers of images kNN accuracies are others, too: their curves do not belong into one picture.
    record["followed_on"] = [len(part.labels_B) for part in (followed.train, followed.test)]
    _write_json(place / TRAINED_FILE, record)
    return Trained(place / ENCODER, json.loads((place / TRAINED_FILE).read_text()))


def _record(config: PretrainConfig, plan: Plan, seconds: float, log: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    images = plan.steps * config.train.batch * config.clips.frames.views
    rows, columns = config.encoder.grid_of(config.encoder.image_hw)
    last = config.encoder.superpixel_blocks[-1:]
    left = {}
    if last:
        counts = _curve(log, f"block_{last[0]:02d}/tokens_mean")
        left = {step: count / (rows * columns) for step, count in counts.items()}
    curves = {
        "knn": _curve(log, "knn"),
        "loss": _thinned(_curve(log, "loss")),
        "tokens_share": _thinned(_curve(log, "tokens_share")),
        "tokens_left": _thinned(left),
    }
    return {
        "plan": asdict(plan),
        "seconds": seconds,
        "images_per_second": images / seconds,
        "tokens_share": _last(curves["tokens_share"]),
        "tokens_left": _last(curves["tokens_left"]),
        "warnings": [line["warning"] for line in log if "warning" in line],
        "curves": curves,
        "device": device_name(config.machine),
    }


def _curve(log: Sequence[Mapping[str, Any]], name: str) -> dict[int, float]:
    return {line["step"]: line[name] for line in log if line.get(name) is not None}


def _thinned(curve: Mapping[int, float]) -> dict[int, float]:
    every = -(-len(curve) // _CURVE_POINTS)
    last = max(curve, default=0)
    return {step: value for number, (step, value) in enumerate(curve.items()) if number % every == 0 or step == last}


def _last(curve: Mapping[int, float]) -> float:
    """The last value; all tokens, where nothing merges."""
    return curve[max(curve)] if curve else 1.0


def settle(study: Study, run: Run) -> None:
    """Leave of a run that is judged what is to be kept."""
    place, kept = study.out / RUNS / run.name, study.out / ENCODERS / run.name
    if study.encoders == "runs" or not place.is_dir():
        return
    if study.encoders == "keep" and (place / TRAINED_FILE).is_file() and not (kept / TRAINED_FILE).is_file():
        state = {name: _halved(tensor) for name, tensor in read_state(place / ENCODER / WEIGHTS_FILE).items()}
        write_whole(kept / ENCODER / WEIGHTS_FILE, lambda file: safetensors.torch.save_file(state, file))
        for name in (Path(ENCODER) / CONFIG_FILE, Path(TRAINED_FILE)):
            write_whole(kept / name, (place / name).read_bytes())
    shutil.rmtree(place)


def _halved(tensor: Tensor) -> Tensor:
    # Thresholds and norms are few, and a threshold in half precision would group otherwise.
    return tensor.half() if tensor.is_floating_point() and tensor.ndim >= 2 else tensor


def _write_json(file: Path, content: Any) -> None:
    write_whole(file, json.dumps(content, indent=1).encode() + b"\n")
