"""The trials of all processes and computers, in one file that Optuna keeps.

    study.journal     every trial with its values and what became of it; lines are only ever added
    trials/0007/      the folder of a trial; who holds the lock on its file ``owner`` is at work on it

A process takes a trial under one lock for the whole study: first one whose owner is gone, which then goes on where it
stopped, then a new point. So no point is tried twice, however many take part.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from asc.tune.space import Point, Range, Space

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

Sampler = Literal["grid", "tpe", "random"]
Pruner = Literal["auto", "none", "median", "hyperband"]

JOURNAL, TRIALS, OWNER = "study.journal", "trials", "owner"
_STUDY, _SETTINGS = "tune", "settings"
# Seconds between two signs of life.
_BEAT = 10.0
# A sampler that keeps coming back to what was tried is asked so often before chance decides.
_ATTEMPTS = 20


def load_optuna() -> Any:
    """Optuna, quiet; a ValueError that says how to get it if it is missing."""
    try:
        import optuna
    except ImportError as error:
        raise ValueError(
            f"asc tune needs Optuna ({error}): pip install 'adaptive-superpixel-coding[tune]', or pip install optuna"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Choice(NamedTuple):
    """How new points are chosen."""

    space: Space
    sampler: Sampler
    seed: int
    """Start of the search's own random draws."""
    trials: int | None
    """Trials of the whole study, finished and running ones among them; None: all points of the grid."""


class Claim:
    """The right to work on a trial, for as long as this process lives.

    The lock ends with the process, and tells everyone on this computer; the time of the file is renewed every few
    seconds, for computers that the lock does not reach.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / OWNER
        self._stream = self._file.open("a")
        fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._file.write_text(json.dumps({"host": socket.gethostname(), "process": os.getpid()}) + "\n")
        self._over = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while not self._over.wait(_BEAT):
            os.utime(self._file)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._stream.close()


def is_abandoned(folder: Path, stale: float) -> bool:
    """Whether nobody is at work on a trial any more."""
    file = folder / OWNER
    if not file.is_file():
        return True
    with file.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    try:
        owner = json.loads(file.read_text())
    except json.JSONDecodeError:
        return True  # it died while writing its name
    return owner["host"] == socket.gethostname() or _age(file) > stale


def _age(file: Path) -> float:
    """Seconds since a file was renewed, by the clock of the disk it lies on: computers' own clocks may differ."""
    probe = file.with_name(f".now-{socket.gethostname()}-{os.getpid()}")
    probe.touch()
    now = probe.stat().st_mtime
    probe.unlink()
    return now - file.stat().st_mtime


class Job(NamedTuple):
    """A trial that this process is to run."""

    number: int
    point: Point
    folder: Path
    claim: Claim
    continued: bool
    """Whether another process had begun with it."""


