"""A fleet: learners that are trained side by side, on a GPU by CUDA graphs on a stream each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parabolic.checks import first_line, invalid, short_of_memory
from parabolic.engine.graphs import Graphs
from parabolic.learners import Learner
from parabolic.learners.whole import is_ours
from parabolic.streams import Stream

__all__ = ["Berth", "Fleet"]

SHEET = 1000  # test examples that are looked at together


class Berth:
    """The place of one learner on a device: there it steps and is tested, and what comes again is captured.

    All that is done in the berth is done on a stream of its own, so that several fill a GPU. A captured step does what
    the learner's own `step` does, to the bit.
    """

    def __init__(self, learner: Learner) -> None:
        self.learner, self.device = learner, learner.device
        self.graphs = Graphs(self.device, learner.generator)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._places: dict[Hashable, list[Tensor | None]] = {}  # where graphs find their inputs, by kind and shape
        # What a replayed step adds to which of the host's counters.
        self._counted: dict[Hashable, list[tuple[Any, str, int]]] = {}

    @property
    def manner(self) -> str:
        """How steps are done: "captured", or "eager" and why."""
        return f"eager: {self.graphs.why_not}" if self.graphs.why_not else "captured"

    def aside(self) -> AbstractContextManager[None]:
        """Do things in the berth while other berths do theirs; `Fleet.together` brings them together."""
        return torch.cuda.stream(self.stream)  # which does nothing where there is none

    def step(self, x: Tensor, y: Tensor, task: int | None = None) -> Tensor:
        """Let the learner learn from a batch; the loss, still on the device."""
        learner, graphs = self.learner, self.graphs
        if not learner.needs_tasks:
            task = None
        if graphs.why_not:
            return learner.step(x, y, task)
        number = None if task is None else torch.full((), task, device=self.device)
        given = self._place("step", x, y, number)
        key = ("step", x.shape, x.dtype, learner.phase(), learner.classes, _rates(learner), *_input_makers(learner))
        loss, replayed = self._run(key, partial(learner.step, *given))
        if replayed:
            for holder, name, more in self._counted[key]:
                setattr(holder, name, getattr(holder, name) + more)
        made: Tensor = loss
        return made

    def test(self, stream: Stream, row: int, size: int = SHEET) -> Tensor:
        """How many test examples of each task are told right after task `row`: all classes seen so far competing, and
        in a second row the task's own alone.
        """
        tasks = stream.tasks[: row + 1]
        rows = torch.cat([task.test_rows for task in tasks])
        # Counted for each task of the whole stream, and for what fills up a sheet: of one size all along.
        right = torch.zeros(2, len(stream) + 1, dtype=torch.long, device=self.device)
        sizes = torch.tensor([len(task.test_rows) for task in tasks])
        numbers = torch.repeat_interleave(sizes).to(rows.device)
        # Of each task, which classes compete: one after the other, as above.
        competing = torch.ones(2, len(stream) + 1, stream.classes, dtype=torch.bool)
        competing[0] = seen = _among(stream.seen(row), stream.classes)
        for task in tasks:
            competing[1, task.index] = seen & _among((*task.classes, *task.tested), stream.classes)
        competing = competing.to(self.device)
        # A prediction of a user's own may ask for what the host knows, such as how much is kept: no graph would notice.
        eager = self.graphs.why_not or type(self.learner).scores_at is not Learner.scores_at
        for some, number in zip(rows.split(size), numbers.split(size), strict=True):
            x, y = tasks[0].test.take(some)
            if eager:
                x, y, number = (each.to(self.device) for each in (x, y, number))
                _mark(self.learner, x, y, number, competing, right)
                continue
            if len(some) < size:  # one graph is to do for all
                x, y = (torch.cat([each, each[:1].expand(size - len(some), *each.shape[1:])]) for each in (x, y))
                number = torch.cat([number, number.new_full((size - len(some),), len(stream))])
            placed = self._place("test", x, y, number, competing, right)
            key = ("test", x.shape, x.dtype, competing.shape, *_input_makers(self.learner))
            self._run(key, partial(_mark, self.learner, *placed))
            right.copy_(placed[-1])
        return right[:, : row + 1]

    def adopt(self, learner: Learner) -> bool:
        """Start again from the state of another learner of the same making: what is captured serves it too.

        False, and nothing done, where that cannot be: an optimiser with a state of its own starts without one, what is
        captured has the first learner's `prepare` and `augment` in it, and of a class that is not ours nobody knows
        whether its `state_dict` is all that there is.
        """
        mine = self.learner
        if mine.optim.state or not is_ours(mine):
            return False
        if not (_alike(mine.prepare, learner.prepare) and _alike(mine.augment, learner.augment)):
            return False
        self.learner.load_state_dict(learner.state_dict())
        self.learner.seed = learner.seed
        return True

    def _run(self, key: tuple[Hashable, ...], work: Callable[[], Any]) -> tuple[Any, bool]:
        """Do work, by its graph where there is one; what it gave back, and whether that was a replay."""
        return (self._capture(key, work), False) if self.graphs.due(key) else self.graphs.run(key, work)

    def _capture(self, key: tuple[Hashable, ...], work: Callable[[], Any]) -> Any:
        """Do work and capture it; where that cannot be, say why and do without graphs from here on."""
        before = counters(self.learner)
        why_not = _on_host(self.learner)
        if not why_not:
            try:
                given, _ = self.graphs.run(key, work)
            except RuntimeError as error:
                if short_of_memory(error):
                    raise
                # Nothing has happened on the device: set the counters back.
                set_counters(self.learner, before)
                torch.cuda.synchronize(self.device)
                why_not = first_line(error)
        if why_not:
            self.graphs.why_not = f"{self.learner.own_name()}: its {key[0]} cannot be captured ({why_not})"
            warnings.warn(self.graphs.why_not, RuntimeWarning, stacklevel=3)
            given = work()
        else:
            holders = _holders(self.learner)
            self._counted[key] = [
                (holders[part], own, value - before[name])
                for name, value in counters(self.learner).items()
                for part, _, own in [name.rpartition(".")]
                if value != before[name]
            ]
        return given

    def _place(self, kind: str, *given: Tensor | None) -> list[Any]:
        """Copy inputs to where graphs find them."""
        key = (kind, *[None if each is None else (each.shape, each.dtype) for each in given])
        if key not in self._places:
            self._places[key] = [None if each is None else torch.empty_like(each, device=self.device) for each in given]
        for place, value in zip(self._places[key], given, strict=True):
            if place is not None and value is not None:
                place.copy_(value)
        return self._places[key]


class Fleet:
    """Learners on one device, each in a berth of its own. One is a fleet too.

    >>> from parabolic import ER
    >>> fleet = Fleet([ER(torch.nn.Linear(4, 3), memory=50, seed=seed) for seed in (0, 1)])
    >>> losses = [berth.step(torch.randn(8, 4), torch.arange(8) % 3) for berth in fleet.berths]
    >>> [learner.steps for learner in fleet.learners]
    [1, 1]
    """

    def __init__(self, learners: Sequence[Learner]) -> None:
        if not learners:
            raise invalid("learners", [], "at least one")
        self.device = learners[0].device
        if any(learner.device != self.device for learner in learners):
            raise invalid("learners", {str(each.device) for each in learners}, "all on one device")
        self.berths = [Berth(learner) for learner in learners]

    def __len__(self) -> int:
        return len(self.berths)

    @property
    def learners(self) -> list[Learner]:
        """The learners, in the order of their berths."""
        return [berth.learner for berth in self.berths]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what berths do aside: they begin after all that was done before, and end before what comes next."""
        if self.device.type != "cuda":
            yield
            return
        outside = torch.cuda.current_stream(self.device)
        streams = [berth.stream for berth in self.berths if berth.stream is not None]
        for stream in streams:
            stream.wait_stream(outside)
        try:
            yield
        finally:
            for stream in streams:
                outside.wait_stream(stream)

    def adopt(self, learners: Sequence[Learner]) -> bool:
        """Start again from the states of other learners of the same making; False where that cannot be."""
        if len(learners) != len(self):
            return False
        return all(berth.adopt(learner) for berth, learner in zip(self.berths, learners, strict=True))


