"""Statistics against scipy's, which are computed another way, and against their definitions."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from parabolic import InputError
from parabolic.statistics import Difference, Summary, average_ranks, paired, welch

numbers = st.floats(-100, 100).map(lambda value: round(value, 3))
samples = st.lists(numbers, min_size=2, max_size=12)


def spread(values):
    return np.std(values) > 1e-3


@given(samples)
def test_a_summary_and_its_interval(values):
    summary = Summary.of(values)
    assert summary.n == len(values)
    assert summary.mean == pytest.approx(math.fsum(values) / len(values))
    assert summary.sd == pytest.approx(
        math.sqrt(sum((value - summary.mean) ** 2 for value in values) / (len(values) - 1))
    )
    assume(spread(values))
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert summary.interval == pytest.approx(tuple(expected))
    assert summary.half_width == pytest.approx((expected.high - expected.low) / 2)


def test_one_value_alone_has_no_spread_and_decides_nothing():
    single = Summary.of([3.0])
    assert (single.mean, single.n) == (3.0, 1)
    assert math.isnan(single.sd)
    assert all(map(math.isnan, single.interval))
    assert welch(single, Summary(100.0, 1.0, 5)).verdict == "unknown"
    assert welch(Summary(100.0, 1.0, 5), single).verdict == "unknown"
    assert welch(single, single).verdict == "unknown"
    assert paired([3.0], [100.0]).verdict == "unknown"


@given(samples, samples)
def test_welch_from_figures_is_scipys_from_the_samples(first, second):
    assume(spread(first) and spread(second))
    ours, theirs = welch(Summary.of(first), Summary.of(second)), stats.ttest_ind(first, second, equal_var=False)
    low, high = theirs.confidence_interval(0.95)
    assert ours.p == pytest.approx(theirs.pvalue, abs=1e-12)
    assert (ours.low, ours.high) == pytest.approx((low, high))
    assert ours.mean == pytest.approx(np.mean(first) - np.mean(second))
    assert welch(first, second) == ours
    reversed_test = welch(Summary.of(second), Summary.of(first))
    assert reversed_test.p == pytest.approx(ours.p)
    assert (reversed_test.low, reversed_test.high) == pytest.approx((-ours.high, -ours.low))


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=12))
def test_the_paired_comparison_is_scipys(pairs):
    first, second = zip(*pairs, strict=True)
    assume(spread(np.subtract(first, second)))
    ours, theirs = paired(first, second), stats.ttest_rel(first, second)
    low, high = theirs.confidence_interval(0.95)
    assert ours.p == pytest.approx(theirs.pvalue, abs=1e-12)
    assert (ours.low, ours.high) == pytest.approx((low, high))


def test_samples_without_spread_differ_or_do_not():
    """The paper prints deviations of 0.0."""
    still = Summary(17.91, 0.0, 5)
    assert welch(still, still) == Difference(0.0, 0.0, 0.0, 1.0)
    assert welch(still, still).verdict == "no difference"
    assert welch(Summary(18.0, 0.0, 5), still) == Difference(pytest.approx(0.09), *[pytest.approx(0.09)] * 2, 0.0)
    assert welch(Summary(17.0, 0.0, 5), still).verdict == "lower"
    moving = Summary(17.0, 0.5, 5)  # then only its own spread counts
    expected = stats.ttest_1samp(17 + 0.5 * stats.zscore([1, 2, 4, 5, 8], ddof=1), 17.91)
    assert welch(moving, still).p == pytest.approx(expected.pvalue)
    assert paired([1.0, 2.0], [1.0, 2.0]).verdict == "no difference"
    assert paired([1.5, 2.5], [1.0, 2.0]).verdict == "higher"


@given(numbers, st.integers(2, 40), st.integers(2, 40))
def test_equal_values_have_no_spread_and_do_not_differ_however_many_there_are(value, count, other_count):
    """Their sum is rounded: divided by their number it need not be the value, and a test would take that for a gap."""
    assert Summary.of([value] * count) == Summary(value, 0.0, count)
    assert welch(Summary.of([value] * count), Summary.of([value] * other_count)) == Difference(0.0, 0.0, 0.0, 1.0)


def test_only_a_p_value_below_the_level_is_a_difference():
    assert Difference(1.0, 0.0, 2.0, p=0.05).verdict == "no difference"
    assert Difference(1.0, 0.0, 2.0, p=math.nextafter(0.05, 0)).verdict == "higher"


def test_a_difference_where_there_is_none_is_found_in_one_of_twenty():
    rng = np.random.default_rng(0)
    differences_found = [
        welch(Summary.of(rng.normal(50, 4, 5)), Summary.of(rng.normal(50, 1, 5))).verdict != "no difference"
        for _ in range(4000)
    ]
    assert 0.04 < np.mean(differences_found) < 0.06


@pytest.mark.parametrize(("deviations", "chance"), [(1, 1 / 4), (2, 3 / 4)])
def test_how_large_a_difference_five_seeds_show(deviations, chance):
    """As docs/results.md says; for equal deviations, Student's test would find a little more."""
    rng = np.random.default_rng(0)
    pairs = zip(rng.normal(50 + 3 * deviations, 3, (4000, 5)), rng.normal(50, 3, (4000, 5)), strict=True)
    share_found = np.mean([welch(*map(Summary.of, pair)).verdict == "higher" for pair in pairs])
    assert share_found == pytest.approx(chance, abs=0.04)
    assert 0 < stats.nct.sf(stats.t.ppf(0.975, 8), 8, deviations / math.sqrt(2 / 5)) - share_found < 0.04


