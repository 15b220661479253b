"""The paper's tables as runs, with what was published beside them."""

from parabolic.experiments.paper.bounds import BoundTable, Rows, bound_specs, bound_tables, find_bounds, measure_bounds
from parabolic.experiments.paper.plan import Estimates, Plan
from parabolic.experiments.paper.selection import NAMES, Selection
from parabolic.experiments.paper.tables import METHODS, SEEDS, Figure, Method, PaperTable, Setting, paper_tables

__all__ = [
    "METHODS",
    "NAMES",
    "SEEDS",
    "BoundTable",
    "Estimates",
    "Figure",
    "Method",
    "PaperTable",
    "Plan",
    "Rows",
    "Selection",
    "Setting",
    "bound_specs",
    "bound_tables",
    "find_bounds",
    "measure_bounds",
    "paper_tables",
]
