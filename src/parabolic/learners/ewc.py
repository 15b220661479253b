"""Elastic weight consolidation, online."""

from __future__ import annotations

import torch
from torch import Tensor

from parabolic.learners.anchor import AnchoredLearner
from parabolic.learners.boundary import checked
from parabolic.learners.fisher import squared_gradients
from parabolic.learners.functional import predicting
from parabolic.learners.learner import TaskBatches
from parabolic.memory import Batch
from parabolic.options import option

__all__ = ["EWC"]


class EWC(AnchoredLearner):
    """Online elastic weight consolidation: a weight is held as hard as past labels' probabilities depended on it.

    The penalty is `strength` · Σ F (θ − θ*)². At a task's end F ← `decay` · F + the task's empirical Fisher
    information: the mean over its examples of the squared gradient of −log p(label) or, of numbers, of the loss. An
    example that the model gets wrong counts much in it; `variant="reference"` lets it count less.

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
        1.0, "γ, what is left of earlier tasks' Fisher information at a task's end", at_least=0, at_most=1
    )
    chunk: int = option(
        256, "how many examples go through the model at once to measure the Fisher information", at_least=1
    )
    variant: str = option(
        "paper",
        "paper: the empirical Fisher information; reference (public code): there each example counts as much as its "
        "label is probable, which is that label's part in the model's own Fisher information",
        among=("paper", "reference"),
    )

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """The loss of the new batch and the penalty."""
        return super().loss(batch, recalled) + self.penalty()

    def end_task(self, batches: TaskBatches) -> None:
        """Add the task's Fisher information to that of the past, and hold the weights where they are."""
        fisher = self.fisher(batches)
        self.importance.mul_(self.decay).add_(fisher)
        self.drop_anchor()

    def fisher(self, batches: TaskBatches) -> Tensor:
        """The empirical Fisher information of each weight, from the gradients of single examples, without augmentation.

        The model is in its evaluation mode for it: with statistics of a batch an example would have no gradient of
        its own, and what is held is the model as it predicts.
        """
        total, count, known = torch.zeros_like(self.importance), 0, dict[int, bool]()
        with predicting(self.model):
            for x, y, _ in checked(self, batches, self.chunk):
                for some, labels in zip(x.split(self.chunk), y.split(self.chunk), strict=True):
                    total += self.weights.layout.join(
                        squared_gradients(self.model, self.inputs(some), labels, self._surprise, known)
                    )
                    count += len(labels)
        return total / max(count, 1)

    def _surprise(self, scores: Tensor, y: Tensor, reduction: str) -> Tensor:
        """The loss, times what makes the square of its gradient count as the variant says."""
        error = self.error.unweighted()  # how probable a label was does not depend on how much it counts
        if self.variant == "paper" or not error.of_classes:
            return error(scores, y, reduction)
        probable = scores.detach().softmax(-1).gather(-1, y[:, None])[:, 0]
        return (probable.sqrt() * error(scores, y, "none")).sum()
