"""What prepares examples has its numbers on each device for good: a captured step finds them where they were."""

import copy
import pickle
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from parabolic import ER, InputError
from parabolic.engine.graphs import Graphs
from parabolic.learners import Scale
from parabolic.learners.whole import left_behind
from parabolic.streams import Normalise

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def normalise():
    return Normalise(MEAN, STD)


def units(seed=0):
    scale = Scale()
    scale.update(batch(20, seed))
    return scale


def batch(size=8, seed=1):
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(seed)) + seed


MADE = pytest.mark.parametrize("make", [normalise, Scale, units])


class Meanwhile(TorchDispatchMode):
    """Before each operation something else is done, as another thread may; the addresses of what is used are noted."""

    def __init__(self, other):
        super().__init__()
        self.other, self.used = other, []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.other()
        self.used += [tensor.data_ptr() for tensor in args if isinstance(tensor, torch.Tensor) and tensor.ndim < 2]
        return operation(*args, **kwargs or {})


@MADE
@pytest.mark.parametrize("method", ["__call__", "undo"])
def test_another_device_may_be_served_at_any_moment(make, method):
    preparation, x = make(), batch()
    expected = getattr(preparation, method)(x)
    with Meanwhile(lambda: getattr(preparation, method)(x.to("meta"))) as meanwhile:
        result = getattr(preparation, method)(x)
    assert torch.equal(result, expected)
    assert getattr(preparation, method)(x.to("meta")).is_meta
    with Meanwhile(lambda: None) as after:
        getattr(preparation, method)(x)
    assert after.used == meanwhile.used


def test_captured_operations_have_the_units_of_now():
    scale, x = units(), batch()
    scale(x)
    captured = make_fx(scale)(x)  # on tensors where they are, as a CUDA graph is
    for change in (lambda: scale.update(batch(30, 2)), lambda: scale.load_state_dict(units(3).state_dict())):
        before = scale(x)
        change()
        assert torch.equal(captured(x), scale(x))
        assert not torch.equal(captured(x), before)


@pytest.mark.parametrize("has_units", [True, False])
def test_units_that_were_used_in_inference_mode_change_outside_of_it(has_units):
    used_in_inference, used_outside, x = Scale(), Scale(), batch()
    for scale in (used_in_inference, used_outside):
        with torch.inference_mode(scale is used_in_inference):
            if has_units:
                scale.update(batch(20, 0))
            scale(x)
        scale.update(batch(30, 2))
    assert torch.equal(used_in_inference(x), used_outside(x))
    with torch.inference_mode():
        used_in_inference.update(batch(30, 3))
    used_outside.update(batch(30, 3))
    assert torch.equal(used_in_inference(x), used_outside(x))
    weight = torch.ones(3, requires_grad=True)
    used_in_inference(x * weight).sum().backward()
    assert weight.grad.isfinite().all()


@MADE
@pytest.mark.parametrize(
    "make_copy", [copy.copy, copy.deepcopy, lambda preparation: pickle.loads(pickle.dumps(preparation))]
)
def test_copies_do_the_same_and_go_their_own_way(make, make_copy):
    preparation, x = make(), batch()
    expected = preparation(x)
    preparation(x.to("meta"))
    copied_part = make_copy(preparation)
    assert torch.equal(copied_part(x), expected)
    if isinstance(preparation, Scale):
        copied_part.update(batch(30, 2))
        assert torch.equal(preparation(x), expected)
        assert not torch.equal(copied_part(x), expected)
    else:
        assert copied_part == preparation
        assert repr(copied_part) == repr(preparation) == f"Normalise(mean={MEAN}, std={STD}, scale=255.0)"


def test_a_pickle_of_before_places_were_kept_can_be_read():
    old_scale = Scale.__new__(Scale)
    old_scale.__setstate__(units().state_dict())  # which was all that it had
    assert torch.equal(old_scale(batch()), units()(batch()))
    old_normalise = Normalise.__new__(Normalise)
    old_normalise.__setstate__({"mean": [*MEAN], "std": [*STD], "scale": 255.0, "factor": torch.ones(3), "shift": None})
    assert old_normalise == normalise()
    assert torch.equal(old_normalise(batch()), normalise()(batch()))


def test_where_numbers_are_is_no_state():
    class Mine(ER):
        def __post_init__(self):
            super().__post_init__()
            self.mine, self.own = normalise(), units()

    used, fresh = (Mine(nn.Linear(3, 2)) for _ in range(2))
    for preparation in (used.mine, used.own):
        preparation(batch())
        preparation(batch().to("meta"))
    assert left_behind(used, fresh) == []


