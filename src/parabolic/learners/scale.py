"""Standardised units: numbers minus their mean, divided by their standard deviation."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from parabolic.checks import check_finite, invalid

__all__ = ["FixedScale", "Scale"]

ROUNDING = 64 * torch.finfo(torch.float64).eps  # a deviation of at most this times the mean is taken for rounding
SAMPLE = 101  # how many of the first examples determine the usual value
ENOUGH, JUMP = 1000, 10.0  # after this many examples, warn of a batch that multiplies a deviation by more than this
RARE, FAR = 0.01, 1000.0  # except if a number differs from its usual value this rarely, and now by at most this factor
TENSORS = ("mean", "squares", "usual", "same")


class Scale:
    """Numbers minus their mean, divided by their standard deviation: those of all examples so far, equally weighted.

    Before anything has been seen, numbers are left unchanged; one that has never changed is not divided. A wrong value
    counts like any other: a batch that multiplies a deviation by more than ten, after a thousand examples, is accepted
    with a warning. There is no warning for a number that was the same in 99 of 100 examples, such as a rare flag or a
    pixel at the edge, unless it is now a thousand times as far from that value as in the other examples.

    Several threads may use it: while one updates it, others compute with the units before or after, not with a mixture.

    >>> scale = Scale()
    >>> for part in ([[0.0], [0.0]], [[4.0], [4.0]]):
    ...     scale.update(torch.tensor(part))
    >>> scale(torch.tensor([[2.0], [4.0]]))
    tensor([[0.],
            [1.]])
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean, self.squares = torch.zeros(2, dtype=torch.float64)  # Σ (x − mean)², not yet divided
        self.usual, self.same = torch.zeros(2, dtype=torch.float64)  # a value of the first batch, and its number so far
        self._places: dict[tuple[torch.device, torch.Size], tuple[Tensor, Tensor]] = {}
        self._lock = threading.RLock()  # mean and deviation change together

    @torch.no_grad()
    def update(self, x: Tensor, name: str = "x") -> None:
        """Take in examples `[n, *shape]`: mean and deviation become those of all so far (Chan's rule for two parts).

        Invalid input is refused before anything changes; errors call it `name`.
        """
        if not isinstance(x, Tensor):
            raise invalid(name, type(x), "a tensor with a row for each example", "convert it with torch.as_tensor")
        if x.ndim < 1 or len(x) == 0:
            raise invalid(name, x, "a batch of at least one example", "skip empty batches")
        if self.count and x.shape[1:] != self.mean.shape:
            raise invalid(name, x, f"examples of shape {list(self.mean.shape)}, as before")
        check_finite(name, x)
        with self._lock:  # all are on one device, for a thread that computes with them meanwhile
            vars(self).update({attribute: getattr(self, attribute).to(x.device) for attribute in TENSORS})
        x, count = x.double(), self.count + len(x)
        mean = x.mean(0)
        gap = mean - self.mean
        squares = self.squares + ((x - mean).square().sum(0) + gap.square() * (self.count * len(x) / count))
        if not squares.isfinite().all():
            raise invalid(name, x, "numbers whose sum of squares fits into float64", "give them in larger units")
        if self.count >= ENOUGH:
            self._warn_of_jump(x, (squares / count).sqrt(), name)
        usual = self.usual
        if not self.count:
            # The median, for which only these are sorted; a copy, as a view would hold all of them.
            usual = x[:SAMPLE].sort(0).values[len(x[:SAMPLE]) // 2].clone()
        same, mean = self.same + (x == usual).sum(0), self.mean + gap * (len(x) / count)
        self._set({"count": count, "mean": mean, "squares": squares, "usual": usual, "same": same})

    @property
    def deviation(self) -> Tensor:
        """The standard deviation of each number; 1 where it is zero up to rounding."""
        deviation = self._spread()
        return torch.where(deviation > 0, deviation, 1.0)

    def __call__(self, x: Tensor) -> Tensor:
        """Numbers in these units, in the type of `x` (float32 for whole numbers)."""
        with self._lock:
            self._check_shape(x)
            return _scaled(x, *self._on_device(x.device))

    def undo(self, x: Tensor) -> Tensor:
        """The original numbers, from numbers in these units."""
        with self._lock:
            self._check_shape(x)
            return _unscaled(x, *self._on_device(x.device))

    def as_module(self) -> FixedScale:
        """The units of this moment as a module, to serve with."""
        with self._lock:
            return FixedScale(self.mean, self.deviation)

    def state_dict(self) -> dict[str, Any]:
        """Everything the units depend on, by name."""
        with self._lock:
            return {"count": self.count} | {name: getattr(self, name) for name in TENSORS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the units of another."""
        state = _completed(state)
        self._set({name: state[name] for name in ("count", *TENSORS)})

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the tensors of `_on_device` and the lock: a copy, deep or not, has its own."""
        with self._lock:
            return {name: value for name, value in vars(self).items() if name not in ("_places", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(_completed(state), _places={}, _lock=threading.RLock())

    def _check_shape(self, x: Tensor) -> None:
        """Refuse numbers of other examples: one number would become several, each in other units."""
        shape = self.mean.shape
        pairs = zip(shape[::-1], x.shape[::-1], strict=False)
        if x.ndim < len(shape) or any(own_size not in (1, size) for own_size, size in pairs):
            raise invalid("x", x, f"examples of shape {list(shape)}, as before")

    def _spread(self) -> Tensor:
        """The standard deviation of each number; 0 where it is zero up to rounding."""
        spread = (self.squares / max(self.count, 1)).sqrt()
        return torch.where(spread > ROUNDING * self.mean.abs(), spread, 0.0)

    def _warn_of_jump(self, x: Tensor, deviation: Tensor, name: str) -> None:
        """Warn of examples that multiply a deviation, before they are taken in."""
        spread = self._spread()
        jump = torch.where(spread > 0, deviation / spread, 0.0)
        if not (jump > JUMP).any():
            return
        different = self.count - self.same
        squares = self.squares + self.count * (self.mean - self.usual).square()  # Σ (x − usual)²: how far off they were
        reach = (squares / different).sqrt()
        rare = (different <= RARE * self.count) & ((x - self.usual).abs().amax(0) <= FAR * reach)
        jump = torch.where(rare, 0.0, jump)
        if (jump > JUMP).any():
            place = [int(i) for i in torch.unravel_index(jump.argmax(), jump.shape)]
            warnings.warn(
                f"{name}: a batch of {len(x)} multiplies the deviation at {place} by {float(jump.max()):.0f}, after "
                f"{self.count} examples, which now look alike; if a value is wrong, resume from an earlier copy",
                RuntimeWarning, stacklevel=4,
            )  # fmt: skip

    def _on_device(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and deviation on a device, at fixed addresses.

        A captured step refers to them by address, and must not wait for a transfer from the host.
        """
        key = (device, self.mean.shape)
        if key not in self._places:
            with torch.inference_mode(False):  # they are also changed outside of it
                units = self.mean.to(device, copy=True), self.deviation.to(device)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # another stream does not wait for this one
            self._places.setdefault(key, units)  # a signal handler may have made them meanwhile
        return self._places[key]

    def _set(self, state: dict[str, Any]) -> None:
        """Take on a state; mean and deviation change on every device, in place."""
        with self._lock:
            vars(self).update(state)
            for (_, shape), (mean, deviation) in self._places.items():
                if shape == self.mean.shape:
                    mean.copy_(self.mean)
                    deviation.copy_(self.deviation)


class FixedScale(nn.Module):
    """A `Scale` that no longer changes: its mean and deviation are buffers.

    >>> units = FixedScale(torch.tensor([2.0]), torch.tensor([4.0]))
    >>> units(torch.tensor([[6.0]])), units.undo(torch.tensor([[1.0]]))
    (tensor([[1.]]), tensor([[6.]]))
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, mean: Tensor, deviation: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean.double().clone())
        self.register_buffer("deviation", deviation.double().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Numbers in these units, as `Scale` gives them."""
        return _scaled(x, self.mean, self.deviation)

    def undo(self, x: Tensor) -> Tensor:
        """The original numbers, from numbers in these units."""
        return _unscaled(x, self.mean, self.deviation)


def _scaled(x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    return ((x.double() - mean) / deviation).to(x.dtype if x.is_floating_point() else torch.float32)


def _unscaled(x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    return (x.double() * deviation + mean).to(x.dtype)


def _completed(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state, completed with what early versions did not store: no number is then known to be rare."""
    complete = {"usual": state["mean"], "same": torch.zeros_like(state["mean"]), **state}
    return complete | {"usual": complete["usual"].clone()}  # in early versions a view of many examples
