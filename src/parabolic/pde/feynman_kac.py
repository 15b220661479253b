"""The loss profile u(x, t) as an expectation over stopped paths (the Feynman–Kac formula)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, inf, sqrt
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from parabolic.checks import (
    Description,
    check_call,
    check_finite,
    check_generator,
    check_name,
    check_number,
    invalid,
)
from parabolic.pde.bridges import bridge
from parabolic.pde.domain import EXACT, Balls, Domain, Hull, Intersection, check_domain, check_methods, random_like

__all__ = ["Drift", "Estimate", "Loss", "gradient_of", "solve", "solve_by_bridges"]

Loss = Callable[[Tensor], Tensor]
"""Maps points `[n, *shape]` to their losses `[n]`, none negative."""

Drift = Callable[[Tensor], Tensor]
"""Maps points `[n, *shape]` to velocities of the same shape."""

DRIFTS = ("simulate", "reweight")


@dataclass(frozen=True)
class Estimate:
    """A Monte Carlo estimate at n points; each field is a tensor `[n]`."""

    mean: Tensor  # of u
    error: Tensor  # the standard error of the mean
    stopped: Tensor  # the share of paths that were stopped before the time was up; if reweighted, of driftless ones
    weight: Tensor  # the mean weight of a path: 1 in expectation, and exactly 1 unless reweighted
    effective: Tensor  # the effective sample size: how many paths of equal weight would say as much


def solve(
    loss: Loss,
    x: Tensor,
    t: float,
    domain: Domain,
    sigma: float,
    drift: Drift | None = None,
    *,
    by: str = "simulate",
    source: float = 1.0,
    paths: int = 1000,
    steps: int = 100,
    chunk: int | None = None,
    generator: Generator | None = None,
) -> Estimate:
    """Estimate u(x, t), the solution of ∂u/∂t = σ∇²u + μ·∇u + source·ℓ with u = ℓ at t = 0 and on the edge.

    It is u(x, t) = E[ℓ(X_{t∧τ}) + source·∫₀^{t∧τ} ℓ(X_s) ds] for dX = μ dt + √(2σ) dW from X₀ = x, stopped at
    the first time τ at which it meets the edge of the domain. The equation of Proposition 1, ∂u/∂t = −σ∇²u + ℓ
    with u(·, T) = ℓ, is this one backwards in time: `solve(..., source=-1)` is its u(x, T − t).

    Within a step of duration Δ a path is a Brownian bridge. Whether, when and where it met the edge there is drawn from
    the exact law for a flat edge. So the bias is of first order in Δ, from a drift and from the curvature of the edge
    (it is of order ½ if paths are checked only after each step). At a single flat edge and without drift, paths end
    exactly when and where they should; what remains, if the loss varies along them, is the error of the trapezoidal
    rule for its integral, of order 3/2 near the edge and 2 far from it. This requires steps short enough for the
    domain; a `RuntimeWarning` says when they are far too long for a hull or, in more than three dimensions, for balls:

    - √(2σΔ) less than a fifth of the domain's width: within a step only the nearest edge is considered. In an interval,
      chances to stay inside are then off by 3 % or less, at half of the width by 10 to 20 %;
    - in d = 3 or more dimensions √(2σΔd), the length of a step, at most half of the radius of the balls, or of the
      margin of a flat hull: in ten dimensions, steps as long as two radii meet balls up to four times too often;
    - in more than three dimensions 2√(2σΔ) at most the margin of a hull that is not flat. The depth of a path in such a
      hull is unknown, so that crossings within a step are detected only in the margin. Without a margin the bias is of
      order ½: in the cube [−1, 1]⁴ times to the edge are 18 % too long at √(2σΔ) = 0.14, and 10 % at 0.07.

    Args:
        loss: ℓ, which maps points `[n, *shape]` to losses `[n]`, none negative.
        x: where to estimate u, `[n, *shape]`, floating-point.
        t: the time, 0 or more.
        domain: where paths run and stop: a `MemoryDomain`, or anything with the methods of `Domain`.
        sigma: the diffusion coefficient σ, above 0.
        drift: μ, which maps points `[n, *shape]` to velocities of the same shape; none by default.
        by: "simulate" simulates the drift; "reweight" simulates diffusion alone and weights each path by
            exp(∫μ·dX/2σ − ∫‖μ‖²ds/4σ) (Girsanov). Both estimate the same u; the weights spread as t grows.
        source: the factor of the loss in the equation.
        paths: how many paths start from each point.
        steps: how many steps of length t/steps a path takes.
        chunk: how many numbers the positions of all paths under way may have together; limits memory use.
        generator: the source of random numbers, on the device of `x`; torch's global one by default.

    >>> from parabolic.pde import Hull
    >>> interval = Hull(torch.tensor([[0.0], [1.0]]))
    >>> noise = torch.Generator().manual_seed(0)
    >>> u = solve(lambda x: torch.ones(len(x)), torch.tensor([[0.5]]), 1.5, interval, sigma=1.0, generator=noise)
    >>> bool((u.mean - (1 + 0.5**2 / 2)).abs() < 3 * u.error)  # 1 and the mean time to the edge, x(1 − x)/2σ
    True
    """
    _check_start(x, t, sigma, paths)
    check_number("source", source)
    payoffs, weights, stopped = Mean(x), Mean(x), Mean(x)
    for rows, batch in walk(
        loss, x, t, domain, sigma, drift, by=by, paths=paths, steps=steps, chunk=chunk, generator=generator
    ):
        weight = batch.log_weight.double().exp()
        payoffs.add(rows, weight * (batch.end.double() + source * batch.integral.double()))
        weights.add(rows, weight)
        stopped.add(rows, batch.stopped)
    _warn_of_long_steps(domain, x, sigma, t, steps, stopped.sum)
    effective = weights.sum.square() / weights.sum_of_squares.clamp_min(torch.finfo(torch.float64).tiny)
    if drift is not None and by == "reweight":
        _warn_of_collapse(effective, paths)
    parts = (payoffs.value, payoffs.error, stopped.value, weights.value, effective)
    return Estimate(*(part.to(x.dtype) for part in parts))


@torch.no_grad()
def solve_by_bridges(
    loss: Loss,
    x: Tensor,
    t: float,
    ends: Tensor,
    sigma: float,
    *,
    source: float = 1.0,
    paths: int = 1000,
    times: int = 5,
    chunk: int | None = None,
    generator: Generator | None = None,
) -> Estimate:
    """The paper's shortcut: paths that are Brownian bridges from x to random points of the memory.

    It estimates E[ℓ(X_t) + source·∫₀^t ℓ(X_s) ds], where X is the bridge from x to a point drawn from `ends`: not the
    solution of `solve`'s equation, but a mean over the ends, for each of which a drift (end − X_s)/(t − s) carries
    every path there exactly at t. So all paths stop in memory and at the same time, and all points of the memory are
    equally likely to stop a path; in the solution of `solve`, near points stop more paths, and sooner, and the edge of
    the hull stops some. In return no path has to be checked against an edge, and few time points suffice.

    Args:
        loss: see `solve`.
        x: see `solve`.
        t: the duration of a bridge, 0 or more.
        ends: where the bridges may end, `[m, *shape]`: the memory.
        sigma: the diffusion coefficient; a bridge's scale is √(2σ).
        source: see `solve`.
        paths: how many bridges start from each point.
        times: how many time points a bridge has, including both ends; the integral uses the trapezoidal rule.
        chunk: see `solve`.
        generator: see `solve`.

    >>> x, memory = torch.zeros(1, 2), torch.ones(4, 2)
    >>> u = solve_by_bridges(lambda x: x.square().sum(1), x, 1.0, memory, sigma=1e-6)
    >>> round(float(u.mean), 2)  # 2 at the end and the integral of 2s² on the way, by five points
    2.69
    """
    _check_start(x, t, sigma, paths)
    check_number("times", times, whole=True, at_least=2)
    check_number("source", source)
    if not isinstance(ends, Tensor) or ends.shape[1:] != x.shape[1:] or ends.dtype != x.dtype or not len(ends):
        raise invalid("ends", ends, f"at least one point of the shape and type of x, {list(x.shape[1:])}, {x.dtype}")
    check_finite("ends", ends)
    check_generator(generator)
    payoffs, ones = Mean(x), torch.ones(len(x), dtype=x.dtype, device=x.device)
    losses_at(loss, x)
    for rows, count in _chunks(x, paths, chunk, times):
        start = x[rows].repeat_interleave(count, 0)
        picks = torch.randint(len(ends), (len(start),), generator=generator, device=x.device)
        if t > 0:
            path = bridge(start, ends[picks], sqrt(2 * sigma), times, horizon=t, generator=generator)
        else:
            path = start[:, None, None].expand(-1, 1, times, *x.shape[1:])
        value = loss(path.flatten(0, 2)).reshape(-1, count, times).double()
        payoffs.add(rows, value[..., -1] + source * torch.trapezoid(value, dx=t / (times - 1)))
    return Estimate(payoffs.value.to(x.dtype), payoffs.error.to(x.dtype), ones, ones, paths * ones)


def gradient_of(potential: Callable[[Tensor], Tensor]) -> Drift:
    """The drift μ = ∇φ of a potential φ, which maps points `[n, *shape]` to numbers `[n]` by operations of torch.

    >>> gradient_of(lambda x: x.square().sum(1))(torch.tensor([[1.0, -2.0]]))
    tensor([[ 2., -4.]])
    """
    check_call("potential", potential, "x")

    def drift(x: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            points = x.detach().clone().requires_grad_()  # a tensor of inference mode has no gradient
            value = potential(points)
            if not isinstance(value, Tensor) or value.shape != (len(x),):
                raise invalid("potential", value, f"to return one number per point, a tensor [{len(x)}]")
            if not value.requires_grad:
                got, remedy = Description("a result that does not depend on x"), "without .detach(), .data or NumPy"
                raise invalid("potential", got, "a function of x by operations of torch, to differentiate", remedy)
            return torch.autograd.grad(value.sum(), points)[0]

    return drift


class Mean:
    """The means of numbers at points x, given in batches `[points, paths]`, and the standard errors of these means.

    Squares are of deviations from the mean, merged by Chan's rule: the mean of squares minus the square of the mean
    would be lost in rounding where numbers are large against their spread.
    """

    def __init__(self, x: Tensor) -> None:
        zero = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        self.count, self.sum, self.squares = zero, zero.clone(), zero.clone()

    def add(self, rows: slice, values: Tensor) -> None:
        """Take in as many more values of each of these points."""
        values, before, size = values.double(), self.count[rows], values.shape[1]
        mean = values.mean(1)
        gap = mean - self.sum[rows] / before.clamp_min(1)
        self.squares[rows] += (values - mean[:, None]).square().sum(1)
        self.squares[rows] += gap.square() * (before * size / (before + size))
        self.sum[rows] += values.sum(1)
        self.count[rows] += size

    @property
    def value(self) -> Tensor:
        """The means."""
        return self.sum / self.count

    @property
    def error(self) -> Tensor:
        """Their standard errors."""
        return (self.squares / self.count / (self.count - 1)).sqrt()

    @property
    def sum_of_squares(self) -> Tensor:
        """The sums of the squares of the numbers themselves."""
        return self.squares + self.sum.square() / self.count


@dataclass
class Paths:
    """What paths have met, each field `[points, paths]`."""

    end: Tensor  # the loss where a path ended
    integral: Tensor  # of the loss along it
    log_weight: Tensor  # the logarithm of its Girsanov weight; zero unless reweighted
    energy: Tensor  # ∫‖μ‖²ds/4σ along it; zero without drift
    stopped: Tensor  # whether it met the edge


@torch.no_grad()
def walk(
    loss: Loss,
    x: Tensor,
    t: float,
    domain: Domain,
    sigma: float,
    drift: Drift | None,
    *,
    by: str,
    paths: int,
    steps: int,
    chunk: int | None,
    generator: Generator | None,
) -> Iterator[tuple[slice, Paths]]:
    """Simulate the stopped paths of `solve` batch by batch: yields the rows of x they start from, and their results."""
    check_number("steps", steps, whole=True, at_least=1)
    check_name("by", by, DRIFTS)
    _check_problem(loss, x, domain, drift)
    gap, process = domain.hit(x), _Walk(loss, domain, sigma, drift, by, t / steps, generator)
    for rows, count in _chunks(x, paths, chunk):
        start, start_gap = (a[rows].repeat_interleave(count, 0) for a in (x, gap))
        yield rows, Paths(*(part.reshape(-1, count) for part in process.run(start, start_gap, steps)))


class _Step(NamedTuple):
    """A step of some paths, one row per path."""

    number: Tensor  # the index of the path in the batch
    x: Tensor  # its position before the step,
    gap: Tensor  # the distance to the edge,
    value: Tensor  # the loss,
    integral: Tensor  # and the sums so far: of losses,
    log_weight: Tensor
    energy: Tensor
    new: Tensor  # its position after the step,
    new_gap: Tensor  # and the distance to the edge
    speed: Tensor  # the drift
    power: Tensor  # ‖μ‖²/4σ

    def rows(self, index: Tensor) -> _Step:
        return _Step(*(part.index_select(0, index) for part in self))


@dataclass(frozen=True)
class _Walk:
    """Paths in steps of length `dt`, stopped at the edge; see `solve`."""

    loss: Loss
    domain: Domain
    sigma: float
    drift: Drift | None
    by: str
    dt: float
    generator: Generator | None

    @property
    def variance(self) -> float:
        """The variance of a step in each direction."""
        return 2 * self.sigma * self.dt

    def run(self, x: Tensor, gap: Tensor, steps: int) -> tuple[Tensor, ...]:
        """Simulate one path from each row of x, at the distance `gap` from the edge: the fields of `Paths`."""
        value, stopped = self._loss(x), gap <= 0
        result = torch.stack([value, *(torch.zeros_like(value) for _ in range(3))])

        # The integral is by the trapezoidal rule, in units of dt: half the first loss, all between, half the last.
        number = (gap > 0).nonzero().squeeze(1)
        x, gap, value = x[number], gap[number], value[number]
        integral, log_weight, energy = value / 2, torch.zeros_like(value), torch.zeros_like(value)
        running, remaining, stops = torch.ones_like(number, dtype=torch.bool), len(number), []
        for _ in range(steps if self.dt > 0 else 0):
            if remaining < 0.9 * len(number):
                # Until now stopped paths were moved along unused: dropping them at every step costs more.
                keep = running.nonzero().squeeze(1)
                number, x, gap, value, integral, log_weight, energy, running = (
                    part.index_select(0, keep)
                    for part in (number, x, gap, value, integral, log_weight, energy, running)
                )
            if not remaining:
                break
            new, speed, power = self._next_positions(x)
            new_gap = self.domain.hit(new)
            met = self._meets_edge(gap, new_gap) & running
            step = _Step(number, x, gap, value, integral, log_weight, energy, new, new_gap, speed, power)
            if len(met_rows := met.nonzero().squeeze(1)):
                stops.append(step.rows(met_rows))
                running &= ~met
                remaining -= len(met_rows)
            if self.drift is not None:
                log_weight, energy = self._updated_weights(step, new, power * self.dt)
            x, gap, value = new, new_gap, self._loss(new)
            integral = integral + value

        keep = running.nonzero().squeeze(1)
        result[:, number[keep]] = torch.stack([value, (integral - value / 2) * self.dt, log_weight, energy])[:, keep]
        if stops:
            last = _Step(*(torch.cat(part) for part in zip(*stops, strict=True)))
            result[:, last.number] = torch.stack(self._stop(last))
            stopped[last.number] = True
        return *result, stopped

    def _loss(self, x: Tensor) -> Tensor:
        """The losses, at least as precise as x: a sum in half precision stops growing after a few hundred steps."""
        value = self.loss(x)
        return value.to(torch.promote_types(value.dtype, x.dtype))

    def _next_positions(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The positions after a step, the drift μ, and ‖μ‖²/4σ; without a drift these are empty."""
        new = torch.add(x, random_like(torch.randn, x.shape, x, self.generator), alpha=sqrt(self.variance))
        if self.drift is None:
            return new, x.new_empty(len(x), 0), x.new_empty(len(x), 0)
        speed = self.drift(x)
        if self.by == "simulate":
            new += speed * self.dt
        return new, speed, _dot(speed, speed) / (4 * self.sigma)

    def _meets_edge(self, gap: Tensor, new_gap: Tensor) -> Tensor:
        """Whether each path meets the edge within a step, given its distances from it before and after."""
        # A bridge between two points at distances a and b from a flat edge meets it with probability
        # exp(−2ab/variance): surely, if b is negative. (Below e⁻⁴⁰ the exponential is slow and means never; a draw of
        # 0, one in 2²⁴ with float32, must not be below that.)
        chance = (gap * new_gap).mul_(-2 / self.variance).clamp_min_(-40).exp_()
        return random_like(torch.rand, gap.shape, gap, self.generator).clamp_min_(1e-12) < chance

    def _stop(self, last: _Step) -> list[Tensor]:
        """The last step of every path that met the edge, all at once: the loss there, and the sums up to there."""
        share = _meeting_time(last.gap, last.new_gap.abs(), self.variance, self.generator)
        fraction = share.reshape(-1, *[1] * (last.x.ndim - 1))
        noise = random_like(torch.randn, last.x.shape, last.x, self.generator)
        spread = noise * (self.variance * fraction * (1 - fraction)).sqrt()
        stop = self.domain.nearest(torch.lerp(last.x, last.new, fraction) + spread)
        end, log_weight, energy = self._loss(stop), last.log_weight, last.energy
        if self.drift is not None:
            log_weight, energy = self._updated_weights(last, stop, last.power * share * self.dt)
        integral = (last.integral + (last.value * (share - 1) + end * share) / 2) * self.dt
        return [end, integral, log_weight, energy]

    def _updated_weights(self, step: _Step, to: Tensor, spent: Tensor) -> tuple[Tensor, Tensor]:
        """The logarithms of the weights, and the energies, of paths that have moved on and `spent` so much energy."""
        log_weight = step.log_weight
        if self.by == "reweight":
            log_weight = log_weight + _dot(step.speed, to - step.x) / (2 * self.sigma) - spent
        return log_weight, step.energy + spent


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).flatten(1).sum(1)


