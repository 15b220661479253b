"""Two independent computations, at the same time on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["side_by_side"]


def side_by_side(
    first: Callable[[], Tensor], second: Callable[[], Tensor], device: torch.device
) -> tuple[Tensor, Tensor]:
    """The results of two functions, neither of which changes what the other reads; a GPU runs both concurrently.

    The second runs on a stream of its own, and so does its backward pass; in a captured step they are two branches.

    >>> side_by_side(lambda: torch.ones(1), lambda: torch.zeros(1), torch.device("cpu"))
    (tensor([1.]), tensor([0.]))
    """
    if device.type != "cuda":
        return first(), second()
    stream = torch.cuda.current_stream(device)
    side_stream = _side_stream(stream)
    side_stream.wait_stream(stream)
    first_result = first()
    with torch.cuda.stream(side_stream):
        second_result = second()
    stream.wait_stream(side_stream)
    second_result.record_stream(stream)  # its memory belongs to the other stream, and must not be reused too early
    return first_result, second_result


@functools.cache
def _side_stream(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """The side stream of a stream: always the same one, as libraries hold memory for every stream that they ran on."""
    return torch.cuda.Stream(stream.device)
