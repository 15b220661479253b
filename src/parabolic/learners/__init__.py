"""How one batch changes a model: one file a method."""

from parabolic.learners.er import ER
from parabolic.learners.learner import Learner, ReplayLearner, join
from parabolic.learners.pcl import PCL
from parabolic.learners.registry import find_learner, known_learners
from parabolic.learners.sgd import SGD

__all__ = ["ER", "PCL", "SGD", "Learner", "ReplayLearner", "find_learner", "join", "known_learners"]
