"""Runs on disk: one folder per run, named after its spec's hash.

    <root>/<key>/run.json       a run that has ended: its results, or where and why it diverged
    <root>/<key>/failed.json    why the last attempt failed, until the run has ended
    <root>/<key>/checkpoint.safetensors    its latest checkpoint, while it is trained or after it was stopped
    <root>/<key>/monitor.jsonl  a monitor's looks, for `parabolic watch`
    <root>/.claims/<key>        locked by the process that is training the run

Stores of several machines are merged by copying their folders into one.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

import numpy as np
from filelock import BaseFileLock, FileLock, Timeout
from numpy.typing import NDArray

from parabolic import metrics
from parabolic.checks import CONTROL, UNREADABLE, encodable, invalid
from parabolic.experiments.code import content_hashes, own_code_of, package_code
from parabolic.experiments.spec import RunSpec
from parabolic.files import disk_errors, sweep, write_text
from parabolic.options import dotted

__all__ = ["EndedRuns", "FailedRun", "Record", "Store", "agree", "check_store", "checked", "is_of", "runs_option"]

FILE, FAILED, CLAIMS, CHECKPOINT = "run.json", "failed.json", ".claims", "checkpoint.safetensors"
MONITOR = "monitor.jsonl"
KEY = re.compile("[0-9a-f]{16}")
SORTED = {"memory": int, "scenario.validation": int | float}  # settings by which runs are sorted, if they have them
ROOM = 1 << 14  # bytes that must be free on disk to start a run

AnyRun = TypeVar("AnyRun", bound="Record | FailedRun")


@dataclass(frozen=True)
class Record:
    """A run that has ended: its spec, results, times and environment.

    A run that diverged has no metrics, and accuracies only of the tasks before. Trained again it would diverge again,
    so it is kept like a result.
    """

    key: str
    spec: Mapping[str, Any]
    metrics: Mapping[str, float]  # in percent and percentage points
    accuracy: list[list[float]]  # row i: the accuracies on tasks 0 to i after task i, in percent
    train_seconds: list[float]  # one value per task, also for the one in which it diverged
    test_seconds: list[float]
    steps: int
    environment: Mapping[str, Any]  # versions, hardware, command, time
    # Like `accuracy`, with only the task's own classes competing; empty in runs that predate this field.
    task_accuracy: list[list[float]] = field(default_factory=list)
    measured: Mapping[str, list[float]] = field(default_factory=dict)  # by the user's own measures, after each task
    # Row i: the accuracies on tasks i, i + 1, … before task i, like `task_accuracy`; empty unless asked for.
    future_accuracy: list[list[float]] = field(default_factory=list)
    diverged: str = ""  # in which task, by which step and how, if it did

    def __repr__(self) -> str:
        learner, stream, seed = (self.spec.get(name) for name in ("learner", "stream", "seed"))
        results = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        return f"Record({self.diverged or f'{learner} on {stream}, seed {seed}: {results}'})"

    @property
    def matrix(self) -> NDArray[np.float64]:
        """The accuracy matrix, NaN above the diagonal."""
        return _square(self.accuracy)

    @property
    def task_matrix(self) -> NDArray[np.float64] | None:
        """The accuracy matrix with only each task's own classes competing, if it was recorded."""
        return _square(self.task_accuracy) if self.task_accuracy else None

    @property
    def by_other_package(self) -> bool:
        """Whether it was trained by other code of this package, as far as that was noted."""
        current = package_code()
        return bool(self.environment.get("package", current) != current)

    @property
    def summary(self) -> dict[str, float]:
        """The metrics, recomputed from the accuracies and the user's own measures; none if it diverged."""
        if self.diverged:
            return {}
        return metrics.summary(self.matrix, self.task_matrix, self.measured, self.future_accuracy or None)


@dataclass(frozen=True)
class FailedRun:
    """A run whose last attempt failed: its spec, and why and when it failed."""

    key: str
    spec: Mapping[str, Any]
    reason: str
    trace: str  # of an unexpected error; otherwise empty
    failed: str  # when


