"""Calling a model with other weights, in evaluation mode or for some classes only; and what modules it contains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn.functional import pad
from torch.nn.modules.batchnorm import _BatchNorm

from parabolic.checks import invalid

__all__ = [
    "RECOMPUTED", "answers_by", "as_written", "call_by", "call_with", "check_between", "copies_of", "draws_apart",
    "has_batch_norm", "has_embedding", "is_expanded", "predicting", "restrict_to", "scores_by", "types_of", "work_by",
]  # fmt: skip

RECOMPUTED = "what is computed again later would be with other weights"  # in torch's error for a checkpoint


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a model contains batch norm, whose statistics a single example may not have."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def has_embedding(model: nn.Module) -> bool:
    """Whether a model contains an embedding, which may not have every id."""
    return any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in model.modules())


def check_between(model: nn.Module, x: Tensor, inputs: Tensor, expected: str) -> None:
    """Refuse inputs that cannot be interpolated, such as ids, for a method that interpolates."""
    if isinstance(inputs, Tensor) and not inputs.is_floating_point():
        remedy = "if they are measurements, convert them with .float()"
        if has_embedding(model):
            remedy = "if they are ids, take the embedding out of the model and pass embed=nn.Embedding(…)"
        raise invalid("x", x, expected, remedy)


@contextmanager
def predicting(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode; afterwards every module, frozen ones included, is back in its own mode.

    >>> model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(1).eval())
    >>> with predicting(model):
    ...     print(any(module.training for module in model.modules()))
    False
    >>> [module.training for module in model.modules()]
    [True, True, False]
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:  # `train` on a module sets its children, which come later: few need a call
            if module.training != training:
                module.train(training)


def as_written(model: nn.Module) -> AbstractContextManager[Any]:
    """A context in which a model is not compiled: compiled code does not call hooks that were registered later.

    >>> with as_written(nn.Linear(2, 2)):
    ...     pass
    """
    compiled = any(module._compiled_call_impl or "_orig_mod" in module._modules for module in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def call_by(weights: Mapping[str, Tensor], model: nn.Module, x: Tensor) -> Tensor:
    """The model's output with other weights and buffers; those not named are its own. The model is not changed.

    Names are those of `named_parameters` or `named_buffers`: one name for a weight that several modules share.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> model, own = nn.Sequential(layer, layer), layer.weight
    >>> call_by({"0.weight": torch.full((1, 1), 3.0)}, model, torch.ones(1, 1)), layer.weight is own
    (tensor([[9.]]), True)
    """
    # Not with torch's tie_weights, which replaces the weight of a module that is used twice two times: the second time
    # it takes the first replacement for the original, and restores that.
    if not weights:
        output: Tensor = model(x)
        return output
    replacements: dict[int, Tensor] = {}  # by the id of the tensor replaced
    places: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            place = f"{path}.{name}" if path else name
            if tensor is None:
                continue
            replacement = replacements.get(id(tensor), weights.get(place))
            if replacement is not None:
                replacements[id(tensor)] = places[place] = replacement
    if not torch.is_grad_enabled():
        return call_with(places, model, x)
    # What is computed again in the backward pass would be computed with the model's own weights.
    with disable_saved_tensors_hooks(RECOMPUTED):
        return call_with(places, model, x)


def call_with(places: Mapping[str, Tensor], model: nn.Module, x: Tensor) -> Tensor:
    """The same, but in the places named alone: what shares a weight with one of them keeps its own.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> call_with({"weight": torch.full((1, 1), 3.0)}, layer, torch.ones(1, 1))
    tensor([[3.]])
    """
    if isinstance(model, nn.DataParallel):
        expected = "a network that can be called with other weights, such as averages"
        raise invalid("model", type(model), expected, "pass model.module")
    scores: Tensor = torch.func.functional_call(model, dict(places), (x,), tie_weights=False)
    return scores


@torch.no_grad()
def answers_by(weights: Mapping[str, Tensor], model: nn.Module, x: Tensor) -> Tensor:
    """The model's output in evaluation mode with other weights and buffers; those not named are its own.

    >>> model = nn.Sequential(nn.Dropout(), nn.Linear(1, 1))
    >>> answers_by({"1.weight": torch.ones(1, 1), "1.bias": torch.zeros(1)}, model, torch.ones(1, 1)), model.training
    (tensor([[1.]]), True)
    """
    with predicting(model):
        return call_by(weights, model, x)


class _Work(nn.Module):
    """A function that calls a model, as a module that contains the model."""

    def __init__(self, work: Callable[[Tensor], Tensor], model: nn.Module) -> None:
        super().__init__()
        self.work, self.model = work, model

    def forward(self, x: Tensor) -> Tensor:
        return self.work(x)


def work_by(weights: Mapping[str, Tensor], model: nn.Module, work: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What a function returns for `x` if the model that it calls is in evaluation mode and has other weights.

    >>> model = nn.Linear(1, 1)
    >>> work_by({"weight": torch.ones(1, 1), "bias": torch.zeros(1)}, model, lambda x: 5 * model(x), torch.ones(1, 1))
    tensor([[5.]])
    """
    return answers_by({f"model.{name}": weight for name, weight in weights.items()}, _Work(work, model), x)


