"""A predictor gives a learner's scores without the learner."""

import io
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError
from test_learners import ALL, batches, frozen, make_learner, net, observe_batch, same
from torch import nn

from parabolic import (
    ER,
    MLP,
    PCL,
    ConvNet,
    InputError,
    Numbers,
    ParabolicClassifier,
    ParabolicRegressor,
    ResNet18,
    make_stream,
)
from parabolic.engine import Diverged
from parabolic.learners import Scale
from parabolic.streams import Normalise

# torch.export.save says so of every channels-last weight; it stores their bytes and strides, which is right.
channels_last = pytest.mark.filterwarnings("ignore:No complete tensor found in the group:UserWarning")
traced = pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")  # a FutureWarning since torch 2.14


def export_and_load(module, x):
    """The module as another process gets it: exported for any number of examples, saved and loaded."""
    batch_size = torch.export.Dim("n", min=1, max=4096)
    file = io.BytesIO()
    torch.export.save(torch.export.export(module, (x,), dynamic_shapes=({0: batch_size},)), file)
    file.seek(0)
    with warnings.catch_warnings():
        # torch reads weights from bytes that cannot be written to, and copies them.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.export.load(file).module()


def saved_bytes(module):
    file = io.BytesIO()
    torch.save(module, file)
    return file.getvalue()


@pytest.mark.parametrize("average", [None, 0.9])
@pytest.mark.parametrize("name", ALL)
def test_a_predictor_gives_the_scores_of_every_learner(name, average):
    learner, data = make_learner(name, average=average), batches(8)
    for index in range(8):
        observe_batch(learner, data, index)
    x = torch.randn(5, 3)
    scores, before = learner.scores(x), frozen(learner.state_dict())
    predictor = learner.predictor()
    assert not any(module.training for module in predictor.modules())
    assert learner.model.training
    assert torch.equal(predictor(x), scores)
    assert not predictor(x).requires_grad
    torch.testing.assert_close(export_and_load(predictor, x)(x[:2]), scores[:2])
    assert same(before, learner.state_dict())
    learner.load_state_dict(make_learner(name, average=average).state_dict())
    assert not torch.equal(learner.scores(x), scores)
    assert torch.equal(predictor(x), scores)  # it is a copy


@pytest.mark.parametrize("name", ALL)
def test_a_predictor_knows_the_classes_of_its_moment(name):
    learner, data = make_learner(name, average=0.9), batches(8)
    before = learner.predictor()
    for index in range(4):
        observe_batch(learner, data, index)
    learner.grow(6)
    for index in range(4, 8):
        observe_batch(learner, data, index)
    x = torch.randn(5, 3)
    assert before(x).shape == (5, 4)
    assert torch.equal(learner.predictor()(x), learner.scores(x))
    assert learner.predictor()(x).shape == (5, 6)


def fitted_scale():
    scale = Scale()
    scale.update(torch.randn(50, 3) * 7 + 1000)
    return scale


PREPARED = {
    "none": (None, torch.randn(5, 3)),
    "doubles": (None, torch.randn(5, 3, dtype=torch.float64)),
    "bytes": (None, torch.arange(15, dtype=torch.uint8).view(5, 3)),
    "scale": (fitted_scale(), torch.randn(5, 3) * 7 + 1000),
    "scaled doubles": (fitted_scale(), torch.randn(5, 3, dtype=torch.float64) * 7 + 1000),
    "scaled whole numbers": (fitted_scale(), torch.randint(900, 1100, (5, 3))),
    "normalise": (Normalise((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)), torch.arange(15, dtype=torch.uint8).view(5, 3)),
    "module": (nn.BatchNorm1d(3).eval(), torch.randn(5, 3)),
    "function": (torch.tanh, torch.randn(5, 3)),
}


@pytest.mark.parametrize("case", PREPARED)
@traced
def test_examples_are_prepared_as_for_the_learner(case):
    prepare, x = PREPARED[case]
    learner = ER(net(), memory=20, replay=5, average=0.9, prepare=prepare)
    for _ in range(3):
        learner.observe(x, torch.arange(5) % 4)
    predictor, scores = learner.predictor(), learner.scores(x)
    assert torch.equal(predictor(x), scores)
    torch.testing.assert_close(export_and_load(predictor, x)(x[:3]), scores[:3])
    torch.testing.assert_close(torch.jit.trace(predictor, x)(x[:3]), scores[:3])
    loaded = torch.load(io.BytesIO(saved_bytes(predictor)), weights_only=False)
    assert torch.equal(loaded(x), scores)
    fresh = ER(net(1), memory=50, prepare=prepare).predictor()
    fresh.load_state_dict(predictor.state_dict())
    assert torch.equal(fresh(x), scores)


