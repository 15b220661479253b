"""The learners as strategies of Avalanche, for its benchmarks, plugins, metrics and loggers (extra `avalanche`)."""

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
from parabolic.checks import Description, invalid
from parabolic.learners import Criterion, CrossEntropy, Learner, find_learner, known_learners
from parabolic.plugins import require

require("avalanche", "avalanche", "avalanche", "Avalanche")  # where it is missing, this says how to get it

from avalanche.benchmarks import OnlineCLExperience  # noqa: E402
from avalanche.models import DynamicModule  # noqa: E402
from avalanche.training.plugins.evaluation import default_evaluator  # noqa: E402
from avalanche.training.templates import SupervisedTemplate  # noqa: E402

__all__ = ["PCL", "Strategy", "strategy_of"]


class Strategy(SupervisedTemplate):  # type: ignore[misc]
    """What the strategies share: Avalanche brings the data and watches, a learner learns, by its own `observe`.

    Loss, memory, optimiser and random numbers are the learner's, `strategy.learner`, which ends with the weights it
    would have had if it had been fed the same batches without Avalanche. All events reach the plugins, in Avalanche's
    order, at their place in the learner's step: what a plugin adds to `strategy.loss` before the backward pass is
    learned too, and gradients that it changes before the update are the ones that count. `mb_output` has the scores of
    the batch before it is learned, as for prediction; it is there to be looked at, and carries no gradient.

    Args:
        model: the network, with an output for each class to come; it is brought to the device.
        optimizer: one of torch, over the model's weights (None: the learner's own, by its `lr`).
        criterion: what is minimised, as learners take it, or a `torch.nn.CrossEntropyLoss`.
        train_mb_size: how many examples are learned at a step.
        train_epochs: passes over an experience.
        eval_mb_size: how many examples are tested at once (None: as many as are learned).
        device: where to compute.
        plugins: Avalanche's plugins.
        evaluator: Avalanche's EvaluationPlugin, or a function that makes one (None: nothing is measured).
        eval_every: how often to test while training, as in all of Avalanche's strategies.
        peval_mode: what `eval_every` counts: epochs, iterations or experiences.
        options: options of the learner, by name. The strategy of a learner has each of them as an argument of its own:
            memory=1000, sigma_x=0.05, average=0.99, prepare=..., seed=0.
    """

    kind: ClassVar[type[Learner]]
    loss: Tensor  # of the batch, as it was descended

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "__init__" not in vars(cls):
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
        given: dict[str, Any] = {
            name: each.to(device) if isinstance(each, nn.Module) else each for name, each in options.items()
        }
        if optimizer is not None:
            given |= _adopted(optimizer, options)
        self.learner = self.kind(model.to(device), criterion=_criterion(criterion), **given)
        super().__init__(
            model=self.learner.model, optimizer=self.learner.optim, criterion=self.learner.error,
            train_mb_size=train_mb_size, train_epochs=train_epochs, eval_mb_size=eval_mb_size, device=device,
            plugins=plugins, evaluator=evaluator, eval_every=eval_every, peval_mode=peval_mode,
        )  # fmt: skip
        self.optimized_param_id = dict(self.model.named_parameters())  # with none Avalanche would reset the optimiser
        # Where the learner's step has its backward pass and its update, Avalanche's plugins have their say.
        self.learner.descend = self._descend  # type: ignore[method-assign]
        self.learner.apply_gradients = self._apply_gradients  # type: ignore[method-assign]

    # -- learning ------------------------------------------------------------------------------------------

    def training_epoch(self, **kwargs: Any) -> None:
        """One pass over the batches of an experience: each is answered, then learned."""
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
        self.loss = loss.reshape(1).clone()  # of the shape that plugins add to, in place
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
            raise invalid("model", type(self.model), "the model that the strategy began with", "make a new strategy")
        if not isinstance(self.experience, OnlineCLExperience):
            self.learner.start_task(_Batches(self))
        elif self.learner.needs_tasks:
            name, remedy = self.learner.own_name(), "use a learner that needs no tasks: `parabolic list` tells"
            raise invalid("learner", name, "one that can do without tasks, on an online stream", remedy)

    def _after_training_exp(self, **kwargs: Any) -> None:
        if not isinstance(self.experience, OnlineCLExperience):
            self.learner.end_task(_Batches(self))
        super()._after_training_exp(**kwargs)

    def make_optimizer(self, reset_optimizer_state: bool = False, **_: Any) -> None:
        """Let the learner's optimiser forget its momentum, if asked to; otherwise it stays as it is."""
        if reset_optimizer_state:
            self.optimizer.state.clear()

    # -- testing -------------------------------------------------------------------------------------------

    def forward(self) -> Tensor:
        """The scores of the batch as the learner predicts them: by the averaged weights, where there are any."""
        return self.learner.scores(self.mb_x)

    def criterion(self) -> Tensor:
        """The loss of these scores."""
        return self.learner.error(self.mb_output, self.mb_y)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """How it is pickled: by its learner, where the class was made here and no module has it under its name."""
        how, arguments, *state = super().__reduce_ex__(protocol)
        return (_blank, (self.kind,), *state) if type(self) is _made.get(self.kind) else (how, arguments, *state)


