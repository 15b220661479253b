"""Domains: signed distances, nearest points and membership, against closed forms, optimality and linear programs."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from parabolic.checks import InputError
from parabolic.gpus import tf32
from parabolic.pde import Balls, Domain, Hull, Intersection, MemoryDomain


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=generator(seed), dtype=dtype)


def cube(d):
    return torch.tensor(list(itertools.product([-1.0, 1.0], repeat=d)), dtype=torch.float64)


def cube_distance(x):
    """The signed distance to the surface of [−1, 1]^d, positive inside: a closed form."""
    over = x.abs() - 1
    return torch.where((over <= 0).all(1), -over.amax(1), -over.clamp_min(0).norm(dim=1))


@pytest.mark.parametrize("d", [1, 2, 5])
def test_a_domain_is_that_of_the_points_as_they_were(d):
    """Also if they are part of a graph, as features of a network are, or are overwritten later, as a memory is."""
    points, x = normal(9, d), normal(5, d, seed=1)
    domain, expected = MemoryDomain(points.requires_grad_(), eps=0.01), MemoryDomain(normal(9, d), eps=0.01)
    points.detach().zero_()
    for of in ("hit", "nearest", "inside"):
        assert torch.equal(getattr(domain, of)(x), getattr(expected, of)(x))
    for sample in ("edge", "interior"):
        found, others = (getattr(each, sample)(20, generator()) for each in (domain, expected))
        assert torch.equal(found, others)
        assert not found.requires_grad
    assert torch.equal(domain.points, expected.points)


# Balls


@pytest.mark.parametrize("shape", [(1,), (2,), (3, 4, 4), (3072,)])
def test_hitting_a_ball_is_the_distance_to_the_nearest_point_less_the_root_of_eps(shape):
    points, x = normal(40, *shape), normal(25, *shape, seed=1)
    distance = np.linalg.norm(x.numpy().reshape(25, 1, -1) - points.numpy().reshape(1, 40, -1), axis=2).min(1)
    assert np.allclose(Balls(points, eps=0.09).hit(x).numpy(), distance - 0.3, atol=1e-10)


def test_the_nearest_point_of_a_ball_is_on_its_surface_and_on_the_way_to_its_centre():
    points, x = normal(10, 3), normal(50, 3, seed=1)
    balls = Balls(points, eps=0.04)
    nearest = balls.nearest(x)
    assert balls.hit(nearest).abs().max() < 1e-7
    assert torch.allclose((x - nearest).norm(dim=1), balls.hit(x).abs())


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
def test_single_precision_far_from_the_origin_loses_no_more_than_the_points_themselves(offset):
    points = (normal(200, 64) + offset).float()
    x = (points[:50].double() + 0.01 * normal(50, 64, seed=1)).float()
    exact = torch.cdist(x.double(), points.double(), compute_mode="donot_use_mm_for_euclid_dist").amin(1)
    distances = Balls(points, eps=1e-4).hit(x) + 0.01
    assert (distances - exact).abs().max() < 1e-6 + 1e-7 * offset


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
@pytest.mark.parametrize("d", [1, 2, 3])
def test_a_hull_far_from_the_origin_is_as_exact_as_one_about_it(d, offset):
    points = (normal(20, d) + offset).float()
    x = (2 * normal(200, d, seed=1) + offset).float()  # inside and outside
    hull, exact = Hull(points, margin=0.1), Hull(points.double(), margin=0.1)
    assert (hull.hit(x) - exact.hit(x.double())).abs().max() < 2e-6
    assert (hull.nearest(x) - exact.nearest(x.double())).abs().max() < 2e-6 + 1e-7 * offset
    assert hull.inside(points).all()


def test_distances_to_many_points_of_many_dimensions_fit_in_memory():
    points, x = normal(1000, 3072, dtype=torch.float32), normal(500, 3072, seed=1, dtype=torch.float32)
    # The table of all differences would take 6 GB.
    assert Balls(points, eps=1.0).hit(x).shape == (500,)


# Hulls


@pytest.mark.parametrize("margin", [0.0, 0.3])
@pytest.mark.parametrize("d", [1, 2, 3])
def test_the_distance_to_a_cube_is_exact_in_few_dimensions(d, margin):
    hull, x = Hull(cube(d), margin), 1.2 * normal(500, d, seed=d)
    expected = cube_distance(x)
    assert torch.allclose(hull.hit(x), expected + margin, atol=1e-12)
    assert torch.equal(hull.inside(x), expected + margin >= 0)
    nearest = hull.nearest(x)
    assert hull.hit(nearest).abs().max() < 1e-9
    assert torch.allclose((nearest - x).norm(dim=1), (expected + margin).abs())


@pytest.mark.parametrize("margin", [0.0, 0.3])
@pytest.mark.parametrize(("points", "d"), [(9, 1), (20, 3), (40, 6), (5, 9)])  # the last is flat
def test_the_distance_and_the_nearest_point_are_the_same_together(points, d, margin):
    far = torch.linspace(0.2, 2, 50, dtype=torch.float64)[:, None]  # from deep inside to far outside
    hull, x = Hull(normal(points, d).reshape(points, 1, d), margin), (far * normal(50, d, seed=1)).reshape(50, 1, d)
    gap, nearest = hull.meet(x)
    assert torch.equal(gap, hull.hit(x))
    assert torch.equal(nearest, hull.nearest(x))
    assert {*(gap > 0).tolist()} >= ({False} if hull.flat else {True, False})


@pytest.mark.parametrize("margin", [0.0, 0.3])
def test_in_more_dimensions_the_distance_outside_a_cube_is_within_the_tolerance(margin):
    hull, x = Hull(cube(6), margin), 0.7 * normal(200, 6, seed=4)
    outside = cube_distance(x) < -1e-3
    assert 50 < outside.sum() < 150
    distances = hull.hit(x)
    assert (distances - cube_distance(x) - margin)[outside].abs().max() <= 1e-4 * hull.radius
    well_inside = cube_distance(x) > 1e-3
    assert distances[well_inside].isinf().all()  # how deep inside, nobody knows
    assert torch.equal(hull.nearest(x)[well_inside], x[well_inside])
    assert torch.equal(hull.inside(x), cube_distance(x) + margin >= 0)


@pytest.mark.parametrize("count", [8, 30, 200])
def test_the_projection_onto_a_hull_is_the_point_from_which_all_others_are_away(count):
    """p is nearest to x in the hull if and only if (x − p)·(q − p) ≤ 0 for every point q of it."""
    points = normal(count, 20) * torch.logspace(0, -2, 20, dtype=torch.float64)  # flat in some directions
    weights = torch.distributions.Dirichlet(torch.full((count,), 0.2, dtype=torch.float64))
    torch.manual_seed(0)
    x = weights.sample((40,)) @ points + 0.3 * normal(40, 20, seed=2)
    hull = Hull(points, tolerance=1e-7)
    projection = hull.nearest(x)
    away = ((x - projection) @ points.T).amax(1) - ((x - projection) * projection).sum(1)
    assert away.max() < 1e-5 * hull.radius**2
    assert hull.inside(projection).all()
    assert torch.allclose(-hull.hit(x), (x - projection).norm(dim=1), atol=1e-5)


def in_hull_by_linear_programming(points, x):
    """Whether weights w ≥ 0 exist with Σw = 1 and Σ wᵢ pᵢ = x."""
    system = np.vstack([points.T, np.ones(len(points))])
    return linprog(np.zeros(len(points)), A_eq=system, b_eq=np.append(x, 1), bounds=(0, None)).status == 0


def inside_and_outside(points, seed=0):
    """Mixtures of the points; the same with one weight below zero; and the first, moved off the points' plane."""
    rng = np.random.default_rng(seed)
    n, d = points.shape
    dense, sparse = rng.dirichlet(np.ones(n), 2), rng.dirichlet(np.full(n, 0.02), 2)
    weights_outside = np.concatenate([dense, sparse])
    weights_outside[:, 0] = -0.01
    weights_outside /= weights_outside.sum(1, keepdims=True)
    inside = np.concatenate([dense, sparse]) @ points
    return inside, np.concatenate([weights_outside @ points, inside[:2] + 0.01 * rng.standard_normal((2, d))])


