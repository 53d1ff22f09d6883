"""The engine of all trainings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from asc.data.loading import make_loader
from asc.data.sampling import BatchPlan
from asc.run_folder import RunFolder, read_log
from asc.train import (
    MachineConfig,
    Measures,
    Outcome,
    Task,
    TrainConfig,
    Trainer,
    TrainingStoppedError,
    _cores_for_loaders,
    _Feed,
    lr_at,
    make_fabric,
)


class Remembering(nn.Module):
    """Keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        self.given = given
        self.inside = torch.is_autocast_enabled("cpu")
        return given["depth"].sum() * self.scale


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_half_precision_rounds_nothing_that_is_learned_from(precision: str) -> None:
    fabric = make_fabric(TrainConfig(steps=1, precision=precision), MachineConfig(accelerator="cpu", devices=1))
    module = Remembering()
    depth = torch.tensor([1.2345678, 9.8765432])
    fabric.setup_module(module)({"depth": depth, "count": torch.tensor(3)})
    assert torch.equal(module.given["depth"], depth) and module.given["depth"].dtype == torch.float32
    assert module.inside == (precision == "bf16-mixed")


class Places(Dataset[list[int]]):
    def __getitem__(self, positions: list[int]) -> list[int]:
        return positions


class Line(Task):
    """Learns two numbers; some batches give gradients that are no numbers, some very long ones."""

    epoch_length = 8

    def __init__(self, bad: tuple[int, ...] = (), long: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.bad, self.long = bad, long
        self.weights = nn.Parameter(torch.tensor([[1.0, -2.0]]))
        self.after: list[Tensor] = []

    def batches(self, plan: BatchPlan, workers: int, pin: bool) -> DataLoader[Any]:
        return make_loader(Places(), plan, workers, pin)

    def prepare(self, batch: list[int], device: torch.device) -> tuple[int, Tensor]:
        return batch[0] // 2 + 1, torch.tensor(batch, dtype=torch.float32, device=device)

    def forward(self, inputs: tuple[int, Tensor]) -> Outcome:
        return Outcome(self.loss(*inputs, self.weights), len(inputs[1]))

    def loss(self, step: int, places_B: Tensor, weights_12: Tensor) -> Tensor:
        scale = float("inf") if step in self.bad else 100.0 if step in self.long else 0.1
        return ((weights_12 * places_B[:, None]).square() * scale).mean()

    def after_step(self, progress: float) -> None:
        self.after.append(self.weights.detach().clone())

    def bad_batch(self, batch: list[int]) -> dict[str, Any]:
        return {"positions": batch}


def train_line(task: Line, config: TrainConfig, out: Path, **machine: Any) -> Trainer:
    where = MachineConfig(accelerator="cpu", devices=1, **machine)
    folder = RunFolder(out)
    try:
        folder.begin({}, free=())
        trainer = Trainer(task, config, where, folder, make_fabric(config, where))
        trainer.run()
    finally:
        folder.close()
    return trainer


def plain_optimiser(weights: nn.Parameter, config: TrainConfig) -> torch.optim.Optimizer:
    if config.optimiser == "sgd":
        return torch.optim.SGD([weights], momentum=config.momentum, weight_decay=config.weight_decay)
    kind = torch.optim.AdamW if config.optimiser == "adamw" else torch.optim.Adam
    return kind([weights], betas=config.betas, weight_decay=config.weight_decay)


@pytest.mark.parametrize("optimiser", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_steps_are_those_of_a_plain_loop_that_leaves_out_the_bad_ones(
    tmp_path: Path, optimiser: Any, clip: float | None
) -> None:
    config = TrainConfig(
        steps=7, batch=2, lr=0.1, lr_batch=2, warmup_steps=2, weight_decay=0.05, clip=clip, optimiser=optimiser
    )
    task = Line(bad=(3, 6), long=(2, 4))
    train_line(task, config, tmp_path, log_every=4)
    weights = nn.Parameter(torch.tensor([[1.0, -2.0]]))
    plain = plain_optimiser(weights, config)
    for step in range(1, 8):
        plain.param_groups[0]["lr"] = lr_at(config, step - 1, 7, task.epoch_length)
        plain.zero_grad()
        task.loss(step, torch.tensor([2.0 * step - 2, 2.0 * step - 1]), weights).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([weights], clip)
        if step not in task.bad:
            plain.step()
        torch.testing.assert_close(task.after[step - 1], weights.detach(), rtol=1e-4, atol=1e-5)


def test_a_step_that_was_not_taken_is_told_with_its_number_and_its_batch(tmp_path: Path) -> None:
    config = TrainConfig(steps=9, batch=2, lr=0.1, lr_batch=2, warmup_steps=0)
    trainer = train_line(Line(bad=(4, 7)), config, tmp_path, log_every=4, checkpoint_every=4)
    assert trainer.state.non_finite == 2
    log = read_log(tmp_path)
    told = [line["warning"] for line in log if "warning" in line]
    assert [text.split(":")[0] for text in told] == ["step 4 was not taken", "step 7 was not taken"]
    assert all("the gradient has the norm" in text for text in told)
    bad = torch.load(tmp_path / "bad_batch_step_000000004_process_0.pt", weights_only=True)
    assert bad["batches"] == [{"positions": [6, 7]}]
    losses = [line["loss"] for line in log if "loss" in line]
    assert len(losses) == 3 and all(loss == loss for loss in losses)
    # The checkpoint of a step knows of that step.
    saved = torch.load(tmp_path / "checkpoints" / "step_000000008.pt", weights_only=False)
    assert saved["state"]["non_finite"] == 2


class Measured(Line):
    """Looks at a weight after every step that is logged; whether anybody waits for it is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def forward(self, inputs: tuple[int, Tensor]) -> Outcome:
        self.events.append(f"step {inputs[0]}")
        return super().forward(inputs)

    def measuring(self, step: int) -> Callable[[], Measures]:
        seen = float(self.weights.detach()[0, 0])
        self.events.append(f"look {step}")

        def finish() -> Measures:
            self.events.append(f"tell {step}")
            return Measures({"weight": seen}, [f"after {step}"])

        return finish

    def evaluation_due(self, step: int, last: bool) -> bool:
        return step == 4

    def evaluate(self, step: int, last: bool, folder: RunFolder) -> dict[str, float]:
        return {"score": 1.0}


def test_the_log_says_what_was_seen_at_its_step_though_it_is_written_later(tmp_path: Path) -> None:
    task = Measured()
    train_line(task, TrainConfig(steps=7, batch=2, lr=0.1, lr_batch=2, warmup_steps=0), tmp_path, log_every=2)
    log = read_log(tmp_path)
    assert [line["step"] for line in log] == [2, 2, 4, 4, 4, 6, 6, 7, 7]
    assert {line["step"]: line["weight"] for line in log if "weight" in line} == pytest.approx(
        {step: float(task.after[step - 1][0, 0]) for step in (2, 4, 6, 7)}
    )
    assert [line["warning"] for line in log if "warning" in line] == [f"after {step}" for step in (2, 4, 6, 7)]
    # A score stands behind the line of its step; else the next step is on its way before the line is made.
    assert ["score" in line for line in log].index(True) == 4
    order = task.events.index
    assert order("look 2") < order("step 3") < order("tell 2") < order("step 4")
    assert order("look 4") < order("tell 4") < order("step 5")


class Breaking(Line):
    """Breaks at one batch, and remembers whether there was something to do meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.offered: list[bool] = []

    def prepare(self, batch: list[int], device: torch.device) -> tuple[int, Tensor]:
        if batch == [13]:
            raise ValueError("this one is broken")
        assert not torch.is_autocast_enabled(device.type)
        return super().prepare(batch, device)

    def forward(self, inputs: tuple[int, Tensor]) -> Outcome:
        self.offered.append(self.meanwhile is not None)
        if self.meanwhile is not None:
            self.meanwhile()
        return super().forward(inputs)


def test_looking_ahead_twice_loses_no_batch_and_a_broken_one_is_told_when_it_is_taken() -> None:
    feed = _Feed(iter([[0], [2], [4], [13], [6]]), Breaking(), torch.device("cpu"))
    feed._ahead = True  # as beside a GPU
    taken: list[list[int]] = []
    for _ in range(3):
        feed.take(taken)
        with torch.autocast("cpu", torch.bfloat16):  # as in a forward pass
            feed.look_ahead()
            feed.look_ahead()
    assert taken == [[0], [2], [4]]
    with pytest.raises(ValueError, match="this one is broken"):
        feed.take(taken)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_next_batch_is_offered_to_every_pass_but_the_last(tmp_path: Path, accumulate: int) -> None:
    task = Breaking()
    train_line(task, TrainConfig(steps=3, batch=2, accumulate=accumulate, warmup_steps=0), tmp_path)
    assert task.offered == [True] * (3 * accumulate - 1) + [False]


def test_a_run_that_stops_early_lets_go_of_its_loader(tmp_path: Path) -> None:
    task = Breaking()
    with pytest.raises(TrainingStoppedError, match="stop_after"):
        train_line(task, TrainConfig(steps=3, batch=2, warmup_steps=0), tmp_path, stop_after=1)
    assert task.offered == [True] and task.meanwhile is None


def test_beside_a_gpu_the_cores_are_left_to_the_loaders() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with _cores_for_loaders(torch.device("cpu")):
            assert torch.get_num_threads() == 2
        with pytest.raises(RuntimeError), _cores_for_loaders(torch.device("cuda")):
            assert torch.get_num_threads() == 1
            raise RuntimeError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
