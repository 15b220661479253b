"""SI, online EWC and LwF against their papers' steps, written out slowly."""

import copy
import functools
import math

import numpy as np
import pytest
import slow
import torch
from slow import assert_same, step_on_both
from torch import nn
from torch.nn.functional import conv2d, cross_entropy, pad

from parabolic import MLP, InputError, Stream, train
from parabolic.backbones import ConvNet, ResNet18
from parabolic.engine import computing_in, numerics
from parabolic.learners import find_learner, fisher
from parabolic.learners.ewc import EWC
from parabolic.learners.fisher import squared_gradients
from parabolic.learners.lwf import LwF
from parabolic.learners.si import SI
from parabolic.states import same_state

CLASSES = 6

net = functools.partial(slow.net, classes=CLASSES)


def tasks(norm=False, seed=1):
    """Three tasks of two classes; the last batch is short, and a single example where the model allows it."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            (
                torch.randn(size, 3, generator=generator, dtype=torch.float64) + label,
                label + torch.randint(2, (size,), generator=generator),
            )
            for size in (5, 5, 5, 2 if norm else 1)
        ]
        for label in (0, 2, 4)
    ]


def learn_tasks(learner, stream):
    for index, batches in enumerate(stream):
        learner.start_task(batches)
        for x, y in batches:
            learner.observe(x, y, index)
        learner.end_task(batches)


def copy_weights(model):
    return [weight.detach().clone() for weight in model.parameters()]


@torch.no_grad()
def descend(model, gradients, lr):
    for weight, gradient in zip(model.parameters(), gradients, strict=True):
        weight -= lr * gradient


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("clip", "c"), [(1.0, 3.0), (0.05, 3.0), (0.05, 3000.0), (None, 3.0)])
@pytest.mark.parametrize("variant", ["paper", "reference"])
def test_si_is_the_published_step(norm, clip, c, variant):
    lr, xi, negative = 0.2, 0.1, False
    ours, theirs = net(norm), net(norm)
    learner = SI(ours, lr=lr, strength=c, damping=xi, clip=clip, variant=variant)
    learn_tasks(learner, tasks(norm))

    anchor, strength = copy_weights(theirs), [torch.zeros_like(w) for w in theirs.parameters()]
    for batches in tasks(norm):
        omega = [torch.zeros_like(w) for w in theirs.parameters()]
        for x, y in batches:
            weights = list(theirs.parameters())
            loss_gradients = torch.autograd.grad(cross_entropy(theirs(x), y), weights)
            totals = []
            for g, w, a, s in zip(loss_gradients, copy_weights(theirs), anchor, strength, strict=True):
                total = g + c * s * 2 * (w - a)
                totals.append(total if clip is None else torch.minimum(torch.maximum(total, -g.new_tensor(clip)),
                                                                      g.new_tensor(clip)))  # fmt: skip
            before = copy_weights(theirs)
            descend(theirs, totals, lr)
            if variant == "paper":
                omega = [
                    o - g * (w - b)
                    for o, g, w, b in zip(omega, loss_gradients, copy_weights(theirs), before, strict=True)
                ]
            else:
                omega = [o + lr * g * g for o, g in zip(omega, totals, strict=True)]
        strength = [
            s + o / ((w - a) ** 2 + xi)
            for s, o, w, a in zip(strength, omega, copy_weights(theirs), anchor, strict=True)
        ]
        negative |= any((s < 0).any() for s in strength)
        strength = [s.relu() for s in strength]
        anchor = copy_weights(theirs)
    assert_same(ours, theirs)
    assert torch.allclose(learner.importance, torch.cat([s.flatten() for s in strength]), atol=1e-10)
    assert learner.importance.min() >= 0
    assert negative == (variant == "paper" and c > 3)  # then the penalty moves weights against their gradients


def test_si_attributes_the_fall_of_the_loss_to_the_weights():
    """Along a gradient flow ω sums to the loss lost; with steps of size lr it does so up to O(lr)."""
    (x, y), *_ = tasks()[0]
    misses = []
    for lr in (0.02, 0.01):
        model = net()
        learner = SI(model, lr=lr, clip=None)
        first_loss = cross_entropy(model(x), y)
        for _ in range(round(1 / lr)):
            learner.observe(x, y, 0)
        fall = (first_loss - cross_entropy(model(x), y)).item()
        assert fall > 0.3
        misses.append(abs(learner.path.sum().item() - fall))
    assert misses[1] < 0.02 * fall
    assert misses[1] == pytest.approx(misses[0] / 2, rel=0.1)


def test_si_follows_what_the_optimizer_did_not_what_it_was_told():
    model = net()
    learner = SI(model, lr=0.01, optimizer=functools.partial(torch.optim.SGD, momentum=0.9))
    expected = [torch.zeros_like(w) for w in model.parameters()]
    for x, y in tasks()[0]:
        gradients = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
        before = copy_weights(model)
        learner.observe(x, y, 0)
        expected = [
            o + g * (b - w) for o, g, b, w in zip(expected, gradients, before, copy_weights(model), strict=True)
        ]
    assert torch.allclose(learner.path, torch.cat([o.flatten() for o in expected]), atol=1e-12)


def slow_fisher(model, batches, variant="paper"):
    """The mean of squared gradients of −log p(label), one example at a time; in public code each counts by p(label)."""
    model = copy.deepcopy(model).eval()
    total, count = [torch.zeros_like(w) for w in model.parameters()], 0
    for x, y in batches:
        for example, label in zip(x, y.tolist(), strict=True):
            surprise = -model(example[None]).log_softmax(-1)[0, label]
            gradients = torch.autograd.grad(surprise, list(model.parameters()))
            share = surprise.neg().exp().item() if variant == "reference" else 1.0
            total, count = [t + share * g**2 for t, g in zip(total, gradients, strict=True)], count + 1
    return [t / count for t in total]


@pytest.mark.parametrize("variant", ["paper", "reference"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("gamma", [1.0, 0.6, 0.0])
def test_ewc_is_the_published_step(norm, gamma, variant):
    lr, strength = 0.1, 4.0
    ours, theirs = net(norm), net(norm)
    learner = EWC(ours, lr=lr, strength=strength, decay=gamma, variant=variant)
    learn_tasks(learner, tasks(norm))

    anchor, fisher = copy_weights(theirs), [torch.zeros_like(w) for w in theirs.parameters()]
    for batches in tasks(norm):
        for x, y in batches:
            gradients = torch.autograd.grad(cross_entropy(theirs(x), y), list(theirs.parameters()))
            pulls = [2 * strength * f * (w - a) for f, w, a in zip(fisher, copy_weights(theirs), anchor, strict=True)]
            descend(theirs, [g + p for g, p in zip(gradients, pulls, strict=True)], lr)
        fisher = [gamma * f + new for f, new in zip(fisher, slow_fisher(theirs, batches, variant), strict=True)]
        anchor = copy_weights(theirs)
    assert_same(ours, theirs)
    assert torch.allclose(learner.importance, torch.cat([f.flatten() for f in fisher]), atol=1e-10)


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
@pytest.mark.parametrize("sizes", [(5, 4, 1), (10,), (1,) * 10])
@pytest.mark.parametrize("variant", ["paper", "reference"])
def test_ewcs_fisher_information_is_the_loop_over_examples(chunk, sizes, variant):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(3 * 16, CLASSES)
    ).double()
    model(torch.randn(20, 1, 6, 6, dtype=torch.float64))  # statistics that are not those of an example
    x, y = torch.randn(10, 1, 6, 6, dtype=torch.float64), torch.randint(CLASSES, (10,))
    batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
    learner = EWC(model, chunk=chunk, variant=variant, augment=lambda x, generator: x + 1e6)
    before = copy.deepcopy(model.state_dict())
    expected = torch.cat([f.flatten() for f in slow_fisher(model, batches, variant)])
    assert torch.allclose(learner.fisher(batches), expected, atol=1e-12)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Reshaped(nn.Module):
    """Calls `inner` on a part of each example after the other, as if each were an example."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class FilledUp(nn.Conv2d):
    """A convolution of images that are given more channels, all zero."""

    def forward(self, x):
        x, weight = (
            pad(tensor, (0, 0, 0, 0, 0, 3), **options) for tensor, options in ((x, {}), (self.weight, {"value": 0.5}))
        )
        return conv2d(x, weight, self.bias, self.stride, self.padding)


