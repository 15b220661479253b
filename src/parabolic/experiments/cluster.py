"""A grid's workers on a cluster: Ray tasks (extra `ray`)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from parabolic.checks import invalid
from parabolic.experiments.execution import Report
from parabolic.experiments.work import Job, News, Over, work
from parabolic.plugins import require

__all__ = ["Cluster"]


class Cluster:
    """One Ray task per job, as many at once as the cluster has room for, or `workers`.

    The nodes need this package and the data, but not the store: records come back through Ray and the grid saves them.
    """

    def __init__(self, address: str | None, workers: int | None, device: str, gpus: float) -> None:
        self._ray = require("ray", "ray", "engine", "Ray")
        self._owns_connection = not self._ray.is_initialized()  # otherwise the caller connected, and stays connected
        if self._owns_connection:
            _connect(self._ray, address)
        has_gpu = bool(self._ray.cluster_resources().get("GPU"))
        if device.startswith("cuda") and not has_gpu:
            raise invalid("device", device, "a device of the cluster", "it has no GPU: choose cpu")
        self.gpu = has_gpu and device != "cpu"
        self._device = "cuda" if self.gpu else "cpu"  # Ray makes only the assigned GPU visible to a task
        self._task_resources = {"CPU": 1.0} | ({"GPU": gpus} if self.gpu else {})
        self._workers = workers
        self._task = self._ray.remote(
            num_cpus=self._task_resources["CPU"],
            num_gpus=self._task_resources.get("GPU", 0),
            num_returns="streaming",
            max_retries=0,  # the grid retries, as with any other crew
        )(_work_in)
        self._busy: dict[Any, Job] = {}  # by the generator of the job's news

    def free(self) -> bool:
        """Whether the cluster, whose nodes come and go, has room for another task now."""
        if self._workers is not None:
            return len(self._busy) < self._workers
        available = self._ray.cluster_resources()
        room = min(int(available.get(name, 0) / amount) for name, amount in self._task_resources.items())
        return len(self._busy) < max(1, room)

    def start(self, job: Job) -> None:
        """Submit a task."""
        remote_job = replace(job, keeping=None)  # nodes need not see the store
        self._busy[self._task.remote(os.getcwd(), remote_job, self._device)] = job

    def wait(
        self,
        seconds: float | None,
        report: Report | None = None,  # noqa: ARG002
    ) -> Iterator[tuple[Job, News | Over]]:
        """Wait for the next message of any task; of their progress nothing is known until they end."""
        if not self._busy:
            time.sleep(seconds or 0)
            return
        ready, _ = self._ray.wait(list(self._busy), timeout=seconds)
        for task in ready:
            message = self._next_message(task)
            yield self._busy.pop(task) if isinstance(message, Over) else self._busy[task], message

    def close(self) -> None:
        """Cancel the tasks, and close the connection if it was opened here."""
        for task in self._busy:
            self._ray.cancel(task, force=True)
        if self._owns_connection:
            self._ray.shutdown()

    def _next_message(self, task: Any) -> News | Over:
        try:
            news: News = self._ray.get(next(task))
        except StopIteration:
            return Over()
        except self._ray.exceptions.RayError as error:
            raised_in_task = isinstance(error, self._ray.exceptions.RayTaskError)  # its last line says what was raised
            return Over(died=f"Ray lost the worker: {str(error).strip().splitlines()[-1 if raised_in_task else 0]}")
        return news


def _work_in(folder: str, job: Job, device: str) -> Iterator[News]:
    """Work in the folder where the grid was called, if this node has it, so that `--learner mine.py:Mine` is found."""
    with suppress(OSError):
        os.chdir(folder)
    yield from work(job, device)


def _connect(ray: Any, address: str | None) -> None:
    host, _, port = (address or "").rpartition(":")
    if address not in (None, "auto") and not (port.isdecimal() and "/" not in host):
        remedy = "run the command on a node of the cluster, for example with `ray job submit`"
        raise invalid("address", address, "auto or HOST:PORT", remedy)
    try:
        if host:  # Ray itself would keep trying for many minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    except OSError as error:
        raise invalid("address", address, "a running Ray cluster", "start one with `ray start --head`") from error
