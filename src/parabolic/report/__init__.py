"""Presentation of results: tables in several formats, pictures, and a page that has them all."""

from parabolic.report.comparisons import comparison, in_words
from parabolic.report.formats import FORMATS, render, terminal
from parabolic.report.page import write_page
from parabolic.report.tables import Cell, Column, Results

__all__ = ["FORMATS", "Cell", "Column", "Results", "comparison", "in_words", "render", "terminal", "write_page"]
