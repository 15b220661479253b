"""A step that is looked ahead, as one operation each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import hardtanh

from parabolic.backbones import has_triton

__all__ = ["step_ahead"]


def step_ahead(weights: Tensor, rates: Tensor, descent: Tensor, limit: float) -> Tensor:
    """`weights + rates * descent`, no entry of the descent counting for more than `limit`; all of them are vectors.

    It has a gradient, and that has none. A GPU goes through the vectors once, both for the step and for its gradient;
    the step may then differ in the last bit from that of a CPU, as product and sum are rounded together.

    >>> step_ahead(torch.ones(3), torch.full((3,), 0.5), torch.tensor([-4.0, 0.0, 1.0]), limit=2.0)
    tensor([0.0000, 1.0000, 1.5000])
    """
    made: Tensor = _StepAhead.apply(weights, rates, descent, limit)  # type: ignore[no-untyped-call]
    return made


class _StepAhead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, rates: Tensor, descent: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(rates, descent)
        ctx.limit = limit
        if _fused(weights):
            from parabolic.vectors import clipped_step

            return clipped_step(weights, rates, descent, limit)
        return weights + rates * hardtanh(descent, -limit, limit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Any:
        (rates, descent), limit, wanted = ctx.saved_tensors, ctx.limit, ctx.needs_input_grad[1]
        if _fused(slope):
            from parabolic.vectors import clipped_slope

            return slope, *clipped_slope(slope, rates, descent, limit, of_rates=wanted), None
        of_rates = slope * hardtanh(descent, -limit, limit) if wanted else None
        return slope, of_rates, torch.ops.aten.hardtanh_backward(slope * rates, descent, -limit, limit), None


def _fused(vector: Tensor) -> bool:
    return vector.is_cuda and vector.dtype == torch.float32 and has_triton()