class Tied(nn.Module):
    """Uses the same weight twice: by the same layer, or by two that share it."""

    def __init__(self, shared):
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5) if shared else None
        if shared:
            self.second.weight = self.first.weight

    def forward(self, x):
        return (self.second or self.first)(torch.tanh(self.first(x)))


class Scaled(nn.Module):
    """A weight that is no layer's."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 5))

    def forward(self, x):
        return self.scale * x


def images(*layers):
    return lambda: (nn.Sequential(*(layer() for layer in layers), nn.Flatten(), nn.LazyLinear(4)), (4, 7, 6))


def rows(*layers):
    return lambda: (nn.Sequential(*(layer() for layer in layers), nn.Flatten(), nn.LazyLinear(4)), (3, 5))


def partly_frozen():
    model = MLP((5,), 4, hidden=(6, 6))
    model[1].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    return model, (5,)


KNOWN = {
    "resnet18": lambda: (ResNet18((3, 8, 8), 4, width=3), (3, 8, 8)),
    "convnet": lambda: (ConvNet((1, 9, 9), 4, width=3), (1, 9, 9)),
    "mlp": lambda: (MLP((1, 3, 3), 4, hidden=(6,)), (1, 3, 3)),
    "stride, padding, dilation, groups": images(
        lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2),
        nn.Tanh,
        lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6),
    ),
    "padding by name": images(
        lambda: nn.Conv2d(4, 4, (3, 2), padding="same", dilation=(1, 3)), lambda: nn.Conv2d(4, 2, 2, padding="valid")
    ),
    "padding round the edge": images(lambda: nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular")),
    "a kernel as large as the image": images(lambda: nn.Conv2d(4, 3, (7, 6))),
    "more channels": images(lambda: FilledUp(4, 3, 3, padding=1, stride=2)),
    "inputs overwritten by ReLU": images(
        lambda: nn.Conv2d(4, 3, 3), lambda: nn.BatchNorm2d(3), lambda: nn.ReLU(inplace=True)
    ),
    "group norm": images(lambda: nn.GroupNorm(2, 4), nn.Tanh),
    "layer norm of an image": images(lambda: nn.LayerNorm((7, 6)), nn.Tanh),
    "several places": rows(lambda: nn.Linear(5, 6), lambda: nn.LayerNorm(6), nn.Tanh, lambda: nn.Linear(6, 2)),
    "one dimension": rows(lambda: nn.Conv1d(3, 4, 3, stride=2), lambda: nn.BatchNorm1d(4), nn.Tanh),
    "three dimensions": images(lambda: nn.Unflatten(1, (2, 2)), lambda: nn.Conv3d(2, 3, (2, 3, 3), bias=False)),
    "partly frozen": partly_frozen,
}


class Recurrent(nn.GRU):
    def forward(self, x):
        return super().forward(x)[0]


UNKNOWN = {
    "a layer called twice": rows(lambda: Tied(shared=False)),
    "a weight shared by two layers": rows(lambda: Tied(shared=True)),
    "a weight that is no layer's": rows(Scaled),
    "a layer of another kind": rows(lambda: nn.Linear(5, 4), nn.PReLU),
    "a weight made of others": rows(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 4))),
    "examples taken apart": rows(lambda: Reshaped(nn.Linear(5, 4))),
    "an operation that vmap has no rule for": rows(lambda: Recurrent(5, 4, batch_first=True)),
    "statistics of a batch": images(lambda: nn.BatchNorm2d(4, track_running_stats=False), nn.Tanh),
}


def check_squares(make_model, **placement):
    """Compare with gradients of one example at a time; returns the sizes of the batches that the model saw."""
    torch.manual_seed(0)
    model, shape = make_model()
    model.double()(torch.randn(11, *shape, dtype=torch.float64))  # statistics that are not those of these examples
    model.eval().to(**placement)
    x, y = torch.randn(9, *shape, dtype=torch.float64).to(**placement), torch.randint(4, (9,))
    expected = [torch.zeros_like(weight) for weight in model.parameters() if weight.requires_grad]
    for example, label in zip(x, y, strict=True):
        loss = cross_entropy(model(example[None]), label[None])
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        expected = [
            total + gradient**2 for total, gradient in zip(expected, torch.autograd.grad(loss, weights), strict=True)
        ]
    batch_sizes = []
    model.register_forward_pre_hook(lambda _, inputs: batch_sizes.append(len(inputs[0])))
    for ours, theirs in zip(squared_gradients(model, x, y), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-14)
    return batch_sizes


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("room", [1, 200, 2**24])
@pytest.mark.parametrize("case", KNOWN)
def test_squared_gradients_of_layers_that_are_known_take_one_pass(case, room, monkeypatch):
    monkeypatch.setattr(fisher, "ROOM", (room, room))
    assert check_squares(KNOWN[case]) == [9, 2]  # two examples tell what is an example


@pytest.mark.parametrize("case", ["resnet18", "stride, padding, dilation, groups", "group norm"])
def test_squared_gradients_of_channels_last_images(case):
    assert check_squares(KNOWN[case], memory_format=torch.channels_last) == [9, 2]


@pytest.mark.parametrize("room", [1, 2**24])
@pytest.mark.parametrize("case", UNKNOWN)
def test_squared_gradients_of_other_models_are_those_of_single_examples(case, room, monkeypatch):
    monkeypatch.setattr(fisher, "ROOM", (room, room))
    assert check_squares(UNKNOWN[case])[0:2] == [9, 1]


class Turned(nn.Module):
    """Calls `inner` with the places of examples first, as recurrent networks do, or on as many rows of its own."""

    def __init__(self, inner, own=None):
        super().__init__()
        self.inner, self.own = inner, own

    def forward(self, x):
        if self.own is not None:
            return torch.einsum("pd,npd->nd", self.inner(self.own), x)
        return self.inner(x.transpose(0, 1)).tanh().mean(0)


LOOK_ALIKE = {
    "places first": lambda: nn.Sequential(Turned(nn.Linear(5, 6)), nn.Linear(6, 4)),
    "a norm, places first": lambda: nn.Sequential(Turned(nn.LayerNorm(5)), nn.Linear(5, 4)),
    "rows of its own": lambda: nn.Sequential(Turned(nn.Linear(3, 5), torch.randn(9, 3).double()), nn.Linear(5, 4)),
}


@pytest.mark.parametrize("case", LOOK_ALIKE)
def test_as_many_of_something_else_as_there_are_examples_are_not_taken_for_these(case):
    assert check_squares(lambda: (LOOK_ALIKE[case](), (9, 5)))[0:3] == [9, 2, 1]


@pytest.mark.parametrize("count", [1, 2])
def test_squared_gradients_of_one_example_and_of_two(count):
    torch.manual_seed(0)
    for model in (Turned(nn.Linear(5, 4)).double(), nn.Sequential(nn.Linear(5, 4), nn.Flatten()).double()):
        x, y = torch.randn(count, count, 5, dtype=torch.float64), torch.arange(count)
        weights = list(model.parameters())
        single_gradients = [
            torch.autograd.grad(cross_entropy(model(x[row : row + 1]), y[row : row + 1]), weights)
            for row in range(count)
        ]
        for ours, *theirs in zip(squared_gradients(model, x, y), *single_gradients, strict=True):
            assert torch.allclose(ours, sum(gradient**2 for gradient in theirs))


class InBfloat16(nn.Module):
    """A model that computes in bfloat16 inside."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x).float()


