"""One run: from its spec to its record."""

from __future__ import annotations

import gc
import json
import os
import platform
import shlex
import sys
import traceback
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from threading import RLock
from typing import Any, Self

import numpy as np
import torch
from filelock import BaseFileLock
from numpy.typing import NDArray

from parabolic.backbones import make_backbone
from parabolic.checks import Description, InputError, encodable, invalid, short_of_memory, with_causes
from parabolic.engine import Callback, DeviceFailed, Diverged, Fleet, State, computing_in, numerics, train_fleet
from parabolic.engine.callbacks import as_callbacks
from parabolic.engine.measures import find_measures
from parabolic.engine.threads import threads_for
from parabolic.experiments.code import commit_here, content_hashes, own_code_of, package_code
from parabolic.experiments.resume import Keeping
from parabolic.experiments.spec import RunSpec, check_spec
from parabolic.experiments.store import Record, Store, check_store, runs_option
from parabolic.learners import Heads, Learner, find_learner
from parabolic.learners.functional import draws_apart
from parabolic.streams import Stream, make_stream

__all__ = [
    "Report",
    "Unsaved",
    "Yard",
    "build",
    "execute",
    "execute_fleet",
    "find_device",
    "reason_of",
    "run",
    "typed_command",
]


_turn = RLock()  # held by the thread that trains: runs share torch's generators and settings
EVERY = 20  # steps between reports of a run's progress

Report = Callable[[RunSpec, float], object]  # of how much of what was left of a run at its start is done, from 0 to 1


class Unsaved(InputError):
    """A finished run that could not be saved; `record` has its results."""

    record: Record


def run(
    spec: RunSpec,
    store: Store,
    *,
    again: bool = False,
    device: str = "auto",
    checkpoint: float = 60.0,
    callbacks: Iterable[Callback] = (),
) -> tuple[Record, bool]:
    """Return the record of a run and whether it was found in the store; if not, or if `again`, the run is trained.

    A run that diverges is kept as well, and raises `Diverged`, also when it is found in the store.

    A checkpoint is saved every `checkpoint` seconds (0: never). A run stopped in any way resumes from there, in the
    middle of a task, and on a CPU gives the same figures as an uninterrupted one. A failure is noted in the store,
    unless the run was refused before its first step, for example because another process is training it. If a finished
    run cannot be saved, because the disk is full, say, the error has it as its `record`. Threads of one process train
    their runs one after the other.
    """
    check_spec(spec)
    check_store(store)
    callbacks = as_callbacks(callbacks)
    ended = None if again else store.ended(spec)
    if ended is None:
        try:
            return _train_and_save(spec, store, again, device, checkpoint, callbacks), False
        except _Ended as error:
            ended = error.record
    hint = f"; found in {store.path(spec.key)}, and trained again only with again=True (--again)"
    return _raise_if_diverged(ended, hint), True


def _train_and_save(
    spec: RunSpec, store: Store, again: bool, device: str, checkpoint: float, callbacks: Iterable[Callback]
) -> Record:
    """Train a run, save it and return its record; raises `_Ended` if another process finishes it first."""
    keeping = Keeping.of(store, checkpoint, anew=again)
    recorder = _StartRecorder()
    with _Claim(store, spec, keeping, again) as claim:
        try:
            record = _execute(spec, device, [claim, *callbacks, recorder], keeping)
        except _Ended:
            raise
        except Exception as error:
            if recorder.started or not isinstance(error, InputError):
                with suppress(InputError):  # the disk's error must not hide the run's
                    store.save_failure(spec, *reason_of(error))
            raise
        try:
            store.save(record)
        except InputError as error:
            _raise_if_diverged(record)  # the disk's error must not hide the run's
            unsaved = Unsaved(*error.args)
            vars(unsaved).update(vars(error), record=record)
            raise unsaved from error
    return _raise_if_diverged(record)


class _Ended(Exception):
    """Another process finished the run before it could be claimed; `record` has its results."""

    def __init__(self, record: Record) -> None:
        super().__init__("another process has just finished it")
        self.record = record


