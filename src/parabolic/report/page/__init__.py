"""The report: one self-contained HTML page, made from the contents of a store."""

from parabolic.report.page.page import TITLE, TRAIN, page_of, write_page

__all__ = ["TITLE", "TRAIN", "page_of", "write_page"]
