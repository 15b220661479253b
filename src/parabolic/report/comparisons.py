"""Learners side by side, in a table and in words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from parabolic.checks import Description, check_name, invalid
from parabolic.engine.measures import Measure
from parabolic.experiments import FailedRun, Record
from parabolic.report.runs import sees_all
from parabolic.report.tables import Cell, Column, Results
from parabolic.statistics import Summary

__all__ = [
    "FIGURES", "USUAL", "cell_of", "column_of", "comparison", "finished", "forgetting_sentences", "format_seconds",
    "gap_phrase", "have_heads", "in_words", "is_level", "joint_notes", "judged_by", "plural",
]  # fmt: skip

FIGURES = {
    "acc": Column("Acc %"),
    "aaa": Column("AAA %"),
    "forgetting": Column("forgetting", better="lower"),
    "backward_transfer": Column("backward transfer"),
    "task_acc": Column("Acc %, task told"),
    "task_aaa": Column("AAA %, task told"),
    "task_forgetting": Column("forgetting, task told", better="lower"),
    "task_backward_transfer": Column("backward transfer, task told"),
    "task_forward_transfer": Column("forward transfer, task told"),
    "seconds": Column("seconds", better="lower"),
}
"""The figures that a comparison can show: metrics, and the seconds of training."""

USUAL = ("acc", "aaa", "forgetting", "seconds")


def comparison(
    runs: Mapping[str, Sequence[Record]],
    *,
    title: str,
    seeds: int,
    notes: Sequence[str] = (),
    columns: Mapping[str, Column] | None = None,
) -> Results:
    """A table of learners against metrics, over the same seeds; `columns` are keyed by the names of the figures.

    By default these are the usual ones: if all runs have a head for each task, with the task told.
    Each learner has one run for each seed. Runs that diverged are counted beside the figures of the others.
    """
    _check_seeds(runs)
    if columns is None:
        heads = have_heads(record for records in runs.values() for record in records)
        columns = {name: FIGURES[name] for name in (judged_by(name, heads=heads) for name in USUAL)}
    rows = {learner: [cell_of(records, name, seeds) for name in columns] for learner, records in runs.items()}
    notes = [*notes, *joint_notes(runs), *_unmeasured_notes(runs, columns)]
    keys = {learner: {record.spec["seed"]: record.key for record in records} for learner, records in runs.items()}
    return Results("comparison", title, list(columns.values()), rows, notes, heading="learner", keys=keys)


def have_heads(runs: Iterable[Record | FailedRun]) -> bool:
    """Whether there are runs and each has a head for each task: scores of different tasks are then not comparable."""
    heads = [bool(run.spec.get("heads")) for run in runs]
    return bool(heads) and all(heads)


def judged_by(name: str, *, heads: bool) -> str:
    """The figure that runs are judged by: with a head for each task, the one with the task told, if there is one.

    >>> judged_by("acc", heads=True), judged_by("seconds", heads=True), judged_by("acc", heads=False)
    ('task_acc', 'seconds', 'acc')
    """
    return f"task_{name}" if heads and {name, f"task_{name}"} <= FIGURES.keys() else name


def column_of(name: str, measure: Measure | None = None) -> Column:
    """The column of a user's own measure, whose attribute `better` says which values are good: "higher" or "lower".

    Stored runs hold what was measured but not the measure; without it no value is marked as the best.

    >>> def calibration(state): ...
    >>> column_of("calibration", calibration).better
    'neither'
    """
    better = getattr(measure, "better", "neither")
    check_name(f"better of {name}", better, ("higher", "lower", "neither"))
    return Column(name, better=better, digits=3, spread_digits=3)


def _check_seeds(runs: Mapping[str, Sequence[Record]]) -> None:
    """Refuse several runs of a learner with the same seed, such as all of a store: only one of them would count."""
    for learner, records in runs.items():
        seed, count = Counter(record.spec["seed"] for record in records).most_common(1)[0] if records else (0, 0)
        if count > 1:
            remedy = "choose those on one stream, with one memory size and the same settings"
            raise invalid(f"runs of {learner}", Description(f"{count} with seed {seed}"), "one for each seed", remedy)


def _unmeasured_notes(runs: Mapping[str, Sequence[Record]], figures: Iterable[str]) -> list[str]:
    """A note on runs that lack one of the figures because it was not yet measured when they were trained."""
    # Only some rows may have a user's own measure, or the forward transfer.
    needed = {*figures} & FIGURES.keys() - {"seconds", "task_forward_transfer"}
    lacking = sum(not needed <= record.metrics.keys() for records in runs.values() for record in finished(records))
    reason = "trained before one of these figures was measured, and left out of its column: --again retrains all runs"
    return [f"{plural(lacking, 'run')} {'was' if lacking == 1 else 'were'} {reason}."] if lacking else []


def joint_notes(runs: Mapping[str, Sequence[Record]]) -> list[str]:
    """A note on learners that learn all tasks at once."""
    names = [name for name, records in runs.items() if _sees_all(records)]
    if not names:
        return []
    explanation = "all tasks at once: there is no forgetting, and AAA is that of the final model"
    return [f"{' and '.join(names)} learned {explanation}."]


def in_words(runs: Mapping[str, Sequence[Record]]) -> str:
    """What a comparison shows, in a few plain sentences: with a head for each task, when the task is told."""
    _check_seeds(runs)
    diverged = {learner: len(records) - len(finished(records)) for learner, records in runs.items()}
    heads = have_heads(record for records in runs.values() for record in records)
    runs = {learner: finished(records) for learner, records in runs.items()}
    competing = "the task told" if heads else "all classes competing"
    acc = {learner: _by_seed(records, judged_by("acc", heads=heads)) for learner, records in runs.items() if records}
    means = {learner: fmean(values.values()) for learner, values in acc.items()}
    ranked = sorted(means, key=lambda learner: -means[learner])
    if not ranked:
        return "There is nothing to compare."
    tasks = len(runs[ranked[0]][0].accuracy)
    accuracies = ", ".join(
        f"{learner} {means[learner]:.0f} %" + f" ({diverged[learner]} diverged)" * bool(diverged[learner])
        for learner in ranked
    )
    sentences = [f"After {plural(tasks, 'task')}, the mean accuracy over them, {competing}, is: {accuracies}."]
    if len(ranked) > 1:
        first, second, *_, last = *ranked, ranked[-1]
        gap = Cell(acc[first]).against(Cell(acc[second]))
        if gap is not None and not math.isnan(gap.p):
            sentences.append(
                f"On the same seeds {gap_phrase(first, gap.mean, second)} "
                f"(95 % interval {gap.low:z.1f} to {gap.high:z.1f})."
            )
        if tasks > 1:
            name = judged_by("forgetting", heads=heads)
            lost = {learner: cell_of(runs[learner], name).ours for learner in (first, last)}
            sentences += forgetting_sentences(lost)
    return " ".join(sentences)


def forgetting_sentences(lost: Mapping[str, Summary | None], digits: int = 0, between: str = ", ") -> list[str]:
    """A sentence on what methods have forgotten, by name; none if they have no forgetting.

    >>> forgetting_sentences({"er": Summary(5.0, 1.0, 3), "joint": None, "sgd": Summary(98.2, 2.0, 3)})
    ['On the earlier tasks er has lost 5 points against its best before the end, sgd has lost 98 points.']
    """
    phrases = [
        f"{name} has {_forgetting_phrase(summary.mean, digits)}"
        for name, summary in lost.items()
        if summary is not None
    ]
    if not phrases:
        return []
    losses = between.join([f"{phrases[0]} against its best before the end", *phrases[1:]])
    return [f"On the earlier tasks {losses}."]


def cell_of(records: Sequence[Record], name: str, wanted: int = 0, published: Summary | None = None) -> Cell:
    """A metric of some runs, or their training `seconds`; those of all tasks at once neither forget nor transfer."""
    if name in FIGURES and name.endswith(("forgetting", "_transfer")) and _sees_all(records):
        return Cell(published=published)
    shared = name == "seconds" and any(record.environment.get("fleet", 1) != 1 for record in records)
    diverged = len(records) - len(finished(records))
    return Cell(_by_seed(records, name), wanted, published, shared, diverged)


def finished(records: Iterable[Record]) -> list[Record]:
    """The runs that did not diverge, and so have figures."""
    return [record for record in records if not record.diverged]


def gap_phrase(one: str, points: float, other: str) -> str:
    """How far one is ahead of another, to the digit that is printed.

    >>> gap_phrase("er", 4.51, "pcl"), gap_phrase("er", -1.0, "pcl"), gap_phrase("er", 0.04, "pcl")
    ('er is 4.5 points ahead of pcl', 'er is 1.0 points behind pcl', 'there is no difference between er and pcl')
    """
    if is_level(points):
        return f"there is no difference between {one} and {other}"
    return f"{one} is {abs(points):.1f} points {'ahead of' if points > 0 else 'behind'} {other}"


def is_level(points: float) -> bool:
    """Whether a difference is zero, to the digit that is printed."""
    return f"{points:z.1f}" == "0.0"


def _forgetting_phrase(points: float, digits: int = 0) -> str:
    """Forgetting in words; if negative, it is a gain.

    >>> _forgetting_phrase(1.2), _forgetting_phrase(-9.0), _forgetting_phrase(-0.3), _forgetting_phrase(2.04, 1)
    ('lost 1 point', 'gained 9 points', 'lost 0 points', 'lost 2.0 points')
    """
    number = f"{abs(points):.{digits}f}"
    return f"{'gained' if points < 0 and float(number) else 'lost'} {number} point{'s' * (number != '1')}"


def format_seconds(seconds: float) -> str:
    """Seconds to a tenth, or to two significant digits if that would be zero.

    >>> format_seconds(12.34), format_seconds(0.0264)
    ('12.3', '0.026')
    """
    return f"{seconds:.2g}" if 0 < seconds < 0.05 else f"{seconds:.1f}"


def plural(number: int, what: str) -> str:
    """A number of things, in the singular or plural.

    >>> plural(1, "task"), plural(2, "task")
    ('1 task', '2 tasks')
    """
    return f"{number} {what}" + ("s" if number != 1 else "")


def _sees_all(records: Sequence[Record]) -> bool:
    return any(sees_all(str(record.spec.get("learner"))) for record in records[:1])


def _by_seed(records: Sequence[Record], name: str) -> dict[int, float]:
    done = finished(records)
    if name == "seconds":
        return {record.spec["seed"]: sum(record.train_seconds) for record in done}
    return {record.spec["seed"]: record.metrics[name] for record in done if name in record.metrics}
