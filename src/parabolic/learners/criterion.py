"""What is minimised: how far scores are from their targets, and what targets are, classes or numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from parabolic.checks import Description, check_finite, check_name, check_number, invalid
from parabolic.learners.scale import Scale
from parabolic.pde.bridges import on_simplex

__all__ = [
    "CRITERIA", "MSE", "Classes", "Criterion", "CrossEntropy", "Huber", "Numbers", "counted_mean", "find_criterion",
]  # fmt: skip

Loss = Callable[[Tensor, Tensor], Tensor]
"""From scores and targets to a loss for each example, as losses of torch are with reduction="none"."""


class Criterion(ABC):
    """A loss that is never negative, and all that depends on what its targets are.

    Labels come as the stream has them. Bridges between labels run through points of a space, the points at their ends
    being the labels themselves.
    """

    of_classes: ClassVar[bool]

    @abstractmethod
    def __call__(self, scores: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        """The loss of scores by labels: its mean, its sum, or one number an example ("none")."""

    @abstractmethod
    def at_points(self, scores: Tensor, points: Tensor) -> Tensor:
        """The loss of each example, where the target is a point."""

    @abstractmethod
    def points(self, y: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
        """Labels as points, `[n, outputs]`."""

    def counts(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """How much each label counts: a mean over them is a sum of losses divided by the sum of these."""
        return torch.ones(len(y), dtype=dtype, device=y.device)

    def unweighted(self) -> Criterion:
        """The same criterion, every label counting alike."""
        return self

    def kept(self, scores: Tensor) -> Tensor:
        """Scores as they can be kept for later, when the network may answer in other units; see `recalled`."""
        return scores

    def recalled(self, kept: Tensor) -> Tensor:
        """Scores that were kept, in the network's units of now."""
        return kept

    @abstractmethod
    def fold(self, path: Tensor) -> Tensor:
        """Points that noise has moved, brought back to where targets can be."""

    @abstractmethod
    def answer(self, scores: Tensor) -> Tensor:
        """What scores say, as labels."""

    @abstractmethod
    def check(self, y: Tensor, size: int, outputs: int, dtype: torch.dtype) -> Tensor:
        """The labels of `size` examples as they are to be kept, refused where they are none; `dtype` is the model's."""

    def to(self, device: torch.device) -> Self:
        """The same criterion for scores on a device."""
        return self

    def widened(self, outputs: int) -> Self:
        """The same criterion for more outputs."""
        return self


