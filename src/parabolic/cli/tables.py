"""Options of the commands that print tables of results, and how the tables are printed or written."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from parabolic.files import disk_errors, write_text, written_whole
from parabolic.report import FORMATS, Results, render, terminal

__all__ = ["Format", "Intervals", "Output", "check_output", "show"]

Format = Annotated[str, typer.Option(help=f"Format of the tables: {', '.join(FORMATS)}.")]
Intervals = Annotated[bool, typer.Option("--intervals", help="Show 95 % intervals instead of standard deviations.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the tables to this file instead.")]


class _Written(Exception):
    """Raised to discard a file that could be written."""


def check_output(path: Path, remedy: str = "name another file", name: str = "--output") -> None:
    """Refuse a file that cannot be written, before anything is trained for it. Nothing on disk changes."""
    made = [folder for folder in path.parents if not folder.exists()]  # the innermost first
    try:
        with suppress(_Written), disk_errors(name, path.parent, remedy), written_whole(path) as aside:
            aside.write_bytes(b"-")
            raise _Written
    finally:
        for folder in made:
            with suppress(OSError):  # another process may have put something there
                folder.rmdir()


def show(tables: Sequence[Results], format: str, *, intervals: bool, output: Path | None) -> None:
    """Print tables, or write them to a file."""
    console = Console()
    if output is not None:
        with disk_errors("--output", output.parent, "name another file"):
            write_text(output, render(tables, format, intervals=intervals))
        print(f"Written: {output}")
    elif format == "terminal" and console.is_terminal:
        console.print(*(terminal(each, intervals=intervals) for each in tables), sep="\n")
    else:
        print(render(tables, format, intervals=intervals), end="")
