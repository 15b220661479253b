"""Numerical precision of a network: float32, TF32, or bfloat16 inside the network only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from parabolic.backbones import uses_plain_operations
from parabolic.checks import check_name
from parabolic.gpus import tf32

__all__ = ["PRECISIONS", "computing_in", "numerics"]

PRECISIONS = ("fp32", "tf32", "bf16")

_Place = tuple[dict[str, Any], str, Tensor]  # a module's parameters, a name among them, and the weight


def computing_in(model: nn.Module, precision: str = "fp32", *, channels_last: bool = False) -> nn.Module:
    """Make a model compute in the given precision, with images in channels-last format if requested; in place.

    With "bf16" the model's operations run in bfloat16 wherever `torch.autocast` considers it safe. Inputs, outputs,
    weights and everything that a learner does (paths, losses, averages, the update) stay float32. "fp32" and "tf32"
    differ by process-wide switches, which `numerics` sets temporarily. This concerns GPUs; a CPU always computes in
    float32.

    >>> computing_in(nn.Linear(4, 8), "bf16")(torch.zeros(2, 4)).dtype
    torch.float32
    """
    check_name("precision", precision, PRECISIONS)
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if precision == "bf16" and any(weight.is_cuda for weight in model.parameters()):
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):  # whose weights autocast would convert
                module.computes_in = torch.bfloat16  # type: ignore[assignment]
        half = _Half()
        model.register_forward_pre_hook(half.enter)
        model.register_forward_hook(half.leave, always_call=True)
    return model


class _Half:
    """Forward hooks that enter autocast before a model's forward pass and leave it after; deep copies include them.

    Autocast would convert the weights of modules that compute in bfloat16 one by one; here they are converted all at
    once, and so are their gradients on the way back.
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
        if uses_plain_operations():
            places = []  # autocast converts them
        autocast = torch.autocast("cuda", torch.bfloat16)
        autocast.__enter__()
        self.opened.append((autocast, places))
        if places:
            halves = _Cast.apply(torch.bfloat16, *[weight for _, _, weight in places])  # type: ignore[no-untyped-call]
            for (weights, name, _), half in zip(places, halves, strict=True):
                weights[name] = half

    def leave(self, _: nn.Module, _args: Any, output: Any) -> Any:
        autocast, places = self.opened.pop()
        for weights, name, weight in places:
            weights[name] = weight
        autocast.__exit__(None, None, None)
        return output.float() if isinstance(output, Tensor) else output  # None if the pass failed


class _Cast(torch.autograd.Function):
    """Converts several tensors to another dtype in one kernel, and their gradients back in one."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = tensors[0].dtype
        ctx.set_materialize_grads(False)
        converted = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
        torch._foreach_copy_(converted, list(tensors))
        return tuple(converted)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        present = [gradient for gradient in gradients if gradient is not None]
        converted = iter(_Cast.apply(ctx.back, *present) if present else ())  # type: ignore[no-untyped-call]
        return None, *[None if gradient is None else next(converted) for gradient in gradients]


@contextmanager
def numerics(precision: str) -> Iterator[None]:
    """A context in which a GPU computes with the given precision, deterministically.

    Convolution algorithms are chosen by rule among those with a fixed order of summation: choosing by timing is up to
    6 % faster (docs/engine.md), but two processes might then compute different numbers.
    """
    check_name("precision", precision, PRECISIONS)
    cudnn = torch.backends.cudnn
    previous = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        with tf32(precision != "fp32"):
            yield
    finally:
        cudnn.deterministic, cudnn.benchmark = previous
