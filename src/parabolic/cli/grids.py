"""Options of the commands that train many runs, and what they print at the end."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from parabolic.cli.common import Checkpoint, Device, listing, plain_console
from parabolic.cli.tracking import tracking
from parabolic.experiments import Event, Failure, GridBar, Outcome, Record, RunSpec, Store, run_grid, track_record
from parabolic.experiments.store import FAILED
from parabolic.report.comparisons import plural
from parabolic.report.runs import fault_of

__all__ = ["GridOptions", "close_grid", "note_outdated", "note_package", "train_all"]

SHOWN = 5  # of the runs that diverged, or failed for the same reason, how many are printed


@dataclass(frozen=True)
class GridOptions:
    """The options of commands that train many runs, by the names of `run_grid`'s arguments."""

    device: Device = "auto"
    engine: Annotated[str, typer.Option(help="Where to train: local, or ray for a Ray cluster.")] = "local"
    workers: Annotated[
        int | None,
        typer.Option(
            help="How many processes (or Ray tasks) train at once; 0: this process.", show_default="one per core or GPU"
        ),
    ] = None
    address: Annotated[str | None, typer.Option(help="The Ray cluster: auto (on one of its nodes) or HOST:PORT.")] = (
        None
    )
    fleet: Annotated[int, typer.Option(help="How many runs of the same shape a GPU trains side by side.")] = 5
    gpus: Annotated[float, typer.Option(help="The share of a GPU that each Ray task takes.")] = 1.0
    minutes: Annotated[
        float | None,
        typer.Option(help="Start no run after this many minutes; the same command resumes.", show_default="no limit"),
    ] = None
    checkpoint: Checkpoint = 60.0


def train_all(
    specs: Sequence[RunSpec], store: Store, options: GridOptions, track: str | None, *, again: bool = False
) -> Outcome:
    """Run a grid with a progress bar and log the trained runs to the trackers."""
    if not again:
        note_outdated(specs, store)
    with GridBar() as bar, tracking(track) as tracker:

        def watch(event: Event) -> None:
            bar(event)
            if tracker is not None and event.record is not None and event.what != "reused":
                track_record(tracker, event.record)

        return run_grid(specs, store, again=again, watch=watch, progress=bar.reach, **vars(options))


def note_outdated(specs: Iterable[RunSpec], store: Store) -> None:
    """Say on standard error how many finished runs are to be trained again because the user's own code has changed."""
    if count := sum(store.outdated(spec) for spec in specs):
        are = "is" if count == 1 else "are"
        print(f"{plural(count, 'finished run')} {are} trained again, as your own code has changed", file=sys.stderr)


def note_package(runs: Iterable[Record], *, again: bool = True) -> None:
    """Say on standard error how many runs were trained by other code of this package; they are not trained again.

    `again` says whether the command has the option `--again`.
    """
    if count := sum(run.by_other_package for run in runs):
        were, them = ("was", "it") if count == 1 else ("were", "them")
        remedy = f"--again trains {them} anew" if again else f"another folder (--runs) trains {them} anew"
        print(f"{plural(count, 'run')} {were} trained by other code of this package: {remedy}", file=sys.stderr)


def close_grid(outcome: Outcome, store: Store) -> None:
    """Print what diverged, failed or was not started; exit with an error code after a failure or an interruption."""
    console = plain_console(stderr=True)
    for record in [*outcome.diverged.values()][:SHOWN]:
        console.print(f"{store.path(record.key)}: {record.diverged}")
    if len(outcome.diverged) > SHOWN:
        console.print(f"and {len(outcome.diverged) - SHOWN} more: `{listing('diverged', store.root)}` lists them")
    if outcome.diverged:
        console.print(f"Diverged runs: {len(outcome.diverged)}. They are kept, and not tried again.")
    failures_by_reason = defaultdict[str, list[Failure]](list)  # a hundred runs may lack the same data
    for failure in outcome.failures:
        failures_by_reason[fault_of(failure.reason, failure.trace)].append(failure)
    for reason, failures in failures_by_reason.items():
        for spec in (failure.spec for failure in failures[:SHOWN]):
            console.print(f"{store.path(spec.key)}: {spec.learner} on {spec.stream}, seed {spec.seed}, failed")
        if len(failures) > SHOWN:
            console.print(f"and {len(failures) - SHOWN} more: `{listing('failed', store.root)}` lists them")
        console.print(f"    {reason}")
        if failures[0].trace:
            console.print(f"    the traceback is in {store.path(failures[0].spec.key) / FAILED}")
    if outcome.failures:
        console.print(f"Failed runs: {len(outcome.failures)}. The same command tries them again.")
    if outcome.put_off:
        console.print(f"The time is up. Runs not started: {outcome.put_off}. The same command resumes from there.")
    if outcome.interrupted:
        console.print(f"Stopped. Finished runs: {len(outcome.records)}. The same command resumes from there.")
    if outcome.interrupted or outcome.failures:
        raise typer.Exit(130 if outcome.interrupted else 1)
