"""Models whose weights are of a short type, or of several."""

import copy
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from parabolic import CLSER, ER, EWC, SI, Learner, ReplayLearner
from parabolic.learners import find_learner, known_learners
from parabolic.learners.average import UPDATES, WeightAverage
from parabolic.states import same_state


class Mixed(nn.Module):
    """Weights and statistics of two types, in turn."""

    def __init__(self, outputs=4, other=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second, self.head = (
            nn.Linear(3, 8), nn.BatchNorm1d(8).to(other), nn.Linear(8, 8).to(other), nn.Linear(8, outputs),
        )  # fmt: skip
        self.other = other

    def forward(self, x):
        middle = self.second(self.norm(self.first(x).to(self.other)).tanh())
        return self.head(middle.to(self.head.weight.dtype))


def batches(count, dtype=torch.float32):
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 3, generator=g).to(dtype), torch.randint(4, (6,), generator=g)) for _ in range(count)]


def learn(learner, data):
    """Learn tasks of four batches; returns the losses."""
    losses = []
    for task, first in enumerate(range(0, len(data), 4)):
        batches = data[first : first + 4]
        learner.start_task(batches)
        losses += [float(learner.observe(x, y, task)) for x, y in batches]
        learner.end_task(batches)
    return losses


def make(name, model, **options):
    cls = find_learner(name)
    return cls(model, **({"memory": 20, "replay": 5} if issubclass(cls, ReplayLearner) else {}) | options)


