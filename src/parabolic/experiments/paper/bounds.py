"""The paper's two tables of bounds, from runs that measure them after each task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from parabolic.engine.measures import owner
from parabolic.experiments.paper.tables import PaperTable, paper_tables, published
from parabolic.experiments.store import Record

__all__ = ["BoundTable", "Rows", "bound_tables", "bounds_in", "is_bound", "table_of"]

MEASURE = "parabolic.engine.theory:bounds"

Rows = Sequence[Mapping[str, float]]
"""The measurements of a run after each task, by their places in `BoundsRow.as_dict`, as in `forgetting.memory.mean`."""


@dataclass(frozen=True)
class BoundTable:
    """The published figures for a bound: losses after each task, on memory and on one task's examples.

    >>> bound_tables()["forgetting"].memory[0]
    0.5077
    """

    title: str
    memory: Sequence[float]
    task: Sequence[float]
    of_memory: str = "mean"  # which of the memory's losses: mean or min
    note: str = ""


def bound_tables() -> dict[str, BoundTable]:
    """The tables for Proposition 1 (`forgetting`) and Corollary 1 (`generalisation`)."""
    return {name: BoundTable(**parts) for name, parts in published()["bounds"].items()}


def table_of(name: str) -> PaperTable:
    """The table of that name; "bounds" stands for both tables of bounds.

    >>> [setting.stream for setting in table_of("bounds").settings]
    ['seq-cifar10']
    """
    if name != "bounds":
        return paper_tables()[name]
    # PCL on Seq-CIFAR10: the runs of the main table, with a measure.
    setting = replace(paper_tables()["main"].settings[0], measure=MEASURE)
    return PaperTable("bounds", {"PCL": ()}, [setting], metrics=(), plus=False)


def bounds_in(record: Record) -> Rows | None:
    """The bounds that a run measured, or None if it measured none."""
    columns = {name.partition(".")[2]: values for name, values in record.measured.items() if is_bound(record, name)}
    return [dict(zip(columns, numbers, strict=True)) for numbers in zip(*columns.values(), strict=True)] or None


def is_bound(record: Record, name: str) -> bool:
    """Whether a number that a run measured is one of its bounds; these have tables and charts of their own."""
    measures = str(record.spec.get("measure")).replace(" ", "").split(",")
    return MEASURE in measures and owner(name) == MEASURE.rpartition(":")[2]
