"""A fleet: learners trained side by side; on a GPU, each with its own CUDA stream and graphs."""

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
from parabolic.learners.whole import is_built_in
from parabolic.streams import Stream, Task

__all__ = ["Berth", "Fleet"]

SHEET = 1000  # test examples per batch
MANY = 2**40  # more than a task has test examples


class Berth:
    """One learner's place on a device: runs its steps and tests, and captures repeated work as CUDA graphs.

    Each berth has its own CUDA stream, so that several fill a GPU. A captured step is bit-identical to the learner's
    own `step`.
    """

    def __init__(self, learner: Learner) -> None:
        self.learner, self.device = learner, learner.device
        self.graphs = Graphs(self.device, learner.generator)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._buffers: dict[Hashable, list[Tensor | None]] = {}  # the graphs' input buffers, by kind and shape
        # For each captured step: the counters on the host that a replay must advance, and by how much.
        self._increments: dict[Hashable, list[tuple[Any, str, int]]] = {}

    @property
    def mode(self) -> str:
        """How steps are executed: "captured", or "eager" with the reason."""
        return f"eager: {self.graphs.why_not}" if self.graphs.why_not else "captured"

    def on_stream(self) -> AbstractContextManager[None]:
        """A context in which work goes to this berth's CUDA stream; `Fleet.together` synchronises the streams."""
        return torch.cuda.stream(self.stream)  # does nothing if the stream is None

    def step(self, x: Tensor, y: Tensor, task: int | None = None) -> Tensor:
        """Train the learner on a batch; returns the loss, on the device."""
        learner, graphs = self.learner, self.graphs
        if not learner.needs_tasks:
            task = None
        if graphs.why_not:
            return learner.step(x, y, task)
        number = None if task is None else torch.full((), task, device=self.device)
        inputs = self._fill_buffers("step", x, y, number)
        constants = (learner.phase(), learner.classes, _hyperparameters(learner), *_input_function_ids(learner))
        key = ("step", x.shape, x.dtype, y.shape, y.dtype, *constants)
        loss: Tensor
        loss, replayed = self._run(key, partial(learner.step, *inputs))
        if replayed:
            for holder, name, increment in self._increments[key]:
                setattr(holder, name, getattr(holder, name) + increment)
        return loss

    def test(self, stream: Stream, row: int, size: int = SHEET) -> Tensor:
        """The number of correct test examples of each task so far, after task `row`; negative where scores are NaN.

        In the first row all classes seen so far compete, in the second only those of the example's own task.
        """
        seen = _class_mask(stream.seen(row), stream.classes)
        return self._count(stream, stream.tasks[: row + 1], [seen] * (row + 1), size)

    def test_ahead(self, stream: Stream, row: int) -> Tensor:
        """The same for task `row` and those to come, which are not learned yet: each among its own classes alone."""
        tasks = stream.tasks[row:]
        seen = [_class_mask(stream.seen(task.index), stream.classes) for task in tasks]
        return self._count(stream, tasks, seen, SHEET)[1]

    def _count(self, stream: Stream, tasks: Sequence[Task], seen: Sequence[Tensor], size: int) -> Tensor:
        """How many test examples of consecutive tasks are answered correctly, by task, in two rows as in `test`.

        `seen` has, for each of these tasks, a mask of the classes that compete in the first row.
        """
        rows = torch.cat([task.test_rows for task in tasks])
        # One column for each task of the whole stream and one for padding: a fixed shape, so one graph serves all.
        right = torch.zeros(2, len(stream) + 1, dtype=torch.long, device=self.device)
        sizes = torch.tensor([len(task.test_rows) for task in tasks])
        first = tasks[0].index
        numbers = (first + torch.repeat_interleave(sizes)).to(rows.device)
        # Which classes compete, by row (as in `right`), task and class.
        competing = torch.ones(2, len(stream) + 1, stream.classes, dtype=torch.bool)
        for task, all_seen in zip(tasks, seen, strict=True):
            own_classes = _class_mask((*task.classes, *task.tested), stream.classes)
            competing[:, task.index] = torch.stack([all_seen, all_seen & own_classes])
        competing = competing.to(self.device)
        # A user's own prediction may depend on the host's state, such as the memory's size: a graph would freeze it.
        eager = self.graphs.why_not or type(self.learner).scores_at is not Learner.scores_at
        for chunk, number in zip(rows.split(size), numbers.split(size), strict=True):
            x, y = tasks[0].test.take(chunk)
            if eager:
                x, y, number = (tensor.to(self.device) for tensor in (x, y, number))
                _count_right(self.learner, x, y, number, competing, right)
                continue
            if len(chunk) < size:  # pad, so that one graph serves all
                x, y = (
                    torch.cat([tensor, tensor[:1].expand(size - len(chunk), *tensor.shape[1:])]) for tensor in (x, y)
                )
                number = torch.cat([number, number.new_full((size - len(chunk),), len(stream))])
            buffers = self._fill_buffers("test", x, y, number, competing, right)
            key = ("test", x.shape, x.dtype, competing.shape, *_input_function_ids(self.learner))
            self._run(key, partial(_count_right, self.learner, *buffers))
            right.copy_(buffers[-1])
        return right[:, first : first + len(tasks)]

    def fits(self, learner: Learner) -> bool:
        """Whether `adopt` is possible.

        It is not if the optimiser has state (a new one starts without), if `prepare` or `augment` differ (they are part
        of the graphs), or if the learner, its network or its optimiser is of a class of the user's own, whose
        `state_dict` may be incomplete.
        """
        current = self.learner
        alike = _are_alike(current.prepare, learner.prepare) and _are_alike(current.augment, learner.augment)
        return alike and not current.optim.state and is_built_in(current)

    def adopt(self, learner: Learner) -> None:
        """Start over from the state of another learner with the same settings, reusing the captured graphs."""
        self.learner.load_state_dict(learner.state_dict())
        self.learner.seed = learner.seed

    def _run(self, key: tuple[Hashable, ...], work: Callable[[], Any]) -> tuple[Any, bool]:
        """Do work, with a graph where possible; returns its result and whether a graph was replayed."""
        return (self._capture(key, work), False) if self.graphs.due(key) else self.graphs.run(key, work)

    def _capture(self, key: tuple[Hashable, ...], work: Callable[[], Any]) -> Any:
        """Do work and capture it; if that fails, warn with the reason and use no graphs from then on."""
        before = counters(self.learner)
        why_not = _replay_obstacle(self.learner)
        if not why_not:
            try:
                result, _ = self.graphs.run(key, work)
            except RuntimeError as error:
                if short_of_memory(error):
                    raise
                # The capture did no work on the device: reset the counters on the host.
                set_counters(self.learner, before)
                torch.cuda.synchronize(self.device)
                why_not = first_line(error)
        if why_not:
            self.graphs.why_not = f"{self.learner.own_name()}: its {key[0]} cannot be captured ({why_not})"
            warnings.warn(self.graphs.why_not, RuntimeWarning, stacklevel=3)
            result = work()
        else:
            holders = _holders(self.learner)
            self._increments[key] = [
                (holders[part], attribute, value - before[name])
                for name, value in counters(self.learner).items()
                for part, _, attribute in [name.rpartition(".")]
                if value != before[name]
            ]
        return result

    def _fill_buffers(self, kind: str, *inputs: Tensor | None) -> list[Any]:
        """Copy inputs into the graphs' input buffers."""
        key = (kind, *[None if tensor is None else (tensor.shape, tensor.dtype) for tensor in inputs])
        if key not in self._buffers:
            self._buffers[key] = [
                None if tensor is None else torch.empty_like(tensor, device=self.device) for tensor in inputs
            ]
        for buffer, value in zip(self._buffers[key], inputs, strict=True):
            if buffer is not None and value is not None:
                buffer.copy_(value)
        return self._buffers[key]


