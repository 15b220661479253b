"""Prepared data sets on disk: memory-mapped bytes with their hashes, written completely or not at all.

    <folder>/<name>.lock            held by the process that prepares the data set
    <folder>/<name>/data.json       describes the data set, with hashes, and names the folder of its files
    <folder>/<name>/files-…/*.npy   images [n, channels, height, width] and labels [n]

`data.json` is replaced atomically once everything else is written, so that a crash at any moment leaves either the
old data set or the new one. It contains a digest of itself (those of earlier versions do not). A folder that it does
not name was left by a crash; the next preparation removes it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from parabolic.checks import UNREADABLE, Description, InputError, first_line, invalid
from parabolic.files import check_file_name, disk_errors, sha256_of, sync_folder, write_text
from parabolic.states import Damaged
from parabolic.streams.stream import LABELS

__all__ = ["Arrays", "Cache", "DataSet", "Origin", "Part", "Raw", "ShowProgress", "data_folder"]

FILE = "data.json"
FORMAT = 1

ShowProgress = Callable[[str, int, int | None], None]
"""Called with a description of the work, how much of it is done, and the total (None: unknown)."""


class Part(NamedTuple):
    """The training or test part of a source: images in chunks `[n, channels, height, width]`, and all labels."""

    images: Iterable[NDArray[np.uint8]]
    labels: NDArray[Any]


@dataclass(frozen=True)
class Raw:
    """A data set on its way from a source into the cache."""

    train: Part
    test: Part | None = None
    class_names: tuple[str, ...] | None = None
    classes: int | None = None  # how many there should be, if known
    label: str | None = None  # the column of the labels, if the user named it


class Arrays(NamedTuple):
    """Images and labels, memory-mapped copy-on-write: writing to them does not change the files."""

    x: NDArray[np.uint8]
    y: NDArray[Any]


@dataclass(frozen=True)
class DataSet:
    """The description of a prepared data set."""

    name: str
    source: str  # where it came from
    classes: int
    shape: tuple[int, int, int]
    train: int  # number of examples
    test: int  # 0: the source has no test examples of its own
    mean: tuple[float, ...]  # of the training pixels, per channel, on a scale from 0 to 1
    std: tuple[float, ...]
    class_names: tuple[str, ...] | None
    content: str  # SHA-256 of all images and labels
    folder: str  # of the files, beside data.json
    files: Mapping[str, Mapping[str, Any]]  # bytes and SHA-256 of each file
    label: str | None = None  # the column of the labels, if the user named it


class Origin(NamedTuple):
    """Where a prepared data set came from."""

    source: str
    label: str | None


def data_folder() -> Path:
    """Where prepared data are stored: `PARABOLIC_DATA`, or the operating system's folder for caches.

    >>> data_folder().is_absolute()
    True
    """
    if configured := os.environ.get("PARABOLIC_DATA"):
        return Path(configured).expanduser()
    home = Path.home()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "parabolic"


class Cache:
    """The folder of prepared data sets.

    >>> import tempfile
    >>> cache = Cache(tempfile.mkdtemp())
    >>> images, labels = np.zeros((6, 3, 4, 4), np.uint8), np.arange(6) % 2
    >>> with cache.lock("mine"):
    ...     made = cache.write("mine", Raw(Part([images], labels)), source="an example")
    >>> train, test = cache.read(made)
    >>> train.x.shape, test, cache.names()
    ((6, 3, 4, 4), None, ['mine'])
    """

    def __init__(self, root: str | Path | None = None) -> None:
        self.root = data_folder() if root is None else Path(root)

    def names(self) -> list[str]:
        """The names of the prepared data sets."""
        return sorted(path.parent.name for path in self.root.glob(f"*/{FILE}"))

    def find(self, name: str) -> DataSet | None:
        """The description of a prepared data set; None if there is none, or if its `data.json` is damaged.

        The files themselves are not checked.
        """
        try:
            fields = self._read_fields(name)
            if fields.pop("format") != FORMAT or fields.pop("digest", _digest(fields)) != _digest(fields):
                return None
            data = DataSet(**fields)
            parts = {file.split("_")[0] for file in data.files} | {"train"}
            complete = {f"{part}_{kind}.npy" for part in parts for kind in ("images", "labels")} == {*data.files}
            if not (complete and isinstance(data.folder, str)):
                return None
            if not all(stated.keys() == {"bytes", "sha256"} for stated in data.files.values()):
                return None
            names = data.class_names and tuple(data.class_names)
            channels, height, width = data.shape
            return dataclasses.replace(
                data, shape=(channels, height, width), mean=tuple(data.mean), std=tuple(data.std), class_names=names
            )
        except (OSError, *UNREADABLE):
            return None

    def origin(self, name: str) -> Origin | None:
        """Where a data set came from, even if the rest of its `data.json` is damaged; None if that is unknown."""
        try:
            fields = self._read_fields(name)
            source, label = fields["source"], fields.get("label")
            valid = fields["format"] == FORMAT and isinstance(source, str) and isinstance(label, str | None)
            return Origin(source, label) if valid else None
        except (OSError, *UNREADABLE):
            return None

    def damaged(self, name: str) -> InputError | None:
        """The error for a `data.json` that exists but cannot be used; None if it is missing or intact."""
        if self.find(name) is not None or not (self._folder(name) / FILE).exists():
            return None
        return _damaged_error(name, FILE, "its contents have changed, or it was written by another version")

    def read(self, data: DataSet) -> tuple[Arrays, Arrays | None]:
        """Return the training and test arrays, after verifying the size and hash of each file."""
        folder = self._folder(data.name) / data.folder
        for file, stated in data.files.items():
            _verify(data.name, folder / file, stated)
        try:
            parts = [
                Arrays(*[np.load(folder / f"{part}_{kind}.npy", mmap_mode="c") for kind in ("images", "labels")])
                for part in ("train", "test")
                if f"{part}_images.npy" in data.files
            ]
        except OSError as error:  # another process has just prepared it again and removed these files
            name, got = f"data {data.name!r}", Description(first_line(error))
            raise invalid(name, got, "the files that were written", "try again", kind=Damaged) from error
        return parts[0], parts[1] if len(parts) > 1 else None

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Let one process at a time prepare a data set; others wait. A process that dies releases the lock."""
        folder = self._folder(name)
        with _data_folder_errors(self.root):
            folder.parent.mkdir(parents=True, exist_ok=True)
            guard = FileLock(folder.with_name(f"{folder.name}.lock"))
            guard.acquire()
        try:
            yield
        finally:
            guard.release()

    def write(
        self,
        name: str,
        raw: Raw,
        source: str,
        progress: ShowProgress | None = None,
        others: Mapping[str, str] | None = None,
    ) -> DataSet:
        """Write a data set, replacing the one of that name at the very end. The caller must hold the lock.

        `others` maps the content hashes of data sets that this one must not be to their names.
        """
        base = self._folder(name)
        with _data_folder_errors(self.root):
            base.mkdir(parents=True, exist_ok=True)
            previous = self.find(name)
            self._sweep(base, keep=previous.folder if previous else None)
            folder = base / f"files-{token_hex(8)}"
            folder.mkdir()
        try:
            data = _write_parts(name, folder, raw, source, progress)
            if others and data.content in others:
                got, remedy = Description(f"{others[data.content]}, from {source}"), "prepare it under its own name"
                raise invalid(f"data {name!r}", got, "the data set of that name", remedy)
            with _data_folder_errors(self.root):
                sync_folder(folder)  # before `data.json` names it
                fields = dataclasses.asdict(data)
                write_text(base / FILE, json.dumps({"format": FORMAT, **fields, "digest": _digest(fields)}, indent=1))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._sweep(base, keep=data.folder)
        return data

    def _read_fields(self, name: str) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads((self._folder(name) / FILE).read_text())
        return fields

    def _folder(self, name: str) -> Path:
        check_file_name(name, "it becomes a folder's name")
        return self.root / name

    @staticmethod
    def _sweep(folder: Path, keep: str | None) -> None:
        """Remove what a crash or the previous data set left; a file that another process has mapped may stay."""
        for path in folder.iterdir():
            if path.name.startswith("files-") and path.name != keep:
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(f".{FILE}."):
                path.unlink(missing_ok=True)


