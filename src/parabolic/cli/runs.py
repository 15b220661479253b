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
from rich.table import Table
from rich.text import Text

from parabolic.checks import Description, invalid
from parabolic.cli.common import Json, OnlyLearner, OnlyStream, Runs, Where, read_where
from parabolic.experiments import FailedRun, Record, Store, write_records
from parabolic.experiments.paper import is_stand_in
from parabolic.experiments.resume import StoppedRun, stopped_runs
from parabolic.experiments.store import FAILED
from parabolic.files import disk_errors
from parabolic.report.comparisons import briefly, many
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

__all__ = ["list_runs", "told_of_stopped"]

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
    store, wanted = Store(runs), read_where(where, learner, stream)
    piped = csv == Path("-")
    if piped and as_json:
        raise invalid("--csv", "-", "a file together with --json", "only one of them can use standard output")
    asked = [name for name, chosen in (("diverged", diverged), ("failed", failed), ("stopped", stopped)) if chosen]
    if len(asked) > 1:
        raise invalid(f"--{asked[1]}", Description(f"it with --{asked[0]}"), "one of the two", "leave one of them out")
    ended, lost, damaged = store.read()
    halted = stopped_runs(store, {each.key for each in lost})
    kind = asked[0] if asked else ""
    kinds: dict[str, Sequence[Record | FailedRun | StoppedRun]] = {
        "": ended,
        "diverged": [each for each in ended if each.diverged],
        "failed": lost,
        "stopped": halted,
    }
    rows = select(map(row_of, kinds[kind]), wanted)
    rows.sort(key=lambda row: (row["stream"], row["learner"], row.get("memory", 0), settings_of(row), row["seed"]))
    written = {} if records is None else _keep(ended, rows, records, kind)  # first, as it may be refused
    if piped:
        print_csv(rows, sys.stdout)
    exported = _export(rows, None if piped else csv, parquet)
    unreadable = {str(path): reason for path, reason in damaged.items()}
    if as_json:
        more = {"records": written} if records is not None else {}
        counts = {name: len(each) for name, each in kinds.items() if name}
        print(json.dumps({"runs": rows, **counts, "unreadable": unreadable, **more}, indent=1))
        return
    console = Console(highlight=False, soft_wrap=True, stderr=piped)
    if not console.is_terminal:
        console.width = WIDE
    if not (piped or exported or records):
        _show(rows, store, console, kind)
    no_folder = "" if runs.is_dir() else ", which is not a folder"
    console.print(Text(f"{many(len(rows), f'{kind} run'.strip())} in {runs}{no_folder}"))
    for path in exported:
        console.print(Text(f"Written: {path}"))
    if records is not None:
        console.print(Text(f"Records: {records} ({_told_of_records(written)})"))
    if not kind and (count := sum(bool(row["diverged"]) for row in rows)):
        console.print(f"{count} of them diverged: parabolic runs --diverged")
    if lost and not failed:
        console.print(f"{len(lost)} more failed at their last attempt: parabolic runs --failed")
    if halted and not stopped:
        console.print(Text(told_of_stopped(halted)))
    for name, reason in unreadable.items():
        console.print(Text(f"Cannot be read: {name} ({reason})"))


def told_of_stopped(runs: Sequence[StoppedRun]) -> str:
    """One line about stopped runs: which one, or how to list them."""
    which = stop_of(row_of(runs[0])) if len(runs) == 1 else "parabolic runs --stopped"
    return f"{many(len(runs), 'stopped run')}, which the same command resumes: {which}"


def _export(rows: list[Row], csv: Path | None, parquet: Path | None) -> list[Path]:
    """Write runs to the files that are given; returns these."""
    files = []
    for name, write, path in (("--csv", write_csv, csv), ("--parquet", write_parquet, parquet)):
        if path is not None:
            with disk_errors(name, path, "free some space or name another file"):
                files.append(write(rows, path))
    return files


def _keep(ended: Sequence[Record], rows: list[Row], path: Path, kind: str) -> dict[str, int]:
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
    kept = [record for record in runs if record.key not in left_out]
    if not kept:
        told = f"{len(quick)} are stand-ins of `paper --quick`, {len(held_out)} have held-out examples"
        got = Description(f"{len(runs)} runs, of which {told}")
        raise invalid("--records", got, "at least one that counts as a result", "train it, or choose others")
    there = write_records(kept, path)
    return {"written": len(kept), "there": there, "stand-ins": len(quick), "held-out": len(held_out)}


def _told_of_records(counts: Mapping[str, int]) -> str:
    words = {"stand-ins": "stand-ins", "held-out": "with held-out examples"}
    left_out = [f"{counts[what]} {words[what]} left out" for what in words if counts[what]]
    return ", ".join([f"{many(counts['written'], 'run')} written", f"{counts['there']} in the file", *left_out])


def _show(rows: list[Row], store: Store, console: Console, kind: str) -> None:
    """Print runs: those of one kind, stopped, say, with where and why; all of them as a table."""
    if kind == "stopped":
        for row in rows:
            console.print(Text(f"{row['key']}  {stop_of(row)}"))
    elif kind:
        _show_why(rows, store, console)
    else:
        _show_table(rows, console)


def _show_table(rows: list[Row], console: Console) -> None:
    told = {"metrics.acc": "Acc %", "metrics.aaa": "AAA %"}
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("key", "learner", "stream", "memory", "seed", "settings", *told.values(), "s"):
        table.add_column(title)
    for row in rows:
        named = [row["key"][:8], row["learner"], row["stream"], row.get("memory", ""), row["seed"], settings_of(row)]
        figures = ["diverged", "–"] if row["diverged"] else [f"{row.get(name, math.nan):.1f}" for name in told]
        table.add_row(*(Text(str(value)) for value in named), *figures, briefly(row.get("train_seconds", math.nan)))
    console.print(table)


def _show_why(rows: list[Row], store: Store, console: Console) -> None:
    """Print runs that failed or diverged, with when and why."""
    for row in rows:
        told = f"{row['learner']} on {row['stream']}, seed {row['seed']} {settings_of(row)}".strip()
        when = row["failed"] if "failed" in row else row.get("environment.finished", "undated")
        why = fault_of(row["reason"], row["trace"]) if "failed" in row else row["diverged"]
        console.print(Text(f"{row['key']}  {told}, {when}\n    {why}"))
        if row.get("trace"):
            console.print(Text(f"    the traceback is in {store.path(row['key']) / FAILED}"))
