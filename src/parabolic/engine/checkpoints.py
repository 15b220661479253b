"""What is written down of a training while it goes on, so that a kill costs little."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parabolic.checks import check_number
from parabolic.engine.callbacks import State
from parabolic.engine.fleet import Fleet
from parabolic.files import write_bytes
from parabolic.learners import Learner
from parabolic.learners.saving import describe, restore
from parabolic.learners.whole import is_ours, left_behind
from parabolic.states import pack_state

__all__ = ["Checkpoints", "Progress", "draws", "set_draws"]


@dataclass(frozen=True)
class Progress:
    """How far a training had come when it was written down: the learner aside, all that `State` tells."""

    step: int
    matrix: Tensor
    task_matrix: Tensor
    train_seconds: list[float]  # a value for each part of the stream that was learned and tested
    test_seconds: list[float]
    spent: float  # seconds of training on the part that was not finished
    resumed: int  # how often it had been resumed before
    measured: dict[str, list[float]]

    @property
    def place(self) -> tuple[int, int]:
        """Where in the stream; learners at one place can go on side by side."""
        return len(self.train_seconds), self.step

    def apply(self, state: State) -> None:
        """Let a state go on from here."""
        state.matrix[:], state.task_matrix[:] = self.matrix.numpy(), self.task_matrix.numpy()
        state.step, state.spent, state.resumed = self.step, self.spent, self.resumed + 1
        state.train_seconds, state.test_seconds = list(self.train_seconds), list(self.test_seconds)
        state.measured = {name: list(values) for name, values in self.measured.items()}


class Checkpoints:
    """Writes down trainings that go side by side: each to a file of its own, at most every so many seconds.

    With each, its entry of `about` is written, by which a later process tells whether the file is of its run. `fresh`
    are functions that make each learner anew. By them a class that is not ours is put to the test: of one whose state
    is not all that it goes on by, nothing is written from there on, as it would be resumed as another.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        seconds: float,
        about: Sequence[Mapping[str, Any]],
        fresh: Sequence[Callable[[], Learner] | None] = (),
    ) -> None:
        check_number("checkpoint", seconds, above=0)
        self.places, self.seconds = list(zip(paths, about, fresh or [None] * len(paths), strict=True)), seconds
        self._last = time.monotonic()
        self._partial = set[Path]()  # those of which a state is not all

    def keep(self, fleet: Fleet, states: Sequence[State], since: float | None = None, *, now: bool = False) -> None:
        """Write down where trainings stand, if it is time or to be done `now`.

        `since` is when the unfinished part of the stream began.
        """
        if not now and time.monotonic() - self._last < self.seconds:
            return
        for berth, state, (path, about, fresh) in zip(fleet.berths, states, self.places, strict=True):
            if state.error is not None or path in self._partial:
                continue
            with berth.aside():
                if fresh is not None and (why := _why_partial(state.learner, fresh)):
                    self._partial.add(path)
                    warnings.warn(f"no checkpoint is written of {why}", RuntimeWarning, stacklevel=2)
                    continue
                progress = _progress(state, since, len(states))
                own = {"run": about, "progress": vars(progress), "draws": draws(state.learner)}
                packed = pack_state(describe(state.learner) | own)
            try:
                write_bytes(path, packed)
            except OSError as error:  # what is lost is only a place to go on from
                warnings.warn(f"{path}: no checkpoint was written ({error.strerror})", RuntimeWarning, stacklevel=2)
        self._last = time.monotonic()

    @staticmethod
    def resume(learner: Learner, saved: Mapping[str, Any]) -> Progress:
        """Bring a learner to where it was written down, and say how far that was."""
        restore(learner, saved)
        set_draws(learner, saved["draws"])
        return Progress(**saved["progress"])


def _why_partial(learner: Learner, fresh: Callable[[], Learner]) -> str:
    """Who would lack what if it were resumed from its state, and what to do about it; nothing where none would."""
    if is_ours(learner):
        return ""
    cuda = [learner.device] if learner.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(cuda):  # the draws of the run go on as if nobody had looked
            missing = left_behind(learner, fresh())
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # whatever the user's own code says, it would say it of the checkpoint too
        return f"{type(learner).__name__}, which could not be resumed: {error}"
    if not missing:
        return ""
    names = ", ".join(f"`{name}`" for name in missing)
    remedy = "put what it goes on by into state_dict(), and take it back in load_state_dict()"
    return f"{type(learner).__name__}, which would be resumed without {names}: {remedy}"


def _progress(state: State, since: float | None, share: int) -> Progress:
    now = 0.0 if since is None else (time.perf_counter() - since) / share
    return Progress(
        state.step, torch.from_numpy(state.matrix), torch.from_numpy(state.task_matrix), state.train_seconds,
        state.test_seconds, state.spent + now, state.resumed, state.measured,
    )  # fmt: skip


def draws(learner: Learner) -> dict[str, Tensor]:
    """The state of torch's own generators, from which a model draws that drops out or samples."""
    states = {"cpu": torch.get_rng_state()}
    if learner.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(learner.device)
    return states


def set_draws(learner: Learner, states: Mapping[str, Tensor]) -> None:
    """Let torch's own generators go on from there."""
    torch.set_rng_state(states["cpu"])
    if learner.device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], learner.device)
