"""The cost of a monitor as in `parabolic run`: a look every 20 steps, written to a file.

    python benchmarks/monitor.py

Five epochs of the digits: the time spent in the monitor during training, as a share of the total, and the time of the
complete look at the end. Medians over rounds, on one thread.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from parabolic import Monitor, RunSpec, train
from parabolic.engine import State
from parabolic.experiments import build

ROUNDS, EPOCHS = 5, 5


class Timed(Monitor):
    """A monitor that measures how long it takes."""

    def on_start(self, state: State) -> None:
        self.spent, self.started = 0.0, time.perf_counter()
        super().on_start(state)

    def on_step(self, state: State) -> None:
        started = time.perf_counter()
        super().on_step(state)
        self.spent += time.perf_counter() - started

    def on_end(self, state: State) -> None:
        self.ended = time.perf_counter()
        super().on_end(state)
        self.closing = time.perf_counter() - self.ended


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    print(f"{'':>6}{'all, s':>10}{'monitor, s':>12}{'share':>9}{'at the end, s':>15}")
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("sgd", "er", "pcl"):
            rounds = []
            for _ in range(ROUNDS):
                learner, stream = build(RunSpec(kind), device="cpu")
                monitor = Timed(every=20, share=0.005, file=Path(folder) / "a.jsonl")
                train(learner, stream, batch=10, epochs=EPOCHS, callbacks=[monitor])
                rounds.append((monitor.ended - monitor.started, monitor.spent, monitor.closing))
            total, spent, closing = map(statistics.median, zip(*rounds, strict=True))
            print(f"{kind:>6}{total:10.2f}{spent:12.3f}{spent / total:9.2%}{closing:15.2f}", flush=True)


if __name__ == "__main__":
    main()
