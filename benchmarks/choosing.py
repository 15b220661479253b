"""How memory size, noise, learning rate, averaging, repeats and similar settings affect the accuracy on seq-digits.

python benchmarks/choosing.py [--seeds 10] [--only memory] [--runs runs] [--picture docs/guides/choosing.png]
"""

import argparse
import time
from itertools import islice

import torch

from parabolic import MLP, RunSpec, Store, make_stream
from parabolic.experiments import run_grid
from parabolic.learners import find_learner
from parabolic.statistics import Summary, paired

NONE = "none"
ER, PCL = {"learner": "er", "lr": 0.1}, {"learner": "pcl", "lr": 0.2}  # at a learning rate that suits each
BOTH = {"er": ER, "pcl": PCL}
PLUS = {
    "optimizer": "SGD(momentum=0.5)", "average": 0.995, "average_part": 0.1, "repeats": 2, "replay": 64, "balance": 1
}  # fmt: skip
WHOLE = {"er": PLUS | {"learner": "er", "lr": 0.2}, "pcl": PLUS | {"learner": "pcl", "lr": 0.2, "times": 3}}
WRONG = {"corruption": "uniform", "corruption_rate": 0.3}
SWEEPS = {  # for each: the setting that varies, its values, and the rows
    "memory": ("memory", (50, 100, 200, 500, 1000), BOTH),
    "lr": ("lr", (0.02, 0.05, 0.1, 0.2, 0.4, 0.8), BOTH),
    "sigma": ("sigma_x", (0, 0.01, 0.03, 0.1, 0.3, 1), {f"pcl, memory {n}": PCL | {"memory": n} for n in (50, 200)}),
    "times": ("times", (2, 3, 5, 9), {"pcl": PCL}),
    "replay": ("replay", (8, 16, 32, 64, 128), BOTH),
    "average": (
        "average",
        (NONE, 0.9, 0.99),
        {
            f"{name}, lr {lr}": each | {"lr": lr} for name, each in BOTH.items() for lr in (0.1, 0.4)
        } | {"er, 5 passes": ER | {"epochs": 5}},
    ),
    "part": (
        "average_part",
        (1, 0.3, 0.1, 0.03),
        {f"{name}, lr 0.4, average 0.99": each | {"lr": 0.4, "average": 0.99} for name, each in BOTH.items()},
    ),
    "repeats": ("repeats", (1, 2, 3), BOTH),
    "balance": (
        "balance",
        (0, 0.5, 1),
        {f"{name}, memory {n}": each | {"memory": n} for n in (50, 200) for name, each in BOTH.items()}
        | {f"{name}, lr 0.4, average 0.9": each | {"lr": 0.4, "average": 0.9} for name, each in BOTH.items()},
    ),
    "labels": (
        "corruption_rate", (0, 0.1, 0.3), {name: each | {"corruption": "uniform"} for name, each in BOTH.items()}
    ),
    "whole-lr": ("lr", (0.05, 0.1, 0.2, 0.4), WHOLE),
    "whole-memory": ("memory", (50, 100, 200, 500), {name: each | {"replay": 50} for name, each in WHOLE.items()}),
    "whole-labels": (
        "corruption_rate", (0, 0.1, 0.3), {name: each | {"corruption": "uniform"} for name, each in WHOLE.items()}
    ),
    "whole-smoothing": ("smoothing", (0, 0.1, 0.2, 0.4), {"er": WHOLE["er"], "er, 30 % wrong": WHOLE["er"] | WRONG}),
    "whole-simplex": ("simplex", (True, False), {"pcl": WHOLE["pcl"], "pcl, 30 % wrong": WHOLE["pcl"] | WRONG}),
}  # fmt: skip


def spec(settings, seed):
    texts = {name: str(value) for name, value in settings.items() if name != "learner"}
    return RunSpec.from_settings(settings["learner"], texts, seed=seed)


