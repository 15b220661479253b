"""Augmentation and normalisation of examples, for a whole batch at once and on its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from parabolic.checks import Description, check_number, invalid, plain
from parabolic.gpus import has_triton

__all__ = ["CropFlip", "Normalise"]


@dataclass(frozen=True)
class CropFlip:
    """Shift each image at random within a border of `padding` zeros and, with `flip`, mirror it with probability ½.

    Works on raw images `[n, channels, height, width]` of any dtype and preserves the dtype.

    >>> images = torch.arange(2 * 16, dtype=torch.uint8).reshape(2, 1, 4, 4)
    >>> CropFlip(padding=1, flip=False)(images, torch.Generator().manual_seed(0)).shape
    torch.Size([2, 1, 4, 4])
    """

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        check_number("padding", self.padding, whole=True, at_least=0)

    def __call__(self, x: Tensor, generator: Generator | None = None) -> Tensor:
        """Return the augmented images."""
        if x.ndim != 4:
            raise invalid("augment", x, "images [n, channels, height, width]", "use CropFlip for images only")
        n, _, height, width = x.shape
        span, device = 2 * self.padding + 1, x.device
        shift = torch.randint(span, (2, n, 1), generator=generator, device=device)
        mirror = torch.rand(n, 1, generator=generator, device=device) if self.flip else None
        if x.is_cuda and 0 < x.numel() < 2**31 and not x.is_complex() and not x.requires_grad and has_triton():
            from parabolic.draws import crop_flip

            return crop_flip(x, self.padding, shift, mirror)
        rows = shift[0] + torch.arange(height, device=device)
        columns = shift[1] + torch.arange(width, device=device)
        if mirror is not None:
            columns = torch.where(mirror < 0.5, columns.flip(1), columns)
        padded = F.pad(x, [self.padding] * 4)
        # One gather for the whole batch, over image, row and column; channels stay where they are.
        image = torch.arange(n, device=device)[:, None, None]
        return padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


@dataclass
class Normalise:
    """Turn raw values into floats, `(x / scale - mean) / std`, with one `mean` and one `std` per channel.

    >>> Normalise((0.5,), (0.25,))(torch.tensor([[[[255]]]], dtype=torch.uint8))
    tensor([[[[2.]]]])
    """

    mean: Sequence[float] | Tensor | NDArray[Any]
    std: Sequence[float] | Tensor | NDArray[Any]
    scale: float = 255.0

    def __post_init__(self) -> None:
        self.mean, self.std = mean, std = _numbers("mean", self.mean), _numbers("std", self.std, above=0)
        if len(mean) != len(std):
            raise invalid("std", Description(f"{len(std)} numbers"), f"{len(mean)}, one per channel as for mean")
        check_number("scale", self.scale, above=0)
        self.scale = plain(self.scale)
        factor = torch.tensor([1 / (self.scale * s) for s in std])
        self._on_device = _copies_on_devices(factor, torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_on_device"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__post_init__()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised examples, `[n, channels, *rest]`."""
        return _normalised(x, *self._on_device(x.device))

    def as_module(self) -> FixedNormalise:
        """The same as a module with buffers, to serve with."""
        return FixedNormalise(*self._on_device(torch.device("cpu")))

    def undo(self, x: Tensor) -> Tensor:
        """Undo the normalisation, in fractions of `scale`, so that images can be displayed.

        >>> normalise = Normalise((0.5,), (0.25,))
        >>> normalise.undo(normalise(torch.tensor([[[[51]]]], dtype=torch.uint8)))
        tensor([[[[0.2000]]]])
        """
        factor, shift = (_by_channel(numbers, x) for numbers in self._on_device(x.device))
        return (x - shift) / factor / self.scale


class FixedNormalise(nn.Module):
    """A `Normalise` as a module: examples times `factor`, plus `shift`, which are buffers.

    >>> FixedNormalise(torch.tensor([2.0]), torch.tensor([1.0]))(torch.tensor([[[[3.0]]]]))
    tensor([[[[7.]]]])
    """

    factor: Tensor
    shift: Tensor

    def __init__(self, factor: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.register_buffer("factor", factor.clone())
        self.register_buffer("shift", shift.clone())

    def forward(self, x: Tensor) -> Tensor:
        """The normalised examples, `[n, channels, *rest]`."""
        return _normalised(x, self.factor, self.shift)


def _normalised(x: Tensor, factor: Tensor, shift: Tensor) -> Tensor:
    return x * _by_channel(factor, x) + _by_channel(shift, x)


def _by_channel(numbers: Tensor, x: Tensor) -> Tensor:
    """One number per channel, shaped to be combined with examples `[n, channels, *rest]`."""
    return numbers.view(-1, *[1] * (x.ndim - 2))


def _numbers(name: str, values: Any, above: float | None = None) -> tuple[float, ...]:
    """One number per channel, from any sequence, array or tensor."""
    expected = "one number for each channel"
    try:
        numbers = tuple(plain(value.item() if isinstance(value, Tensor) else value) for value in values)
    except (TypeError, RuntimeError) as error:
        raise invalid(name, values, expected, "for example (0.5, 0.5, 0.5)") from error
    if not numbers:
        raise invalid(name, values, expected)
    for number in numbers:
        check_number(name, number, above=above)
    return numbers


def _copies_on_devices(*tensors: Tensor) -> Callable[[torch.device], tuple[Tensor, ...]]:
    """Return a function that returns the tensors on a given device.

    They are copied there once and stay: a captured step refers to them by address, and may not copy from the host.
    """
    copies_by_device: dict[torch.device, tuple[Tensor, ...]] = {}

    def on_device(device: torch.device) -> tuple[Tensor, ...]:
        if device not in copies_by_device:
            copies = tuple(tensor.to(device) for tensor in tensors)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # other streams do not wait for this copy
            copies_by_device.setdefault(device, copies)  # if two threads get here, the first one's copies are used
        return copies_by_device[device]

    return on_device
