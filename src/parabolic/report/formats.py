"""Tables of results as text: for a terminal, in Markdown, in LaTeX and as JSON."""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from parabolic.checks import check_name
from parabolic.report.tables import Cell, Column, Results, decimals
from parabolic.statistics import Summary

__all__ = [
    "FORMATS", "Line", "Printed", "WholeTable", "accuracies", "latex", "legend", "line_pairs", "lines", "markdown",
    "render", "terminal",
]  # fmt: skip

FORMATS = ("terminal", "markdown", "latex", "json")
SIGNS = {"higher": "▲", "lower": "▼", "no difference": "=", "unknown": ""}
LEVEL = "†"
GAP = "–"
NARROW = "% on task 1, 2, …, a row after each"  # what a narrow table's headings have no room for


@dataclass(frozen=True)
class Printed:
    """What is printed for a cell, in any format."""

    mean: str
    spread: str
    mark: str
    signs: str = ""


@dataclass(frozen=True)
class Line:
    """A printed line: our figures, or the published ones of the same row."""

    name: str
    entries: Sequence[Printed]
    ranks: Sequence[str]  # the row's mean rank, if the table is ranked
    published: bool = False


class WholeTable(Table):
    """A table for a terminal of any width: a word that is wider than its column goes on below, and is not cut off."""

    def add_column(self, *header: Any, **options: Any) -> None:
        """Add a column, with the arguments of rich's tables."""
        super().add_column(*header, **{"overflow": "fold", **options})


def render(tables: Sequence[Results], format: str = "terminal", *, intervals: bool = False) -> str:
    """Tables as text in one of `FORMATS`; with `intervals`, 95 % intervals in place of standard deviations.

    >>> from parabolic.report.tables import Cell
    >>> results = Results("two", "Two learners", [Column("Acc")], {"er": [Cell({0: 60.0})], "sgd": [Cell({0: 20.0})]})
    >>> print(render([results], "markdown").strip())
    **Two learners**
    <BLANKLINE>
    |  | Acc |
    | --- | ---: |
    | er | **60.0** |
    | sgd | <ins>20.0</ins> |
    """
    check_name("format", format, FORMATS)
    if format == "json":
        return json.dumps([table.as_dict() for table in tables], indent=1, ensure_ascii=False) + "\n"
    format_table = {"terminal": _plain_text, "markdown": markdown, "latex": latex}[format]
    return "\n".join(format_table(table, intervals=intervals) for table in tables)


def lines(results: Results, *, intervals: bool = False) -> Iterator[Line]:
    """The printed lines of a table."""
    for ours, published in line_pairs(results, intervals=intervals):
        yield ours
        if published is not None:
            yield published


def line_pairs(results: Results, *, intervals: bool = False) -> Iterator[tuple[Line, Line | None]]:
    """For each row, the line of our figures and, if there are any, that of the published ones."""
    our_ranks, published_ranks = (
        [[_format_number(rank, 1)] if results.ranked else [] for rank in results.ranks(whose)]
        for whose in ("ours", "published")
    )
    for i, (name, cells) in enumerate(results.rows.items()):
        ours, published = [], []
        for column, cell, judged in zip(results.columns, cells, results.judged[i], strict=True):
            signs = LEVEL * judged.level + SIGNS[judged.verdict] + _seed_count(cell)
            ours.append(Printed(*_mean_and_spread(column, cell.ours, intervals), judged.mark, signs.strip()))
            published.append(Printed(*_mean_and_spread(column, cell.published, intervals), judged.published_mark))
        has_published = any(cell.published for cell in cells)
        published_line = Line("paper", published, published_ranks[i], published=True) if has_published else None
        yield Line(name, ours, our_ranks[i]), published_line


