"""Averaged gradient episodic memory."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from parabolic.learners.boundary import checked_batches
from parabolic.learners.learner import TaskBatches
from parabolic.learners.programme import in_range
from parabolic.learners.projection import ProjectedLearner
from parabolic.memory import Batch

__all__ = ["AGEM"]


class AGEM(ProjectedLearner):
    """Averaged gradient episodic memory: do not step against the gradient of a batch recalled from past tasks.

    Where ⟨g, r⟩ < 0, the new batch's gradient g becomes g − (⟨g, r⟩ / ⟨r, r⟩) r, where r is the recalled batch's
    gradient: the nearest vector that, to first order, does not increase the recalled loss. The memory is a reservoir
    over completed tasks.

    >>> learner = AGEM(torch.nn.Linear(4, 3), memory=50)
    >>> for task in range(2):
    ...     batches = [(torch.randn(8, 4), torch.arange(8) % 3) for _ in range(4)]
    ...     learner.start_task(batches)
    ...     for x, y in batches:
    ...         loss = learner.observe(x, y, task=task)
    ...     learner.end_task(batches)
    >>> len(learner.past), learner.past.offered
    (50, 64)
    """

    name = "agem"
    reference = "Chaudhry et al., 2019: Efficient lifelong learning with A-GEM"

    def constraints(self, recalled: Batch) -> Tensor:
        """The gradient of the recalled batch's loss."""
        return self._past_gradient(recalled["x"], recalled["y"])

    def project(self, vector: Tensor, against: Tensor) -> Tensor:
        """The vector nearest to `vector` whose inner product with `against` is not negative."""
        (scaled, exponent), (against, _) = in_range(vector), in_range(against)
        overlap = torch.dot(scaled, against).clamp(max=0)
        size = torch.dot(against, against).clamp(min=torch.finfo(against.dtype).tiny)  # a gradient may be zero
        return (vector - torch.ldexp((overlap / size)[None], exponent) * against).to(vector)

    def remember(self, raw: Batch, batch: Batch) -> None:
        """Store nothing yet: only completed tasks are recalled."""

    def end_task(self, batches: TaskBatches) -> None:
        """Offer the task's examples to the memory: all of them or, if that fails, none."""
        memory, self.memory = self.past, copy.deepcopy(self.past)
        try:
            for x, y, _ in checked_batches(self, batches):
                super().remember({"x": x, "y": y}, {})
            memory.load_state_dict(self.past.state_dict())
        finally:
            self.memory = memory