class Search:
    """A study on disk.

    Args:
        out: Its folder.
        settings: What all who take part must agree on; None: whatever is there.
        pruner: When a trial is given up.
        resource: Checks of a whole trial, for ``hyperband``.
        stale: Seconds without a sign of life after which a trial of another computer is taken over.
    """

    def __init__(
        self,
        out: Path,
        settings: Mapping[str, Any] | None,
        pruner: Pruner = "none",
        resource: int = 1,
        stale: float = 120.0,
    ) -> None:
        self.optuna = load_optuna()
        self.out, self._stale = out, stale
        journal = out / JOURNAL
        if settings is None and not journal.is_file():
            raise ValueError(f"there is no search in {out}: {JOURNAL} is missing; give the folder of one as --out")
        out.mkdir(parents=True, exist_ok=True)
        backends = self.optuna.storages.journal
        self._taking, self._writing = (backends.JournalFileSymlinkLock(str(out / name)) for name in ("taking", "page"))
        with _held(backends.JournalFileSymlinkLock(str(journal))):
            _mend(journal)
        self._storage = self.optuna.storages.JournalStorage(backends.JournalFileBackend(str(journal)))
        self.study: optuna.Study = self.optuna.create_study(
            storage=self._storage,
            study_name=_STUDY,
            direction="maximize",
            load_if_exists=True,
            sampler=self.optuna.samplers.RandomSampler(),  # points are chosen below, not by the study
            pruner=_make_pruner(self.optuna, pruner, resource),
        )
        with _held(self._taking):
            self._agree(settings)

    def _agree(self, settings: Mapping[str, Any] | None) -> None:
        before = self.study.user_attrs.get(_SETTINGS)
        if settings is None:
            if before is None:
                raise ValueError(f"the search in {self.out} has not begun yet")
            return
        now = json.loads(json.dumps(settings))
        if before is None:
            self.study.set_user_attr(_SETTINGS, now)
        elif before != now:
            changed = [name for name in now if before.get(name) != now[name]]
            said = "; ".join(f"{name} was {before.get(name)!r} and is now {now[name]!r}" for name in changed[:3])
            raise ValueError(
                f"{self.out} holds a search with other settings: {said}. Give the same settings to go on with it, or "
                f"another --out for a new one"
            )

    @property
    def settings(self) -> dict[str, Any]:
        """What all who take part have agreed on."""
        return dict(self.study.user_attrs[_SETTINGS])

    def trials(self) -> list[FrozenTrial]:
        """All trials, by number."""
        return self.study.get_trials(deepcopy=False)

    def folder(self, number: int) -> Path:
        """The folder of a trial."""
        return self.out / TRIALS / f"{number:04d}"

    def trial(self, number: int) -> optuna.Trial:
        """A running trial, to report to."""
        study = self._storage.get_study_id_from_name(_STUDY)
        identity = self._storage.get_trial_id_from_study_id_trial_number(study, number)
        trial: optuna.Trial = self.optuna.trial.Trial(self.study, identity)
        return trial

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep all others from writing the page meanwhile."""
        with _held(self._writing):
            yield

    # --- Taking and finishing -----------------------------------------------------------------------------

    def take(self, choice: Choice) -> Job | list[int]:
        """The next trial to run; if there is none, the numbers of those that others are still running."""
        with _held(self._taking):
            trials = self.trials()
            running = [trial for trial in trials if not trial.state.is_finished()]
            for trial in running:
                folder = self.folder(trial.number)
                if is_abandoned(folder, self._stale):
                    return Job(trial.number, dict(trial.params), folder, Claim(folder), continued=True)
            point = None
            if choice.trials is None or len(trials) < choice.trials:
                point = self._choose(choice, trials)
            if point is None:
                return [trial.number for trial in running]
            return self._begin(choice.space, point, len(trials))

    def _begin(self, space: Space, point: Point, number: int) -> Job:
        # The claim first: a trial that is in the journal without an owner would be taken for an abandoned one.
        claim = Claim(self.folder(number))
        distributions = _distributions(self.optuna, space)
        state = self.optuna.trial.TrialState.RUNNING
        self.study.add_trial(self.optuna.create_trial(state=state, params=point, distributions=distributions))
        return Job(number, point, self.folder(number), claim, continued=False)

    def finish(self, number: int, knn: float | None, given_up: bool = False) -> None:
        """Note what became of a trial; None: it failed."""
        states = self.optuna.trial.TrialState
        if knn is None:
            self.study.tell(number, state=states.FAIL, skip_if_finished=True)
        elif given_up:
            self.study.tell(number, state=states.PRUNED, skip_if_finished=True)
        else:
            self.study.tell(number, knn, skip_if_finished=True)

    # --- Choosing -----------------------------------------------------------------------------------------

    def _choose(self, choice: Choice, trials: Sequence[FrozenTrial]) -> Point | None:
        tried = {_key(trial.params) for trial in trials}
        if choice.sampler == "grid":
            return next((point for point in choice.space.points(choice.seed) if _key(point) not in tried), None)
        if choice.space.size is not None and len(tried) >= choice.space.size:
            return None
        point = self._sampled(choice, trials, tried)
        if point is None:
            fresh = [point for point in choice.space.points(choice.seed) if _key(point) not in tried]
            point = random.Random(choice.seed + len(trials)).choice(fresh)
        return point

    def _sampled(self, choice: Choice, trials: Sequence[FrozenTrial], tried: set[str]) -> Point | None:
        """What the sampler proposes, asked in a copy of the study, so that no half-made trial is ever on disk."""
        distributions = _distributions(self.optuna, choice.space)
        sampler = _make_sampler(self.optuna, choice.sampler, choice.seed + len(trials))
        copy = self.optuna.create_study(direction="maximize", sampler=sampler)
        copy.add_trials(trials)
        for _ in range(_ATTEMPTS):
            asked = copy.ask(distributions)
            if _key(asked.params) not in tried:
                return dict(asked.params)
            copy.tell(asked, state=self.optuna.trial.TrialState.FAIL)
        return None


def _key(point: Mapping[str, Any]) -> str:
    return json.dumps(point, sort_keys=True)


def _distributions(optuna: Any, space: Space) -> dict[str, BaseDistribution]:
    kinds = optuna.distributions
    found: dict[str, BaseDistribution] = {}
    for name, dimension in space.dimensions.items():
        if isinstance(dimension, Range):
            kind = kinds.IntDistribution if dimension.whole else kinds.FloatDistribution
            found[name] = kind(dimension.low, dimension.high, log=dimension.log)
        else:
            found[name] = kinds.CategoricalDistribution(dimension.choices)
    return found


def _make_sampler(optuna: Any, sampler: Sampler, seed: int) -> Any:
    if sampler == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # A trial that still runs counts as a bad one: else all workers would be sent to the same place.
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def _make_pruner(optuna: Any, pruner: Pruner, resource: int) -> Any:
    if pruner == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=5)
    if pruner == "hyperband":
        return optuna.pruners.HyperbandPruner(min_resource=1, max_resource=resource)
    return optuna.pruners.NopPruner()


@contextmanager
def _held(lock: Any) -> Iterator[None]:
    lock.acquire()
    try:
        yield
    finally:
        # After half a minute others take a lock for that of a dead process, and remove it.
        with suppress(RuntimeError):
            lock.release()


def _mend(journal: Path) -> None:
    """Take a last line away that a crash cut off: the next one would be written behind it and spoil the file."""
    if not journal.is_file():
        return
    content = journal.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with journal.open("r+b") as stream:
            stream.truncate(whole)
