"""Synaptic intelligence."""

from __future__ import annotations

import torch
from torch import Tensor

from parabolic.learners.anchor import AnchoredLearner
from parabolic.learners.learner import TaskBatches
from parabolic.options import option

__all__ = ["SI"]


class SI(AnchoredLearner):
    """Synaptic intelligence: hold each weight as firmly as its path through past tasks lowered their losses.

    During a task, ω = −∫ g · dθ is accumulated for each weight, where g is the gradient of the loss alone and dθ the
    optimiser's update. At the end of the task the importance grows by ω / ((θ − θ*)² + damping). As in the authors'
    code, importance is never negative: a negative one would reward moving away without limit.

    >>> learner = SI(torch.nn.Linear(4, 3))
    >>> task = [(torch.randn(8, 4), torch.arange(8) % 3) for _ in range(5)]
    >>> learner.start_task(task)
    >>> for x, y in task:
    ...     loss = learner.observe(x, y, task=0)
    >>> learner.end_task(task)
    >>> bool((learner.importance > 0).any())
    True
    """

    name = "si"
    reference = "Zenke, Poole and Ganguli, 2017: Continual learning through synaptic intelligence"
    _vectors = ("anchor", "importance", "path")

    lr: float = 0.03
    strength: float = 0.5
    damping: float = option(1.0, "ξ, which bounds the importance of a weight that hardly moved", above=0)
    variant: str = option(
        "paper",
        "what is accumulated for a weight. paper: the path integral of the loss's gradient; reference (the code "
        "published with PCL): the sum of lr times the squared gradient of loss and penalty, as the optimizer gets it",
        among=("paper", "reference"),
    )
    clip: float | None = option(1.0, "limit on the size of each entry of a gradient (none: no limit)", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path = torch.zeros_like(self.importance)  # ω

    def descend(self, loss: Tensor) -> None:
        """A step down loss plus penalty, and its share of the path integral."""
        loss_gradient = self.weights.gradient(loss)
        gradient = loss_gradient + self.weights.gradient(self.penalty())
        if self.clip is not None:
            gradient = gradient.clamp(-self.clip, self.clip)
        old_weights = self.weights.vector().detach()
        self.weights.set_gradient(gradient)
        self.apply_gradients()
        if self.variant == "reference":
            applied = self.weights.layout.join(weight.grad for weight in self.weights if weight.grad is not None)
            self.path += self.optim.param_groups[0]["lr"] * applied.to(self.path).square()
        else:
            self.path -= loss_gradient.to(self.path) * (self.weights.vector().detach() - old_weights)

    def end_task(self, batches: TaskBatches) -> None:
        """Turn the path integral into importance, and start another from here."""
        self.importance.add_(self.path / (self._displacement().detach() ** 2 + self.damping)).clamp_(min=0)
        self.path.zero_()
        self.drop_anchor()
