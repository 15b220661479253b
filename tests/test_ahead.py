"""A step ahead as one operation, against the operations that it is made of."""

import pytest
import torch
from torch.nn.functional import hardtanh

from parabolic.learners.ahead import in_types, step_ahead

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LIMIT = 0.75


def vectors(size, device, dtype=torch.float32):
    """Weights, rates, and descents of which some are beyond the limit, or right on it."""
    weights, rates, descent = torch.randn(3, size, dtype=dtype)
    descent[1::7], descent[2::7] = LIMIT, -LIMIT
    return [each.to(device).requires_grad_() for each in (weights, rates, descent)]


def ahead(weights, rates, descent):
    return step_ahead(weights, rates, [descent], LIMIT)[0]


def in_parts(weights, rates, descent):
    return weights + rates * hardtanh(descent, -LIMIT, LIMIT)


def alike(ours, theirs):
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_the_gradient_is_that_of_finite_differences():
    weights, rates, descent = vectors(8, "cpu", torch.float64)
    descent = (descent.detach() * 0.99).requires_grad_()  # on the limit there is none
    assert torch.autograd.gradcheck(ahead, [weights, rates, descent])
    assert torch.autograd.gradcheck(lambda w, r, d: step_ahead(w, r, [d], LIMIT)[3][0], [weights, rates, descent])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 1000, 1024, 5003, 100_000])
def test_it_is_made_of_plain_operations(size, device):
    given = vectors(size, device)
    ours, theirs = ahead(*given), in_parts(*given)
    slope = torch.randn(size, device=device)
    # On a GPU product and sum are rounded together.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if device == "cpu" else 5e-7)
    assert alike(*(torch.autograd.grad(made, given, slope) for made in (ours, theirs)))


@pytest.mark.parametrize("device", DEVICES)
def test_vectors_may_lie_anyhow(device):
    given = [torch.stack([each, each], 1)[:, 1] for each in vectors(3000, device)]
    ours, theirs = ahead(*given), in_parts(*given)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-7)
    assert alike(*(torch.autograd.grad(made.sum(), given) for made in (ours, theirs)))


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_no_number_stays_so(device):
    weights, rates, descent = (each.detach() for each in vectors(3000, device))
    descent[5], descent[6] = torch.nan, torch.inf
    made = ahead(weights, rates, descent)
    assert made.isnan().nonzero().tolist() == [[5]]
    torch.testing.assert_close(made[6], weights[6] + rates[6] * LIMIT)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("used", [[0], [1], [2], [0, 1], [1, 2], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("fixed", [True, False])
def test_gradients_of_all_uses_are_added_up_in_order(used, fixed, device):
    weights, rates, descent = vectors(3000, device)
    rates.requires_grad_(not fixed)
    whole, _, (one,), (other,) = step_ahead(weights, rates, [descent], LIMIT)
    ours, theirs = (whole, one, other), in_parts(weights, rates, descent)
    assert len({each.data_ptr() for each in ours}) == 1
    slopes = [torch.randn(3000, device=device) for _ in used]
    wanted = [weights, descent] if fixed else [weights, rates, descent]
    of_ours = torch.autograd.grad([ours[use] for use in used], wanted, slopes)
    assert alike(of_ours, torch.autograd.grad(theirs, wanted, sum(slopes[1:], slopes[0])))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fixed", [True, False])
def test_rates_that_are_passed_on_gather_the_gradients_of_all_steps(fixed, device):
    weights, rates, descent = vectors(3000, device)
    rates.requires_grad_(not fixed)
    ours, passed, theirs = weights, rates, weights
    for sign in (1, -2, 3):
        ours, passed, _, _ = step_ahead(ours, passed, [sign * descent], LIMIT)
        theirs = in_parts(theirs, rates, sign * descent)
    assert passed.requires_grad is not fixed
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    slope, wanted = torch.randn(3000, device=device), [weights, descent] if fixed else [weights, descent, rates]
    of_ours, of_theirs = (torch.autograd.grad(made, wanted, slope) for made in (ours, theirs))
    torch.testing.assert_close(of_ours, of_theirs, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("used", [[0], [1, 2], [0, 1, 2]])
def test_parts_may_be_of_other_types_and_sums_are_made_in_that_of_the_weights(used, device):
    weights, rates, descent = vectors(5003, device)
    sizes, types = [3001, 2002], [torch.bfloat16, torch.float32]
    descents = [
        part.detach().to(dtype).requires_grad_() for part, dtype in zip(descent.split(sizes), types, strict=True)
    ]
    ours = step_ahead(weights, rates, descents, LIMIT)
    wide = torch.cat([part.float() for part in descents])
    theirs = in_parts(weights, rates, wide)
    torch.testing.assert_close(ours[0], theirs, rtol=0, atol=0 if device == "cpu" else 5e-7)
    for parts in ours[2:]:
        assert [part.dtype for part in parts] == types
        assert alike(parts, [part.to(dtype) for part, dtype in zip(ours[0].split(sizes), types, strict=True)])
    ours = [ours[0], *ours[2:]]
    slopes = [torch.randn(5003, device=device), *[[torch.randn_like(part) for part in parts] for parts in ours[1:]]]
    flat = [slopes[0], *[torch.cat([part.float() for part in parts]) for parts in slopes[1:]]]
    made = [each for use in used for each in ([ours[0]] if use == 0 else ours[use])]
    given = [each for use in used for each in ([slopes[0]] if use == 0 else slopes[use])]
    total = sum((flat[use] for use in used[1:]), flat[used[0]])
    of_ours = torch.autograd.grad(made, [weights, rates, *descents], given)
    assert alike(of_ours, torch.autograd.grad(theirs, [weights, rates, *descents], total))


@pytest.mark.parametrize("device", DEVICES)
def test_parts_of_a_vector_are_cast_to_their_types_and_so_is_its_gradient(device):
    weights = vectors(5003, device)[0]
    sizes, types = [3001, 2002], [torch.bfloat16, torch.float32]
    ours = in_types(weights, sizes, types)
    theirs = [part.to(dtype) for part, dtype in zip(weights.split(sizes), types, strict=True)]
    assert alike(ours, theirs)
    assert ours[1].data_ptr() == weights[3001:].data_ptr()  # what has the type already is not moved
    slopes = [torch.randn_like(part) for part in ours]
    assert alike(*(torch.autograd.grad(parts, weights, slopes) for parts in (ours, theirs)))