class _Claim(Callback):
    """Locks a run while it is trained; the first of its callbacks.

    An unwritable folder is thus reported before the first step rather than after the last, and a run that cannot be
    built leaves nothing behind. The old checkpoint of a restarted run is deleted only now: before, another process may
    be using it.
    """

    def __init__(self, store: Store, spec: RunSpec, keeping: Keeping | None, again: bool) -> None:
        self.store, self.spec, self.keeping, self.again = store, spec, keeping, again
        self.lock: BaseFileLock | None = None

    def on_start(self, state: State) -> None:  # noqa: ARG002
        key = self.spec.key
        self.lock = self.store.claim(key)
        if self.lock is None:
            got = Description(f"{key}, which another process is training")
            command = f"parabolic watch {key[:8]}{runs_option(self.store.root)}"
            remedy = f"`{command}` shows its progress; or name another folder of runs"
            raise invalid("run", got, "one that no other process is training", remedy)
        if not self.again and (record := self.store.ended(self.spec)) is not None:
            raise _Ended(record)
        if self.keeping is not None and self.again:
            self.keeping.forget(self.spec)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.lock is not None:
            self.lock.release()


class _StartRecorder(Callback):
    """The last of a run's callbacks: notes that none of the others refused the run."""

    started = False

    def on_start(self, state: State) -> None:  # noqa: ARG002
        self.started = True


class _Reporter(Callback):
    """Reports the progress of runs, which it knows by their learners."""

    def __init__(self, report: Report, learners: Iterable[Learner], specs: Iterable[RunSpec]) -> None:
        self.report = report
        self.specs = {id(learner): spec for learner, spec in zip(learners, specs, strict=True)}
        self.first: dict[int, int] = {}  # the steps that a run had made before it was resumed

    def on_start(self, state: State) -> None:
        self.first[id(state)] = state.step

    def on_step(self, state: State) -> None:
        if state.step % EVERY == 0:
            first = self.first[id(state)]
            self.report(self.specs[id(state.learner)], (state.step - first) / (state.total_steps - first))


def reason_of(error: Exception) -> tuple[str, str]:
    """Why a run failed, for the store, and the traceback of an unexpected error (otherwise empty)."""
    if isinstance(error, InputError | Diverged):
        return str(error), ""
    return f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))


def execute(spec: RunSpec, *, device: str = "auto", callbacks: Iterable[Callback] = ()) -> Record:
    """Train a run and return its record; nothing is written. A run that diverges raises `Diverged`."""
    return _raise_if_diverged(_execute(spec, device, callbacks, None))


def _execute(spec: RunSpec, device: str, callbacks: Iterable[Callback], keeping: Keeping | None) -> Record:
    ((_, result),) = execute_fleet([spec], device=device, callbacks=callbacks, keeping=keeping)
    if isinstance(result, Exception):
        raise result
    return result


def _raise_if_diverged(record: Record, hint: str = "") -> Record:
    """The record; raises Diverged, with the hint added to its message, if the run diverged."""
    if record.diverged:
        raise Diverged(record.diverged + hint)
    return record


@dataclass
class Yard:
    """Keeps the last fleet, so that one with the same settings can reuse its CUDA graphs, and how many fit at once."""

    made: str = ""  # the settings of the fleet
    fleet: Fleet | None = None
    room: dict[str, int] = field(default_factory=dict)  # by shape, if the device had no memory for more runs at once

    def launch(self, specs: Sequence[RunSpec], learners: Sequence[Learner]) -> Fleet:
        """A fleet of these learners: the last one set to their states if possible, else a new one."""
        code = own_code_of(specs[0])  # the same for all, as they have one shape
        # A learner knows the stream only by its batches, its number of classes and, with heads, its tasks.
        heads = [learner.error.tasks for learner in learners if isinstance(learner.error, Heads)]
        ignored = dict.fromkeys(("seed", "scenario", "epochs"))
        settings = ({**spec.resolved(), **ignored} for spec in specs)
        made = json.dumps([code, learners[0].classes, heads, *settings], sort_keys=True)
        if self.fleet is None or self.made != made or not self.fleet.adopt(learners):
            self.made, self.fleet = made, Fleet(learners)
        return self.fleet

    def clear(self) -> None:
        """Drop the fleet."""
        self.made, self.fleet = "", None


