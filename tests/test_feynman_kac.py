"""Stopped paths against closed forms, finite differences and each other.

Wherever a bias of first order in the step is documented, two step lengths are extrapolated (twice the fine estimate
less the coarse one), which leaves one of higher order, well below the error of the mean.
"""

import math
import re
from itertools import product

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.linalg import solve_banded
from scipy.sparse import coo_matrix, identity
from scipy.sparse.linalg import splu
from scipy.spatial import ConvexHull, Delaunay, cKDTree
from scipy.special import erf

from parabolic.checks import InputError
from parabolic.pde import Balls, Hull, Intersection, MemoryDomain, gradient_of, solve, solve_by_bridges

INTERVAL = Hull(torch.tensor([[0.0], [1.0]], dtype=torch.float64))


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def ones(x):
    return torch.ones(len(x), dtype=x.dtype)


def wavy(x):
    return 1 + torch.sin(5 * x[:, 0])


def extrapolated(loss, x, t, domain, sigma, drift=None, *, steps, seed=0, **options):
    """An estimate free of the bias of first order, and its standard error."""
    coarse, fine = (
        solve(loss, x, t, domain, sigma, drift, steps=k * steps, generator=seeded(seed + k), **options) for k in (1, 2)
    )
    return 2 * fine.mean - coarse.mean, torch.hypot(2 * fine.error, coarse.error)


# One dimension: closed forms and Crank–Nicolson


def mean_time(x, t, sigma):
    """E[t ∧ τ] on [0, 1]: the solution of v' = σv'' + 1, v = 0 at 0 and both ends, as a Fourier series."""
    k = np.arange(1, 4001, 2)[:, None] * np.pi
    decay = 4 / (sigma * k**3) * np.sin(k * x) * np.exp(-sigma * k**2 * t)
    return x * (1 - x) / (2 * sigma) - decay.sum(0)


def test_the_share_of_paths_that_were_stopped():
    """P(τ ≤ t) on [0, 1] as a Fourier series; on the edge itself every path is stopped at once."""
    x, t, sigma, paths = column(0.0, 0.1, 0.5, 1.0), 0.1, 0.5, 20_000
    k = np.arange(1, 401, 2)[:, None] * np.pi
    share = 1 - (4 / k * np.sin(k * x[:, 0].numpy()) * np.exp(-sigma * k**2 * t)).sum(0)
    u = solve(ones, x, t, INTERVAL, sigma, paths=paths, steps=50, generator=seeded())
    assert (np.abs(u.stopped.numpy() - share) <= 4 * np.sqrt(np.abs(share * (1 - share)) / paths) + 1e-9).all()
    assert 0.1 < u.stopped[2] < 0.5


@pytest.mark.parametrize("sigma", [0.1, 1.0, 3.0])
@pytest.mark.parametrize(("time", "steps"), [(0.02, 40), (0.2, 40), (5.0, 500)])
def test_a_constant_source_gives_the_mean_time_to_the_edge(sigma, time, steps):
    x, t, paths = column(0.05, 0.3, 0.5, 0.9), time / sigma, 10_000
    u = solve(lambda y: 2 * ones(y), x, t, INTERVAL, sigma, paths=paths, steps=steps, generator=seeded())
    expected = 2 + 2 * mean_time(x[:, 0].numpy(), t, sigma)
    unseen = 2 * t * 3 / paths  # what a chance of up to 3 in as many paths, which no path need meet, could change
    assert (np.abs(u.mean.numpy() - expected) <= 3 * u.error.numpy() + unseen).all()
    if time == 5:  # the steady state
        assert np.allclose(expected, 2 + (x * (1 - x) / sigma)[:, 0].numpy(), atol=1e-12)
        assert (u.stopped == 1).all()


def crank_nicolson(loss, x, t, sigma, drift=None, source=1.0, cells=500, steps=500):
    """u(x, t) for u' = σu'' + μu' + source·ℓ on [0, 1] with u = ℓ at first and at both ends."""
    grid = np.linspace(0, 1, cells + 1)
    h, dt, value = 1 / cells, t / steps, loss(grid)
    speed = drift(grid) if drift else 0 * grid
    left, right, centre = sigma / h**2 - speed / (2 * h), sigma / h**2 + speed / (2 * h), -2 * sigma / h**2
    u = value.copy()
    for step in range(steps):
        theta = 1.0 if step < 4 else 0.5  # a few implicit steps damp what the corners excite
        known = u.copy()
        known[1:-1] += (1 - theta) * dt * (left[1:-1] * u[:-2] + centre * u[1:-1] + right[1:-1] * u[2:])
        known[1:-1] += dt * source * value[1:-1]
        bands = np.zeros((3, cells + 1))
        bands[0, 2:], bands[2, :-2] = -theta * dt * right[1:-1], -theta * dt * left[1:-1]
        bands[1] = 1 - theta * dt * centre
        bands[1, [0, -1]] = 1
        u = solve_banded((1, 1), bands, known)
    return np.interp(x, grid, u)


def test_the_oracle_agrees_with_the_series():
    x = np.array([0.1, 0.4])
    assert np.allclose(crank_nicolson(np.ones_like, x, 0.3, 0.5), 1 + mean_time(x, 0.3, 0.5), atol=1e-4)


