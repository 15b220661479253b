"""DER, DER++ and CLS-ER against their published steps, written out slowly."""

import copy

import pytest
import torch
from scipy import stats
from slow import SlowReplay, mean, net, same_weights, surprise, tasks
from torch import nn

from parabolic import CrossEntropy, InputError
from parabolic.learners.average import WeightAverage
from parabolic.learners.clser import CLSER
from parabolic.learners.der import DER, DERpp

COMMON = {"lr": 0.3, "memory": 12, "replay": 6, "seed": 7}


class SlowDER(SlowReplay):
    """Cross-entropy of the batch, α times the distance from stored logits, β times the labels of another draw."""

    def __init__(self, model, *, alpha, beta=None, **common):
        super().__init__(model, **common)
        self.alpha, self.beta = alpha, beta

    def step(self, x, y):
        recalled = self.recall()
        logits = [self.scores(example) for example in x]
        loss = mean(surprise(scores, label) for scores, label in zip(logits, y, strict=True))
        if recalled:
            loss = loss + self.alpha * mean(
                ((self.scores(example) - scores) ** 2).mean() for example, _, scores in recalled
            )
            if self.beta is not None:
                loss = loss + self.beta * mean(
                    surprise(self.scores(example), label) for example, label, _ in self.recall()
                )
        value = self.descend(loss)
        self.remember([(example, label, scores.detach()) for example, label, scores in zip(x, y, logits, strict=True)])
        return value


@pytest.mark.parametrize(
    ("learner", "numbers"),
    [(DER, {"alpha": 0.3}), (DERpp, {"alpha": 0.1, "beta": 0.5}), (DERpp, {"alpha": 0, "beta": 2})],
)
def test_the_step_of_der(learner, numbers):
    ours, theirs = net(), net()
    fast, slow = learner(ours, **numbers, **COMMON), SlowDER(theirs, **numbers, **COMMON)
    for task in tasks():
        for x, y in task:
            assert fast.observe(x, y).item() == pytest.approx(slow.step(x, y), abs=1e-10)
    assert same_weights(ours, theirs)
    assert fast.past["y"].tolist() == [label.item() for _, label, _ in slow.remembered]


@pytest.mark.parametrize("learner", [DER, DERpp])
def test_stored_logits_are_those_at_storing_time(learner):
    """Every kept example has the logits that the model gave it just before it learned it, however long ago."""
    fast, logits_before = learner(net(), **COMMON), {}
    for task in tasks(batches=8):
        for x, y in task:
            before = copy.deepcopy(fast.model)
            fast.observe(x, y)
            logits_before |= {tuple(example.tolist()): before(example[None])[0] for example in x}
    stored = torch.stack([logits_before[tuple(example.tolist())] for example in fast.past["x"]])
    assert torch.allclose(fast.past["logits"], stored, atol=1e-12)
    assert not torch.allclose(fast.past["logits"], fast.model(fast.past["x"]), atol=0.1)


def test_stored_logits_are_those_of_what_the_model_saw():
    """With augmentation: the raw example is kept, and the logits of its augmented view."""
    fast = DER(net(), augment=lambda x, _: -x, **COMMON)
    before = copy.deepcopy(fast.model)
    (x, y), *_ = next(tasks())
    fast.observe(x, y)
    assert torch.equal(fast.past["x"], x)
    assert torch.allclose(fast.past["logits"], before(-x), atol=1e-12)


class SlowCLSER(SlowReplay):
    """Experience replay, and λ times the distance from whichever average is surer of the true class."""

    def __init__(self, model, *, weight, stable_rate, stable_decay, plastic_rate, plastic_decay, **common):
        super().__init__(model, **common)
        self.weight, self.steps = weight, 0  # t, from 1 on: the first model counts
        self.averages = [copy.deepcopy(model), copy.deepcopy(model)]
        self.rates, self.decays = (stable_rate, plastic_rate), (stable_decay, plastic_decay)

    def step(self, x, y):
        recalled = self.recall()
        joint = [*zip(x, y, strict=True), *recalled]
        loss = mean(surprise(self.scores(example), label) for example, label in joint)
        if recalled:
            distances = []
            for example, label in recalled:
                stable, plastic = (model(example[None])[0].detach() for model in self.averages)
                surer = stable.softmax(-1)[label] > plastic.softmax(-1)[label]
                distances.append(((self.scores(example) - (stable if surer else plastic)) ** 2).mean())
            loss = loss + self.weight * mean(distances)
        value = self.descend(loss)
        chances = torch.rand(2, generator=self.generator).tolist()
        self.steps += 1
        for average, chance, rate, decay in zip(self.averages, chances, self.rates, self.decays, strict=True):
            if chance < rate:
                share = 1 - min(1 - 1 / (self.steps + 1), decay)
                with torch.no_grad():
                    for averaged_weight, weight in zip(average.parameters(), self.model.parameters(), strict=True):
                        averaged_weight += share * (weight - averaged_weight)
        self.remember(list(zip(x, y, strict=True)))
        return value