def test_membership_in_3072_dimensions_agrees_with_linear_programming():
    points = np.random.default_rng(1).standard_normal((60, 3072))
    x = np.concatenate(inside_and_outside(points))
    expected = [in_hull_by_linear_programming(points, point) for point in x]
    assert expected == [True] * 4 + [False] * 6
    assert Hull(torch.tensor(points)).inside(torch.tensor(x)).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_membership_among_1000_points_of_3072_dimensions(dtype):
    points = np.random.default_rng(1).standard_normal((1000, 3072))
    inside, outside = inside_and_outside(points)
    hull = Hull(torch.tensor(points, dtype=dtype))
    assert hull.inside(torch.tensor(inside, dtype=dtype)).all()
    assert not hull.inside(torch.tensor(outside, dtype=dtype)).any()


def test_a_flat_hull_in_few_dimensions_is_known_by_projection():
    line = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    assert Hull(line).flat
    assert Hull(line).inside(torch.tensor([[0.5, 0.5], [0.5, 0.6]])).tolist() == [True, False]
    with_margin = Hull(line, margin=0.5)
    assert torch.allclose(
        with_margin.hit(torch.tensor([[1.0, 1.0], [0.0, 2.0]])), torch.tensor([0.5, 0.5 - 2**0.5]), atol=1e-3
    )
    single_point = Hull(torch.ones(3, 2), margin=0.5)
    assert torch.allclose(single_point.hit(torch.tensor([[1.0, 3.0]])), torch.tensor([-1.5]))


