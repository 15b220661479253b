"""Classes that define a learner: what their methods are wrapped in, and which fields they may have."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from parabolic.checks import CallError, Description, check_name, invalid
from parabolic.learners.accepting import outgrown_error
from parabolic.learners.functional import work_by
from parabolic.learners.gradients import named_trainable
from parabolic.memory import Memory

if TYPE_CHECKING:
    from parabolic.learners.learner import Learner

__all__ = ["as_one_step", "boundary_of", "check_fields", "locked", "make_dataclass", "wrap_methods"]

# Methods that no other thread sees half done, also where a subclass defines them.
LOCKED = ("step", "load_state_dict")
BOUNDARIES = ("end_task", "start_task")  # likewise
# Attributes of a learner that are not fields.
RESERVED = {"averaged", "body", "device", "dtype", "generator", "lock", "optim", "stepping", "steps"}

Method = TypeVar("Method", bound=Callable[..., Any])


def wrap_methods(cls: type) -> None:
    """Wrap the methods that a class, or a base of it that is no learner, defines for what every learner promises."""
    from parabolic.learners.learner import Learner

    wraps: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]
    wraps = {name: functools.partial(_note_boundary, name=name) for name in BOUNDARIES}
    wraps |= dict.fromkeys(LOCKED, locked)
    wraps |= {"grow": as_one_step, "scores_at": _as_prediction, "__post_init__": _check_set_up}
    for name, wrap in wraps.items():
        owner = next(base for base in cls.__mro__ if name in vars(base))
        if owner is cls or not issubclass(owner, Learner):  # those of learners are wrapped already
            _wrap(cls, name, wrap)


def _wrap(cls: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(cls, name, wrap(getattr(cls, name)))


def make_dataclass(cls: type) -> None:
    """Make a class a dataclass; an `__init__` that this generates is wrapped too."""
    has_init = "__init__" in vars(cls)
    dataclasses.dataclass(eq=False, kw_only=True, repr=False)(cls)
    if not has_init:
        _wrap(cls, "__init__", _as_constructor)


def boundary_of(cls: type[Learner]) -> str:
    """The call between two tasks that a method depends on: `end_task`, if it defines that, or else `start_task`."""
    if "_boundary" in vars(cls) or cls._boundary == "end_task":
        return cls._boundary
    return next((name for name in BOUNDARIES if name in vars(cls)), cls._boundary)


def check_fields(cls: type) -> None:
    """Refuse a field without a type, which would be ignored, and a name that learners use for something else."""
    bases, annotations = cls.__mro__[1:], inspect.get_annotations(cls)
    inherited = {field.name for base in bases if dataclasses.is_dataclass(base) for field in dataclasses.fields(base)}

    def is_taken(name: str) -> bool:
        if name in inherited:  # by a field, whose value would hide a method of that name
            return name not in annotations and inspect.isroutine(vars(cls)[name])
        hidden = [vars(base)[name] for base in bases if name in vars(base) and name in annotations]
        return name in RESERVED or any(inspect.isroutine(value) or isinstance(value, property) for value in hidden)

    for name in annotations.keys() | vars(cls).keys():
        if is_taken(name):
            remedy = f"learners use that name themselves: choose another, such as my_{name}"
            kind = "field" if name in annotations else "attribute"
            raise invalid(f"{kind} of {cls.__name__}", name, "a name that is not taken", remedy)
    for name, value in vars(cls).items():
        is_field = isinstance(value, dataclasses.Field) or (name in inherited and not isinstance(value, property))
        if is_field and name not in annotations:
            raise invalid(f"{cls.__name__}.{name}", value, "a field with its type", f"as in {name}: float = …")


def locked(method: Method) -> Method:
    """Wrap a method that changes a learner, so that no other thread uses or changes it meanwhile."""

    @functools.wraps(method)
    def wrapper(self: Learner, *args: Any, **kwargs: Any) -> Any:
        with self._lock_to_change():
            return method(self, *args, **kwargs)

    return cast(Method, wrapper)


def as_one_step(method: Method) -> Method:
    """Wrap a method as `locked` does, and so that `stepping` tells a signal handler that it is half done."""

    @functools.wraps(method)
    def wrapper(self: Learner, *args: Any, **kwargs: Any) -> Any:
        with self._lock_to_change(), self._mark_stepping():
            return method(self, *args, **kwargs)

    return cast(Method, wrapper)


def _note_boundary(method: Method, name: str) -> Method:
    """Wrap a `start_task` or `end_task`, so that the learner knows that the method was told of the boundary."""

    @functools.wraps(method)
    def wrapper(self: Learner, *args: Any, **kwargs: Any) -> Any:
        try:
            result = method(self, *args, **kwargs)
        except (ValueError, IndexError, RuntimeError) as error:
            if (outgrown := outgrown_error(self, error)) is None:
                raise
            raise outgrown from error
        if name == self._boundary:  # the function itself may have another name
            self._observed_task = None
        return result

    return locked(cast(Method, wrapper))


def _as_constructor(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap an `__init__`: it names the arguments that it takes, and makes what can learn also in inference mode."""

    @functools.wraps(init)
    def wrapper(self: Learner, *args: Any, **options: Any) -> None:
        class_name = type(self).__name__
        fields = {field.name: field for field in dataclasses.fields(self) if field.init}
        for name in options:
            remedy = f"help({class_name}) explains them"
            if name == "device":
                remedy = "a learner is where its model is: pass the model on that device, as in model.to('cuda')"
            check_name(f"option of {class_name}", name, fields, remedy, kind=CallError)
        positional = [name for name, field in fields.items() if not field.kw_only]
        if len(args) > len(positional):
            got, remedy = Description(f"{len(args)} arguments without a name"), "name the others, as in lr=0.1"
            raise invalid(class_name, got, f"{len(positional)}: {', '.join(positional)}", remedy, kind=CallError)
        with torch.inference_mode(False):
            init(self, *args, **options)
        self._first_weights = named_trainable(self.model)  # a `__post_init__` may have added some
        if isinstance(memory := getattr(self, "memory", None), Memory):
            memory._is_taken = True  # not before: a constructor that fails may be called again with the same memory

    return wrapper


def _as_prediction(method: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Wrap a user's own `scores_at`, so that all of its calls of the model are as in prediction."""

    @functools.wraps(method)
    def scores_at(self: Learner, inputs: Tensor) -> Tensor:
        with self._lock_to_read(), self._mark_stepping():
            return work_by(self.predicting_weights(), self.model, functools.partial(method, self), inputs)

    return scores_at


def _check_set_up(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `__post_init__`, so that one that does not call its base classes' is refused at once."""

    @functools.wraps(method)
    def post_init(self: Learner) -> None:
        method(self)
        if not hasattr(self, "steps"):
            got = Description("one that does not call super().__post_init__()")
            name = f"__post_init__ of {type(self).__name__}"
            raise invalid(name, got, "that call, which sets up the learner", "make it the first line")

    return post_init
