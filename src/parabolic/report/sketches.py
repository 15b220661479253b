"""What a learner's class says of itself. That of a file is read, not run: a stored run may name a stranger's."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from parabolic.experiments import RunSpec
from parabolic.experiments.spec import SHARED
from parabolic.learners import Learner, find_learner, known_learners
from parabolic.options import options_of
from parabolic.plugins import is_loaded

__all__ = ["Sketch", "sketch"]


@dataclass(frozen=True)
class Sketch:
    """A learner's class: the name that it states itself, whether it learns all tasks at once, its options' defaults."""

    name: str
    sees_all: bool
    defaults: Mapping[str, Any]


def sketch(learner: str) -> Sketch | None:
    """A learner's class, by its name or as `file.py:Class` or `module:Class`; None if it is not there.

    One that has not been imported is known as far as it is written out.

    >>> sketch("joint").sees_all, sketch("gone.py:Mine")
    (True, None)
    """
    place, _, own = learner.rpartition(":")
    with suppress(Exception):  # anything can be wrong in a user's file
        if is_loaded(learner):
            found = find_learner(learner)
            return Sketch(_text(vars(found).get("name")), found.sees_all, RunSpec(learner).resolved()["options"])
        return _read(own, _source(place))
    return None


@lru_cache(maxsize=64)  # by the contents of the file, which tables of many methods ask for again and again
def _read(own: str, source: bytes) -> Sketch:
    body = ast.parse(source).body
    drawn = _drawn(own, {each.name: each for each in body if isinstance(each, ast.ClassDef)})
    return replace(drawn, defaults={name: drawn.defaults[name] for name in drawn.defaults if name not in SHARED})


def _source(place: str) -> bytes:
    if place.endswith(".py"):
        return Path(place).read_bytes()
    folders, spec, parts = None, None, place.split(".")
    for end in range(1, len(parts) + 1):  # importlib.util.find_spec would import the packages around a module
        spec = PathFinder.find_spec(".".join(parts[:end]), folders)
        folders = spec.submodule_search_locations if spec else []
    if spec is None or spec.origin is None:
        raise LookupError(place)
    return Path(spec.origin).read_bytes()


def _drawn(name: str, classes: Mapping[str, ast.ClassDef]) -> Sketch:
    """The sketch of a class of a file, or else of this package."""
    if name not in classes:
        known_learners()  # imports all of them
        known = {each.__name__: each for each in _subclasses(Learner)}[name]
        return Sketch("", known.sees_all, {each: option.default for each, option in options_of(known).items()})
    node, others = classes[name], {each: classes[each] for each in classes if each != name}
    bases = [_drawn(_last(each), others) for each in reversed(node.bases)]
    defaults = {option: value for base in bases for option, value in base.defaults.items()}
    told: dict[str, Any] = {"sees_all": any(base.sees_all for base in bases)}
    for option, value in _assigned(node):
        if isinstance(value, ast.Call) and _last(value.func) == "option":
            value = [*value.args, *(each.value for each in value.keywords if each.arg == "default")][0]
            defaults[option] = None
        plain: Any = _Unknown()
        with suppress(ValueError, TypeError):
            plain = ast.literal_eval(value)
        (defaults if option in defaults else told)[option] = plain
    return Sketch(_text(told.get("name")), told["sees_all"] is True, defaults)


def _text(stated: Any) -> str:
    return stated if isinstance(stated, str) else ""


class _Unknown:
    """A default that is computed: it equals no value."""


def _assigned(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """What a class assigns in its body, by name."""
    for each in node.body:
        if isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None:
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            yield from ((target.id, each.value) for target in targets if isinstance(target, ast.Name))


def _last(node: ast.expr) -> str:
    """The last part of a dotted name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    raise LookupError(ast.dump(node))


def _subclasses(cls: type[Learner]) -> Iterator[type[Learner]]:
    """A class of this package and those made from it."""
    if cls.__module__.startswith("parabolic."):
        yield cls
        for each in cls.__subclasses__():
            yield from _subclasses(each)
