"""MixupER against its published step, written out slowly."""

import pytest
import torch
from scipy import stats
from slow import SlowReplay, mean, net, same_weights, surprise, tasks

from parabolic import ER, InputError
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
        loss = mean(surprise(self.scores(each), label) for each, label in joint)
        if recalled:
            order = torch.rand(len(recalled), generator=self.g, dtype=torch.float64).tolist()
            concentration = torch.full((2,), self.alpha, dtype=torch.float64)
            share = torch._sample_dirichlet(concentration, generator=self.g)[0].item()
            old = [i for i, (_, label) in enumerate(recalled) if not self.exclude or label not in y]
            self.mixed.append(len(old))
            losses = []
            for i, j in zip(old, sorted(old, key=lambda i: order[i]), strict=True):
                (one, a), (other, b) = recalled[i], recalled[j]
                z = self.scores(share * one + (1 - share) * other)
                if self.pairwise:
                    total = (z[a].exp() + z[b].exp()).log()
                    losses.append(share * (total - z[a]) + (1 - share) * (total - z[b]))
                else:
                    losses.append(share * surprise(z, a) + (1 - share) * surprise(z, b))
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


@pytest.mark.parametrize(("name", "value"), [("weight", -1), ("alpha", 0), ("alpha", -1), ("replay", 300), ("lr", 0)])
def test_bad_options_are_named(name, value):
    with pytest.raises(InputError, match=f"^{name}: got .*, expected "):
        MixupER(net(), **{name: value})
