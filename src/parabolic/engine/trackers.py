"""Trackers: what a training tells is written down where its people look for it, and never stands in its way."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from types import TracebackType
from typing import Any, Self

from parabolic.checks import check_name, check_number, first_line
from parabolic.engine.callbacks import Callback, State
from parabolic.engine.logs import TRACKERS, Log, check_installed
from parabolic.files import file_name
from parabolic.learners import ReplayLearner
from parabolic.options import options_of

__all__ = ["Entry", "Tracker", "end_figures", "run_name", "task_figures"]

PATIENCE = 30.0  # seconds that the end of a run waits for a tracker


class Tracker(Callback):
    """Writes loss, accuracies and times of a training to one or several of `TRACKERS`, with what determines the run.

    It is told of a run as any callback is; `open` is for those that come from elsewhere. Each tracker works in a thread
    of its own. One that is not installed or fails is reported once and left alone from then on; the training goes on.
    As a context manager it also closes, as failed, what does not come to its end.

    Args:
        kinds: names of `TRACKERS`, in a list or with commas between them.
        folder: where they write, unless their own variables (`MLFLOW_TRACKING_URI`, `WANDB_MODE`, ...) say otherwise.
        settings: what determines the run; the learner's options, the stream and the seed by default.
        every: after how many steps the loss is read, which waits for the device.
        warn: told what went wrong with a tracker; a warning by default.

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
        names = [name.strip() for name in kinds.split(",")] if isinstance(kinds, str) else list(kinds)
        for name in names:
            check_name("tracker", name, TRACKERS)
            check_installed(name)
        self.settings, self.every = settings, every
        check_number("every", every, whole=True, at_least=1)
        warn = warn or (lambda text: warnings.warn(text, RuntimeWarning, stacklevel=4))
        self._desks = [_Desk(name, Path(folder).absolute(), warn) for name in names]
        self._entries: dict[int, Entry] = {}  # of the runs that this callback watches, by their state

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for entry in self._entries.values():
            entry.close(failed=True)
        self._entries.clear()
        self.finish()

    def open(self, name: str, settings: Mapping[str, Any]) -> Entry:
        """Begin to write about a run."""
        return Entry(self._desks, file_name(name), _flat(settings))

    def write(self, figures: Mapping[str, float], axis: str, at: int) -> None:
        """Write down more figures of the run that this callback watches, such as a `Monitor` has."""
        for entry in self._entries.values():
            entry.write(figures, axis, at)

    def finish(self) -> None:
        """Wait, for a while, until all is written."""
        for desk in self._desks:
            desk.finish()

    def on_start(self, state: State) -> None:
        """Open an entry for the run."""
        learner, stream = state.learner, state.stream
        own = {"learner": learner.own_name(), "stream": stream.name, "seed": learner.seed}
        options = {name: getattr(learner, name) for name in options_of(type(learner))}
        memory = learner.past.capacity if isinstance(learner, ReplayLearner) else None
        name = run_name(learner.own_name(), stream.name, memory, learner.seed)
        self._entries[id(state)] = self.open(name, self.settings or {**own, "options": options})

    def on_step(self, state: State) -> None:
        """Now and then, write down the loss."""
        if state.loss is not None and (state.step % self.every == 0 or state.step == state.total_steps):
            self._entries[id(state)].write({"loss": state.loss.item()}, "step", state.step)

    def on_task(self, state: State) -> None:
        """Write down the accuracies after a task, and its times."""
        row, task_row = (each[state.task, : state.task + 1].tolist() for each in (state.matrix, state.task_matrix))
        measured = {name: values[-1] for name, values in state.measured.items()}
        told = task_figures(row, task_row, state.train_seconds[-1], state.test_seconds[-1], measured)
        self._entries[id(state)].write(told, "task", state.task + 1)

    def on_end(self, state: State) -> None:
        """Write down the metrics, and close the entry."""
        entry = self._entries.pop(id(state))
        entry.write(end_figures(state.metrics), "task", len(state.stream))
        entry.close()
        if not self._entries:
            self.finish()

    def on_fail(self, state: State, error: BaseException) -> None:  # noqa: ARG002
        """Close the entry as one of a run that failed."""
        if (entry := self._entries.pop(id(state), None)) is not None:
            entry.close(failed=True)
        if not self._entries:
            self.finish()


