"""One run: from its spec to its record."""

from __future__ import annotations

import gc
import json
import os
import platform
import shlex
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from filelock import BaseFileLock
from numpy.typing import NDArray

from parabolic.backbones import make_backbone
from parabolic.checks import Description, InputError, invalid, short_of_memory
from parabolic.engine import Callback, DeviceFailed, Diverged, Fleet, State, computing_in, numerics, train_fleet
from parabolic.engine.measures import find_measures
from parabolic.engine.threads import threads_for
from parabolic.experiments.code import made_of, own_code_of
from parabolic.experiments.resume import Keeping
from parabolic.experiments.spec import RunSpec, check_spec
from parabolic.experiments.store import Record, Store, check_store, encodable
from parabolic.learners import Learner, find_learner
from parabolic.streams import Stream, make_stream

__all__ = ["Unsaved", "Yard", "build", "execute", "execute_fleet", "find_device", "reason_of", "run", "typed_command"]


class Unsaved(InputError):
    """A run came to its end and could not be kept; `record` is what came out."""

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
    """The record of a run, and whether it was there already; it is trained only if not, or if asked `again`.

    Every `checkpoint` seconds (0: never) it is written down how far the run has come. One that was stopped in any way
    goes on from there, in the middle of a task, and on a CPU ends with the figures of one that was not. One that fails
    is noted in the store, unless it was refused before its first step, as one that another process is training is. The
    error of one that cannot be kept at its end, as the disk is full, has it as its `record`.
    """
    check_spec(spec)
    check_store(store)
    finished = None if again else store.find(spec)
    if finished is not None:
        return finished, True
    keeping = Keeping.of(store, checkpoint, anew=again)
    start = _Start()
    with _Claim(store, spec, keeping) as claim:
        try:
            record = execute(spec, device=device, callbacks=[claim, *callbacks, start], keeping=keeping)
        except Exception as error:
            if start.made or not isinstance(error, InputError):
                with suppress(InputError):  # of a disk, which is not why the run failed
                    store.save_failure(spec, *reason_of(error))
            raise
        try:
            store.save(record)
        except InputError as error:
            unsaved = Unsaved(*error.args)
            vars(unsaved).update(vars(error), record=record)
            raise unsaved from error
    return record, False


class _Claim(Callback):
    """Keeps others from a run while it is trained, as the first of its callbacks. A folder that cannot be written to is
    told before the first step, rather than after the last; and what cannot be built has left nothing in it. Of a run
    that begins anew, what was written down is forgotten only now: before, it may be that of another process.
    """

    def __init__(self, store: Store, spec: RunSpec, keeping: Keeping | None) -> None:
        self.store, self.spec, self.keeping = store, spec, keeping
        self.lock: BaseFileLock | None = None

    def on_start(self, state: State) -> None:  # noqa: ARG002
        key = self.spec.key
        self.lock = self.store.claim(key)
        if self.lock is None:
            got = Description(f"{key}, which another process is training")
            remedy = f"`parabolic watch {key[:8]}` shows how far it is; or name another folder of runs"
            raise invalid("run", got, "one that nobody else trains", remedy)
        if self.keeping is not None and self.keeping.anew:
            self.keeping.forget(self.spec)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.lock is not None:
            self.lock.release()


class _Start(Callback):
    """Knows, as the last of a run's callbacks, whether none of them refused it."""

    made = False

    def on_start(self, state: State) -> None:  # noqa: ARG002
        self.made = True


def reason_of(error: Exception) -> tuple[str, str]:
    """Why a run failed, as a store notes it; and the trace of an error that nobody expected, else an empty text."""
    if isinstance(error, InputError | Diverged):
        return str(error), ""
    return f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))


def execute(
    spec: RunSpec, *, device: str = "auto", callbacks: Iterable[Callback] = (), keeping: Keeping | None = None
) -> Record:
    """Train a run and return its record; nothing is written, save for checkpoints where there is a `keeping`."""
    ((_, result),) = execute_fleet([spec], device=device, callbacks=callbacks, keeping=keeping)
    if isinstance(result, Exception):
        raise result
    return result


