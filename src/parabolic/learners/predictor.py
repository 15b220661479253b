"""A learner's predictions as a module of its own, to serve from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from parabolic.checks import Description, all_finite, invalid
from parabolic.learners.gradients import trainable

if TYPE_CHECKING:
    from parabolic.learners.learner import Learner

__all__ = ["Predictor", "as_inputs", "frozen_copy", "predictor_of"]

BYPASSED = ("scores", "scores_at", "inputs")  # methods that a predictor does not call


class Predictor(nn.Module):
    """Maps raw examples to scores: a network in evaluation mode, with what prepares its inputs.

    Its weights need no gradients. It checks nothing: a NaN is answered with NaN.

    Args:
        model: the network.
        prepare: turns raw examples into its inputs; None for a learner's default.
        dtype: the network's type.
        ids: whether bytes are ids rather than numbers from 0 to 1.
    """

    def __init__(
        self, model: nn.Module, prepare: Callable[[Tensor], Tensor] | None, dtype: torch.dtype, ids: bool
    ) -> None:
        super().__init__()
        self.model, self.prepare, self.dtype, self.ids = model, prepare, dtype, ids
        self.requires_grad_(False).eval()

    def forward(self, x: Tensor) -> Tensor:
        """The scores `[n, outputs]` of raw examples."""
        inputs = as_inputs(x, self.prepare, self.dtype, self.ids)
        scores: Tensor = self.model(inputs.clone() if inputs is x else inputs)  # a model may work in place
        return scores


def predictor_of(learner: Learner) -> Predictor:
    """A predictor with copies of everything that a learner predicts with."""
    from parabolic.learners.learner import GO_BACK, Diverged, Learner
    from parabolic.learners.moving import copy_model

    cls = type(learner)
    if overridden := [name for name in BYPASSED if getattr(cls, name) is not getattr(Learner, name)]:
        got = Description(f"{cls.own_name()}, which has its own {' and '.join(overridden)}")
        remedy = "define predictor() too: a module that computes the same scores"
        raise invalid("predictor", got, "a learner that predicts by its model alone", remedy)
    with learner._lock_to_read(), torch.inference_mode(False), torch.no_grad():
        learner.check_whole("predictor")
        model, weights = copy_model(learner.model), learner.predicting_weights()
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if name in weights:
                value.copy_(weights[name])
        if not all(all_finite(weight) for weight in trainable(model)):
            raise Diverged(f"predictor: weights are NaN or infinite after {learner.steps} steps; {GO_BACK}")
        prepare = frozen_copy(learner.prepare, learner.device)
    return Predictor(getattr(model, "_orig_mod", model), prepare, learner.dtype, learner.embed is not None)


def as_inputs(x: Tensor, prepare: Callable[[Tensor], Tensor] | None, dtype: torch.dtype, ids: bool) -> Tensor:
    """Raw examples as inputs of a model of that type; `ids` says whether bytes are ids.

    >>> as_inputs(torch.tensor([51, 255], dtype=torch.uint8), None, torch.float32, ids=False)
    tensor([0.2000, 1.0000])
    """
    if prepare is not None:
        inputs = prepare(x)
        is_double = isinstance(inputs, Tensor) and inputs.is_floating_point() and torch.float64 in (inputs.dtype, dtype)
        return inputs.to(dtype) if is_double else inputs
    if x.is_floating_point():
        return x.to(dtype)  # NumPy defaults to float64, unlike most models
    if ids:
        return x.long() if x.dtype in (torch.uint8, torch.int8, torch.int16) else x
    return (x.float() / 255).to(dtype) if x.dtype == torch.uint8 else x


def frozen_copy(part: Any, device: torch.device) -> Any:
    """A copy of what a learner was given; a `Scale` or `Normalise` becomes a module, with its numbers as buffers."""
    built_in = type(part).__module__.startswith("parabolic.")  # a subclass may compute something else
    return part.as_module().to(device) if built_in and hasattr(part, "as_module") else copy.deepcopy(part)
