"""Records: finished runs that are kept with the project, to be read and not to be trained again.

    results/records/NAME.jsonl    in a checkout; an installed package has them in `parabolic/records`

A line is a run, in short: what `run.json` tells, without what can be computed again or says nothing elsewhere. Lines
are sorted by key, so that a difference between two versions of a file reads well. `PARABOLIC_RECORDS` names another
folder, or a file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import FileLock

from parabolic.checks import Description, invalid
from parabolic.experiments.spec import RunSpec
from parabolic.experiments.store import FailedRun, Record, Store, checked, is_of
from parabolic.files import disk_errors, write_text

__all__ = ["BackedStore", "Records", "is_record", "records_place", "write_records"]

PARTS = ("key", "spec", "accuracy", "train_seconds", "test_seconds", "steps", "environment")
LATER = {"task_accuracy", "measured"}  # parts that not all runs have
# Of the environment. Not the data's hash: decoders differ between machines.
TOLD = ("parabolic", "torch", "python", "device", "processor", "fleet", "code", "command", "finished")
ACCURACY, SECONDS = 4, 3  # digits after the point
FROM = "record"  # in the environment of a run that was read here: the file that it is from


class Records:
    """The runs in some files of records, and in those of some folders; of the same run in several, the newest.

    >>> import tempfile
    >>> records = Records(tempfile.mkdtemp())
    >>> records.find(RunSpec()) is None, list(records)
    (True, [])
    """

    def __init__(self, *places: str | Path) -> None:
        self.places = [Path(each) for each in places]

    @classmethod
    def ours(cls) -> Records:
        """Those that come with the package, or are where `PARABOLIC_RECORDS` says."""
        return cls(records_place())

    def find(self, spec: RunSpec) -> Record | None:
        """The run of this spec, if there is one: as in a store, one made with other defaults or code does not count."""
        record = self._runs.get(spec.key)
        return record if record is not None and is_of(record, spec) else None

    def __iter__(self) -> Iterator[Record]:
        """All runs, by key; lines that cannot be read as one are passed over (`unreadable` names them)."""
        return (self._runs[key] for key in sorted(self._runs))

    def __contains__(self, key: str) -> bool:
        return key in self._runs

    def unreadable(self) -> dict[Path, str]:
        """Lines that should tell of a run and do not, as FILE:LINE, each with the reason."""
        return dict(self._read[1])

    @property
    def _runs(self) -> dict[str, Record]:
        return self._read[0]

    @cached_property
    def _read(self) -> tuple[dict[str, Record], dict[Path, str]]:
        runs, damaged = dict[str, Record](), dict[Path, str]()
        for path in self._files():
            try:
                lines = path.read_text(encoding="utf-8").split("\n")
            except (OSError, ValueError) as error:
                damaged[path] = str(error)
                continue
            for number, line in enumerate(lines, 1):
                try:
                    record = _parse(line, path.name) if line.strip() else None
                except (ValueError, TypeError, AttributeError, KeyError) as error:
                    damaged[Path(f"{path}:{number}")] = str(error)
                    continue
                if record is not None and _newer(record, runs.get(record.key)):
                    runs[record.key] = record
        return runs, damaged

    def _files(self) -> list[Path]:
        each = (
            [place] if place.suffix == ".jsonl" or place.is_file() else sorted(place.glob("*.jsonl"))
            for place in self.places
        )
        return [path for files in each for path in files]


class BackedStore(Store):
    """A store with records behind it: what is not in the one is looked for in the other. Writing goes to the store."""

    def __init__(self, root: str | Path, records: Records) -> None:
        super().__init__(root)
        self.records = records

    def find(self, spec: RunSpec) -> Record | None:
        """The finished run of this spec, here or among the records."""
        return super().find(spec) or self.records.find(spec)

    def __iter__(self) -> Iterator[Record]:
        """All finished runs, those of the store first."""
        own = {record.key: record for record in super().__iter__()}
        yield from own.values()
        yield from (record for record in self.records if record.key not in own)

    def failures(self) -> Iterator[FailedRun]:
        """The runs that failed here when they were last tried, and of which there is no record either."""
        return (each for each in super().failures() if each.key not in self.records)

    def unreadable(self) -> dict[Path, str]:
        """Files of the store and lines of the records that cannot be read, each with the reason."""
        return super().unreadable() | self.records.unreadable()


def records_place() -> Path:
    """Where records are looked for: `PARABOLIC_RECORDS`, else in the package, else in the checkout that it is from."""
    if named := os.environ.get("PARABOLIC_RECORDS"):
        return Path(named).expanduser()
    package = Path(__file__).parent.parent
    inside = package / "records"
    return inside if inside.is_dir() else package.parent.parent / "results" / "records"


def is_record(run: Record) -> bool:
    """Whether a run was read from records, and not from a store."""
    return FROM in run.environment


def write_records(runs: Iterable[Record], path: Path) -> int:
    """Merge runs into a file of records, whole or not at all; of the same run the newer stays. Returns how many it has.

    Processes that merge into one file wait for each other. A file with a line that cannot be read is left as it is:
    what the line was to tell would be lost.
    """
    with disk_errors("--records", path.parent, "free some space or name another file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock")):
            merged = {record.key: record for record in _undamaged(path)}
            for record in runs:
                if _newer(record, merged.get(record.key)):
                    merged[record.key] = record
            lines = [
                json.dumps(_short(merged[key]), ensure_ascii=False, separators=(",", ":")) for key in sorted(merged)
            ]
            write_text(path, "".join(f"{line}\n" for line in lines))
    return len(lines)


def _undamaged(path: Path) -> Records:
    """What a file has, if it is there; one with a line that cannot be read is refused."""
    there = Records(path) if path.exists() else Records()
    if damaged := there.unreadable():
        place, reason = next(iter(damaged.items()))
        got = Description(f"{place} ({reason})")
        raise invalid("--records", got, "a file of records", "mend or remove the line, or name another file")
    return there


def _newer(one: Record, other: Record | None) -> bool:
    """Whether a run takes the place of another of its key; of two that ended at once, the one that comes last does."""
    ends = [str(each.environment.get("finished", "")) for each in (one, other) if each is not None]
    return len(ends) == 1 or ends[0] >= ends[1]


def _short(record: Record) -> dict[str, Any]:
    told = {name: getattr(record, name) for name in PARTS}
    for name in ("accuracy", *["task_accuracy"] * bool(record.task_accuracy)):
        told[name] = [[round(value, ACCURACY) for value in row] for row in getattr(record, name)]
    for name in ("train_seconds", "test_seconds"):
        told[name] = [round(value, SECONDS) for value in told[name]]
    around = {name: record.environment[name] for name in TOLD if name in record.environment}
    if around.get("device") != "cpu":
        around.pop("processor", None)  # it is not what trained
    if "command" in around:  # where folders lie on one machine says nothing on another
        around["command"] = re.sub(r"(?<![\w.~:/])/(?:[^\s/=]+/)*", "", str(around["command"]))
    return {**told, **({"measured": record.measured} if record.measured else {}), "environment": around}


def _parse(line: str, file: str) -> Record:
    told = json.loads(line)
    if not (isinstance(told, Mapping) and told.keys() - LATER == {*PARTS} and isinstance(told["key"], str)):
        raise ValueError("it is no record of a run")
    record = Record(**told, metrics={})
    known = replace(record, metrics=record.summary)
    return checked(replace(known, environment={**record.environment, FROM: file}))