def test_numbers_of_scale_and_normalise_are_buffers_that_later_examples_leave_alone():
    scale, x = fitted_scale(), torch.randn(4, 3)
    learner = ER(net(), memory=20, replay=5, prepare=scale)
    predictor, scores = learner.predictor(), learner.scores(x)
    assert {"prepare.mean", "prepare.deviation"} <= predictor.state_dict().keys()
    scale.update(torch.full((500, 3), -1e6))
    assert torch.equal(predictor(x), scores)
    assert not torch.equal(learner.scores(x), scores)
    normalising = ER(net(), memory=50, prepare=Normalise((0.5,), (0.2,))).predictor()
    assert {"prepare.factor", "prepare.shift"} <= normalising.state_dict().keys()


class Clipped(Scale):
    def __call__(self, x):
        return super().__call__(x).clamp(-1, 1)


def test_a_scale_of_ones_own_is_called():
    scale = Clipped()
    scale.update(torch.randn(50, 3))
    learner, x = ER(net(), memory=50, prepare=scale), 5 * torch.randn(4, 3)
    predictor, scores = learner.predictor(), learner.scores(x)
    assert torch.equal(predictor(x), scores)
    scale.update(torch.full((500, 3), 9.0))
    assert torch.equal(predictor(x), scores)


def test_ids_are_looked_up():
    for x in (torch.randint(9, (5, 3)), torch.randint(9, (5, 3)).byte()):
        body = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
        learner = PCL(body, embed=nn.Embedding(9, 4), memory=20, replay=5, average=0.5)
        learner.observe(x, torch.arange(5) % 4)
        assert torch.equal(learner.predictor()(x), learner.scores(x))


@pytest.mark.parametrize("network_class", [ConvNet, ResNet18])
@traced
def test_networks_of_the_package_are_exported_and_traced(network_class):
    stream = make_stream("seq-digits")
    learner = ER(network_class(stream.shape, 10, width=4), memory=40, prepare=stream.prepare, average=0.9)
    for x, y in stream[0].batches(20):
        learner.observe(x, y)
    scores, predictor = learner.scores(x), learner.predictor()
    assert torch.equal(predictor(x), scores)
    torch.testing.assert_close(export_and_load(predictor, x)(x[:3]), scores[:3])
    torch.testing.assert_close(torch.jit.trace(predictor, x)(x[:3]), scores[:3])


class Tied(nn.Module):
    """Predicts words by the weights that look them up."""

    def __init__(self):
        super().__init__()
        self.look, self.tell = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.tell.weight = self.look.weight

    def forward(self, x):
        return self.tell(self.look(x).mean(1))


def test_weights_that_layers_share_stay_shared():
    learner = ER(Tied(), memory=20, replay=5, average=0.5)
    for _ in range(3):
        learner.observe(torch.randint(6, (8, 3)), torch.arange(8) % 6)
    predictor, x = learner.predictor(), torch.randint(6, (8, 3))
    assert torch.equal(predictor(x), learner.scores(x))
    assert predictor.model.tell.weight is predictor.model.look.weight


def test_a_predictor_leaves_examples_alone():
    x = torch.randn(4, 3)
    model, before = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 4)), x.clone()
    learner = ER(model, memory=50)
    assert torch.equal(learner.predictor()(x), learner.scores(x))
    assert torch.equal(x, before)


def test_a_file_for_serving_has_no_examples_and_no_optimiser():
    learner = ER(nn.Linear(3, 4), memory=5000, optimizer="Adam")
    for _ in range(100):
        learner.observe(torch.full((50, 3), 0.12345678), torch.arange(50) % 4)
    memory_bytes = learner.past["x"].numel() * 4
    file = saved_bytes(learner.predictor())
    assert len(file) < memory_bytes / 5
    assert np.float32(0.12345678).tobytes() * 3 not in file
    assert np.float32(0.12345678).tobytes() * 3 in pickle.dumps(learner)  # as a check of the check


def test_an_exported_predictor_needs_no_parabolic(tmp_path):
    learner = PCL(ResNet18((1, 8, 8), 4, width=2), memory=20, replay=5, prepare=Normalise((0.5,), (0.2,)))
    x = torch.randint(256, (6, 1, 8, 8), dtype=torch.uint8)
    learner.observe(x, torch.arange(6) % 4)
    program = torch.export.export(learner.predictor(), (x,), dynamic_shapes=({0: torch.export.Dim("n")},))
    torch.export.save(program, tmp_path / "served.pt2")
    torch.save((x, learner.scores(x)), tmp_path / "expected.pt")
    code = (
        "import sys; sys.modules['parabolic'] = None\n"
        "import torch; served = torch.export.load('served.pt2').module()\n"
        "x, told = torch.load('expected.pt'); torch.testing.assert_close(served(x), told)\n"
        "torch.testing.assert_close(served(x[:1]), told[:1])"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=tmp_path)


