"""Which runs and cells are wanted, and the digests that name them.

A run is one pre-training: a variant, a seed, and what is kept equal (steps or time). Its cells are what its encoder is
judged by. A digest covers all settings that change a number and, in place of paths, what the data consist of: so other
settings are other cells, and cells of several places fit together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from asc.ablate.tables import TABLES, Part, TableName
from asc.ablate.variants import PLAIN, VARIANTS
from asc.data.clips import SCENES
from asc.pretrain.run import PretrainConfig
from asc.tasks.depth.task import DepthConfig
from asc.tasks.detect.task import DetectConfig
from asc.tasks.segment.task import SegmentConfig

Mode = Literal["steps", "time"]
Keep = Literal["keep", "runs", "drop"]
DenseConfig = SegmentConfig | DetectConfig | DepthConfig

# Settings of a run that change no number of its cells, or that stand in the digest in another form.
_NOT_COUNTED = ("out", "machine", "data", "encoder", "watch", "plain")
# Scenes to judge by have a seed of their own: no training uses it.
SCENE_SEED = 2**31


@dataclass(frozen=True)
class LabelledSet:
    """Labelled images to judge features by."""

    name: str
    """That of its folder."""
    path: Path | None
    """A folder (train/<class>/, val/ or test/); None: the embedded scenes."""
    content: str
    """Digest of its files."""


class Protocol(NamedTuple):
    """Digests of the settings that the cells of one table share."""

    recipe: str
    """Those of the recipe and of what its encoders are judged by."""
    plain: str
    """The same without what the plain network does not depend on."""


@dataclass(frozen=True)
class Run:
    """One pre-training and the cells that are wanted of it."""

    variant: str
    """What is trained, under the first of its names."""
    stands_for: tuple[str, ...]
    """All variants that are the same thing under this recipe."""
    mode: Mode
    """What it has in common with the others: steps or time."""
    seed: int
    """Start of all its random draws."""
    parts: tuple[Part, ...]
    """What its encoder is judged by."""
    name: str
    """Unique; carries the digest of all settings."""

    @property
    def short(self) -> str:
        """The name without the digest."""
        return f"{self.variant}-{self.mode}-{self.seed}"


@dataclass(frozen=True)
class Study:
    """Everything that the cells of a command have in common; can be sent to other processes."""

    out: Path
    """Folder of the cells."""
    base: PretrainConfig
    """The recipe that the variants change."""
    segment: SegmentConfig
    """How segmentation is trained."""
    detect: DetectConfig
    """How detection is trained."""
    depth: DepthConfig
    """How depth is trained."""
    data: str
    """Digest of the videos."""
    voc: str
    """Digest of the images for segmentation and detection."""
    nyu: str
    """Digest of those for depth."""
    sets: tuple[LabelledSet, ...]
    """Labelled images, at least one set."""
    seeds: tuple[int, ...]
    """Seeds of every variant."""
    dense_seeds: int
    """Number of seeds, the first ones, whose encoders are judged by dense tasks."""
    modes: tuple[Mode, ...]
    """What is kept equal."""
    seconds: float | None
    """Training time at equal time; None: as long as the plain network takes for the steps of the recipe."""
    rate_steps: int
    """Steps by which speed is measured."""
    folds: int
    """Parts of a labelled set that are recognised from the others in turn; 0: the set's own parts."""
    encoders: Keep
    """What is kept of a run that is judged."""

    # --- Configs ------------------------------------------------------------------------------------------

    def config(self, variant: str, seed: int) -> PretrainConfig:
        """The recipe as a variant runs it, with the number of steps of the recipe."""
        config = VARIANTS[variant].change(self.base)
        return replace(config, train=replace(config.train, seed=seed))

    def dense_config(self, part: Part, variant: str, seed: int) -> DenseConfig:
        """The training of a dense task as a variant runs it."""
        calibrates = VARIANTS[variant].recalibrated
        if part == "detect":
            watch = self.detect.watch if calibrates else replace(self.detect.watch, calibration=0)
            return replace(self.detect, watch=watch, train=replace(self.detect.train, seed=seed))
        config = self.segment if part == "segment" else self.depth
        tune = config.tune if calibrates else replace(config.tune, calibration=0)
        return replace(config, tune=tune, train=replace(config.train, seed=seed))

    # --- Digests ------------------------------------------------------------------------------------------

    def training(self, variant: str, mode: Mode, seed: int) -> dict[str, Any]:
        """All that the encoder of a run depends on."""
        asked, config = VARIANTS[variant], self.config(variant, seed)
        settings = _counted(config) | {"data": self.data, "calibration": config.watch.calibration}
        # Of a plain network the superpixels' settings change nothing: its runs serve any of them.
        settings["model"] = _as_json(config.encoder)
        settings |= {"calibrated": asked.calibrated, "recalibrated": asked.recalibrated}
        if mode == "time":
            # How many steps that is, the machine decides.
            steps = settings["train"].pop("steps")
            settings["time"] = {"as": PLAIN, "steps": steps} if self.seconds is None else {"seconds": self.seconds}
        return settings

    def judging(self, part: Part, variant: str, seed: int) -> dict[str, Any]:
        """All that the numbers of a cell depend on beside the encoder."""
        if part == "judge":
            counts = self.base.watch.knn_labelled, self.base.watch.knn_judged
            scenes = {"scene": asdict(self.base.clips.scene), "counts": counts}
            sets = [{"name": one.name, "content": one.content if one.path else scenes} for one in self.sets]
            # A set's own parts are no setting: cells from before there were folds stay what they are.
            return {"sets": sets} | ({"folds": self.folds} if self.folds else {})
        config = self.dense_config(part, variant, seed)
        calibration = config.watch.calibration if isinstance(config, DetectConfig) else config.tune.calibration
        return _counted(config) | {"data": self.nyu if part == "depth" else self.voc, "calibration": calibration}

    def cell_name(self, run: Run, part: Part) -> str:
        """The name of a cell's file."""
        settings = [self.training(run.variant, run.mode, run.seed), self.judging(part, run.variant, run.seed)]
        return f"{run.short}-{part}-{digest(settings)}"

    def protocol(self, mode: Mode, part: Part) -> Protocol:
        """What is alike for all variants and seeds: only cells with the same belong into one table."""
        recipe, plain = (
            digest([self.training(name, mode, 0), self.judging(part, name, 0)]) for name in ("superpixels", PLAIN)
        )
        return Protocol(recipe, plain)

    def speed_name(self, variant: str, device: str) -> str:
        """The name of the file with a variant's speed on a device."""
        settings = self.training(variant, "steps", 0)
        settings["train"].pop("steps")
        named = "".join(letter if letter.isalnum() else "_" for letter in device)
        return f"{variant}-{digest(settings)}-{named}"

    # --- Runs ---------------------------------------------------------------------------------------------

    def runs(self, tables: Iterable[TableName]) -> list[Run]:
        """The runs of tables, each once, the first seed of all variants first."""
        alike = self._alike()
        parts: dict[str, dict[Part, None]] = {}
        for key in tables:
            for row in TABLES[key].rows:
                parts.setdefault(alike[row], {}).update(dict.fromkeys(TABLES[key].parts))
        found: dict[str, Run] = {}
        for number, seed in enumerate(self.seeds):
            for asked in self.modes:
                for variant in parts:
                    wanted = [part for part in parts[variant] if part == "judge" or number < self.dense_seeds]
                    run = self._run(variant, alike, asked, seed, tuple(wanted))
                    found[run.name] = run
        return list(found.values())

    def _run(self, variant: str, alike: Mapping[str, str], mode: Mode, seed: int, parts: tuple[Part, ...]) -> Run:
        if variant == PLAIN and self.seconds is None:
            mode = "steps"  # its time is the measure: at equal time it is the very same run
        names = tuple(name for name, first in alike.items() if first == variant)
        name = f"{variant}-{mode}-{seed}-{digest(self.training(variant, mode, seed))}"
        return Run(variant, names, mode, seed, parts, name)

    def _alike(self) -> dict[str, str]:
        """For every variant the first one that is the same thing under this recipe."""
        first: dict[str, str] = {}
        return {name: first.setdefault(digest(self.training(name, "steps", 0)), name) for name in VARIANTS}