def counters(learner: Learner) -> dict[str, int]:
    """The whole numbers that a learner and its parts keep on the host, by name."""
    return {
        f"{part}.{name}": value
        for part, holder in _holders(learner).items()
        for name, value in vars(holder).items()
        if isinstance(value, int) and not isinstance(value, bool)
    }


def set_counters(learner: Learner, values: dict[str, int]) -> None:
    """Set whole numbers on the host, named as in `counters`."""
    holders, now = _holders(learner), counters(learner)
    for name, value in values.items():
        if value != now[name]:  # what is the same may be fixed
            part, _, own = name.rpartition(".")
            setattr(holders[part], own, value)


def _holders(learner: Learner) -> dict[str, Any]:
    """The learner and those of its parts whose classes are this package's or derived from one: its memory, averages."""
    parts = {
        name: value
        for name, value in vars(learner).items()
        if name != "model"
        and hasattr(value, "__dict__")
        and any(base.__module__.startswith("parabolic.") for base in type(value).__mro__)
    }
    return {"": learner, **parts}


def _on_host(learner: Learner) -> str:
    """What a replay would leave behind: numbers that the optimiser counts on the host."""
    values = (value for state in learner.optim.state.values() for value in state.values())
    strays = any(isinstance(value, Tensor) and value.device != learner.device for value in values)
    return f"{type(learner.optim).__name__} counts on the host" if strays else ""


def _alike(one: object, other: object) -> bool:
    """Whether one is the other, or equal to it by a class of this package: of others nobody knows what == says."""
    return one is other or (type(one).__module__.startswith("parabolic.") and type(one) is type(other) and one == other)


def _input_makers(learner: Learner) -> tuple[int, int]:
    """What turns examples into inputs; a learner may be given another before its first step."""
    return id(learner.prepare), id(learner.augment)


def _rates(learner: Learner) -> Hashable:
    """The optimiser's numbers, which a captured step has in it as they were."""
    numbers = (float, int, tuple)  # tuples are such as Adam's betas
    return tuple(
        tuple(value for value in group.values() if isinstance(value, numbers)) for group in learner.optim.param_groups
    )


def _among(some: Sequence[int], classes: int) -> Tensor:
    return torch.isin(torch.arange(classes), torch.tensor(some))


def _mark(learner: Learner, x: Tensor, y: Tensor, task: Tensor, competing: Tensor, right: Tensor) -> None:
    scores = learner.scores_at(learner.inputs(x))[:, : competing.shape[-1]]
    answers = scores.masked_fill(~competing[:, task], -torch.inf).argmax(-1)  # a row with all seen, one with the task's
    right.index_add_(1, task, (answers == y).long())
