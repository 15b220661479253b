"""Groups of options that several commands share: dataclasses, whose fields are declared as a command's parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

__all__ = ["with_groups"]


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of each of its parameters that is a group, in the place of that parameter."""
    signature = inspect.signature(command, eval_str=True)
    parameters = signature.parameters.values()
    groups: dict[str, Any] = {each.name: each.annotation for each in parameters if is_dataclass(each.annotation)}
    options = []
    for parameter in parameters:
        if parameter.name not in groups:
            options.append(parameter)
            continue
        group = groups[parameter.name]
        types = get_type_hints(group, include_extras=True)
        options += [
            parameter.replace(name=field.name, default=field.default, annotation=types[field.name])
            for field in fields(group)
        ]

    @functools.wraps(command)
    def call(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    call.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    return call
