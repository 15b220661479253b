"""A stream: examples cut into tasks that arrive one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from parabolic.checks import Description, check_finite, check_number, invalid

__all__ = ["Batches", "Examples", "Stream", "Task"]


class Examples(NamedTuple):
    """Raw examples `[n, *shape]` and their labels `[n]`."""

    x: Tensor
    y: Tensor

    def to(self, device: torch.device | str) -> Examples:
        """The same examples on another device."""
        return Examples(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class Batches:
    """The batches of a task in their order, which can be gone through again and again.

    The order depends on the seed, the task and the epoch alone. The last batch may be shorter: it is not dropped.
    """

    data: Examples
    rows: Tensor  # which examples of `data` are the task's
    size: int
    epochs: int
    entropy: tuple[int, ...]

    def __len__(self) -> int:
        return self.epochs * -(-len(self.rows) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for epoch in range(self.epochs):
            order = np.random.default_rng([*self.entropy, epoch]).permutation(len(self.rows))
            rows = self.rows[torch.from_numpy(order).to(self.rows.device)]
            for part in rows.split(self.size):
                yield self.data.x.index_select(0, part), self.data.y.index_select(0, part)


@dataclass(frozen=True)
class Task:
    """One task: its classes, its training examples in the order of arrival, and its test examples."""

    index: int
    classes: tuple[int, ...]
    train: Examples = field(repr=False)  # those of the whole stream; `train_rows` says which are the task's
    test: Examples = field(repr=False)
    train_rows: Tensor = field(repr=False)
    test_rows: Tensor = field(repr=False)
    seed: int = 0

    def batches(self, size: int = 32, epochs: int = 1) -> Batches:
        """The task's training batches, shuffled anew in every epoch."""
        check_number("batch", size, whole=True, at_least=1)
        check_number("epochs", epochs, whole=True, at_least=1)
        return Batches(self.train, self.train_rows, size, epochs, (self.seed, self.index))

    def test_batches(self, size: int = 512) -> Iterator[tuple[Tensor, Tensor]]:
        """The task's test examples, in their own order."""
        for part in self.test_rows.split(size):
            yield self.test.x.index_select(0, part), self.test.y.index_select(0, part)


