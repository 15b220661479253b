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
    weights, rates, descent = (vector.contiguous() for vector in (weights, rates, descent))
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
    grads: list[Tensor],
    rates: Tensor,
    descent: Tensor,
    limit: float,
) -> Tensor:
    """Set `slope` to the sum of the one to three gradients `grads` and, if given, `of_rates` to the rates' gradient.

    `later`, if given, is added to `of_rates`. Returns the descent's gradient.
    """
    rates, descent, *grads = (vector.contiguous() for vector in (rates, descent, *grads))
    later = None if later is None else later.contiguous()
    of_descent = torch.empty_like(descent)
    with torch.cuda.device_of(slope):
        _clipped_slope[_grid(slope)](
            *[*grads, None, None][:3], later, rates, descent, slope, of_rates, of_descent, float(limit), slope.numel(),
            GRADS=len(grads), RATES=of_rates is not None, LATER=later is not None, BLOCK=BLOCK,
        )  # fmt: skip
    return of_descent


def _grid(vector: Tensor) -> tuple[int]:
    return (triton.cdiv(vector.numel(), BLOCK),)


@triton.jit
def _clipped_step(weights, rates, descent, reached, cast, limit, n, CAST: tl.constexpr, BLOCK: tl.constexpr):
    """The weights reached and, if `CAST`, the same in another dtype."""
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
    offsets = start + tl.arange(0, BLOCK)
    clipped = _clip(_load(descent, offsets, n, WHOLE), limit)
    value = _load(weights, offsets, n, WHOLE) + _load(rates, offsets, n, WHOLE) * clipped
    _store(reached, offsets, n, value, WHOLE)
    if CAST:
        _store(cast, offsets, n, value, WHOLE)


@triton.jit
def _clipped_slope(
    first, second, third, later, rates, descent, slope, of_rates, of_descent, limit, n,
    GRADS: tl.constexpr, RATES: tl.constexpr, LATER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of the first to third gradients, in this order, and the gradients that follow from it."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start + BLOCK <= n:
        _slope_part(
            first, second, third, later, rates, descent, slope, of_rates, of_descent, limit, start, n,
            GRADS, RATES, LATER, True, BLOCK,
        )  # fmt: skip
    else:
        _slope_part(
            first, second, third, later, rates, descent, slope, of_rates, of_descent, limit, start, n,
            GRADS, RATES, LATER, False, BLOCK,
        )  # fmt: skip


@triton.jit
def _slope_part(
    first, second, third, later, rates, descent, slope, of_rates, of_descent, limit, start, n,
    GRADS: tl.constexpr, RATES: tl.constexpr, LATER: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = start + tl.arange(0, BLOCK)
    total, value = _load(first, offsets, n, WHOLE), _load(descent, offsets, n, WHOLE)
    if GRADS > 1:
        total += _load(second, offsets, n, WHOLE)
    if GRADS > 2:
        total += _load(third, offsets, n, WHOLE)
    _store(slope, offsets, n, total, WHOLE)
    clipped = (value <= -limit) | (value >= limit)
    _store(of_descent, offsets, n, tl.where(clipped, 0.0, total * _load(rates, offsets, n, WHOLE)), WHOLE)
    if RATES:
        rates_slope = total * _clip(value, limit)
        if LATER:
            rates_slope += _load(later, offsets, n, WHOLE)
        _store(of_rates, offsets, n, rates_slope, WHOLE)


@triton.jit
def _clip(value, limit):
    """As in torch, NaN stays NaN, so that it is noticed."""
    return tl.where(value < -limit, -limit, tl.where(value > limit, limit, value))


@triton.jit
def _load(vector, offsets, n, WHOLE: tl.constexpr):
    value = tl.load(vector + offsets) if WHOLE else tl.load(vector + offsets, offsets < n, 0.0)
    return value.to(tl.float32)


@triton.jit
def _store(vector, offsets, n, value, WHOLE: tl.constexpr):
    value = value.to(vector.dtype.element_ty)
    if WHOLE:
        tl.store(vector + offsets, value)
    else:
        tl.store(vector + offsets, value, offsets < n)
