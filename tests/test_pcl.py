"""PCL compared with a slow, literal version of the paper's Algorithms 1 and 2."""

import copy
import math

import pytest
import torch
from slow import reservoir
from torch import nn
from torch.nn.functional import cross_entropy

from parabolic import ER, PCL, InputError, bridge
from parabolic.learners.pairing import PAIRINGS
from parabolic.learners.pcl import ABLATIONS, path_weights, reference_drift
from parabolic.memory import distinct, half_by_loss
from parabolic.pde import gradient_of, log_girsanov

CLASSES, CAPACITY, REPLAY = 4, 12, 5


def net(seed=0, norm=False):
    torch.manual_seed(seed)
    layers = [nn.Linear(3, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers).double()


def stream(batches=6, size=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for number in range(batches):
        count = size if number < batches - 1 else 3  # the last batch is short
        yield (
            torch.randn(count, 3, generator=generator, dtype=torch.float64),
            torch.randint(CLASSES, (count,), generator=generator),
        )


class SlowPCL:
    """Algorithm 1, one example, bridge and time point at a time, taking its random numbers in the same order."""

    def __init__(self, model, lr, sigma_x, sigma_y, times, bridges, horizon, seed, variant, rule, simplex=True):
        self.simplex, self.horizon = simplex, horizon
        self.model, self.lr, self.times, self.bridges = model, lr, times, bridges
        self.sigma_x, self.sigma_y, self.variant, self.rule = sigma_x, sigma_y, variant, rule
        self.generator = torch.Generator().manual_seed(seed)
        self.remembered, self.seen = [], 0

    def algorithm_2(self, starts, ends, sigma, common=False):
        """Bridges from every start to its end: W ← Σ σ ΔW √Δt, W₀ = 0, W ← W + X, BB = W − t (W_k − X')."""
        n, d, k = len(starts), len(starts[0]), self.times - 1
        delta = self.horizon / k
        drawn = k if self.variant == "paper" else self.times
        noise = torch.randn(n, self.bridges, drawn, 1 if common else d, generator=self.generator, dtype=torch.float64)
        if self.variant == "reference":
            noise = noise * torch.empty_like(noise).exponential_(generator=self.generator)
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
        if self.remembered:
            rows = distinct(min(REPLAY, len(self.remembered)), len(self.remembered), generator=self.generator).tolist()
            xs, ys = xs + [self.remembered[r][0] for r in rows], ys + [self.remembered[r][1] for r in rows]
        shuffle = torch.randperm(len(xs), generator=self.generator).tolist()
        corners = torch.eye(CLASSES, dtype=torch.float64)
        x_paths = self.algorithm_2(xs, [xs[j] for j in shuffle], self.sigma_x)
        # The published code moves the weights of all classes by one draw.
        labels = [corners[c] for c in ys], [corners[ys[j]] for j in shuffle]
        y_paths = self.algorithm_2(*labels, self.sigma_y, common=self.variant == "reference")
        k = self.times - 1
        weight = {
            "euler": [1 / k] * k + [0],
            "mean": [1 / self.times] * self.times,
            "feynman-kac": [self.horizon / (1 + self.horizon) / k] * k + [1 / (1 + self.horizon)],
        }[self.rule]
        total = 0.0
        for x_path, y_path in zip(x_paths, y_paths, strict=True):
            for j in range(self.times):
                target = y_path[j].abs() / y_path[j].abs().sum() if self.simplex else y_path[j]
                if weight[j]:
                    total = total - weight[j] * (target * self.model(x_path[j][None])[0].log_softmax(-1)).sum()
        loss = total / len(x_paths)
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter -= self.lr * gradient
        self.seen = reservoir(
            self.remembered, self.seen, CAPACITY, list(zip(x, y.tolist(), strict=True)), self.generator
        )
        return loss.detach()


@pytest.mark.parametrize(
    ("variant", "integral", "rule", "simplex"),
    [
        ("paper", None, "euler", True),
        ("paper", None, "euler", False),
        ("paper", "mean", "mean", True),
        ("paper", "feynman-kac", "feynman-kac", False),
        ("reference", None, "mean", True),
    ],
)
@pytest.mark.parametrize(("times", "bridges", "horizon"), [(5, 1, 1.0), (3, 2, 2.5), (2, 1, 1.0)])
def test_the_step_is_algorithm_1(variant, integral, rule, simplex, times, bridges, horizon):
    ours, theirs = net(), net()
    numbers = {
        "lr": 0.08,
        "sigma_x": 0.3,
        "sigma_y": 0.1,
        "times": times,
        "bridges": bridges,
        "horizon": horizon,
        "variant": variant,
        "simplex": simplex,
    }
    learner = PCL(ours, memory=CAPACITY, replay=REPLAY, seed=7, integral=integral, **numbers)
    slow = SlowPCL(theirs, seed=7, rule=rule, **numbers)
    for x, y in stream():
        assert learner.observe(x, y).item() == pytest.approx(slow.step(x, y).item(), abs=1e-10)
    for our_weight, their_weight in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(our_weight, their_weight, atol=1e-10, rtol=0)
    assert [label for _, label in slow.remembered] == learner.past["y"].tolist()


@pytest.mark.parametrize("variant", ["paper", "reference"])
def test_outputs_that_are_no_classes_have_no_part_in_a_label(variant):
    """A network may have more outputs than there are classes: what it learns about the classes is not affected."""
    plain = PCL(net(), memory=CAPACITY, replay=REPLAY, sigma_y=0.1, variant=variant)
    model = net()
    wide = nn.Linear(model[-1].in_features, 50, dtype=torch.float64)
    with torch.no_grad():
        wide.weight[:CLASSES], wide.bias[:CLASSES] = model[-1].weight, model[-1].bias
        wide.bias[CLASSES:] = -1e3  # so that they have no probability
        wide.weight[CLASSES:] = 0
    model[-1] = wide
    with_spare = PCL(model, memory=CAPACITY, replay=REPLAY, sigma_y=0.1, variant=variant, classes=CLASSES)
    for x, y in stream():
        assert with_spare.observe(x, y).item() == pytest.approx(plain.observe(x, y).item(), abs=1e-10)


def test_the_published_code_folds_labels():
    with pytest.raises(InputError, match="^simplex: got False, expected true for variant='reference'"):
        PCL(net(), variant="reference", simplex=False)


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


def paths_by_hand(learner, x, y, seed=0):
    """Redo a first step's draws: the pairs and the two bridges, for a learner whose endpoints are drawn first."""
    generator = torch.Generator().manual_seed(seed)
    ends = PAIRINGS[learner.endpoints](x, len(x), generator)
    settings = {"variant": learner.variant, "shared": learner.shared, "generator": generator}
    label = torch.eye(CLASSES, dtype=torch.float64)[y]
    return ends, label, settings


def mean_along(model, x_path, y_path, weights):
    """The weighted loss of every path, one point at a time."""
    totals = []
    for x_points, y_points in zip(x_path.flatten(0, 1), y_path.flatten(0, 1), strict=True):
        points = zip(weights, x_points, y_points, strict=False)
        totals.append(sum(-weight * (y / y.sum() * model(x[None])[0].log_softmax(-1)).sum() for weight, x, y in points))
    return torch.stack(totals)


def test_one_bb_shares_its_noise():
    start, end = torch.randn(2, 4, 3, dtype=torch.float64)
    path = bridge(start, end, 0.5, 5, shared=True, generator=torch.Generator().manual_seed(0))
    line = bridge(start, end, 0.0, 5)
    noise = path - line
    assert torch.allclose(noise, noise[:1].expand_as(noise), atol=1e-14)
    assert noise[0, 0, 2].abs().min() > 0
    learner, x, y = PCL(net(), shared=True, memory=12, replay=5), *next(stream(1, 4))
    ends, label, settings = paths_by_hand(learner, x, y)
    x_path = bridge(x, x[ends], 0.03, 5, **settings)
    y_path = bridge(label, label[ends], 0.01, 5, **settings)
    expected = mean_along(net(), x_path, y_path.abs(), [0.25] * 4).mean()
    assert learner.observe(x, y).item() == pytest.approx(expected.item(), abs=1e-12)


def test_the_integral_weighs_as_much_as_its_time_beside_the_end_point():
    """∫ ℓ dt + ℓ at the end, divided by T + 1."""
    for horizon in (0.25, 1.0, 3.0):
        *way, end = path_weights("feynman-kac", 5, horizon).tolist()
        assert (sum(way), end) == pytest.approx((horizon / (horizon + 1), 1 / (horizon + 1)))
    learner = PCL(net(), memory=12, replay=5, integral="feynman-kac", horizon=3.0)
    assert learner.point_weights.tolist() == pytest.approx(path_weights("feynman-kac", 5, 3.0).tolist())


def test_the_gradient_that_tempers_leaves_statistics_to_what_is_learned():
    counts = []
    for tempering in (False, True):
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)).double()
        learner = PCL(model, memory=12, replay=5, tempering=tempering)
        for x, y in stream(3, 4):
            learner.observe(x, y)
        counts.append(model[1].num_batches_tracked.item())
    assert counts == [3, 3]


