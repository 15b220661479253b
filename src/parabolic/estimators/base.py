"""What both estimators share: data become tensors, a learner is built and trained, and threads see whole changes."""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from parabolic.backbones import MLP, drawing_apart
from parabolic.checks import (
    DEVICE_ERRORS,
    Description,
    InputError,
    check_call,
    check_finite,
    check_gaps,
    check_name,
    check_number,
    first_line,
    invalid,
    plain,
    signed,
    type_name,
)
from parabolic.engine import Diverged
from parabolic.estimators.serving import Rows
from parabolic.experiments.execution import find_device
from parabolic.experiments.presets import known_presets, load_preset
from parabolic.learners import Criterion, Learner, ReplayLearner, Scale, find_learner
from parabolic.learners.functional import has_batch_norm, has_embedding
from parabolic.learners.moving import copy_memo, copy_model, move, move_tensors
from parabolic.memory import Memory
from parabolic.options import options_of

__all__ = ["Estimator", "Factory", "as_numbers", "updated_scale"]

Factory = Callable[[Sequence[int], int], nn.Module]
SHEET = 4096  # examples predicted at once
ANEW = ("batch_size", "epochs")  # settings that every call reads again
OWN = ("lr", "average", "memory")  # arguments that are options too: unless they are None, they override those
CPU = torch.device("cpu")
ENCODE = "encode words as columns of numbers, and dates as seconds"
FIRST = threading.RLock()  # taken instead of a learner's lock while there is no learner yet
REMEDIES = {
    "replay": "set it with options={'replay': …}",
    "weights": "announce classes that come later: partial_fit(X, y, classes=…)",
}


@contextmanager
def _estimator_errors(row: int = 0) -> Iterator[None]:
    """Phrase a learner's errors in the estimator's terms; `row` is the first row of X that the learner was given."""
    try:
        yield
    except InputError as error:
        error.remedy = REMEDIES.get(error.name, error.remedy)
        if error.name in ("x", "X"):
            error.name = "X"
            error.got += f", counting from row {row}" if row else ""
        raise


