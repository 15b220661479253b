"""Parabolic continual learning."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from parabolic.checks import invalid
from parabolic.learners.balance import BalancedLearner
from parabolic.learners.functional import check_between, scores_by
from parabolic.learners.learner import join
from parabolic.learners.pairing import PAIRINGS
from parabolic.memory import Batch, half_by_loss
from parabolic.options import option
from parabolic.pde.bridges import VARIANTS, bridge, log_girsanov

__all__ = ["ABLATIONS", "PCL"]


ABLATIONS: dict[str, dict[str, object]] = {
    "One BB": {"shared": True},
    "BB Tempering": {"tempering": True},
    "Eu endpoints": {"endpoints": "farthest"},
    "Max Loss": {"offers": "highest"},
    "Min Loss": {"offers": "lowest"},
    "Middle 50% Loss": {"offers": "middle"},
}
"""The options behind each row of the paper's ablation tables."""


class PCL(BalancedLearner):
    """Minimise the loss along Brownian bridges between new and recalled examples (the paper's Algorithm 1).

    The points between the examples are learned with them. The motivation is the Feynman–Kac formula: the expected loss
    along paths that stop in the memory solves a parabolic PDE whose boundary is the memory. Bridges are other paths:
    the loss minimised here is not an estimate of that solution, and the bounds of `parabolic.pde` do not apply to it.

    A `drift` μ, which maps points to velocities, weights the paths of a step by Girsanov weights (for noise of scale
    one, as in the paper), normalised to a mean of one. On free paths with `sigma_x=1` this adds the term μ·∇u to the
    PDE; with less noise σ it adds a tempered term, σ²μ·∇u for a constant drift: a drift that moves the end of a path by
    0.5 at σ = 1 moves it by 0.045 at 0.3, and by 0.0005 at 0.03. Between given ends it weights pairs: more where the
    path follows the drift, less where the drift is strong. `pde.gradient_of` makes a drift from a potential φ; scale φ
    so that its values at the examples differ by about one, or else a few pairs have nearly all of the weight.

    >>> learner = PCL(torch.nn.Linear(4, 3), memory=50)
    >>> for _ in range(3):
    ...     loss = learner.observe(torch.randn(8, 4), torch.arange(8) % 3)
    >>> learner.steps
    3
    """

    name = "pcl"
    reference = "Yang, Hasan and Tarokh, 2025: Parabolic continual learning"

    lr: float = 0.08
    sigma_x: float = option(0.03, "noise of the bridges between examples", at_least=0, tune="0.003:1:log")
    sigma_y: float = option(0.01, "noise of the bridges between labels", at_least=0, tune="0.001:0.1:log")
    simplex: bool = option(
        True,
        "whether labels along a bridge are mapped back onto the simplex: absolute values, scaled to sum to one; with "
        "many classes this spreads part of each label over all of them (false: labels stay as the noise moved them)",
    )
    times: int = option(5, "time points of a bridge, including both ends", at_least=2)
    bridges: int = option(1, "bridges between each pair", at_least=1)
    horizon: float = option(1.0, "the duration T of a bridge", above=0)
    variant: str = option("paper", "details as in the paper, or in the code published with it", among=VARIANTS)
    integral: str | None = option(
        None,
        "how the loss along a path is integrated: euler (Algorithm 1), feynman-kac (euler plus the end point), or "
        "mean (over all points), each with weights that add up to 1; none: euler for variant=paper, mean for "
        "variant=reference",
        among=("euler", "feynman-kac", "mean"),
    )
    endpoints: str = option(
        "random",
        "where a bridge ends: at a random example of the joint batch, the farthest, the nearest, or across: at a "
        "recalled one for a new one and vice versa",
        among=tuple(PAIRINGS),
    )
    shared: bool = option(False, "whether all pairs of a batch share one noise path")
    tempering: bool = option(False, "whether the noise is the norm of the loss's gradient, linear between the two ends")
    offers: str = option("all", "what is offered to memory: all of a batch or the half of it with the highest, lowest "
                         "or middle loss", among=("all", "highest", "lowest", "middle"))  # fmt: skip
    drift_weight: float = option(0.0, "weight of the reference variant's drift term, with drift ∇ℓ", at_least=0)
    drift: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.simplex and self.variant == "reference":
            raise invalid("simplex", self.simplex, "true for variant='reference', as in its code")
        if self.tempering and self.sigma_x == 0:
            raise invalid("sigma_x", self.sigma_x, "a number above 0", "tempering divides sigma_y by it")
        if self.drift is not None and not callable(self.drift):
            raise invalid("drift", self.drift, "a function from points to velocities")
        if self.drift_weight and self.variant != "reference":
            raise invalid("drift_weight", self.drift_weight, "0 for variant='paper'", "pass drift= instead")
        if self.drift_weight and self.drift is not None:
            raise invalid("drift", self.drift, "none with drift_weight, whose drift is ∇ℓ", "choose one of the two")
        if self.drift_weight and self.integral is not None:
            raise invalid("integral", self.integral, "none with drift_weight, which sums the loss over all points")
        rule = self.integral or ("euler" if self.variant == "paper" else "mean")
        self.point_weights = path_weights(rule, self.times, self.horizon).to(self.device, self.dtype)

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """The loss integrated along a bridge from every example of the joint batch to another."""
        x, y = join(batch, recalled)
        x = x if self.embed is None else self.embed(x)
        ends = PAIRINGS[self.endpoints](x, len(batch["x"]), self.generator)
        sigma_x, sigma_y = self._sigmas(x, y, ends)
        path = self.paths(x, x[ends], sigma_x)
        used = path[:, :, : len(self.point_weights)]
        if self.drift_weight:
            used.requires_grad_()
        scores = self.body(used.flatten(0, 2))
        self.count(y, scores.shape[-1])
        label = self.error.points(y, self.classes or scores.shape[-1], x.dtype)
        labels = self.label_paths(label, label[ends], sigma_y)
        target = pad(labels[:, :, : len(self.point_weights)].flatten(0, 2), (0, scores.shape[-1] - labels.shape[-1]))
        along = self.error.at_points(self.tilted(scores), target).view(used.shape[:3])
        batch["loss"] = along[: len(batch["x"]), 0, 0].detach()  # of the new examples: a path starts at its example
        if self.drift_weight:
            return reference_drift(along, used, self.drift_weight)
        integral = (along * self.point_weights).sum(-1)
        if self.drift is None:
            return integral.mean()
        # A self-normalised mean: in many dimensions the weights themselves are 0 or infinite.
        weight = log_girsanov(path, self.drift, horizon=self.horizon).flatten().softmax(0)
        return (weight * integral.flatten()).sum()

    def remember(self, raw: Batch, batch: Batch) -> None:
        """Offer the batch to memory, or the half of it selected by loss."""
        if self.offers != "all":
            rows = half_by_loss(batch["loss"], self.offers)
            raw, batch = ({name: value[rows] for name, value in fields.items()} for fields in (raw, batch))
        super().remember(raw, batch)

    def paths(self, start: Tensor, end: Tensor, sigma: float | Tensor, *, common: bool = False) -> Tensor:
        """Bridges between inputs of the model, `[n, bridges, times, *shape]`."""
        return bridge(
            start, end, sigma, self.times, self.bridges, horizon=self.horizon, variant=self.variant,
            shared=self.shared, common=common, generator=self.generator,
        )  # fmt: skip

    def label_paths(self, start: Tensor, end: Tensor, sigma: float | Tensor) -> Tensor:
        """Bridges between labels as points, `[n, bridges, times, outputs]`."""
        # The published code draws one number for all classes.
        labels = self.paths(start, end, sigma, common=self.variant == "reference")
        return self.error.fold(labels) if self.simplex else labels

    def _check_inputs(self, x: Tensor, inputs: Tensor) -> None:
        """Also refuse ids and whole numbers: no path runs between them."""
        super()._check_inputs(x, inputs)
        if self.embed is None:
            check_between(self.model, x, inputs, "floating-point numbers, between which paths can run")

    def _sigmas(self, x: Tensor, y: Tensor, ends: Tensor) -> tuple[float | Tensor, float | Tensor]:
        """The noise of examples and labels: two numbers or, with tempering, one value per pair and time point."""
        if not self.tempering:
            return self.sigma_x, self.sigma_y
        with torch.enable_grad():
            probe = x.detach().requires_grad_()
            # With copies of the buffers: batch-norm statistics should track only what is learned.
            (slope,) = torch.autograd.grad(self.error(scores_by({}, self.body, probe), y, reduction="sum"), probe)
        norm = slope.flatten(1).norm(dim=1, keepdim=True)
        first, last = norm, norm[ends]
        if self.variant == "reference":  # its code takes the gradient of the mean loss, and swaps the ends
            first, last = norm[ends] / len(x), norm / len(x)
        sigma = torch.lerp(first, last, torch.linspace(0, 1, self.times, dtype=x.dtype, device=x.device))
        return sigma, sigma * (self.sigma_y / self.sigma_x)


def reference_drift(along: Tensor, path: Tensor, weight: float) -> Tensor:
    """The loss of the published code with its drift on: Σℓ − weight · (Σ g·x − ½ Σ‖g‖²), summed over time points.

    Here g is the gradient of the mean over all paths of the step: that of a path's own loss, divided by the number of
    paths. So the larger the batch, the smaller the term.
    """
    integral = along.mean(1).sum(-1)
    (slope,) = torch.autograd.grad(integral.mean(), path, create_graph=True)
    term = (slope * path - 0.5 * slope.square()).flatten(3).sum(-1).mean(1).sum(-1)
    return (integral - weight * term).mean()


def path_weights(rule: str, times: int, horizon: float = 1.0) -> Tensor:
    """The weight of each time point in the integral of the loss along a path, summing to one.

    The Euler sum takes the loss at the left end of each interval, so that the last point has no weight and is left
    out. The Feynman–Kac formula adds the loss where the path stops: the integral has weight `horizon`, and that loss
    weight one, before normalisation.

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
    return euler if rule == "euler" else torch.cat([horizon * euler, euler.new_ones(1)]) / (horizon + 1)