@pytest.mark.parametrize("source", [1.0, -1.0])
@pytest.mark.parametrize(("sigma", "t"), [(0.2, 0.1), (0.2, 1.0), (1.0, 0.1), (1.0, 1.0)])
def test_a_varying_loss_agrees_with_crank_nicolson(sigma, t, source):
    x = column(0.05, 0.35, 0.6, 0.9)
    expected = crank_nicolson(lambda y: 1 + np.sin(5 * y), x[:, 0].numpy(), t, sigma, source=source)
    u, error = extrapolated(wavy, x, t, INTERVAL, sigma, source=source, paths=10_000, steps=40)
    assert (np.abs(u.numpy() - expected) <= 3 * error.numpy()).all()


DRIFTS = {
    "constant": (lambda x: torch.full_like(x, 1.5), lambda x: np.full_like(x, 1.5)),
    "to the middle": (lambda x: -4 * (x - 0.8), lambda x: -4 * (x - 0.8)),
    "wavy": (lambda x: 2 * torch.cos(6 * x), lambda x: 2 * np.cos(6 * x)),
}


@pytest.mark.parametrize("name", DRIFTS)
def test_drifting_and_reweighted_paths_agree_with_crank_nicolson_and_each_other(name):
    drift, oracle_drift = DRIFTS[name]
    x = column(0.1, 0.3, 0.7)
    expected = crank_nicolson(lambda y: 1 + np.sin(5 * y), x[:, 0].numpy(), 0.4, 0.5, oracle_drift)
    options = {"paths": 20_000, "steps": 40}
    u, error = extrapolated(wavy, x, 0.4, INTERVAL, 0.5, drift, by="simulate", **options)
    v, other_error = extrapolated(wavy, x, 0.4, INTERVAL, 0.5, drift, by="reweight", seed=9, **options)
    assert (np.abs(u.numpy() - expected) <= 3 * error.numpy()).all()
    assert (np.abs(v.numpy() - expected) <= 3 * other_error.numpy()).all()
    assert ((u - v).abs() <= 3 * torch.hypot(error, other_error)).all()


# The order of the bias


class HalfPlane:
    """x₁ > 0: an edge that is flat, and alone."""

    def inside(self, x):
        return x[:, 0] >= 0

    def hit(self, x):
        return x[:, 0]

    def nearest(self, x):
        return torch.stack([torch.zeros_like(x[:, 0]), x[:, 1]], 1)


@pytest.mark.parametrize("steps", [1, 3])
def test_at_a_flat_edge_any_step_is_exact(steps):
    x, t, sigma = torch.tensor([[0.2, 0.1], [1.0, -0.4]], dtype=torch.float64), 0.8, 0.6

    def harmonic(y):  # its mean over any stopped path is its value at the start
        return 2 + torch.exp(-2 * y[:, 0]) * torch.cos(2 * y[:, 1])

    options = {"paths": 40_000, "steps": steps, "generator": seeded()}
    at_the_end = solve(harmonic, x, t, HalfPlane(), sigma, source=0.0, **options)
    assert ((at_the_end.mean - harmonic(x)).abs() <= 3 * at_the_end.error).all()
    in_time = solve(ones, x, t, HalfPlane(), sigma, **options)
    times_inside = [
        quad(lambda time, start=float(start): erf(start / math.sqrt(4 * sigma * time)), 0, t)[0] for start in x[:, 0]
    ]
    assert ((in_time.mean - 1 - torch.tensor(times_inside)).abs() <= 3 * in_time.error).all()


def test_at_a_flat_edge_the_integral_of_a_loss_that_varies_has_a_bias_of_order_three_halves():
    """With ℓ = x₁, X stopped at the edge is a martingale: E[ℓ(end)] = x₁, and E∫ℓ ds = x₁t."""
    x, t, source, bias = torch.tensor([[0.3, 0.0]], dtype=torch.float64), 0.5, -4.0, []  # with −2/t the noise cancels
    for steps in (2, 8):
        u = solve(lambda y: y[:, 0].clamp_min(0), x, t, HalfPlane(), 0.5, source=source, paths=400_000, steps=steps,
                  generator=seeded(steps))  # fmt: skip
        bias.append(float(u.mean) - 0.3 * (1 + source * t))
        assert bias[-1] > 10 * float(u.error)
    assert 5 < bias[0] / bias[1] < 11  # 8 at the order 3/2, 4 at the first, 16 at the second


@pytest.mark.parametrize("steps", [1, 2])
def test_far_from_an_edge_the_integral_has_the_error_of_the_trapezoidal_rule(steps):
    """For ℓ = z⁴, z = x₁ − 50, Eℓ is 3(2σs)² at the time s: the rule adds (t/steps)²/12 times its slope's change."""
    x, t, sigma = torch.tensor([[50.0, 0.0]], dtype=torch.float64), 0.5, 0.5
    u = solve(lambda y: (y[:, 0] - 50) ** 4, x, t, HalfPlane(), sigma, paths=200_000, steps=steps, generator=seeded())
    exact, rule = 3 * (2 * sigma * t) ** 2 + 4 * sigma**2 * t**3, (t / steps) ** 2 / 12 * 24 * sigma**2 * t
    assert abs(float(u.mean) - exact - rule) <= 4 * float(u.error)
    if steps == 1:
        assert rule > 5 * float(u.error)