class Fleet:
    """Learners on one device, each in its own berth. A single learner is a fleet too.

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
            raise invalid("learners", {str(learner.device) for learner in learners}, "all on one device")
        self.berths = [Berth(learner) for learner in learners]

    def __len__(self) -> int:
        return len(self.berths)

    @property
    def learners(self) -> list[Learner]:
        """The learners, in the order of their berths."""
        return [berth.learner for berth in self.berths]

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context for work on the berths' streams: ordered after all earlier and before all later work."""
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
        """Start over from the states of other learners; False, with nothing changed, if not all fit (`Berth.fits`)."""
        pairs = list(zip(self.berths, learners, strict=False))
        if len(learners) != len(self) or not all(berth.fits(learner) for berth, learner in pairs):
            return False
        for berth, learner in pairs:
            berth.adopt(learner)
        return True


def counters(learner: Learner) -> dict[str, int]:
    """The integers that a learner and its parts keep on the host, by name."""
    return {
        f"{part}.{name}": value
        for part, holder in _holders(learner).items()
        for name, value in vars(holder).items()
        if isinstance(value, int) and not isinstance(value, bool)
    }


def set_counters(learner: Learner, values: dict[str, int]) -> None:
    """Set integers on the host, named as in `counters`."""
    holders, current = _holders(learner), counters(learner)
    for name, value in values.items():
        if value != current[name]:  # unchanged attributes may be read-only
            part, _, attribute = name.rpartition(".")
            setattr(holders[part], attribute, value)


