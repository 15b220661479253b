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

    def __init__(self, outputs=4, other_type=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second, self.head = (
            nn.Linear(3, 8), nn.BatchNorm1d(8).to(other_type), nn.Linear(8, 8).to(other_type), nn.Linear(8, outputs),
        )  # fmt: skip
        self.other_type = other_type

    def forward(self, x):
        middle = self.second(self.norm(self.first(x).to(self.other_type)).tanh())
        return self.head(middle.to(self.head.weight.dtype))


def batches(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 3, generator=generator).to(dtype), torch.randint(4, (6,), generator=generator))
        for _ in range(count)
    ]


def learn_tasks(learner, data):
    """Learn tasks of four batches; returns the losses."""
    losses = []
    for task, first in enumerate(range(0, len(data), 4)):
        batches = data[first : first + 4]
        learner.start_task(batches)
        losses += [float(learner.observe(x, y, task)) for x, y in batches]
        learner.end_task(batches)
    return losses


def make_learner(name, model, **options):
    cls = find_learner(name)
    return cls(model, **({"memory": 20, "replay": 5} if issubclass(cls, ReplayLearner) else {}) | options)


# -- several types -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(known_learners()))
def test_a_model_of_two_types_learns_as_one_of_a_single_type_does(tmp_path, name):
    mixed, single = (
        make_learner(name, Mixed(other_type=other_type), average=0.9) for other_type in (torch.float64, torch.float32)
    )
    types = {name: weight.dtype for name, weight in mixed.model.named_parameters()}
    data = batches(12)
    for ours, theirs in zip(learn_tasks(mixed, data), learn_tasks(single, data), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    probe = batches(20)[-1][0]
    assert torch.allclose(mixed.scores(probe), single.scores(probe), atol=1e-3)
    mixed.grow(6)
    assert {name: weight.dtype for name, weight in mixed.model.named_parameters()} == types
    mixed.save(tmp_path / "a")
    loaded = Learner.load(tmp_path / "a", model=Mixed())
    assert learn_tasks(loaded, data) == learn_tasks(mixed, data)
    assert same_state(loaded.state_dict(), mixed.state_dict())


# -- short types -------------------------------------------------------------------------------------------


def walk_and_average(model, average, steps):
    """Let weights wander and their average follow; returns what it should be, by the formula and in float64."""
    generator = torch.Generator().manual_seed(0)
    exact = {name: value.detach().clone().double() for name, value in model.named_parameters()}
    for step in range(steps):
        for name, weight in model.named_parameters():
            weight.data += (torch.randn(weight.shape, generator=generator) / 50 + 0.002).to(weight.dtype)
            exact[name] += (weight.detach().double() - exact[name]) * max(1 / (1 + step), 1 - 0.999)
        average.update(model)
    return exact


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_average_of_a_short_type_does_not_stall(dtype):
    """In float16 itself a step of a thousandth is less than the last bit, and the average would stay where it is."""
    model = nn.Linear(5, 4).to(dtype)
    average = WeightAverage(model, decay=0.999)
    for name, value in walk_and_average(model, average, steps=2000).items():
        assert average.weights[name].dtype == dtype
        assert torch.allclose(average.weights[name].double(), value, rtol=torch.finfo(dtype).eps, atol=1e-3)


def test_averages_of_several_types_are_each_exact_in_their_own():
    model = Mixed()
    average = WeightAverage(model, decay=0.999)
    for name, value in walk_and_average(model, average, steps=300).items():
        tolerance = 1e-13 if average.weights[name].dtype == torch.float64 else 1e-5
        assert torch.allclose(average.weights[name].double(), value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_average_is_computed_in_the_type_of_the_weights_to_the_bit(dtype):
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).to(dtype)
    average, expected = (
        WeightAverage(model, 0.9, part=0.5),
        {name: value.clone() for name, value in model.state_dict().items()},
    )
    for step in range(50):
        model(torch.randn(6, 3, dtype=dtype))
        for weight in model.parameters():
            weight.data += torch.randn_like(weight)
        average.update(model)
        share = torch.tensor(max(1 / (1 + 0.5 * step), 1 - 0.9), dtype=torch.float64).to(dtype)
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                expected[name] = expected[name] + (value - expected[name]) * share
    del expected["1.num_batches_tracked"]
    assert same_state(average.weights, expected)
    assert same_state({name: value for name, value in average.state_dict().items() if name != UPDATES}, expected)


def half_network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).half()