class EndedRuns:
    """Runs that have ended: `find` and iteration give finished ones, `ended` and `every` also those that diverged."""

    def ended(self, spec: RunSpec) -> Record | None:
        """The run of this spec, finished or diverged, or None."""
        raise NotImplementedError

    def every(self) -> list[Record]:
        """All runs, finished or diverged."""
        raise NotImplementedError

    def find(self, spec: RunSpec) -> Record | None:
        """The finished run of this spec, or None."""
        record = self.ended(spec)
        return None if record is None or record.diverged else record

    def __iter__(self) -> Iterator[Record]:
        """All finished runs."""
        return (record for record in self.every() if not record.diverged)


class Store(EndedRuns):
    """The folder of runs. Files are written atomically: under a temporary name, then moved into place.

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
        """The checkpoint of the run with this key, which exists if the run was started and is not finished."""
        return self.path(key) / CHECKPOINT

    def monitor(self, key: str) -> Path:
        """The monitor's file of the run with this key."""
        return self.path(key) / MONITOR

    def unfinished(self, key: str) -> bool:
        """Whether a folder has checkpoints but no finished run; a journal's folder counts too."""
        folder = self.path(key)
        return not (folder / FILE).exists() and any(folder.glob("*.safetensors"))

    def in_progress(self, key: str) -> bool:
        """Whether a process on this machine, or one that shares its locks, is training the run with this key."""
        claim = self.root / CLAIMS / key
        if claim.exists():
            try:
                with FileLock(claim, blocking=False):
                    pass
            except Timeout:
                return True
            except OSError:  # a folder that is closed to us
                pass
        return False

    def written(self) -> dict[Path, int]:
        """The JSON files of all runs with their modification times in nanoseconds, to detect changes."""
        found = {}
        for path in (path for folder in self._folders() for path in folder.glob("*.json")):
            with suppress(FileNotFoundError):  # deleted meanwhile
                found[path] = path.stat().st_mtime_ns
        return found

    def begun(self, prefix: str = "") -> list[str]:
        """The keys, with this prefix, of all runs that were started: finished, failed, stopped or in progress."""
        return [folder.name for folder in self._folders() if folder.name.startswith(prefix)]

    def ended(self, spec: RunSpec) -> Record | None:
        """The run of this spec, finished or diverged, or None.

        A record made when a default had another value has the same key but is a different run, and does not count. Nor
        does one made with a different version of the user's own code or of prepared data.
        """
        record = _read(Record, self.path(spec.key) / FILE)
        return record if record is not None and is_of(record, spec) else None

    def outdated(self, spec: RunSpec) -> bool:
        """Whether there is a finished run of this spec that was made with another version of the user's own code."""
        own_code = own_code_of(spec)
        record = _read(Record, self.path(spec.key) / FILE) if own_code else None
        return record is not None and record.environment.get("code", own_code) != own_code

    def every(self) -> list[Record]:
        """All runs, finished or diverged, each once even if there are copies; without `unreadable` files."""
        return self.read()[0]

    def failures(self) -> list[FailedRun]:
        """The runs whose last attempt failed."""
        return self.read()[1]

    def unreadable(self) -> dict[Path, str]:
        """The unreadable files, each with the reason."""
        return self.read()[2]

    def read(self) -> tuple[list[Record], list[FailedRun], dict[Path, str]]:
        """Read each file once; returns ended runs, failed runs, and unreadable files with the reasons."""
        damaged: dict[Path, str] = {}
        ended = self._read_all(Record, FILE, damaged)
        failed = self._read_all(FailedRun, FAILED, damaged)
        return list(ended.values()), [failed[key] for key in failed if key not in ended], dict(sorted(damaged.items()))

    def save(self, record: Record) -> Path:
        """Save a run atomically; returns its folder."""
        folder = self._write(record.key, FILE, record)
        with self._disk_errors():
            for name in (FAILED, CHECKPOINT):
                (folder / name).unlink(missing_ok=True)
        sweep(folder)
        return folder

    def save_failure(self, spec: RunSpec, reason: str, trace: str = "") -> Path:
        """Note that a run failed; removed once the run is saved."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return self._write(spec.key, FAILED, FailedRun(spec.key, spec.resolved(), reason, trace, now))

    def claim(self, key: str) -> BaseFileLock | None:
        """Lock a run; returns the lock, to be released at the end, or None if another process holds it.

        It keeps two grids from training the same run. The operating system releases it however the process ends.
        Saving needs no claim: two processes would write the same record. A disk without room for a record is reported
        now, rather than after training.
        """
        lock = FileLock(self.root / CLAIMS / key)
        with self._disk_errors():
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
        sweep(self.path(key), older=0, name=CHECKPOINT)  # at any age: only the holder of the claim writes them
        return lock

    def _read_all(self, kind: type[AnyRun], name: str, damaged: dict[Path, str]) -> dict[str, AnyRun]:
        """The contents of all files of this name, by key; of copies, the one in the folder named after the key."""
        runs: dict[str, AnyRun] = {}
        for folder in self._folders():
            run = _read(kind, folder / name, damaged)
            if run is not None and (run.key not in runs or folder.name == run.key):
                runs[run.key] = run
        return runs

    def _folders(self) -> list[Path]:
        return sorted(path for path in self.root.glob("[!.]*") if path.is_dir())

    def _write(self, key: str, name: str, content: Record | FailedRun) -> Path:
        with self._disk_errors():
            return write_text(self.path(key) / name, _as_json(vars(content))).parent

    def _disk_errors(self) -> AbstractContextManager[None]:
        return disk_errors("runs", self.root, "free some space or name another folder; finished runs are safe")


def runs_option(root: Path) -> str:
    """The end of a command about the runs in this folder; empty for the folder that commands look in anyway.

    >>> runs_option(Path("runs")), runs_option(Path("my runs"))
    ('', " --runs 'my runs'")
    """
    return "" if root == Path("runs") else f" --runs {shlex.quote(str(root))}"


def _as_json(fields: Mapping[str, Any]) -> str:
    """The fields as JSON: mappings over several lines, all else on one, as accuracies may be millions of numbers."""
    texts = [
        f'"{name}": {json.dumps(value, indent=1 if isinstance(value, Mapping) else None)}'
        for name, value in fields.items()
    ]
    return "{\n" + ",\n".join(texts) + "\n}"


def _square(rows: list[list[float]]) -> NDArray[np.float64]:
    """Rows that end at the diagonal as a matrix, NaN above it."""
    matrix = np.full((len(rows),) * 2, np.nan)
    for row, values in zip(matrix, rows, strict=True):
        row[: len(values)] = values
    return matrix


def check_store(store: object) -> None:
    """Raise an error unless `store` is a Store (and not, say, the name of its folder)."""
    if not isinstance(store, Store):
        raise invalid("store", store, "a Store", 'as in Store("runs")')


def _try_to_write(folder: Path) -> None:
    """Write a temporary file, to find out whether the disk has room."""
    with TemporaryFile(dir=folder) as file:
        file.write(os.urandom(ROOM))  # which no file system can compress
        file.flush()
        os.fsync(file.fileno())


def _load(kind: type[AnyRun], path: Path) -> AnyRun:
    fields = json.loads(path.read_text())
    run = checked(kind(**{name: value if name == "spec" else encodable(value) for name, value in fields.items()}))
    folder = path.parent.name
    if KEY.fullmatch(folder) and run.key != folder:  # a copy may have any other name
        raise ValueError(f"its key, {run.key}, does not match its folder")
    return run


def checked(run: AnyRun) -> AnyRun:
    """Return a run that was read from a file; raises a ValueError (or another error) if it is not valid."""
    required = {"learner": str, "stream": str, "seed": int}
    if not all(isinstance(run.spec.get(name), kind) for name, kind in required.items()):
        raise ValueError("its spec is not that of a run")
    settings = dotted(run.spec)
    if any(CONTROL.search(str(text)) for pair in settings.items() for text in pair):
        raise ValueError("its spec has control characters or is no UTF-8")
    if not all(isinstance(settings.get(name, 0), kind) for name, kind in SORTED.items()):
        raise ValueError("its memory or validation is not a number")
    if isinstance(run, Record):
        _check_record(run)
    elif not all(isinstance(text, str) for text in (run.reason, run.trace, run.failed)):
        raise ValueError("it does not say in words why and when it failed")
    return run


def _check_record(record: Record) -> None:
    """Raise a ValueError for an invalid record: files are edited by hand, and disks fail."""
    spec = {"options": {}, "scenario": {}, **record.spec}  # missing in old records
    if not (isinstance(spec.get("backbone"), str) and isinstance(spec.get("epochs"), int) and spec["epochs"] > 0):
        raise ValueError("its spec lacks a backbone or epochs")
    if not isinstance(record.diverged, str):
        raise ValueError("it does not say how it diverged")
    groups = (record.metrics, record.measured, record.environment, spec["options"], spec["scenario"])
    tables = (record.accuracy, record.task_accuracy, record.future_accuracy)
    types_match = all(isinstance(group, Mapping) for group in groups) and all(
        isinstance(table, list) for table in tables
    )
    if not types_match or not all(record.accuracy) or not (record.accuracy or record.diverged):
        raise ValueError("its parts are missing or of the wrong type")
    if not all(
        isinstance(values, list) and len(values) == len(record.test_seconds) for values in record.measured.values()
    ):
        raise ValueError("its measures are not a number for each task")
    accuracies = [row for table in tables for row in table]
    rows = [record.train_seconds, record.test_seconds, *accuracies, *record.measured.values()]
    seen = list(range(1, len(record.accuracy) + 1))
    if not (_lengths(record.accuracy) == seen and _lengths(record.task_accuracy) in ([], seen)):
        raise ValueError("it does not have an accuracy for each task seen")
    if _lengths(record.future_accuracy) not in ([], seen[::-1]):
        raise ValueError("it does not have an accuracy for each task to come")
    if not record.task_accuracy and any(name.startswith("task_") for name in record.metrics):
        raise ValueError("it lacks the accuracies that its metrics are computed from")
    numbers = [*record.metrics.values(), *(value for row in rows for value in row)]
    judged = {"acc", "aaa", "forgetting"}
    judged |= {f"task_{name}" for name in judged if spec.get("heads")}
    has_right_metrics = not record.metrics if record.diverged else judged <= set(record.metrics)
    if not (has_right_metrics and all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)):
        raise ValueError("its figures are missing or not finite numbers")
    if not all(0 <= value <= 100 for row in accuracies for value in row):
        raise ValueError("its accuracies are not percentages")
    for name, value in record.summary.items():
        if not math.isclose(record.metrics.get(name, value), value, abs_tol=1e-6):  # some were added later
            raise ValueError(f"its {name} does not match its {'measures' if name in record.measured else 'accuracies'}")


def _lengths(rows: list[list[float]]) -> list[int]:
    return [len(row) for row in rows]


def _read(kind: type[AnyRun], path: Path, damaged: dict[Path, str] | None = None) -> AnyRun | None:
    try:
        return _load(kind, path)
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE) as error:
        if damaged is not None:
            damaged[path] = str(error)
        return None


def is_of(record: Record, spec: RunSpec) -> bool:
    """Whether a record with the key of a spec is a record of this run.

    Defaults, the user's own code and prepared data must be the same, as far as they are recorded and available here.
    """
    return agree(record.spec, spec.resolved()) and agree(record.environment, content_hashes(spec))


def agree(stored: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Whether two nested mappings, such as resolved specs, agree on all keys that both have.

    >>> agree({"seed": 0, "options": {"lr": 0.1}}, {"seed": 0, "options": {"lr": 0.1, "added": None}})
    True
    """
    for name in stored.keys() & expected.keys():
        one, other = stored[name], expected[name]
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            if not agree(one, other):
                return False
        elif one != other:
            return False
    return True