class Disc:
    """The unit disc: an edge that is not flat."""

    def inside(self, x):
        return x.norm(dim=1) <= 1 + 1e-9

    def hit(self, x):
        return 1 - x.norm(dim=1)

    def nearest(self, x):
        return x / x.norm(dim=1, keepdim=True)


class Blind(Disc):
    """The disc, for which nobody knows how deep a point lies: no crossing between two steps is noticed."""

    def hit(self, x):
        return torch.where(super().hit(x) > 0, torch.inf, super().hit(x))


def biases(domain, steps, paths=100_000):
    """For the mean time to the edge of the disc from its middle, 1/4σ, at these numbers of steps."""
    x = torch.zeros(1, 2, dtype=torch.float64)
    estimates = [solve(ones, x, 8.0, domain, 1.0, paths=paths, steps=count, generator=seeded(count)) for count in steps]
    return [(float(estimate.mean) - 1.25, float(estimate.error)) for estimate in estimates]


def test_halving_the_step_halves_the_bias_of_a_drift():
    def drift(y):
        return -3 * (y - 0.5)

    expected = crank_nicolson(lambda y: 1 + np.sin(5 * y), np.array([0.2]), 0.5, 0.5, drift)
    bias = []
    for steps in (8, 16, 32):
        u = solve(wavy, column(0.2), 0.5, INTERVAL, 0.5, drift, paths=400_000, steps=steps, generator=seeded(steps))
        bias.append(float(u.mean) - expected[0])
        assert abs(bias[-1]) > 10 * float(u.error)  # what is measured is the bias, not the noise
    assert 1.6 < bias[0] / bias[1] < 2.5  # 2 at the first order, 1.4 at the order ½, 4 at the second
    assert 1.6 < bias[1] / bias[2] < 2.5


def test_halving_the_step_at_least_halves_the_bias_of_a_curved_edge():
    (coarse, error), (fine, _), (finest, _) = biases(Disc(), [20, 40, 80], paths=200_000)
    assert min(coarse, fine) > 10 * error
    assert fine <= coarse / 2
    assert abs(finest) <= fine / 2


def test_a_curved_edge_has_a_bias_of_first_order_even_without_a_drift():
    """Re z⁴ is harmonic: its mean over stopped paths is its value at the start, whatever the edge."""

    def harmonic(y):
        x_squared, y_squared = y[:, 0].square(), y[:, 1].square()
        return 9 + x_squared * x_squared - 6 * x_squared * y_squared + y_squared * y_squared

    x, bias = torch.tensor([[0.85, 0.0]] * 4, dtype=torch.float64), []
    for steps in (4, 8):
        u = solve(harmonic, x, 0.4, Disc(), 0.5, source=0.0, paths=200_000, steps=steps, generator=seeded(steps))
        bias.append(float((u.mean - harmonic(x)).mean()))
        assert bias[-1] > 10 * float(u.error.norm()) / 4
    assert 1.5 < bias[0] / bias[1] < 2.6  # 2 at the first order, 1.4 at the order ½, 4 at the second


def test_without_the_correction_the_bias_is_of_order_one_half_and_larger():
    (coarse, error), (fine, _) = biases(Blind(), [200, 800])
    assert coarse > 10 * error
    assert 1.7 < coarse / fine < 2.3  # a quarter of the step, half of the bias
    assert abs(biases(Disc(), [200])[0][0]) < coarse / 10


# Steps that are too long


@pytest.mark.parametrize("x", [0.1, 0.5])
def test_steps_of_a_fifth_of_the_width_stay_inside_as_often_as_they_should_and_much_longer_ones_are_warned_of(x):
    """Within a step only the nearest edge is considered, and a long step meets both."""

    def too_often(length, steps):
        k, t = np.arange(1, 801, 2) * np.pi, length**2 * steps
        expected = (4 / k * np.sin(k * x) * np.exp(-(k**2) * t / 2)).sum()
        u = solve(ones, column(x), t, INTERVAL, 0.5, paths=200_000, steps=steps, generator=seeded())
        return (1 - float(u.stopped)) / expected - 1

    assert abs(too_often(0.2, 7)) < 0.03
    for length, low, high in ((0.5, 0.1, 0.2), (1.0, 4, 10)):
        suggested = math.ceil(25 * length**2)  # √(2σΔ) of a fifth of the width
        with pytest.warns(RuntimeWarning, match=f"of {length:g} .* hull of width 1 .* Use steps={suggested} or"):
            assert low < abs(too_often(length, 1)) < high


@pytest.mark.parametrize(
    ("points", "width"),
    [
        ([[2.0], [5.0], [3.0]], 3.2),
        ([[0.0, 0.0], [4.0, 0.0], [0.0, 3.0]], 12 / 5 + 0.2),  # the altitude on the longest side
        ([[0.0, 0.0], [4.0, 4.0]], 0.2),  # of a flat hull, its margins
        ([*torch.eye(4).tolist(), [0.0] * 4], torch.inf),  # unknown
    ],
)
def test_the_width_of_a_hull(points, width):
    assert Hull(torch.tensor(points), margin=0.1).width == pytest.approx(width, rel=1e-5)


