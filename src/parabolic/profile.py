"""The PDE applied to a learner: its loss as ℓ, its memory as the boundary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor

from parabolic.checks import Description, check_finite, check_number, invalid
from parabolic.learners import Learner, ReplayLearner
from parabolic.learners.accepting import as_tensor
from parabolic.learners.functional import draws_apart, restrict_to
from parabolic.pde import (
    Drift,
    DriftBound,
    Estimate,
    ForgettingBound,
    GeneralisationBound,
    MemoryDomain,
    Range,
    drift_bound,
    forgetting_bound,
    solve,
)
from parabolic.pde.bounds import range_of

__all__ = ["LearnerLoss", "Profile", "bounds_of", "drift_of", "examples_loss", "loss_profile", "with_memory"]


class LearnerLoss:
    """ℓ(x): the loss of a learner's model at any point of its input space.

    A point has the label that a bridge without noise between its two nearest memory points would carry there, by the
    ratio of the distances. At a memory point this is the point's own label, so that ℓ on the memory is the loss of the
    stored examples. Examples stored at the same place count as one, with the mean of their labels.

    PCL's bridges join random pairs, and most carry other labels past the same point: between memory points ℓ is not the
    loss that PCL minimises.

    >>> from parabolic import PCL
    >>> learner = PCL(torch.nn.Linear(2, 2), memory=40)
    >>> _ = learner.observe(torch.randn(8, 2), torch.arange(8) % 2)
    >>> LearnerLoss(learner)(torch.zeros(3, 2)).shape
    torch.Size([3])
    """

    def __init__(self, learner: Learner, chunk: int = 4096) -> None:
        learner = with_memory(learner)
        if not len(learner.past):
            raise invalid("learner", Description("an empty memory"), "a learner that has seen a batch")
        if learner.embed is not None:
            remedy = "embed in `prepare`, with an embedding that is not trained"
            raise invalid("learner", Description("one with embed="), "a learner whose inputs are points", remedy)
        self.learner, self.chunk = learner, chunk
        with learner.lock:  # a copy of the current memory, which changes
            self.points, self.labels = learner.inputs(learner.past["x"]).clone(), learner.past["y"].clone()
        # Nearest points are found by matrix products, in which small differences of large numbers would be lost.
        places = self.points.flatten(1).double()
        self._centre = places.mean(0)
        self._places, self._place_of_example, self._place_sizes = (places - self._centre).unique(
            dim=0, return_inverse=True, return_counts=True
        )

    def __call__(self, x: Tensor) -> Tensor:
        """The losses `[n]` of points `[n, *shape]`."""
        return torch.cat([self._losses(part) for part in x.split(self.chunk)])

    def _losses(self, x: Tensor) -> Tensor:
        scores = _scores_at(self.learner, x)
        return self.learner.error.at_points(scores, self.label(x, scores.shape[-1]).to(scores))

    def label(self, x: Tensor, outputs: int) -> Tensor:
        """The label of each point, as on a bridge: a soft label, or numbers."""
        neighbours = min(2, len(self._places))
        place = x.flatten(1).double() - self._centre
        nearest = torch.cdist(place, self._places).topk(neighbours, largest=False).indices
        gap = (place[:, None] - self._places[nearest]).norm(dim=2).to(x.dtype)
        # The nearer of two gets the larger share: 1 at distance 0, ½ half-way. A single one gets all of it.
        total = gap.sum(1, keepdim=True)
        share = torch.where(total > 0, gap.flip(1) / total.masked_fill(total == 0, 1), 1 / neighbours)
        return (share[..., None] * self._mean_labels(outputs, x.dtype)[nearest]).sum(1)

    def _mean_labels(self, outputs: int, dtype: torch.dtype) -> Tensor:
        """The label of each place as a point: the mean of the labels stored there."""
        labels = self.learner.error.points(self.labels, outputs, dtype)
        total = labels.new_zeros(len(self._places), *labels.shape[1:]).index_add_(0, self._place_of_example, labels)
        mean: Tensor = total / self._place_sizes[:, None].to(dtype)
        return mean


def with_memory(learner: Learner) -> ReplayLearner:
    """The learner, refused if it has no memory: without one the PDE has no boundary."""
    if not isinstance(learner, ReplayLearner):
        raise invalid(
            "learner", type(learner).__name__, "a learner with a memory", "`parabolic list` shows which have one"
        )
    return learner


@dataclass(frozen=True)
class Profile:
    """The continual loss profile u(·, t) of a learner at some points, and the memory that it was solved for."""

    points: Tensor
    u: Estimate
    domain: MemoryDomain
    labels: Tensor  # of the memory
    memory_loss: Tensor
    t: float
    sigma: float


def loss_profile(
    learner: Learner,
    x: Tensor,
    *,
    t: float = 1.0,
    sigma: float = 0.05,
    eps: float = 0.01,
    paths: int = 100,
    steps: int = 25,
    generator: Generator | None = None,
) -> Profile:
    """Estimate u(x, t) of the paper's PDE for a learner: ℓ is its model's loss, u = ℓ on the balls around its memory.

    Args:
        learner: a learner with a memory.
        x: points of the model's input space (`learner.inputs` makes them from raw examples), within the hull of the
            memory; points outside are refused.
        t: the time.
        sigma: the diffusion coefficient of the PDE. A bridge of scale s corresponds to √(2σ) = s: the default is a
            scale of 0.32, and PCL's `sigma_x` of 0.03 is a σ of 0.00045.
        eps: the squared radius of the balls.
        paths: how many paths start from each point.
        steps: how many steps a path takes. The default is for points in the plane; in d = 3 or more dimensions paths
            need 8σtd/ε of them, 40·d with the other defaults (see `solve`, which warns of far too few).
        generator: the source of random numbers.
    """
    loss, domain = _loss_and_domain(learner, eps)
    _check_points(x, loss)
    u = solve(loss, x, t, domain, sigma, paths=paths, steps=steps, generator=generator)
    return Profile(x, u, domain, loss.labels, loss(domain.points), t, sigma)


def bounds_of(
    learner: Learner,
    past: tuple[Tensor, Tensor] | None = None,
    future: tuple[Tensor, Tensor] | None = None,
    *,
    tau: float = 1.0,
    eps: float = 0.01,
    samples: int = 256,
    generator: Generator | None = None,
) -> tuple[ForgettingBound, GeneralisationBound]:
    """Proposition 1 and Corollary 1 for a learner: what its losses on memory and hull imply for past and future data.

    Args:
        learner: a learner with a memory.
        past: raw examples of the past and their labels, for the realised loss.
        future: raw examples of the future and their labels, likewise.
        tau: how far ahead the future is.
        eps: the squared radius of the balls around the memory.
        samples: how many points of the edge, and how many inside, are sampled; C is the largest loss found.
        generator: the source of random numbers.
    """
    loss, domain = _loss_and_domain(learner, eps)
    past, future = _checked_pair("past", past, learner), _checked_pair("future", future, learner)
    forgetting = forgetting_bound(loss, domain, samples=samples, generator=generator)
    generalisation = forgetting.ahead(tau)
    past_range, past_covered = _data_range(learner, domain, past)
    future_range, future_covered = _data_range(learner, domain, future)
    return (
        replace(forgetting, past=past_range, covered=past_covered),
        replace(generalisation, future=future_range, covered=future_covered),
    )


def drift_of(
    learner: Learner,
    x: Tensor,
    drift: Drift,
    *,
    t: float = 1.0,
    sigma: float = 0.05,
    eps: float = 0.01,
    paths: int = 100,
    steps: int = 25,
    generator: Generator | None = None,
) -> DriftBound:
    """Remark 1 for a learner: what a drift adds to the bound on −log u at points of its input space."""
    loss, domain = _loss_and_domain(learner, eps)
    _check_points(x, loss)
    return drift_bound(loss, x, t, domain, sigma, drift, paths=paths, steps=steps, generator=generator)


def examples_loss(learner: Learner, x: Tensor, y: Tensor, classes: list[int] | None = None) -> Tensor:
    """The loss of raw examples with their own labels; over `classes` only, if given."""
    losses = []
    for examples, labels in zip(x.split(512), y.split(512), strict=True):
        scores = _scores_at(learner, learner.inputs(examples))
        if classes is not None:
            mask = torch.zeros(scores.shape[-1], dtype=torch.bool, device=scores.device)
            mask[classes] = True
            competing = mask[labels]  # examples of other classes, tested but never seen, are left out
            scores, labels = restrict_to(mask, scores[competing]), labels[competing]
        losses.append(learner.error(scores, labels, "none"))
    return torch.cat(losses)


def _scores_at(learner: Learner, inputs: Tensor) -> Tensor:
    """The scores; what a model draws at random for them, as a step of another thread may, changes no training."""
    with learner._lock_to_read(), draws_apart(learner.device):
        return learner.scores_at(inputs)


def _loss_and_domain(learner: Learner, eps: float) -> tuple[LearnerLoss, MemoryDomain]:
    check_number("eps", eps, above=0)
    loss = LearnerLoss(learner)
    return loss, MemoryDomain(loss.points, eps)


def _check_points(x: Any, loss: LearnerLoss) -> None:
    """Refuse points of another shape or type than the model's inputs; what is no tensor, `solve` refuses."""
    shape, dtype = loss.points.shape[1:], loss.points.dtype
    if isinstance(x, Tensor) and (x.shape[1:], x.dtype) != (shape, dtype):
        remedy = "learner.inputs makes them from raw examples"
        raise invalid("x", x, f"inputs of the model, each of shape {list(shape)} and {dtype}", remedy)


