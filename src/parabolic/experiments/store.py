"""Runs on disk: a folder a run, named by its spec.

    <root>/<key>/run.json       a finished run
    <root>/<key>/failed.json    why it failed when it was last tried, if it has not finished since
    <root>/<key>/checkpoint.safetensors    where it stands, while it is trained or after it was stopped
    <root>/<key>/monitor.jsonl  what a monitor saw of it, for `parabolic watch`
    <root>/<key>/bounds.json    what the theory's bounds say of it, where they were measured
    <root>/.claims/<key>        locked by the process that sees to the run

Folders of several machines are merged by copying them into one.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

import numpy as np
from filelock import BaseFileLock, FileLock, Timeout
from numpy.typing import NDArray

from parabolic import metrics
from parabolic.checks import invalid
from parabolic.experiments.code import made_of
from parabolic.experiments.spec import RunSpec
from parabolic.files import disk_errors, sweep, write_text

__all__ = ["FailedRun", "Record", "Store", "agree", "check_store", "checked", "encodable", "is_of"]

FILE, FAILED, CLAIMS, CHECKPOINT = "run.json", "failed.json", ".claims", "checkpoint.safetensors"
MONITOR, BOUNDS = "monitor.jsonl", "bounds.json"
KEY = re.compile("[0-9a-f]{16}")
ROOM = 1 << 14  # bytes that must be free where a run is begun

Kept = TypeVar("Kept", bound="Record | FailedRun")


@dataclass(frozen=True)
class Record:
    """A finished run: what was run, what came out, how long it took and on what."""

    key: str
    spec: Mapping[str, Any]
    metrics: Mapping[str, float]  # in percent and percentage points
    accuracy: list[list[float]]  # row i: the accuracies on tasks 0 to i after task i, in percent
    train_seconds: list[float]  # a value a task
    test_seconds: list[float]
    steps: int
    environment: Mapping[str, Any]  # versions, hardware, command, time
    # As `accuracy`, where the task is told and its own classes alone compete; empty in runs from before it was asked.
    task_accuracy: list[list[float]] = field(default_factory=list)
    measured: Mapping[str, list[float]] = field(default_factory=dict)  # by measures of the user's own, after each task

    @property
    def matrix(self) -> NDArray[np.float64]:
        """The accuracy matrix, NaN above the diagonal."""
        return _square(self.accuracy)

    @property
    def task_matrix(self) -> NDArray[np.float64] | None:
        """The accuracy matrix where the task is told, if that was asked."""
        return _square(self.task_accuracy) if self.task_accuracy else None

    @property
    def summary(self) -> dict[str, float]:
        """The metrics, computed again from the accuracies and from what was measured."""
        return metrics.summary(self.matrix, self.task_matrix, self.measured)


@dataclass(frozen=True)
class FailedRun:
    """A run that did not come to its end when it was last tried: what was run, why and when it failed."""

    key: str
    spec: Mapping[str, Any]
    reason: str
    trace: str  # of an error that nobody expected; else empty
    failed: str  # when


class Store:
    """The folder of runs. A run is there, whole, or it is not: files are written aside and moved into place.

    Any number of processes may read and write at once.

    >>> import tempfile
    >>> store = Store(tempfile.mkdtemp())
    >>> store.find(RunSpec()) is None
    True
    """

    def __init__(self, root: str | Path) -> None:
        if not isinstance(root, str | Path):
            raise invalid("root", root, "a folder", 'as in Store("runs")')
        self.root = Path(root)

    def path(self, key: str) -> Path:
        """The folder of the run with this key."""
        return self.root / key

    def checkpoint(self, key: str) -> Path:
        """The file that says where the run with this key stands, if it was begun and is not finished."""
        return self.path(key) / CHECKPOINT

    def monitor(self, key: str) -> Path:
        """The file that a monitor of the run with this key writes to."""
        return self.path(key) / MONITOR

    def bounds(self, key: str) -> Path:
        """The file of the bounds that were measured in a training of the run with this key."""
        return self.path(key) / BOUNDS

    def unfinished(self, key: str) -> bool:
        """Whether a run was written down on its way and has not come to its end; or a stream, as its journal has it."""
        folder = self.path(key)
        return not (folder / FILE).exists() and any(folder.glob("*.safetensors"))

    def written(self) -> dict[Path, int]:
        """The files that tell of runs, and when each was written, in nanoseconds: another answer means news."""
        found = {}
        for path in (path for folder in self._folders() for path in folder.glob("*.json")):
            with suppress(FileNotFoundError):  # it has just gone
                found[path] = path.stat().st_mtime_ns
        return found

    def begun(self, prefix: str = "") -> list[str]:
        """The keys, with this beginning, of all runs that were begun: finished, failed, stopped or on their way."""
        return [folder.name for folder in self._folders() if folder.name.startswith(prefix)]

    def find(self, spec: RunSpec) -> Record | None:
        """The finished run of this spec, if there is one.

        A record made when a default had another value has the same key but is another run: it does not count. Nor does
        one that was made by other code of the user's own, or of data that were replaced since.
        """
        record = _read(Record, self.path(spec.key) / FILE)
        return record if record is not None and record.key == spec.key and is_of(record, spec) else None

    def __iter__(self) -> Iterator[Record]:
        """All finished runs, each once, whatever copies of its folder are there; what cannot be read as one is passed
        over (`unreadable` names it)."""
        return self._each(Record, FILE)

    def failures(self) -> Iterator[FailedRun]:
        """The runs that failed when they were last tried."""
        return (each for each in self._each(FailedRun, FAILED) if _read(Record, self.path(each.key) / FILE) is None)

    def unreadable(self) -> dict[Path, str]:
        """Files that should tell of a run and cannot be read, each with the reason."""
        return self.read()[2]

    def read(self) -> tuple[list[Record], list[FailedRun], dict[Path, str]]:
        """All that is in the folder, each file read once: finished runs, those that failed, what cannot be read."""
        damaged: dict[Path, str] = {}
        runs = list(self._each(Record, FILE, damaged))
        done = {run.key for run in runs}
        failed = [each for each in self._each(FailedRun, FAILED, damaged) if each.key not in done]
        return runs, failed, dict(sorted(damaged.items()))

    def save(self, record: Record) -> Path:
        """Write a run, so that a crash at any moment leaves either nothing of it or all."""
        folder = self._write(record.key, FILE, record)
        with self._telling():
            for name in (FAILED, CHECKPOINT):
                (folder / name).unlink(missing_ok=True)
        sweep(folder)
        return folder

    def save_failure(self, spec: RunSpec, reason: str, trace: str = "") -> Path:
        """Write down that a run failed, until it is saved."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return self._write(spec.key, FAILED, FailedRun(spec.key, spec.resolved(), reason, trace, now))

    def claim(self, key: str) -> BaseFileLock | None:
        """A lock on a run, to be released when it is done, or None while another process holds it.

        It keeps two grids from training the same run. The operating system lets go of it when the process ends, however
        it ends. Saving needs no claim: whoever comes last writes the same record over the other's. A disk without room
        for a record is told now, rather than when there is one.
        """
        lock = FileLock(self.root / CLAIMS / key)
        with self._telling():
            (self.root / CLAIMS).mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(blocking=False)
            except Timeout:
                return None
            try:
                _try_to_write(self.root / CLAIMS)
            except OSError:
                lock.release()
                raise
        sweep(self.path(key))
        sweep(self.path(key), older=0, name=CHECKPOINT)  # however new: only who has the claim writes them
        return lock

    def _each(self, kind: type[Kept], name: str, damaged: dict[Path, str] | None = None) -> Iterator[Kept]:
        """What files of this name tell, once for each run: of copies, what is in the folder called by its key."""
        found: dict[str, Kept] = {}
        for folder in self._folders():
            kept = _read(kind, folder / name, damaged)
            if kept is not None and (kept.key not in found or folder.name == kept.key):
                found[kept.key] = kept
        return iter(found.values())

    def _folders(self) -> list[Path]:
        return sorted(path for path in self.root.glob("[!.]*") if path.is_dir())

    def _write(self, key: str, name: str, content: Record | FailedRun) -> Path:
        with self._telling():
            return write_text(self.path(key) / name, json.dumps(asdict(content), indent=1)).parent

    def _telling(self) -> AbstractContextManager[None]:
        return disk_errors("runs", self.root, "free some space or name another folder; what is finished is safe")