def cube(d, half=1.0):
    return half * torch.tensor(list(product([-1.0, 1.0], repeat=d)), dtype=torch.float64)


def cube_time(d, t, sigma):
    """E[t ∧ τ] from the middle of [−1, 1]^d: the integral of the d-th power of the chance to be inside for one."""
    k = np.arange(1, 801, 2)
    signs = np.where(k % 4 == 1, 1, -1)

    def chance_inside(time):
        return (4 / np.pi * signs / k * np.exp(-sigma * (k * np.pi / 2) ** 2 * time)).sum()

    return 1e-4 + quad(lambda time: chance_inside(time) ** d, 1e-4, t, limit=200)[0]


def test_in_a_solid_hull_of_four_dimensions_the_bias_is_of_order_one_half_and_warned_of():
    expected, bias = 1 + cube_time(4, 2.0, 0.5), []
    for steps in (50, 200):
        with pytest.warns(
            RuntimeWarning, match=f"steps={steps} is too few: in a hull of 4 .* missed.* Use a margin"
        ) as caught:
            u = solve(
                ones, torch.zeros(1, 4).double(), 2.0, Hull(cube(4)), 0.5, paths=6000, steps=steps, generator=seeded()
            )
        assert [warning.filename for warning in caught] == [__file__]
        bias.append(float(u.mean) - expected)
        assert bias[-1] > 8 * float(u.error)
    assert 1.5 < bias[0] / bias[1] < 2.7  # a quarter of the step, half of the bias
    three_dimensional = solve(
        ones, torch.zeros(1, 3).double(), 2.0, Hull(cube(3)), 0.5, paths=6000, steps=50, generator=seeded()
    )
    assert abs(float(three_dimensional.mean) - 1 - cube_time(3, 2.0, 0.5)) < 3 * float(three_dimensional.error)


@pytest.mark.parametrize("unit", [1e-5, 1e5])
def test_units_make_no_difference(unit):
    """With lengths in other units, and σ in their square, u is the same: also where the depth of a path is unknown."""

    def estimate(unit):
        start, sigma, options = torch.zeros(1, 4).double(), 0.5 * unit**2, {"paths": 1000, "steps": 50}
        with pytest.warns(RuntimeWarning, match="crossings are missed"):
            return solve(
                lambda y: 1 + (y / unit).square().sum(1), start, 2.0, Hull(unit * cube(4)), sigma, generator=seeded(),
                **options,
            ).mean  # fmt: skip

    assert torch.allclose(estimate(unit), estimate(1.0), rtol=0.005)


def test_a_margin_of_two_steps_sees_all_crossings():
    """The cube of nine tenths, grown by a tenth: of the whole cube it lacks the corners only, where few paths leave."""
    u = solve(ones, torch.zeros(1, 4).double(), 2.0, Hull(cube(4, 0.9), 0.1), 0.5, paths=3000, steps=800,
              generator=seeded())  # fmt: skip
    assert abs(float(u.mean) - 1 - cube_time(4, 2.0, 0.5)) < 3 * float(u.error) + 0.004


@pytest.mark.parametrize("d", [10, 30])
def test_steps_of_half_a_radius_meet_a_ball_as_often_as_they_should_and_steps_of_two_are_warned_of(d):
    """From ρ paths meet the ball of radius r before the sphere of radius 1 with the chance (ρ²⁻ᵈ − 1)/(r²⁻ᵈ − 1)."""
    r, rho = 0.4, 0.4 * 6 ** (1 / (d - 2))
    x = torch.zeros(1, d, dtype=torch.float64)
    x[0, 0] = rho
    domain, expected = Intersection(Balls(0 * x, r**2), Disc()), (rho ** (2 - d) - 1) / (r ** (2 - d) - 1)

    def estimate_with(length):
        steps = math.ceil(20 / length**2)
        settings = {"source": 0.0, "paths": 4000, "steps": steps, "generator": seeded()}
        return solve(lambda y: (y.norm(dim=1) < 0.5).double(), x, 20 / d, domain, 0.5, **settings)

    short_steps = estimate_with(r / 2)
    assert abs(float(short_steps.mean) - expected) < 0.1 * expected + 3 * float(short_steps.error)
    with pytest.warns(
        RuntimeWarning, match=r"steps of length 0.79 meet balls.* of 0.4 too often. Use steps=\d+ or more"
    ) as caught:
        long_steps = estimate_with(2 * r)
    assert float(long_steps.mean) > 2 * expected
    suggested = int(re.findall(r"Use steps=(\d+)", str(caught[0].message))[0])
    assert suggested == pytest.approx(20 / (r / 2) ** 2, abs=1)  # steps of half a radius, as above


def test_there_is_no_warning_where_no_path_runs():
    memory = torch.randn(20, 64, generator=seeded())
    assert (solve(ones, memory, 1.0, MemoryDomain(memory, 0.01), 0.05, paths=2, steps=2).stopped == 1).all()


# Two dimensions: a hull with balls cut out, by finite differences


