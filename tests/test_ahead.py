"""A step ahead as one operation, against the operations that it is made of."""

import pytest
import torch
from torch.nn.functional import hardtanh

from parabolic.learners.ahead import step_ahead

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LIMIT = 0.75


def vectors(size, device, dtype=torch.float32):
    """Weights, rates, and descents of which some are beyond the limit, or right on it."""
    weights, rates, descent = torch.randn(3, size, dtype=dtype)
    descent[1::7], descent[2::7] = LIMIT, -LIMIT
    return [each.to(device).requires_grad_() for each in (weights, rates, descent)]


def in_parts(weights, rates, descent, limit=LIMIT):
    return weights + rates * hardtanh(descent, -limit, limit)


def test_the_gradient_is_that_of_finite_differences():
    weights, rates, descent = vectors(8, "cpu", torch.float64)
    descent = (descent.detach() * 0.99).requires_grad_()  # on the limit there is none
    assert torch.autograd.gradcheck(lambda *given: step_ahead(*given, LIMIT)[0], [weights, rates, descent])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 1000, 1024, 5003, 100_000])
def test_it_is_made_of_plain_operations(size, device):
    given = vectors(size, device)
    ours, theirs = step_ahead(*given, LIMIT)[0], in_parts(*given)
    slope = torch.randn(size, device=device)
    # On a GPU product and sum are rounded together.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if device == "cpu" else 5e-7)
    of_ours, of_theirs = (torch.autograd.grad(made, given, slope) for made in (ours, theirs))
    assert all(torch.equal(one, other) for one, other in zip(of_ours, of_theirs, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_vectors_may_lie_anyhow(device):
    given = [torch.stack([each, each], 1)[:, 1] for each in vectors(3000, device)]
    ours, theirs = step_ahead(*given, LIMIT)[0], in_parts(*given)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-7)
    of_ours, of_theirs = (torch.autograd.grad(made.sum(), given) for made in (ours, theirs))
    assert all(torch.equal(one, other) for one, other in zip(of_ours, of_theirs, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_rates_that_are_fixed_get_no_gradient(device):
    weights, rates, descent = vectors(3000, device)
    made, _, _ = step_ahead(weights, rates.detach(), descent, LIMIT)
    made.square().sum().backward()
    expected = torch.autograd.grad(in_parts(weights, rates, descent).square().sum(), [weights, descent])
    assert rates.grad is None
    for one, other in zip((weights.grad, descent.grad), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_no_number_stays_so(device):
    weights, rates, descent = (each.detach() for each in vectors(3000, device))
    descent[5], descent[6] = torch.nan, torch.inf
    made, _, _ = step_ahead(weights, rates, descent, LIMIT)
    assert made.isnan().nonzero().tolist() == [[5]]
    torch.testing.assert_close(made[6], weights[6] + rates[6] * LIMIT)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("used", [[1], [2], [0, 1], [1, 2], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("fixed", [True, False])
def test_gradients_of_all_uses_are_added_up_in_order(used, fixed, device):
    given = vectors(3000, device)
    given[1].requires_grad_(not fixed)
    ours, theirs = step_ahead(*given, LIMIT), in_parts(*given)
    assert len({each.data_ptr() for each in ours}) == 1
    slopes = [torch.randn(3000, device=device) for _ in used]
    wanted = [each for each in given if each.requires_grad]
    of_ours = torch.autograd.grad([ours[use] for use in used], wanted, slopes)
    of_theirs = torch.autograd.grad(theirs, wanted, sum(slopes[1:], slopes[0]))
    assert all(torch.equal(one, other) for one, other in zip(of_ours, of_theirs, strict=True))
