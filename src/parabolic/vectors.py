"""A step by clipped descents, and its gradient, each as one pass over the vectors that it is made of (Triton)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["clipped_slope", "clipped_step"]

BLOCK = 1024  # numbers that a program works on


def clipped_step(weights: Tensor, rates: Tensor, descent: Tensor, limit: float) -> Tensor:
    """`weights + rates * descent.clamp(-limit, limit)`, rounded once."""
    weights, rates, descent = (each.contiguous() for each in (weights, rates, descent))
    made = torch.empty_like(weights)
    with torch.cuda.device_of(weights):
        _step[_grid(weights)](weights, rates, descent, made, limit, weights.numel(), BLOCK=BLOCK)
    return made


def clipped_slope(
    slopes: Sequence[Tensor], rates: Tensor, descent: Tensor, limit: float, *, of_rates: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """From one to three gradients of what was made: their sum, that of the rates if wanted, and that of the descent."""
    *slopes, rates, descent = (each.contiguous() for each in (*slopes, rates, descent))
    total = torch.empty_like(descent) if len(slopes) > 1 else slopes[0]
    by_rates, by_descent = torch.empty_like(rates) if of_rates else None, torch.empty_like(descent)
    padded = [*slopes, None, None][:3]
    with torch.cuda.device_of(descent):
        _slope[_grid(descent)](
            *padded, rates, descent, total, by_rates, by_descent, limit, descent.numel(),
            SLOPES=len(slopes), RATES=of_rates, BLOCK=BLOCK,
        )  # fmt: skip
    return total, by_rates, by_descent


def _grid(vector: Tensor) -> tuple[int]:
    return (triton.cdiv(vector.numel(), BLOCK),)


@triton.jit
def _step(weights, rates, descent, made, limit, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start + BLOCK <= n:  # without a mask numbers are loaded several at once, however many there are in all
        _step_part(weights, rates, descent, made, limit, start, n, True, BLOCK)
    else:
        _step_part(weights, rates, descent, made, limit, start, n, False, BLOCK)


@triton.jit
def _step_part(weights, rates, descent, made, limit, start, n, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    clipped = _clip(_load(descent, at, n, WHOLE), limit)
    _store(made, at, n, _load(weights, at, n, WHOLE) + _load(rates, at, n, WHOLE) * clipped, WHOLE)


@triton.jit
def _slope(
    first, second, third, rates, descent, total, by_rates, by_descent, limit, n,
    SLOPES: tl.constexpr, RATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start + BLOCK <= n:
        _slope_part(
            first, second, third, rates, descent, total, by_rates, by_descent, limit, start, n,
            SLOPES, RATES, True, BLOCK,
        )  # fmt: skip
    else:
        _slope_part(
            first, second, third, rates, descent, total, by_rates, by_descent, limit, start, n,
            SLOPES, RATES, False, BLOCK,
        )  # fmt: skip


@triton.jit
def _slope_part(
    first, second, third, rates, descent, total, by_rates, by_descent, limit, start, n,
    SLOPES: tl.constexpr, RATES: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = start + tl.arange(0, BLOCK)
    slope, value = _load(first, at, n, WHOLE), _load(descent, at, n, WHOLE)
    if SLOPES > 1:
        slope += _load(second, at, n, WHOLE)
    if SLOPES > 2:
        slope += _load(third, at, n, WHOLE)
    if SLOPES > 1:
        _store(total, at, n, slope, WHOLE)
    clipped = (value <= -limit) | (value >= limit)
    _store(by_descent, at, n, tl.where(clipped, 0.0, slope * _load(rates, at, n, WHOLE)), WHOLE)
    if RATES:
        _store(by_rates, at, n, slope * _clip(value, limit), WHOLE)


@triton.jit
def _clip(value, limit):
    """As torch does: what is no number stays so, and is found out."""
    return tl.where(value < -limit, -limit, tl.where(value > limit, limit, value))


@triton.jit
def _load(vector, at, n, WHOLE: tl.constexpr):
    return tl.load(vector + at) if WHOLE else tl.load(vector + at, at < n, 0.0)


@triton.jit
def _store(vector, at, n, value, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(vector + at, value)
    else:
        tl.store(vector + at, value, at < n)
