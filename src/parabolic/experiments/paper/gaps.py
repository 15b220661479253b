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
        setting = ", ".join([self.stream, f"memory {self.memory}", *unusual])
        return f"{setting}: {', '.join(f'{row} {count}' for row, count in self.rows.items())}"


@dataclass(frozen=True)
class Missing:
    """The missing runs of some tables.

    >>> selection = Selection(("small_buffers",), learners=("sgd",), seeds=2)
    >>> [str(gap) for gap in Missing.of(selection, {}).gaps(selection)]  # without a memory one run serves all sizes
    ['seq-cifar100, memory 50: SGD 2']
    """

    runs: Sequence[RunSpec]

    @classmethod
    def of(cls, selection: Selection, ended: Container[str]) -> Missing:
        """What is missing, given the keys of the runs that have ended."""
        return cls([spec for spec in selection.runs if spec.key not in ended])

    def split_by_data(self, *, cluster: bool = False) -> tuple[Missing, Missing]:
        """What can be trained, and what cannot because its data are not here; a cluster is assumed to have its data."""
        lacking = {stream for stream in {spec.stream for spec in self.runs} if not cluster and lacking_data(stream)}
        trainable, untrainable = (
            Missing([spec for spec in self.runs if (spec.stream in lacking) == absent]) for absent in (False, True)
        )
        return trainable, untrainable

    def gaps(self, selection: Selection) -> list[Gap]:
        """What is missing, grouped; runs that several tables share are counted once."""
        left, gaps = {spec.key for spec in self.runs}, dict[str, Gap]()
        for row, spec in selection.by_row():
            if spec.key in left:
                left.remove(spec.key)
                key = json.dumps([spec.stream, spec.memory, dict(spec.scenario)])
                gap = gaps.setdefault(key, Gap(spec.stream, spec.memory, spec.scenario))
                label = f"bounds of {row}" if spec.measure else row
                gap.rows[label] = gap.rows.get(label, 0) + 1
        return list(gaps.values())


def lacking_data(stream: str) -> str | None:
    """The data set that must be prepared before a stream of the paper can be built, or None.

    >>> lacking_data("seq-digits") is None
    True
    """
    benchmark = BENCHMARKS.get(stream)
    return benchmark.data if benchmark is not None and Cache().find(benchmark.data) is None else None
