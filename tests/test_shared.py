"""Models that have one module, or one weight, in several places."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from parabolic import CLSER, EWC, OBC, PCL, SGD, VRMCL, LwF
from parabolic.learners.functional import answers_by, call_by, scores_by

CLASSES = 4
LEARNERS = {
    "average": lambda model: SGD(model, average=0.9, lr=0.2),
    "CLS-ER": lambda model: CLSER(model, memory=20, replay=5, lr=0.2),
    "VR-MCL": lambda model: VRMCL(model, memory=20, replay=5),
    "EWC": lambda model: EWC(model, lr=0.2),
    "LwF": lambda model: LwF(model, lr=0.2, average=0.9),
    "tempering": lambda model: PCL(model, memory=20, replay=5, sigma_x=0.3, tempering=True, average=0.9, lr=0.2),
    "OBC": lambda model: OBC(model, memory=20, replay=5, correction=5, average=0.9, lr=0.2),
}


class Once(nn.Module):
    """Has each part in one place, and uses one twice."""

    def __init__(self, twice):
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(3, 5), twice, nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.last(self.twice(self.twice(self.first(x).tanh()).tanh()).tanh())


class OneWeight(nn.Module):
    """The same, but what is used twice has another bias each time."""

    def __init__(self):
        super().__init__()
        self.first, self.twice = nn.Linear(3, 5), nn.Linear(5, 5)
        self.biases, self.last = nn.ParameterList([torch.ones(5)]), nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.last(linear(self.twice(self.first(x).tanh()).tanh(), self.twice.weight, self.biases[0]).tanh())


def layer():
    once = Once(nn.Linear(5, 5))
    return once, nn.Sequential(once.first, nn.Tanh(), once.twice, nn.Tanh(), once.twice, nn.Tanh(), once.last)


def batch_norm():
    once = Once(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)))
    return once, nn.Sequential(once.first, nn.Tanh(), once.twice, nn.Tanh(), once.twice, nn.Tanh(), once.last)


def weight():
    once, other = OneWeight(), nn.Linear(5, 5)
    other.weight, other.bias = once.twice.weight, once.biases[0]
    return once, nn.Sequential(once.first, nn.Tanh(), once.twice, nn.Tanh(), other, nn.Tanh(), once.last)


def made(kind):
    """The same model twice: with all in one place, and with something in several."""
    pair = []
    for which in range(2):
        torch.manual_seed(0)
        pair.append(kind()[which].double())
    return pair


def places(model):
    """All that the modules of a model hold, place by place."""
    return [each for module in model.modules() for each in (*module._parameters.values(), *module._buffers.values())]


def learn(learner, predict):
    g = torch.Generator().manual_seed(1)
    for task in range(2):
        classes = torch.arange(6) % 2 + 2 * task
        batches = [(torch.randn(6, 3, generator=g, dtype=torch.float64), classes) for _ in range(6)]
        learner.start_task(batches)
        for x, y in batches:
            learner.observe(x, y, task)
            if predict:
                learner.predict(x)
        learner.end_task(batches)
    return learner.scores(torch.randn(7, 3, generator=g, dtype=torch.float64))


@pytest.mark.parametrize("kind", [layer, batch_norm, weight])
@pytest.mark.parametrize("name", LEARNERS)
def test_a_model_with_one_thing_in_several_places_learns_as_if_it_were_in_one(name, kind):
    once, several = made(kind)
    before, start = places(several), [each.detach().clone() for each in several.parameters()]
    learner = LEARNERS[name](several)
    ours, theirs = learn(learner, predict=True), learn(LEARNERS[name](once), predict=False)
    assert all(now is then for now, then in zip(places(several), before, strict=True))
    known = {id(each) for group in learner.optim.param_groups for each in group["params"]}
    assert all(id(each) in known for each in several.parameters())
    assert not any(torch.equal(now, then) for now, then in zip(several.parameters(), start, strict=True))
    for a, b in zip((*several.parameters(), *several.buffers()), (*once.parameters(), *once.buffers()), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-14)
    assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("call", [call_by, scores_by, answers_by])
@pytest.mark.parametrize("kind", [layer, batch_norm, weight])
def test_weights_that_are_not_named_are_the_models_own(kind, call):
    once, several = made(kind)
    x, other = torch.randn(6, 3, dtype=torch.float64), torch.randn(5, 5, dtype=torch.float64)
    before = places(several)
    shared = next(name for name, each in several.named_parameters() if each.shape == other.shape)
    found = call({shared: other}, several, x)
    next(each for each in once.parameters() if each.shape == other.shape).data.copy_(other)
    assert torch.allclose(found, once.train(call is not answers_by)(x))
    assert all(now is then for now, then in zip(places(several), before, strict=True))


def test_a_last_layer_that_is_used_before_learns_by_obc():
    torch.manual_seed(0)
    block = nn.Linear(4, 4)
    model, own, start = nn.Sequential(block, nn.Tanh(), block), block.weight, block.weight.detach().clone()
    learner = OBC(model, memory=20, replay=5)
    for _ in range(4):
        learner.observe(torch.randn(6, 4), torch.arange(6) % 4)
    assert block.weight is own
    assert not torch.equal(own, start)


def test_weights_that_the_last_layer_shares_are_features_elsewhere():
    """OBC's surrogate stands for the last layer alone: what has its weights too learns through it."""
    torch.manual_seed(0)
    model, free = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double() for _ in range(2))
    model[0].weight = model[2].weight
    free.load_state_dict(model.state_dict())
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 4
    OBC(model, memory=40, lr=0.5).observe(x, y)  # nothing is recalled yet: the last layer itself learns nothing
    OBC(free, memory=40, lr=0.5).observe(x, y)
    assert not torch.equal(free[0].weight, free[2].weight)
    assert torch.allclose(model[0].weight, free[0].weight)
