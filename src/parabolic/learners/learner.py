"""The step that every learner shares: recall, loss, descend, remember."""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Self, dataclass_transform

import torch
from torch import Generator, Tensor, nn

from parabolic.checks import (
    Description,
    InputError,
    check_call,
    check_finite,
    check_module,
    check_number,
    invalid,
    plain,
    signed,
    type_name,
)
from parabolic.learners import optimizers
from parabolic.learners.accepting import (
    as_tensor,
    check_batch,
    check_growth,
    check_kind,
    check_known,
    check_model,
    refusal,
    try_scores,
)
from parabolic.learners.average import WeightAverage
from parabolic.learners.criterion import Criterion, find_criterion
from parabolic.learners.declaring import as_one_step, boundary_of, check_fields, locked, make_dataclass, wrap_methods
from parabolic.learners.functional import answers_by, copies_of, is_expanded
from parabolic.learners.gradients import named_trainable
from parabolic.learners.head import check_head, features, follow, last_linear, widen
from parabolic.learners.predictor import Predictor, as_inputs, predictor_of
from parabolic.memory import Batch, Memory
from parabolic.options import check_options, documented, option, options_of

__all__ = ["Diverged", "Learner", "ReplayLearner", "TaskBatches", "join"]

# Methods that users may override, and those that the package's loops call instead.
CALLED_INSTEAD = {"predict": "scores_at", "scores": "scores_at", "observe": "step"}
GO_BACK = "go back to the last saved file, and lower lr or set clip_norm"
GIVE_WAY = 1e-4  # seconds: enough for a waiting thread to wake up

TaskBatches = Iterable[tuple[Tensor, Tensor]]
"""The batches of a task; they can be iterated over repeatedly."""


