"""Learning without forgetting."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from parabolic.checks import invalid
from parabolic.learners.boundary import check_started, checked_batches, labels_of
from parabolic.learners.functional import restrict_to
from parabolic.learners.gradients import trainable
from parabolic.learners.head import check_head, check_scoring, frozen_features, last_linear, widen
from parabolic.learners.learner import Learner, TaskBatches
from parabolic.learners.moving import copy_model
from parabolic.learners.optimizers import own_optimizer, parse_optimizer
from parabolic.memory import Batch
from parabolic.options import option
from parabolic.states import overwrite

__all__ = ["LwF"]


class LwF(Learner):
    """Learning without forgetting: on new examples, predict the old classes as the model did before the task.

    The loss is the cross-entropy over the classes seen so far, plus `alpha` times that between the old model's
    probabilities of the old classes and the current model's, both softened by `temperature`. Before a task, the last
    layer's weights for its new classes are warmed up on the task's data, with all others frozen.

    >>> learner = LwF(torch.nn.Linear(4, 3))
    >>> for task, labels in enumerate([[0, 1], [2]]):
    ...     batches = [(torch.randn(4, 4), torch.tensor((labels * 4)[:4])) for _ in range(5)]
    ...     learner.start_task(batches)
    ...     for x, y in batches:
    ...         loss = learner.observe(x, y, task=task)
    >>> learner.old.tolist()
    [True, True, False]
    """

    name = "lwf"
    reference = "Li and Hoiem, 2016: Learning without forgetting"
    needs_tasks = True
    needs_classes = True

    lr: float = 0.01
    alpha: float = option(3.0, "weight of the distillation loss on old classes", at_least=0, tune="0.1:10:log")
    temperature: float = option(2.0, "how much the probabilities are softened (1: not at all)", above=0)
    warmup: int = option(1, "passes over a task's batches to warm up its new classes", at_least=0)
    weight_decay: float = option(
        5e-4, "weight decay of an optimizer of torch.optim given by name, unless it sets its own", at_least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _, self.head = last_linear(self.model)
        self.teacher = copy_model(self.model).requires_grad_(False).eval()  # the model at the task's start
        self.seen, self.old = torch.zeros(2, self.head.out_features, dtype=torch.bool, device=self.device)
        self.tasks = 0  # how many have started

    def phase(self) -> Hashable:
        """Whether there are old classes: in the first task there are none."""
        return super().phase(), self.tasks > 1

    def start_task(self, batches: TaskBatches) -> None:
        """Warm up the new classes, and store the model as the teacher."""
        if self.warmup and isinstance(batches, Iterator):  # the look at the labels would leave nothing to warm up on
            expected = "batches that can be iterated over repeatedly"
            raise invalid("start_task", type(batches), expected, "pass a list of them, or set warmup=0")
        labels = labels_of(self, batches)
        check_head(self.head, self.classes)
        new = torch.zeros_like(self.seen).index_fill_(0, labels, True) & ~self.seen
        if self.tasks:
            for _ in range(self.warmup):
                self._warm_up(batches, new)
        self.old.copy_(self.seen)  # only now: a call that was interrupted may be repeated
        self.seen |= new
        self.tasks += 1
        self.teacher.load_state_dict(self.model.state_dict())

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """The loss over the classes seen, plus distillation over the old ones."""
        check_started(self.tasks)
        self.seen.index_fill_(0, batch["y"], True)  # in case start_task has not seen one
        scores = self.model(batch["x"])
        loss = self.error(restrict_to(self.seen, scores), batch["y"])
        if self.tasks == 1:  # no class is old
            return loss
        old_probabilities = restrict_to(self.old, self.teacher(batch["x"]) / self.temperature).softmax(-1)
        return loss + self.alpha * cross_entropy(restrict_to(self.old, scores / self.temperature), old_probabilities)

    def _warm_up(self, batches: TaskBatches, new: Tensor) -> None:
        """Plain gradient steps of the last layer on the new classes alone; only their rows have a gradient.

        All else is frozen, and so are the features, which are computed for many batches at once.
        """
        weights = trainable(self.head)
        rates = {weight: float(group["lr"]) for group in self.optim.param_groups for weight in group["params"]}
        for x, y, sizes in checked_batches(self, batches, size=512):
            is_new = new[y].cpu()  # this waits for the device, but only once for many batches
            counts = [count for part in is_new.split(sizes) if (count := int(part.sum()))]
            if not counts:
                continue
            # Augmented batch by batch, so that each takes the same random numbers as it would alone.
            inputs = torch.cat([self.augmented(part) for part in x[is_new].split(counts)])
            features = frozen_features(self.model, self.head, inputs)
            for part, labels in zip(features.split(counts), y[is_new].split(counts), strict=True):
                loss = self.error(restrict_to(new, self.head(part)), labels)
                with torch.no_grad():
                    for weight, slope in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                        weight.sub_(slope, alpha=rates.get(weight, self.lr))

    def on_growth(self, moved: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Extend the old model, and the masks of seen and old classes."""
        super().on_growth(moved)
        _, head = last_linear(self.teacher)
        extra = self.head.out_features - head.out_features
        widen(head, self.head.out_features, self.generator)
        self.seen, self.old = (pad(mask, (0, extra)) for mask in (self.seen, self.old))

    def _check_model(self, x: Tensor) -> None:
        check_scoring(self.model, self.head, self.inputs(x), shifted=self.error.of_classes)

    def _tensors_to_restore(self) -> list[Tensor]:
        return [*super()._tensors_to_restore(), self.seen]

    def _make_optimizer(self, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = super()._make_optimizer(weights)
        if isinstance(self.optimizer, str) and not own_optimizer(self.optimizer):
            _, arguments = parse_optimizer(self.optimizer)
            for group in optimizer.param_groups:
                group["weight_decay"] = arguments.get("weight_decay", self.weight_decay)
        return optimizer

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on, including the old model."""
        own_state = {"teacher": self.teacher.state_dict(), "seen": self.seen, "old": self.old, "tasks": self.tasks}
        return super().state_dict() | own_state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of a learner of the same class and model."""
        super().load_state_dict(state)
        self.teacher.load_state_dict(state["teacher"])
        overwrite({"seen": self.seen, "old": self.old}, state)
        self.tasks = int(state["tasks"])
