"""`parabolic tune` and `parabolic presets`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from parabolic.checks import InputError
from parabolic.cli.common import Device, Json, Memory, Runs, Set, Stream, read_settings
from parabolic.engine import ProgressBar
from parabolic.experiments import RunSpec, Search, Store, Trial, Tuned, known_presets, load_preset, save_preset, tune
from parabolic.options import options_of, write_option

__all__ = ["list_presets", "tune_one"]

SHOWN = 5  # trials in the table
ABOUT = {name: each.about[0].upper() + each.about[1:] + "." for name, each in options_of(Search).items()}


def tune_one(
    learner: Annotated[str, typer.Option(help="The method: a name of `parabolic list`, or module:Class.")] = "pcl",
    stream: Stream = "seq-digits",
    memory: Memory = 200,
    trials: Annotated[int, typer.Option(min=1, help="How many there are to be, those of earlier calls included.")] = 30,
    space: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=LOW:HIGH[:log]|A,B,C", help="Where to look for a value; may be repeated."),
    ] = None,
    settings: Set = None,
    metric: Annotated[str, typer.Option(help=f"aaa or acc. {ABOUT['metric']}")] = "aaa",
    seeds: Annotated[int, typer.Option(min=1, help=ABOUT["seeds"])] = 1,
    validation: Annotated[float, typer.Option(help=ABOUT["validation"])] = 0.1,
    seed: Annotated[int, typer.Option(help=ABOUT["seed"])] = 0,
    prune: Annotated[bool, typer.Option("--prune", help=ABOUT["prune"])] = False,
    parallel: Annotated[int, typer.Option(min=1, help="Trials at once, side by side on a GPU.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Processes that work on the study.")] = 1,
    name: Annotated[
        str | None,
        typer.Option(help="What the study and its preset are called.", show_default="LEARNER-STREAM"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="The folder for the preset.", show_default="PARABOLIC_PRESETS, or presets"),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            envvar="PARABOLIC_STORAGE",
            help="Where the study is kept: a URL of Optuna, or journal:FILE.",
            show_default="SQLite, in the folder of runs",
        ),
    ] = None,
    runs: Runs = Path("runs"),
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Find values that suit a learner, on training examples that are held out, and keep the best as a preset."""
    spec = RunSpec.from_settings(learner, read_settings(settings), stream=stream, memory=memory)
    search = Search(spec, read_settings(space, "--space", "lr=0.01:0.3:log"), metric, seeds, validation, seed, prune)
    with ProgressBar(many=trials) as bar:
        bar.title = f"{learner} on {stream}"

        def watch(done: list[Trial]) -> None:
            best = max((trial.score or 0.0 for trial in done), default=0.0)
            bar.count("trials", len(done), f"best {best:.1f} %")

        try:
            tuned = tune(
                search, Store(runs), trials=trials, name=name, storage=storage,
                parallel=parallel, workers=workers, device=device, callbacks=[bar], watch=watch,
            )  # fmt: skip
        except KeyboardInterrupt:
            print("stopped: what is done is kept, and the same command goes on", file=sys.stderr)
            raise typer.Exit(130) from None
    path = save_preset(tuned.preset(), output)
    if as_json:
        told = {"preset": str(path), "running": tuned.running, "best": dataclasses.asdict(tuned.best)}
        print(json.dumps({**told, "trials": [dataclasses.asdict(trial) for trial in tuned.trials]}, indent=1))
        return
    console = Console()
    console.print(f"{learner} on {stream}: the best of {len(tuned.trials)} trials")
    console.print(_table(tuned))
    console.print(f"Judged on {validation:.0%} of the training examples, held out; seeds a trial: {seeds}.")
    if search.defaults.keys() == search.ranges.keys():
        console.print(f"With the learner's own values: {tuned.trials[0].score or 0:.1f} %.")
    if tuned.running:
        console.print(f"{tuned.running} more are being tried by other processes.")
    console.print(f"Kept in {path}; to use it: parabolic run --preset {path if output else tuned.name}")


def list_presets(as_json: Json = False) -> None:
    """Show the presets: what they are, and what they were made for."""
    presets, damaged = [], []
    for name, path in sorted(known_presets().items()):
        try:
            presets.append((load_preset(name), path))
        except InputError as error:
            damaged.append(str(error))
    if as_json:
        print(json.dumps([{**dataclasses.asdict(preset), "file": str(path)} for preset, path in presets], indent=1))
    else:
        table = Table("preset", "learner", "made for", "settings", "what it is", title="Presets", title_justify="left")
        for preset, _ in presets:
            made_for = preset.stream or "anything"
            made_for += f", memory {preset.memory}" if preset.memory is not None else ""
            table.add_row(preset.name, preset.learner, made_for, _written(preset.settings), preset.about)
        Console().print(table)
    for problem in damaged:
        print(f"error: {problem}", file=sys.stderr)
    if damaged:
        raise typer.Exit(2)


def _table(tuned: Tuned) -> Table:
    """The best trials with their values."""
    search, ranked = tuned.search, sorted(tuned.trials, key=lambda trial: trial.score or 0.0, reverse=True)
    table = Table()
    for name in search.ranges:
        table.add_column(name, justify="right")
    table.add_column(f"{search.metric.upper()} %", justify="right")
    for trial in ranked[:SHOWN]:
        table.add_row(*[write_option(value) for value in trial.values.values()], f"{trial.score or 0:.1f}")
    return table


def _written(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={write_option(value)}" for name, value in settings.items())
