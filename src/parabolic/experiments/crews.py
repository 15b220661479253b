"""A grid's workers on this machine: this process itself, or worker processes."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Protocol

from parabolic.experiments.execution import Report, Yard
from parabolic.experiments.work import Job, News, Over, Reached, work

__all__ = ["Crew", "InProcess", "Processes"]

GRACE = 8.0  # seconds that processes get to end by themselves


class Crew(Protocol):
    """Works on jobs and reports news of their runs; the last report of every job is `Over`."""

    gpu: bool  # whether a job may have several runs, trained side by side

    def free(self) -> bool:
        """Whether another job can be started now."""

    def start(self, job: Job) -> None:
        """Start a job; call this only while `free()`."""

    def wait(self, seconds: float | None, report: Report | None = None) -> Iterable[tuple[Job, News | Over]]:
        """The next messages, waiting for them if necessary, at most `seconds` if given; progress goes to `report`."""

    def close(self) -> None:
        """Stop all running jobs."""


class InProcess:
    """Works in this process: nothing to start, and debuggers work."""

    def __init__(self, device: str) -> None:
        self.device, self.gpu = device, device != "cpu"
        self._yard = Yard()
        self._job: Job | None = None

    def free(self) -> bool:
        """Whether the last job is over."""
        return self._job is None

    def start(self, job: Job) -> None:
        """Accept the job, to be done in `wait`."""
        self._job = job

    def wait(self, seconds: float | None, report: Report | None = None) -> Iterator[tuple[Job, News | Over]]:
        """Do the job."""
        if self._job is None:
            time.sleep(seconds or 0)
            return
        job = self._job
        for news in work(job, self.device, self._yard, report):
            yield job, news
        self._job = None
        yield job, Over()

    def close(self) -> None:
        """Nothing to stop."""


class Processes:
    """Worker processes, one for each entry of `devices`, each with one job at a time. One that dies is replaced."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.gpu = "cpu" not in devices
        self._vacant = list(devices)  # devices without a process: started once there is a job
        self._idle: list[_Worker] = []
        self._busy: dict[_Worker, Job] = {}
        self._messages: SimpleQueue[tuple[_Worker, News | Reached | Over]] = SimpleQueue()

    def free(self) -> bool:
        """Whether a process is idle or can be started."""
        return bool(self._idle or self._vacant)

    def start(self, job: Job) -> None:
        """Give the job to an idle process or to a new one."""
        worker = self._idle.pop() if self._idle else _Worker(self._vacant.pop(0), self._messages)
        self._busy[worker] = job
        worker.send(job)

    def wait(self, seconds: float | None, report: Report | None = None) -> Iterator[tuple[Job, News | Over]]:
        """Wait for the next message of any process."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                worker, message = self._messages.get(timeout=left)
            except Empty:
                return
            if not isinstance(message, Reached):
                break
            if report is not None:
                report(message.spec, message.share)
        if isinstance(message, News):
            worker.healthy &= not message.trace  # after an unexpected error its state is unknown
            yield self._busy[worker], message
            return
        job = self._busy.pop(worker, None)
        if message.died:
            worker.kill()
            self._vacant.append(worker.device)
            with suppress(ValueError):
                self._idle.remove(worker)
        elif worker.healthy:
            self._idle.append(worker)
        else:
            worker.kill()  # its death is then reported
        if job is not None:
            yield job, message

    def close(self) -> None:
        """End the processes. Runs in progress are checkpointed first, unless that takes too long."""
        workers, deadline = [*self._idle, *self._busy], time.monotonic() + GRACE
        try:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.wait(deadline - time.monotonic())
        finally:  # also after another Ctrl-C
            for worker in workers:
                worker.kill()


class _Worker:
    """A worker process, and a thread that listens to it."""

    def __init__(self, device: str, messages: SimpleQueue[tuple[_Worker, News | Reached | Over]]) -> None:
        self.device = device
        self.healthy = True
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        if device == "cpu":
            environment["OMP_NUM_THREADS"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from parabolic.experiments.work import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            process_group=0,  # Ctrl-C reaches only the grid's process, which then ends the others
        )
        self._listener = Thread(target=self._listen, args=(messages,), daemon=True)
        self._listener.start()

    def send(self, job: Job) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has just died, which the listener reports
            pickle.dump((job, self.device), self._process.stdin)
            self._process.stdin.flush()

    def terminate(self) -> None:
        """Ask the process to end: in the middle of a run, after finishing and checkpointing the current step."""
        self._process.terminate()

    def wait(self, seconds: float) -> None:
        """Wait for its end, at most `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0, seconds))

    def kill(self) -> None:
        """Kill the process. It writes nothing but checkpoints, and those atomically."""
        assert self._process.stdin is not None
        self._process.kill()
        self._listener.join()
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def _listen(self, messages: SimpleQueue[tuple[_Worker, News | Reached | Over]]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe, suppress(Exception):  # its death may cut a message short
            while True:
                messages.put((self, pickle.load(pipe)))
        messages.put((self, Over(died=_exit_reason(self._process.wait()))))


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"the worker process exited with code {code}"
    named = {number.value: number.name for number in signal.Signals}
    name = named.get(-code, f"signal {-code}")  # a real-time signal has no name
    return f"the worker process was killed by {name}" + (", perhaps for lack of memory" if name == "SIGKILL" else "")
