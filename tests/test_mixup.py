"""MixupER against its published step, written out slowly."""

import pytest
import torch
from scipy import stats
from slow import SlowReplay, mean, net, same_weights, surprise, tasks
from torch import nn

from parabolic import ER, Classes, CrossEntropy, InputError
from parabolic.learners.mixup import MixupER

COMMON = {"lr": 0.3, "memory": 12, "replay": 8, "seed": 7}


class SlowMixup(SlowReplay):
    """Experience replay, and a weight times the loss of mixtures of a random matching of recalled examples."""

    def __init__(self, model, *, weight, alpha, exclude, pairwise, **common):
        super().__init__(model, **common)
        self.weight, self.alpha, self.exclude, self.pairwise = weight, alpha, exclude, pairwise
        self.mixed = []

    def step(self, x, y):
        recalled = self.recall()
        joint = [*zip(x, y, strict=True), *recalled]
        loss = mean(surprise(self.scores(example), label) for example, label in joint)
        if recalled:
            order = torch.rand(len(recalled), generator=self.generator, dtype=torch.float64).tolist()
            concentration = torch.full((2,), self.alpha, dtype=torch.float64)
            share = torch._sample_dirichlet(concentration, generator=self.generator)[0].item()
            old = [first for first, (_, label) in enumerate(recalled) if not self.exclude or label not in y]
            self.mixed.append(len(old))
            losses = []
            for first, second in zip(old, sorted(old, key=lambda first: order[first]), strict=True):
                (first_x, first_label), (second_x, second_label) = recalled[first], recalled[second]
                scores = self.scores(share * first_x + (1 - share) * second_x)
                if self.pairwise:
                    total = (scores[first_label].exp() + scores[second_label].exp()).log()
                    losses.append(share * (total - scores[first_label]) + (1 - share) * (total - scores[second_label]))
                else:
                    losses.append(share * surprise(scores, first_label) + (1 - share) * surprise(scores, second_label))
            if losses:
                loss = loss + self.weight * mean(losses)
        value = self.descend(loss)
        self.remember(list(zip(x, y, strict=True)))
        return value


@pytest.mark.parametrize("alpha", [1.0, 0.4])
@pytest.mark.parametrize("exclude", [True, False])
@pytest.mark.parametrize("pairwise", [True, False])
def test_the_step_of_mixup(alpha, exclude, pairwise):
    numbers = {"weight": 0.8, "alpha": alpha, "exclude": exclude, "pairwise": pairwise}
    ours, theirs = net(), net()
    fast, slow = MixupER(ours, **numbers, **COMMON), SlowMixup(theirs, **numbers, **COMMON)
    for task in tasks(batches=6):
        for x, y in task:
            assert fast.observe(x, y).item() == pytest.approx(slow.step(x, y), abs=1e-10)
    assert same_weights(ours, theirs)
    if exclude:  # none, some and all of what is recalled were mixed
        assert {0, 8} < set(slow.mixed)


def test_while_nothing_is_old_it_is_experience_replay():
    fast, er = MixupER(net(), weight=5, **COMMON), ER(net(), **COMMON)
    x, y = next(tasks())[0]
    recalled = {"x": x + 1, "y": y.flip(0)}
    assert fast.loss({"x": x, "y": y}, recalled).item() == er.loss({"x": x, "y": y}, recalled).item()


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_the_proportion_is_of_beta(alpha):
    fast = MixupER(net(), alpha=alpha)
    drawn = [fast.proportion().item() for _ in range(3000)]
    assert stats.kstest(drawn, stats.beta(alpha, alpha).cdf).pvalue > 1e-3


@pytest.mark.parametrize("criterion", [CrossEntropy(weights=[1, 2, 3]), Classes(torch.nn.functional.cross_entropy)])
def test_where_only_two_classes_compete_there_is_no_other_loss(criterion):
    with pytest.raises(
        InputError, match="^criterion: got .*, expected cross-entropy without weights for pairwise=True"
    ):
        MixupER(net(), pairwise=True, criterion=criterion)
    MixupER(net(), criterion=criterion)


@pytest.mark.parametrize(("name", "value"), [("weight", -1), ("alpha", 0), ("alpha", -1), ("replay", 300), ("lr", 0)])
def test_bad_options_are_named(name, value):
    with pytest.raises(InputError, match=f"^{name}: got .*, expected "):
        MixupER(net(), **{name: value})


def test_ids_are_mixed_behind_their_embedding_and_nowhere_else():
    torch.manual_seed(0)
    ids, y = torch.randint(5, (6, 3)), torch.arange(6) % 3
    embed, body = nn.Embedding(5, 4), nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    learner = MixupER(body, embed=embed, memory=40, exclude=False, weight=1.0)
    learner.observe(ids, y)
    inputs_seen = []
    body.register_forward_pre_hook(lambda _, inputs: inputs_seen.append(inputs[0].detach()))
    points = embed.weight.detach().clone()
    learner.observe(ids, y)
    mixed, plain = inputs_seen[-2:]
    assert (plain[:, :, None] == points).all(-1).any(-1).all()  # each a word as it is
    assert not (mixed[:, :, None] == points).all(-1).any(-1).all()  # some between two
    without_embed = MixupER(nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 3)), memory=40)
    with pytest.raises(
        InputError, match=r"^x: got .*, expected floating-point numbers, which can be mixed; .* pass embed="
    ):
        without_embed.observe(ids, y)
