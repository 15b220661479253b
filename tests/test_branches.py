"""Computations side by side give what they give one after the other."""

import pytest
import torch

from parabolic.engine.graphs import Graphs
from parabolic.learners.branches import side_by_side


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_values_and_gradients_are_those_of_one_after_the_other(device):
    device = torch.device(device)

    def chain(weight):
        def made():
            value = weight
            for _ in range(30):
                value = (value @ weight).tanh()
            return value.square().mean()

        return made

    def outcomes(together):
        torch.manual_seed(0)
        weights = [torch.randn(300, 300, device=device).div(20).requires_grad_() for _ in range(2)]

        def work():
            with torch.no_grad():
                torch._foreach_mul_(weights, 1.01)  # what comes before is over when they begin
            both = [chain(weight) for weight in weights]
            one, other = side_by_side(*both, device) if together else (made() for made in both)
            slopes = torch.autograd.grad(one + 2 * other, weights)
            return torch.cat([each.detach().flatten() for each in (one, other, *slopes)])

        graphs = Graphs(device)  # on a GPU the third time is captured, and the rest are replays of it
        return [graphs.run("chains", work)[0].clone() for _ in range(6)]

    # All on one stream, as in a berth: what is done on another would not wait.
    with torch.cuda.stream(torch.cuda.Stream() if device.type == "cuda" else None):
        together, apart = outcomes(True), outcomes(False)
        assert all(torch.equal(one, other) for one, other in zip(together, apart, strict=True))
        assert not torch.equal(together[0], together[5])
