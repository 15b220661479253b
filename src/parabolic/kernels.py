"""Batch norm, the sum with a shortcut and ReLU as one Triton operation, which reads its input twice in each pass."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["norm_add_relu"]

COLUMNS = 32  # of the tile that a program processes at a time
LARGE, SMALL = (128, 8), (64, 4)  # rows of a tile and warps of a program, for large and for small tensors
FEW = 2**22  # elements: above, large tiles are faster on an otherwise idle GPU
PARTS = 128  # programs that share the sum of a channel, at most
PROGRAMS = 264  # of a kernel, about: two for each multiprocessor of an H200
FEWER, LITTLE = 66, 2**19  # programs for at most so many elements: more only take room from other kernels
AHEAD = 4  # tiles whose loads are in flight at once in a sum


def norm_add_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running: tuple[Tensor, Tensor],
    shortcut: Tensor | None = None,
    *,
    relu: bool = True,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """`relu(batch_norm(x) + shortcut)` for channels-last images, returned twice, as tensors that share their memory.

    If the output has two uses, let each take one of the tensors: their gradients then need not be summed beforehand.

    In training the statistics are those of the batch, and `running`, the running mean and variance, is updated by
    `momentum`; otherwise they are the running ones, and there is no gradient. Sums are computed in float32 and always
    in the same order: the result does not depend on how the work is distributed.
    """
    if training:
        made: tuple[Tensor, Tensor] = _NormAddReLU.apply(x, weight, bias, shortcut, running, relu, momentum, eps)
        return made
    y = _normalised(x, weight, bias, shortcut, running, relu, 0.0, eps, None)[0]
    return y, y.detach()


def _normalised(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    shortcut: Tensor | None,
    running: tuple[Tensor, Tensor],
    relu: bool,
    momentum: float,
    eps: float,
    partial: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the mean and inverse standard deviation that were used."""
    work, y = _Work(x), torch.empty_like(x)
    if shortcut is not None:
        shortcut = shortcut.contiguous(memory_format=torch.channels_last)
    mean, scale = x.new_empty(2, x.shape[1], dtype=torch.float32)
    with torch.cuda.device_of(x):
        _normalise[work.grid](
            x, shortcut, y, weight, bias, mean, scale, *running, partial, *work.size, work.parts, momentum, eps,
            BATCH=partial is not None, ADD=shortcut is not None, RELU=relu, **work.tile, PARTS=work.all_parts,
        )  # fmt: skip
    return y, mean, scale


class _NormAddReLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        shortcut: Tensor | None,
        running: tuple[Tensor, Tensor],
        relu: bool,
        momentum: float,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        work = _Work(x)
        partial = work.room(2)
        with torch.cuda.device_of(x):
            _sums[work.shares](x, partial, *work.size, work.share, **work.tile, AHEAD=AHEAD)
        y, mean, scale = _normalised(x, weight, bias, shortcut, running, relu, momentum, eps, partial)
        # Without a shortcut the sign of y follows from x: the backward pass has one tensor less to read.
        ctx.save_for_backward(x, weight, bias, mean, scale, y if relu and shortcut is not None else None)
        ctx.relu, ctx.added = relu, shortcut is not None
        ctx.set_materialize_grads(False)
        return y, y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        given = [grad for grad in grads if grad is not None]
        if not given:
            return (None,) * 8
        dy, other = given if len(given) == 2 else (given[0], None)
        dx, dweight, dbias, dz = _Slope.apply(dy, other, *ctx.saved_tensors, ctx.relu, ctx.added)
        added = dy if ctx.added and dz is None else dz
        return dx, dweight, dbias, added, None, None, None, None


