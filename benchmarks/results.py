"""Write the tables of docs/results.md from the stored results into the page, between its markers.

    python benchmarks/results.py            # update them, after runs were added to results/records
    python benchmarks/results.py --print    # print them and leave the page unchanged
    python benchmarks/results.py --pair PCL ER    # the difference of two rows in each column, over the same seeds
    python benchmarks/results.py --pair PCL ER --tuned
    python benchmarks/results.py --figure docs/curves.png    # the README's figure: accuracy along Seq-CIFAR-100

In the page, a table is between <!-- NAME --> and <!-- end -->. NAME is one of the paper's tables, with -tuned for tuned
values; it shows the methods that have runs, and the columns in which at least two have. <!-- NAME STREAM --> shows only
the columns whose stream begins with STREAM. There are four more: `even` compares the paper's figures for uneven classes
with our runs on uneven and even ones, `leads TABLE` shows tuned methods on Seq-TinyImageNet and how far PCL+ is ahead,
`bounds forgetting` and `bounds generalisation` show losses and bounds, and `seconds` shows run times.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from parabolic.experiments import Record
from parabolic.experiments.paper import PLUS, SEEDS, PaperTable, Selection, Setting, paper_tables
from parabolic.experiments.records import Records
from parabolic.report.comparisons import finished
from parabolic.report.curves import draw_curves
from parabolic.report.paper import paper_results
from parabolic.report.scenes import Method, Scene
from parabolic.statistics import Difference, Summary, paired, welch

ROOT = Path(__file__).parents[1]
PAGE, RECORDS = ROOT / "docs" / "results.md", ROOT / "results" / "records"
NAMES = {"aaa": "AAA", "acc": "Acc"}
DRAWN = [(PLUS, True), ("CLSER", True), ("ER", True), ("PCL", True), ("PCL", False), ("SGD", False)]  # tuned or not
MARKED = re.compile(r"(<!-- (?!end)([\w-]+(?: [\w-]+)?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def written(page: str, records: Records) -> str:
    """Return the page with its tables made from the records."""
    return MARKED.sub(lambda found: found[1] + made(found[2], records) + found[4], page)


def made(name: str, records: Records) -> str:
    """Return one of the page's tables."""
    if name == "seconds":
        return "".join(lines(["records", "runs", "seconds of one H200"], seconds()))
    if name == "even":
        cells = ("paper, uneven", "uneven", "p", "even", "p")
        head = [f"{metric} {cell}" for metric in NAMES.values() for cell in cells]
        return "".join(lines(["", *head], even(records)))
    name, _, stream = name.partition(" ")
    if name == "leads":
        head = [*NAMES.values(), "s", *(f"{PLUS} leads, {metric}" for metric in NAMES.values())]
        return "".join(lines(["tuned", *head], leads(paper_tables()[stream], records)))
    if name == "bounds":
        return "".join(lines(["loss after task", *"12345"], bounds(stream, records)))
    tuned = name.endswith("-tuned")
    return "".join(of_paper(paper_tables()[name.removesuffix("-tuned")], records, stream=stream, tuned=tuned))


