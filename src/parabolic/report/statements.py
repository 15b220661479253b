"""The two statements of the theory that are measured, and where `BoundsRow.as_dict` has the quantities in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["STATEMENTS", "Statement", "at"]


@dataclass(frozen=True)
class Statement:
    """A statement, and the places of the losses that it compares."""

    name: str  # as in `violations`
    task: str  # the task whose loss it bounds
    memory: str  # the loss on memory, with its `min`, `mean` and `max`
    competing: str  # the loss on the task, all classes competing
    among_own: str  # the same with only its own classes competing
    bounds: Mapping[str, str]  # by their names


STATEMENTS = {
    "forgetting": Statement(
        "Proposition 1",
        "first",
        "forgetting.memory",
        "forgetting.past.mean",
        "first_among_own",
        {"bound": "forgetting_bound"},
    ),
    "generalisation": Statement(
        "Corollary 1",
        "last",
        "generalisation.memory",
        "generalisation.future.mean",
        "last_among_own",
        {"lower bound": "generalisation_lower", "upper bound": "generalisation_upper"},
    ),
}
"""By the names of the paper's bound tables."""


def at(row: Mapping[str, Any], place: str) -> float:
    """The number at a dotted path in a row.

    >>> at({"forgetting": {"memory": {"mean": 0.5}}}, "forgetting.memory.mean")
    0.5
    """
    told: Any = row
    for name in place.split("."):
        told = told[name]
    return float(told)
