"""``asc prepare``: a folder of videos becomes shards of frames.

The plan is made first: files in the order of their names, long recordings cut into clips, so many clips to a shard.
A shard is the work of one process and depends on the plan alone; so the number of processes, or a kill in between,
changes no byte of the result.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import wait as wait_for_connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tyro
from tqdm import tqdm

from asc.data.corpora import CORPORA, CorpusName, Coverage, select
from asc.data.shards import Index, Pixels, ShardList, ShardWriter, encode_frame, write_index
from asc.data.video import VideoError, find_videos, probe, read_frames
from asc.files import write_whole

PLAN_FILE, REPORT_FILE = "plan.json", "report.json"
_DEFAULT_FPS = 16.0
# Names of each kind that the printed report shows; report.json has all of them.
_SHOWN = 5
# Frames encoded in a row; more gain little.
_BURST = 16
# What may differ between two runs of the same preparation.
_FREE = ("src", "dst", "workers", "annotations")


@dataclass(frozen=True)
class PrepareSettings:
    """Turn a folder of videos into shards of frames that training reads and streams.

    Killed and started again with the same settings, it goes on where it was, and the result is the same.
    """

    src: tyro.conf.Positional[Path]
    """Folder of videos, in any containers and subfolders."""
    dst: tyro.conf.Positional[Path]
    """Folder for the shards."""
    preset: CorpusName | None = None
    """Corpus of the paper that src holds, laid out as its makers hand it out: sets fps and clip_length, takes only
    the official training split, and reports how much of it is here."""
    annotations: Path | None = None
    """Official list of the preset's training split, if it is not in src: trainingSet.csv (moments), train.csv
    (kinetics700) or ego4d.json."""
    fps: float | None = None
    """Frames a second to keep; default 16, or the preset's (moments 16, kinetics700 15, ego4d 5)."""
    clip_length: float | None = None
    """Seconds after which a video is cut into another clip; default: a video is one clip (ego4d: 10). What is left
    at the end is a shorter clip."""
    short_side: int | None = 256
    """Pixels the shorter side is resized to; None keeps the size."""
    size: int | None = 224
    """Side of the square cut from the middle; None keeps the whole picture."""
    quality: int = 90
    """JPEG quality of the frames, 1 to 100."""
    shard_clips: int = 64
    """Clips in a shard, which is what one process works on at a time."""
    workers: int | None = None
    """Processes; default: one for each core."""


class Note(NamedTuple):
    """A line of the report about one video."""

    file: str
    """Path relative to the folder of videos."""
    text: str
    """What is the matter."""


@dataclass(frozen=True)
class Report:
    """What became of a folder of videos."""

    files: int
    """Files that could be videos; with a preset, those of its training split."""
    ignored: list[str]
    """Entries of the folder that are certainly no videos."""
    planned: int
    """Clips planned from the lengths that the files state."""
    clips: int
    """Clips written."""
    frames: int
    """Frames written."""
    skipped: list[Note]
    """Videos, or parts of them, that gave no clip, each with the reason."""
    warnings: list[Note]
    """Videos that were used although something is wrong with them."""
    duplicates: list[list[str]]
    """Groups of files with the same bytes; all of them were written."""
    coverage: Coverage | None
    """How much of a preset's training split is here."""
    resumed: int
    """Planned clips that an earlier run had dealt with."""
    seconds: float
    """Time of this run."""
    clips_per_second: float
    """Planned clips that this run dealt with, by its time."""

    def __str__(self) -> str:
        before = f" ({self.resumed:,} of them before this run)" if self.resumed else ""
        lines = [str(self.coverage)] if self.coverage else []
        lines += [
            f"{self.files:,} videos, {len(self.ignored):,} other entries ignored",
            f"{self.planned:,} clips planned{before}, {self.clips:,} written with {self.frames:,} frames",
            f"{self.seconds:.1f} s, {self.clips_per_second:.1f} clips/s",
        ]
        lines += _shortened("skipped", [f"{file}: {text}" for file, text in self.skipped])
        lines += _shortened("warnings", [f"{file}: {text}" for file, text in self.warnings])
        lines += _shortened("same content", [" = ".join(files) for files in self.duplicates])
        return "\n".join(lines)


