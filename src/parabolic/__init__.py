"""Learn from a stream without forgetting: parabolic continual learning and other methods, on PyTorch."""

from typing import TYPE_CHECKING, Any

from parabolic.backbones import MLP, ConvNet, ResNet18, make_backbone
from parabolic.checks import InputError
from parabolic.engine import Callback, Journal, Monitor, train
from parabolic.experiments import RunSpec, Store, load_preset, run
from parabolic.learners import (
    AGEM,
    CBRS,
    CLSER,
    DER,
    ER,
    EWC,
    GEM,
    MSE,
    OBC,
    PCL,
    SGD,
    SI,
    VRMCL,
    Classes,
    CrossEntropy,
    DERpp,
    Heads,
    Huber,
    Joint,
    Learner,
    LwF,
    MixupER,
    Numbers,
    ReplayLearner,
)
from parabolic.memory import Memory, Recent
from parabolic.pde import bridge, on_simplex
from parabolic.streams import Stream, make_stream

if TYPE_CHECKING:
    from parabolic.estimators import ParabolicClassifier, ParabolicRegressor

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
    "MSE",
    "OBC",
    "PCL",
    "SGD",
    "SI",
    "VRMCL",
    "Callback",
    "Classes",
    "ConvNet",
    "CrossEntropy",
    "DERpp",
    "Heads",
    "Huber",
    "InputError",
    "Joint",
    "Journal",
    "Learner",
    "LwF",
    "Memory",
    "MixupER",
    "Monitor",
    "Numbers",
    "ParabolicClassifier",
    "ParabolicRegressor",
    "Recent",
    "ReplayLearner",
    "ResNet18",
    "RunSpec",
    "Store",
    "Stream",
    "bridge",
    "load_preset",
    "make_backbone",
    "make_stream",
    "on_simplex",
    "run",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import the estimators on first use: importing scikit-learn takes half as long again as everything else."""
    if name not in ("ParabolicClassifier", "ParabolicRegressor"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from parabolic import estimators

    return getattr(estimators, name)