@dataclass
class Yard:
    """Keeps the last fleet, so that the next of the same making need not be captured anew."""

    made: str = ""  # what the fleet was made of
    fleet: Fleet | None = None

    def launch(self, specs: Sequence[RunSpec], learners: Sequence[Learner]) -> Fleet:
        """The fleet of these learners, or the last one in their state."""
        code = own_code_of(specs[0])  # that of all, as they are of one shape
        # A learner is told of a stream by its batches, but for how many classes it has.
        elsewhere = dict.fromkeys(("seed", "scenario", "epochs"))
        parts = ({**spec.resolved(), **elsewhere} for spec in specs)
        made = json.dumps([code, learners[0].classes, *parts], sort_keys=True)
        if self.fleet is None or self.made != made or not self.fleet.adopt(learners):
            self.made, self.fleet = made, Fleet(learners)
        return self.fleet

    def clear(self) -> None:
        """Keep nothing."""
        self.made, self.fleet = "", None


def execute_fleet(
    specs: Sequence[RunSpec],
    *,
    device: str = "auto",
    callbacks: Iterable[Callback] = (),
    yard: Yard | None = None,
    keeping: Keeping | None = None,
) -> Iterator[tuple[RunSpec, Record | Exception]]:
    """Train runs of one shape (`RunSpec.shape`), side by side on a GPU, else one after the other.

    A run that fails comes back with its error in place of a record, and the others go on; if there is no room for all
    at once they are tried in halves. With a `yard` that is kept from call to call, what was captured for one fleet
    serves the next of its kind. Nothing is written, save for checkpoints where there is a `keeping`.
    """
    specs, callbacks, yard = list(specs), list(callbacks), yard or Yard()
    for spec in specs:
        check_spec(spec)
    size = len(specs) if find_device(device).type == "cuda" else 1
    for group in _abreast(specs, size, keeping):
        try:
            yield from zip(group, _train_side_by_side(group, device, callbacks, yard, keeping), strict=True)
            continue
        except Exception as error:
            yard.clear()
            _let_go(error)
            if len(group) == 1:
                yield group[0], _named(group[0], error)
                continue
            # Where there is no room for all, there may be for half; else one is to blame: alone, each finds out.
            crowded = short_of_memory(error)
        # Only now that the error is gone, nothing holds on to the learners that took the room.
        gc.collect()
        torch.cuda.empty_cache()
        part = max(1, len(group) // 2) if crowded else 1
        for start in range(0, len(group), part):
            some = group[start : start + part]
            yield from execute_fleet(some, device=device, callbacks=callbacks, yard=yard, keeping=keeping)


def _abreast(specs: list[RunSpec], size: int, keeping: Keeping | None) -> Iterator[list[RunSpec]]:
    """The runs in groups of at most `size`, each of runs that begin at one place of the stream."""
    places = defaultdict(list)
    for spec in specs:
        places[(0, 0) if keeping is None or size == 1 else keeping.place(spec)].append(spec)
    for group in places.values():
        yield from (group[start : start + size] for start in range(0, len(group), size))


def _let_go(error: BaseException | None) -> None:
    """Free what the frames of an error hold, learners above all, however long it is kept; its traceback stays."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _named(spec: RunSpec, error: Exception) -> Exception:
    """The error; one of too little memory before training began, which would have told, says of which run it is."""
    if isinstance(error, DeviceFailed) or not short_of_memory(error):
        return error
    who = f"{spec.learner} on {spec.stream}, seed {spec.seed}"
    return DeviceFailed(f"{who}: the device is out of memory before the first step")


def _train_side_by_side(
    specs: list[RunSpec], device: str, callbacks: list[Callback], yard: Yard, keeping: Keeping | None
) -> list[Record | Exception]:
    makers, streams = zip(*[_prepare(spec, device) for spec in specs], strict=True)
    learners = [make() for make in makers]
    place, resolved = learners[0].device, specs[0].resolved()
    made = made_of(specs[0])  # now, as a file may be edited meanwhile; that of all, as they are of one shape
    with (
        numerics(resolved["precision"]),
        torch.random.fork_rng([place] if place.type == "cuda" else []),
        threads_for(learners[0]),
    ):
        # Seeds torch's own generator, from which dropout draws; a resumed run restores it.
        torch.manual_seed(specs[0].seed + 2**31)
        resumed = [keeping.resume(*each) for each in zip(specs, learners, strict=True)] if keeping is not None else []
        fleet = yard.launch(specs, learners)
        states = train_fleet(
            fleet, streams, batch=resolved["batch"], epochs=resolved["epochs"], callbacks=callbacks,
            measures=find_measures(specs[0].measure),
            checkpoints=None if keeping is None else keeping.checkpoints(specs, makers),
            progress=[each for each in resumed if each is not None],
        )  # fmt: skip
        around = environment(fleet.device)  # here, where there are as many threads as have trained
    for spec, state in zip(specs, states, strict=True):
        if keeping is not None and state.error is not None:
            keeping.forget(spec)  # what goes on from there diverges again
    around |= {
        "fleet": len(specs),
        "steps": "; ".join(sorted({berth.manner for berth in fleet.berths})),
        **{name: told for name, told in made.items() if told},
    }
    return [state.error or _record(spec, state, around) for spec, state in zip(specs, states, strict=True)]


def _record(spec: RunSpec, state: State, around: dict[str, Any]) -> Record:
    return Record(
        key=spec.key,
        spec=spec.resolved(),
        metrics=state.metrics,
        accuracy=_rows(state.matrix),
        train_seconds=state.train_seconds,
        test_seconds=state.test_seconds,
        steps=state.step,
        environment=around | {"resumed": state.resumed},
        task_accuracy=_rows(state.task_matrix),
        measured=state.measured,
    )


def _rows(matrix: NDArray[np.float64]) -> list[list[float]]:
    return [row[: i + 1].tolist() for i, row in enumerate(matrix)]


def build(spec: RunSpec, device: str = "auto") -> tuple[Learner, Stream]:
    """The learner and the stream of a run, before the first step.

    >>> learner, stream = build(RunSpec(learner="er"), device="cpu")
    >>> type(learner).__name__, stream.name
    ('ER', 'seq-digits')
    """
    check_spec(spec)
    make, stream = _prepare(spec, device)
    return make(), stream


def _prepare(spec: RunSpec, device: str) -> tuple[Callable[[], Learner], Stream]:
    """What makes the learner of a run, by its code as it is now, and the stream."""
    place, resolved, kind = find_device(device), spec.resolved(), find_learner(spec.learner)
    stream = make_stream(spec.stream, spec.seed, **spec.scenario)
    options = resolved["options"] | ({"memory": spec.memory} if "memory" in resolved else {})

    def make() -> Learner:
        model = make_backbone(resolved["backbone"], stream.shape, stream.classes, spec.seed).to(place)
        computing_in(model, resolved["precision"], channels_last=resolved["channels_last"])
        return kind(
            model, prepare=stream.prepare, augment=stream.augment, classes=stream.classes, seed=spec.seed,
            **options,
        )  # fmt: skip

    return make, stream


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, hardware, command and time: where a number comes from."""
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
    """What was typed; the same for `parabolic` and `python -m parabolic`."""
    program, ours = Path(sys.argv[0]), Path(__file__).parents[1] / "__main__.py"
    called = "parabolic" if program.stem == "parabolic" or program == ours else sys.argv[0]
    return str(encodable(shlex.join([called, *sys.argv[1:]])))


def find_device(name: str) -> torch.device:
    """The device of that name; `auto` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise invalid("device", name, "auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise invalid("device", name, "auto, cpu, cuda or cuda:N")
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= here:
        found = f"of {here} the last is cuda:{here - 1}" if here else "no CUDA device was found"
        raise invalid("device", name, "a device that is here", f"{found}: use cpu")
    return device


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
