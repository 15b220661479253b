"""A learner of one's own is what it says, or the class is refused."""

import copy

import pytest
import torch
from torch import nn

from parabolic import ER, GEM, InputError, make_stream, train
from parabolic.backbones import make_backbone
from parabolic.options import option
from parabolic.states import same_state


def test_a_default_needs_its_type():
    with pytest.raises(InputError, match=r"Mine\.lr: got 0\.5, expected a field with its type; as in lr: float = …"):
        type("Mine", (ER,), {"lr": 0.5})
    with pytest.raises(InputError, match=r"Mine\.weight: got .*, expected a field with its type"):
        type("Mine", (ER,), {"weight": option(0.5, "a weight")})

    class Typed(ER):
        lr: float = 0.5
        tasks = 0  # no field of any class, and so no matter

    assert Typed(nn.Linear(2, 2)).lr == 0.5


class Predicting(ER):
    def predict(self, x):
        return super().predict(x) * 0


class Scoring(ER):
    def scores(self, x):
        return super().scores(x) * 0


class Observing(GEM):  # whose step is its own, but not that of this class
    def observe(self, x, y, task=None):
        return super().observe(x, y, task)


class Stepping(Observing):
    def step(self, x, y, task=None):
        return super().step(x, y, task)


@pytest.mark.parametrize(
    ("cls", "own", "asked"),
    [(Predicting, "predict", "scores_at"), (Scoring, "scores", "scores_at"), (Observing, "observe", "step")],
)
def test_what_the_loop_would_not_ask_is_refused(cls, own, asked):
    stream = make_stream("seq-blobs")
    learner = cls(make_backbone("mlp", stream.shape, stream.classes), memory=40)
    told = f"{own} of {cls.__name__}: got an override, expected one of {asked}, which this loop calls"
    with pytest.raises(InputError, match=told):
        train(learner, stream)
    assert learner.steps == 0


def test_what_it_asks_may_be_ones_own():
    stream = make_stream("seq-blobs")
    assert train(Stepping(make_backbone("mlp", stream.shape, stream.classes), memory=40), stream).step > 0


def test_what_a_memory_is_to_keep_and_no_batch_has_is_told():
    class Weighing(ER):
        keeps = ("x", "y", "weight")

    class ByTask(ER):
        keeps = ("x", "y", "task")

    x, y = torch.zeros(3, 2), torch.zeros(3, dtype=torch.long)
    expected = r"expected what Weighing keeps: x, y, weight; add it to `batch` in `loss`"
    with pytest.raises(InputError, match=f"batch: got no weight, {expected}"):
        Weighing(nn.Linear(2, 2)).observe(x, y)
    learner = ByTask(nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"batch: got no task, .*; pass task= with every batch"):
        learner.observe(x, y)
    learner.observe(x, y, task=4)
    assert learner.past["task"].tolist() == [4, 4, 4]


def test_a_state_that_does_not_fit_changes_nothing():
    def learner(classes=3, **options):
        torch.manual_seed(classes)
        made = ER(nn.Linear(4, classes), **options)
        made.observe(torch.randn(8, 4), torch.arange(8) % 3)
        return made

    mine = learner(memory=50)
    before = copy.deepcopy(mine.state_dict())
    others = {
        r"state: got weight of shape \[5, 4\], expected \[3, 4\].*Learner\.load": learner(5, memory=50).state_dict(),
        r"memory: got a state of \[5, 5\] examples, expected 8": learner(memory=5, replay=5).state_dict(),
        r"memory: got no number offered": {**learner(memory=50).state_dict(), "memory": {}},
    }
    for told, state in others.items():
        with pytest.raises(InputError, match=told):
            mine.load_state_dict(state)
        assert same_state(mine.state_dict(), before)
