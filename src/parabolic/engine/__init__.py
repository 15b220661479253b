"""How it runs: the loop, evaluation, and what watches it."""

from parabolic.engine.callbacks import Callback, ProgressBar, State
from parabolic.engine.loop import Diverged, accuracy, train
from parabolic.engine.monitor import BoundsMonitor, BoundsRow, ProfileRecorder

__all__ = [
    "BoundsMonitor",
    "BoundsRow",
    "Callback",
    "Diverged",
    "ProfileRecorder",
    "ProgressBar",
    "State",
    "accuracy",
    "train",
]
