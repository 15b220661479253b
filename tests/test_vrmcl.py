"""VR-MCL against its published step, written out slowly, and its hypergradient against finite differences."""

import copy
import itertools
import runpy
from pathlib import Path

import pytest
import torch
from slow import SlowReplay, mean, net, same_weights, surprise, tasks
from torch import nn

from parabolic import InputError
from parabolic.learners.functional import scores_by
from parabolic.learners.vrmcl import VRMCL

COMMON = {"memory": 12, "replay": 6, "seed": 7, "lr": 0.4}
NUMBERS = {"momentum": 0.3, "rate": 0.2, "rate_lr": 0.5, "clip": 0.4, "chunk": 2}


@pytest.fixture
def published():
    """The learner of the benchmark that compares ours with its authors' code."""
    path = Path(__file__).parents[1] / "benchmarks" / "vrmcl.py"
    return runpy.run_path(str(path))["Published"]


class SlowVRMCL(SlowReplay):
    """The published step for a network of two layers, all of whose weights are passed by hand."""

    def __init__(self, model, *, momentum, rate, rate_lr, clip, chunk, variant, **common):
        super().__init__(model, **common)
        self.momentum, self.rate_lr, self.clip, self.chunk, self.variant = momentum, rate_lr, clip, chunk, variant
        self.weights = [weight.detach().clone() for weight in model.parameters()]
        self.rates = [torch.full_like(weight, rate) for weight in self.weights]
        self.previous = self.m = None
        self.earlier, self.current = set(), set()

    def start_task(self, classes):
        self.earlier, self.current = self.earlier | self.current, classes

    @staticmethod
    def answer(weights, x):
        w1, b1, w2, b2 = weights
        return w2 @ torch.tanh(w1 @ x + b1) + b2

    def among(self, classes, weights, x, label):
        """The cross-entropy of one example when only some classes compete."""
        chosen = sorted(classes)
        return surprise(self.answer(weights, x)[chosen], chosen.index(label))

    def query(self, weights, new, recalled):
        if self.variant == "paper":
            return mean(surprise(self.answer(weights, x), label) for x, label in new + recalled)
        losses = [self.among({0, 1, 2, 3} - self.earlier, weights, x, label) for x, label in new]
        losses += [0.5 * self.among(self.earlier | self.current, weights, x, label) for x, label in recalled]
        return mean(losses)

    def ahead(self, weights, rates, new, recalled):
        steps = -(-len(new) // self.chunk)
        bounds = [0]
        for number in range(steps):  # parts as even as can be, the longer ones first
            bounds.append(bounds[-1] + len(new) // steps + (number < len(new) % steps))
        losses = []
        for first, last in itertools.pairwise(bounds):
            inner = mean(self.among(self.current, weights, x, label) for x, label in new[first:last])
            gradients = torch.autograd.grad(inner, weights, create_graph=True)
            weights = [
                w - a * g.clamp(-self.clip, self.clip) for w, a, g in zip(weights, rates, gradients, strict=True)
            ]
            losses.append(self.query(weights, new, recalled))
        return mean(losses)

    def slopes(self, weights, new, recalled):
        weights, rates = ([tensor.clone().requires_grad_() for tensor in tensors] for tensors in (weights, self.rates))
        loss = self.ahead(weights, rates, new, recalled)
        gradients = torch.autograd.grad(loss, [*weights, *rates])
        return loss.item(), gradients[: len(weights)], gradients[len(weights) :]

    def clipped(self, gradients):
        norm = sum((tensor**2).sum() for tensor in gradients).sqrt()
        return [tensor * min(1, (self.clip / (norm + 1e-6)).item()) for tensor in gradients]

    def of_rates(self, gradients, new, recalled):
        return self.clipped(gradients)

    def step(self, x, y):
        recalled, new = self.recall(), list(zip(x, y.tolist(), strict=True))
        loss, now, of_rates = self.slopes(self.weights, new, recalled)
        now, of_rates = self.clipped(now), self.of_rates(of_rates, new, recalled)
        if self.previous is None:
            self.m = now
        else:
            before = self.clipped(self.slopes(self.previous, new, recalled)[1])
            self.m = [g + self.momentum * (m - b) for g, m, b in zip(now, self.m, before, strict=True)]
        self.previous = self.weights
        self.weights = [w - self.lr * m for w, m in zip(self.weights, self.m, strict=True)]
        self.rates = [a - self.rate_lr * g for a, g in zip(self.rates, of_rates, strict=True)]
        self.remember(new)
        return loss


class SlowPublished(SlowVRMCL):
    """The step of the authors' code: a task starts without previous weights, and the rates follow two gradients."""

    def start_task(self, classes):
        super().start_task(classes)
        if self.previous is not None:
            self.previous = self.weights

    def of_rates(self, gradients, new, recalled):
        before = self.slopes(self.weights if self.previous is None else self.previous, new, recalled)[2]
        return self.clipped([g + b for g, b in zip(self.clipped(gradients), before, strict=True)])


@pytest.mark.parametrize("variant", ["paper", "reference"])
@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_the_step_of_vrmcl(variant, clip):
    numbers = NUMBERS | {"variant": variant, "clip": clip}
    ours, theirs = net(), net()
    fast, slow = VRMCL(ours, **numbers, **COMMON), SlowVRMCL(theirs, **numbers, **COMMON)
    for number, (first, *rest) in enumerate(tasks()):
        first_class = (
            first[1] == first[1][0]
        )  # at first only one class comes, but both compete from the start of the task
        task = [tuple(tensor[first_class] for tensor in first), first, *rest]
        fast.start_task(task)
        slow.start_task({2 * number, 2 * number + 1})
        for x, y in task:
            assert fast.observe(x, y, number).item() == pytest.approx(slow.step(x, y), abs=1e-10)
        fast.end_task(task)
    for our_weight, expected in zip(ours.parameters(), slow.weights, strict=True):
        assert torch.allclose(our_weight, expected, atol=1e-10, rtol=0)
    assert torch.allclose(fast.rates, torch.cat([tensor.flatten() for tensor in slow.rates]), atol=1e-10, rtol=0)


@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_the_benchmarks_step_is_that_of_the_authors_code(clip, published):
    numbers = NUMBERS | {"variant": "reference", "clip": clip}
    ours, theirs = net(), net()
    fast = published(ours, both=True, restart=True, full=5, **numbers, **COMMON)
    slow = SlowPublished(theirs, **numbers, **COMMON)
    for number, task in enumerate(tasks()):
        fast.start_task(task)
        slow.start_task({2 * number, 2 * number + 1})
        for x, y in task:
            loss = fast.observe(x, y, number).item()
            assert loss == pytest.approx(slow.step(x, y) if len(y) == 5 else 0, abs=1e-10)
        fast.end_task(task)
    for our_weight, expected in zip(ours.parameters(), slow.weights, strict=True):
        assert torch.allclose(our_weight, expected, atol=1e-10, rtol=0)
    assert torch.allclose(fast.rates, torch.cat([tensor.flatten() for tensor in slow.rates]), atol=1e-10, rtol=0)


def test_statistics_that_see_a_step_twice_have_a_larger_momentum(published):
    first = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).double()
    second = copy.deepcopy(first)
    second[1].momentum = 0.19  # 1 − 0.9²
    learners = [published(first, twice=True, **COMMON), VRMCL(second, **COMMON)]
    for number, task in enumerate(tasks()):
        for learner in learners:
            learner.start_task(task)
            for x, y in task:
                learner.observe(x, y, number)
            learner.end_task(task)
    for name in ("running_mean", "running_var"):
        assert torch.allclose(getattr(first[1], name), getattr(second[1], name), atol=1e-12, rtol=0)
    assert same_weights(first, second)


@pytest.mark.parametrize("clip", [0.02, 10.0])
@pytest.mark.parametrize("variant", ["paper", "reference"])
def test_the_hypergradient_equals_finite_differences(variant, clip):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 4)).double()
    fast = VRMCL(model, **NUMBERS | {"clip": clip, "variant": variant, "rate": 0.7})
    first, second = tasks(batches=2)
    for task in (first, second):
        fast.start_task(task)
    batch, recalled = ({"x": x, "y": y} for x, y in (second[0], first[0]))
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    weights_and_rates = torch.cat([weights, fast.rates.detach()]).requires_grad_()

    def loss(weights_and_rates):
        weights, rates = weights_and_rates.chunk(2)
        return fast.ahead(weights, rates, batch, recalled)

    (exact,) = torch.autograd.grad(loss(weights_and_rates), weights_and_rates)
    step = 1e-6 * torch.eye(len(weights_and_rates), dtype=torch.float64)
    start = weights_and_rates.detach().requires_grad_()  # the steps ahead need a gradient even where ours does not
    numeric = torch.stack([(loss(start + offset) - loss(start - offset)) / 2e-6 for offset in step]).detach()
    assert torch.allclose(exact, numeric, atol=2e-9, rtol=1e-6)
    assert exact[len(weights) :].norm() > 1e-3


