"""Experience replay with complementary learning systems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from parabolic.learners.average import WeightAverage, is_averaged
from parabolic.learners.functional import scores_by
from parabolic.learners.learner import ReplayLearner, join
from parabolic.memory import Batch
from parabolic.options import option

__all__ = ["CLSER", "AveragedModel"]


class AveragedModel(WeightAverage):
    """A weight average that sees examples itself, so that it has batch-norm statistics of its own.

    >>> model = nn.BatchNorm1d(1)
    >>> average = AveragedModel(model, decay=0.9)
    >>> scores = scores_by(average.weights, model, torch.tensor([[5.0], [9.0]]))
    >>> average.weights["running_mean"], model.running_mean
    (tensor([0.7000]), tensor([0.]))
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, decay)
        self.updates += 1  # the initial model counts as the first of those averaged

    def sources(self, model: nn.Module) -> dict[str, Tensor]:
        """The weights, without batch-norm statistics."""
        return {name: weight for name, weight in model.named_parameters() if is_averaged(weight)}


class CLSER(ReplayLearner):
    """Experience replay held close to two averages of its weights: a fast one, and a slow one that predicts.

    The defaults are for a single pass. The paper's, for 50 passes over CIFAR-10 (rates 0.1 and 0.3, decay 0.999),
    average over some ten thousand steps, more than a single pass has.

    >>> learner = CLSER(torch.nn.Linear(4, 3), memory=50)
    >>> for _ in range(3):
    ...     loss = learner.observe(torch.randn(8, 4), torch.arange(8) % 3)
    >>> torch.equal(learner.predicting_weights()["weight"], learner.stable.weights["weight"])
    True
    """

    name = "clser"
    reference = "Arani et al., 2022: Learning fast, learning slow: a general continual learning method based on CLS"

    weight: float = option(0.15, "weight of the distance from the averages' logits", at_least=0, tune="0.01:1:log")
    stable_rate: float = option(0.8, "probability that the stable average moves at a step", at_least=0, at_most=1)
    stable_decay: float = option(0.99, "decay of the stable average, which predicts", at_least=0, below=1)
    plastic_rate: float = option(0.9, "probability that the plastic average moves at a step", at_least=0, at_most=1)
    plastic_decay: float = option(0.99, "decay of the plastic average", at_least=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stable = AveragedModel(self.model, self.stable_decay)
        self.plastic = AveragedModel(self.model, self.plastic_decay)

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """Experience replay's loss, plus the squared distance of recalled logits from those of the better average."""
        x, y = join(batch, recalled)
        if recalled is None:
            return self.error(self.model(x), y)
        # Separately, as the averages see them: among new examples, batch norm would give them other logits.
        distance = mse_loss(self.model(recalled["x"]), self._better_logits(recalled))
        return self.error(self.model(x), y) + self.weight * distance

    @torch.no_grad()
    def _better_logits(self, recalled: Batch) -> Tensor:
        """For each example, the logits of the average with the lower loss."""
        stable, plastic = (
            scores_by(average.weights, self.model, recalled["x"]) for average in (self.stable, self.plastic)
        )
        error = self.error.unweighted()  # which one is better does not depend on the weight of a label
        better = error(stable, recalled["y"], "none") < error(plastic, recalled["y"], "none")
        return torch.where(better[:, None], stable, plastic)

    def apply_gradients(self) -> None:
        """An optimiser step, after which each average moves with its probability."""
        super().apply_gradients()
        draws = torch.rand(2, generator=self.generator, device=self.device)
        self.stable.update(self.model, draws[0] < self.stable_rate)
        self.plastic.update(self.model, draws[1] < self.plastic_rate)

    def predicting_weights(self) -> dict[str, Tensor]:
        """The weights of the `average` option if it is set, else the stable average."""
        return super().predicting_weights() or self.stable.weights

    def on_growth(self, moved: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Extend both averages to the new weights."""
        super().on_growth(moved)
        for average in (self.stable, self.plastic):
            average.follow(self.model)

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on, including both averages."""
        return super().state_dict() | {"stable": self.stable.state_dict(), "plastic": self.plastic.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of a learner of the same class, model and memory size."""
        super().load_state_dict(state)
        self.stable.load_state_dict(state["stable"])
        self.plastic.load_state_dict(state["plastic"])

    def _tensors_to_restore(self) -> list[Tensor]:
        averages = (self.stable.weights, self.plastic.weights)
        names = [name for name, _ in self.model.named_buffers()]
        return super()._tensors_to_restore() + [
            average[name] for average in averages for name in names if name in average
        ]
