"""Where bridges end: for each example of a joint batch, the row of another."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

__all__ = ["PAIRINGS"]


def random(x: Tensor, new: int, generator: Generator) -> Tensor:
    """A shuffle, as in the paper's Algorithm 1: every example is the end of one bridge."""
    return torch.randperm(len(x), generator=generator, device=x.device)


def farthest(x: Tensor, new: int, generator: Generator) -> Tensor:
    """The example at the greatest Euclidean distance."""
    return _distances(x).argmax(1)


def nearest(x: Tensor, new: int, generator: Generator) -> Tensor:
    """The example at the smallest Euclidean distance, other than itself (unless there is no other)."""
    return _distances(x).fill_diagonal_(torch.inf).argmin(1)


def across(x: Tensor, new: int, generator: Generator) -> Tensor:
    """A random recalled example for each new one and vice versa; a shuffle while nothing is recalled."""
    old = len(x) - new
    if old == 0:
        return random(x, new, generator)
    to_old = torch.randint(new, new + old, (new,), generator=generator, device=x.device)
    to_new = torch.randint(new, (old,), generator=generator, device=x.device)
    return torch.cat([to_old, to_new])


def _distances(x: Tensor) -> Tensor:
    flat = x.flatten(1)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    # From differences: with a matrix product, far from the origin, rounding would outweigh the distances.
    return torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")


PAIRINGS: dict[str, Callable[[Tensor, int, Generator], Tensor]] = {
    "random": random,
    "farthest": farthest,
    "nearest": nearest,
    "across": across,
}
"""Functions of the joint batch (new examples first), the number of new examples, and a generator."""
