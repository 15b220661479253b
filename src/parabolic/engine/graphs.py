"""CUDA graphs: work that is the same operations every time is captured once and then replayed."""

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

WARM_UP = 2  # how often work is done as it is before it is captured: libraries set themselves up meanwhile


class Graphs:
    """Does work on the current stream of a GPU; what comes again under the same key is captured and replayed.

    Where nothing can be captured (`why_not` says the reason) work is done as it is.

    >>> graphs = Graphs(torch.device("cpu"))
    >>> graphs.run("sum", lambda: 1 + 1)
    (2, False)
    >>> graphs.why_not
    'the device is no GPU'
    """

    def __init__(self, device: torch.device, generator: Generator | None = None) -> None:
        self.device = device
        self.generator = generator  # which the work draws from: a replay goes on where the last draw ended
        self.why_not = "" if device.type == "cuda" else "the device is no GPU"
        self._times = Counter[Hashable]()
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool: Any = None

    def __contains__(self, key: Hashable) -> bool:
        """Whether work under this key is captured."""
        return key in self._captured

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._captured)

    def due(self, key: Hashable) -> bool:
        """Whether work under this key would be captured now."""
        return not self.why_not and key not in self and self._times[key] >= WARM_UP

    def run(self, key: Hashable, work: Callable[[], Any]) -> tuple[Any, bool]:
        """Do the work; what it gave back, and whether that was a replay.

        A replay changes tensors only: no Python code of the work runs. What it gave back are the same tensors every
        time, with new values.
        """
        replay = key in self
        if self.due(key):
            self._captured[key] = self._capture(work)
        if key in self:
            graph, given = self._captured[key]
            graph.replay()
            return given, replay
        self._times[key] += 1
        return work(), False

    def _capture(self, work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        generators = [torch.cuda.default_generators[index]]  # which every capture takes in
        if self.generator is not None:
            graph.register_generator_state(self.generator)
            generators.append(self.generator)
        states = [generator.clone_state() for generator in generators]
        torch.cuda.synchronize(self.device)
        with _no_collection(), torch.cuda.stream(self._aside()):
            # Only this thread is held to what a capture allows: another may be fetching data.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                given = work()
            except BaseException:
                with suppress(RuntimeError), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # both only say that the capture came to nothing
                    graph.capture_end()
                for generator, state in zip(generators, states, strict=True):
                    generator.graphsafe_set_state(state)  # its own is left in the middle of a capture
                raise
            graph.capture_end()
        # The generator was set up for the capture on that stream: a replay on another must come after.
        torch.cuda.synchronize(self.device)
        self._pool = self._pool or graph.pool()
        return graph, given

    def _aside(self) -> torch.cuda.Stream:
        """The current stream, or another in place of the default one, on which nothing can be captured."""
        current = torch.cuda.current_stream(self.device)
        return torch.cuda.Stream(self.device) if current == torch.cuda.default_stream(self.device) else current


@contextmanager
def _no_collection() -> Iterator[None]:
    """Hold back Python's garbage collector: what it frees might be of the GPU, and a capture allows no such thing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
