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

__all__ = ["Sketch", "sketch_of"]


@dataclass(frozen=True)
class Sketch:
    """A learner's class: the name that it states itself, whether it learns all tasks at once, its options' defaults."""

    name: str
    sees_all: bool
    defaults: Mapping[str, Any]


def sketch_of(learner: str) -> Sketch | None:
    """A learner's class, by its name or as `file.py:Class` or `module:Class`; None if it cannot be found.

    Of one that has not been imported, only literal values in its source are known.

    >>> sketch_of("joint").sees_all, sketch_of("gone.py:Mine")
    (True, None)
    """
    source, _, class_name = learner.rpartition(":")
    with suppress(Exception):  # anything can be wrong in a user's file
        if is_loaded(learner):
            cls = find_learner(learner)
            return Sketch(_text(vars(cls).get("name")), cls.sees_all, RunSpec(learner).resolved()["options"])
        return _sketch_from_source(class_name, _source(source))
    return None


@lru_cache(maxsize=64)  # by the contents of the file, which tables of many methods ask for again and again
def _sketch_from_source(class_name: str, source: bytes) -> Sketch:
    body = ast.parse(source).body
    full = _sketch_of_class(class_name, {node.name: node for node in body if isinstance(node, ast.ClassDef)})
    return replace(full, defaults={name: full.defaults[name] for name in full.defaults if name not in SHARED})


def _source(name: str) -> bytes:
    if name.endswith(".py"):
        return Path(name).read_bytes()
    folders, spec, parts = None, None, name.split(".")
    for end in range(1, len(parts) + 1):  # importlib.util.find_spec would import the packages around a module
        spec = PathFinder.find_spec(".".join(parts[:end]), folders)
        folders = spec.submodule_search_locations if spec else []
    if spec is None or spec.origin is None:
        raise LookupError(name)
    return Path(spec.origin).read_bytes()


def _sketch_of_class(name: str, classes: Mapping[str, ast.ClassDef]) -> Sketch:
    """The sketch of a class of a file, or else of this package."""
    if name not in classes:
        known_learners()  # imports all of them
        cls = {subclass.__name__: subclass for subclass in _subclasses(Learner)}[name]
        return Sketch("", cls.sees_all, {option: stated.default for option, stated in options_of(cls).items()})
    node, others = classes[name], {other: classes[other] for other in classes if other != name}
    bases = [_sketch_of_class(_last_part(base), others) for base in reversed(node.bases)]
    defaults = {option: value for base in bases for option, value in base.defaults.items()}
    attributes: dict[str, Any] = {"sees_all": any(base.sees_all for base in bases)}
    for option, value in _assignments(node):
        if isinstance(value, ast.Call) and _last_part(value.func) == "option":
            value = [*value.args, *(keyword.value for keyword in value.keywords if keyword.arg == "default")][0]
            defaults[option] = None
        literal: Any = _Unknown()
        with suppress(ValueError, TypeError):
            literal = ast.literal_eval(value)
        (defaults if option in defaults else attributes)[option] = literal
    return Sketch(_text(attributes.get("name")), attributes["sees_all"] is True, defaults)


def _text(stated: Any) -> str:
    return stated if isinstance(stated, str) else ""


class _Unknown:
    """A default that is computed: it equals no value."""


def _assignments(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """The names and values that a class assigns in its body."""
    for statement in node.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from ((target.id, statement.value) for target in targets if isinstance(target, ast.Name))


def _last_part(node: ast.expr) -> str:
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
        for subclass in cls.__subclasses__():
            yield from _subclasses(subclass)
