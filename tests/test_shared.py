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


def both_models(make_both):
    """The same model twice: with all in one place, and with something in several."""
    pair = []
    for index in range(2):
        torch.manual_seed(0)
        pair.append(make_both()[index].double())
    return pair


def held_tensors(model):
    """All that the modules of a model hold, place by place."""
    return [
        tensor for module in model.modules() for tensor in (*module._parameters.values(), *module._buffers.values())
    ]


def learn(learner, predict):
    generator = torch.Generator().manual_seed(1)
    for task in range(2):
        classes = torch.arange(6) % 2 + 2 * task
        batches = [(torch.randn(6, 3, generator=generator, dtype=torch.float64), classes) for _ in range(6)]
        learner.start_task(batches)
        for x, y in batches:
            learner.observe(x, y, task)
            if predict:
                learner.predict(x)
        learner.end_task(batches)
    return learner.scores(torch.randn(7, 3, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize("make_both", [layer, batch_norm, weight])
@pytest.mark.parametrize("name", LEARNERS)
def test_a_model_with_one_thing_in_several_places_learns_as_if_it_were_in_one(name, make_both):
    once, several = both_models(make_both)
    before, start = held_tensors(several), [parameter.detach().clone() for parameter in several.parameters()]
    learner = LEARNERS[name](several)
    ours, theirs = learn(learner, predict=True), learn(LEARNERS[name](once), predict=False)
    assert all(tensor is tensor_before for tensor, tensor_before in zip(held_tensors(several), before, strict=True))
    optimised = {id(parameter) for group in learner.optim.param_groups for parameter in group["params"]}
    assert all(id(parameter) in optimised for parameter in several.parameters())
    assert not any(
        torch.equal(tensor, tensor_before) for tensor, tensor_before in zip(several.parameters(), start, strict=True)
    )
    for shared_value, plain_value in zip(
        (*several.parameters(), *several.buffers()), (*once.parameters(), *once.buffers()), strict=True
    ):
        assert torch.allclose(shared_value, plain_value, rtol=1e-10, atol=1e-14)
    assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("call", [call_by, scores_by, answers_by])
@pytest.mark.parametrize("make_both", [layer, batch_norm, weight])
def test_weights_that_are_not_named_are_the_models_own(make_both, call):
    once, several = both_models(make_both)
    x, other_weight = torch.randn(6, 3, dtype=torch.float64), torch.randn(5, 5, dtype=torch.float64)
    before = held_tensors(several)
    shared = next(name for name, parameter in several.named_parameters() if parameter.shape == other_weight.shape)
    result = call({shared: other_weight}, several, x)
    next(parameter for parameter in once.parameters() if parameter.shape == other_weight.shape).data.copy_(other_weight)
    assert torch.allclose(result, once.train(call is not answers_by)(x))
    assert all(tensor is tensor_before for tensor, tensor_before in zip(held_tensors(several), before, strict=True))


def test_a_last_layer_that_is_used_before_learns_by_obc():
    torch.manual_seed(0)
    block = nn.Linear(4, 4)
    model, weight, start = nn.Sequential(block, nn.Tanh(), block), block.weight, block.weight.detach().clone()
    learner = OBC(model, memory=20, replay=5)
    for _ in range(4):
        learner.observe(torch.randn(6, 4), torch.arange(6) % 4)
    assert block.weight is weight
    assert not torch.equal(weight, start)


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
