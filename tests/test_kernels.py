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


def tensors(shape, dtype, added):
    torch.manual_seed(0)
    images = [torch.randn(shape, device="cuda") * 2 + 3, torch.randn(shape, device="cuda")][: 1 + added]
    images = [each.to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_() for each in images]
    weights = [torch.randn(shape[1], device="cuda", requires_grad=True) for _ in range(2)]
    return images[0], *weights, images[1] if added else None


def plainly(x, weight, bias, shortcut, running, relu):
    y = F.batch_norm(x, *running, weight, bias, True, 0.1, 1e-5)
    y = y if shortcut is None else y + shortcut
    return y.relu() if relu else y


def error(ours, exact):
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
    assert all(each[3].isnan() for each in running)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_add_relu_agrees_with_float64(shape, added, relu, dtype):
    from parabolic.kernels import norm_add_relu

    given = tensors(shape, dtype, added)
    running = (torch.randn(shape[1], device="cuda"), torch.rand(shape[1], device="cuda"))
    exact_running = [each.double() for each in running]
    y, _ = norm_add_relu(*given[:3], running, given[3], relu=relu)
    exact = [None if each is None else each.detach().double().requires_grad_() for each in given]
    exact_y = plainly(*exact, exact_running, relu)
    ours, theirs = ([each for each in some if each is not None] for some in (given, exact))
    slope = torch.randn_like(y)
    gradients = torch.autograd.grad(y, ours, slope, retain_graph=True)
    again = torch.autograd.grad(y, ours, slope, create_graph=True)
    exact_gradients = torch.autograd.grad(exact_y, theirs, slope.double())
    # bfloat16 has 8 significant bits; what is stored as float32 has been summed in float32.
    rounding = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
    assert y.dtype == dtype
    assert error(y, exact_y) < rounding[dtype]
    for one, two, exact_one in zip(gradients, again, exact_gradients, strict=True):
        # Where y is next to zero rounding decides its sign: sums over such examples differ by their share.
        assert error(one, exact_one) < 3 * rounding[one.dtype]
        assert error(two, exact_one) < 3 * rounding[one.dtype]
    for mine, exact_one in zip(running, exact_running, strict=True):
        assert error(mine, exact_one) < 2e-6


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("added", [True, False])
def test_by_running_statistics_it_is_plain_batch_norm(added, relu):
    from parabolic.kernels import norm_add_relu

    x, weight, bias, shortcut = tensors((17, 96, 3, 5), torch.float32, added)
    running = (torch.randn(96, device="cuda"), torch.rand(96, device="cuda") + 0.1)
    kept = [each.clone() for each in running]
    y, _ = norm_add_relu(x, weight, bias, running, shortcut, relu=relu, training=False)
    exact = F.batch_norm(x.double(), *[each.double() for each in running], weight.double(), bias.double())
    exact = exact if shortcut is None else exact + shortcut.double()
    assert error(y, exact.relu() if relu else exact) < 2e-6
    assert all(torch.equal(mine, was) for mine, was in zip(running, kept, strict=True))


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("added", [True, False])
def test_it_can_be_differentiated_twice(added, relu):
    from parabolic.kernels import norm_add_relu

    def second(op, given):
        inputs = [each for each in given if each is not None]
        one, other = op(*given)
        first = torch.autograd.grad((one**2).sum() + other.sin().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum((slope**2).sum() for slope in first), inputs, materialize_grads=True)

    def exactly(x, weight, bias, shortcut):
        y = plainly(x, weight, bias, shortcut, [each.double() for each in running], relu)
        return y, y

    given = tensors((6, 32, 5, 5), torch.float32, added)
    running = (torch.zeros(32, device="cuda"), torch.ones(32, device="cuda"))
    exact = [None if each is None else each.detach().double().requires_grad_() for each in given]
    ours = second(lambda x, w, b, s: norm_add_relu(x, w, b, running, s, relu=relu), given)
    for one, other in zip(ours, second(exactly, exact), strict=True):
        assert error(one, other) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("added", [True, False])