def test_squared_gradients_of_a_model_that_computes_in_bfloat16_are_summed_in_float32(monkeypatch):
    torch.manual_seed(0)
    model = ResNet18((3, 8, 8), 4, width=4)
    model(torch.randn(50, 3, 8, 8))
    half_model, dtypes = InBfloat16(model.eval()), []
    model.blocks[0].conv1.register_forward_hook(lambda _, x, y: dtypes.append(y.dtype))
    x, y = torch.randn(600, 3, 8, 8), torch.randint(4, (600,))
    exact = squared_gradients(model, x, y)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # not every processor has what it needs for bfloat16
    in_half = squared_gradients(half_model, x, y)
    parts_of_half = [squared_gradients(half_model, *batch) for batch in zip(x.split(200), y.split(200), strict=True)]
    assert dtypes == [torch.float32] * 2 + [torch.bfloat16] * 8
    for exact_square, rough_square, *parts in zip(exact, in_half, *parts_of_half, strict=True):
        assert rough_square.dtype == torch.float32
        assert (exact_square - rough_square).norm() < 0.1 * exact_square.norm()  # each number has 8 bits
        assert torch.allclose(
            rough_square, sum(parts), rtol=1e-3, atol=1e-6 * rough_square.max()
        )  # 600 squares in bfloat16 would lose more