def finite_differences(loss, domain, box, t, sigma, source, h, steps=120):
    """u on the nodes of a grid within a domain (a predicate), by Shortley and Weller's five points and Crank–Nicolson.

    Where a neighbour lies outside, the edge's own point between takes its place, found by bisection: the error is of
    second order however the edge cuts the grid.
    """
    axis = np.arange(-box, box + h / 2, h)
    nodes = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1)
    inside = domain(nodes.reshape(-1, 2)).reshape(nodes.shape[:2])
    assert not inside[[0, -1]].any()
    number = np.full(inside.shape, -1)
    number[inside] = np.arange(inside.sum())
    x, numbers = nodes[inside], number[inside]
    rows, columns, entries = [], [], []
    fixed, diagonal = np.zeros(len(x)), np.zeros(len(x))
    for axis_step in (np.array([1, 0]), np.array([0, 1])):
        arms = []
        for direction in (axis_step, -axis_step):
            index = np.argwhere(inside) + direction
            neighbour = number[index[:, 0], index[:, 1]]
            low, high = np.zeros(len(x)), np.ones(len(x))
            for _ in range(30):
                middle = (low + high) / 2
                within = domain(x + middle[:, None] * h * direction)
                low, high = np.where(within, middle, low), np.where(within, high, middle)
            arms.append((neighbour, np.where(neighbour >= 0, h, np.maximum(low, 1e-6) * h), direction))
        span = arms[0][1] + arms[1][1]
        for neighbour, length, direction in arms:
            weight = 2 / (length * span)
            diagonal -= weight
            inner = neighbour >= 0
            (rows.append(numbers[inner]), columns.append(neighbour[inner]), entries.append(weight[inner]))
            fixed += np.where(inner, 0, weight * loss(x + length[:, None] * direction))
    rows.append(numbers), columns.append(numbers), entries.append(diagonal)
    laplace = coo_matrix((np.concatenate(entries), (np.concatenate(rows), np.concatenate(columns)))).tocsc()
    value, u, dt = loss(x), loss(x), t / steps
    eye = identity(len(x), format="csc")
    solvers = {theta: splu(eye - theta * dt * sigma * laplace) for theta in (1.0, 0.5)}
    for step in range(steps):
        theta = 1.0 if step < 4 else 0.5
        u = solvers[theta].solve(
            u + (1 - theta) * dt * sigma * (laplace @ u) + dt * sigma * fixed + dt * source * value
        )
    return x, u


def ripples(x):
    return 1 + np.sin(2 * x[:, 0]) * np.cos(3 * x[:, 1])


def to_polygon(x, corners):
    """The distance to the nearest side of a polygon."""
    sides = np.roll(corners, -1, 0) - corners
    share = ((x[:, None] - corners) * sides).sum(2) / (sides**2).sum(1)
    foot = corners + np.clip(share, 0, 1)[..., None] * sides
    return np.sqrt(((x[:, None] - foot) ** 2).sum(2).min(1))


@pytest.mark.parametrize("margin", [0.0, 0.2])
@pytest.mark.parametrize(("sigma", "t", "source"), [(0.3, 0.2, 1.0), (0.3, 2.0, 1.0), (1.0, 0.5, -1.0)])
def test_a_hull_with_balls_cut_out_agrees_with_finite_differences(sigma, t, source, margin):
    points = np.random.default_rng(7).normal(size=(14, 2))
    hull, corners = Delaunay(points), points[ConvexHull(points).vertices]

    def within(x):
        in_hull_or_margin = (hull.find_simplex(x) >= 0) | (to_polygon(x, corners) < margin)
        return in_hull_or_margin & (((x[:, None] - points) ** 2).sum(2).min(1) > 0.04)

    (coarse_nodes, coarse), (x, fine) = (
        finite_differences(ripples, within, 3.2, t, sigma, source, h) for h in (0.08, 0.04)
    )
    common = cKDTree(x).query(coarse_nodes)[1][::20]
    expected, grid_error = fine[common], np.abs(fine[common] - coarse[::20]) / 3  # the grid's error is of second order
    domain = MemoryDomain(torch.tensor(points), eps=0.04, margin=margin)
    assert (domain.hit(torch.tensor(x)) > 0).all()  # both hold the same nodes to be inside
    u, error = extrapolated(
        lambda y: 1 + torch.sin(2 * y[:, 0]) * torch.cos(3 * y[:, 1]),
        torch.tensor(x[common]),
        t,
        domain,
        sigma,
        source=source,
        paths=3000,
        steps=100,
    )
    assert grid_error.max() < 0.1 * error.median()  # fine enough to be the judge
    gap, error = u.numpy() - expected, error.numpy()
    assert abs(gap.mean()) <= 3 * np.linalg.norm(error) / len(gap) + grid_error.mean()
    # Of so many points one in 370 is off by more than three standard errors, by chance alone.
    assert (np.abs(gap) > 3 * error + grid_error).sum() <= 1
    assert (np.abs(gap) <= 4 * error + grid_error).all()


