"""The estimators keep scikit-learn's promises, and go on learning when new classes come."""

import copy
import copyreg
import functools
import io
import os
import pickle
import subprocess
import sys
import tracemalloc
from decimal import Decimal

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits, make_regression
from sklearn.exceptions import NotFittedError
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from test_learners import frozen, same
from torch import nn

from parabolic import (
    MLP,
    MSE,
    PCL,
    CrossEntropy,
    InputError,
    Learner,
    Numbers,
    ParabolicClassifier,
    ParabolicRegressor,
    Recent,
    load_preset,
)
from parabolic.engine import Diverged
from parabolic.learners import Scale, find_learner, known_learners


@parametrize_with_checks([ParabolicClassifier(random_state=0), ParabolicRegressor(random_state=0)])
@pytest.mark.filterwarnings("default")
def test_the_checks_of_scikit_learn(estimator, check):
    """None of them raises; the one on other array libraries skips itself unless SCIPY_ARRAY_API is set."""
    check(estimator)


def digits():
    """The digits in five tasks of two, and all that is held out."""
    x, y = load_digits(return_X_y=True)
    held_out = np.arange(len(y)) % 5 == 4
    tasks = [~held_out & np.isin(y, [first, first + 1]) for first in (8, 0, 2, 6, 4)]  # not in the order of their names
    return [(x[in_task], y[in_task]) for in_task in tasks], (x[held_out], y[held_out])


@pytest.mark.parametrize("name", sorted(known_learners()))
def test_new_classes_may_come_with_any_call(name):
    tasks, (x, y) = digits()
    model = ParabolicClassifier(name, batch_size=10, random_state=0, average=0.9)
    for i, task in enumerate(tasks):
        model.partial_fit(*task)
        assert model.classes_.tolist() == sorted({int(label) for _, labels in tasks[: i + 1] for label in labels})
        assert model.score(*task) > 0.3  # what came last is known, whatever the method does for the past
    chances = model.predict_proba(x)
    assert chances.shape == (len(x), 10)
    np.testing.assert_allclose(chances.sum(1), 1)
    assert (model.classes_[chances.argmax(1)] == model.predict(x)).all()
    if name in ("pcl", "er", "cbrs", "mixup", "obc", "vrmcl", "gem"):
        assert model.score(x, y) > 0.75
        assert log_loss(y, chances) < 1.5


@pytest.mark.parametrize("optimizer", ["SGD", functools.partial(torch.optim.SGD, momentum=0.9), "Adam"])
@pytest.mark.parametrize("name", sorted(known_learners()))
def test_a_head_that_grows_leaves_old_outputs_alone(name, optimizer):
    """Scores of old classes, averages and the optimiser's state are what they were, and the next step is taken."""
    torch.manual_seed(0)
    learner = find_learner(name)(MLP((3,), 2, hidden=(8,)), average=0.9, optimizer=optimizer, lr=0.01)
    batch, task = (torch.randn(40, 3), torch.arange(40) % 2), 0 if learner.needs_tasks else None
    learner.start_task([batch])
    for _ in range(3):
        learner.observe(*batch, task)
    learner.end_task([batch])
    before, state_before = learner.scores(batch[0]), copy.deepcopy(learner.state_dict())
    learner.grow(5)
    np.testing.assert_array_equal(learner.scores(batch[0])[:, :2], before)
    state_after = learner.state_dict()
    assert state_after["optimizer"]["state"].keys() == state_before["optimizer"]["state"].keys()
    for weight, old_buffers in state_before["optimizer"]["state"].items():
        for key, old_buffer in old_buffers.items():
            new_buffer = state_after["optimizer"]["state"][weight][key]
            old_rows = new_buffer[: len(old_buffer)] if new_buffer.ndim else new_buffer
            assert torch.equal(old_rows, old_buffer)
            assert not new_buffer.ndim or not new_buffer[len(old_buffer) :].any()
    more_data = (torch.randn(40, 3), torch.arange(40) % 5)
    learner.start_task([more_data])
    for _ in range(3):
        learner.observe(*more_data, task)
    learner.end_task([more_data])
    assert learner.scores(batch[0]).shape == (40, 5)
    assert learner.predict(batch[0]).max() < 5
    # What it became can be carried on by another that had five classes from the start.
    restored = find_learner(name)(MLP((3,), 5, hidden=(8,)), average=0.9, optimizer=optimizer, lr=0.01)
    restored.load_state_dict(copy.deepcopy(learner.state_dict()))
    assert torch.equal(restored.observe(*more_data, task), learner.observe(*more_data, task))


def test_a_network_that_grew_step_by_step_learns_as_one_that_had_all_outputs():
    """Against an oracle: plain SGD with momentum, whose new rows begin where the grown ones did, with no momentum."""
    torch.manual_seed(0)
    ours = nn.Linear(3, 2).double()
    learner = find_learner("sgd")(ours, lr=0.1, optimizer=functools.partial(torch.optim.SGD, momentum=0.5))
    x, y = torch.randn(10, 3, dtype=torch.float64), torch.arange(10) % 2
    learner.observe(x, y)
    learner.grow(3)
    weight, bias = ours.weight.detach().clone(), ours.bias.detach().clone()
    momentum = [learner.optim.state[parameter]["momentum_buffer"].clone() for parameter in (ours.weight, ours.bias)]
    learner.observe(x, torch.arange(10) % 3)
    chances = (x @ weight.T + bias).softmax(1)
    slope = (chances - torch.eye(3, dtype=torch.float64)[torch.arange(10) % 3]) / 10
    for before, momentum_before, gradient, after in (
        (weight, momentum[0], slope.T @ x, ours.weight), (bias, momentum[1], slope.sum(0), ours.bias)
    ):  # fmt: skip
        assert torch.allclose(after, before - 0.1 * (0.5 * momentum_before + gradient), atol=1e-12)


def test_classes_may_be_announced():
    model = ParabolicClassifier(random_state=0)
    model.partial_fit([[0.0], [1.0]] * 20, ["a", "b"] * 20, classes=["c", "b", "a"])
    assert model.classes_.tolist() == ["a", "b", "c"]
    assert model.learner_.classes == 3
    model.partial_fit([[5.0]] * 300, ["aa"] * 300)
    assert model.classes_.tolist() == ["a", "aa", "b", "c"]
    assert model.predict([[5.0]]) == ["aa"]


def test_old_labels_in_another_type_change_none():
    x, y = [[0.0], [1.0]] * 20, [0, 1] * 20
    model = ParabolicClassifier("er", random_state=0).partial_fit(x, y).partial_fit(x, np.array(y, dtype=float))
    assert model.classes_.dtype == model.predict(x).dtype == np.int64


def test_many_classes_in_a_few_examples_are_no_surprise_in_a_part():
    x, y = np.arange(30.0)[:, None], np.arange(30)
    model = ParabolicClassifier("er", epochs=1, random_state=0).partial_fit(x, y)  # in tests warnings are errors
    assert len(model.partial_fit(x, y + 15).classes_) == 45
    with pytest.warns(UserWarning, match="number of unique classes is greater than 50%"):
        model.fit(x, y)
    with pytest.raises(ValueError, match="Unknown label type"):
        model.partial_fit(x, y + 0.5)


def test_logarithms_of_probabilities_are_right_where_those_are_too_small_for_a_float():
    network = nn.Linear(1, 2).double()
    network.weight.data, network.bias.data = torch.tensor([[-1000.0], [1000.0]]).double(), torch.zeros(2).double()
    x, y = np.array([[-1.0], [1.0], [0.001]]), ["b", "c", "c"]
    model = ParabolicClassifier("er", model=network, lr=1e-12, scale=False, epochs=1, random_state=0).fit(x, y)
    log_probabilities = model.predict_log_proba(x)
    np.testing.assert_allclose(log_probabilities[:2], [[0, -2000], [-2000, 0]], atol=1e-6)
    np.testing.assert_allclose(log_probabilities[2], np.log(model.predict_proba(x)[2]))


def test_labels_of_another_kind_are_refused_and_nothing_changes():
    model = ParabolicClassifier(random_state=0).fit([[0.0], [1.0]] * 20, ["a", "b"] * 20)
    before = frozen(model.learner_.state_dict())
    with pytest.raises(InputError, match="^y: got a number for a label, expected a word"):
        model.partial_fit([[0.0]], [3])
    with pytest.raises(ValueError, match="Unknown label type"):
        model.partial_fit([[0.0]], [3.5])
    assert same(before, model.learner_.state_dict())
    assert model.classes_.tolist() == ["a", "b"]


def test_dates_durations_and_numbers_are_different_kinds_of_labels():
    numbers, x = np.arange(4) % 2, np.arange(4.0)[:, None]
    labels = {"number": numbers, "date": numbers.astype("M8[D]"), "duration": numbers.astype("m8[D]")}
    for kind, y in labels.items():
        model = ParabolicClassifier("er", epochs=1, random_state=0).fit(x, y)
        assert model.partial_fit(x, y + 1).classes_.tolist() == np.unique([*y, *(y + 1)]).tolist()
        for other_kind in labels.keys() - {kind}:
            with pytest.raises(InputError, match=f"^y: got a {other_kind} for a label, expected a {kind}"):
                model.partial_fit(x, labels[other_kind])


def test_what_classes_announces_is_checked_under_its_name():
    x, y = np.arange(4.0)[:, None], ["a", "b"] * 2
    model = ParabolicClassifier("er", epochs=1, random_state=0)
    for announced, message in (
        ({"a", "b"}, "got {'.', '.'}, expected a list of labels"),
        (2, "got 2, expected a list of labels"),
        ([1, 2], "got a number for a label, expected a word"),
        ([b"a", b"b"], "got labels that are bytes, .*; decode them"),
    ):
        with pytest.raises(InputError, match=f"^classes: {message}"):
            model.partial_fit(x, y, classes=announced)
    assert model.partial_fit(x, y, classes=[]).classes_.tolist() == ["a", "b"]


