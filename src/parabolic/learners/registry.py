"""Learners by name: the files of this folder, those of installed packages, and any class by its path."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from importlib import metadata
from pathlib import Path

from parabolic.checks import check_name, invalid
from parabolic.learners.learner import Learner
from parabolic.plugins import load_object

__all__ = ["find_learner", "known_learners"]


def known_learners() -> dict[str, type[Learner]]:
    """Every learner that has a name: one file of this folder each, or an entry point `parabolic.learners`.

    >>> known_learners()["pcl"].__name__
    'PCL'
    """
    announced = {point.name: _checked(point.value, point.load()) for point in entry_points("parabolic.learners")}
    return built_in() | announced


@cache  # a run's key asks several times
def built_in() -> dict[str, type[Learner]]:
    """The learners of this folder."""
    found: dict[str, type[Learner]] = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        for value in vars(importlib.import_module(f"parabolic.learners.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Learner) and value.name:
                found[value.name] = value
    return found


@cache  # looking reads a file of every package that is installed
def entry_points(group: str) -> metadata.EntryPoints:
    """What installed packages announce."""
    return metadata.entry_points(group=group)


def find_learner(name: str) -> type[Learner]:
    """The learner called `name`, or the one at `module:Class` or `file.py:Class`.

    >>> find_learner("pcl").__name__
    'PCL'
    """
    if ":" in name:
        return _checked(name, load_object("learner", name))
    if name in built_in() and name not in {point.name for point in entry_points("parabolic.learners")}:
        return built_in()[name]  # whatever may be wrong with another package
    known = known_learners()
    check_name("learner", name, known, "`parabolic list` shows them; module:Class names your own")
    return known[name]


def _checked(path: str, value: object) -> type[Learner]:
    if not (isinstance(value, type) and issubclass(value, Learner)):
        raise invalid("learner", path, "a subclass of parabolic.Learner")
    return value
