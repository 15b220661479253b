"""The two statements of the theory that are measured, and the names of the quantities in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["STATEMENTS", "Statement"]


@dataclass(frozen=True)
class Statement:
    """A statement, and the names of the losses that it compares, as `parabolic.engine.theory.bounds` has them."""

    name: str
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
