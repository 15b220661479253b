"""Replay that makes up for how often each class comes up."""

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

DECAY = 0.95  # of the shares, from step to step
FLOOR = 0.01  # divided among all classes: what a class has that has not come up for long


class BalancedLearner(ReplayLearner):
    """A replay learner whose loss can make up for how often classes come up (logit adjustment: Menon et al., 2021).

    The classes that arrive are half of all that is learned, and those of the past share the rest. With `balance` the
    loss is that of the scores plus balance · log(share of the class). What the network then has to learn, and predicts
    with, are scores as if all classes came up alike.
    """

    balance: float = option(
        0.0,
        "how far the loss makes up for classes that come up more often than others: 0 not at all, 1 wholly",
        at_least=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.balance and not self.error.of_classes:
            raise invalid("balance", self.balance, "0 where targets are numbers", "it is for classes")
        self.shares = torch.zeros(self.classes or 0, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def count(self, y: Tensor, outputs: int) -> None:
        """Take note of the labels of all that is learned in a step."""
        if self.balance:
            self._reserve(outputs)
            self.shares.lerp_(self.error.points(y, outputs, self.dtype).mean(0), 1 - DECAY)

    def tilted(self, scores: Tensor) -> Tensor:
        """Scores as the loss takes them."""
        if not self.balance:
            return scores
        share = self.shares / self.shares.sum()
        return scores + self.balance * (share + FLOOR / len(share)).log()

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, the shares of the classes included where they are in use."""
        return super().state_dict() | ({"shares": self.shares} if self.balance else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of another learner of the same kind, model and memory size."""
        super().load_state_dict(state)
        if self.balance:
            self._reserve(len(state["shares"]))
            refill(self.shares, state["shares"])

    def _reserve(self, outputs: int) -> None:
        if outputs > len(self.shares):
            self.shares = pad(self.shares, (0, outputs - len(self.shares)))
