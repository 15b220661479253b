"""Learners side by side, in a table and in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from parabolic.experiments import Record
from parabolic.report.tables import Cell, Column, Results

__all__ = ["by_seed", "comparison", "in_words"]

METRICS = {
    "acc": Column("Acc %"),
    "aaa": Column("AAA %"),
    "forgetting": Column("forgetting", better="lower"),
    "seconds": Column("seconds", better="lower"),
}


def comparison(runs: Mapping[str, Sequence[Record]], *, title: str, seeds: int, notes: Sequence[str] = ()) -> Results:
    """Learners against metrics, over the same seeds."""
    rows = {
        learner: [Cell(by_seed(records, name), wanted=seeds) for name in METRICS] for learner, records in runs.items()
    }
    return Results("comparison", title, list(METRICS.values()), rows, notes, heading="learner")


def in_words(runs: Mapping[str, Sequence[Record]]) -> str:
    """What a comparison shows, in a plain sentence or two."""
    acc, lost = (
        {learner: by_seed(records, name) for learner, records in runs.items() if records}
        for name in ("acc", "forgetting")
    )
    means = {learner: fmean(values.values()) for learner, values in acc.items()}
    ranked = sorted(means, key=lambda learner: -means[learner])
    if not ranked:
        return "There is nothing to compare."
    tasks = len(runs[ranked[0]][0].accuracy)
    told = ", ".join(f"{learner} {means[learner]:.0f} %" for learner in ranked)
    sentences = [f"After {tasks} tasks, this share of all test examples is classified correctly: {told}."]
    if len(ranked) > 1:
        first, second, *_, last = *ranked, ranked[-1]
        ahead = Cell(acc[first]).against(Cell(acc[second]))
        if ahead is not None and not math.isnan(ahead.p):
            sentences.append(
                f"On the same seeds {first} is {ahead.mean:.1f} points ahead of {second} "
                f"(95 % interval {ahead.low:.1f} to {ahead.high:.1f})."
            )
        sentences.append(
            f"Since it knew the earlier tasks best, {first} has lost {fmean(lost[first].values()):.0f} points on them, "
            f"{last} {fmean(lost[last].values()):.0f}."
        )
    return " ".join(sentences)


def by_seed(records: Sequence[Record], name: str) -> dict[int, float]:
    """A metric of some runs, or their training `seconds`, by seed."""
    return {
        record.spec["seed"]: sum(record.train_seconds) if name == "seconds" else record.metrics[name]
        for record in records
    }
