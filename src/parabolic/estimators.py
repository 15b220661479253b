"""The learners as scikit-learn knows them: a classifier and a regressor that go on learning."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor, nn

from parabolic.backbones import MLP
from parabolic.checks import Description, check_call, check_finite, check_name, check_number, invalid
from parabolic.engine import Diverged
from parabolic.experiments.run import find_device
from parabolic.learners import MSE, Criterion, Huber, Learner, Numbers, ReplayLearner, Scale, find_learner

__all__ = ["ParabolicClassifier", "ParabolicRegressor"]

Factory = Callable[[Sequence[int], int], nn.Module]
SHEET = 4096  # examples that are predicted together


class _Estimator(BaseEstimator):  # type: ignore[misc]
    """What both share: how data become tensors, and how a learner is made and goes through them."""

    learner_: Learner
    _shape: torch.Size

    def __init__(
        self,
        learner: str | type[Learner] = "pcl",
        *,
        model: nn.Module | Factory | None = None,
        options: Mapping[str, Any] | None = None,
        memory: int = 200,
        batch_size: int = 32,
        epochs: int = 20,
        lr: float | None = None,
        average: float | None = None,
        scale: bool = True,
        device: str | torch.device = "cpu",
        random_state: Any = None,
    ) -> None:
        self.learner = learner
        self.model = model
        self.options = options
        self.memory = memory
        self.batch_size = batch_size
        self.epochs = epochs
        self.lr = lr
        self.average = average
        self.scale = scale
        self.device = device
        self.random_state = random_state

    def _examples(self, X: Any) -> Tensor:
        """What is to be predicted, as the learner takes it."""
        check_is_fitted(self)
        return self._tensor(validate_data(self, X, reset=False, allow_nd=True), self.learner_)

    def _tensor(self, X: NDArray[Any], learner: Learner) -> Tensor:
        x = torch.from_numpy(np.array(X, order="C")).to(learner.device)
        x = x.to(learner.dtype) if self.scale or x.is_floating_point() else x
        check_finite("X", x)  # it may have been, in a wider type
        return x

    def _make(self, X: NDArray[Any], outputs: int, criterion: str | Criterion, **usual: Any) -> Learner:
        """A learner that has seen nothing; `usual` are options that it has, if it knows them, unless told otherwise."""
        for name in ("batch_size", "epochs"):
            check_number(name, getattr(self, name), whole=True, at_least=1)
        seed = int(check_random_state(self.random_state).randint(2**31))
        kind = find_learner(self.learner) if isinstance(self.learner, str) else self.learner
        if not (isinstance(kind, type) and issubclass(kind, Learner)):
            raise invalid("learner", kind, "a method's name, or its class", "`parabolic list` shows the names")
        if not isinstance(self.options, Mapping | None):
            raise invalid("options", self.options, "values by their names", "as in {'sigma_x': 0.1}")
        options = copy.deepcopy(dict(self.options or {}))  # whatever it holds is the user's own
        fields = {each.name for each in dataclasses.fields(kind)} - {"model"}
        for name in options:
            check_name("options", name, fields)
        place = find_device(str(self.device))
        options = {name: each.to(place) if isinstance(each, nn.Module) else each for name, each in options.items()}
        given: dict[str, Any] = {name: value for name, value in usual.items() if name in fields}
        given |= {"lr": self.lr, "average": self.average}
        if issubclass(kind, ReplayLearner):
            given["memory"] = self.memory
        given = {name: value for name, value in given.items() if value is not None}
        given |= {"criterion": criterion, "prepare": Scale() if self.scale else None, "seed": seed}
        return kind(self._network(X.shape[1:], outputs, seed).to(place), **(given | options))

    def _network(self, shape: Sequence[int], outputs: int, seed: int) -> nn.Module:
        if isinstance(self.model, nn.Module):
            return copy.deepcopy(self.model)
        factory = _mlp if self.model is None else self.model
        check_call("model", factory, "shape", "outputs")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = factory(shape, outputs)
        if not isinstance(made, nn.Module):
            raise invalid("model", type(made), "a torch.nn.Module, or a function (shape, outputs) that returns one")
        return made

    def _learn(self, learner: Learner, x: Tensor, y: Tensor, epochs: int | None = None) -> None:
        """Go through examples once, in their order; or several times, shuffled anew each time."""
        y, rng, size = y.to(x.device), np.random.default_rng(learner.seed), int(self.batch_size)
        orders = [torch.from_numpy(rng.permutation(len(x))) for _ in range(epochs or 0)] or [torch.arange(len(x))]
        rows = [part.to(x.device) for order in orders for part in order.split(size)]
        task = None
        if learner.needs_tasks:
            self._tasks = 0 if epochs else getattr(self, "_tasks", -1) + 1
            task, batches = self._tasks, list(zip(x.split(size), y.split(size), strict=True))
            learner.start_task(batches)
        loss = x.new_zeros(())
        for part in rows:
            loss = learner.observe(x[part], y[part], task)
        if task is not None:
            learner.end_task(batches)
        if not math.isfinite(float(loss)):
            raise Diverged(f"the loss became {float(loss)}: lower lr (now {learner.lr:g}), or give options a clip_norm")

    def _check_like(self, x: Tensor) -> None:
        """Refuse what the learner would refuse, before anything changes."""
        if x.shape[1:] != self._shape:
            raise invalid("X", x, f"examples of shape {list(self._shape)}, as before")
        for part in () if x.is_floating_point() else x.split(SHEET):
            self.learner_.predict(part)  # of ids only the network knows which there are

    def _scores(self, x: Tensor) -> Tensor:
        return torch.cat([self.learner_.scores(part) for part in x.split(SHEET)])


class ParabolicClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A classifier that keeps learning: new classes may come with any `partial_fit`, and old ones are kept in mind.

    `fit` begins anew and goes through the data `epochs` times, shuffled; `partial_fit` goes on with what comes, once,
    in the order in which it comes. For methods that must know of tasks each call is a task.

    Args:
        learner: a method by its name, such as "pcl" or "er" (`parabolic list` shows them), or a class.
        model: the network, a `torch.nn.Module` of which a copy is trained, or a function (shape, outputs) that makes
            one. By default a perceptron of two hidden layers, sized by the input, in float64. It must end in a
            `torch.nn.Linear`, which gets a row for each class that is new.
        options: further options of the learner, by name: {"sigma_x": 0.1, "clip_norm": 1.0}.
        memory: how many examples are kept, by methods that keep any.
        batch_size: how many examples are learned at a step.
        epochs: how often `fit` goes through the data.
        lr: the learning rate (None: the method's own).
        average: decay of a moving average of the weights, kept for prediction (None: no average).
        scale: whether inputs are brought to mean 0 and deviation 1, as they are over everything seen so far. Without
            it whole numbers, such as ids of words, stay whole.
        device: where to compute: "cpu", "cuda", or "auto".
        random_state: decides weights, order and draws.

    Attributes:
        classes_: the labels seen so far, in their order.
        learner_: the learner, whose memory and model are there to be looked at.

    >>> model = ParabolicClassifier(random_state=0)
    >>> _ = model.partial_fit([[0.0], [1.0]] * 50, ["cold", "warm"] * 50)
    >>> model.partial_fit([[2.0]] * 50, ["hot"] * 50).classes_.tolist()
    ['cold', 'hot', 'warm']
    >>> model.predict_proba([[0.0]]).shape
    (1, 3)
    """

    classes_: NDArray[Any]
    _outputs: NDArray[np.int64]  # of each of them, which output of the network is its score

    def fit(self, X: Any, y: Any) -> Self:
        """Learn from examples and their labels, and forget all that was learned before."""
        return self._begin(X, y, None, self.epochs)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Self:
        """Go on learning from examples and their labels; `classes` may name labels that will come."""
        if not hasattr(self, "learner_"):
            return self._begin(X, y, classes, None)
        X, y = validate_data(self, X, y, reset=False, allow_nd=True)
        x, more = self._tensor(X, self.learner_), _labels(y, classes)
        self._check_like(x)
        labels, outputs = _merged(self.classes_, self._outputs, more)
        with self.learner_.lock:  # a prediction meanwhile finds all of it as it was, or all of it done
            if len(labels) > len(self.classes_):
                self.learner_.grow(len(labels))
                self.classes_, self._outputs = labels, outputs
            if isinstance(self.learner_.prepare, Scale):
                self.learner_.prepare.update(x)
        self._learn(self.learner_, x, _numbered(y, labels, outputs))
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """The label of each example."""
        chances, classes = self._chances(self._examples(X))
        found: NDArray[Any] = classes[chances.argmax(1)]
        return found

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """The probability of each of `classes_`, for each example."""
        return self._chances(self._examples(X))[0]

    def _begin(self, X: Any, y: Any, classes: Any, epochs: int | None) -> Self:
        X, y = validate_data(self, X, y, allow_nd=True)
        labels, outputs = _merged(y[:0], np.arange(0), _labels(y, classes))
        learner = self._make(X, len(labels), "cross-entropy")
        learner.grow(len(labels))
        x = self._tensor(X, learner)
        if isinstance(learner.prepare, Scale):
            learner.prepare.update(x)
        self._learn(learner, x, _numbered(y, labels, outputs), epochs)
        self.learner_, self.classes_, self._outputs, self._shape = learner, labels, outputs, x.shape[1:]
        return self

    def _chances(self, x: Tensor) -> tuple[NDArray[np.float64], NDArray[Any]]:
        with self.learner_.lock:
            scores, classes = self._scores(x)[:, torch.from_numpy(self._outputs).to(x.device)], self.classes_
        return scores.double().softmax(1).cpu().numpy(), classes


class ParabolicRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """A regressor that keeps learning, of one number or several: what was learned of the past is kept in mind.

    `fit`, `partial_fit` and all settings are as of `ParabolicClassifier`; `scale` is for the targets too. PCL's bridges
    end at the nearest example, unless `options` say otherwise.

    Args:
        learner: a method by its name, or a class; one that tells classes apart is refused.
        loss: "mse", "huber", or a `parabolic.Numbers` of your own.
        model: the network, or a function (shape, outputs) that makes one.
        options: further options of the learner, by name.
        memory: how many examples are kept, by methods that keep any.
        batch_size: how many examples are learned at a step.
        epochs: how often `fit` goes through the data.
        lr: the learning rate (None: the method's own).
        average: decay of a moving average of the weights, kept for prediction (None: no average).
        scale: whether inputs and targets are brought to mean 0 and deviation 1, as over everything seen so far.
        device: where to compute: "cpu", "cuda", or "auto".
        random_state: decides weights, order and draws.

    >>> import numpy as np
    >>> x = np.linspace(-2, 2, 400)[:, None]
    >>> model = ParabolicRegressor(random_state=0).fit(x, 100 * np.sin(x[:, 0]))
    >>> bool(model.score(x, 100 * np.sin(x[:, 0])) > 0.9)
    True
    """

    def __init__(
        self,
        learner: str | type[Learner] = "pcl",
        *,
        loss: str | Numbers = "mse",
        model: nn.Module | Factory | None = None,
        options: Mapping[str, Any] | None = None,
        memory: int = 200,
        batch_size: int = 32,
        epochs: int = 20,
        lr: float | None = None,
        average: float | None = None,
        scale: bool = True,
        device: str | torch.device = "cpu",
        random_state: Any = None,
    ) -> None:
        super().__init__(
            learner, model=model, options=options, memory=memory, batch_size=batch_size, epochs=epochs, lr=lr,
            average=average, scale=scale, device=device, random_state=random_state,
        )  # fmt: skip
        self.loss = loss

    def fit(self, X: Any, y: Any) -> Self:
        """Learn from examples and their targets, and forget all that was learned before."""
        return self._begin(X, y, self.epochs)

    def partial_fit(self, X: Any, y: Any) -> Self:
        """Go on learning from examples and their targets."""
        if not hasattr(self, "learner_"):
            return self._begin(X, y, None)
        X, y = validate_data(self, X, y, reset=False, allow_nd=True, multi_output=True, y_numeric=True)
        x, target = self._tensor(X, self.learner_), _target(y, self.learner_)
        self._check_like(x)
        if target.shape[1] != self.learner_.classes or y.ndim != 2 - self._single:
            raise invalid("y", target, f"{self.learner_.classes} numbers an example, as before")
        with self.learner_.lock:
            self._measure(self.learner_, x, target)
        self._learn(self.learner_, x, target)
        return self

    def predict(self, X: Any) -> NDArray[np.float64]:
        """The number, or numbers, of each example."""
        x = self._examples(X)
        with self.learner_.lock:
            found = self.learner_.error.answer(self._scores(x).double()).cpu().numpy()
        return found[:, 0] if self._single else found

    def _begin(self, X: Any, y: Any, epochs: int | None) -> Self:
        X, y = validate_data(self, X, y, allow_nd=True, multi_output=True, y_numeric=True)
        # Between examples far apart, targets on a straight line are wrong wherever the function is curved.
        learner = self._make(X, 1 if y.ndim == 1 else y.shape[1], self._criterion(), endpoints="nearest")
        x, target = self._tensor(X, learner), _target(y, learner)
        self._measure(learner, x, target)
        self._learn(learner, x, target, epochs)
        self.learner_, self._single, self._shape = learner, y.ndim == 1, x.shape[1:]
        return self

    def _criterion(self) -> Criterion:
        known: dict[str, type[MSE] | type[Huber]] = {"mse": MSE, "huber": Huber}
        if isinstance(self.loss, Numbers):
            return dataclasses.replace(self.loss, units=Scale()) if self.scale else copy.copy(self.loss)
        check_name("loss", self.loss, known, "or give a parabolic.Numbers")
        return known[self.loss](units=Scale() if self.scale else None)

    @staticmethod
    def _measure(learner: Learner, x: Tensor, y: Tensor) -> None:
        """Take inputs and targets into what decides how they are scaled."""
        if isinstance(learner.prepare, Scale):
            learner.prepare.update(x)
        if isinstance(learner.error, Numbers) and learner.error.units is not None:
            learner.error.units.update(y)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _mlp(shape: Sequence[int], outputs: int) -> nn.Module:
    """A perceptron sized by the input.

    In float64, as all of scikit-learn: then a prediction does not depend on what is predicted beside it.
    """
    width = min(max(4 * math.prod(shape), 32), 256)
    return MLP(shape, outputs, hidden=(width, width)).double()


