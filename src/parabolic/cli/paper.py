"""`parabolic paper`: the paper's tables, with our figures beside the published ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from parabolic.checks import check_name, invalid
from parabolic.cli.common import Runs, plain_console, table_console
from parabolic.cli.grids import GridOptions, close_grid, note_package, train_all
from parabolic.cli.groups import with_groups
from parabolic.cli.tables import TableOptions, titles_of
from parabolic.cli.tracking import Track
from parabolic.experiments import BackedStore, Outcome, Record, Records, Store, is_record
from parabolic.experiments.execution import environment, find_device
from parabolic.experiments.grid import check_crew, worker_devices
from parabolic.experiments.paper import (
    METHODS,
    NAMES,
    PLUS,
    SEEDS,
    Estimates,
    Missing,
    Plan,
    Selection,
    Tuning,
    lacking_data,
)
from parabolic.report.comparisons import plural
from parabolic.report.formats import WholeTable
from parabolic.report.paper import paper_results

__all__ = ["paper"]


@with_groups
def paper(
    *,
    table: Annotated[str, typer.Argument(help=f"{', '.join(NAMES)}, or all.")],
    learners: Annotated[
        str | None, typer.Option(help="Only the rows of these learners: names separated by commas.", show_default="all")
    ] = None,
    also: Annotated[
        str | None,
        typer.Option(
            help="Add rows of your own: learners or presets separated by commas, as in mine.py:Mine,mine.toml.",
            metavar="NAMES",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, counted from 0.")] = SEEDS,
    quick: Annotated[
        bool, typer.Option("--quick", help="The same tables on the embedded digits: in minutes, without a download.")
    ] = False,
    tuned: Annotated[
        bool,
        typer.Option("--tuned", help="Use presets: LEARNER-STREAM for each row, and pcl-plus in a row of its own."),
    ] = False,
    show_only: Annotated[bool, typer.Option("--show", help="Train nothing: print the results so far.")] = False,
    records: Annotated[
        bool,
        typer.Option(
            "--records/--no-records", help="Whether the records that come with the package count as finished runs."
        ),
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Train nothing: print how many runs are left and how long they may take.")
    ] = False,
    like: Annotated[
        str | None,
        typer.Option(
            help="With --dry-run: the device to estimate the time for, by the stored results.",
            metavar="DEVICE",
            show_default="the one in use",
        ),
    ] = None,
    tables: TableOptions,
    runs: Runs = Path("runs"),
    grid: GridOptions,
    track: Track = None,
) -> None:
    """Train the runs that are missing from the paper's tables, and print our figures beside the published ones.

    A run is missing if it is neither in the folder of runs nor among the records that come with the package; it is
    trained if its data set is prepared.
    """
    check_name("table", table, (*NAMES, "all"))
    selection = Selection(
        NAMES if table == "all" else (table,), _names(learners), seeds, quick, tuned, _names(also) or ()
    )
    store = BackedStore(runs, Records.ours() if records else Records())
    if like is not None and not dry_run:
        raise invalid("--like", like, "none without --dry-run", "add --dry-run")
    if dry_run and tables.output is not None:
        raise invalid("--output", str(tables.output), "none with --dry-run, which prints a plan", "leave one out")
    if dry_run:
        check_name("--format", tables.format, ("terminal", "json"))  # of a plan
    check_crew(grid.engine, grid.workers, grid.address)
    if dry_run:
        similar, at_once = _similar_runs(store, like, grid)
        _print_plans(selection.plans(store, Estimates(similar)), at_once, tables.format)
        _print_lines(_preset_lines(selection), to_stdout=tables.format != "json")
        return
    tables.check_file()
    stored = {spec.key: run for spec in selection.runs if (run := store.ended(spec)) is not None}
    missing, outcome = Missing.of(selection, stored), Outcome()
    if not show_only:
        trainable, missing = missing.split_by_data(cluster=grid.engine == "ray")
        outcome = train_all(trainable.runs, Store(runs), grid, track)
    ended = stored | outcome.records | outcome.diverged
    results = paper_results(selection, ended)
    if tables.format != "json":
        titles = titles_of([*METHODS, *selection.own])
        results = [
            replace(result, rows={titles.get(row, row): cells for row, cells in result.rows.items()})
            for result in results
        ]
    tables.show(results)
    if tables.in_terminal:
        from_records = sum(is_record(record) for record in ended.values())
        reused = len(stored) - from_records + outcome.reused
        diverged = sum(bool(record.diverged) for record in ended.values())
        summary = f"{plural(len(ended), 'run')}, {reused} of them already there ({runs})"
        print(summary + f", {from_records} records" * bool(from_records) + f", {diverged} diverged" * bool(diverged))
    command = "the same command" + (" without --show" if show_only else "")
    unreadable = [f"Cannot be read: {place} ({reason})" for place, reason in store.records.unreadable().items()]
    _print_lines(
        [*_missing_lines(missing, selection, command), *_preset_lines(selection), *unreadable],
        to_stdout=tables.in_terminal,
    )
    note_package(ended.values(), again=False)
    close_grid(outcome, store)


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name.strip() for name in text.split(","))


def _print_lines(lines: list[str], *, to_stdout: bool) -> None:
    """Print lines below a table, or on standard error, apart from what another program reads."""
    console = plain_console(stderr=not to_stdout)
    for line in lines:
        console.print(line)


def _missing_lines(missing: Missing, selection: Selection, command: str) -> list[str]:
    """Return lines on what is missing in which setting, and the commands that would train it."""
    gaps = missing.gaps(selection)
    if not gaps:
        return []
    data = dict.fromkeys(name for gap in gaps if (name := lacking_data(gap.stream)) is not None)
    steps = [*(f"parabolic data prepare {name}" for name in data), command]
    count = sum(sum(gap.rows.values()) for gap in gaps)
    are, them = ("is", "it") if count == 1 else ("are", "them")
    return [
        f"{plural(count, 'run')} {are} missing. To train {them}: {', then '.join(steps)}.",
        *(f"    {gap}" for gap in gaps),
    ]


def _preset_lines(selection: Selection) -> list[str]:
    """Return lines on the rows that have no preset, and the commands that would tune them."""
    if not selection.tuned:
        return []
    tuning, lines = Tuning.of(selection), list[str]()
    if tuning.missing:
        lines.append("Rows without a preset stay empty. To tune them:")
        lines += [f"    {command}" for command in tuning.commands]
    if None in tuning.plus.values():
        lines.append(f"{PLUS} stays empty without a preset pcl-plus or pcl-plus-STREAM.")
    return lines


def _similar_runs(store: Store, like: str | None, grid: GridOptions) -> tuple[Iterator[Record], int]:
    """Return the runs by which to estimate times, on the same kind of device, and how many would be trained at once."""
    if like is not None:
        return _trained_on(like, store), 1
    if grid.engine != "local":  # the devices of a cluster are not known
        return iter(store), grid.workers or 1
    device_name = environment(find_device(grid.device))["device"]
    similar = (record for record in store if record.environment.get("device") == device_name)
    return similar, 1 if grid.workers == 0 else len(worker_devices(grid.device, grid.workers))


def _trained_on(device: str, store: Store) -> Iterator[Record]:
    """The runs that were trained on the device of this name."""
    runs = [(str(record.environment.get("device")), record) for record in store]
    if not runs:
        raise invalid("--like", device, "a device of finished runs, and there are none", "train some, or use --records")
    check_name("--like", device, {name for name, _ in runs})
    return (record for name, record in runs if name == device)


def _print_plans(plans: dict[str, Plan], at_once: int, format: str) -> None:
    if format == "json":
        payload = {name: {**asdict(plan), "seconds": plan.seconds / at_once} for name, plan in plans.items()}
        print(json.dumps(payload, indent=1))
        return
    table = WholeTable(title="Runs to train", title_justify="left")
    for column in ("table", "runs", "done", "to train", f"time, {at_once} at once"):
        table.add_column(column, justify="left" if column == "table" else "right")
    for name, plan in plans.items():
        if name == "all":
            table.add_section()
        table.add_row(name, str(plan.runs), str(plan.done), str(plan.runs - plan.done), _format_time(plan, at_once))
    table_console().print(table)


def _format_time(plan: Plan, at_once: int) -> str:
    """Format the time that a plan may take, as far as it is known."""
    left, seconds = plan.runs - plan.done, plan.seconds / at_once
    if plan.unknown == left > 0:
        return "unknown"
    if seconds < 100:
        text = f"{seconds:.0f} s"
    elif seconds < 6000:
        text = f"{seconds / 60:.0f} min"
    else:
        text = f"{seconds / 3600:.1f} h"
    return f"{text}, and {plural(plan.unknown, 'run')} unknown" if plan.unknown else text
