"""The journal of a long-running stream: the learner is saved regularly, and a crash costs at most a few batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import Any, Self

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from parabolic.checks import Description, InputError, all_finite, check_name, check_number, invalid
from parabolic.engine.checkpoints import draws, set_draws
from parabolic.engine.loop import Diverged
from parabolic.files import disk_errors, sweep, write_bytes
from parabolic.learners import Learner
from parabolic.learners.learner import TaskBatches
from parabolic.learners.saving import describe, read_learner, restore
from parabolic.states import Damaged, check_state, pack_state

__all__ = ["Journal"]

SUFFIX, LOCK = ".safetensors", ".lock"
PATTERN = "[0-9]" * 12 + SUFFIX
Notes = Mapping[str, Any] | Callable[[], Mapping[str, Any] | None] | None
PLACE = ("batches", "tasks", "task_batches", "in_task", "notes")  # saved with the learner


class Journal:
    """Saves a learner to a folder as it learns, and restores it at the next start.

    Every `every` batches a new file is written atomically, and the newest `keep` files are kept. However the process
    ends (kill -9, a full disk, a power failure), the same program then resumes from the newest file: `batches` is the
    number of batches processed so far, and so the index of the next one; `saved` is how many of them the newest file
    contains, to alert on if files cannot be written. On the same CPU the result is as if nothing had happened. A
    damaged file is skipped with a warning, and a learner that is no longer finite is not saved.

    Args:
        folder: where the files are. Only one journal at a time can have it open.
        learner: the same one at every start: a new learner, created with the same options, or one loaded from the same
            file. Its state is restored from the folder.
        every: how many batches there are from one file to the next.
        keep: how many files to keep.
        milestones: also keep, for good, the first file of every so many batches: to go far back, if something wrong was
            learned long ago (None: only the newest `keep`; milestones of an earlier start are removed).
        on_error: what to do if a file cannot be written (the disk is full, memory has run out): "stop" raises, "warn"
            continues learning. Either way the existing files stay, and the next attempt is `every` batches later. A
            learner that is no longer finite raises `Diverged` either way: it would never become finite again.

    `notes` is a dict for the caller's own data, saved with the learner: plain values and tensors. What belongs to a
    batch, such as its offset in a log or the state of a schedule, is passed to `observe`, which saves it with that
    batch; set after `observe`, it would be missing from the file that `observe` has just written.

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
        self,
        folder: str | Path,
        learner: Learner,
        *,
        every: int = 100,
        keep: int = 3,
        milestones: int | None = None,
        on_error: str = "stop",
    ) -> None:
        if not isinstance(learner, Learner):
            raise invalid("learner", type(learner), "a learner", "an estimator is kept by pickling it")
        check_number("every", every, whole=True, at_least=1)
        check_number("keep", keep, whole=True, at_least=1)
        if milestones is not None:
            check_number("milestones", milestones, whole=True, at_least=1)
        check_name("on_error", on_error, ("stop", "warn"))
        self.folder, self.learner = Path(folder).absolute(), learner
        self.every, self.keep, self.milestones, self.on_error = every, keep, milestones, on_error
        self.batches = 0  # learned or skipped
        self.saved = 0  # of them, how many are in the newest file
        self.tasks = 0  # finished
        self.task_batches = 0  # learned or skipped in the current task
        self.in_task = False  # whether a task has started and not ended
        self.notes: dict[str, Any] = {}
        self._resumed_in_task = False  # and the call of `start_task` that is to be ignored is still to come
        self._began = learner.steps  # what it had learned before the journal began
        self._failed: Exception | None = None  # what was wrong about the last batch's notes or file, not about itself
        self._changing = False  # whether a batch or a task's start or end is being processed
        self._due = False  # whether `write` was called during such a change
        self._broken = False  # whether a change was interrupted, as by Ctrl-C
        self._learning = RLock()  # held until a batch is learned, counted and saved; acquired before the learner's lock
        self._writing = RLock()  # held while a file is written
        self._packed = self._written = 0  # how many states were packed so far, and which of them is in the newest file
        # Tensors that were not finite when it began: masks, say.
        self._infinite = {name for name, tensor in self._tensors_in_use() if not all_finite(tensor)}
        self._lock = self._acquire_lock()
        try:
            with torch.inference_mode(False):  # what is restored must be able to learn later
                self._resume()
        except BaseException:
            self._lock.release()
            raise

    @staticmethod
    def load(
        folder: str | Path, *, model: nn.Module | None = None, device: torch.device | str | None = None, **given: Any
    ) -> Learner:
        """Load the learner from the newest intact file of a folder: for another process, to serve from.

        It takes no lock and changes nothing, so a journal may have the folder open, and replace its files meanwhile.
        A damaged file is skipped with a warning. The arguments are those of `Learner.load`.

        >>> import tempfile, torch
        >>> from parabolic import ER
        >>> with Journal(tempfile.mkdtemp(), ER(torch.nn.Linear(4, 3)), every=1) as journal:
        ...     loss = journal.observe(torch.randn(8, 4), torch.arange(8) % 3)
        ...     Journal.load(journal.folder, model=torch.nn.Linear(4, 3)).steps
        1
        """
        skipped: set[Path] = set()
        while remaining := [path for path in _files(Path(folder)) if path not in skipped]:
            try:
                return Learner.load(remaining[0], model=model, device=device, **given)
            except InputError as error:
                if remaining[0].exists():
                    if not isinstance(error, Damaged):
                        raise
                    warnings.warn(f"skipped a damaged file: {error}", RuntimeWarning, stacklevel=2)
                skipped.add(remaining[0])  # it is damaged, or newer ones have replaced it since it was listed
        remedy = f"{len(skipped)} are damaged or gone" if skipped else "start the journal first"
        raise invalid("folder", str(folder), "the folder of a journal, with an intact file", remedy)

    def observe(self, x: Tensor, y: Tensor, task: int | None = None, *, notes: Notes = None) -> Tensor:
        """Learn a batch, and write a file if one is due; returns the loss, on the device.

        `notes` are added to the journal's once the batch is learned, before a file is written. A function that returns
        them is called at that moment, and may step a schedule:

        >>> import tempfile, torch
        >>> from parabolic import ER
        >>> learner = ER(torch.nn.Linear(4, 3))
        >>> schedule = torch.optim.lr_scheduler.ExponentialLR(learner.optim, 0.9)
        >>> def after():
        ...     schedule.step()
        ...     return {"schedule": schedule.state_dict()}
        >>> with Journal(tempfile.mkdtemp(), learner) as journal:
        ...     schedule.load_state_dict(journal.notes.get("schedule", schedule.state_dict()))
        ...     loss = journal.observe(torch.randn(8, 4), torch.arange(8) % 3, notes=after)
        >>> journal.notes["schedule"]["last_epoch"]
        1
        """
        self._check_open()
        self._failed = None
        with self._remembering_errors():
            _check_notes(notes)
        with self._learning:  # until the file is written: another thread's batch would come into it, or postpone it
            with self._change():
                loss = self.learner.observe(x, y, task)
                self._count_batch()
                with self._remembering_errors():
                    self._add_notes(notes)
            self._write_if_due()
        return loss

    def skip(self, *, notes: Notes = None) -> None:
        """Count a batch without learning it, such as one that `observe` refused, so that it is not repeated on resume.

        If only its notes were refused or its file was not written, that error is raised again.
        """
        self._check_open()
        if self._failed is not None:
            raise self._failed
        with self._learning:
            with self._change():
                self._add_notes(notes)
                self._count_batch()
            self._write_if_due()

    def start_task(self, batches: TaskBatches) -> None:
        """Notify the learner of a task's start; does nothing when resuming in the middle of that task."""
        self._check_open()
        if not self._resumed_in_task:
            with self._change():
                self.learner.start_task(batches)
                self.in_task, self.task_batches = True, 0
            self.write()
        self._resumed_in_task = False

    def end_task(self, batches: TaskBatches) -> None:
        """Notify the learner of a task's end."""
        self._check_open()
        with self._change():
            self.learner.end_task(batches)
            self.tasks, self.task_batches, self.in_task, self._resumed_in_task = self.tasks + 1, 0, False, False
        self.write()

    def write(self) -> None:
        """Save the learner now; `on_error` decides what happens if that fails.

        If a signal handler or another thread calls this during a batch, it is deferred to the end of the batch.
        """
        self._check_open()
        with self._remembering_errors():
            # The same text in every attempt, so that Python reports each outage once and stores a single text for it.
            self._write_or_warn("nothing after batch {0.saved} is saved, and learning continues:", stacklevel=5)

    def close(self) -> None:
        """Release the folder. What was learned since the last file is lost unless `write` is called first."""
        with self._writing:  # another thread may be writing
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # After an error the learner may be in the middle of a step.
            if kind is None and self._lock.is_locked:
                message = "closed, with batches after {0.saved} not saved: the next start resumes from there;"
                self._write_or_warn(message, stacklevel=3)
        finally:
            self.close()

    def _write_or_warn(self, message: str, stacklevel: int) -> None:
        """Save the learner; if that fails, `on_error` decides whether that is an error or a warning.

        The warning begins with `message`, in which `{0}` is this journal, after the attempt.
        """
        try:
            self._write()
        except InputError as error:
            if self.on_error == "stop":
                raise
            warnings.warn(f"{message.format(self)} {error}", RuntimeWarning, stacklevel=stacklevel)

    def _check_open(self) -> None:
        if not self._lock.is_locked:
            got = Description(f"a call after it was closed ({self.folder})")
            raise invalid("journal", got, "one that is open", "create a new Journal for the folder")

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Nothing is written in this context: learner and counters may disagree."""
        with self._learning:
            if self._changing:  # by this thread: a signal has come
                raise RuntimeError("journal: called in the middle of a batch; set a flag, and check it after `observe`")
            try:
                with self.learner.lock:  # wait for another thread that is writing
                    self._changing = True
                yield
            except Exception:  # the caller may continue after it
                raise
            except BaseException:
                self._broken = True
                raise
            finally:
                self._changing = False

    @contextmanager
    def _remembering_errors(self) -> Iterator[None]:
        """Remember an error, so that `skip` does not leave out, or count twice, a batch that is not to blame."""
        try:
            yield
        except Exception as error:
            self._failed = error
            raise

    def _count_batch(self) -> None:
        self.batches += 1
        self.task_batches += 1

    def _add_notes(self, notes: Notes) -> None:
        added = notes() if callable(notes) else notes
        _check_notes(added, resolved=True)
        self.notes.update(added or {})

    def _write_if_due(self) -> None:
        if self._due or self.batches % self.every == 0:
            self.write()

    def _write(self) -> None:
        with self.learner._lock_to_read():
            if self._changing or self.learner.stepping:
                self._due = True
                return
            self._due = False
            batches, path = self.batches, self.folder / f"{self.batches:012d}{SUFFIX}"
            position = {name: getattr(self, name) for name in PLACE} | {"began": self._began}
            with _memory_errors():
                self._check_usable()
                packed = pack_state(describe(self.learner) | {"journal": position, "draws": draws(self.learner)})
            number = self._packed = self._packed + 1
        with self._writing, disk_errors("journal", self.folder, "free some space; existing files are safe"):
            self._check_open()  # again: another thread may have closed it meanwhile
            if number < self._written:  # another thread packed a later state and was faster
                return
            self._renew_lock()
            write_bytes(path, packed)
            self.saved, self._written = batches, number
            self._drop_old()

    def _check_usable(self) -> None:
        """Raise an error if the learner is unusable: its files would soon replace all good ones."""
        if self._broken:
            broken = Description(f"a learner interrupted in the middle of a step (after batch {self.batches})")
            raise invalid("journal", broken, "one between steps", self._restart_hint())
        trainable = {name for name, weight in self.learner.model.named_parameters() if weight.requires_grad}
        excused = self._infinite - trainable
        for name, tensor in self._tensors_in_use():
            if name not in excused and not all_finite(tensor):
                got = f"values that are NaN or infinite ({name}, after batch {self.batches})"
                advice = "lower lr in journal.learner.optim.param_groups or leave out extreme examples"
                remedy = f"{hint}, and {advice}" if (hint := self._restart_hint()) else "start with a finite learner"
                raise Diverged(f"journal: got {got}, expected finite ones; {remedy}")

    def _restart_hint(self) -> str:
        """Where to start again from, if there is a file."""
        files = _files(self.folder)
        return f"start again from {files[0].name}" if files else ""

    def _tensors_in_use(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors that predictions and steps depend on, by name: weights, statistics, averages, units, moments."""
        state = self.learner.state_dict()
        yield from _float_tensors("", state["model"])
        yield from _float_tensors("average", self.learner.predicting_weights())
        for name in ("prepare", "units", "optimizer"):
            yield from _float_tensors(name, state.get(name))

    def _acquire_lock(self) -> FileLock:
        lock = FileLock(self.folder / LOCK, thread_local=False)  # any thread may close it
        with disk_errors("journal", self.folder, "name a writable folder"):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(blocking=False)
            except Timeout:
                got = Description(f"a folder that another journal has open, here or in another process ({self.folder})")
                raise invalid("journal", got, "a separate folder for each learner", "close the other first") from None
            self._lock_identity = _identity(self.folder / LOCK)
        sweep(self.folder, older=0, name=PATTERN)  # of its own files only: others may be being written
        return lock

    def _renew_lock(self) -> None:
        """Lock the folder again if it was removed or replaced, as by a copy: the lock was on a file that is gone."""
        if _identity(self.folder / LOCK) != self._lock_identity:
            old, self._lock = self._lock, self._acquire_lock()
            old.release()

    def _resume(self) -> None:
        damaged = []
        for path in _files(self.folder):
            try:
                state = read_learner(path, "journal", "draws")
            except Damaged as error:
                damaged.append((path, error))
                continue
            began = state["journal"].get("began", 0)
            if self.learner.steps != began:
                got = Description(f"one that has learned {self.learner.steps} batches")
                expected = f"one that has learned {began}, as when this journal began" if began else "a new one"
                raise invalid("learner", got, f"{expected}, to be restored", "create one, or name another folder")
            restore(self.learner, state)
            set_draws(self.learner, state["draws"])
            for name in PLACE:
                setattr(self, name, state["journal"][name])
            self._resumed_in_task, self.saved = self.in_task, self.batches
            break
        else:
            if damaged:
                got = Description(f"only damaged files, the newest {damaged[0][0]}")
                raise invalid("journal", got, "at least one that is intact", "restore a copy, or name another folder")
            self.write()
        for path, damage in damaged:
            path.rename(path.with_suffix(".damaged"))  # or it would count as the newest file
            warnings.warn(
                f"skipped a damaged file, resuming from batch {self.batches}: {damage}", RuntimeWarning, stacklevel=3
            )
        with suppress(OSError):  # the next write will report it
            self._drop_old()  # now: a full disk may need the space for the next file

    def _drop_old(self) -> None:
        """Remove all files but the newest `keep` and the milestones."""
        files = _files(self.folder)
        milestones = {int(path.stem) // self.milestones: path for path in files} if self.milestones else {}
        for old in {*files[self.keep :]} - {*milestones.values()}:
            old.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    """The existing files of a journal, newest first."""
    return sorted(folder.glob(PATTERN), reverse=True)


def _identity(path: Path) -> tuple[int, int] | None:
    """The device and inode of a file, which distinguish it from another of the same name; None if it does not exist."""
    try:
        info = path.stat()
    except FileNotFoundError:
        return None
    return info.st_dev, info.st_ino


def _check_notes(notes: Any, resolved: bool = False) -> None:
    """Refuse notes that cannot be saved, before a file needs them; once `resolved`, also a function."""
    if isinstance(notes, Mapping):
        check_state("notes", notes)
    elif notes is not None and (resolved or not callable(notes)):
        raise invalid("notes", type(notes), "a dict, or a function that returns one")


def _float_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors in nested dicts and lists, by their paths."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize > 1:  # torch cannot sum 8 bits
        yield name, value
    elif isinstance(value, Mapping | list | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _float_tensors(f"{name}.{key}" if name else str(key), item)


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Turn out-of-memory errors of Python and torch into an error that says what to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # On a CPU torch raises a plain RuntimeError.
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            expected, remedy = (
                "room for a copy of the learner",
                "free some memory, or keep fewer examples; existing files are safe",
            )
            raise invalid("journal", Description("no memory left for saving"), expected, remedy) from error
        raise
