"""What each part of the preset pcl-plus adds: the whole preset, and the preset minus one part, five seeds each.

    python benchmarks/plus.py                    # the table from the stored results: no GPU needed
    python benchmarks/plus.py --train            # also train missing runs, after `parabolic data prepare cifar100`
    python benchmarks/plus.py --stream seq-cifar10
    python benchmarks/plus.py --balance 1        # every row with fully balanced classes, as the preset first had

Each row is compared with the whole preset by a paired t-test over the seeds.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from parabolic.experiments import Record, RunSpec, run_grid
from parabolic.experiments.presets import load_preset
from parabolic.experiments.records import BackedStore, Records
from parabolic.statistics import Summary, paired

PARTS: dict[str, dict[str, Any]] = {
    "pcl-plus": {},
    "no balance of classes": {"balance": 0.0},
    "classes balanced wholly": {"balance": 1.0},
    "no average of weights": {"average": None, "average_part": 1.0},
    "no momentum": {"optimizer": "SGD"},
    "no momentum, twice the learning rate": {"optimizer": "SGD", "lr": 0.1},
    "one step a batch": {"repeats": 1},
    "replay of 32": {"replay": 32},
    "bridges of five points": {"times": 5},
    "labels not folded": {"simplex": False},
    "no noise on bridges": {"sigma_x": 0.0, "sigma_y": 0.0},
    "details as in the published code": {"variant": "reference"},
}
REPLAY: dict[str, dict[str, Any]] = {
    "no bridges (ER)": {},
    "no bridges, labels smoothed (ER)": {"smoothing": 0.14},  # as much as folding spreads on average, with 100 classes
    "no bridges, three steps a batch (ER)": {"repeats": 3},
    "no bridges, twice the learning rate (ER)": {"lr": 0.1},
}


def rows(stream: str, memory: int, seeds: int, **others: Any) -> dict[str, list[RunSpec]]:
    """Return the runs of each row, one per seed; `others` override options of the preset."""
    whole = load_preset("pcl-plus").spec(stream=stream, memory=memory)
    whole = replace(whole, options={**whole.options, **others})
    shared = {name: value for name, value in whole.options.items() if name in RunSpec.learner_options("er")}
    first = {row: replace(whole, options={**whole.options, **options}) for row, options in PARTS.items()}
    first |= {row: replace(whole, learner="er", options={**shared, **options}) for row, options in REPLAY.items()}
    return {row: [replace(spec, seed=seed) for seed in range(seeds)] for row, spec in first.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stream", default="seq-cifar100")
    parser.add_argument("--memory", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--balance", type=float, help="instead of the preset's own")
    parser.add_argument("--rows", help="only some rows: numbers, separated by commas")
    parser.add_argument("--train", action="store_true", help="train missing runs")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder in which runs are stored")
    asked = parser.parse_args()
    others = {} if asked.balance is None else {"balance": asked.balance}
    table = rows(asked.stream, asked.memory, asked.seeds, **others)
    whole = table["pcl-plus"]
    if asked.rows:
        chosen = asked.rows.split(",")
        if not all(number.isdecimal() and int(number) < len(table) for number in chosen):
            parser.error(f"--rows: got {asked.rows}, expected numbers from 0 to {len(table) - 1}")
        table = {name: specs for number, (name, specs) in enumerate(table.items()) if str(number) in chosen}
    store = BackedStore(asked.runs, Records.ours())
    if asked.train:
        for specs in table.values():  # row by row, so that each has its own seconds
            outcome = run_grid(specs, store, workers=0)
            for failure in outcome.failures:
                print(failure.spec, failure.reason)
            if outcome.interrupted:
                return
    found = {row: [record for spec in specs if (record := store.find(spec))] for row, specs in table.items()}
    compared = [record for spec in whole if (record := store.find(spec))]
    Console(width=120).print(shown(found, compared, f"{asked.stream}, memory {asked.memory}"))


def shown(found: dict[str, list[Record]], whole: list[Record], title: str) -> Table:
    """Return a table of the rows' runs beside those of the whole preset."""
    table = Table("", "n", "AAA %", "minus pcl-plus", "Acc %", "minus pcl-plus", "forgetting", "s per run", title=title)
    for row, records in found.items():
        if len(records) < 2:
            table.add_row(row, str(len(records)))
            continue
        cells = []
        for metric in ("aaa", "acc"):
            ours, best = ({record.spec["seed"]: record.metrics[metric] for record in each} for each in (records, whole))
            summary, both = Summary.of(list(ours.values())), [seed for seed in ours if seed in best]
            cells += [f"{summary.mean:.1f} ± {summary.sd:.1f}", ""]
            if records != whole and len(both) > 1:
                gap = paired([ours[seed] for seed in both], [best[seed] for seed in both])
                cells[-1] = f"{gap.mean:+.1f} [{gap.low:+.1f}, {gap.high:+.1f}]"
        forgetting = Summary.of([record.metrics["forgetting"] for record in records])
        seconds = sum(sum(record.train_seconds) for record in records) / len(records)
        table.add_row(row, str(len(records)), *cells, f"{forgetting.mean:.1f}", f"{seconds:.1f}")
    return table


if __name__ == "__main__":
    main()
