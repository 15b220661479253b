"""Changes of examples, a whole batch at a time and on its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from parabolic.gpus import has_triton

__all__ = ["CropFlip", "Normalise"]


@dataclass(frozen=True)
class CropFlip:
    """Shift each image at random within a border of `padding` zeros and, if asked, mirror half of them.

    Works on raw images `[n, channels, height, width]` of any type and keeps it.

    >>> images = torch.arange(2 * 16, dtype=torch.uint8).reshape(2, 1, 4, 4)
    >>> CropFlip(padding=1, flip=False)(images, torch.Generator().manual_seed(0)).shape
    torch.Size([2, 1, 4, 4])
    """

    padding: int = 4
    flip: bool = True

    def __call__(self, x: Tensor, generator: Generator | None = None) -> Tensor:
        """The changed images."""
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
        # One gather for the batch: image i, its rows, its columns; channels stay where they are.
        image = torch.arange(n, device=device)[:, None, None]
        return padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


@dataclass
class Normalise:
    """Raw values to floats: divided by `scale`, then by channel less `mean` and over `std`.

    >>> Normalise((0.5,), (0.25,))(torch.tensor([[[[255]]]], dtype=torch.uint8))
    tensor([[[[2.]]]])
    """

    mean: Sequence[float]
    std: Sequence[float]
    scale: float = 255.0

    def __post_init__(self) -> None:
        self.factor = torch.tensor([1 / (self.scale * each) for each in self.std])
        self.shift = torch.tensor([-m / s for m, s in zip(self.mean, self.std, strict=True)])

    def __call__(self, x: Tensor) -> Tensor:
        """The normalised examples, `[n, channels, *rest]`."""
        if self.factor.device != x.device:  # once: a copy from the host would break the capture of a step
            self.factor, self.shift = self.factor.to(x.device), self.shift.to(x.device)
        shape = (-1, *[1] * (x.ndim - 2))
        return x * self.factor.view(shape) + self.shift.view(shape)

    def undo(self, x: Tensor) -> Tensor:
        """What was normalised, in fractions of `scale`: what a person can look at.

        >>> each = Normalise((0.5,), (0.25,))
        >>> each.undo(each(torch.tensor([[[[51]]]], dtype=torch.uint8)))
        tensor([[[[0.2000]]]])
        """
        shape = (-1, *[1] * (x.ndim - 2))
        factor, shift = (each.to(x.device).view(shape) for each in (self.factor, self.shift))
        return (x - shift) / factor / self.scale
