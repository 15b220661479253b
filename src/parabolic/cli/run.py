"""`parabolic run`: one learner on one stream."""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from parabolic.cli.common import Again, Checkpoint, Device, Json, RunOptions, Runs, naming_preset, table_console
from parabolic.cli.grids import note_outdated, note_package
from parabolic.cli.groups import with_groups
from parabolic.cli.tables import describe_training
from parabolic.cli.tracking import Track, tracking
from parabolic.engine import Callback, Monitor, ProgressBar
from parabolic.experiments import Record, Store, run
from parabolic.experiments.execution import Unsaved, find_device
from parabolic.experiments.resume import Keeping
from parabolic.report.comparisons import format_seconds
from parabolic.report.formats import accuracies

__all__ = ["run_one"]


@with_groups
def run_one(
    *,
    options: RunOptions,
    runs: Runs = Path("runs"),
    again: Again = False,
    device: Device = "auto",
    checkpoint: Checkpoint = 60.0,
    monitor: Annotated[
        bool,
        typer.Option(help="Record what `parabolic watch` shows; the bound takes long at the end if memory is large."),
    ] = True,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Train one learner on one stream and store the result; a run that was stopped resumes."""
    chosen, spec = options.read()
    store = Store(runs)
    find_device(device)  # this and the next are checked even if the run is already stored
    Keeping.of(store, checkpoint)
    if not again:
        note_outdated([spec], store)
    unsaved: Unsaved | None = None
    with ExitStack() as stack:
        stack.enter_context(naming_preset([chosen], options.stream))
        bar = stack.enter_context(ProgressBar())
        bar.title = chosen.name
        tracker = stack.enter_context(tracking(track, {"key": spec.key, **spec.resolved()}))
        callbacks: list[Callback] = [bar]
        if monitor:  # before the tracker, which closes its entry at the end of the run
            monitor_callback = Monitor(every=20, share=0.005, file=store.monitor(spec.key), tracker=tracker)
            callbacks.append(stack.enter_context(monitor_callback))
        if tracker is not None:
            callbacks.append(tracker)
        try:
            record, reused = run(spec, store, again=again, device=device, checkpoint=checkpoint, callbacks=callbacks)
        except Unsaved as error:  # the results exist, and this is the last chance to see them
            record, reused, unsaved = error.record, False, error
        except KeyboardInterrupt:
            effect = "starts over, as there was no checkpoint yet"
            if store.checkpoint(spec.key).exists():
                effect = "resumes from the last checkpoint"
            print(f"stopped: the same command {effect}", file=sys.stderr)
            raise typer.Exit(130) from None
    if as_json:
        print(json.dumps({**dataclasses.asdict(record), "reused": reused}, indent=1))
    else:
        title = f"{chosen.name} on {spec.stream}, seed {spec.seed}"
        _print_run(record, title, None if unsaved else store.path(record.key), reused)
    note_package([record])
    if unsaved:
        print(f"error: {unsaved}", file=sys.stderr)
        raise typer.Exit(1)


def _print_run(record: Record, title: str, folder: Path | None, reused: bool) -> None:
    """Print the results of a run, how it was trained, and where it is stored, if it is."""
    console = table_console()
    table, shown = accuracies(record.accuracy, console.width, title)
    console.print(table)
    if shown < len(record.accuracy):
        hint = f"; all are in {folder}/run.json" if folder else ""
        console.print(f"{shown} of {len(record.accuracy)} tasks{hint}", soft_wrap=True)
    console.print(describe_training([record]))
    for label, is_task_metric in (("", False), ("with the task told: ", True)):
        figures = {
            name.removeprefix("task_"): value
            for name, value in record.metrics.items()
            if name.startswith("task_") == is_task_metric and name not in record.measured
        }
        if figures:
            texts = (f"{name.replace('_', ' ')} {value:z.1f}" for name, value in figures.items())
            console.print(label + ", ".join(texts))
    if record.measured:
        console.print(", ".join(f"{name} {values[-1]:.4g}" for name, values in record.measured.items()))
    location = f"{'found' if reused else 'stored'} in {folder}" if folder else "not stored"
    console.print(f"{format_seconds(sum(record.train_seconds))} s of training; {location}", soft_wrap=True)
