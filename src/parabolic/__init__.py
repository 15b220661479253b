"""Learn from a stream without forgetting: parabolic continual learning and its rivals, on PyTorch."""

from parabolic.backbones import MLP, ConvNet, ResNet18, make_backbone
from parabolic.checks import InputError
from parabolic.engine import Callback, train
from parabolic.experiments import RunSpec, Store, run
from parabolic.learners import (
    AGEM,
    CBRS,
    CLSER,
    DER,
    ER,
    EWC,
    GEM,
    OBC,
    PCL,
    SGD,
    SI,
    VRMCL,
    DERpp,
    Joint,
    Learner,
    LwF,
    MixupER,
    ReplayLearner,
)
from parabolic.memory import Memory
from parabolic.pde import bridge, on_simplex
from parabolic.streams import Stream, make_stream

__version__ = "0.1.0"

__all__ = [
    "AGEM",
    "CBRS",
    "CLSER",
    "DER",
    "ER",
    "EWC",
    "GEM",
    "MLP",
    "OBC",
    "PCL",
    "SGD",
    "SI",
    "VRMCL",
    "Callback",
    "ConvNet",
    "DERpp",
    "InputError",
    "Joint",
    "Learner",
    "LwF",
    "Memory",
    "MixupER",
    "ReplayLearner",
    "ResNet18",
    "RunSpec",
    "Store",
    "Stream",
    "bridge",
    "make_backbone",
    "make_stream",
    "on_simplex",
    "run",
    "train",
]
