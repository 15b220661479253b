"""A monitor: observes a learner while it learns, in `train` or in any other loop."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Generator, Tensor

from parabolic.checks import check_number, first_line, invalid
from parabolic.engine.callbacks import Callback, State
from parabolic.engine.looks import TENTHS, Lines, Look
from parabolic.learners import Diverged, Learner, ReplayLearner
from parabolic.learners.accepting import as_tensor
from parabolic.learners.functional import draws_apart
from parabolic.memory import Memory
from parabolic.profile import bounds_of, examples_loss

__all__ = ["Monitor"]

FIRST_GUESS = 0.002  # assumed seconds for a bound, per example in memory, before one has been computed


class Book(Protocol):
    """Where figures are logged: a `Tracker`, or an entry that it opened."""

    def write(self, figures: Mapping[str, float], axis: str, at: int, /) -> None:
        """Log figures at a position on an axis."""


class Monitor(Callback):
    """Looks at a learner at regular intervals and reports what it finds to a function, a file or trackers.

    Pass it to `train` as a callback; in your own loop, call it after each step. Training is bit-identical with and
    without it. Between looks it only sums the loss, and does not wait for the device.

    Two figures require evaluating the model and may take long: the loss on memory (with its drift), and the bound. Each
    gets at most half of `share` of the time, and is left out of looks until that suffices. When the stream ends (in
    `train`, or at the end of a `with` block), a last look includes everything. Several learning threads may share a
    monitor: while one looks, the others wait. Do not hold the learner's lock when calling it: the look may need it.

    Args:
        every: steps from one look to the next.
        tell: called with each `Look`, for example `print` or a logger's `info`. By default, without a file or tracker,
            looks are printed to standard error.
        file: where to write looks, one line of JSON each; `parabolic watch FILE` shows them. New lines are appended; if
            the learner resumes from an earlier step, lines about later steps no longer count. The file may be moved
            away at any time.
        tracker: a `Tracker`, or one of its entries, to log the figures to.
        share: the largest share of the time to spend on evaluating the model; 1 for everything at every look.
        sample: how many examples of the memory the loss is computed on.
        follow: after how many evaluations of the loss on memory a new sample is taken to measure drift on.
        bound: how many points on the edge and inside of the memory's hull the bound is computed from; 0 for no bound.
        eps: squared radius of the balls around the memory, for the bound.
        seed: determines these points.

    >>> import torch
    >>> from parabolic import ER
    >>> learner, seen = ER(torch.nn.Linear(4, 3), memory=50), []
    >>> with Monitor(every=10, tell=seen.append) as monitor:
    ...     for _ in range(25):
    ...         loss = learner.observe(torch.randn(6, 4), torch.arange(6) % 3)
    ...         monitor(learner, loss)
    >>> [look.step for look in seen], sum(seen[-1].classes.values())
    ([10, 20, 25], 50)
    """

    def __init__(
        self,
        every: int = 100,
        *,
        tell: Callable[[Look], object] | None = None,
        file: str | Path | None = None,
        tracker: Book | None = None,
        share: float = 0.01,
        sample: int = 256,
        follow: int = 10,
        bound: int = 256,
        eps: float = 0.01,
        seed: int = 0,
    ) -> None:
        for name, value in (("every", every), ("sample", sample), ("follow", follow)):
            check_number(name, value, whole=True, at_least=1)
        check_number("share", share, at_least=0, at_most=1)
        for name, value in (("bound", bound), ("seed", seed)):
            check_number(name, value, whole=True, at_least=0)
        if bound == 1:
            raise invalid("bound", bound, "0 for none, or at least 2")
        check_number("eps", eps, above=0)
        if tell is not None and not callable(tell):
            raise invalid("tell", tell, "a function of a Look", "print, say")
        if file is not None and not Path(file).name:
            raise invalid("file", file, "the name of a file", "monitor.jsonl, say")
        if tracker is not None and not hasattr(tracker, "write"):
            raise invalid("tracker", tracker, "a Tracker, or an entry that one opened", 'Tracker("tensorboard"), say')
        self.every, self.share, self.sample, self.follow = every, share, sample, follow
        self.bound, self.eps, self.seed = bound, eps, seed
        self.tell, self.file, self.tracker = tell, None if file is None else Path(file).absolute(), tracker
        if tell is None and file is None and tracker is None:
            self.tell = partial(print, file=sys.stderr)
        self.last: Look | None = None
        self._lock = RLock()  # always acquired before the learner's lock
        self._learner: Learner | None = None  # None between streams
        self._accuracy: float | None = None

    # -- in your own loop --------------------------------------------------------------------------------

    def __call__(self, learner: Learner, loss: Tensor | float | None = None) -> None:
        """Call this after each step, with the loss it returned; takes a look if one is due."""
        with self._lock:
            self._start_observing(learner, done=1)
            if isinstance(loss, Tensor):
                if loss.numel() != 1:
                    raise invalid("loss", loss, "one number", "pass what `observe` returned")
                loss = loss.detach().double().reshape(())  # a long sum in half precision would stop growing
            if loss is not None:
                self._tally.total = self._tally.total + loss
                self._tally.losses += 1
            if not 0 <= learner.steps - self._tally.step < self.every:  # below 0: an earlier state was restored
                self._look(learner)

    def ahead(self, learner: Learner, x: Tensor, y: Tensor, answers: Tensor | None = None) -> None:
        """Test a batch before it is learned; the looks then say how many of the new examples were answered correctly.

        Every example is new to the learner at that time, so this is its accuracy on the stream as it is now. It falls
        at once if old labels become wrong, while the loss on memory is a loss on old labels. It costs a prediction per
        batch; you may test only some of them. If labels arrive late, `answers` are the classes predicted when the
        examples did: what was served is tested then, and nothing is predicted.
        """
        with self._lock:
            self._start_observing(learner)
            if not learner.error.of_classes:
                remedy = "its loss on a batch is what `observe` returns"
                raise invalid("learner", type(learner).__name__, "one that learns classes", remedy)
            labels = _labels("y", y, len(x), learner)
            # Locked, as a step of another thread draws from the same generators; if it has diverged, nothing is right.
            with learner._lock_to_read(), draws_apart(learner.device), suppress(Diverged):
                predicted = learner.predict(x) if answers is None else _labels("answers", answers, len(x), learner)
                self._tally.right.update(labels[predicted == labels].tolist())
            self._tally.tested.update(labels.tolist())

    def look(self, learner: Learner) -> Look:
        """Take a full look now, however long it takes."""
        with self._lock:
            self._start_observing(learner)
            return self._look(learner, everything=True)

    def close(self, how: str = "finished", why: str = "") -> None:
        """End the stream; the next call starts a new one."""
        with self._lock:
            if self._learner is None:
                return
            if self._lines is not None:
                self._lines.write("ended", {"step": self._learner.steps, "time": time.time(), "how": how, "why": why})
                self._lines.close()
            self._learner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._finish()
        else:
            self._break_off(error)

    # -- as a callback of `train` ------------------------------------------------------------------------

    def on_start(self, state: State) -> None:
        """Start observing a run."""
        learner = state.learner
        self._begin(learner, learner.steps, state.stream.name, learner.steps + state.total_steps - state.step)
        self._accuracy = state.accuracy

    def on_step(self, state: State) -> None:
        """Take a look if one is due."""
        self(state.learner, state.loss)

    def on_task(self, state: State) -> None:
        """Note the accuracy for the next look."""
        self._accuracy = state.accuracy

    def on_end(self, state: State) -> None:  # noqa: ARG002
        """Take a last, full look."""
        self._finish()

    def on_fail(self, state: State, error: BaseException) -> None:  # noqa: ARG002
        """Report that the run did not finish, and close the file."""
        self._break_off(error)

    # -- looks -------------------------------------------------------------------------------------------

    def _start_observing(self, learner: Learner, done: int = 0) -> None:
        """Start observing a learner, from before the `done` latest steps, unless it is already observed."""
        if not isinstance(learner, Learner):
            raise invalid("learner", type(learner), "a learner", "pass an estimator's learner_ or a journal's learner")
        if self._learner is None:
            self._begin(learner, max(learner.steps - done, 0))
        elif learner is not self._learner:
            remedy = "make a monitor for each learner, or close this one first"
            raise invalid("learner", type(learner).__name__, "the one that this monitor started with", remedy)

    def _begin(self, learner: Learner, step: int, stream: str = "", until: int | None = None) -> None:
        self.close("stopped")  # an earlier run that did not finish
        self._lines: Lines | None = None
        self._tally = _Tally(step)
        self._evaluations = 0  # of the loss on memory
        self._followed: _Followed | None = None
        self._loss_budget, self._bound_budget = _Budget(self.share / 2), _Budget(self.share / 2, FIRST_GUESS)
        # From here on `close` has something to end, also if Ctrl-C comes while the file is opened.
        self._learner, self.last, self._accuracy = learner, None, None
        if self.file is not None:
            self._lines = Lines(self.file)
            source = {"learner": learner.own_name(), "stream": stream, "until": until}
            self._lines.write("began", {"step": step, "time": time.time(), **source})

    def _finish(self) -> None:
        with self._lock:
            if self._learner is not None:
                try:
                    self._look(self._learner, everything=True)
                except BaseException as error:  # Ctrl-C, as a bound may take minutes
                    self._break_off(error)
                    raise
                self.close()

    def _break_off(self, error: BaseException) -> None:
        if isinstance(error, Exception):
            self.close("failed", first_line(error))
        else:  # Ctrl-C, sys.exit()
            self.close("stopped")

    def _look(self, learner: Learner, everything: bool = False) -> Look:
        tally, step = self._tally, learner.steps  # now: another thread may continue learning
        previous = self.last if self.last is not None and self.last.step == step else Look(step, 0.0)
        figures: dict[str, Any] = {
            "accuracy": self._accuracy,
            "loss": float(tally.total) / tally.losses if tally.losses else previous.loss,
            "ahead": 100 * tally.right.total() / tally.tested.total() if tally.tested else previous.ahead,
            "ahead_classes": tally.by_class() or previous.ahead_classes,
        }
        if isinstance(learner, ReplayLearner) and len(learner.past):
            with learner.lock:
                figures |= _composition(learner.past, learner.error.of_classes)
            if {"x", "y"} <= set(learner.past.fields):  # a method may store something else
                figures |= self._model_figures(learner, everything)
        look = Look(step, time.time(), **figures)
        self._tally, self.last = _Tally(step), look
        self._report(look)
        return look

    def _report(self, look: Look) -> None:
        if self.tell is not None:
            self.tell(look)
        if self._lines is not None:
            self._lines.write("look", look.as_dict())
        if self.tracker is not None:
            self.tracker.write(look.figures(), "step", look.step)

    def _model_figures(self, learner: ReplayLearner, everything: bool) -> dict[str, Any]:
        """The figures that require the model, within the time budget; if one fails, a note says why."""
        figures: dict[str, Any] = {}
        notes = []
        stored = len(learner.past)
        jobs = [
            ("loss on memory", self._loss_budget, min(stored, self.sample), self._memory_loss),
            ("bound", self._bound_budget, stored, self._bound),
        ]
        for name, budget, examples, compute in jobs if self.bound else jobs[:1]:
            if everything or budget.allows(examples):
                with budget.spending(examples):
                    try:
                        figures |= compute(learner)
                    except Exception as error:  # out of memory, say: monitoring must not stop training
                        notes.append(f"no {name}: {first_line(error)}")
        return figures | {"note": "; ".join(notes)}

    def _memory_loss(self, learner: ReplayLearner) -> dict[str, Any]:
        """The loss on memory, and the drift of the loss on the followed examples."""
        with learner.lock:
            stored, size = len(learner.past), min(self.sample, len(learner.past))
            rows = torch.arange(size, device=learner.device) * stored // size  # evenly spaced: no random draws
            x, y = (learner.past[name][rows] for name in ("x", "y"))
        loss = float(examples_loss(learner, x, y).mean())
        figures: dict[str, Any] = {"memory_loss": loss}
        if self._followed is not None:
            followed = self._followed
            figures |= {
                "drift": float(examples_loss(learner, followed.x, followed.y).mean()) - followed.loss,
                "since": followed.step,
            }
        if self._evaluations % self.follow == 0:
            self._followed = _Followed(x, y, loss, learner.steps)
        self._evaluations += 1
        return figures

    def _bound(self, learner: ReplayLearner) -> dict[str, Any]:
        """The bound of Proposition 1."""
        generator = Generator(learner.device).manual_seed(self.seed)
        past, _ = bounds_of(learner, eps=self.eps, samples=self.bound, generator=generator)
        return {"bound": past.bound}


@dataclass
class _Tally:
    """What was counted since the last look, or since the start."""

    step: int  # of the learner at that time
    total: Tensor | float = 0.0  # of the losses
    losses: int = 0
    right: Counter[int] = field(default_factory=Counter)  # of the examples tested ahead, by class
    tested: Counter[int] = field(default_factory=Counter)

    def by_class(self) -> dict[int, tuple[int, int]]:
        return {label: (self.right[label], count) for label, count in sorted(self.tested.items())}


@dataclass(frozen=True)
class _Followed:
    """Examples that were in memory at a step, and their mean loss at that step."""

    x: Tensor
    y: Tensor
    loss: float
    step: int


class _Budget:
    """A time budget: a share of the time since it was created."""

    def __init__(self, share: float, guess: float = 0.0) -> None:
        self.share, self.cost, self.spent = share, guess, 0.0  # cost: of an example, the last time
        self.began = time.perf_counter()

    def allows(self, examples: int) -> bool:
        if self.share >= 0.5:  # half of share=1: no limit
            return True
        return self.spent + self.cost * examples <= self.share * (time.perf_counter() - self.began)

    @contextmanager
    def spending(self, examples: int) -> Iterator[None]:
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self.cost, self.spent = seconds / examples, self.spent + seconds


def _labels(name: str, values: Any, count: int, learner: Learner) -> Tensor:
    labels = as_tensor(name, values, learner.device)
    if labels.shape != (count,):
        raise invalid(name, labels, f"{count} labels, one for each example")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:  # probabilities, say
        raise invalid(name, labels, "the numbers of classes, as integers", "scores become such by .argmax(1)")
    return labels.long()


def _composition(memory: Memory, of_classes: bool) -> dict[str, Any]:
    """The contents of a memory, by class and by age."""
    figures: dict[str, Any] = {"kept": len(memory), "capacity": memory.capacity, "offered": memory.offered}
    if of_classes and "y" in memory.fields:
        labels, counts = (tensor.tolist() for tensor in memory["y"].unique(return_counts=True))
        figures["classes"] = dict(zip(labels, counts, strict=True))
    ages = memory.ages
    ages = ages[ages < memory.offered]  # the other ages are unknown
    if len(ages):
        tenth = (memory.offered - 1 - ages) * TENTHS // memory.offered  # of arrival
        figures |= {"tenths": tenth.bincount(minlength=TENTHS).tolist(), "age": float(ages.double().mean())}
    return figures
