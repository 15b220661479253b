"""The paper's tables with ours in them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parabolic.experiments import Record
from parabolic.experiments.paper import Rows, Selection, bound_tables, paper_tables
from parabolic.report.comparison import by_seed
from parabolic.report.tables import Cell, Column, Results
from parabolic.statistics import Summary

__all__ = ["paper_results"]

COLUMNS = {
    "aaa": Column("AAA", digits=2),
    "acc": Column("Acc", digits=2),
    "seconds": Column("seconds", better="lower", digits=2, spread_digits=2),
}
OTHER_DATA = "the paper's figures are of other data"
QUICK = (
    "Quick: a small network on seq-digits stands in, in 5 tasks of 2 classes for Seq-CIFAR10, 2 of 5 for Seq-CIFAR100 "
    "and 5 in a shuffled order for Seq-TinyImageNet, with a fifth of the memory."
)


def paper_results(
    selection: Selection, records: Mapping[str, Record], measured: Mapping[int, Rows] | None = None
) -> list[Results]:
    """The paper's tables filled in from finished runs, by key, and from their bounds, by seed; gaps stay gaps."""
    made = []
    for name in selection.tables:
        made += _of_bounds(selection, measured or {}) if name == "bounds" else [_of_runs(selection, name, records)]
    return made


def _of_runs(selection: Selection, name: str, records: Mapping[str, Record]) -> Results:
    table, rows, used = paper_tables()[name], dict[str, list[Cell]](), list[Record]()
    columns = [replace(COLUMNS[metric], group=setting.title) for setting in table.settings for metric in table.metrics]
    for row in table.of(selection.learners):
        cells, published = [], iter(table.rows[row])
        for setting in table.settings:
            specs = setting.specs(row, selection.seeds, quick=selection.quick)
            found = [records[spec.key] for spec in specs if spec.key in records]
            cells += [Cell(by_seed(found, each), selection.seeds, next(published).value) for each in table.metrics]
            used += found
        rows[row] = cells
    notes = [table.note] if table.note else []
    if "seconds" in table.metrics and used:
        notes.append(f"Ours are of {' and '.join(sorted({_hardware(record) for record in used}))}.")
    notes += [QUICK] if selection.quick else []
    why = OTHER_DATA if selection.quick else ""
    ranked = len(columns) > 1
    return Results(name, table.title, columns, rows, notes, "method", table.underlines, ranked, why)


# The statement behind each table, and its lines: their places in `BoundsRow.as_dict`, and what was published of them.
BOUNDS: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {
    "forgetting": (
        "Proposition 1",
        {
            "memory: mean": ("forgetting.memory.mean", "memory"),
            "memory: largest": ("forgetting.memory.max", ""),
            "first task, among its own classes": ("first_among_own", "task"),
            "first task, all classes competing": ("forgetting.past.mean", ""),
            "bound": ("forgetting_bound", ""),
        },
    ),
    "generalisation": (
        "Corollary 1",
        {
            "memory: mean": ("generalisation.memory.mean", "memory"),
            "last task, among its own classes": ("last_among_own", "task"),
            "last task, all classes competing": ("generalisation.future.mean", ""),
            "lower bound": ("generalisation_lower", ""),
            "upper bound": ("generalisation_upper", ""),
        },
    ),
}


def _of_bounds(selection: Selection, measured: Mapping[int, Rows]) -> list[Results]:
    made = []
    for name, table in bound_tables().items():
        statement, lines = BOUNDS[name]
        columns = [Column(f"task {task + 1}", "after", "neither", 4, 4) for task in range(len(table.memory))]
        rows = {}
        for line, (place, of) in lines.items():
            by_task = [
                {seed: _at(told[task], place) for seed, told in measured.items()} for task in range(len(columns))
            ]
            published = [Summary(figure, math.nan, 1) for figure in getattr(table, of)] if of else [None] * len(columns)
            rows[line] = [
                Cell(figures, selection.seeds, figure) for figures, figure in zip(by_task, published, strict=True)
            ]
        looks = [row for told in measured.values() for row in told]
        broken = sum(statement in row["violations"] for row in looks)
        notes = [f"The loss on the task, all classes competing, breaks the bound in {broken} of {len(looks)} cases."]
        notes += [QUICK] if selection.quick else []
        why = OTHER_DATA if selection.quick else "the paper gives no deviations"
        made.append(Results(f"bounds.{name}", table.title, columns, rows, notes, "loss", incomparable=why))
    return made


def _at(told: Any, place: str) -> float:
    """The number at a place such as `forgetting.memory.mean`."""
    for name in place.split("."):
        told = told[name]
    return float(told)


def _hardware(record: Record) -> str:
    environment = record.environment
    return str(environment["processor"] if environment["device"] == "cpu" else environment["device"])
