"""What the methods share that hold weights near where they were, each weight as hard as it mattered."""

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
    """A learner with the penalty `strength` · Σ importance · (θ − θ*)², θ* being the weights at the last task's end.

    What is summed up is at least float32, as small parts of a sum would be lost in shorter types.
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
        """What it costs to be away from the anchor."""
        return self.strength * (self.importance * self._moved() ** 2).sum()

    def drop_anchor(self) -> None:
        """Measure distances from the weights as they are now."""
        self.anchor.copy_(self.weights.vector().detach())

    def on_growth(self, moved: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Let anchor and importance follow; new weights have mattered to nothing yet."""
        super().on_growth(moved)
        before, self.weights = self.weights.layout, Weights(named_trainable(self.model))
        for name in self._vectors:
            rest = [weight.detach() if name == "anchor" else torch.zeros_like(weight) for weight in self.weights]
            setattr(self, name, self.weights.layout.grown(getattr(self, name), before, rest))

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, what each weight is held by included."""
        return super().state_dict() | {name: self._named(name) for name in self._vectors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of another learner of the same kind and model."""
        super().load_state_dict(state)
        for name in self._vectors:
            overwrite(self._named(name), state.get(name))

    def _moved(self) -> Tensor:
        """How far each weight is from the anchor."""
        return (self.weights.vector() - self.anchor).to(self.importance)

    def _named(self, name: str) -> dict[str, Tensor]:
        """The parts of a vector, by the names of the weights."""
        return self.weights.layout.named(getattr(self, name))