# Both together


def test_a_memory_domain_stops_at_the_first_of_balls_and_hull():
    points, x = normal(12, 2), normal(300, 2, seed=1)
    domain = MemoryDomain(points, eps=0.01, margin=0.0)
    assert isinstance(domain, Domain)
    assert torch.equal(domain.hit(x), torch.minimum(Balls(points, 0.01).hit(x), Hull(points).hit(x)))
    assert torch.equal(domain.inside(x), Hull(points).inside(x))
    inside = domain.hit(x) > 0
    assert domain.hit(domain.nearest(x))[inside].max() < 1e-9


def test_by_default_the_hull_is_that_of_the_balls():
    """The hull of M^(ε) is all that lies within √ε of the hull of M: a corner's ball is in it."""
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    x = torch.tensor([[-0.099, 0.0], [0.0, -0.101], [-0.08, -0.08], [0.5, -0.099]])
    assert MemoryDomain(points, eps=0.01).inside(x).tolist() == [True, False, False, True]
    assert not MemoryDomain(points, eps=0.01, margin=0.0).inside(x).any()


@pytest.mark.parametrize(("n", "shape"), [(6, (1,)), (9, (2,)), (9, (3,)), (40, (12,)), (10, (2, 3, 3))])
def test_scattered_points_are_where_they_should_be(n, shape):
    domain = MemoryDomain(normal(n, *shape), eps=0.04)
    inside, edge = domain.interior(64, generator(1)), domain.edge(65, generator(1))
    assert inside.shape == (64, *shape)
    assert edge.shape == (65, *shape)
    assert domain.inside(inside).all()
    # On the surface of a ball or of the hull; a ball's surface may lie in another ball.
    on_ball, on_hull = domain.balls.hit(edge), domain.hull.hit(edge)
    assert on_ball[::2].max() < 1e-6
    assert on_hull[1::2].abs().max() < 2e-3 * domain.hull.radius
    assert torch.equal(domain.edge(65, generator(1)), edge)


def test_scattered_points_fill_the_margin_at_all_depths():
    domain = MemoryDomain(4 * torch.eye(20).double()[:3], eps=0.25)
    depth = domain.hull.hit(domain.interior(2000, generator()))
    assert (depth >= 0).all()
    assert ((depth / 0.5 * 4).long().clamp_max(3).bincount(minlength=4) > 200).all()
    solid = MemoryDomain(cube(3), eps=0.25)
    depth = solid.hull.hit(solid.interior(2000, generator()))
    assert (depth > 0).all()
    assert (depth < 0.25).sum() > 20  # beyond the hull of the points
    without_margin = MemoryDomain(cube(3), eps=0.25, margin=0.0)
    assert (without_margin.hull.hit(without_margin.interior(2000, generator())) > -1e-12).all()


