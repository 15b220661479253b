"""How much a label counts is one thing for every learner; and what was answered once is kept as units move."""

import copy

import numpy as np
import pytest
import torch
from test_learners import batches, make_learner, net, observe_batch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from parabolic import ER, CrossEntropy, ParabolicRegressor
from parabolic.learners import known_learners
from parabolic.learners.lwf import LwF
from parabolic.learners.si import SI
from parabolic.learners.vrmcl import VRMCL

CASES = [
    *[(name, {}) for name in sorted(set(known_learners()) - {"pcl", "joint"})],  # along bridges a mean is plain
    *[(name, {"variant": "reference"}) for name in ("ewc", "si", "vrmcl")],
    ("er", {"smoothing": 0.3}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_weights_that_are_all_alike_change_nothing(name, options):
    data, learners = batches(8, dtype=torch.float64), []
    for weights in (None, [10.0] * 4):
        torch.manual_seed(0)  # for dropout and the like of a learner's own
        learners.append(make_learner(name, net().double(), criterion=CrossEntropy(weights=weights), **options))
        for index in range(len(data)):
            observe_batch(learners[-1], data, index)
    for plain_weight, weighted in zip(*[learner.model.parameters() for learner in learners], strict=True):
        assert torch.allclose(plain_weight, weighted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", sorted(set(known_learners()) - {"joint"}))
def test_a_batch_of_labels_that_do_not_count_leaves_the_model_one_of_numbers(name):
    learner = make_learner(name, criterion=CrossEntropy(weights=[0.0, 1.0, 1.0, 1.0]))
    data = [(x, torch.zeros_like(y)) for x, y in batches(4)]
    for index in range(len(data)):
        assert observe_batch(learner, data, index).isfinite()
    assert all(weight.isfinite().all() for weight in learner.model.parameters())


@pytest.mark.parametrize("smoothing", [1e-12, 0.3])
def test_smoothed_labels_that_count_differently_are_torchs_own(smoothing):
    model, weights = nn.Linear(3, 4).double(), [1.0, 2.0, 0.5, 9.0]
    (x, y), *_ = batches(1, dtype=torch.float64)
    expected = cross_entropy(model(x), y, torch.tensor(weights).double(), label_smoothing=smoothing).item()
    learner = ER(model, memory=40, criterion=CrossEntropy(weights=weights), smoothing=smoothing)
    assert learner.observe(x, y).item() == pytest.approx(expected, rel=1e-12)


def drifting(count=1200):
    """Numbers that rise along the stream, so that their mean and deviation do."""
    rng, time = np.random.default_rng(0), np.linspace(0, 1, count)
    x = np.stack([rng.uniform(-1, 1, count), time], 1)
    return x, x[:, 0] + 5 * time


@pytest.mark.parametrize("name", ["der", "derpp"])
def test_answers_that_were_stored_stay_what_they_were_as_units_move(name):
    x, y = drifting()
    regressor = ParabolicRegressor(name, batch_size=20, random_state=0)

    def answers():  # as they are kept, and what they are in the network's units of now
        past, error = regressor.learner_.past, regressor.learner_.error
        rows = zip(past["x"].tolist(), past["logits"], error.recalled(past["logits"]), strict=True)
        return {tuple(point): (stored.item(), now) for point, stored, now in rows}

    regressor.partial_fit(x[:200], y[:200])
    before = answers()
    for start in range(200, len(x), 200):
        regressor.partial_fit(x[start : start + 200], y[start : start + 200])
    after, error = answers(), regressor.learner_.error
    stored_twice = before.keys() & after.keys()
    assert len(stored_twice) > 5
    for point in stored_twice:
        stored, now = after[point]
        assert stored == before[point][0]
        assert error.answer(now).item() == pytest.approx(stored)
        assert now.item() != pytest.approx(before[point][1].item(), abs=0.1)


def test_a_state_from_when_answers_were_kept_in_the_networks_units_is_understood():
    x, y = drifting(600)
    regressor = ParabolicRegressor("der", batch_size=20, random_state=0).partial_fit(x[:400], y[:400])
    learner = regressor.learner_
    state, answers = learner.state_dict(), learner.past["logits"].clone()
    before = {**state["memory"], "logits": learner.error.recalled(answers).float()}
    fresh = ParabolicRegressor("der", batch_size=20, random_state=1).partial_fit(x[400:], y[400:]).learner_
    fresh.load_state_dict({**copy.deepcopy(state), "memory": before})
    assert torch.allclose(fresh.past["logits"], answers, atol=1e-5)
    fresh.observe(torch.tensor(x[:20]), torch.tensor(y[:20]))


def test_dark_replay_remembers_the_beginning_of_a_stream_whose_numbers_rise():
    x, y = drifting(3000)
    errors = {}
    for name in ("sgd", "der"):
        options = {"alpha": 1.0} if name == "der" else {}
        regressor = ParabolicRegressor(name, batch_size=20, random_state=0, options=options)
        for start in range(0, len(x), 200):
            regressor.partial_fit(x[start : start + 200], y[start : start + 200])
        errors[name] = np.abs(regressor.predict(x[:1500]) - y[:1500]).mean()
    assert errors["der"] < errors["sgd"] / 4


@pytest.mark.parametrize("learner_class", [LwF, VRMCL])
def test_a_class_that_was_not_announced_is_learned_like_any_other(learner_class):
    learner = make_learner(learner_class.name)
    ((x, y),) = data = batches(1)
    learner.start_task([(x[:1], y[:1])])
    before = learner.model[-1].weight[y[y != y[0]]].clone()
    assert learner.observe(*data[0], task=0).isfinite()
    assert not torch.equal(learner.model[-1].weight[y[y != y[0]]], before)


@pytest.mark.parametrize("limit", [None, 0.01])
def test_what_a_weight_has_added_is_of_the_gradient_that_was_descended(limit):
    learner = SI(net().double(), variant="reference", clip=None, clip_norm=limit)
    before = parameters_to_vector(learner.model.parameters()).detach()
    learner.observe(*batches(1, dtype=torch.float64)[0], task=0)
    change = parameters_to_vector(learner.model.parameters()).detach() - before
    assert learner.path.sum().item() == pytest.approx(change.square().sum().item() / learner.lr)
