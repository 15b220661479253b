"""The training loop: each task is learned in turn, and then all tasks so far are tested."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice, product
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parabolic.checks import Description, check_call, first_line, invalid, short_of_memory
from parabolic.engine.callbacks import Callback, State, as_callbacks
from parabolic.engine.checkpoints import Checkpoints, Progress
from parabolic.engine.feed import feed, on_device
from parabolic.engine.fleet import Berth, Fleet
from parabolic.engine.measures import Measure, append_measures, check_measures
from parabolic.engine.stops import PutOff
from parabolic.engine.threads import threads_for
from parabolic.learners import Diverged, Learner
from parabolic.learners.functional import draws_apart, has_batch_norm
from parabolic.learners.moving import copy_model
from parabolic.streams import Batches, Stream

__all__ = ["DeviceFailed", "Diverged", "train", "train_fleet"]

LOOK = 100  # steps between checks of the losses, each of which waits for the device


class DeviceFailed(RuntimeError):
    """The device ran out of memory, or was lost."""


def train(
    learner: Learner,
    stream: Stream,
    *,
    batch: int = 32,
    epochs: int = 1,
    callbacks: Iterable[Callback] = (),
    measures: Mapping[str, Measure] | None = None,
    future: bool = False,
) -> State:
    """Train a learner on a stream; the returned state has the accuracy matrix and the times.

    A learner without its own `prepare` or `augment` takes over the stream's, permanently. If it has already learned
    without them it is refused, as its inputs would change their meaning.

    After each task every function in `measures` is called with the state, and the number it returns is appended to
    `state.measured` under its name; those of a dict of numbers as `MEASURE.NAME`.

    With `future`, tasks are also tested before they are learned: `state.future[i, j]` is the accuracy on task j before
    task i was learned, for j from i on, with only the classes of task j competing. This gives the forward transfer.

    >>> from parabolic import ER, make_stream
    >>> from parabolic.backbones import MLP
    >>> stream = make_stream("seq-digits")
    >>> learner = ER(MLP(stream.shape, stream.classes))
    >>> state = train(learner, stream, batch=10)
    >>> learner.prepare == stream.prepare
    True
    >>> state.matrix.shape, state.step
    ((5, 5), 146)
    >>> bool((state.task_matrix >= state.matrix)[-1].all())  # it is easier to tell the classes of one task apart
    True
    """
    usage = "as in train(learner, stream, batch=32)"
    alternative = f"{usage}; for batches of your own call learner.observe(x, y) in a loop"
    for name, value, kind, remedy in (("learner", learner, Learner, usage), ("stream", stream, Stream, alternative)):
        if not isinstance(value, kind):
            raise invalid(name, type(value), f"a {kind.__name__}", remedy)
    (state,) = train_fleet(
        Fleet([learner]), [stream], batch=batch, epochs=epochs, callbacks=callbacks, measures=measures, future=future
    )
    if state.error is not None:
        raise state.error
    return state


@torch.inference_mode(False)
def train_fleet(
    fleet: Fleet,
    streams: Sequence[Stream],
    *,
    batch: int = 32,
    epochs: int = 1,
    callbacks: Iterable[Callback] = (),
    measures: Mapping[str, Measure] | None = None,
    future: bool = False,
    checkpoints: Checkpoints | None = None,
    progress: Sequence[Progress] = (),
) -> list[State]:
    """Train the learners of a fleet side by side, each on its own stream; all streams must have the same batch sizes.

    If a learner diverges, its `state.error` is set and the others continue. Learners resumed from checkpoints, all at
    the same position in the stream, continue from their `progress`: on a CPU, as if never stopped. As in `train`,
    learners take over a missing `prepare` or `augment` from their streams.
    """
    if len(streams) != len(fleet) or not all(isinstance(stream, Stream) for stream in streams):
        raise invalid("streams", streams, f"a list of {len(fleet)} Streams, one for each learner")
    watchers = as_callbacks(callbacks)
    measures = {} if measures is None else measures
    check_measures(measures)
    # A resumed run continues with the draws that it was saved with: the checks must not use up any of them.
    with draws_apart(fleet.device), ExitStack() as undo:  # if a learner is refused
        for learner, stream in zip(fleet.learners, streams, strict=True):
            undo.callback(vars(learner).update, prepare=learner.prepare, augment=learner.augment)
            _adopt_inputs(learner, stream)
            _check_fit(learner, stream)
        streams = on_device(streams, fleet.device)
        pairs = list(zip(fleet.learners, streams, strict=True))
        plans = [_visits(learner, stream, batch, epochs) for learner, stream in pairs]
        if len({tuple((visit.sizes, *visit.rows) for visit in plan) for plan in plans}) > 1:
            raise invalid("streams", [stream.name for stream in streams], "the same number and sizes of batches")
        undo.pop_all()
    states = [
        State(learner, stream, sum(len(visit.batches) for visit in plan), *np.full((2, *[len(stream)] * 2), np.nan))
        for (learner, stream), plan in zip(pairs, plans, strict=True)
    ]
    for state in states:
        if future and not state.learner.sees_all:  # which learns all tasks at once
            state.future = np.full((len(state.stream),) * 2, np.nan)
    for state, position in zip(states, progress, strict=bool(progress)):
        position.apply(state)
    try:
        with threads_for(fleet.learners[0]), _device_errors(states):
            _run_plans(fleet, plans, states, watchers, measures, checkpoints)
    except BaseException as error:
        _report_failures(states, watchers, error)
        raise
    _report_failures([state for state in states if state.error is not None], watchers)
    return states


def _report_failures(states: Iterable[State], watchers: list[Callback], error: BaseException | None = None) -> None:
    for state in states:
        reason = state.error or error
        assert reason is not None
        for watcher in watchers:
            watcher.on_fail(state, reason)


class Visit(NamedTuple):
    """Batches to learn without interruption, and the rows of the accuracy matrix to fill in after them."""

    batches: Batches
    rows: list[int]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """What learners trained side by side must have in common."""
        return len(self.batches.rows), self.batches.size, self.batches.epochs


def _run_plans(
    fleet: Fleet,
    plans: list[list[Visit]],
    states: list[State],
    watchers: list[Callback],
    measures: Mapping[str, Measure],
    checkpoints: Checkpoints | None,
) -> None:
    for state, watcher in product(states, watchers):
        watcher.on_start(state)
    finished = len(states[0].train_seconds)  # visits finished before a resume; `done`: batches of the next one
    done = states[0].step - sum(len(visit.batches) for visit in plans[0][:finished])
    for visits in islice(zip(*plans, strict=True), finished, None):
        rows = visits[0].rows
        for state in states:
            state.task = rows[-1]
        begun = _now(fleet.device)
        if states[0].future is not None and not done:
            with fleet.together():
                _test_ahead(fleet, states, rows[0])
            if not _active_states(states):
                return
        started, learning = _now(fleet.device), _active_states(states)
        with fleet.together():
            _learn(fleet, [visit.batches for visit in visits], states, watchers, done, checkpoints)
        done, trained = 0, _now(fleet.device)
        for state in learning:  # also if it has just diverged
            state.train_seconds.append(state.spent + (trained - started) / len(states))
            state.spent = 0.0
        if not _active_states(states):
            return
        for row in rows:
            with fleet.together():
                _test(fleet, states, row)
        tested = _now(fleet.device)
        if not _active_states(states):
            return
        for state in _active_states(states):
            state.test_seconds.append((started - begun + tested - trained) / len(states))
        for berth, state in zip(fleet.berths, states, strict=True):
            if state.error is None:
                with berth.on_stream():
                    append_measures(measures, state)
        for state, watcher in product(_active_states(states), watchers):
            watcher.on_task(state)
        if checkpoints is not None:
            checkpoints.keep(fleet, states)
    for state, watcher in product(_active_states(states), watchers):
        watcher.on_end(state)


def _learn(
    fleet: Fleet,
    todo: list[Batches],
    states: list[State],
    watchers: list[Callback],
    done: int,
    checkpoints: Checkpoints | None,
) -> None:
    """Learn the batches of one visit, all learners side by side; the first `done` were learned before a resume."""
    started = time.perf_counter()
    runs = list(zip(fleet.berths, states, todo, strict=True))
    for berth, state, batches in runs:
        if state.stream.boundaries and not done:
            with berth.on_stream():
                state.learner.start_task(batches.once())
    with ExitStack() as stack:
        sources = [stack.enter_context(closing(feed(batches.after(done), fleet.device))) for batches in todo]
        stop = stack.enter_context(PutOff())  # stop only between steps
        for _ in range(len(todo[0]) - done):
            for (berth, state, _), source in zip(runs, sources, strict=True):
                with berth.on_stream():
                    state.loss = berth.step(*next(source), state.task)
                    if state.error is None:
                        state.step += 1
                        for watcher in watchers:
                            watcher.on_step(state)
            if max(state.step for state in states) % LOOK == 0 and not _check_losses(fleet, states):
                return
            if checkpoints is not None:
                checkpoints.keep(fleet, states, since=started, now=stop.asked)
            stop.obey()
    if _check_losses(fleet, states):
        for berth, state, batches in runs:
            if state.stream.boundaries:
                with berth.on_stream():
                    state.learner.end_task(batches.once())


def _test(fleet: Fleet, states: list[State], row: int) -> None:
    """Fill in a row of each learner's accuracy matrices."""
    for state, accuracies in _accuracies(fleet, states, partial(Berth.test, row=row), slice(row + 1)):
        state.matrix[row, : row + 1], state.task_matrix[row, : row + 1] = accuracies