def test_the_step_of_clser():
    numbers = {"weight": 0.7, "stable_rate": 0.4, "stable_decay": 0.8, "plastic_rate": 0.7, "plastic_decay": 0.6}
    ours, theirs = net(), net()
    fast, slow = CLSER(ours, **numbers, **COMMON), SlowCLSER(theirs, **numbers, **COMMON)
    for task in tasks(batches=6):
        for x, y in task:
            assert fast.observe(x, y).item() == pytest.approx(slow.step(x, y), abs=1e-10)
    assert same_weights(ours, theirs)
    for average, expected in zip((fast.stable, fast.plastic), slow.averages, strict=True):
        for name, value in expected.named_parameters():
            assert torch.allclose(average.weights[name], value, atol=1e-10, rtol=0)
    probe = torch.randn(5, 3, dtype=torch.float64)
    assert torch.allclose(fast.scores(probe), slow.averages[0](probe), atol=1e-10)


def test_the_better_average_is_that_to_which_a_label_is_more_probable_however_much_it_counts():
    learner = CLSER(nn.Linear(2, 2), **COMMON, criterion=CrossEntropy(weights=[1.0, 0.0]))
    with torch.no_grad():
        learner.stable.weights["bias"].copy_(torch.tensor([0.0, 9.0]))
        learner.plastic.weights["bias"].copy_(torch.tensor([9.0, 0.0]))
    advice = learner._better_logits({"x": torch.zeros(2, 2), "y": torch.tensor([0, 1])})
    assert advice.tolist() == [[9.0, 0.0], [0.0, 9.0]]


def test_averages_move_with_the_stated_probability_and_independently():
    fast = CLSER(net(), stable_rate=0.3, plastic_rate=0.6, **COMMON | {"lr": 1e-3})
    x, y = next(tasks())[0]
    moved = []
    for _ in range(600):
        before = [average.weights["0.weight"].clone() for average in (fast.stable, fast.plastic)]
        fast.step(x, y)
        after = [average.weights["0.weight"] for average in (fast.stable, fast.plastic)]
        moved.append([not torch.equal(*pair) for pair in zip(before, after, strict=True)])
    stable, plastic = (sum(column) for column in zip(*moved, strict=True))
    both = sum(stable_moved and plastic_moved for stable_moved, plastic_moved in moved)
    for count, rate in ((stable, 0.3), (plastic, 0.6), (both, 0.18)):
        assert stats.binomtest(count, 600, rate).pvalue > 1e-3


def test_an_average_that_does_not_move_still_ages():
    """t of the decay 1 − 1 / (t + 1) counts steps, not moves."""
    model = nn.Linear(1, 1, bias=False).double()
    average = WeightAverage(model, decay=0.9)
    for step, (value, moves) in enumerate([(4.0, True), (8.0, False), (10.0, True)]):
        nn.init.constant_(model.weight, value)
        average.update(model, torch.tensor(moves))
        assert average.updates == step + 1
    assert average.weights["weight"].item() == pytest.approx(4 + (10 - 4) / 3, abs=1e-12)


def test_the_average_that_is_asked_for_predicts_in_place_of_the_stable_one():
    x, y = next(tasks())[0]
    fast = CLSER(net(), average=0.5, **COMMON)
    for _ in range(4):
        fast.observe(x, y)
    assert fast.predicting_weights() is fast.averaged.weights
    assert not torch.allclose(fast.averaged.weights["0.weight"], fast.stable.weights["0.weight"])


@pytest.mark.parametrize(
    ("learner", "name", "value"),
    [(DER, "alpha", -1), (DER, "lr", 0), (DER, "replay", 300), (DERpp, "alpha", -0.1), (DERpp, "beta", -1),
     (DERpp, "beta", "much"), (CLSER, "weight", -1), (CLSER, "stable_rate", 1.1), (CLSER, "plastic_rate", -0.1),
     (CLSER, "stable_decay", 1), (CLSER, "plastic_decay", 2), (CLSER, "memory", 10)],
)  # fmt: skip
def test_bad_options_are_named(learner, name, value):
    name_in_error = "replay" if name == "memory" else name
    with pytest.raises(InputError, match=f"^{name_in_error}: got .*, expected "):
        learner(net(), **{name: value})


def test_defaults_are_the_published_ones():
    der, derpp, clser = DER(net()), DERpp(net()), CLSER(net())
    assert (der.lr, der.alpha) == (0.03, 0.3)
    assert (derpp.lr, derpp.alpha, derpp.beta) == (0.03, 0.1, 0.5)
    assert (clser.weight, clser.stable_rate, clser.plastic_rate) == (0.15, 0.8, 0.9)
    assert (clser.stable_decay, clser.plastic_decay) == (0.99, 0.99)


def test_a_state_without_a_memory_is_refused_by_name():
    learner = DER(net(), memory=40)
    state = {name: value for name, value in learner.state_dict().items() if name != "memory"}
    with pytest.raises(InputError, match="^state: got no memory, expected a complete state"):
        learner.load_state_dict(state)
