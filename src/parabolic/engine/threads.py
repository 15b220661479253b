"""The number of threads that torch uses on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock, get_ident

import torch

from parabolic.learners import Learner

__all__ = ["one_thread", "threads_for"]

_lock = Lock()
_earlier_counts: dict[int, int] = {}  # by thread inside `one_thread`: its earlier setting


@contextmanager
def one_thread(enabled: bool) -> Iterator[None]:
    """A context in which torch computes on the calling thread alone, if `enabled`; the setting is restored afterwards.

    Torch has this setting per thread, but a new thread inherits the value that any thread set last. If that is the 1
    of another thread inside this context, the value to restore is the one that thread had before.
    """
    thread = get_ident()
    if not enabled or thread in _earlier_counts:
        yield
        return
    with _lock:
        count = torch.get_num_threads()
        _earlier_counts[thread] = next(iter(_earlier_counts.values()), count) if count == 1 else count
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            torch.set_num_threads(_earlier_counts.pop(thread))


def threads_for(learner: Learner) -> AbstractContextManager[None]:
    """A context with a single thread for a small network on a CPU.

    More threads mostly wait for each other, and are up to twenty times slower if other work keeps the cores busy. The
    result would also depend on their number, as sums are split among them.
    """
    small = sum(weight.numel() for weight in learner.model.parameters()) < 1_000_000
    return one_thread(learner.device.type == "cpu" and small)
