"""Which runs each cell of the paper's tables needs, and what was published there."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from parabolic.experiments.paper.quick import stand_in
from parabolic.experiments.spec import RunSpec
from parabolic.learners.pcl import ABLATIONS
from parabolic.statistics import Summary

__all__ = ["METHODS", "SEEDS", "Figure", "Method", "PaperTable", "Setting", "paper_tables"]

SEEDS = 5  # "All experiments are repeated over 5 trials."


@dataclass(frozen=True)
class Method:
    """A row: the learner, the options in which it departs from its own, and those that depend on the stream."""

    learner: str
    options: Mapping[str, Any] = field(default_factory=dict)
    on: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


# The published figures come from published code: where a learner can follow it, it does.
REFERENCE = {"variant": "reference"}
METHODS = {
    "SGD": Method("sgd", on={"seq-tinyimagenet": {"lr": 0.03}}),
    "ER": Method("er"),
    "SI": Method("si"),
    "AGEM": Method("agem"),
    "GEM": Method("gem"),
    "DER": Method("der"),
    "DER++": Method("derpp"),
    "On-EWC": Method("ewc", on={"seq-tinyimagenet": {"strength": 25.0}}),
    "LWF": Method("lwf", on={"seq-tinyimagenet": {"alpha": 1.0}}),
    "ER-OBC": Method("obc"),
    "CLSER": Method("clser"),
    "MixupER": Method("mixup", {"exclude": False, "pairwise": True}),
    "CBRS": Method("cbrs"),
    "VRMCL": Method("vrmcl", REFERENCE),
    "PCL": Method("pcl", REFERENCE),
} | {row: Method("pcl", {**REFERENCE, **options}) for row, options in ABLATIONS.items()}
"""The rows of the paper's tables, by the paper's names."""


@dataclass(frozen=True)
class Setting:
    """What the columns of one group have in common."""

    title: str
    stream: str = "seq-cifar100"
    memory: int = 1000
    scenario: Mapping[str, Any] = field(default_factory=dict)

    def specs(self, row: str, seeds: int = SEEDS, *, quick: bool = False) -> list[RunSpec]:
        """The runs of a row, one a seed; `quick`: their stand-ins on the embedded digits.

        >>> [spec.seed for spec in Setting("memory 200", memory=200).specs("ER", seeds=3)]
        [0, 1, 2]
        """
        method = METHODS[row]
        options = {**method.options, **method.on.get(self.stream, {})}
        specs = [
            RunSpec(method.learner, self.stream, self.memory, seed, options=options, scenario=self.scenario)
            for seed in range(seeds)
        ]
        return [stand_in(spec) for spec in specs] if quick else specs


@dataclass(frozen=True)
class Figure:
    """A figure as printed, and whether the paper marks it as the best or the second of its column."""

    value: Summary
    mark: str = ""


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper: a row for each method, a column for each metric in each setting.

    >>> table = paper_tables()["main"]
    >>> table.rows["PCL"][1]
    Figure(value=Summary(mean=54.98, sd=4.1, n=5), mark='best')
    >>> len(table.specs(learners=["pcl", "er"], seeds=1))
    6
    """

    title: str
    rows: Mapping[str, Sequence[Figure]]  # a figure for every metric in the first setting, then in the next
    settings: Sequence[Setting]
    metrics: Sequence[str] = ("aaa", "acc")
    underlines: bool = True  # the second best of each column
    note: str = ""

    def of(self, learners: Sequence[str] | None) -> list[str]:
        """The rows of some learners, or all."""
        return [row for row in self.rows if learners is None or METHODS[row].learner in learners]

    def specs(self, learners: Sequence[str] | None = None, seeds: int = SEEDS, *, quick: bool = False) -> list[RunSpec]:
        """The runs of all cells, which may share some."""
        rows = self.of(learners)
        return [spec for row in rows for setting in self.settings for spec in setting.specs(row, seeds, quick=quick)]


@cache
def paper_tables() -> dict[str, PaperTable]:
    """The paper's tables by name, as `tables.toml` has them.

    >>> list(paper_tables())[:3]
    ['main', 'buffers', 'corrupt']
    """
    return {name: _table(**parts) for name, parts in published().items() if name != "bounds"}


@cache
def published() -> dict[str, Any]:
    """`tables.toml` as it is."""
    return tomllib.loads(files("parabolic.experiments.paper").joinpath("tables.toml").read_text("utf-8"))


def _table(
    rows: dict[str, list[str]], settings: list[dict[str, Any]], scenario: dict[str, Any] | None = None, **others: Any
) -> PaperTable:
    return PaperTable(
        rows={row: [_figure(text) for text in cells] for row, cells in rows.items()},
        settings=[Setting(**{"scenario": scenario or {}, **each}) for each in settings],
        **others,
    )


def _figure(text: str) -> Figure:
    found = re.fullmatch(r"(\*\*|_|)([\d.]+)\1 ± ([\d.]+)", text)
    assert found is not None, text
    mark, mean, sd = found.groups()
    return Figure(Summary(float(mean), float(sd), SEEDS), {"**": "best", "_": "second", "": ""}[mark])
