"""The one training loop, for pre-training and for every task after it.

It knows batches, losses, steps and the folder of the run; what is trained is a :class:`Task`. Killed at any moment and
started again with the same command, it goes on from the last checkpoint and ends with the very same weights.
"""

from __future__ import annotations

import math
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from asc.data.sampling import BatchPlan
from asc.distributed import summed_over_processes
from asc.files import write_whole
from asc.grouping.graph import NonFiniteKeysError
from asc.precision import Precision, in_bf16
from asc.run_folder import RunFolder
from asc.transfer import Transfer

Optimiser = Literal["adamw", "adam", "sgd"]
Schedule = Literal["cosine", "steps"]

# A loss that is no number once can be bad luck; this often, the run is broken.
_MOST_NON_FINITE = 3
_ACCELERATORS = ("auto", "cpu", "cuda", "mps")
_SECONDS_BETWEEN_LINES = 30.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass(frozen=True)
class TrainConfig:
    """How weights are learned."""

    epochs: float = 100.0
    """Rounds through the data."""
    steps: int | None = None
    """Optimiser steps, in place of ``epochs``."""
    batch: int = 512
    """Samples of one optimiser step, of all processes and micro-batches together."""
    accumulate: int = 1
    """Micro-batches of an optimiser step; more need less memory. Batch norm sees each by itself."""
    optimiser: Optimiser = "adamw"
    """``adamw``; ``adam`` and ``sgd`` have the weight decay as part of the gradient."""
    momentum: float = 0.9
    """Momentum of ``sgd``."""
    lr: float = 0.0016
    """Learning rate for a batch of ``lr_batch`` samples; scaled in proportion to the batch."""
    lr_batch: int = 512
    """See ``lr``."""
    schedule: Schedule = "cosine"
    """How the learning rate falls after the warm-up: along a ``cosine``, or in ``steps``."""
    last_lr: float = 0.0
    """Where the cosine ends, as a share of the learning rate."""
    drops: tuple[float, ...] = (0.6, 0.8)
    """Shares of the training after which ``steps`` divides the learning rate by 10."""
    warmup_epochs: float = 5.0
    """Epochs in which the learning rate rises from 0."""
    warmup_steps: int | None = None
    """Steps of that, in place of ``warmup_epochs``."""
    weight_decay: float = 0.05
    """Weight decay; none on norms, biases, positions, thresholds and shares."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the optimiser's two moving averages."""
    clip: float | None = None
    """Largest norm of the gradient; longer ones are shortened. None: never."""
    precision: Precision = "auto"
    """``auto``: bf16-mixed on a GPU that computes with bf16, else 32-true."""
    seed: int = 0
    """Start of all random draws: weights, order of the data, augmentation."""


@dataclass(frozen=True)
class MachineConfig:
    """Where and how the work is done; nothing here changes what is learned, so it may change between restarts."""

    accelerator: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``mps``."""
    devices: int | None = None
    """Processes on this computer, one for each GPU; None: all GPUs, one process on a CPU, what torchrun says."""
    nodes: int | None = None
    """Computers that take part; None: 1, or what torchrun or SLURM says."""
    workers: int | None = None
    """Processes that load data, for each training process; None: by the number of cores, 0 on a CPU."""
    cache_gb: float = 4.0
    """Memory for decoded frames in pre-training, for each training process: what was decoded once is there for all its
    loaders. Never more than a quarter of what is available. 0: none."""
    compile: bool = False
    """Whether parts of the network are compiled; worth its start-up time in long runs on a GPU."""
    replay: bool = True
    """Whether steps of pre-training and of fine-tuning are recorded and replayed as CUDA graphs (one process on one
    GPU, and a network so small that the GPU would wait for the host), which spares the host nearly all of its work.
    Rounding then differs a little between a run that was interrupted and one that was not."""
    log_every: int = 20
    """Steps between two lines of the log."""
    checkpoint_every: int = 500
    """Steps between two checkpoints."""
    checkpoint_minutes: float = 15.0
    """A checkpoint is written after so many minutes even if its step has not come."""
    keep: int = 2
    """Newest checkpoints that are kept."""
    keep_every: int | None = None
    """Checkpoints at multiples of so many steps are kept for good."""
    stop_after: int | None = None
    """Save and stop after so many steps in this start, as at a scheduler's signal."""


