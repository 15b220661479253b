"""Callbacks: notified when training starts, after each step and task, and at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from torch import Tensor

from parabolic import metrics
from parabolic.checks import check_number, invalid
from parabolic.learners import Learner
from parabolic.streams import Stream

__all__ = ["Bar", "Callback", "ProgressBar", "State", "as_callbacks"]

MINUTE = 60.0  # seconds between progress lines when the output is not a terminal


@dataclass
class State:
    """The state of a training run; every callback gets the same object."""

    learner: Learner
    stream: Stream
    total_steps: int
    # Accuracy in percent, one row per task, NaN where not measured (yet); all classes seen so far compete.
    matrix: NDArray[np.float64]
    task_matrix: NDArray[np.float64]  # the same if the task is known: only its own classes compete
    task: int = 0
    step: int = 0  # steps so far, over all tasks
    loss: Tensor | None = None  # of the last step, on the device: reading it waits for the device
    # One value per task (a single one if all tasks are learned at once); a fleet's time is split equally. Of a run that
    # diverges, the task in which it did counts as trained, but not as tested.
    train_seconds: list[float] = field(default_factory=list)
    test_seconds: list[float] = field(default_factory=list)
    spent: float = 0.0  # seconds of training on the current task before the run was resumed
    resumed: int = 0  # how often the run was resumed
    error: Exception | None = None  # why this run ended early while the others of its fleet continue
    measured: dict[str, list[float]] = field(default_factory=dict)  # by the user's own measures; lists as above
    # If asked for: in row i, the accuracies before task i was learned, on it and on those to come, like task_matrix.
    future: NDArray[np.float64] | None = None

    def __repr__(self) -> str:
        run = f"{self.learner.own_name()} on {self.stream.name}, seed {self.learner.seed}"
        position = f"task {self.task + 1} of {len(self.stream)}, step {self.step} of {self.total_steps}"
        accuracy = "" if self.accuracy is None else f", accuracy {self.accuracy:.1f} %"
        return f"State({run}: {position}{accuracy})"

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of a finished run by name, including the user's own measures."""
        return metrics.summary(self.matrix, self.task_matrix, self.measured, self.future)

    @property
    def accuracy(self) -> float | None:
        """The mean accuracy over the tasks seen so far, or None before the first test."""
        done = int(np.isfinite(self.matrix.diagonal()).sum())
        return float(self.matrix[done - 1, :done].mean()) if done else None


class Callback:
    """Observes training; override the methods you need."""

    def on_start(self, state: State) -> None:
        """Before the first step."""

    def on_step(self, state: State) -> None:
        """After every step. Reading `state.loss` waits for the device: do so only occasionally."""

    def on_task(self, state: State) -> None:
        """After a task has been learned and all tasks so far have been tested."""

    def on_end(self, state: State) -> None:
        """After the last task."""

    def on_fail(self, state: State, error: BaseException) -> None:
        """Instead of `on_end`, if training diverges, fails or is interrupted."""


def as_callbacks(callbacks: object) -> list[Callback]:
    """Return the callbacks as a list; raises an error for anything else, such as a single one.

    >>> as_callbacks(Callback())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    parabolic.checks.InputError: callbacks: got <...>, expected a list of Callbacks; as in callbacks=[Monitor()]
    """
    watchers = list(callbacks) if isinstance(callbacks, Iterable) else None
    if watchers is None or not all(isinstance(watcher, Callback) for watcher in watchers):
        raise invalid("callbacks", callbacks, "a list of Callbacks", "as in callbacks=[Monitor()]")
    return watchers


class Bar:
    """Progress bars, each with a note, as a context manager.

    If the output is not a terminal, as in a log, a line is printed about once a minute instead.
    """

    def __init__(self, console: Console | None, time_left: ProgressColumn) -> None:
        self.console = console or Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            time_left,
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self._closed = threading.Event()
        self._reporter: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.progress.start()
        self._closed.clear()
        if self.progress.disable:
            self._reporter = threading.Thread(target=self._report, daemon=True)
            self._reporter.start()
        return self

    def _report(self) -> None:
        """Print progress about once a minute."""
        started = time.monotonic()
        while not self._closed.wait(MINUTE):
            tasks = [task for task in self.progress.tasks if task.total is not None]
            counts = [f"{task.description}: {int(task.completed)} of {task.total:.0f} done" for task in tasks]
            notes = [task.fields["note"] for task in tasks]
            parts = [", ".join(filter(None, pair)) for pair in zip(counts, notes, strict=True)]
            if parts:
                seconds = f"{time.monotonic() - started:.0f} s"
                self.console.print(f"{'; '.join(parts)}; {seconds}", soft_wrap=True, highlight=False, markup=False)

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._reporter is not None:
            self._reporter.join()
        if not self.progress.disable:  # before version 14.3 of rich, a disabled bar too ends with an empty line
            self.progress.stop()


class ProgressBar(Bar, Callback):
    """A bar with task, steps, loss, accuracy so far and time left.

    One bar serves several runs. If they are part of something larger, `many` is the number of its parts, and `count`
    reports how many are done.
    """

    def __init__(self, console: Console | None = None, *, many: int = 1, every: int = 20) -> None:
        check_number("every", every, whole=True, at_least=1)
        super().__init__(console, TimeRemainingColumn())
        self.every = every
        self.all = self.progress.add_task("", total=many, note="") if many > 1 else None
        self.one = self.progress.add_task("run", total=None, note="")
        self.title = ""

    def count(self, what: str, done: int, note: str = "") -> None:
        """Report how many of the `many` parts are done."""
        if self.all is not None:
            self.progress.update(self.all, description=what, completed=done, note=note)

    def on_start(self, state: State) -> None:
        """Reset the bar for a new run."""
        self.progress.reset(self.one, total=state.total_steps, description=self.title or state.stream.name, note="")

    def on_step(self, state: State) -> None:
        """Advance the bar, and read the loss every `every` steps."""
        if state.step % self.every and state.step != state.total_steps:
            return
        if self.progress.disable:  # nobody would see the loss, and reading it waits for the device
            self.progress.update(self.one, completed=state.step)
            return
        loss = f" loss {state.loss.item():.3f}" if state.loss is not None else ""
        accuracy = f" accuracy {state.accuracy:.1f} %" if state.accuracy is not None else ""
        note = f"task {state.task + 1}/{len(state.stream)}{loss}{accuracy}"
        self.progress.update(self.one, completed=state.step, note=note)

    def on_end(self, state: State) -> None:
        """Say that the run is trained: the last look of a monitor may take longer than the training."""
        note = f"{self.progress.tasks[self.one].fields['note']} finishing".strip()
        self.progress.update(self.one, completed=state.total_steps, note=note)
