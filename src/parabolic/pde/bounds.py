"""Bounds that the equation implies for the loss elsewhere: Proposition 1, Corollary 1 and Remark 1 as numbers.

All three rest on u being an expectation of losses at the places where paths end. A path ends on the edge of the domain,
that is, on the memory's balls or on the hull, *or inside, if the time is up first*. The paper's Proposition 1 and the
lower bound of its Corollary 1 leave out that last case. As printed, both hold if every path has time to stop; if not,
the proposition holds for losses that are largest on the edge, such as convex ones, and the lower bound for losses that
are smallest there, such as concave ones. So each is given both ways: `bound` and `lower` include the inside and always
hold, `stated` and `stated_lower` are the paper's. The largest and smallest losses are those of sampled points.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor

from parabolic.checks import InputError, check_call, check_finite, check_number, invalid
from parabolic.pde.domain import Domain, MemoryDomain
from parabolic.pde.feynman_kac import Drift, Loss, Mean, losses_at, solve, walk

__all__ = [
    "DriftBound",
    "ForgettingBound",
    "GeneralisationBound",
    "Range",
    "drift_bound",
    "forgetting_bound",
    "generalisation_bound",
]


ROUNDING = 16  # by how many units of rounding two sums of the same losses may differ


@dataclass(frozen=True)
class Range:
    """The minimum, mean and maximum of some losses."""

    min: float
    mean: float
    max: float


@dataclass(frozen=True)
class ForgettingBound:
    """Proposition 1 for one loss; see `forgetting_bound`."""

    memory: Range  # of the loss over the memory
    edge: Range  # over points of the balls around it and of the hull's surface
    inside: Range  # over points inside the hull, where paths end if the time is up first
    past: Range | None = None  # over past data, if given
    covered: float | None = None  # the share of past data in the domain: the bound applies to those only

    def ahead(self, tau: float, constant: float | None = None) -> GeneralisationBound:
        """Corollary 1 from the same ranges; see `generalisation_bound`."""
        check_number("tau", tau, at_least=0)
        if constant is None:
            constant = self.bound
        check_number("constant", constant, at_least=0)
        if not _at_most(self.bound, constant):
            remedy = "C is a bound on the loss itself, not on its slope; leave it out for the largest loss found"
            raise invalid("constant", constant, f"at least {self.bound:g}, a loss found on the domain", remedy)
        return GeneralisationBound(float(tau), float(constant), self.memory, self.edge, self.inside)

    @property
    def stated(self) -> float:
        """The bound as stated in the paper: the largest loss over memory and edge."""
        return max(self.memory.max, self.edge.max)

    @property
    def bound(self) -> float:
        """The bound that always holds: the largest loss over memory, edge and inside."""
        return max(self.stated, self.inside.max)

    @property
    def realised(self) -> float | None:
        """The mean loss over past data, which is bounded."""
        return None if self.past is None else self.past.mean

    @property
    def slack(self) -> float | None:
        """How far the realised loss is below the bound; negative if it exceeds it."""
        return None if self.realised is None else self.bound - self.realised

    @property
    def holds(self) -> bool | None:
        """Whether the realised loss is within the bound, up to rounding; None without past data."""
        return None if self.realised is None else _at_most(self.realised, self.bound)


@dataclass(frozen=True)
class GeneralisationBound:
    """Corollary 1 for one loss and a time τ ahead; see `generalisation_bound`."""

    tau: float
    constant: float  # C, which bounds the loss on the domain
    memory: Range
    edge: Range
    inside: Range
    future: Range | None = None
    covered: float | None = None

    @property
    def stated_lower(self) -> float:
        """The lower bound as stated in the paper: the smallest loss over memory and edge."""
        return min(self.memory.min, self.edge.min)

    @property
    def lower(self) -> float:
        """The lower bound that always holds: the smallest loss over memory, edge and inside."""
        return min(self.stated_lower, self.inside.min)

    @property
    def upper(self) -> float:
        """C·τ plus the largest loss over memory, edge and inside, as in the paper."""
        return self.constant * self.tau + max(self.memory.max, self.edge.max, self.inside.max)

    @property
    def realised(self) -> float | None:
        """The mean loss over future data, which is bounded."""
        return None if self.future is None else self.future.mean

    @property
    def slack(self) -> float | None:
        """How far the realised loss is from the nearer bound; negative if it is beyond it."""
        return None if self.realised is None else min(self.realised - self.lower, self.upper - self.realised)

    @property
    def holds(self) -> bool | None:
        """Whether the realised loss is within both bounds, up to rounding; None without future data."""
        if self.realised is None:
            return None
        return _at_most(self.lower, self.realised) and _at_most(self.realised, self.upper)


@dataclass(frozen=True)
class DriftBound:
    """Remark 1 at n points; each field is a tensor `[n]`; see `drift_bound`."""

    base: Tensor  # the bound on −log u without drift
    gap: Tensor  # what the drift adds to it
    error: Tensor  # the standard error of their sum
    rate: Tensor  # the derivative of the gap at t = 0: zero exactly where the drift is zero, or where no path runs
    realised: Tensor  # −log u with drift, from simulated paths
    realised_error: Tensor

    @property
    def bound(self) -> Tensor:
        """The bound on −log u with drift."""
        return self.base + self.gap

    @property
    def stated_gap(self) -> Tensor:
        """The gap as stated in the paper, twice as large: it applies the weight to both terms of u."""
        return 2 * self.gap

    @property
    def slack(self) -> Tensor:
        """How far −log u is below its bound."""
        return self.bound - self.realised

    @property
    def holds(self) -> bool:
        """Whether the bound holds at every point, within three standard errors and rounding."""
        # A relative error of u is an absolute error of its logarithm. Where no path runs the bound is an equality.
        rounding = ROUNDING * torch.finfo(self.base.dtype).eps * (1 + self.bound.abs())
        # Where a path meets no loss at all, the bound is infinite and its error NaN: it is not violated there.
        violated = self.slack < -3 * torch.hypot(self.error, self.realised_error) - rounding
        return not bool((violated | self.bound.isnan() | self.realised.isnan()).any())


def forgetting_bound(
    loss: Loss,
    domain: MemoryDomain,
    past: Tensor | None = None,
    *,
    samples: int = 256,
    generator: Generator | None = None,
) -> ForgettingBound:
    """Proposition 1: the expected loss on past data is at most the largest loss on memory and hull.

    For ∂u/∂t = −∇²u + ℓ with u = ℓ now and on the edge, u(x, t − τ) = E[ℓ(X_end) − ∫ℓ ds] ≤ max ℓ, as the
    losses along a path are not negative.

    Args:
        loss: ℓ, which maps points `[n, *shape]` to losses `[n]`, none negative.
        domain: the domain of the memory.
        past: past data `[n, *shape]`, for the realised loss.
        samples: how many points of the edge, and how many inside, are searched for the largest loss.
        generator: the source of random numbers; torch's global one by default.

    >>> from parabolic.pde import MemoryDomain
    >>> memory = MemoryDomain(torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0]]), eps=0.01)
    >>> found = forgetting_bound(lambda x: x.square().sum(1), memory, past=torch.tensor([[0.5, 0.5]]))
    >>> found.memory
    Range(min=0.0, mean=2.6666666666666665, max=4.0)
    >>> found.realised, found.holds
    (0.5, True)
    """
    check_number("samples", samples, whole=True, at_least=2)
    if not all(hasattr(domain, name) for name in ("points", "edge", "interior")):
        raise invalid("domain", domain, "a MemoryDomain, as the bounds are about a memory")
    points = domain.points, domain.edge(samples, generator), domain.interior(samples, generator)
    memory, edge, inside = (_loss_range(loss, sample) for sample in points)
    return ForgettingBound(memory, edge, inside, *_data_range("past", loss, domain, past))


def generalisation_bound(
    loss: Loss,
    domain: MemoryDomain,
    tau: float,
    future: Tensor | None = None,
    *,
    constant: float | None = None,
    samples: int = 256,
    generator: Generator | None = None,
) -> GeneralisationBound:
    """Corollary 1: the expected loss on data a time τ ahead lies between min ℓ and C·τ + max ℓ.

    For ∂u/∂t = ∇²u + ℓ with u = ℓ now and on the edge, u(x, t + τ) = E[ℓ(X_end) + ∫ℓ ds], and the integral
    lies between 0 and C·τ, if C bounds the loss on the domain (the paper calls it a Lipschitz constant).

    Args:
        loss: see `forgetting_bound`.
        domain: see `forgetting_bound`.
        tau: how far ahead, 0 or more.
        future: future data `[n, *shape]`, for the realised loss.
        constant: C, if known: a bound on the loss, not its Lipschitz constant; refused if a larger loss is found. By
            default the largest loss found on memory, edge and inside: an estimate from below, which more samples
            improve.
        samples: see `forgetting_bound`.
        generator: see `forgetting_bound`.

    >>> from parabolic.pde import MemoryDomain
    >>> memory = MemoryDomain(torch.tensor([[0.0], [2.0]]), eps=0.01)
    >>> found = generalisation_bound(lambda x: 1 + x[:, 0].abs(), memory, tau=0.5, constant=3.1)
    >>> round(found.lower, 1), round(found.upper, 1)
    (1.0, 4.6)
    """
    check_number("tau", tau, at_least=0)
    bound = forgetting_bound(loss, domain, samples=samples, generator=generator).ahead(tau, constant)
    realised, covered = _data_range("future", loss, domain, future)
    return replace(bound, future=realised, covered=covered)


def drift_bound(
    loss: Loss,
    x: Tensor,
    t: float,
    domain: Domain,
    sigma: float,
    drift: Drift,
    *,
    paths: int = 1000,
    steps: int = 100,
    chunk: int | None = None,
    generator: Generator | None = None,
) -> DriftBound:
    """Remark 1: what a drift μ, such as the gradient of a convex φ, adds to the bound on −log u.

    With payoff A = ℓ(X_end) + ∫ℓ ds and Girsanov weight w on driftless paths, u = E[wA], and by Jensen
    −log u ≤ E[−log A] + E[−log w]. The first term is the bound without drift; the second is the gap,
    E[∫‖μ‖² ds]/4σ ≥ 0. (The paper, where σ = ½, bounds −log of the two terms of A separately, which is valid
    only where their product is less than their sum, and gets twice this gap: E[∫‖μ‖² ds].)

    For small t the gap is its `rate` at t = 0, ‖μ(x)‖²/4σ, times t: zero where ∇φ is, at φ's minimisers. There the gap
    itself is not zero, as paths leave them, but of order t². It is small near the edge too, where paths stop early.

    The arguments are those of `solve`; the loss must be positive.

    >>> from parabolic.pde import Hull, gradient_of
    >>> interval = Hull(torch.tensor([[-2.0], [2.0]]))
    >>> valley = gradient_of(lambda x: x.square().sum(1) / 2)
    >>> found = drift_bound(lambda x: 1 + x[:, 0] ** 2, torch.tensor([[0.0], [1.0]]), 0.1, interval, 0.5, valley)
    >>> found.rate, found.holds
    (tensor([0.0000, 0.5000]), True)
    """
    check_call("drift", drift, "x")
    options: dict[str, Any] = {"paths": paths, "steps": steps, "chunk": chunk, "generator": generator}
    u = solve(loss, x, t, domain, sigma, drift, **options)
    bases, gaps, totals = Mean(x), Mean(x), Mean(x)
    for rows, batch in walk(loss, x, t, domain, sigma, drift, by="reweight", **options):
        base = -(batch.end + batch.integral).double().log()
        for mean, values in ((bases, base), (gaps, batch.energy), (totals, base + batch.energy)):
            mean.add(rows, values)
    rate = drift(x).flatten(1).square().sum(1) / (4 * sigma) * (domain.hit(x) > 0)
    fields = (bases.value, gaps.value, totals.error, rate, -u.mean.log(), u.error / u.mean)
    return DriftBound(*(field.detach().to(x.dtype) for field in fields))


def _data_range(name: str, loss: Loss, domain: Domain, data: Tensor | None) -> tuple[Range | None, float | None]:
    """The range of the loss over data, and the share of the data in the domain."""
    if data is None:
        return None, None
    if not isinstance(data, Tensor):
        raise invalid(name, type(data), "a tensor of points", f"convert it with torch.as_tensor({name})")
    if not len(data):
        raise invalid(name, data, "at least one point", "leave it out if there are none")
    try:
        covered = float(domain.inside(data).double().mean())
    except InputError as error:  # the domain's argument, under the caller's name
        error.name = name
        raise
    check_finite(name, data)
    return _loss_range(loss, data), covered


def _at_most(one: float, other: float) -> bool:
    """Whether a loss is at most another, up to rounding, which differs between batches of different sizes."""
    return one <= other or math.isclose(one, other, rel_tol=ROUNDING * torch.finfo(torch.float32).eps)


@torch.no_grad()
def _loss_range(loss: Loss, points: Tensor) -> Range:
    return range_of(torch.cat([losses_at(loss, part) for part in torch.split(points, 1024)]))


def range_of(losses: Tensor) -> Range:
    """The range of some losses."""
    return Range(float(losses.min()), float(losses.double().mean()), float(losses.max()))
