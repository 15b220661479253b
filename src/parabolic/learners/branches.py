"""Two computations that do not depend on each other."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["side_by_side"]


def side_by_side(
    first: Callable[[], Tensor], second: Callable[[], Tensor], device: torch.device
) -> tuple[Tensor, Tensor]:
    """What two functions give, of which neither changes what the other reads; a GPU computes both at once.

    The second is computed on a stream of its own, and so is its gradient; in a captured step they are two branches.

    >>> side_by_side(lambda: torch.ones(1), lambda: torch.zeros(1), torch.device("cpu"))
    (tensor([1.]), tensor([0.]))
    """
    if device.type != "cuda":
        return first(), second()
    here = torch.cuda.current_stream(device)
    aside = _aside(here)
    aside.wait_stream(here)
    one = first()
    with torch.cuda.stream(aside):
        other = second()
    here.wait_stream(aside)
    other.record_stream(here)  # its memory, which is of the other stream, is not to be used again too early
    return one, other


@functools.cache
def _aside(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """The stream beside another: always the same one, as libraries keep memory for each that they were used on."""
    return torch.cuda.Stream(stream.device)
