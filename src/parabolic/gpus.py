"""GPU features: whether cuDNN and Triton are available, and whether TF32 may be used."""

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
    """Whether a tensor is on an NVIDIA GPU and cuDNN is enabled."""
    return x.is_cuda and torch.version.hip is None and torch.backends.cudnn.enabled


@functools.cache
def has_triton() -> bool:
    """Whether Triton, which compiles our GPU kernels, is installed."""
    return importlib.util.find_spec("triton") is not None


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 on GPUs within this context; at the end all switches are restored.

    torch has older switches (`allow_tf32`) and newer ones (`fp32_precision`). Once a program has used a newer one,
    reading an older one may raise. Those that can be read are set too, as other code may read them meanwhile.

    >>> with tf32(True):
    ...     torch.backends.cuda.matmul.allow_tf32
    True
    """
    backends: Any = torch.backends
    matmul, cudnn = backends.cuda.matmul, backends.cudnn
    older = _read_or_none(lambda: (matmul.allow_tf32, cudnn.allow_tf32))
    precision = _read_or_none(torch.get_float32_matmul_precision)
    has_new = hasattr(matmul, "fp32_precision")  # since torch 2.9
    newer = [matmul, cudnn.conv, cudnn.rnn] if has_new else []
    previous = [(backend, backend.fp32_precision) for backend in [*newer, backends.mkldnn.matmul]] if has_new else []
    if older is not None:
        matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    for backend in newer:
        backend.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        if older is not None:
            matmul.allow_tf32, cudnn.allow_tf32 = older
        if precision is not None:  # it has three values where allow_tf32 has two, and also sets a switch of the CPU
            torch.set_float32_matmul_precision(precision)
        for backend, value in previous:
            backend.fp32_precision = "none"  # so that it follows torch.backends.fp32_precision, if it did before
            if backend.fp32_precision != value:
                backend.fp32_precision = value


def _read_or_none(read: Callable[[], Any]) -> Any:
    """The value that is read, or None if torch refuses."""
    try:
        return read()
    except RuntimeError:
        return None
