"""An exponential moving average of a model, for prediction."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from parabolic.checks import Description, invalid
from parabolic.learners.functional import is_expanded
from parabolic.learners.head import overlaid
from parabolic.states import overwrite

__all__ = ["WeightAverage", "is_averaged"]

UPDATES = "number of updates"  # its key in a state: no weight has this name; early files have "updates"


class WeightAverage:
    """Averages of a model's real and complex weights and buffers, with step 1 / (1 + `part` · t) at update t = 0, 1, …

    With part 1 this is the plain mean of all models so far; a smaller part spans only that fraction of them. Once the
    step is down to 1 − `decay` it stays there, and the average spans the last 1 / (1 − decay) models. A small part
    suits streams of any length: the untrained model of the beginning is soon forgotten.

    Averages of types shorter than float32 are also held in float32, as steps this small would be lost in the short
    type. Tensors that are sparse or expanded, or not finite at the start, such as a mask, are not averaged.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> average = WeightAverage(model, decay=0.9)
    >>> for value in (1.0, 2.0, 6.0):
    ...     _ = nn.init.constant_(model.weight, value)
    ...     average.update(model)
    >>> round(average.weights["weight"].item(), 4)  # still the plain mean
    3.0
    """

    def __init__(self, model: nn.Module, decay: float, part: float = 1.0) -> None:
        self.decay, self.part = decay, part
        tensors = {name: value.detach() for name, value in _averaged_tensors(model).items()}
        exact = {name: value.float() for name, value in tensors.items() if value.dtype.itemsize < 4}
        is_finite = {name: bool(exact.get(name, value).isfinite().all()) for name, value in tensors.items()}
        self.weights = {name: value.clone() for name, value in tensors.items() if is_finite[name]}
        self._exact = {name: exact[name] for name in self._current_values(model) if name in exact}
        # float64, as a share of 1 / (1 + part · t) must be exact for weights of any type.
        self.updates = torch.zeros((), dtype=torch.float64, device=next(iter(tensors.values())).device)

    @torch.no_grad()
    def update(self, model: nn.Module, moves: Tensor | None = None) -> None:
        """Move towards the current model, unless `moves`, a boolean on the device, is false (t advances either way)."""
        share = torch.clamp_min(1 / (1 + self.part * self.updates), 1 - self.decay)
        if moves is not None:
            share = share * moves
        current = self._current_values(model)
        for name, value in current.items():
            if value.shape != self.weights[name].shape:
                got = Description(f"{name} of shape {list(value.shape)}")
                expected = f"{list(self.weights[name].shape)}, as when the learner was created, as it is averaged"
                raise invalid("model", got, expected, "call it on some examples before, as in model(x)")
        averages = {name: self._exact.get(name, self.weights[name]) for name in current}
        for dtype in dict.fromkeys(average.dtype for average in averages.values()):
            names = [name for name, average in averages.items() if average.dtype == dtype]
            targets = [averages[name] for name in names]
            steps = torch._foreach_sub([current[name].to(dtype) for name in names], targets)
            torch._foreach_mul_(steps, share.to(dtype))
            torch._foreach_add_(targets, steps)
        self._round()
        self.updates += 1

    def sources(self, model: nn.Module) -> dict[str, Tensor]:
        """The tensors to average, by name."""
        return _averaged_tensors(model)

    def follow(self, model: nn.Module) -> None:
        """Extend the averages to weights that have gained rows: new rows start at their current values."""
        for name, value in _averaged_tensors(model).items():
            for averages in (self.weights, self._exact):
                if name in averages and averages[name].shape != value.shape:
                    averages[name] = overlaid(averages[name], value.detach().to(averages[name].dtype))

    def state_dict(self) -> dict[str, Tensor]:
        """The averages and the number of updates, by name."""
        return {**self.weights, **self._exact, UPDATES: self.updates}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over the state of another average of the same model, in place."""
        if UPDATES not in state and "updates" in state:
            state = {**state, UPDATES: state["updates"]}
        overwrite(self.state_dict(), state)
        self._round()

    def _current_values(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's tensors that have an average, by name."""
        return {name: value.detach() for name, value in self.sources(model).items() if name in self.weights}

    def _round(self) -> None:
        """Round the float32 averages to the types that prediction uses."""
        for name, value in self._exact.items():
            self.weights[name].copy_(value)


def is_averaged(value: Tensor) -> bool:
    """Whether a tensor has an average: not if its entries are whole numbers, such as counts, nor if sparse or expanded.

    >>> is_averaged(torch.zeros(1)), is_averaged(torch.zeros(1, dtype=torch.cfloat)), is_averaged(torch.zeros(1).long())
    (True, True, False)
    """
    has_mean = value.is_floating_point() or value.is_complex()
    return has_mean and value.layout == torch.strided and not is_expanded(value)


def _averaged_tensors(model: nn.Module) -> dict[str, Tensor]:
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: value for name, value in named if is_averaged(value)}
