"""SI, online EWC and LwF against their papers' steps, written out slowly."""

import copy
import functools
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from parabolic import InputError, Stream, train
from parabolic.learners.ewc import EWC
from parabolic.learners.lwf import LwF
from parabolic.learners.si import SI

CLASSES = 6


def net(norm=False, seed=0):
    torch.manual_seed(seed)
    layers = [nn.Linear(3, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers).double()


def tasks(norm=False, seed=1):
    """Three tasks of two classes; the last batch is short, and a single example where the model allows it."""
    g = torch.Generator().manual_seed(seed)
    return [
        [
            (torch.randn(n, 3, generator=g, dtype=torch.float64) + label, label + torch.randint(2, (n,), generator=g))
            for n in (5, 5, 5, 2 if norm else 1)
        ]
        for label in (0, 2, 4)
    ]


def learn(learner, stream):
    for index, batches in enumerate(stream):
        learner.start_task(batches)
        for x, y in batches:
            learner.observe(x, y, index)
        learner.end_task(batches)


def assert_same(ours, theirs):
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-10, rtol=0), name


def copies(model):
    return [weight.detach().clone() for weight in model.parameters()]


@torch.no_grad()
def move(model, gradients, lr):
    for weight, gradient in zip(model.parameters(), gradients, strict=True):
        weight -= lr * gradient


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("clip", [1.0, 0.05, None])
def test_si_is_the_published_step(norm, clip):
    lr, c, xi = 0.2, 3.0, 0.1
    ours, theirs = net(norm), net(norm)
    learner = SI(ours, lr=lr, strength=c, damping=xi, clip=clip)
    learn(learner, tasks(norm))

    anchor, strength = copies(theirs), [torch.zeros_like(w) for w in theirs.parameters()]
    for batches in tasks(norm):
        omega = [torch.zeros_like(w) for w in theirs.parameters()]
        for x, y in batches:
            weights = list(theirs.parameters())
            own = torch.autograd.grad(cross_entropy(theirs(x), y), weights)
            whole = []
            for g, w, a, s in zip(own, copies(theirs), anchor, strength, strict=True):
                total = g + c * s * 2 * (w - a)
                whole.append(total if clip is None else torch.minimum(torch.maximum(total, -g.new_tensor(clip)),
                                                                      g.new_tensor(clip)))  # fmt: skip
            before = copies(theirs)
            move(theirs, whole, lr)
            omega = [o - g * (w - b) for o, g, w, b in zip(omega, own, copies(theirs), before, strict=True)]
        strength = [
            (s + o / ((w - a) ** 2 + xi)).relu()
            for s, o, w, a in zip(strength, omega, copies(theirs), anchor, strict=True)
        ]
        anchor = copies(theirs)
    assert_same(ours, theirs)
    assert torch.allclose(learner.importance, torch.cat([s.flatten() for s in strength]), atol=1e-10)
    assert learner.importance.min() >= 0


def test_si_attributes_the_fall_of_the_loss_to_the_weights():
    """Along a gradient flow ω sums to the loss lost; with steps of size lr it does so up to O(lr)."""
    (x, y), *_ = tasks()[0]
    misses = []
    for lr in (0.02, 0.01):
        model = net()
        learner = SI(model, lr=lr, clip=None)
        first = cross_entropy(model(x), y)
        for _ in range(round(1 / lr)):
            learner.observe(x, y, 0)
        fall = (first - cross_entropy(model(x), y)).item()
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
        before = copies(model)
        learner.observe(x, y, 0)
        expected = [o + g * (b - w) for o, g, b, w in zip(expected, gradients, before, copies(model), strict=True)]
    assert torch.allclose(learner.path, torch.cat([o.flatten() for o in expected]), atol=1e-12)


