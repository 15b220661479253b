"""A step by clipped descents, and its gradient, each as one pass over the vectors that it is made of (Triton)."""

from __future__ import annotations

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
    slope: Tensor, rates: Tensor, descent: Tensor, limit: float, *, of_rates: bool
) -> tuple[Tensor | None, Tensor]:
    """The gradients of the rates, if they are wanted, and of the descent, from that of what was made."""
    slope, rates, descent = (each.contiguous() for each in (slope, rates, descent))
    by_rates, by_descent = torch.empty_like(rates) if of_rates else None, torch.empty_like(descent)
    with torch.cuda.device_of(slope):
        _slope[_grid(slope)](
            slope, rates, descent, by_rates, by_descent, limit, slope.numel(), RATES=of_rates, BLOCK=BLOCK
        )
    return by_rates, by_descent


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
def _slope(slope, rates, descent, by_rates, by_descent, limit, n, RATES: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start + BLOCK <= n:
        _slope_part(slope, rates, descent, by_rates, by_descent, limit, start, n, RATES, True, BLOCK)
    else:
        _slope_part(slope, rates, descent, by_rates, by_descent, limit, start, n, RATES, False, BLOCK)


@triton.jit
def _slope_part(
    slope, rates, descent, by_rates, by_descent, limit, start, n,
    RATES: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = start + tl.arange(0, BLOCK)
    given, value = _load(slope, at, n, WHOLE), _load(descent, at, n, WHOLE)
    clipped = (value <= -limit) | (value >= limit)
    _store(by_descent, at, n, tl.where(clipped, 0.0, given * _load(rates, at, n, WHOLE)), WHOLE)
    if RATES:
        _store(by_rates, at, n, given * _clip(value, limit), WHOLE)


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