@pytest.mark.parametrize("spread", [0.0, 1.0])  # of points that are one, and of others
@pytest.mark.parametrize("offset", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("d", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_edge_of_a_memory_is_inside_wherever_it_lies(dtype, d, offset, spread):
    points = ((normal(1, d) + 1) * offset + spread * normal(7, d, seed=1)).to(dtype)
    domain = MemoryDomain(points, eps=0.01)
    assert domain.inside(domain.edge(200, generator())).all()
    assert domain.inside(domain.interior(200, generator())).all()
    rounding = torch.finfo(dtype).eps * points.norm(dim=1).max().double()
    directions = torch.nn.functional.normalize(normal(50, d, seed=2))
    far_points = points.double().mean(0) + (domain.hull.radius + 0.101 + 10 * rounding) * directions
    assert not domain.inside(far_points.to(dtype)).any()  # nor is much else


def test_the_hull_of_points_that_are_one_needs_no_search(monkeypatch):
    monkeypatch.setattr("parabolic.pde.domain.ITERATIONS", 0)
    points = torch.full((12, 64), 0.1).double() + normal(64)  # their mean is another number, by rounding
    hull, offsets = Hull(points, margin=0.5), normal(30, 64, seed=1)
    assert torch.allclose(hull.hit(points[0] + offsets), 0.5 - offsets.norm(dim=1))


# Bad input


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Balls(torch.zeros(3, 2), eps=0), "eps: got 0, expected a number above 0; it is the squared radius"),
        (lambda: Balls(torch.zeros(0, 2), eps=1.0), "points: .* expected at least 1 points"),
        (
            lambda: Balls(torch.zeros(3, 2, dtype=torch.int), eps=1.0),
            "points: .* expected a tensor .* float32 or float64",
        ),
        (lambda: Hull(torch.eye(2).half()), r"points: .* float16, expected .* float32 or float64; .*\.float\(\)"),
        (lambda: MemoryDomain(torch.eye(5).bfloat16(), 0.1), "points: .* bfloat16, expected .* float32 or float64"),
        (lambda: Balls(torch.tensor([[float("nan")]]), eps=1.0), "points: got 1 values that are NaN"),
        (lambda: Hull(torch.zeros(1, 2)), "points: .* expected at least 2 points"),
        (lambda: Hull(torch.eye(3), margin=-1), "margin: got -1"),
        (lambda: Hull(torch.eye(3), tolerance=0), "tolerance: got 0"),
        (lambda: MemoryDomain(torch.eye(2), 0.1, margin=0), r"points: .* at least 3, .* leave margin at its default"),
        (lambda: MemoryDomain(torch.zeros(9, 2), 0.1, margin=0), "points: .* not all on one plane"),
        (lambda: Hull(torch.eye(3)).inside(torch.zeros(2, 4)), r"x: .* expected a tensor \[n, 3\]"),
        (lambda: Hull(torch.eye(3)).hit(torch.zeros(2, 3, dtype=torch.float64)), "x: .* expected type torch.float32"),
        (lambda: Intersection(), "parts: .* at least one domain"),
        (lambda: Intersection(Balls(torch.zeros(3, 2), 1.0), 3), "parts: got 3, expected an object with the methods"),
        (lambda: Balls(torch.zeros(3, 2), 1.0).inside(torch.zeros(2, 5)), r"x: .* expected a tensor \[n, 2\]"),
        (lambda: MemoryDomain(torch.eye(3), 0.1).edge(0), "count: got 0"),
    ],
)
def test_bad_input_is_refused_by_name(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_many_points_on_a_plane_of_many_dimensions_make_a_flat_hull():
    plane = normal(60, 3) @ normal(3, 6, seed=1)
    hull = Hull(plane, margin=0.1)
    assert hull.flat
    assert torch.allclose(hull.hit(plane.mean(0, keepdim=True)), torch.tensor([0.1], dtype=torch.float64))
    assert not Hull(normal(60, 6), margin=0.1).flat


@pytest.mark.gpu
@pytest.mark.parametrize("d", [2, 30])
def test_on_a_gpu_distances_are_exact_where_networks_compute_in_tf32(d):
    points, x = torch.randn(50, d, generator=torch.Generator().manual_seed(0)).split([30, 20])
    domain, oracle = MemoryDomain(points.cuda(), eps=0.1), MemoryDomain(points.double(), eps=0.1)
    with tf32(True):
        assert torch.allclose(domain.hit(x.cuda()).cpu().double(), oracle.hit(x.double()), atol=3e-3 if d > 3 else 1e-5)
        assert torch.allclose(domain.balls.hit(x.cuda()).cpu().double(), oracle.balls.hit(x.double()), atol=1e-5)
