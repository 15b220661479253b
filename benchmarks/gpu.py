"""Seconds per run on a GPU: PCL and ER on Seq-CIFAR-100, alone and five at once, and a plain eager loop.

    python benchmarks/gpu.py                        # on a machine with a GPU and `parabolic data prepare cifar100`
    python benchmarks/gpu.py --random               # random images instead of the data: the same work
    python benchmarks/gpu.py --only er --output results.json    # some rows only; they replace those in the file

The GPU is synchronised before each reading of the clock, and short runs come first as a warm-up. The operations of a
step are counted by torch's own counter. Long runs are timed over their first tasks and scaled up. The eager loop
represents common practice: float32, examples augmented one by one on the CPU by the workers of a DataLoader, every
operation launched separately; it too is timed over some steps and scaled up.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from parabolic import Stream, make_stream
from parabolic.backbones import make_backbone
from parabolic.engine import Berth, Fleet, computing_in, feed, numerics, train_fleet
from parabolic.experiments.execution import environment
from parabolic.learners import find_learner
from parabolic.streams import CropFlip, Normalise

MEAN, STD = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
REFERENCE = {"variant": "reference"}
STEPS, TESTED = 1570, 55_000  # of a whole run: its steps, and its test examples


@dataclass(frozen=True)
class Row:
    title: str
    learner: str
    options: dict = field(default_factory=dict)
    fleets: tuple[int, ...] = (5,)  # how many replicas at once
    tasks: int = 10  # how many tasks are trained
    streamed: bool = False  # whether examples are streamed from the host


ROWS = [
    Row("PCL", "pcl", fleets=(1, 5)),
    Row("PCL, reference", "pcl", REFERENCE),
    Row("PCL, from the host", "pcl", fleets=(1,), tasks=3, streamed=True),
    Row("ER", "er", fleets=(1, 5, 10)),
    Row("ER, from the host", "er", fleets=(1, 5), tasks=5, streamed=True),
    Row("VR-MCL", "vrmcl", REFERENCE, fleets=(1, 5), tasks=2),
]


def images(random: bool, seed: int, tasks: int = 10, each: int = 5000) -> Stream:
    if not random:
        return make_stream("seq-cifar100", seed)
    g = torch.Generator().manual_seed(0)
    y = torch.arange(tasks * each) // each * 10 + torch.arange(tasks * each) % 10
    x = torch.randint(256, (tasks * each, 3, 32, 32), dtype=torch.uint8, generator=g)
    return Stream.from_arrays(
        x, y, test=(x[::5].clone(), y[::5].clone()), tasks=tasks, seed=seed, name="noise",
        prepare=Normalise(MEAN, STD), augment=CropFlip(4),
    )  # fmt: skip


def learner(name: str, options: dict, seed: int, stream: Stream, precision: str, memory: int = 1000, net="resnet18"):
    model = make_backbone(net, (3, 32, 32), 100, seed).cuda()
    computing_in(model, precision, channels_last=True)
    return find_learner(name)(
        model, memory=memory, seed=seed, classes=100, prepare=stream.prepare, augment=stream.augment, **options
    )


def measure(row: Row, replicas: int, random: bool, precision: str = "bf16") -> dict:
    """Measure one run of a fleet, after short ones to warm up."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    streams = [images(random, seed) for seed in range(replicas)]
    streams = [replace(stream, tasks=stream.tasks[: row.tasks]) for stream in streams]

    def fresh():
        each = enumerate(streams)
        return [learner(row.learner, row.options, seed, stream, precision) for seed, stream in each]

    def short(stream):  # a first task that fills the memory, with a short last batch, and a little of the others
        parts = [
            replace(task, train_rows=task.train_rows[: 8 if number else 40 * 32 + 8], test_rows=task.test_rows[:8])
            for number, task in enumerate(stream.tasks)
        ]
        return replace(stream, tasks=parts)

    share, feed.SHARE = feed.SHARE, 0.0 if row.streamed else feed.SHARE
    try:
        with numerics(precision):
            started = time.perf_counter()
            fleet = Fleet(fresh())
            for _ in range(3):  # so that the first step, a short last batch and the tests are captured too
                fleet.adopt(fresh())
                train_fleet(fleet, [short(stream) for stream in streams])
            warm_up = time.perf_counter() - started
            operations = count(fresh()[0])
            fleet.adopt(fresh())
            states = train_fleet(fleet, streams)
    finally:
        feed.SHARE = share
    state = states[0]
    tested = 1000 * row.tasks * (row.tasks + 1) // 2
    step = sum(state.train_seconds) / state.step
    train, test = STEPS * step, sum(state.test_seconds) * TESTED / tested
    return {
        "replicas": replicas,
        "precision": precision,
        "tasks": row.tasks,
        "train_seconds": train,
        "test_seconds": test,
        "seconds": train + test,
        "ms_a_step": 1e3 * step,
        "images_a_second": 50_000 / train,
        "tflops": operations / step / 1e12,
        "operations_a_step": operations,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,  # graphs hold more than is allocated at a time
        "warm_up_seconds": warm_up,
        "manner": fleet.berths[0].mode,
        "acc": [float(each.matrix[-1].mean()) for each in states],
    }