def _blank(kind: type[Learner]) -> Strategy:
    """The strategy of a learner, to be filled from a pickle."""
    return object.__new__(strategy_of(kind))


def _constructor(kind: type[Learner]) -> Callable[..., None]:
    """A constructor with the learner's options among its arguments: Avalanche refuses what it cannot read there."""
    *common, _ = inspect.signature(Strategy.__init__).parameters.values()
    own = [each for each in dataclasses.fields(kind) if each.name not in {argument.name for argument in common}]

    def construct(self: Strategy, **given: Any) -> None:
        options = {each.name: given.pop(each.name) for each in own if each.name in given}
        Strategy.__init__(self, **given, options=options)

    arguments = [inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default) for each in own]
    construct.__signature__ = inspect.Signature([*common, *arguments])  # type: ignore[attr-defined]
    return construct


class PCL(Strategy):
    """Parabolic continual learning as a strategy, with the options of `parabolic.PCL` beside Avalanche's own.

    `PCL(model=model, optimizer=optimizer, train_mb_size=10, evaluator=evaluator, memory=1000, sigma_x=0.05)`, then
    `strategy.train(experience)` and `strategy.eval(stream)`.
    """

    kind = learners.PCL


def strategy_of(learner: str | type[Learner]) -> type[Strategy]:
    """The strategy class of any learner: by name, by its place (`module:Class`), or the class itself.

    Those of this package can be imported too: `from parabolic.integrations.avalanche import ER, DERpp`.
    """
    kind = find_learner(learner) if isinstance(learner, str) else learner
    if not (isinstance(kind, type) and issubclass(kind, Learner)):
        raise invalid("learner", kind, "a subclass of parabolic.Learner, or the name of one")
    if kind.sees_all:
        raise invalid("learner", kind.name, "a learner of streams", "Avalanche has JointTraining for this")
    if kind not in _made:
        _made[kind] = type(kind.__name__, (Strategy,), {"kind": kind, "__module__": __name__, "__doc__": kind.__doc__})
    return _made[kind]


_made: dict[type[Learner], type[Strategy]] = {PCL.kind: PCL}  # one class for each learner


def __getattr__(name: str) -> Any:
    """The strategy of the learner whose class has this name."""
    for kind in known_learners().values():
        if kind.__name__ == name and not kind.sees_all:
            return strategy_of(kind)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclasses.dataclass(frozen=True)
class _Batches:
    """The batches of the experience that is learned; each pass over them is a pass of Avalanche's data loader."""

    strategy: Any

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y, *_ in self.strategy.dataloader:
            yield x.to(self.strategy.device), y.to(self.strategy.device)


def _check_model(model: nn.Module) -> None:
    """Refuse a network that Avalanche would change between experiences, or that must be told the task."""
    if not isinstance(model, nn.Module):
        raise invalid("model", model, "a torch.nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, DynamicModule):
            got = Description(f"{type(module).__name__} in {name or 'its place'}")
            remedy = "end the network with a torch.nn.Linear that has an output for each class to come"
            raise invalid("model", got, "a network that stays as it is", remedy)


def _adopted(optimizer: object, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options by which a learner takes an optimiser that is there already."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        remedy = "for example torch.optim.SGD(model.parameters(), lr=0.1)"
        raise invalid("optimizer", optimizer, "one of torch, over the model's weights, or None", remedy)
    if "lr" in options:
        raise invalid("lr", options["lr"], "none beside an optimizer", "the optimizer has its own")
    return {"optimizer": partial(_adopt, optimizer), "lr": float(optimizer.param_groups[0]["lr"])}


def _adopt(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], **_: Any) -> torch.optim.Optimizer:
    """The optimiser, with those of the weights that it does not know yet: a method may have some of its own."""
    known = {weight for group in optimizer.param_groups for weight in group["params"]}
    if more := [weight for weight in weights if weight not in known]:
        optimizer.add_param_group({"params": more})
    return optimizer


def _criterion(given: str | Criterion | nn.CrossEntropyLoss) -> str | Criterion:
    """A loss of Avalanche's users as a learner takes it."""
    if not isinstance(given, nn.CrossEntropyLoss):
        return given
    if (given.reduction, given.label_smoothing, given.ignore_index) != ("mean", 0.0, -100):
        remedy = "give a parabolic.Classes(loss) for anything else"
        raise invalid("criterion", given, "a torch.nn.CrossEntropyLoss with no setting but weight", remedy)
    return CrossEntropy(weights=None if given.weight is None else given.weight.tolist())