def _write_parts(name: str, folder: Path, raw: Raw, source: str, progress: ShowProgress | None) -> DataSet:
    content, files, pixels, shape = hashlib.sha256(), {}, _Pixels(), None
    parts = {
        part: source_part for part, source_part in (("train", raw.train), ("test", raw.test)) if source_part is not None
    }
    checked, classes = _check_labels(name, parts, raw)
    for part, labels in checked.items():
        done = 0
        with _Writer(folder / f"{part}_images.npy") as file:
            for chunk in parts[part].images:
                size = _check_chunk(part, chunk, shape, done)
                if done == 0:
                    file.write(_header((len(labels), *size)))
                    content.update(repr((len(labels), *size)).encode())
                shape, done = size, done + len(chunk)
                contiguous = np.ascontiguousarray(chunk)
                file.write(contiguous)
                content.update(contiguous.data)
                if part == "train":
                    pixels.add(contiguous)
                if progress:
                    progress(f"{name}: {part} images", done, len(labels))
        if done != len(labels):
            raise invalid(f"{part} labels", len(labels), f"one for each of the {done} images")
        files[f"{part}_images.npy"] = file.stated
        # One byte per label if that is enough; the content hash does not depend on it.
        stored = labels.astype(np.uint8 if classes <= 256 else np.int64)
        content.update(labels.astype("<i8").data)
        with _Writer(folder / f"{part}_labels.npy") as file:
            file.write(_header(stored.shape, stored.dtype))
            file.write(stored)
        files[f"{part}_labels.npy"] = file.stated
    assert shape is not None
    return DataSet(
        name, source, classes, shape, len(checked["train"]), len(checked.get("test", ())), pixels.mean, pixels.std,
        raw.class_names, content.hexdigest(), folder.name, files, raw.label,
    )  # fmt: skip


