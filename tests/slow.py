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
    generator = torch.Generator().manual_seed(seed)
    for task in range(2):
        sizes = [size] * (batches - 1) + [2]
        yield [
            (
                torch.randn(count, 3, generator=generator, dtype=torch.float64) + task,
                torch.randint(2, (count,), generator=generator) + 2 * task,
            )
            for count in sizes
        ]


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def surprise(scores, label):
    """The cross-entropy of one example."""
    return -scores[label] + scores.exp().sum().log()


def same_weights(first, second, tolerance=1e-10):
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return all(
        torch.allclose(first_weight, second_weight, atol=tolerance, rtol=0) for first_weight, second_weight in pairs
    )


def assert_same(ours, theirs, tolerance=1e-10):
    """Assert that weights and statistics are the same."""
    for (name, our_value), their_value in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.allclose(our_value, their_value.to(our_value.device), atol=tolerance, rtol=0), name


def step_on_both(learners, stream):
    """Train a learner on a CPU and one on a GPU on the same tasks; a step that waits for the GPU fails."""
    for index, batches in enumerate(stream):
        for learner in learners:
            learner.start_task(batches)
        gpu_batches = [(x.cuda(), y.cuda()) for x, y in batches]
        for (x, y), (gpu_x, gpu_y) in zip(batches, gpu_batches, strict=True):
            learners[0].step(x, y, index)
            torch.cuda.set_sync_debug_mode("error")
            try:
                learners[1].step(gpu_x, gpu_y, index)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for learner in learners:
            learner.end_task(batches)


def reservoir(remembered, seen, capacity, examples, generator):
    """Offer examples to the list `remembered` one by one, as in Vitter's algorithm R; returns the new `seen`."""
    chances = torch.rand(len(examples), generator=generator, dtype=torch.float64).tolist()
    for example, chance in zip(examples, chances, strict=True):
        slot = math.floor(chance * (seen + 1))
        if seen < capacity:
            remembered.append(example)
        elif slot < capacity:
            remembered[slot] = example
        seen += 1
    return seen


class SlowReplay:
    """A model, a list of stored examples, and a generator that is drawn from in the learner's order."""

    def __init__(self, model, *, lr, memory, replay, seed):
        self.model, self.lr, self.capacity, self.replay = model, lr, memory, replay
        self.generator = torch.Generator().manual_seed(seed)
        self.remembered, self.seen = [], 0

    def scores(self, x):
        return self.model(x[None])[0]

    def recall(self):
        if not self.remembered:
            return []
        size = min(self.replay, len(self.remembered))
        return [self.remembered[row] for row in distinct(size, len(self.remembered), generator=self.generator).tolist()]

    def descend(self, loss):
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter -= self.lr * gradient
        return loss.item()

    def remember(self, examples):
        self.seen = reservoir(self.remembered, self.seen, self.capacity, examples, self.generator)
