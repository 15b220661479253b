"""The runs of a store as one flat table, to filter and to export to other programs."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from parabolic.checks import check_name
from parabolic.experiments import FailedRun, Record, RunSpec
from parabolic.experiments.resume import StoppedRun
from parabolic.experiments.spec import NAMED, OF_STREAMS
from parabolic.files import atomic_write
from parabolic.learners import known_learners
from parabolic.options import dotted, options_of
from parabolic.plugins import is_loaded, is_own, require
from parabolic.report.sketches import sketch_of
from parabolic.streams import Scenario
from parabolic.streams.catalog import Listed

__all__ = [
    "Row", "conditions_of", "default_options", "departures", "fault_of", "format_settings", "name_of",
    "print_csv", "row_of", "sees_all", "select", "settings_of", "short_name", "stop_of", "unusual_settings",
    "write_csv", "write_parquet",
]  # fmt: skip

Row = dict[str, Any]  # by column: names as in run.json, the spec's at the top level: seed, options.lr, metrics.acc

FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)

# Settings that every run has: not the memory size, which some learners lack, nor options, which are the learner's own.
COMMON = {*options_of(RunSpec), *(f"scenario.{name}" for name in options_of(Scenario))} - {"memory"}

GROUPS = ("", "options", "scenario", "metrics", "environment")


def row_of(run: Record | FailedRun | StoppedRun) -> Row:
    """A run as one row; times are summed over the tasks, and the accuracies are left out.

    A setting that did not exist when the run was trained has its default, which is what the run was trained with.
    """
    spec = dotted(run.spec)
    defaults = _defaults(str(spec["learner"]), str(spec["stream"]))
    missing = {name: defaults[name] for name in defaults.keys() - spec.keys() if name in COMMON}
    left_out = ("key", "spec", "accuracy", "task_accuracy", "future_accuracy", "measured")
    results = {name: value for name, value in vars(run).items() if name not in left_out}
    results |= {name: sum(results[name]) for name in ("train_seconds", "test_seconds") if name in results}
    return {"key": run.key, **spec, **dict(sorted(missing.items())), **dotted(results)}


def select(rows: Iterable[Row], where: Mapping[str, str]) -> list[Row]:
    """The rows in which each named column has the value given as text; `lr` is short for `options.lr`.

    A learner without a memory is compared with every memory size, so its runs are kept beside those of the given size.

    >>> select([{"seed": 0, "options.lr": 0.1}, {"seed": 1, "options.lr": 0.05}], {"lr": "0.10"})
    [{'seed': 0, 'options.lr': 0.1}]
    """
    rows = list(rows)
    learners = {row["learner"] for row in rows} if "learner" in where else set()
    names = {learner: name_of(learner).lower() for learner in learners}
    columns = {column for row in rows for column in row} | ({"memory"} if rows else set())
    for name, text in sorted(where.items(), key=lambda item: item[0] == "memory"):  # last: it depends on the rest
        if columns and name not in columns:
            check_name("--where", name, {short_name(column) for column in columns})
        matching = [
            row
            for row in rows
            if any(_matches(text, row[column]) for column in row if name in (column, short_name(column)))
            or (name == "learner" and names[row["learner"]] == text.lower())
        ]
        rows = matching + (_without_memory(rows, beside=matching) if name == "memory" else [])
    return rows


def _without_memory(rows: Sequence[Row], beside: Sequence[Row]) -> list[Row]:
    """The rows of learners without a memory that are compared with the given ones; all, if no row has a memory."""
    conditions = {conditions_of(row) for row in beside}
    no_memory = not any("memory" in row for row in rows)
    return [row for row in rows if "memory" not in row and (no_memory or conditions_of(row) in conditions)]


def name_of(learner: str) -> str:
    """A learner's name: for one in a file or module, the `name` that its class states, if it can be found and the name
    is not a built-in learner's; otherwise the class's own name.

    >>> name_of("er"), name_of("gone.py:Mine")
    ('er', 'Mine')
    """
    source, _, class_name = learner.rpartition(":")
    sketch = sketch_of(learner) if source else None
    return sketch.name if sketch and sketch.name and sketch.name not in known_learners() else class_name


def fault_of(reason: str, trace: str) -> str:
    """Why a run failed and, if that was in the user's own code, the innermost place there.

    >>> fault_of("KeyError: 'x'", '  File "/mine/own.py", line 24, in loss\\n  File "<string>", line 1, in f')
    "KeyError: 'x' (in /mine/own.py:24, loss)"
    """
    frames = [(Path(file), line, name) for file, line, name in FRAME.findall(trace) if not file.startswith("<")]
    own_frames = [frame for frame in frames if is_own(frame[0])]
    if not own_frames:
        return reason
    file, line, name = own_frames[-1]
    cwd = Path.cwd()
    path = file.relative_to(cwd) if file.is_relative_to(cwd) else file
    return f"{reason} (in {path}:{line}, {name})"


def stop_of(row: Row) -> str:
    """Which run was stopped, and at which task.

    >>> stop_of({"learner": "er", "stream": "seq-digits", "seed": 0, "reached": 3, "of": 5})
    'er on seq-digits, seed 0, task 3 of 5'
    """
    run = f"{row['learner']} on {row['stream']}, seed {row['seed']}"
    progress = "all tasks at once" if sees_all(row["learner"]) else f"task {row['reached']} of {row['of']}"
    return ", ".join(filter(None, (run, settings_of(row), progress)))


def sees_all(learner: str) -> bool:
    """Whether a learner learns all tasks at once; False if its class cannot be found.

    >>> sees_all("joint"), sees_all("er")
    (True, False)
    """
    sketch = sketch_of(learner)
    return sketch is not None and sketch.sees_all


def conditions_of(row: Row) -> tuple[str, str]:
    """What a run is compared on, apart from the memory size: its stream, and its non-default settings."""
    return row["stream"], format_settings(unusual_settings(row))


def unusual_settings(row: Row) -> Row:
    """The settings of a run, other than the learner's options, that differ from the defaults, by column."""
    return {name: value for name, value in departures(row).items() if not name.startswith("options.")}


