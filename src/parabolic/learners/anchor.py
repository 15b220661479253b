"""The base class of methods that hold weights near their old values, each in proportion to its importance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from parabolic.learners.gradients import Weights, named_trainable
from parabolic.learners.learner import Learner
from parabolic.memory import Batch
from parabolic.options import option
from parabolic.states import overwrite

__all__ = ["AnchoredLearner"]


class AnchoredLearner(Learner):
    """A learner with the penalty `strength` · Σ importance · (θ − θ*)², with θ* the weights at the last task's end.

    Sums are accumulated in at least float32: shorter types would lose small terms.
    """

    needs_tasks = True
    _vectors: ClassVar[tuple[str, ...]] = ("anchor", "importance")

    strength: float = option(
        1.0, "weight of the penalty on moving weights that mattered", at_least=0, tune="0.01:1000:log"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weights = Weights(named_trainable(self.model))
        self.anchor = self.weights.vector().detach()
        self.importance = torch.zeros_like(self.anchor, dtype=torch.promote_types(self.anchor.dtype, torch.float32))

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """The loss of the new batch."""
        return self.error(self.model(batch["x"]), batch["y"])

    def penalty(self) -> Tensor:
        """The penalty for the distance from the anchor."""
        return self.strength * (self.importance * self._displacement() ** 2).sum()

    def drop_anchor(self) -> None:
        """Make the current weights the anchor."""
        self.anchor.copy_(self.weights.vector().detach())

    def on_growth(self, moved: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Extend anchor and importance to the new weights, whose importance is 0."""
        super().on_growth(moved)
        old_layout, self.weights = self.weights.layout, self.weights.of(self.model)
        for name in self._vectors:
            grown = [weight.detach() if name == "anchor" else torch.zeros_like(weight) for weight in self.weights]
            setattr(self, name, self.weights.layout.grown(getattr(self, name), old_layout, grown))

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on, including anchor and importance."""
        return super().state_dict() | {name: self._named_parts(name) for name in self._vectors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of a learner of the same class and model."""
        super().load_state_dict(state)
        for name in self._vectors:
            overwrite(self._named_parts(name), state.get(name))

    def _displacement(self) -> Tensor:
        """How far each weight is from the anchor."""
        return (self.weights.vector() - self.anchor).to(self.importance)

    def _named_parts(self, name: str) -> dict[str, Tensor]:
        """The parts of the vector attribute `name`, by weight name."""
        return self.weights.layout.named(getattr(self, name))
