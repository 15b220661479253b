"""Examples of types that torch only half supports: converted without loss, or refused by name."""

import numpy as np
import pytest
import torch
from torch import nn

from parabolic import ER, MLP, SGD, InputError, ParabolicClassifier, Stream, train

UNSIGNED = ["uint16", "uint32", "uint64"]


def whole_numbers(dtype, rows=60, below=100):
    rng = np.random.default_rng(0)
    return rng.integers(below, size=(rows, 4)).astype(dtype), np.arange(rows) % 3


@pytest.mark.parametrize("dtype", UNSIGNED)
@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_unsigned_examples_are_learned_as_the_same_numbers_in_a_signed_type(dtype, convert, tmp_path):
    x, y = whole_numbers(dtype)
    scores = []
    for examples in (convert(x), x.astype(np.int64)):
        torch.manual_seed(0)
        learner = ER(MLP((4,), 3), memory=40, prepare=lambda x: x.float() / 100)
        for first in range(0, 60, 20):
            learner.observe(examples[first : first + 20], y[first : first + 20])
        learner.save(tmp_path / "learner")
        scores.append(learner.scores(examples))
    assert torch.equal(*scores)


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_a_stream_takes_unsigned_examples(dtype):
    x, y = whole_numbers(dtype)
    stream = Stream.from_arrays(x, y, tasks=[[0, 1], [2]])
    assert torch.equal(stream[0].train.x, torch.from_numpy(x.astype(np.int64)))
    result = train(ER(MLP((4,), 3), memory=40, prepare=lambda x: x.float() / 100), stream, batch=10)
    assert np.isfinite(result.matrix[-1]).all()


@pytest.mark.parametrize("dtype", [*UNSIGNED, "int8", "int16"])
def test_ids_of_any_whole_type_are_looked_up(dtype):
    x, y = whole_numbers(dtype)
    scores = []
    for examples in (x, x.astype(np.int64)):
        torch.manual_seed(0)
        learner = ER(nn.Sequential(nn.Flatten(), nn.Linear(20, 3)), embed=nn.Embedding(100, 5), memory=40)
        learner.observe(examples, y)
        learner.observe(examples, y)
        scores.append(learner.scores(examples))
    assert torch.equal(*scores)


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_ids_of_an_estimator_may_be_unsigned(dtype):
    x, y = whole_numbers(dtype)

    def network(shape, outputs):
        return nn.Sequential(nn.Embedding(100, 5), nn.Flatten(), nn.Linear(5 * shape[0], outputs))

    model, signed = (ParabolicClassifier("er", model=network, scale=False, random_state=0) for _ in range(2))
    for estimator, examples in ((model, x), (signed, x.astype(np.int64))):
        estimator.fit(examples, y).partial_fit(examples, y)
    np.testing.assert_array_equal(model.predict_proba(x), signed.predict_proba(x))
    np.testing.assert_array_equal(model.predict_proba(x.astype(np.int64)), signed.predict_proba(x))


def test_whole_numbers_that_no_signed_type_holds_are_refused_by_name():
    x, y = whole_numbers("uint64")
    x[3, 1] = 2**63
    message = r"^{}: got whole numbers of 2\*\*63 or more, expected smaller ones; convert them to float64"
    with pytest.raises(InputError, match=message.format("x")):
        SGD(MLP((4,), 3)).observe(x, y)
    with pytest.raises(InputError, match=message.format("test x")):
        Stream.from_arrays(whole_numbers("int64")[0], y, test=(x, y), tasks=1)
    with pytest.raises(InputError, match=message.format("X")):
        ParabolicClassifier("er", model=lambda shape, outputs: MLP(shape, outputs), scale=False).fit(x, y)
    ParabolicClassifier("er", epochs=1).fit(x, y)  # as numbers they are learned


def test_a_state_from_before_unsigned_types_were_converted_still_fits_them():
    x, y = whole_numbers("uint16")
    learner = SGD(MLP((4,), 3), prepare=lambda x: x.float())
    learner.observe(x, y)
    learner.load_state_dict({**learner.state_dict(), "example": torch.empty(0, 4, dtype=torch.uint16)})
    learner.observe(x, y)


def test_complex_numbers_are_refused_with_what_to_do():
    x, y = whole_numbers("complex64")
    with pytest.raises(InputError, match=r"^x: got .*complex64.*; split complex numbers with torch.view_as_real$"):
        SGD(MLP((4,), 3)).observe(x, y)
    with pytest.raises(InputError, match="^x: got an array of type complex64, expected real numbers of at most 64"):
        Stream.from_arrays(x, y)
