"""Experience replay with online bias correction."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor, nn

from parabolic.learners.functional import call_with
from parabolic.learners.gradients import trainable
from parabolic.learners.head import check_scoring, follow, frozen_features, last_linear, widen
from parabolic.learners.learner import ReplayLearner, join
from parabolic.learners.moving import copy_model
from parabolic.memory import Batch
from parabolic.options import option

__all__ = ["OBC"]


class OBC(ReplayLearner):
    """Experience replay with online bias correction: the layer that predicts learns from memory alone.

    Ordinary replay favours the classes of the new batch, and this bias is in the last layer. So the features learn by
    replay through a surrogate of that layer; then a second recalled batch, without new examples, trains the model's own
    last layer on fixed features.

    >>> import torch
    >>> learner = OBC(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)), memory=50)
    >>> for _ in range(3):
    ...     loss = learner.observe(torch.randn(8, 4), torch.arange(8) % 3)
    >>> torch.equal(learner.surrogate.weight, learner.head.weight)
    False
    """

    name = "obc"
    reference = "Chrysakis and Moens, 2023: Online bias correction for task-free continual learning"

    correction: int = option(50, "how many examples are recalled to train the layer that predicts", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        _, self.head = last_linear(self.model)
        self.surrogate = copy_model(self.head)
        self.optim = self._make_optimizer([*trainable(self.model), *trainable(self.surrogate)])

    def phase(self) -> Hashable:
        """How many examples can be recalled, for replay and for the layer that predicts."""
        return super().phase(), self.past.phase(self.correction)

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """The loss of the new batch and the recalled one, through the surrogate."""
        x, y = join(batch, recalled)
        name, _ = last_linear(self.model)
        prefix = name and f"{name}."
        surrogate: dict[str, Tensor] = {prefix + key: weight for key, weight in self.surrogate.named_parameters()}
        # In that layer alone: another that shares its weights, as an embedding may, belongs to the features.
        return self.error(call_with(surrogate, self.model, x), y)

    def descend(self, loss: Tensor) -> None:
        """A step of the features and the surrogate, then one of the last layer on a batch recalled for it alone."""
        self.optim.zero_grad()
        loss.backward()
        if len(self.past):
            self.clip_gradients()
            self.optim.step()
            self.optim.zero_grad()  # optimisers skip weights without a gradient
            drawn = self.past.draw(self.correction, generator=self.generator)
            # Features as in prediction: batch norm uses its running statistics and does not update them.
            features = frozen_features(self.model, self.head, self.augmented(drawn["x"]))
            self.error(self.head(features), drawn["y"]).backward()
        self.apply_gradients()

    def on_growth(self, moved: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Extend the surrogate to the new outputs."""
        super().on_growth(moved)
        follow(self.optim, widen(self.surrogate, self.head.out_features, self.generator))

    def _check_model(self, x: Tensor) -> None:
        check_scoring(self.model, self.head, self.inputs(x), shifted=self.error.of_classes)

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on, including the surrogate."""
        return super().state_dict() | {"surrogate": self.surrogate.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of a learner of the same class, model and memory size."""
        super().load_state_dict(state)
        self.surrogate.load_state_dict(state["surrogate"])
