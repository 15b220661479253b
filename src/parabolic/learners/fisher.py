"""Squared per-example gradients, summed over many examples at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import grad, vmap
from torch.overrides import TorchFunctionMode

from parabolic.backbones import plain_operations
from parabolic.checks import DEVICE_ERRORS
from parabolic.learners.functional import call_by
from parabolic.learners.gradients import named_trainable, trainable

__all__ = ["squared_gradients"]

ROOM = (2**24, 2**28)  # how many numbers are held at once on a CPU, and on a GPU, which needs more to stay busy

Squares = Callable[[Tensor], Tensor]
"""Maps the gradient of a layer's output to the squared gradients of one of its weights, summed over examples."""

Use = tuple[GradientEdge, Squares]


def squared_gradients(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Callable[..., Tensor] = F.cross_entropy,
    is_covered: dict[int, bool] | None = None,
) -> list[Tensor]:
    """For each weight, the sum over examples of the squared gradient of their loss, for a model in evaluation mode.

    One pass over all examples yields the input of each layer and the gradient of its output. From these follow the
    per-example gradients of linear layers, convolutions and norms, which are squared and summed in chunks. A model that
    uses a weight in any other way, or twice, or where the first dimension is not the examples, is differentiated
    example by example. To find out which applies, a few examples are passed through once more, unless `is_covered` has
    the answer for a batch of this size; the answer is stored there.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = nn.init.zeros_(model.weight)
    >>> squared_gradients(model, torch.tensor([[1.0, 0.0], [2.0, 4.0]]), torch.tensor([0, 1]))
    [tensor([[1.2500, 4.0000],
            [1.2500, 4.0000]])]
    """
    weights = trainable(model)
    is_covered = {} if is_covered is None else is_covered
    scores, uses = _record_uses(model, x, weights)
    if uses is not None and len(x) not in is_covered:
        # Another dimension may happen to be as long as the batch; with a batch of another size it is not.
        few = x[:2] if len(x) > 2 else torch.cat([x, x])
        is_covered[len(x)] = _record_uses(model, few, weights)[1] is not None
    if uses is None or not is_covered[len(x)]:
        return _squares_by_example(model, x, y, loss)
    slopes = torch.autograd.grad(loss(scores, y, reduction="sum"), [edge for edge, _ in uses], allow_unused=True)
    with torch.no_grad():
        return [
            torch.zeros_like(weight) if slope is None else squares(slope.to(_sum_type(weight)))
            for weight, (_, squares), slope in zip(weights, uses, slopes, strict=True)
        ]


def _record_uses(model: nn.Module, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, list[Use] | None]:
    """The model's scores, and how it uses each weight; None if it uses one in a way that no rule covers."""
    with torch.enable_grad(), plain_operations(), _UseRecorder(weights, len(x)) as recorder:
        scores: Tensor = model(x)
    if recorder.failed or len(recorder.uses) < len(weights):
        return scores, None
    return scores, [recorder.uses[id(weight)] for weight in weights]