@pytest.mark.parametrize("cls", [SI, EWC])
def test_without_strength_it_is_plain_descent_and_the_more_the_nearer_it_stays(cls):
    first, *rest = tasks()
    distances = []
    for strength in (0, 1, 10):
        model, plain = net(), net()
        learner = cls(model, lr=0.03, strength=strength, **({"damping": 0.01} if cls is SI else {"decay": 0.5}))
        learn_tasks(learner, [first])
        anchor = learner.anchor.clone()
        learn_tasks(learner, rest)
        if strength == 0:
            for x, y in [batch for batches in (first, *rest) for batch in batches]:
                gradients = torch.autograd.grad(cross_entropy(plain(x), y), list(plain.parameters()))
                descend(plain, [g.clamp(-1, 1) if cls is SI else g for g in gradients], 0.03)
            assert_same(model, plain)
        distances.append((learner.anchor - anchor).norm().item())
    assert distances[0] > distances[1] > distances[2]


def slow_lwf(model, stream, lr, alpha, temperature, warmup, decay):
    """Learning without forgetting, class by class and with powers of probabilities as the paper has them."""
    head, seen = model[-1], []
    for index, batches in enumerate(stream):
        old = list(seen)
        new = sorted({label for _, y in batches for label in y.tolist()} - set(old))
        seen = sorted(old + new)
        model.eval()
        for _ in range(warmup if index else 0):
            for x, y in batches:
                with torch.no_grad():
                    features = model[:-1](x)
                    probabilities = (features @ head.weight[new].T + head.bias[new]).softmax(-1)
                    for column, label in enumerate(new):
                        error = (
                            probabilities[:, column] - (y == label).double()
                        )  # the gradient of the mean cross-entropy, by hand
                        head.weight[label] -= lr * (error[:, None] * features).mean(0)
                        head.bias[label] -= lr * error.mean()
        before = copy.deepcopy(model)
        model.train()
        for x, y in batches:
            scores, total = model(x), 0.0
            recorded = before(x).detach()
            for row, label in enumerate(y.tolist()):
                total = total - scores[row, seen].log_softmax(-1)[seen.index(label)]
                if old:
                    was, now = (logits[row, old].softmax(-1) ** (1 / temperature) for logits in (recorded, scores))
                    total = total - alpha * (was / was.sum() * (now / now.sum()).log()).sum()
            gradients = torch.autograd.grad(total / len(y), list(model.parameters()))
            descend(model, [g + decay * w for g, w in zip(gradients, copy_weights(model), strict=True)], lr)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize(("alpha", "temperature"), [(3.0, 2.0), (0.5, 1.0)])
