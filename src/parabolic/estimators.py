"""Estimators for scikit-learn: a classifier and a regressor that learn continually."""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor, nn

from parabolic.backbones import MLP, drawing_apart
from parabolic.checks import (
    FILL_IN,
    Description,
    InputError,
    check_call,
    check_finite,
    check_gaps,
    check_name,
    check_number,
    invalid,
    plain,
)
from parabolic.engine import Diverged
from parabolic.experiments.execution import find_device
from parabolic.learners import MSE, Criterion, CrossEntropy, Huber, Learner, Numbers, ReplayLearner, Scale, find_learner
from parabolic.learners.functional import has_batch_norm, has_embedding
from parabolic.learners.moving import move, place
from parabolic.learners.predictor import fixed

__all__ = ["ParabolicClassifier", "ParabolicRegressor"]

Factory = Callable[[Sequence[int], int], nn.Module]
SHEET = 4096  # examples predicted at once
ANEW = ("batch_size", "epochs")  # settings that every call reads again
EXACT = 2**53  # from here on float64 cannot represent every whole number
CPU = torch.device("cpu")
FIRST = threading.RLock()  # taken instead of a learner's lock while there is no learner yet
REMEDIES = {
    "replay": "set it with options={'replay': …}",
    "weights": "announce classes that come later: partial_fit(X, y, classes=…)",
}


@contextmanager
def _renaming(row: int = 0) -> Iterator[None]:
    """Phrase a learner's errors in the estimator's terms; `row` is the first row of X that the learner was given."""
    try:
        yield
    except InputError as error:
        error.remedy = REMEDIES.get(error.name, error.remedy)
        if error.name in ("x", "X"):
            error.name = "X"
            error.got += f", counting from row {row}" if row else ""
        raise


