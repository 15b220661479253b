"""What the equation says of the loss elsewhere: Proposition 1, Corollary 1 and Remark 1 as numbers.

All three rest on u being a mean of losses at the places where paths end. A path ends on the edge of the domain,
that is on the memory's balls or on the hull, *or inside, when the time is up first*. The paper's statements
leave that last place out; they hold as they are printed when every path has the time to stop, and for losses
that are largest on the edge, such as convex ones. So each bound is given both ways: `bound` takes the inside
in and always holds, `stated` is the paper's. The largest and least losses are those of sampled points.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from parabolic.checks import check_number, invalid
from parabolic.pde.domain import Domain
from parabolic.pde.feynman_kac import Drift, Loss, losses_at, solve, walk

__all__ = [
    "DriftBound",
    "ForgettingBound",
    "GeneralisationBound",
    "Range",
    "SampledDomain",
    "drift_bound",
    "forgetting_bound",
    "generalisation_bound",
]


ROUNDING = 16  # by how many last digits two sums of the same losses may differ


class SampledDomain(Domain, Protocol):
    """A domain that knows its memory and can scatter points over itself, as `MemoryDomain` does."""

    points: Tensor

    def interior(self, count: int, generator: Generator | None = None) -> Tensor:
        """Points scattered over the domain."""

    def edge(self, count: int, generator: Generator | None = None) -> Tensor:
        """Points scattered over what stops a path: the memory's balls and the hull's surface."""


@dataclass(frozen=True)
class Range:
    """The least, the mean and the largest of some losses."""

    min: float
    mean: float
    max: float


@dataclass(frozen=True)
class ForgettingBound:
    """Proposition 1 for one loss; see `forgetting_bound`."""

    memory: Range  # of the loss over the memory
    edge: Range  # over points of the balls round it and of the hull's surface
    inside: Range  # over points inside the hull, where paths end when the time is up
    past: Range | None = None  # over past data, where given
    covered: float | None = None  # the share of past data in the domain: the bound speaks of those only

    def ahead(self, tau: float, constant: float | None = None) -> GeneralisationBound:
        """Corollary 1 from the same pieces; see `generalisation_bound`."""
        check_number("tau", tau, at_least=0)
        if constant is None:
            constant = self.bound
        check_number("constant", constant, at_least=0)
        return GeneralisationBound(float(tau), float(constant), self.memory, self.edge, self.inside)

    @property
    def stated(self) -> float:
        """The bound as the paper has it: the largest loss over memory and edge."""
        return max(self.memory.max, self.edge.max)

    @property
    def bound(self) -> float:
        """The bound that always holds: the largest loss over memory, edge and inside."""
        return max(self.stated, self.inside.max)

    @property
    def realised(self) -> float | None:
        """The mean loss over past data, which the bound is for."""
        return None if self.past is None else self.past.mean

    @property
    def slack(self) -> float | None:
        """How far the realised loss is below the bound; negative if it broke it."""
        return None if self.realised is None else self.bound - self.realised

    @property
    def holds(self) -> bool | None:
        """Whether the realised loss keeps to the bound, up to rounding; None without past data."""
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
        """The lower bound as the paper has it: the least loss over memory and edge."""
        return min(self.memory.min, self.edge.min)

    @property
    def lower(self) -> float:
        """The lower bound that always holds: the least loss over memory, edge and inside."""
        return min(self.stated_lower, self.inside.min)

    @property
    def upper(self) -> float:
        """C·τ and the largest loss over memory, edge and inside, as the paper has it."""
        return self.constant * self.tau + max(self.memory.max, self.edge.max, self.inside.max)

    @property
    def realised(self) -> float | None:
        """The mean loss over future data, which the bounds are for."""
        return None if self.future is None else self.future.mean

    @property
    def slack(self) -> float | None:
        """How far the realised loss is from the nearer bound; negative if it broke it."""
        return None if self.realised is None else min(self.realised - self.lower, self.upper - self.realised)

    @property
    def holds(self) -> bool | None:
        """Whether the realised loss keeps to both bounds, up to rounding; None without future data."""
        if self.realised is None:
            return None
        return _at_most(self.lower, self.realised) and _at_most(self.realised, self.upper)


@dataclass(frozen=True)
class DriftBound:
    """Remark 1 at n points; each field is a tensor `[n]`; see `drift_bound`."""

    base: Tensor  # the bound on −log u without drift
    gap: Tensor  # what the drift adds to it
    error: Tensor  # the standard error of their sum
    rate: Tensor  # the derivative of the gap at t = 0: zero exactly where the drift is, or where no path runs
    realised: Tensor  # −log u with drift, from simulated paths
    realised_error: Tensor

    @property
    def bound(self) -> Tensor:
        """The bound on −log u with drift."""
        return self.base + self.gap

    @property
    def stated_gap(self) -> Tensor:
        """The gap as the paper has it, twice as large: it spends the weight on both terms of u."""
        return 2 * self.gap

    @property
    def slack(self) -> Tensor:
        """How far −log u is below its bound."""
        return self.bound - self.realised

    @property
    def holds(self) -> bool:
        """Whether the bound holds at every point, within three standard errors and rounding."""
        # That of u is relative, so that of its logarithm is not. Where no path runs the bound is an equality.
        rounding = ROUNDING * torch.finfo(self.base.dtype).eps * (1 + self.bound.abs())
        # Where a path meets no loss at all the bound is infinite, and its error no number: it is not broken there.
        return not bool((self.slack < -3 * torch.hypot(self.error, self.realised_error) - rounding).any())


def forgetting_bound(
    loss: Loss,
    domain: SampledDomain,
    past: Tensor | None = None,
    *,
    samples: int = 256,
    generator: Generator | None = None,
) -> ForgettingBound:
    """Proposition 1: the expected loss on data of the past is at most the largest on memory and hull.

    For ∂u/∂t = −∇²u + ℓ with u = ℓ now and on the edge, u(x, t − τ) = E[ℓ(X_end) − ∫ℓ ds] ≤ max ℓ, as the
    losses on the way are not negative.

    Args:
        loss: ℓ, from points `[n, *shape]` to losses `[n]`, none negative.
        domain: the domain of the memory, a `MemoryDomain`.
        past: past data `[n, *shape]`, for the realised loss.
        samples: how many points of the edge and of the inside the largest loss is looked for at.
        generator: where the random numbers come from; torch's own by default.

    >>> from parabolic.pde import MemoryDomain
    >>> memory = MemoryDomain(torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0]]), eps=0.01)
    >>> found = forgetting_bound(lambda x: x.square().sum(1), memory, past=torch.tensor([[0.5, 0.5]]))
    >>> found.memory
    Range(min=0.0, mean=2.6666666666666665, max=4.0)
    >>> found.realised, found.holds
    (0.5, True)
    """
    return ForgettingBound(*_pieces(loss, domain, samples, generator), *_data("past", loss, domain, past))


def generalisation_bound(
    loss: Loss,
    domain: SampledDomain,
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
        constant: C, where it is known. By default the largest loss that was seen on memory, edge and inside:
            an estimate from below, which more samples improve.
        samples: see `forgetting_bound`.
        generator: see `forgetting_bound`.

    >>> from parabolic.pde import MemoryDomain
    >>> memory = MemoryDomain(torch.tensor([[0.0], [2.0]]), eps=0.01)
    >>> found = generalisation_bound(lambda x: 1 + x[:, 0].abs(), memory, tau=0.5, constant=3.1)
    >>> round(found.lower, 1), round(found.upper, 1)
    (1.0, 4.6)
    """
    check_number("tau", tau, at_least=0)
    found = forgetting_bound(loss, domain, samples=samples, generator=generator).ahead(tau, constant)
    data, covered = _data("future", loss, domain, future)
    return replace(found, future=data, covered=covered)


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
    E[∫‖μ‖² ds]/4σ ≥ 0. (The paper, where σ = ½, bounds −log of the two terms of A one by one, which
    holds only where their product is less than their sum, and has twice this: E[∫‖μ‖² ds].)

    The gap grows with the distance from φ's minimiser. There it is not zero, as paths leave it, but of the
    order t², against t elsewhere: its `rate` at t = 0, ‖μ(x)‖²/4σ, is zero there and only there.

    The arguments are those of `solve`; the loss must be positive.

    >>> from parabolic.pde import Hull, gradient_of
    >>> interval = Hull(torch.tensor([[-2.0], [2.0]]))
    >>> valley = gradient_of(lambda x: x.square().sum(1) / 2)
    >>> found = drift_bound(lambda x: 1 + x[:, 0] ** 2, torch.tensor([[0.0], [1.0]]), 0.1, interval, 0.5, valley)
    >>> found.rate, found.holds
    (tensor([0.0000, 0.5000]), True)
    """
    options: dict[str, Any] = {"paths": paths, "steps": steps, "chunk": chunk, "generator": generator}
    u = solve(loss, x, t, domain, sigma, drift, **options)
    sums = torch.zeros(4, len(x), dtype=torch.float64, device=x.device)
    for rows, batch in walk(loss, x, t, domain, sigma, drift, by="reweight", **options):
        base = -(batch.end + batch.integral).double().log()
        both = base + batch.energy
        sums[:, rows] += torch.stack([part.sum(1) for part in (base, batch.energy.double(), both, both.square())])
    base, gap, both, square = sums / paths
    error = ((square - both.square()).clamp_min(0) / (paths - 1)).sqrt()
    rate = drift(x).flatten(1).square().sum(1) / (4 * sigma) * (domain.hit(x) > 0)
    found = (base, gap, error, rate, -u.mean.log(), u.error / u.mean)
    return DriftBound(*(part.detach().to(x.dtype) for part in found))


def _pieces(loss: Loss, domain: SampledDomain, samples: int, generator: Generator | None) -> tuple[Range, Range, Range]:
    """The losses over memory, edge and inside."""
    check_number("samples", samples, whole=True, at_least=2)
    edge, inside = domain.edge(samples, generator), domain.interior(samples, generator)
    return _range(loss, domain.points), _range(loss, edge), _range(loss, inside)


def _data(name: str, loss: Loss, domain: Domain, data: Tensor | None) -> tuple[Range | None, float | None]:
    """The losses over data, and the share of the data in the domain."""
    if data is None:
        return None, None
    if not len(data):
        raise invalid(name, data, "at least one point", "leave it out where there are none")
    return _range(loss, data), float(domain.inside(data).double().mean())


def _at_most(one: float, other: float) -> bool:
    """Whether a loss is at most another, which may be that of the same point in a batch of another size."""
    return one <= other or math.isclose(one, other, rel_tol=ROUNDING * torch.finfo(torch.float32).eps)


@torch.no_grad()
def _range(loss: Loss, points: Tensor) -> Range:
    value = torch.cat([losses_at(loss, part) for part in torch.split(points, 1024)])
    return Range(float(value.min()), float(value.double().mean()), float(value.max()))