def test_lwf_is_the_published_step(norm, warmup, alpha, temperature):
    ours, theirs = net(norm), net(norm)
    learn_tasks(LwF(ours, lr=0.1, alpha=alpha, temperature=temperature, warmup=warmup, weight_decay=0.01), tasks(norm))
    slow_lwf(theirs, tasks(norm), 0.1, alpha, temperature, warmup, 0.01)
    assert_same(ours, theirs)


def test_lwf_warms_up_the_new_classes_alone():
    model, stream = net(norm=True), tasks(norm=True)
    learner = LwF(model, lr=0.1)
    learn_tasks(learner, stream[:1])
    before = copy.deepcopy(model.state_dict())
    learner.start_task(stream[1])
    after = model.state_dict()
    assert learner.old.tolist() == [True] * 2 + [False] * 4
    assert learner.seen.tolist() == [True] * 4 + [False] * 2
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {"3.weight", "3.bias"}
    rows = (after["3.weight"] != before["3.weight"]).any(1) | (after["3.bias"] != before["3.bias"])
    assert rows.tolist() == [False, False, True, True, False, False]

    def loss(state):
        scores = torch.cat([torch.func.functional_call(model.eval(), state, (x,)) for x, _ in stream[1]])
        return cross_entropy(scores[:, 2:4], torch.cat([y for _, y in stream[1]]) - 2)

    assert loss(after) < loss(before)