@dataclass(eq=False)
class Classes(Criterion):
    """Targets are classes: a label is a number from 0, and a corner of the simplex where bridges run.

    `loss` takes either, whole numbers `[n]` or weights of the classes `[n, classes]`, as torch's cross-entropy does.

    >>> missed = lambda scores, target: 1 - (-F.cross_entropy(scores, target, reduction="none")).exp()
    >>> Classes(missed)(torch.zeros(2, 4), torch.tensor([0, 1]))
    tensor(0.7500)
    """

    loss: Loss
    of_classes = True

    def __call__(self, scores: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        """The loss of scores by classes."""
        return _reduced(_each(self.loss, scores, y), reduction)

    def at_points(self, scores: Tensor, points: Tensor) -> Tensor:
        """The loss of each example by weights of the classes."""
        return _each(self.loss, scores, points)

    def points(self, y: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
        """Labels as corners of the simplex."""
        return torch.zeros(len(y), outputs, dtype=dtype, device=y.device).scatter_(1, y[:, None], 1.0)

    def fold(self, path: Tensor) -> Tensor:
        """Points folded onto the simplex."""
        return on_simplex(path)

    def answer(self, scores: Tensor) -> Tensor:
        """The class of the highest score."""
        return scores.argmax(-1)

    def check(self, y: Tensor, size: int, outputs: int, dtype: torch.dtype) -> Tensor:
        """Classes as whole numbers `[n]`."""
        if y.ndim != 1 or len(y) != size or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise invalid("y", y, f"one whole number for each of the {size} examples of x")
        y = y.long()
        low, high = (int(value) for value in y.aminmax())
        if low < 0 or high >= outputs:
            raise invalid(
                "y", low if low < 0 else high, f"labels from 0 to {outputs - 1}",
                f"there are {outputs} classes: number the labels from 0, or make room for more by `grow`",
            )  # fmt: skip
        return y


@dataclass(eq=False)
class CrossEntropy(Classes):
    """Cross-entropy of classes; `weights`, one a class, say how much each counts (any further output: 1).

    As in torch, a mean over labels is weighted by them, and one along bridges, where labels are mixed, is plain. The
    mean of labels of which none counts is 0.

    >>> CrossEntropy(weights=[1.0, 3.0])(torch.zeros(2, 2), torch.tensor([0, 1]), "none")
    tensor([0.6931, 2.0794])
    """

    loss: Loss = field(init=False, repr=False)
    weights: Sequence[float] | Tensor | NDArray[Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.weights, Tensor | np.ndarray):
            if self.weights.ndim != 1:
                raise invalid("weights", Description(f"shape {[*self.weights.shape]}"), "one number for each class")
            self.weights = self.weights.tolist()
        for weight in () if self.weights is None else self.weights:
            check_number("weights", weight, at_least=0)
        self._weights = None if self.weights is None else torch.tensor([*self.weights], dtype=torch.float64)
        self.loss = self.at_points  # which takes labels too

    def __call__(self, scores: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        """The cross-entropy of scores by classes, or by weights of the classes."""
        weights = None if self._weights is None else self._weights.to(scores)
        if weights is not None and len(weights) < scores.shape[-1]:  # a model may have more outputs than classes
            weights = F.pad(weights, (0, scores.shape[-1] - len(weights)), value=1.0)
        if weights is None or reduction != "mean" or y.is_floating_point():
            return F.cross_entropy(scores, y, weights, reduction=reduction)
        return counted_mean(F.cross_entropy(scores, y, weights, reduction="none"), self.counts(y, scores.dtype))

    def at_points(self, scores: Tensor, points: Tensor) -> Tensor:
        """The cross-entropy of each example by weights of the classes."""
        return self(scores, points, reduction="none")

    def counts(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight of each label's class."""
        if self._weights is None:
            return super().counts(y, dtype)
        return self._weights.to(y.device, dtype).index_select(0, y)

    def unweighted(self) -> Criterion:
        """Cross-entropy without weights."""
        return self if self.weights is None else replace(self, weights=None)

    def check(self, y: Tensor, size: int, outputs: int, dtype: torch.dtype) -> Tensor:
        """Classes as whole numbers `[n]`, of which there are as many as weights."""
        if self.weights is not None and len(self.weights) != outputs:
            raise invalid("weights", Description(f"{len(self.weights)} weights"), f"one for each of {outputs} classes")
        return super().check(y, size, outputs, dtype)

    def to(self, device: torch.device) -> Self:
        """The same with its weights at hand where the scores are: a step may not wait for them to come."""
        made = replace(self)
        made._weights = None if self._weights is None else self._weights.to(device)
        return made

    def widened(self, outputs: int) -> Self:
        """The same with a weight of 1 for each class more."""
        if self.weights is None or self._weights is None:
            return self
        more = [1.0] * (outputs - len(self.weights))
        return replace(self, weights=[*self.weights, *more]).to(self._weights.device)


@dataclass(eq=False)
class Numbers(Criterion):
    """Targets are numbers, one or several an example: bridges between them are plain, with nothing to fold.

    `loss` gives a number for each example, or for each of its targets, which are averaged. With `units` the network
    answers in these: what is learned are targets less their mean, in deviations.

    >>> Numbers(lambda scores, target: (scores - target).abs())(torch.zeros(2, 1), torch.tensor([[1.0], [3.0]]))
    tensor(2.)
    """

    loss: Loss
    units: Scale | None = None
    of_classes = False

    def __call__(self, scores: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        """The loss of scores by numbers."""
        return _reduced(_each(self.loss, scores, self.points(y, scores.shape[-1], scores.dtype)), reduction)

    def at_points(self, scores: Tensor, points: Tensor) -> Tensor:
        """The loss of each example by numbers in the network's units."""
        return _each(self.loss, scores, points)

    def points(self, y: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
        """The numbers in the network's units."""
        return (y if self.units is None else self.units(y)).to(dtype)

    def kept(self, scores: Tensor) -> Tensor:
        """Scores in the units of the targets, as these are kept: they stay what they are."""
        return scores if self.units is None else self.units.undo(scores.double())

    def recalled(self, kept: Tensor) -> Tensor:
        """The same in the network's units of now, as exact as they were kept."""
        return kept if self.units is None else self.units(kept)

    def fold(self, path: Tensor) -> Tensor:
        """The points as they are: any number is a target."""
        return path

    def answer(self, scores: Tensor) -> Tensor:
        """The scores, in the units of the targets."""
        return scores if self.units is None else self.units.undo(scores)

    def check(self, y: Tensor, size: int, outputs: int, dtype: torch.dtype) -> Tensor:
        """Numbers `[n, outputs]`."""
        wide = y[:, None] if y.ndim == 1 else y
        if wide.shape != (size, outputs) or y.is_complex() or y.dtype == torch.bool:
            many = "one number" if outputs == 1 else f"{outputs} numbers"
            raise invalid("y", y, f"{many} for each of the {size} examples of x", f"the model has {outputs} outputs")
        wide = wide.to(dtype if self.units is None else torch.float64)  # it is rounded once it is scaled
        check_finite("y", wide)
        return wide


@dataclass(eq=False)
class MSE(Numbers):
    """The squared distance of numbers, the mean over those of an example.

    >>> MSE()(torch.zeros(2, 2), torch.tensor([[1.0, 1.0], [0.0, 2.0]]))
    tensor(1.5000)
    """

    loss: Loss = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.loss = partial(F.mse_loss, reduction="none")


@dataclass(eq=False)
class Huber(Numbers):
    """Huber's loss: half the squared distance up to `delta`, beyond it linear, so that an outlier pulls no harder.

    >>> Huber(delta=1.0)(torch.zeros(2, 1), torch.tensor([[0.5], [10.0]]), "none")
    tensor([0.1250, 9.5000])
    """

    loss: Loss = field(init=False, repr=False)
    delta: float = 1.0

    def __post_init__(self) -> None:
        check_number("delta", self.delta, above=0)
        self.loss = partial(F.huber_loss, reduction="none", delta=self.delta)


CRITERIA: dict[str, type[CrossEntropy] | type[MSE] | type[Huber]] = {
    "cross-entropy": CrossEntropy,
    "mse": MSE,
    "huber": Huber,
}


def find_criterion(criterion: str | Criterion) -> Criterion:
    """A criterion by its name, or the one that is given.

    >>> find_criterion("huber").delta
    1.0
    """
    if isinstance(criterion, Criterion):
        return criterion
    if callable(criterion):
        remedy = "say what its targets are: Classes(loss) or Numbers(loss)"
        raise invalid("criterion", criterion, f"one of {', '.join(CRITERIA)}, or a Criterion", remedy)
    check_name("criterion", criterion, CRITERIA)
    return CRITERIA[criterion]()


def counted_mean(losses: Tensor, counts: Tensor) -> Tensor:
    """The mean of losses that count as much as `counts` says, which is in them already; 0 where none counts.

    >>> counted_mean(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 1.0]))
    tensor(2.)
    """
    return losses.sum() / counts.sum().clamp_min(torch.finfo(losses.dtype).tiny)


def _each(loss: Loss, scores: Tensor, target: Tensor) -> Tensor:
    """One loss for each example."""
    each = loss(scores, target)
    if each.ndim == 0 or len(each) != len(scores):
        raise invalid("criterion", each, f"a loss for each of {len(scores)} examples", 'build it with reduction="none"')
    return each.flatten(1).mean(1) if each.ndim > 1 else each


def _reduced(each: Tensor, reduction: str) -> Tensor:
    return each if reduction == "none" else each.sum() if reduction == "sum" else each.mean()
