"""Dark experience replay, and its variant that replays labels too."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from parabolic.learners.learner import ReplayLearner
from parabolic.memory import Batch
from parabolic.options import option

__all__ = ["DER", "DERpp"]

REFERENCE = "Buzzega et al., 2020: Dark experience for general continual learning"


class DER(ReplayLearner):
    """Dark experience replay: answer recalled examples as the model did when they were stored.

    >>> import torch
    >>> learner = DER(torch.nn.Linear(4, 3), memory=50)
    >>> for _ in range(3):
    ...     loss = learner.observe(torch.randn(8, 4), torch.arange(8) % 3)
    >>> learner.past["logits"].shape
    torch.Size([24, 3])
    """

    name = "der"
    reference = REFERENCE
    keeps = ("x", "y", "logits")

    lr: float = 0.03
    alpha: float = option(0.3, "weight of the distance from the stored logits", at_least=0, tune="0.03:10:log")

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """Cross-entropy of the new batch, and the squared distance of recalled examples from their stored logits."""
        scores = self.model(batch["x"])
        batch["logits"] = scores.detach()
        loss = cross_entropy(scores, batch["y"])
        if recalled is None:
            return loss
        return loss + self.alpha * mse_loss(self.model(recalled["x"]), recalled["logits"])


class DERpp(DER):
    """Dark experience replay++: DER, and the labels of a second, independent recalled batch.

    >>> import torch
    >>> learner = DERpp(torch.nn.Linear(4, 3), memory=50)
    >>> for _ in range(3):
    ...     loss = learner.observe(torch.randn(8, 4), torch.arange(8) % 3)
    >>> learner.past.fields
    ('x', 'y', 'logits')
    """

    name = "derpp"
    reference = REFERENCE

    alpha: float = 0.1
    beta: float = option(
        0.5, "weight of the cross-entropy of the second recalled batch", at_least=0, tune="0.03:10:log"
    )

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """DER's loss, and the cross-entropy of another draw from memory."""
        loss = super().loss(batch, recalled)
        again = self.recall()
        if again is None:
            return loss
        return loss + self.beta * cross_entropy(self.model(again["x"]), again["y"])
