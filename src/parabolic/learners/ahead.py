"""A look-ahead step, as one operation forwards and one backwards."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import hardtanh

from parabolic.gpus import has_triton

__all__ = ["in_types", "step_ahead"]

Vectors = tuple[Tensor, ...]


def in_types(weights: Tensor, sizes: Sequence[int], types: Sequence[torch.dtype]) -> Vectors:
    """Split a vector into parts of the given sizes, each cast to its own type.

    >>> in_types(torch.tensor([1.001, 2.0, 3.0]), [2, 1], [torch.bfloat16, torch.float32])
    (tensor([1., 2.], dtype=torch.bfloat16), tensor([3.]))
    """
    parts: Vectors = _InTypes.apply(weights, sizes, types)  # type: ignore[no-untyped-call]
    return parts


def step_ahead(
    weights: Tensor, rates: Tensor, descents: Sequence[Tensor], limit: float
) -> tuple[Tensor, Tensor, Vectors, Vectors]:
    """`weights + rates * descent` for vectors, with each entry of the descent clipped to ±`limit`.

    The descent comes in parts, which may have different types. The result is returned three times: whole, and twice in
    such parts; the rates are returned again for the next step. This way the backward pass sums the gradients of all
    these uses itself, in the type of the weights, without separate operations. It cannot be differentiated twice. A GPU
    reads the vectors once in each direction; its result may differ from a CPU's in the last bit, as product and sum are
    rounded together.

    >>> descent = torch.tensor([-4.0, 0.0, 1.0])
    >>> reached, rates, (part,), _ = step_ahead(torch.ones(3), torch.full((3,), 0.5), [descent], limit=2.0)
    >>> reached, torch.equal(part, reached), rates
    (tensor([0.0000, 1.0000, 1.5000]), True, tensor([0.5000, 0.5000, 0.5000]))
    """
    reached, rates_again, *parts = _StepAhead.apply(limit, weights, rates, *descents)  # type: ignore[no-untyped-call]
    fixed = not rates.requires_grad  # then their gradient is not needed
    return reached, rates if fixed else rates_again, tuple(parts[: len(descents)]), tuple(parts[len(descents) :])


class _InTypes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, sizes: Sequence[int], types: Sequence[torch.dtype]) -> Vectors:
        ctx.dtype = weights.dtype
        parts = weights.detach().split(list(sizes))
        return tuple(part.to(dtype) for part, dtype in zip(parts, types, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        slope = grads[0].new_empty(sum(map(len, grads)), dtype=ctx.dtype)
        for section, grad in zip(_sections(grads), grads, strict=True):
            slope[section] = grad
        return slope, None, None


class _StepAhead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, limit: float, weights: Tensor, rates: Tensor, *descents: Tensor) -> Vectors:
        ctx.save_for_backward(rates, *descents)
        ctx.limit = limit
        ctx.set_materialize_grads(False)
        reached = torch.empty_like(weights)
        parts = [
            _step(reached[section], weights[section], rates[section], descent, limit).detach()
            for section, descent in zip(_sections(descents), descents, strict=True)
        ]
        return reached, rates.detach(), *parts, *[part.detach() for part in parts]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_reached: Tensor | None, of_later: Tensor | None, *of_parts: Tensor | None) -> Any:
        rates, *descents = ctx.saved_tensors
        slope, of_rates = torch.empty_like(rates), torch.empty_like(rates) if ctx.needs_input_grad[2] else None
        of_descents = []
        for i, (section, descent) in enumerate(zip(_sections(descents), descents, strict=True)):
            whole, rates_slope, later = (
                None if vector is None else vector[section] for vector in (of_reached, of_rates, of_later)
            )
            uses = whole, of_parts[i], of_parts[len(descents) + i]
            grads = [grad for grad in uses if grad is not None] or [torch.zeros_like(descent)]
            of_descents.append(_slope(slope[section], rates_slope, later, grads, rates[section], descent, ctx.limit))
        return None, slope, of_rates, *of_descents


def _sections(parts: Sequence[Tensor]) -> Iterator[slice]:
    """Where each part lies in the whole vector."""
    ends = itertools.accumulate(map(len, parts), initial=0)
    return (slice(start, end) for start, end in itertools.pairwise(ends))


def _step(reached: Tensor, weights: Tensor, rates: Tensor, descent: Tensor, limit: float) -> Tensor:
    """Write the result to `reached`, and return it in the type of the descent."""
    if _fused(weights):
        from parabolic.vectors import clipped_step

        return clipped_step(reached, weights, rates, descent, limit)
    torch.add(weights, rates * hardtanh(descent.to(weights.dtype), -limit, limit), out=reached)
    return reached.to(descent.dtype)


def _slope(
    slope: Tensor,
    of_rates: Tensor | None,
    later: Tensor | None,
    grads: list[Tensor],
    rates: Tensor,
    descent: Tensor,
    limit: float,
) -> Tensor:
    """Write the sum of `grads` to `slope` and, if given, the rates' gradient plus `later` to `of_rates`.

    Returns the gradient of the descent.
    """
    if _fused(rates):
        from parabolic.vectors import clipped_slope

        return clipped_slope(slope, of_rates, later, grads, rates, descent, limit)
    slope.copy_(functools.reduce(torch.add, [grad.to(slope.dtype) for grad in grads]))
    wide = descent.to(slope.dtype)
    if of_rates is not None:
        torch.mul(slope, hardtanh(wide, -limit, limit), out=of_rates)
        if later is not None:
            of_rates += later
    of_descent: Tensor = torch.ops.aten.hardtanh_backward(slope * rates, wide, -limit, limit)
    return of_descent.to(descent.dtype)


def _fused(vector: Tensor) -> bool:
    return vector.is_cuda and vector.dtype == torch.float32 and has_triton()