def slow_fisher(model, batches):
    """The mean of squared gradients of −log p(label), one example at a time."""
    model = copy.deepcopy(model).eval()
    total, count = [torch.zeros_like(w) for w in model.parameters()], 0
    for x, y in batches:
        for example, label in zip(x, y.tolist(), strict=True):
            surprise = -model(example[None]).log_softmax(-1)[0, label]
            gradients = torch.autograd.grad(surprise, list(model.parameters()))
            total, count = [t + g**2 for t, g in zip(total, gradients, strict=True)], count + 1
    return [t / count for t in total]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("gamma", [1.0, 0.6, 0.0])
def test_ewc_is_the_published_step(norm, gamma):
    lr, strength = 0.1, 4.0
    ours, theirs = net(norm), net(norm)
    learner = EWC(ours, lr=lr, strength=strength, decay=gamma)
    learn(learner, tasks(norm))

    anchor, fisher = copies(theirs), [torch.zeros_like(w) for w in theirs.parameters()]
    for batches in tasks(norm):
        for x, y in batches:
            gradients = torch.autograd.grad(cross_entropy(theirs(x), y), list(theirs.parameters()))
            pulls = [2 * strength * f * (w - a) for f, w, a in zip(fisher, copies(theirs), anchor, strict=True)]
            move(theirs, [g + p for g, p in zip(gradients, pulls, strict=True)], lr)
        fisher = [gamma * f + new for f, new in zip(fisher, slow_fisher(theirs, batches), strict=True)]
        anchor = copies(theirs)
    assert_same(ours, theirs)
    assert torch.allclose(learner.importance, torch.cat([f.flatten() for f in fisher]), atol=1e-10)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_ewcs_fisher_information_is_the_loop_over_examples(chunk):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(3 * 16, CLASSES)
    ).double()
    model(torch.randn(20, 1, 6, 6, dtype=torch.float64))  # statistics that are not those of an example
    batches = [(torch.randn(n, 1, 6, 6, dtype=torch.float64), torch.randint(CLASSES, (n,))) for n in (5, 4, 1)]
    learner = EWC(model, chunk=chunk, augment=lambda x, generator: x + 1e6)
    before = copy.deepcopy(model.state_dict())
    expected = torch.cat([f.flatten() for f in slow_fisher(model, batches)])
    assert torch.allclose(learner.fisher(batches), expected, atol=1e-12)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("cls", [SI, EWC])
def test_without_strength_it_is_plain_descent_and_the_more_the_nearer_it_stays(cls):
    first, *rest = tasks()
    distances = []
    for strength in (0, 1, 10):
        model, plain = net(), net()
        learner = cls(model, lr=0.03, strength=strength, **({"damping": 0.01} if cls is SI else {"decay": 0.5}))
        learn(learner, [first])
        anchor = learner.anchor.clone()
        learn(learner, rest)
        if strength == 0:
            for x, y in [batch for batches in (first, *rest) for batch in batches]:
                gradients = torch.autograd.grad(cross_entropy(plain(x), y), list(plain.parameters()))
                move(plain, [g.clamp(-1, 1) if cls is SI else g for g in gradients], 0.03)
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
                    p = (features @ head.weight[new].T + head.bias[new]).softmax(-1)
                    for column, label in enumerate(new):
                        error = p[:, column] - (y == label).double()  # the gradient of the mean cross-entropy, by hand
                        head.weight[label] -= lr * (error[:, None] * features).mean(0)
                        head.bias[label] -= lr * error.mean()
        before = copy.deepcopy(model)
        model.train()
        for x, y in batches:
            scores, total = model(x), 0.0
            recorded = before(x).detach()
            for i, label in enumerate(y.tolist()):
                total = total - scores[i, seen].log_softmax(-1)[seen.index(label)]
                if old:
                    was, now = (each[i, old].softmax(-1) ** (1 / temperature) for each in (recorded, scores))
                    total = total - alpha * (was / was.sum() * (now / now.sum()).log()).sum()
            gradients = torch.autograd.grad(total / len(y), list(model.parameters()))
            move(model, [g + decay * w for g, w in zip(gradients, copies(model), strict=True)], lr)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize(("alpha", "temperature"), [(3.0, 2.0), (0.5, 1.0)])
