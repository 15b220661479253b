"""The step that every learner shares: recall, loss, descend, remember."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, ClassVar, dataclass_transform

import torch
from torch import Generator, Tensor, nn

from parabolic.checks import Description, InputError, check_finite, check_name, check_number, invalid
from parabolic.learners.average import WeightAverage
from parabolic.memory import Batch, Memory
from parabolic.options import check_options, option, options_of

__all__ = ["Batches", "Learner", "ReplayLearner", "join"]

Batches = Iterable[tuple[Tensor, Tensor]]
"""The batches of a task, which can be gone through again and again."""


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(dataclasses.field,))
@dataclasses.dataclass(eq=False, kw_only=True, repr=False)
class Learner:
    """What one batch does to a model. A method is a subclass that states its `loss`, and its options as fields.

    The step is tensor code of fixed shape that never waits for the device, so that it can be captured as a CUDA
    graph; all state is in `state_dict`.

    Args:
        model: the network, mapping a batch of inputs to one score a class. It is trained in place, where it is.
        prepare: turns raw examples into the model's input, for learning and for prediction alike. By default
            bytes become floats in [0, 1] and floats are left alone.
        augment: a random change of raw examples before `prepare`, for learning only: `augment(x, generator)`.
        classes: how many classes there are. By default it is asked of the model, at the first batch.
        seed: the seed of `generator`, from which all randomness of the learner comes.
    """

    name: ClassVar[str] = ""  # what `--learner` calls it; a base class has none
    reference: ClassVar[str] = ""  # authors, year, title
    needs_tasks: ClassVar[bool] = False  # whether it must be told where a task starts and ends
    waits: ClassVar[str] = ""  # why a step must wait for the device, if it must; such a step is no CUDA graph
    sees_all: ClassVar[bool] = False  # whether all tasks come at once, shuffled: a reference, not a learner of streams

    model: nn.Module = dataclasses.field(kw_only=False)
    lr: float = option(0.1, "learning rate", above=0, tune="0.001:1:log")
    optimizer: str | Callable[..., torch.optim.Optimizer] = option(
        "SGD", "a class of torch.optim, by name, or any factory called as factory(parameters, lr=lr)"
    )
    average: float | None = option(
        None,
        "decay of a moving average of the weights, kept for prediction (none: no average)",
        at_least=0,
        below=1,
    )
    prepare: Callable[[Tensor], Tensor] | None = None
    augment: Callable[[Tensor, Generator], Tensor] | None = None
    classes: int | None = None
    seed: int = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(eq=False, kw_only=True, repr=False)(cls)

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise invalid("model", type(self.model), "a torch.nn.Module")
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        if not weights:
            raise invalid("model", self.model, "a module with trainable parameters")
        check_options(self)
        check_number("seed", self.seed, whole=True, at_least=0)
        if self.classes is not None:
            check_number("classes", self.classes, whole=True, at_least=1)
        self.device, self.dtype = weights[0].device, weights[0].dtype
        self.generator = Generator(self.device).manual_seed(self.seed)
        self.optim = self._make_optimizer(weights)
        self.averaged = None if self.average is None else WeightAverage(self.model, self.average)
        self.steps = 0
        self._example: tuple[torch.Size, torch.dtype] | None = None

    # -- learning ------------------------------------------------------------------------------------------

    def observe(self, x: Tensor, y: Tensor, task: int | None = None) -> Tensor:
        """Learn from a batch of raw examples and their labels; returns the loss, still on the device.

        What does not fit is refused before anything changes. Checking waits for the device: a loop that has
        checked its data already calls `step`.
        """
        if self.needs_tasks and task is None:
            remedy = f"{self.name} must know of tasks: pass task=0, 1, … and call start_task and end_task"
            raise invalid("task", task, "the number of the task that the batch belongs to", remedy)
        return self.step(*self._checked(x, y), task)

    def step(self, x: Tensor, y: Tensor, task: int | Tensor | None = None) -> Tensor:
        """Learn from a batch that is known to be sound and on the learner's device."""
        raw = {"x": x, "y": y}
        if task is not None:
            raw["task"] = task.expand_as(y) if isinstance(task, Tensor) else torch.full_like(y, task)
        if not self.model.training:
            self.model.train()
        recalled = self.recall()
        batch = raw | {"x": self._inputs(x)}
        loss = self.loss(batch, recalled)
        self.descend(loss)
        self.remember(raw, batch)
        self.steps += 1
        return loss.detach()

    def phase(self) -> Hashable:
        """All that the host knows and that decides which operations the next step is made of.

        Two steps of one phase, on batches of one size, are the same operations on the same tensors. A method whose
        code asks for a number that changes (say, whether this is the first step) adds the answer here.
        """
        return ()

    def recall(self) -> Batch | None:
        """What is remembered of the past, ready for the model; None where there is nothing."""
        return None

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """The method: the number to descend, from the new batch and the recalled one."""
        raise NotImplementedError

    def descend(self, loss: Tensor) -> None:
        """One step of the optimiser down the gradient of the loss."""
        self.optim.zero_grad()
        loss.backward()
        self.apply_gradients()

    def apply_gradients(self) -> None:
        """A step of the optimiser by the gradients as they stand, and of the weight average where one is kept."""
        self.optim.step()
        if self.averaged is not None:
            self.averaged.update(self.model)

    def remember(self, raw: Batch, batch: Batch) -> None:
        """Keep what the method keeps of the raw batch (and of what `loss` added to `batch`)."""

    def start_task(self, batches: Batches) -> None:
        """Called before a task, where the stream has tasks, with the batches to come."""

    def end_task(self, batches: Batches) -> None:
        """Called after a task, where the stream has tasks, with the batches that came."""

    # -- prediction ----------------------------------------------------------------------------------------

    def scores(self, x: Tensor) -> Tensor:
        """The scores (logits) of every class for raw examples."""
        return self.scores_at(self.inputs(x))

    def inputs(self, x: Tensor) -> Tensor:
        """Raw examples as inputs of the model, as for prediction."""
        return self._inputs(x, augment=False)

    @torch.no_grad()
    def scores_at(self, inputs: Tensor) -> Tensor:
        """The scores of every class for inputs of the model, by the averaged weights where there are any."""
        training = self.model.training
        self.model.eval()
        try:
            scores: Tensor = torch.func.functional_call(self.model, self.predicting_weights(), (inputs,))
        finally:
            self.model.train(training)
        return scores

    def predicting_weights(self) -> dict[str, Tensor]:
        """The weights and buffers that predict in place of the model's own, by name."""
        return {} if self.averaged is None else self.averaged.weights

    def predict(self, x: Tensor) -> Tensor:
        """The class of each raw example."""
        return self.scores(_as_tensor("x", x, self.device)).argmax(-1)

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
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of another learner of the same kind and model."""
        if missing := self.state_dict().keys() - state.keys():
            remedy = "load the state of a learner of the same kind"
            raise invalid("state", Description(f"no {', '.join(sorted(missing))}"), "a whole state", remedy)
        self.model.load_state_dict(state["model"])
        self.optim.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        self.steps = int(state["steps"])
        if self.averaged is not None:
            self.averaged.load_state_dict(state["average"])

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in options_of(type(self)))
        return f"{type(self).__name__}({type(self.model).__name__}, {values})"

    # -- the small print -----------------------------------------------------------------------------------

    def _inputs(self, x: Tensor, augment: bool = True) -> Tensor:
        if augment and self.augment is not None:
            x = self.augment(x, self.generator)
        if self.prepare is not None:
            return self.prepare(x)
        return x.float() / 255 if x.dtype == torch.uint8 else x

    def _make_optimizer(self, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        if not isinstance(self.optimizer, str):
            return self.optimizer(weights, lr=self.lr)
        known = {name for name, value in vars(torch.optim).items() if isinstance(value, type)} - {"Optimizer"}
        check_name("optimizer", self.optimizer, known)
        made: torch.optim.Optimizer = getattr(torch.optim, self.optimizer)(weights, lr=self.lr)
        return made

    def _checked(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = (_as_tensor(name, value, self.device) for name, value in (("x", x), ("y", y)))
        if x.ndim < 1 or len(x) == 0:
            raise invalid("x", x, "a batch of at least one example", "skip empty batches")
        if y.ndim != 1 or len(y) != len(x) or y.is_floating_point() or y.dtype == torch.bool:
            raise invalid("y", y, f"one whole number for each of the {len(x)} examples of x")
        if self._example is not None and self._example != (x.shape[1:], x.dtype):
            shape, dtype = self._example
            like = f"examples as in the first batch, of shape {list(shape)} and {dtype}"
            raise invalid("x", x, like, "one learner learns one kind of example")
        check_finite("x", x)
        if self.classes is None:
            self.classes = self._ask_classes(x)
        low, high = (int(value) for value in y.aminmax())
        if low < 0 or high >= self.classes:
            raise invalid(
                "y", low if low < 0 else high, f"labels from 0 to {self.classes - 1}",
                f"the model has {self.classes} outputs: number the labels from 0, or give it more",
            )  # fmt: skip
        self._example = (x.shape[1:], x.dtype)
        return x, y.long()

    def _ask_classes(self, x: Tensor) -> int:
        try:
            scores = self.scores(x[:1])
        except InputError:
            raise
        except Exception as error:
            raise invalid("x", x, "examples that the model accepts", f"the model says: {error}") from error
        if scores.ndim != 2:
            raise invalid("model", Description(f"an output of shape {list(scores.shape)}"), "scores [n, classes]")
        return scores.shape[1]


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
        return drawn | {"x": self._inputs(drawn["x"])}

    def remember(self, raw: Batch, batch: Batch) -> None:
        """Offer the raw batch to memory, with whatever else the method keeps of it."""
        known = batch | raw
        self.past.offer({name: known[name] for name in self.keeps}, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, the memory included."""
        return super().state_dict() | {"memory": self.past.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of another learner of the same kind, model and memory size."""
        super().load_state_dict(state)
        self.past.load_state_dict(state["memory"])


def join(batch: Batch, recalled: Batch | None) -> tuple[Tensor, Tensor]:
    """The examples and labels of the new batch followed by the recalled ones."""
    if recalled is None:
        return batch["x"], batch["y"]
    return torch.cat([batch["x"], recalled["x"]]), torch.cat([batch["y"], recalled["y"]])


def _as_tensor(name: str, value: Any, device: torch.device) -> Tensor:
    try:
        return torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise invalid(name, type(value), "a tensor, or what torch.as_tensor makes one of", str(error)) from error