def _shortened(title: str, entries: Sequence[str]) -> list[str]:
    rest = [f"  and {len(entries) - _SHOWN:,} more, see {REPORT_FILE}"] if len(entries) > _SHOWN else []
    return [f"{title}: {len(entries):,}", *(f"  {entry}" for entry in entries[:_SHOWN]), *rest]


# ------------------------------------------------------------------------------------------------- the plan


class Source(NamedTuple):
    """A video of the plan, as it was when the plan was made."""

    file: str
    """Path relative to the folder of videos."""
    size: int
    """Bytes; -1 if the file cannot be looked at."""
    modified: int
    """Time of the last change in nanoseconds."""
    clips: int
    """Clips it is cut into, by the length it states."""


@dataclass(frozen=True)
class Part:
    """Consecutive clips of one video that go into one shard."""

    source: Source
    first: int
    """Number of the first clip within the video."""
    clips: int
    """Number of clips."""

    @property
    def is_last(self) -> bool:
        """Whether the video ends with this part, however long it turns out to be."""
        return self.first + self.clips == self.source.clips


@dataclass(frozen=True)
class Task:
    """A shard to be written."""

    settings: PrepareSettings
    number: int
    """Number of the shard."""
    parts: list[Part]
    """What goes into it."""

    @property
    def clips(self) -> int:
        """Number of clips planned."""
        return sum(part.clips for part in self.parts)


def make_tasks(settings: PrepareSettings, sources: Sequence[Source]) -> list[Task]:
    """Cut the clips of all videos, in order, into shards."""
    tasks: list[Task] = []
    parts: list[Part] = []
    room = settings.shard_clips
    for source in sources:
        first = 0
        while first < source.clips:
            clips = min(room, source.clips - first)
            parts.append(Part(source, first, clips))
            first, room = first + clips, room - clips
            if not room:
                tasks.append(Task(settings, len(tasks), parts))
                parts, room = [], settings.shard_clips
    return [*tasks, Task(settings, len(tasks), parts)] if parts else tasks


def _first_sample(settings: PrepareSettings, clip: int) -> int:
    """Number of a clip's first frame among those sampled from the whole video."""
    assert settings.fps is not None
    # The margin keeps rounding from moving a frame that falls on the border.
    return 0 if settings.clip_length is None else math.ceil(clip * settings.clip_length * settings.fps - 1e-6)


def _count_clips(settings: PrepareSettings, path: Path) -> int:
    if settings.clip_length is None:
        return 1
    try:
        duration = probe(path).duration
    except VideoError:
        # Whoever comes to read it will meet the same error and report it.
        return 1
    assert settings.fps is not None
    # Headers round to their ticks: a sample that late need not exist.
    last_sample = max(0, math.ceil(duration * settings.fps - 0.02) - 1)
    return math.floor((last_sample + 1e-6) / (settings.clip_length * settings.fps)) + 1


def _look_at(settings: PrepareSettings, path: Path) -> Source:
    file = path.relative_to(settings.src).as_posix()
    return Source(file, *_status(path), 0)


