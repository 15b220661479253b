"""Tensors joined into one vector, and cut out of it again."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parabolic.learners.head import overlaid

__all__ = ["Layout"]


class Layout:
    """The place of each tensor in a vector of all their entries, which are ordered there as in memory.

    Cutting copies nothing; joining is one copy. Both can be differentiated any number of times.

    >>> layout = Layout({"weight": torch.zeros(2, 2), "bias": torch.zeros(1)})
    >>> vector = layout.join([torch.eye(2), torch.full((1,), 5.0)])
    >>> vector
    tensor([1., 0., 0., 1., 5.])
    >>> layout.cut(vector)[0]
    tensor([[1., 0.],
            [0., 1.]])
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.names = list(tensors)
        self.kinds = [(tensor.shape, _strides(tensor)) for tensor in tensors.values()]
        self.sizes = [shape.numel() for shape, _ in self.kinds]

    def cut(self, vector: Tensor) -> tuple[Tensor, ...]:
        """The tensors that `vector` consists of; they share its memory."""
        parts: tuple[Tensor, ...] = _Cut.apply(vector, self)  # type: ignore[no-untyped-call]
        return parts

    def join(self, tensors: Iterable[Tensor]) -> Tensor:
        """The vector of all entries, in the common type that torch promotes the tensors to."""
        vector: Tensor = _Join.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return vector

    def views(self, vector: Tensor) -> list[Tensor]:
        """Like `cut`, but as plain views."""
        parts = zip(vector.contiguous().split(self.sizes), self.kinds, strict=True)
        return [part.as_strided(*kind) for part, kind in parts]

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """The same views by the names of the tensors."""
        return dict(zip(self.names, self.views(vector), strict=True))

    def grown(self, vector: Tensor, old: Layout, tensors: Iterable[Tensor]) -> Tensor:
        """Extend a vector of smaller tensors, laid out as in `old`, to this layout; new rows are those of `tensors`."""
        return self.join(itertools.starmap(overlaid, zip(old.views(vector), tensors, strict=True)))


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
        dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
        vector = tensors[0].new_empty(sum(layout.sizes), dtype=dtype)
        _copy(layout.views(vector), tensors)
        return vector

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *ctx.layout.cut(grads[0])


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors to tensors: all pairs with the same strides in one operation."""
    pairs = []
    for target, source in zip(targets, sources, strict=True):
        strides = zip(target.shape, target.stride(), source.stride(), strict=True)
        if all(own == other for size, own, other in strides if size > 1):  # for a single entry a stride means nothing
            pairs.append((target, source.as_strided(target.shape, target.stride())))
        else:
            target.copy_(source)
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a tensor if its entries are dense in memory; else those of a contiguous tensor."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()
