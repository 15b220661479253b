"""Brings batches to the device."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from queue import Empty, Full, Queue
from typing import Any

import torch
from torch import Tensor

from parabolic.streams import Batches, Stream

__all__ = ["feed", "on_device"]

SHARE = 0.5  # the share of a device's free memory that data may take
DEPTH = 8  # batches in flight
PATIENCE = 0.05  # seconds after which a waiting thread checks whether it should stop


def on_device(streams: Sequence[Stream], device: torch.device) -> list[Stream]:
    """The streams with their data on the device, if they fit."""
    data = [x for stream in streams for x in {stream[0].train.x, stream[0].test.x}]  # as `Stream.to` copies them
    size = sum(x.nbytes for x in data if x.device != device)
    if device.type == "cuda" and size > SHARE * torch.cuda.mem_get_info(device)[0]:
        return list(streams)
    return [stream.to(device) for stream in streams]


def feed(batches: Batches, device: torch.device) -> Generator[tuple[Tensor, Tensor]]:
    """Yield the batches on the device; if the data are on the host, copy them while earlier steps run."""
    if device.type != "cuda" or batches.data.x.device == device:
        yield from batches
        return
    queue: Queue[Any] = Queue(DEPTH)
    running = threading.Event()
    running.set()
    thread = threading.Thread(target=_copy_batches, args=(batches, device, queue, running), daemon=True)
    thread.start()
    try:
        while (item := queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            (x, y), copied = item
            current = torch.cuda.current_stream(device)
            current.wait_event(copied)
            for tensor in (x, y):
                tensor.record_stream(current)  # so that its memory is not reused too early
            yield x, y
    finally:
        running.clear()
        while thread.is_alive():
            try:
                queue.get(timeout=PATIENCE)
            except Empty:
                continue
        thread.join()


def _copy_batches(batches: Batches, device: torch.device, queue: Queue[Any], running: threading.Event) -> None:
    """Gather batches on the host, pin them, and copy them to the device on a separate CUDA stream."""

    def put(item: Any) -> bool:
        while running.is_set():
            try:
                queue.put(item, timeout=PATIENCE)
            except Full:
                continue
            return True
        return False

    try:
        side_stream = torch.cuda.Stream(device)
        for pair in batches:
            with torch.cuda.stream(side_stream):
                moved = [tensor.pin_memory().to(device, non_blocking=True) for tensor in pair]
                copied = side_stream.record_event()
            if not put((moved, copied)):
                return
        put(None)
    except BaseException as error:  # raised again by `feed`
        put(error)
