"""Balance of classes in the loss."""

import math

import pytest
import torch
from torch import nn

from parabolic import ER, MLP, PCL, Classes, InputError, Learner

LEARNERS = [ER, PCL]


def unbalanced_batches(steps, generator, size=20):
    """Batches whose labels can only be guessed: nine in ten are of class 0."""
    for _ in range(steps):
        yield torch.ones(size, 1, dtype=torch.float64), (torch.rand(size, generator=generator) > 0.9).long()


def bias_only(outputs=2):
    model = nn.Linear(1, outputs).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


@pytest.mark.parametrize("cls", LEARNERS)
@pytest.mark.parametrize(("balance", "odds"), [(0.0, math.log(9)), (0.5, math.log(9) / 2), (1.0, 0.0)])
def test_how_often_a_class_comes_up_is_learned_as_far_as_it_is_not_made_up_for(cls, balance, odds):
    # The minimiser is known: the scores in the loss have the true odds, and the network what is left of them.
    options = {"sigma_y": 0.0, "integral": "euler", "times": 2} if cls is PCL else {}
    learner = cls(bias_only(), memory=400, lr=0.05, average=0.999, balance=balance, classes=2, **options)
    for x, y in unbalanced_batches(2500, torch.Generator().manual_seed(0)):
        learner.step(x, y)
    first, second = learner.scores(torch.ones(1, 1, dtype=torch.float64))[0].tolist()
    assert first - second == pytest.approx(odds, abs=0.2)


@pytest.mark.parametrize("cls", LEARNERS)
def test_shares_are_those_of_what_was_learned_lately(cls):
    learner = cls(MLP((4,), 3, hidden=(8,)), memory=40, balance=1.0, replay=6)
    labels_counted, generator = [], torch.Generator().manual_seed(0)
    count = learner.count
    learner.count = lambda y, outputs: (labels_counted.append(y.clone()), count(y, outputs))
    for _ in range(30):
        learner.observe(torch.randn(5, 4, generator=generator), torch.randint(3, (5,), generator=generator))
    assert [len(y) for y in labels_counted[:3]] == [5, 10, 11]  # the new ones, and as many recalled as there were
    weights = [0.95 ** (len(labels_counted) - 1 - step) for step in range(len(labels_counted))]
    parts = [
        weight * torch.bincount(y, minlength=3) / len(y) for weight, y in zip(weights, labels_counted, strict=True)
    ]
    expected = sum(parts) / sum(weights)
    assert torch.allclose(learner.shares / learner.shares.sum(), expected, atol=1e-6)
    scores = torch.randn(2, 3, generator=generator)
    assert torch.allclose(learner.tilted(scores), scores + (expected + 0.01 / 3).log(), atol=1e-5)


@pytest.mark.parametrize("cls", LEARNERS)
def test_without_balance_nothing_is_kept_of_it(cls):
    learner = cls(MLP((4,), 3), memory=40)
    learner.observe(torch.randn(5, 4), torch.arange(5) % 3)
    scores = torch.randn(2, 3)
    assert learner.tilted(scores) is scores
    assert "shares" not in learner.state_dict()


@pytest.mark.parametrize("cls", LEARNERS)
def test_balance_goes_on_where_it_was(cls, tmp_path):
    def batches(first, last):
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            yield (
                torch.randn(5, 4, generator=generator),
                torch.randint(min(2 + step // 5, 4), (5,), generator=generator),
            )

    learner = cls(MLP((4,), 2), memory=40, balance=1.0, average=0.9)
    learner.grow(3)
    for x, y in batches(0, 8):
        learner.observe(x, y)
    loaded = Learner.load(learner.save(tmp_path / "a"))
    for either in (learner, loaded):
        either.grow(4)
        for x, y in batches(8, 20):
            either.observe(x, y)
        assert len(either.shares) == 4
    assert torch.equal(learner.shares, loaded.shares)
    for weight, loaded_weight in zip(learner.model.parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(weight, loaded_weight)


def test_a_used_learner_takes_over_the_state_of_a_fresh_one():
    used, fresh = (ER(MLP((4,), 3), memory=40, balance=1.0, classes=3) for _ in range(2))
    used.observe(torch.randn(5, 4), torch.arange(5) % 3)
    place = used.shares.data_ptr()
    used.load_state_dict(fresh.state_dict())
    assert used.shares.data_ptr() == place
    assert not used.shares.any()


def test_balance_is_for_classes():
    with pytest.raises(InputError, match=r"balance: got 1\.0, expected 0 where targets are numbers"):
        ER(nn.Linear(4, 1), memory=40, balance=1.0, criterion="mse")


@pytest.mark.parametrize("cls", LEARNERS)
def test_labels_of_a_batch_that_is_refused_are_not_counted(cls):
    """The loss fails after they were counted."""

    def loss(scores, target):
        if failing:
            raise ValueError("no")
        return nn.functional.cross_entropy(scores, target, reduction="none")

    failing = False
    learner, x, y = (
        cls(nn.Linear(3, 2), balance=0.5, criterion=Classes(loss), memory=50),
        torch.randn(8, 3),
        [0] * 8,
    )
    learner.observe(x, y)
    before, failing = learner.shares.clone(), True
    with pytest.raises(ValueError, match="no"):
        learner.observe(x, [1] * 8)
    assert torch.equal(learner.shares, before)
