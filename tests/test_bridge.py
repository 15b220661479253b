"""Brownian bridges: their ends, their distribution, and invalid input."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parabolic import InputError, bridge, on_simplex
from parabolic.pde import log_girsanov

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def generator(seed=0, device="cpu"):
    return torch.Generator(device).manual_seed(seed)


@settings(max_examples=200, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), max_size=3),
    n=st.integers(1, 5),
    times=st.integers(2, 9),
    bridges=st.integers(1, 3),
    variant=st.sampled_from(["paper", "reference"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    seed=st.integers(0, 2**31),
)
def test_both_ends_are_hit_to_the_bit(shape, n, times, bridges, variant, dtype, scale, seed):
    seeded = generator(seed)
    start, end = (scale * torch.randn(2, n, *shape, generator=seeded)).to(dtype)
    path = bridge(start, end, 0.5 * scale, times, bridges, variant=variant, generator=seeded)
    assert path.shape == (n, bridges, times, *shape)
    assert path.dtype == dtype
    assert torch.equal(path[:, :, 0], start[:, None].expand(n, bridges, *shape))
    assert torch.equal(path[:, :, -1], end[:, None].expand(n, bridges, *shape))


@pytest.mark.parametrize("variant", ["paper", "reference"])
def test_common_noise_moves_all_coordinates_alike_and_has_the_law_of_one(variant):
    start, end = torch.randn(2, 4, 3, 2, generator=generator(), dtype=torch.float64)
    path = bridge(start, end, 0.5, 6, 2, variant=variant, common=True, generator=generator(1))
    noise = path - bridge(start, end, 0.0, 6, 2)
    noise_of_one = bridge(torch.zeros(4, 1, dtype=start.dtype), torch.zeros(4, 1, dtype=start.dtype), 0.5, 6, 2,
                          variant=variant, generator=generator(1))  # fmt: skip
    assert torch.allclose(noise, noise_of_one[..., None].expand_as(noise), atol=1e-14)
    assert noise[:, :, 1:-1].abs().min() > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("sigma", "horizon", "times"), [(1.0, 1.0, 5), (0.3, 1.0, 8), (2.0, 2.5, 6)])
def test_mean_and_covariance_are_those_of_a_bridge(sigma, horizon, times, dtype, device):
    """Mean on the line between the ends; covariance σ²T s(1 − s') for s ≤ s'."""
    n = 200_000
    start, end = (
        torch.full((n, 1), -1.0, dtype=dtype, device=device),
        torch.full((n, 1), 2.0, dtype=dtype, device=device),
    )
    path = (
        bridge(start, end, sigma, times, horizon=horizon, generator=generator(1, device))[:, 0, :, 0]
        .cpu()
        .double()
        .numpy()
    )
    s = np.linspace(0, 1, times)
    expected = sigma**2 * horizon * np.minimum.outer(s, s) * (1 - np.maximum.outer(s, s))
    error = 4.5 * sigma * math.sqrt(horizon) / 2 / math.sqrt(n)
    assert np.abs(path.mean(0) - (-1 + 3 * s)).max() < error
    # The variance of an entry of a sample covariance of Gaussians: (c_ii c_jj + c_ij²) / n.
    spread = np.sqrt((np.outer(expected.diagonal(), expected.diagonal()) + expected**2) / n)
    assert (np.abs(np.cov(path.T) - expected) <= 4.5 * spread + 1e-12).all()


def test_marginal_is_gaussian_in_the_paper_and_heavier_in_the_reference():
    n, ends = 100_000, torch.zeros(100_000, 1)
    middle = {
        variant: bridge(ends, ends, 1.0, 5, variant=variant, generator=generator(2))[:, 0, 2, 0]
        for variant in ("paper", "reference")
    }
    kurtosis = {variant: float((points**4).mean() / (points**2).mean() ** 2) for variant, points in middle.items()}
    assert abs(kurtosis["paper"] - 3) < 5 * math.sqrt(24 / n)
    # An increment N·E with E ~ Exp(1) has kurtosis 3·E[E⁴]/E[E²]² = 18; a weighted sum of k of them 3 + 15·Σw⁴/(Σw²)².
    increments = np.array([0.5, 0.5, 0.5, -0.5, -0.5])  # how W(½) − ½W(1) weighs the five: two in the first interval
    expected = 3 + 15 * (increments**4).sum() / (increments**2).sum() ** 2
    assert abs(kurtosis["reference"] - expected) < 0.5


def test_reference_variance_counts_two_increments_in_the_first_interval():
    n, times = 200_000, 5
    ends = torch.zeros(n, 1)
    path = bridge(ends, ends, 1.0, times, variant="reference", generator=generator(3))[:, 0, :, 0]
    s, step = torch.linspace(0, 1, times), 1 / (times - 1)
    for time in range(1, times - 1):
        weights = torch.tensor([1 - s[time]] * (time + 1) + [-s[time]] * (times - 1 - time))
        expected = 2 * step * float((weights**2).sum())  # E[E²] = 2
        assert path[:, time].var().item() == pytest.approx(expected, rel=0.05)


def test_sigma_may_change_along_the_path_and_from_pair_to_pair():
    """With σ(t) on the interval after t, W − sW(1) has variance Σ σᵢ²Δ·(weight)², computed by hand."""
    n, times = 100_000, 4
    sigma = torch.tensor([0.5, 1.0, 2.0, 99.0])  # the last is never used: no interval follows it
    ends = torch.zeros(n, 1)
    path = bridge(ends, ends, sigma, times, generator=generator(4))[:, 0, :, 0]
    weights = torch.tensor([[2 / 3, -1 / 3, -1 / 3], [1 / 3, 1 / 3, -2 / 3]])
    expected = (weights**2 * sigma[:3] ** 2 / 3).sum(1)
    assert torch.allclose(path[:, 1:3].var(0), expected, rtol=0.03)
    before = sigma[:3].square().cumsum(0)[:2] / 3
    after, s = sigma[:3].square().sum() / 3 - before, torch.tensor([1 / 3, 2 / 3])
    assert torch.allclose(expected, (1 - s) ** 2 * before + s**2 * after)  # as the docstring says
    assert not torch.allclose(expected, before * after / (before + after), rtol=0.3)  # that of a Brownian bridge
    by_pair = bridge(ends, ends, sigma.expand(n, times), times, generator=generator(4))[:, 0, :, 0]
    assert torch.equal(by_pair, path)
    constant_sigma = bridge(ends[:9], ends[:9], sigma[0], times, generator=generator(4))
    assert torch.equal(constant_sigma, bridge(ends[:9], ends[:9], 0.5, times, generator=generator(4)))
    two_sigmas = torch.stack([sigma, 0 * sigma])
    assert torch.equal(
        bridge(ends[:2], ends[:2], two_sigmas, times, generator=generator(5))[1], torch.zeros(1, times, 1)
    )


@pytest.mark.parametrize("variant", ["paper", "reference"])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (0, 2, 4), (2, 0)])
def test_between_no_points_there_are_no_paths(shape, variant):
    ends = torch.zeros(shape)
    for sigma in (0.5, torch.ones(shape[0], 4)):
        for options in ({}, {"shared": True}, {"common": True}):
            path = bridge(ends, ends, sigma, times=4, bridges=2, variant=variant, **options)
            assert path.shape == (shape[0], 2, 4, *shape[1:])


def test_without_noise_it_is_the_straight_line():
    start, end = torch.randn(2, 3, 2, dtype=torch.float64, generator=generator())
    path = bridge(start, end, 0.0, 5)
    for index, share in enumerate((0.0, 0.25, 0.5, 0.75, 1.0)):
        assert torch.allclose(path[:, 0, index], (1 - share) * start + share * end, atol=1e-15)


def test_bridges_of_a_pair_are_independent_and_the_generator_decides_all():
    ends = torch.zeros(50_000, 1)
    path = bridge(ends, ends, 1.0, 3, 2, generator=generator(6))[:, :, 1, 0]
    assert abs(float(torch.corrcoef(path.T)[0, 1])) < 0.02
    before = torch.random.get_rng_state()
    repeated = bridge(ends, ends, 1.0, 3, 2, generator=generator(6))[:, :, 1, 0]
    assert torch.equal(path, repeated)
    assert torch.equal(before, torch.random.get_rng_state())


def test_gradients_flow_to_the_ends():
    start = torch.randn(3, 2, dtype=torch.float64, requires_grad=True, generator=generator())
    end = torch.randn(3, 2, dtype=torch.float64, requires_grad=True, generator=generator(1))
    bridge(start, end, 0.1, 5).sum().backward()
    assert torch.allclose(start.grad, torch.full_like(start, 2.5))
    assert torch.allclose(end.grad, torch.full_like(end, 2.5))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 1000))
def test_on_simplex_is_a_probability_and_leaves_one_alone(n, classes, seed):
    folded = on_simplex(torch.randn(n, classes, generator=generator(seed), dtype=torch.float64))
    assert (folded >= 0).all()
    assert torch.allclose(folded.sum(-1), torch.ones(n, dtype=torch.float64))
    assert torch.allclose(on_simplex(folded), folded)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"start": torch.zeros(2, 2, dtype=torch.long)}, "start"),
        ({"end": torch.zeros(2, 3)}, "end"),
        ({"end": torch.zeros(2, 2, dtype=torch.float64)}, "end"),
        ({"sigma": -0.1}, "sigma"),
        ({"sigma": math.nan}, "sigma"),
        ({"sigma": torch.ones(3)}, "sigma"),
        ({"times": 1}, "times"),
        ({"bridges": 0}, "bridges"),
        ({"bridges": 1.5}, "bridges"),
        ({"horizon": 0}, "horizon"),
        ({"variant": "papr"}, "variant"),
        ({"generator": 3}, "generator"),
    ],
)
def test_bad_input_names_the_argument(arguments, name):
    good = {"start": torch.zeros(2, 2), "end": torch.zeros(2, 2)}
    with pytest.raises(InputError, match=f"^{name}: got .*, expected "):
        bridge(**(good | arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": [0.0, 1.0]}, "path: got .*, expected paths of two or more times"),
        ({"path": torch.zeros(2, 1, 3, 2).long()}, "path: .* int64, expected .* floating-point"),
        ({"horizon": 0}, "horizon: got 0, expected a number above 0"),
        ({"horizon": -1.0}, "horizon: got -1.0, expected a number above 0"),
        ({"horizon": math.nan}, "horizon: got nan"),
        ({"drift": 2.0}, "drift: got 2.0, expected a function from points to velocities"),
        ({"drift": lambda x: 2.0}, r"drift: got 2.0, expected to return a velocity for each point, \[4, 2\]"),
        ({"drift": lambda x: x[:, :1]}, r"drift: .* expected to return a velocity for each point, \[4, 2\]"),
    ],
)
def test_bad_input_to_girsanovs_weight_names_the_argument(arguments, message):
    good = {"path": torch.zeros(2, 1, 3, 2), "drift": lambda x: x}
    with pytest.raises(InputError, match=f"^{message}"):
        log_girsanov(**(good | arguments))


@pytest.mark.parametrize("path", [[0.5, 0.5], torch.ones(2, 3, dtype=torch.long), torch.tensor(1.0)])
def test_only_tensors_of_numbers_are_folded_onto_the_simplex(path):
    with pytest.raises(InputError, match=r"^path: got .*, expected a floating-point tensor \[..., classes\]"):
        on_simplex(path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("strength", [0.02, 20.0])
def test_girsanovs_weights_of_paths_of_a_short_type_are_as_exact_as_the_paths(dtype, strength):
    ends = torch.randn(2, 6, 3072, generator=torch.Generator().manual_seed(0)).to(dtype)
    paths = bridge(*ends, 0.03, generator=torch.Generator().manual_seed(1))

    def drift(x):
        return (strength * x.double()).to(dtype)

    ours = log_girsanov(paths, drift)
    exact = log_girsanov(paths.double(), lambda x: drift(x.to(dtype)).double())
    assert torch.allclose(ours.double(), exact, rtol=1e-5, atol=1e-4)
