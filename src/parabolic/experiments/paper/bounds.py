"""The paper's two tables of bounds: what they need is measured in trainings of their own, and kept with the runs."""

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
"""What was measured in a run: `BoundsRow.as_dict` after each task."""


@dataclass(frozen=True)
class BoundTable:
    """What was published of a bound: mean losses after each task, on memory and on one task's examples.

    >>> bound_tables()["forgetting"].memory[0]
    0.5077
    """

    title: str
    memory: Sequence[float]
    task: Sequence[float]


def bound_tables() -> dict[str, BoundTable]:
    """The tables of Proposition 1 (`forgetting`) and of Corollary 1 (`generalisation`)."""
    return {name: BoundTable(**parts) for name, parts in published()["bounds"].items()}


def table_of(name: str) -> PaperTable:
    """The runs of a table of the paper; of both tables of bounds, which are asked for as one.

    >>> [setting.stream for setting in table_of("bounds").settings]
    ['seq-cifar10']
    """
    if name != "bounds":
        return paper_tables()[name]
    # PCL on Seq-CIFAR10, which are runs of the main table too.
    return PaperTable("bounds", {"PCL": ()}, paper_tables()["main"].settings[:1], metrics=(), plus=False)


def bounds_told(spec: RunSpec, monitor: BoundsMonitor) -> dict[str, Any]:
    """What a monitor has measured in a run, as plain JSON values."""
    rows = [row.as_dict() for row in monitor.rows]
    return {"spec": spec.resolved(), "eps": monitor.eps, "samples": monitor.samples, "rows": rows}


def find_bounds(spec: RunSpec, store: Store) -> Rows | None:
    """What was measured in a run, if it was."""
    try:
        told = json.loads(store.bounds(spec.key).read_text())
        mine = agree(told["spec"], spec.resolved()) and agree(told.get("environment", {}), made_of(spec))
        return list(told["rows"]) if mine else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def measure_bounds(
    specs: Iterable[RunSpec], store: Store, *, device: str = "auto", callbacks: Iterable[Callback] = ()
) -> tuple[dict[int, Rows], list[Failure]]:
    """The bounds of runs, by seed, measured where they have not been; and the runs that failed.

    Measuring takes a training of its own, in this process; what is found is kept beside the run's record.
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
