"""Gradient episodic memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from parabolic.learners.projection import ProjectedLearner
from parabolic.memory import Batch, EqualShares, distinct
from parabolic.options import option
from parabolic.plugins import require

__all__ = ["GEM"]


class GEM(ProjectedLearner):
    """Gradient episodic memory: do not step against the gradient of any past task.

    Where ⟨g, gₖ⟩ < 0 for some past task k, the new batch's gradient g becomes g + Σ vₖ gₖ, v solving the dual
    programme: minimise ½ |g + Σ vₖ gₖ|² over v ≥ `margin`. Memory has an equal share for each task.

    How many examples there are of each task, and the programme, are known to the host alone: each step waits for the
    device, and is no CUDA graph.

    >>> learner = GEM(torch.nn.Linear(4, 3), memory=50)
    >>> for task in range(2):
    ...     for _ in range(4):
    ...         loss = learner.observe(torch.randn(8, 4), torch.arange(8) % 3, task=task)
    >>> learner.past["task"].bincount()
    tensor([25, 25])
    """

    name = "gem"
    reference = "Lopez-Paz and Ranzato, 2017: Gradient episodic memory for continual learning"
    policy = EqualShares
    keeps = ("x", "y", "task")

    replay: int = option(
        0, "how many examples of each past task are recalled at a step (0: all that are kept)", at_least=0
    )
    margin: float = option(0.5, "γ, the least share of each past gradient in a bent one", at_least=0)

    def __post_init__(self) -> None:
        quadprog = require("quadprog", "gem", "gem", "quadprog, which solves its quadratic programme")
        self._solve = quadprog.solve_qp
        super().__post_init__()

    def recall(self) -> Batch | None:
        """All that is kept; which of it is past is known once the batch is."""
        return {name: self.past[name] for name in self.past.fields} or None

    def constraints(self, batch: Batch, recalled: Batch) -> Tensor | None:
        """The gradient of each past task's loss, one a row."""
        gradients = []
        for task in sorted({*recalled["task"].tolist()} - {int(batch["task"][0])}):
            rows = (recalled["task"] == task).nonzero().flatten()
            if self.replay:
                size = min(self.replay, len(rows))
                rows = rows[distinct(size, len(rows), device=rows.device, generator=self.generator)]
            gradients.append(self._past_gradient(self._inputs(recalled["x"][rows]), recalled["y"][rows]))
        return torch.stack(gradients) if gradients else None

    def project(self, vector: Tensor, against: Tensor) -> Tensor:
        """`vector` and at least `margin` of each row of `against`: no more than lets it point against none of them."""
        # In lengths of the vectors themselves, as the solver's tolerances are absolute.
        length, lengths = vector.norm(), against.norm(dim=1).clamp(min=torch.finfo(vector.dtype).tiny)
        rows = against / lengths[:, None]
        overlap, gram, least = (
            each.double().cpu().numpy()
            for each in (rows @ vector / length, rows @ rows.T, self.margin * lengths / length)
        )
        if not (overlap < 0).any():
            return vector
        # Rows may depend on each other; the solver wants a matrix that is safely positive definite.
        ridge = 1e3 * torch.finfo(vector.dtype).eps
        share = self._solve(gram + ridge * np.eye(len(gram)), -overlap, np.eye(len(gram)), least)[0]
        bent: Tensor = vector + length * torch.from_numpy(share).to(vector) @ rows
        return bent