def execute_fleet(
    specs: Sequence[RunSpec],
    *,
    device: str = "auto",
    callbacks: Iterable[Callback] = (),
    yard: Yard | None = None,
    keeping: Keeping | None = None,
    report: Report | None = None,
) -> Iterator[tuple[RunSpec, Record | Exception]]:
    """Train runs of one shape (`RunSpec.shape`): side by side on a GPU, otherwise one after the other.

    For a run that fails, the error is yielded in place of a record, and the others continue; if the device has no
    memory for all at once, half as many are tried, from their checkpoints if there are any. One that diverges has a
    record that says so. A `yard` passed to several calls lets a fleet reuse the CUDA graphs of the one before, and
    tries no more runs at once than the device had memory for. Nothing is written, except checkpoints if there is a
    `keeping`. A `report` is called now and then with a run and its progress.
    """
    specs, callbacks, yard = list(specs), as_callbacks(callbacks), yard or Yard()
    for spec in specs:
        check_spec(spec)
    on_gpu = find_device(device).type == "cuda"
    size = yard.room.get(specs[0].shape, len(specs)) if on_gpu and specs else 1
    groups = deque(_groups_by_position(specs, size, keeping))
    while groups:
        group = groups.popleft()
        try:
            with _turn:
                records = _train_side_by_side(group, device, callbacks, yard, keeping, report)
        except Exception as error:
            yard.clear()
            _free_frames(error)
            if len(group) == 1:
                yield group[0], _with_run_name(group[0], error)
                continue
            # If memory is short, half of the group may fit; otherwise run each alone, to find the one that fails.
            if out_of_memory := short_of_memory(error):
                yard.room[group[0].shape] = size = (len(group) + 1) // 2
                origin = "the start" if keeping is None else "their last checkpoints"
                reason = f"{_with_run_name(group[0], error)}; at most {size} at once go on, from {origin}"
                warnings.warn(reason, RuntimeWarning, stacklevel=2)
        else:
            yield from zip(group, records, strict=True)
            continue
        # The learners that filled the memory can be freed only now, without references from the error.
        gc.collect()
        torch.cuda.empty_cache()
        if out_of_memory:
            groups = deque(_groups_by_position([*group, *chain.from_iterable(groups)], size, keeping))
        else:
            groups.extendleft([spec] for spec in reversed(group))


def _groups_by_position(specs: list[RunSpec], size: int, keeping: Keeping | None) -> Iterator[list[RunSpec]]:
    """The runs in groups of at most `size`, each of runs that start at the same position in the stream."""
    groups = defaultdict(list)
    for spec in specs:
        groups[(0, 0) if keeping is None or size == 1 else keeping.place(spec)].append(spec)
    for group in groups.values():
        yield from (group[start : start + size] for start in range(0, len(group), size))


def _free_frames(error: BaseException) -> None:
    """Free the local variables of an error's frames, learners above all; the traceback stays."""
    for each in with_causes(error, hidden=True):
        traceback.clear_frames(each.__traceback__)


def _with_run_name(spec: RunSpec, error: Exception) -> Exception:
    """The error; if memory ran out before training, which would have named the run, with the run's name."""
    if isinstance(error, DeviceFailed) or not short_of_memory(error):
        return error
    label = f"{spec.learner} on {spec.stream}, seed {spec.seed}"
    return DeviceFailed(f"{label}: the device ran out of memory before the first step")


def _train_side_by_side(
    specs: list[RunSpec],
    device: str,
    callbacks: list[Callback],
    yard: Yard,
    keeping: Keeping | None,
    report: Report | None,
) -> list[Record]:
    makers, streams = zip(*[_prepare(spec, device) for spec in specs], strict=True)
    learners = [make() for make in makers]
    resolved = specs[0].resolved()
    # Before training, as files may be edited meanwhile; the same for all, as they have one shape.
    versions = {**content_hashes(specs[0]), "package": package_code(), "commit": commit_here()}
    with (
        numerics(resolved["precision"]),
        draws_apart(learners[0].device),
        threads_for(learners[0]),
    ):
        # Seeds torch's global generator, which dropout draws from; a resumed run restores its state.
        torch.manual_seed(specs[0].seed + 2**31)
        pairs = zip(specs, learners, strict=True)
        resumed = [] if keeping is None else [keeping.resume(spec, learner) for spec, learner in pairs]
        fleet = yard.launch(specs, learners)
        if report is not None:
            callbacks = [*callbacks, _Reporter(report, fleet.learners, specs)]
        states = train_fleet(
            fleet, streams, batch=resolved["batch"], epochs=resolved["epochs"], callbacks=callbacks,
            measures=find_measures(specs[0].measure), future=specs[0].future,
            checkpoints=None if keeping is None else keeping.checkpoints(specs, makers),
            progress=[progress for progress in resumed if progress is not None],
        )  # fmt: skip
        fleet_environment = environment(fleet.device)  # here, as the number of threads is that of training
    fleet_environment |= {
        "fleet": len(specs),
        "steps": "; ".join(sorted({berth.mode for berth in fleet.berths})),
        **{name: version for name, version in versions.items() if version},
    }
    return [_record(spec, state, fleet_environment) for spec, state in zip(specs, states, strict=True)]


