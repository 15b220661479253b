"""Finished runs on disk: a folder a run, named by its spec."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parabolic.experiments.spec import RunSpec
from parabolic.files import write_text

__all__ = ["Record", "Store"]

FILE = "run.json"


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

    @property
    def matrix(self) -> NDArray[np.float64]:
        """The accuracy matrix, NaN above the diagonal."""
        matrix = np.full((len(self.accuracy),) * 2, np.nan)
        for row, values in zip(matrix, self.accuracy, strict=True):
            row[: len(values)] = values
        return matrix


class Store:
    """The folder of runs. A run is there, whole, or it is not: files are written aside and moved into place.

    >>> import tempfile
    >>> store = Store(tempfile.mkdtemp())
    >>> store.find(RunSpec()) is None
    True
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def path(self, key: str) -> Path:
        """The folder of the run with this key."""
        return self.root / key

    def find(self, spec: RunSpec) -> Record | None:
        """The finished run of this spec, if there is one.

        A record made when a default had another value has the same key but is another run: it does not count.
        """
        record = self._read(self.path(spec.key) / FILE)
        return record if record is not None and _agree(record.spec, spec.resolved()) else None

    def __iter__(self) -> Iterator[Record]:
        """All finished runs; what cannot be read as one is passed over."""
        for path in sorted(self.root.glob(f"*/{FILE}")):
            record = self._read(path)
            if record is not None:
                yield record

    def save(self, record: Record) -> Path:
        """Write a run, so that a crash at any moment leaves either nothing of it or all."""
        return write_text(self.path(record.key) / FILE, json.dumps(asdict(record), indent=1)).parent

    @staticmethod
    def _read(path: Path) -> Record | None:
        try:
            return Record(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None


def _agree(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether two resolved specs say the same wherever both say something."""
    for name in stored.keys() & wanted.keys():
        one, other = stored[name], wanted[name]
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            if not _agree(one, other):
                return False
        elif one != other:
            return False
    return True
