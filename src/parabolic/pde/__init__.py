"""The mathematics: bridges, stopped paths, domains and bounds, for tensors and without any learning."""

from parabolic.pde.bounds import (
    DriftBound,
    ForgettingBound,
    GeneralisationBound,
    Range,
    drift_bound,
    forgetting_bound,
    generalisation_bound,
)
from parabolic.pde.bridges import bridge, log_girsanov, on_simplex
from parabolic.pde.domain import Balls, Domain, Hull, Intersection, MemoryDomain
from parabolic.pde.feynman_kac import Drift, Estimate, Loss, gradient_of, solve, solve_by_bridges

__all__ = [
    "Balls",
    "Domain",
    "Drift",
    "DriftBound",
    "Estimate",
    "ForgettingBound",
    "GeneralisationBound",
    "Hull",
    "Intersection",
    "Loss",
    "MemoryDomain",
    "Range",
    "bridge",
    "drift_bound",
    "forgetting_bound",
    "generalisation_bound",
    "gradient_of",
    "log_girsanov",
    "on_simplex",
    "solve",
    "solve_by_bridges",
]