def legend(results: Results, *, intervals: bool = False) -> list[str]:
    """The sentences that explain a table."""
    cells = [cell for row in results.rows.values() for cell in row]
    seeds = max((cell.wanted for cell in cells), default=0)
    spread = "half-width of the 95 % interval" if intervals else "sample standard deviation"
    sentences = [f"Mean ± {spread} over {seeds} seeds."] if seeds > 1 else []
    if any(map(_seed_count, cells)):
        diverged = any(cell.diverged for cell in cells)
        sentences.append(f"(n): the number of seeds, if some are missing{' or diverged' * diverged}.")
    if results.ranked:
        gaps = any(map(math.isnan, results.ranks()))
        sentences.append(f"rank: the mean rank over the columns{'; ours have none while a figure is missing' * gaps}.")
    if any(cell.shared for cell in cells):
        sentences.append("Runs side by side share their time: their seconds have no deviation and no verdict.")
    if any(judged.level for row in results.judged for judged in row):
        meaning = "not shown to differ from the best of its column at the 5 % level, paired over the seeds"
        sentences.append(f"{LEVEL}: {meaning}.")
    if any(cell.published for cell in cells):
        sentences.append("“paper”: the published figures.")
        counts = ", ".join(f"{SIGNS[verdict]} {n} {verdict}".strip() for verdict, n in results.verdicts().items())
        verdicts = f"Ours against the paper's at the 5 % level, by Welch's test: {counts}."
        sentences.append(f"No verdicts: {results.incomparable}." if results.incomparable else verdicts)
    return [*sentences, *results.notes]


def terminal(results: Results, *, intervals: bool = False) -> Group:
    """The table for a terminal."""
    table = WholeTable(results.heading)
    headings = [f"{column.group}\n{column.title}".strip() for column in results.columns] + ["rank"] * results.ranked
    for heading in headings:
        table.add_column(escape(heading), justify="right")
    styles = {"best": "[bold]{}[/bold]", "second": "[underline]{}[/underline]", "": "{}"}
    for line in lines(results, intervals=intervals):
        cells = [
            f"{styles[entry.mark].format(_with_spread(entry.mean, entry))} {entry.signs}".strip()
            for entry in line.entries
        ]
        table.add_row(escape(line.name), *cells, *line.ranks, style="dim" if line.published else None)
    return Group(Text(results.title, "italic"), table, *map(Text, legend(results, intervals=intervals)))


def markdown(results: Results, *, intervals: bool = False) -> str:
    """The table in Markdown."""
    headings = [f"{column.group} {column.title}".strip() for column in results.columns] + ["rank"] * results.ranked
    styles = {"best": "**{}**", "second": "<ins>{}</ins>", "": "{}"}
    rows = [[results.heading, *headings], ["---", *["---:"] * len(headings)]]
    for line in lines(results, intervals=intervals):
        cells = [
            f"{_with_spread(styles[entry.mark].format(entry.mean), entry)} {entry.signs}".strip()
            for entry in line.entries
        ]
        rows.append([line.name.replace("<", "&lt;"), *cells, *line.ranks])
    table = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    notes, title = legend(results, intervals=intervals), results.title.replace("<", "&lt;")
    return "\n".join([f"**{title}**", "", *table, *(["", " ".join(notes)] if notes else []), ""])


def latex(results: Results, *, intervals: bool = False) -> str:
    """The table in LaTeX, in the paper's style: booktabs, the best in bold, the second best underlined."""
    headings = [column.title for column in results.columns] + ["rank"] * results.ranked
    groups = [column.group for column in results.columns] + [""] * results.ranked
    styles = {"best": r"\textbf{%s}", "second": r"\underline{%s}", "": "%s"}
    body = []
    for line in lines(results, intervals=intervals):
        cells = [_latex(line.name) if not line.published else r"\quad " + _latex(line.name)]
        for entry in line.entries:
            mean = styles[entry.mark] % _latex(entry.mean)
            spread = rf"$_{{\pm {entry.spread}}}$" if entry.spread else ""
            cells.append(" ".join(filter(None, (mean, spread, _latex(entry.signs)))))
        body.append([*cells, *map(_latex, line.ranks)])
    above = [rf"\multicolumn{{{len(list(same))}}}{{c}}{{{_latex(group)}}}" for group, same in itertools.groupby(groups)]
    caption = _latex(" ".join([f"{results.title}.", *legend(results, intervals=intervals)]))
    return "\n".join(
        [
            r"\begin{table*}  % \usepackage{booktabs}",
            r"\centering",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{@{{}}l{'r' * len(headings)}@{{}}}}",
            r"\toprule",
            *([_latex_row(["", *above])] if any(groups) else []),
            _latex_row([_latex(heading) for heading in (results.heading, *headings)]),
            r"\midrule",
            *map(_latex_row, body),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table*}",
            "",
        ]
    )


