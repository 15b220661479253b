"""The learners as Avalanche strategies, for its benchmarks, plugins, metrics and loggers (extra `avalanche`)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from parabolic import learners
from parabolic.checks import Description, check_module, first_line, invalid
from parabolic.learners import Criterion, CrossEntropy, Learner, find_learner, known_learners
from parabolic.learners.optimizers import weights_of
from parabolic.plugins import require

try:
    require("avalanche", "avalanche", "avalanche", "Avalanche")  # if it is missing, the error says how to install it
except RuntimeError as error:
    got, remedy = Description(f"an error: {first_line(error)}"), "install the torchvision that was built for your torch"
    raise invalid("avalanche", got, "it to be imported", remedy) from error

from avalanche.benchmarks import OnlineCLExperience
from avalanche.models import DynamicModule
from avalanche.training.plugins.evaluation import default_evaluator
from avalanche.training.templates import SupervisedTemplate

__all__ = ["PCL", "Strategy", "strategy_of"]


class Strategy(SupervisedTemplate):  # type: ignore[misc]
    """Base of the strategies: Avalanche supplies the data and runs its plugins; a learner learns, by its `observe`.

    Loss, memory, optimiser and random numbers belong to the learner, `strategy.learner`, which ends with the same
    weights as if it had been given the same batches without Avalanche. All events reach the plugins, in Avalanche's
    order, at their place in the learner's step: what a plugin adds to `strategy.loss` before the backward pass is
    minimised too, and gradients that it changes before the update are the ones applied. `mb_output` holds the scores of
    the batch before it is learned, computed as for prediction; it is for inspection only and carries no gradient.

    Args:
        model: the network, with an output for each class to come; it is moved to the device.
        optimizer: a torch optimiser over the model's weights, or some of them (None: the learner's own, by its `lr`).
        criterion: the loss, as learners take it, or a `torch.nn.CrossEntropyLoss`.
        train_mb_size: how many examples are learned at a step.
        train_epochs: how many passes are made over an experience.
        eval_mb_size: how many examples are tested at once (None: as many as are learned).
        device: where to compute.
        plugins: Avalanche's plugins.
        evaluator: Avalanche's EvaluationPlugin, or a function that makes one (None: nothing is measured).
        eval_every: how often to test while training, as in all Avalanche strategies.
        peval_mode: what `eval_every` counts: epochs, iterations or experiences.
        options: options of the learner, by name. The strategy of a specific learner takes each of them as an argument:
            memory=1000, sigma_x=0.05, average=0.99, prepare=..., seed=0.
    """

    kind: ClassVar[type[Learner]]
    loss: Tensor  # of the batch, including what plugins added

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "kind" in vars(cls) and "__init__" not in vars(cls):  # otherwise it is inherited
            cls.__init__ = _constructor(cls.kind)  # type: ignore[method-assign]
        super().__init_subclass__(**kwargs)

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: str | Criterion | nn.CrossEntropyLoss = "cross-entropy",
        train_mb_size: int = 1,
        train_epochs: int = 1,
        eval_mb_size: int | None = None,
        device: str | torch.device = "cpu",
        plugins: Sequence[Any] | None = None,
        evaluator: Any = default_evaluator,
        eval_every: int = -1,
        peval_mode: str = "epoch",
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        _check_model(model)
        arguments: dict[str, Any] = {
            name: value.to(device) if isinstance(value, nn.Module) else value for name, value in options.items()
        }
        if optimizer is not None:
            arguments |= _optimizer_options(optimizer, model, options)
        self.learner = self.kind(model.to(device), criterion=_criterion(criterion), **arguments)
        super().__init__(
            model=self.learner.model, optimizer=self.learner.optim, criterion=self.learner.error,
            train_mb_size=train_mb_size, train_epochs=train_epochs, eval_mb_size=eval_mb_size, device=device,
            plugins=plugins, evaluator=evaluator, eval_every=eval_every, peval_mode=peval_mode,
        )  # fmt: skip
        self.optimized_param_id = dict(self.model.named_parameters())  # without it Avalanche would reset the optimiser
        # Avalanche's plugins are called around the backward pass and the update of the learner's step.
        self.learner.descend = self._descend  # type: ignore[method-assign]
        self.learner.apply_gradients = self._apply_gradients  # type: ignore[method-assign]

    # -- learning ------------------------------------------------------------------------------------------

    def training_epoch(self, **kwargs: Any) -> None:
        """Make one pass over the batches of an experience: each is predicted, then learned."""
        task = None if isinstance(self.experience, OnlineCLExperience) else self.clock.train_exp_counter
        for batch in self.dataloader:
            self.mbatch = batch
            if self._stop_training:
                break
            self._unpack_minibatch()
            self._before_training_iteration(**kwargs)
            self._before_forward(**kwargs)
            self.mb_output = self.forward()
            self._after_forward(**kwargs)
            self.learner.observe(self.mb_x, self.mb_y, task)
            self.loss = self.loss.detach()
            self._after_training_iteration(**kwargs)

    def _descend(self, loss: Tensor) -> None:
        self.loss = loss.reshape(1).clone()  # in the shape to which plugins add in place
        self._before_backward()
        type(self.learner).descend(self.learner, self.loss.sum())

    def _apply_gradients(self) -> None:
        self._after_backward()
        self._before_update()
        type(self.learner).apply_gradients(self.learner)
        self._after_update()

    def _before_training_exp(self, **kwargs: Any) -> None:
        super()._before_training_exp(**kwargs)
        if self.model is not self.learner.model:
            raise invalid("model", type(self.model), "the model that the strategy was made with", "make a new strategy")
        if not isinstance(self.experience, OnlineCLExperience):
            self.learner.start_task(_Batches(self))
        elif self.learner.needs_tasks:
            name, remedy = self.learner.own_name(), "use a learner that needs no tasks: see `parabolic list`"
            raise invalid("learner", name, "one that works without tasks, on an online stream", remedy)

    def _after_training_exp(self, **kwargs: Any) -> None:
        if not isinstance(self.experience, OnlineCLExperience):
            self.learner.end_task(_Batches(self))
        super()._after_training_exp(**kwargs)

    def make_optimizer(self, reset_optimizer_state: bool = False, **_: Any) -> None:
        """Clear the state (momentum) of the learner's optimiser if asked to; otherwise leave it as it is."""
        if reset_optimizer_state:
            self.optimizer.state.clear()

    # -- testing -------------------------------------------------------------------------------------------

    def forward(self) -> Tensor:
        """The scores of the batch as the learner predicts them: with the averaged weights, if there are any."""
        return self.learner.scores(self.mb_x)

    def criterion(self) -> Tensor:
        """The loss of these scores."""
        return self.learner.error(self.mb_output, self.mb_y)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by learner if the class was generated here, as no module then holds it under its name."""
        rebuild, arguments, *state = super().__reduce_ex__(protocol)
        if type(self) is _strategies.get(self.kind):
            rebuild, arguments = _blank, (self.kind,)
        return rebuild, arguments, *state


def _blank(kind: type[Learner]) -> Strategy:
    """Return an empty strategy of a learner, to be filled from a pickle."""
    return object.__new__(strategy_of(kind))


def _constructor(kind: type[Learner]) -> Callable[..., None]:
    """Return a constructor whose signature includes the learner's options: Avalanche refuses arguments not in it."""
    *common, _ = inspect.signature(Strategy.__init__).parameters.values()
    fields = [field for field in dataclasses.fields(kind) if field.name not in {argument.name for argument in common}]

    def construct(self: Strategy, **arguments: Any) -> None:
        options = {field.name: arguments.pop(field.name) for field in fields if field.name in arguments}
        Strategy.__init__(self, **arguments, options=options)

    parameters = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default) for field in fields
    ]
    construct.__signature__ = inspect.Signature([*common, *parameters])  # type: ignore[attr-defined]
    return construct