def of_paper(table: PaperTable, records: Records, *, stream: str, tuned: bool) -> Iterator[str]:
    """Yield a table of the paper: each method that has runs, in the settings in which at least two methods have."""
    rows = [*table.rows, *([] if tuned else table.also), *[PLUS] * table.plus]
    ended = {
        (row, place): [run for spec in setting.specs(row, tuned=tuned or row == PLUS) if (run := records.ended(spec))]
        for row in rows
        for place, setting in enumerate(table.settings)
    }
    runs = {where: finished(each) for where, each in ended.items()}
    places = [
        place
        for place, setting in enumerate(table.settings)
        if setting.stream.startswith(stream) and sum(bool(runs[row, place]) for row in rows) > 1
    ]
    rows = [row for row in rows if any(runs[row, place] for place in places)]
    head, cells = [], {row: list[str]() for row in rows}
    for place in places:
        title = table.settings[place].title.replace("CIFAR", "CIFAR-") + " "
        for number, metric in enumerate(table.metrics):
            head += [title * (number == 0) + NAMES[metric], *([] if tuned else ["paper"])]
            ours = {
                row: Summary.of([run.metrics[metric] for run in runs[row, place]]) for row in rows if runs[row, place]
            }
            best = max(summary.mean for summary in ours.values())
            for row in rows:
                diverged = len(ended[row, place]) - len(runs[row, place])
                figure = as_cell(ours[row], best=ours[row].mean == best, diverged=diverged) if row in ours else ""
                cells[row].append(figure)
                if not tuned:
                    figures = table.rows.get(row)
                    cells[row].append(as_cell(figures[len(table.metrics) * place + number].value) if figures else "")
    for row in rows:
        last = next(runs[row, place] for place in reversed(places) if runs[row, place])
        cells[row].append(f"{fmean(sum(run.train_seconds) for run in last):.1f}")
    yield from lines(["tuned" if tuned else "", *head, "s"], ([row, *cells[row]] for row in rows))


def even(records: Records) -> Iterator[list[str]]:
    """Compare the paper's figures for uneven classes with our runs on uneven and on even ones, by Welch's test."""
    main, imbalance = paper_tables()["main"], paper_tables()["imbalance"]
    for row in ("ER", "PCL", "VRMCL"):
        for place, setting in enumerate(imbalance.settings):
            cells = [f"{row}, {setting.title.split()[-1]}"]
            for number, metric in enumerate(NAMES):
                paper = imbalance.rows[row][len(NAMES) * place + number].value
                cells.append(as_cell(paper))
                for specs in (setting.specs(row), main.settings[0].specs(row)):
                    ours = Summary.of([run.metrics[metric] for spec in specs if (run := records.find(spec))])
                    cells += [as_cell(ours), f"{welch(ours, paper).p:.3f}"]
            yield cells


def leads(table: PaperTable, records: Records) -> Iterator[list[str]]:
    """Show PCL+ on Seq-TinyImageNet beside the other tuned methods, and its leads over them, paired over seeds."""
    (setting,) = (each for each in table.settings if each.stream == "seq-tinyimagenet")
    for row in [*table.rows, PLUS]:
        if runs := [run for spec in setting.specs(row, tuned=True) if (run := records.find(spec))]:
            figures = [as_cell(Summary.of([run.metrics[metric] for run in runs])) for metric in NAMES]
            common = both(PLUS, row, setting, records, tuned=True) if row != PLUS else []
            gaps = [ahead(metric, common) for metric in NAMES if len(common) > 1]
            cells = [f"{gap.mean:.1f} ({chance(gap.p)})" for gap in gaps] or [""] * len(NAMES)
            yield [row, *figures, f"{fmean(sum(run.train_seconds) for run in runs):.1f}", *cells]


def chance(p: float) -> str:
    """Return a p-value in words."""
    return "p < 0.0001" if p < 5e-5 else f"p = {p:.4f}"


def bounds(statement: str, records: Records) -> Iterator[list[str]]:
    """Show PCL's losses after each task and the bounds on them, each with the paper's figures below it."""
    selection = Selection(("bounds",))
    runs = {spec.key: run for spec in selection.runs if (run := records.find(spec))}
    (found,) = (each for each in paper_results(selection, runs) if each.name == f"bounds.{statement}")
    for row, cells in found.rows.items():
        yield [row, *(f"{cell.ours.mean:.2f} ± {cell.ours.sd:.2f}" for cell in cells if cell.ours)]
        if published := [cell.published.mean for cell in cells if cell.published]:
            yield ["paper", *(f"{loss:.1e}" if 0 < loss < 0.01 else f"{loss:.2f}" for loss in published)]


