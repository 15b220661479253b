"""Metrics against their definitions, entry by entry."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parabolic import InputError, metrics


def matrices():
    def fill(size, seed):
        matrix = np.random.default_rng(seed).uniform(0, 100, (size, size))
        matrix[np.triu_indices(size, 1)] = np.nan
        return matrix

    return st.builds(fill, st.integers(1, 8), st.integers(0, 10_000))


@given(matrices())
def test_definitions(matrix):
    tasks = len(matrix)
    averages = [sum(matrix[row, column] for column in range(row + 1)) / (row + 1) for row in range(tasks)]
    assert metrics.acc(matrix) == pytest.approx(averages[-1])
    assert metrics.aaa(matrix) == pytest.approx(sum(averages) / tasks)
    assert metrics.anytime(matrix) == pytest.approx(averages)
    if tasks > 1:
        fell = [
            max(matrix[row, column] for row in range(column, tasks - 1)) - matrix[tasks - 1, column]
            for column in range(tasks - 1)
        ]
        assert metrics.forgetting(matrix) == pytest.approx(sum(fell) / (tasks - 1))
        gained = [matrix[tasks - 1, column] - matrix[column, column] for column in range(tasks - 1)]
        assert metrics.backward_transfer(matrix) == pytest.approx(sum(gained) / (tasks - 1))
        assert metrics.forgetting(matrix) >= -metrics.backward_transfer(matrix) - 1e-9  # the best is at least the first
    assert metrics.summary(matrix)["acc"] == metrics.acc(matrix)
    as_recorded = [values[: row + 1].tolist() for row, values in enumerate(matrix)]
    assert metrics.summary(as_recorded) == metrics.summary(matrix)
    summary = metrics.summary(matrix, 100 - matrix)
    assert summary == metrics.summary(matrix) | {
        f"task_{name}": value for name, value in metrics.summary(100 - matrix).items()
    }
    assert metrics.summary(matrix, measured={"own": averages})["own"] == averages[-1]


@given(matrices())
def test_forward_transfer(matrix):
    future, tasks = matrix.T, len(matrix)  # a row for each task that is about to be learned, NaN for those before
    gained = [future[task, task] - future[0, task] for task in range(1, tasks)]
    assert metrics.forward_transfer(future) == pytest.approx(sum(gained) / (tasks - 1) if tasks > 1 else 0)
    as_recorded = [row[number:].tolist() for number, row in enumerate(future)]
    assert metrics.summary(matrix, matrix, future=as_recorded) == metrics.summary(matrix, matrix) | {
        "task_forward_transfer": metrics.forward_transfer(future)
    }


@pytest.mark.parametrize("bad", [[], [[1, 2]], [[1], [2, 3]], [[np.nan]], [[1, np.nan], [2, 3]], [["a"]], 5, None])
def test_bad_accuracies_of_tasks_to_come_are_refused(bad):
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
def test_bad_matrices_are_refused(bad):
    with pytest.raises(InputError, match="^matrix"):
        metrics.acc(bad)


def test_an_accuracy_that_is_missing_is_refused_in_words():
    with pytest.raises(InputError, match="^matrix: got NaN on or below the diagonal, expected an accuracy"):
        metrics.acc([[np.nan]])
    with pytest.raises(InputError, match="^future: got NaN on or above the diagonal, expected an accuracy"):
        metrics.forward_transfer([[np.nan]])


def test_masked_accuracies_count_as_missing():
    tri = [[False, True], [False, False]]
    masked = np.ma.masked_array([[90, 1], [50, 80]], mask=tri)
    assert metrics.summary(masked) == metrics.summary([[90], [50, 80]])
    with pytest.raises(InputError, match="^matrix: got NaN on or below the diagonal"):
        metrics.acc(np.ma.masked_array([[90, 1], [999, 80]], mask=np.transpose(tri)))
