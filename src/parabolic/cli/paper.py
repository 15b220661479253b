"""`parabolic paper`: the paper's tables, ours beside the published figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from parabolic.checks import check_name
from parabolic.cli.common import Device, Runs
from parabolic.cli.grids import Address, Engine, Fleet, Gpus, Workers, close_grid, train_all
from parabolic.cli.tables import Format, Intervals, Output, show
from parabolic.cli.tracking import Track
from parabolic.engine import ProgressBar
from parabolic.experiments import Record, Store
from parabolic.experiments.grid import worker_devices
from parabolic.experiments.paper import NAMES, SEEDS, Estimates, Plan, Rows, Selection, measure_bounds
from parabolic.experiments.run import environment, find_device
from parabolic.report import FORMATS
from parabolic.report.paper import paper_results

__all__ = ["paper"]


def paper(
    table: Annotated[str, typer.Argument(help=f"{', '.join(NAMES)}, or all.")],
    learners: Annotated[
        str | None, typer.Option(help="Only the rows of these: names, with commas between them.", show_default="all")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0.")] = SEEDS,
    quick: Annotated[
        bool, typer.Option("--quick", help="The same tables on the embedded digits: in minutes, nothing to download.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Train nothing: tell how many runs are left, and for how long.")
    ] = False,
    format: Format = "terminal",
    intervals: Intervals = False,
    output: Output = None,
    runs: Runs = Path("runs"),
    device: Device = "auto",
    engine: Engine = "local",
    workers: Workers = None,
    address: Address = None,
    fleet: Fleet = 5,
    gpus: Gpus = 1.0,
    track: Track = None,
) -> None:
    """Run what is missing of the paper's tables, and print ours beside what was published."""
    check_name("table", table, (*NAMES, "all"))
    check_name("--format", format, FORMATS)
    names = None if learners is None else tuple(name.strip() for name in learners.split(","))
    selection, store = Selection(NAMES if table == "all" else (table,), names, seeds, quick), Store(runs)
    if dry_run:
        records, at_once = _like_here(store, device, workers) if engine == "local" else (iter(store), workers or 1)
        _tell_plans(selection.plans(store, Estimates(records)), at_once, format)
        return
    outcome = train_all(
        selection.runs, store, track,
        engine=engine, workers=workers, address=address, fleet=fleet, gpus=gpus, device=device,
    )  # fmt: skip
    measured: dict[int, Rows] = {}
    if selection.bounds and not outcome.interrupted:
        with ProgressBar() as bar:
            bar.title = "bounds"
            measured, failures = measure_bounds(selection.bounds, store, device=device, callbacks=[bar])
        outcome.failures.extend(failures)
    results = paper_results(selection, outcome.records, measured)
    show(results, format, intervals=intervals, output=output)
    if format == "terminal" and output is None:
        print(f"{len(outcome.records)} runs, {outcome.reused} of them already there ({runs})")
    close_grid(outcome, store)


def _like_here(store: Store, device: str, workers: int | None) -> tuple[Iterator[Record], int]:
    """The runs that were trained on such a device, and how many would be trained at once."""
    here = environment(find_device(device))["device"]
    alike = (record for record in store if record.environment.get("device") == here)
    return alike, 1 if workers == 0 else len(worker_devices(device, workers))


def _tell_plans(plans: dict[str, Plan], at_once: int, format: str) -> None:
    if format == "json":
        told = {name: {**asdict(each), "seconds": each.seconds / at_once} for name, each in plans.items()}
        print(json.dumps(told, indent=1))
        return
    table = Table(title="What there is to do", title_justify="left")
    for column in ("table", "runs", "done", "to train", f"time, {at_once} at once"):
        table.add_column(column, justify="left" if column == "table" else "right")
    for name, each in plans.items():
        if name == "all":
            table.add_section()
        table.add_row(name, str(each.runs), str(each.done), str(each.runs - each.done), _time(each, at_once))
    Console().print(table)


def _time(plan: Plan, at_once: int) -> str:
    """The time that a plan may take, as far as it can be told."""
    left, seconds = plan.runs - plan.done, plan.seconds / at_once
    if plan.unknown == left > 0:
        return "unknown"
    told = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
    told = told if seconds < 6000 else f"{seconds / 3600:.1f} h"
    return f"{told}, and {plan.unknown} runs unknown" if plan.unknown else told
