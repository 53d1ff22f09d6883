"""Where the time of real training steps goes, by the host's clock.

    python benchmarks/training_loop.py --data SHARDS [--plain] [--steps 400] [--changes machine.compile=true ...]

Trains the recipe ``ablation`` for some steps and prints, for the second half of them, the mean and the median time of
a step, what each part of the loop took of it, and the slowest steps with what they did. Parts lie in each other:
``forward`` holds ``record``, ``plain run`` and ``replay``, that mostly ``next batch``, and ``settle`` holds ``log``.
"""

from __future__ import annotations

import argparse
import collections
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asc import train
from asc.ablate.run import AblateSettings, make_study
from asc.ablate.training import measure_speed
from asc.pretrain.replay import Replay, _RecordedAgreement
from asc.replay.replayer import Replayer

PARTS: tuple[tuple[type, str, str], ...] = (
    (Replay, "__call__", "forward"),
    (Replay, "record", "record"),
    (Replayer, "_run_plainly", "plain run"),
    (_RecordedAgreement, "run", "replay"),
    (_RecordedAgreement, "gradients", "gradients"),
    (train.Trainer, "_gradient_norm", "gradient's length"),
    (train.Trainer, "_take_step", "optimiser, thresholds, target"),
    (train._Feed, "take", "take batch"),
    (train._Feed, "look_ahead", "next batch"),
    (train.Trainer, "_settle", "settle"),
    (train.Trainer, "_log", "log"),
)
SLOWEST = 8


class Clock:
    """Milliseconds of every part, step by step."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, float]] = []
        self._now: dict[str, float] = collections.defaultdict(float)
        self._begun: float | None = None
        self._garbage = 0.0

    def watch(self) -> None:
        """Put the clock into every part of the loop."""
        for owner, method, name in PARTS:
            setattr(owner, method, self._timed(getattr(owner, method), name))
        whole: Callable[..., None] = train.Trainer._step
        setattr(train.Trainer, "_step", lambda *arguments: (self._next_step(), whole(*arguments))[1])  # noqa: B010
        gc.callbacks.append(self._collected)

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self._now[name] += 1e3 * (time.perf_counter() - start)

        return run

    def _next_step(self) -> None:
        now = time.perf_counter()
        if self._begun is not None:
            self.steps.append(dict(self._now) | {"step": 1e3 * (now - self._begun)})
        self._now.clear()
        self._begun = now

    def _collected(self, phase: str, _: Mapping[str, int]) -> None:
        if phase == "start":
            self._garbage = time.perf_counter()
        else:
            self._now["garbage collection"] += 1e3 * (time.perf_counter() - self._garbage)


def report(steps: list[Mapping[str, float]], first: int) -> None:
    """Print where the time went."""
    whole = [step["step"] for step in steps]
    print(f"{len(steps)} steps from {first} on: mean {statistics.fmean(whole):.1f} ms, median", end=" ")
    print(f"{statistics.median(whole):.1f} ms ({1e3 / statistics.fmean(whole):.1f} steps/s)")
    names = dict.fromkeys(name for step in steps for name in step)
    print("\n| part | mean of all steps, ms | in how many steps | longest, ms |\n|---|---|---|---|")
    for name in names:
        times = [step[name] for step in steps if name in step]
        print(f"| {name} | {sum(times) / len(steps):.2f} | {len(times)} | {max(times):.1f} |")
    print("\nThe slowest:")
    for number, step in sorted(enumerate(steps), key=lambda pair: -pair[1]["step"])[:SLOWEST]:
        parts = ", ".join(f"{name} {ms:.0f}" for name, ms in step.items() if ms >= 1 and name != "step")
        print(f"  step {first + number}: {step['step']:.0f} ms ({parts})")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["scenes"], help="folders of shards or videos")
    parser.add_argument("--plain", action="store_true", help="the plain network")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--changes", nargs="*", default=["machine.compile=true"], help="settings of the recipe")
    arguments = parser.parse_args()
    if arguments.steps < 4:
        parser.error("--steps must be at least 4: half of them only warm up")
    clock = Clock()
    clock.watch()
    with tempfile.TemporaryDirectory() as scratch:
        settings = AblateSettings(
            "layer",
            out=Path(scratch),
            data=tuple(arguments.data),
            seeds=(0,),
            rate_steps=arguments.steps,
            changes=tuple(arguments.changes),
        )
        measure_speed(make_study(settings), "plain" if arguments.plain else "superpixels")
    half = len(clock.steps) // 2
    report(clock.steps[half:], half)


if __name__ == "__main__":
    main()
