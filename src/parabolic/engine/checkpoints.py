"""What is written down of a training while it goes on, so that a kill costs little."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
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
from parabolic.states import pack_state

__all__ = ["Checkpoints", "Progress", "draws", "set_draws"]


@dataclass(frozen=True)
class Progress:
    """How far a training had come when it was written down: the learner aside, all that `State` tells."""

    step: int
    matrix: Tensor
    train_seconds: list[float]  # a value for each part of the stream that was learned and tested
    test_seconds: list[float]
    spent: float  # seconds of training on the part that was not finished
    resumed: int  # how often it had been resumed before

    @property
    def place(self) -> tuple[int, int]:
        """Where in the stream; learners at one place can go on side by side."""
        return len(self.train_seconds), self.step

    def apply(self, state: State) -> None:
        """Let a state go on from here."""
        state.matrix[:] = self.matrix.numpy()
        state.step, state.spent, state.resumed = self.step, self.spent, self.resumed + 1
        state.train_seconds, state.test_seconds = list(self.train_seconds), list(self.test_seconds)


class Checkpoints:
    """Writes down trainings that go side by side: each to a file of its own, at most every so many seconds.

    `about` each of them something is written along, by which to tell whether a file is of the run that is resumed.
    """

    def __init__(self, paths: Sequence[Path], seconds: float, about: Sequence[Mapping[str, Any]]) -> None:
        check_number("checkpoint", seconds, above=0)
        self.places, self.seconds = list(zip(paths, about, strict=True)), seconds
        self._last = time.monotonic()

    def keep(self, fleet: Fleet, states: Sequence[State], since: float | None = None) -> None:
        """Write down, if it is time, where trainings stand; `since` is when the unfinished part of the stream began."""
        if time.monotonic() - self._last < self.seconds:
            return
        for berth, state, (path, about) in zip(fleet.berths, states, self.places, strict=True):
            if state.error is not None:
                continue
            with berth.aside():
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


def _progress(state: State, since: float | None, share: int) -> Progress:
    now = 0.0 if since is None else (time.perf_counter() - since) / share
    matrix = torch.from_numpy(state.matrix)
    return Progress(state.step, matrix, state.train_seconds, state.test_seconds, state.spent + now, state.resumed)


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