def _holders(learner: Learner) -> dict[str, Any]:
    """The learner and its parts (memory, averages, ...) whose classes are from this package or derived from one."""
    parts = {
        name: value
        for name, value in vars(learner).items()
        if name != "model"
        and hasattr(value, "__dict__")
        and any(base.__module__.startswith("parabolic.") for base in type(value).__mro__)
    }
    return {"": learner, **parts}


def _replay_obstacle(learner: Learner) -> str:
    """Why a step cannot be replayed: the optimiser has state on the host, which a replay would not update."""
    values = (value for state in learner.optim.state.values() for value in state.values())
    has_host_state = any(isinstance(value, Tensor) and value.device != learner.device for value in values)
    return f"{type(learner.optim).__name__} keeps state on the host" if has_host_state else ""


def _are_alike(one: object, other: object) -> bool:
    """Whether two objects are identical, or equal if their class is from this package (others may redefine ==)."""
    return one is other or (type(one).__module__.startswith("parabolic.") and type(one) is type(other) and one == other)


def _input_function_ids(learner: Learner) -> tuple[int, int]:
    """The identities of `prepare` and `augment`, which may be replaced before the first step."""
    return id(learner.prepare), id(learner.augment)


def _hyperparameters(learner: Learner) -> Hashable:
    """The optimiser's hyperparameters, which are constants in a captured step."""
    numbers = (float, int, tuple, Tensor)  # tuples: Adam's betas, for example
    return tuple(
        tuple(_as_constant(value) for value in group.values() if isinstance(value, numbers))
        for group in learner.optim.param_groups
    )


def _as_constant(value: Any) -> Any:
    """A number in a tensor on the host, which may be changed in place, as its present value; all else as it is."""
    return value.item() if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1 else value


def _class_mask(members: Sequence[int], classes: int) -> Tensor:
    return torch.isin(torch.arange(classes), torch.tensor(members))


def _count_right(learner: Learner, x: Tensor, y: Tensor, task: Tensor, competing: Tensor, right: Tensor) -> None:
    scores = learner.scores_at(learner.inputs(x))[:, : competing.shape[-1]]
    answers = scores.masked_fill(~competing[:, task], -torch.inf).argmax(-1)  # two rows, as in `competing`
    right.index_add_(1, task, (answers == y).long() - MANY * scores.isnan().any(-1))
