"""The paper's tables: the runs behind them and the published figures."""

from parabolic.experiments.paper.bounds import BoundTable, Rows, bound_tables, bounds_in, is_bound
from parabolic.experiments.paper.gaps import Gap, Missing, lacking_data
from parabolic.experiments.paper.plan import Estimates, Plan
from parabolic.experiments.paper.quick import is_stand_in
from parabolic.experiments.paper.selection import NAMES, Selection
from parabolic.experiments.paper.tables import METHODS, PLUS, SEEDS, Figure, Method, PaperTable, Setting, paper_tables
from parabolic.experiments.paper.tuning import Effort, Tuning

__all__ = [
    "METHODS",
    "NAMES",
    "PLUS",
    "SEEDS",
    "BoundTable",
    "Effort",
    "Estimates",
    "Figure",
    "Gap",
    "Method",
    "Missing",
    "PaperTable",
    "Plan",
    "Rows",
    "Selection",
    "Setting",
    "Tuning",
    "bound_tables",
    "bounds_in",
    "is_bound",
    "is_stand_in",
    "lacking_data",
    "paper_tables",
]
