"""Experiments: specs of runs, their execution one by one or in grids, stored results, presets and tuning."""

from parabolic.experiments.bar import GridBar
from parabolic.experiments.execution import build, execute, execute_fleet, run
from parabolic.experiments.grid import Event, Failure, Outcome, run_grid
from parabolic.experiments.presets import Preset, known_presets, load_preset, save_preset
from parabolic.experiments.records import BackedStore, Records, is_record, write_records
from parabolic.experiments.search import Search, Trial
from parabolic.experiments.spec import RunSpec
from parabolic.experiments.store import FailedRun, Record, Store
from parabolic.experiments.tracking import track_record
from parabolic.experiments.tuning import Tuned, tune

__all__ = [
    "BackedStore",
    "Event",
    "FailedRun",
    "Failure",
    "GridBar",
    "Outcome",
    "Preset",
    "Record",
    "Records",
    "RunSpec",
    "Search",
    "Store",
    "Trial",
    "Tuned",
    "build",
    "execute",
    "execute_fleet",
    "is_record",
    "known_presets",
    "load_preset",
    "run",
    "run_grid",
    "save_preset",
    "track_record",
    "tune",
    "write_records",
]
