"""Computations side by side give what they give one after the other."""

import pytest
import torch

from parabolic.engine.graphs import Graphs
from parabolic.learners.branches import side_by_side


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_values_and_gradients_are_those_of_one_after_the_other(device):
    device = torch.device(device)

    def chain(weight):
        def compute():
            value = weight
            for _ in range(30):
                value = (value @ weight).tanh()
            return value.square().mean()

        return compute

    def outcomes(together):
        torch.manual_seed(0)
        weights = [torch.randn(300, 300, device=device).div(20).requires_grad_() for _ in range(2)]

        def work():
            with torch.no_grad():
                torch._foreach_mul_(weights, 1.01)  # what comes before is over when they begin
            computations = [chain(weight) for weight in weights]
            first, second = side_by_side(*computations, device) if together else (compute() for compute in computations)
            slopes = torch.autograd.grad(first + 2 * second, weights)
            return torch.cat([tensor.detach().flatten() for tensor in (first, second, *slopes)])

        graphs = Graphs(device)  # on a GPU the third time is captured, and the rest are replays of it
        return [graphs.run("chains", work)[0].clone() for _ in range(6)]

    # All on one stream, as in a berth: what is done on another would not wait.
    with torch.cuda.stream(torch.cuda.Stream() if device.type == "cuda" else None):
        together, apart = outcomes(True), outcomes(False)
        assert all(torch.equal(first, second) for first, second in zip(together, apart, strict=True))
        assert not torch.equal(together[0], together[5])
