"""Convolutions and vectors of weights that can be differentiated twice."""

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parabolic import backbones
from parabolic.backbones import Block, ResNet18, plain_operations
from parabolic.convolution import convolve, convolve_both
from parabolic.engine import numerics

LAYOUTS = [((1, 1), (1, 1), 3), ((2, 2), (1, 1), 3), ((2, 2), (0, 0), 1), ((2, 1), (0, 2), 2)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tensors(size, device="cpu", dtype=torch.float64):
    torch.manual_seed(0)
    x, weight = torch.randn(3, 4, 6, 5, dtype=dtype), torch.randn(2, 4, size, size, dtype=dtype)
    return [tensor.to(device).requires_grad_() for tensor in (x, weight)]


@pytest.mark.parametrize(("stride", "padding", "size"), LAYOUTS)
def test_both_derivatives_are_those_of_finite_differences(stride, padding, size):
    inputs = tensors(size)

    def convolution(*tensors_given):
        return convolve(*tensors_given, stride, padding)

    assert torch.autograd.gradcheck(convolution, inputs)
    assert torch.autograd.gradgradcheck(convolution, inputs)


@pytest.mark.parametrize("fixed", [0, 1])
def test_what_needs_no_gradient_gets_none(fixed):
    inputs = tensors(3)
    inputs[fixed].requires_grad_(False)
    assert torch.autograd.gradgradcheck(convolve, inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("stride", "padding", "size"), LAYOUTS)
def test_value_and_gradient_are_torchs_own_to_the_bit(stride, padding, size, device):
    inputs = tensors(size, device, torch.float32)
    ours, theirs = convolve(*inputs, stride, padding), F.conv2d(*inputs, None, stride, padding)
    slope = torch.randn_like(ours)
    torch.use_deterministic_algorithms(True)
    try:
        for our_value, their_value in zip(
            (ours, *torch.autograd.grad(ours, inputs, slope)), (theirs, *torch.autograd.grad(theirs, inputs, slope)),
            strict=True,
        ):  # fmt: skip
            assert torch.equal(our_value, their_value)
    finally:
        torch.use_deterministic_algorithms(False)


def images_and_two_weights(size, dtype=torch.float64, shape=(3, 4, 6, 5), after=2, device="cpu"):
    """Images channels-last, a weight, and one of 1 × 1."""
    torch.manual_seed(0)
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(after, shape[1], size, size, dtype=dtype)
    inputs = (x.contiguous(memory_format=torch.channels_last), weight, torch.randn(after, shape[1], 1, 1, dtype=dtype))
    return [tensor.to(device).requires_grad_() for tensor in inputs]


def two_convolutions(x, weight, short, stride, padding):
    return F.conv2d(x, weight, None, stride, padding), F.conv2d(x, short, None, stride)


@pytest.mark.parametrize("fixed", [None, 0, 1, 2])
@pytest.mark.parametrize(("stride", "padding", "size"), LAYOUTS[1:2] + LAYOUTS[3:] + [((1, 1), (1, 1), 3)])
def test_two_convolutions_at_once_have_both_derivatives(stride, padding, size, fixed):
    inputs = images_and_two_weights(size)
    if fixed is not None:
        inputs[fixed].requires_grad_(False)

    def both_convolutions(*tensors_given):
        return convolve_both(*tensors_given, stride, padding)

    for ours, theirs in zip(both_convolutions(*inputs), two_convolutions(*inputs, stride, padding), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert torch.autograd.gradcheck(both_convolutions, inputs)
    assert torch.autograd.gradgradcheck(both_convolutions, inputs)


def test_either_of_two_convolutions_may_go_unused():
    inputs = images_and_two_weights(3)
    for index in (0, 1):
        ours, theirs = (
            convolutions(*inputs, (2, 2), (1, 1))[index].square().sum()
            for convolutions in (convolve_both, two_convolutions)
        )
        for our_gradient, their_gradient in zip(
            torch.autograd.grad(ours, inputs, materialize_grads=True),
            torch.autograd.grad(theirs, inputs, materialize_grads=True),
            strict=True,
        ):
            torch.testing.assert_close(our_gradient, their_gradient)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64, 32, 32), (8, 256, 8, 8), (3, 16, 7, 5)])