def test_the_gradients_of_two_uses_are_added_as_torch_adds_them(added, relu, dtype):
    from parabolic.kernels import norm_add_relu

    given = tensors((17, 96, 9, 5), dtype, added)
    running = (torch.zeros(96, device="cuda"), torch.ones(96, device="cuda"))
    y, again = norm_add_relu(*given[:3], running, given[3], relu=relu)
    assert y.data_ptr() == again.data_ptr()
    inputs, slopes = [each for each in given if each is not None], [torch.randn_like(y) for _ in range(2)]
    expected = torch.autograd.grad(y, inputs, slopes[0] + slopes[1], retain_graph=True)
    found = torch.autograd.grad((y, again), inputs, slopes, retain_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    # Either may have none.
    expected = torch.autograd.grad(y, inputs, slopes[0], retain_graph=True)
    found = torch.autograd.grad(again, inputs, slopes[0])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_images_that_were_changed_in_place_are_no_more_what_was_handed_out():
    torch.manual_seed(0)
    net = nn.Sequential(Norm(16), nn.Hardtanh(0.5, 2.0), Block(16, 16, 1)).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(8, 16, 6, 6, device="cuda").contiguous(memory_format=torch.channels_last).requires_grad_()
    found = []
    with numerics("fp32"):
        for net[1].inplace in (False, True):
            found.append(torch.autograd.grad(net(x).sin().sum(), [x, *net.parameters()]))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("training", [True, False])
def test_images_are_freed_as_soon_as_no_one_needs_them(training):
    net = nn.Sequential(Norm(16), Block(16, 32, 2), Block(32, 32, 1)).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(8, 16, 6, 6, device="cuda").contiguous(memory_format=torch.channels_last)
    net.train(training)
    gc.disable()  # it would find what holds on to itself
    try:
        held = set()
        for _ in range(5):
            with torch.set_grad_enabled(training):
                net(x)
            held.add(torch.cuda.memory_allocated())
        assert len(held) == 1
    finally:
        gc.enable()


def test_the_outcome_is_the_same_every_time():
    from parabolic.kernels import norm_add_relu

    outcomes = []
    for _ in range(2):
        given = tensors((64, 64, 32, 32), torch.bfloat16, True)
        y, _ = norm_add_relu(*given[:3], (torch.zeros(64, device="cuda"), torch.ones(64, device="cuda")), given[3])
        outcomes.append([y, *torch.autograd.grad(y.float().sin().sum(), given)])
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


def network(dtype=torch.bfloat16):
    """A network whose norms have seen something."""
    torch.manual_seed(0)
    net = ResNet18((3, 16, 16), 10, width=16).cuda()
    with torch.no_grad():
        for norm in [each for each in net.modules() if isinstance(each, Norm)]:
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.1, 2.0)
            norm.weight.normal_()
            norm.bias.normal_()
    return net.to(dtype=dtype, memory_format=torch.channels_last).eval()


def images(n):
    return torch.randn(n, 3, 16, 16, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)


@pytest.fixture
def merged(monkeypatch):
    """How many blocks have predicted by convolutions that hold their norms."""
    counted, original = [], Block._merged_maps

    def counting(self, x):
        counted.append(self)
        return original(self, x)

    monkeypatch.setattr(Block, "_merged_maps", counting)
    return counted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_for_prediction_norms_are_part_of_convolutions(merged, dtype):
    net, x = network(dtype), images(7).to(dtype)
    kept = {name: each.clone() for name, each in net.state_dict().items()}
    with torch.no_grad():
        exact = copy.deepcopy(net).double()(x.double())
        assert not merged
        found = net(x)
    assert len(merged) == 8
    assert found.dtype == dtype
    assert error(found, exact) < 3e-2
    assert all(torch.equal(each, kept[name]) for name, each in net.state_dict().items())
    # Who learns from it gets what can be differentiated.
    assert error(net(x), exact) < 3e-2
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
    net, x, told = network(), images(3), []
    with torch.no_grad():
        found = net(x)
        net.blocks[2].norm1.register_forward_hook(lambda _, __, given: told.append(given.shape[1:]))
        net.blocks[4].conv2 = nn.Conv2d(64, 64, 3, padding=1, bias=False, device="cuda", dtype=torch.bfloat16)
        net.blocks[4].conv2.weight.zero_()
        changed = net(x)
    assert told == [(32, 8, 8)]
    assert len(merged) == 8 + 6
    assert not torch.equal(found, changed)
