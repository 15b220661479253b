"""The looks of a monitor, and their file: one line of JSON each, which other processes read as it grows.

    {"began": {"step": 0, "time": …, "learner": "er", "stream": "seq-digits", "until": 146}}
    {"look": {"step": 20, "time": …, "loss": 1.93, …}}
    {"ended": {"step": 146, "time": …, "how": "finished", "why": ""}}

Lines are only ever appended. A process that resumes a killed run says from which step, and earlier lines about later
steps no longer count. The writer holds a lock, which the operating system releases however the process ends.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import IO, Any

from filelock import FileLock, Timeout

from parabolic.checks import UNREADABLE, encodable, first_line

__all__ = ["TENTHS", "Lines", "Look", "Tail"]

TENTHS = 10  # parts of the stream by which ages are counted
FEW = 20  # with more classes, trackers get no figures per class
MANY = 10_000  # looks that a reader keeps; beyond that, every other one of the older half is dropped
TOGETHER = ({"kept", "capacity", "offered"}, {"drift", "since"})  # fields that are only valid together
PATIENCE = 1.0  # seconds to wait for the lock, which `Tail.written` takes for a moment


@dataclass(frozen=True)
class Look:
    """A learner at one moment. What is unavailable, or was not measured this time, is None."""

    step: int  # the learner's steps so far
    time: float  # in seconds since 1970
    loss: float | None = None  # the mean over the steps since the last look
    ahead: float | None = None  # percent of the examples since then that were answered correctly before being learned
    ahead_classes: Mapping[int, tuple[int, int]] | None = None  # by class: how many were, of how many
    kept: int | None = None  # examples in memory
    capacity: int | None = None
    offered: int | None = None  # examples offered to the memory so far
    classes: Mapping[int, int] | None = None  # how many examples of each class are in memory
    tenths: list[int] | None = None  # how many arrived in the first, second … last tenth of all examples offered
    age: float | None = None  # how many examples were offered since, on average over the memory
    memory_loss: float | None = None  # the mean over (a sample of) the memory
    drift: float | None = None  # how much the loss on examples that were in memory at `since` has risen
    since: int | None = None  # a step
    bound: float | None = None  # Proposition 1's, on the expected loss on the past
    accuracy: float | None = None  # in percent, over the tasks tested so far
    note: str = ""  # why there is no loss on memory, or no bound

    def __str__(self) -> str:
        """The look in one line.

        >>> print(Look(1200, 0.0, loss=0.31, kept=2, capacity=9, offered=2, classes={0: 1, 4: 1}, age=0.5))
        step 1,200: loss 0.31; memory 2 of 9, 2 classes of 1 each, mean age 0
        >>> print(Look(3, 0.0, kept=5, capacity=9, offered=5, classes={0: 5}))
        step 3: memory 5 of 9, 1 class of 5
        """
        parts = [] if self.loss is None else [f"loss {self.loss:.3g}"]
        if self.ahead is not None:
            balanced = self.balanced if len(self.ahead_classes or {}) > 1 else None
            average = "" if balanced is None else f", {balanced:.1f} % averaged over classes"
            parts.append(f"{self.ahead:.1f} % right before learning{average}")
        if self.kept is not None:
            parts.append(", ".join([f"memory {self.kept:,} of {self.capacity:,}", *self._composition()]))
        if self.memory_loss is not None:
            parts.append(f"loss on memory {self.memory_loss:.3g}")
        if self.drift is not None:
            drift = f"drift {self.drift:+.2g} since step {self.since:,}"
            parts[-1:] = [f"{parts[-1]}, {drift}" if parts else drift]
        if self.bound is not None:
            parts.append(f"bound {self.bound:.3g}")
        if self.accuracy is not None:
            parts.append(f"accuracy {self.accuracy:.1f} %")
        return f"step {self.step:,}: " + "; ".join(parts)

    @property
    def balanced(self) -> float | None:
        """As `ahead`, in percent, but averaged over the classes that occurred, so that rare ones count as much.

        >>> Look(100, 0.0, ahead=95.0, ahead_classes={0: (95, 95), 1: (0, 5)}).balanced
        50.0
        """
        if not self.ahead_classes:
            return None
        return 100 * fmean(right / tested for right, tested in self.ahead_classes.values())

    def _composition(self) -> Iterator[str]:
        if self.classes:
            least, most = min(self.classes.values()), max(self.classes.values())
            sizes = f"{least}" if least == most else f"{least} to {most}"
            yield f"{len(self.classes)} classes of {sizes} each" if len(self.classes) > 1 else f"1 class of {sizes}"
        if self.age is not None:
            yield f"mean age {self.age:,.0f}"

    def figures(self) -> dict[str, float]:
        """The figures for trackers, by name."""
        names = ("loss", "ahead", "balanced", "memory_loss", "drift", "bound", "age", "kept")
        figures = {f"monitor/{name}": getattr(self, name) for name in names}
        if self.classes and len(self.classes) <= FEW:
            figures |= {f"memory_by_class/{label}": count for label, count in self.classes.items()}
        if self.ahead_classes and len(self.ahead_classes) <= FEW:
            counts = self.ahead_classes.items()
            figures |= {f"ahead_by_class/{label}": 100 * right / tested for label, (right, tested) in counts}
        figures |= {f"memory_by_tenth/{i}": count for i, count in enumerate(self.tenths or [], 1)}
        return {name: value for name, value in figures.items() if value is not None}

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values, without None. NaN and infinity become strings, as JSON has no such numbers."""
        present = {name: value for name, value in vars(self).items() if value not in (None, "")}
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in present.items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Look:
        """The inverse of `as_dict`; unknown fields, as from a later version, are ignored.

        >>> look = Look.from_dict({"step": 3, "time": 1.0, "loss": "nan", "classes": {"0": 2}, "news": 5})
        >>> look.loss, look.classes
        (nan, {0: 2})
        """
        fields = {name: value for name, value in values.items() if name in cls.__dataclass_fields__}
        fields |= {name: kind(fields[name]) for name, kind in KINDS.items() if name in fields}
        if "classes" in fields:
            fields["classes"] = {int(label): int(count) for label, count in fields["classes"].items()}
        if "ahead_classes" in fields:
            counts = fields["ahead_classes"].items()
            fields["ahead_classes"] = {int(label): (int(right), int(tested)) for label, (right, tested) in counts}
        if "tenths" in fields:
            fields["tenths"] = list(map(int, fields["tenths"]))
        is_complete = len(fields.get("tenths", range(TENTHS))) == TENTHS
        if not is_complete or any(0 < len(group & fields.keys()) < len(group) for group in TOGETHER):
            raise ValueError("a part is missing")
        return cls(**fields)


