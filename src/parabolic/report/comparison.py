"""Learners side by side, in a table and in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from parabolic.experiments import Record
from parabolic.report.tables import Cell, Column, Results
from parabolic.statistics import Summary

__all__ = ["cell_of", "comparison", "in_words", "many"]

METRICS = {
    "acc": Column("Acc %"),
    "aaa": Column("AAA %"),
    "forgetting": Column("forgetting", better="lower"),
    "seconds": Column("seconds", better="lower"),
}


def comparison(runs: Mapping[str, Sequence[Record]], *, title: str, seeds: int, notes: Sequence[str] = ()) -> Results:
    """Learners against metrics, over the same seeds."""
    rows = {learner: [cell_of(records, name, seeds) for name in METRICS] for learner, records in runs.items()}
    return Results("comparison", title, list(METRICS.values()), rows, notes, heading="learner")


def in_words(runs: Mapping[str, Sequence[Record]]) -> str:
    """What a comparison shows, in a plain sentence or two."""
    acc, lost = (
        {learner: _by_seed(records, name) for learner, records in runs.items() if records}
        for name in ("acc", "forgetting")
    )
    means = {learner: fmean(values.values()) for learner, values in acc.items()}
    ranked = sorted(means, key=lambda learner: -means[learner])
    if not ranked:
        return "There is nothing to compare."
    tasks = len(runs[ranked[0]][0].accuracy)
    told = ", ".join(f"{learner} {means[learner]:.0f} %" for learner in ranked)
    sentences = [f"After {many(tasks, 'task')}, the mean accuracy over them, all classes competing, is: {told}."]
    if len(ranked) > 1:
        first, second, *_, last = *ranked, ranked[-1]
        ahead = Cell(acc[first]).against(Cell(acc[second]))
        if ahead is not None and not math.isnan(ahead.p):
            sentences.append(
                f"On the same seeds {first} is {ahead.mean:z.1f} points ahead of {second} "
                f"(95 % interval {ahead.low:z.1f} to {ahead.high:z.1f})."
            )
        mine, theirs = (round(fmean(lost[learner].values())) for learner in (first, last))
        sentences.append(
            f"Since it knew the earlier tasks best, {first} has lost {many(mine, 'point')} on them, {last} {theirs}."
        )
    return " ".join(sentences)


def cell_of(records: Sequence[Record], name: str, wanted: int = 0, published: Summary | None = None) -> Cell:
    """A metric of some runs, or their training `seconds`."""
    shared = name == "seconds" and any(record.environment.get("fleet", 1) != 1 for record in records)
    return Cell(_by_seed(records, name), wanted, published, shared)


def many(number: int, what: str) -> str:
    """A number of things.

    >>> many(1, "task"), many(2, "task")
    ('1 task', '2 tasks')
    """
    return f"{number} {what}" + ("s" if number != 1 else "")


def _by_seed(records: Sequence[Record], name: str) -> dict[int, float]:
    return {
        record.spec["seed"]: sum(record.train_seconds) if name == "seconds" else record.metrics[name]
        for record in records
    }
