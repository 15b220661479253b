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
    return [vector.to(device).requires_grad_() for vector in (weights, rates, descent)]


def ahead(weights, rates, descent):
    return step_ahead(weights, rates, [descent], LIMIT)[0]


def in_parts(weights, rates, descent):
    return weights + rates * hardtanh(descent, -LIMIT, LIMIT)


def all_equal(ours, theirs):
    return all(torch.equal(our_tensor, their_tensor) for our_tensor, their_tensor in zip(ours, theirs, strict=True))


def test_the_gradient_is_that_of_finite_differences():
    weights, rates, descent = vectors(8, "cpu", torch.float64)
    descent = (descent.detach() * 0.99).requires_grad_()  # on the limit there is none
    assert torch.autograd.gradcheck(ahead, [weights, rates, descent])
    assert torch.autograd.gradcheck(
        lambda w, r, d: step_ahead(w, r, [d], LIMIT)[3][0],
        [weights, rates, descent],
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 1000, 1024, 5003, 100_000])
def test_it_is_made_of_plain_operations(size, device):
    inputs = vectors(size, device)
    ours, theirs = ahead(*inputs), in_parts(*inputs)
    slope = torch.randn(size, device=device)
    # On a GPU product and sum are rounded together.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if device == "cpu" else 5e-7)
    assert all_equal(*(torch.autograd.grad(result, inputs, slope) for result in (ours, theirs)))


@pytest.mark.parametrize("device", DEVICES)
def test_vectors_may_lie_anyhow(device):
    inputs = [torch.stack([vector, vector], 1)[:, 1] for vector in vectors(3000, device)]
    ours, theirs = ahead(*inputs), in_parts(*inputs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-7)
    assert all_equal(*(torch.autograd.grad(result.sum(), inputs) for result in (ours, theirs)))


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_no_number_stays_so(device):
    weights, rates, descent = (vector.detach() for vector in vectors(3000, device))
    descent[5], descent[6] = torch.nan, torch.inf
    stepped = ahead(weights, rates, descent)
    assert stepped.isnan().nonzero().tolist() == [[5]]
    torch.testing.assert_close(stepped[6], weights[6] + rates[6] * LIMIT)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("used", [[0], [1], [2], [0, 1], [1, 2], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("fixed", [True, False])
def test_gradients_of_all_uses_are_added_up_in_order(used, fixed, device):
    weights, rates, descent = vectors(3000, device)
    rates.requires_grad_(not fixed)
    stepped, _, (first_use,), (second_use,) = step_ahead(weights, rates, [descent], LIMIT)
    ours, theirs = (stepped, first_use, second_use), in_parts(weights, rates, descent)
    assert len({use_of_step.data_ptr() for use_of_step in ours}) == 1
    slopes = [torch.randn(3000, device=device) for _ in used]
    inputs = [weights, descent] if fixed else [weights, rates, descent]
    of_ours = torch.autograd.grad([ours[use] for use in used], inputs, slopes)
    assert all_equal(of_ours, torch.autograd.grad(theirs, inputs, sum(slopes[1:], slopes[0])))


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
    slope, inputs = torch.randn(3000, device=device), [weights, descent] if fixed else [weights, descent, rates]
    of_ours, of_theirs = (torch.autograd.grad(result, inputs, slope) for result in (ours, theirs))
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
        assert all_equal(parts, [part.to(dtype) for part, dtype in zip(ours[0].split(sizes), types, strict=True)])
    ours = [ours[0], *ours[2:]]
    slopes = [torch.randn(5003, device=device), *[[torch.randn_like(part) for part in parts] for parts in ours[1:]]]
    flat = [slopes[0], *[torch.cat([part.float() for part in parts]) for parts in slopes[1:]]]
    outputs = [output for use in used for output in ([ours[0]] if use == 0 else ours[use])]
    output_slopes = [slope for use in used for slope in ([slopes[0]] if use == 0 else slopes[use])]
    total = sum((flat[use] for use in used[1:]), flat[used[0]])
    of_ours = torch.autograd.grad(outputs, [weights, rates, *descents], output_slopes)
    assert all_equal(of_ours, torch.autograd.grad(theirs, [weights, rates, *descents], total))


@pytest.mark.parametrize("device", DEVICES)
def test_parts_of_a_vector_are_cast_to_their_types_and_so_is_its_gradient(device):
    weights = vectors(5003, device)[0]
    sizes, types = [3001, 2002], [torch.bfloat16, torch.float32]
    ours = in_types(weights, sizes, types)
    theirs = [part.to(dtype) for part, dtype in zip(weights.split(sizes), types, strict=True)]
    assert all_equal(ours, theirs)
    assert ours[1].data_ptr() == weights[3001:].data_ptr()  # what has the type already is not moved
    slopes = [torch.randn_like(part) for part in ours]
    assert all_equal(*(torch.autograd.grad(parts, weights, slopes) for parts in (ours, theirs)))