def _plain_text(results: Results, *, intervals: bool = False) -> str:
    """The table for a terminal that is as wide as needed."""
    console = Console(file=io.StringIO(), width=10_000, emoji=False, color_system=None)  # even with FORCE_COLOR
    with console.capture() as captured:
        console.print(terminal(results, intervals=intervals))
    return captured.get()


def accuracies(matrix: Sequence[Sequence[float]], width: int, title: str) -> tuple[Group, int]:
    """A table of a run's accuracies, a row after each task, and how many tasks it shows.

    If there is little room, it shows whole percents, then no lines, and finally only some of the tasks, with the first
    and the last.

    >>> shown = [[100.0] * (task + 1) for task in range(40)]
    >>> [accuracies(shown[:tasks], 80, "er")[1] for tasks in (5, 10, 19, 40)]
    [5, 10, 19, 19]
    """
    console, tasks = Console(width=10_000), range(len(matrix))
    for digits, roomy in ((1, True), (1, False), (0, False)):
        table = _accuracies(matrix, tasks, digits, roomy=roomy)
        if console.measure(table).maximum <= width:
            return Group(Text(title if roomy else f"{title}: {NARROW}", style="table.title"), table), len(matrix)
    for count in range(len(matrix), 0, -1):
        some_tasks = [round(i * (len(matrix) - 1) / max(count - 1, 1)) for i in range(count)]
        table = _accuracies(matrix, some_tasks, 0, lined=False)
        if console.measure(table).maximum <= width:
            break
    return Group(Text(f"{title}: {NARROW}", style="table.title"), table), count


def _accuracies(
    matrix: Sequence[Sequence[float]],
    tasks: Sequence[int],
    digits: int,
    *,
    roomy: bool = False,
    lined: bool = True,
) -> WholeTable:
    table = WholeTable()
    if not lined:
        table.box, table.padding, table.pad_edge = None, (0, 1, 0, 0), False
    table.add_column("after task" if roomy else "", justify="left" if roomy else "right")
    for task in tasks:
        table.add_column(f"task {task + 1} %" if roomy else str(task + 1), justify="right", no_wrap=True)
    for task in tasks:
        table.add_row(str(task + 1), *[f"{matrix[task][other]:.{digits}f}" for other in tasks if other <= task])
    return table


def _mean_and_spread(column: Column, figure: Summary | None, intervals: bool) -> tuple[str, str]:
    """A mean and its spread; a single value has none."""
    if figure is None:
        return GAP, ""
    spread, places = figure.half_width if intervals else figure.sd, decimals(column, figure)
    if places is None:
        return f"{figure.mean:.1e}", "" if math.isnan(spread) else f"{spread:.1e}"
    spread_places = column.spread_digits if places == column.digits else max(column.spread_digits, places)
    spread_text = _format_number(spread, spread_places)
    return _format_number(figure.mean, places), "" if spread_text == GAP else spread_text


def _seed_count(cell: Cell) -> str:
    """How many seeds a figure is of, unless all are there, and how many diverged."""
    parts = [f"n={len(cell.by_seed)}", *[f"{cell.diverged} diverged"] * bool(cell.diverged)]
    return f" ({', '.join(parts)})" if cell.diverged or len(cell.by_seed) < cell.wanted else ""


def _format_number(value: float, digits: int) -> str:
    return GAP if math.isnan(value) else f"{value:z.{digits}f}"


def _with_spread(mean: str, entry: Printed) -> str:
    return f"{mean} ± {entry.spread}" if entry.spread else mean


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "%": r"\%", "&": r"\&", "_": r"\_", "#": r"\#", "$": r"\$",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "γ": r"$\gamma$", "†": r"$\dagger$",
    "▲": r"$\uparrow$", "▼": r"$\downarrow$", "=": "$=$", "–": "--", "“": "``", "”": "''",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
}  # fmt: skip


def _latex(text: str) -> str:
    parts = ("".join(LATEX.get(letter, letter) for letter in part) for part in text.split("--"))
    return "-{}-".join(parts)  # LaTeX would set the -- of an option as one dash
