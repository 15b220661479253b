"""Computations side by side give what they give one after the other."""

import pytest
import torch

from parabolic.engine.graphs import Graphs
from parabolic.learners.branches import side_by_side


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_values_and_gradients_are_those_of_one_after_the_other(device):
    device = torch.device(device)
    weights = torch.randn(2, 300, 300, device=device).div(20).requires_grad_()

    def chain(weight):
        def made():
            value = weight
            for _ in range(30):
                value = (value @ weight).tanh()
            return value.square().mean()

        return made

    def work(together):
        with torch.no_grad():
            weights.mul_(1.01)  # what comes before is over when they begin
        if together:
            one, other = side_by_side(chain(weights[0]), chain(weights[1]), device)
        else:
            one, other = chain(weights[0])(), chain(weights[1])()
        weights.grad = None
        (one + 2 * other).backward()
        return torch.cat([one[None], other[None], weights.grad.flatten()]).detach()

    start, outcomes = weights.detach().clone(), []
    for together in (True, False):
        with torch.no_grad():
            weights.copy_(start)
        graphs = Graphs(device)  # on a GPU the third time is captured, and the rest are replays of it
        with torch.cuda.stream(torch.cuda.Stream() if device.type == "cuda" else None):  # as a berth does
            outcomes.append([graphs.run("chains", lambda: work(together))[0].clone() for _ in range(6)])  # noqa: B023
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))
    assert not torch.equal(outcomes[0][0], outcomes[0][5])
