"""Of a GPU: whether kernels of our own can be brought to it, and whether it may round what it multiplies (TF32)."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["has_cudnn", "has_triton", "tf32"]


def has_cudnn(x: Tensor) -> bool:
    """Whether a tensor is on a GPU of NVIDIA, whose library may be used."""
    return x.is_cuda and torch.version.hip is None and torch.backends.cudnn.enabled


@functools.cache
def has_triton() -> bool:
    """Whether Triton is here, by which Python brings kernels to a GPU."""
    return importlib.util.find_spec("triton") is not None


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """For a while, allow or forbid a GPU to compute in TF32; then all switches are as they were.

    torch has older switches (`allow_tf32`) and newer ones (`fp32_precision`). Once a program has used a newer one, an
    older may refuse to be read. Where they can be read they are set too, as others may read them meanwhile.

    >>> with tf32(True):
    ...     torch.backends.cuda.matmul.allow_tf32
    True
    """
    backends: Any = torch.backends
    matmul, cudnn = backends.cuda.matmul, backends.cudnn
    older = _readable(lambda: (matmul.allow_tf32, cudnn.allow_tf32))
    word = _readable(torch.get_float32_matmul_precision)
    new = hasattr(matmul, "fp32_precision")  # since torch 2.9
    newer = [matmul, cudnn.conv, cudnn.rnn] if new else []
    before = [(place, place.fp32_precision) for place in [*newer, backends.mkldnn.matmul]] if new else []
    if older is not None:
        matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    for place in newer:
        place.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        if older is not None:
            matmul.allow_tf32, cudnn.allow_tf32 = older
        if word is not None:  # which has three values to the older's two, and sets a switch of the CPU as well
            torch.set_float32_matmul_precision(word)
        for place, value in before:
            place.fp32_precision = "none"  # then it follows torch.backends.fp32_precision, as it may have done
            if place.fp32_precision != value:
                place.fp32_precision = value


def _readable(read: Callable[[], Any]) -> Any:
    """What is read, or None where torch refuses to tell."""
    try:
        return read()
    except RuntimeError:
        return None
