"""A regressor that keeps learning."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from parabolic.checks import Description, check_finite, check_name, invalid
from parabolic.estimators.base import Estimator, Factory, as_numbers, updated_scale
from parabolic.estimators.serving import Targets
from parabolic.learners import MSE, Criterion, Huber, Learner, Numbers, Scale
from parabolic.memory import Memory

__all__ = ["ParabolicRegressor"]


class ParabolicRegressor(RegressorMixin, Estimator):  # type: ignore[misc]
    """A regressor that keeps learning, for one target or several, and remembers what it learned before.

    `fit`, `partial_fit` and all settings work as in `ParabolicClassifier`; `scale` applies to the targets too. PCL's
    bridges end at the nearest example, unless `options` says otherwise.

    Args:
        learner: a method by its name, or its class; methods that need classes are refused.
        loss: "mse", "huber", or a `parabolic.Numbers` of your own.
        model: the network, or a function (shape, outputs) that returns one.
        options: further options of the learner, by name. A `criterion` among them gets targets as they are, not scaled.
        memory: how many examples the memory holds, for methods that have one, or a memory such as `Recent(200)` (None:
            that of `options`, or the method's default, 200).
        batch_size: how many examples are learned at a step.
        epochs: how many passes `fit` makes over the data.
        lr: the learning rate (None: that of `options`, or the method's default).
        average: decay of a moving average of the weights, used for prediction (None: that of `options`, or no average).
        scale: whether inputs and targets are standardised to mean 0 and standard deviation 1 over everything seen so
            far.
        device: where to compute: "cpu", "cuda", or "auto".
        random_state: decides the initial weights, the order and every draw, except those of dropout.

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
        memory: int | Memory | None = None,
        batch_size: int = 32,
        epochs: int = 20,
        lr: float | None = None,
        average: float | None = None,
        scale: bool = True,
        device: str | torch.device = "cpu",
        random_state: Any = None,
    ) -> None:
        super().__init__(
            learner=learner, model=model, options=options, memory=memory, batch_size=batch_size, epochs=epochs, lr=lr,
            average=average, scale=scale, device=device, random_state=random_state,
        )  # fmt: skip
        self.loss = loss

    def fit(self, X: Any, y: Any) -> Self:
        """Learn from examples and their targets, discarding everything learned before."""
        self._begin(X, y, self.epochs)
        return self

    def partial_fit(self, X: Any, y: Any) -> Self:
        """Continue learning from examples and their targets."""
        if not hasattr(self, "learner_") and self._begin(X, y, None):
            return self
        X, y = self._validated(X, y, reset=False, multi_output=True, y_numeric=True)
        x, target = self._tensor(X, self.learner_, self._example[1]), _target(y, self.learner_)
        self._check_examples(x)
        self._check_settings()
        if target.shape[1] != self.learner_.classes:
            raise invalid("y", target, f"one of shape {[len(y), self.learner_.classes]}, as before")
        self._rehearse(x, lambda trial: trial._continue(x[:1], target[:1]))
        return self._continue(x, target)

    def predict(self, X: Any) -> NDArray[np.float64]:
        """The prediction for each example: one-dimensional if the first targets were, otherwise a column per target."""
        with self._locked():  # scores and units must belong together
            scores = self._scores(X)
            answers = self.learner_.error.answer(scores).cpu().numpy()
            return answers[:, 0] if self._single else answers

    def predictor(self) -> nn.Module:
        """A module that maps rows of X, as a tensor, to what `predict` returns for them: to serve from.

        It is a copy in evaluation mode, on the learner's device, with the scaling as buffers, and contains neither
        memory nor optimiser. It only checks the type of X. See `Learner.predictor`.
        """
        check_is_fitted(self)
        with self._locked():
            return self._serving_module(Targets(self.learner_.error, self.learner_.device, self._single))

    def _begin(self, X: Any, y: Any, epochs: int | None) -> bool:
        """Learn from nothing, in one pass if `epochs` is None; returns False if another thread was the first to fit."""
        new = copy.copy(self)  # self takes its state in one step, or not at all
        X, y = new._validated(X, y, multi_output=True, y_numeric=True)
        # Between examples far apart, targets on a straight line are wrong wherever the function is curved.
        learner = new._build_learner(X, 1 if y.ndim == 1 else y.shape[1], new._criterion(), endpoints="nearest")
        x, target = new._tensor(X, learner), _target(y, learner)
        new._measure(learner, x, target)
        new._learn(learner, x, target, epochs)
        new.learner_, new._single, new._example = learner, y.ndim == 1, (x.shape[1:], x.dtype)
        return self._take_state(new, first=epochs is None)

    def _continue(self, x: Tensor, y: Tensor) -> Self:
        with self._locked():
            learner = self.learner_
            self._measure(learner, x, y)
            self._update_lr()
        self._learn(learner, x, y)
        return self

    def _criterion(self) -> Criterion:
        losses: dict[str, Numbers] = {"mse": MSE(), "huber": Huber()}
        if self.loss != "mse" and "criterion" in self._own_options():
            raise invalid("loss", self.loss, "'mse', the default, as options has a criterion", "give one of the two")
        if not isinstance(self.loss, Numbers):
            check_name("loss", self.loss, losses, "or give a parabolic.Numbers")
        loss = copy.copy(self.loss if isinstance(self.loss, Numbers) else losses[self.loss])
        if self.scale:
            loss.units = Scale()
        return loss

    @staticmethod
    def _measure(learner: Learner, x: Tensor, y: Tensor) -> None:
        """Update the scales of inputs and targets."""
        error, prepare = learner.error, updated_scale(learner.prepare, "X", x)
        if isinstance(error, Numbers):
            error.units = updated_scale(error.units, "y", y)
        learner.prepare = prepare

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _target(y: NDArray[Any], learner: Learner) -> Tensor:
    if y.dtype.kind in "mM":
        raise invalid("y", Description(f"an array of type {y.dtype}"), "numbers", "turn dates and times into seconds")
    target = torch.from_numpy(as_numbers(y)).reshape(len(y), -1).to(learner.device)
    if not isinstance(learner.error, Numbers) or learner.error.units is None:  # otherwise rounded after scaling
        target = target.to(learner.dtype)
    check_finite("y", target)
    return target
