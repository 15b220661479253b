"""The last layer of a network: its inputs, and how it grows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Generator, Tensor, nn

from parabolic.checks import Description, invalid
from parabolic.learners.functional import as_written, predicting

__all__ = [
    "check_alone",
    "check_head",
    "check_scoring",
    "features",
    "follow",
    "frozen_features",
    "last_linear",
    "overlaid",
    "widen",
    "wider_weights",
]


def last_linear(model: nn.Module) -> tuple[str, nn.Linear]:
    """The name of a model's last linear layer, which computes the scores, and the layer itself.

    >>> name, head = last_linear(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    >>> name, head.out_features
    ('2', 3)
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not layers:
        remedy = "end the model with one, or choose a learner that does not need to know the last layer"
        raise invalid("model", type(model), "a model with a torch.nn.Linear that gives the scores", remedy)
    return layers[-1]


def features(model: nn.Module, head: nn.Linear, x: Tensor) -> Tensor:
    """The features: the inputs of `head`, the layer that gives the scores, when the model is called on `x`.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> features(model, model[1], torch.ones(2, 2, 2))
    tensor([[1., 1., 1., 1.],
            [1., 1., 1., 1.]])
    """
    inputs, _, _ = _record_head(model, head, x)
    return inputs.to(head.weight.dtype)  # a model may compute in a lower precision than that of its weights


def _record_head(model: nn.Module, head: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The input and output of `head`, and the scores, when the model is called on `x`."""
    calls: list[tuple[Tensor, Tensor]] = []
    hook = head.register_forward_hook(lambda _, inputs, output: calls.append((inputs[0], output)))
    try:
        with as_written(model):
            scores = model(x)
    finally:
        hook.remove()
    check_head(head, scores.shape[-1], gives_scores=bool(calls) and calls[-1][1].shape == scores.shape)
    return *calls[-1], scores


@torch.no_grad()
def frozen_features(model: nn.Module, head: nn.Linear, x: Tensor) -> Tensor:
    """The features as in prediction: without gradients, in evaluation mode, and without changing anything.

    >>> model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
    >>> frozen_features(model, model[1], torch.ones(1, 2)).shape, model.training, model[0].num_batches_tracked.item()
    (torch.Size([1, 2]), True, 0)
    """
    with predicting(model):
        return features(model, head, x)


def check_head(head: nn.Linear, classes: int | None, gives_scores: bool = True) -> None:
    """Refuse a last linear layer that does not compute the scores of the classes."""
    if not gives_scores or (classes is not None and head.out_features < classes):
        got = Description(f"{classes} scores that are not the output of its last linear layer, {head}")
        remedy = "define it after the others, and return what it gives"
        raise invalid("model", got, "a model whose last torch.nn.Linear gives the scores", remedy)


def check_scoring(model: nn.Module, head: nn.Linear, x: Tensor, shifted: bool) -> None:
    """Refuse a model whose scores for `x` are not the output of its last linear layer, or in which that is frozen.

    If `shifted`, each row of scores may differ by a number, as after a log-softmax.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.LogSoftmax(-1))
    >>> check_scoring(model, model[0], torch.ones(1, 2), shifted=True)
    """
    if not any(weight.requires_grad for weight in head.parameters()):
        expected = "one that is trained, as the method trains it by itself"
        remedy = "unfreeze it, or choose a learner that does not need it"
        raise invalid("model", Description("a frozen last linear layer"), expected, remedy)
    with torch.no_grad(), predicting(model):
        _, output, scores = _record_head(model, head, x)
    output, scores = output.float(), scores.float()
    if shifted:
        output, scores = output.log_softmax(-1), scores.log_softmax(-1)
    check_head(head, scores.shape[-1], gives_scores=torch.allclose(output, scores, rtol=0.01, atol=0.01))


def check_alone(model: nn.Module, head: nn.Linear) -> None:
    """Refuse a last linear layer that cannot grow by itself: its weights are parametrised, or shared with others.

    >>> model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 3))
    >>> model[1].weight = model[0].weight
    >>> check_alone(model, model[1])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    parabolic.checks.InputError: model: got a last linear layer that shares weights with 0, expected its own weights...
    """
    parameters, remedy = dict(head.named_parameters()), "give it all outputs from the start"
    if others := sorted(parameters.keys() - {"weight", "bias"}):
        got = Description(f"a last linear layer with {', '.join(others)}")
        raise invalid("model", got, "no parameters but weight and bias", remedy)
    for name, module in model.named_modules():
        if module is not head and _ids(parameters.values()) & _ids(module.parameters(recurse=False)):
            got = Description(f"a last linear layer that shares weights with {name}")
            raise invalid("model", got, "its own weights", remedy)


def wider_weights(model: nn.Module, head: nn.Linear, outputs: int) -> dict[str, Tensor]:
    """Weights of zeros, by name, that give the last layer of a model more outputs: to check shapes.

    >>> model = nn.Linear(4, 2)
    >>> [(name, list(weight.shape)) for name, weight in wider_weights(model, model, 3).items()]
    [('weight', [3, 4]), ('bias', [3])]
    """
    ids = _ids(head.parameters())
    weights = {name: weight for name, weight in model.named_parameters() if id(weight) in ids}
    return {name: weight.new_zeros(outputs, *weight.shape[1:]) for name, weight in weights.items()}


@torch.no_grad()
def widen(layer: nn.Linear, outputs: int, generator: Generator) -> dict[nn.Parameter, nn.Parameter]:
    """Give a layer more outputs, in place; the old ones keep their weights. Returns the new parameter for each old one.

    >>> layer = nn.Linear(4, 2)
    >>> moved = widen(layer, 3, torch.Generator())
    >>> layer(torch.zeros(1, 4)).shape, [list(weight.shape) for weight in moved.values()]
    (torch.Size([1, 3]), [[3, 4], [3]])
    """
    moved, bound = {}, layer.in_features**-0.5  # as torch initialises them
    for name, weight in list(layer.named_parameters()):
        fresh = weight.new_empty(outputs, *weight.shape[1:]).uniform_(-bound, bound, generator=generator)
        moved[weight] = nn.Parameter(overlaid(weight, fresh), requires_grad=weight.requires_grad)
        setattr(layer, name, moved[weight])
    layer.out_features = outputs
    return moved


def follow(optimizer: torch.optim.Optimizer, moved: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters in an optimiser: its state for each row is kept, and is 0 for new rows.

    Where the state of a weight is not per entry, such as sums over rows and columns, it starts over for that weight.

    >>> layer = nn.Linear(4, 2)
    >>> optimizer = torch.optim.Adam(layer.parameters())
    >>> follow(optimizer, widen(layer, 3, torch.Generator()))
    >>> optimizer.param_groups[0]["params"][0] is layer.weight
    True
    """
    for group in optimizer.param_groups:
        # Rprop's step size changes by factors: from 0 it would hardly grow.
        initial = {"step_size": float(group.get("lr", 0.0))}
        for old in moved.keys() & set(group["params"]):
            new, state = moved[old], optimizer.state.pop(old, {})
            per_entry = {name: value for name, value in state.items() if _is_per_entry(value, old)}
            if state and all(name in per_entry or _is_scalar(value) for name, value in state.items()):
                optimizer.state[new] = state | {
                    name: overlaid(value, value.new_full(new.shape, initial.get(name, 0.0)))
                    for name, value in per_entry.items()
                }
        group["params"] = [moved.get(weight, weight) for weight in group["params"]]


def overlaid(old: Tensor, new: Tensor) -> Tensor:
    """A copy of `new`, with `old` in its first rows.

    >>> overlaid(torch.ones(1, 2), torch.zeros(2, 2))
    tensor([[1., 1.],
            [0., 0.]])
    """
    return torch.cat([old, new[len(old) :]]) if old.ndim and len(old) < len(new) else old.clone()


def _is_per_entry(value: object, weight: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == weight.shape


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)


def _ids(weights: Iterable[nn.Parameter]) -> set[int]:
    return set(map(id, weights))