# -- several types -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(known_learners()))
def test_a_model_of_two_types_learns_as_one_of_a_single_type_does(tmp_path, name):
    mixed, alike = (make(name, Mixed(other=other), average=0.9) for other in (torch.float64, torch.float32))
    types = {name: weight.dtype for name, weight in mixed.model.named_parameters()}
    data = batches(12)
    for ours, theirs in zip(learn(mixed, data), learn(alike, data), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    probe = batches(20)[-1][0]
    assert torch.allclose(mixed.scores(probe), alike.scores(probe), atol=1e-3)
    mixed.grow(6)
    assert {name: weight.dtype for name, weight in mixed.model.named_parameters()} == types
    mixed.save(tmp_path / "a")
    again = Learner.load(tmp_path / "a", model=Mixed())
    assert learn(again, data) == learn(mixed, data)
    assert same_state(again.state_dict(), mixed.state_dict())


# -- short types -------------------------------------------------------------------------------------------


def walk(model, average, steps):
    """Let weights wander and their average follow; returns what it should be, by the formula and in float64."""
    g = torch.Generator().manual_seed(0)
    exact = {name: value.detach().clone().double() for name, value in model.named_parameters()}
    for t in range(steps):
        for name, weight in model.named_parameters():
            weight.data += (torch.randn(weight.shape, generator=g) / 50 + 0.002).to(weight.dtype)
            exact[name] += (weight.detach().double() - exact[name]) * max(1 / (1 + t), 1 - 0.999)
        average.update(model)
    return exact


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_average_of_a_short_type_does_not_stall(dtype):
    """In float16 itself a step of a thousandth is less than the last bit, and the average would stay where it is."""
    model = nn.Linear(5, 4).to(dtype)
    average = WeightAverage(model, decay=0.999)
    for name, value in walk(model, average, steps=2000).items():
        assert average.weights[name].dtype == dtype
        assert torch.allclose(average.weights[name].double(), value, rtol=torch.finfo(dtype).eps, atol=1e-3)


def test_averages_of_several_types_are_each_exact_in_their_own():
    model = Mixed()
    average = WeightAverage(model, decay=0.999)
    for name, value in walk(model, average, steps=300).items():
        tolerance = 1e-13 if average.weights[name].dtype == torch.float64 else 1e-5
        assert torch.allclose(average.weights[name].double(), value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_average_is_computed_in_the_type_of_the_weights_to_the_bit(dtype):
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).to(dtype)
    average, expected = WeightAverage(model, 0.9, part=0.5), {k: v.clone() for k, v in model.state_dict().items()}
    for t in range(50):
        model(torch.randn(6, 3, dtype=dtype))
        for weight in model.parameters():
            weight.data += torch.randn_like(weight)
        average.update(model)
        share = torch.tensor(max(1 / (1 + 0.5 * t), 1 - 0.9), dtype=torch.float64).to(dtype)
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                expected[name] = expected[name] + (value - expected[name]) * share
    del expected["1.num_batches_tracked"]
    assert same_state(average.weights, expected)
    assert same_state({k: v for k, v in average.state_dict().items() if k != UPDATES}, expected)


def halved(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).half()


@pytest.mark.parametrize("cls", [ER, CLSER])
def test_a_learner_of_a_short_type_goes_on_from_its_state_bit_for_bit(tmp_path, cls):
    learner, data = cls(halved(), average=0.99, memory=20, replay=5), batches(8, torch.float16)
    learn(learner, data)
    learner.grow(5)
    learner.save(tmp_path / "a")
    again = Learner.load(tmp_path / "a", model=halved(seed=1))
    assert learn(again, data) == learn(learner, data)
    assert same_state(again.state_dict(), learner.state_dict())
    assert same_state(again.predicting_weights(), learner.predicting_weights())
    assert {weight.dtype for weight in again.predicting_weights().values()} == {torch.float16}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_importance_in_a_short_type_does_not_stall(dtype):
    data = batches(400, dtype)
    short, exact = SI(halved().to(dtype)), torch.zeros(())
    gradient = short.weights.gradient
    short.start_task(data)
    for x, y in data:
        given = []
        short.weights.gradient = lambda loss, given=given: given.append(gradient(loss)) or given[-1]
        before = short.weights.vector().detach().double()
        short.observe(x, y, 0)
        exact = exact - given[0].double() * (short.weights.vector().detach().double() - before)
    assert (short.path - exact).norm() < 1e-4 * exact.norm()

    model = halved().to(dtype)
    again, wide = ([(x.to(each), y) for x, y in data * 5] for each in (dtype, torch.float32))
    ours, theirs = EWC(model, chunk=6).fisher(again), EWC(copy.deepcopy(model).float(), chunk=6).fisher(wide)
    assert (ours - theirs).norm() < 4 * torch.finfo(dtype).eps * theirs.norm()


@pytest.mark.parametrize("cls", [SI, EWC])
def test_importance_is_float32_or_longer_and_goes_on_bit_for_bit(tmp_path, cls):
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        learner, data = cls(halved().to(dtype)), batches(8, dtype)
        learn(learner, data)
        learner.grow(5)
        learner.save(tmp_path / "a")
        again = Learner.load(tmp_path / "a", model=halved(seed=1).to(dtype))
        assert learn(again, data) == learn(learner, data)
        state = again.state_dict()
        assert same_state(state, learner.state_dict())
        sums = {each.dtype for name in ("importance", "path") for each in state.get(name, {}).values()}
        assert sums == {torch.promote_types(dtype, torch.float32)}
        assert {each.dtype for each in (*state["anchor"].values(), *again.model.parameters())} == {dtype}


def test_a_state_from_when_importance_had_the_type_of_the_weights_is_gone_on_from():
    learner, data = SI(halved()), batches(8, torch.float16)
    learn(learner, data)
    state = copy.deepcopy(learner.state_dict())
    for name in ("importance", "path"):
        state[name] = {each: value.half() for each, value in state[name].items()}
    again = SI(halved(seed=1))
    again.load_state_dict(state)
    assert again.importance.dtype == torch.float32
    assert torch.equal(again.importance, learner.importance.half().float())
    learn(again, data)


def test_a_state_from_when_averages_had_the_type_of_the_weights_is_gone_on_from():
    learner, data = ER(halved(), average=0.99, memory=20, replay=5), batches(8, torch.float16)
    learn(learner, data)
    state = copy.deepcopy(learner.state_dict())
    state["average"] = {name: state["average"][name].half() for name in learner.averaged.weights} | {
        "updates": state["average"][UPDATES]
    }
    again = ER(halved(seed=1), average=0.99, memory=20, replay=5)
    again.load_state_dict(state)
    assert same_state(again.predicting_weights(), learner.predicting_weights())
    learn(again, data)


def test_mixed_precision_around_observe_stays_on():
    """In a process of its own, as some virtual machines list bfloat16 instructions that they do not run."""
    code = """if True:
        import torch
        from parabolic import DER, ER, InputError
        for kind in (ER, DER):
            learner = kind(torch.nn.Linear(3, 4), memory=50, average=0.9)
            x, y = torch.randn(8, 3), torch.arange(8) % 4
            for _ in range(5):
                with torch.autocast("cpu", torch.bfloat16):
                    learner.observe(x, y)
            state = learner.state_dict()
            kept = {each.dtype for part in ("model", "average") for each in state[part].values()}
            assert kept <= {torch.float32, torch.float64} and learner.past["x"].dtype == torch.float32
            try:
                learner.observe(x, y)
            except InputError as error:
                print(kind.name, error)
    """
    least = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=least, check=True)
    assert re.fullmatch(r"der logits: got .* type float32, expected .* type bfloat16; .*\n", done.stdout)