def test_lwf_warms_up_at_the_rate_that_the_optimizer_has():
    """As a schedule has set it, and not as it was at first."""
    models, stream = (net(), net()), tasks()
    learners = [LwF(model, lr=lr, alpha=0.0) for model, lr in zip(models, (0.5, 0.01), strict=True)]
    for learner in learners:
        for group in learner.optim.param_groups:
            group["lr"] = 0.01
        learn_tasks(learner, stream)
    assert_same(*models)


def test_lwf_warms_up_batch_by_batch_with_the_numbers_drawn_for_each():
    """Old and new classes in every batch, and some without a new one: only new ones are augmented and learned."""
    draws = torch.Generator().manual_seed(3)
    first = [(torch.randn(5, 3, generator=draws, dtype=torch.float64), torch.randint(2, (5,), generator=draws))]
    second = [
        (torch.randn(size, 3, generator=draws, dtype=torch.float64), torch.randint(classes, (size,), generator=draws))
        for size, classes in [(300, 5), (4, 1), (300, 5), (1, 5), (7, 5)]
    ]

    def augment(x, generator):
        return x + torch.rand(x.shape, generator=generator, dtype=x.dtype)

    model = net(norm=True)
    learner = LwF(model, lr=0.1, augment=augment, warmup=2, seed=5)
    learn_tasks(learner, [first])
    theirs, generator = copy.deepcopy(model).eval(), torch.Generator()
    generator.set_state(learner.generator.get_state())
    learner.start_task(second)
    head, new = theirs[-1], [2, 3, 4]
    for x, y in second * 2:
        x, y = x[y > 1], y[y > 1]
        if len(y):
            features = theirs[:-1](augment(x, generator)).detach()
            loss = cross_entropy(features @ head.weight[new].T + head.bias[new], y - 2)
            descend(head, torch.autograd.grad(loss, list(head.parameters())), 0.1)
    assert_same(model, theirs)
    assert torch.equal(learner.generator.get_state(), generator.get_state())


def test_lwf_takes_tasks_that_bring_nothing_new_and_tasks_of_old_and_new():
    stream = tasks()
    mixed = [
        (torch.cat([old_x, new_x]), torch.cat([old_y, new_y]))
        for (old_x, old_y), (new_x, new_y) in zip(stream[0], stream[1], strict=True)
    ]
    model = net()
    learner = LwF(model, lr=0.1)
    learn_tasks(learner, [stream[0], stream[0], mixed])
    assert learner.old.tolist() == [True] * 2 + [False] * 4
    assert all(torch.isfinite(weight).all() for weight in model.parameters())