def _test_ahead(fleet: Fleet, states: list[State], row: int) -> None:
    """Fill in a row of each learner's `future`: the accuracies before task `row` is learned."""
    for state, accuracies in _accuracies(fleet, states, partial(Berth.test_ahead, row=row), slice(row, None)):
        assert state.future is not None
        state.future[row, row:] = accuracies


def _accuracies(
    fleet: Fleet, states: list[State], test: Callable[[Berth, Stream], Tensor], tasks: slice
) -> Iterator[tuple[State, NDArray[np.float64]]]:
    """The accuracies of each learner on some tasks, in percent; one whose scores are NaN has diverged, and has none."""
    results = []
    for berth, state in zip(fleet.berths, states, strict=True):
        with berth.on_stream():
            results.append(test(berth, state.stream))
    for berth, state, right in zip(fleet.berths, states, results, strict=True):
        with berth.on_stream():
            counts = np.array(right.tolist())
        if counts.min() < 0:
            state.error = state.error or _divergence(state, "the scores became NaN")
        else:
            yield state, 100 * counts / [len(task.test_rows) for task in state.stream.tasks[tasks]]


def _check_losses(fleet: Fleet, states: list[State]) -> bool:
    """Set the error of runs whose loss is not finite; returns whether any run continues. Waits for the device."""
    for berth, state in zip(fleet.berths, states, strict=True):
        with berth.on_stream():
            loss = 0.0 if state.loss is None else state.loss.item()
        if state.error is None and not math.isfinite(loss):
            state.error = _divergence(state, f"the loss became {loss}")
    return bool(_active_states(states))