# Exit code of a run that cannot go on as it is.
GAVE_UP = 3


class TrainingStoppedError(Exception):
    """The run ended before its time; the message says why and what to do, ``code`` is the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    @property
    def gave_up(self) -> bool:
        """Whether the run failed, and was not told to stop: started again, it would fail again."""
        return self.code == GAVE_UP


class Outcome(NamedTuple):
    """What a forward pass gives."""

    loss: Tensor
    images: int
    """Images that went through the network."""


class Measures(NamedTuple):
    """What a task has to say of a step."""

    values: dict[str, float]
    """Numbers for the log."""
    warnings: list[str]
    """In plain words."""


class Task(nn.Module, ABC):
    """What a run trains. ``forward`` takes what ``prepare`` makes of a batch and returns an ``Outcome``.

    What must survive a restart belongs into parameters, buffers or ``get_extra_state``.
    """

    epoch_length: int
    """Samples of one round through the data."""
    meanwhile: Callable[[], None] | None = None
    """What the host may do wherever ``forward`` would wait for the device: set by the loop, which prepares the next
    batch so."""

    @abstractmethod
    def batches(self, plan: BatchPlan, workers: int, pin: bool) -> DataLoader[Any]:
        """The micro-batches of the plan."""

    @abstractmethod
    def prepare(self, batch: Any, device: torch.device) -> Any:
        """A batch as ``forward`` wants it, on the device; augmentation happens here."""

    @abstractmethod
    def bad_batch(self, batch: Any) -> dict[str, Any]:
        """What is worth saving of a batch that broke the run: tensors, and the names of its samples."""

    def start(self, device: torch.device) -> None:
        """Called once before the first step of a new run, not of a continued one."""

    def after_step(self, progress: float) -> None:
        """Called after every optimiser step with the share of the training that is done."""

    def forget_step(self) -> None:
        """Called in place of ``after_step`` when a step was not taken."""

    def measuring(self, step: int) -> Callable[[], Measures]:
        """What the log is to say of the last step.

        Whatever the device must compute for it is set going here; the rest is done by what this returns, which is
        called when the device is busy with the next step.
        """
        return lambda: Measures({}, [])

    def evaluation_due(self, step: int, last: bool) -> bool:
        """Whether to evaluate after this many steps."""
        return False

    def evaluate(self, step: int, last: bool, folder: RunFolder) -> dict[str, float]:
        """Numbers for the log, when an evaluation is due.

        Only the first process of several calls this: nothing in it may wait for the others.
        """
        return {}

    def brief(self) -> dict[str, str]:
        """A few values for the progress bar."""
        return {}

    def finished(self) -> bool:
        """Asked after every evaluation: whether to end the training here, as early stopping does.

        Must follow from the task's state alone, so that a continued run ends at the same step.
        """
        return False

    def lr_share(self, name: str) -> float:
        """Share of the learning rate that a parameter gets."""
        return 1.0

    def parts_to_compile(self) -> list[nn.Module]:
        """Modules that are worth compiling."""
        return []


# --- Setting up -------------------------------------------------------------------------------------------


def make_fabric(train: TrainConfig, machine: MachineConfig) -> Fabric:
    """The engine: devices, precision, and the processes of the run."""
    accelerator = machine.accelerator
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    # torchrun has started the processes already and says how many.
    devices = machine.devices or int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or ("auto" if accelerator != "cpu" else 1)
    nodes = machine.nodes or int(os.environ.get("GROUP_WORLD_SIZE", 0)) or int(os.environ.get("SLURM_NNODES", 1))
    precision = train.precision
    if precision == "auto":
        precision = "bf16-mixed" if in_bf16(precision, torch.device(accelerator)) else "32-true"
    how: Any = {"precision": precision}
    if precision == "bf16-mixed":
        how = {"plugins": [_OnlyAutocast(precision, accelerator)]}
    several = nodes > 1 or (devices != 1 if isinstance(devices, int) else torch.cuda.device_count() > 1)
    strategy: Any = DDPStrategy() if several else "auto"
    fabric = Fabric(accelerator=accelerator, devices=devices, num_nodes=nodes, strategy=strategy, **how)
    fabric.launch()
    return fabric


class _OnlyAutocast(MixedPrecision):
    """Mixed precision that leaves it to autocast what is rounded: depths and boxes to learn from never are."""

    def convert_input(self, data: Any) -> Any:
        """As it is."""
        return data


def total_steps(config: TrainConfig, epoch_length: int) -> int:
    """Optimiser steps of the whole training."""
    steps = config.steps if config.steps is not None else math.ceil(config.epochs * epoch_length / config.batch)
    if steps < 1:
        raise ValueError(f"the training has no step: train.epochs is {config.epochs}")
    return steps


def lr_at(config: TrainConfig, step: int, steps: int, epoch_length: int) -> float:
    """Learning rate of a step: a straight rise, then a cosine or a few drops."""
    highest = config.lr * config.batch / config.lr_batch
    warmup = config.warmup_steps
    if warmup is None:
        warmup = round(config.warmup_epochs * epoch_length / config.batch)
    warmup = min(warmup, steps)
    if step < warmup:
        return highest * (step + 1) / warmup
    if config.schedule == "steps":
        return highest * 0.1 ** sum(step >= round(drop * steps) for drop in config.drops)
    progress = (step - warmup) / max(1, steps - warmup)
    share = config.last_lr + (1 - config.last_lr) * (1 + math.cos(math.pi * progress)) / 2
    return highest * share


def make_optimiser(task: Task, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimiser, with weight decay on matrices alone and each parameter's share of the learning rate."""
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in task.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((is_decayed(name, parameter), task.lr_share(name)), []).append(parameter)
    if not groups:
        raise ValueError("the task has no parameter to learn")
    settings = [
        {"params": parameters, "weight_decay": config.weight_decay if decayed else 0.0, "lr_share": share}
        for (decayed, share), parameters in groups.items()
    ]
    # Fused: one launch for all parameters on a GPU, and steps that the device itself can leave out.
    if config.optimiser == "sgd":
        return torch.optim.SGD(settings, lr=config.lr, momentum=config.momentum, fused=True)
    kind = torch.optim.AdamW if config.optimiser == "adamw" else torch.optim.Adam
    return kind(settings, lr=config.lr, betas=config.betas, fused=True)


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Whether weight decay makes sense for a parameter: for matrices, but neither positions nor prefix tokens."""
    last = name.rsplit(".", 1)[-1]
    return parameter.ndim in (2, 4) and last not in ("pos_embed", "prefix_tokens", "allocation", "u")


# --- The loop ---------------------------------------------------------------------------------------------


class _StopRequest:
    """Remembers a signal to stop, so that the loop can finish its step first."""

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _StopRequest:
        for number in _STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: at once
        self.signal = number


@dataclass
class _State:
    """What changes from step to step besides weights and optimiser."""

    step: int = 0
    non_finite: int = 0
    seconds: float = 0.0
    finished: bool = False
    """Whether the task ended the training before its last step."""


class Trainer:
    """Runs a task to its end.

    Args:
        task: What to train.
        config: How weights are learned.
        machine: Where the work is done.
        folder: Where everything is kept.
        fabric: The engine, from ``make_fabric``.
    """

    def __init__(
        self, task: Task, config: TrainConfig, machine: MachineConfig, folder: RunFolder, fabric: Fabric
    ) -> None:
        self.task, self.config, self.machine, self.folder, self.fabric = task, config, machine, folder, fabric
        self.steps = total_steps(config, task.epoch_length)
        self.state = _State()
        self._unsettled: _Unsettled | None = None
        self._told = -math.inf

    def run(self) -> None:
        """Train from the last checkpoint, or from the start, to the end."""
        fabric, task = self.fabric, self.task
        self.model = fabric.setup_module(task)
        self.optimiser: Any = make_optimiser(task, self.config)
        resumed = self._resume()
        if not resumed:
            task.start(fabric.device)
        if self.machine.compile:
            for part in task.parts_to_compile():
                part.compile(dynamic=True)
        self.optimiser = fabric.setup_optimizers(self.optimiser)
        task.train()
        if not resumed:
            self._evaluate()
        if self.state.step < self.steps and not self.state.finished:
            with _StopRequest() as stop, _cores_for_loaders(fabric.device):
                try:
                    self._loop(stop)
                finally:
                    task.meanwhile = None  # lets go of the loader
            self._checkpoint()

    def _loop(self, stop: _StopRequest) -> None:
        first = self.state.step
        last_save = time.monotonic()
        feed = _Feed(self._batches(), self.task, self.fabric.device)
        with tqdm(
            total=self.steps, initial=first, unit="step", disable=None if self.fabric.is_global_zero else True
        ) as bar:
            self._meter = _Meter()
            while self.state.step < self.steps and not self.state.finished:
                self._step(feed)
                self.state.step += 1
                step = self.state.step
                bar.update()
                if self._unsettled is not None and (step % self.machine.log_every == 0 or step == self.steps):
                    self._unsettled.log = _Line(self.task.measuring(step), bar)
                self._evaluate()
                number = self._agreed_signal(stop)
                if number or (self.machine.stop_after is not None and step - first >= self.machine.stop_after):
                    self._stop_early(number)
                overdue = time.monotonic() - last_save > 60 * self.machine.checkpoint_minutes
                if step < self.steps and (step % self.machine.checkpoint_every == 0 or self._agreed(overdue)):
                    self._checkpoint()
                    last_save = time.monotonic()

    def _batches(self) -> Iterator[Any]:
        config, fabric = self.config, self.fabric
        start, end = self.state.step * config.batch, self.steps * config.batch
        plan = BatchPlan(start, end, config.batch, config.accumulate, fabric.global_rank, fabric.world_size)
        workers = self.machine.workers
        on_gpu = fabric.device.type == "cuda"
        if workers is None:
            # On a CPU the cores are busy with training; beside a GPU they have nothing better to do.
            workers = min(16, (os.cpu_count() or 1) // max(1, fabric.world_size)) if on_gpu else 0
        return iter(self.task.batches(plan, workers, pin=on_gpu))

    # --- One step -----------------------------------------------------------------------------------------

    def _step(self, feed: _Feed) -> None:
        lr = lr_at(self.config, self.state.step, self.steps, self.task.epoch_length)
        for group in self.optimiser.param_groups:
            group["lr"] = lr * group["lr_share"]
        images, problem = 0, ""
        losses: list[Tensor] = []
        batches: list[Any] = []
        count = self.config.accumulate
        try:
            for number in range(count):
                inputs = feed.take(batches)
                goes_on = number + 1 < count or self.state.step + 1 < self.steps
                self.task.meanwhile = feed.look_ahead if goes_on else None
                # Gradients of several micro-batches travel between processes once.
                with self.fabric.no_backward_sync(self.model, enabled=number + 1 < count):
                    outcome: Outcome = self.model(inputs)
                    self.fabric.backward(outcome.loss / count)
                losses.append(outcome.loss.detach())
                images += outcome.images
            mean = summed_over_processes(torch.stack(losses).mean().float()) / self.fabric.world_size
            norm = self._gradient_norm().float()
            numbers = Transfer(torch.stack([mean, norm]))
            self._take_step(norm)
        except NonFiniteKeysError as error:
            numbers = Transfer(torch.full((2,), math.nan))
            self.task.forget_step()
            problem = str(error)
            if self.fabric.world_size > 1:
                # The others wait for this process in the middle of a step: there is no way to go on together.
                self._give_up(self.state.step + 1, self._save_bad_batch(self.state.step + 1, batches, problem), problem)
        self.optimiser.zero_grad(set_to_none=True)
        if self.state.step + 1 < self.steps:
            feed.look_ahead()
        self._settle()
        images *= self.fabric.world_size
        self._unsettled = _Unsettled(self.state.step + 1, numbers, problem, batches, images, lr)

    def _gradient_norm(self) -> Tensor:
        gradients = [p.grad for group in self.optimiser.param_groups for p in group["params"] if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, foreach=True)

    def _take_step(self, norm: Tensor) -> None:
        """Take the step, unless the gradient is not finite: the device sees to that, so that the host need not wait."""
        optimiser = self.optimiser.optimizer
        # Fused optimisers leave everything as it is where the one is not 0, and divide gradients by the other.
        optimiser.found_inf = (~norm.isfinite()).float()
        if self.config.clip is not None:
            optimiser.grad_scale = (norm / self.config.clip).clamp(min=1.0)
        self.optimiser.step()
        self.task.after_step((self.state.step + 1) / self.steps)

    def _settle(self) -> None:
        """See how the last step went, which the host has not waited for; its numbers are there by now."""
        if self._unsettled is None:
            return
        last, self._unsettled = self._unsettled, None
        loss, length = last.numbers.wait().tolist()
        self._meter.add(loss, length, last.images, last.lr)
        if not math.isfinite(length):
            problem = last.problem or f"the loss is {loss:.4g} and the gradient has the norm {length}"
            self._tell_skipped(last.step, last.batches, problem)
        if last.log is not None:
            self._log(last.step, last.log)

    def _tell_skipped(self, step: int, batches: Sequence[Any], problem: str) -> None:
        """A step that would have ruined the weights was not taken; the third such ends the run."""
        self.state.non_finite += 1
        file = self._save_bad_batch(step, batches, problem)
        count = f"{self.state.non_finite} of {_MOST_NON_FINITE} in this run"
        self._warn(f"step {step} was not taken: {problem} ({count}). Its batch is saved in {file.name}")
        if self.state.non_finite >= _MOST_NON_FINITE:
            self._give_up(step, file, f"{problem}, for the third time")

    def _save_bad_batch(self, step: int, batches: Sequence[Any], problem: str) -> Path:
        file = self.folder.path / f"bad_batch_step_{step:09d}_process_{self.fabric.global_rank}.pt"
        saved = [self.task.bad_batch(batch) for batch in batches]
        write_whole(file, lambda path: torch.save({"step": step, "problem": problem, "batches": saved}, path))
        return file

    def _give_up(self, step: int, batch: Path, problem: str) -> NoReturn:
        good = self.folder.checkpoints()
        kept = f"the last good checkpoint is {good[-1].name}" if good else "there is no checkpoint yet"
        raise TrainingStoppedError(
            f"stopped at step {step}: {problem}; {kept}, the batch is {batch}. Try a lower train.lr, "
            f"train.clip 1.0, or train.precision 32-true in a new run",
            code=GAVE_UP,
        )

    # --- What is kept and told ----------------------------------------------------------------------------

    def _resume(self) -> bool:
        saved = self.folder.load_checkpoint(self.fabric.device)
        if saved is None:
            self.folder.rewind_log(-1)  # of a start that did not get as far as its first checkpoint
            return False
        state = saved.state
        self.task.load_state_dict(state["task"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.state = _State(**state["state"])
        torch.set_rng_state(state["random"]["torch"].cpu())
        if self.fabric.device.type == "cuda" and "cuda" in state["random"]:
            torch.cuda.set_rng_state(state["random"]["cuda"].cpu())
        self.folder.rewind_log(self.state.step)
        for problem in saved.passed_over:
            self._warn(f"{problem}; going on from the one before")
        self.fabric.print(f"continuing {self.folder.path} at step {self.state.step} of {self.steps}")
        return True

    def _checkpoint(self) -> None:
        self._settle()
        random = {"torch": torch.get_rng_state()}
        if self.fabric.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state()
        self.state.seconds += self._meter.lap()
        self.folder.save_checkpoint(
            self.state.step,
            {
                "task": self.task.state_dict(),
                "optimiser": self.optimiser.state_dict(),
                "state": vars(self.state),
                "random": random,
            },
            self.machine.keep,
            self.machine.keep_every,
        )

    def _stop_early(self, number: int) -> None:
        self._checkpoint()
        why = f"by the signal {signal.Signals(number).name}" if number else "after machine.stop_after steps"
        raise TrainingStoppedError(
            f"stopped {why} at step {self.state.step} of {self.steps}; all is saved, the same command continues",
            code=128 + number if number else 0,
        )

    def _agreed_signal(self, stop: _StopRequest) -> int:
        if self.fabric.world_size == 1:
            return stop.signal
        asked = summed_over_processes(torch.tensor(float(stop.signal > 0), device=self.fabric.device))
        return (stop.signal or signal.SIGTERM) if float(asked) else 0

    def _agreed(self, flag: bool) -> bool:
        # The first process' clock decides, since all must save at the same step.
        return bool(self.fabric.broadcast(flag)) if self.fabric.world_size > 1 else flag

    def _log(self, step: int, line: _Line) -> None:
        measures = line.measures()
        values = self._meter.values() | measures.values
        self.folder.log(step, values)
        for message in measures.warnings:
            self._warn(message)
        brief = {"loss": f"{values['loss']:.3f}", "img/s": f"{values['images_per_second']:.0f}"} | self.task.brief()
        line.bar.set_postfix(brief)
        if line.bar.disable and self.fabric.is_global_zero and time.monotonic() - self._told > _SECONDS_BETWEEN_LINES:
            # Whoever reads a file of output, which has no bar, must see that it goes on.
            self._told = time.monotonic()
            print(f"step {step} of {self.steps}: {', '.join(f'{k} {v}' for k, v in brief.items())}", flush=True)

    def _evaluate(self) -> None:
        step, last = self.state.step, self.state.step == self.steps
        if not self.task.evaluation_due(step, last):
            return
        self._settle()
        if self.fabric.is_global_zero:
            self.folder.log(step, self.task.evaluate(step, last, self.folder))
            self.task.train()
        self.fabric.barrier()
        self.state.finished = self._agreed(self.task.finished())

    def _warn(self, message: str) -> None:
        self.folder.log(self.state.step, {"warning": message})
        if self.fabric.is_global_zero:
            tqdm.write(f"warning: {message}")


@contextmanager
def _cores_for_loaders(device: torch.device) -> Iterator[None]:
    """Beside a GPU the cores belong to the loaders: threads that share a small piece of work would wait for them."""
    before = torch.get_num_threads()
    if device.type == "cuda":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class _Unsettled:
    """A step that the host has not seen the outcome of."""

    step: int
    """Its number, from 1 on."""
    numbers: Transfer
    """Loss and length of the gradient."""
    problem: str
    """What went wrong before there were any; empty: nothing."""
    batches: list[Any]
    images: int
    lr: float
    log: _Line | None = None
    """What the log is to say of it, if anything."""


class _Line(NamedTuple):
    """A line of the log that is not written yet."""

    measures: Callable[[], Measures]
    bar: tqdm[None]


class _Feed:
    """Batches as the network wants them. The next can be made ready while a GPU is still busy with this one."""

    def __init__(self, batches: Iterator[Any], task: Task, device: torch.device) -> None:
        self._batches, self._task, self._device = batches, task, device
        self._ahead = device.type == "cuda"
        self._ready: tuple[Any, Any] | None = None
        self._problem: Exception | None = None

    def take(self, taken: list[Any]) -> Any:
        """The next batch, prepared; as it came from the loader it is put with those taken."""
        if self._problem is not None:
            raise self._problem
        batch, inputs = self._next() if self._ready is None else self._ready
        self._ready = None
        taken.append(batch)
        return inputs

    def look_ahead(self) -> None:
        """Prepare the next batch now, if that is for a GPU; what goes wrong is told when it is taken."""
        if self._ahead and self._ready is None and self._problem is None:
            try:
                self._ready = self._next()
            except Exception as error:
                self._problem = error

    def _next(self) -> tuple[Any, Any]:
        batch = next(self._batches)
        # In the middle of a forward pass, too, images are worked on in full precision.
        with torch.autocast(self._device.type, enabled=False):
            return batch, self._task.prepare(batch, self._device)


class _Meter:
    """Means of what happened since the last line of the log."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._reset()

    def _reset(self) -> None:
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._images = 0
        self._since = time.monotonic()

    def add(self, loss: float, norm: float, images: int, lr: float) -> None:
        self._losses.append(loss)
        self._norms.append(norm)
        self._images += images
        self._lr = lr

    def values(self) -> dict[str, float]:
        seconds = max(time.monotonic() - self._since, 1e-9)
        finite = [loss for loss in self._losses if math.isfinite(loss)]
        values = {
            "loss": float(np.mean(finite)) if finite else math.nan,
            "gradient_norm": float(np.mean([norm for norm in self._norms if math.isfinite(norm)] or [math.nan])),
            "lr": self._lr,
            "images_per_second": self._images / seconds,
        }
        self._reset()
        return values

    def lap(self) -> float:
        """Seconds since the last call."""
        now = time.monotonic()
        seconds, self._begun = now - self._begun, now
        return seconds


