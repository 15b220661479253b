"""Experience replay."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from parabolic.checks import invalid
from parabolic.learners.balance import BalancedLearner
from parabolic.learners.criterion import counted_mean
from parabolic.learners.learner import join
from parabolic.memory import Batch
from parabolic.options import option

__all__ = ["ER"]


class ER(BalancedLearner):
    """Experience replay: learn the new batch and a recalled one together.

    >>> learner = ER(torch.nn.Linear(4, 3), memory=50)
    >>> for _ in range(3):
    ...     loss = learner.observe(torch.randn(8, 4), torch.arange(8) % 3)
    >>> len(learner.past)
    24
    """

    name = "er"
    reference = "Rolnick et al., 2019: Experience replay for continual learning"

    smoothing: float = option(0.0, "share of every label that is spread evenly over all classes", at_least=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.smoothing and not self.error.of_classes:
            raise invalid("smoothing", self.smoothing, "0 where targets are numbers", "it applies to classes only")

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """The loss of the new batch and the recalled one, in one forward pass."""
        x, y = join(batch, recalled)
        scores = self.model(x)
        self.count(y, scores.shape[-1])
        scores = self.tilted(scores)
        if not self.smoothing:
            return self.error(scores, y)
        labels = self.error.points(y, self.classes or scores.shape[-1], scores.dtype)
        labels = labels.lerp(torch.full_like(labels, 1 / labels.shape[-1]), self.smoothing)
        losses = self.error.at_points(scores, pad(labels, (0, scores.shape[-1] - labels.shape[-1])))
        return counted_mean(losses, self.error.counts(y, scores.dtype))
