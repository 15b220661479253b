"""The progress bar of a grid."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from rich.console import Console
from rich.progress import ProgressColumn, Task
from rich.text import Text

from parabolic.engine.callbacks import Bar
from parabolic.experiments.grid import Event
from parabolic.experiments.spec import RunSpec

__all__ = ["GridBar"]


class GridBar(Bar):
    """A bar with the numbers of runs that ended, run, diverged or failed, and the time left.

    The bar is a grid's `watch`, and `reach` its `progress`.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console, _TimeLeft())
        self.counts: Counter[str] = Counter()
        self.left = 0  # how many runs have not ended
        self.shares: dict[str, float] = {}  # how much is done of each run in progress, by key
        self.task = self.progress.add_task("runs", total=None, note="")

    def __call__(self, event: Event) -> None:
        """Count an event; reused runs are not part of the bar."""
        self.counts[event.what] += 1
        self.left = event.left
        self.shares.pop(event.spec.key, None)
        self._update()

    def reach(self, spec: RunSpec, share: float) -> None:
        """Show the progress of a run."""
        self.shares[spec.key] = share
        self._update()

    def _update(self) -> None:
        ended = sum(self.counts[what] for what in ("trained", "diverged", "failed"))
        running, done = self.counts["started"] - ended - self.counts["retried"], sum(self.shares.values())
        note = f"{running} running" + (f", {100 * done / running:.0f} % through" if self.shares else "")
        note += "".join(f", {self.counts[what]} {what}" for what in ("diverged", "failed") if self.counts[what])
        self.progress.update(self.task, completed=ended + done, total=ended + self.left, note=note)


class _TimeLeft(ProgressColumn):
    """The time left at the average speed so far. (Rich's own column considers only the last half minute.)"""

    def render(self, task: Task) -> Text:
        if not (task.completed and task.remaining and task.elapsed):
            return Text("")
        seconds = task.elapsed / task.completed * task.remaining
        return Text(f"about {timedelta(seconds=round(seconds))} left", style="progress.remaining")
