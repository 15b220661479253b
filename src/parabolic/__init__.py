"""Learn from a stream without forgetting: parabolic continual learning and other methods, on PyTorch."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parabolic import (  # noqa: F401  # as `__getattr__` imports them
        backbones,
        checks,
        engine,
        estimators,
        experiments,
        learners,
        memory,
        metrics,
        options,
        pde,
        profile,
        statistics,
        streams,
    )
    from parabolic.backbones import MLP, ConvNet, ResNet18, make_backbone
    from parabolic.checks import InputError
    from parabolic.engine import Callback, Diverged, Journal, Monitor, train
    from parabolic.estimators import ParabolicClassifier, ParabolicRegressor
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
    "Diverged",
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


_PARTS = {  # the same names by module, for `__getattr__`
    "backbones": ("MLP", "ConvNet", "ResNet18", "make_backbone"),
    "checks": ("InputError",),
    "engine": ("Callback", "Diverged", "Journal", "Monitor", "train"),
    "estimators": ("ParabolicClassifier", "ParabolicRegressor"),
    "experiments": ("RunSpec", "Store", "load_preset", "run"),
    "learners": (
        "AGEM", "CBRS", "CLSER", "DER", "ER", "EWC", "GEM", "MSE", "OBC", "PCL", "SGD", "SI", "VRMCL", "Classes",
        "CrossEntropy", "DERpp", "Heads", "Huber", "Joint", "Learner", "LwF", "MixupER", "Numbers", "ReplayLearner",
    ),
    "memory": ("Memory", "Recent"),
    "pde": ("bridge", "on_simplex"),
    "streams": ("Stream", "make_stream"),
}  # fmt: skip
_HOMES = {name: part for part, names in _PARTS.items() for name in names}


if not TYPE_CHECKING:  # to a type checker every name would exist, also a misspelt one

    def __getattr__(name: str) -> Any:
        """Import a part of the library on first use: `parabolic --version` needs no torch, few need scikit-learn."""
        if name in _HOMES:
            return getattr(import_module(f"parabolic.{_HOMES[name]}"), name)
        if not name.startswith("_") and find_spec(f"parabolic.{name}"):
            return import_module(f"parabolic.{name}")
        # With these arguments, Python suggests the nearest name.
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=import_module(__name__))


def __dir__() -> list[str]:
    dunders = {name for name in globals() if name.startswith("__")}
    return sorted({*dunders, *__all__, *_PARTS})
