"""Convolutions whose second derivatives are as fast as convolutions and matrix products."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["convolve", "convolve_both", "mix", "thin"]

Pair = tuple[int, int]


def convolve(x: Tensor, weight: Tensor, stride: Pair = (1, 1), padding: Pair = (0, 0)) -> Tensor:
    """`F.conv2d` and its gradient, bit-identical to torch's, with a double backward that consists of convolutions too.

    Torch's own double backward uses examples as channels and images as filters, for which GPUs have no fast algorithm.

    >>> x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    >>> torch.equal(convolve(x, weight), F.conv2d(x, weight))
    True
    """
    y: Tensor = _Convolution.apply(x, weight, stride, padding)  # type: ignore[no-untyped-call]
    return y


def convolve_both(
    x: Tensor, weight: Tensor, short: Tensor, stride: Pair = (1, 1), padding: Pair = (0, 0)
) -> tuple[Tensor, Tensor]:
    """`convolve` x with `weight`, and with `short`, a 1 × 1 weight, with the same stride and no padding.

    The second is computed as a matrix product of the strided rows and columns, which is faster on GPUs than a 1 × 1
    convolution; its gradient is added in place to that of the first.

    >>> x, weight, short = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4, 3, 1, 1)
    >>> y, z = convolve_both(x, weight, short, (2, 2), (1, 1))
    >>> torch.equal(y, F.conv2d(x, weight, None, 2, 1)), torch.allclose(z, F.conv2d(x, short, None, 2), atol=1e-5)
    (True, True)
    """
    # The gradient of `whole` is added to in place: it must be a new tensor that nothing else uses, as convolve's is.
    whole, thinned = _Thin.apply(x, stride)  # type: ignore[no-untyped-call]
    return convolve(whole, weight, stride, padding), mix(thinned, short)


def mix(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A convolution with a 1 × 1 weight, computed as a matrix product; for channels-last images.

    >>> x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 1, 1)
    >>> torch.allclose(mix(x, weight), F.conv2d(x, weight), atol=1e-5)
    True
    """
    return F.linear(x.movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)


def thin(x: Tensor, stride: Pair) -> Tensor:
    """Every `stride`-th row and column of images, channels-last: the input of a strided 1 × 1 convolution.

    >>> thin(torch.arange(16.0).view(1, 1, 4, 4), (2, 2)).flatten().tolist()
    [0.0, 2.0, 8.0, 10.0]
    """
    return _thinned(x, stride).contiguous(memory_format=torch.channels_last)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layout = stride, padding
        return F.conv2d(x, weight, None, stride, padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        arguments = grads[0], *ctx.saved_tensors, ctx.layout, ctx.needs_input_grad[:2]
        return *_Slope.apply(*arguments), None, None  # type: ignore[no-untyped-call]


class _Slope(torch.autograd.Function):
    """The gradients of x and of the weight, each only if `needed`."""

    @staticmethod
    def forward(
        ctx: Any, dy: Tensor, x: Tensor, weight: Tensor, layout: tuple[Pair, Pair], needed: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        ctx.save_for_backward(dy, x, weight)
        ctx.layout = layout
        ctx.set_materialize_grads(False)
        return _slope(dy, x, weight, layout, needed)

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
            contribution = F.conv2d(x, of_dweight, None, *ctx.layout)
            of_dy = contribution if of_dy is None else of_dy + contribution
            if ctx.needs_input_grad[1]:
                of_x, _ = _slope(dy, x, of_dweight, ctx.layout, (True, False))
        return of_dy, of_x, of_weight, None, None


def _slope(
    dy: Tensor, x: Tensor, weight: Tensor, layout: tuple[Pair, Pair], needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    dx, dweight, _ = torch.ops.aten.convolution_backward(
        dy, x, weight, None, *layout, (1, 1), False, (0, 0), 1, (*needed, False)
    )
    return dx, dweight


class _Thin(torch.autograd.Function):
    """The images unchanged, and every `stride`-th of their rows and columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stride: Pair) -> tuple[Tensor, Tensor]:
        ctx.stride = stride
        x = x.detach()
        return x, thin(x, stride)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Fill.apply(*grads, ctx.stride), None  # type: ignore[no-untyped-call]


class _Fill(torch.autograd.Function):
    """The transpose of `_Thin`: add thinned images to the rows and columns they came from, in place."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, thinned: Tensor, stride: Pair) -> Tensor:
        ctx.stride = stride
        ctx.mark_dirty(whole)
        _thinned(whole, stride).add_(thinned)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *_Thin.apply(grads[0], ctx.stride), None  # type: ignore[no-untyped-call]


def _thinned(x: Tensor, stride: Pair) -> Tensor:
    return x[:, :, :: stride[0], :: stride[1]]
