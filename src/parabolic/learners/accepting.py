"""What a learner can learn from and predict: examples as tensors, checked against the model and those before."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from parabolic.checks import (
    DEVICE_ERRORS,
    FILL_IN,
    Description,
    InputError,
    check_finite,
    check_gaps,
    check_plain,
    first_line,
    invalid,
    signed,
)
from parabolic.learners.functional import RECOMPUTED, answers_by, has_embedding
from parabolic.learners.gradients import named_trainable, trainable
from parabolic.learners.head import check_alone, check_head, last_linear, wider_weights
from parabolic.learners.optimizers import weights_of
from parabolic.learners.scale import Scale

if TYPE_CHECKING:
    from parabolic.learners.learner import Learner

__all__ = [
    "as_tensor", "check_batch", "check_growth", "check_kind", "check_known", "check_model", "outgrown_error", "refusal",
    "try_scores",
]  # fmt: skip

NEEDS_TWO = "more than 1 value per channel"  # from torch's error for batch norm on one example
NO_GRADIENT = "does not require grad and does not have a grad_fn"  # from that for a loss that depends on no weight
AGAIN = "backward through the graph a second time"  # from that for a loss whose graph is used up


def check_model(model: nn.Module) -> list[nn.Parameter]:
    """The trainable weights of a model, if it can learn."""
    if any(nn.parameter.is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        remedy = "pass it some examples first, as in model(x)"
        raise invalid("model", Description("one with lazy layers that have no weights yet"), "one with weights", remedy)
    weights = trainable(model)
    if not weights:
        remedy = "leave some, such as those of its last layer: a method that takes no steps does not change them"
        raise invalid("model", model, "a module with trainable parameters", remedy)
    modules = model.named_modules()
    scripts = (name for name, module in modules if isinstance(module, ScriptModule) and [*module.parameters()])
    if (name := next(scripts, None)) is not None:
        got = Description(
            f"TorchScript{name and f' ({name})'}, whose weights torch neither copies nor replaces as others"
        )
        remedy = "pass the network that it was made of; one that stays frozen may compute features before observe"
        raise invalid("model", got, "plain modules", remedy)
    if any(weight.is_inference() for weight in weights):
        got = Description("one made in inference mode")
        raise invalid("model", got, "one that can learn", "make it outside, or in torch.inference_mode(False)")
    if any(weight.is_meta for weight in weights):
        got = Description("one with weights on the meta device, which have no values")
        raise invalid("model", got, "one on a CPU or GPU", "load its weights there first")
    if any(weight.device.type == "mps" for weight in weights):
        got = Description("one on mps, which has no float64")
        raise invalid("model", got, "one on a CPU or a CUDA device", "move it with model.cpu()")
    return weights


def check_known(learner: Learner) -> None:
    """Refuse weights that no optimiser of the learner knows, and that were frozen or missing when it was created."""
    first, weights = learner._first_weights, named_trainable(learner.model)
    others = {name: weight for name, weight in weights.items() if first.get(name) is not weight}
    if others:
        optims = (value for value in vars(learner).values() if isinstance(value, torch.optim.Optimizer))
        known = {id(weight) for optim in optims for weight in weights_of(optim)}
        for name, weight in others.items():
            if id(weight) not in known:
                got = Description(f"weights that were frozen or missing when the learner was created ({name})")
                remedy = "create a new learner, or give them to learner.optim.add_param_group"
                raise invalid("model", got, "only weights that are trained, or still frozen", remedy)


def as_tensor(name: str, value: Any, device: torch.device) -> Tensor:
    """Anything that torch can convert, as a tensor on the device that can be trained on."""
    check_gaps(name, value)
    try:
        if hasattr(value, "__array__") and not isinstance(value, Tensor):  # a pandas frame, for example
            value = np.asarray(value)
            if not value.flags.writeable or not value.dtype.isnative or any(step < 0 for step in value.strides):
                value = value.astype(value.dtype.newbyteorder("="))  # torch refuses these, or warns without need
        tensor = torch.as_tensor(value, device=device).detach()
    except DEVICE_ERRORS:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_tensor_error(name, value, error) from error
    check_plain(name, tensor)
    tensor = signed(name, tensor)
    return tensor.clone() if tensor.is_inference() else tensor  # an inference tensor has no gradient


def check_batch(learner: Learner, x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Examples and labels as tensors on the learner's device, if it can learn from them.

    The first batch determines the number of classes, unless that was given, and what kind of example all others hold.
    """
    x, y = (as_tensor(name, value, learner.device) for name, value in (("x", x), ("y", y)))
    if x.ndim < 1 or len(x) == 0:
        raise invalid("x", x, "a batch of at least one example", "skip empty batches")
    check_kind(learner, x)
    # Only the model knows what it accepts: after the first batch numbers are like those before, but ids may be new.
    has_ids = not x.is_floating_point() and (learner.embed is not None or x.dtype != torch.uint8)
    needs_scores = has_ids or learner._example is None or learner.classes is None
    scores = try_scores(learner, x if has_ids else x[:1]) if needs_scores else None
    check_finite("x", x)
    if x.is_floating_point():
        learner._check_inputs(x, learner.inputs(x))
    if learner.classes is None:
        assert scores is not None
        learner.classes = scores.shape[1]
    elif scores is not None:
        _check_outputs(scores.shape[1], learner.classes, learner.error.of_classes)
    y = learner.error.check(y, len(x), learner.classes, learner.dtype)
    if learner._example is None:
        if scores is not None:
            learner.error(scores, y[: len(scores)])  # a loss of the user's may raise an error
        learner._check_model(x[:1])
        learner._check_room({"x": x, "y": y})
    learner._example = (x.shape[1:], x.dtype)
    return x, y


