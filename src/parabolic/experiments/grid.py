"""Grids: train the runs that a store lacks in parallel; one that fails does not stop the others."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import joblib
import torch
from filelock import BaseFileLock

from parabolic.checks import check_name, check_number, invalid
from parabolic.engine.stops import PutOff
from parabolic.experiments.crews import Crew, InProcess, Processes
from parabolic.experiments.execution import Report, find_device
from parabolic.experiments.resume import Keeping
from parabolic.experiments.spec import RunSpec, check_spec
from parabolic.experiments.store import Record, Store, check_store
from parabolic.experiments.work import Job, News

__all__ = ["ENGINES", "Event", "Failure", "Outcome", "check_crew", "run_grid", "worker_devices"]

ENGINES = ("local", "ray")
POLL = 0.5  # seconds between checks of runs that another grid is training


@dataclass(frozen=True)
class Failure:
    """A run that failed, and why."""

    spec: RunSpec
    reason: str
    trace: str = ""  # of an unexpected error


@dataclass
class Outcome:
    """The results of a grid."""

    records: dict[str, Record] = field(default_factory=dict)  # of finished runs by key, in the order of the specs
    diverged: dict[str, Record] = field(default_factory=dict)  # of those that diverged, likewise
    reused: int = 0  # already in the store, or trained by another grid meanwhile
    trained: int = 0  # to the end, or until they diverged
    failures: list[Failure] = field(default_factory=list)
    put_off: int = 0  # not started because the time was up
    interrupted: bool = False  # by Ctrl-C; the same call continues from there


@dataclass(frozen=True)
class Event:
    """Something that happened to a run: it was reused, started, trained, diverged, retried or failed."""

    what: str
    spec: RunSpec
    left: int  # how many runs have not ended yet
    reason: str = ""  # why it diverged, is retried or failed
    record: Record | None = None  # of a run that was reused, trained or diverged


def run_grid(
    specs: Iterable[RunSpec],
    store: Store,
    *,
    engine: str = "local",
    workers: int | None = None,
    address: str | None = None,
    device: str = "auto",
    fleet: int = 5,
    gpus: float = 1.0,
    retries: int = 1,
    again: bool = False,
    checkpoint: float = 60.0,
    minutes: float | None = None,
    watch: Callable[[Event], object] | None = None,
    progress: Report | None = None,
) -> Outcome:
    """Train the runs that are missing from the store, or all if `again`, in parallel, and save them there.

    On a CPU each of the `workers` processes (by default one per core) trains one run at a time; on GPUs each process
    (by default one per GPU) trains up to `fleet` runs of one shape side by side; `workers=0` works in this process.
    With engine "ray" the workers are tasks on the cluster at `address`, each with `gpus` of a GPU if there are any.

    A run is saved as soon as it ends, also if it diverged: like a finished one, it is not trained again. A failure is
    noted in the store, and the next call tries the run again; a run whose worker died or ran out of memory is retried
    immediately, alone, up to `retries` times. If several grids share a store, each run is trained by one of them.
    Checkpoints are saved every `checkpoint` seconds (0: never; none on a cluster) and at Ctrl-C; killing the process in
    any way loses only what was trained since. After `minutes` minutes no new runs are started, and those in progress
    are finished.

    `watch` is called with every event; `progress`, every twenty steps of a run, with its spec and how much of what was
    left of it at its start is done, from 0 to 1 (not on a cluster).

    >>> import tempfile
    >>> specs = [RunSpec("sgd", seed=seed, backbone="mlp") for seed in range(2)]
    >>> store = Store(tempfile.mkdtemp())
    >>> outcome = run_grid(specs, store, workers=0, device="cpu")
    >>> outcome.trained, outcome.failures, run_grid(specs, store).reused
    (2, [], 2)
    """
    if not isinstance(specs, Iterable):
        raise invalid("specs", specs, "a list of RunSpecs", 'as in [RunSpec("er")]')
    specs = list(specs)
    for spec in specs:
        check_spec(spec)
    check_store(store)
    check_crew(engine, workers, address)
    check_number("fleet", fleet, whole=True, at_least=1)
    check_number("retries", retries, whole=True, at_least=0)
    check_number("gpus", gpus, above=0)
    if minutes is not None:
        check_number("minutes", minutes, above=0)
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes

    unique = {spec.key: spec for spec in specs}
    keeping = Keeping.of(store, checkpoint)
    grid = _Grid(
        store, list(unique.values()), again=again, retries=retries, keeping=keeping, deadline=deadline, watch=watch
    )
    if grid.missing:
        if workers != 0:
            _check_importable(grid.missing)
        crew = _make_crew(engine, workers, address, device, gpus)
        try:
            grid.train(crew, fleet if crew.gpu else 1, progress)
        except KeyboardInterrupt:
            grid.outcome.interrupted = True
        finally:
            try:
                crew.close()
            finally:  # also after another Ctrl-C
                grid.release_claims()
    outcome = grid.outcome
    outcome.records, outcome.diverged = (
        {key: runs[key] for key in unique if key in runs} for runs in (outcome.records, outcome.diverged)
    )
    return outcome


def check_crew(engine: str, workers: int | None, address: str | None) -> None:
    """Raise an error unless `run_grid` accepts these arguments."""
    check_name("engine", engine, ENGINES)
    if workers is not None:
        check_number("workers", workers, whole=True, at_least=0 if engine == "local" else 1)
    if address is not None and engine != "ray":
        raise invalid("address", address, f"none with engine {engine!r}", "for a Ray cluster use engine 'ray'")


def _check_importable(specs: Iterable[RunSpec]) -> None:
    """Raise an error for names in `__main__`, which worker processes cannot import."""
    for spec in specs:
        references = {name: getattr(spec, name) for name in ("learner", "stream", "backbone", "measure")}
        for name, reference in (references | {"optimizer": spec.options.get("optimizer")}).items():
            if reference is not None and "__main__:" in reference:
                remedy = f"put it into a file, as mine.py:{reference.rpartition(':')[2]}, or use workers=0"
                raise invalid(name, reference, "a name that worker processes can import", remedy)


def _make_crew(engine: str, workers: int | None, address: str | None, device: str, gpus: float) -> Crew:
    if engine == "ray":
        from parabolic.experiments.cluster import Cluster

        return Cluster(address, workers, device, gpus)
    return InProcess(str(find_device(device))) if workers == 0 else Processes(worker_devices(device, workers))


def worker_devices(device: str, workers: int | None = None) -> list[str]:
    """The device of each worker process on this machine; by default one process per core or GPU.

    >>> worker_devices("cpu", 2)
    ['cpu', 'cpu']
    """
    torch_device = find_device(device)
    if torch_device.type == "cpu":
        return ["cpu"] * (workers or joblib.cpu_count())
    indices = range(torch.cuda.device_count()) if torch_device.index is None else [torch_device.index]
    return [f"cuda:{indices[number % len(indices)]}" for number in range(workers or len(indices))]


class _Grid:
    """A grid in progress: the runs waiting, those being trained, and the outcome so far."""

    def __init__(
        self,
        store: Store,
        specs: list[RunSpec],
        *,
        again: bool,
        retries: int,
        keeping: Keeping | None,
        deadline: float,
        watch: Callable[[Event], object] | None,
    ) -> None:
        self.store, self.again, self.retries, self.keeping, self.watch = store, again, retries, keeping, watch
        self.deadline = deadline  # by the monotonic clock: no run is started later
        self.outcome = Outcome()
        self.total = len(specs)
        self.missing = [spec for spec in specs if not self._reuse(spec)]
        self.waiting: deque[list[RunSpec]] = deque()  # groups to train side by side
        self.running: dict[Job, dict[str, RunSpec]] = {}  # the unfinished runs of each job
        self.claims: dict[str, BaseFileLock] = {}
        self.tries: Counter[str] = Counter()

    def train(self, crew: Crew, fleet: int, progress: Report | None) -> None:
        """Have the crew train the missing runs."""
        self.waiting.extend(_groups(self.missing, fleet))
        while True:
            if time.monotonic() >= self.deadline:
                self.outcome.put_off += sum(map(len, self.waiting))
                self.waiting.clear()
            self._start(crew)
            if not (self.waiting or self.running):
                return
            blocked = bool(self.waiting) and crew.free()  # other grids are training all waiting runs
            for job, message in crew.wait(POLL if blocked else None, progress):
                with PutOff():  # so that a saved run is also counted
                    if isinstance(message, News):
                        self._settle(self.running[job].pop(message.key), message)
                    else:
                        for spec in self.running.pop(job).values():
                            self._settle(spec, News(spec.key, reason=message.died, retry=True))

    def release_claims(self) -> None:
        """Release the claims on unfinished runs."""
        for claim in self.claims.values():
            claim.release()

    def _start(self, crew: Crew) -> None:
        for _ in range(len(self.waiting)):
            if not crew.free():
                return
            claimed, others = self._claim(self.waiting.popleft())
            if others:
                self.waiting.append(others)
            if claimed:
                job = Job(tuple(claimed), keeping=self.keeping)
                self.running[job] = {spec.key: spec for spec in claimed}
                crew.start(job)
                for spec in claimed:
                    self._notify("started", spec)

    def _claim(self, group: list[RunSpec]) -> tuple[list[RunSpec], list[RunSpec]]:
        """The runs of a group that this grid has claimed, and those that another grid is training."""
        claimed, others = [], []
        for spec in group:
            claim = self.store.claim(spec.key)
            if claim is None:
                others.append(spec)
                continue
            self.claims[spec.key] = claim
            if self._reuse(spec):  # another grid has finished it meanwhile
                self._release(spec)
                continue
            if self.keeping is not None and self.again and not self.tries[spec.key]:
                self.keeping.forget(spec)
            claimed.append(spec)
        return claimed, others

    def _reuse(self, spec: RunSpec) -> bool:
        record = None if self.again else self.store.ended(spec)
        if record is None:
            return False
        self.outcome.reused += 1
        self._add_record("reused", spec, record)
        return True

    def _settle(self, spec: RunSpec, news: News) -> None:
        """Save the result of a run, or have it retried."""
        if news.record is not None:
            self.store.save(news.record)
            self.outcome.trained += 1
            self._add_record("diverged" if news.record.diverged else "trained", spec, news.record)
        elif news.retry and self.tries[spec.key] < self.retries:
            self.tries[spec.key] += 1
            self.waiting.appendleft([spec])
            self._notify("retried", spec, news.reason)
        else:
            self.store.save_failure(spec, news.reason, news.trace)
            self.outcome.failures.append(Failure(spec, news.reason, news.trace))
            self._notify("failed", spec, news.reason)
        self._release(spec)

    def _add_record(self, what: str, spec: RunSpec, record: Record) -> None:
        (self.outcome.diverged if record.diverged else self.outcome.records)[record.key] = record
        self._notify(what, spec, record.diverged, record)

    def _release(self, spec: RunSpec) -> None:
        self.claims.pop(spec.key).release()

    def _notify(self, what: str, spec: RunSpec, reason: str = "", record: Record | None = None) -> None:
        if self.watch is not None:
            ended = len(self.outcome.records) + len(self.outcome.diverged) + len(self.outcome.failures)
            self.watch(Event(what, spec, self.total - ended, reason, record))


def _groups(specs: Iterable[RunSpec], size: int) -> list[list[RunSpec]]:
    """The runs in groups of one shape, of at most `size`."""
    if size == 1:
        return [[spec] for spec in specs]
    shapes: dict[str, list[RunSpec]] = {}
    for spec in specs:
        shapes.setdefault(spec.shape, []).append(spec)
    return [group[first : first + size] for group in shapes.values() for first in range(0, len(group), size)]
