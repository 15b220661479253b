"""Whatever `observe`, `partial_fit` and the loaders are given: a clear error and nothing changed, or a right answer."""

import copy
import warnings

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_learners import frozen, same

from parabolic import DER, EWC, MLP, PCL, InputError, ParabolicClassifier, ParabolicRegressor, Stream

slow_to_draw = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int8,
    torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64, torch.bool, torch.complex64,
]  # fmt: skip
LABELS = st.sampled_from([0, 1, 2, 3, 4, -1, 7, 2**24, 2**31, 2**40, 2**62, -(2**63)])
ODD = st.sampled_from([
    None, "words", b"bytes", 3, 2.5, float("nan"), [], [[]], [[1.0, 2.0], [3.0]], {"x": 1}, {1, 2}, object(), [None],
    ["a", "b"], [[1, "a", 2]], [2**70], range(3), np.datetime64("2020-01-01"), np.array(["a", "b"]),
    np.array([object(), None]), np.array([(1, 2.0)], dtype="i4,f4"), torch.nn.Linear(2, 2), torch.tensor(1.0),
    torch.zeros(3, 3, device="meta"),
])  # fmt: skip


def attempt(function, *expected_errors):
    """What a call gives, or what the error says that it raises."""
    try:
        return function(), None
    except expected_errors as error:
        return None, str(error)


@st.composite
def floats(draw, shape):
    """Numbers, among which there may be some that are none."""
    values = np.random.default_rng(draw(st.integers(0, 9))).normal(size=shape).astype(np.float32)
    bad = draw(st.sampled_from([None, None, None, np.nan, np.inf, -np.inf]))
    if bad is not None and values.size:
        values.flat[draw(st.integers(0, values.size - 1))] = bad
    return values


def in_some_form(draw, values):
    """The same numbers in one of the many ways in which they may come."""
    how, tensor = draw(st.integers(0, 11)), torch.from_numpy(values.copy())
    if how == 0 or not values.ndim:
        return values
    if how == 1:
        return values.tolist()
    if how == 2:
        return np.asfortranarray(values)
    if how == 3:
        return np.repeat(values, 2, axis=0)[::2]  # not contiguous
    if how == 4:
        return values[::-1].copy()[::-1]  # steps backwards
    if how == 5:
        frozen_array = values.copy()
        frozen_array.flags.writeable = False
        return frozen_array
    if how == 6 and tensor.is_floating_point():
        return tensor.clone().requires_grad_() * 1  # with a history
    if how == 7:
        return torch.repeat_interleave(tensor, 2, 0)[::2]
    if how == 8 and tensor.ndim > 1:
        return tensor.to_sparse()
    if how == 9:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if how == 10:
        return values.astype(values.dtype.newbyteorder(">"))
    return tensor


@st.composite
def batches(draw):
    """Examples of three numbers and their labels: right, if oddly dressed; or nearly right."""
    if draw(st.booleans()):
        size = draw(st.sampled_from([1, 12, 30]))
        return in_some_form(draw, draw(floats((size, 3)))), in_some_form(
            draw, np.arange(size) % draw(st.integers(1, 4))
        )
    size = draw(st.sampled_from([0, 1, 2, 5, 8]))
    shape = draw(st.sampled_from([(size, 3)] * 4 + [(size,), (size, 2), (size, 3, 1), (3, size), ()]))
    x = draw(floats(shape))
    labels = draw(st.lists(LABELS if draw(st.booleans()) else st.integers(0, 3), min_size=size, max_size=size))
    y = np.array(labels, dtype=np.int64)
    if draw(st.integers(0, 4)) == 0:
        y = y[:, None] if draw(st.booleans()) else y[:-1]
    pair = [in_some_form(draw, x), in_some_form(draw, y)]
    for position in (0, 1):
        case = draw(st.integers(0, 9))
        if case == 0:
            pair[position] = draw(ODD)
        elif case == 1 and isinstance(pair[position], torch.Tensor) and pair[position].layout == torch.strided:
            pair[position] = pair[position].detach().to(draw(st.sampled_from(DTYPES)))
    return tuple(pair)


def plain_tensor(value):
    """What was accepted, as an ordinary tensor."""
    value = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(np.array(value).tolist())
    return value.contiguous().clone()


@pytest.mark.parametrize("learner_class", [PCL, DER, EWC])
@pytest.mark.parametrize("fresh", [True, False])
@slow_to_draw
@given(batch=batches(), task=st.sampled_from([0, 0, 0, None, 1, -1, 2**40, 1.5, "one", float("nan")]))
def test_observe(learner_class, fresh, batch, task):
    torch.manual_seed(0)
    learner = learner_class(MLP((3,), 4, hidden=(6,)), lr=0.01)
    if not fresh:
        learner.observe(torch.randn(5, 3), torch.arange(5) % 4, 0)
    before, undisturbed = frozen(learner.state_dict()), copy.deepcopy(learner)
    loss, message = attempt(lambda: learner.observe(*batch, task), InputError)
    if loss is None:
        assert message.split(":")[0] in ("x", "y", "task")
        assert same(before, learner.state_dict())
    else:
        assert torch.isfinite(loss)
        assert torch.equal(loss, undisturbed.observe(plain_tensor(batch[0]), plain_tensor(batch[1]), task))
        assert same(learner.state_dict(), undisturbed.state_dict())
        stored = learner.state_dict().get("memory", {}).values()  # of whose history nothing is held
        assert not any(isinstance(value, torch.Tensor) and value.requires_grad for value in stored)


