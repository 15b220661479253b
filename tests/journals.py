"""Helpers for tests of journals: a stream, a learner with much to lose, and writers that are killed.

Nothing here takes long to import: the tests start many processes that do.
"""

import json
import os
import random
import signal
import time
import warnings
from pathlib import Path

import torch
from torch import nn

from parabolic import PCL, Journal, LwF
from parabolic.states import same_state

LENGTH = 30


def batch(number):
    """The batch of that number: a stream that can begin anywhere."""
    generator = torch.Generator().manual_seed(number)
    y = torch.randint(4, (8,), generator=generator)
    return torch.randn(8, 3, generator=generator) + y[:, None], y


def make(cls=PCL, seed=0, **options):
    """A learner with much that must not be lost: a memory, an average, moments, and dropout that draws elsewhere."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
    settings = {"memory": 40, "replay": 8} if cls is not LwF else {}
    return cls(model, optimizer="Adam", lr=0.01, average=0.9, **settings | options)


def frozen(learner):
    return {name: torch.utils._pytree.tree_map(clone, value) for name, value in learner.state_dict().items()}


def clone(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


def trajectory(length=LENGTH):
    """The states of a learner that nothing disturbs, before each batch and at the end."""
    learner = make()
    states = [frozen(learner)]
    for number in range(length):
        learner.observe(*batch(number))
        states.append(frozen(learner))
    return states


def go_on(folder, length=LENGTH, **options):
    with Journal(folder, make(), **options) as journal:
        for number in range(journal.batches, length):
            journal.observe(*batch(number))
    return journal


def files(folder):
    return sorted(path.name for path in Path(folder).glob("0*"))


KILLS = 100


def main(folder):
    """A process that forks writers and kills them: importing torch a hundred times would take minutes."""
    oracle, moments = trajectory(), random.Random(7)
    counts = {"kills": 0, "in a write": 0, "starts": [], "ends": 0}
    warnings.simplefilter("error")  # no kill leaves a file that would have to be passed over
    started = time.perf_counter()
    go_on(Path(folder) / "undisturbed", length=20, every=1, keep=2)
    window = (time.perf_counter() - started) / 2  # some ten batches, however busy the machine is
    while counts["kills"] < KILLS:
        journal_folder = Path(folder) / str(counts["ends"])
        ready, writer = fork(journal_folder)
        os.read(ready, 1)
        time.sleep(moments.uniform(0, window))
        os.kill(writer, signal.SIGKILL)
        killed = os.WIFSIGNALED(os.waitpid(writer, 0)[1])
        os.close(ready)
        counts["kills"] += killed
        counts["in a write"] += killed and any(journal_folder.glob(".0*"))
        learner = make(seed=99)  # which knows nothing of the weights
        journal = Journal(journal_folder, learner)
        assert same_state(learner.state_dict(), oracle[journal.batches])
        counts["starts"].append(journal.batches)
        journal.close()
        if not killed:  # it came to its end before the signal
            assert journal.batches == LENGTH
            counts["ends"] += 1
    assert same_state(go_on(journal_folder).learner.state_dict(), oracle[LENGTH])
    print(json.dumps(counts))


def fork(folder):
    """A process that goes on with the stream, and a pipe that tells when it has begun."""
    ready, started = os.pipe()
    writer = os.fork()
    if writer:
        os.close(started)
        return ready, writer
    with Journal(folder, make(), every=1, keep=2) as journal:
        os.write(started, b".")
        for number in range(journal.batches, LENGTH):
            journal.observe(*batch(number))
    os._exit(0)