def test_the_start_of_a_task_that_was_interrupted_may_be_repeated():
    first, second = tasks()[:2]

    class Interrupted:
        """Batches, of which only the first look reaches the end."""

        looks = 0

        def __iter__(self):
            self.looks += 1
            yield second[0]
            if self.looks > 1:
                raise KeyboardInterrupt
            yield from second[1:]

    learner, expected = (LwF(net(), lr=0.1) for _ in range(2))
    for each in (learner, expected):
        learn_tasks(each, [first])
    with pytest.raises(KeyboardInterrupt):
        learner.start_task(Interrupted())
    for each in (learner, expected):
        each.start_task(second)
    assert (learner.tasks, learner.old.tolist()) == (expected.tasks, expected.old.tolist())
    assert torch.equal(learner.seen, expected.seen)
    assert torch.equal(learner.head.weight, expected.head.weight)  # nothing had been warmed up yet


def test_lwf_says_when_it_was_not_told_of_a_start():
    with pytest.raises(InputError, match="start_task: got a batch before any task"):
        LwF(net()).observe(*tasks()[0][0], 0)


def test_lwf_needs_a_last_layer_that_gives_the_scores():
    with pytest.raises(InputError, match="model: got .*Conv2d.*Linear"):
        LwF(nn.Conv2d(1, 2, 3))
    no_linear_head = nn.Sequential(
        nn.Linear(3, 4), nn.Unflatten(1, (4, 1)), nn.Conv1d(4, CLASSES, 1), nn.Flatten()
    ).double()
    with pytest.raises(InputError, match="model: got .*, expected .*Linear gives the scores"):
        learn_tasks(LwF(no_linear_head), tasks())


@pytest.mark.parametrize("cls", [SI, EWC, LwF])
def test_images_batch_norm_and_single_examples_are_welcome(cls):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, CLASSES))
    learner = cls(model, average=0.9, augment=lambda x, g: x.roll(1, -1))
    generator = torch.Generator().manual_seed(0)
    stream = [
        [
            (torch.randint(256, (n, 1, 8, 8), generator=generator, dtype=torch.uint8), torch.full((n,), label))
            for n in (6, 1)
        ]
        for label in range(3)
    ]
    learn_tasks(learner, stream)
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    assert learner.predict(stream[0][0][0]).shape == (6,)


@pytest.mark.parametrize("cls", [SI, EWC, LwF])
def test_a_stream_without_tasks_is_refused(cls):
    stream = Stream.from_arrays(torch.randn(60, 3), torch.arange(60) % 6, tasks=3, boundaries=False)
    with pytest.raises(InputError, match=f"learner: got '{cls.name}', expected one that needs no tasks"):
        train(cls(net().float()), stream)


@pytest.mark.parametrize(("name", "moment"), [("lwf", "start"), ("vrmcl", "start"), ("ewc", "end"), ("agem", "end")])
@pytest.mark.parametrize(
    ("bad", "message"),
    [((torch.zeros(2, 3), torch.tensor([0, 9])), "y: got 9, expected labels from 0 to 5"),
     ((torch.full((2, 3), math.nan), torch.tensor([0, 1])), "x: got 6 values"),
     ((torch.zeros(2, 4), torch.tensor([0, 1])), "x: got .*, expected examples as in the first batch"),
     ((torch.zeros(2, 3, dtype=torch.uint8), torch.tensor([0, 1])), "x: got .*uint8, expected"),
     ((torch.zeros(2, 3), torch.tensor([0])), "y: got .*, expected one whole number for each of the 2"),
     ((torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)), "x: got .*, expected a batch of at least one"),
     ((torch.zeros(2, 3), torch.tensor(1)), "y: got .*, expected one whole number for each of the 2"),
     (("words", torch.tensor([0, 1])), "x: got .*, expected a tensor")],
)  # fmt: skip
def test_a_bad_batch_of_a_task_is_refused_for_what_it_is(name, moment, bad, message):
    learner = find_learner(name)(net().float())
    good = (torch.zeros(5, 3), torch.arange(5))
    with pytest.raises(InputError, match=f"^{message}"):
        getattr(learner, f"{moment}_task")([good, good, bad, good])


@pytest.mark.parametrize("name", ["lwf", "vrmcl"])
def test_a_start_without_batches_is_refused_and_changes_nothing(name):
    learner, stream = find_learner(name)(net()), tasks()
    learn_tasks(learner, stream[:1])
    before = copy.deepcopy(learner.state_dict())
    with pytest.raises(
        InputError, match=f"^start_task: got no batches, expected .*; {name} takes the classes of the task from them"
    ):
        learner.start_task([])
    assert same_state(learner.state_dict(), before)


