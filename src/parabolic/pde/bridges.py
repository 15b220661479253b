"""Brownian bridges between pairs of points (the paper's Algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from parabolic.checks import check_generator, check_name, check_number, invalid

__all__ = ["VARIANTS", "bridge", "log_girsanov", "on_simplex"]

VARIANTS = ("paper", "reference")


def bridge(
    start: Tensor,
    end: Tensor,
    sigma: float | Tensor = 1.0,
    times: int = 5,
    bridges: int = 1,
    *,
    horizon: float = 1.0,
    variant: str = "paper",
    shared: bool = False,
    common: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    """Sample Brownian bridges from each row of `start` to the same row of `end`.

    Args:
        start: the points where the bridges start, `[n, *shape]`, floating-point.
        end: the points where they end, of the same shape, type and device.
        sigma: the scale of the noise: a number, one value per time point, `[times]`, or one per pair and time point,
            `[n, times]`. Between two time points the value at the earlier one applies (Itô). If it varies, the paths
            are those of Algorithm 2, W(s) − s·W(1), and not those of W conditioned on its end: with A the variance of W
            up to s and B from there on, a point has the variance (1 − s)²A + s²B, where a Brownian bridge would have
            AB/(A + B).
        times: how many equidistant time points a bridge has, including both ends.
        bridges: how many independent bridges join each pair.
        horizon: the duration T of a bridge. At the fraction s of it, the variance is s(1 − s)Tσ² for a constant σ.
        variant: "paper" for Gaussian noise. "reference" for the noise of the code published with the paper:
            each increment is also multiplied by an Exp(1) draw, and the first interval carries two increments.
        shared: whether all pairs share one noise path, each between its own ends.
        common: whether all coordinates of a point share the same noise.
        generator: the source of random numbers, on the device of `start`; torch's global one by default.

    Returns:
        The paths, `[n, bridges, times, *shape]`. They meet both ends exactly, without rounding errors.

    >>> a, b = torch.zeros(3, 2), torch.ones(3, 2)
    >>> path = bridge(a, b, sigma=0.1, times=5, generator=torch.Generator().manual_seed(0))
    >>> path.shape
    torch.Size([3, 1, 5, 2])
    >>> bool((path[:, :, 0] == a[:, None]).all() and (path[:, :, -1] == b[:, None]).all())
    True
    """
    _check_ends(start, end)
    check_number("times", times, whole=True, at_least=2)
    check_number("bridges", bridges, whole=True, at_least=1)
    check_number("horizon", horizon, above=0)
    check_name("variant", variant, VARIANTS)
    check_generator(generator)
    n, intervals = len(start), times - 1
    scale = _scale(sigma, start, times) * (horizon / intervals) ** 0.5

    # Everything below works on flat points: [n, bridges, times, d].
    first, last = (points.reshape(n, 1, 1, points.shape[1:].numel()) for points in (start, end))
    increments = intervals if variant == "paper" else times
    shape = (1 if shared else n, bridges, increments, 1 if common else first.shape[-1])
    noise = torch.randn(shape, generator=generator, dtype=start.dtype, device=start.device)
    if variant == "paper":
        walk = (noise * scale[:, :, :-1]).cumsum(2)
    else:
        noise *= torch.empty_like(noise).exponential_(generator=generator)
        walk = (noise * scale).cumsum(2)[:, :, 1:]  # summed from the first increment on, and only then set to zero at 0

    # W(s) − s·W(1) is exactly zero for s = 1, and lerp is exact at both ends: so are the paths.
    s = torch.linspace(0, 1, times, dtype=start.dtype, device=start.device)[:, None]
    path = torch.lerp(first, last, s).expand(n, bridges, times, first.shape[-1]).contiguous()
    path[:, :, 1:] += torch.addcmul(walk, s[1:], walk[:, :, -1:], value=-1)
    return path.reshape(n, bridges, times, *start.shape[1:])


def log_girsanov(path: Tensor, drift: Callable[[Tensor], Tensor], *, horizon: float = 1.0) -> Tensor:
    """The logarithm of the Girsanov weight exp(∫μ·dX − ½∫‖μ‖² ds) of each path, by Euler sums.

    Args:
        path: paths at equidistant times, `[n, bridges, times, *shape]`.
        drift: μ, which maps points `[m, *shape]` to velocities of the same shape.
        horizon: the duration of a path.

    Returns:
        One number per path, `[n, bridges]`, in at least float32: sums over many dimensions exceed shorter types. As in
        the paper, paths are weighted as if their noise had scale one.

    >>> line = bridge(torch.zeros(1, 1), torch.ones(1, 1), sigma=0.0)
    >>> log_girsanov(line, lambda x: torch.full_like(x, 2.0))  # 2·1 − ½·2²·1
    tensor([[0.]])
    """
    if not isinstance(path, Tensor) or not path.is_floating_point() or path.ndim < 3 or path.shape[2] < 2:
        remedy = "as `bridge` returns them; with one path for each, add [:, None]"
        raise invalid("path", path, "paths of two or more times, [n, bridges, times, *shape], floating-point", remedy)
    check_number("horizon", horizon, above=0)
    if not callable(drift):
        raise invalid("drift", drift, "a function from points to velocities")
    lefts, step = path[:, :, :-1], horizon / (path.shape[2] - 1)
    points = lefts.flatten(0, 2)
    speed = drift(points)
    if not isinstance(speed, Tensor) or speed.shape != points.shape:
        raise invalid("drift", speed, f"to return a velocity for each point, {list(points.shape)}")
    wide = torch.promote_types(path.dtype, torch.float32)
    speed, change = speed.view_as(lefts).flatten(2).to(wide), path.to(wide).diff(dim=2).flatten(2)
    return (speed * change).sum(-1) - 0.5 * step * speed.square().sum(-1)


def on_simplex(path: Tensor) -> Tensor:
    """Fold points onto the probability simplex: absolute values, scaled to sum to one over the last dimension.

    Noise moves a bridge between two one-hot labels off the simplex; this brings it back, and leaves the labels at its
    ends unchanged. A point of zeros, which noise reaches with probability zero, remains as it is.

    >>> on_simplex(torch.tensor([[0.75, -0.25], [1.0, 0.0]]))
    tensor([[0.7500, 0.2500],
            [1.0000, 0.0000]])
    """
    if not isinstance(path, Tensor) or not path.is_floating_point() or path.ndim < 1:
        raise invalid("path", path, "a floating-point tensor [..., classes]", "convert it with .float()")
    size = path.abs()
    return size / size.sum(-1, keepdim=True).clamp_min(torch.finfo(path.dtype).tiny)


def _check_ends(start: Tensor, end: Tensor) -> None:
    for name, value in (("start", start), ("end", end)):
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 1:
            remedy = f"convert it with torch.as_tensor({name}).float()"
            raise invalid(name, value, "a floating-point tensor [n, *shape]", remedy)
    if start.shape != end.shape or start.dtype != end.dtype or start.device != end.device:
        kind = f"({list(start.shape)}, {start.dtype}, {start.device})"
        raise invalid("end", end, f"the shape, type and device of start {kind}")


def _scale(sigma: float | Tensor, start: Tensor, times: int) -> Tensor:
    """Sigma as a tensor that broadcasts over `[n, bridges, times, d]`."""
    if isinstance(sigma, Tensor):
        n = len(start)
        shapes = {(): (1, 1, 1, 1), (times,): (1, 1, times, 1), (n, times): (n, 1, times, 1)}
        if tuple(sigma.shape) not in shapes:
            raise invalid("sigma", sigma, f"a number, or a tensor [{times}] or [{n}, {times}]")
        return sigma.to(start).reshape(shapes[tuple(sigma.shape)]).expand(-1, -1, times, -1)
    check_number("sigma", sigma, at_least=0, remedy="pass 0 for bridges without noise")
    return torch.full((1, 1, times, 1), float(sigma), dtype=start.dtype, device=start.device)
