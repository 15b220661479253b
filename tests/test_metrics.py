"""Metrics against their definitions, entry by entry."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parabolic import InputError, metrics


def matrices():
    def fill(size, seed):
        a = np.random.default_rng(seed).uniform(0, 100, (size, size))
        a[np.triu_indices(size, 1)] = np.nan
        return a

    return st.builds(fill, st.integers(1, 8), st.integers(0, 10_000))


@given(matrices())
def test_definitions(a):
    n = len(a)
    averages = [sum(a[i, j] for j in range(i + 1)) / (i + 1) for i in range(n)]
    assert metrics.acc(a) == pytest.approx(averages[-1])
    assert metrics.aaa(a) == pytest.approx(sum(averages) / n)
    assert metrics.anytime(a) == pytest.approx(averages)
    if n > 1:
        fell = [max(a[i, j] for i in range(j, n - 1)) - a[n - 1, j] for j in range(n - 1)]
        assert metrics.forgetting(a) == pytest.approx(sum(fell) / (n - 1))
        gained = [a[n - 1, j] - a[j, j] for j in range(n - 1)]
        assert metrics.backward_transfer(a) == pytest.approx(sum(gained) / (n - 1))
        assert metrics.forgetting(a) >= -metrics.backward_transfer(a) - 1e-9  # the best is at least the first
    assert metrics.summary(a)["acc"] == metrics.acc(a)
    as_recorded = [row[: i + 1].tolist() for i, row in enumerate(a)]
    assert metrics.summary(as_recorded) == metrics.summary(a)
    told = metrics.summary(a, 100 - a)
    assert told == metrics.summary(a) | {f"task_{name}": value for name, value in metrics.summary(100 - a).items()}
    assert metrics.summary(a, measured={"own": averages})["own"] == averages[-1]


@given(matrices())
def test_forward_transfer(a):
    future, n = a.T, len(a)  # a row for each task that is about to be learned, NaN for those before
    gained = [future[j, j] - future[0, j] for j in range(1, n)]
    assert metrics.forward_transfer(future) == pytest.approx(sum(gained) / (n - 1) if n > 1 else 0)
    as_recorded = [row[i:].tolist() for i, row in enumerate(future)]
    assert metrics.summary(a, a, future=as_recorded) == metrics.summary(a, a) | {
        "task_forward_transfer": metrics.forward_transfer(future)
    }


@pytest.mark.parametrize("bad", [[], [[1, 2]], [[1], [2, 3]], [[np.nan]], [[1, np.nan], [2, 3]], [["a"]], 5, None])
def test_bad_accuracies_of_tasks_to_come(bad):
    with pytest.raises(InputError, match="^future"):
        metrics.forward_transfer(bad)


def test_one_task_forgets_nothing():
    assert metrics.summary([[80.0]]) == {
        "acc": 80.0,
        "aaa": 80.0,
        "forgetting": 0.0,
        "backward_transfer": 0.0,
    }


RAGGED = [[[1, 2], [3]], [[1], [2, 3], [4, 5]], [[1], [2, 3, 4]], [["a"], ["b", "c"]]]


@pytest.mark.parametrize("bad", [[], [[1, 2]], [[np.nan]], [[1, np.nan], [np.nan, 2]], [1, 2], 5, None, "ab", *RAGGED])
def test_bad_matrices(bad):
    with pytest.raises(InputError, match="^matrix"):
        metrics.acc(bad)


def test_an_accuracy_that_is_missing_is_told_in_words():
    with pytest.raises(InputError, match="^matrix: got NaN on or below the diagonal, expected an accuracy"):
        metrics.acc([[np.nan]])
    with pytest.raises(InputError, match="^future: got NaN on or above the diagonal, expected an accuracy"):
        metrics.forward_transfer([[np.nan]])