def test_labels_may_be_of_any_type_of_number():
    x, y = np.arange(4.0)[:, None], np.arange(4) % 2
    for kind in (np.float16, np.uint8, np.int64, np.longdouble, bool):
        assert ParabolicClassifier("er", epochs=1).fit(x, y.astype(kind)).classes_.tolist() == [0, 1]


def test_a_pickle_goes_on_in_another_process_as_if_nothing_had_happened(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 3
    models = [cls(random_state=0, average=0.9).partial_fit(x, y) for cls in (ParabolicClassifier, ParabolicRegressor)]
    (tmp_path / "models.pickle").write_bytes(pickle.dumps((models, x, y)))
    code = (
        "import pickle; models, x, y = pickle.load(open('models.pickle', 'rb'))\n"
        "pickle.dump([model.partial_fit(x + 1, y + 1).predict(x) for model in models], open('found.pickle', 'wb'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    for model, predictions in zip(models, pickle.loads((tmp_path / "found.pickle").read_bytes()), strict=True):
        np.testing.assert_array_equal(model.partial_fit(x + 1, y + 1).predict(x), predictions)


@pytest.mark.parametrize("cls", [ParabolicClassifier, ParabolicRegressor])
def test_a_model_that_was_fitted_in_inference_mode_goes_on_learning(cls):
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 3
    expected = cls("er", random_state=0).fit(x, y).partial_fit(x, y + 1).predict(x)
    with torch.inference_mode():
        model = cls("er", random_state=0).fit(x, y)
    np.testing.assert_array_equal(model.partial_fit(x, y + 1).predict(x), expected)


def test_one_seed_one_outcome_and_a_clone_starts_afresh():
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 3
    model = ParabolicClassifier(random_state=3).fit(x, y)
    np.testing.assert_array_equal(model.predict_proba(x), clone(model).fit(x, y).predict_proba(x))
    np.testing.assert_array_equal(model.predict_proba(x), model.fit(x, y).predict_proba(x))
    other_seed = clone(model).set_params(random_state=4).fit(x, y)
    assert not np.array_equal(model.predict_proba(x), other_seed.predict_proba(x))
    assert model.get_params()["learner"] == "pcl"


def test_estimators_work_in_pipelines_with_grid_search_and_data_frames():
    x, y = load_digits(return_X_y=True)
    frame = pd.DataFrame(x[:300], columns=[f"pixel {i}" for i in range(64)])
    search = GridSearchCV(
        make_pipeline(StandardScaler(), ParabolicClassifier(epochs=3, random_state=0)),
        {"parabolicclassifier__learner": ["er", "sgd"], "parabolicclassifier__options": [{"clip_norm": 1.0}, None]},
        cv=2,
    ).fit(frame, y[:300])
    assert search.best_score_ > 0.6
    model = ParabolicClassifier("er", epochs=2, random_state=0).fit(frame, y[:300])
    assert model.feature_names_in_[1] == "pixel 1"
    with pytest.raises(ValueError, match="feature names should match"):
        model.partial_fit(frame.rename(columns={"pixel 1": "another"}), y[:300])


def test_columns_of_arrow_batches_are_known_by_name():
    arrow = pytest.importorskip("pyarrow")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=60), "b": rng.integers(0, 5, 60), "c": rng.random(60) > 0.5})
    labels = np.where(frame["a"] > 0, "up", "down")
    expected = ParabolicClassifier("er", random_state=0).partial_fit(frame, labels).predict_proba(frame)
    table = arrow.Table.from_pandas(frame)
    for table_or_batch in (table, table.to_batches()[0]):
        model = ParabolicClassifier("er", random_state=0).partial_fit(table_or_batch, arrow.array(labels))
        np.testing.assert_array_equal(model.predict_proba(table_or_batch), expected)
        for method in (model.predict, functools.partial(model.partial_fit, y=labels)):
            with pytest.raises(ValueError, match="Feature names must be in the same order"):
                method(table_or_batch.select(["c", "a", "b"]))


@pytest.mark.parametrize("cls", [ParabolicClassifier, ParabolicRegressor])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_row_and_column_of_a_gap_are_named(cls, bad):
    x, y = np.random.default_rng(0).normal(size=(6, 3)), np.arange(6) % 2
    gaps = x.copy()
    gaps[2, 1] = gaps[4, 0] = bad
    frame = pd.DataFrame(gaps, columns=["age", "size", "price"])
    full = pd.DataFrame(x, columns=frame.columns)
    for data, good, column in (
        (gaps, x, "1"),
        (frame, full, "'size'"),
        (frame.convert_dtypes(), full, "'size'"),
    ):
        model = cls("er", random_state=0).partial_fit(good, y)
        before = frozen(model.learner_.state_dict())
        for method in (model.predict, *(functools.partial(method, y=y) for method in (model.partial_fit, model.fit))):
            with pytest.raises(InputError, match=f"in 2 of 6 rows, first in row 2 .*column {column}, expected finite"):
                method(data)
        assert same(before, model.learner_.state_dict())
    with pytest.raises(InputError, match=r"in 1 of 6 rows, first in row 4 .*column \[0, 1\], expected finite"):
        cls("er").fit(np.where(np.arange(24).reshape(6, 2, 2) == 17, bad, 0.0), y)


@pytest.mark.parametrize(
    "column",
    [
        ["a", "b"] * 3,
        pd.Categorical(["a", "b"] * 3),
        pd.date_range("2026-01-01", periods=6),
        pd.date_range("2026-01-01", periods=6, tz="Europe/Berlin"),
    ],
)
def test_columns_that_are_no_numbers_are_named(column):
    y = np.arange(6) % 2
    frame = pd.DataFrame({"size": np.arange(6.0), "kind": column, "as text": [str(i) for i in range(6)]})
    numbers = frame.assign(kind=y)
    model = ParabolicClassifier("er", random_state=0).partial_fit(numbers, y)  # texts of numbers are numbers
    for method in (model.predict, functools.partial(model.partial_fit, y=y), functools.partial(model.fit, y=y)):
        with pytest.raises(InputError, match=r"X: got columns that are no numbers: 'kind' \([^)]*\), expected numbers"):
            method(frame)
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(frame.rename(columns={"size": "length"}))


def test_a_preset_among_learners_says_how_to_use_it():
    x, y = load_digits(return_X_y=True)
    with pytest.raises(InputError, match="learner: got 'pcl-plus', .* it is a preset: ") as error:
        ParabolicClassifier("pcl-plus").fit(x, y)
    suggested_arguments = error.value.remedy.removeprefix("it is a preset: ")
    model = eval(f"ParabolicClassifier({suggested_arguments})", {**globals(), "load_preset": load_preset}).partial_fit(
        x, y
    )
    assert (model.learner_.repeats, model.learner_.replay, model.learner_.average) == (2, 64, 0.995)


def test_one_of_the_options_can_be_set_and_searched_by_its_own_name():
    x, y = load_digits(return_X_y=True)
    options = {"sigma_x": 0.1}
    model = ParabolicClassifier(options=options, epochs=1, random_state=0)
    assert model.get_params()["options__sigma_x"] == 0.1
    assert "options__sigma_x" not in model.get_params(deep=False)
    for estimator, prefix in ((model, ""), (make_pipeline(StandardScaler(), clone(model)), "parabolicclassifier__")):
        grid = {f"{prefix}options__replay": [8, 16]}
        search = GridSearchCV(estimator, grid, cv=2, error_score="raise").fit(x[:200], y[:200])
        best = search.best_estimator_ if not prefix else search.best_estimator_[-1]
        assert [search.cv_results_["params"][i][f"{prefix}options__replay"] for i in range(2)] == [8, 16]
        assert best.learner_.replay == best.options["replay"] == search.best_params_[f"{prefix}options__replay"]
        assert best.learner_.sigma_x == 0.1  # the other stays
    assert options == {"sigma_x": 0.1} == model.options
    assert clone(model).set_params(options={"replay": 4}, options__times=2).options == {"replay": 4, "times": 2}
    assert ParabolicRegressor().set_params(options__replay=8).options == {"replay": 8}
    with pytest.raises(InputError, match="options: got 'replya', .*did you mean 'replay'"):
        clone(model).set_params(options__replya=8).fit(x[:50], y[:50])
    with pytest.raises(InputError, match="options: got 3, expected a mapping of names to values"):
        ParabolicClassifier(options=3).set_params(options__replay=8)


def test_regression_of_one_number_and_of_several_in_the_units_of_the_targets():
    x, y = make_regression(300, 4, n_targets=3, noise=1.0, random_state=0)
    y = 1e4 + 50 * y
    for loss in ("mse", "huber", Numbers(lambda scores, target: (scores - target).abs())):
        assert cross_val_score(ParabolicRegressor(loss=loss, random_state=0), x, y, cv=2).min() > 0.9
    regressor = ParabolicRegressor("er", random_state=0).fit(x, y[:, 0])
    assert regressor.predict(x).shape == (300,)
    assert regressor.score(x, y[:, 0]) > 0.9
    with pytest.raises(InputError, match=r"^y: got .*, expected one of shape \[300, 1\], as before"):
        regressor.partial_fit(x, y)


def test_estimators_take_modules_and_functions_that_make_networks():
    x, y = load_digits(return_X_y=True)
    images = x.reshape(-1, 1, 8, 8)[:400]
    network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))  # it will grow
    before = copy.deepcopy(network.state_dict())
    model = ParabolicClassifier("er", model=network, epochs=5, random_state=0).fit(images, y[:400])
    assert model.score(images, y[:400]) > 0.9
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    other_model = ParabolicClassifier(model=functools.partial(MLP, hidden=(30,)), epochs=5, random_state=0)
    other_model.fit(images, y[:400])
    assert other_model.learner_.model[1].out_features == 30
    assert other_model.score(images, y[:400]) > 0.7
    with pytest.raises(InputError, match="^X: got .*, expected examples of shape"):
        model.partial_fit(images.reshape(-1, 1, 4, 16), y[:400])