def _target(y: NDArray[Any], learner: Learner) -> Tensor:
    target = torch.from_numpy(np.array(y, dtype=np.float64)).reshape(len(y), -1).to(learner.device, learner.dtype)
    check_finite("y", target)
    return target


def _numbered(y: NDArray[Any], labels: NDArray[Any], outputs: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(outputs[np.searchsorted(labels, y)])


def _labels(y: NDArray[Any], classes: Any) -> NDArray[Any]:
    """The labels of a batch, and those that are announced."""
    check_classification_targets(y)
    found = np.unique(y)
    return found if classes is None else _union(found, np.unique(column_or_1d(classes)))


def _merged(
    classes: NDArray[Any], outputs: NDArray[np.int64], labels: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The classes with those that are new, sorted, and the output of each: an old one has the output that it had."""
    merged = _union(classes, labels)
    fresh = len(classes) + np.arange(len(merged) - len(classes))
    old = np.isin(merged, classes)
    found = np.empty(len(merged), dtype=np.int64)
    found[old], found[~old] = outputs, fresh
    return merged, found


def _union(one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    kinds = ["a word" if each.dtype.kind in "OUS" else "a number" for each in (one, other)]
    if len(one) and kinds[0] != kinds[1]:
        raise invalid("y", Description(f"{kinds[1]} for a label"), f"{kinds[0]}, like the labels before")
    return np.unique(np.concatenate([one, other]))