def _divergence(state: State, symptom: str) -> Diverged:
    return Diverged(
        f"{_run_label(state)}: {symptom} in task {state.task + 1}, by step {state.step}: "
        f"lower lr (now {state.learner.lr:g}) or set clip_norm"
    )


def _active_states(states: list[State]) -> list[State]:
    return [state for state in states if state.error is None]


def _visits(learner: Learner, stream: Stream, batch: int, epochs: int) -> list[Visit]:
    if learner.sees_all:
        visits = [Visit(stream.together(batch, epochs), list(range(len(stream))))]
    else:
        visits = [Visit(task.batches(batch, epochs), [task.index]) for task in stream]
    if any(len(batches.rows) % batch == 1 for batches, _ in visits) and _fails_on_single(learner, stream):
        visits = [Visit(replace(batches, joined=True), rows) for batches, rows in visits]
    return visits


@torch.no_grad()
def _fails_on_single(learner: Learner, stream: Stream) -> bool:
    """Whether batch norm fails on a single example, as with feature maps of 1 × 1."""
    if not has_batch_norm(learner.model):
        return False
    model = copy_model(learner.model).train()  # so that its statistics do not change
    try:
        model(learner.inputs(stream[0].train.x[:1].to(learner.device)))
    except ValueError:
        return True
    return False


