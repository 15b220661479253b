"""A step that is looked ahead, as one operation each way."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import hardtanh

from parabolic.backbones import has_triton

__all__ = ["step_ahead"]


def step_ahead(weights: Tensor, rates: Tensor, descent: Tensor, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    """`weights + rates * descent`, no entry of the descent counting for more than `limit`; all of them are vectors.

    What is reached is given out three times, and shares its memory: the gradients of up to three uses are then added up
    on the way, and not by operations of their own. There is no gradient of the gradient. A GPU goes through the vectors
    once each way; what it reaches may differ in the last bit from a CPU's, as product and sum are rounded together.

    >>> reached, _, _ = step_ahead(torch.ones(3), torch.full((3,), 0.5), torch.tensor([-4.0, 0.0, 1.0]), limit=2.0)
    >>> reached
    tensor([0.0000, 1.0000, 1.5000])
    """
    reached: tuple[Tensor, Tensor, Tensor] = _StepAhead.apply(weights, rates, descent, limit)  # type: ignore[no-untyped-call]
    return reached


class _StepAhead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, rates: Tensor, descent: Tensor, limit: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(rates, descent)
        ctx.limit = limit
        ctx.set_materialize_grads(False)
        if _fused(weights):
            from parabolic.vectors import clipped_step

            reached = clipped_step(weights, rates, descent, limit)
        else:
            reached = weights + rates * hardtanh(descent, -limit, limit)
        return reached, reached.detach(), reached.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (rates, descent), limit, wanted = ctx.saved_tensors, ctx.limit, ctx.needs_input_grad[1]
        slopes = [each for each in grads if each is not None]
        if not slopes:
            return None, None, None, None
        if _fused(descent):
            from parabolic.vectors import clipped_slope

            return *clipped_slope(slopes, rates, descent, limit, of_rates=wanted), None
        slope = functools.reduce(torch.add, slopes)
        of_rates = slope * hardtanh(descent, -limit, limit) if wanted else None
        return slope, of_rates, torch.ops.aten.hardtanh_backward(slope * rates, descent, -limit, limit), None


def _fused(vector: Tensor) -> bool:
    return vector.is_cuda and vector.dtype == torch.float32 and has_triton()
