"""How it runs: the loop, evaluation, and what watches it."""

from parabolic.engine.callbacks import Callback, ProgressBar, State
from parabolic.engine.loop import Diverged, accuracy, train

__all__ = ["Callback", "Diverged", "ProgressBar", "State", "accuracy", "train"]