def check_training(config: TrainConfig, machine: MachineConfig) -> None:
    """Refuse settings that cannot work, before anything is done with them."""
    for name in ("batch", "accumulate", "lr_batch"):
        if getattr(config, name) < 1:
            raise ValueError(f"train.{name} must be at least 1, got {getattr(config, name)}")
    for name in ("lr", "weight_decay", "warmup_epochs", "last_lr", "momentum"):
        if not (getattr(config, name) >= 0 and math.isfinite(getattr(config, name))):
            raise ValueError(f"train.{name} must be a number of at least 0, got {getattr(config, name)}")
    if config.steps is not None and config.steps < 1:
        raise ValueError(f"the training has no step: train.steps must be at least 1, got {config.steps}")
    if not all(0 < drop < 1 for drop in config.drops):
        raise ValueError(f"train.drops are shares of the training between 0 and 1, got {config.drops}")
    if config.clip is not None and not config.clip > 0:
        raise ValueError(f"train.clip must be positive, or None for no clipping, got {config.clip}")
    for name in ("log_every", "checkpoint_every", "keep"):
        if getattr(machine, name) < 1:
            raise ValueError(f"machine.{name} must be at least 1, got {getattr(machine, name)}")
    if not machine.cache_gb >= 0 or math.isinf(machine.cache_gb):
        raise ValueError(f"machine.cache_gb must be a number of at least 0, got {machine.cache_gb}")
    if machine.stop_after is not None and machine.stop_after < 1:
        raise ValueError(f"machine.stop_after must be at least 1, or None for no stop, got {machine.stop_after}")
    check_accelerator("machine.accelerator", machine.accelerator)
    if machine.workers is not None and machine.workers < 0:
        raise ValueError(f"machine.workers must be at least 0, got {machine.workers}")


def check_accelerator(setting: str, accelerator: str) -> None:
    """Refuse what is not there."""
    if accelerator not in _ACCELERATORS:
        raise ValueError(f"{setting} must be one of {', '.join(_ACCELERATORS)}, got {accelerator!r}")
    there = torch.backends.mps.is_available() if accelerator == "mps" else torch.cuda.is_available()
    if accelerator in ("cuda", "mps") and not there:
        raise ValueError(f"{setting} is {accelerator}, but PyTorch finds no such GPU; leave it at auto, or take cpu")
