"""A convolution that can be differentiated twice at the speed of convolutions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["convolve"]

Pair = tuple[int, int]


def convolve(x: Tensor, weight: Tensor, stride: Pair = (1, 1), padding: Pair = (0, 0)) -> Tensor:
    """`F.conv2d` and its gradient, to the bit; what is the gradient of that is made of convolutions alike.

    Torch's own turns examples into channels there and images into filters, for which GPUs have no fast algorithm.

    >>> x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    >>> torch.equal(convolve(x, weight), F.conv2d(x, weight))
    True
    """
    y: Tensor = _Convolution.apply(x, weight, stride, padding)  # type: ignore[no-untyped-call]
    return y


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layout = stride, padding
        return F.conv2d(x, weight, None, stride, padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        given = grads[0], *ctx.saved_tensors, ctx.layout, ctx.needs_input_grad[:2]
        return *_Slope.apply(*given), None, None  # type: ignore[no-untyped-call]


class _Slope(torch.autograd.Function):
    """The gradients of x and of the weight, as far as they are wanted."""

    @staticmethod
    def forward(
        ctx: Any, dy: Tensor, x: Tensor, weight: Tensor, layout: tuple[Pair, Pair], wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        ctx.save_for_backward(dy, x, weight)
        ctx.layout = layout
        ctx.set_materialize_grads(False)
        return _slope(dy, x, weight, layout, wanted)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_dx: Tensor | None, of_dweight: Tensor | None) -> Any:
        """The gradients of ⟨of_dx, dx⟩ + ⟨of_dweight, dweight⟩, which is ⟨dy, of_dx ∗ weight + x ∗ of_dweight⟩."""
        dy, x, weight = ctx.saved_tensors
        of_dy = of_x = of_weight = None
        if of_dx is not None:
            of_dy = F.conv2d(of_dx, weight, None, *ctx.layout)
            _, of_weight = _slope(dy, of_dx, weight, ctx.layout, (False, True))
        if of_dweight is not None:
            more = F.conv2d(x, of_dweight, None, *ctx.layout)
            of_dy = more if of_dy is None else of_dy + more
            if ctx.needs_input_grad[1]:
                of_x, _ = _slope(dy, x, of_dweight, ctx.layout, (True, False))
        return of_dy, of_x, of_weight, None, None


def _slope(
    dy: Tensor, x: Tensor, weight: Tensor, layout: tuple[Pair, Pair], wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    dx, dweight, _ = torch.ops.aten.convolution_backward(
        dy, x, weight, None, *layout, (1, 1), False, (0, 0), 1, (*wanted, False)
    )
    return dx, dweight
