"""What CLS-ER's working weights would score, where its slower average predicts: the mean over the tasks so far.

    parabolic compare --learners clser --set measure=benchmarks/working.py:working --metrics acc,aaa,working

The value after every task is stored with the run (`measured`): their mean is the AAA of the working weights, the last
is their Acc.
"""

from __future__ import annotations

import torch

from parabolic.engine import State
from parabolic.learners.functional import answers_by

SHEET = 1000  # test examples per batch


def working(state: State) -> float:
    """Return the accuracy in percent of the working weights, in evaluation mode, averaged over the tasks so far."""
    learner, stream = state.learner, state.stream
    seen = torch.tensor(stream.seen(state.task), device=learner.device)
    accuracies = []
    for task in stream.tasks[: state.task + 1]:
        right = 0
        for rows in task.test_rows.split(SHEET):
            x, y = task.test.take(rows)
            scores = answers_by({}, learner.model, learner.inputs(x.to(learner.device)))
            right += int((seen[scores[:, seen].argmax(1)] == y.to(learner.device)).sum())
        accuracies.append(100 * right / len(task.test_rows))
    return sum(accuracies) / len(accuracies)
