"""Slow, obvious building blocks of the reference implementations of several learners."""

import math

import torch
from torch import nn

from parabolic.memory import distinct

CLASSES = 4


def net(norm=False, seed=0, classes=CLASSES):
    torch.manual_seed(seed)
    layers = [nn.Linear(3, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Linear(8, classes)]
    return nn.Sequential(*layers).double()


def tasks(batches=4, size=5, seed=1):
    """Two tasks of two classes each; the last batch of a task is short."""
    g = torch.Generator().manual_seed(seed)
    for task in range(2):
        sizes = [size] * (batches - 1) + [2]
        yield [
            (
                torch.randn(n, 3, generator=g, dtype=torch.float64) + task,
                torch.randint(2, (n,), generator=g) + 2 * task,
            )
            for n in sizes
        ]


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def surprise(scores, label):
    """The cross-entropy of one example."""
    return -scores[label] + scores.exp().sum().log()


def same_weights(one, other, tolerance=1e-10):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a, b, atol=tolerance, rtol=0) for a, b in pairs)


def assert_same(ours, theirs, tolerance=1e-10):
    """Assert that weights and statistics are the same."""
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.allclose(a, b.to(a.device), atol=tolerance, rtol=0), name


def step_on_both(learners, stream):
    """Train a learner on a CPU and one on a GPU on the same tasks; a step that waits for the GPU fails."""
    for index, batches in enumerate(stream):
        for learner in learners:
            learner.start_task(batches)
        moved = [(x.cuda(), y.cuda()) for x, y in batches]
        for (x, y), (gx, gy) in zip(batches, moved, strict=True):
            learners[0].step(x, y, index)
            torch.cuda.set_sync_debug_mode("error")
            try:
                learners[1].step(gx, gy, index)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for learner in learners:
            learner.end_task(batches)


def reservoir(kept, seen, capacity, examples, generator):
    """Offer examples to the list `kept` one by one, as in Vitter's algorithm R; returns the new `seen`."""
    chances = torch.rand(len(examples), generator=generator, dtype=torch.float64).tolist()
    for example, chance in zip(examples, chances, strict=True):
        slot = math.floor(chance * (seen + 1))
        if seen < capacity:
            kept.append(example)
        elif slot < capacity:
            kept[slot] = example
        seen += 1
    return seen


class SlowReplay:
    """A model, a list of stored examples, and a generator that is drawn from in the learner's order."""

    def __init__(self, model, *, lr, memory, replay, seed):
        self.model, self.lr, self.capacity, self.replay = model, lr, memory, replay
        self.g = torch.Generator().manual_seed(seed)
        self.kept, self.seen = [], 0

    def scores(self, x):
        return self.model(x[None])[0]

    def recall(self):
        if not self.kept:
            return []
        size = min(self.replay, len(self.kept))
        return [self.kept[row] for row in distinct(size, len(self.kept), generator=self.g).tolist()]

    def descend(self, loss):
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter -= self.lr * gradient
        return loss.item()

    def remember(self, examples):
        self.seen = reservoir(self.kept, self.seen, self.capacity, examples, self.g)
