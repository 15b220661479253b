"""The learners as scikit-learn knows them: a classifier and a regressor that go on learning."""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
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
from parabolic.learners import MSE, Criterion, Huber, Learner, Numbers, ReplayLearner, Scale, find_learner
from parabolic.learners.functional import has_batch_norm, has_embedding

__all__ = ["ParabolicClassifier", "ParabolicRegressor"]

Factory = Callable[[Sequence[int], int], nn.Module]
SHEET = 4096  # examples that are predicted together
ANEW = ("batch_size", "epochs")  # settings that each call reads
EXACT = 2**53  # from here on float64 does not tell all whole numbers apart
FIRST = threading.RLock()  # held in place of a learner's lock where there is no learner yet
REMEDIES = {
    "replay": "it is set by options={'replay': …}",
    "weights": "a class that is still to come is announced: partial_fit(X, y, classes=…)",
}


@contextmanager
def _renaming(row: int = 0) -> Iterator[None]:
    """Let errors of a learner, which was given the examples from that row on, speak as one of scikit-learn does."""
    try:
        yield
    except InputError as error:
        error.remedy = REMEDIES.get(error.name, error.remedy)
        if error.name in ("x", "X"):
            error.name = "X"
            error.got += f", counting from row {row}" if row else ""
        raise


