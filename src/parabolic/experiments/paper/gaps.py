"""The runs missing from the paper's tables, and those that cannot be trained here for lack of data."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parabolic.experiments.paper.selection import Selection
from parabolic.experiments.spec import RunSpec
from parabolic.options import write_option
from parabolic.streams.benchmarks import BENCHMARKS
from parabolic.streams.cache import Cache

__all__ = ["Gap", "Missing", "lacking_data"]


@dataclass
class Gap:
    """The numbers of missing runs by row, for one stream, memory size and scenario.

    >>> str(Gap("seq-cifar10", 1000, {"corruption": "shuffle"}, {"ER": 5, "PCL": 2}))
    'seq-cifar10, memory 1000, corruption=shuffle: ER 5, PCL 2'
    """

    stream: str
    memory: int
    scenario: Mapping[str, Any] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        unusual = [f"{name}={write_option(value)}" for name, value in self.scenario.items()]
        place = ", ".join([self.stream, f"memory {self.memory}", *unusual])
        return f"{place}: {', '.join(f'{row} {count}' for row, count in self.rows.items())}"


@dataclass(frozen=True)
class Missing:
    """The missing runs of some tables, and those whose bounds have not been measured.

    >>> selection = Selection(("small_buffers",), learners=("sgd",), seeds=2)
    >>> [str(gap) for gap in Missing.of(selection, {}).gaps(selection)]  # without a memory one run serves all sizes
    ['seq-cifar100, memory 50: SGD 2']
    """

    runs: Sequence[RunSpec]
    bounds: Sequence[RunSpec] = ()

    @classmethod
    def of(cls, selection: Selection, there: Container[str], bounds: Container[int] = ()) -> Missing:
        """What is missing, given the keys of the available runs and the seeds with measured bounds."""
        return cls(
            [spec for spec in selection.runs if spec.key not in there],
            [spec for spec in selection.bounds if spec.seed not in bounds],
        )

    def parted(self, *, cluster: bool = False) -> tuple[Missing, Missing]:
        """What can be trained, and what cannot because its data are not here; a cluster is assumed to have its data."""
        lacking = {each for each in {spec.stream for spec in (*self.runs, *self.bounds)} if lacking_data(each)}

        def chosen(here: bool) -> Missing:
            return Missing(
                [spec for spec in self.runs if (cluster or spec.stream not in lacking) == here],
                [spec for spec in self.bounds if (spec.stream not in lacking) == here],
            )

        return chosen(True), chosen(False)

    def gaps(self, selection: Selection) -> list[Gap]:
        """What is missing, grouped; runs that several tables share are counted once."""
        left, gaps = {spec.key for spec in self.runs}, dict[str, Gap]()
        for row, spec in selection.by_row():
            if spec.key in left:
                left.remove(spec.key)
                _note(gaps, row, spec)
        for spec in self.bounds:
            _note(gaps, "bounds of PCL", spec)
        return list(gaps.values())


def lacking_data(stream: str) -> str | None:
    """The data set that must be prepared before a stream of the paper can be built, or None.

    >>> lacking_data("seq-digits") is None
    True
    """
    benchmark = BENCHMARKS.get(stream)
    return benchmark.data if benchmark is not None and Cache().find(benchmark.data) is None else None


def _note(gaps: dict[str, Gap], row: str, spec: RunSpec) -> None:
    place = json.dumps([spec.stream, spec.memory, dict(spec.scenario)])
    gap = gaps.setdefault(place, Gap(spec.stream, spec.memory, spec.scenario))
    gap.rows[row] = gap.rows.get(row, 0) + 1