# The types that `from_dict` converts to, by field: annotations are strings here.
KINDS = {
    field.name: kind
    for field in dataclasses.fields(Look)
    for kind in (int, float, str)
    if str(field.type).removesuffix(" | None") == kind.__name__
}


class Lines:
    """Appends lines to a file. If that fails, it warns once, and leaves out lines until they can be written again.

    The file may be moved away at any time, as by logrotate: the next line begins a new one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _lock(path)
        self._began = b""  # the line that says how the stream began, which every file repeats
        self._missing = False  # whether the present file lacks it
        self._failed = False  # whether the last line could not be written
        self._taken = False  # whether another monitor writes to the file
        with self._warning_of_errors():
            self._acquire_lock()
            path.open("ab").close()

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Append a line, visible to readers at once."""
        line = json.dumps({kind: fields}).encode() + b"\n"
        if kind == "began":
            self._began, self._missing = line, True
        if self._taken:
            return
        with self._warning_of_errors():
            self._acquire_lock()
            with self.path.open("ab+", buffering=0) as file:
                if self._missing or not file.seek(0, os.SEEK_END):
                    line = self._began if kind == "began" else self._began + line
                self._end_line(file)
                if file.write(line) < len(line):
                    raise OSError("no room")
            self._missing = self._failed = False

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    def _acquire_lock(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self._lock.is_locked:
            self._lock.acquire(timeout=PATIENCE)

    @staticmethod
    def _end_line(file: IO[bytes]) -> None:
        """End the last line, if a killed process or a full disk left it unfinished."""
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")

    @contextmanager
    def _warning_of_errors(self) -> Iterator[None]:
        """Warn of an error, unless the one before was reported."""
        try:
            yield
        except Timeout:
            self._taken = True
            self._warn("nothing is written to it: another monitor is writing to it")
        except (OSError, NotImplementedError) as error:  # a full disk, no permission, or a file system without locks
            if not self._failed:
                self._warn(f"looks are missing in it until it can be written again ({first_line(error)})")
            self._failed = True

    def _warn(self, reason: str) -> None:
        warnings.warn(f"{self.path}: {reason}", RuntimeWarning, stacklevel=2)


class Tail:
    """Reads such a file as it grows; `poll` reads what is new.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.jsonl"
    >>> _ = path.write_text('{"look": {"step": 5, "time": 1, "loss": 0.5}}\\n{"look": {"st')
    >>> tail = Tail(path)
    >>> tail.poll(), [look.loss for look in tail.looks]
    (True, [0.5])
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reset()

    def _reset(self) -> None:
        self.began: dict[str, Any] = {}
        self.looks: list[Look] = []
        self.ended: dict[str, Any] = {}
        self.strange = False  # whether there are lines, but none from a monitor
        self._inode, self._offset = 0, 0

    @property
    def written(self) -> bool:
        """Whether a process has the file open for writing."""
        lock = _lock(self.path)
        if not Path(lock.lock_file).exists():
            return False
        try:
            lock.acquire(blocking=False)
        except (Timeout, OSError):  # held, or another user's lock: assume that its process is alive
            return True
        lock.release()
        return False

    def poll(self) -> bool:
        """Read the complete lines that were added; returns whether there were any. A replaced file is read anew."""
        try:
            with self.path.open("rb") as file:
                info = os.fstat(file.fileno())
                if info.st_ino != self._inode or info.st_size < self._offset:
                    self._reset()
                    self._inode = info.st_ino
                file.seek(start := self._offset)
                for line in file:  # one at a time: a file of months is larger than what is kept of it
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    self._read_line(line)
        except FileNotFoundError:
            return False
        self.strange = self._offset > 0 and not (self.began or self.looks)
        return self._offset > start

    def _read_line(self, line: bytes) -> None:
        try:
            ((kind, fields),) = json.loads(line).items()
            fields = {**encodable(fields), "step": (step := int(fields["step"]))}
            look = Look.from_dict(fields) if kind == "look" else None
            if kind == "began":
                fields = {**fields, "time": float(fields["time"]), "until": fields["until"] and int(fields["until"])}
        except UNREADABLE:  # an incomplete line, or not a monitor's
            return
        if kind == "began":
            self.began, self.ended = fields, {}
            self._forget_after(step)
        elif kind == "ended":
            self.ended = fields
        elif look is not None:
            self._forget_after(step - 1)
            self.looks.append(look)
            if len(self.looks) > MANY:
                del self.looks[: MANY // 2 : 2]

    def _forget_after(self, step: int) -> None:
        while self.looks and self.looks[-1].step > step:
            self.looks.pop()


def _lock(path: Path) -> FileLock:
    return FileLock(path.with_name(f".{path.name}.lock"), thread_local=False)
