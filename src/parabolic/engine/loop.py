"""The loop: every task is learned in one go, then all tasks so far are tested."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from parabolic.checks import InputError, invalid
from parabolic.engine.callbacks import Callback, State
from parabolic.learners import Learner
from parabolic.streams import Batches, Stream, Task

__all__ = ["Diverged", "accuracy", "train"]


class Diverged(RuntimeError):
    """The loss is no longer a finite number."""


def train(
    learner: Learner,
    stream: Stream,
    *,
    batch: int = 32,
    epochs: int = 1,
    callbacks: Iterable[Callback] = (),
) -> State:
    """Let a learner go through a stream; what comes back holds the accuracy matrix and the times.

    >>> from parabolic import ER, make_stream
    >>> from parabolic.backbones import MLP
    >>> stream = make_stream("seq-digits")
    >>> learner = ER(MLP(stream.shape, stream.classes), prepare=stream.prepare)
    >>> state = train(learner, stream, batch=10)
    >>> state.matrix.shape, state.step
    ((5, 5), 146)
    """
    _check_fit(learner, stream)
    stream = stream.to(learner.device)
    visits = _visits(learner, stream, batch, epochs)
    size = len(stream)
    state = State(learner, stream, sum(len(visit.batches) for visit in visits), np.full((size, size), np.nan))
    with _threads_for(learner):
        _go_through(visits, state, list(callbacks))
    return state


class Visit(NamedTuple):
    """Batches that are learned in one go, and the rows of the accuracy matrix that are filled in after them."""

    batches: Batches
    rows: list[int]


def _go_through(visits: list[Visit], state: State, watchers: list[Callback]) -> None:
    learner, stream = state.learner, state.stream
    for watcher in watchers:
        watcher.on_start(state)
    for visit in visits:
        state.task = visit.rows[-1]
        started = _now(learner.device)
        _learn(learner, visit.batches, state, watchers)
        trained = _now(learner.device)
        for row in visit.rows:
            seen = stream.seen(row)
            for task in stream.tasks[: row + 1]:
                state.matrix[row, task.index] = accuracy(learner, task, seen)
        state.train_seconds.append(trained - started)
        state.test_seconds.append(_now(learner.device) - trained)
        for watcher in watchers:
            watcher.on_task(state)
    for watcher in watchers:
        watcher.on_end(state)


def _visits(learner: Learner, stream: Stream, batch: int, epochs: int) -> list[Visit]:
    if learner.sees_all:
        return [Visit(stream.together(batch, epochs), list(range(len(stream))))]
    return [Visit(task.batches(batch, epochs), [task.index]) for task in stream]


def _learn(learner: Learner, batches: Batches, state: State, watchers: list[Callback]) -> None:
    """Learn one visit's batches, and stop with a clear error if the loss is no longer a number."""
    if state.stream.boundaries:
        learner.start_task(batches)
    for x, y in batches:
        state.loss = learner.step(x, y, state.task if learner.needs_tasks else None)
        state.step += 1
        for watcher in watchers:
            watcher.on_step(state)
    if state.stream.boundaries:
        learner.end_task(batches)
    if state.loss is not None and not torch.isfinite(state.loss):
        raise Diverged(
            f"the loss became {state.loss.item()} in task {state.task + 1} of {state.stream.name}, "
            f"by step {state.step}: lower lr (now {learner.lr:g})"
        )


def accuracy(learner: Learner, task: Task, classes: list[int]) -> float:
    """The share of a task's test examples, in percent, that are told right with `classes` competing."""
    competing = torch.tensor(classes, device=learner.device)
    right = torch.zeros((), dtype=torch.long, device=learner.device)
    for x, y in task.test_batches():
        right += (competing[learner.scores(x)[:, competing].argmax(-1)] == y).sum()
    return 100 * right.item() / len(task.test_rows)


def _check_fit(learner: Learner, stream: Stream) -> None:
    """Refuse a learner that cannot take this stream, before the first step."""
    if learner.needs_tasks and not stream.boundaries:
        remedy = "use a learner that needs no tasks: `parabolic list` tells"
        raise invalid("learner", learner.name, f"one that can do without tasks, as {stream.name} has none", remedy)
    try:
        scores = learner.scores(stream[0].train.x[:1].to(learner.device))
    except InputError:
        raise
    except RuntimeError as error:
        raise invalid("model", type(learner.model), f"a module for {list(stream.shape)}", str(error)) from error
    if scores.ndim != 2 or scores.shape[1] < stream.classes:
        raise invalid("model", scores, f"a score for each of the {stream.classes} classes of {stream.name}")


@contextmanager
def _threads_for(learner: Learner) -> Iterator[None]:
    """One thread for a small network on a CPU.

    More only wait for each other, by a factor of twenty where other work keeps the cores busy; and the outcome then
    depends on how many there are, as sums are split among them.
    """
    before = torch.get_num_threads()
    small = sum(weight.numel() for weight in learner.model.parameters()) < 1_000_000
    if learner.device.type == "cpu" and small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _now(device: torch.device) -> float:
    """The time, once the device has done all that it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
