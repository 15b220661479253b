"""Runs that were stopped: each is written down in its folder now and then, and goes on from there."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parabolic.checks import InputError, check_number
from parabolic.engine import Checkpoints, Progress
from parabolic.experiments.code import made_of, package_code
from parabolic.experiments.spec import RunSpec
from parabolic.experiments.store import Store, agree
from parabolic.files import sweep
from parabolic.learners import Learner
from parabolic.learners.saving import read_learner

__all__ = ["Keeping"]


@dataclass(frozen=True)
class Keeping:
    """Runs are checkpointed to a store every so many seconds, and resumed from there."""

    store: Store
    seconds: float = 60.0
    anew: bool = False  # whether they begin at the beginning, whatever is there

    @classmethod
    def of(cls, store: Store, seconds: float, *, anew: bool = False) -> Keeping | None:
        """Every so many seconds; none for 0, which means never."""
        check_number("checkpoint", seconds, at_least=0, remedy="0 writes nothing down")
        return cls(store, seconds, anew) if seconds else None

    def checkpoints(self, specs: list[RunSpec], fresh: Sequence[Callable[[], Learner]]) -> Checkpoints:
        """What writes these runs down, while they are trained side by side; `fresh` make their learners anew."""
        paths = [self.store.checkpoint(spec.key) for spec in specs]
        return Checkpoints(paths, self.seconds, [_about(spec) for spec in specs], fresh)

    def place(self, spec: RunSpec) -> tuple[int, int]:
        """Where in the stream a run would be resumed."""
        saved = self._find(spec)
        return (0, 0) if saved is None else Progress(**saved["progress"]).place

    def resume(self, spec: RunSpec, learner: Learner) -> Progress | None:
        """Bring a run's learner to where it was written down; None where it has to start at the beginning."""
        saved = self._find(spec)
        return None if saved is None else Checkpoints.resume(learner, saved)

    def forget(self, spec: RunSpec) -> None:
        """Let a run start at the beginning."""
        self.store.checkpoint(spec.key).unlink(missing_ok=True)

    def _find(self, spec: RunSpec) -> dict[str, Any] | None:
        path = self.store.checkpoint(spec.key)
        sweep(path.parent)
        if self.anew or not path.exists():
            return None
        try:
            saved = read_learner(path, "run", "progress", "draws")
        except InputError as error:
            warnings.warn(f"the run starts at the beginning: {error}", RuntimeWarning, stacklevel=2)
            return None
        return saved if agree(saved["run"], _about(spec)) else None


def _about(spec: RunSpec) -> dict[str, Any]:
    """All that must be as it was for a run to go on: what it came to by other code or data is not mixed with this."""
    from parabolic import __version__

    return {
        **made_of(spec),
        "spec": spec.resolved(),
        "package": package_code(),
        "parabolic": __version__,
        "torch": str(torch.__version__),
    }
