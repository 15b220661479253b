"""The modules around a network in an estimator's predictor: what comes before it, and what its scores become."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from parabolic.checks import invalid, type_name
from parabolic.learners import Criterion
from parabolic.learners.predictor import frozen_copy

__all__ = ["Columns", "Rows", "Targets"]


class Rows(nn.Module):
    """Converts rows to the type of those learned, as an estimator does, but whole numbers never to a shorter type."""

    def __init__(self, dtype: torch.dtype, scaled: bool) -> None:
        super().__init__()
        self.dtype, self.scaled = dtype, scaled

    def forward(self, x: Tensor) -> Tensor:
        """The rows in that type."""
        ids = x.is_floating_point() and not self.dtype.is_floating_point
        bytes_ = torch.uint8 in (x.dtype, self.dtype) and not self.scaled  # they stand for 0 to 1
        if x.dtype != self.dtype and (ids or bytes_):
            raise invalid("X", x, f"examples of type {type_name(self.dtype)}, as before")
        may_overflow = not self.dtype.is_floating_point and x.dtype.itemsize > self.dtype.itemsize
        return x if may_overflow else x.to(self.dtype)


class Columns(nn.Module):
    """Scores in float64, in the order of the classes."""

    outputs: Tensor

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self.register_buffer("outputs", outputs)

    def forward(self, scores: Tensor) -> Tensor:
        """The scores of the classes."""
        return scores.double().index_select(1, self.outputs)


class Targets(nn.Module):
    """Targets in float64, in their own units."""

    def __init__(self, error: Criterion, device: torch.device, single: bool) -> None:
        super().__init__()
        self.units = frozen_copy(getattr(error, "units", None), device)
        self.error, self.single = copy.copy(error), single
        vars(self.error).update(units=self.units, loss=None)  # only its `answer` is needed

    def forward(self, scores: Tensor) -> Tensor:
        """The targets."""
        answers = self.error.answer(scores.double())
        return answers[:, 0] if self.single else answers
