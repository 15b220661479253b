"""Learners by name: those of this folder, those of installed packages, and any class by its path."""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from functools import cache
from importlib import metadata
from pathlib import Path

from parabolic.checks import InputError, check_name, first_line, invalid
from parabolic.learners.learner import Learner
from parabolic.options import options_of
from parabolic.plugins import load_object

__all__ = ["find_learner", "known_learners"]


def known_learners() -> dict[str, type[Learner]]:
    """Every learner with a name, from this folder or an entry point of the group `parabolic.learners`.

    A learner that cannot be imported, or has the name of one of ours, is left out with a warning.

    >>> known_learners()["pcl"].__name__
    'PCL'
    """
    learners = dict(built_in())
    for name, point in _learner_points().items():
        if name in learners:
            _warn(f"the learner {name!r} of {_package(point)} is left out: the name is taken; give it another one")
            continue
        try:
            learners[name] = _load_point(point)
        except InputError as error:
            _warn(f"the learner {name!r} is left out: {error.remedy}")
    return learners


@cache  # called several times per run key
def built_in() -> dict[str, type[Learner]]:
    """The learners of this folder."""
    learners: dict[str, type[Learner]] = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        for value in vars(importlib.import_module(f"parabolic.learners.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Learner) and value.name:
                learners[value.name] = value
    return learners


@cache  # the search reads a file of every installed package
def entry_points(group: str) -> metadata.EntryPoints:
    """The entry points of installed packages in a group."""
    return metadata.entry_points(group=group)


def find_learner(name: str) -> type[Learner]:
    """The learner called `name`, or the one at `module:Class` or `file.py:Class`.

    >>> find_learner("pcl").__name__
    'PCL'
    """
    if ":" in name:
        cls = _check_class(name, load_object("learner", name))
        options_of(cls)  # resolves its annotations now: modules beside its file may later give way to others
        return cls
    if name in built_in():
        return built_in()[name]
    if name not in _learner_points():
        check_name("learner", name, known_learners(), "`parabolic list` shows them; module:Class names your own")
    return _load_point(_learner_points()[name])


def _learner_points() -> dict[str, metadata.EntryPoint]:
    """The entry points of learners of installed packages, by name."""
    return {point.name: point for point in entry_points("parabolic.learners")}


def _load_point(point: metadata.EntryPoint) -> type[Learner]:
    """The learner that an entry point names; raises an error that says why it cannot be used."""
    try:
        return _check_class(point.value, point.load())
    except Exception as error:  # foreign code may raise anything
        package = _package(point)
        remedy = f"{package} cannot be used ({first_line(error)}): fix or remove it"
        raise invalid("learner", point.name, f"a learner, as {package} declares", remedy) from error


def _package(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value


@cache  # so that each warning appears once
def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def _check_class(path: str, value: object) -> type[Learner]:
    if not (isinstance(value, type) and issubclass(value, Learner)):
        raise invalid("learner", path, "a subclass of parabolic.Learner")
    return value
