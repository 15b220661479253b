"""Criteria: the loss to minimise, and whether its targets are classes or numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from parabolic.checks import Description, InputError, check_finite, check_name, check_number, first_line, invalid, plain
from parabolic.learners.scale import Scale
from parabolic.pde.bridges import on_simplex

__all__ = [
    "CRITERIA", "MSE", "Classes", "Criterion", "CrossEntropy", "Heads", "Huber", "Numbers", "counted_mean",
    "find_criterion",
]  # fmt: skip

Loss = Callable[[Tensor, Tensor], Tensor]
"""Maps scores and targets to one loss per example, as torch's losses do with reduction="none"."""

TO_NUMBERS = "if they are numbers to predict, set criterion='mse' or a Numbers of your own"

ClassWeights = Sequence[float] | Tensor | NDArray[Any] | None


class Criterion(ABC):
    """A loss that is never negative, and everything that depends on the kind of its targets.

    Labels are those of the stream. Bridges between labels run through points of a space in which every label has a
    point too.
    """

    of_classes: ClassVar[bool]

    @abstractmethod
    def __call__(self, scores: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        """The loss of scores given labels: the mean, the sum, or one number per example ("none")."""

    @abstractmethod
    def at_points(self, scores: Tensor, points: Tensor) -> Tensor:
        """The loss of each example, with points as targets."""

    @abstractmethod
    def points(self, y: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
        """Labels as points, `[n, outputs]`."""

    def counts(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight of each label: a mean loss is the sum of losses divided by the sum of these weights."""
        return torch.ones(len(y), dtype=dtype, device=y.device)

    def unweighted(self) -> Criterion:
        """The same criterion, with equal weights for all labels."""
        return self

    def competing(self, scores: Tensor, y: Tensor) -> Tensor:
        """The scores, with those that do not compete for an example of this label so low that they have no part."""
        return scores

    def kept(self, scores: Tensor) -> Tensor:
        """Scores in a form to store, as the units of the network's outputs may change; see `recalled`."""
        return scores

    def recalled(self, kept: Tensor) -> Tensor:
        """Stored scores, in the network's current units."""
        return kept

    @abstractmethod
    def fold(self, path: Tensor) -> Tensor:
        """Points that noise has moved, mapped back to valid targets."""

    @abstractmethod
    def answer(self, scores: Tensor) -> Tensor:
        """The predictions that scores stand for, as labels."""

    @abstractmethod
    def check(self, y: Tensor, size: int, outputs: int, dtype: torch.dtype) -> Tensor:
        """Check the labels of `size` examples and return them as they are stored; `dtype` is the model's."""

    def to(self, device: torch.device) -> Self:
        """The same criterion for scores on a device."""
        return self

    def widened(self, outputs: int) -> Self:
        """The same criterion for more outputs."""
        return self


@dataclass(eq=False)
class Classes(Criterion):
    """Targets are classes: a label is a class number from 0 or, for bridges, a corner of the simplex.

    `loss` must accept both class numbers `[n]` and soft labels `[n, classes]`, as torch's cross-entropy does.

    >>> missed = lambda scores, target: 1 - (-F.cross_entropy(scores, target, reduction="none")).exp()
    >>> Classes(missed)(torch.zeros(2, 4), torch.tensor([0, 1]))
    tensor(0.7500)
    """

    loss: Loss
    of_classes = True

    def __call__(self, scores: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        """The loss of scores given class numbers."""
        return _reduced(self.at_points(scores, y), reduction)

    def at_points(self, scores: Tensor, points: Tensor) -> Tensor:
        """The loss of each example given soft labels."""
        try:
            return _example_losses(self.loss, scores, points)
        except InputError:
            raise
        except Exception as error:
            # For class numbers it says enough; on a GPU the engine must see why a step cannot be captured.
            if points.ndim == 1 or points.is_cuda:
                raise
            got = Description(f"an error on soft labels of shape {list(points.shape)}")
            expected = "a loss that accepts them as well as class numbers, as torch's cross-entropy does"
            remedy = "write it so, or choose a method and options without soft labels, such as ER"
            raise invalid("criterion", got, expected, f"{remedy}; it says: {first_line(error)}") from error

    def points(self, y: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
        """Labels as corners of the simplex."""
        return torch.zeros(len(y), outputs, dtype=dtype, device=y.device).scatter_(1, y[:, None], 1.0)

    def fold(self, path: Tensor) -> Tensor:
        """Points folded onto the simplex."""
        return on_simplex(path)

    def answer(self, scores: Tensor) -> Tensor:
        """The class with the highest score."""
        return scores.argmax(-1)

    def check(self, y: Tensor, size: int, outputs: int, dtype: torch.dtype) -> Tensor:
        """Class numbers `[n]`."""
        if y.ndim != 1 or len(y) != size or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            are_numbers = y.is_floating_point() and y.ndim in (1, 2) and len(y) == size
            remedy = f"convert class numbers with .long(); {TO_NUMBERS}" if are_numbers else ""
            raise invalid("y", y, f"one whole number for each of the {size} examples of x", remedy)
        y = y.long()
        low, high = (int(value) for value in y.aminmax())
        if outputs == 1 and high == 1 and low >= 0:
            got, remedy = Description("the labels 0 and 1 for one output"), f"make the model so; {TO_NUMBERS}"
            raise invalid("y", got, "two outputs, one for each class", remedy)
        if low < 0 or high >= outputs:
            raise invalid(
                "y", low if low < 0 else high, f"labels from 0 to {outputs - 1}",
                f"there are {outputs} classes: number the labels from 0, or make room for more with `grow`",
            )  # fmt: skip
        return y


@dataclass(eq=False)
class CrossEntropy(Classes):
    """Cross-entropy; `weights`, one per class, say how much each class counts (any further output: 1).

    As in torch, the mean over class numbers is a weighted mean, and that over soft labels (along bridges) divides by
    their number. If all weights of a batch are 0, so is its mean.

    >>> CrossEntropy(weights=[1.0, 3.0])(torch.zeros(2, 2), torch.tensor([0, 1]), "none")
    tensor([0.6931, 2.0794])
    """

    loss: Loss = field(init=False, repr=False)
    weights: ClassWeights = None

    def __post_init__(self) -> None:
        if isinstance(self.weights, Tensor | np.ndarray):
            if self.weights.ndim != 1:
                raise invalid("weights", Description(f"shape {[*self.weights.shape]}"), "one number for each class")
            self.weights = self.weights.tolist()
        if isinstance(self.weights, Mapping | Set) or not isinstance(self.weights, Collection | None):
            remedy = "in the order of the classes, as in [1, 5]"
            raise invalid("weights", self.weights, "one number for each class", remedy)
        if self.weights is not None:
            for weight in self.weights:
                check_number("weights", weight, at_least=0)
            self.weights = [*map(plain, self.weights)]  # which a file can hold
        self._weights = None if self.weights is None else torch.tensor(self.weights, dtype=torch.float64)
        self.loss = self.at_points  # for both kinds of labels

    def __call__(self, scores: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        """The cross-entropy of scores given class numbers or soft labels."""
        weights = None if self._weights is None else self._weights.to(scores)
        if weights is not None and len(weights) < scores.shape[-1]:  # a model may have more outputs than classes
            weights = F.pad(weights, (0, scores.shape[-1] - len(weights)), value=1.0)
        if weights is None or reduction != "mean" or y.is_floating_point():
            return F.cross_entropy(scores, y, weights, reduction=reduction)
        return counted_mean(F.cross_entropy(scores, y, weights, reduction="none"), self.counts(y, scores.dtype))

    def at_points(self, scores: Tensor, points: Tensor) -> Tensor:
        """The cross-entropy of each example given soft labels."""
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
        """Class numbers `[n]`; there must be one weight per class."""
        if self.weights is not None and len(self.weights) != outputs:
            raise invalid("weights", Description(f"{len(self.weights)} weights"), f"one for each of {outputs} classes")
        return super().check(y, size, outputs, dtype)

    def to(self, device: torch.device) -> Self:
        """The same criterion, with its weights on the device: a step must not wait for their transfer."""
        copy = replace(self)
        copy._weights = None if self._weights is None else self._weights.to(device)
        return copy

    def widened(self, outputs: int) -> Self:
        """The same criterion, with a weight of 1 for each additional class."""
        if self.weights is None or self._weights is None:
            return self
        extra = [1.0] * (outputs - len(self.weights))
        return replace(self, weights=[*self.weights, *extra]).to(self._weights.device)


@dataclass(eq=False)
class Heads(CrossEntropy):
    """Cross-entropy among the classes of each example's own task, as if every task had a last layer of its own.

    For task-incremental learning, where the task is known in training and in testing. `tasks` are the classes of each
    task; those in none share a head. Labels between classes, as on PCL's bridges, are refused: they may be of two
    tasks.

    >>> Heads([[0, 1], [2, 3]])(torch.tensor([[0.0, 0.0, 9.0, 9.0]]), torch.tensor([1]))
    tensor(0.6931)
    """

    tasks: Sequence[Sequence[int]] = ()
    weights: ClassWeights = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self.tasks = [[_checked_label(label) for label in task] for task in self.tasks]
        except TypeError as error:
            raise invalid("tasks", self.tasks, "the classes of each task", "as in [[0, 1], [2, 3]]") from error
        listed = [label for task in self.tasks for label in task]
        if not listed or len(set(listed)) < len(listed):
            remedy = "tasks that share classes, such as domains, have no heads of their own"
            raise invalid("tasks", self.tasks, "the classes of each task, and no class in two of them", remedy)
        self._head = torch.full((max(listed) + 1,), len(self.tasks))
        for number, task in enumerate(self.tasks):
            self._head[task] = number

    def __call__(self, scores: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        """The cross-entropy of scores given class numbers, each among the classes of its task."""
        if y.is_floating_point():
            remedy = "PCL, `smoothing` and bounds use labels between classes: leave these out, or the heads"
            raise invalid("criterion", Description("Heads"), "one for labels that may be of two tasks", remedy)
        return super().__call__(self.competing(scores, y), y, reduction)

    def competing(self, scores: Tensor, y: Tensor) -> Tensor:
        """The scores, with those of other tasks so low that their probability is 0."""
        extra = scores.shape[-1] - len(self._head)
        head = F.pad(self._head, (0, extra), value=len(self.tasks)) if extra > 0 else self._head[: scores.shape[-1]]
        other_task = head != head.index_select(0, y)[:, None]
        return scores.masked_fill(other_task, torch.finfo(scores.dtype).min / 2)

    def unweighted(self) -> Criterion:
        """The same heads, without weights; called in a step, which must not wait for a transfer of the heads."""
        if self.weights is None:
            return self
        copy = replace(self, weights=None)
        copy._head = self._head
        return copy

    def to(self, device: torch.device) -> Self:
        """The same criterion, with its weights and heads on the device."""
        copy = super().to(device)
        copy._head = self._head.to(device)
        return copy


@dataclass(eq=False)
class Numbers(Criterion):
    """Targets are numbers, one or several per example: bridges between them need no folding.

    `loss` returns one number per example, or one per target, which are then averaged. With `units`, the network's
    outputs are in these units: it learns targets minus their mean, divided by their standard deviation.

    >>> Numbers(lambda scores, target: (scores - target).abs())(torch.zeros(2, 1), torch.tensor([[1.0], [3.0]]))
    tensor(2.)
    """

    loss: Loss
    units: Scale | None = field(default=None, kw_only=True)
    of_classes = False

    def __call__(self, scores: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        """The loss of scores given numbers."""
        return _reduced(self.at_points(scores, self.points(y, scores.shape[-1], scores.dtype)), reduction)

    def at_points(self, scores: Tensor, points: Tensor) -> Tensor:
        """The loss of each example given numbers in the network's units."""
        return _example_losses(self.loss, scores, points)

    def points(self, y: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
        """The numbers in the network's units."""
        y = _as_columns(y)
        return (y if self.units is None else self.units(y)).to(dtype)

    def kept(self, scores: Tensor) -> Tensor:
        """Scores in the units of the targets, which do not change."""
        return scores if self.units is None else self.units.undo(scores.double())

    def recalled(self, kept: Tensor) -> Tensor:
        """Stored scores in the network's current units, in the precision that they are stored in."""
        return kept if self.units is None else self.units(kept)

    def fold(self, path: Tensor) -> Tensor:
        """The points unchanged: any number is a valid target."""
        return path

    def answer(self, scores: Tensor) -> Tensor:
        """The scores, in the units of the targets."""
        return scores if self.units is None else self.units.undo(scores)

    def check(self, y: Tensor, size: int, outputs: int, dtype: torch.dtype) -> Tensor:
        """Numbers `[n, outputs]`."""
        targets = _as_columns(y)
        if targets.shape != (size, outputs) or y.is_complex() or y.dtype == torch.bool:
            numbers = "one number" if outputs == 1 else f"{outputs} numbers"
            raise invalid("y", y, f"{numbers} for each of the {size} examples of x", f"the model has {outputs} outputs")
        targets = targets.to(dtype if self.units is None else torch.float64)  # rounded only after scaling
        check_finite("y", targets)
        return targets


@dataclass(eq=False)
class MSE(Numbers):
    """Squared error, averaged over the targets of an example.

    >>> MSE()(torch.zeros(2, 2), torch.tensor([[1.0, 1.0], [0.0, 2.0]]))
    tensor(1.5000)
    """

    loss: Loss = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.loss = partial(F.mse_loss, reduction="none")


@dataclass(eq=False)
class Huber(Numbers):
    """Huber loss: half the squared error up to `delta`, linear beyond, so that outliers pull no harder.

    >>> Huber(1.0)(torch.zeros(2, 1), torch.tensor([[0.5], [10.0]]), "none")
    tensor([0.1250, 9.5000])
    """

    loss: Loss = field(init=False, repr=False)
    delta: float = 1.0

    def __post_init__(self) -> None:
        check_number("delta", self.delta, above=0)
        self.delta = plain(self.delta)
        self.loss = partial(F.huber_loss, reduction="none", delta=self.delta)


CRITERIA: dict[str, type[CrossEntropy] | type[MSE] | type[Huber]] = {
    "cross-entropy": CrossEntropy,
    "mse": MSE,
    "huber": Huber,
}


def find_criterion(criterion: str | Criterion) -> Criterion:
    """The criterion of that name, or the given criterion itself.

    >>> find_criterion("huber").delta
    1.0
    """
    if isinstance(criterion, Criterion):
        return criterion
    if callable(criterion):
        function: Any = criterion
        is_class = isinstance(function, type) and issubclass(function, Criterion)
        remedy = "say what its targets are: Classes(loss) or Numbers(loss)"
        if is_class:
            remedy = f"pass one made of it: {function.__name__}(…)"
        raise invalid("criterion", criterion, f"one of {', '.join(CRITERIA)}, or a Criterion", remedy)
    check_name("criterion", criterion, CRITERIA)
    return CRITERIA[criterion]()


def counted_mean(losses: Tensor, counts: Tensor) -> Tensor:
    """The weighted mean of losses that are already multiplied by their weights `counts`; 0 if all weights are 0.

    >>> counted_mean(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 1.0]))
    tensor(2.)
    """
    return losses.sum() / counts.sum().clamp_min(torch.finfo(losses.dtype).tiny)


def _checked_label(value: Any) -> int:
    check_number("tasks", value, whole=True, at_least=0)
    return int(value)


def _as_columns(y: Tensor) -> Tensor:
    """Numbers `[n]` as `[n, 1]`: against scores of that shape they would be broadcast, to n² losses."""
    return y[:, None] if y.ndim == 1 else y


def _example_losses(loss: Loss, scores: Tensor, target: Tensor) -> Tensor:
    """One loss per example."""
    losses = loss(scores, target)
    if not isinstance(losses, Tensor) or losses.ndim == 0 or len(losses) != len(scores):
        raise invalid(
            "criterion", losses, f"a loss for each of {len(scores)} examples", 'build it with reduction="none"'
        )
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.mean()
