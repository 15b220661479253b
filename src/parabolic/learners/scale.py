"""Units in which numbers are of size one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from parabolic.checks import check_finite, invalid

__all__ = ["Scale"]

ROUNDING = 64 * torch.finfo(torch.float64).eps  # of its mean, what a number that never changes may seem to deviate
ENOUGH, JUMP = 1000, 10.0  # after so many examples no batch should multiply a deviation by more


class Scale:
    """Numbers less their mean, in deviations: those of everything that was seen so far, each example counting alike.

    Before anything was seen numbers stay as they are; one that never changed is not divided. A wrong value counts as
    any other: a batch that multiplies a deviation by more than ten, after a thousand examples, is taken in with a
    warning.

    >>> scale = Scale()
    >>> for part in ([[0.0], [0.0]], [[4.0], [4.0]]):
    ...     scale.update(torch.tensor(part))
    >>> scale(torch.tensor([[2.0], [4.0]]))
    tensor([[0.],
            [1.]])
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean, self.squares = torch.zeros(2, dtype=torch.float64)  # Σ (x − mean)², not yet divided

    @torch.no_grad()
    def update(self, x: Tensor, name: str = "x") -> None:
        """Take in examples `[n, *shape]`: mean and deviation are those of all so far (Chan's rule for two parts).

        What does not fit is refused before anything changes; `name` is what errors call it.
        """
        if x.ndim < 1 or len(x) == 0:
            raise invalid(name, x, "a batch of at least one example", "skip empty batches")
        if self.count and x.shape[1:] != self.mean.shape:
            raise invalid(name, x, f"examples of shape {list(self.mean.shape)}, as before")
        check_finite(name, x)
        self._move(x.device)
        x, count = x.double(), self.count + len(x)
        mean = x.mean(0)
        gap = mean - self.mean
        squares = self.squares + ((x - mean).square().sum(0) + gap.square() * (self.count * len(x) / count))
        if not squares.isfinite().all():
            raise invalid(name, x, "numbers whose squares have a sum in float64", "give them in larger units")
        if self.count >= ENOUGH:
            self._watch(x, (squares / count).sqrt(), name)
        self.count, self.mean, self.squares = count, self.mean + gap * (len(x) / count), squares

    @property
    def deviation(self) -> Tensor:
        """The standard deviation of each number; 1 where it is zero up to rounding."""
        deviation = self._spread()
        return torch.where(deviation > 0, deviation, 1.0)

    def __call__(self, x: Tensor) -> Tensor:
        """Numbers in these units, in the type of `x` (float32 for whole numbers)."""
        self._move(x.device)
        scaled: Tensor = (x.double() - self.mean) / self.deviation
        return scaled.to(x.dtype if x.is_floating_point() else torch.float32)

    def undo(self, x: Tensor) -> Tensor:
        """Numbers in these units as they were."""
        self._move(x.device)
        undone: Tensor = (x.double() * self.deviation + self.mean).to(x.dtype)
        return undone

    def state_dict(self) -> dict[str, Any]:
        """All that the units depend on, by name."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the units of another."""
        self.count, self.mean, self.squares = (state[name] for name in ("count", "mean", "squares"))

    def _spread(self) -> Tensor:
        """The standard deviation of each number; 0 where it is zero up to rounding."""
        spread = (self.squares / max(self.count, 1)).sqrt()
        return torch.where(spread > ROUNDING * self.mean.abs(), spread, 0.0)

    def _watch(self, x: Tensor, deviation: Tensor, name: str) -> None:
        """Warn of examples that multiply a deviation, before they do."""
        known = self._spread()
        jump = torch.where(known > 0, deviation / known, 0.0)
        if not (jump > JUMP).any():
            return
        # What is nearly always the same, as a pixel at the edge, may be so here too but for one: that is no mistake.
        jump = torch.where((x - self.mean).abs().median(0).values > known / JUMP, jump, 0.0)
        if (jump > JUMP).any():
            place = [int(i) for i in torch.unravel_index(jump.argmax(), jump.shape)]
            warnings.warn(
                f"{name}: a batch of {len(x)} multiplies the deviation at {place} by {float(jump.max()):.0f}, after "
                f"{self.count} examples, which now look alike; if a value is wrong, go on from a copy of before",
                RuntimeWarning, stacklevel=4,
            )  # fmt: skip

    def _move(self, device: torch.device) -> None:
        """Be where the numbers are, once and for all: a step must not wait for the units to come."""
        self.mean, self.squares = self.mean.to(device), self.squares.to(device)