def _square(rows: list[list[float]]) -> NDArray[np.float64]:
    """Rows that end at the diagonal as a matrix, NaN above it."""
    matrix = np.full((len(rows),) * 2, np.nan)
    for row, values in zip(matrix, rows, strict=True):
        row[: len(values)] = values
    return matrix


def check_store(store: object) -> None:
    """Refuse what is no store, such as the name of its folder."""
    if not isinstance(store, Store):
        raise invalid("store", store, "a Store", 'as in Store("runs")')


def encodable(told: Any) -> Any:
    r"""The same with texts that every file takes: bytes of a command that are no UTF-8 are written out.

    >>> encodable({"command": "run \udcff"})
    {'command': 'run \\udcff'}
    """
    if isinstance(told, Mapping):
        return {name: encodable(value) for name, value in told.items()}
    return told.encode("utf-8", "backslashreplace").decode() if isinstance(told, str) else told


def _try_to_write(folder: Path) -> None:
    """Write something to a disk, to see whether it can be done, and let it go."""
    with TemporaryFile(dir=folder) as file:
        file.write(os.urandom(ROOM))  # which no disk can make smaller
        file.flush()
        os.fsync(file.fileno())


def _load(kind: type[Kept], path: Path) -> Kept:
    told = json.loads(path.read_text())
    kept = checked(kind(**{name: value if name == "spec" else encodable(value) for name, value in told.items()}))
    folder = path.parent.name
    if KEY.fullmatch(folder) and kept.key != folder:  # a copy may be called otherwise
        raise ValueError(f"its key, {kept.key}, is not that of its folder")
    return kept


