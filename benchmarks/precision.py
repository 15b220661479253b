"""What bfloat16 costs in accuracy: PCL and ER on Seq-CIFAR-100 in three precisions, ten seeds each.

    python benchmarks/precision.py                 # the table from the stored results: no GPU needed
    python benchmarks/precision.py --no-records    # train them, on a GPU, after `parabolic data prepare cifar100`

Runs are stored, so that the experiment can be done in portions: a later call trains what is missing. Every precision is
compared with float32 by Welch's test. The mean of each seed over the precisions is compared with the paper's figures by
the same test, and between the learners by a test paired over seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from parabolic.experiments import RunSpec, Store, run_grid
from parabolic.experiments.paper import paper_tables
from parabolic.experiments.records import BackedStore, Records
from parabolic.statistics import Summary, paired, welch

LEARNERS: dict[str, dict[str, Any]] = {"pcl": {}, "er": {"lr": 0.05}}
PRECISIONS = ("bf16", "tf32", "fp32")  # the fastest first


def specs(learner: str, precision: str, seeds: int) -> list[RunSpec]:
    return [
        RunSpec(learner, "seq-cifar100", memory=1000, seed=seed, precision=precision, options=LEARNERS[learner])
        for seed in range(seeds)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder in which runs are stored")
    parser.add_argument("--no-records", action="store_true", help="train every run that is not in that folder")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seconds", type=float, help="start no fleet after this many seconds")
    asked = parser.parse_args()
    store = Store(asked.runs) if asked.no_records else BackedStore(asked.runs, Records.ours())
    minutes = None if asked.seconds is None else asked.seconds / 60
    each = [specs(learner, precision, asked.seeds) for precision in PRECISIONS for learner in LEARNERS]
    for failure in run_grid([spec for row in each for spec in row], store, workers=0, minutes=minutes).failures:
        print(failure.reason)
    console = Console(width=120)
    console.print(table(store, asked.seeds))
    for line in differences(store, asked.seeds):
        console.print(line)


def table(store: Store, seeds: int) -> Table:
    shown = Table("learner", "precision", "n", "Acc %", "AAA %", "Acc against fp32", "AAA against fp32", "s per run",
                  title="Seq-CIFAR-100, memory 1000: mean ± sd [95 % interval]")  # fmt: skip
    for learner in LEARNERS:
        found = {
            precision: [record for spec in specs(learner, precision, seeds) if (record := store.find(spec))]
            for precision in PRECISIONS
        }
        for precision, records in found.items():
            if len(records) < 2:
                continue
            cells, verdicts = [], []
            for metric in ("acc", "aaa"):
                ours = Summary.of([record.metrics[metric] for record in records])
                exact = [record.metrics[metric] for record in found["fp32"]]
                cells.append("{:.2f} ± {:.2f} [{:.2f}, {:.2f}]".format(ours.mean, ours.sd, *ours.interval))
                if precision == "fp32" or len(exact) < 2:
                    verdicts.append("")
                else:
                    differs = welch(ours, Summary.of(exact))
                    verdicts.append(f"{differs.mean:+.2f} [{differs.low:+.2f}, {differs.high:+.2f}] p={differs.p:.2f}")
            seconds = sum(sum(record.train_seconds) for record in records) / len(records)
            shown.add_row(learner, precision, str(len(records)), *cells, *verdicts, f"{seconds:.1f}")
    return shown


def differences(store: Store, seeds: int) -> Iterator[str]:
    """Compare the learners with the published figures (Welch) and with each other (paired); a seed counts once."""
    ours = {
        (learner, metric): found
        for learner in LEARNERS
        for metric in ("aaa", "acc", "forgetting")
        if len(found := by_seed(store, learner, metric, seeds)) > 1
    }
    published = {learner: paper_tables()["main"].rows[learner.upper()][2:4] for learner in LEARNERS}  # Seq-CIFAR-100
    for (learner, metric), mine in ours.items():
        summary = Summary.of([*mine.values()])
        yield f"{learner} {metric}: {summary.mean:.2f} ± {summary.sd:.2f}, n = {summary.n}"
        found = {}
        theirs = ours.get(("er", metric), {}) if learner == "pcl" else {}
        if len(both := sorted(mine.keys() & theirs.keys())) > 1:
            found["er"] = paired([mine[seed] for seed in both], [theirs[seed] for seed in both])
        if metric != "forgetting":
            found["the paper's"] = welch(summary, published[learner][metric == "acc"].value)
        for name, differs in found.items():
            yield f"    minus {name}: {differs.mean:+.2f} [{differs.low:+.2f}, {differs.high:+.2f}] p={differs.p:.2g}"


def by_seed(store: Store, learner: str, metric: str, seeds: int) -> dict[int, float]:
    """Return each seed's mean over the precisions, if it has all: these runs share data, order and initial weights."""
    alike = zip(*(specs(learner, precision, seeds) for precision in PRECISIONS), strict=True)
    found = {seed: [record for spec in each if (record := store.find(spec))] for seed, each in enumerate(alike)}
    return {
        seed: fmean(record.metrics[metric] for record in records)
        for seed, records in found.items()
        if len(records) == len(PRECISIONS)
    }


if __name__ == "__main__":
    main()
