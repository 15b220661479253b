"""Which of the paper's tables are wanted, and the runs that they need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parabolic.checks import check_name, check_number
from parabolic.experiments.paper.bounds import find_bounds, table_of
from parabolic.experiments.paper.plan import Estimates, Plan, plan
from parabolic.experiments.paper.tables import METHODS, SEEDS, Setting
from parabolic.experiments.spec import RunSpec
from parabolic.experiments.store import Store

__all__ = ["NAMES", "Selection"]

NAMES = (
    "main", "buffers", "corrupt", "corrupt_buffers", "imbalance", "small_buffers", "ablation", "ablation_buffers",
    "bounds", "runtime",
)  # fmt: skip
"""The paper's tables, in its order."""


@dataclass(frozen=True)
class Selection:
    """Some of the paper's tables: for which learners, with how many seeds, whether on the embedded digits, and whether
    with the values of presets in place of published ones.

    >>> Selection(("main", "ablation"), learners=("er",), seeds=2).tables
    ['main']
    """

    names: tuple[str, ...] = NAMES
    learners: tuple[str, ...] | None = None
    seeds: int = SEEDS
    quick: bool = False
    tuned: bool = False

    def __post_init__(self) -> None:
        for name in self.names:
            check_name("table", name, NAMES)
        check_number("seeds", self.seeds, whole=True, at_least=1)
        there = {learner for name in self.names for learner in self._learners(name)}
        for learner in self.learners or ():
            check_name("learners", learner, there)

    @property
    def tables(self) -> list[str]:
        """The names of the tables in which there is something of the learners."""
        return [name for name in self.names if self.learners is None or self._learners(name) & {*self.learners}]

    @property
    def runs(self) -> list[RunSpec]:
        """The runs of all tables but those of bounds."""
        return [spec for _, spec in self.by_row()]

    @property
    def bounds(self) -> list[RunSpec]:
        """The runs whose bounds are to be measured."""
        return self.specs("bounds") if "bounds" in self.tables else []

    def specs(self, name: str) -> list[RunSpec]:
        """The runs of a table."""
        return table_of(name).specs(self.learners, self.seeds, quick=self.quick, tuned=self.tuned)

    def rows(self, name: str) -> list[str]:
        """The rows of a table (of bounds: those of the runs behind it)."""
        return table_of(name).of(self.learners, tuned=self.tuned)

    def cell(self, row: str, setting: Setting) -> list[RunSpec]:
        """The runs of a row in a setting."""
        return setting.specs(row, self.seeds, quick=self.quick, tuned=self.tuned)

    def by_row(self) -> Iterator[tuple[str, RunSpec]]:
        """The runs of all tables but those of bounds, each with the row that it is of; tables share some."""
        for name in self._of_records:
            for row in self.rows(name):
                for setting in table_of(name).settings:
                    yield from ((row, spec) for spec in self.cell(row, setting))

    def plans(self, store: Store, estimates: Estimates) -> dict[str, Plan]:
        """What is left to do for each table and, last, for `all`, where what several tables share is done once."""
        plans = {name: plan(self.specs(name), store.find, estimates) for name in self._of_records}
        together = plan(self.runs, store.find, estimates)
        if self.bounds:
            plans["bounds"] = plan(self.bounds, lambda spec: find_bounds(spec, store), estimates)
            together += plans["bounds"]
        return plans | {"all": together}

    @property
    def _of_records(self) -> list[str]:
        """The tables that finished runs fill."""
        return [name for name in self.tables if name != "bounds"]

    def _learners(self, name: str) -> set[str]:
        """By which names the rows of a table can be asked for."""
        rows = table_of(name).of(None, tuned=self.tuned)
        return {called for row in rows for called in (METHODS[row].learner, METHODS[row].preset) if called}