def test_tempering_needs_noise_to_temper():
    with pytest.raises(InputError, match="^sigma_x: got 0.0, expected a number above 0; tempering divides"):
        PCL(net(), tempering=True, sigma_x=0)


@pytest.mark.parametrize("variant", ["paper", "reference"])
def test_tempering_takes_its_noise_from_the_gradient_norms_at_the_ends(variant):
    learner, x, y = PCL(net(), tempering=True, variant=variant, memory=12, replay=5), *next(stream(1, 4))
    norms = []
    for row in range(len(x)):
        example = x[row].clone().requires_grad_()
        cross_entropy(net()(example[None]), y[row : row + 1]).backward()
        norms.append(example.grad.norm() / (len(x) if variant == "reference" else 1))
    ends, label, settings = paths_by_hand(learner, x, y)
    sigma = torch.empty(len(x), 5, dtype=torch.float64)
    for row in range(len(x)):
        first, last = (norms[row], norms[ends[row]]) if variant == "paper" else (norms[ends[row]], norms[row])
        sigma[row] = torch.stack([first + share * (last - first) for share in (0, 0.25, 0.5, 0.75, 1)])
    x_path = bridge(x, x[ends], sigma, 5, **settings)
    y_path = bridge(label, label[ends], sigma / 3, 5, common=variant == "reference", **settings)
    weights = [0.25] * 4 if variant == "paper" else [0.2] * 5
    expected = mean_along(net(), x_path, y_path.abs(), weights).mean()
    assert learner.observe(x, y).item() == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize("row", ["BB Tempering", "Eu endpoints", "One BB", "Max Loss"])
