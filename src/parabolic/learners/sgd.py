"""Plain stochastic gradient descent: the learner that forgets."""

from __future__ import annotations

from torch import Tensor

from parabolic.learners.learner import Learner
from parabolic.memory import Batch

__all__ = ["SGD"]


class SGD(Learner):
    """Learn each batch as it comes, and store nothing: the baseline for the others.

    >>> import torch
    >>> learner = SGD(torch.nn.Linear(4, 3), lr=0.1)
    >>> loss = learner.observe(torch.randn(8, 4), torch.arange(8) % 3)
    >>> learner.predict(torch.randn(2, 4)).shape
    torch.Size([2])
    """

    name = "sgd"
    reference = "Robbins and Monro, 1951: A stochastic approximation method"

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """The loss of the new batch."""
        return self.error(self.model(batch["x"]), batch["y"])