class _Estimator(BaseEstimator):  # type: ignore[misc]
    """The base of both estimators: converts data to tensors, builds a learner and trains it."""

    learner_: Learner
    loss_: float
    _example: tuple[torch.Size, torch.dtype]  # shape and type of an example
    _made: dict[str, Any]  # the settings that the learner was made with

    learner: str | type[Learner]
    model: nn.Module | Factory | None
    options: Mapping[str, Any] | None
    memory: int
    batch_size: int
    epochs: int
    lr: float | None
    average: float | None
    scale: bool
    device: str | torch.device
    random_state: Any

    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(settings)  # unchanged and unchecked, as scikit-learn asks

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the settings by name and, if `deep`, each entry of `options` as options__NAME."""
        params: dict[str, Any] = super().get_params(deep)
        own = self.options if deep and isinstance(self.options, Mapping) else {}
        return params | {f"options__{name}": value for name, value in own.items()}

    def set_params(self, **params: Any) -> Self:
        """Change settings; options__NAME changes that entry of `options` and leaves the others."""
        own = {name: params.pop(name) for name in [*params] if name.startswith("options__")}
        super().set_params(**params)
        if own:
            self.options = self._own_options() | {name.removeprefix("options__"): own[name] for name in own}
        return self

    def __copy__(self) -> Self:
        """Return a shallow copy, which shares the learner (a pickle has a copy of it)."""
        made = object.__new__(type(self))
        with self._held():
            made.__dict__ = {**self.__dict__}
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with a learner of its own, on the same device."""
        memo[id(self)] = made = object.__new__(type(self))
        with self._held():
            made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle: a copy, as other threads may use the learner meanwhile, with all on the CPU."""
        with self._held():
            state: dict[str, Any] = copy.deepcopy(super().__getstate__())
        if "learner_" in state:
            state["_drawn"] = state["learner_"].generator.get_state()  # only this kind of device can go on from it
            move(state["learner_"], CPU)
        place(state, CPU)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state, and put the learner on the device that it was made for, if there is one here."""
        drawn = state.get("_drawn")
        super().__setstate__({name: value for name, value in state.items() if name != "_drawn"})
        if drawn is not None:
            asked = getattr(self, "_made", {}).get("device", self.device)
            move(self.learner_, _device_here(asked), drawn)

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the learner's lock, so that learner, classes and units are all of the same moment."""
        while True:
            learner = getattr(self, "learner_", None)
            with FIRST if learner is None else learner._turn():
                if getattr(self, "learner_", None) is learner:  # otherwise it was refitted meanwhile
                    yield
                    return

    def _become(self, new: Self, first: bool) -> bool:
        """Take the state of `new` in one step; with `first`, return False if another thread was the first to fit."""
        with self._held():
            if first and hasattr(self, "learner_"):
                return False
            self.__dict__ = new.__dict__
        return True

    def _checked(self, X: Any, *y: Any, **how: Any) -> Any:
        """Validate data as scikit-learn does, and refuse missing values that it does not detect."""
        for name, value in zip("Xy", (X, *y), strict=False):
            check_gaps(name, value)
        return validate_data(self, X, *y, allow_nd=True, **how)

    def _tensor(self, X: NDArray[Any], learner: Learner, known: torch.dtype | None = None) -> Tensor:
        """Convert examples for the learner: to the type of earlier ones (`known`), wherever that is exact."""
        if X.dtype.kind not in "biuf":
            got = Description(f"an array of type {X.dtype}")
            raise invalid("X", got, "numbers", "encode words as columns of numbers, and dates as seconds")
        kind = np.float64 if X.dtype == np.longdouble else X.dtype.newbyteorder("=")  # torch has no others
        x = torch.from_numpy(np.array(X, kind, order="C")).to(learner.device)
        numbers = x.dtype != torch.uint8 and self.model is None and learner.embed is None  # neither bytes nor ids
        if isinstance(learner.prepare, Scale):
            x = x.double()  # rounded only after scaling
        elif known is not None and not self.scale:
            x = _cast(x, known)
        elif self.scale or x.is_floating_point() or numbers:
            x = x.to(learner.dtype)
        check_finite("X", x)  # it may have been finite only in a wider type
        return x

    def _settings(self) -> dict[str, Any]:
        """Return all settings except those that every call reads again."""
        kept = {name: value for name, value in self.get_params(deep=False).items() if name not in ANEW}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in kept.items()}

    def _own_options(self) -> dict[str, Any]:
        if not isinstance(self.options, Mapping | None):
            raise invalid("options", self.options, "a mapping of names to values", "as in {'sigma_x': 0.1}")
        return dict(self.options or {})

    def _check_counts(self) -> None:
        for name in ANEW:
            check_number(name, getattr(self, name), whole=True, at_least=1)

    def _check_settings(self) -> None:
        """Refuse changes to the settings that the learner was made with, except to lr."""
        self._check_counts()
        now = self._settings()
        for name, before in self._made.items():
            if name != "lr" and not _same(now[name], before):
                remedy = "a change takes effect at the next fit: call fit, or set it back"
                raise invalid(name, now[name], "the value that the learner was made with", remedy)
        if now["lr"] is not None:
            check_number("lr", now["lr"], above=0)

    def _follow_lr(self) -> None:
        """Apply the current lr to the learner."""
        now, learner = self._settings(), self.learner_
        if now["lr"] != self._made["lr"]:
            usual = (now["options"] or {}).get("lr", type(learner).lr)
            learner.lr, self._made = plain(usual if now["lr"] is None else now["lr"]), now
            for group in learner.optim.param_groups:
                group["lr"] = learner.lr

    @torch.inference_mode(False)  # the learner must be able to train later
    @_renaming()
    def _make(self, X: NDArray[Any], outputs: int, criterion: str | Criterion, **usual: Any) -> Learner:
        """Build an untrained learner; `usual` are defaults for those options that its class has."""
        self._check_counts()
        if not isinstance(self.scale, bool | np.bool_):
            raise invalid("scale", self.scale, "True or False")
        seed = int(check_random_state(self.random_state).randint(2**31))
        kind = find_learner(self.learner) if isinstance(self.learner, str) else self.learner
        if not (isinstance(kind, type) and issubclass(kind, Learner)):
            raise invalid("learner", kind, "a method's name, or its class", "`parabolic list` shows the names")
        options = copy.deepcopy(self._own_options())  # the values belong to the user
        fields = {each.name for each in dataclasses.fields(kind)} - {"model"}
        for name in options:
            check_name("options", name, fields)
        place = find_device(str(self.device))
        options = {name: each.to(place) if isinstance(each, nn.Module) else each for name, each in options.items()}
        given: dict[str, Any] = {name: value for name, value in usual.items() if name in fields}
        if issubclass(kind, ReplayLearner) and self.memory is not None:
            given["memory"] = self.memory
        given |= {"criterion": criterion, "seed": seed} | options
        given |= {name: value for name in ("lr", "average") if (value := getattr(self, name)) is not None}
        learner = kind(self._network(X.shape[1:], outputs, seed).to(place), **given)
        if self.scale and "prepare" not in options:
            if isinstance(learner.embed, nn.Embedding):
                raise invalid("scale", self.scale, "False, as embed looks up ids", "ids cannot be scaled")
            learner.prepare = Scale()
        self._made = self._settings()
        self._alone = math.inf  # how many examples could be recalled when batch norm met a single one; none yet
        return learner

    def _network(self, shape: Sequence[int], outputs: int, seed: int) -> nn.Module:
        if isinstance(self.model, nn.Module):
            return copy.deepcopy(self.model)
        factory = _mlp if self.model is None else self.model
        check_call("model", factory, "shape", "outputs")
        with drawing_apart():
            torch.manual_seed(seed)
            made = factory(shape, outputs)
        if not isinstance(made, nn.Module):
            raise invalid("model", type(made), "a torch.nn.Module, or a function (shape, outputs) that returns one")
        return made

    @_renaming()
    def _learn(self, learner: Learner, x: Tensor, y: Tensor, epochs: int | None = None) -> None:
        """Train on the examples once, in their order, or for several epochs, reshuffled each time."""
        y, rng, size = y.to(x.device), np.random.default_rng(learner.seed), int(self.batch_size)
        orders = [torch.from_numpy(rng.permutation(len(x))) for _ in range(epochs or 0)] or [torch.arange(len(x))]
        rows = [part.to(x.device) for order in orders for part in _batches(order, size, learner.model)]
        task = None
        if learner.needs_tasks:
            with learner.lock:
                task = self._tasks = 0 if epochs else getattr(self, "_tasks", -1) + 1
            batches = list(zip(x.split(size), y.split(size), strict=True))
            learner.start_task(batches)
        loss = total = torch.zeros((), dtype=torch.float64)
        steps = len(rows) // len(orders)
        for number, part in enumerate(rows):
            loss = learner.observe(x[part], y[part], task).double()
            total = total + loss if number % steps else loss  # of one pass
        if task is not None:
            learner.end_task(batches)
        self.loss_ = float(total) / steps
        if not math.isfinite(float(loss)):
            raise Diverged(f"the loss became {float(loss)}: lower lr (now {learner.lr:g}), or set clip_norm in options")

    @_renaming()
    def _check_like(self, x: Tensor) -> None:
        """Refuse what the learner would refuse, before anything changes."""
        shape, dtype = self._example
        if (x.shape[1:], x.dtype) != self._example:
            raise invalid("X", x, f"examples of shape {list(shape)} and type {str(dtype)[6:]}, as before")
        learner = self.learner_
        ids = not x.is_floating_point() or has_embedding(learner.model)
        for part in x.split(SHEET) if ids or not isinstance(learner.prepare, Scale | None) else ():
            learner.predict(part)  # only the network knows which ids exist, and only `prepare` what it returns

    def _rehearse(self, x: Tensor, go_on: Callable[[Self], object]) -> None:
        """Let a copy go on first if batch norm meets a single example: only a step shows if it is refused."""
        learner = self.learner_
        if min(len(x), int(self.batch_size)) > 1 or not has_batch_norm(learner.model):
            return
        stored = len(learner.past) if isinstance(learner, ReplayLearner) else 0
        if not learner.needs_tasks and stored >= getattr(self, "_alone", math.inf):
            return  # one was learned with as little to recall
        with self._held():
            trial = copy.copy(self)
            trial.learner_ = copy.deepcopy(learner)
        go_on(trial)
        self._alone = stored

    def _served(self, answer: nn.Module) -> nn.Module:
        """Return a module of its own that predicts: the learner's predictor, followed by `answer`."""
        scaled = isinstance(self.learner_.prepare, Scale)
        return nn.Sequential(
            OrderedDict(rows=_Rows(self._example[1], scaled), scores=self.learner_.predictor(), answer=answer)
        ).eval()

    def _scores(self, X: Any) -> Tensor:
        """Return the scores of examples, all by the same weights, as the lock is held."""
        check_is_fitted(self)
        X, found, learner = self._checked(X, reset=False), [], self.learner_
        for row in range(0, len(X), SHEET):
            with _renaming(row):
                x = self._tensor(X[row : row + SHEET], learner, self._example[1])
                found.append(learner.scores(x).double())
                if not found[-1].isfinite().all():
                    check_finite("X", learner.inputs(x))  # in the network's type
                    raise Diverged(
                        "the scores are not finite numbers: the network has diverged, or X is far from all that it has "
                        f"learned; call fit with a lower lr (now {learner.lr:g}), or with clip_norm in options"
                    )
        return torch.cat(found)


class ParabolicClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
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
            searches each also has its own name, such as options__sigma_x. An `lr` or `average` here applies only if the
            argument of that name is None; a `memory` here overrides the argument.
        memory: how many examples the memory holds, for methods that have one.
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
        memory: int = 200,
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
        _check_labels("y", y)
        X, y = self._checked(X, y, reset=False)
        if isinstance(self.class_weight, str):
            _balanced(self.class_weight, y, None)  # raises: not all labels are known
        x, labels = self._tensor(X, self.learner_, self._example[1]), _labels(y, classes)
        self._check_like(x)
        self._check_settings()
        self._rehearse(x, lambda trial: trial._go_on(x[:1], y[:1], labels))
        return self._go_on(x, y, labels)

    def predict(self, X: Any) -> NDArray[Any]:
        """The label of each example."""
        scores, classes = self._class_scores(X)
        found: NDArray[Any] = classes[scores.softmax(1).argmax(1).numpy()]
        return found

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """The probability of each of `classes_`, for each example."""
        return self._class_scores(X)[0].softmax(1).numpy()

    def predict_log_proba(self, X: Any) -> NDArray[np.float64]:
        """The logarithms of these probabilities, even of those too small for a float."""
        return self._class_scores(X)[0].log_softmax(1).numpy()

    def _begin(self, X: Any, y: Any, classes: Any, epochs: int | None) -> bool:
        new = copy.copy(self)  # self takes its state in one step, or not at all
        _check_labels("y", y)
        X, y = new._checked(X, y)
        labels, outputs = _merged(y[:0], np.arange(0), _labels(y, classes, part=epochs is None))
        learner = new._make(X, len(labels), new._criterion(labels, outputs, None if epochs is None else y))
        learner.grow(len(labels))
        x = new._tensor(X, learner)
        learner.prepare = _measured(learner.prepare, "X", x)
        new._learn(learner, x, _numbered(y, labels, outputs), epochs)
        new.learner_, new.classes_, new._outputs = learner, labels, outputs
        new._example = (x.shape[1:], x.dtype)
        return self._become(new, first=epochs is None)

    def _go_on(self, x: Tensor, y: NDArray[Any], more: NDArray[Any]) -> Self:
        with self._held():  # other threads see all of these changes or none
            learner, (labels, outputs) = self.learner_, _merged(self.classes_, self._outputs, more)
            prepare = _measured(learner.prepare, "X", x)
            if len(labels) > len(self.classes_):
                learner.grow(len(labels))
                self.classes_, self._outputs = labels, outputs
                if self.class_weight is not None:
                    learner.criterion = self._criterion(labels, outputs).to(learner.device)
            self._follow_lr()
            learner.prepare = prepare
        self._learn(learner, x, _numbered(y, labels, outputs))
        return self

    def _criterion(
        self, labels: NDArray[Any], outputs: NDArray[np.int64], y: NDArray[Any] | None = None
    ) -> CrossEntropy:
        """The loss, with the weights of the classes in the order of the outputs; `y` are all labels, if known."""
        given = self.class_weight
        if given is None:
            return CrossEntropy()
        if "criterion" in self._own_options():
            raise invalid("class_weight", given, "None, as options has a criterion", "give the weights in one of them")
        weights = np.empty(len(labels))
        weights[outputs] = _balanced(given, labels, y) if isinstance(given, str) else _given(given, labels)
        return CrossEntropy(weights)

    def predictor(self) -> nn.Module:
        """A module that maps rows of X, as a tensor, to scores in the order of `classes_`: to serve from.

        `scores.softmax(1)` is what `predict_proba` returns, and `classes_[scores.argmax(1)]` what `predict` does. Keep
        `classes_` with it. It is a copy in evaluation mode, on the learner's device, with the scaling as buffers, and
        contains neither memory nor optimiser. It only checks the type of X. See `Learner.predictor`.
        """
        check_is_fitted(self)
        with self._held():
            answer = _Columns(torch.from_numpy(self._outputs).to(self.learner_.device))
            return self._served(answer)

    def memory_counts(self) -> dict[Any, int]:
        """How many examples of each of `classes_` are in memory: all 0 for a method without one."""
        check_is_fitted(self)
        with self._held():
            learner, counts = self.learner_, np.zeros(len(self.classes_), dtype=np.int64)
            if isinstance(learner, ReplayLearner):
                counts = learner.past["y"].bincount(minlength=len(counts)).cpu().numpy()
            return dict(zip(self.classes_.tolist(), counts[self._outputs].tolist(), strict=True))

    def _class_scores(self, X: Any) -> tuple[Tensor, NDArray[Any]]:
        """Return the scores of the classes, and `classes_` of the same moment."""
        with self._held():
            return self._scores(X).cpu()[:, torch.from_numpy(self._outputs)], self.classes_


class ParabolicRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """A regressor that keeps learning, for one target or several, and remembers what it learned before.

    `fit`, `partial_fit` and all settings work as in `ParabolicClassifier`; `scale` applies to the targets too. PCL's
    bridges end at the nearest example, unless `options` says otherwise.

    Args:
        learner: a method by its name, or its class; methods that need classes are refused.
        loss: "mse", "huber", or a `parabolic.Numbers` of your own.
        model: the network, or a function (shape, outputs) that returns one.
        options: further options of the learner, by name.
        memory: how many examples the memory holds, for methods that have one.
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
        X, y = self._checked(X, y, reset=False, multi_output=True, y_numeric=True)
        x, target = self._tensor(X, self.learner_, self._example[1]), _target(y, self.learner_)
        self._check_like(x)
        self._check_settings()
        if target.shape[1] != self.learner_.classes:
            raise invalid("y", target, f"one of shape {[len(y), self.learner_.classes]}, as before")
        self._rehearse(x, lambda trial: trial._go_on(x[:1], target[:1]))
        return self._go_on(x, target)

    def predict(self, X: Any) -> NDArray[np.float64]:
        """The prediction for each example: one-dimensional if the first targets were, otherwise a column per target."""
        with self._held():  # scores and units must belong together
            scores = self._scores(X)
            found = self.learner_.error.answer(scores).cpu().numpy()
            return found[:, 0] if self._single else found

    def predictor(self) -> nn.Module:
        """A module that maps rows of X, as a tensor, to what `predict` returns for them: to serve from.

        It is a copy in evaluation mode, on the learner's device, with the scaling as buffers, and contains neither
        memory nor optimiser. It only checks the type of X. See `Learner.predictor`.
        """
        check_is_fitted(self)
        with self._held():
            return self._served(_Targets(self.learner_.error, self.learner_.device, self._single))

    def _begin(self, X: Any, y: Any, epochs: int | None) -> bool:
        new = copy.copy(self)  # self takes its state in one step, or not at all
        X, y = new._checked(X, y, multi_output=True, y_numeric=True)
        # Between examples far apart, targets on a straight line are wrong wherever the function is curved.
        learner = new._make(X, 1 if y.ndim == 1 else y.shape[1], new._criterion(), endpoints="nearest")
        x, target = new._tensor(X, learner), _target(y, learner)
        new._measure(learner, x, target)
        new._learn(learner, x, target, epochs)
        new.learner_, new._single, new._example = learner, y.ndim == 1, (x.shape[1:], x.dtype)
        return self._become(new, first=epochs is None)

    def _go_on(self, x: Tensor, y: Tensor) -> Self:
        with self._held():
            learner = self.learner_
            self._measure(learner, x, y)
            self._follow_lr()
        self._learn(learner, x, y)
        return self

    def _criterion(self) -> Criterion:
        known: dict[str, type[MSE] | type[Huber]] = {"mse": MSE, "huber": Huber}
        if isinstance(self.loss, Numbers):
            return dataclasses.replace(self.loss, units=Scale()) if self.scale else copy.copy(self.loss)
        check_name("loss", self.loss, known, "or give a parabolic.Numbers")
        return known[self.loss](units=Scale() if self.scale else None)

    @staticmethod
    def _measure(learner: Learner, x: Tensor, y: Tensor) -> None:
        """Update the scales of inputs and targets."""
        error, prepare = learner.error, _measured(learner.prepare, "X", x)
        if isinstance(error, Numbers):
            error.units = _measured(error.units, "y", y)
        learner.prepare = prepare

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class _Rows(nn.Module):
    """Converts rows to the type of those learned, as `_tensor` does, if no values can be lost."""

    def __init__(self, dtype: torch.dtype, scaled: bool) -> None:
        super().__init__()
        self.dtype, self.scaled = dtype, scaled

    def forward(self, x: Tensor) -> Tensor:
        ids = x.is_floating_point() and not self.dtype.is_floating_point
        bytes_ = torch.uint8 in (x.dtype, self.dtype) and not self.scaled  # they stand for 0 to 1
        if x.dtype != self.dtype and (ids or bytes_):
            raise invalid("X", x, f"examples of type {str(self.dtype)[6:]}, as before")
        return x.to(self.dtype)


class _Columns(nn.Module):
    """Scores in float64, in the order of the classes."""

    outputs: Tensor

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self.register_buffer("outputs", outputs)

    def forward(self, scores: Tensor) -> Tensor:
        return scores.double().index_select(1, self.outputs)


class _Targets(nn.Module):
    """Targets in float64, in their own units."""

    def __init__(self, error: Criterion, device: torch.device, single: bool) -> None:
        super().__init__()
        self.units = fixed(getattr(error, "units", None), device)
        self.error, self.single = copy.copy(error), single
        vars(self.error).update(units=self.units, loss=None)  # only its `answer` is needed

    def forward(self, scores: Tensor) -> Tensor:
        found = self.error.answer(scores.double())
        return found[:, 0] if self.single else found


def _device_here(asked: str | torch.device) -> torch.device:
    """The device that a pickled estimator was made for or, with a warning, the CPU if this machine has no such."""
    try:
        return find_device(str(asked))
    except InputError as error:
        told = f"{error}. What was loaded computes on the CPU; before its next fit, call set_params(device='auto')"
        warnings.warn(told, RuntimeWarning, stacklevel=3)
        return CPU


def _mlp(shape: Sequence[int], outputs: int) -> nn.Module:
    """A perceptron sized by the input.

    In float64, as in scikit-learn, so that a prediction does not depend on the other examples of its batch.
    """
    width = min(max(4 * math.prod(shape), 32), 256)
    return MLP(shape, outputs, hidden=(width, width)).double()


def _batches(order: Tensor, size: int, model: nn.Module) -> list[Tensor]:
    """Split rows into batches. A single last row joins the batch before it if batch norm could not learn it alone."""
    parts = list(order.split(size))
    if len(parts) > 1 and len(parts[-1]) == 1 and has_batch_norm(model):
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert numbers to `dtype`, or return them as they are if it is an integer type that would change them.

    Bytes stand for 0 to 1, and are never converted to or from floats.
    """
    if torch.uint8 in (x.dtype, dtype) and (x.is_floating_point() or dtype.is_floating_point):
        return x
    cast = x.to(dtype)
    return cast if dtype.is_floating_point or torch.equal(cast.to(x.dtype), x) else x