@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 10_000))
def test_average_ranks(rows, columns, seed):
    rng = np.random.default_rng(seed)
    figures = rng.integers(0, 5, (rows, columns)).astype(float)  # so that there are ties
    better = rng.choice(["higher", "lower"], columns).tolist()
    expected = np.mean(
        [
            stats.rankdata(column if direction == "lower" else -column)
            for column, direction in zip(figures.T, better, strict=True)
        ],
        axis=0,
    )
    assert average_ranks(figures.tolist(), better) == pytest.approx(expected.tolist())
    assert sum(average_ranks(figures.tolist(), better)) == pytest.approx(rows * (rows + 1) / 2)


def test_a_row_with_a_gap_has_no_rank_and_takes_none():
    ranks = average_ranks([[1.0, 5.0], [9.0, math.nan], [2.0, 4.0]], ["higher", "higher"])
    assert math.isnan(ranks[1])
    assert [ranks[0], ranks[2]] == [1.5, 1.5]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: Summary.of([]), "values: got .*at least one number"),
        (lambda: Summary.of([1.0, math.nan]), "values: got a number that is NaN"),
        (lambda: paired([1.0, 2.0], [1.0]), "other: got 1 values, expected 2, as in the first sample; keep the seeds"),
        (lambda: average_ranks([[1.0]], ["best"]), "better: got 'best'"),
        (lambda: average_ranks([[1.0, 2.0]], ["higher"]), "rows: got"),
        (lambda: average_ranks([1.0, 2.0], ["higher"]), "rows: got"),
        (lambda: average_ranks([], ["higher"]), "rows: got"),
        (lambda: average_ranks([[1.0, 2.0], [1.0]], ["higher"] * 2), "rows: got .*, expected numbers, and as many"),
        (lambda: Summary.of(["high", "low"]), "values: got .*, expected numbers"),
        (lambda: Summary.of([1.0, 10**400]), "values: got .*, expected numbers"),
        (lambda: Summary.of(np.ma.masked_array([1.0, 999.0], mask=[0, 1])), "values: got an array with 1 masked value"),
        (lambda: paired([1.0], np.ma.masked_array([9.0], mask=[1])), "other: got an array with 1 masked value"),
    ],
)
def test_what_cannot_be_used_is_refused(function, message):
    with pytest.raises(InputError, match=message):
        function()