def test_lwf_is_the_published_step(norm, warmup, alpha, temperature):
    ours, theirs = net(norm), net(norm)
    learn(LwF(ours, lr=0.1, alpha=alpha, temperature=temperature, warmup=warmup, weight_decay=0.01), tasks(norm))
    slow_lwf(theirs, tasks(norm), 0.1, alpha, temperature, warmup, 0.01)
    assert_same(ours, theirs)


def test_lwf_warms_up_the_new_classes_alone():
    model, stream = net(norm=True), tasks(norm=True)
    learner = LwF(model, lr=0.1)
    learn(learner, stream[:1])
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


def test_lwf_takes_tasks_that_bring_nothing_new_and_tasks_of_old_and_new():
    stream = tasks()
    mixed = [(torch.cat([a, b]), torch.cat([c, d])) for (a, c), (b, d) in zip(stream[0], stream[1], strict=True)]
    model = net()
    learner = LwF(model, lr=0.1)
    learn(learner, [stream[0], stream[0], mixed])
    assert learner.old.tolist() == [True] * 2 + [False] * 4
    assert all(torch.isfinite(weight).all() for weight in model.parameters())


def test_lwf_says_when_it_was_not_told_of_a_start():
    with pytest.raises(InputError, match="start_task: got a batch before any task"):
        LwF(net()).observe(*tasks()[0][0], 0)


def test_lwf_needs_a_last_layer_that_gives_the_scores():
    with pytest.raises(InputError, match="model: got .*Conv2d.*Linear"):
        LwF(nn.Conv2d(1, 2, 3))
    odd = nn.Sequential(nn.Linear(3, 4), nn.Unflatten(1, (4, 1)), nn.Conv1d(4, CLASSES, 1), nn.Flatten()).double()
    with pytest.raises(InputError, match="model: got .*, expected .*Linear gives the scores"):
        learn(LwF(odd), tasks())


@pytest.mark.parametrize("cls", [SI, EWC, LwF])
def test_images_batch_norm_and_single_examples_are_welcome(cls):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, CLASSES))
    learner = cls(model, average=0.9, augment=lambda x, g: x.roll(1, -1))
    g = torch.Generator().manual_seed(0)
    stream = [
        [(torch.randint(256, (n, 1, 8, 8), generator=g, dtype=torch.uint8), torch.full((n,), label)) for n in (6, 1)]
        for label in range(3)
    ]
    learn(learner, stream)
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    assert learner.predict(stream[0][0][0]).shape == (6,)


@pytest.mark.parametrize("cls", [SI, EWC, LwF])
def test_a_stream_without_tasks_is_refused(cls):
    stream = Stream.from_arrays(torch.randn(60, 3), torch.arange(60) % 6, tasks=3, boundaries=False)
    with pytest.raises(InputError, match=f"learner: got '{cls.name}', expected one that can do without tasks"):
        train(cls(net().float()), stream)


def test_defaults_are_the_published_ones():
    si, ewc, lwf = SI(net()), EWC(net()), LwF(net())
    assert (si.lr, si.strength, si.damping, si.clip) == (0.03, 0.5, 1.0, 1.0)
    assert (ewc.lr, ewc.strength, ewc.decay) == (0.03, 10.0, 1.0)
    assert (lwf.lr, lwf.alpha, lwf.temperature, lwf.weight_decay) == (0.01, 3.0, 2.0, 5e-4)
    assert lwf.optim.param_groups[0]["weight_decay"] == 5e-4
    own = LwF(net(), optimizer=functools.partial(torch.optim.SGD, weight_decay=0.3))
    assert own.optim.param_groups[0]["weight_decay"] == 0.3


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
    for index, batches in enumerate(tasks(norm=True)):
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
    for a, b in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        assert torch.allclose(a, b.cpu(), atol=1e-8)