def test_the_shape_of_an_example_makes_no_difference(row):
    flat = PCL(net(), memory=CAPACITY, replay=REPLAY, **ABLATIONS[row])
    images = PCL(nn.Sequential(nn.Flatten(), net()), memory=CAPACITY, replay=REPLAY, **ABLATIONS[row])
    for x, y in stream():
        assert images.observe(x.reshape(-1, 1, 3, 1), y).item() == pytest.approx(flat.observe(x, y).item(), abs=1e-12)


def test_each_pairing_chooses_the_endpoints_that_its_name_says():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 2, 2, generator=generator)
    gaps = [[float((one - other).norm()) for other in x] for one in x]
    assert PAIRINGS["farthest"](x, 4, generator).tolist() == [max(range(9), key=row.__getitem__) for row in gaps]
    others = [[second for second in range(9) if second != first] for first in range(9)]
    assert PAIRINGS["nearest"](x, 4, generator).tolist() == [
        min(others[first], key=gaps[first].__getitem__) for first in range(9)
    ]
    assert sorted(PAIRINGS["random"](x, 4, generator).tolist()) == list(range(9))
    for _ in range(50):
        ends = PAIRINGS["across"](x, 4, generator)
        assert (ends[:4] >= 4).all()
        assert (ends[4:] < 4).all()
    drawn = torch.cat([PAIRINGS["across"](x, 4, generator) for _ in range(400)])
    assert set(drawn.tolist()) == set(range(9))
    assert sorted(PAIRINGS["across"](x, 9, generator).tolist()) == list(range(9))  # nothing is recalled yet
    assert PAIRINGS["nearest"](x[:1], 1, generator).tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_endpoints_far_from_the_origin_and_of_a_short_type(dtype, offset):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(64, 3, generator=generator) + offset).to(dtype)
    gaps = (x[:, None].double() - x.double()).norm(dim=2)
    assert torch.allclose(gaps.gather(1, PAIRINGS["farthest"](x, 32, generator)[:, None])[:, 0], gaps.amax(1))
    nearest = gaps.gather(1, PAIRINGS["nearest"](x, 32, generator)[:, None])[:, 0]
    assert torch.allclose(nearest, gaps.fill_diagonal_(torch.inf).amin(1))


