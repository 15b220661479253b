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
from parabolic.files import written_whole
from parabolic.learners import known_learners
from parabolic.options import dotted, options_of
from parabolic.plugins import is_loaded, is_own, require
from parabolic.report.sketches import sketch
from parabolic.streams import Scenario
from parabolic.streams.catalog import Listed

__all__ = [
    "Row", "departures", "fault_of", "flat", "name_of", "place_of", "print_csv", "row_of", "sees_all", "select",
    "settings_of", "short", "stop_of", "unusual", "usual_options", "write_csv", "write_parquet", "written",
]  # fmt: skip

Row = dict[str, Any]  # by column: names as in run.json, the spec's at the top level: seed, options.lr, metrics.acc

FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)

# Settings that every run has; a learner without a memory has none, and options are the learner's own.
LATER = {*options_of(RunSpec), *(f"scenario.{name}" for name in options_of(Scenario))} - {"memory"}

GROUPS = ("", "options", "scenario", "metrics", "environment")


def row_of(run: Record | FailedRun | StoppedRun) -> Row:
    """A run as one row; times are summed over the tasks, and the accuracies are left out.

    A setting that did not exist when the run was trained has its default, which is what the run was trained with.
    """
    spec = flat(run.spec)
    usual = _defaults(str(spec["learner"]), str(spec["stream"]))
    later = {name: usual[name] for name in usual.keys() - spec.keys() if name in LATER}
    apart = ("key", "spec", "accuracy", "task_accuracy", "future_accuracy", "measured")
    told = flat({name: value for name, value in vars(run).items() if name not in apart})
    return {"key": run.key, **spec, **dict(sorted(later.items())), **told}


def flat(told: Mapping[str, Any]) -> Row:
    """A spec, or a similar nested mapping, as one row.

    >>> flat({"seed": 0, "options": {"lr": 0.1}, "train_seconds": [1, 2]})
    {'seed': 0, 'options.lr': 0.1, 'train_seconds': 3}
    """
    return {
        name: sum(value) if isinstance(value, list) and name in told else value for name, value in dotted(told).items()
    }


def select(rows: Iterable[Row], where: Mapping[str, str]) -> list[Row]:
    """The rows in which each named column has the value given as text; `lr` is short for `options.lr`.

    A learner without a memory is compared with every memory size, so its runs are kept beside those of the given size.

    >>> select([{"seed": 0, "options.lr": 0.1}, {"seed": 1, "options.lr": 0.05}], {"lr": "0.10"})
    [{'seed': 0, 'options.lr': 0.1}]
    """
    rows = list(rows)
    learners = {row["learner"] for row in rows} if "learner" in where else set()
    called = {learner: name_of(learner).lower() for learner in learners}
    columns = {column for row in rows for column in row} | ({"memory"} if rows else set())
    for name, text in sorted(where.items(), key=lambda each: each[0] == "memory"):  # last: it depends on the rest
        if columns and name not in columns:
            check_name("--where", name, {short(column) for column in columns})
        fits = [
            row
            for row in rows
            if any(_means(text, row[each]) for each in row if name in (each, short(each)))
            or (name == "learner" and called[row["learner"]] == text.lower())
        ]
        rows = fits + (_without_memory(rows, beside=fits) if name == "memory" else [])
    return rows


def _without_memory(rows: Sequence[Row], beside: Sequence[Row]) -> list[Row]:
    """The rows of learners without a memory that are compared with the given ones; all, if no row has a memory."""
    places = {place_of(row) for row in beside}
    alone = not any("memory" in row for row in rows)
    return [row for row in rows if "memory" not in row and (alone or place_of(row) in places)]


def name_of(learner: str) -> str:
    """A learner's name: for one in a file or module, the `name` that its class states, if it is there and the name is
    not a built-in learner's; otherwise the class's own name.

    >>> name_of("er"), name_of("gone.py:Mine")
    ('er', 'Mine')
    """
    place, _, own = learner.rpartition(":")
    drawn = sketch(learner) if place else None
    return drawn.name if drawn and drawn.name and drawn.name not in known_learners() else own