def departures(row: Row) -> Row:
    """The settings of a run that differ from the defaults, by column; all options if its learner cannot be found."""
    defaults = _defaults(row["learner"], row["stream"])
    names = [name for name in row if name in defaults or name.startswith(("options.", "scenario."))]
    return {name: row[name] for name in names if name not in NAMED and row[name] != defaults.get(name)}


def settings_of(row: Row) -> str:
    """The settings of a run that differ from the defaults, as they are written for `--set`."""
    return format_settings(departures(row))


def format_settings(settings: Row) -> str:
    """Settings by column, as they are written for `--set`."""
    return " ".join(f"{short_name(name)}={value}" for name, value in settings.items())


def write_csv(rows: Sequence[Row], path: Path) -> Path:
    """Write rows as CSV, atomically; what a run does not have is left empty."""
    with atomic_write(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        print_csv(rows, file)
    return path


def print_csv(rows: Sequence[Row], file: TextIO) -> None:
    """Print rows as CSV to an open file."""
    table = csv.DictWriter(file, _columns(rows))
    table.writeheader()
    table.writerows(rows)


def write_parquet(rows: Sequence[Row], path: Path) -> Path:
    """Write rows as Parquet, atomically; what a run does not have is null."""
    arrow = require("pyarrow", "parquet", "--parquet", "pyarrow")
    parquet = require("pyarrow.parquet", "parquet", "--parquet", "pyarrow")
    table = arrow.table({name: _one_type([row.get(name) for row in rows]) for name in _columns(rows)})
    with atomic_write(path) as temporary:
        parquet.write_table(table, temporary)
    return path


def _columns(rows: Iterable[Row]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row)
    places = {group: place for place, group in enumerate(GROUPS)}  # a file may have others: they come last
    return sorted(names, key=lambda name: places.get(name.partition(".")[0] if "." in name else "", len(places)))


def _one_type(values: list[Any]) -> list[Any]:
    """A column with one type: options of the same name may be a number in one learner and a text in another."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) < 2 or kinds == {int, float}:
        return values
    return [None if value is None else str(value) for value in values]


def short_name(column: str) -> str:
    """A column without its group: `lr` for `options.lr`, `mine.loss` for `metrics.mine.loss`."""
    return column.partition(".")[2] or column


def _matches(text: str, value: Any) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(text) == value
        except ValueError:
            return False
    name = str(value).lower()
    return text.lower() in (name, name.rpartition(":")[2])  # Mine is short for path/to/file.py:Mine


def default_options(learner: str) -> Row:
    """The default options of a learner, by column; none if its class cannot be found."""
    sketch = sketch_of(learner)
    return {f"options.{name}": value for name, value in sketch.defaults.items()} if sketch else {}


@cache
def _defaults(learner: str, stream: str) -> Row:
    """The default settings; without the options of a learner whose code cannot be found (any more).

    Code that a run names is not imported to look at the run: it may be a stranger's.
    """
    is_known = is_loaded(stream) or stream.startswith("hf:")
    try:
        defaults = dotted(RunSpec("sgd", stream=stream if is_known else RunSpec.stream).resolved())
    except Exception:  # anything can be wrong in a user's file
        defaults = dotted(RunSpec("sgd").resolved())
    if not is_known:
        defaults |= {name: getattr(Listed, name) for name in OF_STREAMS}
    shared = {name: value for name, value in defaults.items() if not name.startswith("options.")}
    return shared | default_options(learner)