def check_kind(learner: Learner, x: Tensor) -> None:
    """Refuse examples of another shape or type than those of the first batch, and what is no batch."""
    if learner._example is not None and learner._example != (x.shape[1:], x.dtype):
        shape, dtype = learner._example
        expected = f"examples as in the first batch, each of shape {list(shape)} and {dtype}"
        if (x.shape, x.dtype) == learner._example:
            remedy = "add a dimension: x[None]"
        elif x.shape[1:] == shape and dtype.is_floating_point:
            remedy = f"convert them: x.to({dtype})"
            remedy += " / 255, if they were divided then" if x.dtype == torch.uint8 else ""
        else:
            remedy = "one learner learns one kind of example: pad sequences to one length"
        raise invalid("x", x, expected, remedy)
    if not x.ndim:
        raise invalid("x", x, "a batch of examples", "add a dimension: x[None]")


def check_growth(learner: Learner, head: nn.Linear, classes: int) -> None:
    """Refuse a last layer that cannot grow alone or, tried on an example of zeros, does not compute the scores."""
    grows = classes > head.out_features
    if grows:
        check_alone(learner.model, head)
    if learner._example is None:  # then the first batch will show it
        return
    shape, dtype = learner._example

    def count_outputs(weights: Mapping[str, Tensor]) -> int:
        try:
            inputs = learner.inputs(torch.zeros(1, *shape, dtype=dtype, device=learner.device))
            return answers_by(weights, learner.model, inputs).shape[-1]
        except Exception:  # the user's own code may fail on zeros, or with such weights
            return 0

    if outputs := count_outputs({}):
        weights = wider_weights(learner.model, head, classes) if grows else {}
        check_head(head, outputs, gives_scores=count_outputs(weights) >= classes)


def try_scores(learner: Learner, x: Tensor) -> Tensor:
    """The scores of raw examples, or an error that says why the model does not accept them."""
    inputs = _try_inputs(learner, x)
    try:
        learner._check_inputs(x, inputs)
        scores = learner.scores_at(inputs)
    except (InputError, *DEVICE_ERRORS):
        raise
    except Exception as error:
        remedy = f"the model says: {error}{_hint(learner, x)}"
        raise invalid("x", x, "examples that the model accepts", remedy) from error
    if not isinstance(scores, Tensor):
        raise invalid("model", type(scores), "one tensor of scores [n, classes]", "wrap the model to return that")
    if scores.ndim != 2 or len(scores) != len(x):
        got = Description(f"an output of shape {list(scores.shape)} for {len(x)} example{'s' * (len(x) > 1)}")
        raise invalid("model", got, "scores [n, classes], a row for each example")
    if not scores.is_floating_point():
        raise invalid("model", scores.dtype, "scores that are floating-point numbers")
    return scores


def refusal(learner: Learner, x: Tensor, error: Exception) -> InputError | None:
    """The error to raise for a batch on which a step failed; None if the error itself says enough."""
    if NO_GRADIENT in str(error) and _caller_of_torch(error).startswith("parabolic."):
        got, expected = Description("a number without a gradient"), "one computed from the weights that are trained"
        remedy = "leave out .detach() and torch.no_grad(), also in the model"
        return invalid(f"loss of {learner.own_name()}", got, expected, remedy)
    if AGAIN in str(error) and _caller_of_torch(error).startswith("parabolic."):
        got, expected = Description("a number that has been differentiated, at least in part"), "one that has not been"
        remedy = "leave out .backward(), which follows `loss`, and .detach() what you keep from one step to the next"
        return invalid(f"loss of {learner.own_name()}", got, expected, remedy)
    if RECOMPUTED in str(error):
        got, expected = Description("one that computes activations again in the backward pass"), "one that keeps them"
        remedy = f"turn off checkpointing and save_on_cpu: the weights that {learner.own_name()} tries are gone by then"
        return invalid("model", got, expected, remedy)
    if (name := _sparse_embedding(learner.model)) is not None and _caller_of_torch(error).startswith("parabolic."):
        got, expected = Description(f"an embedding with sparse gradients ({name})"), "dense ones, as needed here"
        return invalid("model", got, expected, f"set sparse=False; torch says: {first_line(error)}")
    if (outgrown := outgrown_error(learner, error)) is not None:
        return outgrown
    if isinstance(error, IndexError) and has_embedding(learner.model):  # for an id that it does not have
        return invalid("x", x, "examples that the model accepts", f"the model says: {error}")
    if NEEDS_TWO not in str(error):
        return None
    needed = "at least two examples, as batch norm needs here"
    if len(x) == 1:
        return invalid("x", x, needed, "hold it back until a second one arrives")
    got = Description("one example, recalled or split off, that passes through the model alone")
    return invalid(f"step of {learner.own_name()}", got, needed, "raise replay, memory or chunk")


