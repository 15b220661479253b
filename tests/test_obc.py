"""ER-OBC against its published step, written out slowly."""

import copy
import functools
import math

import pytest
import torch
from slow import reservoir
from torch import nn
from torch.nn.functional import cross_entropy

from parabolic import ER, InputError
from parabolic.learners.obc import OBC
from parabolic.memory import distinct

CLASSES, CAPACITY, REPLAY, CORRECTION = 4, 12, 5, 7


def net(norm=False, seed=0):
    torch.manual_seed(seed)
    layers = [nn.Linear(3, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers).double()


def stream(batches=8, size=4, last=1, seed=1):
    generator = torch.Generator().manual_seed(seed)
    sizes = [size] * (batches - 1) + [last]
    return [
        (
            torch.randn(count, 3, generator=generator, dtype=torch.float64),
            torch.randint(4, (count,), generator=generator),
        )
        for count in sizes
    ]


def assert_same(ours, theirs, atol=1e-10):
    for (name, our_value), their_value in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.allclose(our_value, their_value, atol=atol, rtol=0), name


@torch.no_grad()
def move(module, gradients, velocity, lr, momentum, limit):
    norm = sum(gradient.square().sum() for gradient in gradients).sqrt()
    gradients = [gradient * min(1.0, limit / (float(norm) + 1e-6)) for gradient in gradients]
    for index, (weight, gradient) in enumerate(zip(module.parameters(), gradients, strict=True)):
        velocity[index] = gradient + momentum * velocity.get(index, 0)
        weight -= lr * velocity[index]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("momentum", "limit"), [(0.0, math.inf), (0.9, math.inf), (0.0, 0.1)])
def test_obc_is_the_published_step(norm, momentum, limit):
    """Each of the two steps has gradients of its own, whose norm is limited on its own."""
    lr = 0.1
    ours, theirs = net(norm), net(norm)
    optimizer = functools.partial(torch.optim.SGD, momentum=momentum)
    numbers = {"lr": lr, "memory": CAPACITY, "replay": REPLAY, "correction": CORRECTION, "seed": 7}
    learner = OBC(ours, optimizer=optimizer, clip_norm=None if limit == math.inf else limit, **numbers)
    body, output = theirs[:-1], theirs[-1]
    surrogate = copy.deepcopy(output)
    through = nn.Sequential(body, surrogate)
    generator, remembered, seen, velocities = torch.Generator().manual_seed(7), [], 0, ({}, {})

    def recalled(size):
        rows = distinct(min(size, len(remembered)), len(remembered), generator=generator).tolist()
        return torch.stack([remembered[row][0] for row in rows]), torch.tensor([remembered[row][1] for row in rows])

    for x, y in stream(last=2 if norm else 1):
        first = recalled(REPLAY) if remembered else (x[:0], y[:0])
        loss = cross_entropy(through(torch.cat([x, first[0]])), torch.cat([y, first[1]]))
        move(through, torch.autograd.grad(loss, list(through.parameters())), velocities[0], lr, momentum, limit)
        if remembered:
            second = recalled(CORRECTION)
            with torch.no_grad():
                features = body.eval()(second[0])
            body.train()
            correction = cross_entropy(output(features), second[1])
            move(output, torch.autograd.grad(correction, list(output.parameters())), velocities[1], lr, momentum, limit)
        seen = reservoir(remembered, seen, CAPACITY, list(zip(x, y.tolist(), strict=True)), generator)
        assert learner.observe(x, y).item() == pytest.approx(loss.item(), abs=1e-10)
    assert_same(ours, theirs)
    assert_same(learner.surrogate, surrogate)
    assert learner.past["y"].tolist() == [label for _, label in remembered]


def test_a_layer_that_shares_the_last_ones_weights_belongs_to_the_features():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    model[0].weight = model[2].weight
    learner = OBC(model, memory=CAPACITY, replay=REPLAY)
    nn.init.normal_(learner.surrogate.weight)
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 4
    expected = cross_entropy(learner.surrogate(model[:2](x)), y).item()
    assert learner.loss({"x": x, "y": y}, None).item() == pytest.approx(expected, abs=1e-12)