class _Slope(torch.autograd.Function):
    """The gradients of x, weight, bias and, unless it equals dy, the shortcut; they can be differentiated again.

    The shortcut's gradient is dz, the gradient before ReLU. If there are two dy, or dz is returned, the first kernel
    stores dz, rounded as torch rounds sums, and everything else is computed from that, including Σ dz and Σ dz x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        dy: Tensor,
        other: Tensor | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        scale: Tensor,
        y: Tensor | None,
        relu: bool,
        added: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        dy = dy.contiguous(memory_format=torch.channels_last)
        if other is not None:
            other = other.contiguous(memory_format=torch.channels_last)
        dx, dweight, dbias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)
        dz = torch.empty_like(x) if other is not None or (added and relu) else None
        work = _Work(x)
        partial = work.room(2)
        with torch.cuda.device_of(x):
            _slope_sums[work.shares](
                dy, other, x, y, weight, bias, mean, scale, dz, partial, *work.size, work.share, TWO=other is not None,
                KEEP=dz is not None, ADD=added, RELU=relu, **work.tile,
            )  # fmt: skip
            if dz is not None:
                dy = dz
            _slope[work.grid](
                dy, x, weight, bias, mean, scale, dx, dweight, dbias, partial, *work.size, work.parts,
                RELU=relu and dz is None, **work.tile, PARTS=work.all_parts,
            )  # fmt: skip
        ctx.save_for_backward(dy, x, weight, bias, mean, scale, y)
        ctx.relu, ctx.added, ctx.two, ctx.done = relu, added, other is not None, dz is not None
        return dx, dweight, dbias, dz if added else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_dx: Tensor, of_dweight: Tensor, of_dbias: Tensor, of_dz: Tensor | None) -> Any:
        dy, x, weight, bias, mean, scale, y = ctx.saved_tensors
        of_dx = of_dx.contiguous(memory_format=torch.channels_last)
        if of_dz is not None:
            of_dz = of_dz.contiguous(memory_format=torch.channels_last)
        of_dy, of_x, of_weight = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(weight)
        work = _Work(x)
        partial = work.room(5)
        with torch.cuda.device_of(x):
            _curve_sums[work.shares](
                of_dx, dy, x, y, weight, bias, mean, scale, partial, *work.size, work.share, ADD=ctx.added,
                RELU=ctx.relu and not ctx.done, **work.tile,
            )  # fmt: skip
            _curve[work.grid](
                of_dx, of_dweight, of_dbias, of_dz, dy, x, y, weight, bias, mean, scale, of_dy, of_x, of_weight,
                partial, *work.size, work.parts, GIVEN=of_dz is not None, ADD=ctx.added, RELU=ctx.relu, **work.tile,
                PARTS=work.all_parts,
            )  # fmt: skip
        return of_dy, of_dy if ctx.two else None, of_x, of_weight, None, None, None, None, None, None


class _Work:
    """How the rows and channels of images are distributed over programs."""

    def __init__(self, x: Tensor) -> None:
        rows, channels = self.size = x.numel() // x.shape[1], x.shape[1]
        tall, warps = SMALL if x.numel() <= FEW else LARGE
        blocks = triton.cdiv(channels, COLUMNS)
        programs = max(1, (FEWER if x.numel() <= LITTLE else PROGRAMS) // blocks)
        self.share = triton.cdiv(triton.cdiv(rows, min(programs, PARTS)), tall) * tall  # rows per program in a sum
        self.parts = triton.cdiv(rows, self.share)
        self.all_parts = triton.next_power_of_2(self.parts)  # a tile's sides are powers of 2
        self.shares = (self.parts, blocks)
        self.grid = (min(programs, triton.cdiv(rows, tall)), blocks)
        self.tile = {"ROWS": tall, "COLUMNS": COLUMNS, "num_warps": warps}
        self.like = x

    def room(self, sums: int) -> Tensor:
        """Allocate room for each program's sums, so many per channel."""
        return self.like.new_empty(self.parts, sums, self.size[1], dtype=torch.float32)