class Entry:
    """A run, as all trackers of a `Tracker` are told of it; its methods come back at once."""

    _numbers = itertools.count()

    def __init__(self, desks: Sequence[_Desk], name: str, settings: Mapping[str, str]) -> None:
        self._desks, self._number = desks, next(self._numbers)
        for desk in desks:
            desk.open(self._number, name, settings)

    def write(self, figures: Mapping[str, float], axis: str, at: int) -> None:
        """Write down some figures at a place of an axis."""
        for desk in self._desks:
            desk.write(self._number, dict(figures), axis, at)

    def close(self, failed: bool = False) -> None:
        """The run is over."""
        for desk in self._desks:
            desk.close(self._number, failed)


def task_figures(
    row: Sequence[float],
    task_row: Sequence[float],
    train_seconds: float,
    test_seconds: float,
    measured: Mapping[str, float],
) -> dict[str, float]:
    """What is written down after a task; `task_row` is where the task is told, and may be missing.

    >>> task_figures([90.0, 70.0], [], 1.5, 0.5, {})["accuracy/so_far"]
    80.0
    """
    told = {f"measured/{name}": value for name, value in measured.items()}
    for group, figures in (("accuracy", row), ("task_accuracy", task_row)):
        if figures:
            told[f"{group}/so_far"] = sum(figures) / len(figures)
            told |= {f"{group}/task_{task + 1}": value for task, value in enumerate(figures)}
    return {**told, "seconds/training": train_seconds, "seconds/testing": test_seconds}


def run_name(learner: str, stream: str, memory: int | None, seed: int) -> str:
    """What trackers call a run.

    >>> run_name("er", "seq-digits", 200, 0), run_name("sgd", "seq-digits", None, 0)
    ('er-seq-digits-memory200-seed0', 'sgd-seq-digits-seed0')
    """
    return "-".join([learner, stream, *([] if memory is None else [f"memory{memory}"]), f"seed{seed}"])


def end_figures(summary: Mapping[str, float]) -> dict[str, float]:
    """What is written down at the end: the metrics."""
    return {f"metrics/{name}": value for name, value in summary.items()}


class _Desk:
    """One tracker at work, in a thread: what is asked of it is done in turn, and nothing more once it has failed."""

    def __init__(self, kind: str, folder: Path, warn: Callable[[str], object]) -> None:
        self._kind, self._folder, self._warn = kind, folder, warn
        self._jobs: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._logs: dict[int, Log] = {}
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._off = False  # it has failed, and that was said

    def open(self, number: int, name: str, settings: Mapping[str, str]) -> None:
        make = TRACKERS[self._kind]
        self._do(lambda: self._logs.__setitem__(number, make(name, settings, self._folder)))

    def write(self, number: int, figures: Mapping[str, float], axis: str, at: int) -> None:
        self._do(lambda: self._logs[number].write(figures, axis, at))

    def close(self, number: int, failed: bool) -> None:
        self._do(lambda: self._logs.pop(number).close(failed))

    def finish(self) -> None:
        done, end = Event(), time.monotonic() + PATIENCE
        self._do(done.set)
        while not (self._off or done.wait(0.05)):
            if time.monotonic() > end:
                self._error = TimeoutError(f"no answer within {PATIENCE:g} s")
            self._look()

    def _do(self, job: Callable[[], object]) -> None:
        self._look()
        if self._off:
            return
        if self._thread is None:
            self._thread = Thread(target=self._work, name=f"tracker {self._kind}", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _look(self) -> None:
        """Say what went wrong: here, since a warning in a thread of its own would be nobody's."""
        if self._error is not None and not self._off:
            self._off = True
            said = first_line(self._error)
            self._warn(f"tracker {self._kind}: {type(self._error).__name__}: {said}; the run goes on without it")

    def _work(self) -> None:
        try:
            while True:
                self._jobs.get()()
        except Exception as error:
            self._error = error


def _flat(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings as texts, those of groups as `group.name`."""
    told: dict[str, str] = {}
    for name, value in settings.items():
        inner = {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, Mapping) else {name: value}
        told |= {key: str(each) for key, each in inner.items()}
    return told
