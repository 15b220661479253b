"""A step along a clipped descent, and its gradient, each in one pass over the vectors involved (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["clipped_slope", "clipped_step"]

BLOCK = 1024  # elements per program


def clipped_step(reached: Tensor, weights: Tensor, rates: Tensor, descent: Tensor, limit: float) -> Tensor:
    """Set `reached` to `weights + rates * descent.clamp(-limit, limit)`, rounded once; return it in descent's dtype."""
    weights, rates, descent = (each.contiguous() for each in (weights, rates, descent))
    cast = reached if descent.dtype == reached.dtype else torch.empty_like(descent)
    with torch.cuda.device_of(weights):
        _clipped_step[_grid(weights)](
            weights, rates, descent, reached, cast, float(limit), weights.numel(),
            CAST=cast is not reached, BLOCK=BLOCK,
        )  # fmt: skip
    return cast


def clipped_slope(
    slope: Tensor,
    of_rates: Tensor | None,
    later: Tensor | None,
    given: list[Tensor],
    rates: Tensor,
    descent: Tensor,
    limit: float,
) -> Tensor:
    """Set `slope` to the sum of the one to three gradients `given` and, if wanted, `of_rates` to the rates' gradient.

    `later`, if given, is added to `of_rates`. Returns the descent's gradient.
    """
    rates, descent, *given = (each.contiguous() for each in (rates, descent, *given))
    later = None if later is None else later.contiguous()
    of_descent = torch.empty_like(descent)
    with torch.cuda.device_of(slope):
        _clipped_slope[_grid(slope)](
            *[*given, None, None][:3], later, rates, descent, slope, of_rates, of_descent, float(limit), slope.numel(),
            GIVEN=len(given), RATES=of_rates is not None, LATER=later is not None, BLOCK=BLOCK,
        )  # fmt: skip
    return of_descent


def _grid(vector: Tensor) -> tuple[int]:
    return (triton.cdiv(vector.numel(), BLOCK),)


@triton.jit
def _clipped_step(weights, rates, descent, reached, cast, limit, n, CAST: tl.constexpr, BLOCK: tl.constexpr):
    """The weights reached and, if wanted, the same in another dtype."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start + BLOCK <= n:  # without a mask loads are vectorised, whatever n is
        _step_part(weights, rates, descent, reached, cast, limit, start, n, CAST, True, BLOCK)
    else:
        _step_part(weights, rates, descent, reached, cast, limit, start, n, CAST, False, BLOCK)


@triton.jit
def _step_part(
    weights, rates, descent, reached, cast, limit, start, n,
    CAST: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = start + tl.arange(0, BLOCK)
    clipped = _clip(_load(descent, at, n, WHOLE), limit)
    value = _load(weights, at, n, WHOLE) + _load(rates, at, n, WHOLE) * clipped
    _store(reached, at, n, value, WHOLE)
    if CAST:
        _store(cast, at, n, value, WHOLE)


@triton.jit
def _clipped_slope(
    first, second, third, later, rates, descent, slope, of_rates, of_descent, limit, n,
    GIVEN: tl.constexpr, RATES: tl.constexpr, LATER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of the given gradients, in their order, and the gradients that follow from it."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start + BLOCK <= n:
        _slope_part(
            first, second, third, later, rates, descent, slope, of_rates, of_descent, limit, start, n,
            GIVEN, RATES, LATER, True, BLOCK,
        )  # fmt: skip
    else:
        _slope_part(
            first, second, third, later, rates, descent, slope, of_rates, of_descent, limit, start, n,
            GIVEN, RATES, LATER, False, BLOCK,
        )  # fmt: skip


@triton.jit
def _slope_part(
    first, second, third, later, rates, descent, slope, of_rates, of_descent, limit, start, n,
    GIVEN: tl.constexpr, RATES: tl.constexpr, LATER: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = start + tl.arange(0, BLOCK)
    total, value = _load(first, at, n, WHOLE), _load(descent, at, n, WHOLE)
    if GIVEN > 1:
        total += _load(second, at, n, WHOLE)
    if GIVEN > 2:
        total += _load(third, at, n, WHOLE)
    _store(slope, at, n, total, WHOLE)
    clipped = (value <= -limit) | (value >= limit)
    _store(of_descent, at, n, tl.where(clipped, 0.0, total * _load(rates, at, n, WHOLE)), WHOLE)
    if RATES:
        own = total * _clip(value, limit)
        if LATER:
            own += _load(later, at, n, WHOLE)
        _store(of_rates, at, n, own, WHOLE)


@triton.jit
def _clip(value, limit):
    """As in torch, NaN stays NaN, so that it is noticed."""
    return tl.where(value < -limit, -limit, tl.where(value > limit, limit, value))


@triton.jit
def _load(vector, at, n, WHOLE: tl.constexpr):
    value = tl.load(vector + at) if WHOLE else tl.load(vector + at, at < n, 0.0)
    return value.to(tl.float32)


@triton.jit
def _store(vector, at, n, value, WHOLE: tl.constexpr):
    value = value.to(vector.dtype.element_ty)
    if WHOLE:
        tl.store(vector + at, value)
    else:
        tl.store(vector + at, value, at < n)
