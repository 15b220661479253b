"""Convolutions and vectors of weights that can be differentiated twice."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parabolic.backbones import ResNet18
from parabolic.convolution import convolve
from parabolic.engine import numerics
from parabolic.learners.layout import Layout

LAYOUTS = [((1, 1), (1, 1), 3), ((2, 2), (1, 1), 3), ((2, 2), (0, 0), 1), ((2, 1), (0, 2), 2)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tensors(size, device="cpu", dtype=torch.float64):
    torch.manual_seed(0)
    x, weight = torch.randn(3, 4, 6, 5, dtype=dtype), torch.randn(2, 4, size, size, dtype=dtype)
    return [each.to(device).requires_grad_() for each in (x, weight)]


@pytest.mark.parametrize(("stride", "padding", "size"), LAYOUTS)
def test_both_derivatives_are_those_of_finite_differences(stride, padding, size):
    given = tensors(size)

    def of(*both):
        return convolve(*both, stride, padding)

    assert torch.autograd.gradcheck(of, given)
    assert torch.autograd.gradgradcheck(of, given)


@pytest.mark.parametrize("fixed", [0, 1])
def test_what_needs_no_gradient_gets_none(fixed):
    given = tensors(3)
    given[fixed].requires_grad_(False)
    assert torch.autograd.gradgradcheck(convolve, given)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("stride", "padding", "size"), LAYOUTS)
def test_value_and_gradient_are_torchs_own_to_the_bit(stride, padding, size, device):
    given = tensors(size, device, torch.float32)
    ours, theirs = convolve(*given, stride, padding), F.conv2d(*given, None, stride, padding)
    slope = torch.randn_like(ours)
    torch.use_deterministic_algorithms(True)
    try:
        for one, other in zip(
            (ours, *torch.autograd.grad(ours, given, slope)), (theirs, *torch.autograd.grad(theirs, given, slope)),
            strict=True,
        ):  # fmt: skip
            assert torch.equal(one, other)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("training", [True, False])
def test_a_network_serves_the_transforms_of_torch_func(training):
    model = ResNet18((3, 16, 16), 3, width=8).cuda().to(memory_format=torch.channels_last).train(training)
    x = torch.randn(8, 3, 16, 16, device="cuda").contiguous(memory_format=torch.channels_last)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    kept = {name: value.clone() for name, value in model.named_buffers()}

    def loss(some):
        buffers = {name: value.clone() for name, value in kept.items()}
        return torch.func.functional_call(model, (some, buffers), (x,)).square().sum()

    with numerics("fp32"):
        found = torch.func.grad(loss)(weights)
        model(x).square().sum().backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-3, atol=1e-3 * weight.grad.abs().max().item())


def channels_last():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1), nn.Flatten(), nn.Linear(8, 2)).double()
    return [weight.detach() for weight in model.to(memory_format=torch.channels_last).parameters()]


def test_a_vector_is_cut_up_and_joined_again():
    weights = channels_last()
    layout = Layout(weights)
    vector = layout.join(weights)
    assert vector.shape == (sum(weight.numel() for weight in weights),)
    for part, weight in zip(layout.cut(vector), weights, strict=True):
        assert torch.equal(part, weight)
        assert part.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()
    vector.mul_(2)
    assert all(torch.equal(part, 2 * weight) for part, weight in zip(layout.views(vector), weights, strict=True))
    assert torch.equal(layout.join([weight.contiguous() for weight in weights]), vector / 2)  # however they lie


def test_cutting_and_joining_have_every_derivative():
    weights = channels_last()
    layout, vector = Layout(weights), Layout(weights).join(weights).requires_grad_()

    def of(some):
        first, *others = layout.cut(some)
        return layout.join([first * others[0].square().sum(), *[each.exp() for each in others]])

    assert torch.autograd.gradcheck(of, [vector])
    assert torch.autograd.gradgradcheck(of, [vector])
