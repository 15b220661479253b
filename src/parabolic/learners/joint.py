"""Joint training: the upper reference."""

from __future__ import annotations

from parabolic.learners.sgd import SGD

__all__ = ["Joint"]


class Joint(SGD):
    """Plain SGD on all tasks at once, shuffled, in one pass: what SGD would reach if there were nothing to forget.

    There is only the final model; the accuracies "after" earlier tasks are its own. It sees every example once,
    whereas a replay learner sees those in memory many times: on a short stream replay can end above it.

    >>> Joint.sees_all
    True
    """

    name = "joint"
    reference = "no stream: an upper reference"
    sees_all = True
