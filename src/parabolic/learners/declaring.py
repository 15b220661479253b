"""Classes that define a learner: what their methods are wrapped in, and which fields they may have."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import Tensor

from parabolic.checks import CallError, Description, check_name, invalid
from parabolic.learners.accepting import left_narrow
from parabolic.learners.functional import work_by

if TYPE_CHECKING:
    from parabolic.learners.learner import Learner

__all__ = ["alone", "boundary_of", "check_fields", "in_one_go", "make_dataclass", "wrap_methods"]

# Methods that no other thread sees half done, also where a subclass defines them.
WHOLE = ("step", "load_state_dict")
BOUNDARIES = ("end_task", "start_task")  # of these too
# Attributes of a learner that are not fields.
OWN = {"averaged", "body", "device", "dtype", "generator", "lock", "optim", "stepping", "steps"}

Method = TypeVar("Method", bound=Callable[..., Any])


def wrap_methods(cls: type) -> None:
    """Wrap the methods that a class defines for what every learner promises."""
    wraps: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]
    wraps = {**dict.fromkeys(WHOLE, alone), **dict.fromkeys(BOUNDARIES, _noted)}
    wraps |= {"grow": in_one_go, "scores_at": _as_predicted, "__post_init__": _complete}
    for name, wrap in wraps.items():
        if name in vars(cls):
            _wrap(cls, name, wrap)


def _wrap(cls: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(cls, name, wrap(vars(cls)[name]))


def make_dataclass(cls: type) -> None:
    """Make a class a dataclass; an `__init__` that this generates explains which arguments there are."""
    own = "__init__" in vars(cls)
    dataclasses.dataclass(eq=False, kw_only=True, repr=False)(cls)
    if not own:
        _wrap(cls, "__init__", _explaining)


def boundary_of(cls: type[Learner]) -> str:
    """The call between two tasks that a method depends on: `end_task`, if it defines that, or else `start_task`."""
    if "_boundary" in vars(cls) or cls._boundary == "end_task":
        return cls._boundary
    return next((name for name in BOUNDARIES if name in vars(cls)), cls._boundary)


def check_fields(cls: type) -> None:
    """Refuse a field without a type, which would be ignored, and a name that learners use for something else."""
    bases, typed = cls.__mro__[1:], inspect.get_annotations(cls)
    inherited = {each.name for base in bases if dataclasses.is_dataclass(base) for each in dataclasses.fields(base)}

    def taken(name: str) -> bool:
        if name in inherited:  # by a field, whose value would hide a method of that name
            return name not in typed and inspect.isroutine(vars(cls)[name])
        hidden = [vars(base)[name] for base in bases if name in vars(base) and name in typed]
        return name in OWN or any(inspect.isroutine(each) or isinstance(each, property) for each in hidden)

    for name in typed.keys() | vars(cls).keys():
        if taken(name):
            remedy = f"learners use that name themselves: choose another, such as my_{name}"
            what = "field" if name in typed else "attribute"
            raise invalid(f"{what} of {cls.__name__}", name, "a name that is not taken", remedy)
    for name, value in vars(cls).items():
        field = isinstance(value, dataclasses.Field) or (name in inherited and not isinstance(value, property))
        if field and name not in typed:
            raise invalid(f"{cls.__name__}.{name}", value, "a field with its type", f"as in {name}: float = …")


def alone(method: Method) -> Method:
    """Wrap a method that changes a learner, so that no other thread uses or changes it meanwhile."""

    @functools.wraps(method)
    def alone(self: Learner, *args: Any, **kwargs: Any) -> Any:
        with self._changing():
            return method(self, *args, **kwargs)

    return cast(Method, alone)


def in_one_go(method: Method) -> Method:
    """Wrap a method as `alone` does, and so that a signal handler of the same thread, too, can tell it is half done."""

    @functools.wraps(method)
    def in_one_go(self: Learner, *args: Any, **kwargs: Any) -> Any:
        with self._changing(), self._half_done():
            return method(self, *args, **kwargs)

    return cast(Method, in_one_go)


def _noted(method: Method) -> Method:
    """Wrap a `start_task` or `end_task`, so that the learner knows that the method was told of the boundary."""

    @functools.wraps(method)
    def noted(self: Learner, *args: Any, **kwargs: Any) -> Any:
        try:
            made = method(self, *args, **kwargs)
        except (ValueError, IndexError, RuntimeError) as error:
            if (narrow := left_narrow(self, error)) is None:
                raise
            raise narrow from error
        if method.__name__ == self._boundary:
            self._observed_task = None
        return made

    return alone(cast(Method, noted))


def _explaining(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap an `__init__`, so that an argument which it does not take is refused with those that it does."""

    @functools.wraps(init)
    def explaining(self: Learner, *args: Any, **options: Any) -> None:
        kind, fields = type(self).__name__, {each.name: each for each in dataclasses.fields(self) if each.init}
        for name in options:
            check_name(f"option of {kind}", name, fields, f"help({kind}) explains them", kind=CallError)
        unnamed = [name for name, each in fields.items() if not each.kw_only]
        if len(args) > len(unnamed):
            got, remedy = Description(f"{len(args)} arguments without a name"), "name the others, as in lr=0.1"
            raise invalid(kind, got, f"{len(unnamed)}: {', '.join(unnamed)}", remedy, kind=CallError)
        init(self, *args, **options)

    return explaining


def _as_predicted(method: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Wrap a user's own `scores_at`, so that whatever it asks the model is answered as in prediction."""

    @functools.wraps(method)
    def scores_at(self: Learner, inputs: Tensor) -> Tensor:
        with self._turn(), self._half_done():
            return work_by(self.predicting_weights(), self.model, functools.partial(method, self), inputs)

    return scores_at


def _complete(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `__post_init__`, so that one that forgets those of the classes above is named at once."""

    @functools.wraps(method)
    def post_init(self: Learner) -> None:
        method(self)
        if not hasattr(self, "steps"):
            got = Description("one that does not call super().__post_init__()")
            whose = f"__post_init__ of {type(self).__name__}"
            raise invalid(whose, got, "that call, which sets up the learner", "make it the first line")

    return post_init