def measure(sweep, seeds, store):
    """Return the records of a sweep by row and value, one for each seed."""
    name, values, rows = SWEEPS[sweep]
    specs = {
        (row, value): [spec(settings | {name: value}, seed) for seed in range(seeds)]
        for row, settings in rows.items() for value in values
    }  # fmt: skip
    outcome = run_grid([each for group in specs.values() for each in group], store, device="cpu")
    return {
        where: [record for each in group if (record := outcome.records.get(each.key))] for where, group in specs.items()
    }


def show(sweep, found):
    name, values, rows = SWEEPS[sweep]
    print(f"\n{sweep}\n| {name} | " + " | ".join(str(value) for value in values) + " |")
    print("|---" * (len(values) + 1) + "|")
    for row in rows:
        print(f"| {row} | " + " | ".join(cell(found[row, value]) for value in values) + " |")
    for row in rows:
        if row.startswith("er") and (other := "pcl" + row[2:]) in rows:
            gaps = [paired(*(accuracies(found[each, value]) for each in (other, row))) for value in values]
            cells = [f"{gap.mean:+.1f} ({gap.low:+.1f} to {gap.high:+.1f})" for gap in gaps]
            print(f"| {other} − {row}, same seeds | " + " | ".join(cells) + " |")


def accuracies(records):
    return [record.metrics["acc"] for record in records]


def cell(records):
    of = Summary.of(accuracies(records))
    return f"{of.mean:.1f} ± {of.half_width:.1f}"


def cost(rounds=10, steps=50):
    """Print the CPU time of a step relative to ER's: the best of several rounds, in which all take turns."""
    stream = make_stream("seq-digits")
    batches = list(islice((batch for task in stream for batch in task.batches(10)), steps))
    rows = {
        **{f"{name}, replay {size}": (name, {"replay": size}) for name in BOTH for size in (8, 32, 64, 128)},
        **{f"pcl, times {points}": ("pcl", {"times": points}) for points in (2, 3, 9)},
        "er, average 0.9": ("er", {"average": 0.9}),
        "er, memory 100000": ("er", {"memory": 100_000}),
    }
    learners = {
        row: find_learner(name)(MLP(stream.shape, 10), prepare=stream.prepare, **{"memory": 200} | options)
        for row, (name, options) in rows.items()
    }
    best = dict.fromkeys(rows, float("inf"))
    for _ in range(rounds):
        for row, learner in learners.items():
            started = time.process_time()
            for x, y in batches:
                learner.observe(x, y)
            best[row] = min(best[row], time.process_time() - started)
    print("\ncost")
    for row, spent in best.items():
        print(f"  {row}: {spent / best['er, replay 32']:.1f} × ({1000 * spent / steps:.2f} ms)")


def draw(path, found):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(9.6, 2.8), layout="constrained", sharey=True)
    styles = (("#D55E00", "--", "s"), ("#0072B2", "-", "o"))
    names = {"memory": "examples kept", "lr": "learning rate", "replay": "examples recalled at a step"}
    for axis, (sweep, label) in zip(axes, names.items(), strict=True):
        _, values, rows = SWEEPS[sweep]
        for (colour, line, mark), row in zip(styles, rows, strict=True):
            sums = [Summary.of(accuracies(found[sweep][row, value])) for value in values]
            axis.errorbar(
                values, [each.mean for each in sums], [each.half_width for each in sums], color=colour, linestyle=line,
                marker=mark, markersize=4, capsize=2, label=row.upper(),
            )  # fmt: skip
        axis.set(xscale="log", xlabel=label)
        axis.set_xticks(values, [f"{value:g}" for value in values])
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    axes[0].set_ylabel("accuracy at the end, %")
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", choices=SWEEPS)
    parser.add_argument("--runs", default="runs")
    parser.add_argument("--picture")
    given = parser.parse_args()
    if given.only and given.picture:
        parser.error("--picture shows several sweeps: leave --only out")
    torch.set_num_threads(1)
    store, found = Store(given.runs), {}
    for sweep in [given.only] if given.only else SWEEPS:
        found[sweep] = measure(sweep, given.seeds, store)
        show(sweep, found[sweep])
    if not given.only:
        cost()
    if given.picture:
        draw(given.picture, found)


if __name__ == "__main__":
    main()
