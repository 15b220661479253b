"""Replay that compensates for class frequencies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from parabolic.checks import invalid
from parabolic.learners.learner import ReplayLearner
from parabolic.options import option
from parabolic.states import refill

__all__ = ["BalancedLearner"]

DECAY = 0.95  # of the class shares, per step
FLOOR = 0.01  # split evenly among all classes, so that a class that has been absent for long keeps some share


class BalancedLearner(ReplayLearner):
    """A replay learner whose loss can compensate for class frequencies (logit adjustment: Menon et al., 2021).

    The arriving classes make up about half of what is learned if as many examples are recalled as arrive, and those of
    the past share the rest. With `balance`, the loss is computed from the scores plus balance · log(share of the
    class). With a balance of 1 the network then learns, and predicts with, scores as if all classes were equally
    frequent; with b, as if their frequencies were the shares to the power of 1 − b.
    """

    balance: float = option(
        0.0,
        "how far the loss compensates for classes that occur more often than others: 0 not at all, 1 fully",
        at_least=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.balance and not self.error.of_classes:
            raise invalid("balance", self.balance, "0 where targets are numbers", "it applies to classes only")
        self.shares = torch.zeros(self.classes or 0, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def count(self, y: Tensor, outputs: int) -> None:
        """Update the class shares with the labels of everything learned in a step."""
        if self.balance:
            self._reserve(outputs)
            self.shares.lerp_(self.error.points(y, outputs, self.dtype).mean(0), 1 - DECAY)

    def tilted(self, scores: Tensor) -> Tensor:
        """The scores as adjusted for the loss."""
        if not self.balance:
            return scores
        share = self.shares / self.shares.sum()
        return scores + self.balance * (share + FLOOR / len(share)).log()

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on, including the class shares if they are in use."""
        return super().state_dict() | ({"shares": self.shares} if self.balance else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of a learner of the same class, model and memory size."""
        super().load_state_dict(state)
        if self.balance:
            self._reserve(len(state["shares"]))
            refill(self.shares, state["shares"])

    def _tensors_to_restore(self) -> list[Tensor]:
        return [*super()._tensors_to_restore(), self.shares]

    def _reserve(self, outputs: int) -> None:
        if outputs > len(self.shares):
            self.shares = pad(self.shares, (0, outputs - len(self.shares)))
