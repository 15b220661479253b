"""PCL against the paper's Algorithms 1 and 2, written out slowly."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from parabolic import ER, PCL, InputError
from parabolic.memory import distinct

CLASSES, CAPACITY, REPLAY = 4, 12, 5


def net(seed=0, norm=False):
    torch.manual_seed(seed)
    layers = [nn.Linear(3, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers).double()


def stream(batches=6, size=4, seed=1):
    g = torch.Generator().manual_seed(seed)
    for i in range(batches):
        n = size if i < batches - 1 else 3  # the last batch is short
        yield torch.randn(n, 3, generator=g, dtype=torch.float64), torch.randint(CLASSES, (n,), generator=g)


class SlowPCL:
    """Algorithm 1, one example, bridge and time point at a time, taking its random numbers in the same order."""

    def __init__(self, model, lr, sigma_x, sigma_y, times, bridges, seed, variant, rule):
        self.model, self.lr, self.times, self.bridges = model, lr, times, bridges
        self.sigma_x, self.sigma_y, self.variant, self.rule = sigma_x, sigma_y, variant, rule
        self.g = torch.Generator().manual_seed(seed)
        self.kept, self.seen = [], 0

    def algorithm_2(self, starts, ends, sigma):
        """Bridges from every start to its end: W ← Σ σ ΔW √Δt, W₀ = 0, W ← W + X, BB = W − t (W_k − X')."""
        n, d, k = len(starts), len(starts[0]), self.times - 1
        delta = 1 / k
        drawn = k if self.variant == "paper" else self.times
        noise = torch.randn(n, self.bridges, drawn, d, generator=self.g, dtype=torch.float64)
        if self.variant == "reference":
            noise = noise * torch.empty_like(noise).exponential_(generator=self.g)
        paths = []
        for i in range(n):
            for b in range(self.bridges):
                increments = [noise[i, b, j] * sigma * math.sqrt(delta) for j in range(drawn)]
                if self.variant == "reference":  # summed from the first on, and only then W₀ = 0
                    sums = [sum(increments[: j + 1]) for j in range(self.times)]
                    walk = [torch.zeros(d, dtype=torch.float64), *sums[1:]]
                else:
                    walk = [sum(increments[:j], torch.zeros(d, dtype=torch.float64)) for j in range(self.times)]
                walk = [w + starts[i] for w in walk]
                paths.append([walk[j] - (j / k) * (walk[k] - ends[i]) for j in range(self.times)])
        return paths

    def step(self, x, y):
        xs, ys = list(x), y.tolist()
        if self.kept:
            rows = distinct(min(REPLAY, len(self.kept)), len(self.kept), generator=self.g).tolist()
            xs, ys = xs + [self.kept[r][0] for r in rows], ys + [self.kept[r][1] for r in rows]
        shuffle = torch.randperm(len(xs), generator=self.g).tolist()
        corners = torch.eye(CLASSES, dtype=torch.float64)
        x_paths = self.algorithm_2(xs, [xs[j] for j in shuffle], self.sigma_x)
        y_paths = self.algorithm_2([corners[c] for c in ys], [corners[ys[j]] for j in shuffle], self.sigma_y)
        k = self.times - 1
        weight = {
            "euler": [1 / k] * k + [0],
            "mean": [1 / self.times] * self.times,
            "feynman-kac": [0.5 / k] * k + [0.5],
        }[self.rule]
        total = 0.0
        for x_path, y_path in zip(x_paths, y_paths, strict=True):
            for j in range(self.times):
                target = y_path[j].abs() / y_path[j].abs().sum()
                if weight[j]:
                    total = total - weight[j] * (target * self.model(x_path[j][None])[0].log_softmax(-1)).sum()
        loss = total / len(x_paths)
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter -= self.lr * gradient
        for chance, example, label in zip(
            torch.rand(len(x), generator=self.g, dtype=torch.float64).tolist(), x, y.tolist(), strict=True
        ):
            slot = math.floor(chance * (self.seen + 1))
            if self.seen < CAPACITY:
                self.kept.append((example, label))
            elif slot < CAPACITY:
                self.kept[slot] = (example, label)
            self.seen += 1
        return loss.detach()


@pytest.mark.parametrize(
    ("variant", "integral", "rule"),
    [
        ("paper", None, "euler"),
        ("paper", "mean", "mean"),
        ("paper", "feynman-kac", "feynman-kac"),
        ("reference", None, "mean"),
    ],
)
@pytest.mark.parametrize(("times", "bridges"), [(5, 1), (3, 2), (2, 1)])
def test_the_step_is_algorithm_1(variant, integral, rule, times, bridges):
    ours, theirs = net(), net()
    numbers = {
        "lr": 0.08,
        "sigma_x": 0.3,
        "sigma_y": 0.1,
        "times": times,
        "bridges": bridges,
        "variant": variant,
    }
    learner = PCL(ours, memory=CAPACITY, replay=REPLAY, seed=7, integral=integral, **numbers)
    slow = SlowPCL(theirs, seed=7, rule=rule, **numbers)
    for x, y in stream():
        assert learner.observe(x, y).item() == pytest.approx(slow.step(x, y).item(), abs=1e-10)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-10, rtol=0)
    assert [label for _, label in slow.kept] == learner.past["y"].tolist()


@pytest.mark.parametrize("integral", ["euler", "feynman-kac", "mean"])
def test_without_noise_and_between_two_points_it_is_experience_replay(integral):
    model = net()
    pcl = PCL(model, memory=12, sigma_x=0, sigma_y=0, times=2, integral=integral, replay=5)
    er = ER(model, memory=12, replay=5)
    x, y = next(stream(1, 4))
    recalled = {"x": x[:2] + 1, "y": y[:2]}
    ours = pcl.loss({"x": x, "y": y}, recalled)
    assert ours.item() == pytest.approx(er.loss({"x": x, "y": y}, recalled).item(), abs=1e-12)
    assert ours.item() == pytest.approx(
        cross_entropy(model(torch.cat([x, x[:2] + 1])), torch.cat([y, y[:2]])).item(), abs=1e-12
    )


def test_defaults_are_the_papers():
    learner = PCL(net())
    numbers = (
        learner.lr,
        learner.sigma_x,
        learner.sigma_y,
        learner.times,
        learner.bridges,
        learner.horizon,
        learner.replay,
    )
    assert numbers == (0.08, 0.03, 0.01, 5, 1, 1.0, 32)
    assert learner.variant == "paper"


def test_images_and_batch_norm_are_welcome():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    learner = PCL(model, memory=40)
    before = copy.deepcopy(model.state_dict())
    for _ in range(3):
        loss = learner.observe(torch.randint(256, (8, 1, 8, 8), dtype=torch.uint8), torch.randint(10, (8,)))
    assert torch.isfinite(loss)
    assert learner.past["x"].dtype == torch.uint8
    assert not torch.equal(before["0.weight"], model.state_dict()["0.weight"])


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", 0), ("lr", math.nan), ("sigma_x", -1), ("sigma_y", "much"), ("times", 1), ("times", 2.5), ("bridges", 0),
     ("horizon", -1), ("variant", "papr"), ("integral", "trapezoid"), ("memory", -3), ("memory", 0), ("replay", 0),
     ("replay", 300), ("average", 1), ("average", -0.1), ("optimizer", "Adm"), ("seed", -1), ("classes", 0)],
)  # fmt: skip
def test_bad_options_are_named(name, value):
    with pytest.raises(InputError, match=f"^{name}: got .*, expected "):
        PCL(net(), **{name: value})
