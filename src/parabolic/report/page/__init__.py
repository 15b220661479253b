"""The report: one page of HTML that needs nothing else, made of what a store holds."""

from parabolic.report.page.page import TITLE, TRAIN, page_of, write_page

__all__ = ["TITLE", "TRAIN", "page_of", "write_page"]