def _adopt_inputs(learner: Learner, stream: Stream) -> None:
    """Give a learner the `prepare` and `augment` that it lacks; refuse one that has learned without them."""
    for name, arguments in (("prepare", ("x",)), ("augment", ("x", "generator"))):
        function = getattr(stream, name)
        if function is None or getattr(learner, name) is not None:
            continue
        if learner.steps:
            got = Description(f"none, in a learner that has made {learner.steps} steps without it")
            remedy = (
                f"create the learner with {name}=stream.{name}; or, to continue without it, train on "
                f"dataclasses.replace(stream, {name}=None)"
            )
            raise invalid(name, got, f"that of {stream.name}, from the first step on", remedy)
        check_call(name, function, *arguments)
        setattr(learner, name, function)


def _check_fit(learner: Learner, stream: Stream) -> None:
    """Raise an error, before the first step, if a learner cannot be trained on this stream."""
    for method, required in learner.overridden().items():
        remedy = f"override {required}, or write your own loop over the stream"
        got, expected = Description("an override"), f"one of {required}, which this loop calls"
        raise invalid(f"{method} of {type(learner).__name__}", got, expected, remedy)
    if learner.needs_tasks and not stream.boundaries:
        alternative = "a stream without `blur` (one of your own: with boundaries=True)"
        remedy = f"use a learner that needs no tasks (see `parabolic list`), or {alternative}"
        expected = f"one that needs no tasks, as {stream.name} does not say where they begin and end"
        raise invalid("learner", learner.own_name(), expected, remedy)
    if not learner.error.of_classes:
        remedy = "call its `observe` in your own loop"
        raise invalid("criterion", learner.criterion, f"a loss of classes, as {stream.name} has class labels", remedy)
    scores = learner.scores(stream[0].train.x[:1])
    if scores.shape[1] < stream.classes:
        raise invalid("model", scores, f"a score for each of the {stream.classes} classes of {stream.name}")
    if learner.classes is not None and learner.classes < stream.classes:  # the others would never be predicted
        expected = f"at least {stream.classes}, as {stream.name} has"
        raise invalid("classes", learner.classes, expected, "leave it out, or call learner.grow")


@contextmanager
def _device_errors(states: list[State]) -> Iterator[None]:
    """Name the runs and the step in errors of the device."""
    try:
        yield
    except RuntimeError as error:
        if short_of_memory(error):
            remedy = "train fewer runs at once, or smaller batches"
        elif isinstance(error, torch.AcceleratorError):
            remedy = "start again: finished runs are kept"
        else:
            raise
        label = _run_label(states[0]) + (f" and {len(states) - 1} beside it" if len(states) > 1 else "")
        position = f"task {states[0].task + 1}, after step {states[0].step}"
        raise DeviceFailed(f"{label}: the device failed in {position}: {first_line(error)} ({remedy})") from error


def _run_label(state: State) -> str:
    return f"{state.learner.own_name()} on {state.stream.name}, seed {state.learner.seed}"


def _now(device: torch.device) -> float:
    """The time, after waiting for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
