"""Gradient episodic memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from parabolic.checks import invalid
from parabolic.learners.learner import TaskBatches
from parabolic.learners.programme import in_range, inner_products, nonnegative_shares
from parabolic.learners.projection import ProjectedLearner
from parabolic.memory import Batch, EqualShares, distinct, equal_shares
from parabolic.options import option

__all__ = ["GEM"]


class GEM(ProjectedLearner):
    """Gradient episodic memory: do not step against the gradient of any past task.

    Where ⟨g, gₖ⟩ < 0 for some past task k, the new batch's gradient g becomes g + Σ vₖ gₖ, where v solves the dual
    programme: minimise ½ |g + Σ vₖ gₖ|² over v ≥ `margin`. The memory has an equal share for each task, and gₖ is the
    gradient on those examples of task k that stay when the current task has its share.

    A task passed to `step` as a tensor must be the one that `start_task` began.

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
    _boundary = ""  # the task of each batch shows where one ends

    replay: int = option(
        0, "how many examples of each past task are recalled at a step (0: its whole share)", at_least=0
    )
    margin: float = option(0.5, "γ, the least share of each past gradient in a projected one", at_least=0, tune="0:1")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.memory, EqualShares):
            raise invalid("memory", type(self.memory), "a parabolic.memory.EqualShares", "or give its capacity")
        self.task = -1  # the current task
        self._since = 0  # how many examples had been offered when it began
        self._offered = Counter[int]()  # how many of each task in memory had been offered by then
        self._count_stored()

    @property
    def past(self) -> EqualShares:
        """The memory."""
        assert isinstance(self.memory, EqualShares)
        return self.memory

    def start_task(self, batches: TaskBatches) -> None:
        """Turn to the next task."""
        self._turn_to(self.task + 1)

    def step(self, x: Tensor, y: Tensor, task: int | Tensor | None = None) -> Tensor:
        """Learn from a batch that has been checked and is on the learner's device."""
        if task is not None and not isinstance(task, Tensor) and task != self.task:
            self._turn_to(task)
        return super().step(x, y, task)

    def phase(self) -> Hashable:
        """Whether the memory is empty, and how many examples of each past task are recalled from."""
        return len(self.past) == 0, *self.shares()

    def shares(self) -> list[tuple[int, int]]:
        """Each past task in memory, and how many of its examples stay when the current task has its share.

        That is known from its first batch on, so that all steps of a task have the same shape.
        """
        stored = self._stored(self._offered + Counter({self.task: self.past.capacity}))
        return [(task, share) for task, share in stored.items() if task != self.task]

    def recall(self) -> Batch | None:
        """The memory slots, sorted by task, and the task of each."""
        return dict(zip(("slot", "task"), self.past.by_task(), strict=True)) if self.shares() else None

    def constraints(self, recalled: Batch) -> Tensor:
        """The gradient of each past task's loss, one per row."""
        slots, tasks, gradients = recalled["slot"], recalled["task"], []
        for task, share in self.shares():
            if self.replay:
                size = min(self.replay, share)
                ranks = distinct(size, share, device=slots.device, generator=self.generator)
            else:
                ranks = torch.arange(share, device=slots.device)
            first = torch.searchsorted(tasks, torch.full_like(ranks[:1], task))
            examples = self.past.take(slots.index_select(0, first + ranks))
            gradients.append(self._past_gradient(self.augmented(examples["x"]), examples["y"]))
        return torch.stack(gradients)

    def project(self, vector: Tensor, against: Tensor) -> Tensor:
        """`vector` plus at least `margin` of each row of `against`: just enough to point against none of them."""
        original, wide = vector, torch.promote_types(vector.dtype, torch.float32)
        vector, against = vector.to(wide), against.to(wide)
        start = vector + self.margin * against.sum(0)
        rows, exponents = in_range(torch.cat([vector[None], start[None], against]))
        lengths = rows.norm(dim=1, keepdim=True)
        rows /= lengths.masked_fill(lengths == 0, 1)  # a gradient may be zero
        products, rounding = inner_products(rows), torch.finfo(wide).eps
        # A vector closer to the span of the others than this precision can resolve is taken to lie in it.
        shares = nonnegative_shares(products[2:, 2:], products[2:, 1], tolerance=1e3 * rounding).to(vector)
        projected = start + torch.ldexp((lengths[1] * shares) @ rows[2:], exponents[1])
        return torch.where((products[2:, 0] < -16 * rounding).any(), projected, vector).to(original)

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on, including the task."""
        return super().state_dict() | {"task": self.task}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of a learner of the same class, model and memory size."""
        super().load_state_dict(state)
        self.task = int(state["task"])
        self._count_stored()

    def _turn_to(self, task: int) -> None:
        """Make `task` the current task."""
        offered = self._offered + Counter({self.task: self.past.offered - self._since})
        # A task that has no slot left has no part in later shares: drop it, or every task would slow down all steps.
        self._offered = Counter({past: offered[past] for past in self._stored(offered)})
        self._since, self.task = self.past.offered, task

    def _stored(self, offered: Mapping[int, int]) -> dict[int, int]:
        """How many examples of each task are stored, if so many were offered; only those with any, by number."""
        tasks = sorted(offered)
        shares = equal_shares(self.past.capacity, [offered[task] for task in tasks])
        return {task: share for task, share in zip(tasks, shares, strict=True) if share}

    def _count_stored(self) -> None:
        """Count the stored examples of each task, so that the host knows them from now on without asking the device."""
        # Stored examples may stand in for those offered: a task's share does not grow without new examples.
        self._offered = Counter(self.past["task"].tolist() if self.past.fields else ())
        self._since = self.past.offered
