"""Trackers: the figures of a run, logged to TensorBoard, MLflow or Weights & Biases without delaying training."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Self

from parabolic.checks import check_name, check_number, first_line, invalid
from parabolic.engine.callbacks import Callback, State
from parabolic.engine.logs import TRACKERS, Log, check_installed
from parabolic.files import file_name
from parabolic.learners import ReplayLearner
from parabolic.options import dotted, options_of

__all__ = ["Entry", "Tracker", "end_figures", "run_name", "task_figures"]

PATIENCE = 30.0  # seconds to wait for a tracker at the end of a run


class Tracker(Callback):
    """Logs loss, accuracies and times of a run, with its settings, to one or more of `TRACKERS`.

    Pass it to `train` as a callback; `open` is for runs from elsewhere. Each tracker works in its own thread. One that
    fails is reported once and not used again, and training continues; one that is not installed raises an error here.
    As a context manager it also closes unfinished runs, as failed.

    Args:
        kinds: names of `TRACKERS`, as a list or separated by commas.
        folder: where they write, unless their own variables (`MLFLOW_TRACKING_URI`, `WANDB_MODE`, ...) say otherwise.
        settings: what determines the run; by default the learner's options, the stream and the seed.
        every: how many steps there are between readings of the loss, each of which waits for the device.
        warn: called with a text when a tracker fails; by default a warning is issued.

    >>> Tracker("tensorboard,mlfow")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    parabolic.checks.InputError: tracker: got 'mlfow', expected one of ... did you mean 'mlflow'?
    """

    def __init__(
        self,
        kinds: str | Sequence[str],
        folder: str | Path = "tracked",
        *,
        settings: Mapping[str, Any] | None = None,
        every: int = 20,
        warn: Callable[[str], object] | None = None,
    ) -> None:
        names = [name.strip() for name in kinds.split(",")] if isinstance(kinds, str) else kinds
        if not isinstance(names, Iterable):
            raise invalid("kinds", kinds, f"names of trackers: {', '.join(TRACKERS)}", 'as in Tracker("tensorboard")')
        for name in names:
            check_name("tracker", name, TRACKERS)
            check_installed(name)
        check_number("every", every, whole=True, at_least=1)
        self.settings, self.every = settings, every
        warn = warn or (lambda text: warnings.warn(text, RuntimeWarning, stacklevel=4))
        self._workers = [_Worker(name, Path(folder).absolute(), warn) for name in names]
        self._open: list[Entry] = []
        self._entries: dict[int, Entry] = {}  # of the runs in progress, by the id of their state

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for entry in [*self._open]:
            entry.close(failed=True)
        self._entries.clear()
        self.finish()

    def open(self, name: str, settings: Mapping[str, Any]) -> Entry:
        """Open an entry for a run, to be closed at its end: until then a tracker may hold back figures."""
        texts = {setting: str(value) for setting, value in dotted(settings).items()}
        return Entry(self._workers, self._open, file_name(name) or "run", texts)

    def write(self, figures: Mapping[str, float], axis: str, at: int) -> None:
        """Log more figures to the open entries, such as those of a `Monitor`."""
        for entry in self._open:
            entry.write(figures, axis, at)

    def finish(self) -> None:
        """Wait for pending writes, up to 30 seconds per tracker."""
        for worker in self._workers:
            worker.finish()

    def on_start(self, state: State) -> None:
        """Open an entry for the run."""
        learner, stream = state.learner, state.stream
        identity = {"learner": learner.own_name(), "stream": stream.name, "seed": learner.seed}
        options = {name: getattr(learner, name) for name in options_of(type(learner))}
        memory = learner.past.capacity if isinstance(learner, ReplayLearner) else None
        name = run_name(learner.own_name(), stream.name, memory, learner.seed)
        self._entries[id(state)] = self.open(name, self.settings or {**identity, "options": options})

    def on_step(self, state: State) -> None:
        """Log the loss every `every` steps."""
        if state.loss is not None and (state.step % self.every == 0 or state.step == state.total_steps):
            self._entries[id(state)].write({"loss": state.loss.item()}, "step", state.step)

    def on_task(self, state: State) -> None:
        """Log the accuracies and times after a task."""
        row, task_row = (matrix[state.task, : state.task + 1].tolist() for matrix in (state.matrix, state.task_matrix))
        measured = {name: values[-1] for name, values in state.measured.items()}
        figures = task_figures(row, task_row, state.train_seconds[-1], state.test_seconds[-1], measured)
        self._entries[id(state)].write(figures, "task", state.task + 1)

    def on_end(self, state: State) -> None:
        """Log the metrics, and close the entry."""
        entry = self._entries.pop(id(state))
        entry.write(end_figures(state.metrics), "task", len(state.stream))
        entry.close()
        if not self._entries:
            self.finish()

    def on_fail(self, state: State, error: BaseException) -> None:  # noqa: ARG002
        """Close the entry as failed."""
        if (entry := self._entries.pop(id(state), None)) is not None:
            entry.close(failed=True)
        if not self._entries:
            self.finish()


class Entry:
    """A run in all trackers of a `Tracker`; its methods return at once."""

    _numbers = itertools.count()

    def __init__(
        self, workers: Sequence[_Worker], still_open: list[Entry], name: str, settings: Mapping[str, str]
    ) -> None:
        self._workers, self._open, self._number = workers, still_open, next(self._numbers)
        still_open.append(self)
        for worker in workers:
            worker.open(self._number, name, settings)

    def write(self, figures: Mapping[str, float], axis: str, at: int) -> None:
        """Log figures at a position on an axis."""
        for worker in self._workers:
            worker.write(self._number, dict(figures), axis, at)

    def close(self, failed: bool = False) -> None:
        """End the run, unless it has been closed."""
        if self in self._open:
            self._open.remove(self)
            for worker in self._workers:
                worker.close(self._number, failed)


def task_figures(
    row: Sequence[float],
    task_row: Sequence[float],
    train_seconds: float,
    test_seconds: float,
    measured: Mapping[str, float],
) -> dict[str, float]:
    """The figures to log after a task; `task_row` has the accuracies with known tasks, and may be empty.

    >>> task_figures([90.0, 70.0], [], 1.5, 0.5, {})["accuracy/so_far"]
    80.0
    """
    figures = {f"measured/{name}": value for name, value in measured.items()}
    for group, accuracies in (("accuracy", row), ("task_accuracy", task_row)):
        if accuracies:
            figures[f"{group}/so_far"] = sum(accuracies) / len(accuracies)
            figures |= {f"{group}/task_{task + 1}": value for task, value in enumerate(accuracies)}
    return {**figures, "seconds/training": train_seconds, "seconds/testing": test_seconds}


def run_name(learner: str, stream: str, memory: int | None, seed: int) -> str:
    """The name of a run in trackers.

    >>> run_name("er", "seq-digits", 200, 0), run_name("sgd", "seq-digits", None, 0)
    ('er-seq-digits-memory200-seed0', 'sgd-seq-digits-seed0')
    """
    return "-".join([learner, stream, *([] if memory is None else [f"memory{memory}"]), f"seed{seed}"])


def end_figures(summary: Mapping[str, float]) -> dict[str, float]:
    """The figures to log at the end: the metrics."""
    return {f"metrics/{name}": value for name, value in summary.items()}


class _Worker:
    """One tracker with its thread, which does its jobs in order; after a failure it does no more."""

    def __init__(self, kind: str, folder: Path, warn: Callable[[str], object]) -> None:
        self._kind, self._folder, self._warn = kind, folder, warn
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()  # None ends the thread
        self._logs: dict[int, Log] = {}
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._stopped = False  # whether it has failed and was reported

    def open(self, number: int, name: str, settings: Mapping[str, str]) -> None:
        make = TRACKERS[self._kind]
        self._submit(lambda: self._logs.__setitem__(number, make(name, settings, self._folder)))

    def write(self, number: int, figures: Mapping[str, float], axis: str, at: int) -> None:
        self._submit(lambda: self._logs[number].write(figures, axis, at))

    def close(self, number: int, failed: bool) -> None:
        self._submit(lambda: self._logs.pop(number).close(failed))

    def finish(self) -> None:
        """Wait for the jobs so far; without an open log, the thread ends, and the next job starts another."""
        done, end = Event(), time.monotonic() + PATIENCE
        self._submit(done.set)
        while not (self._stopped or done.wait(0.05)):
            if time.monotonic() > end:
                self._error = TimeoutError(f"no answer within {PATIENCE:g} s")
            self._report_error()
        if not self._logs:
            self._jobs.put(None)
            self._thread = None

    def _submit(self, job: Callable[[], object]) -> None:
        self._report_error()
        if self._stopped:
            return
        if self._thread is None:
            self._thread = Thread(target=self._run_jobs, name=f"tracker {self._kind}", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _report_error(self) -> None:
        """Report an error here, in the caller's thread: a warning from the tracker's thread would point nowhere."""
        if self._error is not None and not self._stopped:
            self._stopped = True
            message = first_line(self._error)
            self._warn(f"tracker {self._kind}: {type(self._error).__name__}: {message}; the run continues without it")

    def _run_jobs(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
        except Exception as error:
            self._error = error
