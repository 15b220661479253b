"""What a worker does, in whatever process, on whatever machine: it trains runs, tells of each and keeps no record."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Thread
from typing import BinaryIO

import torch

from parabolic.engine import DeviceFailed
from parabolic.engine.threads import one_thread
from parabolic.experiments.execution import Yard, execute_fleet, reason_of, typed_command
from parabolic.experiments.resume import Keeping
from parabolic.experiments.spec import RunSpec
from parabolic.experiments.store import Record

__all__ = ["Job", "News", "Over", "serve", "work"]


@dataclass(frozen=True, eq=False)
class Job:
    """Runs that one worker trains side by side (on a CPU: one run)."""

    specs: tuple[RunSpec, ...]
    command: str = field(default_factory=typed_command)  # that of the grid, which the records are to name
    keeping: Keeping | None = None  # that they are written down while they are trained


@dataclass(frozen=True)
class News:
    """What became of one run: its record, or the reason why there is none."""

    key: str
    record: Record | None = None
    reason: str = ""
    trace: str = ""  # of an error that nobody expected
    retry: bool = False  # the machine is to blame and not the run: in a fresh process it may do better


@dataclass(frozen=True)
class Over:
    """A job came to its end, or its worker did: then `died` says how."""

    died: str = ""


def work(job: Job, device: str, yard: Yard | None = None) -> Iterator[News]:
    """Train the runs of a job and tell of each as it ends, whatever happens to it.

    >>> [news] = work(Job((RunSpec(learner="sgd", options={"lr": 1e30}),)), "cpu")
    >>> news.record, news.reason.endswith("lower lr (now 1e+30) or set clip_norm")
    (None, True)
    """
    left = {spec.key: spec for spec in job.specs}
    with one_thread(device == "cpu"):  # workers share the cores, and the outcome is then the same in all of them
        try:
            for spec, result in execute_fleet(job.specs, device=device, yard=yard, keeping=job.keeping):
                del left[spec.key]
                yield _news(job, spec, result)
        except Exception as error:  # of the fleet as a whole
            for spec in left.values():
                yield _news(job, spec, error)


def serve() -> None:
    """The life of a worker process: jobs come in on standard input, news go out on standard output.

    It ends when its input does, in the middle of a run if need be: that is how it learns that the grid is over or was
    killed. So no process outlives its grid, and no record is written after it.
    """
    news = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a learner prints is not news
    jobs: SimpleQueue[tuple[Job, str]] = SimpleQueue()
    yard = Yard()
    Thread(target=_listen, args=(sys.stdin.buffer, jobs), daemon=True).start()
    while True:
        for each in work(*jobs.get(), yard):
            _send(news, each)
        _send(news, Over())


def _listen(pipe: BinaryIO, jobs: SimpleQueue[tuple[Job, str]]) -> None:
    try:
        while True:
            jobs.put(pickle.load(pipe))
    finally:  # the other end is closed, perhaps in the middle of a word
        os._exit(0)


def _send(pipe: BinaryIO, told: News | Over) -> None:
    try:
        pickle.dump(told, pipe)
        pipe.flush()
    except BrokenPipeError:  # nobody is there to hear it
        os._exit(0)


def _news(job: Job, spec: RunSpec, result: Record | Exception) -> News:
    if isinstance(result, Record):
        return News(spec.key, replace(result, environment={**result.environment, "command": job.command}))
    reason, trace = reason_of(result)
    # A GPU that was told something wrong by one run of a fleet fails the others of its process too.
    machine = isinstance(result, MemoryError | DeviceFailed | torch.OutOfMemoryError | torch.AcceleratorError)
    return News(spec.key, reason=reason, trace=trace, retry=machine)