def count(one) -> int:
    """Count the operations of convolutions and matrix products in a step, forward and backward."""
    x = torch.randint(256, (32, 3, 32, 32), dtype=torch.uint8, device="cuda")
    y = torch.randint(100, (32,), device="cuda")
    one.start_task([(x, y)])
    for _ in range(3):
        one.step(x, y, 0 if one.needs_tasks else None)
    with FlopCounterMode(display=False) as counter:
        one.step(x, y, 0 if one.needs_tasks else None)
    return counter.get_total_flops()


class OneByOne(Dataset):
    """Examples augmented one by one on the CPU, as data loaders do."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return augmented(self.x[i]), self.y[i], i


def augmented(image: np.ndarray) -> torch.Tensor:
    padded = np.pad(image, ((0, 0), (4, 4), (4, 4)))
    top, left = torch.randint(9, (2,)).tolist()
    image = padded[:, top : top + 32, left : left + 32]
    if torch.rand(()) < 0.5:
        image = image[:, :, ::-1]
    image = torch.from_numpy(np.ascontiguousarray(image)).float() / 255
    return (image - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def eager_loop(name: str, steps: int = 120, memory: int = 1000) -> dict:
    """Replay as it is commonly written, in float32 and with nothing captured."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (32 * (steps + 20), 3, 32, 32), dtype=np.uint8)
    y = rng.integers(0, 100, len(x))
    model = make_backbone("resnet18", (3, 32, 32), 100, 0).cuda()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.08)
    kept_x, kept_y, offered = [], [], 0
    loader = DataLoader(OneByOne(x, y), 32, shuffle=True, num_workers=4, pin_memory=True)
    for step, (batch, labels, rows) in enumerate(loader):
        if step == 20:
            torch.cuda.synchronize()
            started = time.perf_counter()
        batch, labels = batch.cuda(non_blocking=True), labels.cuda(non_blocking=True)
        if kept_x:
            drawn = rng.choice(len(kept_x), min(32, len(kept_x)), replace=False)
            batch = torch.cat([batch, torch.stack([augmented(kept_x[i]) for i in drawn]).cuda()])
            labels = torch.cat([labels, torch.tensor([kept_y[i] for i in drawn]).cuda()])
        if name == "ER":
            loss = cross_entropy(model(batch), labels)
        else:
            loss = bridges(model, batch, labels, points=4 if name == "PCL" else 5)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        for row in rows.tolist():
            slot = offered if offered < memory else rng.integers(0, offered + 1)
            if slot >= len(kept_x):
                kept_x.append(x[row]), kept_y.append(int(y[row]))
            elif slot < memory:
                kept_x[slot], kept_y[slot] = x[row], int(y[row])
            offered += 1
        loss.item()  # as progress bars do
    torch.cuda.synchronize()
    each = (time.perf_counter() - started) / (step - 19)
    return {"replicas": 1, "precision": "fp32, eager", "train_seconds": STEPS * each, "ms_a_step": 1e3 * each,
            "images_a_second": 50_000 / (STEPS * each)}  # fmt: skip


