"""The library's overhead: one of its steps against the same step written by hand in plain torch.

    python benchmarks/overhead.py

A multilayer perceptron 784-256-256-10, batch 32 + 32, memory 1000, on one CPU thread. Both sides are timed in turn,
in short rounds, and the median of the rounds' ratios is reported, so that a busy machine affects both equally.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from parabolic import ER, MLP, PCL

BATCH, REPLAY, CAPACITY, TIMES, SIGMA_X, SIGMA_Y, LR = 32, 32, 1000, 5, 0.03, 0.01, 0.01


def by_hand(kind: str) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """ER or PCL as written for this network only: no checks, no names, nothing to extend."""
    torch.manual_seed(0)
    model = MLP((784,), 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    kept_x, kept_y = torch.zeros(CAPACITY, 784), torch.zeros(CAPACITY, dtype=torch.long)
    seen = 0

    def step(x: torch.Tensor, y: torch.Tensor) -> object:
        nonlocal seen
        new_x, new_y = x, y
        if seen:
            rows = torch.randperm(min(seen, CAPACITY))[:REPLAY]
            x, y = torch.cat([x, kept_x[rows]]), torch.cat([y, kept_y[rows]])
        if kind == "er":
            loss = F.cross_entropy(model(x), y)
        else:
            ends = torch.randperm(len(x))
            s = torch.linspace(0, 1, TIMES)[:, None]

            def bridge(a: torch.Tensor, b: torch.Tensor, sigma: float) -> torch.Tensor:
                increments = torch.randn(len(a), TIMES - 1, a.shape[1]) * (sigma * (1 / (TIMES - 1)) ** 0.5)
                walk = torch.cat([torch.zeros(len(a), 1, a.shape[1]), increments.cumsum(1)], 1) + a[:, None]
                return (walk - s * (walk[:, -1:] - b[:, None]))[:, :-1].flatten(0, 1)

            label = F.one_hot(y, 10).float()
            target = bridge(label, label[ends], SIGMA_Y).abs()
            loss = F.cross_entropy(model(bridge(x, x[ends], SIGMA_X)), target / target.sum(-1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        position = torch.arange(seen, seen + len(new_x))
        slot = torch.where(position < CAPACITY, position, (torch.rand(len(new_x)) * (position + 1)).long())
        stays = slot < CAPACITY
        kept_x[slot[stays]], kept_y[slot[stays]] = new_x[stays], new_y[stays]
        seen += len(new_x)
        return loss.detach()

    return step


def ours(kind: str) -> Callable[[torch.Tensor, torch.Tensor], object]:
    torch.manual_seed(0)
    model = MLP((784,), 10)
    return (PCL if kind == "pcl" else ER)(model, memory=CAPACITY, replay=REPLAY, lr=LR).observe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=50, help="steps per round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # a network that has memorised its batches would be slower than a fresh one
    pool = [(torch.randn(BATCH, 784), torch.randint(10, (BATCH,))) for _ in range(500)]
    print(f"{'step':>6} {'by hand, µs':>12} {'ours, µs':>10} {'ratio':>7}")
    for kind in ("er", "pcl"):
        sides = (by_hand(kind), ours(kind))
        for side in sides:
            for x, y in pool[: 2 * CAPACITY // BATCH]:  # until the memory is full
                side(x, y)
        times: list[list[float]] = [[], []]
        for turn in range(args.rounds):
            batches = [pool[(turn * args.steps + i) % len(pool)] for i in range(args.steps)]
            for side, spent in zip(sides, times, strict=True):
                started = time.perf_counter()
                for x, y in batches:
                    side(x, y)
                spent.append((time.perf_counter() - started) / args.steps * 1e6)
        ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
        hand, own = (statistics.median(spent) for spent in times)
        print(f"{kind:>6} {hand:12.0f} {own:10.0f} {ratio:7.2f}")


if __name__ == "__main__":
    main()