def _status(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return -1, 0
    return status.st_size, status.st_mtime_ns


# ------------------------------------------------------------------------------------------- the whole job


def prepare(settings: PrepareSettings) -> Report:
    """Write the shards, the index and the report, or what is missing of them."""
    begun = time.perf_counter()
    settings = _resolved(settings)
    found = find_videos(settings.src)
    videos, coverage = found.videos, None
    if settings.preset is not None:
        videos, coverage = select(settings.preset, settings.src, videos, settings.annotations)
    _make_folder(settings.dst)
    with _alone_in(settings.dst), _plain_write_errors(settings.dst):
        tasks = make_tasks(settings, _planned(settings, videos))
        todo = [task for task in tasks if not ShardList.path(settings.dst, task.number).exists()]
        planned, left = (sum(task.clips for task in some) for some in (tasks, todo))
        with tqdm(total=planned, initial=planned - left, unit="clip", desc="preparing", smoothing=0.05) as bar:
            _run(todo, settings, bar)
        index, notes = write_index(settings.dst, len(tasks))
        seconds = time.perf_counter() - begun
        report = Report(
            files=len(videos),
            ignored=[path.relative_to(settings.src).as_posix() for path in found.ignored],
            planned=planned,
            clips=len(index.clip_shard_C),
            frames=len(index.frame_bytes_F),
            skipped=_notes(notes, "skipped"),
            warnings=_notes(notes, "warnings"),
            duplicates=_duplicates(index),
            coverage=coverage,
            resumed=planned - left,
            seconds=round(seconds, 3),
            clips_per_second=round(left / seconds, 3),
        )
        write_whole(settings.dst / REPORT_FILE, json.dumps(_as_json(report), indent=1).encode())
    # Names of files need not be text that a terminal can show.
    print(str(report).encode(errors="backslashreplace").decode())
    return report


def _as_json(report: Report) -> dict[str, Any]:
    notes = {name: [note._asdict() for note in getattr(report, name)] for name in ("skipped", "warnings")}
    return asdict(report) | notes


def _notes(notes: Sequence[dict[str, Any]], kind: str) -> list[Note]:
    # A recording that lies in several shards has the same flaw in each.
    return list(dict.fromkeys(Note(*note) for of_shard in notes for note in of_shard[kind]))


def _duplicates(index: Index) -> list[list[str]]:
    files: dict[bytes, list[str]] = {}
    for number, sha256 in enumerate(index.file_sha256_N32):
        files.setdefault(sha256.tobytes(), []).append(index.file_name(number))
    return [same for same in files.values() if len(same) > 1]


def _resolved(settings: PrepareSettings) -> PrepareSettings:
    """Check the settings and fill in what depends on the preset and this computer."""
    corpus = CORPORA[settings.preset] if settings.preset is not None else None
    if settings.fps is None:
        settings = replace(settings, fps=corpus.fps if corpus else _DEFAULT_FPS)
    if settings.clip_length is None and corpus:
        settings = replace(settings, clip_length=corpus.clip_length)
    if settings.workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        settings = replace(settings, workers=cores)
    _check(settings)
    return settings


def _check(settings: PrepareSettings) -> None:
    assert settings.fps is not None
    for name in ("fps", "clip_length"):
        value = getattr(settings, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive number, got {value}")
    for name in ("short_side", "size", "shard_clips", "workers"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not 1 <= settings.quality <= 100:
        raise ValueError(f"quality must be from 1 to 100, got {settings.quality}")
    if None not in (settings.short_side, settings.size) and settings.size > settings.short_side:  # type: ignore[operator]
        raise ValueError(f"size={settings.size} must not exceed short_side={settings.short_side}")
    if settings.clip_length is not None and settings.clip_length * settings.fps < 1:
        raise ValueError(f"clip_length={settings.clip_length:g} holds no frame at fps={settings.fps:g}; make it longer")
    if settings.annotations is not None and settings.preset is None:
        raise ValueError("annotations is the list of a preset: give a preset, too")
    if settings.dst.resolve().is_relative_to(settings.src.resolve()):
        raise ValueError(f"dst must not lie inside src, but {settings.dst} lies in {settings.src}")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_ours = (folder / PLAN_FILE).exists() or {path.name for path in folder.iterdir()} <= {f".{PLAN_FILE}.tmp"}
    except OSError as error:
        raise ValueError(f"dst={folder} cannot be used as a folder ({error.strerror})") from error
    if not is_ours:
        raise ValueError(f"dst={folder} holds other files; give an empty or new folder")


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two runs would overwrite each other's unfinished shards."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"dst={folder}: another preparation is writing there; wait until it ends") from error
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _plain_write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"dst={folder}: writing failed ({error.strerror or error}); what is finished is safe: when this is put "
            "right, the same command goes on"
        ) from error


def _planned(settings: PrepareSettings, videos: Sequence[Path]) -> list[Source]:
    """The plan of an earlier run, if it still fits; else a new one."""
    path = settings.dst / PLAN_FILE
    fixed = {name: value for name, value in asdict(settings).items() if name not in _FREE}
    sources = [_look_at(settings, video) for video in videos]
    if not path.exists():
        sources = _with_clips(settings, sources)
        plan = {"settings": fixed, "sources": sources}
        write_whole(path, json.dumps(plan, separators=(",", ":")).encode())
        return sources
    try:
        plan = json.loads(path.read_text())
        old = [Source(*source) for source in plan["sources"]]
        changed = [
            f"{name} was {plan['settings'][name]}, is {fixed[name]}"
            for name in fixed
            if plan["settings"][name] != fixed[name]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: this plan is damaged ({error!r}); give an empty folder") from error
    if changed:
        raise ValueError(f"dst={settings.dst} was begun with other settings ({'; '.join(changed)}); give another dst")
    _check_unchanged(settings, old, sources)
    return old


def _with_clips(settings: PrepareSettings, sources: list[Source]) -> list[Source]:
    """Ask every video for its length."""
    if settings.clip_length is None:
        return [source._replace(clips=1) for source in sources]
    paths = [settings.src / source.file for source in sources]
    counts: list[int] = []
    with tqdm(total=len(paths), unit="video", desc="looking at lengths") as bar, contextlib.ExitStack() as stack:
        mapped: Iterator[int]
        if settings.workers == 1:
            mapped = map(_count_clips, itertools.repeat(settings), paths)
        else:
            pool = stack.enter_context(_pool(settings.workers or 1)[0])
            mapped = pool.map(_count_clips, itertools.repeat(settings), paths, chunksize=16)
        for count in mapped:
            counts.append(count)
            bar.update()
    return [source._replace(clips=clips) for source, clips in zip(sources, counts, strict=True)]


def _check_unchanged(settings: PrepareSettings, old: Sequence[Source], new: Sequence[Source]) -> None:
    before = {source.file: source[1:3] for source in old}
    now = {source.file: source[1:3] for source in new}
    kinds = {
        "new": [file for file in now if file not in before],
        "gone": [file for file in before if file not in now],
        "changed": [file for file in before if file in now and before[file] != now[file]],
    }
    parts = [f"{len(files)} {kind} ({', '.join(files[:3])})" for kind, files in kinds.items() if files]
    if parts:
        raise ValueError(
            f"src={settings.src} is not as it was when dst={settings.dst} was begun: {'; '.join(parts)}; put it back "
            "or give another dst"
        )


# -------------------------------------------------------------------------------------------------- a shard


@dataclass
class _Notes:
    skipped: list[Note] = field(default_factory=list)
    warnings: list[Note] = field(default_factory=list)


def write_shard(task: Task, advance: Callable[[int], object]) -> None:
    """Write a shard; ``advance`` is called often, with the number of planned clips dealt with since."""
    notes = _Notes()
    with ShardWriter(task.settings.dst, task.number) as shard:
        for part in task.parts:
            _write_part(shard, task.settings, part, notes, advance)
        shard.finish(asdict(notes))


def _write_part(
    shard: ShardWriter, settings: PrepareSettings, part: Part, notes: _Notes, advance: Callable[[int], object]
) -> None:
    file, path = part.source.file, settings.src / part.source.file
    _check_still_same(path, part.source)
    clips, told, flaws, problem, sha256 = 0, 0, list[str](), "", ""
    try:
        for clip, jpeg in _encoded(_clips(settings, part, path, flaws), settings.quality):
            if clip == part.first + clips:
                # Those before it are dealt with; there may be more than the file has promised.
                advance(min(clips, part.clips) - told)
                told = min(clips, part.clips)
                clips += 1
                sha256 = sha256 or _hash(path)
                shard.begin_clip(file, sha256, _start(settings, clip))
            shard.add_frame(jpeg)
            advance(0)
    except VideoError as error:
        problem = str(error).removeprefix(f"{path}: ")
    _check_still_same(path, part.source)
    advance(part.clips - told)
    if clips < part.clips:
        at = f" from {_start(settings, part.first + clips):g} s on" if part.first + clips else ""
        notes.skipped.append(Note(file, f"no clip{at}: {problem or 'the video ends before'}"))
    elif problem:
        notes.warnings.append(Note(file, f"only in part: {problem}"))
    notes.warnings.extend(Note(file, flaw) for flaw in flaws)


def _start(settings: PrepareSettings, clip: int) -> float:
    assert settings.fps is not None
    return _first_sample(settings, clip) / settings.fps


def _encoded(frames: Iterator[tuple[int, Pixels]], quality: int) -> Iterator[tuple[int, bytes]]:
    """JPEGs of frames, several made in a row: decoder and encoder drive each other out of the processor's caches."""
    burst: list[tuple[int, Pixels]] = []
    problem: VideoError | None = None
    while problem is None:
        try:
            burst.extend(itertools.islice(frames, _BURST))
        except VideoError as error:
            problem = error
        if not burst:
            break
        yield from [(clip, encode_frame(pixels_HW3, quality)) for clip, pixels_HW3 in burst]
        burst.clear()
    if problem is not None:
        raise problem


def _clips(settings: PrepareSettings, part: Part, path: Path, flaws: list[str]) -> Iterator[tuple[int, Pixels]]:
    """The frames of a part, each with the number of its clip, read in one go."""
    assert settings.fps is not None
    sample, stop = (_first_sample(settings, part.first + clips) for clips in (0, part.clips))
    frames = read_frames(
        path,
        settings.fps,
        start=sample / settings.fps,
        length=None if part.is_last else (stop - sample) / settings.fps,
        short_side=settings.short_side,
        crop=settings.size,
        flaws=flaws,
    )
    clip = part.first
    for number, (_, pixels_HW3) in enumerate(frames, start=sample):
        if settings.clip_length is not None and number >= _first_sample(settings, clip + 1):
            clip += 1
        yield clip, pixels_HW3


def _hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise VideoError(f"{path}: reading failed ({error.strerror})") from error


def _check_still_same(path: Path, source: Source) -> None:
    if _status(path) != (source.size, source.modified):
        raise ValueError(f"{path}: the file has changed since the preparation began; put it back or give another dst")


# ------------------------------------------------------------------------------------------------ processes


class _StoppedError(Exception):
    """Another process has failed, or the user wants to stop."""


class _Shared(NamedTuple):
    """What the processes tell each other."""

    clips: Any
    """Planned clips dealt with (a multiprocessing value)."""
    stop: Any
    """Whether all are to stop (a multiprocessing event)."""


_shared: _Shared


def _pool(workers: int) -> tuple[ProcessPoolExecutor, _Shared]:
    # Clean processes, which inherit no threads and locks of this one, but need not import everything anew.
    has_server = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if has_server else "spawn")
    if has_server:
        context.set_forkserver_preload([__name__])
    shared = _Shared(context.Value("q", 0), context.Event())
    return ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(shared,)), shared


def _run(tasks: Sequence[Task], settings: PrepareSettings, bar: tqdm[None]) -> None:
    workers = min(settings.workers or 1, len(tasks))
    if workers > 1:
        _run_in_processes(tasks, workers, bar)
        return
    for task in tasks:
        write_shard(task, bar.update)


def _run_in_processes(tasks: Sequence[Task], workers: int, bar: tqdm[None]) -> None:
    executor, shared = _pool(workers)
    before, waiting = bar.n, iter(tasks)
    with executor as pool:
        running: dict[Future[None], Task] = {}
        try:
            while True:
                # One more than there are processes, so that none waits for the next.
                for task in itertools.islice(waiting, workers + 1 - len(running)):
                    running[pool.submit(_work, task)] = task
                if not running:
                    break
                done = wait(running, timeout=0.2, return_when=FIRST_COMPLETED).done
                bar.update(before + shared.clips.value - bar.n)
                for future in done:
                    future.result()
                    del running[future]
        except BrokenProcessPool as error:
            raise ValueError(_lost(running.values())) from error
        except BaseException:
            shared.stop.set()
            raise


def _lost(tasks: Iterable[Task]) -> str:
    files = sorted({part.source.file for task in tasks for part in task.parts})
    return (
        "a process was killed, for want of memory or by a video that crashes the decoder; the same command goes on, "
        f"and if it happens again look among the {len(files)} videos from {files[0]} to {files[-1]}"
    )


def _start_worker(shared: _Shared) -> None:
    global _shared
    _shared = shared
    torch.set_num_threads(1)
    # The terminal sends Ctrl-C to all; the first process tells the others to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for_connection([parent.sentinel])
    # Killed without a chance to say so: nobody waits for this shard any more.
    os._exit(1)


def _work(task: Task) -> None:
    with contextlib.suppress(_StoppedError):
        write_shard(task, _advance)


def _advance(clips: int) -> None:
    if _shared.stop.is_set():
        raise _StoppedError
    if clips:
        with _shared.clips.get_lock():
            _shared.clips.value += clips
