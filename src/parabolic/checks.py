"""Checks of arguments, and the one error that they raise.

Every error text has the same form: the argument's name, what was given, what was expected, what to do.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "CONTROL", "DEVICE_ERRORS", "FILL_IN", "SIGNED", "UNREADABLE", "CallError", "InputError", "all_finite",
    "check_call", "check_finite", "check_gaps", "check_generator", "check_module", "check_name", "check_number",
    "check_plain", "digits", "encodable", "first_line", "invalid", "plain", "short_of_memory", "signed", "type_name",
    "with_causes",
]  # fmt: skip

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # and what is no UTF-8
# What may be raised when JSON of unknown origin is read as if it were well-formed.
UNREADABLE = (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError)

DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)  # the machine is to blame, not what it was given
FILL_IN = "fill in what is missing"
SIGNED = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}  # without loss
MANY, FEW = 24, 4  # if there are more than MANY names, an error lists only the FEW nearest


class InputError(ValueError):
    """An argument or input cannot be used; the message names it and says what to do.

    >>> from parabolic import PCL
    >>> import torch
    >>> PCL(torch.nn.Linear(2, 2), lr=-1)
    Traceback (most recent call last):
        ...
    parabolic.checks.InputError: lr: got -1, expected a number above 0

    The parts of the message are attributes (empty in an error created from a message alone). A caller that exposes the
    argument under another name can set that:

    >>> try:
    ...     PCL(torch.nn.Linear(2, 2), lr=-1)
    ... except InputError as error:
    ...     error.name, error.got, error.expected, error.remedy
    ...     error.name = "--rate"
    ...     print(error)
    ('lr', '-1', 'a number above 0', '')
    --rate: got -1, expected a number above 0
    """

    name: str = ""
    got: str = ""
    expected: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        if not self.expected:
            return super().__str__()
        return f"{self.name}: got {self.got}, expected {self.expected}" + (f"; {self.remedy}" if self.remedy else "")


class CallError(InputError, TypeError):
    """A call with arguments that do not exist: also a TypeError, which Python itself would raise."""


def invalid(
    name: str, got: object, expected: str, remedy: str = "", *, kind: type[InputError] = InputError
) -> InputError:
    """The error for argument `name`: what was given, what was expected, and how to fix it.

    >>> str(invalid("sigma", -1, "a number of at least 0", "pass 0 for no noise"))
    'sigma: got -1, expected a number of at least 0; pass 0 for no noise'
    """
    error = kind()
    error.name, error.got, error.expected, error.remedy = name, _short_repr(got), expected, remedy
    error.args = (str(error),)  # as in any other exception
    return error


def _short_repr(got: object) -> str:
    """One short line for any value: tensors by their shape and type, never by their contents."""
    if isinstance(got, Tensor):
        return f"a tensor of shape {list(got.shape)} and type {type_name(got.dtype)}"
    text = got if isinstance(got, Description) else " ".join(line.strip() for line in repr(got).splitlines())
    return text if len(text) <= 120 else text[:117] + "..."


class Description(str):
    """A description of what was given, shown as it is rather than quoted."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type if it has none.

    >>> first_line(RuntimeError("out of memory\\nin a long story"))
    'out of memory'
    """
    return (str(error).splitlines() or [type(error).__name__])[0]


def short_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, says that a device is out of memory.

    Torch's allocator has an error class for this; errors of CUDA and its libraries, which allocate memory of their own,
    can only be recognised by their messages.

    >>> short_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")), short_of_memory(RuntimeError("no"))
    (True, False)
    """
    return any(
        isinstance(each, torch.OutOfMemoryError)
        or "CUDA error: out of memory" in str(each)
        or "ALLOC_FAILED" in str(each)
        for each in with_causes(error)
    )


