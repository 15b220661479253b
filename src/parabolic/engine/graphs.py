"""CUDA graphs: work with the same operations every time is captured once and then replayed."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Generator

__all__ = ["Graphs"]

WARM_UP = 2  # eager executions before a capture, in which libraries initialise themselves


class Graphs:
    """Does work on the current stream of a GPU; work repeated under the same key is captured and replayed.

    If nothing can be captured (`why_not` gives the reason), work is done eagerly.

    >>> graphs = Graphs(torch.device("cpu"))
    >>> graphs.run("sum", lambda: 1 + 1)
    (2, False)
    >>> graphs.why_not
    'the device is not a GPU'
    """

    def __init__(self, device: torch.device, generator: Generator | None = None) -> None:
        self.device = device
        self.generator = generator  # which the work draws from: replays continue its sequence
        self.why_not = "" if device.type == "cuda" else "the device is not a GPU"
        self._runs = Counter[Hashable]()
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool: Any = None

    def __contains__(self, key: Hashable) -> bool:
        """Whether work under this key has been captured."""
        return key in self._captured

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._captured)

    def due(self, key: Hashable) -> bool:
        """Whether work under this key would be captured now."""
        return not self.why_not and key not in self and self._runs[key] >= WARM_UP

    def run(self, key: Hashable, work: Callable[[], Any]) -> tuple[Any, bool]:
        """Do the work; returns its result and whether that was a replay.

        A replay changes only tensors and runs no Python code. Its result is the same tensors every time, with new
        values.
        """
        is_replay = key in self
        if self.due(key):
            self._captured[key] = self._capture(work)
        if key in self:
            graph, result = self._captured[key]
            graph.replay()
            return result, is_replay
        self._runs[key] += 1
        return work(), False

    def _capture(self, work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        generators = [torch.cuda.default_generators[index]]  # part of every capture
        if self.generator is not None:
            graph.register_generator_state(self.generator)
            generators.append(self.generator)
        states = [generator.clone_state() for generator in generators]
        torch.cuda.synchronize(self.device)
        _make_room(index)
        with _no_collection(), torch.cuda.stream(self._capture_stream()):
            # Restrict only this thread during the capture: another may be copying data.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            except BaseException:
                with suppress(RuntimeError), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # both only say that the capture failed
                    graph.capture_end()
                for generator, state in zip(generators, states, strict=True):
                    generator.graphsafe_set_state(state)  # the failed capture leaves the generator in capture mode
                raise
            graph.capture_end()
        # The capture initialised the generator's state on that stream: replays on another must come after it.
        torch.cuda.synchronize(self.device)
        self._pool = self._pool or graph.pool()
        return graph, result

    def _capture_stream(self) -> torch.cuda.Stream:
        """The current stream, or a new one if it is the default stream, which cannot be captured."""
        current = torch.cuda.current_stream(self.device)
        return torch.cuda.Stream(self.device) if current == torch.cuda.default_stream(self.device) else current


def _make_room(device: int) -> None:
    """Give back the memory that torch has cached, if there is more of it than is free.

    A capture cannot use what the eager executions before it, or an earlier fleet, have left in the cache: unlike
    outside a capture, torch does not give it back where memory runs out.
    """
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device)) - reserved
    if min(free, allowed) < reserved - torch.cuda.memory_allocated(device):
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable Python's garbage collector: freeing GPU memory during a capture is not allowed."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
