"""Results to look at: tables in several formats."""

from parabolic.report.comparison import comparison, in_words
from parabolic.report.formats import FORMATS, render, terminal
from parabolic.report.tables import Cell, Column, Results

__all__ = ["FORMATS", "Cell", "Column", "Results", "comparison", "in_words", "render", "terminal"]