@pytest.mark.parametrize(
    "numbers",
    [[*MEAN], np.array(MEAN), torch.tensor(MEAN, dtype=torch.float64), [torch.tensor(0.5), np.float64(0.4), 0.3]],
)
def test_numbers_of_channels_come_in_any_form_and_are_kept_as_plain_ones(numbers):
    normalise_any = Normalise(numbers, numbers, np.int64(16))
    assert normalise_any == Normalise(MEAN, MEAN, 16)
    assert repr(normalise_any) == f"Normalise(mean={MEAN}, std={MEAN}, scale=16)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((MEAN, STD[:2]), "std: got 2 numbers, expected 3, one per channel as for mean"),
        ((MEAN, (0.2, 0.0, 0.3)), "std: got 0.0, expected a number above 0"),
        (((0.5, float("nan"), 0.3), STD), "mean: got nan, expected a number"),
        ((MEAN, STD, 0), "scale: got 0, expected a number above 0"),
        ((0.5, 0.2), "mean: got 0.5, expected one number for each channel; for example (0.5, 0.5, 0.5)"),
        (((), ()), "mean: got (), expected one number for each channel"),
        ((torch.zeros(2, 3), STD), "mean: got a tensor of shape [2, 3] and type float32, expected one number "),
        ((np.zeros((2, 3)), STD), "mean: got array([0., 0., 0.]), expected a number"),
    ],
)
def test_numbers_that_are_none_of_channels_are_refused(arguments, message):
    with pytest.raises(InputError) as error:
        Normalise(*arguments)
    assert str(error.value).startswith(message)


@pytest.mark.gpu
@MADE
def test_a_captured_call_finds_its_numbers_whatever_happened_meanwhile(make):
    preparation, graphs, x = make(), Graphs(torch.device("cuda", 0)), batch().cuda()
    if isinstance(preparation, Scale):
        preparation.update(batch(20, 0).cuda())
    for _ in range(4):
        _, replayed = graphs.run("call", lambda: preparation(x))
    assert replayed
    preparation(x.cpu())
    if isinstance(preparation, Scale):
        preparation.update(batch(30, 2))  # on the host
    later_tensors = [torch.full((3,), 7.0, dtype=dtype, device="cuda") for dtype in (torch.float32, torch.float64) * 99]
    assert torch.equal(graphs.run("call", lambda: preparation(x))[0], preparation(x))
    assert all((tensor == 7).all() for tensor in later_tensors)  # which are where something was let go


def test_units_keep_none_of_the_examples():
    """The usual value is one of a hundred, which a view would hold as well; so it was in early versions."""
    scale, from_old_state = Scale(), Scale()
    x = torch.randn(101, 1, dtype=torch.float64)
    scale.update(x)
    from_old_state.load_state_dict({**scale.state_dict(), "usual": x.sort(0).values[50]})
    pickled = pickle.loads(pickle.dumps(from_old_state))
    for scale_or_copy in (scale, from_old_state, pickled):
        assert torch.equal(scale_or_copy.usual, x.median(0).values)
        assert scale_or_copy.usual.untyped_storage().nbytes() == 8


def test_a_thread_never_computes_with_half_of_an_update():
    x, results = torch.tensor([[2.0]]), []

    class Watched(Scale):
        """While its deviation is about to change, another thread asks."""

        @property
        def deviation(self):
            if self.count == 4 and asks.ident is None:
                asks.start()
                asks.join(0.3)
            return super().deviation

    scale = Watched()
    asks = threading.Thread(target=lambda: results.append(scale(x)))
    scale.update(torch.tensor([[0.0], [2.0]]))
    before = scale(x)
    scale.update(torch.tensor([[100.0], [300.0]]))
    asks.join()
    assert not torch.equal(before, scale(x))
    assert any(torch.equal(results[0], expected) for expected in (before, scale(x)))


@pytest.mark.parametrize("shape", [(4, 1), (4, 5), (3, 1), ()])
def test_units_are_not_those_of_other_numbers(shape):
    scale = Scale()
    scale.update(torch.randn(4, 3))
    for change in (scale, scale.undo):
        with pytest.raises(InputError, match=r"^x: got a tensor of shape .*, expected examples of shape \[3\], as"):
            change(torch.zeros(shape))
        assert change(torch.zeros(3)).shape == (3,)
    with pytest.raises(InputError, match="^x: got <class 'numpy.ndarray'>, expected a tensor with a row for each"):
        scale.update(np.zeros((4, 3)))