def test_without_steps_ahead_and_momentum_it_is_experience_replay():
    """With rates so small that they lead nowhere, the hypergradient is the gradient of the joint batch."""
    ours, theirs = net(), net()
    fast = VRMCL(ours, rate=1e-12, rate_lr=0, momentum=0, clip=1e6, **COMMON)
    slow = SlowReplay(theirs, **COMMON)
    for number, task in enumerate(tasks()):
        fast.start_task(task)
        for x, y in task:
            fast.observe(x, y, number)
            new = list(zip(x, y, strict=True))
            slow.descend(mean(surprise(slow.scores(example), label) for example, label in new + slow.recall()))
            slow.remember(new)
    assert same_weights(ours, theirs, tolerance=1e-9)


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 31, 32, 33])
def test_vrmcl_takes_batches_of_any_length(size):
    fast = VRMCL(net(), **COMMON)
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(size, 3, generator=generator, dtype=torch.float64), torch.randint(4, (size,), generator=generator))
    ] * 3
    fast.start_task(batches)
    for x, y in batches:
        assert torch.isfinite(fast.observe(x, y, 0))


def test_batch_norm_statistics_follow_the_model_s_own_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).double()
    fast, plain = VRMCL(model, **COMMON), copy.deepcopy(model)
    batches = next(tasks(size=9))
    fast.start_task(batches)
    x, y = batches[0]
    fast.observe(x, y, 0)
    plain(x)
    assert torch.equal(model[1].running_mean, plain[1].running_mean)
    assert model[1].num_batches_tracked == 1


