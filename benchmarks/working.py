"""What CLS-ER's working weights would score, where its slower average predicts.

    python benchmarks/working.py                                      # seq-digits: a minute
    python benchmarks/working.py --stream seq-cifar100 --memory 1000  # on a GPU, once it is prepared

Both are scored after every task of the same runs. Public code for a single pass scores the working weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

import torch

from parabolic.engine import State
from parabolic.experiments import RunSpec, Store, run_grid
from parabolic.learners.functional import answers_by
from parabolic.statistics import Summary, paired

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
    return fmean(accuracies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stream", default="seq-digits")
    parser.add_argument("--memory", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder in which runs are stored")
    asked = parser.parse_args()
    specs = [
        RunSpec("clser", asked.stream, memory=asked.memory, seed=seed, measure="benchmarks/working.py:working")
        for seed in range(asked.seeds)
    ]
    runs = run_grid(specs, Store(asked.runs), workers=0).records.values()
    for name, average, own in (
        ("AAA", [run.metrics["aaa"] for run in runs], [fmean(run.measured["working"]) for run in runs]),
        ("Acc", [run.metrics["acc"] for run in runs], [run.measured["working"][-1] for run in runs]),
    ):
        by_average, by_own = (f"{each.mean:.1f} ± {each.sd:.1f}" for each in map(Summary.of, (average, own)))
        p = paired(average, own).p
        print(f"{name}: {by_average} by the average, {by_own} by the working weights (p = {p:.3g})")


if __name__ == "__main__":
    main()
