"""The fused kernels compute what torch's own operations do, to the rounding of their type."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parabolic.backbones import Block, Norm, ResNet18
from parabolic.engine import numerics

pytestmark = pytest.mark.gpu

# Shapes: rows and channels that fill tiles, that do not, and more rows than one program takes.
SHAPES = [(5, 64, 7, 7), (3, 96, 4, 4), (64, 64, 32, 32), (17, 512, 3, 5), (2, 8, 3, 1), (70, 64, 32, 32)]


def tensors(shape, dtype, with_shortcut):
    torch.manual_seed(0)
    images = [torch.randn(shape, device="cuda") * 2 + 3, torch.randn(shape, device="cuda")][: 1 + with_shortcut]
    images = [image.to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_() for image in images]
    weights = [torch.randn(shape[1], device="cuda", requires_grad=True) for _ in range(2)]
    return images[0], *weights, images[1] if with_shortcut else None


def plain_norm_add_relu(x, weight, bias, shortcut, running, relu):
    y = F.batch_norm(x, *running, weight, bias, True, 0.1, 1e-5)
    y = y if shortcut is None else y + shortcut
    return y.relu() if relu else y


def relative_error(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()


def test_what_is_no_number_stays_so():
    from parabolic.kernels import norm_add_relu

    x, weight, bias, _ = tensors((4, 8, 3, 3), torch.float32, False)
    x = x.detach().clone(memory_format=torch.preserve_format)
    x[0, 3, 1, 1] = torch.nan
    running = (torch.zeros(8, device="cuda"), torch.ones(8, device="cuda"))
    y, _ = norm_add_relu(x, weight, bias, running)
    assert y[:, 3].isnan().all()
    assert not y[:, [0, 1, 2, 4, 5, 6, 7]].isnan().any()
    assert all(statistics[3].isnan() for statistics in running)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("with_shortcut", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_add_relu_agrees_with_float64(shape, with_shortcut, relu, dtype):
    from parabolic.kernels import norm_add_relu

    inputs = tensors(shape, dtype, with_shortcut)
    running = (torch.randn(shape[1], device="cuda"), torch.rand(shape[1], device="cuda"))
    exact_running = [statistics.double() for statistics in running]
    y, _ = norm_add_relu(*inputs[:3], running, inputs[3], relu=relu)
    exact = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in inputs]
    exact_y = plain_norm_add_relu(*exact, exact_running, relu)
    ours, theirs = ([tensor for tensor in all_tensors if tensor is not None] for all_tensors in (inputs, exact))
    slope = torch.randn_like(y)
    gradients = torch.autograd.grad(y, ours, slope, retain_graph=True)
    gradients_again = torch.autograd.grad(y, ours, slope, create_graph=True)
    exact_gradients = torch.autograd.grad(exact_y, theirs, slope.double())
    # bfloat16 has 8 significant bits; what is stored as float32 has been summed in float32.
    rounding = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
    assert y.dtype == dtype
    assert relative_error(y, exact_y) < rounding[dtype]
    for gradient, gradient_again, exact_gradient in zip(gradients, gradients_again, exact_gradients, strict=True):
        # Where y is next to zero rounding decides its sign: sums over such examples differ by their share.
        assert relative_error(gradient, exact_gradient) < 3 * rounding[gradient.dtype]
        assert relative_error(gradient_again, exact_gradient) < 3 * rounding[gradient.dtype]
    for our_statistics, exact_statistics in zip(running, exact_running, strict=True):
        assert relative_error(our_statistics, exact_statistics) < 2e-6


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("with_shortcut", [True, False])
def test_by_running_statistics_it_is_plain_batch_norm(with_shortcut, relu):
    from parabolic.kernels import norm_add_relu

    x, weight, bias, shortcut = tensors((17, 96, 3, 5), torch.float32, with_shortcut)
    running = (torch.randn(96, device="cuda"), torch.rand(96, device="cuda") + 0.1)
    running_before = [statistics.clone() for statistics in running]
    y, _ = norm_add_relu(x, weight, bias, running, shortcut, relu=relu, training=False)
    exact = F.batch_norm(x.double(), *[statistics.double() for statistics in running], weight.double(), bias.double())
    exact = exact if shortcut is None else exact + shortcut.double()
    assert relative_error(y, exact.relu() if relu else exact) < 2e-6
    assert all(torch.equal(now, before) for now, before in zip(running, running_before, strict=True))


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("with_shortcut", [True, False])
def test_it_can_be_differentiated_twice(with_shortcut, relu):
    from parabolic.kernels import norm_add_relu

    def second_derivatives(op, all_inputs):
        inputs = [tensor for tensor in all_inputs if tensor is not None]
        first, second = op(*all_inputs)
        gradients = torch.autograd.grad((first**2).sum() + second.sin().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum((slope**2).sum() for slope in gradients), inputs, materialize_grads=True)

    def exactly(x, weight, bias, shortcut):
        y = plain_norm_add_relu(x, weight, bias, shortcut, [statistics.double() for statistics in running], relu)
        return y, y

    all_inputs = tensors((6, 32, 5, 5), torch.float32, with_shortcut)
    running = (torch.zeros(32, device="cuda"), torch.ones(32, device="cuda"))
    exact = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in all_inputs]
    ours = second_derivatives(lambda x, w, b, s: norm_add_relu(x, w, b, running, s, relu=relu), all_inputs)
    for ours_one, exact_one in zip(ours, second_derivatives(exactly, exact), strict=True):
        assert relative_error(ours_one, exact_one) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("with_shortcut", [True, False])
def test_the_gradients_of_two_uses_are_added_as_torch_adds_them(with_shortcut, relu, dtype):
    from parabolic.kernels import norm_add_relu

    inputs_given = tensors((17, 96, 9, 5), dtype, with_shortcut)
    running = (torch.zeros(96, device="cuda"), torch.ones(96, device="cuda"))
    y, second_output = norm_add_relu(*inputs_given[:3], running, inputs_given[3], relu=relu)
    assert y.data_ptr() == second_output.data_ptr()
    inputs, slopes = [tensor for tensor in inputs_given if tensor is not None], [torch.randn_like(y) for _ in range(2)]
    expected = torch.autograd.grad(y, inputs, slopes[0] + slopes[1], retain_graph=True)
    gradients = torch.autograd.grad((y, second_output), inputs, slopes, retain_graph=True)
    assert all(
        torch.equal(gradient, expected_gradient)
        for gradient, expected_gradient in zip(gradients, expected, strict=True)
    )
    # Either may have none.
    expected = torch.autograd.grad(y, inputs, slopes[0], retain_graph=True)
    gradients = torch.autograd.grad(second_output, inputs, slopes[0])
    assert all(
        torch.equal(gradient, expected_gradient)
        for gradient, expected_gradient in zip(gradients, expected, strict=True)
    )


def test_images_that_were_changed_in_place_are_no_more_what_was_handed_out():
    torch.manual_seed(0)
    net = nn.Sequential(Norm(16), nn.Hardtanh(0.5, 2.0), Block(16, 16, 1)).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(8, 16, 6, 6, device="cuda").contiguous(memory_format=torch.channels_last).requires_grad_()
    gradients = []
    with numerics("fp32"):
        for net[1].inplace in (False, True):
            gradients.append(torch.autograd.grad(net(x).sin().sum(), [x, *net.parameters()]))
    for gradient, gradient_in_place in zip(*gradients, strict=True):
        assert torch.equal(gradient, gradient_in_place)


@pytest.mark.parametrize("training", [True, False])
def test_images_are_freed_as_soon_as_no_one_needs_them(training):
    net = nn.Sequential(Norm(16), Block(16, 32, 2), Block(32, 32, 1)).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(8, 16, 6, 6, device="cuda").contiguous(memory_format=torch.channels_last)
    net.train(training)
    gc.disable()  # it would find what holds on to itself
    try:
        bytes_held = set()
        for _ in range(5):
            with torch.set_grad_enabled(training):
                net(x)
            bytes_held.add(torch.cuda.memory_allocated())
        assert len(bytes_held) == 1
    finally:
        gc.enable()


def test_the_outcome_is_the_same_every_time():
    from parabolic.kernels import norm_add_relu

    outcomes = []
    for _ in range(2):
        inputs = tensors((64, 64, 32, 32), torch.bfloat16, True)
        y, _ = norm_add_relu(*inputs[:3], (torch.zeros(64, device="cuda"), torch.ones(64, device="cuda")), inputs[3])
        outcomes.append([y, *torch.autograd.grad(y.float().sin().sum(), inputs)])
    assert all(torch.equal(first, second) for first, second in zip(*outcomes, strict=True))


def network(dtype=torch.bfloat16):
    """A network whose norms have random weights and running statistics."""
    torch.manual_seed(0)
    net = ResNet18((3, 16, 16), 10, width=16).cuda()
    with torch.no_grad():
        for norm in [module for module in net.modules() if isinstance(module, Norm)]:
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.1, 2.0)
            norm.weight.normal_()
            norm.bias.normal_()
    return net.to(dtype=dtype, memory_format=torch.channels_last).eval()


def images(count):
    return torch.randn(count, 3, 16, 16, device="cuda", dtype=torch.bfloat16).contiguous(
        memory_format=torch.channels_last
    )


@pytest.fixture
def merged(monkeypatch):
    """How many blocks have predicted by convolutions that hold their norms."""
    blocks, original = [], Block._merged_maps

    def count_and_call(self, x):
        blocks.append(self)
        return original(self, x)

    monkeypatch.setattr(Block, "_merged_maps", count_and_call)
    return blocks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_for_prediction_norms_are_part_of_convolutions(merged, dtype):
    net, x = network(dtype), images(7).to(dtype)
    state_before = {name: value.clone() for name, value in net.state_dict().items()}
    with torch.no_grad():
        exact = copy.deepcopy(net).double()(x.double())
        assert not merged
        scores = net(x)
    assert len(merged) == 8
    assert scores.dtype == dtype
    assert relative_error(scores, exact) < 3e-2
    assert all(torch.equal(value, state_before[name]) for name, value in net.state_dict().items())
    # Who learns from it gets what can be differentiated.
    assert relative_error(net(x), exact) < 3e-2
    assert net(x).grad_fn is not None
    assert len(merged) == 8


def test_a_prediction_does_not_depend_on_what_was_in_memory_before(merged):
    net, x = network(), images(200)
    with numerics("bf16"), torch.no_grad():
        first = net(x)
        for _ in range(20):
            junk = [torch.full((200, 16 << stage, 16 >> stage, 16 >> stage), torch.nan, device="cuda",
                               dtype=torch.bfloat16) for stage in range(4) for _ in range(8)]  # fmt: skip
            torch.cuda.synchronize()
            del junk
            assert torch.equal(net(x), first)
    assert len(merged) == 21 * 8


def test_for_prediction_what_is_no_number_stays_so(merged):
    net, x = network(), images(3)
    x[1, 0, 5, 5] = torch.nan
    with torch.no_grad():
        assert net(x).isnan().any(1).tolist() == [False, True, False]
        assert len(merged) == 8
        assert net(x[:0]).shape == (0, 10)


def test_who_looks_into_a_block_sees_its_parts_predict(merged):
    net, x, shapes = network(), images(3), []
    with torch.no_grad():
        scores = net(x)
        net.blocks[2].norm1.register_forward_hook(lambda _, __, output: shapes.append(output.shape[1:]))
        net.blocks[4].conv2 = nn.Conv2d(64, 64, 3, padding=1, bias=False, device="cuda", dtype=torch.bfloat16)
        net.blocks[4].conv2.weight.zero_()
        changed = net(x)
    assert shapes == [(32, 8, 8)]
    assert len(merged) == 8 + 6
    assert not torch.equal(scores, changed)
