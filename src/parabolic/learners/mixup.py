"""Experience replay with mixup of recalled examples."""

from __future__ import annotations

import torch
from torch import Tensor

from parabolic.checks import invalid
from parabolic.learners.criterion import CrossEntropy, counted_mean
from parabolic.learners.functional import check_between
from parabolic.learners.learner import ReplayLearner, join
from parabolic.memory import Batch
from parabolic.options import option

__all__ = ["MixupER"]


class MixupER(ReplayLearner):
    """Experience replay, with mixup among the recalled examples whose classes are not in the new batch.

    >>> learner = MixupER(torch.nn.Linear(4, 3), memory=50)
    >>> for _ in range(3):
    ...     loss = learner.observe(torch.randn(8, 4), torch.arange(8) % 3)
    >>> learner.steps
    3
    """

    name = "mixup"
    reference = "Lim et al., 2024: MixER: mixup-based experience replay for online class-incremental learning"
    needs_classes = True

    weight: float = option(0.1, "weight of the mixup loss", at_least=0, tune="0.01:1:log")
    alpha: float = option(1.0, "the mixing proportion is drawn from Beta(alpha, alpha)", at_least=0.01)
    exclude: bool = option(True, "whether classes of the new batch are excluded from mixing")
    pairwise: bool = option(False, "whether only the two mixed classes compete, as in the code published with PCL")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pairwise and not (type(self.error) is CrossEntropy and self.error.weights is None):
            remedy = "leave out pairwise or the criterion"
            raise invalid("criterion", self.criterion, "cross-entropy without weights for pairwise=True", remedy)

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """The loss of the new batch and the recalled one, plus `weight` times the mixup loss."""
        # Mixtures go first: batch-norm statistics weight the last pass most, and should suit unmixed examples.
        mixup = None if recalled is None else self._mixup(recalled, batch["y"])
        x, y = join(batch, recalled)
        loss = self.error(self.model(x), y)
        return loss if mixup is None else loss + self.weight * mixup

    def _mixup(self, recalled: Batch, arriving: Tensor) -> Tensor:
        """The mean loss of randomly paired recalled examples, of those that may be mixed; 0 if there are none."""
        x, y = recalled["x"], recalled["y"]
        x = x if self.embed is None else self.embed(x)
        mixable = (y[:, None] != arriving).all(1) if self.exclude else torch.ones_like(y, dtype=torch.bool)
        # Those to mix come first, once in order and once shuffled, so that the shape does not depend on their number.
        first = (~mixable).int().argsort(stable=True)
        draws = torch.rand(len(y), generator=self.generator, dtype=torch.float64, device=y.device)
        second = draws.masked_fill_(~mixable, 2).argsort()
        proportion = self.proportion().to(x.dtype)
        scores = self.body(proportion * x[first] + (1 - proportion) * x[second])
        losses = proportion * self._loss_of(y[first], y[second], scores)
        losses = losses + (1 - proportion) * self._loss_of(y[second], y[first], scores)
        return counted_mean(losses * mixable[first], self.error.counts(y, losses.dtype) * mixable)

    def proportion(self) -> Tensor:
        """The share of the first example in a mixture: one number for the whole batch."""
        alphas = torch.full((2,), self.alpha, dtype=torch.float64, device=self.device)
        return torch._sample_dirichlet(alphas, generator=self.generator)[0]

    def _check_inputs(self, x: Tensor, inputs: Tensor) -> None:
        """Also refuse ids and whole numbers, which cannot be mixed."""
        super()._check_inputs(x, inputs)
        if self.embed is None:
            check_between(self.model, x, inputs, "floating-point numbers, which can be mixed")

    def _loss_of(self, y: Tensor, mixed_with: Tensor, scores: Tensor) -> Tensor:
        """The loss of each example, over all classes or only the two mixed ones."""
        if not self.pairwise:
            return self.error(scores, y, reduction="none")
        pair = scores.gather(1, torch.stack([y, mixed_with], 1))
        return -pair.log_softmax(-1)[:, 0]