def test_in_two_dimensions_a_rotating_drift_can_be_simulated_or_reweighted():
    domain = MemoryDomain(torch.tensor(np.random.default_rng(7).normal(size=(14, 2))), eps=0.01)

    def swirl(x):
        return torch.stack([-x[:, 1], x[:, 0]], 1)

    def loss(x):
        return x[:, 0].square() + x[:, 1].exp()

    x = domain.interior(8, seeded(1))
    x = x[domain.hit(x) > 0.05]
    u, error = extrapolated(loss, x, 0.5, domain, 0.4, swirl, paths=10_000, steps=40)
    v, other_error = extrapolated(loss, x, 0.5, domain, 0.4, swirl, by="reweight", paths=10_000, steps=40, seed=5)
    assert len(x) >= 3
    assert ((u - v).abs() <= 3 * torch.hypot(error, other_error)).all()


# Girsanov's weight


@pytest.mark.parametrize("name", DRIFTS)
@pytest.mark.parametrize("sigma", [0.25, 1.0])
def test_the_weight_has_mean_one(name, sigma):
    n = 40_000
    u = solve(
        wavy,
        column(0.2, 0.6),
        0.3,
        INTERVAL,
        sigma,
        DRIFTS[name][0],
        by="reweight",
        paths=n,
        steps=100,
        generator=seeded(),
    )
    error = u.weight * (1 / u.effective - 1 / n).sqrt()  # as Σw² = (Σw)²/effective
    assert (u.effective < n).all()
    assert ((u.weight - 1).abs() <= 3 * error).all()
    simulated = solve(wavy, column(0.2), 0.3, INTERVAL, sigma, DRIFTS[name][0], paths=100, generator=seeded())
    assert simulated.weight == 1
    assert simulated.effective == 100


def test_collapsed_weights_are_warned_of():
    line = Hull(column(-50.0, 50.0))
    with pytest.warns(RuntimeWarning, match=r'reweighting collapsed: .* use by="simulate"'):
        u = solve(
            ones, column(0.0), 4.0, line, 0.5, lambda x: torch.full_like(x, 3.0), by="reweight", generator=seeded()
        )
    assert u.effective < 100


def test_the_gradient_of_a_potential_is_a_drift():
    x = column(-0.5, 2.0)
    with torch.no_grad():  # as paths are simulated
        assert torch.allclose(gradient_of(lambda y: (y**4).sum(1))(x), 4 * x**3)
    assert not x.requires_grad  # the points are left as they were


# The paper's shortcut


def test_bridges_estimate_the_mean_along_bridges_to_the_memory():
    """For ℓ = ‖x‖² the mean on a bridge from x to m is ‖x + s(m − x)‖² + 2σdts(1 − s) at the share s of the way."""
    x, ends = torch.tensor([[1.0, 0.0, -1.0], [0.0, 0.5, 0.0]]), torch.randn(5, 3, generator=seeded())
    t, sigma, s = 0.7, 0.3, torch.linspace(0, 1, 9)
    u = solve_by_bridges(
        lambda y: y.square().sum(1), x, t, ends, sigma, paths=40_000, times=9, generator=seeded(1), source=1.0
    )
    mean = torch.lerp(x[:, None, None], ends[None, :, None], s[:, None]).square().sum(3).mean(1)
    mean = mean + 2 * sigma * 3 * t * s * (1 - s)
    expected = mean[:, -1] + t * torch.trapezoid(mean, s)
    assert ((u.mean - expected).abs() <= 3 * u.error).all()
    assert torch.equal(solve_by_bridges(lambda y: y.square().sum(1), x, 0.0, ends, sigma).mean, x.square().sum(1))


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("sigma", [1e-6, 1.0])  # no path stops; most do
def test_a_loss_of_any_type_is_summed_precisely(sigma, dtype):
    """A loss of one everywhere gives 1 + E[t ∧ τ], as a count of errors or in half precision too."""
    for point_dtype in (torch.float32, torch.float64):
        domain, x = Hull(column(0.0, 1.0).to(point_dtype)), column(0.5).to(point_dtype)
        u = solve(lambda y: torch.ones(len(y), dtype=dtype), x, 0.2, domain, sigma, paths=500, steps=600,
                  generator=seeded())  # fmt: skip
        expected = 0.2 if sigma < 1 else mean_time(np.array([0.5]), 0.2, sigma)[0]
        assert u.mean.dtype == point_dtype
        assert abs(float(u.mean) - 1 - expected) < 3 * float(u.error) + 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_points_in_half_precision_stop_when_others_do(dtype):
    """In a domain of one's own; those of the package are in single or double precision."""
    u = solve(ones, torch.zeros(1, 2, dtype=dtype), 0.5, Disc(), 0.5, paths=5000, generator=seeded())
    expected = solve(ones, torch.zeros(1, 2), 0.5, Disc(), 0.5, paths=5000, generator=seeded(1))
    assert abs(float(u.mean) - float(expected.mean)) < 3 * math.hypot(u.error, expected.error) + torch.finfo(dtype).eps


def test_a_potential_has_its_gradient_in_inference_mode_too():
    drift = gradient_of(lambda x: x.square().sum(1))
    with torch.inference_mode():
        x = column(0.3, 0.6)
        inside = solve(ones, x, 0.1, INTERVAL, 0.5, drift, paths=9, generator=seeded()).mean
        assert torch.equal(drift(x), 2 * x)
    assert torch.equal(drift(x), 2 * x)
    assert torch.equal(solve(ones, x, 0.1, INTERVAL, 0.5, drift, paths=9, generator=seeded()).mean, inside)