def test_other_weights_leave_buffers_of_any_type_alone():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.register_buffer("sums", torch.zeros(3))
            self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))
            self.register_buffer("shift", torch.ones(2, 3)[:, 1])  # not contiguous

        def forward(self, x):
            self.calls += 1
            self.sums += x.sum(0)
            self.seen[0] = True
            return self.layer(x) + self.shift * self.calls

    model, x = Counting(), torch.randn(4, 3)
    before = copy.deepcopy(model.state_dict())
    weights = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
    for _ in range(2):  # each call starts from the model's own
        assert torch.equal(scores_by(weights, model, x), torch.ones(4, 2))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def image_tasks():
    generator = torch.Generator().manual_seed(1)
    return [
        [
            (
                torch.randn(6, 2, 5, 5, generator=generator, dtype=torch.float64),
                torch.randint(4, (6,), generator=generator),
            )
        ]
        * 3
        for _ in range(2)
    ]


def image_learner(channels_last):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(100, 4)
    ).double()
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return VRMCL(model.to(memory_format=layout), **COMMON, **NUMBERS)


@pytest.mark.parametrize("channels_last", [False, True])
def test_channels_last_images_are_learned_alike_and_states_go_across(channels_last):
    """In the middle, the state moves to a learner whose weights lie in memory in the other way, or in the same."""
    plain, moving = image_learner(False), image_learner(True)
    for number, task in enumerate(image_tasks()):
        plain.start_task(task)
        moving.start_task(task)
        for x, y in task:
            assert plain.observe(x, y, number).item() == pytest.approx(moving.observe(x, y, number).item(), abs=1e-10)
        state = copy.deepcopy(moving.state_dict())
        moving = image_learner(channels_last)
        moving.load_state_dict(state)
    assert same_weights(plain.model, moving.model)
    for plain_rates, moved_rates in zip(
        plain.weights.layout.views(plain.rates), moving.weights.layout.views(moving.rates), strict=True
    ):
        assert torch.allclose(plain_rates, moved_rates, atol=1e-10)
    assert not torch.allclose(plain.rates, torch.full_like(plain.rates, NUMBERS["rate"]))