def with_causes(error: BaseException | None, *, hidden: bool = False) -> Iterator[BaseException]:
    """An error and those that caused it, each once: one that was raised from itself is its own cause.

    Those behind a `raise … from None` are left out unless `hidden`.

    >>> [type(each).__name__ for each in with_causes(ValueError())]
    ['ValueError']
    """
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        is_end = error.__suppress_context__ and not hidden
        error = error.__cause__ or (None if is_end else error.__context__)


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
    """Refuse `value` unless it is a finite number (an integer, with `whole`) within the given limits.

    NumPy numbers, as from `np.arange` and scikit-learn's grids, are accepted too: see `plain`.
    """
    value, kind = plain(value), int if whole else (int, float)
    fits = (
        isinstance(value, kind)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max  # integers may be too large for a float
        and (above is None or value > above)
        and (at_least is None or value >= at_least)
        and (below is None or value < below)
        and (at_most is None or value <= at_most)
    )
    if not fits:
        limits = (("above", above), ("of at least", at_least), ("below", below), ("of at most", at_most))
        bounds = " and ".join(f"{word} {digits(limit)}" for word, limit in limits if limit is not None)
        raise invalid(name, value, f"{'a whole number' if whole else 'a number'} {bounds}".strip(), remedy)


def digits(limit: float) -> str:
    """A limit as messages show it: an integer with all its digits, another number with the first few.

    >>> digits(2**31), digits(1.0), digits(1 / 3)
    ('2147483648', '1', '0.333333')
    """
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def type_name(dtype: torch.dtype) -> str:
    """A type as messages show it.

    >>> type_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


def plain(value: Any) -> Any:
    """Convert a NumPy number or bool to Python's own type, as files and run keys need; return all else unchanged.

    >>> plain(np.int64(3)), plain(np.bool_(True)), plain("er")
    (3, True, 'er')
    """
    return value.item() if isinstance(value, np.number | np.bool_) else value


def check_call(name: str, function: Any, *positional: str, **keywords: object) -> None:
    """Refuse a `function` that cannot be called with these positional and keyword arguments.

    >>> check_call("prepare", abs, "x")
    >>> check_call("prepare", 3, "x")
    Traceback (most recent call last):
        ...
    parabolic.checks.InputError: prepare: got 3, expected a function that is called as prepare(x)
    """
    try:
        inspect.signature(function).bind(*positional, **keywords)
    except ValueError:  # some functions written in C have no signature
        return
    except TypeError as error:
        call = ", ".join([*positional, *(f"{key}={key}" for key in keywords)])
        raise invalid(name, function, f"a function that is called as {name}({call})") from error


def check_generator(generator: object) -> None:
    """Refuse anything but a generator or None; for a seed, the error says how to make a generator from it.

    >>> check_generator(3)
    Traceback (most recent call last):
        ...
    parabolic.checks.InputError: generator: got 3, expected a torch.Generator; pass torch.Generator().manual_seed(3)
    """
    if generator is not None and not isinstance(generator, torch.Generator):
        seed = generator if isinstance(generator, int) else 0
        remedy = f"pass torch.Generator().manual_seed({int(seed)})"
        raise invalid("generator", generator, "a torch.Generator", remedy)


def check_module(name: str, value: object) -> None:
    """Refuse anything but a module; for a class or function that makes one, the error says what to pass instead.

    >>> check_module("model", torch.nn.Linear)
    Traceback (most recent call last):
        ...
    parabolic.checks.InputError: model: got the class Linear, expected a torch.nn.Module; pass one made of it: Linear(…)
    """
    if isinstance(value, torch.nn.Module):
        return
    if isinstance(value, type):
        remedy = f"pass one made of it: {value.__name__}(…)" if issubclass(value, torch.nn.Module) else ""
        raise invalid(name, Description(f"the class {value.__name__}"), "a torch.nn.Module", remedy)
    raise invalid(name, value, "a torch.nn.Module", "call it, and pass what it returns" if callable(value) else "")


def check_name(
    name: str, value: object, known: Iterable[str], remedy: str = "", *, kind: type[InputError] = InputError
) -> None:
    """Refuse `value` unless it is one of the `known` names; the error suggests the nearest, then the remedy.

    >>> check_name("learner", "pcll", ["pcl", "er"], "see `parabolic list`")
    Traceback (most recent call last):
        ...
    parabolic.checks.InputError: learner: got 'pcll', expected one of er, pcl; did you mean 'pcl'? see `parabolic list`
    >>> check_name("optimizer", "sgd", ["SGD", "Adam"])
    Traceback (most recent call last):
        ...
    parabolic.checks.InputError: optimizer: got 'sgd', expected one of Adam, SGD; did you mean 'SGD'?
    """
    names = sorted(known)
    if value in names:
        return
    by_lowercase = {known_name.casefold(): known_name for known_name in names}
    near = [by_lowercase[match] for match in difflib.get_close_matches(str(value).casefold(), by_lowercase, n=FEW)]
    hint = f"did you mean {near[0]!r}? {remedy}".strip() if near else remedy
    listed = names if len(names) <= MANY else sorted(near) or names[:FEW]
    expected = "one of " if listed is names else f"one of {len(names)} names such as "
    raise invalid(name, value, expected + ", ".join(listed), hint, kind=kind)


def all_finite(value: Tensor) -> bool:
    """Whether a floating tensor holds no NaN and no infinity."""
    # The sum usually suffices, and needs no mask; but it may overflow although all entries are finite.
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())


def check_gaps(name: str, value: Any) -> None:
    """Refuse a masked array with masked entries: the data under a mask are not values."""
    if isinstance(value, np.ma.MaskedArray) and (masked := int(np.ma.getmaskarray(value).sum())):
        raise invalid(name, Description(f"an array with {masked} masked values"), "one without gaps", FILL_IN)


def check_plain(name: str, value: Tensor) -> None:
    """Refuse a tensor of a layout or type that torch cannot index."""
    if value.is_nested:
        raise invalid(name, Description("a nested tensor"), "a plain tensor", "convert it with .to_padded_tensor(0.0)")
    if value.layout != torch.strided or value.is_quantized:
        raise invalid(name, value, "a plain tensor", "convert it with .to_dense() or .dequantize()")
    if value.is_floating_point() and value.dtype.itemsize == 1:  # torch can neither sum nor index them
        raise invalid(name, value, "floating-point numbers of at least 16 bits", "convert them with .half()")


def signed(name: str, value: Tensor) -> Tensor:
    """Convert unsigned integers of more than a byte to signed ones: torch cannot store, compare or look up the former.

    >>> signed("x", torch.tensor([65535], dtype=torch.uint16))
    tensor([65535], dtype=torch.int32)
    """
    if value.dtype == torch.uint64 and bool((value.view(torch.long) < 0).any()):
        raise invalid(name, Description("whole numbers of 2**63 or more"), "smaller ones", "convert them to float64")
    return value.to(SIGNED.get(value.dtype, value.dtype))


def check_finite(name: str, value: Tensor, remedy: str = "clean or drop those examples") -> None:
    """Refuse a floating tensor that holds a NaN or an infinity, and say where the first one is."""
    if value.is_floating_point() and not all_finite(value):
        bad = ~torch.isfinite(value)
        first = [int(i) for i in bad.nonzero()[0]]
        got = Description(f"{int(bad.sum())} values that are NaN or infinite, the first at {first}")
        raise invalid(name, got, "finite numbers", remedy)


def encodable(value: Any) -> Any:
    r"""The value with strings that can be encoded and printed, also those in mappings.

    Bytes of a command that are not UTF-8, and control characters, which a terminal would obey, become escape sequences.

    >>> encodable({"command": "run \udcff", "reason": "\x1b[2J"})
    {'command': 'run \\udcff', 'reason': '\\x1b[2J'}
    """
    if isinstance(value, Mapping):
        return {name: encodable(item) for name, item in value.items()}
    if not isinstance(value, str):
        return value
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", value.encode("utf-8", "backslashreplace").decode())
