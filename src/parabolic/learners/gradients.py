"""Gradients as one flat vector, for methods that change a gradient before it is descended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from parabolic.learners.head import overlaid

__all__ = ["flatten", "gradient", "named_trainable", "refit", "set_gradient", "trainable"]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The weights that learning changes, in the order of the model."""
    return list(named_trainable(model).values())


def named_trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The same weights by their names in the model."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """All entries of some tensors, one after the other.

    >>> flatten([torch.eye(2), torch.zeros(1)])
    tensor([1., 0., 0., 1., 0.])
    """
    return torch.cat([each.reshape(-1) for each in tensors])


def gradient(loss: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The gradient of `loss` as one vector; weights that it does not depend on count as zeros.

    >>> weight = torch.ones(3, requires_grad=True)
    >>> gradient((weight**2).sum(), [weight])
    tensor([2., 2., 2.])
    """
    return flatten(torch.autograd.grad(loss, weights, materialize_grads=True))


def set_gradient(weights: Sequence[Tensor], vector: Tensor) -> None:
    """Make `vector` the gradient that an optimiser of `weights` finds.

    >>> weight = torch.ones(3, requires_grad=True)
    >>> set_gradient([weight], torch.arange(3.0))
    >>> weight.grad
    tensor([0., 1., 2.])
    """
    for weight, part in zip(weights, vector.split([weight.numel() for weight in weights]), strict=True):
        weight.grad = part.view_as(weight)


def refit(vector: Tensor, before: Sequence[Tensor], now: Iterable[Tensor]) -> Tensor:
    """A vector of all entries of the tensors `before`, fitted to larger ones; what is new is as they have it.

    >>> refit(torch.tensor([1.0, 2.0, 3.0]), [torch.zeros(2), torch.zeros(1)], [torch.zeros(3), torch.zeros(1)])
    tensor([1., 2., 0., 3.])
    """
    parts = vector.split([each.numel() for each in before])
    each = zip(parts, before, now, strict=True)
    return flatten(overlaid(part.view_as(old), new.detach()) for part, old, new in each)
