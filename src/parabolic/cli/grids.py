"""What the commands that train many runs share: their options, and what they say at the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console

from parabolic.cli.tracking import tracking
from parabolic.experiments import Event, GridBar, Outcome, RunSpec, Store, run_grid, track_record
from parabolic.experiments.store import FAILED
from parabolic.report.runs import fault_of

__all__ = ["Address", "Engine", "Fleet", "Gpus", "Minutes", "Workers", "close_grid", "train_all"]

SHOWN = 5  # runs that failed for the same reason

Engine = Annotated[str, typer.Option(help="Where to train: local, or ray for a cluster.")]
Workers = Annotated[
    int | None,
    typer.Option(
        help="How many processes or tasks at once; 0: in this process.", show_default="one for each core or GPU"
    ),
]
Address = Annotated[str | None, typer.Option(help="The Ray cluster: auto on one of its nodes, or HOST:PORT.")]
Fleet = Annotated[int, typer.Option(help="How many runs, of one shape, a GPU trains side by side.")]
Gpus = Annotated[float, typer.Option(help="The share of a GPU for each task on a cluster.")]

Minutes = Annotated[
    float | None,
    typer.Option(help="Begin no run after so long; the same command goes on from there.", show_default="all of them"),
]


def train_all(specs: Sequence[RunSpec], store: Store, track: str | None = None, **options: Any) -> Outcome:
    """Run a grid with a bar, and tell trackers of what was trained; the options are those of `run_grid`."""
    with GridBar() as bar, tracking(track) as tracker:

        def watch(event: Event) -> None:
            bar(event)
            if tracker is not None and event.what == "trained":
                record = store.find(event.spec)
                if record is not None:
                    track_record(tracker, record)

        return run_grid(specs, store, watch=watch, **options)


def close_grid(outcome: Outcome, store: Store) -> None:
    """Say what failed or was not reached, and end the command with an exit code that tells of it."""
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    alike, traced = defaultdict[str, list[RunSpec]](list), set[str]()  # a hundred runs may lack the same data
    for failure in outcome.failures:
        alike[fault_of(failure.reason, failure.trace)].append(failure.spec)
        traced |= {failure.spec.key} if failure.trace else set()
    for reason, specs in alike.items():
        for spec in specs[:SHOWN]:
            console.print(f"{store.path(spec.key)}: {spec.learner} on {spec.stream}, seed {spec.seed}, failed")
        if len(specs) > SHOWN:
            console.print(f"and {len(specs) - SHOWN} more: `parabolic runs --failed` lists them")
        console.print(f"    {reason}")
        if specs[0].key in traced:
            console.print(f"    the trace is in {store.path(specs[0].key) / FAILED}")
    if outcome.failures:
        console.print(f"Runs that failed: {len(outcome.failures)}. The same command tries them again.")
    if outcome.put_off:
        console.print(
            f"The time is up. Runs that were put off: {outcome.put_off}. The same command goes on from there."
        )
    if outcome.interrupted:
        console.print(f"Stopped. Runs that are done: {len(outcome.records)}. The same command goes on from there.")
    if outcome.interrupted or outcome.failures:
        raise typer.Exit(130 if outcome.interrupted else 1)
