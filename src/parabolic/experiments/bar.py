"""The progress bar of a grid."""

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
    """A bar with the numbers of runs that ended, run, diverged or failed, and the time left: a grid's `watch`."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console, _TimeLeft())
        self.counts: Counter[str] = Counter()
        self.task = self.progress.add_task("runs", total=None, note="")

    def __call__(self, event: Event) -> None:
        """Count an event; reused runs are not part of the bar."""
        self.counts[event.what] += 1
        ended = sum(self.counts[what] for what in ("trained", "diverged", "failed"))
        note = f"{self.counts['started'] - ended - self.counts['retried']} running"
        note += "".join(f", {self.counts[what]} {what}" for what in ("diverged", "failed") if self.counts[what])
        self.progress.update(self.task, completed=ended, total=ended + event.left, note=note)


class _TimeLeft(ProgressColumn):
    """The time left at the average speed so far. (Rich's own column considers only the last half minute.)"""

    def render(self, task: Task) -> Text:
        if not (task.completed and task.remaining and task.elapsed):
            return Text("")
        seconds = task.elapsed / task.completed * task.remaining
        return Text(f"about {timedelta(seconds=round(seconds))} left", style="progress.remaining")
