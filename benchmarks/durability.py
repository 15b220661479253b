"""The cost of saving a learner and of loading it.

    python benchmarks/durability.py

Medians over repetitions, on one thread; a file counts as written once it is on disk (fsync). The last two columns are
the peak growth of memory (the resident set, as Linux reports it) in a save, and in a load with the learner it returns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from parabolic import PCL, Learner, make_backbone
from parabolic.learners.saving import describe
from parabolic.states import pack_state

CASES = {
    "mlp, 1 × 8 × 8, memory 200": ("mlp", (1, 8, 8), 10, 200, 10),
    "resnet18, 3 × 32 × 32, memory 1000": ("resnet18", (3, 32, 32), 100, 1000, 3),
}


def median(work: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return 1e3 * statistics.median(taken)


def growth(work: Callable[[], object]) -> float:
    """Return the peak growth of the process, in megabytes."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    work()
    return (resident("VmHWM") - before) / 1e3


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    print(f"{'':38}{'size':>10}{'a step':>10}{'packed':>10}{'saved':>10}{'loaded':>10}{'grows':>10}{'grows':>10}")
    for title, (backbone, shape, classes, memory, times) in CASES.items():
        learner = PCL(make_backbone(backbone, shape, classes), memory=memory, average=0.99)
        x, y = torch.randint(256, (memory, *shape), dtype=torch.uint8), torch.arange(memory) % classes
        for part in range(0, memory, 100):
            learner.remember({"x": x[part : part + 100], "y": y[part : part + 100]}, {})
        path = folder / "a.safetensors"
        # First, as memory that was freed earlier would be reused.
        grows = growth(lambda: learner.save(path)), growth(lambda: Learner.load(path))  # noqa: B023
        step = median(lambda: learner.observe(x[:10], y[:10]), times)  # noqa: B023
        packed = median(lambda: pack_state(describe(learner)), times)  # noqa: B023
        saved = median(lambda: learner.save(path), times)  # noqa: B023
        loaded = median(lambda: Learner.load(path), times)  # noqa: B023
        size = f"{path.stat().st_size / 1e6:.1f} MB"
        times_taken = "".join(f"{value:7.0f} ms" for value in (step, packed, saved, loaded))
        print(f"{title:38}{size:>10}{times_taken}" + "".join(f"{value:7.1f} MB" for value in grows))


if __name__ == "__main__":
    main()