def test_the_features_learn_as_by_replay_and_the_last_layer_does_not_touch_them():
    """While all that came is recalled, the features and the surrogate are those of experience replay."""
    ours, theirs = net(norm=True), net(norm=True)
    obc, er = (cls(model, lr=0.1, memory=50, replay=50) for cls, model in ((OBC, ours), (ER, theirs)))
    for x, y in stream(last=3):
        obc.observe(x, y)
        er.observe(x, y)
    assert_same(ours[:-1], theirs[:-1], atol=1e-12)
    assert_same(obc.surrogate, theirs[-1], atol=1e-12)
    assert not torch.allclose(ours[-1].weight, theirs[-1].weight, atol=1e-3)


def test_the_last_layer_learns_from_memory_alone():
    model = net()
    learner = OBC(model, lr=0.1, memory=20, replay=5)
    before = copy.deepcopy(model[-1].state_dict())
    learner.observe(*stream()[0])  # nothing is remembered yet
    assert all(torch.equal(value, before[name]) for name, value in model[-1].state_dict().items())
    x, y = stream()[1]
    with_other_labels = copy.deepcopy(learner)
    learner.observe(x, y)
    with_other_labels.observe(
        x, (y + 1) % CLASSES
    )  # other labels change the surrogate, but reach the last layer by features alone
    assert not torch.allclose(learner.surrogate.bias, with_other_labels.surrogate.bias, atol=1e-3)
    assert not torch.equal(model[-1].bias, before["bias"])
    with torch.no_grad():
        drift = (model[-1].bias - with_other_labels.model[-1].bias).abs().max()
    assert drift < 0.1 * (learner.surrogate.bias - with_other_labels.surrogate.bias).abs().max()


def test_the_models_own_layer_predicts():
    model = net(norm=True)
    learner = OBC(model, memory=20, replay=5)
    for x, y in stream(last=2):
        learner.observe(x, y)
    with torch.no_grad():
        assert torch.equal(learner.scores(x), copy.deepcopy(model).eval()(x))


def test_images_batch_norm_single_examples_and_a_bare_layer_are_welcome():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, CLASSES))
    learner = OBC(model, memory=5, replay=2, average=0.9, augment=lambda x, g: x.roll(1, -1))
    for count in (6, 1, 1):
        learner.observe(torch.randint(256, (count, 1, 8, 8), dtype=torch.uint8), torch.randint(CLASSES, (count,)))
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    without_features = OBC(nn.Linear(3, CLASSES, bias=False).double(), memory=5, replay=2)
    for x, y in stream():
        loss = without_features.observe(x, y)
    assert torch.isfinite(loss)


def test_a_model_without_a_last_layer_is_refused():
    with pytest.raises(InputError, match="model: got .*Conv2d.*Linear"):
        OBC(nn.Conv2d(1, 2, 3))


def test_defaults_are_the_published_ones():
    learner = OBC(net())
    assert (learner.lr, learner.replay, learner.correction) == (ER(net()).lr, 32, 50)


@pytest.mark.parametrize(
    ("name", "value"),
    [("correction", 0), ("correction", 2.5), ("lr", 0), ("memory", 0), ("replay", 0), ("replay", 300)],
)
def test_bad_options_are_named(name, value):
    with pytest.raises(InputError, match=f"^{name}: got .*, expected "):
        OBC(net(), **{name: value})


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_on_a_gpu_waits_for_nothing_and_agrees_with_the_cpu():
    models = [net(norm=True), net(norm=True).cuda()]
    learners = [OBC(model, lr=0.1, memory=50, replay=50, average=0.9) for model in models]
    for x, y in stream(last=2):
        learners[0].step(x, y)
        moved = x.cuda(), y.cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            learners[1].step(*moved)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for cpu_value, gpu_value in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        assert torch.allclose(cpu_value, gpu_value.cpu(), atol=1e-8)
