"""What the tests of records and of tuned tables share: runs as they would be in a store, without their training."""

import random
from dataclasses import replace

from parabolic import metrics
from parabolic.experiments import Record

TASKS = {"seq-cifar10": 5, "seq-cifar100": 10, "seq-tinyimagenet": 20, "seq-digits": 5}


def made_up(spec, seed=0, finished="2026-11-15T10:00:00+00:00", **around):
    """A run as it would be in a store, without its training: accuracies of 1,000 test examples a task."""
    rng, tasks = random.Random(f"{spec.key} {seed}"), TASKS[spec.stream]
    accuracy = [[rng.randrange(1001) / 10 for _ in range(task + 1)] for task in range(tasks)]
    machine = {
        "parabolic": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6", "platform": "Linux",
        "processor": "a processor", "cores": 2, "threads": 1, "device": "A fast GPU", "fleet": 5, "steps": "captured",
        "command": "parabolic paper main --runs /home/someone/runs", "finished": finished, "resumed": 0,
    }  # fmt: skip
    record = Record(
        spec.key,
        spec.resolved(),
        {},
        accuracy,
        [rng.randrange(9000) / 1000] * tasks,
        [0.1] * tasks,
        7,
        machine | around,
    )
    return replace(record, metrics=metrics.summary(record.matrix))
