"""The base class of methods that project the gradient so that past losses do not increase."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from parabolic.learners.gradients import Weights, named_trainable
from parabolic.learners.learner import ReplayLearner
from parabolic.memory import Batch

__all__ = ["ProjectedLearner"]


class ProjectedLearner(ReplayLearner):
    """A learner that minimises the new batch's loss, with a gradient projected where it would increase a past loss."""

    needs_tasks = True

    lr: float = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weights = Weights(named_trainable(self.model))
        self._past_gradients: Tensor | None = None  # from `loss` to `descend`, within a step

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """The loss of the new batch."""
        self._past_gradients = None if recalled is None else self.constraints(recalled)
        return self.error(self.model(batch["x"]), batch["y"])

    def descend(self, loss: Tensor) -> None:
        """A step down the projected gradient of the loss."""
        gradient = self.weights.gradient(loss)
        if self._past_gradients is not None:
            gradient, self._past_gradients = self.project(gradient, self._past_gradients), None
        self.weights.set_gradient(gradient)
        self.apply_gradients()

    def constraints(self, recalled: Batch) -> Tensor:
        """The gradients of past losses, to project the new one against."""
        raise NotImplementedError

    def project(self, vector: Tensor, against: Tensor) -> Tensor:
        """The gradient to descend in place of `vector`."""
        raise NotImplementedError

    def on_growth(self, moved: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Take over the new weights."""
        super().on_growth(moved)
        self.weights = self.weights.of(self.model)

    def _past_gradient(self, x: Tensor, y: Tensor) -> Tensor:
        return self.weights.gradient(self.error(self.model(x), y))
