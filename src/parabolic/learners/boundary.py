"""The batches of a whole task, for work at its start or end: few large pieces, as each check waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parabolic.checks import Description, invalid
from parabolic.learners.accepting import check_batch
from parabolic.learners.learner import Learner, TaskBatches

__all__ = ["check_started", "checked_batches", "labels_of"]


def checked_batches(
    learner: Learner, batches: TaskBatches, size: int = 2048
) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
    """Examples and labels of several batches combined, checked for a learner, and the size of each batch.

    Consecutive batches are combined until there are at least `size` examples.

    >>> from parabolic import SGD
    >>> batches = [(torch.zeros(n, 4), torch.arange(n)) for n in (3, 3, 3, 1)]
    >>> [sizes for _, _, sizes in checked_batches(SGD(torch.nn.Linear(4, 3)), batches, size=6)]
    [[3, 3], [3, 1]]
    """
    pending: list[tuple[Any, Any]] = []
    count, kind_before = 0, None
    for x, y in batches:
        kind = _kind(x, y)
        # A batch unlike those before it is checked by itself, so that the error describes that batch.
        if pending and (count >= size or kind is None or kind != kind_before):
            yield _combined(learner, pending)
            pending, count = [], 0
        pending.append((x, y))
        count, kind_before = count + (0 if kind is None else len(y)), kind
    if pending:
        yield _combined(learner, pending)


def labels_of(learner: Learner, batches: TaskBatches) -> Tensor:
    """All labels of a starting task, checked, for a learner that must know them in advance."""
    labels = [y for _, y, _ in checked_batches(learner, batches)]
    if not labels:
        remedy = f"{learner.own_name()} takes the classes of the task from them"
        raise invalid("start_task", Description("no batches"), "the batches of the task", remedy)
    return torch.cat(labels)


def check_started(tasks: int) -> None:
    """Refuse a batch if no task has started yet."""
    if not tasks:
        raise invalid("start_task", Description("a batch before any task"), "a call before the task's first batch")


def _combined(learner: Learner, pending: list[tuple[Any, Any]]) -> tuple[Tensor, Tensor, list[int]]:
    if len(pending) == 1:
        x, y = check_batch(learner, *pending[0])
        return x, y, [len(y)]
    x, y = check_batch(learner, *(torch.cat(parts) for parts in zip(*pending, strict=True)))
    return x, y, [len(labels) for _, labels in pending]


def _kind(x: Any, y: Any) -> tuple[Any, ...] | None:
    """What two batches must have in common to be concatenated; None for one that cannot be, whatever the other is."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.ndim and y.ndim and len(x) == len(y) > 0):
        return None
    return x.shape[1:], x.dtype, x.device, y.shape[1:], y.dtype, y.device
