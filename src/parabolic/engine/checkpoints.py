"""Checkpoints: the state of a training run, saved regularly so that a kill costs little."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parabolic.checks import DEVICE_ERRORS, InputError, check_number
from parabolic.engine.callbacks import State
from parabolic.engine.fleet import Fleet
from parabolic.files import write_bytes
from parabolic.learners import Learner
from parabolic.learners.functional import draws_apart
from parabolic.learners.saving import describe, restore
from parabolic.learners.whole import is_built_in, left_behind
from parabolic.states import pack_state

__all__ = ["Checkpoints", "Progress", "draws", "set_draws"]


@dataclass(frozen=True)
class Progress:
    """How far a run had come when its checkpoint was saved: all of `State` except the learner."""

    step: int
    matrix: Tensor
    task_matrix: Tensor
    train_seconds: list[float]  # one value for each part of the stream that was learned and tested
    test_seconds: list[float]
    spent: float  # seconds of training on the unfinished part
    resumed: int  # how often it had been resumed before
    measured: dict[str, list[float]]
    future: Tensor | None = None

    @property
    def place(self) -> tuple[int, int]:
        """The position in the stream; learners at the same position can continue side by side."""
        return len(self.train_seconds), self.step

    def apply(self, state: State) -> None:
        """Set a state to this position, counting one more resume."""
        state.matrix[:], state.task_matrix[:] = self.matrix.numpy(), self.task_matrix.numpy()
        state.step, state.spent, state.resumed = self.step, self.spent, self.resumed + 1
        state.train_seconds, state.test_seconds = list(self.train_seconds), list(self.test_seconds)
        state.measured = {name: list(values) for name, values in self.measured.items()}
        if state.future is not None and self.future is not None:
            state.future[:] = self.future.numpy()


class Checkpoints:
    """Checkpoints runs that are trained side by side: each in its own file, at most every `seconds` seconds.

    Each file includes the run's entry of `about`, by which a later process recognises its own run. `fresh` are
    functions that build each learner again, to check classes that are not from this package: if a learner's state is
    incomplete, no further checkpoints of it are saved, as it would resume as a different one.
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
        self._given_up = set[Path]()  # of learners whose state is incomplete, or does not fit into a file

    def keep(self, fleet: Fleet, states: Sequence[State], since: float | None = None, *, now: bool = False) -> None:
        """Save a checkpoint of each run, if one is due or `now` is set.

        `since` is when training on the unfinished part of the stream began (`time.perf_counter`).
        """
        if not now and time.monotonic() - self._last < self.seconds:
            return
        for berth, state, (path, about, fresh) in zip(fleet.berths, states, self.places, strict=True):
            if state.error is not None or path in self._given_up:
                continue
            with berth.on_stream():
                if fresh is not None and (reason := _why_incomplete(state.learner, fresh)):
                    self._give_up(path, reason)
                    continue
                progress = _progress(state, since, len(states))
                extra = {"run": about, "progress": vars(progress), "draws": draws(state.learner)}
                try:
                    write_bytes(path, pack_state(describe(state.learner) | extra))
                except InputError as error:  # it has something that no file can hold, and always will
                    self._give_up(path, f"{state.learner.own_name()}: {error}")
                except (OSError, MemoryError) as error:  # training itself is not affected
                    cause = error.strerror or error if isinstance(error, OSError) else "no memory left"
                    warnings.warn(f"{path}: no checkpoint was saved ({cause})", RuntimeWarning, stacklevel=2)
        self._last = time.monotonic()

    def _give_up(self, path: Path, what: str) -> None:
        self._given_up.add(path)
        warnings.warn(f"no checkpoint is saved of {what}", RuntimeWarning, stacklevel=3)

    @staticmethod
    def resume(learner: Learner, saved: Mapping[str, Any]) -> Progress:
        """Restore a learner from a checkpoint and return how far the run had come."""
        restore(learner, saved)
        set_draws(learner, saved["draws"])
        return Progress(**saved["progress"])


def _why_incomplete(learner: Learner, fresh: Callable[[], Learner]) -> str:
    """What a learner resumed from its state would lack, and the remedy; empty if the state is complete."""
    if is_built_in(learner):
        return ""
    try:
        with draws_apart(learner.device):
            missing = left_behind(learner, fresh())
    except torch.OutOfMemoryError:  # training itself is not affected
        return f"{type(learner).__name__}, as the device has no room for another one to compare it with"
    except DEVICE_ERRORS:
        raise
    except Exception as error:  # the user's own code would fail in the same way on resume
        return f"{type(learner).__name__}, which could not be resumed: {error}"
    if not missing:
        return ""
    names = ", ".join(f"`{name}`" for name in missing)
    remedy = "include what it needs in state_dict(), and restore it in load_state_dict()"
    return f"{type(learner).__name__}, which would be resumed without {names}: {remedy}"


def _progress(state: State, since: float | None, runs: int) -> Progress:
    elapsed = 0.0 if since is None else (time.perf_counter() - since) / runs
    return Progress(
        state.step, torch.from_numpy(state.matrix), torch.from_numpy(state.task_matrix), state.train_seconds,
        state.test_seconds, state.spent + elapsed, state.resumed, state.measured,
        None if state.future is None else torch.from_numpy(state.future),
    )  # fmt: skip


def draws(learner: Learner) -> dict[str, Tensor]:
    """The states of torch's global generators, which models with dropout or sampling draw from."""
    states = {"cpu": torch.get_rng_state()}
    if learner.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(learner.device)
    return states


def set_draws(learner: Learner, states: Mapping[str, Tensor]) -> None:
    """Restore the states of torch's global generators."""
    torch.set_rng_state(states["cpu"])
    if learner.device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], learner.device)