def outgrown_error(learner: Learner, error: Exception) -> InputError | None:
    """The error to raise if a user's own method failed because it still stores something for fewer outputs."""
    built_in = type(learner).__module__.startswith("parabolic.")
    if built_in or not learner._outgrown or isinstance(error, (InputError, *DEVICE_ERRORS)):
        return None
    known = {id(learner.model), id(learner.body), id(learner.optim), id(learner.embed)}
    for name, value in vars(learner).items():
        for outputs in learner._outgrown:
            if id(value) not in known and any(part.shape[:1] == (outputs,) for part in _tensors_of(value)):
                got = Description(f"none that widens `{name}`, which is still for {outputs} outputs")
                expected = f"one that does, as the model now has {last_linear(learner.model)[1].out_features}"
                remedy = f"define it, or give the model all outputs from the start; torch says: {first_line(error)}"
                return invalid(f"on_growth of {type(learner).__name__}", got, expected, remedy)
    return None


def _sparse_embedding(model: nn.Module) -> str | None:
    """The name of the first embedding with sparse gradients, if there is one."""
    kinds = nn.Embedding | nn.EmbeddingBag
    modules = model.named_modules()
    return next((name for name, module in modules if isinstance(module, kinds) and module.sparse), None)


def _tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, Mapping):
        value = list(value.values())
    parts = value if isinstance(value, list | tuple) else [value]
    return [part for part in parts if isinstance(part, Tensor)]


def _caller_of_torch(error: Exception) -> str:
    """The module in which an error arose or, if torch raised it, that called torch."""
    names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((name for name in reversed(names) if name.partition(".")[0] != "torch"), "")


def _try_inputs(learner: Learner, x: Tensor) -> Tensor:
    """Raw examples as inputs of the model, or an error that says why `prepare` fails on them."""
    try:
        inputs = learner.inputs(x)
    except (InputError, *DEVICE_ERRORS):
        raise
    except Exception as error:
        got = Description(f"an error on examples of shape {list(x.shape)} and {x.dtype}")
        raise invalid("prepare", got, "one that accepts them", f"it says: {error}") from error
    if not isinstance(inputs, Tensor):
        raise invalid("prepare", inputs, "a function that returns a tensor")
    if inputs.ndim < 1 or len(inputs) != len(x):
        got = Description(f"inputs of shape {list(inputs.shape)} for {len(x)} examples")
        raise invalid("prepare", got, "one input for each example")
    return inputs


def _check_outputs(outputs: int, classes: int, of_classes: bool) -> None:
    """Refuse a number of classes, or of numbers to learn, that does not fit the outputs of the model."""
    if not of_classes and outputs != classes:
        remedy = "every output is a number to learn"
        raise invalid("classes", classes, f"{outputs}, as many as the model has outputs", remedy)
    if outputs < classes:
        remedy = "give the model more outputs, or call `grow` if its last torch.nn.Linear computes the scores"
        raise invalid("classes", classes, f"at most {outputs}, as many as the model scores", remedy)


def _hint(learner: Learner, x: Tensor) -> str:
    """What may help if the model does not accept examples of this type; empty if nothing is known to."""
    if x.is_complex():
        return "; split complex numbers with torch.view_as_real"
    if isinstance(learner.prepare, Scale) and has_embedding(learner.model):
        return "; if they are ids, they must not be scaled (in an estimator: scale=False)"
    if not x.is_floating_point() and x.dtype != torch.uint8 and learner.embed is None:
        return "; if they are measurements, convert them with .float()"
    return ""


def _no_tensor_error(name: str, value: Any, error: Exception) -> InputError:
    """The error to raise for a value that torch cannot convert."""
    if isinstance(value, Mapping) or (isinstance(value, list | tuple) and any(map(_is_array, value))):
        remedy = "use torch.stack(x); for several inputs, as in torch.stack([ids, mask], 1), split them in the model"
        return invalid(name, type(value), "one tensor, whose first dimension is the batch", remedy)
    is_list = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)
    if is_list and any(isinstance(label, str) for label in value[:1]):
        remedy = "number them from 0, or use an estimator, which accepts words"
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        remedy = f"it holds Python objects: make every column numeric, and {FILL_IN}"
    else:
        remedy = str(error)
    return invalid(name, type(value), "a tensor, or anything that torch.as_tensor accepts", remedy)


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") and np.ndim(value) > 0
