"""Draws without replacement, and crops of images, as one Triton kernel each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["crop_flip", "floyd"]

BLOCK = 1024  # values that a program moves


def floyd(total: Tensor, chance: Tensor) -> Tensor:
    """Draw distinct numbers below `total`, one for each uniform value from [0, 1) in `chance`.

    This is Floyd's algorithm in its sequential form: see `parabolic.memory.distinct`.
    """
    taken = torch.empty_like(chance, dtype=torch.long)
    with torch.cuda.device_of(chance):
        _floyd[(1,)](total, chance, taken, len(chance), SIZE=triton.next_power_of_2(len(chance)), num_warps=1)
    return taken


def crop_flip(x: Tensor, padding: int, shift: Tensor, mirror: Tensor | None) -> Tensor:
    """Crop a window of the same size from each zero-padded image; the result is channels-last.

    `shift` holds each window's row and column offset; images whose `mirror` is below ½ are mirrored.
    """
    images, channels, height, width = x.shape
    y = x.new_empty(images, height, width, channels).permute(0, 3, 1, 2)
    with torch.cuda.device_of(x):
        _crop_flip[(triton.cdiv(x.numel(), BLOCK),)](
            x, y, shift, mirror, x.numel(), *x.shape, padding, *x.stride(), MIRROR=mirror is not None, BLOCK=BLOCK
        )
    return y


@triton.jit
def _floyd(total, chance, taken, size, SIZE: tl.constexpr):
    """For each j from total − size on, take the number drawn from 0..j, or j if that number is already taken."""
    offsets = tl.arange(0, SIZE)
    first = tl.load(total) - size
    drawn = (tl.load(chance + offsets, offsets < size, 0.0) * (first + offsets + 1).to(tl.float64)).to(tl.int64)
    numbers = tl.full((SIZE,), -1, tl.int64)
    for j in range(size):
        number = tl.sum(tl.where(offsets == j, drawn, 0), 0)
        is_taken = tl.sum((numbers == number).to(tl.int32), 0) > 0
        numbers = tl.where(offsets == j, tl.where(is_taken, first + j, number), numbers)
    tl.store(taken + offsets, numbers, offsets < size)


@triton.jit
def _crop_flip(
    x, y, shift, mirror, n, images, channels, height, width, padding, by_image, by_channel, by_row, by_column,
    MIRROR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy each value of y from its place in x, or write 0 if that is outside."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_range = offsets < n
    channel, pixel = offsets % channels, offsets // channels
    column, pixel = pixel % width, pixel // width
    row, image = pixel % height, pixel // height
    row += (tl.load(shift + image, in_range, 0) - padding).to(tl.int32)
    if MIRROR:
        column = tl.where(tl.load(mirror + image, in_range, 1.0) < 0.5, width - 1 - column, column)
    column += (tl.load(shift + images + image, in_range, 0) - padding).to(tl.int32)
    inside = in_range & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    source = x + image.to(tl.int64) * by_image + channel * by_channel + row * by_row + column * by_column
    tl.store(y + offsets, tl.load(source, inside, 0), in_range)  # offsets between images may exceed 32 bits