class Nearest(ER):
    def scores_at(self, inputs):
        return -inputs[:, :2]


class Served(Nearest):
    def predictor(self):
        return nn.Flatten()


def test_a_learner_that_predicts_in_its_own_way_is_refused():
    with pytest.raises(InputError, match=r"^predictor: got Nearest, which has its own scores_at, .*; define predictor"):
        Nearest(net(), memory=50).predictor()
    assert isinstance(Served(net(), memory=50).predictor(), nn.Flatten)


def test_weights_that_diverged_are_not_served():
    learner = ER(net(), memory=50)
    nn.init.constant_(learner.model[0].weight, torch.nan)
    with pytest.raises(Diverged, match="^predictor: weights are NaN or infinite after 0 steps; go back"):
        learner.predictor()


def test_a_predictor_made_in_inference_mode_can_be_exported():
    learner, x = ER(net(), memory=50, average=0.9, prepare=fitted_scale()), torch.randn(5, 3)
    with torch.inference_mode():
        predictor = learner.predictor()
    torch.testing.assert_close(export_and_load(predictor, x)(x), learner.scores(x))


@pytest.mark.parametrize("name", ALL)
def test_a_predictor_of_a_classifier_has_a_column_for_each_class_in_their_order(name):
    x, y = np.random.default_rng(0).normal(1e6, 3, size=(60, 3)), np.array(["pear", "fig"] * 30)
    model = ParabolicClassifier(name, random_state=0, average=0.9).partial_fit(x, y)
    model.partial_fit(x, np.array(["kiwi", "apple", "fig"] * 20))
    assert model.classes_.tolist() == ["apple", "fig", "kiwi", "pear"]  # not the order of the outputs
    predictor, rows = model.predictor(), torch.from_numpy(x)
    scores = predictor(rows)
    np.testing.assert_array_equal(scores.softmax(1), model.predict_proba(x))
    np.testing.assert_array_equal(model.classes_[scores.argmax(1)], model.predict(x))
    torch.testing.assert_close(export_and_load(predictor, rows)(rows[:7]), scores[:7])
    model.partial_fit(x, ["banana"] * 60)
    assert torch.equal(predictor(rows), scores)


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("row_type", [np.float32, np.float64, np.int64, np.uint8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_any_type_are_answered_as_by_the_estimator(scale, row_type, dtype):
    x, y = np.random.default_rng(0).integers(0, 200, (60, 3)).astype(row_type), np.arange(60) % 3

    def network(shape, outputs):
        return nn.Sequential(Cast(dtype), MLP(shape, outputs).to(dtype))

    model = ParabolicClassifier("er", model=network, scale=scale, lr=1e-4, random_state=0).fit(x, y)
    scores = model.predictor()(torch.from_numpy(x))
    np.testing.assert_array_equal(scores.softmax(1), model.predict_proba(x))


def test_rows_are_prepared_by_a_function_of_ones_own_as_by_the_estimator():
    x, y = np.random.default_rng(0).integers(0, 200, (60, 3)), np.arange(60) % 3
    for learned_type in (np.float64, np.uint8):
        model = ParabolicClassifier("er", options={"prepare": torch.tanh}, lr=1e-4, random_state=0)
        model.fit(x.astype(learned_type), y)
        for row_type in (np.float32, np.int64, np.uint8):
            rows = x.astype(row_type)
            scores = model.predictor()(torch.from_numpy(rows))
            np.testing.assert_array_equal(scores.softmax(1), model.predict_proba(rows))


def test_ids_that_do_not_fit_the_type_of_those_learned_are_not_taken_for_others():
    ids, y = np.random.default_rng(0).integers(0, 100, (60, 3)), np.arange(60) % 3
    options = {"embed": nn.Sequential(nn.Embedding(400, 4), nn.Flatten())}
    model = ParabolicClassifier("er", model=nn.Linear(12, 3), options=options, scale=False, random_state=0)
    predictor = model.fit(ids.astype(np.int8), y).predictor()
    other_ids = torch.from_numpy(ids)
    np.testing.assert_array_equal(predictor(other_ids).softmax(1), model.predict_proba(ids))
    assert not (predictor(other_ids) == predictor(other_ids + 256)).all(1).any()  # the same ids in eight bits


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


def test_rows_that_the_estimator_would_refuse_for_their_type_are_refused():
    x, y = np.random.default_rng(0).integers(0, 9, (60, 3)), np.arange(60) % 3
    model = ParabolicClassifier("er", model=nn.Sequential(Cast(torch.float32), nn.Linear(3, 3)), scale=False)
    for learned_type, asked_type in ((np.uint8, torch.float32), (np.float32, torch.uint8), (np.int64, torch.float64)):
        predictor = model.fit(x.astype(learned_type), y).predictor()
        with pytest.raises(
            InputError, match=f"^X: got .*, expected examples of type {np.dtype(learned_type).name}, as before"
        ):
            predictor(torch.ones(2, 3, dtype=asked_type))


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize("loss", ["huber", Numbers(lambda scores, target: (scores - target).abs())])
def test_a_predictor_of_a_regressor_gives_its_predictions(scale, targets, loss):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 3)), rng.normal(50 if scale else 0, 3, size=(60, targets))
    y = y[:, 0] if targets == 1 else y
    model = ParabolicRegressor(loss=loss, scale=scale, lr=0.01, average=0.9, random_state=0).fit(x, y)
    predictor, rows, predictions = model.predictor(), torch.from_numpy(x), model.predict(x)
    np.testing.assert_array_equal(predictor(rows), predictions)
    np.testing.assert_allclose(export_and_load(predictor, rows)(rows[:7]), predictions[:7])
    loaded = torch.load(io.BytesIO(saved_bytes(predictor)), weights_only=False)
    model.partial_fit(x, y + 100)
    np.testing.assert_array_equal(loaded(rows), predictions)


