"""Statistics of a few runs: summaries of a sample, tests between two samples, and average ranks over columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtr, stdtrit

from parabolic.checks import Description, check_gaps, check_name, invalid

__all__ = ["Difference", "Summary", "average_ranks", "paired", "welch"]

CONFIDENCE = 0.95  # of every interval
LEVEL = 0.05  # p-values below this count as a difference


@dataclass(frozen=True)
class Summary:
    """The mean, sample standard deviation and size of a sample; a single value has no deviation (NaN).

    >>> Summary.of([1.0, 2.0, 3.0])
    Summary(mean=2.0, sd=1.0, n=3)
    >>> low, high = Summary(mean=50.0, sd=2.0, n=5).interval
    >>> f"{low:.2f} to {high:.2f}"
    '47.52 to 52.48'
    """

    mean: float
    sd: float
    n: int

    @classmethod
    def of(cls, values: ArrayLike) -> Summary:
        """The summary of a sample."""
        sample = _sample("values", values)
        gaps = sample - sample[0]  # so that equal values have that mean, and no deviation: rounding would look like one
        sd = float(gaps.std(ddof=1)) if len(sample) > 1 else math.nan
        return cls(float(sample[0] + gaps.mean()), sd, len(sample))

    @property
    def half_width(self) -> float:
        """Half the width of the 95 % confidence interval of the mean (Student's t)."""
        return _half_width(self.sd / math.sqrt(self.n), self.n - 1)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the mean."""
        return self.mean - self.half_width, self.mean + self.half_width


@dataclass(frozen=True)
class Difference:
    """The difference between the means of two samples, with its 95 % confidence interval and p-value."""

    mean: float
    low: float
    high: float
    p: float  # NaN, like low and high, if a sample has only one value

    @property
    def verdict(self) -> str:
        """Whether the first mean is higher, lower or no difference is shown at the 5 % level; unknown without p."""
        if math.isnan(self.p):
            return "unknown"
        if self.p >= LEVEL:
            return "no difference"
        return "higher" if self.mean > 0 else "lower"


def welch(one: Summary | ArrayLike, other: Summary | ArrayLike) -> Difference:
    """Welch's t-test: two independent samples, or summaries of them, with possibly different variances.

    >>> ours, published = Summary.of([57.1, 55.2, 58.3, 56.0, 57.4]), Summary(mean=54.98, sd=4.1, n=5)
    >>> welch(ours, published).verdict
    'no difference'
    """
    samples = [each if isinstance(each, Summary) else Summary.of(each) for each in (one, other)]
    squares = [sample.sd**2 / sample.n for sample in samples]
    spread = sum(square**2 / (sample.n - 1) for square, sample in zip(squares, samples, strict=True) if sample.n > 1)
    # With no variance at all the degrees of freedom do not matter: the difference is certain.
    freedom = sum(squares) ** 2 / spread if spread else 1.0
    return _difference(samples[0].mean - samples[1].mean, math.sqrt(sum(squares)), freedom)


def paired(one: ArrayLike, other: ArrayLike) -> Difference:
    """The paired t-test: two samples whose values correspond one to one, such as runs with the same seeds.

    >>> paired([57.1, 55.2, 58.3], [55.0, 53.4, 56.1]).verdict
    'higher'
    """
    first, second = _sample("one", one), _sample("other", other)
    if len(first) != len(second):
        got = Description(f"{len(second)} values")
        raise invalid("other", got, f"{len(first)}, as in the first sample", "keep the seeds that both have")
    gaps = Summary.of(first - second)
    return _difference(gaps.mean, gaps.sd / math.sqrt(gaps.n), gaps.n - 1)


def average_ranks(rows: Sequence[Sequence[float]], better: Sequence[str]) -> list[float]:
    """Each row's rank, averaged over the columns; 1 is the best, and ties share the mean of their ranks.

    Args:
        rows: the figures. A row with a gap (NaN) gets no rank (NaN), and the others are ranked without it.
        better: for each column, "higher" or "lower".

    >>> average_ranks([[90.0, 3.0], [80.0, 1.0], [90.0, 2.0]], ["higher", "lower"])
    [2.25, 2.0, 1.75]
    """
    for direction in better:
        check_name("better", direction, ("higher", "lower"))
    figures = _floats("rows", rows)
    if not better or figures.ndim != 2 or figures.shape[1] != len(better):
        raise invalid("rows", list(figures.shape), f"rows of {len(better)} figures, one for each entry of better")
    complete, ranks = ~np.isnan(figures).any(1), np.full(len(figures), np.nan)
    costs = figures[complete] * [-1 if direction == "higher" else 1 for direction in better]
    ahead = (costs[None] < costs[:, None]).sum(1)  # how many rows are better, by row and column
    level = (costs[None] == costs[:, None]).sum(1)  # how many rows are equal, including the row itself
    ranks[complete] = (ahead + (level + 1) / 2).mean(1)
    return [float(rank) for rank in ranks]


def _difference(mean: float, error: float, freedom: float) -> Difference:
    if error == 0:
        return Difference(mean, mean, mean, 1.0 if mean == 0 else 0.0)
    half_width = _half_width(error, freedom)
    return Difference(mean, mean - half_width, mean + half_width, float(2 * stdtr(freedom, -abs(mean) / error)))


def _half_width(error: float, freedom: float) -> float:
    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2) * error)  # the quantile of Student's t


def _sample(name: str, values: ArrayLike) -> NDArray[np.float64]:
    sample = _floats(name, values)
    if sample.ndim != 1 or not len(sample):
        raise invalid(name, list(sample.shape), "a list of at least one number")
    if not np.isfinite(sample).all():
        raise invalid(name, Description("a number that is NaN or infinite"), "finite numbers")
    return sample


def _floats(name: str, values: ArrayLike) -> NDArray[np.float64]:
    check_gaps(name, values)
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:  # words, or rows of different lengths
        raise invalid(name, values, "numbers, and as many in each row") from error
