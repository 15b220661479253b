"""Tables of the page: what each cell shows, the value to sort by, and the runs behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, product
from pathlib import Path

from parabolic.checks import InputError
from parabolic.experiments import RunSpec, Store, known_presets
from parabolic.experiments.paper import Selection, paper_tables
from parabolic.report.formats import Printed, legend, line_pairs
from parabolic.report.paper import paper_results
from parabolic.report.scenes import FoundScenes, Scene, results_of
from parabolic.report.tables import Results

__all__ = ["TableCell", "TableView", "paper_table_views", "scene_table_view"]


@dataclass(frozen=True)
class TableCell:
    """A cell: our figure, the published one, and the keys of the runs behind ours."""

    ours: Printed
    published: Printed | None
    value: float | None  # to sort by
    runs: Sequence[str]


@dataclass(frozen=True)
class TableView:
    """A table as a page shows it."""

    title: str
    heading: str
    groups: Sequence[tuple[str, int]]  # headings above several columns
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[TableCell], Sequence[str]]]  # name, cells and mean ranks, if shown
    notes: Sequence[str]
    ranked: bool


def scene_table_view(scene: Scene) -> TableView:
    """The methods of a scene side by side."""
    results = results_of(scene)
    run_keys = [
        [run.key for runs in (method.runs, method.diverged) for run in runs.values()] for method in scene.methods
    ]
    keys = [[row_keys] * len(results.columns) for row_keys in run_keys]
    most_seeds = max(len(method.runs) for method in scene.methods)
    notes = ["One seed (n = 1): no deviation."] if most_seeds == 1 else []
    return _table_view(results, keys, notes)


def paper_table_views(finds: FoundScenes, store: Store) -> list[TableView]:
    """The paper's tables for which there are runs of ours: untuned and tuned, and both with `--quick`."""
    views, presets = [], tuple((path, path.stat().st_mtime_ns) for path in known_presets().values() if path.exists())
    streams = {run.spec["stream"] for runs in (finds.runs, finds.diverged) for run in runs.values()}
    for quick, tuned in product((False, True), repeat=2):
        if not streams & Selection(quick=quick).streams:  # to name a thousand runs of which none is there takes seconds
            continue
        try:
            selection, specs = _selected(quick, presets if tuned else None)
        except InputError:  # a damaged preset of the user's should not prevent the page
            continue
        ended = [spec for spec in specs if spec.key in finds.runs or spec.key in finds.diverged]
        records = {spec.key: record for spec in ended if (record := store.ended(spec)) is not None}
        views += [
            _table_view(results, _paper_keys(results, selection), _unit_notes(results))
            for results in (paper_results(selection, records) if records else [])
            if any(cell.ours or cell.diverged for row in results.rows.values() for cell in row)
        ]
    return views


@cache  # there are a thousand runs, and a watched page is generated again and again
def _selected(quick: bool, presets: tuple[tuple[Path, int], ...] | None) -> tuple[Selection, list[RunSpec]]:
    """All tables of the paper, and their runs; tuned if `presets`, the current preset files, are given."""
    selection = Selection(quick=quick, tuned=presets is not None)
    return selection, selection.runs


def _table_view(results: Results, keys: Sequence[Sequence[Sequence[str]]], notes: Sequence[str]) -> TableView:
    rows = []
    for (line, published), cells, row_keys in zip(line_pairs(results), results.rows.values(), keys, strict=True):
        view_cells = [
            TableCell(
                entry,
                published.entries[j] if published and cell.published else None,
                cell.ours.mean if cell.ours else None,
                cell_keys if cell.ours or cell.diverged else (),
            )
            for j, (entry, cell, cell_keys) in enumerate(zip(line.entries, cells, row_keys, strict=True))
        ]
        rows.append((line.name, view_cells, [*line.ranks, *(published.ranks if published else [])]))
    groups = [(group, len(list(same))) for group, same in groupby(column.group for column in results.columns)]
    return TableView(
        results.title,
        results.heading,
        groups if any(group for group, _ in groups) else [],
        [column.title for column in results.columns],
        rows,
        [*notes, *legend(results)],
        results.ranked,
    )


def _unit_notes(results: Results) -> list[str]:
    return ["AAA and Acc are in percent."] if any(column.title == "Acc" for column in results.columns) else []


def _paper_keys(results: Results, selection: Selection) -> list[list[list[str]]]:
    """The keys of the runs behind each cell."""
    if results.name.startswith("bounds."):
        run_keys = [spec.key for spec in selection.specs("bounds")]
        return [[run_keys] * len(results.columns)] * len(results.rows)
    table, keys = paper_tables()[results.name], list[list[list[str]]]()
    for row in results.rows:
        row_keys = []
        for setting in table.settings:
            run_keys = [spec.key for spec in selection.cell(row, setting)]
            row_keys += [run_keys] * len(table.metrics)
        keys.append(row_keys)
    return keys