class Counts(Numbers):
    """Learns logarithms, and answers with numbers."""

    def answer(self, scores):
        return scores.exp()


def test_a_criterion_may_answer_in_its_own_way():
    x = np.random.default_rng(0).normal(size=(60, 3))
    model = ParabolicRegressor("er", loss=Counts(nn.PoissonNLLLoss(reduction="none")), scale=False, random_state=0)
    model.fit(x, np.arange(60) % 3)
    np.testing.assert_array_equal(model.predictor()(torch.from_numpy(x)), model.predict(x))


def test_a_predictor_that_an_earlier_version_saved_is_loaded():
    """Its modules were in one file with the estimators."""
    fitted = ParabolicClassifier(random_state=0, epochs=1).fit([[0.0], [1.0]] * 20, [0, 1] * 20)
    pickled = pickle.dumps(fitted.predictor(), protocol=0)
    for name in ("Rows", "Columns"):
        new_name, old_name = (
            f"parabolic.estimators{separator}{name}\n".encode() for separator in (".serving\n", "\n_")
        )
        assert new_name in pickled
        pickled = pickled.replace(new_name, old_name)
    x = torch.tensor([[0.5]])
    assert torch.equal(pickle.loads(pickled)(x), fitted.predictor()(x))


def test_an_estimator_that_is_not_fitted_has_no_predictor():
    for estimator_class in (ParabolicClassifier, ParabolicRegressor):
        with pytest.raises(NotFittedError):
            estimator_class().predictor()


@channels_last
def test_a_channels_last_network_is_exported_as_it_is():
    model = ResNet18((3, 16, 16), 4, width=8).to(memory_format=torch.channels_last)
    learner, x = ER(model, memory=50), torch.randn(12, 3, 16, 16)
    for _ in range(3):
        learner.observe(x, torch.arange(12) % 4)
    torch.testing.assert_close(export_and_load(learner.predictor(), x)(x[:5]), learner.scores(x)[:5])


@channels_last
@pytest.mark.gpu
def test_a_network_on_a_gpu_is_exported_with_the_operations_of_torch_alone():
    model = ResNet18((3, 16, 16), 4, width=8).cuda().to(memory_format=torch.channels_last)
    learner = ER(model, memory=50, average=0.9, prepare=Normalise((0.5,) * 3, (0.2,) * 3))
    x = torch.randint(256, (12, 3, 16, 16), dtype=torch.uint8, device="cuda")
    for _ in range(3):
        learner.observe(x, torch.arange(12, device="cuda") % 4)
    predictor, scores = learner.predictor(), learner.scores(x)
    with torch.no_grad():
        assert torch.equal(predictor(x), scores)
    torch.testing.assert_close(predictor(x), scores, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(export_and_load(predictor, x)(x[:5]), scores[:5], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(predictor.cpu()(x.cpu()), scores.cpu(), rtol=1e-2, atol=1e-2)
