"""Synaptic intelligence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from parabolic.learners.anchor import AnchoredLearner
from parabolic.learners.gradients import flatten, gradient, refit, set_gradient
from parabolic.learners.learner import Batches
from parabolic.options import option
from parabolic.states import overwrite

__all__ = ["SI"]


class SI(AnchoredLearner):
    """Synaptic intelligence: a weight is held as hard as its path through past tasks lowered their losses.

    Along the path of a task ω = −∫ g · dθ adds up, weight by weight, g being the gradient of the loss alone
    and dθ what the optimiser did. At the task's end the importance grows by ω / ((θ − θ*)² + damping). As in the
    authors' code an importance is never negative: a negative one would reward moving away without end.

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

    lr: float = 0.03
    strength: float = 0.5
    damping: float = option(1.0, "ξ, which bounds the importance of a weight that hardly moved", above=0)
    clip: float | None = option(1.0, "the largest entry of a gradient, in size (none: no limit)", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path = torch.zeros_like(self.anchor)  # ω

    def descend(self, loss: Tensor) -> None:
        """A step down the loss and the penalty, and its share of the path integral."""
        own = gradient(loss, self.weights)
        whole = own + gradient(self.penalty(), self.weights)
        set_gradient(self.weights, whole if self.clip is None else whole.clamp(-self.clip, self.clip))
        before = flatten(self.weights).detach()
        self.apply_gradients()
        self.path -= own * (flatten(self.weights).detach() - before)

    def end_task(self, batches: Batches) -> None:
        """Turn the path integral into importance, and begin another from here."""
        moved = flatten(self.weights).detach() - self.anchor
        self.importance.add_(self.path / (moved**2 + self.damping)).clamp_(min=0)
        self.path.zero_()
        self.drop_anchor()

    def on_growth(self, moved: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Let the path integral follow too."""
        before = self.weights
        super().on_growth(moved)
        self.path = refit(self.path, before, map(torch.zeros_like, self.weights))

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, the path integral included."""
        return super().state_dict() | {"path": self.path}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of another learner of the same kind and model."""
        super().load_state_dict(state)
        overwrite({"path": self.path}, state)