@triton.jit
def _sums(x, partial, rows, channels, share, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr):
    """Each program's Σ(x − k) and Σ(x − k)² per channel; k, the first row, avoids cancellation in the variance."""
    part = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    first = tl.load(x + column, inside, 0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    end = tl.minimum((part + 1) * share, rows)
    for start in range(part * share, end, ROWS * AHEAD):
        for ahead in tl.static_range(AHEAD):
            at, here = _tile(start + ahead * ROWS, end, channels, column, inside, ROWS)
            value = tl.where(here, tl.load(x + at, here, 0.0).to(tl.float32) - first[None, :], 0.0)
            total += value
            squares += value * value
    tl.store(partial + part * 2 * channels + column, tl.sum(total, 0), inside)
    tl.store(partial + (part * 2 + 1) * channels + column, tl.sum(squares, 0), inside)


@triton.jit
def _normalise(
    x, shortcut, y, weight, bias, mean, scale, running_mean, running_variance, partial, rows, channels, parts,
    momentum, eps, BATCH: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The output, by statistics of the batch (which every program adds up, and the first stores) or the running ones.

    Tiles are loaded ahead: the first while sums are added up, each other one while the tile before it is processed.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    first, far = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    at, here = _tile(first, rows, channels, column, inside, ROWS)
    next_x = tl.load(x + at, here, 0.0)
    if ADD:
        next_shortcut = tl.load(shortcut + at, here, 0.0)
    centre = tl.load(running_mean + column, inside, 0.0)
    variance = tl.load(running_variance + column, inside, 0.0)
    if BATCH:
        before, varied = centre, variance
        total = _add_up(partial, 0, 2, channels, parts, column, inside, PARTS)
        squares = _add_up(partial, 1, 2, channels, parts, column, inside, PARTS)
        shift = total / rows
        centre = tl.load(x + column, inside, 0.0).to(tl.float32) + shift
        variance = squares / rows - shift * shift
        variance = tl.where(variance < 0, 0.0, variance)
    factor = 1 / tl.sqrt(variance + eps)
    if BATCH:
        tl.debug_barrier()  # all threads have read what is overwritten now
        if tl.program_id(0) == 0:
            tl.store(mean + column, centre, inside)
            tl.store(scale + column, factor, inside)
            tl.store(running_mean + column, before + momentum * (centre - before), inside)
            unbiased = variance * (rows / (rows - 1.0))
            tl.store(running_variance + column, varied + momentum * (unbiased - varied), inside)
    factor *= tl.load(weight + column, inside, 0.0).to(tl.float32)
    shift = tl.load(bias + column, inside, 0.0).to(tl.float32)
    for start in range(first, rows, far):
        at, here = _tile(start, rows, channels, column, inside, ROWS)
        then, there = _tile(start + far, rows, channels, column, inside, ROWS)
        value = (next_x.to(tl.float32) - centre[None, :]) * factor[None, :] + shift[None, :]
        next_x = tl.load(x + then, there, 0.0)
        if ADD:
            value += next_shortcut.to(tl.float32)
            next_shortcut = tl.load(shortcut + then, there, 0.0)
        if RELU:
            value = tl.where(value < 0, 0.0, value)  # as in torch, NaN stays NaN, so that it is noticed
        tl.store(y + at, value.to(y.dtype.element_ty), here)


@triton.jit
def _slope_sums(
    dy, other, x, y, weight, bias, mean, scale, dz_kept, partial, rows, channels, share,
    TWO: tl.constexpr, KEEP: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each program's Σ dz and Σ dz (x − mean) per channel, where dy may be the sum of two; with KEEP, dz is stored."""
    part = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    centre, factor, shift = _affine(weight, bias, mean, scale, column, inside)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    products = tl.zeros((ROWS, COLUMNS), tl.float32)
    end = tl.minimum((part + 1) * share, rows)
    at, here = _tile(part * share, end, channels, column, inside, ROWS)
    next_dy, next_x = tl.load(dy + at, here, 0.0), tl.load(x + at, here, 0.0)
    if TWO:
        next_other = tl.load(other + at, here, 0.0)
    if RELU and ADD:
        next_y = tl.load(y + at, here, 0.0)
    for start in range(part * share, end, ROWS):
        at, here = _tile(start, end, channels, column, inside, ROWS)
        then, there = _tile(start + ROWS, end, channels, column, inside, ROWS)
        dz, centred = next_dy.to(tl.float32), next_x.to(tl.float32) - centre[None, :]
        next_dy, next_x = tl.load(dy + then, there, 0.0), tl.load(x + then, there, 0.0)
        if TWO:
            dz = (dz + next_other.to(tl.float32)).to(dy.dtype.element_ty).to(tl.float32)
            next_other = tl.load(other + then, there, 0.0)
        if RELU:
            if ADD:
                dz = tl.where(next_y.to(tl.float32) > 0, dz, 0.0)
                next_y = tl.load(y + then, there, 0.0)
            else:
                dz = tl.where(centred * factor[None, :] + shift[None, :] > 0, dz, 0.0)
        if KEEP:
            tl.store(dz_kept + at, dz.to(dz_kept.dtype.element_ty), here)
        total += dz
        products += dz * centred
    tl.store(partial + part * 2 * channels + column, tl.sum(total, 0), inside)
    tl.store(partial + (part * 2 + 1) * channels + column, tl.sum(products, 0), inside)


@triton.jit
def _slope(
    dy, x, weight, bias, mean, scale, dx, dweight, dbias, partial, rows, channels, parts,
    RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The gradient of x; the first program also stores those of weight and bias.

    With RELU, dy has yet to be masked by it; then no shortcut was added.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    first, far = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    at, here = _tile(first, rows, channels, column, inside, ROWS)
    next_dy, next_x = tl.load(dy + at, here, 0.0), tl.load(x + at, here, 0.0)
    total = _add_up(partial, 0, 2, channels, parts, column, inside, PARTS)
    products = _add_up(partial, 1, 2, channels, parts, column, inside, PARTS)
    centre, factor, shift = _affine(weight, bias, mean, scale, column, inside)
    inverse = tl.load(scale + column, inside, 0.0)
    if tl.program_id(0) == 0:
        tl.store(dbias + column, total.to(dbias.dtype.element_ty), inside)
        tl.store(dweight + column, (products * inverse).to(dweight.dtype.element_ty), inside)
    by_mean, by_scale = total / rows, products * inverse * inverse / rows
    for start in range(first, rows, far):
        at, here = _tile(start, rows, channels, column, inside, ROWS)
        then, there = _tile(start + far, rows, channels, column, inside, ROWS)
        dz, centred = next_dy.to(tl.float32), next_x.to(tl.float32) - centre[None, :]
        next_dy, next_x = tl.load(dy + then, there, 0.0), tl.load(x + then, there, 0.0)
        if RELU:
            dz = tl.where(centred * factor[None, :] + shift[None, :] > 0, dz, 0.0)
        slope = factor[None, :] * (dz - by_mean[None, :] - centred * by_scale[None, :])
        tl.store(dx + at, slope.to(dx.dtype.element_ty), here)


@triton.jit
def _curve_sums(
    u, dy, x, y, weight, bias, mean, scale, partial, rows, channels, share,
    ADD: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each program's Σ dz, Σ dz x̂, Σ u, Σ u x̂ and Σ u dz per channel, where x̂ is x with mean 0 and deviation 1."""
    part = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    centre, factor, shift = _affine(weight, bias, mean, scale, column, inside)
    inverse = tl.load(scale + column, inside, 0.0)
    dz_sum = tl.zeros((COLUMNS,), tl.float32)
    dz_unit = tl.zeros((COLUMNS,), tl.float32)
    u_sum = tl.zeros((COLUMNS,), tl.float32)
    u_unit = tl.zeros((COLUMNS,), tl.float32)
    u_dz = tl.zeros((COLUMNS,), tl.float32)
    end = tl.minimum((part + 1) * share, rows)
    for start in range(part * share, end, ROWS):
        at, here = _tile(start, end, channels, column, inside, ROWS)
        dz = tl.load(dy + at, here, 0.0).to(tl.float32)
        centred = tl.load(x + at, here, 0.0).to(tl.float32) - centre[None, :]
        if RELU:
            dz = tl.where(_positive(centred, factor, shift, y, at, here, ADD), dz, 0.0)
        unit = centred * inverse[None, :]
        other = tl.load(u + at, here, 0.0).to(tl.float32)
        dz_sum += tl.sum(dz, 0)
        dz_unit += tl.sum(dz * unit, 0)
        u_sum += tl.sum(other, 0)
        u_unit += tl.sum(other * unit, 0)
        u_dz += tl.sum(other * dz, 0)
    at = partial + part * 5 * channels + column
    tl.store(at, dz_sum, inside)
    tl.store(at + channels, dz_unit, inside)
    tl.store(at + 2 * channels, u_sum, inside)
    tl.store(at + 3 * channels, u_unit, inside)
    tl.store(at + 4 * channels, u_dz, inside)


@triton.jit
def _curve(
    u, of_dweight, of_dbias, of_dz, dy, x, y, weight, bias, mean, scale, of_dy, of_x, of_weight, partial,
    rows, channels, parts, GIVEN: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The gradients of ⟨u, dx⟩ + ⟨of_dweight, dweight⟩ + ⟨of_dbias, dbias⟩ + ⟨of_dz, dz⟩.

    With P v = v − mean(v) − x̂ mean(v x̂), γ the weight and s the inverse deviation, dx is γ s P dz. As P is symmetric,
    the gradient of dz is γ s P u plus those of the other three terms; that of x follows from
    ∂ mean(v x̂) / ∂x = s P v / rows.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    dz_mean = _add_up(partial, 0, 5, channels, parts, column, inside, PARTS) / rows
    dz_unit = _add_up(partial, 1, 5, channels, parts, column, inside, PARTS) / rows
    u_mean = _add_up(partial, 2, 5, channels, parts, column, inside, PARTS) / rows
    u_unit = _add_up(partial, 3, 5, channels, parts, column, inside, PARTS) / rows
    both = _add_up(partial, 4, 5, channels, parts, column, inside, PARTS) / rows
    both -= dz_mean * u_mean + dz_unit * u_unit  # mean(u · P dz)
    centre, factor, shift = _affine(weight, bias, mean, scale, column, inside)
    inverse = tl.load(scale + column, inside, 0.0)
    by_weight = tl.load(of_dweight + column, inside, 0.0).to(tl.float32)
    by_bias = tl.load(of_dbias + column, inside, 0.0).to(tl.float32)
    if tl.program_id(0) == 0:
        tl.store(of_weight + column, (inverse * both * rows).to(of_weight.dtype.element_ty), inside)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        at, here = _tile(start, rows, channels, column, inside, ROWS)
        dz = tl.load(dy + at, here, 0.0).to(tl.float32)
        centred = tl.load(x + at, here, 0.0).to(tl.float32) - centre[None, :]
        if RELU:
            positive = _positive(centred, factor, shift, y, at, here, ADD)
            dz = tl.where(positive, dz, 0.0)
        unit = centred * inverse[None, :]
        other = tl.load(u + at, here, 0.0).to(tl.float32)
        p_dz = dz - dz_mean[None, :] - unit * dz_unit[None, :]
        p_u = other - u_mean[None, :] - unit * u_unit[None, :]
        slope = p_dz * (inverse * (by_weight - factor * u_unit))[None, :]
        slope -= (factor * inverse)[None, :] * (dz_unit[None, :] * p_u + both[None, :] * unit)
        tl.store(of_x + at, slope.to(of_x.dtype.element_ty), here)
        back = factor[None, :] * p_u + by_weight[None, :] * unit + by_bias[None, :]
        if GIVEN:
            back += tl.load(of_dz + at, here, 0.0).to(tl.float32)
        if RELU:
            back = tl.where(positive, back, 0.0)
        tl.store(of_dy + at, back.to(of_dy.dtype.element_ty), here)


@triton.jit
def _tile(start, rows, channels, column, inside, ROWS: tl.constexpr):
    """The offsets of a tile's elements, and a mask of those that exist."""
    row = start + tl.arange(0, ROWS)
    return row[:, None] * channels + column[None, :], (row < rows)[:, None] & inside[None, :]


@triton.jit
def _add_up(partial, which, sums, channels, parts, column, inside, PARTS: tl.constexpr):
    """One of the sums of each channel, added up over all programs' parts."""
    part = tl.arange(0, PARTS)
    here = (part < parts)[:, None] & inside[None, :]
    return tl.sum(tl.load(partial + (part[:, None] * sums + which) * channels + column[None, :], here, 0.0), 0)


@triton.jit
def _affine(weight, bias, mean, scale, column, inside):
    """The centre, factor and shift of the map from x to the output, (x − centre) · factor + shift."""
    factor = tl.load(weight + column, inside, 0.0).to(tl.float32) * tl.load(scale + column, inside, 0.0)
    return tl.load(mean + column, inside, 0.0), factor, tl.load(bias + column, inside, 0.0).to(tl.float32)


@triton.jit
def _positive(centred, factor, shift, y, at, here, ADD: tl.constexpr):
    """Where ReLU lets a gradient through; y is the output, which is only needed if a shortcut was added."""
    return (tl.load(y + at, here, 0.0).to(tl.float32) if ADD else centred * factor[None, :] + shift[None, :]) > 0
