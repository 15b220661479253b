"""TF32: whichever of torch's switches a program has used, runs compute as they say, and leave all as it was."""

from contextlib import suppress

import pytest
import torch

from parabolic import RunSpec
from parabolic.engine import numerics
from parabolic.experiments import execute
from parabolic.gpus import tf32
from parabolic.learners.programme import inner_products

BACKENDS = torch.backends
MATMUL, CUDNN = BACKENDS.cuda.matmul, BACKENDS.cudnn
NEW = hasattr(MATMUL, "fp32_precision")


def fresh():
    torch.set_float32_matmul_precision("highest")
    CUDNN.allow_tf32 = True
    if NEW:
        for place in (BACKENDS, CUDNN, MATMUL, BACKENDS.mkldnn.matmul):
            place.fp32_precision = "none"
        CUDNN.conv.fp32_precision = CUDNN.rnn.fp32_precision = "tf32"


@pytest.fixture(autouse=True)
def _fresh():
    fresh()
    yield
    fresh()


def switches():
    """The values of all switches of torch for TF32."""
    reads = [lambda: MATMUL.allow_tf32, lambda: CUDNN.allow_tf32, torch.get_float32_matmul_precision]
    if NEW:
        places = (BACKENDS, CUDNN, MATMUL, CUDNN.conv, CUDNN.rnn, BACKENDS.mkldnn, BACKENDS.mkldnn.matmul)
        reads += [lambda place=place: place.fp32_precision for place in places]
    values = []
    for read in reads:
        try:
            values.append(read())
        except RuntimeError:
            values.append("cannot be read")
    return values


def computes_in_tf32():
    """By the switches that a GPU's kernels ask."""
    if not NEW:
        return [MATMUL.allow_tf32, CUDNN.allow_tf32]
    return [place.fp32_precision == "tf32" for place in (MATMUL, CUDNN.conv, CUDNN.rnn)]


def newer(place, value):
    return pytest.param(place, "fp32_precision", value, marks=pytest.mark.skipif(not NEW, reason="needs torch 2.9"))


PROGRAMMES = [
    (None, "", None),
    (MATMUL, "allow_tf32", True),
    (CUDNN, "allow_tf32", False),
    *(newer(place, value) for place in (BACKENDS, CUDNN, MATMUL) for value in ("tf32", "ieee")),
    *(newer(getattr(CUDNN, name, None), "ieee") for name in ("conv", "rnn")),
    (torch, "set_float32_matmul_precision", "high"),
    (torch, "set_float32_matmul_precision", "medium"),
]


@pytest.mark.parametrize(("place", "name", "value"), PROGRAMMES)
def test_any_switch_may_have_been_used_before(place, name, value):
    if place is torch:
        torch.set_float32_matmul_precision(value)
    elif place is not None:
        setattr(place, name, value)
    before = switches()
    for allowed in (True, False):
        with tf32(allowed):
            assert set(computes_in_tf32()) == {allowed}
            inside = switches()
            with suppress(ZeroDivisionError), tf32(not allowed):
                assert set(computes_in_tf32()) == {not allowed}
                raise ZeroDivisionError
            assert switches() == inside
            if "cannot be read" not in before[:2]:
                assert inside[:2] == [allowed, allowed]  # where a model, or torch.compile, reads the older ones
        assert switches() == before


@pytest.mark.skipif(not NEW, reason="needs torch 2.9")
def test_what_follows_a_wider_switch_follows_it_again():
    BACKENDS.fp32_precision = "tf32"
    with tf32(False):
        pass
    BACKENDS.fp32_precision = "ieee"
    assert MATMUL.fp32_precision == "ieee"


@pytest.mark.skipif(not NEW, reason="needs torch 2.9")
def test_a_run_is_the_same_after_the_newer_switches_were_used():
    spec = RunSpec("gem", stream="seq-blobs", memory=50)  # it computes inner products by itself
    plain = execute(spec, device="cpu")
    MATMUL.fp32_precision, CUDNN.conv.fp32_precision = "tf32", "ieee"
    before = switches()
    assert "cannot be read" in before
    assert execute(spec, device="cpu").accuracy == plain.accuracy
    with numerics("fp32"):
        assert inner_products(torch.eye(2)).tolist() == [[1, 0], [0, 1]]
        assert not any(computes_in_tf32())
    assert switches() == before