@pytest.mark.parametrize("cls", [ER, CLSER])
def test_a_learner_of_a_short_type_goes_on_from_its_state_bit_for_bit(tmp_path, cls):
    learner, data = cls(half_network(), average=0.99, memory=20, replay=5), batches(8, torch.float16)
    learn_tasks(learner, data)
    learner.grow(5)
    learner.save(tmp_path / "a")
    loaded = Learner.load(tmp_path / "a", model=half_network(seed=1))
    assert learn_tasks(loaded, data) == learn_tasks(learner, data)
    assert same_state(loaded.state_dict(), learner.state_dict())
    assert same_state(loaded.predicting_weights(), learner.predicting_weights())
    assert {weight.dtype for weight in loaded.predicting_weights().values()} == {torch.float16}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_importance_in_a_short_type_does_not_stall(dtype):
    data = batches(400, dtype)
    short, exact = SI(half_network().to(dtype)), torch.zeros(())
    gradient = short.weights.gradient
    short.start_task(data)
    for x, y in data:
        gradients = []
        short.weights.gradient = lambda loss, gradients=gradients: gradients.append(gradient(loss)) or gradients[-1]
        before = short.weights.vector().detach().double()
        short.observe(x, y, 0)
        exact = exact - gradients[0].double() * (short.weights.vector().detach().double() - before)
    assert (short.path - exact).norm() < 1e-4 * exact.norm()

    model = half_network().to(dtype)
    longer, wide = ([(x.to(data_type), y) for x, y in data * 5] for data_type in (dtype, torch.float32))
    ours, theirs = EWC(model, chunk=6).fisher(longer), EWC(copy.deepcopy(model).float(), chunk=6).fisher(wide)
    assert (ours - theirs).norm() < 4 * torch.finfo(dtype).eps * theirs.norm()


@pytest.mark.parametrize("cls", [SI, EWC])
def test_importance_is_float32_or_longer_and_goes_on_bit_for_bit(tmp_path, cls):
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        learner, data = cls(half_network().to(dtype)), batches(8, dtype)
        learn_tasks(learner, data)
        learner.grow(5)
        learner.save(tmp_path / "a")
        loaded = Learner.load(tmp_path / "a", model=half_network(seed=1).to(dtype))
        assert learn_tasks(loaded, data) == learn_tasks(learner, data)
        state = loaded.state_dict()
        assert same_state(state, learner.state_dict())
        sums = {tensor.dtype for name in ("importance", "path") for tensor in state.get(name, {}).values()}
        assert sums == {torch.promote_types(dtype, torch.float32)}
        assert {tensor.dtype for tensor in (*state["anchor"].values(), *loaded.model.parameters())} == {dtype}


def test_a_state_from_when_importance_had_the_type_of_the_weights_is_gone_on_from():
    learner, data = SI(half_network()), batches(8, torch.float16)
    learn_tasks(learner, data)
    state = copy.deepcopy(learner.state_dict())
    for name in ("importance", "path"):
        state[name] = {key: value.half() for key, value in state[name].items()}
    resumed = SI(half_network(seed=1))
    resumed.load_state_dict(state)
    assert resumed.importance.dtype == torch.float32
    assert torch.equal(resumed.importance, learner.importance.half().float())
    learn_tasks(resumed, data)


def test_a_state_from_when_averages_had_the_type_of_the_weights_is_gone_on_from():
    learner, data = ER(half_network(), average=0.99, memory=20, replay=5), batches(8, torch.float16)
    learn_tasks(learner, data)
    state = copy.deepcopy(learner.state_dict())
    state["average"] = {name: state["average"][name].half() for name in learner.averaged.weights} | {
        "updates": state["average"][UPDATES]
    }
    resumed = ER(half_network(seed=1), average=0.99, memory=20, replay=5)
    resumed.load_state_dict(state)
    assert same_state(resumed.predicting_weights(), learner.predicting_weights())
    learn_tasks(resumed, data)


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
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "default"}
    process = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment, check=True
    )
    assert re.fullmatch(r"der logits: got .* type float32, expected .* type bfloat16; .*\n", process.stdout)