def test_words_may_come_as_ids_for_an_embedding():
    rng = np.random.default_rng(0)
    ids = np.concatenate([rng.integers(0, 10, (100, 5)), rng.integers(10, 20, (100, 5))])
    y = np.repeat([0, 1], 100)
    options = {"embed": nn.Embedding(20, 4)}
    model = ParabolicClassifier(model=lambda shape, outputs: MLP((20,), outputs, hidden=(16,)), scale=False,
                                options=options, random_state=0)  # fmt: skip
    assert model.fit(ids, y).score(ids, y) > 0.85
    before = frozen(model.learner_.state_dict())
    for method in (functools.partial(model.partial_fit, y=y), model.predict):
        with pytest.raises(InputError, match="^X: got .*, expected examples that the model accepts"):
            method(ids + 5)
    assert same(before, model.learner_.state_dict())


def test_ids_that_would_be_scaled_are_refused_with_a_remedy():
    ids = np.random.default_rng(0).integers(0, 20, (40, 5))
    network = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(20, 2))
    with pytest.raises(InputError, match="if they are ids, they must not be scaled .*scale=False"):
        ParabolicClassifier("er", model=network).partial_fit(ids, np.arange(40) % 2)
    ParabolicClassifier("er", model=network, scale=False).partial_fit(ids, np.arange(40) % 2)


def test_scale_is_that_of_everything_seen():
    rng = np.random.default_rng(0)
    batches = [rng.normal(size, size, (10 * size, 3)) for size in (1, 5, 2)]
    scale, theirs = Scale(), StandardScaler()
    for batch in batches:
        batch[:, 2] = 7.0
        scale.update(torch.from_numpy(batch))
        theirs.partial_fit(batch)
    everything = np.concatenate(batches)
    np.testing.assert_allclose(
        scale(torch.from_numpy(everything)), StandardScaler().fit_transform(everything), atol=1e-12
    )
    np.testing.assert_allclose(scale(torch.from_numpy(everything)), theirs.transform(everything), atol=1e-12)
    np.testing.assert_allclose(scale.undo(scale(torch.from_numpy(everything))), everything, atol=1e-12)


def test_scale_refuses_what_it_could_not_forget_and_stays_as_it_was():
    x = torch.randn(20, 3, dtype=torch.float64)
    bad_batches = {
        "values that are NaN or infinite": torch.tensor([[1.0, torch.nan, 0.0]]),
        "1 values that are NaN or infinite": torch.tensor([[-torch.inf, 1.0, 0.0]]),
        r"numbers whose sum of squares fits into float64": torch.full((2, 3), 1e200, dtype=torch.float64) * x[:2],
        "a batch of at least one example": x[:0],
        r"examples of shape \[3\], as before": x[:, :1],
    }
    for before_it in (x, x[:0]):
        scale = Scale()
        if len(before_it):
            scale.update(before_it)
        before = frozen(scale.state_dict())
        for message, batch in bad_batches.items():
            if len(before_it) or "as before" not in message:
                with pytest.raises(InputError, match=f"^x: got .*{message}"):
                    scale.update(batch)
            assert same(before, scale.state_dict())
    with pytest.raises(InputError, match="^rows: got "):
        Scale().update(x[:0], name="rows")


def test_scale_tells_a_small_spread_from_none():
    """A thousandth of a second since 1970, and numbers that never change, of which a mean is right but for rounding."""
    rng = np.random.default_rng(0)
    x = 1.7e9 + 1e-3 * rng.normal(size=(4000, 1))
    constant = np.tile(rng.uniform(0.1, 1e9, (1, 50)), (100_000, 1))
    scale, constant_scale = Scale(), Scale()
    for part in np.array_split(x, 7):
        scale.update(torch.from_numpy(part))
    for part in np.array_split(constant, 3):
        constant_scale.update(torch.from_numpy(part))
    np.testing.assert_allclose(scale.deviation, (x - 1.7e9).std(), rtol=1e-3)
    assert (constant_scale.deviation == 1).all()