@pytest.mark.parametrize(("offers", "ranks"), [("highest", [2, 3]), ("lowest", [0, 1]), ("middle", [1, 2])])
def test_only_half_of_a_batch_is_offered_by_its_loss(offers, ranks):
    model, (x, y) = net(), next(stream(2, 4))
    order = cross_entropy(model(x), y, reduction="none").argsort().tolist()
    learner = PCL(model, memory=12, replay=5, offers=offers)
    learner.observe(x, y)
    expected = sorted(tuple(x[order[rank]].tolist()) for rank in ranks)
    assert sorted(map(tuple, learner.past["x"].tolist())) == expected


def test_half_of_an_odd_batch_is_rounded_up():
    loss = torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0])
    assert loss[half_by_loss(loss, "lowest")].tolist() == [1, 2, 3]
    assert loss[half_by_loss(loss, "middle")].tolist() == [2, 3, 4]
    assert loss[half_by_loss(loss, "highest")].tolist() == [3, 4, 5]
    assert all(half_by_loss(loss[:1], part).tolist() == [0] for part in ("lowest", "middle", "highest"))


@pytest.mark.parametrize("horizon", [1.0, 2.5])
def test_a_drift_weighs_each_path_by_girsanov(horizon):
    def drift(points):
        return 1 - points

    learner = PCL(net(), drift=drift, memory=12, replay=5, sigma_x=0.5, horizon=horizon)
    x, y = next(stream(1, 4))
    ends, label, settings = paths_by_hand(learner, x, y)
    x_path = bridge(x, x[ends], 0.5, 5, horizon=horizon, **settings)
    y_path = bridge(label, label[ends], 0.01, 5, horizon=horizon, **settings)
    losses = mean_along(net(), x_path, y_path.abs(), [0.25] * 4)
    weights = []
    for row in range(len(x)):
        exponent = 0.0
        for number in range(4):
            point, next_point = x_path[row, 0, number], x_path[row, 0, number + 1]
            exponent += (drift(point) * (next_point - point)).sum() - 0.5 * (drift(point) ** 2).sum() * horizon / 4
        weights.append(exponent.exp())
    expected = sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights)
    assert learner.observe(x, y).item() == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_drift_leaves_a_loss_to_descend_however_many_dimensions_there_are(sign):
    """The unnormalised weights are exp(−1800) here, or e¹⁰⁰ for longer paths: all 0, or infinite."""
    torch.manual_seed(0)
    model = nn.Linear(3072, CLASSES)
    learner = PCL(model, drift=gradient_of(lambda x: sign * x.square().sum(1) / 2), memory=40, bridges=2)
    for scale in (1.0, 4.0):
        batch = {"x": scale * torch.randn(16, 3072), "y": torch.arange(16) % CLASSES}
        loss = learner.loss(batch, None)
        (slope,) = torch.autograd.grad(loss, model.weight)
        assert 0.01 < loss.item() < 100
        assert slope.isfinite().all()
        assert slope.norm() > 0.01


def test_only_differences_of_the_weights_of_a_drift_count(monkeypatch):
    def loss(shift, drift=torch.neg):
        monkeypatch.setattr(
            "parabolic.learners.pcl.log_girsanov",
            lambda *arguments, **options: log_girsanov(*arguments, **options) + shift,
        )
        learner = PCL(net(), drift=drift, memory=12, replay=5, bridges=2)
        return [learner.observe(x, y).item() for x, y in stream()]

    assert loss(1e3) == pytest.approx(loss(0.0), abs=1e-9)
    assert loss(-1e3) == pytest.approx(loss(0.0), abs=1e-9)
    assert loss(0.0, drift=torch.zeros_like) == pytest.approx(loss(0.0, drift=None), abs=1e-12)
    assert loss(0.0) != pytest.approx(loss(0.0, drift=None), abs=1e-3)


