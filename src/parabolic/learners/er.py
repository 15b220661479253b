"""Experience replay."""

from __future__ import annotations

from torch import Tensor

from parabolic.learners.balance import BalancedLearner
from parabolic.learners.learner import join
from parabolic.memory import Batch

__all__ = ["ER"]


class ER(BalancedLearner):
    """Experience replay: learn the new batch and a recalled one together.

    >>> import torch
    >>> learner = ER(torch.nn.Linear(4, 3), memory=50)
    >>> for _ in range(3):
    ...     loss = learner.observe(torch.randn(8, 4), torch.arange(8) % 3)
    >>> len(learner.past)
    24
    """

    name = "er"
    reference = "Rolnick et al., 2019: Experience replay for continual learning"

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """The loss of the new batch and the recalled one, in one forward pass."""
        x, y = join(batch, recalled)
        scores = self.model(x)
        self.count(y, scores.shape[-1])
        return self.error(self.tilted(scores), y)
