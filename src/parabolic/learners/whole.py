"""Whether the state of a learner is complete: for classes of a user's own, by restoring it and comparing."""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections import deque
from collections.abc import Mapping
from functools import cached_property, partial
from types import ModuleType
from typing import Any

import numpy as np
from torch import Generator, Tensor

from parabolic.checks import plain
from parabolic.learners.learner import Learner
from parabolic.learners.moving import copy_model
from parabolic.learners.saving import describe, restore
from parabolic.memory import Memory
from parabolic.states import same_state

__all__ = ["is_built_in", "left_behind"]

PLAIN_TYPES = (int, float, str, list, tuple, dict, set)
IN_STATE = ("training", "state", "param_groups", "defaults")  # of modules and optimisers: set anew, or in the state


def is_built_in(learner: Learner) -> bool:
    """Whether a learner, its memory, optimiser and modules are of this package or torch: their states are complete."""
    parts = (learner, getattr(learner, "memory", learner), learner.optim, *learner.model.modules())
    return all(type(part).__module__.startswith(("parabolic.", "torch.")) for part in parts)


def left_behind(learner: Learner, fresh: Learner) -> list[str]:
    """The attributes of a learner, its memory, optimiser and modules that its state does not restore, by name.

    `fresh` is another learner made in the same way, which is restored from that state as a new process would do it.
    Attributes that then differ are returned: numbers, texts, tensors, random generators, anything with a `state_dict`,
    and containers and objects of these; for modules only numbers, texts and containers, as a tensor there may be left
    over from a call. Functions, locks and cached properties are not compared.

    >>> import torch
    >>> from parabolic import ER
    >>> class Counting(ER):
    ...     tasks = 0
    ...     def end_task(self, batches):
    ...         self.tasks += 1
    >>> learner, fresh = (Counting(torch.nn.Linear(4, 3)) for _ in range(2))
    >>> learner.end_task([])
    >>> left_behind(learner, fresh)
    ['tasks']
    """
    restore(fresh, describe(learner))
    state, restored = learner.state_dict(), fresh.state_dict()
    missing = [name for name in state if not same_state(state[name], restored.get(name))]
    is_ours = type(learner) is _package_class(learner)
    missing += _differing(learner, fresh, {*vars(fresh)} if is_ours else _attributes_of_base(learner))
    missing += _differing_plainly("optim", learner.optim, fresh.optim)
    for (path, module), other in zip(learner.model.named_modules(), fresh.model.modules(), strict=False):
        missing += _differing_plainly(f"model.{path}".rstrip("."), module, other)
    if isinstance(memory := getattr(learner, "memory", None), Memory):
        excluded = vars(_package_class(memory)(memory.capacity)).keys()
        missing += [f"memory.{name}" for name in _differing(memory, getattr(fresh, "memory", None), {*excluded})]
    return missing


def _package_class(part: Any) -> Any:
    """The nearest class of this package that an object is an instance of."""
    return next((cls for cls in type(part).__mro__ if cls.__module__.startswith("parabolic.")), object)


def _attributes_of_base(learner: Learner) -> set[str]:
    """The attributes of a learner's base class in this package, which restores them in its own way."""
    base = _package_class(learner)
    options = {field.name: getattr(learner, field.name) for field in dataclasses.fields(base) if field.init}
    if isinstance(memory := options.get("memory"), Memory):  # its policy may need what the base does not keep
        options["memory"] = memory.capacity
    return {*vars(base(**options | {"model": copy_model(learner.body)}))}


def _differing(one: Any, other: Any, excluded: set[str]) -> list[str]:
    """The names of attributes that differ."""
    names = (name for name in {**vars(one), **vars(other)} if name not in excluded)
    return [
        name
        for name in names
        if not isinstance(inspect.getattr_static(type(one), name, None), cached_property)
        and not _alike(getattr(one, name, None), getattr(other, name, None))
    ]


def _differing_plainly(path: str, one: Any, other: Any) -> list[str]:
    """The names, after `path`, of public numbers, texts and containers of an object that differ; not its state's."""
    return [
        f"{path}.{name}"
        for name, value in vars(one).items()
        if not name.startswith("_") and name not in IN_STATE and isinstance(value, PLAIN_TYPES)
        if not _alike(value, getattr(other, name, None))
    ]


def _alike(one: Any, other: Any, above: tuple[int, ...] = ()) -> bool:
    """Whether two values hold the same data; `above` are the ids of the values that contain them."""
    if one is other or id(one) in above:
        return True
    one, other, above = _data(one), _data(other), (*above, id(one))
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return same_state(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_alike(one[name], other[name], above) for name in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(_alike(*pair, above) for pair in zip(one, other, strict=True))
    if isinstance(one, int | float | complex | str | bytes | set | frozenset):
        return bool(one == other) or (one != one and other != other)  # NaN equals NaN here
    return _alike(object.__getstate__(one), object.__getstate__(other), above)  # attributes, also those in slots


def _data(value: Any) -> Any:
    """A value in the form in which it is compared; None for code."""
    if inspect.isroutine(value) or isinstance(value, type | ModuleType | partial):
        return None
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if isinstance(value, Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if isinstance(value, np.ndarray):
        return value.tolist() if value.dtype.hasobject else (value.dtype.str, value.shape, value.tobytes())
    return plain(value)
