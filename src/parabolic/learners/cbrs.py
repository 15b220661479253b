"""Experience replay from a class-balanced memory."""

from __future__ import annotations

from torch import Tensor

from parabolic.checks import invalid
from parabolic.learners.learner import ReplayLearner
from parabolic.memory import Batch, ClassBalanced

__all__ = ["CBRS"]


class CBRS(ReplayLearner):
    """Experience replay from a class-balanced memory; the recalled loss weighs more the more classes have been seen.

    >>> import torch
    >>> learner = CBRS(torch.nn.Linear(4, 3), memory=12, replay=6)
    >>> for _ in range(9):  # two examples of class 0 for one of class 1
    ...     loss = learner.observe(torch.randn(9, 4), torch.arange(9) % 3 // 2)
    >>> learner.past["y"].bincount().tolist()
    [6, 6]
    """

    name = "cbrs"
    reference = "Chrysakis and Moens, 2020: Online continual learning from imbalanced data"
    policy = ClassBalanced
    needs_classes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.memory, ClassBalanced):
            raise invalid("memory", type(self.memory), "a number of examples or a ClassBalanced memory")

    @property
    def past(self) -> ClassBalanced:
        """The memory."""
        assert isinstance(self.memory, ClassBalanced)
        return self.memory

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """1/n of the new batch's loss plus 1 − 1/n of the recalled batch's, for n classes seen so far."""
        scores = self.model(batch["x"])
        seen = self.past.seen_by_class(scores.shape[-1], scores.device)
        share = 1 / seen.index_fill(0, batch["y"], 1).count_nonzero().to(scores.dtype)
        loss = share * self.error(scores, batch["y"])
        if recalled is None:
            return loss
        return loss + (1 - share) * self.error(self.model(recalled["x"]), recalled["y"])
