"""Checks of what a caller gives, and the one error they raise.

Every refusal reads the same way: the argument's name, what came, what was expected, what to do.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["InputError", "check_finite", "check_name", "check_number", "first_line", "invalid"]


class InputError(ValueError):
    """Something that was given cannot be used; the message names it and says what to do.

    >>> from parabolic import PCL
    >>> import torch
    >>> PCL(torch.nn.Linear(2, 2), lr=-1)
    Traceback (most recent call last):
        ...
    parabolic.checks.InputError: lr: got -1, expected a number above 0
    """


def invalid(name: str, got: object, expected: str, remedy: str = "") -> InputError:
    """The error for argument `name`: what came, what was expected, and how to mend it.

    >>> str(invalid("sigma", -1, "a number of at least 0", "pass 0 for no noise"))
    'sigma: got -1, expected a number of at least 0; pass 0 for no noise'
    """
    return InputError(f"{name}: got {_brief(got)}, expected {expected}" + (f"; {remedy}" if remedy else ""))


def _brief(got: object) -> str:
    """One short line for any value: tensors by their shape and type, never by their contents."""
    if isinstance(got, Tensor):
        return f"a tensor of shape {list(got.shape)} and type {str(got.dtype).removeprefix('torch.')}"
    text = got if isinstance(got, Description) else repr(got)
    return text if len(text) <= 120 else text[:117] + "..."


class Description(str):
    """Words that describe what came, shown as they are rather than quoted."""


def first_line(error: BaseException) -> str:
    """What an error says, in short: its first line, or its kind where it says nothing.

    >>> first_line(RuntimeError("out of memory\\nin a long story"))
    'out of memory'
    """
    return (str(error).splitlines() or [type(error).__name__])[0]


def check_number(
    name: str,
    value: Any,
    *,
    whole: bool = False,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    remedy: str = "",
) -> None:
    """Refuse `value` unless it is a finite number (a `whole` one, if asked) within the limits given."""
    kind = int if whole else (int, float)
    limits = [
        f"{word} {limit:g}"
        for word, limit in (
            ("above", above),
            ("of at least", at_least),
            ("below", below),
            ("of at most", at_most),
        )
        if limit is not None
    ]
    fits = (
        isinstance(value, kind)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and (above is None or value > above)
        and (at_least is None or value >= at_least)
        and (below is None or value < below)
        and (at_most is None or value <= at_most)
    )
    if not fits:
        noun = "a whole number" if whole else "a number"
        raise invalid(name, value, " ".join([noun, " and ".join(limits)]).strip(), remedy)


def check_name(name: str, value: object, known: Iterable[str], remedy: str = "") -> None:
    """Refuse `value` unless it is one of the `known` names; the error suggests the nearest.

    >>> check_name("learner", "pcll", ["pcl", "er"])
    Traceback (most recent call last):
        ...
    parabolic.checks.InputError: learner: got 'pcll', expected one of er, pcl; did you mean 'pcl'?
    """
    names = sorted(known)
    if value in names:
        return
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else remedy
    raise invalid(name, value, "one of " + ", ".join(names), hint)


def check_finite(name: str, value: Tensor) -> None:
    """Refuse a floating tensor that holds a NaN or an infinity, and say where the first one is."""
    if not value.is_floating_point():
        return
    # A sum is finite unless an entry is not (or it overflows): one pass and no mask in the usual case.
    if bool(torch.isfinite(value.sum())):
        return
    bad = ~torch.isfinite(value)
    count = int(bad.sum())
    if count:
        first = [int(i) for i in bad.nonzero()[0]]
        raise invalid(
            name,
            Description(f"{count} values that are NaN or infinite, the first at {first}"),
            "finite numbers",
            "clean or drop those examples",
        )
