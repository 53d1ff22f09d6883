"""Prepared clips: JPEG frames in plain tar files, and an index by which single frames are read.

A prepared folder holds ``shard-00000.tar`` and so on, beside each the list of what is in it (``.json``), and
``index.safetensors`` for all of them. A member of a shard is called ``<shard>-<clip>.<frame>.jpg``, so that tar,
webdataset and every other tool can read it. Tar pads all it stores to blocks of 512 bytes; the sizes of the frames
therefore say where each of them lies, and two frames of a clip cost two small reads.

Shape letters: C clips, F frames of all clips, N source files, S shards.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import tarfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.numpy import save as to_safetensors

from asc.files import write_whole

try:
    # Up to twice as fast as Pillow, but announced to leave torchvision one day.
    from torchvision.io import ImageReadMode, decode_jpeg
except ImportError:
    decode_jpeg = None

Pixels = NDArray[np.uint8]

INDEX_FILE = "index.safetensors"
_VERSION = 1
_BLOCK = 512
# A tar file ends with two empty blocks.
_END = bytes(2 * _BLOCK)
# Shards that a stream mixes at a time: with 64 clips each, samples come from 2,048 clips at once.
WINDOW = 32
# Open files of one process; more than a window would only keep shards on the disk that the cache has given up.
_OPEN_FILES = WINDOW
_KINDS = {"F64": np.float64, "I64": np.int64, "I32": np.int32, "U32": np.uint32, "U8": np.uint8}


def encode_frame(pixels_HW3: Pixels, quality: int) -> bytes:
    """A JPEG of RGB pixels; the same pixels always give the same bytes."""
    file = io.BytesIO()
    Image.fromarray(pixels_HW3).save(file, "JPEG", quality=quality)
    return file.getvalue()


def decode_frame(jpeg: bytearray) -> Pixels:
    """RGB pixels ``(H, W, 3)`` of a JPEG."""
    if decode_jpeg is None:
        return np.array(Image.open(io.BytesIO(jpeg)).convert("RGB"))
    pixels_3HW = decode_jpeg(torch.frombuffer(jpeg, dtype=torch.uint8), mode=ImageReadMode.RGB)
    pixels_HW3: Pixels = pixels_3HW.permute(1, 2, 0).contiguous().numpy()
    return pixels_HW3


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:05d}.tar"


# ---------------------------------------------------------------------------------------------- writing


@dataclass
class ClipEntry:
    """What the list of a shard says of one clip."""

    file: str
    """Source file, relative to the folder of videos."""
    sha256: str
    """Hash of the source file's bytes."""
    start: float
    """Second of the source file at which the clip begins."""
    offset: int
    """Byte of the shard at which the clip's first member begins."""
    frame_bytes: list[int] = field(default_factory=list)
    """Size of every frame's JPEG."""


