"""Scores of a model: by weights that are not its own, or of some classes only."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

__all__ = ["only", "scores_by"]


def scores_by(weights: Mapping[str, Tensor], model: nn.Module, x: Tensor) -> Tensor:
    """The model's scores by other weights. Its buffers stay as they are: batch-norm statistics follow its own alone.

    >>> model = nn.BatchNorm1d(1)
    >>> scores = scores_by({"bias": torch.ones(1)}, model, torch.tensor([[5.0], [9.0]]))
    >>> round(scores.mean().item(), 3), model.running_mean
    (1.0, tensor([0.]))
    """
    scratch = {name: buffer.clone() for name, buffer in model.named_buffers()}
    scores: Tensor = torch.func.functional_call(model, {**weights, **scratch}, (x,))
    return scores


def only(classes: Tensor, scores: Tensor) -> Tensor:
    """The scores with those of all other classes so low that they have no probability.

    >>> only(torch.tensor([True, False, True]), torch.zeros(1, 3)).softmax(-1)
    tensor([[0.5000, 0.0000, 0.5000]])
    """
    # Not −∞: 0 · log 0 is to be 0 in a cross-entropy.
    return scores.masked_fill(~classes, torch.finfo(scores.dtype).min / 2)
