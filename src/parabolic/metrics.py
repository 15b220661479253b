"""The accuracy matrix and the metrics computed from it.

`matrix[i, j]` is the accuracy, in percent, on the test set of task j after training on task i, with all classes seen
so far competing (class-incremental) or, in a separate matrix, only those of task j (task-incremental). Above the
diagonal it is NaN: those tasks have not been seen. Rows that end at the diagonal, as in `Record.accuracy`, are accepted
as well. Tasks to come have a matrix of their own, of which the other half is NaN (see `forward_transfer`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from parabolic.checks import Description, invalid

__all__ = ["aaa", "acc", "anytime", "backward_transfer", "forgetting", "forward_transfer", "summary"]


def anytime(matrix: ArrayLike) -> NDArray[np.float64]:
    """The mean accuracy over the tasks seen so far, after each task.

    >>> anytime([[90, np.nan], [50, 80]])
    array([90., 65.])
    >>> anytime([[90], [50, 80]])
    array([90., 65.])
    """
    a = _checked_matrix(matrix)
    return np.array([a[i, : i + 1].mean() for i in range(len(a))])


def acc(matrix: ArrayLike) -> float:
    """Final accuracy: the mean over all tasks after the last."""
    return float(anytime(matrix)[-1])


def aaa(matrix: ArrayLike) -> float:
    """Averaged anytime accuracy: the mean of `anytime` over the tasks."""
    return float(anytime(matrix).mean())


def forgetting(matrix: ArrayLike) -> float:
    """How far each earlier task fell from its best accuracy before the end, on average; 0 for a single task.

    It is negative if the last task raised the earlier ones above their previous best.

    >>> forgetting([[90, np.nan, np.nan], [50, 80, np.nan], [60, 40, 70]])
    35.0
    >>> forgetting([[90, np.nan], [95, 80]])
    -5.0
    """
    a = _checked_matrix(matrix)
    drops = [a[j : len(a) - 1, j].max() - a[-1, j] for j in range(len(a) - 1)]
    return float(np.mean(drops)) if drops else 0.0


def backward_transfer(matrix: ArrayLike) -> float:
    """How much each earlier task gained (or, if negative, lost) since it was learned, on average.

    >>> backward_transfer([[90, np.nan, np.nan], [50, 80, np.nan], [60, 40, 70]])
    -35.0
    """
    a = _checked_matrix(matrix)
    gains = [a[-1, j] - a[j, j] for j in range(len(a) - 1)]
    return float(np.mean(gains)) if gains else 0.0


def forward_transfer(future: ArrayLike) -> float:
    """How much better each later task did right before it was learned than before the first step, on average.

    `future[i, j]` is the accuracy on task j before task i was learned, with only the classes of task j competing, for j
    from i on. Rows that start at the diagonal, as in `Record.future_accuracy`, are accepted as well.

    >>> forward_transfer([[50, 40, 60], [np.nan, 70, 65], [np.nan, np.nan, 80]])
    25.0
    >>> forward_transfer([[50, 40, 60], [70, 65], [80]])
    25.0
    """
    a = _checked_matrix(future, "future", upper=True)
    gains = [a[j, j] - a[0, j] for j in range(1, len(a))]
    return float(np.mean(gains)) if gains else 0.0


def summary(
    matrix: ArrayLike,
    task_matrix: ArrayLike | None = None,
    measured: Mapping[str, Sequence[float]] | None = None,
    future: ArrayLike | None = None,
) -> dict[str, float]:
    """The metrics above by name, in percentage points; those of the second, task-incremental matrix as `task_acc` etc.

    Of the user's own measures, taken after each task, it has the last value. If tasks were also tested before they were
    learned, `task_forward_transfer` is among the metrics.

    >>> metrics = summary([[90], [50, 80]], [[90], [85, 95]], {"calibration": [0.1, 0.3]})
    >>> metrics["task_acc"], metrics["calibration"]
    (90.0, 0.3)
    """
    extra = {} if task_matrix is None else {f"task_{name}": value for name, value in summary(task_matrix).items()}
    if future is not None:
        extra["task_forward_transfer"] = forward_transfer(future)
    return {
        "acc": acc(matrix),
        "aaa": aaa(matrix),
        "forgetting": forgetting(matrix),
        "backward_transfer": backward_transfer(matrix),
        **extra,
        **{name: values[-1] for name, values in (measured or {}).items()},
    }


def _checked_matrix(values: ArrayLike, name: str = "matrix", upper: bool = False) -> NDArray[np.float64]:
    """A square matrix, checked on and below its diagonal, or on and above it; short rows are filled with NaN."""
    side, ends, tasks = ("above", "start", "to come") if upper else ("below", "end", "seen so far")
    expected, rows = f"a square matrix with a row for each task, or rows that {ends} at its diagonal", values
    if isinstance(values, np.ma.MaskedArray):
        rows = np.ma.filled(values.astype(np.float64), np.nan)
    try:
        if isinstance(values, list | tuple) and len(values) > 1 and len(values[-1 if upper else 0]) == 1:
            gaps = [[np.nan] * (i if upper else len(values) - 1 - i) for i in range(len(values))]
            rows = [[*gap, *row] if upper else [*row, *gap] for gap, row in zip(gaps, values, strict=True)]
        a = np.asarray(rows, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise invalid(name, values, expected) from error
    if a.ndim != 2 or a.shape[0] != a.shape[1] or not a.size:
        raise invalid(name, list(a.shape), expected)
    triangle = np.tri(len(a), dtype=bool)
    if not np.isfinite(a[triangle.T if upper else triangle]).all():
        raise invalid(name, Description(f"NaN on or {side} the diagonal"), f"an accuracy for every task {tasks}")
    return a
