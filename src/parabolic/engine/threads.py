"""How many threads compute on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock, get_ident

import torch

from parabolic.learners import Learner

__all__ = ["one_thread", "threads_for"]

_turn = Lock()
_before: dict[int, int] = {}  # of each thread that computes alone just now, how many it had before


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """No other thread helps this one to compute, if so wanted; afterwards it has as many as it had.

    Torch counts for each thread by itself, but one that begins takes over the number that any other set last: what it
    had is then what that one had.
    """
    me = get_ident()
    if not wanted or me in _before:
        yield
        return
    with _turn:
        now = torch.get_num_threads()
        _before[me] = next(iter(_before.values()), now) if now == 1 else now
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _turn:
            torch.set_num_threads(_before.pop(me))


def threads_for(learner: Learner) -> AbstractContextManager[None]:
    """One thread for a small network on a CPU.

    More only wait for each other, by a factor of twenty where other work keeps the cores busy; and the outcome then
    depends on how many there are, as sums are split among them.
    """
    small = sum(weight.numel() for weight in learner.model.parameters()) < 1_000_000
    return one_thread(learner.device.type == "cpu" and small)
