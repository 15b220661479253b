"""Many runs: what determines one, how it is run, and where it is kept."""

from parabolic.experiments.run import build, execute, run
from parabolic.experiments.spec import RunSpec
from parabolic.experiments.store import Record, Store

__all__ = ["Record", "RunSpec", "Store", "build", "execute", "run"]