@dataclass
class ShardList:
    """Everything there is to know of a finished shard; its presence says that the shard is finished."""

    clips: list[ClipEntry] = field(default_factory=list)
    """The clips in the order they lie in the shard."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What the writer's caller wants to remember, as JSON holds it."""

    @staticmethod
    def path(folder: Path, number: int) -> Path:
        """Where the list of a shard lies."""
        return folder / Path(shard_name(number)).with_suffix(".json")

    @classmethod
    def load(cls, folder: Path, number: int) -> ShardList:
        """Read the list of a finished shard."""
        path = cls.path(folder, number)
        try:
            stored = json.loads(path.read_text())
            return cls([ClipEntry(**clip) for clip in stored["clips"]], stored["notes"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: this list of a shard cannot be read ({error}); delete it and run again"
            ) from error


class ShardWriter:
    """Writes one shard into a temporary file; :meth:`finish` gives it its name."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number = folder, number
        self.listed = ShardList()
        self._path = folder / shard_name(number)
        # Always the same name: a run that goes on after a kill overwrites what the killed one left behind.
        self._temporary = self._path.with_suffix(".tar.tmp")
        self._file: BinaryIO = self._temporary.open("wb")

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: object) -> None:
        # The last bytes may be what the full disk has refused: closing would try once more.
        with suppress(OSError):
            self._file.close()
        if error[0] is not None:
            self._temporary.unlink(missing_ok=True)

    def begin_clip(self, file: str, sha256: str, start: float) -> None:
        """Frames added from now on belong to this clip."""
        self.listed.clips.append(ClipEntry(file, sha256, start, self._file.tell()))

    def add_frame(self, jpeg: bytes) -> None:
        """Append a frame to the clip."""
        sizes = self.listed.clips[-1].frame_bytes
        # Owner and time stay at zero: the bytes depend on the frames alone.
        member = tarfile.TarInfo(f"{self.number:05d}-{len(self.listed.clips) - 1:05d}.{len(sizes):04d}.jpg")
        member.size = len(jpeg)
        self._file.write(member.tobuf(tarfile.USTAR_FORMAT) + jpeg + bytes(-len(jpeg) % _BLOCK))
        sizes.append(len(jpeg))

    def finish(self, notes: dict[str, Any]) -> None:
        """Make the shard safe against a loss of power, then write its list."""
        self._file.write(_END)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.replace(self._path)
        self.listed.notes = notes
        text = json.dumps(asdict(self.listed), separators=(",", ":"), ensure_ascii=True)
        write_whole(ShardList.path(self.folder, self.number), text.encode())


# ------------------------------------------------------------------------------------------------ index


@dataclass(frozen=True)
class Index:
    """Where every frame of a prepared folder lies."""

    clip_shard_C: NDArray[np.int32]
    """Shard of a clip."""
    clip_offset_C: NDArray[np.int64]
    """Byte of its shard at which a clip's first member begins."""
    clip_start_C: NDArray[np.float64]
    """Second of its source file at which a clip begins."""
    clip_file_C: NDArray[np.int32]
    """Source file of a clip."""
    clip_end_C: NDArray[np.int64]
    """Frames of this and all clips before it."""
    frame_bytes_F: NDArray[np.uint32]
    """Size of a frame's JPEG."""
    file_sha256_N32: NDArray[np.uint8]
    """Hash of a source file."""
    name_end_N: NDArray[np.int64]
    """Bytes of this and all names of source files before it."""
    names: NDArray[np.uint8]
    """Names of the source files as UTF-8, one after another."""
    shard_bytes_S: NDArray[np.int64]
    """Size of a shard."""

    def frames(self, clip: int) -> tuple[int, int]:
        """Where a clip's frames begin and end among all frames."""
        return int(self.clip_end_C[clip - 1]) if clip else 0, int(self.clip_end_C[clip])

    def file_name(self, file: int) -> str:
        """Name of a source file."""
        start = int(self.name_end_N[file - 1]) if file else 0
        # The names are those of the file system, which need not be UTF-8.
        return self.names[start : int(self.name_end_N[file])].tobytes().decode(errors="surrogateescape")


def write_index(folder: Path, shards: int) -> tuple[Index, list[dict[str, Any]]]:
    """Join the lists of all shards into the index; also returns their notes."""
    clips: list[tuple[int, ClipEntry]] = []
    sizes: list[NDArray[np.uint32]] = []
    notes: list[dict[str, Any]] = []
    for number in range(shards):
        listed = ShardList.load(folder, number)
        notes.append(listed.notes)
        for clip in listed.clips:
            sizes.append(np.array(clip.frame_bytes, np.uint32))
            # As an array a corpus' sizes fit into memory, as lists of numbers they would not.
            clip.frame_bytes = []
            clips.append((number, clip))
    hashes = {clip.file: clip.sha256 for _, clip in clips}
    place = {file: number for number, file in enumerate(hashes)}
    names = [file.encode(errors="surrogateescape") for file in hashes]
    index = Index(
        clip_shard_C=np.array([number for number, _ in clips], np.int32),
        clip_offset_C=np.array([clip.offset for _, clip in clips], np.int64),
        clip_start_C=np.array([clip.start for _, clip in clips], np.float64),
        clip_file_C=np.array([place[clip.file] for _, clip in clips], np.int32),
        clip_end_C=np.cumsum([len(frames) for frames in sizes], dtype=np.int64),
        frame_bytes_F=np.concatenate([np.zeros(0, np.uint32), *sizes]),
        file_sha256_N32=np.frombuffer(bytes.fromhex("".join(hashes.values())), np.uint8).reshape(-1, 32),
        name_end_N=np.cumsum([len(name) for name in names], dtype=np.int64),
        names=np.frombuffer(b"".join(names), np.uint8),
        shard_bytes_S=np.array([(folder / shard_name(number)).stat().st_size for number in range(shards)], np.int64),
    )
    arrays = {part.name: getattr(index, part.name) for part in fields(Index)}
    write_whole(folder / INDEX_FILE, to_safetensors(arrays, {"asc_shards": str(_VERSION)}))
    return index, notes


def read_index(path: Path) -> Index:
    """Map an index into memory: all processes of a computer share it, however long it is."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        version = header["__metadata__"]["asc_shards"]
        raw = np.memmap(path, np.uint8, "r", offset=8 + length)
        arrays = {part.name: _array(raw, header[part.name]) for part in fields(Index)}
    except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise ValueError(f"{path}: not an index of prepared clips, or damaged ({error})") from error
    if version != str(_VERSION):
        raise ValueError(f"{path}: written by another version of asc ({version}, not {_VERSION}); prepare it again")
    return Index(**arrays)


def _array(raw: NDArray[np.uint8], entry: dict[str, Any]) -> NDArray[Any]:
    start, stop = entry["data_offsets"]
    return np.asarray(raw[start:stop]).view(_KINDS[entry["dtype"]]).reshape(entry["shape"])


# ---------------------------------------------------------------------------------------------- storage


class _Folder:
    """Shards on a disk of this computer."""

    is_remote = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index_path = folder / INDEX_FILE
        if not self.index_path.is_file():
            raise ValueError(f"{folder}: no prepared clips here ({INDEX_FILE} is missing); make them with asc prepare")

    def open(self, name: str) -> int:
        """A file descriptor of a shard."""
        return os.open(self.folder / name, os.O_RDONLY)


class _ObjectStorage:
    """Shards behind a URL. Whole shards are fetched, once for all processes of a computer, into a folder of
    limited size."""

    is_remote = True

    def __init__(self, url: str, cache: Path, cache_bytes: int) -> None:
        self.url, self.cache_bytes = url.rstrip("/"), cache_bytes
        index = self._read_index()
        # Named after the contents: another corpus at the same address cannot meet the old one's shards.
        self.folder = cache / hashlib.sha256(index).hexdigest()[:16]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.index_path = self.folder / INDEX_FILE
        if not self.index_path.exists():
            with self._alone(INDEX_FILE):
                write_whole(self.index_path, index)

    def _read_index(self) -> bytes:
        url = f"{self.url}/{INDEX_FILE}"
        try:
            system, path = fsspec.core.url_to_fs(url)
            index: bytes = system.cat_file(path)
        # Every kind of storage has its own exceptions; a missing package for it is one of them.
        except Exception as error:
            raise ValueError(f"{url}: cannot be fetched ({error!r})") from error
        return index

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        with (self.folder / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def open(self, name: str) -> int:
        """A file descriptor of a shard, fetched if it is not here."""
        path = self.folder / name
        while True:
            with suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDONLY)
                # The time of the last use, by which shards are given up.
                os.utime(descriptor)
                return descriptor
            with self._alone(name):
                # Another process may have fetched it while this one waited.
                if not path.exists():
                    self._fetch(name, path)

    def _fetch(self, name: str, path: Path) -> None:
        temporary = path.with_suffix(".tmp")
        try:
            system, remote = fsspec.core.url_to_fs(f"{self.url}/{name}")
            system.get_file(remote, str(temporary))
        except Exception as error:
            temporary.unlink(missing_ok=True)
            raise ValueError(f"{self.url}/{name}: cannot be fetched ({error!r})") from error
        temporary.replace(path)
        self._give_up_oldest(path)

    def _give_up_oldest(self, newest: Path) -> None:
        sizes: dict[Path, int] = {}
        times: dict[Path, int] = {}
        for path in self.folder.glob("shard-*.tar"):
            with suppress(FileNotFoundError):
                status = path.stat()
                sizes[path], times[path] = status.st_size, status.st_mtime_ns
        excess = sum(sizes.values()) - self.cache_bytes
        for path in sorted(sizes.keys() - {newest}, key=times.__getitem__):
            if excess <= 0:
                return
            # Whoever has it open can go on reading.
            path.unlink(missing_ok=True)
            excess -= sizes[path]


# ---------------------------------------------------------------------------------------------- reading


class ShardedClips:
    """The clips that ``asc prepare`` has written, in a folder or behind a URL (s3://, gs://, https://).

    Can be pickled and used in forked processes: each opens the files it reads by itself.

    Args:
        place: Folder or URL that holds the shards.
        cache: Folder for shards fetched from a URL; default ``~/.cache/asc``.
        cache_gb: Size that folder may have. It must hold the shards in use at a time, a few more than ``WINDOW``.
    """

    def __init__(self, place: str | Path, cache: str | Path | None = None, cache_gb: float = 50.0) -> None:
        self.name = str(place)
        self._storage: _Folder | _ObjectStorage
        if "://" in self.name:
            folder = Path(cache) if cache is not None else Path.home() / ".cache" / "asc"
            self._storage = _ObjectStorage(self.name, folder, int(cache_gb * 1e9))
        else:
            self._storage = _Folder(Path(place))
        self._index = read_index(self._storage.index_path)
        if not len(self):
            raise ValueError(f"{self.name}: no clips in here; report.json says why each video was skipped")
        self._have_no_files()
        self._check_cache()

    def _check_cache(self) -> None:
        window = int(np.sort(self._index.shard_bytes_S)[-WINDOW - 1 :].sum())
        if isinstance(self._storage, _ObjectStorage) and self._storage.cache_bytes < window:
            raise ValueError(
                f"cache_gb is too small for {self.name}: {len(self._index.shard_bytes_S[-WINDOW - 1 :])} shards are in "
                f"use at a time, give at least {window / 1e9:.3g}"
            )

    def _have_no_files(self) -> None:
        self._open: OrderedDict[int, int] = OrderedDict()
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "_storage": self._storage}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._index = read_index(self._storage.index_path)
        self._have_no_files()

    def __del__(self) -> None:
        self._close_files()

    def __len__(self) -> int:
        return len(self._index.clip_shard_C)

    def num_frames(self, clip: int) -> int:
        """Number of frames of a clip."""
        start, stop = self._index.frames(self._checked(clip))
        return stop - start

    def read(self, clip: int, frames: Sequence[int]) -> list[Pixels]:
        """The frames of these numbers as RGB bytes ``(H, W, 3)``, in the order given."""
        index = self._index
        start, stop = index.frames(self._checked(clip))
        sizes = index.frame_bytes_F[start:stop].astype(np.int64)
        if any(not 0 <= frame < len(sizes) for frame in frames):
            raise ValueError(f"frames {list(frames)} asked of {self.source(clip)}, which has {len(sizes)}")
        # A member is a block of header and the padded JPEG.
        ends = index.clip_offset_C[clip] + np.cumsum(_BLOCK + -(-sizes // _BLOCK) * _BLOCK)
        padding = -sizes % _BLOCK
        shard = int(index.clip_shard_C[clip])
        descriptor = self._descriptor(shard)
        return [
            self._read_frame(shard, descriptor, int(ends[frame] - padding[frame] - sizes[frame]), int(sizes[frame]))
            for frame in frames
        ]

    def source(self, clip: int) -> str:
        """Source file of a clip, below the folder of videos."""
        return self._index.file_name(int(self._index.clip_file_C[self._checked(clip)]))

    def start(self, clip: int) -> float:
        """Where in its source file a clip begins, in seconds."""
        return float(self._index.clip_start_C[self._checked(clip)])

    def content_hash(self, clip: int) -> str:
        """SHA-256 of the source file."""
        file = int(self._index.clip_file_C[self._checked(clip)])
        sha256: bytes = self._index.file_sha256_N32[file].tobytes()
        return sha256.hex()

    def order(self, generator: np.random.Generator) -> NDArray[np.int64]:
        """All clips in a random order: a full shuffle, or one a stream can follow.

        Behind a URL the shards are shuffled, and each is spread over the time in which ``WINDOW`` shards are read;
        so a shard is fetched once, and a new one is needed only every now and then.
        """
        if not self._storage.is_remote:
            return generator.permutation(len(self))
        place_S = generator.permutation(len(self._index.shard_bytes_S))
        time_C = place_S[self._index.clip_shard_C] + WINDOW * generator.random(len(self))
        return np.argsort(time_C, kind="stable").astype(np.int64)

    def _close_files(self) -> None:
        for descriptor in getattr(self, "_open", {}).values():
            os.close(descriptor)

    def _checked(self, clip: int) -> int:
        if not 0 <= clip < len(self):
            raise IndexError(f"clip {clip} of {self.name}, which has {len(self)}")
        return clip

    def _descriptor(self, shard: int) -> int:
        if self._process != os.getpid():
            # A forked process has copies of its parent's.
            self._close_files()
            self._have_no_files()
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        if len(self._open) >= _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        try:
            descriptor = self._storage.open(shard_name(shard))
        except OSError as error:
            raise ValueError(f"{self.name}/{shard_name(shard)}: cannot be opened ({error.strerror})") from error
        self._open[shard] = descriptor
        size, expected = os.fstat(descriptor).st_size, int(self._index.shard_bytes_S[shard])
        if size != expected:
            raise ValueError(
                f"{self.name}/{shard_name(shard)}: has {size} bytes, but the index says {expected}; copy it again"
            )
        return descriptor

    def _read_frame(self, shard: int, descriptor: int, offset: int, size: int) -> Pixels:
        jpeg = bytearray(size)
        # Reading at a place leaves no position behind that processes could fight over.
        got = os.preadv(descriptor, [jpeg], offset)
        try:
            if got != size:
                raise OSError("the file ends")
            return decode_frame(jpeg)
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"{self.name}/{shard_name(shard)}: no picture at byte {offset} ({error}); copy it again"
            ) from error
