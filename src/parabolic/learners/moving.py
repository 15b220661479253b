"""Everything that a learner holds, moved to another device or copied."""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor, nn

from parabolic.learners.gradients import trainable
from parabolic.learners.learner import Learner
from parabolic.learners.optimizers import count_steps_on

__all__ = ["copy_memo", "copy_model", "move", "move_tensors", "tensors_in"]

Network = TypeVar("Network", bound=nn.Module)


@torch.no_grad()
def move(learner: Learner, device: torch.device, generator_state: Tensor | None = None) -> None:
    """Move a learner to a device, in place; its generator goes on from the state `generator_state` (default: its own).

    Between a GPU and a CPU everything carries over except future random draws: their generators' states differ.
    """
    generator_state = learner.generator.get_state() if generator_state is None else generator_state
    move_tensors(learner, device)
    learner.device = trainable(learner.model)[0].device  # with its number
    learner.generator = Generator(learner.device)
    learner._load_generator(generator_state)
    if isinstance(learner.optimizer, str):
        count_steps_on(learner.optim, device)


@torch.no_grad()
def move_tensors(value: Any, device: torch.device) -> None:
    """Move all tensors in a value to a device: each that moves stays the same object, and loses its gradient."""
    for tensor in tensors_in(value):
        moved = tensor.data.to(device)
        if moved.device != tensor.device:
            tensor.grad = None
            tensor.data = moved


def copy_model(model: Network) -> Network:
    """A deep copy, also of a model that keeps tensors from its last call.

    >>> model = nn.Linear(2, 2)
    >>> model.seen = model(torch.ones(1, 2))
    >>> copy_model(model).seen.requires_grad
    False
    """
    return copy.deepcopy(model, copy_memo(model))


def copy_memo(model: Any) -> dict[int, Any]:
    """A memo for `copy.deepcopy`, with copies of what torch refuses to copy: tensors computed from the weights."""
    return {id(tensor): tensor.detach().clone() for tensor in tensors_in(model) if tensor.grad_fn is not None}


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a value: in containers, and in the attributes of objects, but not in functions' closures.

    >>> [each.shape for each in tensors_in({"model": torch.nn.Linear(2, 3), "more": [(torch.zeros(5),)]})]
    [torch.Size([3, 2]), torch.Size([3]), torch.Size([5])]
    """
    tensors: dict[int, Tensor] = {}
    seen: dict[int, Any] = {}  # by id, and held, so that no id is given to another
    pending = [value]
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen[id(part)] = part
        if isinstance(part, Tensor):
            tensors[id(part)] = part
        pending += reversed([*_contents(part)])
    return [*tensors.values()]


def _contents(value: Any) -> Iterator[Any]:
    """What a value consists of."""
    if isinstance(value, type | ModuleType | str | bytes) or inspect.isfunction(value):
        return
    if isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from value
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif inspect.ismethod(value):
        yield value.__self__
    yield from vars(value).values() if hasattr(value, "__dict__") else ()