def _checked_pair(name: str, data: Any, learner: Learner) -> tuple[Tensor, Tensor] | None:
    """Examples and labels as two tensors of equal length, checked as in `observe`."""
    if data is None:
        return None
    if not isinstance(data, tuple | list) or len(data) != 2:
        got = data if isinstance(data, Tensor) else type(data)
        raise invalid(name, got, "a pair, examples and their labels", f"as in {name}=(x, y)")
    x, y = (as_tensor(name, part, learner.device) for part in data)
    for part in (x, y):
        if not part.ndim:
            raise invalid(name, part, "a batch of examples and one of labels")
    if not len(x):
        raise invalid(name, x, "at least one example", "leave it out if there are none")
    if len(x) != len(y):
        raise invalid(name, Description(f"{len(x)} examples and {len(y)} labels"), "a label for each example")
    check_finite(name, x)
    outputs = learner.scores(x[:1]).shape[1]
    return x, learner.error.unweighted().check(y, len(x), outputs, learner.dtype)


def _data_range(
    learner: Learner, domain: MemoryDomain, data: tuple[Tensor, Tensor] | None
) -> tuple[Range | None, float | None]:
    """The range of the loss over data, by their own labels, and the share of the data in the domain."""
    if data is None:
        return None, None
    covered = domain.inside(learner.inputs(data[0])).double().mean()
    return range_of(examples_loss(learner, *data)), float(covered)
