"""`parabolic runs`: list and export stored runs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from parabolic.checks import Description, invalid
from parabolic.cli.common import Json, OnlyLearner, OnlyStream, Runs, Where, listing, plain_console, read_where
from parabolic.experiments import FailedRun, Record, Store, write_records
from parabolic.experiments.paper import is_stand_in
from parabolic.experiments.resume import StoppedRun, stopped_runs
from parabolic.experiments.store import FAILED
from parabolic.files import disk_errors
from parabolic.report.comparisons import format_seconds, plural
from parabolic.report.formats import WholeTable
from parabolic.report.runs import (
    Row,
    fault_of,
    print_csv,
    row_of,
    select,
    settings_of,
    stop_of,
    write_csv,
    write_parquet,
)

__all__ = ["describe_stopped", "list_runs"]

WIDE = 200  # columns, if the output is not a terminal


def list_runs(
    learner: OnlyLearner = None,
    stream: OnlyStream = None,
    where: Where = None,
    diverged: Annotated[bool, typer.Option("--diverged", help="Only runs that diverged: where and why.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Only runs whose last attempt failed.")] = False,
    stopped: Annotated[
        bool, typer.Option("--stopped", help="Only runs that were stopped, which the same command resumes.")
    ] = False,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all columns as CSV; - prints them.")] = None,
    parquet: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all columns as Parquet.")] = None,
    records: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Merge the runs into a records file, to keep them.")
    ] = None,
    runs: Runs = Path("runs"),
    as_json: Json = False,
) -> None:
    """List, select and export the stored runs."""
    store, filters = Store(runs), read_where(where, learner, stream)
    piped = csv == Path("-")
    if piped and as_json:
        raise invalid("--csv", "-", "a file together with --json", "only one of them can use standard output")
    flags = [name for name, is_set in (("diverged", diverged), ("failed", failed), ("stopped", stopped)) if is_set]
    if len(flags) > 1:
        raise invalid(f"--{flags[1]}", Description(f"it with --{flags[0]}"), "one of the two", "leave one of them out")
    ended, failures, damaged = store.read()
    resumable = stopped_runs(store, {run.key for run in failures})
    kind = flags[0] if flags else ""
    every: list[Record | FailedRun | StoppedRun] = [*ended, *failures, *resumable]
    selected = select(map(row_of, every), filters)
    finished = [row for row in selected if "diverged" in row]
    by_kind = {
        "": finished,
        "diverged": [row for row in finished if row["diverged"]],
        "failed": [row for row in selected if "failed" in row],
        "stopped": [row for row in selected if "reached" in row],
    }
    rows = by_kind[kind]
    rows.sort(key=lambda row: (row["stream"], row["learner"], row.get("memory", 0), settings_of(row), row["seed"]))
    # Before anything is printed, as it may be refused.
    record_counts = {} if records is None else _merge_into_records(ended, rows, records, kind)
    if piped:
        print_csv(rows, sys.stdout)
    exported = _export(rows, None if piped else csv, parquet)
    unreadable = {str(path): reason for path, reason in damaged.items()}
    if as_json:
        extra = {"records": record_counts} if records is not None else {}
        counts = {name: len(kind_rows) for name, kind_rows in by_kind.items() if name}
        print(json.dumps({"runs": rows, **counts, "unreadable": unreadable, **extra}, indent=1))
        return
    console = plain_console(stderr=piped)
    if not console.is_terminal:
        console.width = WIDE
    if not (piped or exported or records):
        _print_runs(rows, store, console, kind)
    no_folder = "" if runs.is_dir() else ", which is not a folder"
    console.print(f"{plural(len(rows), f'{kind} run'.strip())} in {runs}{no_folder}")
    for path in exported:
        console.print(f"Written: {path}")
    if records is not None:
        console.print(f"Records: {records} ({_describe_record_counts(record_counts)})")
    if not kind and (count := sum(bool(row["diverged"]) for row in rows)):
        console.print(f"{count} of them diverged: {listing('diverged', runs)}")
    if not failed and (count := len(by_kind["failed"])):
        console.print(f"{count} more failed at their last attempt: {listing('failed', runs)}")
    if not stopped and by_kind["stopped"]:
        console.print(describe_stopped(by_kind["stopped"], runs))
    for name, reason in unreadable.items():
        console.print(f"Cannot be read: {name} ({reason})")


def describe_stopped(rows: Sequence[Row], runs: Path) -> str:
    """One line about stopped runs: which one, or how to list them."""
    hint = stop_of(rows[0]) if len(rows) == 1 else listing("stopped", runs)
    return f"{plural(len(rows), 'stopped run')}, which the same command resumes: {hint}"


def _export(rows: list[Row], csv: Path | None, parquet: Path | None) -> list[Path]:
    """Write runs to the files that are given; returns these."""
    files = []
    for name, write, path in (("--csv", write_csv, csv), ("--parquet", write_parquet, parquet)):
        if path is not None:
            with disk_errors(name, path, "free some space or name another file"):
                files.append(write(rows, path))
    return files


def _merge_into_records(ended: Sequence[Record], rows: list[Row], path: Path, kind: str) -> dict[str, int]:
    """Merge runs into a records file, except those that are no results: stand-ins, and runs with held-out examples
    (such as the trials of a search).
    """
    if kind in ("failed", "stopped"):
        got = Description("runs that failed" if kind == "failed" else "runs that were stopped")
        raise invalid("--records", got, "finished runs", f"leave --{kind} out")
    if path.suffix != ".jsonl":
        raise invalid("--records", str(path), "a file called NAME.jsonl", "only such files are read as records")
    chosen = {row["key"] for row in rows}
    runs = [record for record in ended if record.key in chosen]
    quick = [record for record in runs if is_stand_in(record.spec, str(record.environment.get("command", "")))]
    held_out = [record for record in runs if record.spec.get("scenario", {}).get("validation")]
    left_out = {record.key for record in (*quick, *held_out)}
    results = [record for record in runs if record.key not in left_out]
    if not results:
        exclusions = f"{len(quick)} are stand-ins of `paper --quick`, {len(held_out)} have held-out examples"
        got = Description(f"{len(runs)} runs, of which {exclusions}")
        raise invalid("--records", got, "at least one that counts as a result", "train it, or choose others")
    total = write_records(results, path)
    return {"written": len(results), "there": total, "stand-ins": len(quick), "held-out": len(held_out)}


def _describe_record_counts(counts: Mapping[str, int]) -> str:
    words = {"stand-ins": "stand-ins", "held-out": "with held-out examples"}
    left_out = [f"{counts[kind]} {words[kind]} left out" for kind in words if counts[kind]]
    return ", ".join([f"{plural(counts['written'], 'run')} written", f"{counts['there']} in the file", *left_out])


def _print_runs(rows: list[Row], store: Store, console: Console, kind: str) -> None:
    """Print runs: those of one kind, stopped, say, with where and why; all of them as a table."""
    if kind == "stopped":
        for row in rows:
            console.print(f"{row['key']}  {stop_of(row)}")
    elif kind:
        _print_reasons(rows, store, console)
    else:
        _print_table(rows, console)


def _print_table(rows: list[Row], console: Console) -> None:
    metrics = {"metrics.acc": "Acc %", "metrics.aaa": "AAA %"}
    table = WholeTable(box=None, padding=(0, 2, 0, 0))
    for title in ("key", "learner", "stream", "memory", "seed", "settings", *metrics.values(), "s"):
        table.add_column(title, no_wrap=title == "key")  # so that it can be copied
    for row in rows:
        cells = [row["key"][:8], row["learner"], row["stream"], row.get("memory", ""), row["seed"], settings_of(row)]
        figures = ["diverged", "–"] if row["diverged"] else [f"{row.get(name, math.nan):.1f}" for name in metrics]
        seconds = format_seconds(row.get("train_seconds", math.nan))
        table.add_row(*map(str, cells), *figures, seconds)
    console.print(table)


def _print_reasons(rows: list[Row], store: Store, console: Console) -> None:
    """Print runs that failed or diverged, with when and why."""
    for row in rows:
        description = f"{row['learner']} on {row['stream']}, seed {row['seed']} {settings_of(row)}".strip()
        time = row["failed"] if "failed" in row else row.get("environment.finished", "undated")
        reason = fault_of(row["reason"], row["trace"]) if "failed" in row else row["diverged"]
        console.print(f"{row['key']}  {description}, {time}\n    {reason}")
        if row.get("trace"):
            console.print(f"    the traceback is in {store.path(row['key']) / FAILED}")