def test_lwf_refuses_batches_that_come_only_once():
    learner, stream = LwF(net()), tasks()
    learn_tasks(learner, stream[:1])
    before = copy.deepcopy(learner.state_dict())
    with pytest.raises(InputError, match=r"^start_task: got <class 'list_iterator'>, expected batches that can be"):
        learner.start_task(iter(stream[1]))  # which would warm up nothing
    assert same_state(learner.state_dict(), before)
    LwF(net(), warmup=0).start_task(iter(stream[1]))


@pytest.mark.parametrize(("name", "moment"), [("lwf", "start"), ("vrmcl", "start"), ("ewc", "end"), ("agem", "end")])
def test_a_task_may_come_as_arrays(name, moment):
    learner = find_learner(name)(net().float())
    getattr(learner, f"{moment}_task")([(np.zeros((n, 3), dtype=np.float32), list(range(n))) for n in (3, 3, 1)])
    assert learner.classes == CLASSES


def test_defaults_are_the_published_ones():
    si, ewc, lwf = SI(net()), EWC(net()), LwF(net())
    assert (si.lr, si.strength, si.damping, si.clip) == (0.03, 0.5, 1.0, 1.0)
    assert (ewc.lr, ewc.strength, ewc.decay) == (0.03, 10.0, 1.0)
    assert (lwf.lr, lwf.alpha, lwf.temperature, lwf.weight_decay) == (0.01, 3.0, 2.0, 5e-4)
    assert lwf.optim.param_groups[0]["weight_decay"] == 5e-4
    with_own_decay = LwF(net(), optimizer=functools.partial(torch.optim.SGD, weight_decay=0.3))
    assert with_own_decay.optim.param_groups[0]["weight_decay"] == 0.3


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [(SI, "strength", -1), (SI, "damping", 0), (SI, "clip", 0), (SI, "clip", math.inf), (SI, "lr", 0),
     (EWC, "strength", -0.1), (EWC, "strength", math.nan), (EWC, "decay", 1.1), (EWC, "decay", -0.1),
     (EWC, "chunk", 0), (EWC, "chunk", 1.5), (LwF, "alpha", -1), (LwF, "temperature", 0), (LwF, "warmup", -1),
     (LwF, "weight_decay", -1), (LwF, "alpha", "much")],
)  # fmt: skip
def test_bad_options_are_named(cls, name, value):
    with pytest.raises(InputError, match=f"^{name}: got .*, expected "):
        cls(net(), **{name: value})


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("cls", [SI, EWC, LwF])
def test_a_step_on_a_gpu_waits_for_nothing_and_agrees_with_the_cpu(cls):
    models = [net(norm=True), net(norm=True).cuda()]
    learners = [cls(model, lr=0.1, average=0.9) for model in models]
    step_on_both(learners, tasks(norm=True))
    assert_same(*models, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_squared_gradients_on_a_gpu_take_one_pass_and_agree_with_the_cpu(precision):
    torch.manual_seed(0)
    model = ResNet18((3, 8, 8), 4, width=8)
    model(torch.randn(50, 3, 8, 8))
    x, y, batch_sizes = torch.randn(20, 3, 8, 8), torch.randint(4, (20,)), []
    expected = squared_gradients(model.eval(), x, y)
    gpu_model = computing_in(model.cuda(), precision, channels_last=True)
    gpu_model.register_forward_pre_hook(lambda _, inputs: batch_sizes.append(len(inputs[0])))
    with numerics(precision):
        ours = squared_gradients(gpu_model, x.cuda(), y.cuda())
    assert batch_sizes == [20, 2]  # and not example by example, as where our operations on a GPU would not be known
    for cpu_square, gpu_square in zip(expected, ours, strict=True):
        assert (cpu_square - gpu_square.cpu()).norm() < (1e-3 if precision == "fp32" else 0.1) * cpu_square.norm()