class Estimator(BaseEstimator):  # type: ignore[misc]
    """The base of both estimators: converts data to tensors, builds a learner and trains it.

    A first call, `_begin`, works on a copy: it builds a learner, trains it, and takes over the copy's state at the end
    (`_take_state`), so that a call that fails changes nothing. A later one checks all it can, lets a copy `_rehearse`
    what only a step shows, and continues.
    """

    learner_: Learner
    loss_: float
    _example: tuple[torch.Size, torch.dtype]  # shape and type of an example
    _made: dict[str, Any]  # the settings that the learner was made with
    _tasks: int = -1  # the number of the last task, for methods that need tasks
    _alone: float = math.inf  # the memory's size when batch norm accepted a single example; infinite before

    learner: str | type[Learner]
    model: nn.Module | Factory | None
    options: Mapping[str, Any] | None
    memory: int | Memory | None
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
        options = self.options if deep and isinstance(self.options, Mapping) else {}
        return params | {f"options__{name}": value for name, value in options.items()}

    def set_params(self, **params: Any) -> Self:
        """Change settings; options__NAME changes that entry of `options` and leaves the others."""
        options = {name: params.pop(name) for name in [*params] if name.startswith("options__")}
        super().set_params(**params)
        if options:
            self.options = self._own_options() | {name.removeprefix("options__"): options[name] for name in options}
        return self

    def __copy__(self) -> Self:
        """Return a shallow copy, which shares the learner (a pickle has a copy of it)."""
        clone = object.__new__(type(self))
        with self._locked():
            clone.__dict__ = {**self.__dict__}
        return clone

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with a learner of its own, on the same device."""
        memo[id(self)] = clone = object.__new__(type(self))
        with self._locked():
            memo |= copy_memo(self.model)
            clone.__dict__ = copy.deepcopy(self.__dict__, memo)
        return clone

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle: a copy, as other threads may use the learner meanwhile, with all on the CPU."""
        with self._locked():
            state: dict[str, Any] = copy.deepcopy(super().__getstate__(), copy_memo(self.model))
        if "learner_" in state:
            learner = state["learner_"]
            state["_drawn"] = learner.generator.get_state()  # only this kind of device can go on from it
            move(learner, CPU)
            del learner.generator  # `__setstate__` makes one; torch 2.13 leaks 5 KB for each that is pickled
        move_tensors(state, CPU)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state, and put the learner on the device that it was made for, if there is one here."""
        generator_state = state.get("_drawn")
        super().__setstate__({name: value for name, value in state.items() if name != "_drawn"})
        if generator_state is not None:
            device = getattr(self, "_made", {}).get("device", self.device)
            move(self.learner_, _available_device(device), generator_state)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the learner's lock, so that learner, classes and units are all of the same moment."""
        while True:
            learner = getattr(self, "learner_", None)
            with FIRST if learner is None else learner._lock_to_read():
                if getattr(self, "learner_", None) is learner:  # otherwise it was refitted meanwhile
                    yield
                    return

    def _take_state(self, new: Self, first: bool) -> bool:
        """Take the state of `new` in one step; with `first`, return False if another thread was the first to fit."""
        with self._locked():
            if first and hasattr(self, "learner_"):
                return False
            self.__dict__ = new.__dict__
        return True

    def _validated(self, X: Any, *y: Any, **settings: Any) -> Any:
        """Validate data as scikit-learn does, refuse missing values that it does not detect, and say where one is."""
        for name, value in zip("Xy", (X, *y), strict=False):
            check_gaps(name, value)
        try:
            validated = validate_data(self, _with_names(X), *y, allow_nd=True, ensure_all_finite=False, **settings)
        except (TypeError, ValueError) as error:
            if "eature names" not in str(error):  # other columns than before, which it names
                _check_columns(X)
            if settings.get("y_numeric") and not np.iscomplexobj(*y):  # whose error is clear
                as_numbers(*y)
            raise
        rows = validated[0] if y else validated
        if rows.dtype.kind == "O":  # decimals, for example, of Arrow
            with suppress(TypeError, ValueError):  # the columns that are no numbers are named below
                rows = rows.astype(np.float64)
        self._check_numbers(rows, X)
        return (rows, *validated[1:]) if y else rows

    def _check_numbers(self, X: NDArray[Any], original: Any) -> None:
        """Refuse NaN and infinity, and name the row and the column of the first: few rows of a batch have them."""
        if X.dtype.kind not in "biuf":
            _check_columns(original)
        if X.dtype.kind != "f" or np.isfinite(X).all():
            return
        bad = ~np.isfinite(X)
        row, *position = np.argwhere(bad)[0].tolist()
        names = getattr(self, "feature_names_in_", None)
        column = position[0] if len(position) == 1 else position
        if names is not None:
            column = repr(names[position[0]])
        rows = int(bad.reshape(len(X), -1).any(1).sum())
        message = f"NaN or infinity in {rows} of {len(X)} rows, first in row {row} (from 0), column {column}"
        raise invalid("X", Description(message), "finite numbers", "fill in what is missing, or drop those rows")

    def _tensor(self, X: NDArray[Any], learner: Learner, example_dtype: torch.dtype | None = None) -> Tensor:
        """Convert examples for the learner: to `example_dtype`, that of earlier ones, if that is exact."""
        if X.dtype.kind not in "biuf":
            raise invalid("X", Description(f"an array of type {X.dtype}"), "numbers", ENCODE)
        scale, model = self._made["scale"], self._made["model"]  # a change takes effect at the next fit
        array_dtype = np.float64 if X.dtype == np.longdouble else X.dtype.newbyteorder("=")  # torch has no others
        x = torch.from_numpy(np.array(X, array_dtype, order="C")).to(learner.device)
        is_numeric = x.dtype != torch.uint8 and model is None and learner.embed is None  # neither bytes nor ids
        if isinstance(learner.prepare, Scale):
            x = x.double()  # rounded only after scaling
        elif example_dtype is not None and not scale:
            x = _cast(x if example_dtype.is_floating_point else signed("X", x), example_dtype)
        elif scale or x.is_floating_point() or is_numeric:
            x = x.to(learner.dtype)
        else:
            x = signed("X", x)
        check_finite("X", x)  # it may have been finite only in a wider type
        return x

    def _settings(self) -> dict[str, Any]:
        """Return all settings except those that every call reads again, also those that a subclass fixes itself."""
        kinds = [kind for kind in type(self).__mro__ if issubclass(kind, Estimator)]
        names = {name for kind in kinds for name in kind._get_param_names()} - {*ANEW}
        settings = {name: getattr(self, name) for name in sorted(names)}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in settings.items()}

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
        settings = self._settings()
        for name, earlier in self._made.items():
            if name != "lr" and not _is_same(settings[name], earlier):
                remedy = "a change takes effect at the next fit: call fit, or set it back"
                raise invalid(name, settings[name], "the value that the learner was made with", remedy)
        if settings["lr"] is not None:
            check_number("lr", settings["lr"], above=0)

    def _update_lr(self) -> None:
        """Apply the current lr to the learner."""
        if self.lr == self._made["lr"]:
            return
        settings, learner = self._settings(), self.learner_
        lr = settings["lr"]
        if lr is None:
            lr = (settings["options"] or {}).get("lr", type(learner).lr)
        learner.lr, self._made = options_of(type(learner))["lr"].taken(lr), settings
        for group in learner.optim.param_groups:
            group["lr"] = learner.lr

    @torch.inference_mode(False)  # the learner must be able to train later
    @_estimator_errors()
    def _build_learner(self, X: NDArray[Any], outputs: int, criterion: str | Criterion, **defaults: Any) -> Learner:
        """Build an untrained learner; `defaults` are for those options that its class has."""
        self._check_counts()
        if not isinstance(self.scale, bool | np.bool_):
            raise invalid("scale", self.scale, "True or False")
        seed = int(check_random_state(self.random_state).randint(2**31))
        kind = _learner_class(self.learner)
        arguments = {"criterion": criterion, "seed": seed} | self._learner_arguments(kind, defaults)
        device = find_device(str(self.device))
        for name, value in arguments.items():
            arguments[name] = value.to(device) if isinstance(value, nn.Module) else value
        learner = kind(self._network(X.shape[1:], outputs, seed).to(device), **arguments)
        if self.scale and "prepare" not in arguments:
            if isinstance(learner.embed, nn.Embedding):
                raise invalid("scale", self.scale, "False, as embed looks up ids", "ids cannot be scaled")
            learner.prepare = Scale()
        self._made = self._settings()
        self._alone = math.inf
        return learner

    def _learner_arguments(self, kind: type[Learner], defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return copies of the learner's arguments: those in OWN go before `options`, and these before `defaults`."""
        options = self._own_options()
        fields = {field.name for field in dataclasses.fields(kind)} - {"model"}
        for name in options:
            check_name("options", name, fields)
        if "seed" in options:  # it would not determine the initial weights
            raise invalid("options", "seed", "options other than the seed", "set random_state instead")
        arguments = {name: value for name, value in defaults.items() if name in fields} | options
        own = {name: getattr(self, name) for name in OWN if name in fields}
        arguments |= {name: value for name, value in own.items() if value is not None}
        return copy.deepcopy(arguments)  # the values belong to the user

    def _network(self, shape: Sequence[int], outputs: int, seed: int) -> nn.Module:
        if isinstance(self.model, nn.Module):
            return copy_model(self.model)
        factory = _mlp if self.model is None else self.model
        expected = "a torch.nn.Module, or a function (shape, outputs) that returns one"
        remedy = f"or pass one made of this class: {factory.__name__}(…)" if isinstance(factory, type) else ""
        try:
            check_call("model", factory, "shape", "outputs")
        except InputError as error:
            error.remedy = remedy
            raise
        with drawing_apart():
            torch.manual_seed(seed)
            try:
                network = factory(shape, outputs)
            except (InputError, *DEVICE_ERRORS):
                raise
            except Exception as error:
                message = f"called with {tuple(shape)} and {outputs}, it says: {first_line(error)}"
                raise invalid("model", factory, expected, "; ".join(filter(None, [message, remedy]))) from error
        if not isinstance(network, nn.Module):
            raise invalid("model", type(network), expected)
        return network

    @_estimator_errors()
    def _learn(self, learner: Learner, x: Tensor, y: Tensor, epochs: int | None = None) -> None:
        """Train on the examples once, in their order, or for several epochs, reshuffled each time."""
        y, rng, size, task = y.to(x.device), np.random.default_rng(learner.seed), int(self.batch_size), None
        if learner.needs_tasks:
            task = 0 if epochs else self._tasks + 1
            batches = list(zip(x.split(size), y.split(size), strict=True))
            learner.start_task(batches)
        for _ in range(epochs or 1):
            order = torch.from_numpy(rng.permutation(len(x))) if epochs else torch.arange(len(x))
            parts = _batches(order.to(x.device), size, learner.model)
            losses = [learner.observe(x[rows], y[rows], task).double() for rows in parts]
        if task is not None:
            learner.end_task(batches)
            self._tasks = task  # only now: after a call that was interrupted, its task goes on
        self.loss_, last = float(sum(losses)) / len(losses), float(losses[-1])
        if not math.isfinite(last):
            raise Diverged(f"the loss became {last}: lower lr (now {learner.lr:g}), or set clip_norm in options")

    @_estimator_errors()
    def _check_examples(self, x: Tensor) -> None:
        """Refuse what the learner would refuse, before anything changes."""
        self._check_kind(x)
        learner = self.learner_
        ids = not x.is_floating_point() or has_embedding(learner.model)
        for part in x.split(SHEET) if ids or not isinstance(learner.prepare, Scale | None) else ():
            learner.predict(part)  # only the network knows which ids exist, and only `prepare` what it returns

    def _check_kind(self, x: Tensor) -> None:
        shape, dtype = self._example
        if (x.shape[1:], x.dtype) != self._example:
            raise invalid("X", x, f"examples of shape {list(shape)} and type {type_name(dtype)}, as before")

    def _rehearse(self, x: Tensor, learn: Callable[[Self], object]) -> None:
        """Let a copy learn first if batch norm gets a single example: only a step shows whether that fails."""
        learner = self.learner_
        if min(len(x), int(self.batch_size)) > 1 or not has_batch_norm(learner.model):
            return
        stored = len(learner.past) if isinstance(learner, ReplayLearner) else 0
        if not learner.needs_tasks and stored >= self._alone:
            return  # one was learned with no more in memory
        with self._locked():
            trial = copy.copy(self)
            trial.learner_ = copy.deepcopy(learner)
        learn(trial)
        self._alone = stored

    def _serving_module(self, answer: nn.Module) -> nn.Module:
        """Return a module of its own that predicts: the learner's predictor, followed by `answer`."""
        scaled = isinstance(self.learner_.prepare, Scale) or self._made["scale"]
        return nn.Sequential(
            OrderedDict(rows=Rows(self._example[1], scaled), scores=self.learner_.predictor(), answer=answer)
        ).eval()

    def _scores(self, X: Any) -> Tensor:
        """Return the scores of examples, all by the same weights, as the lock is held."""
        check_is_fitted(self)
        X, scores, learner = self._validated(X, reset=False), [], self.learner_
        for row in range(0, len(X), SHEET):
            with _estimator_errors(row):
                x = self._tensor(X[row : row + SHEET], learner, self._example[1])
                self._check_kind(x)
                scores.append(learner.scores(x).double())
                if not scores[-1].isfinite().all():
                    check_finite("X", learner.inputs(x))  # in the network's type
                    raise Diverged(
                        "the scores are not finite numbers: the network has diverged, or X is far from all that it has "
                        f"learned; call fit with a lower lr (now {learner.lr:g}), or with clip_norm in options"
                    )
        return torch.cat(scores)


def updated_scale(scale: Any, name: str, x: Tensor) -> Any:
    """Return a copy of a Scale, updated with these numbers; anything else is returned as it is."""
    if not isinstance(scale, Scale):
        return scale
    scale = copy.copy(scale)
    scale.update(x, name)
    return scale


def _learner_class(learner: Any) -> type[Learner]:
    """The class of a method, given that or its name; if it is a preset's name, the error says how to use that."""
    if isinstance(learner, type) and issubclass(learner, Learner):
        return learner
    if not isinstance(learner, str):
        raise invalid("learner", learner, "a method's name, or its class", "`parabolic list` shows the names")
    try:
        return find_learner(learner)
    except InputError as error:
        if learner in known_presets():
            preset = load_preset(learner)
            error.remedy = f"it is a preset: learner={preset.learner!r}, options=load_preset({learner!r}).settings"
        raise


def _check_columns(X: Any) -> None:
    """Name the columns of a frame that are no numbers, as scikit-learn's errors do not."""
    names = getattr(X, "column_names", getattr(X, "columns", ()))  # the former in Arrow, whose `columns` are arrays
    if len(set(names)) < len(names):  # which scikit-learn names
        return
    columns = {name: X[name] for name in names if isinstance(name, str)}
    kinds = {name: getattr(column, "dtype", getattr(column, "type", "several")) for name, column in columns.items()}
    if described := [f"{name!r} ({kinds[name]})" for name, column in columns.items() if not _is_numeric(column)]:
        raise invalid("X", Description(f"columns that are no numbers: {', '.join(described)}"), "numbers", ENCODE)


def _is_numeric(values: Any) -> bool:
    array = np.asarray(values)  # see `as_numbers`
    try:
        array.astype(np.float64)
    except (TypeError, ValueError):
        return False
    return array.dtype.kind not in "mM"  # dates and times


def as_numbers(y: Any) -> NDArray[np.float64]:
    """A copy of the targets as numbers; words are refused."""
    try:
        return np.asarray(y).astype(np.float64)  # pandas itself would turn dates with a time zone into numbers
    except (TypeError, ValueError) as error:
        remedy = f"for words, use a ParabolicClassifier; NumPy says: {first_line(error)}"
        raise invalid("y", Description("values that are no numbers"), "numbers", remedy) from error


def _with_names(X: Any) -> Any:
    """Return X, or an Arrow record batch as a table: scikit-learn 1.9 checks the names of a table's columns alone."""
    arrow = sys.modules.get("pyarrow")
    return arrow.Table.from_batches([X]) if arrow is not None and isinstance(X, arrow.RecordBatch) else X


def _available_device(device: str | torch.device) -> torch.device:
    """The device that a pickled estimator was made for or, with a warning, the CPU if this machine has no such."""
    try:
        return find_device(str(device))
    except InputError as error:
        message = f"{error}. What was loaded computes on the CPU; before its next fit, call set_params(device='auto')"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
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


def _is_same(one: Any, other: Any) -> bool:
    """Whether a setting is unchanged: equal if it is a plain value, otherwise the same object."""
    one, other = (str(setting) if isinstance(setting, torch.device) else plain(setting) for setting in (one, other))
    kinds = str | int | float
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    return one is other or (isinstance(one, kinds) and isinstance(other, kinds) and one == other)
