"""Records: stored results that come with the package, to be read instead of trained again.

    results/records/NAME.jsonl    in a checkout; an installed package has them in `parabolic/records`

Each line is a run: the content of `run.json` without what can be recomputed or is meaningless on other machines. Lines
are sorted by key, so that diffs between versions of a file are readable. `PARABOLIC_RECORDS` names another folder, or a
file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import FileLock

from parabolic.checks import UNREADABLE, Description, encodable, invalid
from parabolic.experiments.spec import RunSpec
from parabolic.experiments.store import EndedRuns, FailedRun, Record, Store, checked, is_of
from parabolic.files import disk_errors, write_text

__all__ = ["BackedStore", "Records", "is_record", "records_place", "write_records"]

PARTS = ("key", "spec", "accuracy", "train_seconds", "test_seconds", "steps", "environment")
OPTIONAL = ("task_accuracy", "future_accuracy", "measured", "diverged")  # of runs that have them
# Parts of the environment. Not the data's hash: decoders differ between machines.
ENVIRONMENT = (
    "parabolic", "torch", "python", "device", "processor", "fleet", "code", "commit", "command", "finished",
)  # fmt: skip
ACCURACY, SECONDS = 4, 3  # decimal places
SOURCE = "record"  # key in the environment of a run read from records: the name of its file


class Records(EndedRuns):
    """The runs in the given records files, or folders of them; of copies of a run, the newest.

    >>> import tempfile
    >>> records = Records(tempfile.mkdtemp())
    >>> records.find(RunSpec()) is None, list(records)
    (True, [])
    """

    def __init__(self, *places: str | Path) -> None:
        self.places = [Path(place) for place in places]

    @classmethod
    def ours(cls) -> Records:
        """The records that come with the package, or those that `PARABOLIC_RECORDS` names."""
        return cls(records_place())

    def ended(self, spec: RunSpec) -> Record | None:
        """The run of this spec, finished or diverged, or None; one made with other defaults or code does not count."""
        record = self._runs.get(spec.key)
        return record if record is not None and is_of(record, spec) else None

    def every(self) -> list[Record]:
        """All runs, finished or diverged, sorted by key; unreadable lines are skipped (see `unreadable`)."""
        return [self._runs[key] for key in sorted(self._runs)]

    def __contains__(self, key: str) -> bool:
        return key in self._runs

    def unreadable(self) -> dict[Path, str]:
        """Unreadable lines, as FILE:LINE, each with the reason."""
        return dict(self._contents[1])

    @property
    def _runs(self) -> dict[str, Record]:
        return self._contents[0]

    @cached_property
    def _contents(self) -> tuple[dict[str, Record], dict[Path, str]]:
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
                except UNREADABLE as error:
                    damaged[Path(f"{path}:{number}")] = str(error)
                    continue
                if record is not None and _is_newer(record, runs.get(record.key)):
                    runs[record.key] = record
        return runs, damaged

    def _files(self) -> list[Path]:
        files = list[Path]()
        for place in self.places:
            files += [place] if place.suffix == ".jsonl" or place.is_file() else sorted(place.glob("*.jsonl"))
        return files


class BackedStore(Store):
    """A store that falls back on records for runs that it does not have. Only the store is written to."""

    def __init__(self, root: str | Path, records: Records) -> None:
        super().__init__(root)
        self.records = records

    def ended(self, spec: RunSpec) -> Record | None:
        """The run of this spec, finished or diverged, from the store or the records, or None."""
        return super().ended(spec) or self.records.ended(spec)

    def read(self) -> tuple[list[Record], list[FailedRun], dict[Path, str]]:
        """Ended runs, those of the store first; failed runs that have no record; unreadable files and lines."""
        ended, failed, damaged = super().read()
        stored_keys = {record.key for record in ended}
        ended += [record for record in self.records.every() if record.key not in stored_keys]
        failed = [run for run in failed if run.key not in self.records]
        return ended, failed, damaged | self.records.unreadable()


def records_place() -> Path:
    """Where records are: `PARABOLIC_RECORDS`, else in the package, else in its checkout."""
    if place := os.environ.get("PARABOLIC_RECORDS"):
        return Path(place).expanduser()
    package = Path(__file__).parent.parent
    bundled = package / "records"
    return bundled if bundled.is_dir() else package.parent.parent / "results" / "records"


def is_record(run: Record) -> bool:
    """Whether a run was read from records, not from a store."""
    return SOURCE in run.environment


def write_records(runs: Iterable[Record], path: str | Path) -> int:
    """Merge runs into a records file, atomically; of copies of a run the newer stays. Returns how many runs it has.

    Processes that merge into the same file wait for each other. A file with an unreadable line is refused, as that line
    would be lost.
    """
    path = Path(path)
    with disk_errors("records", path.parent, "free some space or name another file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock")):
            merged = {record.key: record for record in _load_undamaged(path).every()}
            for record in runs:
                if _is_newer(record, merged.get(record.key)):
                    merged[record.key] = record
            lines = [
                json.dumps(_record_fields(merged[key]), ensure_ascii=False, separators=(",", ":"))
                for key in sorted(merged)
            ]
            write_text(path, "".join(f"{line}\n" for line in lines))
    return len(lines)


def _load_undamaged(path: Path) -> Records:
    """The contents of a file, if it exists; an unreadable line is an error."""
    records = Records(path) if path.exists() else Records()
    if damaged := records.unreadable():
        place, reason = next(iter(damaged.items()))
        got = Description(f"{place} ({reason})")
        raise invalid("records", got, "a records file", "repair or remove the line, or name another file")
    return records


def _is_newer(one: Record, other: Record | None) -> bool:
    """Whether a run replaces another with its key, if there is one; if both ended at the same time, it does."""
    if other is None:
        return True
    finished, other_finished = (str(record.environment.get("finished", "")) for record in (one, other))
    return finished >= other_finished


def _record_fields(record: Record) -> dict[str, Any]:
    """The parts of a run that are written, with rounded numbers."""
    fields = {name: value for name in (*PARTS, *OPTIONAL) if (value := getattr(record, name)) or name in PARTS}
    for name in fields.keys() & {"accuracy", "task_accuracy", "future_accuracy"}:
        fields[name] = [[round(value, ACCURACY) for value in row] for row in fields[name]]
    for name in ("train_seconds", "test_seconds"):
        fields[name] = [round(value, SECONDS) for value in fields[name]]
    environment = {name: record.environment[name] for name in ENVIRONMENT if name in record.environment}
    if environment.get("device") != "cpu":
        environment.pop("processor", None)  # irrelevant to training on a GPU
    if "command" in environment:  # paths are meaningless on other machines
        environment["command"] = re.sub(r"(?<![\w.~:/])/(?:[^\s/=]+/)*", "", str(environment["command"]))
    return {**fields, "environment": environment}


def _parse(line: str, file: str) -> Record:
    fields = json.loads(line)
    if not (isinstance(fields, Mapping) and fields.keys() - {*OPTIONAL} == {*PARTS} and isinstance(fields["key"], str)):
        raise ValueError("it is not the record of a run")
    record = Record(**fields, metrics={})
    return checked(replace(record, metrics=record.summary, environment=encodable({**record.environment, SOURCE: file})))