def _record(spec: RunSpec, state: State, fleet_environment: dict[str, Any]) -> Record:
    diverged = str(state.error or "")
    tested = len(state.test_seconds) if diverged else len(state.stream)  # a fleet may go on and test it all the same
    future_rows = [] if state.future is None or diverged else [row[i:].tolist() for i, row in enumerate(state.future)]
    return Record(
        key=spec.key,
        spec=spec.resolved(),
        metrics={} if diverged else state.metrics,
        accuracy=_rows_to_diagonal(state.matrix[:tested]),
        train_seconds=state.train_seconds,
        test_seconds=state.test_seconds,
        steps=state.step,
        environment=fleet_environment | {"resumed": state.resumed},
        task_accuracy=_rows_to_diagonal(state.task_matrix[:tested]),
        measured=state.measured,
        future_accuracy=future_rows,
        diverged=diverged,
    )


def _rows_to_diagonal(matrix: NDArray[np.float64]) -> list[list[float]]:
    """Row i of a matrix up to its column i, for each i."""
    return [row[: i + 1].tolist() for i, row in enumerate(matrix)]


def build(spec: RunSpec, device: str = "auto") -> tuple[Learner, Stream]:
    """Build the learner and the stream of a run.

    >>> learner, stream = build(RunSpec(learner="er"), device="cpu")
    >>> type(learner).__name__, stream.name
    ('ER', 'seq-digits')
    """
    check_spec(spec)
    make, stream = _prepare(spec, device)
    return make(), stream


def _prepare(spec: RunSpec, device: str) -> tuple[Callable[[], Learner], Stream]:
    """A function that builds the learner of a run, with its class as it is now, and the stream."""
    torch_device, resolved, learner_class = find_device(device), spec.resolved(), find_learner(spec.learner)
    stream = make_stream(spec.stream, spec.seed, **spec.scenario)
    options: dict[str, Any] = {**spec.options} | ({"memory": spec.memory} if "memory" in resolved else {})
    if spec.heads:
        options["criterion"] = Heads(tasks=[task.classes for task in stream])

    def make() -> Learner:
        model = make_backbone(resolved["backbone"], stream.shape, stream.classes, spec.seed).to(torch_device)
        computing_in(model, resolved["precision"], channels_last=resolved["channels_last"])
        return learner_class(
            model, prepare=stream.prepare, augment=stream.augment, classes=stream.classes, seed=spec.seed,
            **options,
        )  # fmt: skip

    return make, stream


def environment(device: torch.device) -> dict[str, Any]:
    """Where a result comes from: versions, hardware, command and time."""
    from parabolic import __version__

    return {
        "parabolic": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "command": typed_command(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def typed_command() -> str:
    """The command line; the same for `parabolic` and `python -m parabolic`."""
    program, main_module = Path(sys.argv[0]), Path(__file__).parents[1] / "__main__.py"
    name = "parabolic" if program.stem == "parabolic" or program == main_module else sys.argv[0]
    return str(encodable(shlex.join([name, *sys.argv[1:]])))


def find_device(name: str) -> torch.device:
    """The device of that name; `auto` is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise invalid("device", name, "auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise invalid("device", name, "auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        available = f"of {count}, the last is cuda:{count - 1}" if count else "no CUDA device was found"
        raise invalid("device", name, "a device of this machine", f"{available}: use cpu")
    return device if device.type == "cuda" else torch.device("cpu")  # cpu:0 is the CPU too


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
