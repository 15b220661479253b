"""What can watch a training: a callback is told when a run, a step or a task is done."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from torch import Tensor

from parabolic import metrics
from parabolic.checks import check_number
from parabolic.learners import Learner
from parabolic.streams import Stream

__all__ = ["Bar", "Callback", "ProgressBar", "State"]

MINUTE = 60.0  # seconds between two lines, where there is no terminal for a bar


@dataclass
class State:
    """Where a training stands; the same object is handed to every callback."""

    learner: Learner
    stream: Stream
    total_steps: int
    # Accuracy in percent, a row after each task, NaN where nothing is known yet; all classes seen so far compete.
    matrix: NDArray[np.float64]
    task_matrix: NDArray[np.float64]  # the same, where the task is told: its own classes alone compete
    task: int = 0
    step: int = 0  # steps done, over all tasks
    loss: Tensor | None = None  # of the last step, still on the device: reading it waits for the device
    # A value a task (one for all, where all are seen at once); of several side by side, each has an equal share.
    train_seconds: list[float] = field(default_factory=list)
    test_seconds: list[float] = field(default_factory=list)
    spent: float = 0.0  # seconds that a process that was stopped had trained on the present task
    resumed: int = 0  # how often such a process was followed by another
    error: Exception | None = None  # why it goes on no more, where others beside it do
    measured: dict[str, list[float]] = field(default_factory=dict)  # by measures of the user's own: as the seconds

    @property
    def metrics(self) -> dict[str, float]:
        """The figures of a training that has come to its end, by name; what was measured besides among them."""
        return metrics.summary(self.matrix, self.task_matrix, self.measured)

    @property
    def accuracy(self) -> float | None:
        """The mean accuracy over the tasks seen so far, or None before the first task is done."""
        done = int(np.isfinite(self.matrix.diagonal()).sum())
        return float(self.matrix[done - 1, :done].mean()) if done else None


class Callback:
    """Watches a training; override what you need."""

    def on_start(self, state: State) -> None:
        """Before the first step."""

    def on_step(self, state: State) -> None:
        """After every step. To keep the device busy, read `state.loss` only now and then."""

    def on_task(self, state: State) -> None:
        """After a task was learned and all tasks so far were tested."""

    def on_end(self, state: State) -> None:
        """After the last task."""

    def on_fail(self, state: State, error: BaseException) -> None:
        """In place of `on_end`, where a training goes on no more: it diverged, failed or was stopped."""


class Bar:
    """Bars of progress, each with a note, within a `with`.

    Where the output is not a terminal, as in a log, there is a line about once a minute instead.
    """

    def __init__(self, console: Console | None, time_left: ProgressColumn) -> None:
        self.console = console or Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            time_left,
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self._over = threading.Event()
        self._reporter: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.progress.start()
        self._over.clear()
        if self.progress.disable:
            self._reporter = threading.Thread(target=self._report, daemon=True)
            self._reporter.start()
        return self

    def _report(self) -> None:
        """Say now and then how far it is."""
        started = time.monotonic()
        while not self._over.wait(MINUTE):
            known = [each for each in self.progress.tasks if each.total is not None]
            told = [f"{each.description}: {each.completed:.0f} of {each.total:.0f} done" for each in known]
            notes = [each.fields["note"] for each in known]
            line = [", ".join(filter(None, each)) for each in zip(told, notes, strict=True)]
            if line:
                seconds = f"{time.monotonic() - started:.0f} s"
                self.console.print(f"{'; '.join(line)}; {seconds}", soft_wrap=True, highlight=False, markup=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._reporter is not None:
            self._reporter.join()
        self.progress.stop()


class ProgressBar(Bar, Callback):
    """A bar with task, steps, loss, accuracy so far and time left.

    It lives through several runs; where these are steps of something larger, `many` is of how many, and `count` tells
    how far that is.
    """

    def __init__(self, console: Console | None = None, *, many: int = 1, every: int = 20) -> None:
        check_number("every", every, whole=True, at_least=1)
        super().__init__(console, TimeRemainingColumn())
        self.every = every
        self.all = self.progress.add_task("", total=many, note="") if many > 1 else None
        self.one = self.progress.add_task("run", total=None, note="")
        self.title = ""

    def count(self, what: str, done: int, note: str = "") -> None:
        """Say how many of the larger steps are done."""
        if self.all is not None:
            self.progress.update(self.all, description=what, completed=done, note=note)

    def on_start(self, state: State) -> None:
        """Start the bar of a run."""
        self.progress.reset(self.one, total=state.total_steps, description=self.title or state.stream.name, note="")

    def on_step(self, state: State) -> None:
        """Move the bar, and now and then read the loss."""
        if state.step % self.every and state.step != state.total_steps:
            return
        if self.progress.disable:  # then nobody sees the loss, for which the device would have to be waited for
            self.progress.update(self.one, completed=state.step)
            return
        loss = f" loss {state.loss.item():.3f}" if state.loss is not None else ""
        accuracy = f" accuracy {state.accuracy:.1f} %" if state.accuracy is not None else ""
        note = f"task {state.task + 1}/{len(state.stream)}{loss}{accuracy}"
        self.progress.update(self.one, completed=state.step, note=note)