def test_no_graph_of_the_loss_is_kept():
    net = torch.nn.Linear(1, 1).double()

    def loss(x):
        return net(x)[:, 0].square()

    assert not solve(loss, column(0.5), 0.1, INTERVAL, 0.5, paths=9).mean.requires_grad
    assert not solve_by_bridges(loss, column(0.5), 0.1, column(0.0, 1.0), 0.5, paths=9).mean.requires_grad


# Promises


def test_at_time_zero_and_on_memory_u_is_the_loss_itself():
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    domain, x = MemoryDomain(points, eps=0.01), torch.tensor([[0.0, 0.05], [0.3, 0.3]])

    def loss(y):
        return y.sum(1) + 1

    at_time_zero = solve(loss, x, 0.0, domain, 1.0)
    assert torch.allclose(at_time_zero.mean, loss(x))
    assert (at_time_zero.error < 1e-6).all()
    at_time_one = solve(loss, x, 1.0, domain, 1.0)
    assert torch.isclose(at_time_one.mean[0], loss(x)[0])
    assert at_time_one.stopped[0] == 1
    assert at_time_one.error[1] > 0


def test_chunks_bound_the_memory_and_do_not_change_what_is_estimated():
    largest = 0

    def loss(x):
        nonlocal largest
        largest = max(largest, len(x))
        return wavy(x)

    x = column(0.2, 0.5, 0.8)
    at_once = solve(wavy, x, 0.2, INTERVAL, 1.0, paths=5000, generator=seeded())
    in_chunks = solve(loss, x, 0.2, INTERVAL, 1.0, paths=5000, chunk=700, generator=seeded(1))
    assert largest <= 700
    assert ((at_once.mean - in_chunks.mean).abs() <= 3 * torch.hypot(at_once.error, in_chunks.error)).all()
    assert torch.allclose(at_once.error, in_chunks.error, rtol=0.05)


def test_the_error_is_that_of_the_mean():
    """Over many repeats the estimates spread as much as each one says."""
    x = column(*[0.4] * 400)
    u = solve(wavy, x, 0.3, INTERVAL, 0.5, paths=100, steps=20, generator=seeded())
    assert abs(float(u.mean.std() / u.error.mean()) - 1) < 0.1


@pytest.mark.parametrize("chunk", [None, 700])
def test_the_error_is_not_lost_in_the_rounding_of_large_losses(chunk):
    """A constant added to the loss where a path ends adds to u, and leaves the error as it is."""
    x, options = column(0.2, 0.5, 1.0), {"source": 0.0, "paths": 2000, "steps": 10, "chunk": chunk}
    small = solve(wavy, x, 0.1, INTERVAL, 0.5, generator=seeded(), **options)
    large = solve(lambda x: 1e9 + wavy(x), x, 0.1, INTERVAL, 0.5, generator=seeded(), **options)
    assert torch.allclose(large.error, small.error, atol=1e-6)
    assert small.error[2] < 1e-12  # on the edge


def test_the_same_generator_gives_the_same_estimate_and_points_may_have_any_shape():
    points = torch.randn(9, 1, 2, generator=seeded())
    domain = MemoryDomain(points, eps=0.01)
    x = domain.interior(5, seeded(1))

    def loss(y):
        assert y.shape[1:] == (1, 2)
        return y.square().sum((1, 2))

    first, second = (solve(loss, x, 0.1, domain, 0.5, lambda y: -y, paths=50, generator=seeded(3)) for _ in range(2))
    assert torch.equal(first.mean, second.mean)
    assert first.mean.shape == first.error.shape == (5,)


def test_in_many_dimensions_paths_run_in_the_tube_round_a_flat_hull():
    """Far from memory the way out is across the hull's plane, in all other directions: |W| = √ε on average at ε/2dσ."""
    points = torch.zeros(2, 30, dtype=torch.float64)
    points[1, 0] = 100.0
    domain, x = MemoryDomain(points, eps=1.0), torch.zeros(1, 30, dtype=torch.float64)
    x[0, 0] = 50.0
    u, error = extrapolated(ones, x, 1.0, domain, 0.5, paths=2000, steps=200)
    assert abs(float(u) - 1 - 1 / (2 * 29 * 0.5)) <= 3 * float(error)


@pytest.mark.gpu
def test_a_gpu_estimates_the_same():
    points = torch.randn(14, 2, generator=seeded())
    x = MemoryDomain(points, eps=0.01).interior(16, seeded(1))
    x = x[MemoryDomain(points, eps=0.01).hit(x) > 0.05]
    estimates = []
    for device in ("cpu", "cuda"):
        domain = MemoryDomain(points.to(device), eps=0.01)
        generator = torch.Generator(device).manual_seed(0)
        estimates.append(solve(wavy, x.to(device), 0.5, domain, 0.3, torch.neg, paths=20_000, generator=generator))
    assert estimates[1].mean.is_cuda
    gap = (estimates[0].mean - estimates[1].mean.cpu()).abs()
    assert (gap <= 3 * torch.hypot(estimates[0].error, estimates[1].error.cpu())).all()