@pytest.mark.parametrize(("sigma", "moved"), [(1.0, 0.5), (0.3, 0.045), (0.03, 0.00045)])
def test_self_normalised_weights_move_the_ends_of_free_paths_by_the_drift_times_the_square_of_the_noise(sigma, moved):
    n, k = 100_000, 4
    noise = torch.randn(n, 1, k, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    path = torch.cat([torch.zeros(n, 1, 1, 1), (sigma * noise / k**0.5).cumsum(2)], 2)
    weight = log_girsanov(path, lambda x: torch.full_like(x, 0.5)).flatten().softmax(0)
    assert float(weight @ path[:, 0, -1, 0]) == pytest.approx(moved, abs=4 * 1.2 * sigma / n**0.5)


@pytest.mark.parametrize("shape", [(3, 5), (3, 5, 1)])
def test_paths_without_a_dimension_of_times_have_no_weight(shape):
    with pytest.raises(InputError, match=r"^path: got .*, expected paths of two or more times, \[n, bridges, times, "):
        log_girsanov(torch.zeros(shape), torch.zeros_like)


def test_the_drift_of_the_published_code():
    learner = PCL(net(), variant="reference", drift_weight=0.3, bridges=2, memory=12, replay=5)
    x, y = next(stream(1, 4))
    ends, label, settings = paths_by_hand(learner, x, y)
    x_path = bridge(x, x[ends], 0.03, 5, 2, **settings).requires_grad_()
    y_path = bridge(label, label[ends], 0.01, 5, 2, common=True, **settings).abs()
    total = mean_along(net(), x_path, y_path, [1.0] * 5).view(-1, 2).mean(1)
    (slope,) = torch.autograd.grad(total.mean(), x_path, retain_graph=True)
    term = torch.zeros(len(x), dtype=torch.float64)
    for row in range(len(x)):
        for path_number in range(2):
            for number in range(5):
                gradient, point = slope[row, path_number, number], x_path[row, path_number, number]
                term[row] += ((gradient * point).sum() - 0.5 * (gradient**2).sum()) / 2
    assert learner.observe(x, y).item() == pytest.approx((total - 0.3 * term).mean().item(), abs=1e-12)


def test_the_drift_of_the_published_code_fades_with_the_size_of_the_batch():
    path = torch.randn(4, 2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for copies in (1, 10):
        repeated = path.repeat(copies, 1, 1, 1).requires_grad_()
        losses, paths = repeated.square().sum(-1), 8 * copies
        gradient = 2 * path / paths  # the gradient of a path's own loss, divided by the number of paths
        term = (gradient * path - 0.5 * gradient.square()).flatten(2).sum(-1).mean()
        expected = path.square().flatten(2).sum(-1).mean() - 0.3 * term
        assert reference_drift(losses, repeated, 0.3).item() == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize(("name", "value"), [("drift", torch.neg), ("integral", "mean"), ("integral", "euler")])
def test_the_drift_of_the_published_code_goes_with_no_other_drift_or_integral(name, value):
    with pytest.raises(InputError, match=f"^{name}: got .*, expected none with drift_weight"):
        PCL(net(), variant="reference", drift_weight=0.3, **{name: value})


def test_every_row_of_the_papers_ablations_learns():
    for options in ABLATIONS.values():
        learner = PCL(net(norm=True), memory=12, replay=5, **options)
        losses = [learner.observe(x, y) for x, y in list(stream(1)) * 30]
        assert losses[-1] < losses[0]


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
     ("replay", 300), ("average", 1), ("average", -0.1), ("optimizer", "Adm"), ("seed", -1), ("classes", 0),
     ("endpoints", "far"), ("offers", "some"), ("shared", 2), ("drift", 3), ("drift_weight", 0.5)],
)  # fmt: skip
def test_bad_options_are_named(name, value):
    with pytest.raises(InputError, match=f"^{name}: got .*, expected "):
        PCL(net(), **{name: value})
