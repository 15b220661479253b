"""A million batches through one learner: whether memory use and step time stay constant.

    python benchmarks/soak.py                      # PCL; half an hour on an idle core
    python benchmarks/soak.py --learner er --out results/soak-er.json

Ten classes rotate endlessly in 16 dimensions, eight examples a batch. A journal saves the learner every thousand
batches, and in one window of five a monitor looks at it every hundred. At the end of each window the resident memory of
the process and the number of its open files are recorded.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Generator, Tensor

from parabolic import ER, MLP, PCL, Journal, Monitor

CLASSES, DIMENSIONS, SIZE = 10, 16, 8


def stream(length: int) -> Iterator[tuple[Tensor, Tensor]]:
    g = Generator().manual_seed(0)
    centre = 2 * torch.randn(CLASSES, DIMENSIONS, generator=g)
    for number in range(length):
        angle = 2 * math.pi * number / 100_000
        y = torch.randint(CLASSES, (SIZE,), generator=g)
        moved = math.cos(angle) * centre[y] + math.sin(angle) * centre[y].roll(1, 1)
        yield moved + torch.randn(SIZE, DIMENSIONS, generator=g), y


def resident() -> float:
    """Return the resident memory of the process, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learner", choices=["pcl", "er"], default="pcl")
    parser.add_argument("--batches", type=int, default=1_000_000)
    parser.add_argument("--window", type=int, default=20_000, help="batches between two readings")
    parser.add_argument("--out", type=Path, default=Path("results/soak.json"))
    args = parser.parse_args()
    if not 2 <= args.window <= args.batches:
        parser.error("--window: expected a number from 2 to that of --batches")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    kind = {"pcl": PCL, "er": ER}[args.learner]
    learner = kind(MLP((DIMENSIONS,), CLASSES, hidden=(32,)), memory=200, replay=8, lr=0.05)
    batches, rows = stream(args.batches), []
    print(f"{'batches':>10}{'MB':>8}{'µs/step':>11}{'slowest 1 %':>13}{'loss':>8}{'files':>7}  monitor", flush=True)
    with tempfile.TemporaryDirectory() as folder, Journal(folder, learner, every=1000) as journal:
        for window in range(args.batches // args.window):
            watched, spent, total = window % 5 == 4, [], torch.zeros(())
            with ExitStack() as stack:
                file = Path(folder) / "monitor.jsonl"
                monitor = stack.enter_context(Monitor(file=file)) if watched else None
                for _ in range(args.window):
                    x, y = next(batches)
                    started = time.perf_counter()
                    loss = journal.observe(x, y)
                    if monitor is not None:
                        monitor(learner, loss)
                    spent.append(1e6 * (time.perf_counter() - started))
                    total += loss
            files = len(os.listdir("/proc/self/fd"))
            step, slow, loss = (
                statistics.median(spent),
                statistics.quantiles(spent, n=100)[-1],
                float(total / len(spent)),
            )
            rows.append([journal.batches, resident(), step, slow, loss, files, watched])
            line = f"{journal.batches:10,}{rows[-1][1]:8.1f}{step:11.0f}{slow:13.0f}{loss:8.3f}{files:7}"
            print(f"{line}  {'on' if watched else ''}", flush=True)
        sound = all(bool(weight.isfinite().all()) for weight in learner.model.parameters())
    settled = rows[len(rows) // 10 :]  # after the first tenth, one-time allocations are done
    part = max(1, len(settled) // 5)
    quiet = [row for row in settled if not row[-1]]
    first, last = (statistics.median(row[2] for row in some) for some in (quiet[:part], quiet[-part:]))
    memory = [row[1] for row in settled]
    report = {
        "learner": args.learner,
        "batches": journal.batches,
        "finite": sound and all(math.isfinite(row[4]) for row in rows),
        "resident_mb": {"after_a_tenth": memory[0], "least": min(memory), "most": max(memory), "end": memory[-1]},
        "step_us": {"first_fifth": first, "last_fifth": last, "ratio": last / first},
        "open_files": sorted({row[5] for row in settled}),
        "columns": ["batches", "resident_mb", "step_us", "slowest_percent_us", "loss", "open_files", "monitored"],
        "windows": [[round(each, 4) if isinstance(each, float) else each for each in row] for row in rows],
        "torch": str(torch.__version__),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: report[name] for name in ("finite", "resident_mb", "step_us", "open_files")}, indent=1))


if __name__ == "__main__":
    main()
