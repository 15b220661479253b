"""Gradient episodic memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from parabolic.checks import invalid
from parabolic.learners.learner import TaskBatches
from parabolic.learners.programme import inner_products, nonnegative_shares
from parabolic.learners.projection import ProjectedLearner
from parabolic.memory import Batch, EqualShares, distinct, equal_shares
from parabolic.options import option

__all__ = ["GEM"]


class GEM(ProjectedLearner):
    """Gradient episodic memory: do not step against the gradient of any past task.

    Where ⟨g, gₖ⟩ < 0 for some past task k, the new batch's gradient g becomes g + Σ vₖ gₖ, v solving the dual
    programme: minimise ½ |g + Σ vₖ gₖ|² over v ≥ `margin`. Memory has an equal share for each task.

    A task given as a tensor is the one that `start_task` began.

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
    margin: float = option(0.5, "γ, the least share of each past gradient in a bent one", at_least=0, tune="0:1")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.memory, EqualShares):
            raise invalid("memory", type(self.memory), "a parabolic.memory.EqualShares", "or give its capacity")
        self.task = -1  # the one that is learned now
        self._since = 0  # how many examples had been offered when it began,
        self._offered = Counter[int]()  # and how many of each task
        self._count()

    @property
    def past(self) -> EqualShares:
        """The memory."""
        assert isinstance(self.memory, EqualShares)
        return self.memory

    def start_task(self, batches: TaskBatches) -> None:
        """Note that another task begins."""
        self._turn_to(self.task + 1)

    def step(self, x: Tensor, y: Tensor, task: int | Tensor | None = None) -> Tensor:
        """Learn from a batch that is known to be sound and on the learner's device."""
        if task is not None and not isinstance(task, Tensor) and task != self.task:
            self._turn_to(task)
        return super().step(x, y, task)

    def phase(self) -> Hashable:
        """Whether memory is still empty, and which part of it, in the order of tasks, each past task has."""
        return len(self.past) == 0, *self.parts()

    def parts(self) -> list[tuple[int, int]]:
        """Of each past task of which there is something: how many examples of earlier ones are kept, and of itself."""
        offered = self._offered + Counter({self.task: self.past.offered - self._since})
        tasks = sorted(offered)
        shares = equal_shares(self.past.capacity, [offered[task] for task in tasks])
        starts = accumulate(shares, initial=0)
        return [
            (start, share)
            for task, start, share in zip(tasks, starts, shares, strict=False)
            if share and task != self.task
        ]

    def recall(self) -> Batch | None:
        """The slots of memory in the order of tasks."""
        return {"slot": self.past.by_task()} if self.parts() else None

    def constraints(self, recalled: Batch) -> Tensor:
        """The gradient of each past task's loss, one a row."""
        gradients = []
        for start, share in self.parts():
            slots = recalled["slot"][start : start + share]
            if self.replay:
                size = min(self.replay, share)
                slots = slots.index_select(0, distinct(size, share, device=slots.device, generator=self.generator))
            kept = self.past.take(slots)
            gradients.append(self._past_gradient(self._inputs(kept["x"]), kept["y"]))
        return torch.stack(gradients)

    def project(self, vector: Tensor, against: Tensor) -> Tensor:
        """`vector` and at least `margin` of each row of `against`: no more than lets it point against none of them."""
        given, wide = vector, torch.promote_types(vector.dtype, torch.float32)
        vector, against = vector.to(wide), against.to(wide)
        least = vector + self.margin * against.sum(0)
        rows = torch.cat([vector[None], least[None], against])
        lengths = rows.norm(dim=1, keepdim=True)
        rows /= lengths.masked_fill(lengths == 0, 1)  # a gradient may be zero
        products, rounding = inner_products(rows), torch.finfo(wide).eps
        # What lies closer to the span of others than numbers of this precision can tell is taken to lie in it.
        shares = nonnegative_shares(products[2:, 2:], products[2:, 1], tolerance=1e3 * rounding).to(vector)
        bent = least + (lengths[1] * shares) @ rows[2:]
        return torch.where((products[2:, 0] < -16 * rounding).any(), bent, vector).to(given)

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, the task included."""
        return super().state_dict() | {"task": self.task}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of another learner of the same kind, model and memory size."""
        super().load_state_dict(state)
        self.task = int(state["task"])
        self._count()

    def _turn_to(self, task: int) -> None:
        """Another task is learned from now on."""
        self._offered = self._offered + Counter({self.task: self.past.offered - self._since})
        self._since, self.task = self.past.offered, task

    def _count(self) -> None:
        """Count how much there is of each task, for the host to know from now on without looking."""
        # What is kept of a task says as much as what was offered: its share will not grow without new examples.
        self._offered = Counter(self.past["task"].tolist() if self.past.fields else ())
        self._since = self.past.offered
