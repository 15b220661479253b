"""The paper's two tables of bounds, measured in separate trainings and saved with the runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from parabolic.engine import BoundsMonitor, Callback
from parabolic.experiments.code import made_of
from parabolic.experiments.execution import execute, reason_of
from parabolic.experiments.grid import Failure
from parabolic.experiments.paper.tables import PaperTable, paper_tables, published
from parabolic.experiments.spec import RunSpec
from parabolic.experiments.store import Store, agree
from parabolic.files import disk_errors, write_text

__all__ = ["BoundTable", "Rows", "bound_tables", "bounds_told", "find_bounds", "measure_bounds", "table_of"]

Rows = list[dict[str, Any]]
"""The measurements of a run: `BoundsRow.as_dict` after each task."""


@dataclass(frozen=True)
class BoundTable:
    """The published figures for a bound: mean losses after each task, on memory and on one task's examples.

    >>> bound_tables()["forgetting"].memory[0]
    0.5077
    """

    title: str
    memory: Sequence[float]
    task: Sequence[float]


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
    # PCL on Seq-CIFAR10: the same runs as in the main table.
    return PaperTable("bounds", {"PCL": ()}, paper_tables()["main"].settings[:1], metrics=(), plus=False)


def bounds_told(spec: RunSpec, monitor: BoundsMonitor) -> dict[str, Any]:
    """The measurements of a monitor in a run, as plain JSON values."""
    rows = [row.as_dict() for row in monitor.rows]
    return {"spec": spec.resolved(), "eps": monitor.eps, "samples": monitor.samples, "rows": rows}


def find_bounds(spec: RunSpec, store: Store) -> Rows | None:
    """The bounds measured for a run, or None."""
    try:
        told = json.loads(store.bounds(spec.key).read_text())
        mine = agree(told["spec"], spec.resolved()) and agree(told.get("environment", {}), made_of(spec))
        return list(told["rows"]) if mine else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def measure_bounds(
    specs: Iterable[RunSpec], store: Store, *, device: str = "auto", callbacks: Iterable[Callback] = ()
) -> tuple[dict[int, Rows], list[Failure]]:
    """The bounds of runs by seed, measured if they have not been yet, and the runs that failed.

    Measuring takes a separate training, in this process; the results are saved beside the run's record.
    """
    measured, failures = dict[int, Rows](), list[Failure]()
    for spec in specs:
        try:
            measured[spec.seed] = find_bounds(spec, store) or _measure(spec, store, device, [*callbacks])
        except Exception as error:
            failures.append(Failure(spec, reason_of(error)[0]))
    return measured, failures


def _measure(spec: RunSpec, store: Store, device: str, callbacks: list[Callback]) -> Rows:
    monitor = BoundsMonitor(seed=spec.seed)
    record = execute(spec, device=device, callbacks=[*callbacks, monitor])
    told = bounds_told(spec, monitor) | {"environment": record.environment}
    with disk_errors("runs", store.root, "free some space or name another folder"):
        write_text(store.bounds(spec.key), json.dumps(told, indent=1))
    return list(told["rows"])