class PCL(Strategy):
    """Parabolic continual learning as a strategy, with the options of `parabolic.PCL` and those of Avalanche.

    `PCL(model=model, optimizer=optimizer, train_mb_size=10, evaluator=evaluator, memory=1000, sigma_x=0.05)`, then
    `strategy.train(experience)` and `strategy.eval(stream)`.
    """

    kind = learners.PCL


def strategy_of(learner: str | type[Learner]) -> type[Strategy]:
    """Return the strategy class of any learner, given its name, its path (`module:Class`) or its class.

    Those of the package's own learners can also be imported: `from parabolic.integrations.avalanche import ER, DERpp`.
    """
    kind = find_learner(learner) if isinstance(learner, str) else learner
    if not (isinstance(kind, type) and issubclass(kind, Learner)):
        raise invalid("learner", kind, "a subclass of parabolic.Learner, or the name of one")
    if kind.sees_all:
        raise invalid("learner", kind.name, "one that learns from a stream", "Avalanche has JointTraining for this")
    if kind not in _strategies:
        namespace = {"kind": kind, "__module__": __name__, "__doc__": kind.__doc__}
        _strategies[kind] = type(kind.__name__, (Strategy,), namespace)
    return _strategies[kind]


_strategies: dict[type[Learner], type[Strategy]] = {PCL.kind: PCL}  # one class for each learner