def test_two_convolutions_at_once_agree_with_float64_every_time(shape, dtype):
    inputs = images_and_two_weights(3, dtype, shape, 2 * shape[1], "cuda")
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    layout, rounding = ((2, 2), (1, 1)), {torch.float32: 3e-5, torch.bfloat16: 1e-2}[dtype]
    outcomes = []
    with numerics("fp32"):
        for _ in range(2):
            outputs = convolve_both(*inputs, *layout)
            torch.manual_seed(1)
            slopes = [torch.randn_like(output) for output in outputs]
            outcomes.append([*outputs, *torch.autograd.grad(outputs, inputs, slopes)])
        expected = two_convolutions(*exact, *layout)
        expected += torch.autograd.grad(expected, exact, [slope.double() for slope in slopes])
    for value, value_again, exact_value in zip(*outcomes, expected, strict=True):
        assert value.dtype == dtype
        assert torch.equal(value, value_again)
        assert (value - exact_value).norm() < rounding * exact_value.norm()
    assert all(value.is_contiguous(memory_format=torch.channels_last) for value in outcomes[0][:3])


def derivatives(block, x):
    """The output of a block and its derivatives of first and second order."""
    y = block(x)
    weights = [x, *block.parameters()]
    slopes = torch.autograd.grad(y.square().sum(), weights, create_graph=True)
    return [y, *slopes, *torch.autograd.grad(sum(slope.square().sum() for slope in slopes), weights)]


def block_and_images(before=4, after=8, stride=2, device="cpu", dtype=torch.float64):
    torch.manual_seed(0)
    block = Block(before, after, stride).to(device, dtype, memory_format=torch.channels_last)
    x = torch.randn(3, before, 6, 5, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last)
    return block, x.requires_grad_()


@pytest.mark.parametrize("stride", [1, 2])
def test_a_block_is_the_same_by_two_convolutions_at_once(monkeypatch, stride):
    block, x = block_and_images(stride=stride)
    plain, called = derivatives(block, x), []
    block.shortcut[0].register_forward_hook(lambda *_: called.append(1))
    monkeypatch.setattr(backbones, "_use_own_convolution", lambda x, weight: True)
    for value, expected in zip(derivatives(block, x), plain, strict=True):
        torch.testing.assert_close(value, expected)
    assert not called  # it was at once


def test_what_is_put_in_place_of_a_convolution_is_used(monkeypatch):
    monkeypatch.setattr(backbones, "_use_own_convolution", lambda x, weight: True)
    block, x = block_and_images()
    before = block(x)
    block.conv1 = nn.Sequential(block.conv1, nn.Hardtanh(-0.1, 0.1))
    assert not torch.allclose(block(x), before)


class Handed(torch.autograd.Function):
    """Images for two uses, as Norm hands them out on a GPU; notes how many gradients came back."""

    came: ClassVar = []

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x.clone(), x.clone()

    @staticmethod
    def backward(ctx, *grads):
        gradients = [gradient for gradient in grads if gradient is not None]
        Handed.came.append(len(gradients))
        return sum(gradients)


@pytest.mark.parametrize(("changed", "count"), [(False, 2), (True, 1)])
def test_a_block_gives_two_gradients_to_who_hands_out_images_for_two_uses(changed, count):
    block, x = block_and_images(8, 8, 1)
    y, y.again = Handed.apply(x)
    images = x.clone()
    for changed_images in (y, images) if changed else ():
        changed_images.mul_(2)  # what was handed out beside it is not these images any more
    (expected,) = torch.autograd.grad(block(images).square().sum(), x)
    Handed.came.clear()
    (gradient,) = torch.autograd.grad(block(y).square().sum(), x)
    assert Handed.came == [count]
    torch.testing.assert_close(gradient, expected)


@pytest.mark.gpu
def test_a_block_on_a_gpu_is_what_torchs_own_operations_make_it():
    block, x = block_and_images(16, 32, device="cuda", dtype=torch.float32)
    with numerics("fp32"):
        ours = derivatives(block, x)
        with plain_operations():
            theirs = derivatives(block, x)
        with torch.no_grad():
            predicted = block.eval()(x)
            with plain_operations():
                expected = block(x)
    for our_value, their_value in zip([*ours, predicted], [*theirs, expected], strict=True):
        torch.testing.assert_close(our_value, their_value, rtol=1e-3, atol=1e-3 * their_value.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("training", [True, False])
def test_a_network_serves_the_transforms_of_torch_func(training):
    model = ResNet18((3, 16, 16), 3, width=8).cuda().to(memory_format=torch.channels_last).train(training)
    x = torch.randn(8, 3, 16, 16, device="cuda").contiguous(memory_format=torch.channels_last)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    buffers_before = {name: value.clone() for name, value in model.named_buffers()}

    def loss(some_weights):
        buffers = {name: value.clone() for name, value in buffers_before.items()}
        return torch.func.functional_call(model, (some_weights, buffers), (x,)).square().sum()

    with numerics("fp32"):
        gradients = torch.func.grad(loss)(weights)
        model(x).square().sum().backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-3, atol=1e-3 * weight.grad.abs().max().item())
