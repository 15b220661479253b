"""Variance-reduced meta-continual learning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from parabolic.checks import Description, invalid
from parabolic.learners.functional import only, scores_by
from parabolic.learners.gradients import flatten, gradient, set_gradient
from parabolic.learners.learner import Batches, ReplayLearner, join
from parabolic.memory import Batch
from parabolic.options import option

__all__ = ["VRMCL"]


class VRMCL(ReplayLearner):
    """Descend the loss that the new batch and a recalled one will have after some steps on the new batch alone.

    The gradient is taken through those steps, whose rates (one for each weight) are learned too; a momentum that
    compares it with the same gradient at the previous weights reduces its variance.

    >>> learner = VRMCL(torch.nn.Linear(4, 3), memory=50)
    >>> batches = [(torch.randn(8, 4), torch.arange(8) % 3) for _ in range(3)]
    >>> learner.start_task(batches)
    >>> for x, y in batches:
    ...     loss = learner.observe(x, y, task=0)
    >>> learner.rates.shape  # one for each weight
    torch.Size([15])
    """

    name = "vrmcl"
    reference = "Wu et al., 2024: Meta continual learning revisited: implicitly enhancing online Hessian approximation"
    needs_tasks = True
    _kept = ("previous", "rates", "velocity", "current", "seen")

    lr: float = 0.35
    momentum: float = option(0.15, "share of the previous step's momentum that is kept", at_least=0, at_most=1)
    rate: float = option(0.1, "rate of the steps ahead, at the start", above=0)
    rate_lr: float = option(0.25, "learning rate of those rates", at_least=0)
    clip: float = option(1.0, "limit of each entry of a gradient ahead, and of the norm of those descended", above=0)
    chunk: int = option(8, "examples of a step ahead", at_least=1)
    variant: str = option(
        "paper",
        "paper: plain cross-entropy after the steps ahead; reference (the published code): classes of earlier tasks do "
        "not compete for new examples, nor unseen ones for recalled examples, which count half",
        among=("paper", "reference"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weights = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        self.previous = flatten(self.weights.values()).detach().requires_grad_()
        self.rates = torch.full_like(self.previous, self.rate).requires_grad_()
        self.velocity = torch.zeros_like(self.previous)
        self._reserve(0)  # until a task tells

    def start_task(self, batches: Batches) -> None:
        """Note which classes the task has: the steps ahead tell only these apart."""
        labels = torch.cat([self._checked(x, y)[1] for x, y in batches])
        if not len(self.seen):
            assert self.classes is not None  # asked of the model with the first batch
            self._reserve(self.classes)
        self.current.zero_().index_fill_(0, labels, True)
        self.seen |= self.current

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """The loss after the steps ahead; its gradient at the previous weights comes along."""
        if not len(self.seen):
            raise invalid("start_task", Description("a batch before any task"), "a call before the task's first batch")
        for classes in (self.current, self.seen):
            classes.index_fill_(0, batch["y"], True)  # should start_task not have told of one
        with torch.no_grad():
            self.model(join(batch, recalled)[0])  # for batch-norm statistics, which follow the model's own weights
        now = self.ahead(dict(self.weights), self.rates, batch, recalled)
        if self.steps == 0:
            return now
        before = self.ahead(self._named(self.previous), self.rates.detach(), batch, recalled)
        # Its value cancels: what is left of it is the gradient with respect to the previous weights.
        return now + (before - before.detach())

    def ahead(self, weights: dict[str, Tensor], rates: Tensor, batch: Batch, recalled: Batch | None) -> Tensor:
        """The mean of the losses that follow each step ahead, taken on a part of the new batch."""
        losses, rate = [], self._named(rates)
        # Parts of even size: a last one of a single example would have no batch-norm statistics.
        parts = -(-len(batch["y"]) // self.chunk)
        for x, y in zip(batch["x"].tensor_split(parts), batch["y"].tensor_split(parts), strict=True):
            error = cross_entropy(only(self.current, scores_by(weights, self.model, x)), y)
            slopes = torch.autograd.grad(error, list(weights.values()), create_graph=True, materialize_grads=True)
            weights = {
                name: weight - rate[name] * slope.clamp(-self.clip, self.clip)
                for (name, weight), slope in zip(weights.items(), slopes, strict=True)
            }
            losses.append(self._query(weights, batch, recalled))
        return torch.stack(losses).mean()

    def _query(self, weights: dict[str, Tensor], batch: Batch, recalled: Batch | None) -> Tensor:
        """The loss of the new batch and the recalled one by the weights that were reached."""
        x, y = join(batch, recalled)
        scores, new = scores_by(weights, self.model, x), len(batch["y"])
        if self.variant == "paper":
            return cross_entropy(scores, y)
        fresh = cross_entropy(only(self.current | ~self.seen, scores[:new]), y[:new], reduction="sum")
        past = cross_entropy(only(self.seen, scores[new:]), y[new:], reduction="sum")
        return (fresh + past / 2) / len(y)

    def descend(self, loss: Tensor) -> None:
        """Descend m ← g + momentum · (m − g at the previous weights); the rates descend their own gradient."""
        weights = list(self.weights.values())
        gradients = gradient(loss, [*weights, self.rates, self.previous]).chunk(3)
        now, of_rates, before = (each * (self.clip / (each.norm() + 1e-6)).clamp(max=1) for each in gradients)
        with torch.no_grad():
            self.velocity.sub_(before).mul_(self.momentum).add_(now)
            self.rates.sub_(self.rate_lr * of_rates)
            self.previous.copy_(flatten(weights))
        set_gradient(weights, self.velocity.clone())  # a copy, as an optimiser may change a gradient in place
        self.apply_gradients()

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on: rates, previous weights, momentum and classes included."""
        return super().state_dict() | {name: getattr(self, name).detach() for name in self._kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of another learner of the same kind, model and memory size."""
        super().load_state_dict(state)
        if len(self.seen) != len(state["seen"]):
            self._reserve(len(state["seen"]))
        for name in self._kept:
            getattr(self, name).detach().copy_(state[name])

    def _reserve(self, classes: int) -> None:
        """Make room to note which classes are the task's, and which were seen."""
        self.current, self.seen = torch.zeros(2, classes, dtype=torch.bool, device=self.device)

    def _named(self, vector: Tensor) -> dict[str, Tensor]:
        """A vector with an entry for each weight, in the names and shapes of the weights."""
        parts = vector.split([weight.numel() for weight in self.weights.values()])
        return {name: part.view_as(self.weights[name]) for name, part in zip(self.weights, parts, strict=True)}
