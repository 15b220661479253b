"""The paper's tables with our figures beside the published ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from parabolic.experiments import Record, is_record
from parabolic.experiments.paper import PLUS, BoundTable, Selection, Tuning, bound_tables, bounds_in, paper_tables
from parabolic.report.comparisons import cell_of, finished
from parabolic.report.statements import STATEMENTS, Statement
from parabolic.report.tables import Cell, Column, Results
from parabolic.statistics import Summary

__all__ = ["hardware", "paper_results"]

COLUMNS = {
    "aaa": Column("AAA", digits=2),
    "acc": Column("Acc", digits=2),
    "seconds": Column("seconds", better="lower", digits=2, spread_digits=2),
}
OTHER_DATA = "the paper's figures are for other data"
QUICK = (
    "Quick: a stand-in, with a small network on seq-digits: 5 tasks of 2 classes for Seq-CIFAR10, 2 of 5 for "
    "Seq-CIFAR100 and 5 in a shuffled order for Seq-TinyImageNet, with batches of 10 in place of 32, recalled ones "
    "too, and a fifth of the memory."
)


def paper_results(selection: Selection, records: Mapping[str, Record]) -> list[Results]:
    """The paper's tables filled in from runs that have ended, by key; gaps stay empty."""
    results = []
    for name in selection.tables:
        results += _bound_results(selection, records) if name == "bounds" else [_run_results(selection, name, records)]
    return results


def _run_results(selection: Selection, name: str, records: Mapping[str, Record]) -> Results:
    table, rows, used = paper_tables()[name], dict[str, list[Cell]](), dict[str, Record]()
    columns = [replace(COLUMNS[metric], group=setting.title) for setting in table.settings for metric in table.metrics]
    for row in selection.rows(name):
        cells, published = list[Cell](), iter(table.rows.get(row, ()))
        for setting in table.settings:
            runs = [records[spec.key] for spec in selection.cell(row, setting) if spec.key in records]
            for metric in table.metrics:
                figure = next(published, None)  # nothing was published for a row of our own
                cells.append(cell_of(runs, metric, selection.seeds, figure.value if figure else None))
            used |= {record.key: record for record in runs}
        rows[row] = cells
    notes = [note for note in (table.note, *(table.also.get(row) for row in rows)) if note]
    if "seconds" in table.metrics and used:
        notes.append(f"Ours were measured on {_join({hardware(record) for record in used.values()})}.")
    return Results(
        name,
        _title(table.title, selection),
        columns,
        rows,
        [*notes, *_notes(selection, name, used.values())],
        heading="method",
        underlines=table.underlines,
        ranked=len(columns) > 1,
        incomparable=OTHER_DATA if selection.quick else "",
    )


def _title(title: str, selection: Selection) -> str:
    return f"{title}, tuned" if selection.tuned else title


def _notes(selection: Selection, name: str, used: Iterable[Record]) -> list[str]:
    """The notes that any table has: on stand-ins, tuning and records, as far as there are any."""
    notes = [QUICK] if selection.quick else []
    notes += _tuning_notes(Tuning.of(selection, [name])) if selection.tuned else []
    return notes + _record_notes(f"{name} --tuned" if selection.tuned else name, used)


def _tuning_notes(tuning: Tuning) -> list[str]:
    """How the settings of a tuned table were found, and whether with the same effort for all."""
    sentences = []
    if tuning.effort is not None and tuning.effort.trials:
        method = f"Tuned: for each method, the best of {tuning.effort} on held-out training examples of its stream"
        sentences.append(f"{method} (presets LEARNER-STREAM); the paper's figures are for the published settings.")
    elif tuning.effort is not None:
        sentences.append("The presets mention no trials; the paper's figures are for the published settings.")
    if tuning.unlike:
        efforts = ", ".join(f"{name} ({effort})" for name, effort in sorted(tuning.unlike.items()))
        sentences.append(f"Not as much was tried for each: {efforts}.")
    plus = {preset.name: preset.about for preset in tuning.plus.values() if preset is not None}
    sentences += [
        f"{PLUS} is the preset {name}: {about.rstrip('.') or 'without a description'}." for name, about in plus.items()
    ]
    return sentences


def _record_notes(table: str, used: Iterable[Record]) -> list[str]:
    """How many of the runs are records, from which hardware and when, and how to train them yourself."""
    runs = list(used)
    bundled = [record for record in runs if is_record(record)]
    if not bundled:
        return []
    days = sorted({str(record.environment.get("finished", "undated"))[:10] for record in bundled})
    dates = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    devices = _join({hardware(record) for record in bundled})
    sentence = f"{len(bundled)} of {len(runs)} runs are records, which come with the package ({devices}, {dates})."
    return [f"{sentence} To train them yourself: parabolic paper {table} --no-records."]


def _bound_results(selection: Selection, records: Mapping[str, Record]) -> list[Results]:
    used = {spec.seed: records[spec.key] for spec in selection.specs("bounds") if spec.key in records}
    finite = {record.spec["seed"]: record for record in finished(used.values())}
    measured = {seed: tasks for seed, record in finite.items() if (tasks := bounds_in(record))}
    results = []
    for name, table in bound_tables().items():
        columns = [Column(f"task {task + 1}", "after", "neither", 4, 4) for task in range(len(table.memory))]
        rows = {}
        for line, (quantity, published) in _bound_lines(STATEMENTS[name], table).items():
            by_task = [
                {seed: tasks[task][quantity] for seed, tasks in measured.items()} for task in range(len(columns))
            ]
            summaries = [Summary(figure, math.nan, 1) for figure in published] if published else [None] * len(columns)
            rows[line] = [
                Cell(figures, selection.seeds, figure, diverged=len(used) - len(finite))
                for figures, figure in zip(by_task, summaries, strict=True)
            ]
        measurements = [row for tasks in measured.values() for row in tasks]
        broken = sum(row[f"{name}.broken"] == 1 for row in measurements)
        notes = [
            f"The loss on the task, all classes competing, breaks the bound in {broken} of {len(measurements)} cases."
        ]
        notes += [table.note] if table.note else []
        notes += _notes(selection, "bounds", used.values())
        title = _title(table.title, selection)
        reason = OTHER_DATA if selection.quick else "the paper gives no deviations"
        results.append(Results(f"bounds.{name}", title, columns, rows, notes, heading="loss", incomparable=reason))
    return results


def _bound_lines(statement: Statement, table: BoundTable) -> dict[str, tuple[str, Sequence[float] | None]]:
    """The rows of a table of bounds: the name of each number in what a run measured, and the published figures."""
    memory = {
        f"memory: {line}": (f"{statement.memory}.{statistic}", table.memory if statistic == table.of_memory else None)
        for line, statistic in {"smallest": "min", "mean": "mean", "largest": "max"}.items()
    }
    return {
        **memory,
        f"{statement.task} task, among its own classes": (statement.among_own, table.task),
        f"{statement.task} task, all classes competing": (statement.competing, None),
        **{bound: (quantity, None) for bound, quantity in statement.bounds.items()},
    }


def hardware(record: Record) -> str:
    """The hardware that a run was trained on."""
    environment = record.environment
    device = environment.get("device", "an unknown device")
    return str(environment.get("processor", device) if device == "cpu" else device)


def _join(things: Iterable[str]) -> str:
    return " and ".join(sorted(things))
