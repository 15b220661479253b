"""Tables of finished runs, for a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from parabolic.experiments import Record

__all__ = ["Column", "comparison", "in_words", "mean_sd"]


@dataclass(frozen=True)
class Column:
    """A column of a comparison: what is read off a record, and which end of it is the good one."""

    title: str
    name: str
    best: str = "max"


COLUMNS = (
    Column("Acc %", "acc"),
    Column("AAA %", "aaa"),
    Column("forgetting", "forgetting", best="min"),
    Column("seconds", "seconds", best="min"),
)


def mean_sd(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 for a single value).

    >>> mean_sd([1.0, 2.0, 3.0])
    (2.0, 1.0)
    """
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def read(record: Record, name: str) -> float:
    """A metric of a record, or its training seconds."""
    return sum(record.train_seconds) if name == "seconds" else record.metrics[name]


def comparison(runs: Mapping[str, Sequence[Record]], *, title: str, caption: str) -> Table:
    """Learners against metrics, mean ± sample standard deviation over the seeds, the best of each column in bold."""
    table = Table(title=title, caption=caption, caption_justify="left", title_justify="left")
    table.add_column("learner")
    cells: dict[str, list[str]] = {learner: [] for learner in runs}
    for column in COLUMNS:
        table.add_column(column.title, justify="right")
        figures = {
            learner: mean_sd([read(record, column.name) for record in records]) for learner, records in runs.items()
        }
        ends = [mean for mean, _ in figures.values()]
        best = max(ends) if column.best == "max" else min(ends)
        for learner, (mean, sd) in figures.items():
            text = f"{mean:.1f} ± {sd:.1f}"
            cells[learner].append(f"[bold]{text}[/bold]" if mean == best else text)
    for learner, row in cells.items():
        table.add_row(learner, *row)
    return table


def in_words(runs: Mapping[str, Sequence[Record]]) -> str:
    """What the comparison shows, in a plain sentence or two."""
    final = {learner: mean_sd([record.metrics["acc"] for record in records])[0] for learner, records in runs.items()}
    lost = {
        learner: mean_sd([record.metrics["forgetting"] for record in records])[0] for learner, records in runs.items()
    }
    ranked = sorted(final, key=lambda learner: -final[learner])
    first, last = ranked[0], ranked[-1]
    record = next(iter(runs.values()))[0]
    tasks = len(record.accuracy)
    said = ", ".join(f"{learner} {final[learner]:.0f} %" for learner in ranked)
    sentence = f"After {tasks} tasks, this share of all test examples is classified correctly: {said}."
    if len(ranked) > 1:
        sentence += (
            f" Since it knew the earlier tasks best, {first} has lost {lost[first]:.0f} points on them,"
            f" {last} {lost[last]:.0f}."
        )
    return sentence
