"""Learners: how one batch updates a model, one file per method."""

from parabolic.learners.agem import AGEM
from parabolic.learners.cbrs import CBRS
from parabolic.learners.clser import CLSER
from parabolic.learners.criterion import MSE, Classes, Criterion, CrossEntropy, Heads, Huber, Numbers
from parabolic.learners.der import DER, DERpp
from parabolic.learners.er import ER
from parabolic.learners.ewc import EWC
from parabolic.learners.gem import GEM
from parabolic.learners.joint import Joint
from parabolic.learners.learner import Diverged, Learner, ReplayLearner, join
from parabolic.learners.lwf import LwF
from parabolic.learners.mixup import MixupER
from parabolic.learners.obc import OBC
from parabolic.learners.pcl import PCL
from parabolic.learners.registry import find_learner, known_learners
from parabolic.learners.scale import Scale
from parabolic.learners.sgd import SGD
from parabolic.learners.si import SI
from parabolic.learners.vrmcl import VRMCL

__all__ = [
    "AGEM",
    "CBRS",
    "CLSER",
    "DER",
    "ER",
    "EWC",
    "GEM",
    "MSE",
    "OBC",
    "PCL",
    "SGD",
    "SI",
    "VRMCL",
    "Classes",
    "Criterion",
    "CrossEntropy",
    "DERpp",
    "Diverged",
    "Heads",
    "Huber",
    "Joint",
    "Learner",
    "LwF",
    "MixupER",
    "Numbers",
    "ReplayLearner",
    "Scale",
    "find_learner",
    "join",
    "known_learners",
]