def _check_labels(name: str, y: Any) -> None:
    """Refuse labels of which some are missing, as NumPy would make words of these."""
    check_gaps(name, y)
    if y is None or getattr(getattr(y, "dtype", None), "kind", "O") != "O":
        return
    if missing := sum(map(_is_missing, np.asarray(y, dtype=object).flat)):
        raise invalid(name, Description(f"{missing} missing labels"), "words or numbers", f"{FILL_IN}, or drop it")


def _is_missing(label: Any) -> bool:
    """Whether a label is None, or NaN, NaT or pandas' NA, which do not equal themselves."""
    return label is None or str(label == label) in ("False", "<NA>")


def _target(y: NDArray[Any], learner: Learner) -> Tensor:
    if y.dtype.kind in "mM":
        raise invalid("y", Description(f"an array of type {y.dtype}"), "numbers", "turn dates and times into seconds")
    target = torch.from_numpy(np.array(y, dtype=np.float64)).reshape(len(y), -1).to(learner.device)
    if not isinstance(learner.error, Numbers) or learner.error.units is None:  # otherwise rounded after scaling
        target = target.to(learner.dtype)
    check_finite("y", target)
    return target


def _measured(scale: Any, name: str, x: Tensor) -> Any:
    """Return a copy of a Scale, updated with these numbers; anything else is returned as it is."""
    if not isinstance(scale, Scale):
        return scale
    scale = copy.copy(scale)
    scale.update(x, name)
    return scale


