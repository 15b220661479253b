"""The training engine: the loop, fleets of learners and their CUDA graphs, precision, checkpoints and callbacks."""

from parabolic.engine.callbacks import Callback, ProgressBar, State
from parabolic.engine.checkpoints import Checkpoints, Progress
from parabolic.engine.fleet import Berth, Fleet
from parabolic.engine.journal import Journal
from parabolic.engine.logs import TRACKERS
from parabolic.engine.looks import Look, Tail
from parabolic.engine.loop import DeviceFailed, Diverged, train, train_fleet
from parabolic.engine.monitor import Monitor
from parabolic.engine.precision import PRECISIONS, computing_in, numerics
from parabolic.engine.theory import BoundsMonitor, BoundsRow, ProfileRecorder
from parabolic.engine.trackers import Tracker

__all__ = [
    "PRECISIONS",
    "TRACKERS",
    "Berth",
    "BoundsMonitor",
    "BoundsRow",
    "Callback",
    "Checkpoints",
    "DeviceFailed",
    "Diverged",
    "Fleet",
    "Journal",
    "Look",
    "Monitor",
    "ProfileRecorder",
    "Progress",
    "ProgressBar",
    "State",
    "Tail",
    "Tracker",
    "computing_in",
    "numerics",
    "train",
    "train_fleet",
]
