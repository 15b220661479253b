"""The step that every learner shares: recall, loss, descend, remember."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Self, dataclass_transform

import numpy as np
import torch
from torch import Generator, Tensor, nn

from parabolic.checks import (
    FILL_IN,
    Description,
    InputError,
    check_call,
    check_finite,
    check_gaps,
    check_number,
    invalid,
    plain,
)
from parabolic.learners.average import WeightAverage
from parabolic.learners.criterion import Criterion, find_criterion
from parabolic.learners.functional import answers_by, copies_of, has_embedding
from parabolic.learners.gradients import trainable
from parabolic.learners.head import check_alone, check_head, follow, last_linear, widen, wider
from parabolic.learners.optimizers import make_optimizer, parse_optimizer
from parabolic.memory import Batch, Memory
from parabolic.options import check_options, documented, option, options_of

__all__ = ["Diverged", "Learner", "ReplayLearner", "TaskBatches", "join"]

NEEDS_TWO = "more than 1 value per channel"  # what torch says of batch norm and one example
WHOLE = ("step", "start_task", "end_task", "grow", "load_state_dict")  # no other thread sees these half done
# What a learner keeps that is no field of it.
OWN = {"averaged", "body", "device", "dtype", "generator", "lock", "optim", "stepping", "steps"}
# Methods that users may override, and those that our loops call instead.
ASKED = {"predict": "scores_at", "scores": "scores_at", "observe": "step"}
GO_BACK = "go back to the last file that was saved, and lower lr or set clip_norm"
GIVE_WAY = 1e-4  # seconds: enough for a thread that waits to wake up

TaskBatches = Iterable[tuple[Tensor, Tensor]]
"""The batches of a task, which can be gone through again and again."""


class Diverged(RuntimeError):
    """Losses, weights or scores are no longer finite numbers."""


def _alone(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a learner that changes it, called when no other thread asks or changes it."""

    @functools.wraps(method)
    def alone(self: Learner, *args: Any, **kwargs: Any) -> Any:
        with self._changing():
            return method(self, *args, **kwargs)

    return alone


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(dataclasses.field,))
@dataclasses.dataclass(eq=False, kw_only=True, repr=False)
class Learner:
    """What one batch does to a model. A method is a subclass that states its `loss`, and its options as fields.

    The step is tensor code of fixed shape that never waits for the device, so that it can be captured as a CUDA
    graph; all state is in `state_dict`.

    Args:
        model: the network, mapping a batch of inputs to one score a class. It is trained in place, where it is.
        criterion: what is minimised: "cross-entropy" for classes; "mse" or "huber" where targets are numbers, each of
            which is a score; or a `Criterion`, such as CrossEntropy(weights=[1, 5]) or Numbers(your_loss).
        embed: a module that comes before the model and is trained with it, where inputs are no points that a path
            could run between, such as ids of words: bridges run through what it gives.
        prepare: turns raw examples into the model's input, for learning and for prediction alike. By default
            bytes become floats in [0, 1] (with `embed`, ids), floats those of the model's type, and all else is left
            alone. If it has a `state_dict`, as `Scale` and modules have, that is part of the learner's. `train` gives
            a learner that has none the stream's; in a loop of your own, give it here.
        augment: a random change of raw examples before `prepare`, for learning only: `augment(x, generator)`. As with
            `prepare`, `train` takes the stream's where there is none.
        classes: how many scores count. By default it is asked of the model, at the first batch.
        seed: the seed of `generator`, from which all randomness of the learner comes.

    Any number of threads may predict while one observes: `lock` is held by whoever changes or asks the model, so that a
    prediction is that of the model before or after a step. Hold it (`with learner.lock:`) to copy a state meanwhile.
    `stepping` tells whoever holds it, as a signal handler may, whether a step is only half done.

    `lr` is what the optimiser is made with: later on, change a learning rate in `learner.optim.param_groups`.
    """

    name: ClassVar[str] = ""  # what `--learner` calls it; a base class has none
    reference: ClassVar[str] = ""  # authors, year, title
    needs_tasks: ClassVar[bool] = False  # whether it must be told where a task starts and ends
    needs_classes: ClassVar[bool] = False  # whether it makes no sense for targets that are numbers
    sees_all: ClassVar[bool] = False  # whether all tasks come at once, shuffled: a reference, not a learner of streams

    model: nn.Module = dataclasses.field(kw_only=False)
    lr: float = option(0.1, "learning rate", above=0, tune="0.001:1:log")
    optimizer: str | Callable[..., torch.optim.Optimizer] = option(
        "SGD", "a class of torch.optim: SGD, SGD(momentum=0.9); in Python also a factory(parameters, lr=lr)",
        reads=parse_optimizer,
    )  # fmt: skip
    average: float | None = option(
        None,
        "decay of a moving average of the weights, kept for prediction (none: no average)",
        at_least=0,
        below=1,
    )
    average_part: float = option(
        1.0, "the part of all steps so far that the average spans while it is short of 1 / (1 − average) steps",
        above=0, at_most=1,
    )  # fmt: skip
    repeats: int = option(
        1, "how many steps are made on each batch, with draws of their own: what is recalled, crops, paths", at_least=1
    )
    clip_norm: float | None = option(None, "the largest norm of a gradient that is descended (none: no limit)", above=0)
    criterion: str | Criterion = "cross-entropy"
    embed: nn.Module | None = None
    prepare: Callable[[Tensor], Tensor] | None = None
    augment: Callable[[Tensor, Generator], Tensor] | None = None
    classes: int | None = None
    seed: int = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in WHOLE:
            if name in vars(cls):
                setattr(cls, name, _alone(vars(cls)[name]))
        cls._check_fields()
        about = cls.__doc__
        dataclasses.dataclass(eq=False, kw_only=True, repr=False)(cls)
        cls.__doc__ = about and documented(about, cls)  # without one, the dataclass has put its signature there

    @classmethod
    def _check_fields(cls) -> None:
        """Refuse a field without its type, of which nothing would come, and one that hides what learners need."""
        bases, typed = cls.__mro__[1:], inspect.get_annotations(cls)
        inherited = {each.name for base in bases if dataclasses.is_dataclass(base) for each in dataclasses.fields(base)}
        for name, value in vars(cls).items():
            field = isinstance(value, dataclasses.Field) or (name in inherited and not isinstance(value, property))
            if field and name not in typed:
                raise invalid(f"{cls.__name__}.{name}", value, "a type with it", f"as in {name}: float = …")
        for name in typed.keys() - inherited:
            hidden = [vars(base)[name] for base in bases if name in vars(base)]
            if name in OWN or any(inspect.isroutine(each) or isinstance(each, property) for each in hidden):
                remedy = f"learners use that name themselves: choose another, such as my_{name}"
                raise invalid(f"field of {cls.__name__}", name, "a name that is not taken", remedy)

    @classmethod
    def overridden(cls) -> dict[str, str]:
        """Overrides that no loop of this package calls, each with the method that it calls instead.

        >>> from parabolic import ER
        >>> class Nearest(ER):
        ...     def predict(self, x): ...
        >>> Nearest.overridden(), ER.overridden()
        ({'predict': 'scores_at'}, {})
        """

        def stated(name: str) -> int:
            return next(place for place, base in enumerate(cls.__mro__) if name in vars(base))

        return {name: other for name, other in ASKED.items() if stated(name) < stated(other)}

    @classmethod
    def own_name(cls) -> str:
        """What an error calls it: its name, or that of the class where the name is inherited, and so another's.

        >>> from parabolic import ER
        >>> class Mine(ER): ...
        >>> ER.own_name(), Mine.own_name()
        ('er', 'Mine')
        """
        return vars(cls).get("name") or cls.__name__

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise invalid("model", type(self.model), "a torch.nn.Module")
        self.lock, self.stepping = threading.RLock(), False
        self._descended = False  # whether the weights have moved since `observe` began
        self._asking: set[int] = set()  # threads that wait to predict
        self.body = self.model  # from what bridges run through to the scores
        if self.embed is not None:
            if not isinstance(self.embed, nn.Module):
                raise invalid("embed", type(self.embed), "a torch.nn.Module")
            self.model = nn.Sequential(OrderedDict(embed=self.embed, body=self.body))
        weights = trainable(self.model)
        if not weights:
            raise invalid("model", self.model, "a module with trainable parameters")
        if any(weight.is_inference() for weight in weights):
            got = Description("one made in inference mode")
            raise invalid("model", got, "one that can learn", "make it outside, or in torch.inference_mode(False)")
        check_options(self)
        check_number("seed", self.seed, whole=True, at_least=0, below=2**63)
        if self.classes is not None:
            check_number("classes", self.classes, whole=True, at_least=1)
        self.seed, self.classes = plain(self.seed), plain(self.classes)
        if self.prepare is not None:
            check_call("prepare", self.prepare, "x")
        if self.augment is not None:
            check_call("augment", self.augment, "x", "generator")
        for module in self.model.modules():  # such as one that keeps a norm frozen whenever it is set to train
            if module.training and getattr(module.train, "__func__", None) is not nn.Module.train:
                module.train()
        self.device, self.dtype = weights[0].device, weights[0].dtype
        self.criterion = find_criterion(self.criterion).to(self.device)
        if self.needs_classes and not self.error.of_classes:
            remedy = f"{self.own_name()} tells classes apart: choose another learner for numbers"
            raise invalid("criterion", self.criterion, "a loss of classes", remedy)
        self.generator = Generator(self.device).manual_seed(self.seed)
        self.optim = self._make_optimizer(weights)
        if self.average_part != 1 and self.average is None:
            raise invalid("average_part", self.average_part, "1 without an average", "set average=0.99, say")
        self.averaged = None if self.average is None else WeightAverage(self.model, self.average, self.average_part)
        self.steps = 0
        self._example: tuple[torch.Size, torch.dtype] | None = None

    # -- learning ------------------------------------------------------------------------------------------

    def observe(self, x: Tensor, y: Tensor, task: int | None = None) -> Tensor:
        """Learn from a batch of raw examples and their labels; returns the loss, still on the device.

        What does not fit is refused before anything changes. Checking waits for the device: a loop that has
        checked its data already calls `step`.
        """
        if self.needs_tasks and task is None:
            remedy = f"{self.own_name()} must know of tasks: pass task=0, 1, … and call start_task and end_task"
            raise invalid("task", task, "the number of the task that the batch belongs to", remedy)
        if task is not None:
            check_number("task", task, whole=True, at_least=0, below=2**31)
        with self._changing():
            take_back, self._descended = self._kept_aside(), False
            try:
                x, y = self._checked(x, y)
                loss = self.step(x, y, task)
            except InputError:
                if not self._descended:  # else there is no way back: it has learned
                    take_back()
                raise
        if self._asking:  # a lock goes to whoever comes first, and that would be the next batch
            time.sleep(GIVE_WAY)
        return loss

    def step(self, x: Tensor, y: Tensor, task: int | Tensor | None = None) -> Tensor:
        """Learn from a batch that is known to be sound and on the learner's device."""
        raw = {"x": x, "y": y}
        if task is not None:
            number = task if isinstance(task, Tensor) else torch.full((), task, device=y.device)
            raw["task"] = number.expand(len(y))
        with self._changing():
            self.stepping = True
            try:
                if not self.model.training:
                    self.model.train()
                for _ in range(self.repeats):
                    recalled = self.recall()
                    batch = raw | {"x": self._given(x), "raw": x}
                    loss = self._loss(batch, recalled)
                    if not isinstance(loss, Tensor) or loss.ndim:
                        whose = f"loss of {self.own_name()}"
                        raise invalid(whose, loss, "a tensor of one number", "take its mean, say")
                    self._descended = True
                    self.descend(loss)
                self.remember(raw, batch)
                self.steps += 1
            except (ValueError, IndexError) as error:
                if (refusal := self._refusal(x, error)) is None:
                    raise
                raise refusal from error
            finally:
                self.stepping = False
        return loss.detach()

    def phase(self) -> Hashable:
        """All that the host knows and that decides which operations the next step is made of.

        Two steps of one phase, on batches of one size, are the same operations on the same tensors. A method whose
        code asks for a number that changes (say, whether this is the first step) adds the answer here.
        """
        return ()

    @property
    def error(self) -> Criterion:
        """The criterion: how far scores are from their targets."""
        assert isinstance(self.criterion, Criterion)
        return self.criterion

    def recall(self) -> Batch | None:
        """What is remembered of the past, ready for the model; None where there is nothing."""
        return None

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """The method: the number to descend, from the new batch and the recalled one.

        Of both, "x" is ready for the model, "raw" is what it was made of, and "y" are the labels; with tasks, the new
        one has "task" too. Of what is raw `augmented` makes another view, and `inputs` the one for prediction.
        """
        raise NotImplementedError(f"{type(self).__name__} states no loss(batch, recalled)")

    def descend(self, loss: Tensor) -> None:
        """One step of the optimiser down the gradient of the loss."""
        self.optim.zero_grad()
        loss.backward()
        self.apply_gradients()

    def apply_gradients(self) -> None:
        """A step of the optimiser by the gradients as they stand, and of the weight average where one is kept."""
        self.clip_gradients()
        self.optim.step()
        if self.averaged is not None:
            self.averaged.update(self.model)

    def clip_gradients(self) -> None:
        """Shorten the gradients as they stand, all by one factor, where they are longer than `clip_norm`."""
        if self.clip_norm is not None:
            weights = [weight for group in self.optim.param_groups for weight in group["params"]]
            nn.utils.clip_grad_norm_(weights, self.clip_norm)

    def remember(self, raw: Batch, batch: Batch) -> None:
        """Keep what the method keeps of the raw batch (and of what `loss` added to `batch`)."""

    def start_task(self, batches: TaskBatches) -> None:
        """Called before a task, where the stream has tasks, with its batches: each example once."""

    def end_task(self, batches: TaskBatches) -> None:
        """Called after a task, where the stream has tasks, with its batches: each example once."""

    def grow(self, classes: int) -> None:
        """Make room for the labels below `classes`: the last linear layer gets more outputs, the old ones stay.

        The optimiser's state, averages, and what the method keeps of each output go along.

        >>> from parabolic import ER
        >>> learner = ER(nn.Linear(4, 2), memory=50)
        >>> learner.grow(3)
        >>> loss = learner.observe(torch.randn(6, 4), torch.arange(6) % 3)
        """
        check_number("classes", classes, whole=True, at_least=1)
        classes = int(classes)
        if not self.error.of_classes:
            raise invalid("criterion", self.criterion, "a loss of classes", "among numbers there are no more classes")
        with self._changing():
            _, head = last_linear(self.model)
            check_head(head, self.classes)
            known = self.classes or head.out_features
            if classes > head.out_features:
                self._check_growth(head, classes)
                self.on_growth(widen(head, classes, self.generator))
            if classes > known:
                self.criterion, self.classes = self.error.widened(classes), classes

    def on_growth(self, moved: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Let all that goes with single weights follow those that moved to where there are more rows."""
        follow(self.optim, moved)
        if self.averaged is not None:
            self.averaged.follow(self.model)

    # -- prediction ----------------------------------------------------------------------------------------

    def scores(self, x: Tensor) -> Tensor:
        """The scores (logits) of raw examples: all outputs of the model, also those that are no classes."""
        x = _as_tensor("x", x, self.device)
        check_finite("x", x)
        self._check_kind(x)
        return self._try(x)

    def inputs(self, x: Tensor) -> Tensor:
        """Raw examples as inputs of the model, as for prediction."""
        return self._given(x, augment=False)

    def augmented(self, x: Tensor) -> Tensor:
        """Raw examples as inputs of the model, as for learning: changed at random, anew in every call."""
        return self._given(x)

    def scores_at(self, inputs: Tensor) -> Tensor:
        """The scores for inputs of the model, by the averaged weights where there are any."""
        with self._turn():
            return answers_by(self.predicting_weights(), self.model, inputs)

    def predicting_weights(self) -> dict[str, Tensor]:
        """The weights and buffers that predict in place of the model's own, by name."""
        return {} if self.averaged is None else self.averaged.weights

    def predict(self, x: Tensor) -> Tensor:
        """The class of each raw example; where targets are numbers, these, `[n, outputs]`."""
        with self._turn():
            scores = self.scores(x)[:, : self.classes]
            if bool(scores.isnan().any()):
                raise Diverged(f"predict: the scores are no numbers any more, after {self.steps} steps; {GO_BACK}")
            return self.error.answer(scores)  # in the units of the same moment

    # -- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on. As in torch, the tensors are the live ones: copy them to keep them."""
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": self.optim.state_dict(),
            "generator": self.generator.get_state(),
            "steps": self.steps,
        }
        if self.averaged is not None:
            state["average"] = self.averaged.state_dict()
        state |= {name: part.state_dict() for name, part in self._parts().items()}
        if self._example is not None:  # as a batch of none, which says what examples are like
            shape, dtype = self._example
            state["example"] = torch.empty(0, *shape, dtype=dtype)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of another learner of the same kind and model, on whatever device it was.

        From a GPU to a CPU, or back, all is the same but what will be drawn: their generators have no state in common.
        """
        optional = {"example", *self._parts()}  # of which a new learner, or a file from before they were kept, has none
        if missing := self.state_dict().keys() - state.keys() - optional:
            remedy = "load the state of a learner of the same kind"
            raise invalid("state", Description(f"no {', '.join(sorted(missing))}"), "a whole state", remedy)
        own = self.model.state_dict()
        for name, value in state["model"].items():
            if isinstance(value, Tensor) and name in own and value.shape != own[name].shape:
                got = Description(f"{name} of shape {list(value.shape)}")
                remedy = "load it into one that has as many classes, as `Learner.load` makes it of a file"
                raise invalid("state", got, f"{list(own[name].shape)}, as in this learner", remedy)
        self._check_optimizer(state["optimizer"])
        with self._changing():
            self.model.load_state_dict(state["model"])
            self._load_optimizer(state["optimizer"])
            self._load_generator(state["generator"].cpu())
            self.steps = int(state["steps"])
            if self.averaged is not None:
                self.averaged.load_state_dict(state["average"])
            for name, part in self._parts().items():
                if name in state:
                    part.load_state_dict(state[name])
            example = state.get("example")
            self._example = None if example is None else (example.shape[1:], example.dtype)

    def save(self, path: str | Path) -> Path:
        """Write the learner to one file: all that its next step depends on, and how it was made. It holds no code.

        A crash at any moment leaves what was there, or all of the new.

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
        """Refuse to do something in the middle of a step, as a signal handler could."""
        if self.stepping:
            raise RuntimeError(f"{what}: called in the middle of a step; set a flag, and look at it after `observe`")

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        model: nn.Module | None = None,
        device: torch.device | str | None = None,
        **given: Any,
    ) -> Self:
        """The learner that `save` wrote: in any process it goes on as if it had never stopped.

        A file that is damaged, or of a later version, is refused. Loading runs nothing that the file names: a class of
        your own must be imported before.

        Args:
            path: the file.
            model: a network like the one saved, which takes over its weights; one of this package is made anew without.
            device: where the learner is to be (default: where the model is).
            given: what no file can hold, as it was: your own `prepare`, `augment`, optimiser factory or `drift`.
        """
        from parabolic.learners.saving import load

        with torch.inference_mode(False):  # it may learn later
            return load(cls, path, model, device, given)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy, with a lock of its own; meanwhile no other thread learns or predicts."""
        with self.lock:
            memo[id(self)] = made = self.__new__(type(self))
            made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        """All but the lock, for a copy or a pickle, which has its own.

        While other threads use the learner, hold the lock until the pickle is made, or pickle a deep copy.
        """
        with self.lock:
            self.check_whole("a copy")
            return {name: value for name, value in self.__dict__.items() if name not in ("lock", "_asking")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {"stepping": False, **state, "lock": threading.RLock(), "_asking": set()}

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in options_of(type(self)))
        return f"{type(self).__name__}({type(self.model).__name__}, {values})"

    # -- the small print -----------------------------------------------------------------------------------

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """The lock, for what changes the learner, with gradients even where the caller has switched them off."""
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():  # as nearly always: a step may be short
            with self.lock:
                yield
        else:
            with self.lock, torch.inference_mode(False), torch.enable_grad():
                yield

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The lock, for a prediction: a thread that learns gives way to it between two batches."""
        me = threading.get_ident()
        self._asking.add(me)
        try:
            with self.lock:
                self._asking.discard(me)
                yield
        finally:
            self._asking.discard(me)

    def _touched(self) -> list[Tensor]:
        """The tensors that a loss changes in place before it is descended; a batch that is refused changes none."""
        return list(self.model.buffers())

    def _kept_aside(self) -> Callable[[], None]:
        """What takes back, when it is called, a step whose loss failed on the way: draws, statistics and notes."""
        notes, drawn, touched = {**vars(self)}, self.generator.get_state(), self._touched()
        copies = copies_of(touched)

        def take_back() -> None:
            for name in vars(self).keys() - notes.keys():
                delattr(self, name)
            vars(self).update(notes)
            self.generator.set_state(drawn)
            for tensor, before in zip(touched, copies, strict=True):
                tensor.copy_(before)

        return take_back

    def _refusal(self, x: Tensor, error: Exception) -> InputError | None:
        """The error to raise for a batch on which a step failed; None where the batch is not to blame."""
        if isinstance(error, IndexError) and has_embedding(self.model):  # of an id that it does not have
            return invalid("x", x, "examples that the model accepts", f"the model says: {error}")
        if NEEDS_TWO not in str(error):
            return None
        needed = "at least two examples, as batch norm needs here"
        if len(x) == 1:
            return invalid("x", x, needed, "hold it back until there is a second one")
        got = Description("one example, recalled or split off, that goes through the model by itself")
        return invalid(f"step of {self.own_name()}", got, needed, "raise replay, memory or chunk")

    def _parts(self) -> dict[str, Any]:
        """What it was given that has a state of its own, by name."""
        brought = {"prepare": self.prepare, "units": getattr(self.criterion, "units", None)}
        return {name: part for name, part in brought.items() if hasattr(part, "load_state_dict")}

    def _check_optimizer(self, state: Mapping[str, Any]) -> None:
        """Refuse the state of another optimiser: it has settings that this one has not, and lacks some of its own."""
        ours, theirs = self.optim.param_groups, state["param_groups"]
        same = [len(each["params"]) for each in ours] == [len(each["params"]) for each in theirs]
        pairs = zip(ours, theirs, strict=False)
        if not same or any(mine.keys() - its.keys() and its.keys() - mine.keys() for mine, its in pairs):
            got = Description(" and ".join(f"one of {', '.join(sorted(each.keys() - {'params'}))}" for each in theirs))
            expected = f"one of {type(self.optim).__name__} for the weights of this model"
            raise invalid("state of the optimizer", got, expected, "make the learner with the optimizer that it had")

    def _load_optimizer(self, state: Mapping[str, Any]) -> None:
        # Where steps are counted is a matter of the device, not of the state.
        groups = [
            {**saved, "capturable": own["capturable"]} if "capturable" in own else saved
            for saved, own in zip(state["param_groups"], self.optim.param_groups, strict=True)
        ]
        self.optim.load_state_dict({**state, "param_groups": groups})
        # Torch takes over tensors themselves where they fit, and casts others: a copy of each, in its own type.
        weights = [weight for group in self.optim.param_groups for weight in group["params"]]
        for number, saved in state["state"].items():
            own = self.optim.state[weights[number]]
            for name in [name for name, value in saved.items() if isinstance(value, Tensor)]:
                own[name] = saved[name].to(own[name].device, copy=True)

    def _load_generator(self, state: Tensor) -> None:
        if len(state) == len(self.generator.get_state()):
            self.generator.set_state(state)
        else:  # of another kind of device: then draws differ, but depend on the state alone
            self.generator.manual_seed(int.from_bytes(sha256(bytes(state.tolist())).digest()[:7]))

    def _loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """The loss, from a model that leaves its input alone: a method may ask it of the same examples again."""
        inputs = batch["x"]
        version = _version(inputs)
        loss = self.loss(batch, recalled)
        if _version(inputs) != version:
            got = Description("one that changes its input in place")
            raise invalid("model", got, "one that leaves it alone", "as in x = x - 1, or ReLU(inplace=False) at first")
        return loss

    def _given(self, x: Tensor, augment: bool = True) -> Tensor:
        """What the model is given for examples that are someone else's: never these, as it may work in place."""
        version = _version(x)
        made = self._inputs(x, augment)
        if _version(x) != version:
            got = Description("one that changes examples in place")
            raise invalid("prepare or augment", got, "one that makes new ones", "as in x = x - 1, and not x -= 1")
        shared = isinstance(made, Tensor) and made.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        return made.clone() if shared else made

    def _inputs(self, x: Tensor, augment: bool = True) -> Tensor:
        if augment and self.augment is not None:
            x = self.augment(x, self.generator)
        if self.prepare is not None:
            made = self.prepare(x)
            double = isinstance(made, Tensor) and made.is_floating_point() and torch.float64 in (made.dtype, self.dtype)
            return made.to(self.dtype) if double else made
        if x.dtype != torch.uint8:
            return x.to(self.dtype) if x.is_floating_point() else x  # NumPy's numbers are float64, and few models are
        return (x.float() / 255).to(self.dtype) if self.embed is None else x.long()

    def _make_optimizer(self, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = make_optimizer(self.optimizer, weights, self.lr)
        if self.device.type == "cuda" and isinstance(self.optimizer, str):
            for group in made.param_groups:
                if "capturable" in group:
                    group["capturable"] = True  # it then counts its steps on the device
        return made

    def _checked(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = (_as_tensor(name, value, self.device) for name, value in (("x", x), ("y", y)))
        if x.ndim < 1 or len(x) == 0:
            raise invalid("x", x, "a batch of at least one example", "skip empty batches")
        self._check_kind(x)
        # Only the model knows what it takes: after the first batch numbers are like those before, but an id may be new.
        ids = not x.is_floating_point() and (self.embed is not None or x.dtype != torch.uint8)
        scores = self._try(x if ids else x[:1]) if ids or self._example is None or self.classes is None else None
        check_finite("x", x)
        if x.is_floating_point():
            self._check_inputs(x, self.inputs(x))
        if self.classes is None:
            assert scores is not None
            self.classes = scores.shape[1]
        elif scores is not None and not self.error.of_classes and scores.shape[1] != self.classes:
            remedy = "every output is a number to learn"
            raise invalid("classes", self.classes, f"{scores.shape[1]}, as many as the model has outputs", remedy)
        elif scores is not None and scores.shape[1] < self.classes:
            remedy = "give the model more outputs, or let its last torch.nn.Linear give them and the learner `grow`"
            raise invalid("classes", self.classes, f"at most {scores.shape[1]}, as many as the model scores", remedy)
        y = self.error.check(y, len(x), self.classes, self.dtype)
        if self._example is None:
            if scores is not None:
                self.error(scores, y[: len(scores)])  # a loss that the user brings may have something to say
            self._check_room({"x": x, "y": y})
        self._example = (x.shape[1:], x.dtype)
        return x, y

    def _check_growth(self, head: nn.Linear, classes: int) -> None:
        """Refuse a last layer that cannot grow alone, or does not give the scores, as an example of zeros tells."""
        check_alone(self.model, head)
        if self._example is None:  # then the first batch tells
            return
        shape, dtype = self._example

        def outputs(weights: Mapping[str, Tensor]) -> int:
            try:
                inputs = self.inputs(torch.zeros(1, *shape, dtype=dtype, device=self.device))
                return answers_by(weights, self.model, inputs).shape[-1]
            except Exception:  # whatever the user's own code says of zeros, or of such weights
                return 0

        if known := outputs({}):
            check_head(head, known, given=outputs(wider(self.model, head, classes)) >= classes)

    def _check_kind(self, x: Tensor) -> None:
        if self._example is not None and self._example != (x.shape[1:], x.dtype):
            shape, dtype = self._example
            like = f"examples as in the first batch, each of shape {list(shape)} and {dtype}"
            alone = "add a dimension: x[None]" if (x.shape, x.dtype) == self._example else ""
            raise invalid("x", x, like, alone or "one learner learns one kind of example")

    def _check_inputs(self, x: Tensor, inputs: Tensor) -> None:
        """Refuse numbers that are none any more as the model sees them."""
        if x.is_floating_point() and (self.prepare is not None or inputs.dtype != x.dtype):
            told = str(self.dtype).removeprefix("torch.")
            check_finite("x", inputs, f"as inputs of the model ({told}) they are not: clip or drop those examples")

    def _check_room(self, batch: Batch) -> None:
        """Refuse a first batch of which there is no room for all that would be kept."""

    def _try(self, x: Tensor) -> Tensor:
        """The scores of raw examples, or an error that says why the model does not take them."""
        try:
            inputs = self.inputs(x)
            self._check_inputs(x, inputs)
            scores = self.scores_at(inputs)
        except (InputError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:
            whole = not x.is_floating_point() and x.dtype != torch.uint8
            remedy = "; if they are measurements, convert them with .float()" if whole and self.embed is None else ""
            raise invalid("x", x, "examples that the model accepts", f"the model says: {error}{remedy}") from error
        if not isinstance(scores, Tensor):
            raise invalid("model", type(scores), "one tensor of scores [n, classes]", "wrap it and return that")
        if scores.ndim != 2:
            raise invalid("model", Description(f"an output of shape {list(scores.shape)}"), "scores [n, classes]")
        return scores


class ReplayLearner(Learner):
    """A learner that keeps a memory of the stream and recalls a batch of it at every step."""

    policy: ClassVar[type[Memory]] = Memory  # which examples stay
    keeps: ClassVar[tuple[str, ...]] = ("x", "y")  # what is kept of an example

    memory: int | Memory = option(200, "how many examples are kept", at_least=1)
    replay: int = option(32, "how many examples are recalled at a step", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.memory, Memory):
            self.memory = self.policy(self.memory)
        if self.replay > self.memory.capacity:
            remedy = "recall fewer examples, or keep more"
            raise invalid("replay", self.replay, f"at most memory={self.memory.capacity}", remedy)
        if lacking := [name for name in self.memory.needs if name not in self.keeps]:
            expected = f"one that does without {', '.join(lacking)}"
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
        """How much of a batch can be recalled."""
        return self.past.phase(self.replay)

    def recall(self) -> Batch | None:
        """A batch drawn from memory without replacement, augmented afresh."""
        if len(self.past) == 0:
            return None
        drawn = self.past.draw(self.replay, generator=self.generator)
        return drawn | {"x": self._inputs(drawn["x"]), "raw": drawn["x"]}

    def remember(self, raw: Batch, batch: Batch) -> None:
        """Offer the raw batch to memory, with whatever else the method keeps of it."""
        known = batch | raw
        self.past.offer({name: known[name] for name in self.keeps}, generator=self.generator)

    def _check_room(self, batch: Batch) -> None:
        self.past.check_room(batch)

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, the memory included."""
        return super().state_dict() | {"memory": self.past.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of another learner of the same kind, model and memory size."""
        # A memory is where its examples are.
        kept = {
            name: each.to(self.device) if isinstance(each, Tensor) else each
            for name, each in state.get("memory", {}).items()
        }
        if "y" in kept and not self.error.of_classes:  # at first, targets with units were kept in the model's type
            kept["y"] = self.error.check(kept["y"], len(kept["y"]), kept["y"].shape[1], self.dtype)
        if kept:  # else it is told what is missing
            self.past.check_state(kept, *self.keeps)
        super().load_state_dict(state)
        self.past.load_state_dict(kept)


def join(batch: Batch, recalled: Batch | None) -> tuple[Tensor, Tensor]:
    """The examples and labels of the new batch followed by the recalled ones."""
    if recalled is None:
        return batch["x"], batch["y"]
    return torch.cat([batch["x"], recalled["x"]]), torch.cat([batch["y"], recalled["y"]])


def _version(x: Any) -> int:
    """How often a tensor was changed in place, where torch counts that: not in inference mode."""
    return 0 if not isinstance(x, Tensor) or x.is_inference() else x._version


def _as_tensor(name: str, value: Any, device: torch.device) -> Tensor:
    check_gaps(name, value)
    try:
        if hasattr(value, "__array__") and not isinstance(value, Tensor):  # a frame of pandas, say
            value = np.asarray(value)
            if not value.flags.writeable or not value.dtype.isnative or any(step < 0 for step in value.strides):
                value = value.astype(value.dtype.newbyteorder("="))  # torch refuses these, or warns, in vain
        tensor = torch.as_tensor(value, device=device).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        several = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)
        words = several and any(isinstance(each, str) for each in value[:1])
        remedy = "number them from 0, or use an estimator, which takes words" if words else str(error)
        if not words and isinstance(value, np.ndarray) and value.dtype.hasobject:
            remedy = f"it holds Python objects: make every column one of numbers, and {FILL_IN}"
        raise invalid(name, type(value), "a tensor, or what torch.as_tensor makes one of", remedy) from error
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise invalid(name, tensor, "a plain tensor", "convert it with .to_dense() or .dequantize()")
    return tensor.clone() if tensor.is_inference() else tensor  # of such a one there is no gradient
