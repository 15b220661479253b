"""Resuming stopped runs from the checkpoints in their folders."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from parabolic.checks import InputError, check_number
from parabolic.engine import Checkpoints, Progress
from parabolic.experiments.code import content_hashes, package_code
from parabolic.experiments.spec import RunSpec
from parabolic.experiments.store import Store, agree
from parabolic.learners import Learner
from parabolic.learners.saving import read_learner

__all__ = ["Keeping", "StoppedRun", "stopped_runs"]


@dataclass(frozen=True)
class StoppedRun:
    """A run that was stopped and has a checkpoint: its spec, and the task that it had come to."""

    key: str
    spec: Mapping[str, Any]
    reached: int  # from 1
    of: int  # how many tasks there are


def stopped_runs(store: Store, failed: Container[str] | None = None) -> list[StoppedRun]:
    """The runs that have a checkpoint but are neither finished, nor `failed` (by key), nor in progress.

    Checkpoints that cannot be read are left out: such runs start over. Of each only the header is read, as it may be
    large; whether the rest is undamaged is found when the run resumes.
    """
    failed, stopped = {run.key for run in store.failures()} if failed is None else failed, []
    for key in store.begun():
        if key in failed or not store.unfinished(key) or store.in_progress(key):
            continue
        with suppress(InputError, LookupError, TypeError):
            saved = read_learner(store.checkpoint(key), "run", "progress", "draws", outline=True)
            done, tasks = len(saved["progress"]["train_seconds"]), len(saved["progress"]["matrix"])
            stopped.append(StoppedRun(key, saved["run"]["spec"], min(done + 1, tasks), tasks))
    return stopped


@dataclass(frozen=True)
class Keeping:
    """Checkpoints runs to a store every `seconds` seconds, and resumes them from there."""

    store: Store
    seconds: float = 60.0
    anew: bool = False  # whether to start over, ignoring existing checkpoints

    @classmethod
    def of(cls, store: Store, seconds: float, *, anew: bool = False) -> Keeping | None:
        """Checkpoints every `seconds` seconds, or None for 0, which means never."""
        check_number("checkpoint", seconds, at_least=0, remedy="0 saves no checkpoints")
        return cls(store, seconds, anew) if seconds else None

    def checkpoints(self, specs: list[RunSpec], fresh: Sequence[Callable[[], Learner]]) -> Checkpoints:
        """The checkpoints of runs trained side by side; `fresh` are functions that build their learners again."""
        paths = [self.store.checkpoint(spec.key) for spec in specs]
        return Checkpoints(paths, self.seconds, [_identity(spec) for spec in specs], fresh)

    def place(self, spec: RunSpec) -> tuple[int, int]:
        """The position in the stream at which a run would resume."""
        saved = self._read_checkpoint(spec)
        return (0, 0) if saved is None else Progress(**saved["progress"]).place

    def resume(self, spec: RunSpec, learner: Learner) -> Progress | None:
        """Restore a run's learner from its checkpoint; returns its progress, or None if it has to start over."""
        saved = self._read_checkpoint(spec)
        return None if saved is None else Checkpoints.resume(learner, saved)

    def forget(self, spec: RunSpec) -> None:
        """Delete a run's checkpoint, so that it starts over."""
        self.store.checkpoint(spec.key).unlink(missing_ok=True)

    def _read_checkpoint(self, spec: RunSpec) -> dict[str, Any] | None:
        path = self.store.checkpoint(spec.key)
        if self.anew or not path.exists():
            return None
        try:
            saved = read_learner(path, "run", "progress", "draws")
        except InputError as error:
            warnings.warn(f"the run starts over: {error}", RuntimeWarning, stacklevel=2)
            return None
        return saved if agree(saved["run"], _identity(spec)) else None


def _identity(spec: RunSpec) -> dict[str, Any]:
    """Everything that must be unchanged for a run to resume, so that results of different code or data never mix."""
    from parabolic import __version__

    return {
        **content_hashes(spec),
        "spec": spec.resolved(),
        "package": package_code(),
        "parabolic": __version__,
        "torch": str(torch.__version__),
    }
