"""The time and memory that the paper's benchmarks take to load, and whether their contents are right.

    parabolic data prepare cifar10 --from FOLDER    # and cifar100, tinyimagenet
    python benchmarks/data.py

Each stream is built and iterated once in a process of its own. Memory is the growth of the process (resident set,
mapped files included), as a multiple of the bytes of all images and labels.
"""

import argparse
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from parabolic import make_stream
from parabolic.streams import BENCHMARKS, Cache


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmRSS")))


def measure(name: str) -> None:
    torch.set_num_threads(1)
    warm = make_stream("seq-digits")  # so that imports do not count
    sum(len(y) for task in warm for _, y in task.batches(32))
    before, start = resident(), time.perf_counter()
    stream = make_stream(name)
    built = time.perf_counter() - start
    train = Counter(label for task in stream for _, y in task.batches(32) for label in y.tolist())
    gone_through = time.perf_counter() - start - built
    test = Counter(label for task in stream for _, y in task.test_batches() for label in y.tolist())
    raw = sum(each.x.nbytes + len(each.y) for each in (stream[0].train, stream[0].test))
    print(
        f"{name}: {list(stream[0].train.x.shape)} + {list(stream[0].test.x.shape)}, {len(stream)} tasks, "
        f"{len(train)} classes of {sorted(set(train.values()))} + {sorted(set(test.values()))}; "
        f"built in {built:.2f} s, all batches of 32 in {gone_through:.2f} s, "
        f"memory {(resident() - before) / raw:.3f} × {raw / 1e6:.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stream", nargs="?", help="only this one, in this process")
    args = parser.parse_args()
    if args.stream:
        measure(args.stream)
        return
    prepared = Cache().names()
    for name, benchmark in BENCHMARKS.items():
        if benchmark.data in prepared:
            subprocess.run([sys.executable, __file__, name], check=True)
        else:
            print(f"{name}: not prepared; parabolic data prepare {benchmark.data}")


if __name__ == "__main__":
    main()