def _balanced(given: str, labels: NDArray[Any], y: NDArray[Any] | None) -> NDArray[np.float64]:
    """Weights that are inverse to how often the classes occur, as in scikit-learn."""
    check_name("class_weight", given, ["balanced"], "or give a dict from labels to weights")
    if y is None:
        remedy = (
            "a new class is rare only so far, and already half of what is learned: "
            "options={'balance': 0.5} or learner='cbrs' compensate for frequencies as they change"
        )
        raise invalid("class_weight", given, "None or a dict from labels to weights for partial_fit", remedy)
    found: NDArray[np.float64] = compute_class_weight(given, classes=labels, y=y)
    return found


def _given(weights: Any, labels: NDArray[Any]) -> list[float]:
    """The weight of each label in a mapping: 1 if it is not there."""
    if not isinstance(weights, Mapping):
        raise invalid("class_weight", weights, "None, 'balanced', or a dict from labels to weights")
    for label, weight in weights.items():
        check_number(f"class_weight of {label!r}", weight, at_least=0)
        if isinstance(label, str | bytes) != (labels.dtype.kind in "OUS"):
            raise invalid("class_weight", label, f"labels like those in y, such as {labels[:1].tolist()[0]!r}")
    if labels.dtype.kind in "mM":  # in the unit of the labels: a key may have another
        weights = {np.asarray(label, labels.dtype).item(): weight for label, weight in weights.items()}
    return [float(weights.get(label, 1.0)) for label in labels.tolist()]