class Coarse(nn.Linear):
    """A linear layer that computes with weights of bfloat16."""

    def forward(self, x):
        return x @ self.weight.bfloat16().to(x.dtype).T + self.bias.bfloat16().to(x.dtype)


def test_weights_given_in_the_types_that_a_model_uses_lead_to_the_same():
    def learned(with_types):
        torch.manual_seed(0)
        layers = [Coarse(3, 8), nn.BatchNorm1d(8), nn.Tanh(), Coarse(8, 4)]
        for layer in (layers[0], layers[3]) if with_types else ():
            layer.computes_in = torch.bfloat16
        # Without a limit, the norm of a gradient, which depends on how its entries are ordered, decides nothing.
        fast = VRMCL(nn.Sequential(*layers).double(), **COMMON, **NUMBERS | {"clip": 1e6})
        for number, task in enumerate(tasks(size=6)):
            fast.start_task(task)
            for x, y in task:
                fast.observe(x, y, number)
        return fast

    with_types, without_types = learned(True), learned(False)
    assert list(with_types._by_type) == [torch.bfloat16, torch.float64]
    assert same_weights(with_types.model, without_types.model, tolerance=0)
    ours, theirs = (learner.state_dict()["rates"] for learner in (with_types, without_types))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_state_is_taken_over_in_place():
    used, fresh = (VRMCL(net(), classes=4, **COMMON) for _ in range(2))
    start = copy.deepcopy(fresh.state_dict())
    for number, task in enumerate(tasks()):
        used.start_task(task)
        for x, y in task:
            used.observe(x, y, number)
    tensors = [used.rates, used.previous, used.velocity, used.current, used.seen]
    places = [tensor.data_ptr() for tensor in tensors]
    used.load_state_dict(start)
    assert [
        tensor.data_ptr() for tensor in (used.rates, used.previous, used.velocity, used.current, used.seen)
    ] == places
    assert not used.seen.any()
    with pytest.raises(InputError, match="^start_task: got a batch before any task"):
        used.observe(*next(tasks())[0], 0)


def test_a_class_of_which_start_task_did_not_tell_is_learned_too():
    first, second = tasks()
    fast = VRMCL(net(), **COMMON)
    fast.start_task(first)
    assert fast.observe(*second[0], 0) < 10
    assert fast.current.tolist() == [True] * 4


def test_a_task_must_be_started_first():
    x, y = next(tasks())[0]
    with pytest.raises(InputError, match="^start_task: got a batch before any task"):
        VRMCL(net(), **COMMON).observe(x, y, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("momentum", -0.1), ("momentum", 1.1), ("rate", 0), ("rate_lr", -1), ("clip", 0), ("chunk", 0), ("chunk", 1.5),
     ("variant", "papr"), ("replay", 300)],
)  # fmt: skip
def test_bad_options_are_named(name, value):
    with pytest.raises(InputError, match=f"^{name}: got .*, expected "):
        VRMCL(net(), **{name: value})


def test_defaults_are_the_published_ones():
    fast = VRMCL(net())
    numbers = (fast.lr, fast.momentum, fast.rate, fast.rate_lr, fast.clip, fast.chunk)
    assert numbers == (0.35, 0.15, 0.1, 0.25, 1.0, 8)