def fault_of(reason: str, trace: str) -> str:
    """Why a run failed and, if that was in the user's own code, the innermost place there.

    >>> fault_of("KeyError: 'x'", '  File "/mine/own.py", line 24, in loss\\n  File "<string>", line 1, in f')
    "KeyError: 'x' (in /mine/own.py:24, loss)"
    """
    places = [(Path(file), line, name) for file, line, name in FRAME.findall(trace) if not file.startswith("<")]
    own = [each for each in places if is_own(each[0])]
    if not own:
        return reason
    file, line, name = own[-1]
    here = Path.cwd()
    return f"{reason} (in {file.relative_to(here) if file.is_relative_to(here) else file}:{line}, {name})"


def stop_of(row: Row) -> str:
    """What run was stopped, and where.

    >>> stop_of({"learner": "er", "stream": "seq-digits", "seed": 0, "reached": 3, "of": 5})
    'er on seq-digits, seed 0, task 3 of 5'
    """
    told = f"{row['learner']} on {row['stream']}, seed {row['seed']}"
    where = "all tasks at once" if sees_all(row["learner"]) else f"task {row['reached']} of {row['of']}"
    return ", ".join(filter(None, (told, settings_of(row), where)))


def sees_all(learner: str) -> bool:
    """Whether a learner learns all tasks at once; False if it is not there.

    >>> sees_all("joint"), sees_all("er")
    (True, False)
    """
    drawn = sketch(learner)
    return drawn is not None and drawn.sees_all


def place_of(row: Row) -> tuple[str, str]:
    """What a run is compared on, apart from the memory size: its stream, and its non-default settings."""
    return row["stream"], written(unusual(row))


def unusual(row: Row) -> Row:
    """The settings of a run, other than the learner's options, that differ from the defaults, by column."""
    return {name: value for name, value in departures(row).items() if not name.startswith("options.")}


def departures(row: Row) -> Row:
    """The settings of a run that differ from the defaults, by column; all options if its learner is not there."""
    usual = _defaults(row["learner"], row["stream"])
    told = [name for name in row if name in usual or name.startswith(("options.", "scenario."))]
    return {name: row[name] for name in told if name not in NAMED and row[name] != usual.get(name)}


def settings_of(row: Row) -> str:
    """The settings of a run that differ from the defaults, as they are written for `--set`."""
    return written(departures(row))


def written(settings: Row) -> str:
    """Settings by column, as they are written for `--set`."""
    return " ".join(f"{short(name)}={value}" for name, value in settings.items())


def write_csv(rows: Sequence[Row], path: Path) -> Path:
    """Write rows as CSV, atomically; what a run does not have is left empty."""
    with written_whole(path) as aside, aside.open("w", newline="", encoding="utf-8") as file:
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
    with written_whole(path) as aside:
        parquet.write_table(table, aside)
    return path


def _columns(rows: Iterable[Row]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row)
    return sorted(names, key=lambda name: GROUPS.index(name.partition(".")[0] if "." in name else ""))


def _one_type(values: list[Any]) -> list[Any]:
    """A column with one type: options of the same name may be a number in one learner and a text in another."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) < 2 or kinds == {int, float}:
        return values
    return [None if value is None else str(value) for value in values]


def short(column: str) -> str:
    """A column without its group: `lr` for `options.lr`, `mine.loss` for `metrics.mine.loss`."""
    return column.partition(".")[2] or column


def _means(text: str, value: Any) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(text) == value
        except ValueError:
            return False
    called = str(value).lower()
    return text.lower() in (called, called.rpartition(":")[2])  # Mine is short for path/to/file.py:Mine


def usual_options(learner: str) -> Row:
    """The default options of a learner, by column; none if it is not there."""
    drawn = sketch(learner)
    return {f"options.{name}": value for name, value in drawn.defaults.items()} if drawn else {}


@cache
def _defaults(learner: str, stream: str) -> Row:
    """The default settings; without the options of a learner that is not there (any more).

    Code that a run names is not imported to look at the run: it may be a stranger's.
    """
    listed = is_loaded(stream) or stream.startswith("hf:")
    try:
        usual = flat(RunSpec("sgd", stream=stream if listed else RunSpec.stream).resolved())
    except Exception:  # anything can be wrong in a user's file
        usual = flat(RunSpec("sgd").resolved())
    if not listed:
        usual |= {name: getattr(Listed, name) for name in OF_STREAMS}
    return {name: value for name, value in usual.items() if not name.startswith("options.")} | usual_options(learner)
