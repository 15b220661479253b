"""Results to look at: tables in the terminal."""

from parabolic.report.tables import comparison, in_words, mean_sd

__all__ = ["comparison", "in_words", "mean_sd"]