def checked(kept: Kept) -> Kept:
    """A run as it was read; a ValueError, or another, where no run has written such a thing."""
    named = {"learner": str, "stream": str, "seed": int}
    if not all(isinstance(kept.spec.get(name), each) for name, each in named.items()):
        raise ValueError("its spec is not that of a run")
    if isinstance(kept, Record):
        _check(kept)
    return kept


def _check(record: Record) -> None:
    """Refuse what no run has written: files are edited by hand, and disks fail."""
    spec = {"options": {}, "scenario": {}, **record.spec}  # there were none at first
    if not (isinstance(spec.get("backbone"), str) and isinstance(spec.get("epochs"), int) and spec["epochs"] > 0):
        raise ValueError("its spec is not that of a run that was trained")
    parts = (record.metrics, record.measured, record.environment, spec["options"], spec["scenario"])
    listed = all(isinstance(each, list) for each in (record.accuracy, record.task_accuracy))
    if not (listed and record.accuracy and all(record.accuracy) and all(isinstance(each, Mapping) for each in parts)):
        raise ValueError("its parts are not those of a run")
    accuracies = [*record.accuracy, *record.task_accuracy]
    rows = [record.train_seconds, record.test_seconds, *accuracies, *record.measured.values()]
    seen = list(range(1, len(record.accuracy) + 1))
    if not (_lengths(record.accuracy) == seen and _lengths(record.task_accuracy) in ([], seen)):
        raise ValueError("it has not an accuracy for each task that was seen")
    if not record.task_accuracy and any(name.startswith("task_") for name in record.metrics):
        raise ValueError("it lacks the accuracies that its figures are of")
    numbers = [*record.metrics.values(), *(value for row in rows for value in row)]
    told = {"acc", "aaa", "forgetting"} <= set(record.metrics)
    if not (told and all(isinstance(each, int | float) and math.isfinite(each) for each in numbers)):
        raise ValueError("its figures are not those of a run")
    if not all(0 <= value <= 100 for row in accuracies for value in row):
        raise ValueError("its accuracies are no percentages")
    for name, value in record.summary.items():
        if not math.isclose(record.metrics.get(name, value), value, abs_tol=1e-6):  # some were added later
            raise ValueError(f"its {name} is not that of its {'measures' if name in record.measured else 'accuracies'}")


def _lengths(rows: list[list[float]]) -> list[int]:
    return [len(row) for row in rows]


def _read(kind: type[Kept], path: Path, damaged: dict[Path, str] | None = None) -> Kept | None:
    try:
        return _load(kind, path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        if damaged is not None:
            damaged[path] = str(error)
        return None


def is_of(record: Record, spec: RunSpec) -> bool:
    """Whether a record with the key of a spec is of this run: by the same defaults, the same code of the user's and the
    same prepared data, as far as it tells of them and they are here.
    """
    return agree(record.spec, spec.resolved()) and agree(record.environment, made_of(spec))


def agree(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether two resolved specs say the same wherever both say something.

    >>> agree({"seed": 0, "options": {"lr": 0.1}}, {"seed": 0, "options": {"lr": 0.1, "added": None}})
    True
    """
    for name in stored.keys() & wanted.keys():
        one, other = stored[name], wanted[name]
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            if not agree(one, other):
                return False
        elif one != other:
            return False
    return True
