"""What the methods share that hold weights near where they were, each weight as hard as it mattered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from parabolic.learners.gradients import flatten, refit, trainable
from parabolic.learners.learner import Learner
from parabolic.memory import Batch
from parabolic.options import option
from parabolic.states import overwrite

__all__ = ["AnchoredLearner"]


class AnchoredLearner(Learner):
    """A learner with the penalty `strength` · Σ importance · (θ − θ*)², θ* being the weights at the last task's end."""

    needs_tasks = True

    strength: float = option(
        1.0, "weight of the penalty on moving weights that mattered", at_least=0, tune="0.01:1000:log"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weights = trainable(self.model)
        self.anchor = flatten(self.weights).detach().clone()
        self.importance = torch.zeros_like(self.anchor)

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """The loss of the new batch."""
        return self.error(self.model(batch["x"]), batch["y"])

    def penalty(self) -> Tensor:
        """What it costs to be away from the anchor."""
        return self.strength * (self.importance * (flatten(self.weights) - self.anchor) ** 2).sum()

    def drop_anchor(self) -> None:
        """Measure distances from the weights as they are now."""
        self.anchor.copy_(flatten(self.weights).detach())

    def on_growth(self, moved: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Let anchor and importance follow; new weights have mattered to nothing yet."""
        super().on_growth(moved)
        before, self.weights = self.weights, trainable(self.model)
        self.anchor = refit(self.anchor, before, self.weights)
        self.importance = refit(self.importance, before, map(torch.zeros_like, self.weights))

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, the anchor included."""
        return super().state_dict() | {"anchor": self.anchor, "importance": self.importance}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of another learner of the same kind and model."""
        super().load_state_dict(state)
        overwrite({"anchor": self.anchor, "importance": self.importance}, state)