class _Pixels:
    """The mean and standard deviation of pixels, per channel, on a scale from 0 to 1; images are added in chunks."""

    def __init__(self) -> None:
        self.count, self.sums, self.squares = 0, np.zeros(1), np.zeros(1)

    def add(self, images: NDArray[np.uint8]) -> None:
        self.count += len(images) * images.shape[2] * images.shape[3]
        self.sums = self.sums + images.sum(axis=(0, 2, 3), dtype=np.int64)
        self.squares = self.squares + np.square(images, dtype=np.uint16).sum(axis=(0, 2, 3), dtype=np.int64)

    @property
    def mean(self) -> tuple[float, ...]:
        return tuple((self.sums / self.count / 255).tolist())

    @property
    def std(self) -> tuple[float, ...]:
        variance = np.maximum(self.squares / self.count - (self.sums / self.count) ** 2, 0)
        return tuple((np.sqrt(variance) / 255).tolist())


def _digest(fields: Mapping[str, Any]) -> str:
    """A hash of the values of a `data.json`."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _check_labels(name: str, parts: Mapping[str, Part], raw: Raw) -> tuple[dict[str, NDArray[np.int64]], int]:
    """The labels of each part, and the number of classes."""
    checked = {part: _label_array(part, source_part.labels) for part, source_part in parts.items()}
    names, highest = raw.class_names, max(int(labels.max()) for labels in checked.values())
    classes = raw.classes or (len(names) if names else highest + 1)
    if names and len(names) != classes:
        raise invalid(name, Description(f"{len(names)} class names"), f"one for each of the {classes}")
    for part, labels in checked.items():
        outside = (labels < 0) | (labels >= classes)
        if outside.any():
            first = int(outside.argmax())
            got = Description(f"{int(labels[first])} at {first}")
            raise invalid(f"{part} labels", got, f"whole numbers from 0 to {classes - 1}")
    if "test" in checked:
        _check_tested(checked["train"], checked["test"], names)
    return checked, classes


def _label_array(part: str, labels: NDArray[Any]) -> NDArray[np.int64]:
    labels = np.asarray(labels)
    if labels.ndim != 1 or not len(labels) or labels.dtype.kind not in "iu":
        got = Description(f"an array of shape {list(labels.shape)} and type {labels.dtype}")
        raise invalid(f"{part} labels", got, "one whole number for each image")
    if (high := int(labels.max())) >= LABELS:
        expected = f"labels from 0 up, below {LABELS}"
        raise invalid(f"{part} labels", high, expected, "number the classes 0, 1, 2, …")
    return labels.astype(np.int64)


def _check_tested(train: NDArray[np.int64], test: NDArray[np.int64], names: Sequence[str] | None) -> None:
    """Refuse test examples of classes without training examples, which a stream would drop."""
    unknown = [names[label] if names else str(label) for label in np.setdiff1d(test, train)]
    if unknown:
        raise untrained_error(", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""))


def untrained_error(classes: str) -> InputError:
    """The error for classes that only the test set has."""
    remedy = "remove them from the test set, or add training examples of them"
    return invalid("test labels", Description(classes), "classes with training examples", remedy)


def _check_chunk(part: str, chunk: NDArray[Any], shape: tuple[int, ...] | None, done: int) -> tuple[int, int, int]:
    if chunk.dtype != np.uint8 or chunk.ndim != 4:
        got = Description(f"an array of shape {list(chunk.shape)} and type {chunk.dtype}")
        raise invalid(f"{part} images", got, "bytes [n, channels, height, width]")
    if 0 in chunk.shape:
        raise invalid(f"{part} images", Description(f"an array of shape {list(chunk.shape)}"), "at least one pixel")
    size = chunk.shape[1:]
    if shape is not None and size != shape:
        got = Description(f"{list(size)} from image {done} on")
        raise invalid(f"{part} images", got, f"all of one size, {list(shape)}", "resize them first")
    return size[0], size[1], size[2]


class _Writer:
    """A file that hashes what is written to it, is synced to disk at the end, and raises clear errors."""

    def __init__(self, path: Path) -> None:
        self.path, self.hash, self.bytes = path, hashlib.sha256(), 0
        self.stated: dict[str, Any] = {}

    def __enter__(self) -> _Writer:
        with _data_folder_errors(self.path.parent):
            self.file: BinaryIO = open(self.path, "wb")
        return self

    def write(self, data: bytes | NDArray[Any]) -> None:
        view = memoryview(data if isinstance(data, bytes) else data.data).cast("B")
        with _data_folder_errors(self.path.parent):
            self.file.write(view)
        self.hash.update(view)
        self.bytes += len(view)

    def __exit__(self, kind: object, *rest: object) -> None:
        with _data_folder_errors(self.path.parent), self.file:
            if kind is None:
                self.file.flush()
                os.fsync(self.file.fileno())
        self.stated = {"bytes": self.bytes, "sha256": self.hash.hexdigest()}


def _data_folder_errors(folder: Path) -> AbstractContextManager[None]:
    return disk_errors(
        "data folder", folder, "free some space, or set PARABOLIC_DATA to another folder; nothing was changed"
    )


def _header(shape: tuple[int, ...], dtype: Any = np.uint8) -> bytes:
    buffer = io.BytesIO()
    fields = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, fields)
    return buffer.getvalue()


def _verify(name: str, path: Path, stated: Mapping[str, Any]) -> None:
    try:
        size = path.stat().st_size
        if size != stated["bytes"]:
            problem = f"{size} bytes instead of {stated['bytes']}"
        elif sha256_of(path) != stated["sha256"]:
            problem = "its contents have changed"
        else:
            return
    except FileNotFoundError:
        problem = "it is missing"
    except OSError as error:
        problem = str(error)
    raise _damaged_error(name, path.name, problem)


def _damaged_error(name: str, file: str, problem: str) -> InputError:
    remedy = f"run `parabolic data prepare {name} --again`, with --from if the source has moved"
    got = Description(f"a damaged {file} ({problem})")
    return invalid(f"data {name!r}", got, "the file that was written", remedy, kind=Damaged)