def _numbered(y: NDArray[Any], labels: NDArray[Any], outputs: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(outputs[np.searchsorted(labels, y)])


def _labels(y: NDArray[Any], classes: Any, part: bool = True) -> NDArray[Any]:
    """Return the labels of a batch and those that `classes` announces."""
    # In part of the data every label may differ; repeating them avoids scikit-learn's warning about too many classes.
    check_classification_targets(np.repeat(y, 2) if part else y)
    _check_labels("classes", classes)
    found = np.unique(y)
    return found if classes is None else _union(found, np.unique(column_or_1d(classes)))


def _merged(
    classes: NDArray[Any], outputs: NDArray[np.int64], labels: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the classes and new labels, sorted, and the output of each; known classes keep their outputs."""
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
    both = np.unique(np.concatenate([one, other]))
    if both.dtype.kind == "f" and len(both) and np.abs(both).max() >= EXACT:
        got = Description(f"labels of {EXACT} or more as floats, or of types that NumPy merges into floats")
        raise invalid("y", got, "labels that stay distinct", "give all of them as int64, or as words")
    return both


def _same(one: Any, other: Any) -> bool:
    """Whether a setting is unchanged: equal if it is a plain value, otherwise the same object."""
    one, other = (str(each) if isinstance(each, torch.device) else plain(each) for each in (one, other))
    kinds = str | int | float
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return one is other or (isinstance(one, kinds) and isinstance(other, kinds) and one == other)
