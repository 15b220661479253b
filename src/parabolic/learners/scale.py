"""Units in which numbers are of size one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Scale"]


class Scale:
    """Numbers less their mean, in deviations: those of everything that was seen so far, each example counting alike.

    Before anything was seen numbers stay as they are; one that never changed is not divided.

    >>> scale = Scale()
    >>> for part in ([[0.0], [0.0]], [[4.0], [4.0]]):
    ...     scale.update(torch.tensor(part))
    >>> scale(torch.tensor([[2.0], [4.0]]))
    tensor([[0.],
            [1.]])
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean, self.squares = torch.zeros(2, 1, dtype=torch.float64)  # Σ (x − mean)², not yet divided

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Take in examples `[n, *shape]`: mean and deviation are those of all so far (Chan's rule for two parts)."""
        self._move(x.device)
        x, count = x.double(), self.count + len(x)
        mean = x.mean(0)
        gap = mean - self.mean
        squares = (x - mean).square().sum(0) + gap.square() * (self.count * len(x) / count)
        self.count, self.mean, self.squares = count, self.mean + gap * (len(x) / count), self.squares + squares

    @property
    def deviation(self) -> Tensor:
        """The standard deviation of each number; 1 where it is zero up to rounding."""
        deviation = (self.squares / max(self.count, 1)).sqrt()
        return torch.where(deviation > 1e-12 * self.mean.abs(), deviation, 1.0)

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

    def _move(self, device: torch.device) -> None:
        """Be where the numbers are, once and for all: a step must not wait for the units to come."""
        self.mean, self.squares = self.mean.to(device), self.squares.to(device)