def bridges(model, x, y, points: int, sigma_x=0.03, sigma_y=0.01):
    ends, paths = torch.randperm(len(x), device=x.device), []
    for value, sigma in ((x, sigma_x), (one_hot(y, 100).float(), sigma_y)):
        walk = torch.randn(4, *value.shape, device=x.device).mul(sigma * 0.5).cumsum(0)
        path = [value]
        for i in range(1, points):
            s = i / 4
            path.append((1 - s) * value + s * value[ends] + walk[i - 1] - s * walk[-1])
        paths.append(torch.cat(path))
    target = paths[1].abs()
    return cross_entropy(model(paths[0]), target / target.sum(1, keepdim=True))


def ceilings() -> dict:
    """Measure the card's peak rates: bfloat16 matrix products and memory copies."""
    one, other = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    found = {}
    for name, work, amount in (
        ("matrix_tflops", lambda: one @ other, 2 * 8192**3 / 1e12),
        ("copy_tb_a_second", lambda: target.copy_(source), 2 * 2**31 / 1e12),
    ):
        for _ in range(3):
            work()
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(10):
                work()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - started) / 10)
        found[name] = amount / float(np.median(times))
    return found


def flat(steps: int = 1000) -> dict:
    """Measure milliseconds per ER step with a small network: by memory size, and along a stream ten times as long."""
    by_memory = {}
    batch = (torch.randint(256, (32, 3, 32, 32), dtype=torch.uint8, device="cuda"),
             torch.randint(100, (32,), device="cuda"))  # fmt: skip
    stream = images(True, 0, tasks=1, each=64)

    def timed(berth, count):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            berth.step(*batch)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - started) / count

    for _ in range(2):  # the first time warms up
        for memory in (200, 1_000, 10_000, 100_000):
            berth = Berth(learner("er", {}, 0, stream, "bf16", memory=memory, net="convnet"))
            timed(berth, 50)
            by_memory[memory] = timed(berth, steps)
    berth = Berth(learner("er", {}, 0, stream, "bf16", net="convnet"))
    timed(berth, 200)
    along = [timed(berth, STEPS) for _ in range(10)]  # the length of Seq-CIFAR-100, ten times
    return {"ms_a_step_by_memory": by_memory, "ms_a_step_along_ten_streams": along}


def commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random", action="store_true", help="random images instead of the data")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--commit", default=None, help="the measured commit, if git does not know it")
    parser.add_argument("--only", default="", help="only these learners, separated by commas: pcl,er")
    asked = parser.parse_args()
    best = ceilings()
    found = []
    for row in ROWS:
        if asked.only and row.learner not in asked.only.split(","):
            continue
        for replicas in row.fleets:
            found.append({"row": row.title, **measure(row, replicas, asked.random)})
            print(json.dumps(found[-1]), flush=True)
        if row.title in ("PCL", "ER"):
            found.append({"row": row.title, **eager_loop(row.title)})
    table = Table("", "replicas", "precision", "train s", "test s", "ms per step", "images/s", "TFLOP/s",
                  "of matrix rate", "GiB", title="Seq-CIFAR-100, memory 1000, per replica")  # fmt: skip
    for each in found:
        share = f"{100 * each['tflops'] / best['matrix_tflops']:.0f} %" if "tflops" in each else ""
        figures = [
            f"{each[key]:,.{digits}f}" if key in each else ""
            for key, digits in (
                ("train_seconds", 2),
                ("test_seconds", 2),
                ("ms_a_step", 2),
                ("images_a_second", 0),
                ("tflops", 0),
            )
        ]
        room = f"{each['reserved_gib']:.1f}" if "reserved_gib" in each else ""
        table.add_row(each["row"], str(each["replicas"]), each["precision"], *figures, share, room)
    steady = flat()
    console = Console(width=140)
    console.print(table)
    console.print(f"matrix rate {best['matrix_tflops']:.0f} TFLOP/s, copies {best['copy_tb_a_second']:.2f} TB/s")
    console.print(f"ER, small network, ms per step by memory size: {steady['ms_a_step_by_memory']}")
    console.print(f"along ten streams: {[round(each, 3) for each in steady['ms_a_step_along_ten_streams']]}")
    if asked.output:
        found = [each | {"commit": asked.commit or commit()} for each in found]  # rows may come from several calls
        kept = json.loads(asked.output.read_text())["rows"] if asked.output.exists() else []
        rows = {(each["row"], each["replicas"], each["precision"]): each for each in [*kept, *found]}
        made = {"rows": [*rows.values()], **best, **steady, "environment": environment(torch.device("cuda"))}
        asked.output.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
