"""A classifier that keeps learning."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from parabolic.checks import invalid
from parabolic.estimators.base import Estimator, Factory, updated_scale
from parabolic.estimators.labels import (
    balanced_weights,
    check_labels,
    given_weights,
    labels_of,
    merge_labels,
    outputs_of,
)
from parabolic.estimators.serving import Columns
from parabolic.learners import CrossEntropy, Learner, ReplayLearner
from parabolic.memory import Memory

__all__ = ["ParabolicClassifier"]


class ParabolicClassifier(ClassifierMixin, Estimator):  # type: ignore[misc]
    """A classifier that keeps learning: any `partial_fit` may add classes, and old ones are remembered.

    `fit` starts over and makes `epochs` passes over the data, shuffled; `partial_fit` continues with one pass over new
    data, in their order. For methods that need tasks, each call is a task. If `fit` fails, the estimator stays as it
    was.

    Args:
        learner: a method by its name, such as "pcl" or "er" (`parabolic list` shows them), or its class.
        model: the network: a `torch.nn.Module`, of which a copy is trained, or a function (shape, outputs) that returns
            one. By default a perceptron with two hidden layers, sized by the input, in float64. It must end in a
            `torch.nn.Linear`, which gets a row for each new class.
        options: further options of the learner, by name: {"sigma_x": 0.1, "clip_norm": 1.0}. For `set_params` and grid
            searches each also has its own name, such as options__sigma_x. An argument `lr`, `average` or `memory` takes
            precedence over the option of that name.
        memory: how many examples the memory holds, for methods that have one, or a memory such as `Recent(200)` (None:
            that of `options`, or the method's default, 200).
        batch_size: how many examples are learned at a step.
        epochs: how many passes `fit` makes over the data.
        lr: the learning rate (None: that of `options`, or the method's default).
        average: decay of a moving average of the weights, used for prediction (None: that of `options`, or no average).
        scale: whether inputs are standardised to mean 0 and standard deviation 1 over everything seen so far. They are
            stored in float64, and rounded to the network's type after scaling. Without scaling, bytes become numbers
            from 0 to 1 and, for your own `model` or with `embed`, other whole numbers stay whole, as ids of words.
        class_weight: how much each class counts in the loss: a dict from labels to weights (1 for labels that it does
            not contain, and it may contain labels that come later), or, for `fit` alone, "balanced": inversely to how
            often a class occurs in y.
        device: where to compute: "cpu", "cuda", or "auto". A pickle holds everything on the CPU, and goes to this
            device where it is loaded, or stays on the CPU, with a warning, if there is none.
        random_state: decides the initial weights, the order and every draw, except those that the network itself makes
            (dropout), which come from torch's global generator (`torch.manual_seed`).

    Attributes:
        classes_: the labels seen so far, sorted.
        learner_: the learner, with its memory and model.
        loss_: the mean of the losses in the last pass over data: that of the last `partial_fit`, or of the last of the
            epochs of `fit`. As in `Learner.observe`, a loss is what the method minimises, replay included.
        n_features_in_: the number of columns of X (its second axis, if X has more than two).
        feature_names_in_: the names of the columns, if X was a data frame.

    >>> model = ParabolicClassifier(random_state=0)
    >>> _ = model.partial_fit([[0.0], [1.0]] * 50, ["cold", "warm"] * 50)
    >>> model.partial_fit([[2.0]] * 50, ["hot"] * 50).classes_.tolist()
    ['cold', 'hot', 'warm']
    >>> model.predict_proba([[0.0]]).shape
    (1, 3)
    """

    classes_: NDArray[Any]
    _outputs: NDArray[np.int64]  # for each class, the network's output that is its score

    def __init__(
        self,
        learner: str | type[Learner] = "pcl",
        *,
        model: nn.Module | Factory | None = None,
        options: Mapping[str, Any] | None = None,
        memory: int | Memory | None = None,
        batch_size: int = 32,
        epochs: int = 20,
        lr: float | None = None,
        average: float | None = None,
        scale: bool = True,
        class_weight: Mapping[Any, float] | str | None = None,
        device: str | torch.device = "cpu",
        random_state: Any = None,
    ) -> None:
        super().__init__(
            learner=learner, model=model, options=options, memory=memory, batch_size=batch_size, epochs=epochs, lr=lr,
            average=average, scale=scale, device=device, random_state=random_state,
        )  # fmt: skip
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any) -> Self:
        """Learn from examples and their labels, discarding everything learned before."""
        self._begin(X, y, None, self.epochs)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Self:
        """Continue learning from examples and their labels; `classes` may announce labels that come later."""
        if not hasattr(self, "learner_") and self._begin(X, y, classes, None):
            return self
        check_labels("y", y)
        X, y = self._validated(X, y, reset=False)
        if isinstance(self.class_weight, str):
            balanced_weights(self.class_weight, y, None)  # raises: not all labels are known
        x, labels = self._tensor(X, self.learner_, self._example[1]), labels_of(y, classes)
        self._check_examples(x)
        self._check_settings()
        self._rehearse(x, lambda trial: trial._continue(x[:1], y[:1], labels))
        return self._continue(x, y, labels)

    def predict(self, X: Any) -> NDArray[Any]:
        """The label of each example."""
        scores, classes = self._class_scores(X)
        predicted: NDArray[Any] = classes[scores.softmax(1).argmax(1).numpy()]
        return predicted

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """The probability of each of `classes_`, for each example."""
        return self._class_scores(X)[0].softmax(1).numpy()

    def predict_log_proba(self, X: Any) -> NDArray[np.float64]:
        """The logarithms of these probabilities, even of those too small for a float."""
        return self._class_scores(X)[0].log_softmax(1).numpy()

    def predictor(self) -> nn.Module:
        """A module that maps rows of X, as a tensor, to scores in the order of `classes_`: to serve from.

        `scores.softmax(1)` is what `predict_proba` returns, and `classes_[scores.argmax(1)]` what `predict` does. Keep
        `classes_` with it. It is a copy in evaluation mode, on the learner's device, with the scaling as buffers, and
        contains neither memory nor optimiser. It only checks the type of X. See `Learner.predictor`.
        """
        check_is_fitted(self)
        with self._locked():
            answer = Columns(torch.from_numpy(self._outputs.copy()).to(self.learner_.device))
            return self._serving_module(answer)

    def memory_counts(self) -> dict[Any, int]:
        """How many examples of each of `classes_` are in memory: all 0 for a method without one."""
        check_is_fitted(self)
        with self._locked():
            learner, counts = self.learner_, np.zeros(len(self.classes_), dtype=np.int64)
            if isinstance(learner, ReplayLearner) and len(learner.past):
                counts = learner.past["y"].bincount(minlength=len(counts)).cpu().numpy()
            return dict(zip(self.classes_.tolist(), counts[self._outputs].tolist(), strict=True))

    def _begin(self, X: Any, y: Any, classes: Any, epochs: int | None) -> bool:
        """Learn from nothing, in one pass if `epochs` is None; returns False if another thread was the first to fit."""
        new = copy.copy(self)  # self takes its state in one step, or not at all
        check_labels("y", y)
        X, y = new._validated(X, y)
        labels, outputs = merge_labels(y[:0], np.arange(0), labels_of(y, classes, part=epochs is None))
        learner = new._build_learner(X, len(labels), new._criterion(labels, outputs, None if epochs is None else y))
        learner.grow(len(labels))
        x = new._tensor(X, learner)
        learner.prepare = updated_scale(learner.prepare, "X", x)
        new._learn(learner, x, outputs_of(y, labels, outputs), epochs)
        new.learner_, new.classes_, new._outputs = learner, labels, outputs
        new._example = (x.shape[1:], x.dtype)
        return self._take_state(new, first=epochs is None)

    def _continue(self, x: Tensor, y: NDArray[Any], more_labels: NDArray[Any]) -> Self:
        with self._locked():  # other threads see all of these changes or none
            learner, (labels, outputs) = self.learner_, merge_labels(self.classes_, self._outputs, more_labels)
            prepare = updated_scale(learner.prepare, "X", x)
            if len(labels) > len(self.classes_):
                learner.grow(len(labels))
                self.classes_, self._outputs = labels, outputs
                if self.class_weight is not None:
                    learner.criterion = self._criterion(labels, outputs).to(learner.device)
            self._update_lr()
            learner.prepare = prepare
        self._learn(learner, x, outputs_of(y, labels, outputs))
        return self

    def _criterion(
        self, labels: NDArray[Any], outputs: NDArray[np.int64], y: NDArray[Any] | None = None
    ) -> CrossEntropy:
        """The loss, with the weights of the classes in the order of the outputs; `y` are all labels, if known."""
        class_weight = self.class_weight
        if class_weight is None:
            return CrossEntropy()
        if "criterion" in self._own_options():
            remedy = "give the weights in one of them"
            raise invalid("class_weight", class_weight, "None, as options has a criterion", remedy)
        weights = np.empty(len(labels))
        if isinstance(class_weight, str):
            weights[outputs] = balanced_weights(class_weight, labels, y)
        else:
            weights[outputs] = given_weights(class_weight, labels)
        return CrossEntropy(weights)

    def _class_scores(self, X: Any) -> tuple[Tensor, NDArray[Any]]:
        """Return the scores of the classes, and `classes_` of the same moment."""
        with self._locked():
            return self._scores(X).cpu()[:, torch.from_numpy(self._outputs.copy())], self.classes_