def _squares_by_example(model: nn.Module, x: Tensor, y: Tensor, loss: Callable[..., Tensor]) -> list[Tensor]:
    """The same for any model, by computing the gradient of every single example."""
    weights = {name: weight.detach() for name, weight in named_trainable(model).items()}

    def error(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(call_by(weights, model, x[None]), y[None], reduction="sum")

    slopes_of = vmap(grad(error), in_dims=(None, 0, 0))
    totals = [torch.zeros_like(weight, dtype=_sum_type(weight)) for weight in weights.values()]
    for examples, labels in _chunks(sum(total.numel() for total in totals), x, y):
        try:
            slopes = slopes_of(weights, examples, labels)
        except DEVICE_ERRORS:
            raise
        except RuntimeError:  # vmap has no rule for some operations, such as a GRU's, or for an autograd.Function
            slopes = _looped_slopes(model, examples, labels, loss)
        for total, slope in zip(totals, slopes.values(), strict=True):
            total += slope.to(total).square().sum(0)
    return totals


def _looped_slopes(model: nn.Module, x: Tensor, y: Tensor, loss: Callable[..., Tensor]) -> dict[str, Tensor]:
    """The gradients of each example, computed one after the other as in training, which works for any model."""
    weights, slopes = named_trainable(model), []
    # In evaluation mode cuDNN's recurrent layers have no gradient.
    with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        for example, label in zip(x.split(1), y.split(1), strict=True):
            error = loss(model(example), label, reduction="sum")
            slopes.append(torch.autograd.grad(error, list(weights.values()), materialize_grads=True))
    by_weight = zip(*slopes, strict=True)
    return {name: torch.stack(stack) for name, stack in zip(weights, by_weight, strict=True)}


class _UseRecorder(TorchFunctionMode):
    """Records where a forward pass uses each weight; `failed` is set once one is used in a way that no rule covers."""

    def __init__(self, weights: Sequence[Tensor], size: int) -> None:
        super().__init__()
        self.size = size
        # By id, each weight or padded copy of one (held here, so that no other tensor gets its id) and that weight.
        self.origin = {id(weight): (weight, weight) for weight in weights}
        self.uses: dict[int, Use] = {}
        self.failed = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        used = [tensor for tensor in _tensors((args, kwargs)) if id(tensor) in self.origin]
        if not used or not any(tensor.requires_grad for tensor in _tensors(out)):
            return out
        if func is F.pad and (args[2] if len(args) > 2 else kwargs.get("mode", "constant")) == "constant":
            self.origin[id(out)] = (out, self.origin[id(used[0])][1])
            return out
        rules = RULES[func](*args, **kwargs) if func in RULES and out.ndim > 1 and len(out) == self.size else {}
        for tensor in used:
            _, weight = self.origin[id(tensor)]
            self.failed |= id(weight) in self.uses or tensor not in rules
            if not self.failed:
                rule = rules[tensor] if tensor is weight else _unpadded(weight, tensor, rules[tensor])
                self.uses[id(weight)] = (get_gradient_edge(out), rule)
        return out


def _unpadded(weight: Tensor, padded: Tensor, squares: Squares) -> Squares:
    """From the squares for a padded weight to those of the weight itself: padding has only moved its entries."""
    return lambda slope: torch.autograd.grad(padded, weight, squares(slope).to(padded))[0]


# -- the rules: each is called like the function it is for, and returns how to measure each weight of that function ----


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> dict[Tensor | None, Squares]:
    def of_weight(slope: Tensor) -> Tensor:
        g, a = (tensor.reshape(len(tensor), 1, -1, tensor.shape[-1]) for tensor in (slope, input))
        return _sum_squared_products(g.mT, a, lambda a: a, weight.numel()).view_as(weight)

    return {weight: of_weight, bias: _squares_of_sums(range(1, input.ndim - 1))}


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> dict[Tensor | None, Squares]:
    if input.ndim != weight.ndim:  # a single example without a batch dimension
        return {}
    out, channels, *kernel = weight.shape  # `channels` of a group
    steps, gaps = (_as_list(value, len(kernel)) for value in (stride, dilation))
    if padding == "same":
        widths = [gap * (side - 1) for gap, side in zip(gaps, kernel, strict=True)]
        borders = [(width // 2, width - width // 2) for width in widths]
    else:
        borders = [(width, width) for width in _as_list(0 if isinstance(padding, str) else padding, len(kernel))]

    def of_weight(slope: Tensor) -> Tensor:
        places = slope.shape[2:]

        def windows(x: Tensor) -> Tensor:
            """What the kernel sees at each place: [examples, groups, places, kernel · channels of a group]."""
            x = F.pad(x, [0, 0, *(width for border in reversed(borders) for width in border)])
            first, *along, last = x.stride()
            strides = [a * b for a, b in zip(along * 2, [*steps, *gaps], strict=True)]
            views = x.as_strided((len(x), *places, *kernel, x.shape[-1]), (first, *strides, last))
            by_group: Tensor = views.unflatten(-1, (groups, channels)).movedim(-2, 1)
            return by_group.reshape(len(x), groups, places.numel(), -1)

        # Channels last: each window is then copied in a few long pieces.
        g = slope.movedim(1, -1).reshape(len(slope), -1, groups, out // groups).permute(0, 2, 3, 1)
        held = max(weight.numel(), places.numel() * math.prod(kernel) * groups * channels)
        squares = _sum_squared_products(g, input.movedim(1, -1), windows, held)
        return squares.reshape(out, *kernel, channels).movedim(-1, 1)

    return {weight: of_weight, bias: _squares_of_sums(range(2, input.ndim))}


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> dict[Tensor | None, Squares]:
    if training or running_mean is None or running_var is None:  # with batch statistics no example has its own gradient
        return {}

    def normalise(x: Tensor) -> Tensor:
        return F.batch_norm(x, running_mean.to(x), running_var.to(x), eps=eps)

    places = range(2, input.ndim)
    return {weight: _squares_of_sums(places, input, normalise), bias: _squares_of_sums(places)}


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> dict[Tensor | None, Squares]:
    places = range(2, input.ndim)
    normalise = partial(F.group_norm, num_groups=num_groups, eps=eps)
    return {weight: _squares_of_sums(places, input, normalise), bias: _squares_of_sums(places)}


def _layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> dict[Tensor | None, Squares]:
    if input.ndim == len(normalized_shape):  # the examples of a batch are normalised together
        return {}
    places = range(1, input.ndim - len(normalized_shape))
    normalise = partial(F.layer_norm, normalized_shape=normalized_shape, eps=eps)
    return {weight: _squares_of_sums(places, input, normalise), bias: _squares_of_sums(places)}


RULES: dict[Any, Callable[..., dict[Tensor | None, Squares]]] = {
    F.linear: _linear,
    F.conv1d: _convolution,
    F.conv2d: _convolution,
    F.conv3d: _convolution,
    F.batch_norm: _batch_norm,
    F.group_norm: _group_norm,
    F.layer_norm: _layer_norm,
}


def _squares_of_sums(
    places: range, x: Tensor | None = None, normalise: Callable[[Tensor], Tensor] | None = None
) -> Squares:
    """For a weight that is added at all places, or that multiplies normalise(x)."""

    def squares(slope: Tensor) -> Tensor:
        if x is not None and normalise is not None:
            slope = slope * normalise(x.to(slope))
        return (slope.sum(tuple(places)) if places else slope).square().sum(0)

    return squares


def _sum_squared_products(g: Tensor, x: Tensor, a: Callable[[Tensor], Tensor], held: int) -> Tensor:
    """Σ over examples of (g · a(x))²: g is [examples, groups, out, places], a(x) is [examples, groups, places, in].

    `held` is how many numbers an example occupies meanwhile.
    """
    if g.shape[-1] == 1:  # the squares of an outer product are the outer product of the squares
        return torch.einsum("ngol,ngli->goi", g.square(), a(x.to(g)).square())
    total = g.new_zeros(())
    for g_chunk, x_chunk in _chunks(held, g, x):
        # As a norm, which reads the products once and does not write their squares.
        total = total + torch.linalg.vector_norm(g_chunk @ a(x_chunk.to(g_chunk)), dim=0).square()
    return total


def _chunks(held: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors into chunks that fit into memory if each row occupies `held` numbers."""
    room = ROOM[tensors[0].device.type != "cpu"]
    return zip(*(tensor.split(max(1, room // held)) for tensor in tensors), strict=True)


def _sum_type(weight: Tensor) -> torch.dtype:
    """The type in which squares are summed."""
    return torch.promote_types(weight.dtype, torch.float32)


def _as_list(value: int | Sequence[int], count: int) -> list[int]:
    return [value] * count if isinstance(value, int) else [*value] * (count // len(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a function's arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