def test_a_batch_that_dwarfs_all_before_is_warned_of():
    """One wrong value of 10,000 among thousands; as an error, the warning leaves all as it was."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 3))
    y, good_batch, bad_batch = (x[:, 0] > 0).astype(int), rng.normal(size=(32, 3)), rng.normal(size=(32, 3))
    bad_batch[5, 2] = 1e4
    model = ParabolicClassifier("er", random_state=0).partial_fit(x, y)
    before, probabilities = frozen(model.learner_.state_dict()), model.predict_proba(x)
    with pytest.raises(
        RuntimeWarning, match=r"^X: a batch of 32 multiplies the deviation at \[2\] by 22\d, after 2000 "
    ):
        model.partial_fit(bad_batch, y[:32] + 2)  # in tests warnings are errors
    assert same(before, model.learner_.state_dict())
    np.testing.assert_array_equal(model.predict_proba(x), probabilities)
    model.partial_fit(good_batch, y[:32])
    with pytest.warns(RuntimeWarning, match="^X: a batch of 32 multiplies"):
        model.partial_fit(bad_batch, y[:32])
    assert model.learner_.prepare.count == 2064
    regressor = ParabolicRegressor("er", random_state=0).partial_fit(x, x[:, 0])
    with pytest.raises(RuntimeWarning, match=r"^y: a batch of 32 multiplies the deviation at \[0\]"):
        regressor.partial_fit(good_batch, bad_batch[:, 2])


def test_columns_that_are_rarely_other_than_zero_are_no_surprise():
    rng = np.random.default_rng(0)
    rare, usual = np.zeros((5000, 2)), rng.normal(size=(5000, 1))
    rare[[10, 900], 0] = 0.01  # a pixel at the edge, and one that has always been black
    rare[[3000, 4000]] = 1.0
    scale = Scale()
    for batch in np.array_split(np.hstack([rare, usual]), 100):
        scale.update(torch.from_numpy(batch))  # in tests warnings are errors
    digits_scale = Scale()
    for batch in torch.from_numpy(load_digits().data).split(10):
        digits_scale.update(batch)
    assert (scale.count, digits_scale.count) == (5000, 1797)  # and nothing was left out
    copied = copy.deepcopy(scale)
    copied.update(torch.tensor([[500.0, 500.0, 0.0]]))  # nor is it the batch that decides
    with pytest.raises(RuntimeWarning, match=r"^x: a batch of 1 multiplies the deviation at \[0\]"):
        scale.update(torch.tensor([[1e7, 0.0, 0.0]]))


@pytest.mark.parametrize("filled", [5, 7])
def test_a_wrong_value_among_those_that_were_filled_in_is_warned_of(filled):
    x = np.random.default_rng(0).normal(size=(5000, 3))
    bad_batch = x[:8].copy()
    bad_batch[:filled, 1] = x[:, 1].mean()
    bad_batch[7, 1] = 1e7
    model = ParabolicRegressor("er", random_state=0).partial_fit(x, x[:, 1])
    with pytest.raises(RuntimeWarning, match=r"^X: a batch of 8 multiplies the deviation at \[1\]"):
        model.partial_fit(bad_batch, x[:8, 1])
    with pytest.raises(RuntimeWarning, match=r"^y: a batch of 8 multiplies the deviation at \[0\]"):
        model.partial_fit(x[:8], bad_batch[:, 1])


def test_states_of_a_scale_from_before_usual_values_were_kept_are_loaded():
    """Of those files and pickles nothing is known to be rare: they rather warn."""
    scale, loaded, unpickled = Scale(), Scale(), Scale.__new__(Scale)
    x = torch.zeros(2000, 1)
    x[7] = 0.01
    scale.update(x)
    old_state = {name: scale.state_dict()[name] for name in ("count", "mean", "squares")}
    loaded.load_state_dict(old_state)
    unpickled.__setstate__(old_state)
    for old_scale in (loaded, unpickled):
        assert torch.equal(old_scale(x), scale(x))
        with pytest.raises(RuntimeWarning, match="^x: a batch of 1 multiplies"):
            old_scale.update(torch.ones(1, 1))
    scale.update(torch.ones(1, 1))


@pytest.mark.parametrize("cls", [ParabolicClassifier, ParabolicRegressor])
def test_masked_values_are_refused_and_a_mask_of_nothing_is_not(cls):
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6) % 2
    model = cls("er", epochs=1, random_state=0).fit(np.ma.masked_array(x), np.ma.masked_array(y))
    masked, message = (
        np.ma.masked_greater(x, 8),
        "got an array with 3 masked values, expected one without gaps; fill in ",
    )
    for method in (clone(model).fit, clone(model).partial_fit, model.partial_fit):
        with pytest.raises(InputError, match=f"^X: {message}what is missing"):
            method(masked, y)
        with pytest.raises(InputError, match=f"^y: {message}what is missing"):
            method(x, np.ma.masked_equal(y, 1))
    with pytest.raises(InputError, match=f"^X: {message}"):
        model.predict(masked)


@pytest.mark.parametrize("gap", [float("nan"), None, pd.NA, pd.NaT])
def test_a_missing_label_is_no_class(gap):
    x, y = [[0.0], [1.0], [2.0]], ["a", "b", gap]
    model = ParabolicClassifier("er", epochs=1, random_state=0).fit(x, ["a", "b", "nan"])  # which is a word
    containers = (
        list,
        tuple,
        pd.Series,
        functools.partial(np.array, dtype=object),
        functools.partial(pd.Series, dtype="string"),
    )
    for labels in (container(y) for container in containers):
        for method in (clone(model).fit, clone(model).partial_fit, model.partial_fit):
            with pytest.raises(
                InputError, match="^y: got 1 missing labels, expected words or numbers; fill in what is "
            ):
                method(x, labels)
    with pytest.raises(InputError, match="^classes: got 1 missing labels"):
        model.partial_fit(x, ["a"] * 3, classes=y)
    assert model.classes_.tolist() == ["a", "b", "nan"]


def test_a_missing_number_or_date_is_no_class():
    x, model = [[0.0], [1.0]], ParabolicClassifier("er", epochs=1, random_state=0)
    numbers, dates = np.array([1.0, np.nan]), np.array(["2020-01-01", "NaT"], "datetime64[D]")
    for y in (numbers, dates, pd.Series(dates), pd.Series([1, None], dtype="Int64")):
        with pytest.raises(InputError, match="^y: got 1 missing labels"):
            model.fit(x, y)
    for y, announced in (([1.0, 2.0], numbers), (dates[:1].repeat(2), dates)):
        with pytest.raises(InputError, match="^classes: got 1 missing labels"):
            model.partial_fit(x, y, classes=announced)


def test_words_are_no_targets_of_a_regressor():
    x, words = np.arange(6.0)[:, None], ["a", "b"] * 3
    model = ParabolicRegressor("er", epochs=1, random_state=0).fit(x, np.arange(6))
    for method in (clone(model).fit, model.partial_fit):
        for y in (words, np.array(words, dtype=object), pd.Series(words)):
            with pytest.raises(InputError, match=r"^y: got values that are no numbers, .*use a ParabolicClassifier"):
                method(x, y)


@pytest.mark.parametrize("kind", ["datetime64[s]", "datetime64[ns]", "timedelta64[m]"])
def test_dates_and_times_are_no_numbers(kind):
    x, y = np.arange(6.0)[:, None], np.arange(6)
    model = ParabolicRegressor("er", epochs=1, random_state=0).fit(x, y)
    for dates in (y.astype(kind), pd.Series(y.astype(kind)), y.astype(kind)[:, None]):
        for method in (clone(model).fit, model.partial_fit):
            with pytest.raises(
                InputError, match=r"^y: got an array of type (date|time).*, expected numbers; turn dates "
            ):
                method(x, dates)
        for dates in (pd.Series(y.astype(kind)).astype(object), pd.Series(y.astype("M8[s]")).dt.tz_localize("UTC")):
            with pytest.raises(InputError, match="^y: got values that are no numbers, expected numbers"):
                method(x, dates)


@pytest.mark.parametrize("first", [1, 2])
def test_one_number_is_the_same_flat_and_in_a_column(first):
    """Predictions have the shape that the first targets had."""
    x = np.linspace(-1, 1, 40)[:, None]
    shapes = {1: x[:, 0], 2: x}
    models = [ParabolicRegressor("er", random_state=0).partial_fit(x, shapes[first]) for _ in shapes]
    predictions = [model.partial_fit(x, y).predict(x) for model, y in zip(models, shapes.values(), strict=True)]
    np.testing.assert_array_equal(*predictions)
    assert predictions[0].ndim == first
    with pytest.raises(
        InputError, match=r"^y: got a tensor of shape \[40, 2\] .*, expected one of shape \[40, 1\], as"
    ):
        models[0].partial_fit(x, np.hstack([x, x]))


@pytest.mark.parametrize("kind", [">f8", ">f4", ">i4", np.longdouble])
@pytest.mark.parametrize("scale", [True, False])
def test_numbers_of_types_that_torch_does_not_know_are_those_that_it_knows(kind, scale):
    x, y = np.arange(12).reshape(6, 2), [0, 1] * 3
    for cls in (ParabolicClassifier, ParabolicRegressor):
        model = cls("er", epochs=1, scale=scale, random_state=0)
        fitted_on_kind, fitted_on_plain = clone(model).fit(x.astype(kind), y), model.fit(x, y)
        np.testing.assert_array_equal(
            fitted_on_kind.partial_fit(x.astype(kind), y).predict(x), fitted_on_plain.partial_fit(x, y).predict(x)
        )
        np.testing.assert_array_equal(fitted_on_plain.predict(x.astype(kind)), fitted_on_plain.predict(x))


def test_classes_have_weights_in_their_order_and_new_ones_count_once():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 2))
    y, rare_share = np.where(x[:, 0] + rng.normal(size=400) > 1.5, "rare", "common"), {}
    for weight in (1.0, 5.0):
        options = {"criterion": CrossEntropy(weights=[1.0, weight])}
        model = ParabolicClassifier("er", options=options, random_state=0).fit(x, y)
        rare_share[weight] = (model.predict(x) == "rare").mean()
    assert rare_share[5] > 2 * rare_share[1]
    model.partial_fit(x[:20] + 9, ["another"] * 20)
    assert model.classes_.tolist() == ["another", "common", "rare"]
    assert list(model.learner_.error.weights) == [1.0, 5.0, 1.0]  # in the order of the outputs


def test_a_class_that_has_a_weight_may_come_later_if_it_is_announced():
    x, y = np.random.default_rng(0).normal(size=(20, 2)), ["common"] * 20
    model = ParabolicClassifier("er", options={"criterion": CrossEntropy(weights=[1.0, 5.0])}, random_state=0)
    with pytest.raises(InputError, match=r"^weights: got 2 .*; announce .*: partial_fit\(X, y, classes=…\)"):
        model.partial_fit(x, y)
    assert list(model.partial_fit(x, y, classes=["rare", "common"]).learner_.error.weights) == [1.0, 5.0]


@pytest.mark.parametrize("name", sorted(known_learners()))
def test_weights_by_label_are_those_of_a_criterion_and_reach_classes_that_come_later(name):
    x, weights = np.random.default_rng(0).normal(size=(60, 3)), {"pear": 5.0, "apple": 3, "quince": 2}
    y = np.array(["pear", "fig"] * 30)
    model = ParabolicClassifier(name, class_weight=weights, random_state=0).partial_fit(x, y)
    with_criterion = ParabolicClassifier(name, options={"criterion": CrossEntropy(weights=[1.0, 5.0])}, random_state=0)
    np.testing.assert_array_equal(model.predict_proba(x), with_criterion.partial_fit(x, y).predict_proba(x))
    plain = ParabolicClassifier(name, random_state=0).partial_fit(x, y)
    assert not np.array_equal(model.predict_proba(x), plain.predict_proba(x))
    model.partial_fit(x[:20], ["apple", "kiwi"] * 10)
    assert model.classes_.tolist() == ["apple", "fig", "kiwi", "pear"]
    assert list(model.learner_.error.weights) == [1.0, 5.0, 3.0, 1.0]  # by output: fig, pear, apple, kiwi
    model.partial_fit(x, y)
    assert list(pickle.loads(pickle.dumps(model)).learner_.error.weights) == [1.0, 5.0, 3.0, 1.0]


def test_balanced_weights_are_inverse_to_frequencies():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(100, 2)), np.array([3] * 80 + [7] * 15 + [5] * 5)
    model = ParabolicClassifier("er", class_weight="balanced", epochs=2, random_state=0).fit(x, y)
    np.testing.assert_allclose(model.learner_.error.weights, [100 / 3 / 80, 100 / 3 / 5, 100 / 3 / 15])
    before = frozen(model.learner_.state_dict())
    for estimator in (model, clone(model)):
        with pytest.raises(InputError, match="^class_weight: got 'balanced', .*dict .* for partial_fit; a new class"):
            estimator.partial_fit(x, y)
    assert same(before, model.learner_.state_dict())


def test_weights_that_fit_no_label_are_refused():
    x, y = [[0.0], [1.0]] * 20, [0, 1] * 20

    def assert_refused(match, y=y, **settings):
        with pytest.raises(InputError, match=match):
            ParabolicClassifier(**settings).fit(x, y)

    assert_refused("^class_weight: got 'balance', .*did you mean 'balanced'", class_weight="balance")
    assert_refused(r"^class_weight: got \[1, 2\], expected None, 'balanced', or a dict", class_weight=[1, 2])
    assert_refused("^class_weight of 1: got -1, expected a number of at least 0", class_weight={1: -1})
    assert_refused("^class_weight: got '1', expected labels like those in y, such as 0", class_weight={"1": 2})
    assert_refused("^class_weight: got b'a', expected .* such as 'a'", ["a", "b"] * 20, class_weight={b"a": 2})
    criterion = {"criterion": CrossEntropy()}
    assert_refused("^class_weight: got {1: 2}, expected None, as options has", class_weight={1: 2}, options=criterion)
    model = ParabolicClassifier("er", class_weight={1: 2}, random_state=0).partial_fit(x, y)
    with pytest.raises(InputError, match="^class_weight: got {1: 3}, .*takes effect at the next fit"):
        model.set_params(class_weight={1: 3}).partial_fit(x, y)


def test_several_labels_per_example_are_for_a_regressor():
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.eye(3, dtype=int)[np.arange(60) % 3]
    with pytest.raises(ValueError, match="y should be a 1d array"):
        ParabolicClassifier(random_state=0).fit(x, y)
    loss = Numbers(nn.BCEWithLogitsLoss(reduction="none"))
    options = {"prepare": Scale(), "sigma_y": 0.0}
    tagger = ParabolicRegressor(loss=loss, scale=False, options=options, random_state=0).partial_fit(1e3 + x, y)
    assert tagger.predict(1e3 + x).shape == (60, 3)
    with torch.no_grad():
        inputs = torch.from_numpy((x - x.mean(0)) / x.std(0))
        np.testing.assert_allclose(tagger.predict(1e3 + x), tagger.learner_.model(inputs), atol=1e-9)
    with pytest.raises(InputError, match=r"^y: .*expected one of shape \[60, 3\], as before"):
        tagger.partial_fit(x, y[:, :2])


def test_grids_may_be_of_numpy():
    x, y = [[0.0], [1.0]] * 20, [0, 1] * 20
    grid = {
        "memory": np.array([32, 40]),
        "batch_size": np.arange(5, 7),
        "lr": np.float32([0.1]),
        "epochs": np.arange(1, 2),
    }
    search = GridSearchCV(ParabolicClassifier("er", random_state=0), grid, cv=2, error_score="raise").fit(x, y)
    assert search.best_estimator_.learner_.past.capacity in (32, 40)


def test_bad_parameters_are_refused_by_fit():
    x, y = [[0.0], [1.0]] * 20, [0, 1] * 20
    with pytest.raises(InputError, match="did you mean 'pcl'"):
        ParabolicClassifier("pcll").fit(x, y)
    with pytest.raises(InputError, match="^options: got 'seed', .*; set random_state instead$"):
        ParabolicClassifier("er", options={"seed": 3}, random_state=0).fit(x, y)
    with pytest.raises(InputError, match="^options: got 'sigmax', .*did you mean 'sigma_x'"):
        ParabolicClassifier(options={"sigmax": 1}).fit(x, y)
    with pytest.raises(InputError, match="^batch_size"):
        ParabolicClassifier(batch_size=0).fit(x, y)
    with pytest.raises(InputError, match="^learner: got 3, expected a method's name, or its class"):
        ParabolicClassifier(3).fit(x, y)
    with pytest.raises(InputError, match=r"^options: got \['lr'\], expected a mapping of names to values"):
        ParabolicClassifier(options=["lr"]).fit(x, y)
    with pytest.raises(InputError, match=r"^model: got 'mlp', .* called as model\(shape, outputs\)"):
        ParabolicClassifier(model="mlp").fit(x, y)
    with pytest.raises(InputError, match=r"^replay: got 32, .* memory=20; set it with options=\{'replay': …\}"):
        ParabolicClassifier("er", memory=20).fit(x, y)
    with pytest.raises(InputError, match="^scale: got True, expected False, as embed looks up ids"):
        ParabolicClassifier("er", options={"embed": nn.Embedding(2, 4)}, model=nn.Linear(4, 2)).fit(x, y)
    with pytest.raises(InputError, match="^criterion: .*lwf is for classes"):
        ParabolicRegressor("lwf").fit(x, y)
    with pytest.raises(InputError, match="^model"):
        ParabolicClassifier(model=lambda shape, outputs: "network").fit(x, y)
    with pytest.raises(Diverged, match="lower lr"):
        ParabolicRegressor(lr=1e6, random_state=0).fit(x, y)
    assert isinstance(ParabolicClassifier(PCL, random_state=0).fit(x, y).learner_, PCL)


@pytest.mark.parametrize("scale", [True, False])
def test_numbers_too_large_are_refused_and_change_nothing(scale):
    """For the type of a network or, where they are scaled, for their squares; scikit-learn finds them finite."""
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
    model = ParabolicRegressor(model=MLP((3,), 1), scale=scale, random_state=0).partial_fit(x, y)
    before, predictions = frozen(model.learner_.state_dict()), model.predict(x)
    size = 1e200 if scale else 1e60
    for name, bad_data in (("X", (x * size, y)), ("y", (x, y * size))):
        with pytest.raises(InputError, match=f"^{name}: got "):
            model.partial_fit(*bad_data)
    with pytest.raises(InputError, match="^X: .*values that are NaN or infinite"):
        model.predict(x * 1e60)
    assert same(before, model.learner_.state_dict())
    np.testing.assert_array_equal(model.predict(x), predictions)


def test_a_long_prediction_takes_no_more_room_than_a_few_thousand_examples():
    """Of many bytes no more than some are floats at a time; an error still tells which example it means."""
    x, y = np.random.default_rng(0).integers(0, 256, (40_000, 50)).astype(np.uint8), np.arange(40_000) % 2
    model = ParabolicClassifier("er", model=MLP((50,), 2), epochs=1, random_state=0)
    unscaled = clone(model).set_params(scale=False).fit(x[:100] / 256, y[:100])
    model.fit(x[:100], y[:100])
    tracemalloc.start()
    model.predict(x)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < x.nbytes / 2
    with_outlier = x[:5000].astype(float)
    with_outlier[4100, 7] = 1e60
    for estimator in (model, unscaled):
        with pytest.raises(InputError, match=r"^X: got 1 .* the first at \[4, 7\], counting from row 4096, expected"):
            estimator.predict(with_outlier)


def test_large_numbers_that_differ_little_are_scaled_before_they_are_rounded():
    """Seconds of today: in float32 a network would find two minutes of them equal."""
    rng, y = np.random.default_rng(0), np.arange(400) % 2
    x = (1.7e9 + 20 * y + rng.normal(size=400))[:, None]
    network = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 2))
    model = ParabolicClassifier(model=network, random_state=0).fit(x[:200], y[:200]).partial_fit(x[200:], y[200:])
    assert model.score(x, y) == 1
    assert model.learner_.inputs(model.learner_.past["x"]).dtype == torch.float32


def test_large_targets_that_differ_little_are_scaled_before_they_are_rounded():
    x = np.random.default_rng(0).normal(size=(400, 1))
    target = 1e8 + x[:, 0]
    model = ParabolicRegressor(model=nn.Linear(1, 1), lr=0.05, random_state=0).fit(x[:200], target[:200])
    assert model.partial_fit(x[200:], target[200:]).score(x, target) > 0.99


def test_whole_numbers_need_not_be_scaled():
    x, y = (array[:600] for array in load_digits(return_X_y=True))
    model = ParabolicClassifier("er", scale=False, lr=0.01, epochs=5, random_state=0)
    expected = model.fit(x, y).predict_proba(x)
    for whole_numbers in (x.astype(np.int64), x.astype(np.uint16), x.astype(int).tolist()):
        np.testing.assert_array_equal(clone(model).fit(whole_numbers, y).predict_proba(whole_numbers), expected)
    assert clone(model).set_params(lr=0.1).fit(x > 8, y).score(x > 8, y) > 0.8


def test_bytes_that_are_not_scaled_are_numbers_from_0_to_1():
    x, y = (array[:600] for array in load_digits(return_X_y=True))
    images = (x * 15.9375).astype(np.uint8)
    model = ParabolicClassifier("er", scale=False, lr=0.1, epochs=5, random_state=0)
    expected = model.fit((images / np.float32(255)).astype(np.float64), y).predict_proba(images / np.float32(255))
    np.testing.assert_allclose(clone(model).fit(images, y).predict_proba(images), expected, rtol=1e-5)
    assert model.fit(images, y).learner_.past["x"].dtype == torch.uint8


def test_whole_numbers_are_what_was_learned_wherever_that_is_exact():
    """A chunk of floats that happen to be whole, ids that come as floats, bytes in a wider type."""
    rng, y = np.random.default_rng(0), np.arange(60) % 2
    x = rng.normal(size=(60, 4))
    float_model = ParabolicClassifier("er", model=MLP((4,), 2), scale=False, random_state=0).fit(x, y)
    expected = float_model.predict_proba([[1.0, 2.0, 3.0, 4.0]])
    np.testing.assert_array_equal(float_model.predict_proba([[1, 2, 3, 4]]), expected)
    assert float_model.partial_fit(np.round(x).astype(int), y).learner_.past["x"].dtype == torch.float32
    with pytest.raises(InputError, match="^X: got .* type uint8, expected .*float32"):
        float_model.predict(np.ones((1, 4), np.uint8))  # as bytes they mean something else
    ids = rng.integers(0, 20, (60, 5))
    word_model = ParabolicClassifier("er", model=lambda shape, outputs: MLP((20,), outputs), scale=False,
                                options={"embed": nn.Embedding(20, 4)}, random_state=0).fit(ids, y)  # fmt: skip
    np.testing.assert_array_equal(word_model.predict_proba(ids.astype(float)), word_model.predict_proba(ids))
    for method in (word_model.predict, functools.partial(word_model.partial_fit, y=y)):
        with pytest.raises(InputError, match=r"^X: got .* type float64, expected .* type int64, as before$"):
            method(ids + 0.5)
    images = rng.integers(0, 256, (60, 4)).astype(np.uint8)
    pixel_model = ParabolicClassifier("er", scale=False, random_state=0).fit(images, y)
    np.testing.assert_array_equal(pixel_model.predict_proba(images.astype(int)), pixel_model.predict_proba(images))
    for wrong_images in (images.astype(int) + 1000, images / 255):
        with pytest.raises(InputError, match="^X: got .*, expected .*uint8"):
            pixel_model.predict(wrong_images)


def test_labels_that_floats_do_not_distinguish_are_refused():
    x, y = np.arange(60.0)[:, None], (np.arange(60) % 3).astype(np.uint64)
    model = ParabolicClassifier(random_state=0)
    with pytest.raises(InputError, match="^y: got labels of 9007199254740992 or more as floats"):
        model.partial_fit(x, y + np.uint64(2**63), classes=[1, 2])
    with pytest.raises(InputError, match="^y: got labels of 9007199254740992 or more as floats"):
        model.fit(x, [2.0**60, 2**60 + 1] * 30)  # NumPy makes floats of both
    assert model.fit(x, y + np.uint64(2**63)).classes_.tolist() == [2**63, 2**63 + 1, 2**63 + 2]
    model.fit(x, y + np.uint64(2**60))
    with pytest.raises(InputError, match="^y: got labels of 9007199254740992 or more as floats"):
        model.partial_fit(x, 2**60 + np.arange(60) % 3)
    assert model.partial_fit(x, y + np.uint64(2**60 + 1)).classes_.tolist() == [2**60 + i for i in range(4)]


def test_a_learning_rate_may_change_after_the_fit_and_other_settings_may_not():
    """A learning rate is taken up by the next call; what a learner is made of is not, and that is said."""
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 3
    model = ParabolicClassifier("er", options={"clip_norm": 1.0}, lr=0.1, random_state=0).partial_fit(x, y)
    slow, same_lr = copy.deepcopy(model).set_params(lr=np.float32(1e-9)), copy.deepcopy(model).set_params(lr=0.1)
    probabilities = model.predict_proba(x)
    np.testing.assert_allclose(slow.partial_fit(x, y).predict_proba(x), probabilities, atol=1e-6)
    np.testing.assert_array_equal(same_lr.partial_fit(x, y).predict_proba(x), model.partial_fit(x, y).predict_proba(x))
    assert model.set_params(lr=None, batch_size=5).partial_fit(x, y).learner_.lr == find_learner("er").lr
    with pytest.raises(InputError, match="^lr: got -1"):
        model.set_params(lr=-1).partial_fit(x, y)
    with pytest.raises(InputError, match="^batch_size: got 0"):
        model.set_params(lr=None, batch_size=0).partial_fit(x, y)
    model.set_params(batch_size=5, options={"clip_norm": 1.0}, device=torch.device("cpu")).partial_fit(x, y)
    with pytest.raises(InputError, match="^options: got .* takes effect at the next fit"):
        ParabolicClassifier("er").partial_fit(x, y).set_params(options={"clip_norm": 1.0}).partial_fit(x, y)
    changes = {"memory": 50, "options": {"clip_norm": 2.0}, "learner": "pcl", "scale": False, "average": 0.9}
    for name, value in changes.items():
        changed = copy.deepcopy(model).set_params(**{name: value})
        before = frozen(changed.learner_.state_dict())
        with pytest.raises(InputError, match=f"^{name}: got .* takes effect at the next fit"):
            changed.partial_fit(x, y)
        assert same(before, changed.learner_.state_dict())
        changed.fit(x, y).partial_fit(x, y)


def test_a_learning_rate_among_the_options_is_the_one_to_come_back_to():
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 3
    model = ParabolicClassifier("er", options={"lr": 0.02}, random_state=0).partial_fit(x, y)
    for lr, expected in ((0.3, 0.3), (None, 0.02)):
        model.set_params(lr=lr).partial_fit(x, y)
        assert model.learner_.lr == model.learner_.optim.param_groups[0]["lr"] == expected


def test_a_learner_whose_learning_rate_became_a_whole_number_is_saved_and_loaded(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 3
    model = ParabolicClassifier("er", lr=0.1, scale=False, random_state=0).partial_fit(x, y)
    learner = model.set_params(lr=1).partial_fit(x, y).learner_
    again = Learner.load(learner.save(tmp_path / "learner"), model=copy.deepcopy(learner.model))
    assert again.lr == learner.lr == 1


@pytest.mark.parametrize("cls", [ParabolicClassifier, ParabolicRegressor])
@pytest.mark.parametrize("method", ["fit", "partial_fit"])
def test_what_is_an_argument_and_an_option_is_the_arguments_unless_that_is_none(cls, method):
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 3
    model = cls("er", options={"lr": 0.02, "average": 0.5}, lr=0.03, average=0.9, epochs=1, random_state=0)
    for lr, average, expected in ((0.03, 0.9, (0.03, 0.9)), (None, None, (0.02, 0.5)), (0.04, None, (0.04, 0.5))):
        learner = getattr(clone(model).set_params(lr=lr, average=average), method)(x, y).learner_
        assert (
            (learner.optim.param_groups[0]["lr"], learner.averaged.decay) == (learner.lr, learner.average) == expected
        )
    for lr, expected in ((0.03, 0.03), (None, 0.02)):  # of a model that was fitted before too
        learner = getattr(model.set_params(lr=lr), method)(x, y).learner_
        assert learner.lr == learner.optim.param_groups[0]["lr"] == expected


def batch_norm_network(shape, outputs):
    return nn.Sequential(nn.Linear(*shape, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, outputs))


def embedding_network(shape, outputs):
    return nn.Sequential(ByShop(), nn.Linear(6, outputs))


class ByShop(nn.Module):
    """The first number is an id, though it is a float."""

    def __init__(self):
        super().__init__()
        self.shops = nn.Embedding(5, 4)

    def forward(self, x):
        return torch.cat([self.shops(x[:, 0].long()), x[:, 1:]], 1)


def models_and_bad_data():
    """Models, and what they refuse of which some would be learned, or grown for, before it is found out."""
    rng = np.random.default_rng(0)
    x, pixels = rng.integers(0, 5, (60, 3)).astype(float), rng.integers(0, 256, (60, 3)).astype(np.uint8)
    bad_later = np.where(np.arange(60)[:, None] == 59, 5.0, x)  # in the second batch
    for cls in (ParabolicClassifier, ParabolicRegressor):
        for name in ("sgd", "ewc"):
            yield cls(name, model=batch_norm_network, average=0.9), x, x[:1] + 100
        yield cls("er", scale=False), pixels, pixels / 255
        yield cls("er", model=embedding_network, scale=False), x, bad_later
        yield (cls("er", options={"prepare": lambda x: torch.where(x == 5, torch.inf, x)}), x, bad_later)


@pytest.mark.parametrize(("model", "x", "bad"), [*models_and_bad_data()])
def test_a_partial_fit_that_refuses_its_data_leaves_all_as_it_was(model, x, bad):
    y = (np.arange(60) % 2).astype(float)
    model = clone(model).set_params(random_state=0).partial_fit(x, y)
    before, predictions = frozen(model.learner_.state_dict()), model.predict(x)
    with pytest.raises(InputError, match="^X: got "):
        model.set_params(lr=0.01).partial_fit(bad, 7 + np.arange(len(bad)) % 3)
    assert same(before, model.learner_.state_dict())
    np.testing.assert_array_equal(model.predict(x), predictions)
    if hasattr(model, "classes_"):
        assert model.classes_.tolist() == [0, 1]
        assert model.predict_proba(x).shape == (60, 2)
    continued = copy.deepcopy(model).set_params(lr=None)
    undisturbed = clone(model).set_params(lr=None).partial_fit(x, y)
    np.testing.assert_array_equal(continued.partial_fit(x, y).predict(x), undisturbed.partial_fit(x, y).predict(x))


@pytest.mark.parametrize("cls", [ParabolicClassifier, ParabolicRegressor])
def test_batch_norm_learns_a_single_example_beside_those_of_memory(cls):
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 2
    model = cls("er", model=batch_norm_network, random_state=0).partial_fit(x, y)
    one_example, one_by_one = (
        copy.deepcopy(model).partial_fit(x[:1], y[:1]),
        copy.deepcopy(model).set_params(batch_size=1),
    )
    assert one_example.learner_.steps == model.learner_.steps + 1
    assert one_by_one.partial_fit(x[:3], y[:3]).learner_.prepare.count == 63


@pytest.mark.parametrize("cls", [ParabolicClassifier, ParabolicRegressor])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_learner_of_an_estimator_can_be_loaded_alone(tmp_path, cls, dtype):
    x, y = np.random.default_rng(0).normal(1e9, 1, size=(60, 3)), np.arange(60) % 2
    model = cls("er", model=MLP((3,), 2 if cls is ParabolicClassifier else 1).to(dtype), random_state=0).fit(x, y)
    path, target = model.learner_.save(tmp_path / "er.safetensors"), torch.from_numpy(y)
    criterion = {} if cls is ParabolicClassifier else {"criterion": MSE(units=Scale())}
    loaded = Learner.load(path, prepare=Scale(), **criterion)
    np.testing.assert_allclose(loaded.predict(torch.from_numpy(x)).flatten(), model.predict(x), rtol=1e-6)
    loaded.observe(torch.from_numpy(x), target)
    model.learner_.observe(torch.from_numpy(x), target)
    assert same(frozen(loaded.state_dict()), model.learner_.state_dict())


@pytest.mark.parametrize("cls", [ParabolicClassifier, ParabolicRegressor])
def test_a_fit_that_fails_leaves_all_as_it_was(cls):
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
    model = cls(random_state=0)
    with pytest.raises(InputError, match="^options"):
        model.set_params(options={"unknown": 1}).partial_fit(x, y)
    assert not hasattr(model, "n_features_in_")
    frame = pd.DataFrame(x, columns=list("abc"))
    predictions = model.set_params(options=None).fit(frame, y).predict(frame)
    with pytest.raises(InputError, match="^batch_size"):
        model.set_params(batch_size=0).fit(x[:, :2], y)
    with pytest.raises(Diverged):
        model.set_params(batch_size=32, lr=1e300).fit(x[:, :2], y)
    np.testing.assert_array_equal(model.predict(frame), predictions)


@pytest.mark.parametrize("cls", [ParabolicClassifier, ParabolicRegressor])
@pytest.mark.parametrize("name", ["er", "ewc"])
def test_no_call_copies_the_learner_and_a_prediction_or_a_fit_that_fails_changes_nothing(cls, name, monkeypatch):
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
    model = cls(name, average=0.9, random_state=0).partial_fit(x, y)
    assert copy.copy(model).learner_ is model.learner_
    assert copy.deepcopy(model).learner_ is not model.learner_

    def refuse(*_):
        raise AssertionError("it is copied")

    monkeypatch.setattr(Learner, "__deepcopy__", refuse)
    attributes, state = {**vars(model)}, frozen(model.learner_.state_dict())
    for method in (model.predict, getattr(model, "predict_proba", model.predict)):
        method(x)
    with pytest.raises(Diverged):
        model.set_params(lr=1e300).fit(x[:, :2], y)
    model.set_params(lr=None)
    assert vars(model).keys() == attributes.keys()
    assert all(vars(model)[attribute] is value for attribute, value in attributes.items())
    assert same(state, model.learner_.state_dict())
    learner = model.learner_
    assert model.partial_fit(x, y + 1).learner_ is learner
    assert model.fit(x, y).learner_ is not learner


@pytest.mark.parametrize("cls", [ParabolicClassifier, ParabolicRegressor])
def test_a_network_that_diverged_refuses_to_predict(cls):
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
    model = cls(random_state=0).partial_fit(x, y).set_params(lr=1e300)
    with pytest.raises(Diverged, match="lower lr"):
        model.partial_fit(x, y)
    for method in (model.predict, getattr(model, "predict_proba", model.predict)):
        with pytest.raises(Diverged, match="the scores are not finite numbers: .*call fit with a lower lr"):
            method(x)
    assert np.isfinite(model.set_params(lr=0.01).fit(x, y).predict(x)).all()


@pytest.mark.parametrize("cls", [ParabolicClassifier, ParabolicRegressor])
@pytest.mark.parametrize("name", ["er", "ewc"])
def test_the_loss_of_a_call_is_the_mean_of_the_losses_of_its_last_pass(cls, name, monkeypatch):
    x, y, losses = np.random.default_rng(0).normal(size=(70, 3)), np.arange(70) % 3, []
    learner_class, observe = find_learner(name), find_learner(name).observe
    monkeypatch.setattr(
        learner_class, "observe", lambda *args: losses.append(float(observe(*args))) or torch.tensor(losses[-1])
    )
    model = cls(name, epochs=4, batch_size=32, random_state=0).fit(x, y)
    assert len(losses) == 12
    assert model.loss_ == pytest.approx(np.mean(losses[-3:]), rel=1e-6)
    losses.clear()
    assert model.partial_fit(x[:40], y[:40]).loss_ == pytest.approx(np.mean(losses), rel=1e-6)
    assert len(losses) == 2


@pytest.mark.parametrize("name", sorted(known_learners()))
def test_memory_counts_are_by_label(name):
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.array(["pear", "fig", "fig"] * 20)
    model = ParabolicClassifier(name, memory=100, random_state=0).partial_fit(x, y, classes=["pear", "fig", "kiwi"])
    model.partial_fit(x[:10], ["apple"] * 10)  # the last output, and the first label
    counts = model.memory_counts()
    assert list(counts) == model.classes_.tolist() == ["apple", "fig", "kiwi", "pear"]
    if not hasattr(model.learner_, "past"):
        assert set(counts.values()) == {0}
    elif name == "gem":  # which divides its memory among tasks
        assert counts["kiwi"] == 0 < min(counts[label] for label in ("apple", "fig", "pear"))
    else:
        assert counts == {"apple": 10, "fig": 40, "kiwi": 0, "pear": 20}


class Forgetful(find_learner("er")):
    """Stores nothing."""

    def remember(self, raw, batch):
        pass


def test_the_counts_of_an_empty_memory_are_zero():
    model = ParabolicClassifier(Forgetful, epochs=1).fit([[0.0], [1.0]], ["a", "b"])
    assert model.memory_counts() == {"a": 0, "b": 0}


def test_an_estimator_that_is_not_fitted_has_no_memory_counts():
    with pytest.raises(NotFittedError):
        ParabolicClassifier().memory_counts()


class Tensors(pickle.Pickler):
    """Notes all tensors in what it pickles, except the states of generators."""

    def __init__(self):
        super().__init__(io.BytesIO())
        self.tensors, self.sizes = [], set()

    def persistent_id(self, value):
        if isinstance(value, torch.Generator):
            self.sizes.add(len(value.get_state()))
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)

    @classmethod
    def of(cls, value):
        pickler = cls()
        pickler.dump(value)
        return [tensor for tensor in pickler.tensors if tensor.dtype != torch.uint8 or len(tensor) not in pickler.sizes]


def pickle_settings(cls, name):
    """Data, and settings with which an estimator of this method has as many tensors as it can."""
    if cls is ParabolicRegressor and find_learner(name).needs_classes:
        pytest.skip("it is for classes")
    options = {"optimizer": "Adam"} if name != "vrmcl" else {}
    settings = {"options": options, "average": 0.9, "lr": 0.01, "random_state": 0}
    return np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 3, settings


@pytest.mark.parametrize("cls", [ParabolicClassifier, ParabolicRegressor])
@pytest.mark.parametrize("name", sorted(known_learners()))
def test_a_pickle_is_made_of_copies_and_every_tensor_in_it_is_moved(cls, name, monkeypatch):
    x, y, settings = pickle_settings(cls, name)
    model = cls(name, model=MLP((3,), 1), **settings).partial_fit(x, y)
    moves, to = [], torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, *arguments: moves.append((self.data_ptr(), arguments)) or to(self, *arguments)
    )
    state = model.__getstate__()
    monkeypatch.undo()
    moved_to_cpu = {address for address, arguments in moves if arguments == (torch.device("cpu"),)}
    in_state = {tensor.data_ptr() for tensor in Tensors.of(state) if tensor.numel()}
    assert in_state <= moved_to_cpu
    assert not in_state & {tensor.data_ptr() for tensor in Tensors.of(model.learner_)}
    assert len(in_state) > 10
    loaded = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(loaded.partial_fit(x, y).predict(x), model.partial_fit(x, y).predict(x))


def test_copies_and_pickles_may_be_made_for_ever(monkeypatch):
    """torch leaks a few kilobytes whenever it reduces a generator to a copy or a pickle, so it is not to."""
    x, y = np.eye(6), np.arange(6) % 2
    model = ParabolicClassifier("er", random_state=0).partial_fit(x, y)
    monkeypatch.setitem(
        copyreg.dispatch_table, torch.Generator, lambda generator: pytest.fail(f"{generator} is reduced")
    )
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    monkeypatch.undo()
    model.partial_fit(x, y)
    for copied in copies:
        assert same(frozen(model.learner_.state_dict()), copied.partial_fit(x, y).learner_.state_dict())


@pytest.mark.parametrize("device", ["cuda", "cuda:7", torch.device("cuda")])
def test_a_pickle_from_a_gpu_is_used_on_the_cpu_if_there_is_none(device, monkeypatch):
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 3
    model = ParabolicClassifier(random_state=0).partial_fit(x, y)
    model.device = model._made["device"] = device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(
        RuntimeWarning, match="^device: got 'cuda.*no CUDA device was found: use cpu. .* on the CPU; before"
    ):
        loaded = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(loaded.predict_proba(x), model.predict_proba(x))
    np.testing.assert_array_equal(loaded.partial_fit(x, y).predict_proba(x), model.partial_fit(x, y).predict_proba(x))
    with pytest.raises(InputError, match="^device: got 'cuda"):
        loaded.fit(x, y)
    assert loaded.set_params(device="auto").fit(x, y).learner_.device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("cls", [ParabolicClassifier, ParabolicRegressor])
@pytest.mark.parametrize("name", sorted(known_learners()))
def test_a_pickle_from_a_gpu_goes_on_there_and_on_a_cpu(cls, name, tmp_path):
    x, y, settings = pickle_settings(cls, name)
    network = MLP((3,), 1).cuda()
    for device in ("cuda", "auto"):
        model = cls(name, model=network, device=device, **settings)
        model.partial_fit(x, y)
        assert {tensor.device.type for tensor in Tensors.of(model.__getstate__())} == {"cpu"}
        assert copy.deepcopy(model).learner_.device == model.learner_.device == torch.device("cuda:0")
        pickled = pickle.dumps(model)
        loaded = pickle.loads(pickled)
        assert loaded.learner_.device == model.learner_.device
        expected = getattr(model, "predict_proba", model.predict)(x)
        np.testing.assert_array_equal(loaded.predict(x), model.predict(x))
        np.testing.assert_array_equal(loaded.partial_fit(x, y).predict(x), model.partial_fit(x, y).predict(x))
        (tmp_path / "model.pickle").write_bytes(pickled)
        code = (
            "import pickle, sys; model = pickle.load(open('model.pickle', 'rb'))\n"
            "x, y = pickle.loads(sys.stdin.buffer.read()); ask = getattr(model, 'predict_proba', model.predict)\n"
            "told = ask(x); model.partial_fit(x, y)\n"
            "sys.stdout.buffer.write(pickle.dumps((told, str(model.learner_.device), ask(x).shape)))"
        )
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
        process = subprocess.run(
            [sys.executable, "-c", code], input=pickle.dumps((x, y)), stdout=subprocess.PIPE, cwd=tmp_path, env=env
        )
        result, device_name, shape = pickle.loads(process.stdout)
        assert (device_name, shape) == ("cpu", expected.shape)
        np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_a_pickle_from_a_cpu_goes_to_a_gpu_if_one_was_asked_for():
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 3
    model = ParabolicClassifier(options={"optimizer": "Adam"}, lr=0.01, random_state=0).partial_fit(x, y)
    model.device = model._made["device"] = "auto"
    loaded = pickle.loads(pickle.dumps(model))
    assert loaded.learner_.device == torch.device("cuda:0")
    assert {tensor.device.type for tensor in Tensors.of(loaded.learner_)} == {"cuda"}
    np.testing.assert_allclose(loaded.predict_proba(x), model.predict_proba(x), atol=1e-6)
    loaded.partial_fit(x, y)


@pytest.mark.parametrize("cls", [ParabolicClassifier, ParabolicRegressor])
def test_single_examples_that_batch_norm_has_met_before_are_learned_without_a_copy_of_the_memory(cls, monkeypatch):
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 2
    model = cls("er", model=batch_norm_network, random_state=0).partial_fit(x, y)
    copies, copy_of = [], Learner.__deepcopy__
    monkeypatch.setattr(Learner, "__deepcopy__", lambda self, memo: copies.append(1) or copy_of(self, memo))
    counts = []
    for row in range(3):
        model.partial_fit(x[row : row + 1], y[row : row + 1])
        counts.append(len(copies))
    model.learner_.past.erase(torch.ones(len(model.learner_.past), dtype=torch.bool))
    with pytest.raises(InputError, match="batch norm"):  # which only a copy shows, now that there is nothing to recall
        model.partial_fit(x[:1], y[:1])
    assert [*counts, len(copies)] == [1, 1, 1, 2]


def test_settings_that_would_be_misread_are_refused():
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.array(["2020-01-01", "2021-01-01"] * 20, "datetime64[D]")
    with pytest.raises(InputError, match="^scale: got 'no', expected True or False"):
        ParabolicClassifier(scale="no").fit(x, y)
    weights = {np.datetime64("2020-01-01", "s"): 9.0}
    for unit in ("D", "ns"):
        model = ParabolicClassifier("sgd", class_weight=weights, random_state=0).fit(x, y.astype(f"datetime64[{unit}]"))
        assert list(model.learner_.error.weights) == [9.0, 1.0]


def test_an_estimator_goes_on_after_a_call_that_was_interrupted():
    """Also with a method that needs to know where tasks end: the interrupted one goes on."""

    class InterruptedOnce(nn.Linear):
        left = 3

        def forward(self, x):
            if self.training:
                self.left -= 1
                if self.left == 0:
                    raise KeyboardInterrupt
            return super().forward(x)

    model = ParabolicClassifier("ewc", model=InterruptedOnce(2, 2), batch_size=4, random_state=0)
    x, y = np.random.default_rng(0).normal(size=(8, 2)), [0, 1] * 4
    model.partial_fit(x, y)
    with pytest.raises(KeyboardInterrupt):
        model.partial_fit(x, y)
    model.partial_fit(x, y).partial_fit(x, y)
    assert (model.learner_.importance > 0).any()


def test_arguments_take_precedence_over_options_of_the_same_name():
    x, y = [[0.0], [1.0]] * 20, [0, 1] * 20
    options = load_preset("pcl-plus").settings | {"replay": 8, "memory": 60}
    preset = ParabolicClassifier("pcl", options=options, epochs=1, random_state=0).fit(x, y).learner_
    assert (preset.past.capacity, preset.lr, preset.average) == (60, options["lr"], options["average"])
    explicit = ParabolicClassifier("pcl", options=options, memory=30, lr=0.5, average=0.9, epochs=1).fit(x, y).learner_
    assert (explicit.past.capacity, explicit.lr, explicit.average) == (30, 0.5, 0.9)
    grid = GridSearchCV(ParabolicClassifier("pcl", options=options, epochs=1), {"memory": [10, 20]}, cv=2)
    best = grid.fit(x, y).best_estimator_
    assert best.learner_.past.capacity == best.memory
    assert ParabolicRegressor("er", epochs=1).fit(x, y).learner_.past.capacity == 200
    ParabolicClassifier("sgd", memory=30, epochs=1).fit(x, y)  # which has none


def test_a_memory_given_to_an_estimator_stays_as_it_was():
    x, y = [[0.0], [1.0]] * 20, [0, 1] * 20
    memory = Recent(50)
    model = ParabolicClassifier("er", memory=memory, epochs=1, random_state=0)
    probabilities = model.fit(x, y).predict_proba(x)
    assert len(memory) == 0
    assert len(model.learner_.past) == 40
    assert np.array_equal(model.fit(x, y).predict_proba(x), probabilities)


class Pinball(Numbers):
    """The loss whose minimum is a quantile, with a constructor of its own."""

    def __init__(self, quantile):
        super().__init__(self.of_examples)
        self.quantile = quantile

    def of_examples(self, scores, target):
        return torch.maximum(self.quantile * (target - scores), (self.quantile - 1) * (target - scores))


def test_a_loss_of_ones_own_is_scaled_and_stays_as_it_was():
    x, noise = np.random.default_rng(0).normal(size=(2, 300))
    y, loss = 100 * x + 50 * noise + 1000, Pinball(0.9)
    model = ParabolicRegressor("er", loss=loss, random_state=0).fit(x[:, None], y)
    predictions = model.predict(x[:, None])
    assert 0.8 < (y < predictions).mean() < 0.97
    np.testing.assert_array_equal(model.predictor()(torch.from_numpy(x[:, None])), predictions)
    assert loss.units is None


def test_a_loss_given_twice_is_refused():
    with pytest.raises(InputError, match="^loss: got 'huber', expected 'mse', the default, as options has a criterion"):
        ParabolicRegressor("er", loss="huber", options={"criterion": MSE()}).fit([[0.0]] * 4, [0.0] * 4)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear, r"^model: got <class .*Linear'>, expected a torch.nn.Module, or a function \(shape, outputs\) that "
         r"returns one; called with \(2,\) and 2, it says: .*; or pass one made of this class: Linear\(…\)$"),
        (Plain, r"^model: got <class .*Plain'>, .* called as model\(shape, outputs\); or pass one .*: Plain\(…\)$"),
        (lambda shape, outputs: nn.Linear(shape, outputs), r"^model: got <function .*with \(2,\) and 2, it says"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_made_is_named(model, message):
    with pytest.raises(InputError, match=message):
        ParabolicClassifier("er", model=model).fit([[0.0, 1.0]] * 4, [0, 1, 0, 1])


def test_decimals_are_numbers_in_any_table():
    pa = pytest.importorskip("pyarrow")
    price = [Decimal(f"{number}.25") for number in range(40)]
    arrow = pa.table({"price": price, "one": [1.0] * 40})
    typed = pd.DataFrame({"price": pd.array(price, dtype=pd.ArrowDtype(pa.decimal128(5, 2))), "one": [1.0] * 40})
    plain = pd.DataFrame({"price": [float(number) for number in price], "one": [1.0] * 40})
    model = ParabolicClassifier("er", epochs=1, random_state=0)
    expected = model.fit(plain, [0, 1] * 20).predict_proba(plain)
    for table in (arrow, arrow.to_batches()[0], typed):
        assert np.array_equal(model.fit(table, [0, 1] * 20).predict_proba(table), expected)
    gap = pa.table({"price": [price[0], None], "one": [1.0, 1.0]})
    with pytest.raises(InputError, match=r"^X: got NaN or infinity in 1 of 2 rows, first in row 1 .*column 'price'"):
        model.fit(gap, [0, 1])


def test_columns_of_arrow_that_are_no_numbers_are_named():
    pa = pytest.importorskip("pyarrow")
    words, dates = pa.array(["a", "b"]), pa.array([0, 1], pa.timestamp("s"))
    for column, kind in ((words, "string"), (words.dictionary_encode(), "dictionary"), (dates, "timestamp")):
        table = pa.table({"shop": column, "price": [1.0, 2.0]})
        for data in (table, table.to_batches()[0]):
            with pytest.raises(InputError, match=rf"^X: got columns that are no numbers: 'shop' \({kind}"):
                ParabolicClassifier("er").fit(data, [0, 1])


@pytest.mark.parametrize("values", [[0.0, 1.0], ["a", "b"]])
def test_columns_of_one_name_are_named(values):
    pa = pytest.importorskip("pyarrow")
    frame = pd.DataFrame([[value] * 2 for value in values], columns=["size", "size"])
    for data in (frame, pa.table([values, values], names=["size", "size"])):
        with pytest.raises(ValueError, match="(?s)unique column names.*'size' 2 times"):
            ParabolicClassifier("er").fit(data, [0, 1])


class Rare(ParabolicClassifier):
    """Shows one setting of its base class, and one of its own."""

    def __init__(self, *, memory=50, share=0.1):
        super().__init__("er", memory=memory, epochs=1, lr=0.05, scale=False, random_state=0)
        self.share = share


def test_a_subclass_may_fix_settings():
    x, y = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20) % 2
    same_settings = ParabolicClassifier("er", memory=40, epochs=1, lr=0.05, scale=False, random_state=0)
    model = clone(Rare(memory=40)).fit(x, y).partial_fit(x, y)
    np.testing.assert_array_equal(model.predict_proba(x), same_settings.fit(x, y).partial_fit(x, y).predict_proba(x))
    with pytest.raises(InputError, match="^memory: got 30, .*takes effect at the next fit"):
        model.set_params(memory=30).partial_fit(x, y)


def test_settings_that_changed_leave_predictions_as_they_were():
    x, y = np.random.default_rng(0).integers(256, size=(20, 3)).astype(np.uint8), np.arange(20) % 2
    model = ParabolicClassifier("er", epochs=1, scale=False, random_state=0).fit(x, y)
    probabilities = model.predict_proba(x)
    model.set_params(scale=True, model=nn.Linear(3, 2), learner="pcl", memory=5)
    np.testing.assert_array_equal(model.predict_proba(x), probabilities)
    np.testing.assert_array_equal(model.predictor()(torch.from_numpy(x)).softmax(1), probabilities)


def test_an_estimator_may_be_mapped_from_a_file(tmp_path):
    """Its arrays can then not be written to, of which torch warns."""
    x, y = np.arange(20.0)[:, None], np.arange(20) % 2
    model = ParabolicClassifier("er", epochs=1, random_state=0).fit(x, y)
    joblib.dump(model, tmp_path / "model")
    mapped = joblib.load(tmp_path / "model", mmap_mode="r")
    np.testing.assert_array_equal(mapped.predict_proba(x), model.predict_proba(x))
    np.testing.assert_array_equal(mapped.partial_fit(x, y + 1).predict(x), model.partial_fit(x, y + 1).predict(x))


@pytest.mark.parametrize("labels", [[0, 1, 1, 0], ["a", 0, 0, "a"], [0.0, 1.0, 1.0, 0.0], [b"a", b"b", b"b", b"a"]])
def test_labels_that_are_objects_but_no_words_are_refused(labels):
    x, y = np.arange(8.0).reshape(4, 2), np.array(labels, dtype=object)
    for objects in (y, pd.Series(y)):
        with pytest.raises(InputError, match=r"^y: got Unknown label type: Python objects \(.*\), .* y.astype"):
            ParabolicClassifier("er").fit(x, objects)
    with pytest.raises(InputError, match="^classes: got Unknown label type: Python objects"):
        ParabolicClassifier("er").partial_fit(x, ["a", "b", "b", "a"], classes=y)
