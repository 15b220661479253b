"""Logs runs that have ended to trackers."""

from __future__ import annotations

from parabolic.engine import Tracker
from parabolic.engine.trackers import end_figures, run_name, task_figures
from parabolic.experiments.store import Record

__all__ = ["track_record"]


def track_record(tracker: Tracker, record: Record) -> None:
    """Log a run that has ended to trackers, such as one trained in a worker of a grid."""
    spec = record.spec
    name = run_name(spec["learner"], spec["stream"], spec.get("memory"), spec["seed"])
    entry = tracker.open(name, {"key": record.key, **spec, "environment": record.environment})
    times = list(zip(record.train_seconds, record.test_seconds, strict=False))
    task_rows = record.task_accuracy or [[]] * len(record.accuracy)
    for task, rows in enumerate(zip(record.accuracy, task_rows, strict=True)):
        last = min(task, len(times) - 1)  # tasks learned at once share one time
        measured = {name: values[last] for name, values in record.measured.items()}
        entry.write(task_figures(*rows, *times[last], measured), "task", task + 1)
    entry.write(end_figures(record.metrics), "task", len(record.accuracy))
    entry.close(failed=bool(record.diverged))