def pair(one: str, other: str, records: Records, *, tuned: bool) -> Iterator[list[str]]:
    """Yield the difference of two rows in each setting where both have runs, and p by the paired t-test."""
    for name, table in paper_tables().items():
        for setting in table.settings if {one, other} <= {*table.rows, *table.also, PLUS} else []:
            found = both(one, other, setting, records, tuned=tuned)
            for metric in table.metrics if len(found) > 1 and {*table.metrics} <= {*NAMES} else []:
                gap = ahead(metric, found)
                yield [name, setting.title, NAMES[metric], f"{gap.mean:+.2f}", f"{gap.p:.4f}", str(len(found))]


def both(one: str, other: str, setting: Setting, records: Records, *, tuned: bool) -> list[tuple[Record, Record]]:
    """Return the runs of two rows with the same seed, where both have one; a row without a preset has none."""
    specs = [setting.specs(row, tuned=tuned or row == PLUS) for row in (one, other)]
    found = zip(*[map(records.find, each) for each in specs], strict=False)
    return [(ours, theirs) for ours, theirs in found if ours and theirs]


def ahead(metric: str, found: list[tuple[Record, Record]]) -> Difference:
    """Return how far the first of each two runs is ahead of the second."""
    return paired(*zip(*[[run.metrics[metric] for run in two] for two in found], strict=True))


def along(records: Records) -> Scene:
    """Return some rows of the paper's main table on Seq-CIFAR-100, to draw."""
    setting, methods = paper_tables()["main"].settings[1], []
    for row, tuned in DRAWN:
        runs = [run for spec in setting.specs(row, tuned=tuned) if (run := records.find(spec))]
        how = "" if row == PLUS else ", tuned, averaged weights" if tuned else ", published settings"
        methods.append(Method(row + how, {run.spec["seed"]: run for run in runs}))
    return Scene("Seq-CIFAR-100, one pass, memory 1000, all classes so far competing", setting.stream, methods)


def as_cell(summary: Summary, *, best: bool = False, diverged: int = 0) -> str:
    mean, spread = f"{summary.mean:.1f}", f" ± {summary.sd:.1f}" * (summary.n > 1)
    counts = f"n = {summary.n}" + f", {diverged} diverged" * bool(diverged)
    return (f"**{mean}**" if best else mean) + spread + f" ({counts})" * (summary.n < SEEDS)


def seconds() -> Iterator[list[str]]:
    """Yield how long the runs of each file took; a fleet's seconds are divided among its runs."""
    for path in sorted(RECORDS.glob("*.jsonl")):
        runs = Records(path).every()  # those that diverged took time too
        total = sum(sum(run.train_seconds) + sum(run.test_seconds) for run in runs)
        yield [path.stem, str(len(runs)), f"{total:,.0f}"]


def lines(head: list[str], rows: Iterator[list[str]]) -> Iterator[str]:
    for cells in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(cells) + " |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--print", action="store_true", help="print the tables and leave the page unchanged")
    parser.add_argument("--pair", nargs=2, metavar="ROW", help="print the difference of two rows")
    parser.add_argument("--tuned", action="store_true", help="with --pair: use tuned values")
    parser.add_argument("--figure", type=Path, help="draw accuracy along Seq-CIFAR-100 to this file")
    asked = parser.parse_args()
    if asked.figure:
        draw_curves(along(Records(RECORDS)), asked.figure)
        return
    if asked.pair:
        known = {PLUS, *(row for table in paper_tables().values() for row in (*table.rows, *table.also))}
        if unknown := {*asked.pair} - known:
            parser.error(f"--pair: got {', '.join(unknown)}, expected two of {', '.join(sorted(known))}")
        rows = pair(*asked.pair, Records(RECORDS), tuned=asked.tuned)
        print(*lines(["table", "setting", "", "difference", "p", "seeds"], rows), sep="", end="")
        return
    before = PAGE.read_text(encoding="utf-8")
    after = written(before, Records(RECORDS))
    if asked.print:
        print("\n".join(f"{name}\n{body}" for _, name, body, _ in MARKED.findall(after)))
    elif after != before:
        PAGE.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