# Bad input


class HalfLine:
    """The half-line x < 1, with the methods that are given in place of its own."""

    def __init__(self, inside=None, hit=None, nearest=None):
        self.inside = inside or (lambda x: x[:, 0] <= 1)
        self.hit = hit or (lambda x: 1 - x[:, 0])
        self.nearest = nearest or torch.ones_like


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": column(0.5, 1.5, 2.0)}, "x: got 2 points outside the domain, the first in row 1"),
        ({"x": torch.tensor([[1]])}, "x: .* expected a floating-point tensor"),
        ({"x": column(float("nan"))}, "x: got 1 values that are NaN"),
        ({"sigma": -1.0}, "sigma: got -1.0, expected a number above 0"),
        ({"sigma": 0}, "sigma: got 0"),
        ({"t": -0.1}, "t: got -0.1, expected a number of at least 0"),
        ({"drift": lambda x: x[:, 0]}, r"drift: got a tensor of shape \[1\]"),
        ({"drift": lambda x: x.float()}, "drift: .* type float32"),
        ({"drift": 2.0}, r"drift: got 2.0, expected a function that is called as drift\(x\)"),
        ({"drift": gradient_of(lambda x: x)}, r"potential: .* expected to return one number per point, a tensor \[1\]"),
        ({"drift": lambda x: x / 0}, "drift: got 1 values that are NaN or infinite.* it is the drift itself"),
        (
            {"drift": gradient_of(lambda x: x.detach().sum(1))},
            "potential: got a result that does not depend on x, expected .* operations of torch",
        ),
        ({"domain": HalfPlane}, "domain: got <class .*, expected an object with the methods inside, hit and nearest"),
        ({"domain": HalfLine(inside=lambda x: x[:, 0])}, r"domain.inside: .* expected .* shape \[1\] and type bool"),
        ({"domain": HalfLine(hit=lambda x: 1 - x.abs())}, r"domain.hit: .* expected .* shape \[1\] and type float64"),
        ({"domain": HalfLine(hit=lambda x: x[:, 0] < 1)}, r"domain.hit: .* bool, expected .* type float64"),
        ({"domain": HalfLine(nearest=lambda x: x[:, 0])}, r"domain.nearest: .* expected .* shape \[1, 1\]"),
        ({"loss": None}, "loss: got None, expected a function from points to their losses"),
        ({"generator": 3}, r"generator: got 3, expected a torch.Generator; pass torch.Generator\(\).manual_seed\(3\)"),
        (
            {"domain": column(0.5)},
            "domain: got a tensor .*, expected an object with the methods inside, hit and nearest",
        ),
        ({"x": [[0.5]]}, r"x: .*; convert it with torch.as_tensor\(x\).float\(\)"),
        ({"loss": lambda x: x}, r"loss: .* expected to return one number per point, a tensor \[1\]"),
        ({"loss": lambda x: x[:, 0] - 9}, "loss: got -8.5, expected no negative loss"),
        ({"by": "weigh"}, "by: got 'weigh', expected one of reweight, simulate"),
        ({"paths": 1}, "paths: got 1"),
        ({"steps": 0}, "steps: got 0"),
        ({"chunk": 0}, "chunk: got 0"),
        ({"source": float("inf")}, "source: got inf"),
    ],
)
def test_bad_input_is_refused_by_name(change, message):
    arguments = {"loss": wavy, "x": column(0.5), "t": 0.1, "domain": INTERVAL, "sigma": 1.0, **change}
    with pytest.raises(InputError, match=message):
        solve(**arguments)


def test_bridges_refuse_ends_of_another_shape():
    with pytest.raises(InputError, match="ends: .* expected at least one point of the shape"):
        solve_by_bridges(wavy, column(0.5), 1.0, torch.zeros(3, 2, dtype=torch.float64), 1.0)
    with pytest.raises(InputError, match="ends: got 1 values that are NaN"):
        solve_by_bridges(wavy, column(0.5), 1.0, column(0.5, math.nan), 1.0)
    with pytest.raises(InputError, match="generator: got 3, expected a torch.Generator"):
        solve_by_bridges(wavy, column(0.5), 1.0, column(0.5), 1.0, generator=3)


def test_a_potential_is_a_function():
    with pytest.raises(InputError, match=r"potential: got 2.0, expected a function that is called as potential\(x\)"):
        gradient_of(2.0)


@pytest.mark.parametrize("d", [3, 4, 6])
def test_far_from_every_edge_no_path_stops_in_any_dimension(d):
    """With ℓ = ‖x‖² and no edge in reach, u(0, 1) = E‖X₁‖² + ∫ E‖X‖² ds = 2σd + σd."""
    points = 20 * torch.cat([torch.eye(d), -torch.eye(d)]).double()
    start, domain = torch.zeros(1, d, dtype=torch.float64), MemoryDomain(points, eps=0.01)
    u = solve(lambda x: x.square().sum(1), start, 1.0, domain, 0.5, paths=2000, generator=seeded())
    assert u.stopped == 0
    assert abs(u.mean - 1.5 * d) < 4 * u.error
