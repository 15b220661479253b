"""Replay through batch norm: which examples go through the network together, how often and in which order."""

import copy

import pytest
import torch
from slow import tasks
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from parabolic import CBRS, CLSER, DER, ER, DERpp, MixupER

COMMON = {"lr": 0.2, "memory": 12, "replay": 6, "seed": 7}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()


def together(model, new, recalled):
    return cross_entropy(model(torch.cat([new["x"], recalled["x"]])), torch.cat([new["y"], recalled["y"]]))


class Plain:
    """A published loss, as it is written down: each term a pass of its own."""

    def __init__(self, model):
        self.model, self.seen = model, set()

    def loss(self, new, *recalled):
        return cross_entropy(self.model(new["x"]), new["y"])

    def step(self, new, *recalled):
        self.seen |= {*new["y"].tolist()}
        loss = self.loss(new, *recalled) if recalled else cross_entropy(self.model(new["x"]), new["y"])
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        with torch.no_grad():
            for weight, gradient in zip(self.model.parameters(), gradients, strict=True):
                weight -= COMMON["lr"] * gradient
        self.after()

    def after(self):
        pass


class PlainER(Plain):
    def loss(self, new, recalled):
        return together(self.model, new, recalled)


class PlainDER(Plain):
    def loss(self, new, recalled):
        return super().loss(new) + 0.3 * mse_loss(self.model(recalled["x"]), recalled["logits"])


class PlainDERpp(Plain):
    def loss(self, new, recalled, recalled_again):
        loss = super().loss(new) + 0.1 * mse_loss(self.model(recalled["x"]), recalled["logits"])
        return loss + 0.5 * cross_entropy(self.model(recalled_again["x"]), recalled_again["y"])


class PlainCBRS(Plain):
    def loss(self, new, recalled):
        classes = len(self.seen)
        return super().loss(new) / classes + (1 - 1 / classes) * cross_entropy(self.model(recalled["x"]), recalled["y"])


class PlainCLSER(Plain):
    """The averages are networks in their training mode, of whose weights alone averages are made."""

    def __init__(self, model):
        super().__init__(model)
        self.averages, self.steps = {"stable": copy.deepcopy(model), "plastic": copy.deepcopy(model)}, 0

    def loss(self, new, recalled):
        x, y = recalled["x"], recalled["y"]
        stable, plastic = (average(x).detach() for average in self.averages.values())
        surer = [
            stable_scores.softmax(-1)[label] > plastic_scores.softmax(-1)[label]
            for stable_scores, plastic_scores, label in zip(stable, plastic, y, strict=True)
        ]
        advice = torch.stack(
            [
                stable_scores if sure else plastic_scores
                for stable_scores, plastic_scores, sure in zip(stable, plastic, surer, strict=True)
            ]
        )
        distance = mse_loss(self.model(x), advice)
        return together(self.model, new, recalled) + 0.7 * distance

    def after(self):
        self.steps += 1
        for average, limit in zip(self.averages.values(), (0.8, 0.6), strict=True):
            decay = min(1 - 1 / (self.steps + 1), limit)
            with torch.no_grad():
                for averaged_weight, weight in zip(average.parameters(), self.model.parameters(), strict=True):
                    averaged_weight.copy_(decay * averaged_weight + (1 - decay) * weight)


ALWAYS = {"weight": 0.7, "stable_rate": 1, "stable_decay": 0.8, "plastic_rate": 1, "plastic_decay": 0.6}


@pytest.mark.parametrize(
    ("learner", "plain", "options"),
    [(ER, PlainER, {}), (DER, PlainDER, {}), (DERpp, PlainDERpp, {}), (CBRS, PlainCBRS, {}),
     (CLSER, PlainCLSER, ALWAYS)],
)  # fmt: skip
def test_weights_and_statistics_are_those_of_the_published_passes(learner, plain, options, monkeypatch):
    ours, theirs = net(), plain(net())
    fast, drawn = learner(ours, **options, **COMMON), []
    draw = fast.past.draw
    monkeypatch.setattr(fast.past, "draw", lambda *args, **kwargs: drawn.append(draw(*args, **kwargs)) or drawn[-1])
    for task in tasks(batches=6):
        for x, y in task:
            drawn.clear()
            fast.observe(x, y)
            theirs.step({"x": x, "y": y}, *drawn)
            for name, value in theirs.model.state_dict().items():
                assert torch.allclose(ours.state_dict()[name], value, atol=1e-12, rtol=0), name
    for name, average in getattr(theirs, "averages", {}).items():
        for key, value in getattr(fast, name).weights.items():
            assert torch.allclose(value, average.state_dict()[key], atol=1e-12, rtol=0), (name, key)
    if learner is CLSER:
        probe = torch.randn(5, 3, dtype=torch.float64)
        assert torch.allclose(fast.scores(probe), theirs.averages["stable"].eval()(probe), atol=1e-12, rtol=0)


def test_mixtures_pass_through_batch_norm_before_the_examples_themselves():
    ours, theirs = net(), net()
    fast = MixupER(ours, **COMMON)
    (x, y), *_ = next(tasks())
    recalled = {"x": x[:1].expand(6, 3), "y": (y[:1] + 2).expand(6)}  # all alike: mixed they are the same
    fast.loss({"x": x, "y": y}, recalled)
    theirs(recalled["x"])
    together(theirs, {"x": x, "y": y}, recalled)
    for name in ("running_mean", "running_var"):
        assert torch.allclose(getattr(ours[1], name), getattr(theirs[1], name), atol=1e-12, rtol=0)