@st.composite
def tables(draw):
    """Rows of three numbers and a target, as people bring them."""
    size = draw(st.sampled_from([0, 1, 2, 6]))
    values = draw(floats(draw(st.sampled_from([(size, 3)] * 4 + [(size,), (size, 2), (size, 3, 1), (1, size, 3)]))))
    targets = draw(st.sampled_from(["numbers", "words", "huge", "floats", "mixed", "none", "columns"]))
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    y = {
        "numbers": rng.integers(0, 5, size),
        "words": np.array(["a", "b", "c", "a long one"])[rng.integers(0, 4, size)],
        "huge": rng.integers(0, 2, size) * 2**62,
        "floats": rng.normal(size=size),
        "mixed": np.array([1, "a", None, 2.5, 1, "a"][:size], dtype=object),
        "none": None,
        "columns": rng.normal(size=(size, 2)),
    }[targets]
    case = draw(st.integers(0, 11))
    x = values
    if case == 0:
        x = draw(ODD)
    elif case == 1 and values.ndim == 2:
        x = pd.DataFrame(values, columns=list("abc")[: values.shape[1]])
    elif case == 2 and values.ndim == 2:
        x = scipy.sparse.csr_matrix(values)
    elif case == 3:
        x = values.astype(object)
    elif case == 4:
        x = values.astype(str)
    elif case == 5:
        x = values.astype(complex)
    elif case == 6:
        x = values[::-1]
    elif case == 7:
        x, y = values[:-1], y
    return x, y


@pytest.mark.parametrize("cls", [ParabolicClassifier, ParabolicRegressor])
@slow_to_draw
@given(table=tables())
def test_partial_fit(cls, table):
    rng = np.random.default_rng(0)
    model = cls(random_state=0, memory=32).partial_fit(rng.normal(size=(20, 3)), np.arange(20) % 3)
    probe = rng.normal(size=(4, 3))
    before, answers_before = frozen(model.learner_.state_dict()), getattr(model, "predict_proba", model.predict)(probe)
    with warnings.catch_warnings():  # of scikit-learn, on names of features that were not there before
        warnings.simplefilter("ignore", UserWarning)
        fitted, message = attempt(lambda: model.partial_fit(*table), ValueError, TypeError)
    answers_after = getattr(model, "predict_proba", model.predict)(probe)
    if fitted is None:
        assert message
        assert same(before, model.learner_.state_dict())
        np.testing.assert_array_equal(answers_after, answers_before)
    else:
        assert np.isfinite(answers_after).all()
        if cls is ParabolicClassifier:
            assert set(np.unique(table[1])) <= set(model.classes_.tolist())
            np.testing.assert_allclose(answers_after.sum(1), 1)


@slow_to_draw
@given(batch=batches(), tasks=st.sampled_from([1, 1, 1, 2, 0, -1, 1.5, "ab", None, [[0], [1]], [["a"]], [[]], [0]]))
def test_streams_of_arrays(batch, tasks):
    stream, message = attempt(lambda: Stream.from_arrays(*batch, tasks=tasks), InputError)
    if stream is None:
        assert message
        return
    x, y = plain_tensor(batch[0]), plain_tensor(batch[1])
    rows = torch.cat([torch.cat([task.train_rows, task.test_rows]) for task in stream])
    expected_rows = set(range(len(y))) if isinstance(tasks, int) else {row for row in range(len(y)) if y[row] in (0, 1)}
    assert set(rows.tolist()) == expected_rows
    assert len(rows) == len(expected_rows)
    assert torch.equal(stream[0].train.y, y.long())
    assert torch.equal(stream[0].train.x.double(), x.double())


@slow_to_draw
@given(
    items=st.lists(st.tuples(floats((3,)), st.sampled_from([0, 0, 1])), min_size=5, max_size=20)
    | st.lists(
        st.one_of(
            st.tuples(floats((3,)), st.integers(0, 2)),
            st.tuples(floats((3,)), st.sampled_from([1.5, "1", None, -1, 2**70, float("inf"), torch.tensor(1)])),
            st.tuples(floats((2,)), st.integers(0, 2)),
            ODD,
        ),
        max_size=12,
    )
)
def test_streams_of_pairs(items):
    stream, message = attempt(lambda: Stream.from_dataset(items, tasks=1), InputError)
    if stream is None:
        assert message
        return
    assert stream[0].train.y.tolist() == [int(label) for _, label in items]
    assert torch.equal(stream[0].train.x, torch.stack([torch.from_numpy(example) for example, _ in items]))
