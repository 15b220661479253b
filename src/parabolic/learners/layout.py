"""All weights of a model as one vector, for methods whose steps can be differentiated themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Layout"]


class Layout:
    """Where each of some tensors lies in a vector of all their entries; they lie there as they do in memory.

    To cut a vector up moves no number, and to join tensors takes one operation; both can be differentiated, time and
    again.

    >>> layout = Layout([torch.zeros(2, 2), torch.zeros(1)])
    >>> vector = layout.join([torch.eye(2), torch.full((1,), 5.0)])
    >>> vector
    tensor([1., 0., 0., 1., 5.])
    >>> layout.cut(vector)[0]
    tensor([[1., 0.],
            [0., 1.]])
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.kinds = [(each.shape, each.ndim > 2 and not each.is_contiguous()) for each in tensors]
        self.sizes = [shape.numel() for shape, _ in self.kinds]

    def cut(self, vector: Tensor) -> tuple[Tensor, ...]:
        """The tensors of which `vector` consists, which share its memory."""
        parts: tuple[Tensor, ...] = _Cut.apply(vector, self)  # type: ignore[no-untyped-call]
        return parts

    def join(self, tensors: Iterable[Tensor]) -> Tensor:
        """The vector of all entries."""
        vector: Tensor = _Join.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return vector

    def views(self, vector: Tensor) -> list[Tensor]:
        """Like `cut`, but as plain views."""
        found = []
        for part, (shape, channels_last) in zip(vector.split(self.sizes), self.kinds, strict=True):
            if channels_last:
                n, channels, *space = shape
                found.append(part.view(n, *space, channels).movedim(-1, 1))
            else:
                found.append(part.view(shape))
        return found


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vector: Tensor, layout: Layout) -> tuple[Tensor, ...]:
        ctx.layout = layout
        return tuple(layout.views(vector.detach()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.layout.join(grads), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: Layout, *tensors: Tensor) -> Tensor:
        ctx.layout = layout
        vector = tensors[0].new_empty(sum(layout.sizes))
        _copy(layout.views(vector), tensors)
        return vector

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *ctx.layout.cut(grads[0])


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors to tensors: all that lie alike by one operation."""
    alike = []
    for target, source in zip(targets, sources, strict=True):
        strides = zip(target.shape, target.stride(), source.stride(), strict=True)
        if all(own == other for size, own, other in strides if size > 1):  # along one entry a stride says nothing
            alike.append((target, source.as_strided(target.shape, target.stride())))
        else:
            target.copy_(source)
    if alike:
        torch._foreach_copy_([target for target, _ in alike], [source for _, source in alike])