def _meeting_time(a: Tensor, b: Tensor, variance: float, generator: Generator | None) -> Tensor:
    """An exact draw of the time when a Brownian bridge from a to −b first meets 0, as a fraction of its duration.

    At the fraction s it is (1 − s) times a Brownian motion from a with drift −b at the time s/(1 − s), whose first
    passage time is inverse Gaussian with mean a/b and shape a²/variance (drawn by the method of Michael, Schucany and
    Haas).
    """
    tiny, dtype = 1e-6 * sqrt(variance), a.dtype
    a, b = (gap.to(torch.promote_types(dtype, torch.float32)) for gap in (a, b))  # shorter types do not reach so far
    unknown = a.isinf()
    a, b = a.masked_fill(unknown, 1.0).clamp_min(tiny), b.clamp_min(tiny)
    q = random_like(torch.randn, a.shape, a, generator).square() * (variance / 2) / (a * b)
    root = 1 + q + (q * (2 + q)).sqrt()
    early = random_like(torch.rand, a.shape, a, generator) * (1 + root) < root
    share = torch.where(early, a / (a + b * root), a * root / (a * root + b))
    share = share.masked_fill(unknown, 1.0)  # from an unknown depth to an edge that was crossed: all the way inside
    return share.to(dtype)


def _chunks(x: Tensor, paths: int, chunk: int | None, times: int = 1) -> Iterator[tuple[slice, int]]:
    """Batches of paths with at most `chunk` numbers: a slice of x, and how many paths start from each of its rows."""
    if chunk is None:
        chunk = 2**18 if x.device.type == "cpu" else 2**24  # what stays in a core's cache, or keeps a GPU busy
    check_number("chunk", chunk, whole=True, at_least=1)
    size = max(1, chunk // (x[0].numel() * times)) if len(x) else 1
    rows = max(1, size // paths)
    for begin in range(0, len(x), rows):
        for done in range(0, paths, size):
            yield slice(begin, min(begin + rows, len(x))), min(size, paths - done)


def _warn_of_collapse(effective: Tensor, paths: int) -> None:
    """Warn if a few paths have nearly all of the weight, given the effective sample size at each point."""
    if bool((effective < 0.1 * paths).any()):
        _warn(
            f"reweighting collapsed: at one point {paths} paths are worth only {float(effective.min()):.0f} of equal "
            'weight; use by="simulate", a smaller t or a weaker drift'
        )


def _warn_of_long_steps(domain: Domain, x: Tensor, sigma: float, t: float, steps: int, stopped: Tensor) -> None:
    """Warn if paths met an edge for which their steps are far too long by the rules in `solve`."""
    d, variance = x.shape[1:].numel(), 2 * sigma * t / steps
    if not bool((stopped[domain.hit(x) > 0] > 0).any()):
        return
    parts = _simple_parts(domain)
    hulls = [part for part in parts if isinstance(part, Hull)]
    curved = [part.radius for part in parts if isinstance(part, Balls)] + [hull.margin for hull in hulls if hull.flat]
    radius, margin = min(curved, default=inf), min([hull.margin for hull in hulls if hull.blind], default=inf)
    width = min([hull.width for hull in hulls], default=inf)
    reasons, needed = [], 0.0
    if variance > (0.4 * width) ** 2:
        reasons.append(f"steps of {sqrt(variance):.2g} in each direction cross a hull of width {width:.2g} at once")
        needed = 25 * variance * steps / width**2
    if d > EXACT and variance * d > radius**2:
        length = sqrt(variance * d)
        reasons.append(
            f"steps of length {length:.2g} meet balls, or the margin of a flat hull, of {radius:.2g} too often"
        )
        needed = max(needed, 4 * d * variance * steps / radius**2)
    if variance > (margin / 1.5) ** 2:
        reasons.append(
            f"in a hull of {d} dimensions with a margin of {margin:.2g}, crossings are missed: paths stop late"
        )
        needed = max(needed, 4 * variance * steps / margin**2) if margin else inf
    if reasons:
        remedy = (
            f"steps={ceil(needed)} or more, or a smaller t or sigma"
            if needed < inf
            else "a margin, or compare two numbers of steps"
        )
        _warn(f"steps={steps} is too few: {'; '.join(reasons)}. Use {remedy}")


def _simple_parts(domain: Domain) -> list[Domain]:
    if isinstance(domain, Intersection):
        return [simple for part in domain.parts for simple in _simple_parts(part)]
    return [domain]


def _warn(text: str) -> None:
    """Warn at the line of the first caller outside the package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("parabolic."):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, RuntimeWarning, stacklevel=level)


def _check_start(x: Tensor, t: float, sigma: float, paths: int) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
        remedy = "convert it with torch.as_tensor(x).float(), or add [:, None]"
        raise invalid("x", x, "a floating-point tensor [n, *shape]", remedy)
    check_finite("x", x)
    check_number("t", t, at_least=0)
    check_number("sigma", sigma, above=0, remedy="without diffusion the equation is not parabolic")
    check_number("paths", paths, whole=True, at_least=2)


def _check_problem(loss: Loss, x: Tensor, domain: Domain, drift: Drift | None) -> None:
    """Refuse points outside the domain, and functions that do not return at these points what they should."""
    check_domain("domain", domain)
    if drift is not None:
        check_call("drift", drift, "x")
    losses_at(loss, x)
    check_methods(domain, x[:2])
    outside = ~domain.inside(x)
    if outside.any():
        total, first = int(outside.sum()), int(outside.nonzero()[0])
        got = Description(f"{total} points outside the domain, the first in row {first}")
        raise invalid("x", got, "points where domain.inside(x) holds", "drop the others: u is not defined there")
    if drift is not None:
        speed = drift(x)
        if not isinstance(speed, Tensor) or speed.shape != x.shape or speed.dtype != x.dtype:
            raise invalid("drift", speed, f"to return a tensor of the shape {list(x.shape)} and type of its argument")
        check_finite("drift", speed, "the points are finite, so it is the drift itself")


def losses_at(loss: Loss, x: Tensor) -> Tensor:
    """The losses at x, refused unless there is one number per point and none is negative."""
    if not callable(loss):
        raise invalid("loss", loss, "a function from points to their losses")
    losses = loss(x)
    if not isinstance(losses, Tensor) or losses.is_complex() or losses.shape != (len(x),):
        raise invalid("loss", losses, f"to return one number per point, a tensor [{len(x)}]", 'use reduction="none"')
    check_finite("loss", losses, "the points are finite, so it is the model: if it has diverged, lower its lr")
    if (losses < 0).any():
        raise invalid("loss", float(losses.min()), "no negative loss: the bounds require it")
    return losses