class _Estimator(BaseEstimator):  # type: ignore[misc]
    """What both share: how data become tensors, and how a learner is made and goes through them."""

    learner_: Learner
    _example: tuple[torch.Size, torch.dtype]  # what one is like
    _made: dict[str, Any]  # the settings that the learner was made with

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

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The settings by name and, if `deep`, each of `options` as options__NAME."""
        params: dict[str, Any] = super().get_params(deep)
        own = self.options if deep and isinstance(self.options, Mapping) else {}
        return params | {f"options__{name}": value for name, value in own.items()}

    def set_params(self, **params: Any) -> Self:
        """Change settings; options__NAME changes that one of `options` and leaves the others."""
        own = {name: params.pop(name) for name in [*params] if name.startswith("options__")}
        super().set_params(**params)
        if own:
            self.options = self._own_options() | {name.removeprefix("options__"): own[name] for name in own}
        return self

    def __copy__(self) -> Self:
        """A shallow one: the learner, which a pickle has a copy of, is the same."""
        made = object.__new__(type(self))
        with self._held():
            made.__dict__ = {**self.__dict__}
        return made

    def __getstate__(self) -> dict[str, Any]:
        """For a pickle: with a copy of the learner, which other threads may use meanwhile."""
        with self._held():
            state: dict[str, Any] = super().__getstate__()
            return state | ({"learner_": copy.deepcopy(state["learner_"])} if "learner_" in state else {})

    @contextmanager
    def _held(self) -> Iterator[None]:
        """The learner's lock, under which all that was learned is of one moment: of classes and units too."""
        while True:
            learner = getattr(self, "learner_", None)
            with FIRST if learner is None else learner._turn():
                if getattr(self, "learner_", None) is learner:  # else it was fitted anew meanwhile
                    yield
                    return

    def _become(self, new: Self, first: bool) -> bool:
        """Be the new one, in one step; not so a `first` one, where another thread's was there before."""
        with self._held():
            if first and hasattr(self, "learner_"):
                return False
            self.__dict__ = new.__dict__
        return True

    def _checked(self, X: Any, *y: Any, **how: Any) -> Any:
        """Data as scikit-learn checks them, without the gaps that it does not see."""
        for name, value in zip("Xy", (X, *y), strict=False):
            check_gaps(name, value)
        return validate_data(self, X, *y, allow_nd=True, **how)

    def _tensor(self, X: NDArray[Any], learner: Learner, known: torch.dtype | None = None) -> Tensor:
        """Examples as the learner takes them: in the type of those that are known, wherever that is exact."""
        if X.dtype.kind not in "biuf":
            got = Description(f"an array of type {X.dtype}")
            raise invalid("X", got, "numbers", "turn words into columns of their own, and dates into seconds")
        kind = np.float64 if X.dtype == np.longdouble else X.dtype.newbyteorder("=")  # torch knows no others
        x = torch.from_numpy(np.array(X, kind, order="C")).to(learner.device)
        numbers = x.dtype != torch.uint8 and self.model is None and learner.embed is None  # no bytes, and no ids
        if isinstance(learner.prepare, Scale):
            x = x.double()  # it is rounded once it is scaled
        elif known is not None and not self.scale:
            x = _cast(x, known)
        elif self.scale or x.is_floating_point() or numbers:
            x = x.to(learner.dtype)
        check_finite("X", x)  # it may have been, in a wider type
        return x

    def _settings(self) -> dict[str, Any]:
        """All settings but those that each call reads anew."""
        kept = {name: value for name, value in self.get_params(deep=False).items() if name not in ANEW}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in kept.items()}

    def _own_options(self) -> dict[str, Any]:
        if not isinstance(self.options, Mapping | None):
            raise invalid("options", self.options, "values by their names", "as in {'sigma_x': 0.1}")
        return dict(self.options or {})

    def _check_counts(self) -> None:
        for name in ANEW:
            check_number(name, getattr(self, name), whole=True, at_least=1)

    def _check_settings(self) -> None:
        """Refuse a change of what the learner is made of; its lr may change."""
        self._check_counts()
        now = self._settings()
        for name, before in self._made.items():
            if name != "lr" and not _same(now[name], before):
                remedy = "a change takes effect at the next fit: call fit, or set it back"
                raise invalid(name, now[name], "what it was when the learner was made", remedy)
        if now["lr"] is not None:
            check_number("lr", now["lr"], above=0)

    def _follow_lr(self) -> None:
        """Let the learner go on with the lr that is set now."""
        now, learner = self._settings(), self.learner_
        if now["lr"] != self._made["lr"]:
            usual = (now["options"] or {}).get("lr", type(learner).lr)
            learner.lr, self._made = plain(usual if now["lr"] is None else now["lr"]), now
            for group in learner.optim.param_groups:
                group["lr"] = learner.lr

    @torch.inference_mode(False)  # it is to learn later
    @_renaming()
    def _make(self, X: NDArray[Any], outputs: int, criterion: str | Criterion, **usual: Any) -> Learner:
        """A learner that has seen nothing; `usual` are options that it has, if it knows them, unless told otherwise."""
        self._check_counts()
        seed = int(check_random_state(self.random_state).randint(2**31))
        kind = find_learner(self.learner) if isinstance(self.learner, str) else self.learner
        if not (isinstance(kind, type) and issubclass(kind, Learner)):
            raise invalid("learner", kind, "a method's name, or its class", "`parabolic list` shows the names")
        options = copy.deepcopy(self._own_options())  # whatever it holds is the user's own
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
                raise invalid("scale", self.scale, "False, as embed looks ids up", "ids are no measurements")
            learner.prepare = Scale()
        self._made = self._settings()
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
        """Go through examples once, in their order; or several times, shuffled anew each time."""
        y, rng, size = y.to(x.device), np.random.default_rng(learner.seed), int(self.batch_size)
        orders = [torch.from_numpy(rng.permutation(len(x))) for _ in range(epochs or 0)] or [torch.arange(len(x))]
        rows = [part.to(x.device) for order in orders for part in _batches(order, size, learner.model)]
        task = None
        if learner.needs_tasks:
            with learner.lock:
                task = self._tasks = 0 if epochs else getattr(self, "_tasks", -1) + 1
            batches = list(zip(x.split(size), y.split(size), strict=True))
            learner.start_task(batches)
        loss = x.new_zeros(())
        for part in rows:
            loss = learner.observe(x[part], y[part], task)
        if task is not None:
            learner.end_task(batches)
        if not math.isfinite(float(loss)):
            raise Diverged(f"the loss became {float(loss)}: lower lr (now {learner.lr:g}), or give options a clip_norm")

    @_renaming()
    def _check_like(self, x: Tensor) -> None:
        """Refuse what the learner would refuse, before anything changes."""
        shape, dtype = self._example
        if (x.shape[1:], x.dtype) != self._example:
            raise invalid("X", x, f"examples of shape {list(shape)} and type {str(dtype)[6:]}, as before")
        learner = self.learner_
        ids = not x.is_floating_point() or has_embedding(learner.model)
        for part in x.split(SHEET) if ids or not isinstance(learner.prepare, Scale | None) else ():
            learner.predict(part)  # of ids only the network knows which there are, and of a prepare what it gives

    def _trial(self, x: Tensor) -> Self | None:
        """A copy to learn first where batch norm meets a single example: whether it is refused only a step can tell."""
        if min(len(x), int(self.batch_size)) > 1 or not has_batch_norm(self.learner_.model):
            return None
        with self._held():
            trial = copy.copy(self)
            trial.learner_ = copy.deepcopy(self.learner_)
        return trial

    def _scores(self, X: Any) -> Tensor:
        """What the network says of examples: one network of all of them, as the lock is held."""
        check_is_fitted(self)
        X, found, learner = self._checked(X, reset=False), [], self.learner_
        for row in range(0, len(X), SHEET):
            with _renaming(row):
                x = self._tensor(X[row : row + SHEET], learner, self._example[1])
                found.append(learner.scores(x).double())
                if not found[-1].isfinite().all():
                    check_finite("X", learner.inputs(x))  # in the network's type
                    raise Diverged(
                        "the scores are not finite numbers: the network has diverged, or X is far from all that it "
                        f"learned; call fit, with a lower lr (now {learner.lr:g}) or a clip_norm among the options"
                    )
        return torch.cat(found)


class ParabolicClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A classifier that keeps learning: new classes may come with any `partial_fit`, and old ones are kept in mind.

    `fit` begins anew and goes through the data `epochs` times, shuffled; `partial_fit` goes on with what comes, once,
    in the order in which it comes. For methods that must know of tasks each call is a task. A `fit` that fails leaves
    all as it was.

    Args:
        learner: a method by its name, such as "pcl" or "er" (`parabolic list` shows them), or a class.
        model: the network, a `torch.nn.Module` of which a copy is trained, or a function (shape, outputs) that makes
            one. By default a perceptron of two hidden layers, sized by the input, in float64. It must end in a
            `torch.nn.Linear`, which gets a row for each class that is new.
        options: further options of the learner, by name: {"sigma_x": 0.1, "clip_norm": 1.0}. For `set_params` and grids
            each has a name of its own too, such as options__sigma_x. An `lr` or `average` among them counts where the
            argument of that name is None; a `memory` among them comes before the argument.
        memory: how many examples are kept, by methods that keep any.
        batch_size: how many examples are learned at a step.
        epochs: how often `fit` goes through the data.
        lr: the learning rate (None: that of `options`, or the method's own).
        average: decay of a moving average of the weights, kept for prediction (None: that of `options`, or no average).
        scale: whether inputs are brought to mean 0 and deviation 1, as they are over everything seen so far. They are
            kept in float64, and rounded to the network's type once they are scaled. Without it bytes become numbers
            from 0 to 1 and, for a `model` of your own or with `embed`, other whole numbers stay whole: ids of words.
        device: where to compute: "cpu", "cuda", or "auto".
        random_state: decides weights, order and draws; not those of a network that draws itself (dropout), which are
            from torch's own generator (`torch.manual_seed`).

    Attributes:
        classes_: the labels seen so far, sorted.
        learner_: the learner, whose memory and model are there to be looked at.
        n_features_in_: how many numbers an example has.
        feature_names_in_: the names of its columns, where X was a frame.

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
        self._begin(X, y, None, self.epochs)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Self:
        """Go on learning from examples and their labels; `classes` may name labels that will come."""
        if not hasattr(self, "learner_") and self._begin(X, y, classes, None):
            return self
        _check_labels("y", y)
        X, y = self._checked(X, y, reset=False)
        x, labels = self._tensor(X, self.learner_, self._example[1]), _labels(y, classes)
        self._check_like(x)
        self._check_settings()
        if trial := self._trial(x):
            trial._go_on(x[:1], y[:1], labels)
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
        """The logarithms of these probabilities, also of those that are too small for a float."""
        return self._class_scores(X)[0].log_softmax(1).numpy()

    def _begin(self, X: Any, y: Any, classes: Any, epochs: int | None) -> bool:
        new = copy.copy(self)  # what self becomes in one step, or not at all
        _check_labels("y", y)
        X, y = new._checked(X, y)
        labels, outputs = _merged(y[:0], np.arange(0), _labels(y, classes, part=epochs is None))
        learner = new._make(X, len(labels), "cross-entropy")
        learner.grow(len(labels))
        x = new._tensor(X, learner)
        learner.prepare = _measured(learner.prepare, "X", x)
        new._learn(learner, x, _numbered(y, labels, outputs), epochs)
        new.learner_, new.classes_, new._outputs = learner, labels, outputs
        new._example = (x.shape[1:], x.dtype)
        return self._become(new, first=epochs is None)

    def _go_on(self, x: Tensor, y: NDArray[Any], more: NDArray[Any]) -> Self:
        with self._held():  # another thread finds all of it as it was, or all of it done
            learner, (labels, outputs) = self.learner_, _merged(self.classes_, self._outputs, more)
            prepare = _measured(learner.prepare, "X", x)
            if len(labels) > len(self.classes_):
                learner.grow(len(labels))
                self.classes_, self._outputs = labels, outputs
            self._follow_lr()
            learner.prepare = prepare
        self._learn(learner, x, _numbered(y, labels, outputs))
        return self

    def _class_scores(self, X: Any) -> tuple[Tensor, NDArray[Any]]:
        """The scores of `classes_`, and these."""
        with self._held():
            return self._scores(X).cpu()[:, torch.from_numpy(self._outputs)], self.classes_


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
        lr: the learning rate (None: that of `options`, or the method's own).
        average: decay of a moving average of the weights, kept for prediction (None: that of `options`, or no average).
        scale: whether inputs and targets are brought to mean 0 and deviation 1, as over everything seen so far.
        device: where to compute: "cpu", "cuda", or "auto".
        random_state: decides weights, order and draws, but none of dropout.

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
        self._begin(X, y, self.epochs)
        return self

    def partial_fit(self, X: Any, y: Any) -> Self:
        """Go on learning from examples and their targets."""
        if not hasattr(self, "learner_") and self._begin(X, y, None):
            return self
        X, y = self._checked(X, y, reset=False, multi_output=True, y_numeric=True)
        x, target = self._tensor(X, self.learner_, self._example[1]), _target(y, self.learner_)
        self._check_like(x)
        self._check_settings()
        if target.shape[1] != self.learner_.classes:
            raise invalid("y", target, f"one of shape {[len(y), self.learner_.classes]}, as before")
        if trial := self._trial(x):
            trial._go_on(x[:1], target[:1])
        return self._go_on(x, target)

    def predict(self, X: Any) -> NDArray[np.float64]:
        """The number of each example: flat, if the first targets were, or else in columns, as many as they had."""
        with self._held():  # the units are those of the scores
            scores = self._scores(X)
            found = self.learner_.error.answer(scores).cpu().numpy()
            return found[:, 0] if self._single else found

    def _begin(self, X: Any, y: Any, epochs: int | None) -> bool:
        new = copy.copy(self)  # what self becomes in one step, or not at all
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
        """Take inputs and targets into what decides how they are scaled."""
        error, prepare = learner.error, _measured(learner.prepare, "X", x)
        if isinstance(error, Numbers):
            error.units = _measured(error.units, "y", y)
        learner.prepare = prepare

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


def _batches(order: Tensor, size: int, model: nn.Module) -> list[Tensor]:
    """Rows in batches. A single one that is left goes with those before it where batch norm cannot learn it alone."""
    parts = list(order.split(size))
    if len(parts) > 1 and len(parts[-1]) == 1 and has_batch_norm(model):
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in a type, or as they are where it does not hold them; bytes, which mean 0 to 1, are no floats."""
    if torch.uint8 in (x.dtype, dtype) and (x.is_floating_point() or dtype.is_floating_point):
        return x
    cast = x.to(dtype)
    return cast if dtype.is_floating_point or torch.equal(cast.to(x.dtype), x) else x


def _check_labels(name: str, y: Any) -> None:
    """Refuse words of which some are missing; NumPy would make a word of these, too."""
    check_gaps(name, y)
    if y is None or getattr(getattr(y, "dtype", None), "kind", "O") != "O":
        return
    if missing := sum(map(_is_missing, np.asarray(y, dtype=object).flat)):
        raise invalid(name, Description(f"{missing} missing labels"), "words or numbers", f"{FILL_IN}, or drop it")


def _is_missing(label: Any) -> bool:
    """Whether it is None, NaN, NaT or pandas' NA, of which no one can tell what it is equal to."""
    return label is None or str(label == label) in ("False", "<NA>")


def _target(y: NDArray[Any], learner: Learner) -> Tensor:
    if y.dtype.kind in "mM":
        raise invalid("y", Description(f"an array of type {y.dtype}"), "numbers", "turn dates and times into seconds")
    target = torch.from_numpy(np.array(y, dtype=np.float64)).reshape(len(y), -1).to(learner.device)
    if not isinstance(learner.error, Numbers) or learner.error.units is None:  # else it is rounded when it is scaled
        target = target.to(learner.dtype)
    check_finite("y", target)
    return target


def _measured(scale: Any, name: str, x: Tensor) -> Any:
    """A copy of a scale that has seen these numbers too; what is no scale as it is."""
    if not isinstance(scale, Scale):
        return scale
    scale = copy.copy(scale)
    scale.update(x, name)
    return scale


def _numbered(y: NDArray[Any], labels: NDArray[Any], outputs: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(outputs[np.searchsorted(labels, y)])


def _labels(y: NDArray[Any], classes: Any, part: bool = True) -> NDArray[Any]:
    """The labels of a batch, and those that are announced."""
    # A part of the data may have a new label in each example: there is no warning of it where each is there twice.
    check_classification_targets(np.repeat(y, 2) if part else y)
    _check_labels("classes", classes)
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
    both = np.unique(np.concatenate([one, other]))
    if both.dtype.kind == "f" and len(both) and np.abs(both).max() >= EXACT:
        got = Description(f"labels of {EXACT} or more as floats, or of types that NumPy joins as such")
        raise invalid("y", got, "labels that stay apart", "give all of them as int64, or as words")
    return both


def _same(one: Any, other: Any) -> bool:
    """Whether a setting is as it was: equal, where it is a plain value, or else the same thing."""
    one, other = (str(each) if isinstance(each, torch.device) else plain(each) for each in (one, other))
    kinds = str | int | float
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return one is other or (isinstance(one, kinds) and isinstance(other, kinds) and one == other)
