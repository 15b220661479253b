"""The cost of the memory: `draw` and `offer`, from a thousand to a million slots.

    python benchmarks/memory.py

Each memory has been offered ten times as many examples as it holds. The sizes are timed in turn, in short rounds, on
one CPU thread.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from parabolic import Memory

SIZES, BATCH, ROUNDS, CALLS = (10**3, 10**4, 10**5, 10**6), 32, 40, 100


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    memories = {}
    for size in SIZES:
        memories[size] = Memory(size)
        for _ in range(10):
            memories[size].offer(
                {"x": torch.zeros(size, 64), "y": torch.zeros(size, dtype=torch.long)}, generator=generator
            )
    batch = {"x": torch.randn(BATCH, 64), "y": torch.zeros(BATCH, dtype=torch.long)}
    spent: dict[tuple[str, int], list[float]] = {}
    for _ in range(ROUNDS):
        for size, memory in memories.items():
            for name, call in (
                ("draw", lambda memory=memory: memory.draw(BATCH, generator=generator)),
                ("offer", lambda memory=memory: memory.offer(batch, generator=generator)),
            ):
                started = time.perf_counter()
                for _ in range(CALLS):
                    call()
                spent.setdefault((name, size), []).append((time.perf_counter() - started) / CALLS * 1e6)
    print(f"{'µs a call':>10}" + "".join(f"{size:>12,}" for size in SIZES) + f"{'largest/smallest':>18}")
    for name in ("draw", "offer"):
        medians = [statistics.median(spent[name, size]) for size in SIZES]
        ratio = max(medians) / min(medians)
        print(f"{name:>10}" + "".join(f"{median:12.0f}" for median in medians) + f"{ratio:18.2f}")


if __name__ == "__main__":
    main()
