"""Regression on a drifting stream: how much of the past each learner retains once the stream has moved on.

python benchmarks/drift.py [--seeds 10] [--picture docs/guides/drift.png]
"""

import argparse
import functools

import numpy as np
import torch

from parabolic import ParabolicRegressor

ADAM = {"optimizer": "Adam"}
LEARNERS = {
    "PCL": ("pcl", {}),
    "PCL, random ends": ("pcl", {"endpoints": "random"}),
    "ER": ("er", {}),
    "SGD": ("sgd", {}),
}
GRID = np.linspace(-2, 2, 200)


@functools.cache
def found(learner, seed, size=6000):
    """Return a learner's predictions for the whole wave after a window has moved along it once."""
    rng = np.random.default_rng(seed)
    x = np.linspace(-2, 2, size) + rng.normal(0, 0.2, size)
    y = np.sin(2 * x) + rng.normal(0, 0.1, size)
    name, options = LEARNERS[learner]
    model = ParabolicRegressor(name, lr=0.01, options=ADAM | options, batch_size=10, random_state=seed)
    for start in range(0, size, 500):
        model.partial_fit(x[start : start + 500, None], y[start : start + 500])
    return model.predict(GRID[:, None])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--picture")
    given = parser.parse_args()
    torch.set_num_threads(1)
    truth, half = np.sin(2 * GRID), len(GRID) // 2
    print("| mean distance from the wave | first half, long ago | second half |\n|---|---|---|")
    for learner in LEARNERS:
        distance = np.array([np.abs(found(learner, seed) - truth) for seed in range(given.seeds)])
        halves = [each.mean(1) for each in (distance[:, :half], distance[:, half:])]
        print(f"| {learner} | " + " | ".join(f"{each.mean():.2f} ± {each.std(ddof=1):.2f}" for each in halves) + " |")
    if given.picture:
        draw(given.picture, truth)


def draw(path, truth):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    axes.plot(GRID, truth, color="0.75", linewidth=5, label="the wave")
    styles = zip(("#0072B2", "#D55E00", "#000000"), ("-", "--", ":"), ("PCL", "ER", "SGD"), strict=True)
    for colour, line, learner in styles:
        axes.plot(GRID, found(learner, 0), line, color=colour, label=learner)
    axes.set(xlabel="x: the stream moves from left to right", ylabel="y", ylim=(-2.5, 2.5))
    axes.legend(ncols=4, frameon=False, loc="upper center")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
