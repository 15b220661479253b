"""The work of a worker, in any process on any machine: it trains runs and reports on each, but saves no records."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import BinaryIO

from parabolic.checks import DEVICE_ERRORS
from parabolic.engine import DeviceFailed
from parabolic.engine.threads import one_thread
from parabolic.experiments.execution import Report, Yard, execute_fleet, reason_of, typed_command
from parabolic.experiments.resume import Keeping
from parabolic.experiments.spec import RunSpec
from parabolic.experiments.store import Record

__all__ = ["Job", "News", "Over", "Reached", "serve", "work"]


@dataclass(frozen=True, eq=False)
class Job:
    """Runs for one worker to train side by side (on a CPU: a single run)."""

    specs: tuple[RunSpec, ...]
    command: str = field(default_factory=typed_command)  # the grid's, to be named in the records
    keeping: Keeping | None = None  # how to checkpoint them


@dataclass(frozen=True)
class News:
    """The result of one run: its record, also if it diverged, or the reason why it failed."""

    key: str
    record: Record | None = None
    reason: str = ""
    trace: str = ""  # of an unexpected error
    retry: bool = False  # the machine may be to blame: a fresh process may succeed


@dataclass(frozen=True)
class Reached:
    """How far a run has come, as in a `Report`."""

    spec: RunSpec
    share: float


@dataclass(frozen=True)
class Over:
    """The end of a job; if its worker died, `died` says how."""

    died: str = ""


def work(job: Job, device: str, yard: Yard | None = None, report: Report | None = None) -> Iterator[News]:
    """Train the runs of a job and yield news of each when it ends, successfully or not; report on their progress.

    >>> [news] = work(Job((RunSpec(learner="sgd", options={"lr": 1e30}),)), "cpu")
    >>> news.record.diverged.endswith("lower lr (now 1e+30) or set clip_norm"), news.reason
    (True, '')
    """
    left = {spec.key: spec for spec in job.specs}
    with one_thread(device == "cpu"):  # workers share the cores, and all get the same results
        try:
            for spec, result in execute_fleet(job.specs, device=device, yard=yard, keeping=job.keeping, report=report):
                del left[spec.key]
                yield _news(job, spec, result)
        except Exception as error:  # in the fleet as a whole
            for spec in left.values():
                yield _news(job, spec, error)


def serve() -> None:
    """The main loop of a worker process: reads jobs from standard input and writes news to standard output.

    The process exits when its input is closed, even in the middle of a run: the grid is then finished or was killed.
    So no worker outlives its grid, and no record is written after it.
    """
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a learner's output must not mix with the news
    # The grid learns of this process's death by the end of its output, which no forked process may keep open.
    os.register_at_fork(after_in_child=partial(os.close, output.fileno()))
    jobs: SimpleQueue[tuple[Job, str]] = SimpleQueue()
    yard = Yard()

    def report(spec: RunSpec, share: float) -> None:
        _send(output, Reached(spec, share))

    Thread(target=_listen, args=(sys.stdin.buffer, jobs), daemon=True).start()
    while True:
        for news in work(*jobs.get(), yard, report):
            _send(output, news)
        _send(output, Over())


def _listen(pipe: BinaryIO, jobs: SimpleQueue[tuple[Job, str]]) -> None:
    try:
        while True:
            jobs.put(pickle.load(pipe))
    finally:  # the other end is closed, perhaps in the middle of a message
        os._exit(0)


def _send(pipe: BinaryIO, message: News | Reached | Over) -> None:
    try:
        pickle.dump(message, pipe)
        pipe.flush()
    except BrokenPipeError:  # the grid is gone
        os._exit(0)


def _news(job: Job, spec: RunSpec, result: Record | Exception) -> News:
    if isinstance(result, Record):
        return News(spec.key, replace(result, environment={**result.environment, "command": job.command}))
    reason, trace = reason_of(result)
    # After an invalid operation by one run of a fleet, the GPU fails for all others of the process too.
    retry = isinstance(result, (MemoryError, DeviceFailed, *DEVICE_ERRORS))
    return News(spec.key, reason=reason, trace=trace, retry=retry)
