"""A grid's progress in a terminal."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from parabolic.experiments.grid import Event

__all__ = ["GridBar"]


class GridBar:
    """A bar of the runs that ended, how many run and how many failed, and the time left.

    It is the `watch` of a grid, within a `with`; where the output is not a terminal it is silent.
    """

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            _TimeLeft(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.counts: Counter[str] = Counter()
        self.task = self.progress.add_task("runs", total=None, note="")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

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
