"""The trainable weights, and these and their gradients as one vector, for methods that modify gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from parabolic.checks import Description, invalid
from parabolic.learners.layout import Layout

__all__ = ["Weights", "named_trainable", "trainable"]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The trainable weights, in the order of the model."""
    return list(named_trainable(model).values())


def named_trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable weights by their names in the model."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


class Weights:
    """The trainable weights, and flat vectors of as many numbers, in which entries are ordered as in memory.

    >>> weights = Weights(named_trainable(nn.Linear(2, 1, bias=False)))
    >>> weights.gradient((weights.vector() * torch.tensor([3.0, 4.0])).sum())
    tensor([3., 4.])
    """

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        if odd := [name for name, weight in named.items() if weight.is_complex()]:
            remedy = "hold them as torch.view_as_real(weight), or choose another learner, such as ER"
            raise invalid("model", Description(f"complex weights ({odd[0]})"), "real ones", remedy)
        self.named = named
        self.layout = Layout(named)

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self.named.values())

    def of(self, model: nn.Module) -> Weights:
        """The weights of the same names, in a model that has grown; some may be frozen by now."""
        named = dict(model.named_parameters())
        return Weights({name: named[name] for name in self.named})

    def vector(self) -> Tensor:
        """The current weights."""
        self._check_trained()
        return self.layout.join(self)

    def gradient(self, loss: Tensor) -> Tensor:
        """The gradient of `loss`; 0 for weights that it does not depend on."""
        self._check_trained()
        return self.layout.join(torch.autograd.grad(loss, list(self), materialize_grads=True))

    def set_gradient(self, vector: Tensor) -> None:
        """Store a vector as the `grad` of the weights, for the optimiser."""
        for weight, part in zip(self, self.layout.views(vector), strict=True):
            weight.grad = part.to(weight.dtype)

    def _check_trained(self) -> None:
        """Refuse weights that were frozen meanwhile: vectors have a place for them."""
        if frozen := [name for name, weight in self.named.items() if not weight.requires_grad]:
            got = Description(f"weights that were frozen after the learner was created ({frozen[0]})")
            raise invalid("model", got, "the same trained weights as then", "create a new learner, with the same model")