class Diverged(RuntimeError):
    """Losses, weights or scores are no longer finite numbers, and will not be again: go back to a saved file.

    >>> from parabolic import ER
    >>> learner = ER(torch.nn.Linear(2, 1), criterion="mse", lr=1e9)
    >>> for _ in range(9):
    ...     loss = learner.observe(torch.ones(3, 2), torch.zeros(3, 1))
    >>> try:
    ...     learner.predict(torch.ones(1, 2))
    ... except Diverged as error:
    ...     print(error)
    predict: the scores are NaN after 9 steps; go back to the last saved file, and lower lr or set clip_norm
    """


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(dataclasses.field,))
@dataclasses.dataclass(eq=False, kw_only=True, repr=False)
class Learner:
    """How one batch updates a model. A method is a subclass that defines its `loss`, and its options as fields.

    The step is tensor code of fixed shape that never waits for the device, so that it can be captured as a CUDA
    graph; all state is in `state_dict`.

    Args:
        model: the network, mapping a batch of inputs to one score per class. It is trained in place, on its device.
        criterion: the loss: "cross-entropy" for classes; "mse" or "huber" if targets are numbers, one per output of the
            model; or a `Criterion`, such as CrossEntropy(weights=[1, 5]) or Numbers(your_loss).
        embed: a module that precedes the model and is trained with it, for inputs that no path can run between, such as
            word ids: bridges run between its outputs.
        prepare: turns raw examples into the model's input, for learning and prediction. By default bytes become floats
            in [0, 1] (with `embed`, ids), floats are cast to the model's type, and all else is left unchanged. If it
            has a `state_dict`, as `Scale` and modules have, that is part of the learner's. If it is None, `train` uses
            the stream's; in a loop of your own, pass it here.
        augment: a random change of raw examples before `prepare`, for learning only: `augment(x, generator)`. As with
            `prepare`, `train` uses the stream's if it is None.
        classes: how many of the scores are classes. By default all outputs of the model, counted at the first batch.
        seed: the seed of `generator`, from which all randomness of the learner comes.

    Any number of threads may predict while one observes: `lock` is held by any thread that changes or uses the model,
    so that a prediction is that of the model before or after a step. Hold it (`with learner.lock:`) to copy a state
    meanwhile. `stepping` tells code that holds the lock, such as a signal handler, whether a step is only half done, or
    a call of `grow`, or a prediction, for which the averaged weights take the place of the model's own for a moment.

    `lr` is the optimiser's initial learning rate: change it later in `learner.optim.param_groups`.
    """

    name: ClassVar[str] = ""  # its name for `--learner`; a base class has none
    reference: ClassVar[str] = ""  # authors, year, title
    needs_tasks: ClassVar[bool] = False  # whether it must know where a task starts and ends
    needs_classes: ClassVar[bool] = False  # whether it is for classes only, not for targets that are numbers
    sees_all: ClassVar[bool] = False  # whether it gets all tasks at once, shuffled: only a reference
    _boundary: ClassVar[str] = ""  # the call between two tasks without which the method would miss the first

    model: nn.Module = dataclasses.field(kw_only=False)
    lr: float = option(0.1, "learning rate", above=0, tune="0.001:1:log")
    optimizer: str | Callable[..., torch.optim.Optimizer] = option(
        "SGD",
        "a class of torch.optim: SGD, SGD(momentum=0.9); or your own factory(parameters, lr=lr) as file.py:name, in "
        "Python also itself",
        reads=optimizers.parse_optimizer,
    )  # fmt: skip
    average: float | None = option(
        None,
        "decay of a moving average of the weights, used for prediction (none: no average)",
        at_least=0,
        below=1,
    )
    average_part: float = option(
        1.0, "the part of all steps so far that the average spans, until that is 1 / (1 − average) steps",
        above=0, at_most=1,
    )  # fmt: skip
    repeats: int = option(
        1, "how many steps are made on each batch, each with its own recalled examples, crops and paths", at_least=1
    )
    clip_norm: float | None = option(
        None, "limit on the norm of a gradient, which is scaled down to it (none: no limit)", above=0
    )
    criterion: str | Criterion = "cross-entropy"
    embed: nn.Module | None = None
    prepare: Callable[[Tensor], Tensor] | None = None
    augment: Callable[[Tensor, Generator], Tensor] | None = None
    classes: int | None = None
    seed: int = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        wrap_methods(cls)
        cls._boundary = boundary_of(cls)
        check_fields(cls)
        docstring = cls.__doc__
        make_dataclass(cls)
        cls.__doc__ = docstring and documented(docstring, cls)  # if None, the dataclass has put its signature there

    @classmethod
    def overridden(cls) -> dict[str, str]:
        """Overrides that no loop of this package calls, each with the method that is called instead.

        >>> from parabolic import ER
        >>> class Nearest(ER):
        ...     def predict(self, x): ...
        >>> Nearest.overridden(), ER.overridden()
        ({'predict': 'scores_at'}, {})
        """

        def mro_index(name: str) -> int:
            return next(index for index, base in enumerate(cls.__mro__) if name in vars(base))

        return {name: other for name, other in CALLED_INSTEAD.items() if mro_index(name) < mro_index(other)}

    @classmethod
    def own_name(cls) -> str:
        """Its name for errors: that of the learner, or of the class if the learner's name is inherited.

        >>> from parabolic import ER
        >>> class Mine(ER): ...
        >>> ER.own_name(), Mine.own_name()
        ('er', 'Mine')
        """
        return vars(cls).get("name") or cls.__name__

    def __post_init__(self) -> None:
        check_module("model", self.model)
        self.lock, self.stepping = threading.RLock(), False
        self._descended = False  # whether the weights may have moved since `observe` began
        self._waiting: set[int] = set()  # threads waiting to predict, copy or save
        self.body = self.model  # maps the points that bridges run through to scores
        if self.embed is not None:
            check_module("embed", self.embed)
            self.model = nn.Sequential(OrderedDict(embed=self.embed, body=self.body))
        weights = check_model(self.model)
        check_options(self)
        _check_arguments(self)
        self.seed, self.classes = plain(self.seed), plain(self.classes)
        for module in self.model.modules():  # an overridden `train` may keep a norm frozen
            if module.training and getattr(module.train, "__func__", None) is not nn.Module.train:
                module.train()
        float_types = (weight.dtype for weight in weights if weight.is_floating_point())
        self.device, self.dtype = weights[0].device, next(float_types, weights[0].dtype)  # the type of inputs
        self.criterion = find_criterion(self.criterion).to(self.device)
        if self.needs_classes and not self.error.of_classes:
            remedy = f"{self.own_name()} is for classes: choose another learner for numbers"
            raise invalid("criterion", self.criterion, "a loss of classes", remedy)
        self.generator = Generator(self.device).manual_seed(self.seed)
        self.optim = self._make_optimizer(weights)
        self.averaged = None if self.average is None else WeightAverage(self.model, self.average, self.average_part)
        self.steps = 0
        self._first_weights = named_trainable(self.model)  # or what they grew to
        self._example: tuple[torch.Size, torch.dtype] | None = None  # its shape and type, from the first batch on
        self._observed_task: int | None = None  # that of the batches observed since the method was told of a boundary
        self._outgrown: tuple[int, ...] = ()  # the numbers of outputs that the model had before it grew

    # -- learning ------------------------------------------------------------------------------------------

    def observe(self, x: Tensor, y: Tensor, task: int | None = None) -> Tensor:
        """Learn from a batch of raw examples and their labels; returns the loss, still on the device.

        Invalid input is refused before anything changes, and so is a batch of another task if the method depends on
        `end_task` or `start_task`, and that was not called since. Checking waits for the device: a loop that has
        already checked its data calls `step`.
        """
        if self.needs_tasks and task is None:
            remedy = f"{self.own_name()} must know the tasks: pass task=0, 1, … and call start_task and end_task"
            raise invalid("task", task, "the number of the task that the batch belongs to", remedy)
        if task is not None:
            check_number("task", task, whole=True, at_least=0, below=2**31)
        number = int(task) if task is not None and self.needs_tasks and self._boundary else None
        with self._lock_to_change():
            undo, self._descended = self._make_undo(), False
            try:
                check_known(self)
                self._check_boundary(number)
                x, y = check_batch(self, x, y)
                loss = self.step(x, y, task)
                self._observed_task = number
            except torch.AcceleratorError:  # nothing can be copied on a device that has failed
                raise
            except Exception:
                if not self._descended:  # else it has learned, which cannot be undone
                    undo()
                raise
        if self._waiting:  # the lock goes to the first to ask, which would be the next batch
            time.sleep(GIVE_WAY)
        return loss

    @locked
    def step(self, x: Tensor, y: Tensor, task: int | Tensor | None = None) -> Tensor:
        """Learn from a batch that has been checked and is on the learner's device."""
        raw = {"x": x, "y": y}
        if task is not None:
            number = task if isinstance(task, Tensor) else torch.full((), task, device=y.device)
            raw["task"] = number.expand(len(y))
        self.stepping = True
        try:
            if not self.model.training:
                self.model.train()
            for _ in range(self.repeats):
                recalled = self.recall()
                batch = raw | {"x": self.augmented(x), "raw": x}
                loss = self._loss(batch, recalled)
                self._descended |= type(self).descend is not Learner.descend  # which may move them at any time
                self.descend(loss)
            self.remember(raw, batch)
            self.steps += 1
        except (ValueError, IndexError, RuntimeError) as error:
            if (refused := refusal(self, x, error)) is None:
                raise
            raise refused from error
        finally:
            self.stepping = False
        return loss.detach()

    def phase(self) -> Hashable:
        """Everything known to the host that determines the operations of the next step.

        Two steps in the same phase, on batches of the same size, are the same operations on the same tensors. A method
        whose code branches on something that changes (such as whether this is the first step) adds it here.
        """
        return ()

    @property
    def error(self) -> Criterion:
        """The criterion: how far scores are from their targets."""
        assert isinstance(self.criterion, Criterion)
        return self.criterion

    def recall(self) -> Batch | None:
        """A batch of past examples, ready for the model; None if there is none."""
        return None

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """The method: the loss to minimise, from the new batch and the recalled one.

        In both, "x" is ready for the model, "raw" is what it was made from, and "y" are the labels; with tasks, the new
        batch has "task" too. From raw examples, `augmented` makes another view, and `inputs` the one for prediction.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no loss(batch, recalled)")

    def descend(self, loss: Tensor) -> None:
        """One optimiser step down the gradient of the loss."""
        self.optim.zero_grad()
        loss.backward()
        self._descended = True
        self.apply_gradients()

    def apply_gradients(self) -> None:
        """An optimiser step with the current gradients, and an update of the weight average if there is one."""
        self.clip_gradients()
        self.optim.step()
        if self.averaged is not None:
            self.averaged.update(self.model)

    def clip_gradients(self) -> None:
        """Scale down the current gradients, all by the same factor, if their norm exceeds `clip_norm`."""
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(optimizers.weights_of(self.optim), self.clip_norm)

    def remember(self, raw: Batch, batch: Batch) -> None:
        """Store what the method keeps of the batch as it came (`raw`) and of what `loss` added to `batch`."""

    def start_task(self, batches: TaskBatches) -> None:
        """Called before a task, if the stream has tasks, with its batches: each example once."""

    def end_task(self, batches: TaskBatches) -> None:
        """Called after a task, if the stream has tasks, with its batches: each example once."""

    @as_one_step
    def grow(self, classes: int) -> None:
        """Make room for labels below `classes`: the last linear layer gets more outputs, and the old ones stay.

        The optimiser's state, averages, and what the method stores per output grow with it.

        >>> from parabolic import ER
        >>> learner = ER(nn.Linear(4, 2), memory=50)
        >>> learner.grow(3)
        >>> loss = learner.observe(torch.randn(6, 4), torch.arange(6) % 3)
        """
        check_number("classes", classes, whole=True, at_least=1)
        classes = int(classes)
        if not self.error.of_classes:
            raise invalid("criterion", self.criterion, "a loss of classes", "only classes can grow")
        _, head = last_linear(self.model)
        check_head(head, self.classes)
        current = self.classes or head.out_features
        if classes > current:
            check_growth(self, head, classes)
        if classes > head.out_features:
            self._outgrown += (head.out_features,)
            self.on_growth(widen(head, classes, self.generator))
        if classes > current:
            self.criterion, self.classes = self.error.widened(classes), classes

    def on_growth(self, moved: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Extend everything that is stored per weight; `moved` maps old parameters to new ones, with more rows."""
        follow(self.optim, moved)
        self._first_weights = {name: moved.get(weight, weight) for name, weight in self._first_weights.items()}
        if self.averaged is not None:
            self.averaged.follow(self.model)

    # -- prediction ----------------------------------------------------------------------------------------

    def scores(self, x: Tensor) -> Tensor:
        """The scores (logits) of raw examples: all outputs of the model, including any that are not classes."""
        x = as_tensor("x", x, self.device)
        check_finite("x", x)
        check_kind(self, x)
        with self._lock_to_read():  # what `prepare` does, and the weights, are of one moment
            return try_scores(self, x)

    def inputs(self, x: Tensor) -> Tensor:
        """Raw examples as inputs of the model, as for prediction."""
        return self._as_inputs(x, augment=False)

    def augmented(self, x: Tensor) -> Tensor:
        """Raw examples as inputs of the model, as for learning: changed at random, differently in every call."""
        return self._as_inputs(x, augment=True)

    def scores_at(self, inputs: Tensor) -> Tensor:
        """The scores for inputs of the model, in evaluation mode and with the averaged weights if there are any.

        Both, and that there are no gradients, also hold for everything that an override calls.
        """
        with self._lock_to_read(), self._mark_stepping():
            return answers_by(self.predicting_weights(), self.model, inputs)

    def features(self, inputs: Tensor) -> Tensor:
        """The features of inputs of the model: what the last linear layer of the network, whichever it is, gets.

        With gradients, and in the model's present mode: that of learning in `loss`, that of prediction in `scores_at`.

        >>> from parabolic import ER, ResNet18
        >>> ER(ResNet18((3, 32, 32), 10, width=8)).features(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 64])
        """
        _, head = last_linear(self.model)
        return features(self.model, head, inputs)

    def predicting_weights(self) -> dict[str, Tensor]:
        """The weights and buffers to predict with in place of the model's own, by name."""
        return {} if self.averaged is None else self.averaged.weights

    def predict(self, x: Tensor) -> Tensor:
        """The predicted class of each raw example or, if targets are numbers, the predicted numbers `[n, outputs]`."""
        with self._lock_to_read():
            scores = self.scores(x)[:, : self.classes]
            if bool(scores.isnan().any()):
                raise Diverged(f"predict: the scores are NaN after {self.steps} steps; {GO_BACK}")
            return self.error.answer(scores)  # under the same lock, as units may change

    def predictor(self) -> Predictor:
        """A module that maps raw examples to what `scores` returns for them now: to serve from, without the learner.

        It is a copy in evaluation mode, on the same device, with the averaged weights if those predict, and contains
        neither memory nor optimiser. It takes tensors and checks nothing. `prepare` is part of it: a `Scale` or
        `Normalise` as buffers, any other as a copy that it calls, in evaluation mode too if it is a module.
        `torch.export` and `torch.jit.trace` accept it if they accept the model and `prepare`; to `torch.save` it, both
        must be picklable.

        >>> from parabolic import ER
        >>> learner = ER(nn.Linear(4, 3), memory=50, average=0.9)
        >>> loss = learner.observe(torch.randn(8, 4), torch.arange(8) % 3)
        >>> torch.equal(learner.predictor()(torch.ones(1, 4)), learner.scores(torch.ones(1, 4)))
        True
        """
        return predictor_of(self)

    # -- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on. As in torch, the tensors are the live ones: copy them to keep them."""
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": self.optim.state_dict(),
            "generator": self.generator.get_state(),
            "steps": self.steps,
        }
        if self.averaged is not None:
            state["average"] = self.averaged.state_dict()
        state |= {name: part.state_dict() for name, part in self._stateful_parts().items()}
        if self._example is not None:  # as an empty batch, which has the shape and type of examples
            shape, dtype = self._example
            state["example"] = torch.empty(0, *shape, dtype=dtype)
        if self._observed_task is not None:
            state["observed_task"] = self._observed_task
        return state

    @locked
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of a learner of the same class and model, whatever device it was on.

        Between a GPU and a CPU everything carries over except future random draws: their generators' states differ.
        """
        # Missing in new learners, and in files of early versions.
        optional = {"example", "observed_task", *self._stateful_parts()}
        if missing := self.state_dict().keys() - state.keys() - optional:
            remedy = "load the state of a learner of the same kind"
            raise invalid("state", Description(f"no {', '.join(sorted(missing))}"), "a complete state", remedy)
        own_state = self.model.state_dict()
        for name, value in state["model"].items():
            if isinstance(value, Tensor) and name in own_state and value.shape != own_state[name].shape:
                got = Description(f"{name} of shape {list(value.shape)}")
                remedy = "load it into a learner with as many classes; `Learner.load` makes one from a file"
                raise invalid("state", got, f"{list(own_state[name].shape)}, as in this learner", remedy)
        optimizers.check_state(self.optim, state["optimizer"])
        self.model.load_state_dict(state["model"])
        optimizers.load_state(self.optim, state["optimizer"])
        self._load_generator(state["generator"].cpu())
        self.steps = int(state["steps"])
        if self.averaged is not None:
            self.averaged.load_state_dict(state["average"])
        for name, part in self._stateful_parts().items():
            if name in state:
                part.load_state_dict(state[name])
        example = state.get("example")
        example = None if example is None else signed("state", example)  # early versions kept unsigned types
        self._example = None if example is None else (example.shape[1:], example.dtype)
        self._observed_task = state.get("observed_task")

    def save(self, path: str | Path) -> Path:
        """Write the learner to one file: everything its next step depends on, and how it was made. It holds no code.

        A crash at any moment leaves either the old file or the complete new one.

        >>> import tempfile
        >>> from parabolic import ER, make_backbone
        >>> learner = ER(make_backbone("mlp", (4,), 3), memory=50)
        >>> loss = learner.observe(torch.randn(8, 4), torch.arange(8) % 3)
        >>> path = learner.save(tempfile.mkdtemp() + "/er.safetensors")
        >>> Learner.load(path).observe(torch.ones(1, 4), [0]) == learner.observe(torch.ones(1, 4), [0])
        tensor(True)
        """
        from parabolic.learners.saving import save

        return save(self, path)

    def check_whole(self, what: str) -> None:
        """Raise an error if called in the middle of a step or prediction, as a signal handler might."""
        if self.stepping:
            where = "in the middle of a step or prediction"
            raise RuntimeError(f"{what}: called {where}; set a flag, and check it after `observe`")

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        model: nn.Module | None = None,
        device: torch.device | str | None = None,
        **given: Any,
    ) -> Self:
        """Load a learner that `save` wrote: in any process it resumes as if it had never stopped.

        A file that is damaged, or of a later version, is refused. Loading runs nothing that the file names: a class of
        your own must be imported first.

        Args:
            path: the file.
            model: a network like the one saved, to receive its weights; not needed for a network of this package.
            device: where to put the learner (default: where the model is).
            given: what a file cannot hold, as it was: your own `prepare`, `augment`, optimiser factory or `drift`.
        """
        from parabolic.learners.saving import load

        with torch.inference_mode(False):  # so that it can learn later
            return load(cls, path, model, device, given)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with its own lock; no other thread learns or predicts meanwhile."""
        from parabolic.learners.moving import copy_memo

        with self._lock_to_read(), torch.inference_mode(False):  # so that the copy can learn
            memo |= copy_memo(self)
            memo[id(self)] = duplicate = self.__new__(type(self))
            memo[id(self.generator)] = self.generator.clone_state()  # copied by deepcopy, it leaks 5 KB (torch 2.13)
            duplicate.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the lock, for a copy or a pickle, which has its own.

        While other threads use the learner, hold the lock until the pickle is made, or pickle a deep copy.
        """
        with self.lock:
            self.check_whole("a copy")
            return {name: value for name, value in self.__dict__.items() if name not in ("lock", "_waiting")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {"stepping": False, "_observed_task": None, "_outgrown": (), **state}
        self.__dict__.setdefault("_first_weights", named_trainable(self.model))
        self.__dict__ |= {"lock": threading.RLock(), "_waiting": set()}
        # Else a copied optimiser would warn that its steps could be captured but are not.
        self.optim._warned_capturable_if_run_uncaptured = True

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in options_of(type(self)))
        return f"{type(self).__name__}({type(self.model).__name__}, {values})"

    # -- internals -----------------------------------------------------------------------------------------

    @contextmanager
    def _lock_to_change(self) -> Iterator[None]:
        """Hold the lock to change the learner, with gradients enabled even if the caller has switched them off."""
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():  # the usual case, kept fast
            with self.lock:
                yield
        else:
            with self.lock, torch.inference_mode(False), torch.enable_grad():
                yield

    @contextmanager
    def _lock_to_read(self) -> Iterator[None]:
        """Hold the lock to predict, copy or save: a thread that learns gives way between two batches."""
        thread = threading.get_ident()
        self._waiting.add(thread)
        try:
            with self.lock:
                self._waiting.discard(thread)
                yield
        finally:
            self._waiting.discard(thread)

    @contextmanager
    def _mark_stepping(self) -> Iterator[None]:
        """Mark the learner as `stepping`, so that it is neither copied nor saved meanwhile; hold the lock."""
        before, self.stepping = self.stepping, True
        try:
            yield
        finally:
            self.stepping = before

    def _check_boundary(self, task: int | None) -> None:
        """Refuse a batch of another task if the method was not told of the boundary, and would keep nothing."""
        if (before := self._observed_task) not in (None, task):
            ends = self._boundary == "end_task"
            moment = f"{before}, after its last" if ends else f"{task}, before its first"
            remedy = f"{self.own_name()} depends on that call: pass the batches of task {moment}"
            raise invalid("task", task, f"{before} until {self._boundary} is called", remedy)

    def _tensors_to_restore(self) -> list[Tensor]:
        """The tensors that computing a loss changes in place, to be restored if the batch is refused."""
        return list(self.model.buffers())

    def _make_undo(self) -> Callable[[], None]:
        """A function that undoes a step that failed before a weight moved: random draws, statistics and attributes."""
        attributes, generator_state = {**vars(self)}, self.generator.get_state()
        tensors = self._tensors_to_restore()
        originals = copies_of(tensors)

        def undo() -> None:
            for name in vars(self).keys() - attributes.keys():
                delattr(self, name)
            vars(self).update(attributes)
            self.generator.set_state(generator_state)
            for tensor, original in zip(tensors, originals, strict=True):
                if not is_expanded(tensor):  # else nothing has changed it, as torch refuses to
                    tensor.copy_(original)

        return undo

    def _stateful_parts(self) -> dict[str, Any]:
        """The objects given to the learner that have a state of their own, by name."""
        parts = {"prepare": self.prepare, "units": getattr(self.criterion, "units", None)}
        return {name: part for name, part in parts.items() if hasattr(part, "load_state_dict")}

    def _load_generator(self, state: Tensor) -> None:
        if len(state) == len(self.generator.get_state()):
            self.generator.set_state(state)
        else:  # from another kind of device: draws differ, but depend on the state alone
            self.generator.manual_seed(int.from_bytes(sha256(bytes(state.tolist())).digest()[:7]))

    def _loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """The loss, checked; a model that changes its input is refused, as a method may use that input again."""
        inputs = batch["x"]
        version = _version(inputs)
        loss = self.loss(batch, recalled)
        if _version(inputs) != version:
            got = Description("one that changes its input in place")
            raise invalid("model", got, "one that does not", "write x = x - 1, or ReLU(inplace=False) as first layer")
        if not isinstance(loss, Tensor) or loss.ndim:
            name = f"loss of {self.own_name()}"
            raise invalid(name, loss, "a tensor of one number", "take its mean, for example")
        return loss

    def _as_inputs(self, x: Tensor, augment: bool) -> Tensor:
        """Raw examples as inputs of the model: never the same tensor, as the model may work in place."""
        version = _version(x)
        view = self.augment(x, self.generator) if augment and self.augment is not None else x
        inputs = as_inputs(view, self.prepare, self.dtype, ids=self.embed is not None)
        if _version(x) != version:
            got = Description("one that changes examples in place")
            raise invalid("prepare or augment", got, "one that returns new ones", "write x = x - 1, not x -= 1")
        is_shared = isinstance(inputs, Tensor) and inputs.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        return inputs.clone() if is_shared else inputs

    def _make_optimizer(self, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = optimizers.make_optimizer(self.optimizer, weights, self.lr)
        if isinstance(self.optimizer, str):
            optimizers.count_steps_on(optimizer, self.device)
        return optimizer

    def _check_inputs(self, x: Tensor, inputs: Tensor) -> None:
        """Refuse numbers that are no longer finite as inputs of the model."""
        if x.is_floating_point() and (self.prepare is not None or inputs.dtype != x.dtype):
            name = type_name(self.dtype)
            remedy = f"they are not finite as inputs of the model ({name}): clip or drop those examples"
            check_finite("x", inputs, remedy)

    def _check_room(self, batch: Batch) -> None:
        """Refuse a first batch if the memory has no room for such examples, or was filled with others."""

    def _check_model(self, x: Tensor) -> None:
        """Refuse a model that the method cannot use, tried on an example of the first batch."""


class ReplayLearner(Learner):
    """A learner that keeps a memory of the stream and recalls a batch of it at every step."""

    policy: ClassVar[type[Memory]] = Memory  # decides which examples stay
    keeps: ClassVar[tuple[str, ...]] = ("x", "y")  # what is stored of an example

    memory: int | Memory = option(200, "how many examples are kept", at_least=1)
    replay: int = option(32, "how many examples are recalled at a step", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.memory, Memory):
            self.memory = self.policy(self.memory)
        if self.memory._is_taken:
            got, remedy = Description(f"{self.memory}, which belongs to another learner"), "or a copy: copy.deepcopy(…)"
            raise invalid("memory", got, "one of its own, as both would store examples in it", remedy)
        if self.replay > self.memory.capacity:
            remedy = "recall fewer examples, or keep more"
            raise invalid("replay", self.replay, f"at most memory={self.memory.capacity}", remedy)
        if missing := [name for name in self.memory.needs if name not in self.keeps]:
            expected = f"one that does not need {', '.join(missing)}"
            raise invalid("memory", self.memory, expected, f"{self.own_name()} keeps {', '.join(self.keeps)}")
        if self.memory.needs_classes and not self.error.of_classes:
            remedy = f"give memory={self.memory.capacity}"
            raise invalid("memory", self.memory, "one for targets that are numbers", remedy)

    @property
    def past(self) -> Memory:
        """The memory."""
        assert isinstance(self.memory, Memory)
        return self.memory

    def phase(self) -> Hashable:
        """How many examples can be recalled."""
        return self.past.phase(self.replay)

    def recall(self) -> Batch | None:
        """A batch drawn from memory without replacement, newly augmented."""
        if len(self.past) == 0:
            return None
        drawn = self.past.draw(self.replay, generator=self.generator)
        return drawn | {"x": self.augmented(drawn["x"]), "raw": drawn["x"]}

    def remember(self, raw: Batch, batch: Batch) -> None:
        """Offer the batch as it came (`raw`) to memory, with whatever else the method stores of it."""
        fields = batch | raw
        if missing := [name for name in self.keeps if name not in fields]:
            got, keeps = Description(f"no {', '.join(missing)}"), ", ".join(self.keeps)
            remedy = "pass task= with every batch" if missing == ["task"] else "add it to `batch` in `loss`"
            raise invalid("batch", got, f"what {self.own_name()} keeps: {keeps}", remedy)
        self.past.offer({name: fields[name] for name in self.keeps}, generator=self.generator)

    def _check_room(self, batch: Batch) -> None:
        self.past.check_room(batch, *self.keeps)
        stored = self.past.fields if len(self.past) else ()
        if "x" in stored:
            check_finite('memory["x"]', self.past["x"])
        if "y" in stored:
            assert self.classes is not None
            try:
                self.error.check(self.past["y"], len(self.past), self.classes, self.dtype)
            except InputError as error:
                error.name = 'memory["y"]'
                raise

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on, including the memory."""
        return super().state_dict() | {"memory": self.past.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of a learner of the same class, model and memory size."""
        # A memory is on the device of its examples.
        memory_state = {
            name: value.to(self.device) if isinstance(value, Tensor) else value
            for name, value in state.get("memory", {}).items()
        }
        if "y" in memory_state and not self.error.of_classes:
            y = memory_state["y"]  # early versions stored targets with units in the model's type
            memory_state["y"] = self.error.check(y, len(y), y.shape[1], self.dtype)
        if memory_state:  # else the base class says what is missing
            self.past.check_state(memory_state, *self.keeps)
        super().load_state_dict(state)
        self.past.load_state_dict(memory_state)


def join(batch: Batch, recalled: Batch | None) -> tuple[Tensor, Tensor]:
    """The examples and labels of the new batch followed by the recalled ones."""
    if recalled is None:
        return batch["x"], batch["y"]
    return torch.cat([batch["x"], recalled["x"]]), torch.cat([batch["y"], recalled["y"]])


def _check_arguments(learner: Learner) -> None:
    """Check the arguments that are no options, and options that depend on one another."""
    check_number("seed", learner.seed, whole=True, at_least=0, below=2**63)
    if learner.classes is not None:
        check_number("classes", learner.classes, whole=True, at_least=1)
    if learner.prepare is not None:
        check_call("prepare", learner.prepare, "x")
    if learner.augment is not None:
        check_call("augment", learner.augment, "x", "generator")
    if learner.average_part != 1 and learner.average is None:
        raise invalid("average_part", learner.average_part, "1 without an average", "set average=0.99, for example")


def _version(x: Any) -> int:
    """How often a tensor was changed in place, if torch counts that: not in inference mode."""
    return 0 if not isinstance(x, Tensor) or x.is_inference() else x._version
