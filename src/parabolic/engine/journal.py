"""A stream that goes on for months: what was learned is on disk, and a crash costs a few batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from parabolic.checks import Description, InputError, all_finite, check_name, check_number, invalid
from parabolic.engine.checkpoints import draws, set_draws
from parabolic.engine.loop import Diverged
from parabolic.files import disk_errors, sweep, write_bytes
from parabolic.learners import Learner
from parabolic.learners.learner import TaskBatches
from parabolic.learners.saving import describe, read_learner, restore
from parabolic.states import Damaged, pack_state

__all__ = ["Journal"]

SUFFIX, LOCK = ".safetensors", ".lock"
PLACE = ("batches", "tasks", "task_batches", "in_task", "notes")  # what is written down beside the learner


class Journal:
    """Writes a learner to a folder as it learns, and brings it back to where it was at the next start.

    Every `every` batches there is a new file, whole or not at all; the last `keep` stay. So after any end of the
    process (kill -9, a full disk, no power) the same program goes on from the last of them: `batches` says how many
    batches are behind it, and the next to give it is the one of that number, counted from 0. On one CPU it is then
    what it would be, had nothing happened. A file that is damaged is passed over with a warning, and a learner that is
    no longer finite is not written down.

    Args:
        folder: where the files are. One journal at a time may have it.
        learner: as made at every start, with the same options. What is found in the folder becomes its state.
        every: after how many batches a file is written.
        keep: how many files stay.
        on_error: what to do where a file cannot be written (the disk is full, no memory is left, the learner is not
            finite): "stop", or "warn" and learn on. Either way the files that are there stay, and the next try is
            `every` batches later.

    `notes` are the caller's own: plain values and tensors that are kept with the learner, such as a schedule's state.

    >>> import tempfile, torch
    >>> from parabolic import ER
    >>> folder, stream = tempfile.mkdtemp(), [(torch.randn(8, 4), torch.arange(8) % 3) for _ in range(25)]
    >>> for start in range(2):
    ...     with Journal(folder, ER(torch.nn.Linear(4, 3)), every=10) as journal:
    ...         print("from batch", journal.batches)
    ...         for x, y in stream[journal.batches :]:
    ...             loss = journal.observe(x, y)
    from batch 0
    from batch 25
    """

    def __init__(
        self, folder: str | Path, learner: Learner, *, every: int = 100, keep: int = 3, on_error: str = "stop"
    ) -> None:
        if not isinstance(learner, Learner):
            raise invalid("learner", type(learner), "a learner", "an estimator's is its learner_ once it is fitted")
        check_number("every", every, whole=True, at_least=1)
        check_number("keep", keep, whole=True, at_least=1)
        check_name("on_error", on_error, ("stop", "warn"))
        self.folder, self.learner = Path(folder).absolute(), learner
        self.every, self.keep, self.on_error = every, keep, on_error
        self.batches = 0  # learned or skipped so far
        self.tasks = 0  # that are over
        self.task_batches = 0  # learned or skipped so far of the present task
        self.in_task = False  # whether a task has started and is not over
        self.notes: dict[str, Any] = {}
        self._started = False  # whether that was so when it was resumed
        self._unwritten: Exception | None = None  # why the batch that was learned last could not be written down
        self._changing = False  # whether a batch is being learned and counted, or a task's start or end told
        self._due = False  # whether a file was asked for meanwhile
        self._broken = False  # whether that was broken off, as by Ctrl-C
        self._infinite = {name for name, each in self._numbers() if not all_finite(each)}  # from the start: masks, say
        self._lock = self._hold()
        try:
            self._resume()
        except BaseException:
            self._lock.release()
            raise

    def observe(self, x: Tensor, y: Tensor, task: int | None = None) -> Tensor:
        """Let the learner learn a batch, and write it down if it is time; returns the loss, still on the device."""
        self._check_open()
        self._unwritten = None
        with self._change():
            loss = self.learner.observe(x, y, task)
            self._count()
        self._write_if_due()
        return loss

    def skip(self) -> None:
        """Count a batch that was not learned, such as one that `observe` refused, so that it is not given again.

        Where it was learned and only its file could not be written, the error of that is raised once more.
        """
        self._check_open()
        if self._unwritten is not None:
            raise self._unwritten
        with self._change():
            self._count()
        self._write_if_due()

    def start_task(self, batches: TaskBatches) -> None:
        """Tell the learner of a task's start; does nothing where it was told before it was stopped in that task."""
        self._check_open()
        if not self._started:
            with self._change():
                self.learner.start_task(batches)
                self.in_task, self.task_batches = True, 0
            self.write()
        self._started = False

    def end_task(self, batches: TaskBatches) -> None:
        """Tell the learner of a task's end."""
        self._check_open()
        with self._change():
            self.learner.end_task(batches)
            self.tasks, self.task_batches, self.in_task, self._started = self.tasks + 1, 0, False, False
        self.write()

    def write(self) -> None:
        """Write the learner down as it is now; where that cannot be done, `on_error` says what happens.

        In the middle of a batch, when a signal handler or another thread may call it, it is put off to the end of that.
        """
        self._check_open()
        try:
            self._write()
        except (InputError, Diverged) as error:
            if self.on_error == "stop":
                self._unwritten = error
                raise
            told = f"batch {self.batches} was not written down, and learning goes on: {error}"
            warnings.warn(told, RuntimeWarning, stacklevel=4)

    def close(self) -> None:
        """Let another journal have the folder. What was learned since the last file is lost unless it is written."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # After an error the learner may be in the middle of a step.
            if kind is None and self._lock.is_locked:
                self.write()
        finally:
            self.close()

    def _check_open(self) -> None:
        if not self._lock.is_locked:
            got = Description(f"a call after it was closed ({self.folder})")
            raise invalid("journal", got, "one that is open", "make a Journal of the folder again")

    @contextmanager
    def _change(self) -> Iterator[None]:
        """While it lasts nothing is written, as learner and counters are only half done."""
        try:
            with self.learner.lock:  # so it does not begin while another thread writes
                self._changing = True
            yield
        except Exception:  # after which the caller may go on
            raise
        except BaseException:
            self._broken = True
            raise
        finally:
            self._changing = False

    def _count(self) -> None:
        self.batches += 1
        self.task_batches += 1

    def _write_if_due(self) -> None:
        if self._due or self.batches % self.every == 0:
            self.write()

    def _write(self) -> None:
        with self.learner.lock:
            if self._changing or self.learner.stepping:
                self._due = True
                return
            self._due = False
            path = self._path(self.batches)
            place = {name: getattr(self, name) for name in PLACE}
            with _memory_errors():
                self._check_sound()
                packed = pack_state(describe(self.learner) | {"journal": place, "draws": draws(self.learner)})
        with disk_errors("journal", self.folder, "free some space; what it has is safe"):
            write_bytes(path, packed)
            self._drop_old()

    def _check_sound(self) -> None:
        """Refuse what cannot be gone on from: files of it would soon have taken the place of all good ones."""
        good = self._files()
        again = f"start again from {good[0].name}" if good else ""
        if self._broken:
            broken = Description(f"a learner that was broken off in the middle of a step (after batch {self.batches})")
            raise invalid("journal", broken, "one between two steps", again)
        learned = {name for name, weight in self.learner.model.named_parameters() if weight.requires_grad}
        excused = self._infinite - learned
        for name, each in self._numbers():
            if name not in excused and not all_finite(each):
                got = f"numbers that are NaN or infinite ({name}, after batch {self.batches})"
                lower = "lower lr in journal.learner.optim.param_groups or leave out what is far off"
                remedy = f"{again}, and {lower}" if again else "give the learner others"
                raise Diverged(f"journal: got {got}, expected finite ones; {remedy}")

    def _numbers(self) -> Iterator[tuple[str, Tensor]]:
        """All that predictions and steps are computed with, by name: weights, statistics, averages, units, moments."""
        state = self.learner.state_dict()
        yield from _tensors("", state["model"])
        yield from _tensors("average", self.learner.predicting_weights())
        for name in ("prepare", "units", "optimizer"):
            yield from _tensors(name, state.get(name))

    def _hold(self) -> FileLock:
        lock = FileLock(self.folder / LOCK, thread_local=False)  # any thread may close what another opened
        with disk_errors("journal", self.folder, "name a folder that can be written to"):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(blocking=False)
            except Timeout:
                got = Description(f"one that another journal has open, here or in another process ({self.folder})")
                raise invalid("journal", got, "a folder of its own for each learner", "close the other first") from None
        sweep(self.folder, older=0)
        return lock

    def _resume(self) -> None:
        damaged = []
        for path in self._files():
            try:
                saved = read_learner(path, "journal", "draws")
            except Damaged as found:
                damaged.append((path, found))
                continue
            if self.learner.steps:
                got = Description(f"one that has learned {self.learner.steps} batches")
                raise invalid("learner", got, "a new one, to become what the journal holds", "or name another folder")
            restore(self.learner, saved)
            set_draws(self.learner, saved["draws"])
            for name in PLACE:
                setattr(self, name, saved["journal"][name])
            self._started = self.in_task
            break
        else:
            if damaged:
                got = Description(f"only damaged files, the last {damaged[0][0]}")
                raise invalid("journal", got, "at least one that is whole", "bring back a copy, or name another folder")
            self.write()
        for path, error in damaged:
            path.rename(path.with_suffix(".damaged"))  # else it would count as the newest
            warnings.warn(f"passed over, to go on from batch {self.batches}: {error}", RuntimeWarning, stacklevel=3)
        with suppress(OSError):  # the next file that is written tells
            self._drop_old()  # now, as a full disk may have no room for a new file before

    def _drop_old(self) -> None:
        """Remove all files but the newest that are to stay."""
        for old in self._files()[self.keep :]:
            old.unlink(missing_ok=True)  # another thread may write, too

    def _path(self, batches: int) -> Path:
        return self.folder / f"{batches:012d}{SUFFIX}"

    def _files(self) -> list[Path]:
        """The files that are there, the newest first."""
        return sorted(self.folder.glob("[0-9]" * 12 + SUFFIX), reverse=True)


def _tensors(place: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of real numbers in nested dicts and lists, by their places."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize > 1:  # torch adds up no 8 bits
        yield place, value
    elif isinstance(value, Mapping | list | tuple):
        for name, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(f"{place}.{name}" if place else str(name), each)


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Turn what Python and torch say where no memory is left into an error that says what to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # On a CPU torch has no class for it.
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            expected, remedy = (
                "room for a copy of the learner",
                "free some, or keep fewer examples; what it has is safe",
            )
            raise invalid("journal", Description("no memory left to write"), expected, remedy) from error
        raise
