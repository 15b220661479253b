"""Tables of results: which figure is the best of its column, and how the others compare with it over the seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from parabolic.statistics import Difference, Summary, average_ranks, paired, welch

__all__ = ["Cell", "Column", "Judged", "Results", "decimals", "marks"]

VERDICTS = ("higher", "lower", "no difference", "unknown")
ENOUGH = 3  # seeds in common: with two, hardly any gap is significant, and a mark would suggest that there is none
SMALL = 1e-3  # below, a mean that needs more digits is printed in scientific notation


@dataclass(frozen=True)
class Column:
    """A column: its heading, which values are better, and how many digits are shown."""

    title: str
    group: str = ""  # the heading that it shares with its neighbours
    better: str = "higher"  # or lower; or neither: then nothing is marked
    digits: int = 1
    spread_digits: int = 1


@dataclass(frozen=True)
class Cell:
    """A cell of a table: a figure for each seed, of which some may be missing, and the published figure.

    >>> Cell({0: 54.0, 1: 56.0}, wanted=5, published=Summary(54.98, 4.1, 5)).ours.mean
    55.0
    """

    by_seed: Mapping[int, float] = field(default_factory=dict)
    wanted: int = 0  # how many seeds there should be
    published: Summary | None = None
    shared: bool = False  # whether they are shares of the time of runs side by side, and so not independent
    diverged: int = 0  # how many runs diverged, and so have no figure

    @property
    def ours(self) -> Summary | None:
        """A summary of the figures that exist; nothing is filled in for missing ones."""
        if not self.by_seed:
            return None
        summary = Summary.of(list(self.by_seed.values()))
        return replace(summary, sd=math.nan) if self.shared else summary

    @property
    def difference(self) -> Difference | None:
        """Our figures against the published ones, by Welch's test."""
        return welch(self.ours, self.published) if self.ours and self.published else None

    def against(self, other: Cell) -> Difference | None:
        """This cell against another, paired over the seeds that both have."""
        if self.shared or other.shared:
            return None
        seeds = sorted(self.by_seed.keys() & other.by_seed.keys())
        return paired(*([cell.by_seed[seed] for seed in seeds] for cell in (self, other))) if seeds else None


@dataclass(frozen=True)
class Judged:
    """How a cell compares with the others of its column, and with the published figure."""

    mark: str = ""  # best or second
    behind: Difference | None = None  # against the best, paired over the seeds
    published_mark: str = ""
    verdict: str = "unknown"  # ours against the published figure: one of VERDICTS
    level: bool = False  # whether enough seeds do not show it to differ from the best


