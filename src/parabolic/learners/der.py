"""Dark experience replay, and its variant that replays labels too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from parabolic.learners.head import last_linear
from parabolic.learners.learner import ReplayLearner
from parabolic.learners.scale import Scale
from parabolic.memory import Batch
from parabolic.options import option

__all__ = ["DER", "DERpp"]

REFERENCE = "Buzzega et al., 2020: Dark experience for general continual learning"


class DER(ReplayLearner):
    """Dark experience replay: answer recalled examples as the model did when they were stored.

    >>> learner = DER(torch.nn.Linear(4, 3), memory=50)
    >>> for _ in range(3):
    ...     loss = learner.observe(torch.randn(8, 4), torch.arange(8) % 3)
    >>> learner.past["logits"].shape
    torch.Size([24, 3])
    """

    name = "der"
    reference = REFERENCE
    keeps = ("x", "y", "logits")

    lr: float = 0.03
    alpha: float = option(0.3, "weight of the distance from the stored logits", at_least=0, tune="0.03:10:log")

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """The loss of the new batch, plus the squared distance of recalled examples' logits from the stored ones."""
        scores = self.model(batch["x"])
        batch["logits"] = self.error.kept(scores.detach())
        loss = self.error(scores, batch["y"])
        if recalled is None:
            return loss
        answers = self.error.recalled(recalled["logits"]).to(scores.dtype)
        return loss + self.alpha * mse_loss(self.model(recalled["x"]), answers)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of a learner of the same class, model and memory size."""
        memory_state = state.get("memory", {})
        if "units" in state and "logits" in memory_state and memory_state["logits"].dtype != torch.float64:
            units = Scale()  # early versions stored logits in the network's units
            units.load_state_dict(state["units"])
            state = {**state, "memory": {**memory_state, "logits": units.undo(memory_state["logits"].double())}}
        super().load_state_dict(state)

    def on_growth(self, moved: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Widen the stored logits: they are 0 for classes that were unknown at the time."""
        super().on_growth(moved)
        _, head = last_linear(self.model)
        self.past.widen("logits", head.out_features)


class DERpp(DER):
    """Dark experience replay++: DER, plus the loss of a second, independently recalled batch on its labels.

    >>> learner = DERpp(torch.nn.Linear(4, 3), memory=50)
    >>> for _ in range(3):
    ...     loss = learner.observe(torch.randn(8, 4), torch.arange(8) % 3)
    >>> learner.past.fields
    ('x', 'y', 'logits')
    """

    name = "derpp"
    reference = REFERENCE

    alpha: float = 0.1
    beta: float = option(0.5, "weight of the loss of the second recalled batch", at_least=0, tune="0.03:10:log")

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """DER's loss, plus the loss of another batch drawn from memory on its labels."""
        loss = super().loss(batch, recalled)
        second = self.recall()
        if second is None:
            return loss
        return loss + self.beta * self.error(self.model(second["x"]), second["y"])
