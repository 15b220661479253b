"""A small quadratic programme, solved on the device without waiting for it; and what it is made of."""

from __future__ import annotations

import torch
from torch import Tensor

from parabolic.gpus import tf32

__all__ = ["in_range", "inner_products", "nonnegative_shares"]

PIECE = 4096  # columns multiplied at once
LARGEST = 126  # of the exponents for which both powers of two are normal numbers in float32


def nonnegative_shares(gram: Tensor, overlap: Tensor, tolerance: float) -> Tensor:
    """The shares z ≥ 0 of unit vectors rₖ that minimise |b + Σ zₖ rₖ|; `gram` is ⟨rᵢ, rₖ⟩ and `overlap` is ⟨rₖ, b⟩.

    They solve w = overlap + gram z, z ≥ 0, w ≥ 0, zᵀw = 0. With overlap + λ · lift in place of overlap, and all lifts
    positive, z = 0 is the solution for large λ; as λ falls to 0, the solution is piecewise linear. At each bend one
    index changes sides, from z = 0 to w = 0 or back, which is one pivot of a tableau (parametric principal pivoting).
    There are about as many bends as shares above zero, and at most 2 n for n vectors in everything that the tests try:
    3 n pivots are done, of which those after the last bend change nothing.

    Values below `tolerance` are taken for rounding errors: a vector whose squared distance from the span of those in
    use is that small lies in it, and its w is zero like theirs; a λ that small is zero.

    >>> gram = torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    >>> nonnegative_shares(gram, torch.tensor([-0.6, -0.2], dtype=torch.float64), 1e-12)
    tensor([0.6000, 0.0000], dtype=torch.float64)
    """
    size, zero = len(gram), torch.zeros_like(overlap)
    lift = 1 + torch.arange(size, device=gram.device) * 0.618034 % 1 / 8  # no two indices should change sides at once
    unit = torch.eye(size, size + 2, dtype=gram.dtype, device=gram.device)
    tableau = torch.cat([gram, overlap[:, None], -lift[:, None].to(gram)], 1)
    changed, bends = [], []
    for _ in range(3 * size):
        value, slope = tableau[:, -2], tableau[:, -1]
        falls = (slope < 0) & (tableau.diagonal() > tolerance)
        bend, index = torch.where(falls, value / slope, zero).max(0, keepdim=True)
        row, column = tableau.index_select(0, index), tableau.index_select(1, index)
        unit_row, pivot = unit.index_select(0, index), row.index_select(1, index)
        pivoted = torch.addcmul(tableau, column + unit_row[:, :size].mT, (row - unit_row) / pivot, value=-1)
        tableau = torch.where(bend > tolerance, pivoted, tableau)
        changed.append(index)
        bends.append(bend)
    # In use are the vectors that have changed sides an odd number of times.
    used = zero.index_add(0, torch.cat(changed), (torch.cat(bends) > tolerance).to(zero)) % 2
    shares, inverse = used * tableau[:, -2], used * tableau[:, :size] * used[:, None]
    for _ in range(2):  # to correct rounding errors
        shares = shares - inverse @ (overlap + gram @ shares)
    return shares.clamp(min=0)


def inner_products(rows: Tensor) -> Tensor:
    """⟨rᵢ, rₖ⟩ for a few long rows, in float64.

    They are multiplied piece by piece: a single matrix product would keep few of a GPU's processors busy.

    >>> inner_products(torch.tensor([[3.0, 4.0], [1.0, 0.0]]))
    tensor([[25.,  3.],
            [ 3.,  1.]], dtype=torch.float64)
    """
    whole = rows.shape[1] // PIECE * PIECE
    pieces, rest = rows[:, :whole].unflatten(1, (-1, PIECE)).transpose(0, 1), rows[:, whole:]
    with tf32(False):  # whatever precision the network computes in
        products: Tensor = (pieces @ pieces.mT).sum(0, dtype=torch.float64) + rest @ rest.mT
    return products


def in_range(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows divided by powers of two, so that their largest entries are about one; and the exponents `[..., 1]`.

    Squares of numbers below 1e-19, or above 1e19, do not fit into float32. A power of two rounds nothing. Types shorter
    than float32 become float32.

    >>> in_range(torch.tensor([3e-20, -1e-20]))
    (tensor([ 0.5534, -0.1845]), tensor([-64], dtype=torch.int32))
    """
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    largest = torch.maximum(rows.amax(-1, keepdim=True), -rows.amin(-1, keepdim=True))  # abs would copy the rows
    exponents = largest.frexp().exponent.clamp(-LARGEST, LARGEST)
    return torch.ldexp(rows, -exponents), exponents