def _counted(config: PretrainConfig | DenseConfig) -> dict[str, Any]:
    return {name: value for name, value in _as_json(config).items() if name not in _NOT_COUNTED}


def _as_json(config: Any) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(json.dumps(asdict(config), default=str))
    return settings


def digest(settings: Any) -> str:
    """Ten letters that change with any of the settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:10]


# --- Data -------------------------------------------------------------------------------------------------


def content_of(setting: str, source: str) -> str:
    """What data consist of, wherever they lie: names and sizes of files, or the index of prepared clips."""
    if source == SCENES or "://" in source:
        return source
    from asc.data.shards import INDEX_FILE

    path = Path(source)
    if not path.exists():
        raise ValueError(f"{setting}: there is no {path}; give a folder, or {SCENES!r} for the embedded ones")
    if (path / INDEX_FILE).is_file():
        return hashlib.sha256((path / INDEX_FILE).read_bytes()).hexdigest()[:16]
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    lines = "".join(f"{file.relative_to(path)}\t{file.stat().st_size}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def labelled_sets(sources: Iterable[str]) -> tuple[LabelledSet, ...]:
    """The sets that are named: ``scenes``, labelled folders, or folders of such."""
    found: dict[str, LabelledSet] = {}
    for source in sources:
        paths = [None] if source == SCENES else _labelled_folders(Path(source).resolve())
        for path in paths:
            name = SCENES if path is None else path.name
            if name in found:
                raise ValueError(f"images: two labelled sets are called {name!r}; rename a folder")
            found[name] = LabelledSet(name, path, content_of("images", source if path is None else str(path)))
    if not found:
        raise ValueError(f"images names nothing to judge by: give labelled folders, or {SCENES!r}")
    return tuple(found.values())


def _labelled_folders(path: Path) -> list[Path]:
    candidates = [path] if (path / "train").is_dir() else sorted(path.glob("*/"))
    # Images with depth lie in train/, too, but in no classes.
    folders = [folder for folder in candidates if (folder / "train").is_dir() and not (folder / "train/depth").is_dir()]
    if not folders:
        raise ValueError(f"images: {path} holds no labelled images: neither train/<class>/ nor folders with it")
    return folders
