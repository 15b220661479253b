"""Elastic weight consolidation, online."""

from __future__ import annotations

import torch
from torch import Tensor

from parabolic.learners.anchor import AnchoredLearner
from parabolic.learners.boundary import checked_batches
from parabolic.learners.fisher import squared_gradients
from parabolic.learners.functional import predicting
from parabolic.learners.learner import TaskBatches
from parabolic.memory import Batch
from parabolic.options import option

__all__ = ["EWC"]


class EWC(AnchoredLearner):
    """Online elastic weight consolidation: hold each weight as firmly as past labels' probabilities depended on it.

    The penalty is `strength` · Σ F (θ − θ*)². At the end of a task, F ← `decay` · F + the task's empirical Fisher
    information: the mean over its examples of the squared gradient of −log p(label) or, if targets are numbers, of the
    loss. Examples that the model gets wrong have a large weight in it; `variant="reference"` reduces that weight.

    >>> learner = EWC(torch.nn.Linear(4, 3))
    >>> task = [(torch.randn(8, 4), torch.arange(8) % 3) for _ in range(5)]
    >>> learner.start_task(task)
    >>> for x, y in task:
    ...     loss = learner.observe(x, y, task=0)
    >>> learner.end_task(task)
    >>> bool((learner.importance > 0).all())
    True
    """

    name = "ewc"
    reference = (
        "Kirkpatrick et al., 2017: Overcoming catastrophic forgetting in neural networks; online: Schwarz et al., 2018"
    )

    lr: float = 0.03
    strength: float = 10.0
    decay: float = option(
        1.0, "γ, the share of earlier tasks' Fisher information that is kept after a task", at_least=0, at_most=1
    )
    chunk: int = option(
        256, "how many examples go through the model at once to measure the Fisher information", at_least=1
    )
    variant: str = option(
        "paper",
        "paper: the empirical Fisher information; reference (public code): each example is weighted by the model's "
        "probability of its label, which gives that label's term in the model's own Fisher information",
        among=("paper", "reference"),
    )

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """The loss of the new batch plus the penalty."""
        return super().loss(batch, recalled) + self.penalty()

    def end_task(self, batches: TaskBatches) -> None:
        """Add the task's Fisher information to that of the past, and make the current weights the anchor."""
        fisher = self.fisher(batches)
        self.importance.mul_(self.decay).add_(fisher)
        self.drop_anchor()

    def fisher(self, batches: TaskBatches) -> Tensor:
        """The empirical Fisher information of each weight, from per-example gradients, without augmentation.

        It is measured in evaluation mode: with batch statistics an example would have no gradient of its own, and the
        model to preserve is the one that predicts.
        """
        total, count, is_covered = torch.zeros_like(self.importance), 0, dict[int, bool]()
        with predicting(self.model):
            for x, y, _ in checked_batches(self, batches, self.chunk):
                for examples, labels in zip(x.split(self.chunk), y.split(self.chunk), strict=True):
                    total += self.weights.layout.join(
                        squared_gradients(self.model, self.inputs(examples), labels, self._fisher_loss, is_covered)
                    )
                    count += len(labels)
        return total / max(count, 1)

    def _fisher_loss(self, scores: Tensor, y: Tensor, reduction: str) -> Tensor:
        """The loss, scaled so that its squared gradient has the weight that the variant prescribes."""
        error = self.error.unweighted()  # the probability of a label does not depend on its weight
        if self.variant == "paper" or not error.of_classes:
            return error(scores, y, reduction)
        probability = error.competing(scores.detach(), y).softmax(-1).gather(-1, y[:, None])[:, 0]
        return (probability.sqrt() * error(scores, y, "none")).sum()