@dataclass(frozen=True)
class Stream(Sequence[Task]):
    """Tasks in the order of their arrival, and how their examples become a model's input.

    >>> x, y = torch.randn(100, 4), torch.arange(100) % 4
    >>> stream = Stream.from_arrays(x, y, tasks=2)
    >>> [task.classes for task in stream]
    [(0, 1), (2, 3)]
    >>> x, y = next(iter(stream[0].batches(32)))
    >>> x.shape, sorted(set(y.tolist()))
    (torch.Size([32, 4]), [0, 1])
    """

    name: str
    tasks: tuple[Task, ...] = field(repr=False)
    classes: int
    shape: tuple[int, ...]
    prepare: Callable[[Tensor], Tensor] | None = None
    augment: Callable[[Tensor, Generator], Tensor] | None = None
    class_names: tuple[str, ...] | None = None
    boundaries: bool = True  # whether a learner may be told where a task starts and ends

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: Any) -> Any:
        return self.tasks[index]

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def seen(self, index: int) -> list[int]:
        """The classes that have come up to and including the task `index`."""
        return sorted({label for task in self.tasks[: index + 1] for label in task.classes})

    def together(self, size: int = 32, epochs: int = 1) -> Batches:
        """The training batches of all tasks at once, shuffled: what a stream never gives."""
        first = self.tasks[0]
        rows = torch.cat([task.train_rows for task in self.tasks])
        return replace(first.batches(size, epochs), rows=rows, entropy=(first.seed, len(self.tasks)))

    def to(self, device: torch.device | str) -> Stream:
        """The same stream with all examples on another device."""
        first = self.tasks[0]
        train, test = first.train.to(device), first.test.to(device)
        return replace(
            self,
            tasks=tuple(
                replace(
                    task, train=train, test=test,
                    train_rows=task.train_rows.to(device), test_rows=task.test_rows.to(device),
                )
                for task in self.tasks
            ),
        )  # fmt: skip

    @classmethod
    def from_arrays(
        cls,
        x: Any,
        y: Any,
        *,
        test: tuple[Any, Any] | None = None,
        tasks: int | Sequence[Sequence[int]] = 5,
        seed: int = 0,
        name: str = "arrays",
        **settings: Any,
    ) -> Stream:
        """Cut arrays or tensors into tasks by class.

        Args:
            x: raw examples `[n, *shape]`, as they should be kept in memory: bytes may stay bytes.
            y: labels `[n]`, whole numbers from 0.
            test: test examples and labels; without them every fifth example of each class is held out.
            tasks: how many tasks of equally many classes, in the order of their labels; or the classes of each.
            seed: decides the order of the examples within each task.
            name: what the stream is called.
            settings: `prepare`, `augment`, `class_names`, `boundaries`.
        """
        train = _examples("x", "y", x, y)
        held_out = _hold_out(train.y) if test is None else None
        tested = train if test is None else _examples("test x", "test y", *test)
        if tested.x.shape[1:] != train.x.shape[1:] or tested.x.dtype != train.x.dtype:
            raise invalid("test", tested.x, f"examples like x, {list(train.x.shape[1:])} of {train.x.dtype}")
        known = sorted(set(train.y.unique().tolist()))
        groups = _groups(tasks, known)
        made = []
        for index, labels in enumerate(groups):
            rows = []
            for part, in_part in ((train, _not(held_out)), (tested, held_out)):
                mine = torch.isin(part.y, torch.tensor(labels))
                rows.append((mine if in_part is None else mine & in_part).nonzero().flatten())
                if not len(rows[-1]):
                    kind = "training" if part is train and len(rows) == 1 else "test"
                    raise invalid("tasks", labels, f"classes with {kind} examples")
            made.append(Task(index, tuple(labels), train, tested, rows[0], rows[1], seed))
        classes = max(known) + 1
        return cls(name, tuple(made), classes, tuple(train.x.shape[1:]), **settings)

    @classmethod
    def from_tasks(
        cls,
        parts: Sequence[tuple[tuple[Any, Any], tuple[Any, Any]]],
        *,
        seed: int = 0,
        name: str = "tasks",
        **settings: Any,
    ) -> Stream:
        """Make a stream of ready tasks, each `((x, y), (test x, test y))`; they may share classes.

        >>> part = lambda shift: (torch.randn(20, 2) + shift, torch.arange(20) % 2)
        >>> len(Stream.from_tasks([(part(0), part(0)), (part(3), part(3))]))
        2
        """
        if not parts:
            raise invalid("parts", parts, "at least one task")
        pieces: list[list[Examples]] = [[], []]
        for index, part in enumerate(parts):
            for split, (x, y) in enumerate(part):
                pieces[split].append(_examples(f"x of task {index}", f"y of task {index}", x, y))
        train, test = (
            Examples(torch.cat([each.x for each in split]), torch.cat([each.y for each in split])) for split in pieces
        )
        rows = [torch.arange(len(whole.y)).split([len(each.y) for each in split]) for whole, split in
                zip((train, test), pieces, strict=True)]  # fmt: skip
        made = tuple(
            Task(index, tuple(train.y[mine].unique().tolist()), train, test, mine, tested, seed)
            for index, (mine, tested) in enumerate(zip(*rows, strict=True))
        )
        classes = int(torch.cat([train.y, test.y]).max()) + 1
        return cls(name, made, classes, tuple(train.x.shape[1:]), **settings)


def _examples(x_name: str, y_name: str, x: Any, y: Any) -> Examples:
    """Check arrays or tensors of examples and labels, and take them over without a copy where that is safe."""
    inputs, labels = _tensor(x_name, x), _tensor(y_name, y)
    if inputs.ndim < 1 or len(inputs) == 0:
        raise invalid(x_name, inputs, "at least one example")
    if labels.ndim != 1 or len(labels) != len(inputs) or labels.is_floating_point():
        raise invalid(y_name, labels, f"one whole number for each of the {len(inputs)} examples")
    if int(labels.min()) < 0:
        raise invalid(y_name, int(labels.min()), "labels from 0 up")
    check_finite(x_name, inputs)
    return Examples(inputs, labels.long())


def _tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    array = np.asarray(value)
    if array.dtype == object or array.dtype.kind not in "biuf":
        raise invalid(name, Description(f"an array of type {array.dtype}"), "numbers")
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _hold_out(y: Tensor) -> Tensor:
    """A mask of every fifth example of each class."""
    mask = torch.zeros(len(y), dtype=torch.bool)
    for label in y.unique():
        mask[(y == label).nonzero().flatten()[4::5]] = True
    return mask


def _not(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else ~mask


def _groups(tasks: int | Sequence[Sequence[int]], known: list[int]) -> list[list[int]]:
    if isinstance(tasks, int):
        check_number("tasks", tasks, whole=True, at_least=1)
        if len(known) % tasks:
            raise invalid(
                "tasks",
                tasks,
                f"a divisor of the number of classes, {len(known)}",
                "or list each task's classes",
            )
        size = len(known) // tasks
        return [known[start : start + size] for start in range(0, len(known), size)]
    groups = [[int(label) for label in labels] for labels in tasks]
    if not groups or any(not labels or not set(labels) <= set(known) for labels in groups):
        raise invalid("tasks", tasks, f"for each task some of the classes {known}")
    return groups
