"""Options of the commands that print tables of results, and how the tables are printed or written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from parabolic.checks import check_name
from parabolic.experiments import Record
from parabolic.files import atomic_write, disk_errors, write_text
from parabolic.learners import find_learner, known_learners
from parabolic.report import FORMATS, Results, render, terminal
from parabolic.report.comparisons import plural

__all__ = ["TableOptions", "check_output", "describe_training", "titles_of"]


@dataclass(frozen=True)
class TableOptions:
    """The options of commands that print tables of results."""

    format: Annotated[str, typer.Option(help=f"Format of the tables: {', '.join(FORMATS)}.")] = "terminal"
    intervals: Annotated[
        bool, typer.Option("--intervals", help="Show 95 % intervals instead of standard deviations.")
    ] = False
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the tables to this file instead.")] = None

    def __post_init__(self) -> None:
        check_name("--format", self.format, FORMATS)

    @property
    def in_terminal(self) -> bool:
        """Whether the tables are printed for a reader, so that more may be printed below them."""
        return self.format == "terminal" and self.output is None

    def check_file(self) -> None:
        """Refuse a file that cannot be written, before anything is trained for it."""
        if self.output is not None:
            check_output(self.output)

    def show(self, tables: Sequence[Results]) -> None:
        """Print tables, or write them to the file."""
        console = Console(emoji=False)
        if self.output is not None:
            with disk_errors("--output", self.output.parent, "name another file"):
                write_text(self.output, render(tables, self.format, intervals=self.intervals))
            print(f"Written: {self.output}")
        elif self.format == "terminal" and console.is_terminal:
            console.print(*(terminal(table, intervals=self.intervals) for table in tables), sep="\n")
        else:
            print(render(tables, self.format, intervals=self.intervals), end="")


class _Discard(Exception):
    """Raised to discard a file that could be written."""


def check_output(path: Path, remedy: str = "name another file", name: str = "--output") -> None:
    """Refuse a file that cannot be written, before anything is trained for it. Nothing on disk changes."""
    new_folders = [folder for folder in path.parents if not folder.exists()]  # the innermost first
    try:
        with suppress(_Discard), disk_errors(name, path.parent, remedy), atomic_write(path) as temporary:
            temporary.write_bytes(b"-")
            raise _Discard
    finally:
        for folder in new_folders:
            with suppress(OSError):  # another process may have put something there
                folder.rmdir()


def titles_of(rows: Iterable[str]) -> dict[str, str]:
    """Return the title of each row: for a class from a file the name that it declares, unless another row has it."""
    rows = list(rows)
    declared = {row: vars(find_learner(row)).get("name", "") for row in rows if ":" in row}  # only classes have a colon
    counts = Counter([*declared.values(), *(row for row in rows if row not in declared), *known_learners()])
    return {row: name if (name := declared.get(row)) and counts[name] == 1 else row for row in rows}


def describe_training(records: Sequence[Record]) -> str:
    """Describe the network, batches and steps of runs that differ only in their seeds."""
    spec, steps = records[0].spec, sorted({record.steps for record in records})
    epochs = f", {plural(spec['epochs'], 'epoch')}" if spec["epochs"] != 1 else ""
    step_counts = " to ".join(f"{count:,}" for count in dict.fromkeys((steps[0], steps[-1])))
    return f"{spec['backbone']}, batches of {spec['batch']}{epochs}: {step_counts} step{'s' * (step_counts != '1')}"
