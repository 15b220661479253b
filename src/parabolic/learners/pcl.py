"""Parabolic continual learning."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from parabolic.learners.learner import ReplayLearner, join
from parabolic.memory import Batch
from parabolic.options import option
from parabolic.pde.bridge import VARIANTS, bridge, on_simplex

__all__ = ["PCL"]


class PCL(ReplayLearner):
    """Minimise the loss along Brownian bridges between new and recalled examples (the paper's Algorithm 1).

    The expected loss of the paths solves a parabolic PDE whose boundary is the memory (Feynman–Kac), so that what
    lies between the examples is learned with them and the loss there is held by the loss at the boundary.

    >>> learner = PCL(torch.nn.Linear(4, 3), memory=50)
    >>> for _ in range(3):
    ...     loss = learner.observe(torch.randn(8, 4), torch.arange(8) % 3)
    >>> learner.steps
    3
    """

    name = "pcl"
    reference = "Yang, Hasan and Tarokh, 2025: Parabolic continual learning"

    lr: float = 0.08
    sigma_x: float = option(0.03, "noise of the bridges between examples", at_least=0)
    sigma_y: float = option(0.01, "noise of the bridges between labels", at_least=0)
    times: int = option(5, "time points of a bridge, both ends counted", at_least=2)
    bridges: int = option(1, "bridges between each pair", at_least=1)
    horizon: float = option(1.0, "the time T that a bridge takes", above=0)
    variant: str = option("paper", "noise and integral of the paper, or of the code published with it", among=VARIANTS)
    integral: str | None = option(
        None,
        "how the loss along a path is summed up: euler (Algorithm 1), feynman-kac (euler and the end point), or "
        "mean (over all points); none: euler for the paper, mean for the reference",
        among=("euler", "feynman-kac", "mean"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = self.integral or ("euler" if self.variant == "paper" else "mean")
        self.weights = path_weights(rule, self.times).to(self.device, self.dtype)

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """The loss integrated along a bridge from every example to a random one of the joint batch."""
        x, y = join(batch, recalled)
        ends = torch.randperm(len(x), generator=self.generator, device=x.device)
        path = self._bridge(x, x[ends], self.sigma_x)
        scores = self.model(path.flatten(0, 2))
        label = one_hot(y, scores)
        target = on_simplex(self._bridge(label, label[ends], self.sigma_y))
        along = cross_entropy(scores, target.flatten(0, 2), reduction="none")
        return (along.view(-1, len(self.weights)) * self.weights).sum(-1).mean()

    def _bridge(self, start: Tensor, end: Tensor, sigma: float) -> Tensor:
        path = bridge(
            start, end, sigma, self.times, self.bridges,
            horizon=self.horizon, variant=self.variant, generator=self.generator,
        )  # fmt: skip
        return path[:, :, : len(self.weights)]


def path_weights(rule: str, times: int) -> Tensor:
    """The weight of each time point in the integral of the loss along a path, summing to one.

    Euler's sum takes the loss at the left end of each interval, so that the last point has no weight and is left
    out. Feynman–Kac's formula adds the loss where the path stops, with the weight of the whole integral.

    >>> path_weights("euler", 5).tolist()
    [0.25, 0.25, 0.25, 0.25]
    >>> path_weights("feynman-kac", 5).tolist()
    [0.125, 0.125, 0.125, 0.125, 0.5]
    >>> path_weights("mean", 5).tolist()
    [0.2, 0.2, 0.2, 0.2, 0.2]
    """
    if rule == "mean":
        return torch.full((times,), 1 / times, dtype=torch.float64)
    euler = torch.full((times - 1,), 1 / (times - 1), dtype=torch.float64)
    return euler if rule == "euler" else torch.cat([euler, euler.new_ones(1)]) / 2


def one_hot(y: Tensor, scores: Tensor) -> Tensor:
    """Labels as corners of the simplex, with as many classes as there are scores, and of their type."""
    return torch.zeros(len(y), scores.shape[-1], dtype=scores.dtype, device=y.device).scatter_(1, y[:, None], 1.0)
