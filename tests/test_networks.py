"""Networks of users: each learner either learns with them as it should, or says why it does not."""

import pytest
import torch
from torch import nn

from parabolic import CLSER, ER, InputError, ReplayLearner
from parabolic.learners import find_learner, known_learners

ALL = sorted(known_learners())
CLASSES = 4


def make(name, model, **options):
    cls = find_learner(name)
    return cls(model, **({"memory": 30, "replay": 8} if issubclass(cls, ReplayLearner) else {}) | options)


def tasks(*shape, dtype=torch.float32):
    g = torch.Generator().manual_seed(1)
    return [
        [(torch.randn(8, *shape, generator=g).to(dtype), torch.arange(8) % 2 + 2 * task) for _ in range(3)]
        for task in range(2)
    ]


def learn(learner, data):
    for task, batches in enumerate(data):
        learner.start_task(batches)
        for x, y in batches:
            learner.observe(x, y, task if learner.needs_tasks else None)
        learner.end_task(batches)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, dtype=torch.cfloat))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        assert not x.is_complex()
        return self.head((x.cfloat() @ self.weight).abs())


class Warm(nn.Module):
    """A linear layer with a temperature, a weight that is one number."""

    def __init__(self):
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.tensor(2.0)), nn.Linear(3, CLASSES)

    def forward(self, x):
        return self.head(x * self.scale)


class Cached(nn.Module):
    """It builds what depends on the length of its inputs when it meets one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cosine", torch.ones(2), persistent=False)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x):
        if len(self.cosine) < x.shape[1]:
            self.cosine = torch.arange(x.shape[1], dtype=x.dtype).cos()
        return self.head((x * self.cosine[: x.shape[1], None]).mean(1))


@pytest.mark.parametrize("kind", [ER, CLSER])
def test_complex_weights_are_averaged_too(kind):
    learner = kind(Complex(), memory=30, replay=8, lr=0.5, **({"average": 0.5} if kind is ER else {"stable_rate": 1}))
    seen = [learner.model.weight.detach().clone()] if kind is CLSER else []  # the first of those that it averages
    for x, y in tasks(3)[0]:
        learner.observe(x, y)
        seen.append(learner.model.weight.detach().clone())
    mean = seen[0]
    for step, weight in enumerate(seen[1:], 1):
        mean = mean + max(1 / (1 + step), 0.5 if kind is ER else 0.01) * (weight - mean)
    assert torch.allclose(learner.predicting_weights()["weight"], mean)
    assert not torch.allclose(mean, seen[-1])


@pytest.mark.parametrize("name", ["agem", "ewc", "gem", "si", "vrmcl"])
def test_methods_that_compare_weights_or_gradients_refuse_complex_ones(name):
    with pytest.raises(InputError, match=r"model: got complex weights \(weight\), expected real ones; hold them as"):
        make(name, Complex())


@pytest.mark.parametrize("name", ALL)
def test_a_network_with_a_weight_that_is_one_number_grows(name):
    learner = make(name, Warm(), average=0.9)
    data = tasks(3)
    learn(learner, data)
    learner.grow(CLASSES + 1)
    more = [(x, y * 0 + CLASSES) for x, y in data[0]]
    learner.start_task(more)
    learner.observe(*more[0], 2 if learner.needs_tasks else None)
    assert learner.scores(more[0][0]).shape == (8, CLASSES + 1)


def test_a_buffer_that_changes_its_shape_has_no_average_and_how_to_avoid_it_is_told():
    learner = ER(Cached(), memory=30, replay=8, average=0.9)
    (x, y), *_ = tasks(5, 3)[0]
    with pytest.raises(InputError, match=r"model: got cosine of shape \[5\], expected \[2\].*; call it on"):
        learner.observe(x, y)
    model = Cached()
    model(x)
    learner = ER(model, memory=30, replay=8, average=0.9)
    learner.observe(x, y)
    assert learner.predict(x).shape == (8,)
