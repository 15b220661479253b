"""Options: dataclass fields that carry a line of help and their limits.

The constructor's checks, the command line, the stored spec and the printed tables are all derived from them, so
that each option is declared once, where it is used.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from parabolic.checks import check_name, check_number, digits, invalid, plain

__all__ = [
    "Option", "check_options", "documented", "dotted", "no_option", "option", "options_of", "parse_option",
    "write_option",
]  # fmt: skip

SIGNS = {"above": ">", "at_least": "≥", "below": "<", "at_most": "≤"}


def option(default: Any, about: str, *, tune: str | None = None, **limits: Any) -> Any:
    """A dataclass field with a line of help and limits: above, at_least, below, at_most, among or reads.

    `among` are the allowed values; `reads` is a function that raises an error for a text that it cannot read. `tune` is
    the range in which to search for values, as for `parabolic tune --space`: "0.01:1", "0.01:1:log" or "a,b,c".

    >>> @dataclass
    ... class Settings:
    ...     rate: float = option(0.1, "step size", above=0)
    >>> Settings().rate
    0.1
    >>> options_of(Settings)["rate"].about
    'step size'
    """
    return dataclasses.field(default=default, metadata={"about": about, "limits": limits, "tune": tune})


@dataclass(frozen=True)
class Option:
    """One option of a class: its name, type, default, help, limits and search range."""

    name: str
    type: Any
    default: Any
    about: str
    limits: Mapping[str, Any]
    tune: str | None = None

    @property
    def optional(self) -> bool:
        """Whether None is allowed."""
        return type(None) in _members(self.type)

    @property
    def allowed(self) -> str:
        """The allowed values, in short.

        >>> Option("average", float | None, None, "decay", {"at_least": 0, "below": 1}).allowed
        'a number ≥ 0, < 1, or none'
        """
        kinds = _members(self.type)
        if among := self.limits.get("among"):
            description = ", ".join(map(write_option, among))
        elif bool in kinds:
            description = "true, false"
        elif int in kinds or float in kinds:
            noun = "a number" if float in kinds else "a whole number"
            bounds = [
                f"{sign} {digits(self.limits[key])}" for key, sign in SIGNS.items() if self.limits.get(key) is not None
            ]
            description = f"{noun} {', '.join(bounds)}".strip()
        else:
            description = "text"
        return f"{description}, or none" if self.optional else description

    def check(self, value: Any) -> None:
        """Refuse a value of the wrong type or outside the limits, naming the option."""
        if value is None and self.optional:
            return
        kinds = [kind for kind in _members(self.type) if kind is not type(None)]
        if any(_is_instance(value, kind) for kind in kinds if kind not in (bool, int, float, str)):
            return  # an object that is used as it is, such as a memory or an optimizer's class
        among, reads = self.limits.get("among"), self.limits.get("reads")
        if str in kinds and isinstance(value, str):
            if among:
                check_name(self.name, value, among)
            if reads:
                reads(value)
        elif bool in kinds:
            if not isinstance(value, bool):
                raise invalid(self.name, value, "true or false")
        elif int in kinds or float in kinds:
            bounds = {key: limit for key, limit in self.limits.items() if key in SIGNS}
            check_number(self.name, value, whole=float not in kinds, **bounds)
        elif str in kinds:
            expected = f"one of {self.allowed}" if among else "a name"
            raise invalid(self.name, value, expected if len(kinds) == 1 and not reads else self.about)
        if among and value not in among:
            raise invalid(self.name, value, f"one of {self.allowed}")

    def taken(self, value: Any) -> Any:
        """Check a value and return it as it is stored: NumPy numbers become Python's, and integers floats if allowed.

        >>> Option("lr", float, 0.1, "learning rate", {"above": 0}).taken(1)
        1.0
        """
        value = plain(value)
        self.check(value)
        kinds = _members(self.type)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return float(value) if is_whole and float in kinds and int not in kinds else value

    def parse(self, text: str) -> Any:
        """Parse a `text` from the command line, and check the value."""
        return self.taken(_parse(self, text))


def options_of(cls: type) -> dict[str, Option]:
    """The options of a dataclass, by name. A subclass may override just a default: help and limits are inherited."""
    return dict(_options_of(cls))


@cache  # a run's key needs those of several classes, and resolving type hints is slow
def _options_of(cls: type) -> dict[str, Option]:
    hints = typing.get_type_hints(cls)
    return {
        field.name: Option(field.name, hints[field.name], field.default, **metadata)
        for field, metadata in _option_fields(cls)
    }


def _option_fields(cls: type) -> list[tuple[dataclasses.Field[Any], Mapping[str, Any]]]:
    """The fields of a dataclass that are options, each with the metadata that the most derived class gives it."""
    metadata: dict[str, Mapping[str, Any]] = {}
    for base in reversed(cls.__mro__):  # the most derived last
        for field in vars(base).get("__dataclass_fields__", {}).values():
            if field.metadata:
                metadata[field.name] = field.metadata
    return [(field, metadata[field.name]) for field in dataclasses.fields(cls) if field.name in metadata]


def documented(about: str, cls: type) -> str:
    """A dataclass's docstring with its options appended, for `help`: each with its default and purpose.

    >>> @dataclass
    ... class Settings:
    ...     rate: float = option(0.1, "learning rate", above=0)
    >>> print(documented("How to learn.", Settings))
    How to learn.
    <BLANKLINE>
    Options:
        rate=0.1: learning rate
    """
    lines = [f"    {field.name}={field.default!r}: {metadata['about']}" for field, metadata in _option_fields(cls)]
    return "\n".join([inspect.cleandoc(about), "", "Options:", *lines])


def check_options(instance: Any) -> None:
    """Check every option of a dataclass instance against its limits, and store it as `Option.taken` returns it."""
    for name, option in options_of(type(instance)).items():
        object.__setattr__(instance, name, option.taken(getattr(instance, name)))  # the instance may be frozen


def no_option(cls: type, name: str) -> str:
    """The remedy for a name that is a field of a dataclass but not an option; empty if it is no field.

    >>> @dataclass
    ... class Settings:
    ...     rate: float = 0.1
    >>> no_option(Settings, "rate")
    'it is a field of the class, but not an option(...)'
    """
    fields = {field.name for field in dataclasses.fields(cls)}
    return "it is a field of the class, but not an option(...)" if name in fields - options_of(cls).keys() else ""


def parse_option(known: Mapping[str, Option], name: str, text: str) -> Any:
    """Parse `text` for the option `name`; the error for an unknown name suggests the nearest known one."""
    check_name("settings", name, known)
    return known[name].parse(text)


def write_option(value: Any) -> str:
    """A value as it is written on the command line.

    >>> write_option(None), write_option(True), write_option(0.05)
    ('none', 'true', '0.05')
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return value.__name__ if isinstance(value, type) else str(value)


def _members(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the only one."""
    union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    return typing.get_args(kind) if union else (kind,)


def _is_instance(value: Any, kind: Any) -> bool:
    """Whether a value is an instance of `kind`, which is a class, `Any` or a `Callable[...]`."""
    if kind is Any:
        return True
    if typing.get_origin(kind) is Callable:
        return callable(value)
    return isinstance(kind, type) and isinstance(value, kind)


def _parse(option: Option, text: str) -> Any:
    kinds = _members(option.type)
    if option.optional and text.lower() == "none":
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    return text


def dotted(nested: Mapping[str, Any]) -> dict[str, Any]:
    """A nested mapping as a flat one, whose names are paths with dots; empty groups are left out.

    >>> dotted({"forgetting": {"memory": {"mean": 0.5}}, "first_among_own": 0.25, "options": {}})
    {'forgetting.memory.mean': 0.5, 'first_among_own': 0.25}
    """
    flat = dict[str, Any]()
    for name, value in nested.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}": leaf for key, leaf in dotted(value).items()}
        else:
            flat[str(name)] = value
    return flat
