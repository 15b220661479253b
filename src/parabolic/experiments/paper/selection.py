"""A selection of the paper's tables, and the runs they need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from parabolic.checks import check_name, check_number, invalid
from parabolic.experiments.paper.bounds import table_of
from parabolic.experiments.paper.plan import Estimates, Plan, plan
from parabolic.experiments.paper.quick import STREAM
from parabolic.experiments.paper.tables import METHODS, PLUS, SEEDS, Setting
from parabolic.experiments.spec import RunSpec
from parabolic.experiments.store import Store

__all__ = ["NAMES", "Selection"]

NAMES = (
    "main", "buffers", "corrupt", "corrupt_buffers", "imbalance", "small_buffers", "ablation", "ablation_buffers",
    "bounds", "runtime",
)  # fmt: skip
"""The paper's tables, in the paper's order."""


@dataclass(frozen=True)
class Selection:
    """Some of the paper's tables: for which learners, with how many seeds, whether on the bundled digits (`quick`), and
    whether with the settings of presets instead of the published ones (`tuned`). Tables that compare methods can have
    rows of the user's `own`: learners, or presets by name or file.

    >>> Selection(("main", "ablation"), learners=("er",), seeds=2).tables
    ['main']
    >>> Selection(("main",), learners=("er",), own=("pcl-plus",)).rows("main")
    ['ER', 'pcl-plus']
    """

    names: tuple[str, ...] = NAMES
    learners: tuple[str, ...] | None = None
    seeds: int = SEEDS
    quick: bool = False
    tuned: bool = False
    own: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.names:
            check_name("table", name, NAMES)
        check_number("seeds", self.seeds, whole=True, at_least=1)
        known = {learner for name in self.names for learner in self._learners(name)}
        for learner in self.learners or ():
            if learner == METHODS[PLUS].preset and not self.tuned:
                remedy = f"add --tuned, or make it a row of your own: --also {learner}"
                raise invalid("learners", learner, "a method with its published settings", remedy)
            check_name("learners", learner, known)
        rows = ",".join(self.own)
        if len({*self.own, *METHODS}) < len(self.own) + len(METHODS):
            raise invalid("--also", rows, "each row once, and none of the table's", "a preset may be FILE.toml")
        if self.own and not any(table_of(name).plus for name in self.names):
            raise invalid("--also", rows, f"none for {', '.join(self.names)}", "choose a table of several methods")
        for row in self.own:
            Setting("").specs(row, seeds=1)  # refuses an unknown name, say

    @property
    def tables(self) -> list[str]:
        """The names of the tables that have any of the rows."""
        return [name for name in self.names if self.rows(name)]

    @property
    def runs(self) -> list[RunSpec]:
        """The runs of all tables, each once."""
        return list({spec.key: spec for _, spec in self.by_row()}.values())

    @property
    def streams(self) -> set[str]:
        """The streams of these runs."""
        if self.quick:
            return {STREAM}
        return {setting.stream for name in self.tables for setting in table_of(name).settings}

    def specs(self, name: str) -> list[RunSpec]:
        """The runs of a table; cells may share runs."""
        return [spec for _, spec in self._by_row(name)]

    def rows(self, name: str) -> list[str]:
        """The rows of a table (for `bounds`, the methods whose bounds are measured)."""
        table = table_of(name)
        return [*table.of(self.learners, tuned=self.tuned), *(self.own if table.plus else ())]

    def cell(self, row: str, setting: Setting) -> list[RunSpec]:
        """The runs of a row in a setting."""
        if (row, setting) not in self._cells:
            self._cells[row, setting] = setting.specs(row, self.seeds, quick=self.quick, tuned=self.tuned)
        return self._cells[row, setting]

    def by_row(self) -> Iterator[tuple[str, RunSpec]]:
        """The runs of all tables, each with its row; a run may be in several tables."""
        for name in self.tables:
            yield from self._by_row(name)

    def plans(self, store: Store, estimates: Estimates) -> dict[str, Plan]:
        """What is left to do for each table and, last, for `all`, which counts shared runs once."""
        by_table = {name: self.specs(name) for name in self.tables} | {"all": self.runs}
        return {name: plan(specs, store.ended, estimates) for name, specs in by_table.items()}

    def _by_row(self, name: str) -> Iterator[tuple[str, RunSpec]]:
        for row in self.rows(name):
            for setting in table_of(name).settings:
                yield from ((row, spec) for spec in self.cell(row, setting))

    @cached_property
    def _cells(self) -> dict[tuple[str, Setting], list[RunSpec]]:
        """The cells that were asked for: a page asks for each several times, and a thousand runs take a second."""
        return {}

    def _learners(self, name: str) -> set[str]:
        """The names by which the rows of a table can be selected."""
        rows = table_of(name).of(None, tuned=self.tuned)
        return {selector for row in rows for selector in (METHODS[row].learner, METHODS[row].preset) if selector}
