"""Variance-reduced meta-continual learning."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from parabolic.learners.ahead import in_types, step_ahead
from parabolic.learners.boundary import check_started, labels_of
from parabolic.learners.branches import side_by_side
from parabolic.learners.criterion import counted_mean
from parabolic.learners.functional import restrict_to, scores_by, types_of
from parabolic.learners.gradients import Weights, named_trainable
from parabolic.learners.layout import Layout
from parabolic.learners.learner import ReplayLearner, TaskBatches, join
from parabolic.memory import Batch
from parabolic.options import option
from parabolic.states import overwrite, refill

__all__ = ["VRMCL"]


class VRMCL(ReplayLearner):
    """Minimise the loss of the new batch and a recalled one after some look-ahead steps on the new batch alone.

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
    needs_classes = True
    _vectors = ("previous", "rates", "velocity")

    lr: float = 0.35
    momentum: float = option(
        0.15, "share of the previous step's momentum that is kept", at_least=0, at_most=1, tune="0:0.9"
    )
    rate: float = option(0.1, "initial rate of the look-ahead steps", above=0, tune="0.01:1:log")
    rate_lr: float = option(0.25, "learning rate of those rates", at_least=0)
    clip: float = option(1.0, "limit on each entry of a look-ahead gradient, and on the norm of the others", above=0)
    chunk: int = option(8, "most examples of a look-ahead step: a batch is split evenly", at_least=1)
    variant: str = option(
        "paper",
        "paper: plain cross-entropy after the look-ahead steps; reference (the published code): classes of earlier "
        "tasks do not compete for new examples, nor unseen ones for recalled examples, which count half",
        among=("paper", "reference"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lay_out(named_trainable(self.model))
        self.previous = self.weights.vector().detach().requires_grad_()
        self.rates = torch.full_like(self.previous, self.rate).requires_grad_()
        self.velocity = torch.zeros_like(self.previous)
        self._start: Tensor | None = None  # the weights, from `loss` to `descend`, within a step
        self.tasks = 0  # how many have started
        self.descents = 0  # how many there have been: after the first there are previous weights
        self.current, self.seen = torch.zeros(2, self.classes or 0, dtype=torch.bool, device=self.device)

    def phase(self) -> Hashable:
        """Whether this is the first step, which has no previous weights to compare with."""
        return super().phase(), self.descents == 0

    def start_task(self, batches: TaskBatches) -> None:
        """Note the classes of the task: the look-ahead steps distinguish only these."""
        labels = labels_of(self, batches)
        self._reserve(self.classes or 0)  # known since the labels were checked
        self.tasks += 1
        self.current.zero_().index_fill_(0, labels, True)
        self.seen |= self.current

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """The loss after the look-ahead steps, with a term that only adds its gradient at the previous weights."""
        check_started(self.tasks)
        for classes in (self.current, self.seen):
            classes.index_fill_(0, batch["y"], True)  # in case start_task has not seen one
        with torch.no_grad():
            self.model(join(batch, recalled)[0])  # for batch-norm statistics, which track the model's own weights
        weights = self._start = self.weights.vector().detach().requires_grad_()
        if self.descents == 0:
            return self.ahead(weights, self.rates, batch, recalled)
        now, before = side_by_side(
            lambda: self.ahead(weights, self.rates, batch, recalled),
            lambda: self.ahead(self.previous, self.rates.detach(), batch, recalled),
            self.device,
        )
        # Its value cancels: only its gradient with respect to the previous weights remains.
        return now + (before - before.detach())

    def ahead(self, weights: Tensor, rates: Tensor, batch: Batch, recalled: Batch | None) -> Tensor:
        """The mean of the losses after each look-ahead step; each step is on a part of the new batch."""
        losses = []
        sizes = [sum(layout.sizes) for layout in self._by_type.values()]
        start = in_types(weights, sizes, list(self._by_type))
        # Parts of even size: a last one of a single example would have no batch-norm statistics.
        parts = -(-len(batch["y"]) // self.chunk)
        for x, y in zip(batch["x"].tensor_split(parts), batch["y"].tensor_split(parts), strict=True):
            error = self.error(restrict_to(self.current, self._scores(start, x)), y)
            # In this thread: the order in which gradients are summed later depends on when, and in which thread, each
            # operation was recorded, and must be the same every time.
            with torch.autograd.set_multithreading_enabled(False):
                descents = torch.autograd.grad(-error, start, create_graph=True, materialize_grads=True)
            weights, rates, start, reached = step_ahead(weights, rates, descents, self.clip)
            losses.append(self._query(reached, batch, recalled))
        return torch.stack(losses).mean()

    def _query(self, weights: tuple[Tensor, ...], batch: Batch, recalled: Batch | None) -> Tensor:
        """The loss of the new batch and the recalled one with the weights reached."""
        x, y = join(batch, recalled)
        scores, size = self._scores(weights, x), len(batch["y"])
        if self.variant == "paper":
            return self.error(scores, y)
        fresh = self.error(restrict_to(self.current | ~self.seen, scores[:size]), y[:size], reduction="sum")
        past = self.error(restrict_to(self.seen, scores[size:]), y[size:], reduction="sum")
        return counted_mean(fresh + past / 2, self.error.counts(y, scores.dtype))

    def descend(self, loss: Tensor) -> None:
        """A step along m ← g + momentum · (m − g at the previous weights); the rates descend their own gradient."""
        assert self._start is not None
        start, self._start = self._start, None
        gradients = torch.autograd.grad(loss, [start, self.rates, self.previous], materialize_grads=True)
        of_weights, of_rates, of_previous = (
            (gradient, (self.clip / (gradient.norm() + 1e-6)).clamp(max=1)) for gradient in gradients
        )
        with torch.no_grad():
            self.velocity.addcmul_(*of_previous, value=-1).mul_(self.momentum).addcmul_(*of_weights)
            self.rates.addcmul_(*of_rates, value=-self.rate_lr)
            self.previous.copy_(start)
        self.descents += 1
        self.weights.set_gradient(self.velocity.clone())  # a copy, as an optimiser may change a gradient in place
        self.apply_gradients()

    def grow(self, classes: int) -> None:
        """Make room for labels below `classes`, also in the masks of current and seen classes."""
        super().grow(classes)
        self._reserve(self.classes or 0)

    def on_growth(self, moved: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Extend the vectors of all weights."""
        old_layout = self.weights.layout
        super().on_growth(moved)
        self._lay_out(self.weights.of(self.model).named)
        new_rows = {
            "previous": [weight.detach() for weight in self.weights],
            "rates": [torch.full_like(weight, self.rate) for weight in self.weights],
            "velocity": [torch.zeros_like(weight) for weight in self.weights],
        }
        for name, tensors in new_rows.items():
            grown = self.weights.layout.grown(getattr(self, name).detach(), old_layout, tensors)
            setattr(self, name, grown.requires_grad_(name != "velocity"))

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on, including rates, previous weights, momentum and classes."""
        vectors = {name: self.weights.layout.named(getattr(self, name).detach()) for name in self._vectors}
        return super().state_dict() | vectors | {"current": self.current, "seen": self.seen, "tasks": self.tasks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of a learner of the same class, model and memory size."""
        super().load_state_dict(state)
        for name in self._vectors:
            overwrite(self.weights.layout.named(getattr(self, name).detach()), state.get(name))
        self._reserve(len(state["seen"]))
        for name in ("current", "seen"):
            refill(getattr(self, name), state[name])
        self.tasks, self.descents = int(state["tasks"]), self.steps * self.repeats

    def _tensors_to_restore(self) -> list[Tensor]:
        return [*super()._tensors_to_restore(), self.current, self.seen]

    def _lay_out(self, named: Mapping[str, nn.Parameter]) -> None:
        """Lay out the weights in one vector: those that the model uses in the same type are adjacent."""
        types = dict(zip(named, types_of(self.model, named.values()), strict=True))
        self.weights = Weights({name: named[name] for name in sorted(named, key=lambda name: str(types[name]))})
        groups = itertools.groupby(self.weights.named, types.__getitem__)
        self._by_type = {dtype: Layout({name: named[name] for name in names}) for dtype, names in groups}

    def _reserve(self, classes: int) -> None:
        """Make room in the masks of current and seen classes."""
        if classes > len(self.seen):
            padding = (0, classes - len(self.seen))
            self.current, self.seen = pad(self.current, padding), pad(self.seen, padding)

    def _scores(self, weights: tuple[Tensor, ...], x: Tensor) -> Tensor:
        """The model's scores with weights given as one vector per type."""
        cuts = (layout.cut(vector) for layout, vector in zip(self._by_type.values(), weights, strict=True))
        return scores_by(dict(zip(self.weights.named, itertools.chain(*cuts), strict=True)), self.model, x)
