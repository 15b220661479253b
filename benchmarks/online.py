"""Online classifiers of river and ours on the same streams: each batch of ten is predicted first, and then learned.

    pip install river
    OMP_NUM_THREADS=1 python benchmarks/online.py [--seeds 5] [--only digits]

Three streams of river and the digits, in random order and two classes at a time. Ours have the settings of
docs/guides/choosing.md ("All together"), chosen on the digits by class, or their defaults; river's have theirs. The
figures are the accuracy of the predictions, without the first batch, that on held-out digits at the end, and the time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from choosing import WHOLE
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from parabolic import ParabolicClassifier
from parabolic.statistics import Summary

BATCH, MEMORY, HELD_OUT = 10, 200, 297
NO_AVERAGE = {"average": None, "average_part": 1}


class Classifier(Protocol):
    def predict(self, x: NDArray[Any]) -> NDArray[Any]: ...

    def partial_fit(self, x: NDArray[Any], y: NDArray[Any]) -> Any: ...


class River:
    """A classifier of river with batches: it learns the examples of a batch one after another."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def predict(self, x: NDArray[Any]) -> NDArray[Any]:
        return np.array([self.model.predict_one(example) for example in as_dicts(x)])

    def partial_fit(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        for example, label in zip(as_dicts(x), y.tolist(), strict=True):
            self.model.learn_one(example, label)


def as_dicts(x: NDArray[Any]) -> Iterator[dict[int, float]]:
    return (dict(enumerate(row)) for row in x.tolist())


def classifiers() -> dict[str, Callable[[int], Classifier]]:
    """Return what makes each classifier from a seed."""
    from river import forest, linear_model, naive_bayes, neighbors, preprocessing, tree

    def scaled(model: Any) -> River:
        return River(preprocessing.StandardScaler() | model)

    return {
        "naive Bayes": lambda _: River(naive_bayes.GaussianNB()),
        "softmax regression": lambda _: scaled(linear_model.SoftmaxRegression()),
        "nearest neighbours": lambda _: scaled(neighbors.KNNClassifier()),
        "Hoeffding tree": lambda _: River(tree.HoeffdingTreeClassifier()),
        "adaptive random forest": lambda seed: River(forest.ARFClassifier(seed=seed)),
        "ER, its defaults": lambda seed: ours("er", seed, {}),
        "ER": lambda seed: ours("er", seed, WHOLE["er"]),
        "ER, average_part=0.03": lambda seed: ours("er", seed, WHOLE["er"] | {"average_part": 0.03}),
        "ER, no average": lambda seed: ours("er", seed, WHOLE["er"] | NO_AVERAGE),
        "PCL": lambda seed: ours("pcl", seed, WHOLE["pcl"]),
        "PCL, no average": lambda seed: ours("pcl", seed, WHOLE["pcl"] | NO_AVERAGE),
    }


def ours(name: str, seed: int, settings: Mapping[str, Any]) -> Classifier:
    options = {key: value for key, value in settings.items() if key != "learner"}
    return ParabolicClassifier(name, memory=MEMORY, batch_size=BATCH, random_state=seed, options=options)


def streams() -> dict[str, Callable[[int], tuple[NDArray[Any], NDArray[Any]]]]:
    """Return what makes the examples and labels of each stream, in order, from a seed."""
    from river import datasets

    def of_river(dataset: Any) -> Callable[[int], tuple[NDArray[Any], NDArray[Any]]]:
        pairs = [(list(example.values()), label) for example, label in dataset]
        x, y = (np.array(part) for part in zip(*pairs, strict=True))
        return lambda _: (x.astype(float), np.unique(y, return_inverse=True)[1])

    return {
        "phishing": of_river(datasets.Phishing()),
        "bananas": of_river(datasets.Bananas()),
        "segments": of_river(datasets.ImageSegments()),
        "digits, shuffled": lambda seed: digits(seed)[:2],
        "digits, by class": lambda seed: by_class(*digits(seed)[:2]),
    }


def digits(seed: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the digits in random order, and those that are held out, which are the same for every seed."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(y) - HELD_OUT)
    return x[order], y[order], x[-HELD_OUT:], y[-HELD_OUT:]


def by_class(x: NDArray[Any], y: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    order = np.argsort(y // 2, kind="stable")
    return x[order], y[order]


def run(model: Classifier, x: NDArray[Any], y: NDArray[Any]) -> tuple[float, float]:
    """Return the accuracy in percent of predictions before learning, and microseconds per example."""
    right, start = 0, time.perf_counter()
    for first in range(0, len(y), BATCH):
        rows = slice(first, first + BATCH)
        if first:
            right += int((model.predict(x[rows]) == y[rows]).sum())
        model.partial_fit(x[rows], y[rows])
    return 100 * right / (len(y) - BATCH), 1e6 * (time.perf_counter() - start) / len(y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="streams whose names begin so")
    args = parser.parse_args()
    for name, make in streams().items():
        if not name.startswith(args.only):
            continue
        print(f"\n{name}: {len(make(0)[1]):,} examples, {len(np.unique(make(0)[1]))} classes")
        for title, build in classifiers().items():
            ahead, end, cost = list[float](), list[float](), list[float]()
            for seed in range(args.seeds):
                model, (x, y) = build(seed), make(seed)
                accuracy, microseconds = run(model, x, y)
                ahead.append(accuracy)
                cost.append(microseconds)
                if name.startswith("digits"):
                    *_, held_x, held_y = digits(seed)
                    end.append(100 * float((model.predict(held_x) == held_y).mean()))
            at_end = f", at the end {mean_and_sd(end)}" if end else ""
            average_cost = Summary.of(cost).mean
            print(f"  {title:22} {mean_and_sd(ahead)} %{at_end}; {average_cost:.0f} µs per example", flush=True)


def mean_and_sd(values: list[float]) -> str:
    summary = Summary.of(values)
    return f"{summary.mean:.1f} ± {summary.sd:.1f}"


if __name__ == "__main__":
    main()
