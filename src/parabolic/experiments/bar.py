"""A grid's progress in a terminal."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from rich.console import Console
from rich.progress import ProgressColumn, Task
from rich.text import Text

from parabolic.engine.callbacks import Bar
from parabolic.experiments.grid import Event

__all__ = ["GridBar"]


class GridBar(Bar):
    """A bar of the runs that ended, how many run and how many failed, and the time left: the `watch` of a grid."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console, _TimeLeft())
        self.counts: Counter[str] = Counter()
        self.task = self.progress.add_task("runs", total=None, note="")

    def __call__(self, event: Event) -> None:
        """Take note of what happened to a run; those that were there already are no part of the bar."""
        self.counts[event.what] += 1
        ended = self.counts["trained"] + self.counts["failed"]
        note = f"{self.counts['started'] - ended - self.counts['retried']} running"
        if self.counts["failed"]:
            note += f", {self.counts['failed']} failed"
        self.progress.update(self.task, completed=ended, total=ended + event.left, note=note)


class _TimeLeft(ProgressColumn):
    """The time left if the rest goes as what has been done. (Rich's own looks at the last half minute alone.)"""

    def render(self, task: Task) -> Text:
        if not (task.completed and task.remaining and task.elapsed):
            return Text("")
        seconds = task.elapsed / task.completed * task.remaining
        return Text(f"about {timedelta(seconds=round(seconds))} left", style="progress.remaining")
