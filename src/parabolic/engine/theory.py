"""Callbacks that compare theory with practice after each task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from parabolic.checks import Description, check_number, invalid
from parabolic.engine.callbacks import Callback, State
from parabolic.options import dotted
from parabolic.pde import ForgettingBound, GeneralisationBound, MemoryDomain
from parabolic.profile import (
    LearnerLoss,
    Profile,
    bounds_of,
    examples_loss,
    loss_profile,
    with_memory,
)
from parabolic.streams import Task

__all__ = ["BoundsMonitor", "BoundsRow", "ProfileRecorder", "bounds"]

EPS, SAMPLES = 0.01, 256  # the usual squared radius of the balls around the memory, and number of sampled points


@dataclass(frozen=True)
class BoundsRow:
    """The bounds after a task, and the realised losses on the first and on the last task."""

    task: int  # counted from 0
    forgetting: ForgettingBound  # Proposition 1; realised: on the first task's test examples, all classes competing
    generalisation: GeneralisationBound  # Corollary 1, one task ahead; realised: on the last task's test examples
    first_among_own: float  # the mean loss on the first task with only its own classes competing
    last_among_own: float  # the same on the last task

    @property
    def violations(self) -> list[str]:
        """The statements that the realised loss violates."""
        return [
            name
            for name, bound in (("Proposition 1", self.forgetting), ("Corollary 1", self.generalisation))
            if bound.holds is False
        ]

    def as_dict(self) -> dict[str, Any]:
        """The row as plain JSON values."""
        forgetting, generalisation = self.forgetting, self.generalisation
        return {
            **asdict(self),
            "forgetting_bound": forgetting.bound,
            "forgetting_bound_stated": forgetting.stated,
            "generalisation_lower": generalisation.lower,
            "generalisation_upper": generalisation.upper,
            "violations": self.violations,
        }


def bounds(state: State) -> dict[str, float]:
    """The bounds and the losses after a task, as a measure: `measure=parabolic.engine.theory:bounds`.

    The names are the places of the numbers in `BoundsRow.as_dict`, as in `forgetting.memory.mean`. In addition,
    `forgetting.broken` and `generalisation.broken` are 1 if the realised loss violates the bound, and 0 otherwise.
    """
    row = _row(state, eps=EPS, samples=SAMPLES, seed=0)
    broken = {"forgetting": row.forgetting.holds is False, "generalisation": row.generalisation.holds is False}
    fields = {name: value for name, value in row.as_dict().items() if name not in ("task", "violations")}
    return dotted(fields) | {f"{name}.broken": float(is_broken) for name, is_broken in broken.items()}


class _OfOneRun(Callback):
    """A callback that keeps what it finds in one list, for one run at a time."""

    _state: State | None = None

    def on_start(self, state: State) -> None:
        """Raise an error for a learner without a memory."""
        with_memory(state.learner)
        self._state = state

    def on_step(self, state: State) -> None:
        """Raise an error if another run is trained side by side."""
        if state is not self._state:
            got = Description(f"a {type(self).__name__} with runs that are trained side by side")
            raise invalid("callbacks", got, "it with one run", "train them one after the other, each with its own")


class BoundsMonitor(_OfOneRun):
    """After each task, records the bounds and the realised losses, and flags violations.

    >>> from parabolic import ER, MLP, make_stream, train
    >>> stream, monitor = make_stream("seq-blobs"), BoundsMonitor(samples=32)
    >>> _ = train(ER(MLP((2,), 6)), stream, batch=50, callbacks=[monitor])
    >>> len(monitor.rows), monitor.rows[0].forgetting.holds
    (3, True)
    """

    def __init__(
        self, *, eps: float = EPS, samples: int = SAMPLES, seed: int = 0, warn: Callable[[str], None] | None = None
    ):
        check_number("eps", eps, above=0)
        check_number("samples", samples, whole=True, at_least=2)
        check_number("seed", seed, whole=True)
        self.eps, self.samples, self.seed, self.warn = eps, samples, seed, warn
        self.rows: list[BoundsRow] = []

    def on_start(self, state: State) -> None:
        """Raise an error for a learner without a memory, and discard earlier rows."""
        super().on_start(state)
        self.rows = []

    def on_task(self, state: State) -> None:
        """Compute a row, and flag violations."""
        row = _row(state, eps=self.eps, samples=self.samples, seed=self.seed)
        self.rows.append(row)
        if self.warn is not None:
            for name in row.violations:
                self.warn(f"after task {state.task + 1} the realised loss violates the bound of {name}")


class ProfileRecorder(_OfOneRun):
    """After each task of a stream of points in the plane, solves for u on a grid over the hull of the memory."""

    def __init__(
        self, *, grid: int = 48, eps: float = EPS, t: float = 1.0, sigma: float = 0.05, paths: int = 100, seed: int = 0
    ):
        check_number("grid", grid, whole=True, at_least=1)
        check_number("paths", paths, whole=True, at_least=2)
        for name, value in (("eps", eps), ("sigma", sigma)):
            check_number(name, value, above=0)
        check_number("t", t, at_least=0)
        check_number("seed", seed, whole=True)
        self.grid, self.eps, self.t, self.sigma, self.paths, self.seed = grid, eps, t, sigma, paths, seed
        self.profiles: list[Profile] = []

    def on_start(self, state: State) -> None:
        """Raise an error for streams that cannot be drawn, and lay out the grid over all training data."""
        if state.stream.shape != (2,):
            raise invalid("stream", state.stream.name, "points in the plane, of shape [2]", "use seq-blobs or your own")
        super().on_start(state)
        points = state.learner.inputs(state.stream[0].train.x.to(state.learner.device))
        low, high = points.amin(0).tolist(), points.amax(0).tolist()
        sides = [
            torch.linspace(a, b, self.grid, dtype=points.dtype, device=points.device)
            for a, b in zip(low, high, strict=True)
        ]
        self.points = torch.cartesian_prod(*sides)
        self.profiles = []

    def on_task(self, state: State) -> None:
        """Solve for u at the points of the grid inside the hull."""
        learner = state.learner
        domain = MemoryDomain(LearnerLoss(learner).points, self.eps)
        inside = self.points[domain.inside(self.points)]
        if not len(inside):
            raise invalid("grid", self.grid, "a grid with a point in the hull of the memory", "use a finer one")
        generator = Generator(learner.device).manual_seed(self.seed)
        settings: dict[str, Any] = {"t": self.t, "sigma": self.sigma, "eps": self.eps, "paths": self.paths}
        self.profiles.append(loss_profile(learner, inside, generator=generator, **settings))


def _row(state: State, *, eps: float, samples: int, seed: int) -> BoundsRow:
    learner, first, last = state.learner, state.stream[0], state.stream[-1]
    generator = Generator(learner.device).manual_seed(seed)
    past, future = (_test_examples(task, learner.device) for task in (first, last))
    forgetting, generalisation = bounds_of(learner, past, future, eps=eps, samples=samples, generator=generator)
    return BoundsRow(
        state.task,
        forgetting,
        generalisation,
        float(examples_loss(learner, *past, classes=list(first.classes)).mean()),
        float(examples_loss(learner, *future, classes=list(last.classes)).mean()),
    )


def _test_examples(task: Task, device: torch.device) -> tuple[Tensor, Tensor]:
    """A task's test examples and labels, moved to the device if the data are on the host."""
    x, y = task.test.take(task.test_rows)
    return x.to(device), y.to(device)