def scores_by(weights: Mapping[str, Tensor], model: nn.Module, x: Tensor) -> Tensor:
    """The model's scores with other weights. Its buffers do not change: batch-norm statistics track its own weights.

    Buffers that are given with the weights are used, and updated.

    >>> model = nn.BatchNorm1d(1)
    >>> scores = scores_by({"bias": torch.ones(1)}, model, torch.tensor([[5.0], [9.0]]))
    >>> round(scores.mean().item(), 3), model.running_mean
    (1.0, tensor([0.]))
    """
    own_buffers = {name: buffer for name, buffer in model.named_buffers() if name not in weights}
    copies = zip(own_buffers, copies_of(own_buffers.values()), strict=True)
    return call_by({**weights, **dict(copies)}, model, x)


def types_of(model: nn.Module, weights: Iterable[Tensor]) -> list[torch.dtype]:
    """The types in which a model uses its weights: their own, or `computes_in` of their modules.

    Other weights for the model may be given in these types.

    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False))
    >>> model[0].computes_in = torch.bfloat16
    >>> types_of(model, model.parameters())
    [torch.bfloat16]
    """
    uses = defaultdict[Tensor, set[torch.dtype]](set)
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            uses[weight].add(getattr(module, "computes_in", weight.dtype))
    return [next(iter(uses[weight])) if len(uses[weight]) == 1 else weight.dtype for weight in weights]


def draws_apart(device: torch.device) -> AbstractContextManager[None]:
    """A context whose draws from torch's global generators do not change those of the run."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def copies_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """A copy of each tensor, with one operation per type: a network has many small buffers."""
    pairs = [(torch.empty_like(tensor), tensor) for tensor in tensors]
    for dtype in {tensor.dtype for _, tensor in pairs}:
        same_type = [pair for pair in pairs if pair[1].dtype == dtype]
        torch._foreach_copy_([copy for copy, _ in same_type], [tensor for _, tensor in same_type])
    return [copy for copy, _ in pairs]


def is_expanded(tensor: Tensor) -> bool:
    """Whether several entries of a tensor are one number in memory, so that torch cannot change it in place.

    >>> is_expanded(torch.zeros(1).expand(3)), is_expanded(torch.zeros(3).expand(1, 3))
    (True, False)
    """
    if tensor.layout != torch.strided:
        return False
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def restrict_to(classes: Tensor, scores: Tensor) -> Tensor:
    """The scores, with those of all other classes so low that their probability is 0.

    `classes`, a mask, may be shorter than the scores.

    >>> restrict_to(torch.tensor([True, False, True]), torch.zeros(1, 3)).softmax(-1)
    tensor([[0.5000, 0.0000, 0.5000]])
    """
    if len(classes) < scores.shape[-1]:
        classes = pad(classes, (0, scores.shape[-1] - len(classes)))
    # Not −∞: 0 · log 0 must be 0 in a cross-entropy.
    return scores.masked_fill(~classes, torch.finfo(scores.dtype).min / 2)