def __getattr__(name: str) -> Any:
    """Return the strategy of the learner whose class has this name."""
    for kind in known_learners().values():
        if kind.__name__ == name and not kind.sees_all:
            return strategy_of(kind)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclasses.dataclass(frozen=True)
class _Batches:
    """The batches of the current experience; each pass over them is a pass of Avalanche's data loader."""

    strategy: Any

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y, *_ in self.strategy.dataloader:
            yield x.to(self.strategy.device), y.to(self.strategy.device)


def _check_model(model: nn.Module) -> None:
    """Refuse a network that Avalanche would change between experiences, or that needs the task as input."""
    check_module("model", model)
    for name, module in model.named_modules():
        if isinstance(module, DynamicModule):
            got = Description(f"{type(module).__name__} in {name or 'its place'}")
            remedy = "end the network with a torch.nn.Linear that has an output for each class to come"
            raise invalid("model", got, "a network that does not change", remedy)


def _optimizer_options(optimizer: object, model: nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that make a learner use an existing optimiser."""
    remedy = "for example torch.optim.SGD(model.parameters(), lr=0.1)"
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise invalid("optimizer", optimizer, "a torch optimizer over the model's weights, or None", remedy)
    if {*model.parameters()}.isdisjoint(weights_of(optimizer)):
        raise invalid("optimizer", Description("one over other weights"), "one over the model's weights", remedy)
    if "lr" in options:
        raise invalid("lr", options["lr"], "none with an optimizer", "the optimizer has its own")
    lr = float(optimizer.param_groups[0]["lr"])
    return {"optimizer": partial(_adopt, optimizer, [*model.parameters()]), "lr": lr}


def _adopt(
    optimizer: torch.optim.Optimizer, of_model: list[nn.Parameter], weights: list[nn.Parameter], **_: Any
) -> torch.optim.Optimizer:
    """Return the optimiser, extended by weights that are not of the model: a method may have some of its own."""
    known = {*of_model, *weights_of(optimizer)}
    if added := [weight for weight in weights if weight not in known]:
        optimizer.add_param_group({"params": added})
    return optimizer


def _criterion(loss: str | Criterion | nn.CrossEntropyLoss) -> str | Criterion:
    """Convert a torch loss, as Avalanche takes it, to one that a learner takes."""
    if not isinstance(loss, nn.CrossEntropyLoss):
        return loss
    if (loss.reduction, loss.label_smoothing, loss.ignore_index) != ("mean", 0.0, -100):
        remedy = "give a parabolic.Classes(loss) for anything else"
        raise invalid("criterion", loss, "a torch.nn.CrossEntropyLoss with no setting but weight", remedy)
    return CrossEntropy(weights=None if loss.weight is None else loss.weight.tolist())
