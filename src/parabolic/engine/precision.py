"""How finely a network computes: in float32, in TF32, or in bfloat16 inside the network alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from parabolic.backbones import in_plain
from parabolic.checks import check_name
from parabolic.gpus import tf32

__all__ = ["PRECISIONS", "computing_in", "numerics"]

PRECISIONS = ("fp32", "tf32", "bf16")

_Place = tuple[dict[str, Any], str, Tensor]  # the weights of a module, the name of one, and the weight itself


def computing_in(model: nn.Module, precision: str = "fp32", *, channels_last: bool = False) -> nn.Module:
    """Let a model compute in a precision wherever it is called, and keep images channels-last if asked; in place.

    For "bf16" what is inside the model runs in bfloat16 as far as `torch.autocast` finds safe. What goes in, what comes
    out, the weights and all that a learner does (paths, losses, averages, the update) stay float32. "fp32" and "tf32"
    differ by switches of the whole process, which `numerics` sets for a while. This is for GPUs; a CPU always computes
    in float32.

    >>> computing_in(nn.Linear(4, 8), "bf16")(torch.zeros(2, 4)).dtype
    torch.float32
    """
    check_name("precision", precision, PRECISIONS)
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if precision == "bf16" and next(model.parameters()).is_cuda:
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):  # whose weights autocast would turn to it
                module.computes_in = torch.bfloat16  # type: ignore[assignment]
        half = _Half()
        model.register_forward_pre_hook(half.enter)
        model.register_forward_hook(half.leave, always_call=True)
    return model


class _Half:
    """Opens autocast before a model's forward pass and closes it after, as hooks: they go along with a deep copy.

    The weights of modules that compute in bfloat16, which autocast would turn to it one by one, are turned all at once,
    and their gradients back.
    """

    def __init__(self) -> None:
        self.opened: list[tuple[torch.autocast, list[_Place]]] = []

    def enter(self, model: nn.Module, _args: Any) -> None:
        places: list[_Place] = [
            (module._parameters, name, weight)
            for module in model.modules()
            if hasattr(module, "computes_in")
            for name, weight in module._parameters.items()
            if weight is not None and weight.dtype == torch.float32
        ]
        if in_plain():
            places = []  # there autocast does it
        cast = torch.autocast("cuda", torch.bfloat16)
        cast.__enter__()
        self.opened.append((cast, places))
        if places:
            halves = _Cast.apply(torch.bfloat16, *[weight for _, _, weight in places])  # type: ignore[no-untyped-call]
            for (weights, name, _), half in zip(places, halves, strict=True):
                weights[name] = half

    def leave(self, _: nn.Module, _args: Any, output: Any) -> Any:
        cast, places = self.opened.pop()
        for weights, name, weight in places:
            weights[name] = weight
        cast.__exit__(None, None, None)
        return output.float() if isinstance(output, Tensor) else output  # nothing, where the pass has failed


class _Cast(torch.autograd.Function):
    """Several tensors to another type in one kernel, and their gradients back in one."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = tensors[0].dtype
        ctx.set_materialize_grads(False)
        made = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
        torch._foreach_copy_(made, list(tensors))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [each for each in slopes if each is not None]
        back = iter(_Cast.apply(ctx.back, *given) if given else ())  # type: ignore[no-untyped-call]
        return None, *[None if each is None else next(back) for each in slopes]


@contextmanager
def numerics(precision: str) -> Iterator[None]:
    """For a while, let a GPU compute as `precision` says, and the same way every time.

    The algorithms of convolutions are chosen by rule among those that always add up in the same order: choosing them
    by a stopwatch is up to 6 % faster (docs/engine.md), but then two processes may compute different numbers.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        with tf32(precision != "fp32"):
            yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
