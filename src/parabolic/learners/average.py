"""An exponential moving average of a model, for prediction."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from parabolic.learners.head import overlaid
from parabolic.states import overwrite

__all__ = ["WeightAverage"]


class WeightAverage:
    """Averages of a model's weights and floating buffers, that move by 1 / (1 + `part` · t) at update t = 0, 1, …

    So it spans that part of the models so far, all alike with part 1, until it moves by 1 − `decay` at every update and
    spans the last 1 / (1 − decay) of them. A small part serves streams of any length: what was in the beginning, when a
    model knew nothing, is soon forgotten.

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
        self.weights = {name: value.detach().clone() for name, value in _averaged(model).items()}
        # float64, as a share of 1 / (1 + part · t) must be exact for weights of any type.
        self.updates = torch.zeros((), dtype=torch.float64, device=next(iter(self.weights.values())).device)

    @torch.no_grad()
    def update(self, model: nn.Module, moves: Tensor | None = None) -> None:
        """Move towards the model as it is now; `moves`, a truth value on the device, may say not to (t goes on)."""
        share = torch.clamp_min(1 / (1 + self.part * self.updates), 1 - self.decay)
        if moves is not None:
            share = share * moves
        followed = self.followed(model)
        ours = [self.weights[name] for name in followed]
        steps = torch._foreach_sub(list(followed.values()), ours)
        torch._foreach_mul_(steps, share.to(ours[0].dtype))
        torch._foreach_add_(ours, steps)
        self.updates += 1

    def followed(self, model: nn.Module) -> dict[str, Tensor]:
        """What the averages are of, by name."""
        return _averaged(model)

    def follow(self, model: nn.Module) -> None:
        """Take in weights that have more rows by now: these begin as they are."""
        for name, value in _averaged(model).items():
            if value.shape != self.weights[name].shape:
                self.weights[name] = overlaid(self.weights[name], value.detach())

    def state_dict(self) -> dict[str, Tensor]:
        """The averages and the number of updates, by name."""
        return {**self.weights, "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over the state of another average of the same model, in place."""
        overwrite(self.state_dict(), state)


def _averaged(model: nn.Module) -> dict[str, Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: value for name, value in tensors.items() if value.is_floating_point()}
