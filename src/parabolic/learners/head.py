"""The last layer of a network, and what it sees."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parabolic.checks import Description, invalid

__all__ = ["check_head", "features", "last_linear"]


def last_linear(model: nn.Module) -> tuple[str, nn.Linear]:
    """The last linear layer of a model, which gives the scores, and its name in the model.

    >>> name, head = last_linear(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    >>> name, head.out_features
    ('2', 3)
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not layers:
        remedy = "end the model with one, or choose a learner that does not need to know the last layer"
        raise invalid("model", type(model), "a model with a torch.nn.Linear that gives the scores", remedy)
    return layers[-1]


@torch.no_grad()
def features(model: nn.Module, head: nn.Linear, x: Tensor) -> Tensor:
    """What `head` is given when the model, in its evaluation mode, sees `x`: the features, and nothing changes.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> features(model, model[1], torch.ones(2, 2, 2))
    tensor([[1., 1., 1., 1.],
            [1., 1., 1., 1.]])
    """
    seen: list[tuple[Tensor, Tensor]] = []
    hook = head.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    training = model.training
    model.eval()
    try:
        scores = model(x)
    finally:
        model.train(training)
        hook.remove()
    check_head(head, scores.shape[-1], given=bool(seen) and seen[-1][1].shape == scores.shape)
    return seen[-1][0].to(head.weight.dtype)  # a model may compute in less than its weights have


def check_head(head: nn.Linear, classes: int | None, given: bool = True) -> None:
    """Refuse a last linear layer that does not give the scores of the classes."""
    if not given or (classes is not None and head.out_features < classes):
        got = Description(f"{classes} scores that are not the output of its last linear layer, {head}")
        raise invalid("model", got, "a model whose last torch.nn.Linear gives the scores")