@dataclass(frozen=True)
class Results:
    """A table of results; `parabolic.report.formats` prints it."""

    name: str  # for programs
    title: str
    columns: Sequence[Column]
    rows: Mapping[str, Sequence[Cell]]
    notes: Sequence[str] = ()
    heading: str = ""  # of the rows' names
    underlines: bool = True  # the second best of each column
    ranked: bool = False  # whether the mean rank of each row over the columns is shown
    incomparable: str = ""  # why there can be no verdict against the published figures, if so
    keys: Mapping[str, Mapping[int, str]] = field(default_factory=dict)  # of the runs of a row, by seed

    @cached_property
    def judged(self) -> list[list[Judged]]:
        """The judgement on each cell, row by row."""
        by_column = [
            self._judge(column, [cells[j] for cells in self.rows.values()]) for j, column in enumerate(self.columns)
        ]
        return [[column[i] for column in by_column] for i in range(len(self.rows))]

    def ranks(self, whose: str = "ours") -> list[float]:
        """The mean rank of each row, by our figures or the `published` ones; NaN for all if a figure is missing."""
        rankable = [(j, column) for j, column in enumerate(self.columns) if column.better != "neither"]
        means = [
            [_printed_mean(column, getattr(cells[j], whose)) for j, column in rankable] for cells in self.rows.values()
        ]
        missing = [sum(map(math.isnan, row)) for row in means]
        # A row for which nothing was published does not take part in the ranking of published figures.
        complete = all(count == 0 or (count == len(rankable) and whose == "published") for count in missing)
        if not (self.ranked and rankable and complete):
            return [math.nan] * len(self.rows)
        return average_ranks(means, [column.better for _, column in rankable])

    def verdicts(self) -> dict[str, int]:
        """How many of the cells with a published figure have each verdict."""
        pairs = [pair for row in zip(self.rows.values(), self.judged, strict=True) for pair in zip(*row, strict=True)]
        counts = Counter(judged.verdict for cell, judged in pairs if cell.published)
        return {verdict: counts[verdict] for verdict in VERDICTS}

    def as_dict(self) -> dict[str, Any]:
        """The table and everything computed for it, as plain JSON values."""
        ours, published = self.ranks(), self.ranks("published")
        rows = [
            {
                "name": name,
                "rank": ours[i],
                "published_rank": published[i],
                **({"keys": self.keys[name]} if name in self.keys else {}),
                "cells": [
                    {
                        "by_seed": cell.by_seed,
                        "wanted": cell.wanted,
                        "diverged": cell.diverged,
                        "ours": cell.ours and {**asdict(cell.ours), "interval": cell.ours.interval},
                        "published": cell.published and asdict(cell.published),
                        "difference": cell.difference and asdict(cell.difference) if not self.incomparable else None,
                        **asdict(judged),
                    }
                    for cell, judged in zip(cells, self.judged[i], strict=True)
                ],
            }
            for i, (name, cells) in enumerate(self.rows.items())
        ]
        columns = [asdict(column) for column in self.columns]
        fields = {
            "name": self.name, "title": self.title, "columns": columns, "rows": rows, "verdicts": self.verdicts(),
            "notes": self.notes,
        }  # fmt: skip
        return {name: _plain(value) for name, value in fields.items()}

    def _judge(self, column: Column, cells: Sequence[Cell]) -> list[Judged]:
        ours, published = (
            marks([_printed_mean(column, getattr(cell, whose)) for cell in cells], column.better, self.underlines)
            for whose in ("ours", "published")
        )
        best = next((cell for cell, mark in zip(cells, ours, strict=True) if mark == "best"), None)
        judged = []
        for cell, mark, published_mark in zip(cells, ours, published, strict=True):
            behind = cell.against(best) if best is not None and mark != "best" else None
            verdict = cell.difference.verdict if cell.difference and not self.incomparable else "unknown"
            enough = best is not None and len(cell.by_seed.keys() & best.by_seed.keys()) >= ENOUGH
            level = enough and behind is not None and behind.verdict == "no difference"
            judged.append(Judged(mark, behind, published_mark, verdict, level))
        return judged


def marks(figures: Sequence[float], better: str = "higher", second: bool = True) -> list[str]:
    """Mark the best and the second best figures of a column; equal ones share a mark, and NaN has none.

    >>> marks([54.98, 52.81, 53.86])
    ['best', '', 'second']
    """
    distinct = sorted({figure for figure in figures if not math.isnan(figure)}, reverse=better == "higher")
    if better == "neither" or len(distinct) < 2:
        return [""] * len(figures)
    mark_of = {distinct[0]: "best"} | ({distinct[1]: "second"} if second else {})
    return [mark_of.get(figure, "") for figure in figures]


def decimals(column: Column, figure: Summary) -> int | None:
    """How many decimals of a mean are printed: the column's digits; None for scientific notation.

    A mean that would be printed as zero, and is not below its spread, has two significant digits: 0.026, or 2.6e-05.

    >>> [decimals(Column("Acc"), Summary(mean, 0.01, 5)) for mean in (60.0, 0.026, 0.0)]
    [1, 3, 1]
    """
    size = abs(figure.mean)
    if not 0 < size < 0.5 * 10**-column.digits or figure.sd > size:
        return column.digits
    return None if size < SMALL else 1 - math.floor(math.log10(size))


def _printed_mean(column: Column, figure: Summary | None) -> float:
    """The mean as it is printed, so that figures that look equal are equal; NaN if there is none."""
    if figure is None:
        return math.nan
    places = decimals(column, figure)
    return float(f"{figure.mean:.1e}") if places is None else round(figure.mean, places)


def _plain(value: Any) -> Any:
    """Replace NaN, which JSON does not have, by None."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
