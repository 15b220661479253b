"""What happens when old labels become wrong: how many new examples are answered correctly, before they are learned.

    python benchmarks/changed.py

Rows of four numbers come in batches of eight; the label is the sign of the first number. From the middle of the stream
on it is the opposite. A memory of everything then holds mostly wrong labels, which replay teaches again and again; one
that favours recent examples forgets them. A learner that never replays adapts fastest, and forgets everything else.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import fmean

import torch
from rich.console import Console
from rich.table import Table

from parabolic import ER, MLP, PCL, SGD, Learner, Memory, Recent

KEPT, SIZE, LR = 200, 8, 0.05
LEARNERS: dict[str, Callable[[torch.nn.Module, int], Learner]] = {
    "PCL, reservoir": lambda model, seed: PCL(model, memory=Memory(KEPT), lr=LR, seed=seed),
    "PCL, recent": lambda model, seed: PCL(model, memory=Recent(KEPT), lr=LR, seed=seed),
    "ER, reservoir": lambda model, seed: ER(model, memory=Memory(KEPT), lr=LR, seed=seed),
    "ER, horizon 1000": lambda model, seed: ER(model, memory=Recent(KEPT, horizon=1000), lr=LR, seed=seed),
    "ER, recent": lambda model, seed: ER(model, memory=Recent(KEPT), lr=LR, seed=seed),
    "SGD": lambda model, seed: SGD(model, lr=LR, seed=seed),
}
WINDOWS = {"before": (-125, 0), "1 to 500 after": (0, 63), "501 to 1,500": (63, 188), "2,001 to 3,000": (250, 375)}


def answered(make: Callable[[torch.nn.Module, int], Learner], seed: int, batches: int) -> list[float]:
    """Return the share of each batch that is answered correctly before it is learned."""
    torch.manual_seed(seed)
    learner, draws = make(MLP((4,), 2), seed), torch.Generator().manual_seed(seed)
    right = []
    for number in range(2 * batches):
        x = torch.randn(SIZE, 4, generator=draws)
        y = ((x[:, 0] > 0) ^ (number >= batches)).long()
        right.append(float((learner.predict(x) == y).double().mean()))
        learner.observe(x, y)
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=375, help="before the labels change, and after")
    parser.add_argument("--seeds", type=int, default=5)
    asked = parser.parse_args()
    if asked.batches < (least := max(last for _, last in WINDOWS.values())):
        parser.error(f"--batches: got {asked.batches}, expected at least {least}")
    torch.set_num_threads(1)  # the network is small
    table = Table(title=f"Percent right before learning, by examples since the change; {asked.seeds} seeds")
    for title in ("learner", *WINDOWS):
        table.add_column(title, justify="right" if title != "learner" else "left")
    for name, make in LEARNERS.items():
        runs = [answered(make, seed, asked.batches) for seed in range(asked.seeds)]
        parts = [
            fmean(share for run in runs for share in run[asked.batches + first : asked.batches + last])
            for first, last in WINDOWS.values()
        ]
        table.add_row(name, *(f"{100 * part:.0f}" for part in parts))
    Console().print(table)


if __name__ == "__main__":
    main()
